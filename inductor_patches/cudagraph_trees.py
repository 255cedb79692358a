"""Patches of ``torch._inductor.cudagraph_trees``: our recording and manager, the entry of functions, and the reset.

Upstream looks all four names up in the module when it uses them, so rebinding them there is enough. Thread-local state,
liveness and pool rules, and additions of a torch version, stay upstream's.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

_MODULE = "torch._inductor.cudagraph_trees"


def _recording(upstream: type) -> type:
    from pygraph_trees.trees.recording import Recording

    return Recording


def _manager(upstream: type) -> type:
    from pygraph_trees.trees.manager import Manager

    return Manager


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
        replace=made_by("pygraph_trees.trees.entry_points", "cudagraphify_impl"),
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="reset_cudagraph_trees",
        replace=made_by("pygraph_trees.trees.entry_points", "reset_cudagraph_trees"),
        removable="never: memory of recordings that are gone is given back there",
    ),
)
