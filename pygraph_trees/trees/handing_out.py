"""Which outputs the functions of a manager hand out, and the memory that each call is given for them.

A function of a graph for inference hands out all outputs that its code allocates, if it is the graph's only partition.
Other outputs are handed out after they outlive two steps, from the next call on. An output that a recording cannot
write to a call's memory stays in the graph pool. If the outputs change, the function is recorded again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._inductor.cudagraph_utils import PlaceholderInfo

from pygraph_trees.report.naming import INFERENCE

from . import input_rules
from .allocations import Allocations, Memory, generated_by_inductor, memory_of_libraries
from .function import FunctionModel
from .handed_outputs import Handed, OutputPlan, Templates, given_memory, templates_of_call
from .kept_outputs import keeps_outputs

if TYPE_CHECKING:
    from .reclaiming import Reclaiming

_OUTLIVED = 2  # steps that an output outlives before it is handed out
_Found = Callable[[Sequence[Any], Callable[[int], bool]], None]


class Manages(Protocol):
    """The manager whose functions hand out outputs."""

    ids_to_funcs: Any
    device_index: int
    reclaiming: Reclaiming


class HandingOut:
    """The outputs that the functions of one manager hand out; methods are given the manager and do not keep it."""

    __slots__ = ("_candidates", "_memory", "_outlived", "_templates")

    def __init__(self, candidates: dict[Any, Any]) -> None:
        """Args:
        candidates: the manager's known candidates. They are cleared if outputs will change, so that the next call
            searches for recordings and finds none (:attr:`changes_next`).
        """
        self._candidates = candidates
        self._memory: dict[Any, dict[int, Memory]] = {}  # by function, then by output
        self._templates: dict[Any, Templates] = {}  # by function
        self._outlived: list[FunctionModel] = []  # functions that hand out more outputs from the next call on

    @property
    def changes_next(self) -> bool:
        """Whether functions hand out more outputs from the next :meth:`call` on."""
        return bool(self._outlived)

    @contextlib.contextmanager
    def call(self, manager: Manages, function_id: Any, inputs: list[Any]) -> Iterator[None]:
        """Wraps a call of the manager; appends memory for outputs to its inputs."""
        while self._outlived:
            model = self._outlived.pop()
            self._change(manager, model, "outputs that outlive their steps are handed out from now on")
        templates = self._templates.get(function_id)
        if templates is None and templates_of_call() is None:
            yield
            return
        with given_memory(templates):
            if templates is not None:
                inputs += templates.allocate()
            yield

    @contextlib.contextmanager
    def watched(self, manager: Manages, function_id: Any, inputs: list[Any]) -> Iterator[_Found]:
        """Wraps a warm-up; yields a function that must be called afterwards, with the outputs and with whether the
        graph pool holds an address."""
        model = manager.ids_to_funcs[function_id].model
        if function_id in self._memory or not _may_hand_out(model):
            yield lambda outputs, is_in_pool: None
            return
        plan = model.outputs
        plan.takes, plan.watch = len(inputs), (watch := Allocations())
        given = {
            value.untyped_storage().data_ptr()
            for value in inputs
            if isinstance(value, torch.Tensor) and not value._is_zerotensor()  # a tangent without memory
        }

        def found(outputs: Sequence[Any], is_in_pool: Callable[[int], bool]) -> None:
            generated = watch.memory_of(outputs)
            copied = memory_of_libraries(outputs, lambda address: address not in given and is_in_pool(address))
            self._memory[function_id] = copied | generated
            graph = model.log.graph
            # The function is added to the manager after its first call.
            if not model.dispatch.is_added and model.log.mode == INFERENCE and graph and graph.functions == 1:
                plan.handed = Handed.of(generated)
            self._hand_out(manager, function_id)

        try:
            yield found
        finally:
            plan.watch = None

    def recorded(self, manager: Manages, model: FunctionModel, node: Any) -> None:
        """Lets outputs stay in the graph pool if a new recording cannot write them to memory of each call."""
        templates, plan = node.templates, model.outputs
        if templates is None or templates.handed != plan.handed:
            return
        decisions, returned = {}, set()
        if node.live is not None:
            decisions, returned = node.live.decisions, {index for index, _ in node.live.outputs.values()}
        given = enumerate(templates.handed.outputs, plan.takes)
        refused = [n for index, n in given if index not in returned or not decisions[index].by_address]
        if refused:
            plan.not_handed.update(refused)
            plan.handed = plan.handed.without(refused)
            self._change(manager, model, "an output cannot be given by address")

    def moved(self, manager: Manages, path: Iterable[Any]) -> None:
        """Lets functions hand out outputs on a path that outlived two steps, from the next call on.

        The call that is under way has its inputs already, and may be one of the same function.
        """
        models = {id(model): model for node in path if keeps_outputs(model := node.wrapped_function.model)}
        for model in models.values():
            plan = model.outputs
            outlived = {number for number, (times, _) in model.log.moved.items() if times >= _OUTLIVED}
            wanted = outlived - plan.not_handed - set(plan.handed.outputs)
            memory = next((self._memory[id_] for id_ in self._ids(manager, model)), None) if wanted else None
            if memory is None:
                continue
            plan.not_handed |= wanted - memory.keys()
            if wanted & memory.keys():
                known = wanted.union(plan.handed.outputs)
                plan.handed = Handed.of({n: found for n, found in memory.items() if n in known})
                self._outlived.append(model)
        if self._outlived:
            self._candidates.clear()

    def _ids(self, manager: Manages, model: FunctionModel) -> list[Any]:
        """The ids of a function that was warmed up: one, or one for each set of its integers."""
        return [id_ for id_ in self._memory if manager.ids_to_funcs[id_].model is model]

    def _change(self, manager: Manages, model: FunctionModel, why: str) -> None:
        for index in [index for index in model.refused if index >= model.outputs.takes]:
            del model.refused[index]
        for function_id in self._ids(manager, model):
            self._hand_out(manager, function_id)
            manager.reclaiming.record_again(function_id, why)

    def _hand_out(self, manager: Manages, function_id: Any) -> None:
        """Gives a function an input for each output that it hands out, from its next call on."""
        wrapped, memory = manager.ids_to_funcs[function_id], self._memory[function_id]
        plan: OutputPlan = wrapped.model.outputs
        takes, handed = plan.takes, plan.handed
        self._templates.pop(function_id, None)
        outputs = handed.outputs if handed.fits(memory) else ()
        if outputs:
            device = torch.device("cuda", manager.device_index)
            self._templates[function_id] = Templates(handed, memory, device, plan)
        manager.ids_to_funcs[function_id] = dataclasses.replace(
            wrapped,
            mutated_input_idxs=(
                *(index for index in wrapped.mutated_input_idxs if index < takes),
                *range(takes, takes + len(outputs)),
            ),
            placeholders=(
                *wrapped.placeholders[:takes],
                *(PlaceholderInfo(f"output {number}", None, [], None) for number in outputs),
            ),
        )


def _may_hand_out(model: Any) -> bool:
    return (
        keeps_outputs(model)
        and not model.log.has_collective  # it may hide the address of any memory
        and input_rules.uses_addresses(model)
        and input_rules.knows_its_writes(model)
        and generated_by_inductor(model.model)
    )
