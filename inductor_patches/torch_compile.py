"""Patch of ``torch.compile``'s options: a flag given in ``options=`` is checked at once.

The check runs before Inductor applies any of the options, so a wrong value raises in ``torch.compile``, and not at the
function's first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind


def _apply_options(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.settings import checking_options

    return checking_options(upstream)


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="flags",
        module="torch",
        name="_TorchCompileInductorWrapper.apply_options",
        replace=_apply_options,
        removable="torch has a way to register config entries from outside",
    ),
)
