"""Loads the workloads: a folder with a package that defines ``WORKLOADS``.

The package is loaded by path, once per process and under a fixed module name, so a checkout need not be installed. An
error in the package is raised.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import WORKLOADS_FOLDER

MODULE = "pygraph_bench_workloads"


def load_workloads(folder: Path = WORKLOADS_FOLDER) -> Mapping[str, Any]:
    """The workloads of the package in ``folder``, by name; loads the package once per process."""
    path = folder.resolve() / "__init__.py"
    loaded = sys.modules.get(MODULE)
    if loaded is None or getattr(loaded, "__file__", None) != str(path):
        spec = importlib.util.spec_from_file_location(MODULE, path, submodule_search_locations=[str(path.parent)])
        if spec is None or spec.loader is None:
            raise ImportError(f"no workloads in {folder}")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[MODULE] = loaded
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[MODULE]
            raise
    workloads: Mapping[str, Any] = loaded.WORKLOADS
    return workloads
