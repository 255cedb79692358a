"""The named features that a case uses; a campaign counts cases by feature, to show that each one is tried."""

from __future__ import annotations

import re

import torch

from .case import Case
from .faults import ProgramError

USES = (
    "backward",
    "saved-tensor hooks",
    "special tangents",
    "finalizers that call",
    "hooks that call or collect",
    "threads",
    "streams and devices",
    "constant chains",
    "outputs kept alive",
    "held outputs, losses or graphs",
    "outputs read on another stream",
    "calls at the same time",
    "own captures",
    "out of memory",
    "interrupts",
    "exceptions",
    "control flow",
    "resize_",
    "parameters written in forward",
)


def uses(case: Case) -> tuple[str, ...]:
    """The features in :data:`USES` that a case uses."""
    around = case.around
    found = (
        case.backward,
        case.backward and around.saved is not None,
        case.backward and bool(around.tangents),
        around.garbage is not None,
        bool(around.events),
        around.thread is not None,
        around.where is not None,
        bool(case.constants),
        around.keeps > 0 or around.step_of > 1,
        around.holds is not None,
        around.reads is not None,
        bool(around.beside),
        around.captures is not None,
        any(issubclass(f.raises, torch.OutOfMemoryError) for f in around.faults),
        any(issubclass(f.raises, KeyboardInterrupt) for f in around.faults),
        any(issubclass(f.raises, ProgramError) for f in around.faults),
        bool(re.search(r"torch\.(cond|while_loop|_higher_order_ops\.scan)\(", "\n".join(case.body))),
        any(".resize_(" in line for line in case.body),
        any(".data" in line for line in case.body),
    )
    return tuple(name for name, used in zip(USES, found, strict=True) if used)
