"""Packages that are installed and cannot be imported, because they were built for another torch."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys


@functools.cache
def is_torchvision_broken() -> bool:
    """Whether torchvision is installed and cannot be imported; transformers and lightning import it if it is there."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode != 0
    )
