"""The patches that change torch; no other code changes it.

If a patch of a feature does not fit the installed torch, none of that feature's patches is applied, and one warning
says so. With ``PYGRAPH_DISABLE=1`` none is applied; flags can still be set, but do nothing. Importing this package
changes nothing and needs neither torch nor ``pygraph_trees``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .environment import disabled
from .fingerprints import parse_version
from .import_hook import ImportHook, is_loaded
from .patch import FeatureOff, IfThere, LiveProbe, Patch, TorchUnknown

# In order of application.
FEATURES = ("flags", "trees", "report", "calls", "backward", "entry", "saving", "placement", "table")


@dataclass(frozen=True, slots=True)
class Status:
    feature: str
    # "on", "waiting" (for torch's compiler to be imported), "off", "disabled" (by PYGRAPH_DISABLE) or "mismatch" (does
    # not fit this torch)
    state: str
    targets: tuple[str, ...]  # what its patches change
    mismatches: tuple[str, ...] = ()  # why it does not fit, a line each


_lock = threading.RLock()
_undo: dict[str, list[Callable[[], None]]] = {}  # by feature that is on, in the order of application
_mismatches: dict[str, tuple[str, ...]] = {}  # by feature that was checked; torch does not change in a process
_busy = False
_hook = ImportHook()
_executed: set[str] = set()  # modules of the compiler whose code has run, though their import may not be over

_LOGS = "torch._logging._registrations"
_FLAGS = "torch._inductor.config"
_COMPILER = ("torch._inductor.compile_fx", "torch._inductor.cudagraph_trees")
_LOADING = "torch._functorch._aot_autograd.aot_autograd_result"
_declared: list[Callable[[], None]] = []  # removes the flags of a disabled package
_first_load: list[Callable[[], None]] = []  # undoes the patch of what puts a program that was compiled earlier to use


def patches(feature: str) -> tuple[Patch, ...]:
    """The patches of a feature, in the order in which they go on."""
    from .table import PATCHES

    return tuple(patch for patch in PATCHES if patch.feature == feature)


def install() -> tuple[Status, ...]:
    """Imports torch's compiler and applies every feature that fits and is not on yet; a second call does nothing."""
    if not disabled():
        for name in _COMPILER:  # before taking the lock, which another thread takes after importing one of them
            importlib.import_module(name)
        if _is_there():
            _install(FEATURES)
    return status()


def install_when_loaded() -> None:
    """Applies the patches as soon as the modules that they change are imported; at once if they are.

    The name in ``TORCH_LOGS`` is registered before torch reads the variable, the flags are there once
    ``torch._inductor.config`` is, and everything else is applied before a program can be compiled.
    """
    actions: dict[str, Callable[[], None]] = {_LOGS: register}
    if disabled():
        actions[_FLAGS] = _declare_flags
    else:
        # If torch itself is not loaded yet, the flags are applied with the other features.
        actions[_FLAGS] = lambda: _install(["flags"]) if is_loaded("torch") else None
        actions |= {name: functools.partial(_install_after, name) for name in _COMPILER}
        actions[_LOADING] = _install_at_first_load
    _hook.watch(actions)


def _declare_flags() -> None:
    import torch

    from .config import declare

    with _lock:
        if is_loaded("torch") and not _declared and why_unsupported(torch.__version__) is None:
            _declared.append(declare())


def register() -> None:
    """Registers the log ``pygraph`` with torch, for ``TORCH_LOGS="pygraph"``: the facts of the report as they happen.

    Torch reads ``TORCH_LOGS`` once, during its import, and raises on an unknown name. This function runs earlier if
    ``pygraph_trees`` is imported before torch or, since torch 2.12, through the installed package's entry point.
    """
    from torch._logging import _internal

    if not _internal.log_registry.is_log("pygraph"):
        _internal.register_log("pygraph", "pygraph_trees")


def _install_after(module: str) -> None:
    # Each of these modules may import the other, and another thread may import either: both must have run.
    _executed.add(module)
    try:
        if _is_there():
            install()
    except BaseException:  # the module is discarded
        _executed.discard(module)
        raise


def _install_at_first_load() -> None:
    """Applies the patches once a program is loaded that another process compiled: then nothing imports the compiler."""

    def installing(upstream: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(upstream)
        def wrap_post_compile(self: object, *args: object, **kwargs: object) -> object:
            from torch._inductor import config

            if not config.triton.cudagraphs:
                return upstream(self, *args, **kwargs)
            with _lock:
                _take_off(_first_load)
            try:
                install()
            except Exception:  # of the compiler's import, which torch alone does not need here
                logging.getLogger("pygraph_trees").warning("torch could not be patched", exc_info=True)
            found: Callable[..., object] = type(self).wrap_post_compile  # type: ignore[attr-defined]
            return found(self, *args, **kwargs)

        return wrap_post_compile

    with _lock:
        if "trees" not in _mismatches:  # else the patches were already tried
            name = "GenericAOTAutogradResult.wrap_post_compile"
            _first_load.append(IfThere("trees", _LOADING, name, installing).apply())


def _is_there() -> bool:
    """Whether no module of the compiler is partially imported."""
    return all(name in _executed or name not in sys.modules or is_loaded(name) for name in _COMPILER)


def _install(features: Collection[str]) -> None:
    global _busy
    with _lock:
        # Importing the replacements may import watched modules, whose actions call this function again.
        if _busy:
            return
        _busy = True
        before = set(_undo)
        try:
            _take_off(_declared)
            if "trees" in features:
                _take_off(_first_load)
            for feature in features:
                if feature not in _undo:
                    _put_on(feature)
        except BaseException:  # the module that is imported now is discarded
            _take_features_off([feature for feature in FEATURES if feature not in before])
            raise
        finally:
            _busy = False


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


def why_unsupported(torch: str) -> str | None:
    """Why nothing is patched on a version of torch; None if the patches were written for it."""
    trees = patches("trees")[0]
    is_known = torch != "none" and trees.fingerprints_for(parse_version(torch))
    return None if is_known else str(TorchUnknown(torch=torch, known=trees.versions))


def _check(feature: str, wanted: tuple[Patch, ...]) -> tuple[str, ...]:
    import torch

    version = parse_version(torch.__version__)
    probe = LiveProbe()
    lines = tuple(line for patch in wanted for line in patch.mismatches(probe, version))
    if lines and any(patch.fingerprints_for(version) for patch in wanted):
        warnings.warn(FeatureOff(feature=feature, torch=torch.__version__, why="; ".join(lines)), stacklevel=4)
    elif lines and not any(_mismatches.values()):  # once, not for each feature
        warnings.warn(TorchUnknown(torch=torch.__version__, known=wanted[0].versions), stacklevel=4)
    return lines


def _take_off(undo: list[Callable[[], None]]) -> None:
    """Undoes everything, the last change first; raises an error or interrupt only when all is undone."""
    with contextlib.ExitStack() as stack:
        for one in undo:
            stack.callback(one)
        undo.clear()


def _take_features_off(features: Collection[str]) -> None:
    _take_off([undo for feature in features for undo in _undo.pop(feature, ())])


def uninstall() -> tuple[Status, ...]:
    """Undoes all patches in reverse order; programs that are already compiled and recorded keep working."""
    with _lock:
        _hook.stop()
        _take_off(_first_load)
        _take_features_off(FEATURES)
        return status()


def status() -> tuple[Status, ...]:
    with _lock:
        return tuple(map(_status, FEATURES))


def _status(feature: str) -> Status:
    mismatches = _mismatches.get(feature, ())
    off = "mismatch" if mismatches else "waiting" if any(map(_hook.waits_for, _COMPILER)) else "off"
    state = "on" if feature in _undo else "disabled" if disabled() else off
    return Status(feature, state, tuple(patch.target for patch in patches(feature)), mismatches)
