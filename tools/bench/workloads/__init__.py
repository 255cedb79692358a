"""The workloads: one file each, registered by name in :data:`WORKLOADS`.

A workload has the model, mode and batch size of the paper's list; BERT-I alone is not on the list. README.md says what
each one follows and where it differs. All weights and inputs are random. To add one, write a file with a builder under
:func:`registry.workload`; all files of this folder are imported, in alphabetical order.
"""

import importlib
import pkgutil

from .registry import WORKLOADS

__all__ = ["WORKLOADS"]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
