"""Runs a case in one way, call by call, with memory of its own and all events around its calls.

Two :class:`Runner` objects of one case get equal inputs at different addresses. :meth:`Runner.step` makes the next call
and returns an :class:`Observation`; it raises what the call raises.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pygraph_trees.benchmark import Program
from pygraph_trees.benchmark.ways import make_ways

from .around import LATE, at
from .case import Case
from .elsewhere import Elsewhere, Threads
from .gradients import Gradients, gradients
from .inner import OTHER, Inner, Target
from .memory import Memory
from .observation import Observation, observe
from .saved import hooks

WAYS = ("eager", "compile", "upstream", "ours")


class Runner:
    """One way of running a case, with memory of its own."""

    def __init__(self, case: Case, kind: str, device: torch.device, *, keeps: bool = False) -> None:
        """``keeps``: whether outputs stay valid while they are alive; if so, no steps are marked, and outputs of
        earlier calls are read again.
        """
        self.kind, self._keeps = kind, keeps
        self._case = case
        self._elsewhere = Elsewhere(case.around.where, device)
        device = self._elsewhere.device
        self._threads = Threads(device)
        self._memory = Memory(case, device)
        self._call = 0
        self._module: torch.nn.Module | None = None
        fn: Callable[..., Any] = case.function()
        if case.parameters:
            self._module = module_of(fn, case, self._memory.prepare(0))
            fn = self._module
        self._fed: dict[str, torch.Tensor] = {}
        self._of_step: list[Any] = []  # outputs of the current step's calls
        self._held: deque[Any] = deque(maxlen=max(case.around.keeps, 2 if keeps else 0))
        self._callable, self._active, self._close, self._recorded = _way(fn, kind)
        self._events = _by_event(case)
        self._inner = Inner(self._targets(fn), device, backward=case.around.inner_backward)
        self._outer = _Hooked(self._callable, lambda: self._happened("forward hook"))

    def step(self) -> Observation:
        """Makes the next call."""
        around, call = self._case.around, self._call
        given = self._inputs()
        self._inner.prepare(call)
        with self._active():
            if call == 0:
                self._inner.warm_up()
            if call % around.step_of == 0 and not self._keeps:
                torch.compiler.cudagraph_mark_step_begin()
                self._of_step.clear()
            if around.thread in ("call", "worker") and at(around.thread_when, call):
                run = self._threads.new if around.thread == "call" else self._threads.worker
                seen = run(lambda: self._elsewhere_or_here(given))
            else:
                seen = self._elsewhere_or_here(given)
        self._call += 1
        return seen

    def detach_outputs(self) -> None:
        """Passes copies of the outputs to the next call, instead of the outputs."""
        self._fed = {name: output.clone() for name, output in self._fed.items()}

    def recorded(self) -> bool:
        """Whether the last call's outputs may end with its step, and must not be used in a later one."""
        return not self._keeps and (self._recorded() or bool(self._case.around.targets))

    def close(self) -> None:
        """Frees what the way holds on the device."""
        self._fed.clear()
        self._held.clear()
        self._of_step.clear()
        self._threads.close()
        self._close()

    def _inputs(self) -> dict[str, torch.Tensor]:
        given = dict(self._memory.prepare(self._call))
        if self._module is not None:
            held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
            for name, tensor in held.items():
                if tensor.data_ptr() != given[name].data_ptr():
                    tensor.data = given[name].detach()
                given[name] = tensor
        return given | self._fed

    def _targets(self, fn: Callable[..., Any]) -> dict[str, Target]:
        wanted = self._case.around.targets
        found = {}
        if "same" in wanted:
            found["same"] = Target.of(self._case, fn, self._callable)
        if "other" in wanted:
            eager = OTHER.function()
            made, *_ = _way(eager, self.kind)
            found["other"] = Target.of(_with_backward(OTHER, self._case.backward), eager, made)
        return found

    def _elsewhere_or_here(self, given: Mapping[str, torch.Tensor]) -> Observation:
        if not at(self._case.around.where_when, self._call):
            return self._observed(given)
        with self._elsewhere.current():
            return self._observed(given)

    def _observed(self, given: Mapping[str, torch.Tensor]) -> Observation:
        around, case = self._case.around, self._case
        late = self._call >= 2  # the first call compiles and warms up, the second records
        with self._inner.finalizers(around.garbage if late else None, around.threshold if late else 0):
            with self._saved():
                outputs = self._outer(*(given[i.name] for i in case.arguments))
            if not isinstance(outputs, tuple):
                outputs = (outputs,)
            found = self._gradients(outputs, given) if case.backward else ()
        inside = self._inner.taken()
        seen = observe(case.returns, outputs, found, self._memory, earlier=self._earlier(), inside=inside)
        self._fed = {name: outputs[position] for position, name in case.feedback}
        if around.thread in ("call", "worker") and not self._keeps:
            self.detach_outputs()  # the thread's graphs end with it
        else:
            self._held.append((outputs, found))
            if around.step_of > 1:
                self._of_step.append((outputs, found))
        return seen

    def _earlier(self) -> tuple[Any, ...]:
        """Outputs and gradients of earlier calls that must still be valid."""
        return tuple(self._held if self._keeps else self._of_step)

    def _saved(self) -> AbstractContextManager[Any]:
        around = self._case.around
        if not self._case.backward or around.saved is None or not at(around.saved_when, self._call):
            return contextlib.nullcontext()
        return hooks(around.saved, self._happened)

    def _gradients(self, outputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]) -> Gradients:
        around = self._case.around
        leaves = [given[i.name] for i in self._case.inputs if given[i.name].requires_grad]
        named = list(zip(self._case.returns, outputs, strict=True))
        tangents = {name: kind for name, kind in around.tangents if kind not in LATE or self._call >= 2}
        accumulated = (lambda: self._happened("accumulated")) if "accumulated" in self._events else None
        with self._output_hooks(outputs):
            if around.thread == "backward" and at(around.thread_when, self._call):
                return self._threads.new(lambda: _copies(gradients(named, leaves, tangents, accumulated)))
            return gradients(named, leaves, tangents, accumulated)

    @contextlib.contextmanager
    def _output_hooks(self, outputs: Sequence[torch.Tensor]) -> Any:
        wanted = [o for o in outputs if o.requires_grad] if "output hook" in self._events else []
        handles = [o.register_hook(lambda _: self._happened("output hook")) for o in wanted]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _happened(self, event: str) -> None:
        for action in self._events.get(event, ()):
            self._inner.act(action, f"{event} of call {self._call}")


class _Hooked(torch.nn.Module):
    """A module around a callable, with a forward hook."""

    def __init__(self, callable_: Callable[..., Any], happened: Callable[[], None]) -> None:
        super().__init__()
        self._callable = (callable_,)  # not as a submodule
        self.register_forward_hook(lambda *_: happened())

    def forward(self, *arguments: torch.Tensor) -> Any:
        return self._callable[0](*arguments)


def module_of(fn: Callable[..., Any], case: Case, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module that holds the parameters of a case, with its program as ``forward``."""

    class Fuzzed(torch.nn.Module):
        forward = fn

    module = Fuzzed()
    for item in case.parameters:
        tensor = tensors[item.name].detach()
        if case.backward and tensor.is_floating_point():
            module.register_parameter(item.name, torch.nn.Parameter(tensor))
        else:
            module.register_buffer(item.name, tensor)
    return module


def _by_event(case: Case) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for event, action in case.around.events:
        found.setdefault(event, []).append(action)
    return found


def _with_backward(case: Case, backward: bool) -> Case:
    return Case(case.inputs, case.body, case.returns, backward=backward)


def _copies(found: Gradients) -> Gradients:
    return tuple(None if g is None else g.clone() for g in found)


def _way(
    fn: Callable[..., Any], kind: str
) -> tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]], Callable[[], None], Callable[[], bool]]:
    """The callable of a way, the context for calls, what frees it, and whether the last call was not a replay."""
    if kind in WAYS:
        (way,) = make_ways(Program(fn), [kind])
        trees = way.trees
        if trees is None:
            return way.callable, way.active, lambda: None, lambda: False
        return way.callable, way.active, trees.clear, lambda: not all(map(_replays, way.managers))
    backend: Any = kind
    if ":" in kind:
        module, name = kind.split(":")
        backend = getattr(importlib.import_module(module), name)
    return torch.compile(fn, backend=backend), contextlib.nullcontext, lambda: None, lambda: False


def _replays(manager: Any) -> bool:
    state: str = manager.path_state.name
    return state == "EXECUTION"
