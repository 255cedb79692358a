"""Patch of ``torch.compile``'s options: a flag given there is checked at once, before Inductor has applied half of
them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind


def _apply_options(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.settings import FLAGS

    flags = {f"triton.{flag.name}": flag for flag in FLAGS}

    @functools.wraps(upstream)
    def apply_options(self: Any, options: dict[str, Any] | None) -> None:
        for key, value in (options or {}).items():
            flag = flags.get(key.replace("-", "_"))
            if flag is not None:
                flag.check(value)
        upstream(self, options)

    return apply_options


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="flags",
        module="torch",
        name="_TorchCompileInductorWrapper.apply_options",
        replace=_apply_options,
        removable="torch has a way to register config entries from outside",
    ),
)
