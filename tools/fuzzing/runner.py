"""Runs a case in one way, call by call, with memory of its own and all events around its calls.

Two :class:`Runner` objects of one case get equal inputs at different addresses. :meth:`Runner.step` makes the next call
and returns an :class:`Observation`; it raises what the call raises. A call of a compiled way that raises an injected
fault is made again, with its inputs as they were.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config

from pygraph_trees.benchmark import Program
from pygraph_trees.benchmark.ways import FLAGS, make_ways
from pygraph_trees.outputs.allocations import bytes_of
from pygraph_trees.trees.functions.containment import end_allocations

from .around import LATE, at
from .beside import Beside
from .case import Case
from .elsewhere import Elsewhere, Reader, Threads
from .everything import CHAIN, in_order
from .faults import Fault
from .gradients import Gradients, gradients, loss_of
from .inner import OTHER, Inner, Target
from .memory import Memory
from .observation import Observation, observe
from .saved import hooks


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
        self._held: deque[Any] = deque(maxlen=max(case.around.keeps, 2 if keeps or case.around.holds else 0))
        self._reader = Reader(device)
        self._captured: list[tuple[Any, ...]] = []  # graphs of the program, with the tensors that they read
        if kind == "ours" and case.around.faults:
            kind = "ours:graphed"  # a trial would decide by time, which faults change
        self._callable, self._active, self._close, self._recorded = _way(fn, kind)
        self._events: dict[str, list[str]] = {}
        for event, action in case.around.events:
            self._events.setdefault(event, []).append(action)
        targets = self._targets(fn)
        self._inner = Inner(targets, device, backward=case.around.inner_backward)
        self._beside = Beside(case.around.beside, targets, device, case.around.inner_backward)
        self._outer = _Hooked(self._callable, lambda: self._happened("forward hook"))
        self._fault: Fault | None = None  # of the current attempt
        self.caught = 0  # faults that were raised

    def step(self) -> Observation:
        """Makes the next call; makes it again if an injected fault ends it."""
        given = self._inputs()
        faults = [f for f in self._case.around.faults if f.call == self._call and self.kind != "eager"]
        self._fault = faults[0] if faults else None
        restore = self._restorer() if faults else None
        seen = None
        try:
            seen = self._attempt(given)
        except BaseException as error:
            if self._fault is None or not isinstance(error, self._fault.raises):
                raise
        self._fault = None
        if seen is None and restore is not None:
            self.caught += 1
            restore()
            seen = self._attempt(given)
        self._call += 1
        assert seen is not None
        return seen

    def _attempt(self, given: Mapping[str, torch.Tensor]) -> Observation:
        around, call = self._case.around, self._call
        self._inner.prepare(call)
        if call >= 2:
            self._beside.prepare(call)
        with self._active(), _config(self._case), in_order() if self.kind == CHAIN else contextlib.nullcontext():
            if call == 0:
                self._inner.warm_up()
            if call % around.step_of == 0 and not self._keeps:
                torch.compiler.cudagraph_mark_step_begin()
                self._of_step.clear()
            work = lambda: self._elsewhere_or_here(given)  # noqa: E731
            if around.thread in ("call", "worker", "workers") and at(around.thread_when, call):
                if around.thread == "call":
                    return self._threads.new(work)
                return self._threads.worker(call % 2 if around.thread == "workers" else 0, work)
            return work()

    def _restorer(self) -> Callable[[], None]:
        """What gives inputs their present values again."""
        fed = [tensor for tensor in self._fed.values() if self._memory.place_of(tensor) is None]
        tensors = [*self._memory.blocks.values(), *fed]
        held = [(tensor, tensor.detach()) for tensor in self._held_by_module().values()]
        tensors += [data for _, data in held if self._memory.place_of(data) is None]
        # Whole storages: elements of an expanded tensor share memory, and torch refuses to write there.
        storages = [bytes_of(tensor.untyped_storage()) for tensor in tensors]
        copies = [storage.clone() for storage in storages]

        def restore() -> None:
            for storage, copy in zip(storages, copies, strict=True):
                storage.copy_(copy)
            for tensor, data in held:
                tensor.data = data

        return restore

    def detach_outputs(self) -> None:
        """Passes copies of the outputs to the next call, instead of the outputs."""
        self._fed = {name: output.clone() for name, output in self._fed.items()}

    def recorded(self) -> bool:
        """Whether the last call's outputs may end with its step, and must not be used in a later one."""
        return not self._keeps and (self._recorded() or bool(self._case.around.targets))

    def close(self) -> None:
        """Frees what the way holds on the device."""
        for kept in (self._fed, self._held, self._of_step, self._captured):
            kept.clear()
        self._threads.close()
        self._close()

    def _inputs(self) -> dict[str, torch.Tensor]:
        given = dict(self._memory.prepare(self._call))
        places = {item.name: item.place for item in self._case.inputs}
        for name, tensor in self._held_by_module().items():
            # A parameter that the program gave other memory keeps it, if the program's writes are kept.
            if tensor.data_ptr() != given[name].data_ptr() and not (self._call and places[name] == "kept"):
                tensor.data = given[name].detach()
            given[name] = tensor
        return given | self._fed

    def _held_by_module(self) -> dict[str, torch.Tensor]:
        if self._module is None:
            return {}
        return dict(self._module.named_parameters()) | dict(self._module.named_buffers())

    def _targets(self, fn: Callable[..., Any]) -> dict[str, Target]:
        wanted = self._case.around.targets
        found = {}
        if "same" in wanted:
            found["same"] = Target.of(self._case, fn, self._callable)
        if "other" in wanted:
            eager = OTHER.function()
            made, *_ = _way(eager, self.kind)
            found["other"] = Target.of(replace(OTHER, backward=self._case.backward), eager, made)
        return found

    def _elsewhere_or_here(self, given: Mapping[str, torch.Tensor]) -> Observation:
        if not at(self._case.around.where_when, self._call):
            return self._observed(given)
        with self._elsewhere.current(self._call):
            return self._observed(given)

    def _observed(self, given: Mapping[str, torch.Tensor]) -> Observation:
        around, case = self._case.around, self._case
        late = self._call >= 2  # the first call compiles and warms up, the second records
        for graph, *_ in self._captured:
            graph.replay()
        kept: list[Any] = []
        with (
            self._inner.finalizers(around.garbage if late else None, around.threshold if late else 0),
            self._beside.running(),
            self._fault.injected(self._elsewhere.device) if self._fault else contextlib.nullcontext(),
        ):
            with self._saved():
                outputs = self._forward([given[i.name] for i in case.arguments])
            found = self._gradients(outputs, given, kept) if case.backward else ()
        inside = [*self._inner.taken(), *self._beside.seen]
        valid = self._held if self._keeps else self._of_step  # outputs, gradients and losses of earlier calls
        earlier = (*valid, *self._reader.taken(), *self._moved_parameters())
        seen = observe(case.returns, outputs, found, self._memory, earlier=earlier, inside=inside)
        self._fed = {name: outputs[position] for position, name in case.feedback}
        if around.reads is not None and at(around.reads, self._call):
            self._reader.read([t for t in (*outputs, *found) if t is not None])
            self.detach_outputs()
        elif self._is_captured() or (around.thread in ("call", "worker", "workers") and not self._keeps):
            self.detach_outputs()  # the thread's graphs end with it, and a captured graph is replayed
        else:
            self._hold(kept, outputs, found)
        return seen

    def _forward(self, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs; of a graph that the program captures and replays, if the case says so."""
        if self.kind == "eager" or not self._is_captured():
            outputs = self._outer(*arguments)
        else:
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            try:
                with torch.cuda.graph(graph, pool=pool):
                    outputs = self._outer(*arguments)
            except BaseException:
                end_allocations(torch.cuda.current_device(), pool)  # torch 2.11 and 2.12 do not
                raise
            graph.replay()
            self._captured.append((graph, arguments, outputs))
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def _is_captured(self) -> bool:
        """Whether ways other than eager capture this call, so that later calls replay it."""
        captures, on_gpu = self._case.around.captures, self._elsewhere.device.type == "cuda"
        return on_gpu and captures is not None and at(captures, self._call)

    def _hold(self, kept: list[Any], outputs: tuple[torch.Tensor, ...], found: Gradients) -> None:
        """Holds what the program holds over later calls."""
        around = self._case.around
        if around.holds is None:
            self._held.append((outputs, found))
        elif at(around.holds_when, self._call) and around.holds != "nothing":
            self._held.append(kept or (outputs, found))
        if around.step_of > 1:
            self._of_step.append((outputs, found))

    def _moved_parameters(self) -> tuple[torch.Tensor, ...]:
        """Parameters to which the program gave other memory."""
        return tuple(t for t in self._held_by_module().values() if self._memory.place_of(t) is None)

    def _saved(self) -> AbstractContextManager[Any]:
        around = self._case.around
        if not self._case.backward or around.saved is None or not at(around.saved_when, self._call):
            return contextlib.nullcontext()
        return hooks(around.saved, self._happened)

    def _gradients(
        self, outputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor], kept: list[Any]
    ) -> Gradients:
        """The gradients; puts the loss into ``kept`` if the program holds it."""
        around = self._case.around
        leaves = [given[i.name] for i in self._case.inputs if given[i.name].requires_grad]
        named = list(zip(self._case.returns, outputs, strict=True))
        tangents = {name: kind for name, kind in around.tangents if kind not in LATE or self._call >= 2}
        accumulated = (lambda: self._happened("accumulated")) if "accumulated" in self._events else None
        holds = around.holds if at(around.holds_when, self._call) else None
        loss = loss_of(outputs) if holds in ("loss", "detached loss") else None
        if loss is not None:
            named, tangents = [("loss", loss)], {}
            kept.append(loss if holds == "loss" else loss.detach())

        def taken() -> Gradients:
            found = twice()
            are_zeros = any(".data" in line or "graph_break" in line for line in self._case.body)
            if not are_zeros and "missing" not in tangents.values():
                return found
            # In compiled code, leaves of an output that is left out or that only the next graph gets, and a parameter
            # that is written to and not used, have gradients of zeros.
            return tuple(torch.zeros_like(w) if g is None else g for g, w in zip(found, leaves * 2, strict=False))

        def twice() -> Gradients:
            if holds != "graph":
                return gradients(named, leaves, tangents, accumulated)
            first = gradients(named, leaves, tangents, accumulated, retain=True)
            return (*first, *gradients(named, leaves, tangents, accumulated, retain=True))

        with self._output_hooks(outputs):
            if around.thread == "backward" and at(around.thread_when, self._call):
                return self._threads.new(lambda: tuple(None if g is None else g.clone() for g in taken()))
            return taken()

    def _output_hooks(self, outputs: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        hooked = contextlib.ExitStack()
        for output in outputs if "output hook" in self._events else ():
            if output.requires_grad:
                hooked.enter_context(output.register_hook(lambda _: self._happened("output hook")))
        return hooked

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


@contextlib.contextmanager
def _config(case: Case) -> Iterator[None]:
    """The settings that torch.compile needs for a case."""
    with contextlib.ExitStack() as stack:
        if any("scan(" in line for line in case.body):
            stack.enter_context(torch._dynamo.config.patch(capture_scalar_outputs=True))
        if case.around.holds == "graph":
            stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        yield


def _way(
    fn: Callable[..., Any], kind: str
) -> tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]], Callable[[], None], Callable[[], bool]]:
    """The callable of a way, the context for calls, what frees it, and whether the last call was not a replay."""
    kind = "ours" if kind == CHAIN else kind
    if kind in FLAGS:
        (way,) = make_ways(Program(fn), [kind])
        call = way.callable, way.active
        if way.trees is None:
            return *call, lambda: None, lambda: False
        return *call, way.trees.clear, lambda: any(m.path_state.name != "EXECUTION" for m in way.managers)
    backend: Any = kind
    if ":" in kind:
        module, name = kind.split(":")
        backend = getattr(importlib.import_module(module), name)
    return torch.compile(fn, backend=backend), contextlib.nullcontext, lambda: None, lambda: False
