"""Calls of compiled functions from inside other calls: from hooks, and from finalizers that the collector runs.

An :class:`Inner` prepares inputs and eager's results before a step begins, so that a call from inside makes only the
call. Its outputs are observed at once and compared later. An error is kept, because a finalizer's would be lost. A
finalizer does nothing while torch compiles, warms up or captures: no program may run work of its own then.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .around import NOTHING
from .case import Case, Input
from .gradients import Gradients, gradients
from .memory import Memory
from .observation import Inside, Observation, observe

if TYPE_CHECKING:
    from types import FrameType

MOST = 4  # calls of each function per step
_CALLING = frozenset({1, 2, 4, 8})  # numbers of a step's finalizers that call; they run long before the program
_GARBAGE = 2  # objects that await the collector
_FIRST_SEED = 1000  # calls from inside have other values than the calls around them

OTHER = Case(
    (Input("a", (33, 8)), Input("b", (33, 8))),
    ("w0 = torch.sin(a) * b + a", "w1 = w0.sum(0)"),  # names that no case uses
    ("w0", "w1"),
)


class InnerError(Exception):
    """A call from inside another one raised."""


@dataclass(frozen=True, slots=True)
class Target:
    """A function that is called from inside."""

    case: Case
    eager: Callable[..., Any]
    callable: Callable[..., Any]

    @staticmethod
    def of(case: Case, eager: Callable[..., Any], callable_: Callable[..., Any]) -> Target:
        fresh = tuple(replace(item, place="fresh") for item in case.inputs)
        return Target(replace(case, inputs=fresh, feedback=(), around=NOTHING), eager, callable_)


@dataclass(frozen=True, slots=True)
class Ready:
    """The inputs of a call, and what eager gave for them."""

    memory: Memory
    given: Mapping[str, torch.Tensor]
    wanted: Observation


def made_ready(target: Target, seed: int, device: torch.device, backward: bool) -> Ready:
    memory, twin = (Memory(target.case, device) for _ in range(2))
    made = run_target(replace(target, callable=target.eager), twin.prepare(seed), backward)
    return Ready(memory, memory.prepare(seed), observe(target.case.returns, *made, twin))


def run_target(
    target: Target, given: Mapping[str, torch.Tensor], backward: bool
) -> tuple[tuple[torch.Tensor, ...], Gradients]:
    """The outputs of a call, and its gradients if it has a backward."""
    arguments = [given[item.name] for item in target.case.arguments]
    outputs = target.callable(*arguments)
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    if not (backward and target.case.backward):
        return outputs, ()
    named = list(zip(target.case.returns, outputs, strict=True))
    return outputs, gradients(named, [a for a in arguments if a.requires_grad], {})


class Inner:
    """The calls from inside of one runner.

    Args:
        targets: functions by their names in the case; without any, nothing is ever called.
        backward: whether these calls have a backward.
    """

    def __init__(self, targets: Mapping[str, Target], device: torch.device, *, backward: bool) -> None:
        self._targets, self._device, self._backward = targets, device, backward
        self._ready: dict[str, list[Ready]] = {}
        self._used: list[Ready] = []  # this step's: other streams may still read their memory
        self._seen: list[Inside] = []
        self._error: InnerError | None = None
        self._busy = False
        self._garbage_calls: str | None = None
        self._thread: int | None = None  # in which finalizers may call; None outside of a step
        self._made = self._finalized = 0  # objects: all, and those of this step

    def prepare(self, call: int) -> None:
        """Prepares inputs for a step's calls from inside, and runs eager on them."""
        self._used.clear()
        for name, target in self._targets.items():
            seeds = [_FIRST_SEED + call * MOST + i for i in range(MOST)]
            self._ready[name] = [made_ready(target, seed, self._device, self._backward) for seed in seeds]

    def warm_up(self) -> None:
        """Calls the other function, which the case itself does not call, until it is replayed."""
        target = self._targets.get("other")
        if target is None:
            return
        for number in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            run_target(target, Memory(target.case, self._device).prepare(number), self._backward)

    @contextlib.contextmanager
    def finalizers(self, target: str | None, threshold: int) -> Iterator[None]:
        """Creates garbage whose finalizers call ``target``, and lowers the collector's threshold."""
        before = gc.get_threshold()
        self._thread, self._garbage_calls, self._finalized = threading.get_ident(), target, 0
        try:
            for _ in range(_GARBAGE if target is not None else 0):
                self._litter()
            if threshold:
                gc.set_threshold(threshold, *before[1:])
            yield
        finally:
            gc.set_threshold(*before)
            self._thread = None

    @torch._dynamo.disable
    def act(self, action: str, where: str) -> None:
        """Collects garbage, or calls a function, unless a call from inside is in progress."""
        if self._busy:
            return
        if action == "collect":
            gc.collect(1)  # garbage of this step is young; a full collection takes a third of a second
        else:
            self._call(action, where)

    def taken(self) -> Sequence[Inside]:
        """The calls since the last time.

        Raises:
            InnerError: one of them raised.
        """
        seen, self._seen = self._seen, []
        error, self._error = self._error, None
        self._ready.clear()
        if error is not None:
            raise error
        return seen

    def _call(self, name: str, where: str) -> None:
        if not self._ready.get(name):
            return
        ready = self._ready[name].pop()
        self._used.append(ready)
        self._busy = True
        try:
            with torch.enable_grad():  # a backward's hook has it off, which would compile again
                outputs, found = run_target(self._targets[name], ready.given, self._backward)
                seen = observe(self._targets[name].case.returns, outputs, found, ready.memory)
            self._seen.append(Inside(f"a call from {where}", seen, ready.wanted))
        except Exception as error:
            self._error = self._error or InnerError(f"a call from {where} raised {type(error).__name__}: {error}")
        finally:
            self._busy = False

    def _litter(self) -> None:
        """Makes an object that only the collector frees."""
        self._made += 1
        litter = _Litter(self if self._made % 2 else None)
        if self._made % 2 == 0:
            weakref.finalize(litter, self.from_finalizer).atexit = False

    @torch._dynamo.disable  # a finalizer may run between a compiled function's own lines
    def from_finalizer(self) -> None:
        """The work of a finalizer: calls a function if inputs are left, and makes more garbage."""
        name = self._garbage_calls
        if self._thread is None or name is None or not self._ready.get(name):
            return
        ours = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
        if ours and not self._busy and not _graphs_are_made():
            self._finalized += 1
            if self._finalized in _CALLING:
                self._call(name, "a finalizer")
        self._litter()


class _Litter:
    """An object in a cycle; with an :class:`Inner`, its finalizer calls."""

    def __init__(self, inner: Inner | None) -> None:
        self._inner = inner
        self._cycle = self

    @torch._dynamo.disable
    def __del__(self) -> None:
        if self._inner is not None:
            self._inner.from_finalizer()


_BUSY = frozenset({"torch._dynamo.convert_frame", "torch._dynamo.guards"})
_MAKERS = frozenset({"record_function", "run_eager", "add_function", "_record", "cudagraphify_impl"})


def _graphs_are_made() -> bool:
    """Whether this thread is compiling, warming up, capturing, checking guards, or in a control-flow operator."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        # A control-flow operator calls a branch without autograd; torch holds a lock while it checks guards.
        if module in _BUSY or module.startswith("torch._higher_order_ops"):
            return True
        if module == "torch._inductor.compile_fx" and "compile_fx" in name:
            return True
        if name in _MAKERS and module.startswith(("torch._inductor.", "pygraph_trees.")):
            return True
        frame = frame.f_back
    return False
