"""Errors that a program catches, injected at a drawn moment of a call: out of memory, interrupts, its own exceptions.

:data:`OPERATOR` is the custom operator of the programs. It copies its operand, and raises at its n-th run while a fault
for it is injected, in forward or backward. A replay does not run it. The other faults come from outside: the
allocator's limit, and interrupts while Python code around the graphs runs. Interrupts never come in Dynamo or in the
checks, whose state torch does not restore.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import FrameType

OPERATOR = "torch.ops.fuzzing.copied"
OF_OPERATOR = ("exception", "out of memory", "interrupt")  # the operator raises it
FROM_OUTSIDE = (
    "limit",  # the allocator gets only `moment` more segments of 2 MiB
    "at a call",  # an interrupt at the moment-th call or return in the code around the graphs
    "signal",  # an interrupt by a timer, after `moment` microseconds; the moment is not the same in each run
)
KINDS = (*OF_OPERATOR, *FROM_OUTSIDE)
_AROUND_GRAPHS = ("pygraph_trees.", "torch._inductor.")
_SEGMENT = 2 << 20
_AGAIN_S = 2e-5  # a signal at a moment that is not allowed is sent again


class ProgramError(Exception):
    """The program's own error."""


_RAISED: dict[str, type[BaseException]] = {
    "exception": ProgramError,
    "out of memory": torch.OutOfMemoryError,
    "limit": torch.OutOfMemoryError,
}
_in_operator: list[Callable[[], None]] = []  # called at each run of the operator


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one call of a case."""

    kind: str  # one of KINDS
    call: int
    moment: int

    @property
    def raises(self) -> type[BaseException]:
        return _RAISED.get(self.kind, KeyboardInterrupt)

    def injected(self, device: torch.device) -> AbstractContextManager[None]:
        """Injects it into a block, which may also finish before the moment comes."""
        if self.kind in OF_OPERATOR:
            return _operator_raising(self.raises, self.moment)
        if self.kind == "limit":
            return _limited(device, self.moment)
        return _interrupted_at(self.moment) if self.kind == "at a call" else _signalled(self.moment * 1e-6)


@contextlib.contextmanager
def _operator_raising(error: type[BaseException], moment: int) -> Iterator[None]:
    runs = iter(range(1, moment + 1))

    def run() -> None:
        if next(runs, None) == moment:
            raise error("the custom operator failed")

    _in_operator.append(run)
    try:
        yield
    finally:
        _in_operator.clear()


@contextlib.contextmanager
def _limited(device: torch.device, segments: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            allowed = torch.cuda.memory_reserved(device) + segments * _SEGMENT + _SEGMENT // 2
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
            stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0, device)
        yield


@contextlib.contextmanager
def _interrupted_at(moment: int) -> Iterator[None]:
    left = moment

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and _is_around_graphs(frame):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def _signalled(after_s: float) -> Iterator[None]:
    is_due = True

    def handler(_: int, frame: FrameType | None) -> None:
        nonlocal is_due
        if not is_due:
            return
        if frame is None or not _is_around_graphs(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        is_due = False
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGALRM, handler)
    except ValueError:  # a thread other than the main one cannot be interrupted
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        is_due = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_around_graphs(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_AROUND_GRAPHS)


NEVER = Fault("exception", call=-1, moment=1)  # for the same way of running a case without its faults


@torch.library.custom_op("fuzzing::copied", mutates_args=())
def _copied(x: torch.Tensor) -> torch.Tensor:
    for run in _in_operator:
        run()
    return x.clone()


_copied.register_fake(torch.empty_like)
_copied.register_autograd(lambda _, gradient: _copied(gradient))
