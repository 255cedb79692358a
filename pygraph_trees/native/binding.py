"""The C++ module, if it was built for the torch in use, and what Python and C++ share.

``extension`` is the module or None; ``why_without`` is the reason if it was built but is not used. A wheel's modules
that cannot be loaded are passed over, and ``why_not_prebuilt`` is the reason. Without the module no replay is fast,
outputs are torch's, and counters are Python's.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from . import PREBUILT, __path__
from .location import seal

why_without: str | None = None  # why the module in C++ is not used although it is built
why_not_prebuilt: str | None = None  # why the module of the wheel is not used


def _load() -> Any:
    """The module in C++; None if it is not built for this torch, or cannot be loaded."""
    global why_without, why_not_prebuilt
    import torch  # noqa: F401  the module needs its libraries

    prebuilt = PREBUILT if str(PREBUILT) in __path__ else None
    try:
        if prebuilt is not None and not seal(prebuilt).exists():  # loading an incomplete file would end the process
            raise ImportError(f"{prebuilt} is damaged: install the wheel again")
        return importlib.import_module("pygraph_trees.native._fast_path")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        if prebuilt is not None:
            __path__.remove(str(prebuilt))
            why_not_prebuilt = str(error)
            return _load()
        why_without = f"it cannot be loaded: {error}"
        return None


extension = _load()


def do_without_extension(why: str) -> None:
    """Stops the use of the module in C++. Must be called before any of its objects is made."""
    global extension, why_without
    if extension is not None:
        extension, why_without = None, why


def new_counter() -> Any:
    """An object whose ``value`` is a number that Python and C++ change; of the class in C++ if it was built."""
    return SimpleNamespace(value=0) if extension is None else extension.Counter()
