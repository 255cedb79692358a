"""The named features that a case uses; a campaign counts cases by feature, to show that each one is tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from .case import Case
from .faults import ProgramError

USES: Mapping[str, Callable[[Case], bool]] = {
    "backward": lambda case: case.backward,
    "saved-tensor hooks": lambda case: case.backward and case.around.saved is not None,
    "special tangents": lambda case: case.backward and bool(case.around.tangents),
    "finalizers that call": lambda case: case.around.garbage is not None,
    "hooks that call or collect": lambda case: bool(case.around.events),
    "threads": lambda case: case.around.thread is not None,
    "streams and devices": lambda case: case.around.where is not None,
    "constant chains": lambda case: bool(case.constants),
    "outputs kept alive": lambda case: case.around.keeps > 0 or case.around.step_of > 1,
    "held outputs, losses or graphs": lambda case: case.around.holds is not None,
    "outputs read on another stream": lambda case: case.around.reads is not None,
    "calls at the same time": lambda case: bool(case.around.beside),
    "own captures": lambda case: case.around.captures is not None,
    "out of memory": lambda case: _raises(case, torch.OutOfMemoryError),
    "interrupts": lambda case: _raises(case, KeyboardInterrupt),
    "exceptions": lambda case: _raises(case, ProgramError),
    "control flow": lambda case: _contains(case, r"torch\.(cond|while_loop|_higher_order_ops\.scan)\("),
    "resize_": lambda case: _contains(case, r"\.resize_\("),
    "parameters written in forward": lambda case: _contains(case, r"\.data"),
}


def uses(case: Case) -> tuple[str, ...]:
    """The features in :data:`USES` that a case uses."""
    return tuple(name for name, is_used in USES.items() if is_used(case))


def _raises(case: Case, error: type[BaseException]) -> bool:
    return any(issubclass(fault.raises, error) for fault in case.around.faults)


def _contains(case: Case, pattern: str) -> bool:
    return re.search(pattern, "\n".join(case.body)) is not None
