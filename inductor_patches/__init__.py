"""Everything that changes torch, and nothing else does.

:func:`install` puts the patches on, :func:`uninstall` takes them off and leaves torch as it was, :func:`status` tells
how things stand. Importing this package or a module of it changes nothing and needs neither torch nor
``pygraph_trees``; importing ``pygraph_trees`` installs.

Patches belong to features and go on in the order of :data:`FEATURES`. A feature is put on as a whole: where one of
its patches does not fit the torch that is there, none of them is applied, torch keeps its own behaviour there, and
one warning names the feature, the target and the version. With ``PYGRAPH_DISABLE=1`` in the environment torch is left
alone (:mod:`.environment` says what else counts as 1).
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

# In the order in which they go on; a feature's patches stand in the modules that are named behind it.
FEATURES: dict[str, tuple[str, ...]] = {
    "flags": ("config", "torch_compile"),
    "trees": ("cudagraph_trees", "compile_fx", "output_code", "autograd_cache"),
    "coverage": ("scheduler", "output_code"),
    "calls": ("dynamo",),
    "placement": ("post_grad", "compile_fx", "scheduler"),
    "table": ("triton_heuristics",),
}


@dataclass(frozen=True, slots=True)
class Status:
    """How a feature stands."""

    feature: str
    state: str  # "on", "off", "disabled" (by PYGRAPH_DISABLE), "mismatch" (does not fit this torch)
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
    """Puts on every feature that fits and is not on yet; doing it again does nothing."""
    global _busy
    with _lock:
        # Importing the replacements imports pygraph_trees, which installs: that inner call has nothing to do.
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
    """Takes everything off, in the reverse order; what is compiled and recorded already goes on working."""
    with _lock:
        for feature in reversed(FEATURES):
            _take_off(_undo.pop(feature, []))
        return status()


def status() -> tuple[Status, ...]:
    """How each feature stands, in the order of application."""
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
