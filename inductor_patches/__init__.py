"""The patches that change torch; no other code changes it.

:func:`install` applies the patches, feature by feature, and :func:`uninstall` restores torch. If a patch of a feature
does not fit the installed torch, none of that feature's patches is applied, and one warning says so. With
``PYGRAPH_DISABLE=1`` none is applied. Importing this package changes nothing and needs neither torch nor
``pygraph_trees``, whose import installs the patches.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .environment import disabled

if TYPE_CHECKING:
    from .patch import Patch

# In the order in which they are applied; each feature with the modules that hold its patches.
FEATURES: dict[str, tuple[str, ...]] = {
    "flags": ("config", "torch_compile"),
    "trees": ("cudagraph_trees", "compile_fx", "output_code", "autograd_cache"),
    "report": ("scheduler", "output_code"),
    "calls": ("dynamo",),
    "placement": ("post_grad", "compile_fx", "scheduler"),
    "table": ("triton_heuristics",),
}


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a feature."""

    feature: str
    state: str  # "on", "off", "disabled" (by PYGRAPH_DISABLE) or "mismatch" (does not fit this torch)
    targets: tuple[str, ...]  # what its patches change
    mismatches: tuple[str, ...] = ()  # why it does not fit, a line each


_lock = threading.RLock()
_undo: dict[str, list[Callable[[], None]]] = {}  # by feature that is on, in the order of application
_mismatches: dict[str, tuple[str, ...]] = {}  # by feature that was checked; torch does not change in a process
_busy = False


def patches(feature: str) -> tuple[Patch, ...]:
    """The patches of a feature, in the order in which they go on."""
    modules = [importlib.import_module(f".{name}", __name__) for name in FEATURES[feature]]
    return tuple(patch for module in modules for patch in module.PATCHES if patch.feature == feature)


def install() -> tuple[Status, ...]:
    """Applies every feature that fits and is not on yet; a second call does nothing."""
    global _busy
    with _lock:
        # Importing the replacements imports pygraph_trees, which calls this function: the inner call has nothing to do.
        if not _busy and not disabled():
            _busy = True
            try:
                for feature in FEATURES:
                    if feature not in _undo:
                        _put_on(feature)
            finally:
                _busy = False
        return status()


def _put_on(feature: str) -> None:
    wanted = patches(feature)
    if feature not in _mismatches:
        _mismatches[feature] = _check(feature, wanted)
    if _mismatches[feature]:
        return
    done: list[Callable[[], None]] = []
    try:
        for patch in wanted:
            done.append(patch.apply())
    except BaseException:
        _take_off(done)
        raise
    _undo[feature] = done


def _check(feature: str, wanted: tuple[Patch, ...]) -> tuple[str, ...]:
    import torch

    from .fingerprints import parse_version
    from .patch import FeatureOff, LiveProbe

    version = parse_version(torch.__version__)
    probe = LiveProbe()
    lines = tuple(line for patch in wanted for line in patch.mismatches(probe, version))
    if lines:
        warnings.warn(FeatureOff(feature=feature, torch=torch.__version__, why="; ".join(lines)), stacklevel=4)
    return lines


def _take_off(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()


def uninstall() -> tuple[Status, ...]:
    """Undoes all patches in reverse order; programs that are already compiled and recorded keep working."""
    with _lock:
        for feature in reversed(FEATURES):
            _take_off(_undo.pop(feature, []))
        return status()


def status() -> tuple[Status, ...]:
    """The state of each feature, in the order of application."""
    with _lock:
        return tuple(_status(feature) for feature in FEATURES)


def _status(feature: str) -> Status:
    mismatches = _mismatches.get(feature, ())
    if feature in _undo:
        state = "on"
    elif disabled():
        state = "disabled"
    else:
        state = "mismatch" if mismatches else "off"
    return Status(feature, state, tuple(patch.target for patch in patches(feature)), mismatches)
