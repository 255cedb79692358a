"""Patches of ``torch._inductor.cudagraph_trees``: our recording and manager, the entry of functions, and the reset.

Upstream looks all four names up in the module when it uses them, so rebinding them there is enough. Thread-local state,
liveness and pool rules, and additions of a torch version, stay upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.cudagraph_trees"


def _recording(upstream: type) -> type:
    from pygraph_trees.trees.recording import Recording

    return Recording


def _manager(upstream: type) -> type:
    from pygraph_trees.trees.manager import Manager

    return Manager


def _cudagraphify_impl(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.trees.entry_points import cudagraphify_impl

    return cudagraphify_impl(upstream)


def _reset_cudagraph_trees(upstream: Callable[[], None]) -> Callable[[], None]:
    from pygraph_trees.trees.entry_points import reset_cudagraph_trees

    return reset_cudagraph_trees(upstream)


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CUDAGraphNode",
        replace=_recording,
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CUDAGraphTreeManager",
        replace=_manager,
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="cudagraphify_impl",
        replace=_cudagraphify_impl,
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="reset_cudagraph_trees",
        replace=_reset_cudagraph_trees,
        removable="never: memory of recordings that are gone is given back there",
    ),
)
