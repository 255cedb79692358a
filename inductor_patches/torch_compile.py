"""Patch of ``torch.compile``'s options: a flag given in ``options=`` is checked at once.

The check runs before Inductor applies any option, so a wrong value raises in ``torch.compile`` and not at the
function's first call.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="flags",
        module="torch",
        name="_TorchCompileInductorWrapper.apply_options",
        replace=made_by("pygraph_trees.settings", "checking_options"),
        removable="torch has a way to register config entries from outside",
    ),
)
