"""Patch of ``torch._inductor.fx_passes.post_grad``: placement replaces ``move_constructors_to_gpu``.

The passes look the name up in the module when they run, so rebinding it there is enough. Placement gets upstream's
pass, and runs it if placement itself does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind


def _move_constructors_to_gpu(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.placement import placing

    return placing(upstream, _has_addresses)


def _has_addresses() -> bool:
    """Whether recordings are given addresses, or would be on a fake GPU; artifacts depend on this rule."""
    import torch
    from torch._inductor import cudagraph_trees

    from pygraph_trees.fake_gpu.presence import is_absent
    from pygraph_trees.indirection.availability import usable_driver
    from pygraph_trees.trees.recording import Recording

    if cudagraph_trees.CUDAGraphNode is not Recording:
        return False
    if is_absent():
        return True
    # Asking for the driver may warn, which says nothing to programs without a GPU.
    return torch.cuda.is_available() and usable_driver() is not None


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="placement",
        module="torch._inductor.fx_passes.post_grad",
        name="move_constructors_to_gpu",
        replace=_move_constructors_to_gpu,
        removable="torch moves what the CPU computes for the GPU, and leaves what is returned where it is",
    ),
)
