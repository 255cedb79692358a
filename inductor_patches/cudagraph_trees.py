"""Patches of ``torch._inductor.cudagraph_trees``: our recording, manager, container, entry of functions and reset.

Upstream looks all names up in the module when it uses them, so rebinding them there is enough. Thread-local state, the
rules of liveness and pools, and additions of a torch version stay upstream's.
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


def _container(upstream: type) -> type:
    from pygraph_trees.trees.manager_container import ManagerContainer

    return ManagerContainer


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
        name="TreeManagerContainer",
        replace=_container,
        removable="when the locks of containers are reentrant, or are not held while a manager is made",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="get_container",
        replace=made_by("pygraph_trees.trees.manager_container", "get_container"),
        removable="when the locks of containers are reentrant",
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
