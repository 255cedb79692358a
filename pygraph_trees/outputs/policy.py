"""Decides which outputs get own memory, and when; README.md has the rules. Each change records functions again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.cudagraph_utils import PlaceholderInfo, WrappedFunction

from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.naming import BACKWARD, INFERENCE

from .allocations import Allocations, Block, Storage
from .own_memory import MOST_CHANGES, OwnMemory, OwnOutputs

_OUTLIVED = 2  # steps that one output outlives before outputs get own memory
_Found = Callable[[Sequence[Any], Callable[[int], bool]], None]


@dataclass(frozen=True)
class OwnFunction(WrappedFunction):
    """Upstream's record of a function, with the function's own memory."""

    own: OwnMemory | None = None


class OutputPolicy:
    """Own memory of the functions of one manager. Methods are given the manager and do not keep it."""

    __slots__ = ("_given", "changing", "storages")

    def __init__(self) -> None:
        self.storages: dict[Any, tuple[Storage, ...]] = {}  # by function: where a warm-up found its outputs
        self._given: dict[Any, tuple[Block, ...]] = {}  # by function: the blocks for which it was given memory
        # Compiled code, and its outputs that get own memory from the next call on.
        self.changing: list[tuple[Any, set[int]]] = []

    @contextlib.contextmanager
    def call(self, manager: Any, function_id: Any, inputs: list[Any]) -> Iterator[None]:
        """Wraps a call of the manager, and appends own memory to its inputs."""
        while self.changing:
            self._change(manager, *self.changing.pop(), Reason.OUTPUTS_OUTLIVE())
        if (own := getattr(manager.ids_to_funcs[function_id], "own", None)) is None:
            yield
            return
        try:
            inputs += own.native.take()
        except torch.OutOfMemoryError:
            self.release(manager)
            inputs += own.native.take()
        plan: OwnOutputs = manager.ids_to_funcs[function_id].model.outputs
        plan.call.blocks = own.blocks
        try:
            yield
        finally:
            plan.call.blocks = ()
            own.native.finish()

    def release(self, manager: Any, model: Any = None) -> None:
        """Frees own memory that the program does not use: of all functions, or of those with this compiled code."""
        for native in self._natives(manager, model):
            native.release()

    def _natives(self, manager: Any, model: Any = None) -> list[Any]:
        functions = [f for f in list(manager.ids_to_funcs.values()) if model is None or f.model is model]
        return [own.native for f in functions if (own := getattr(f, "own", None)) is not None]

    @contextlib.contextmanager
    def watched(self, manager: Any, function_id: Any, inputs: list[Any]) -> Iterator[_Found]:
        """Wraps a warm-up of a function whose outputs may get own memory.

        Yields a function that must be given the outputs afterwards, and one that tells what is in the graph pool.
        """
        model = manager.ids_to_funcs[function_id].model
        plan: OwnOutputs = model.outputs
        plan.takes, plan.call.watch = len(inputs), (watch := Allocations())
        tensors = (value for value in inputs if isinstance(value, torch.Tensor))
        given = {t.untyped_storage().data_ptr() for t in tensors if not t._is_zerotensor()}  # a tangent without memory

        def found(outputs: Sequence[Any], is_in_pool: Callable[[int], bool]) -> None:
            storages = watch.storages(outputs, lambda address: address not in given and is_in_pool(address))
            self.storages[function_id] = storages
            graph, mode, chosen = model.log.graph, model.log.mode, storages
            # A collective may hide the address of all memory except that to which only copies write.
            is_alike = model.may_have_collective or manager.reclaiming.is_alike
            if model.log.has_collective:
                plan.copied.update(storage.block.outputs for storage in storages)
            elif not is_alike:  # if a library's outlive their step, that changes later
                chosen = tuple(storage for storage in storages if storage.allocation is not None)
            # The function is added to the manager after its first call. Ranks may hold outputs for different times.
            is_whole = mode == INFERENCE and graph is not None and graph.functions == 1
            if not model.dispatch.is_added and (is_whole or (is_alike and mode != BACKWARD)):
                seen = None if mode == INFERENCE else model.first_inside or 0
                numbers = [n for storage in chosen for n in storage.block.outputs if seen is None or n < seen]
                plan.blocks = plan.blocks_of(chosen, numbers)
            self._give_memory(manager, function_id)

        try:
            yield found
        finally:
            plan.call.watch = None

    def recorded(self, manager: Any, node: Any, pool_bytes: int) -> None:
        """Finds another way for outputs that a new recording cannot write to own memory, and limits the kept memory.

        An output of generated code is copied from then on; one that is copied already stays in the graph pool. All
        functions but the one used last keep at most as much as the pool has, ``pool_bytes``.
        """
        own: OwnMemory | None = node.own
        if own is None:
            return
        plan: OwnOutputs = node.wrapped_function.model.outputs
        returned = set() if node.live is None else {index for index, _ in node.live.outputs.values()}
        written = {i for i in returned if i >= own.takes and node.live.decisions[i].by_address}
        refused = [block for index, block in enumerate(own.blocks, own.takes) if index not in written]
        if refused and plan.blocks == own.blocks:
            plan.copied.update(block.outputs for block in refused if block.allocation is not None)
            plan.refused.update(block.outputs for block in refused if block.allocation is None)
            self._change(manager, node.wrapped_function.model, (), Reason.OUTPUT_REFUSED())
        kept = sorted(self._natives(manager), key=lambda native: native.used, reverse=True)
        for native in kept:
            may = native is kept[0] or pool_bytes >= native.nbytes
            native.hold(may)
            if not may:
                native.release()
            pool_bytes -= 0 if native is kept[0] else native.nbytes

    def held_bytes(self, manager: Any) -> int:
        return sum(native.held_bytes for native in self._natives(manager))

    def moved(self, manager: Any, models: Sequence[Any]) -> None:
        """Lets outputs of functions on a path get own memory from the next call on, if one has outlived two steps.

        The call that is under way has its inputs already, and may be one of the same function.
        """
        if manager.reclaiming.is_alike:  # how long an output is held may differ between ranks
            return
        for model in models:  # those that the manager of another thread has changed
            if any(self._given.get(id_) != model.outputs.blocks for id_ in self._ids(manager, model)):
                self.changing.append((model, set()))
        may_change = [model.outputs.changes < MOST_CHANGES for model in models]
        wanted_by = (n for n, model in enumerate(models) if may_change[n] and self._wanted(manager, model, _OUTLIVED))
        first = next(wanted_by, len(models))
        # The functions from the first one on are recorded again anyway.
        for model in itertools.compress(models[first:], may_change[first:]):
            model.outputs.changes += 1
            is_last = model.outputs.changes == MOST_CHANGES
            if wanted := self._wanted(manager, model, 1, with_seen=is_last):
                self.changing.append((model, wanted))
        if self.changing:
            manager._candidates.clear()  # the next call finds none, and calls upstream

    def _wanted(self, manager: Any, model: Any, times: int, *, with_seen: bool = False) -> set[int]:
        """The outputs without own memory that can get it and outlived so many steps, or are seen, if ``with_seen``."""
        plan: OwnOutputs = model.outputs
        if not (ids := self._ids(manager, model)):
            return set()
        numbers = {number for number, (moves, _) in model.log.moved.items() if moves >= times}
        possible = {number for storage in self.storages[ids[0]] for number in storage.block.outputs}
        if with_seen and (model.log.mode in (INFERENCE, BACKWARD) or model.first_inside is not None):
            seen = model.first_inside if model.log.mode not in (INFERENCE, BACKWARD) else None
            numbers |= {number for number in possible if seen is None or number < seen}
        has = set().union(*(block.outputs for block in plan.blocks))
        return (numbers & possible) - has - set().union(*plan.refused)

    def _ids(self, manager: Any, model: Any) -> list[Any]:
        """The ids of a function that was warmed up: one, or one for each set of its integers."""
        return [id_ for id_ in self.storages if manager.ids_to_funcs[id_].model is model]

    def _change(self, manager: Any, model: Any, wanted: Iterable[int], why: Why) -> None:
        plan: OwnOutputs = model.outputs
        ids = self._ids(manager, model)
        plan.blocks = plan.blocks_of(self.storages[ids[0]], wanted)
        for index in [index for index in model.refused if index >= plan.takes]:
            del model.refused[index]
        for function_id in ids:
            self._give_memory(manager, function_id)
            manager.reclaiming.record_again(function_id, why, model.log.newest_recording)

    def _give_memory(self, manager: Any, function_id: Any) -> None:
        """Gives a function an input for each of its blocks, from its next call on."""
        wrapped, storages = manager.ids_to_funcs[function_id], self.storages[function_id]
        model = wrapped.model
        plan: OwnOutputs = model.outputs
        takes, blocks, own = plan.takes, plan.blocks, None
        assert takes is not None
        self._given[function_id] = blocks
        if isinstance(wrapped, OwnFunction) and wrapped.own is not None:
            wrapped.own.native.release()
        if blocks and OwnMemory.fits(blocks, storages):
            own = OwnMemory(blocks, storages, torch.device("cuda", manager.device_index), model.log, takes)
        outputs = () if own is None else [block.outputs[0] for block in own.blocks]
        mutated = [index for index in wrapped.mutated_input_idxs if index < takes]
        placeholders = [PlaceholderInfo(f"output {number}", None, [], None) for number in outputs]
        known = {field.name: getattr(wrapped, field.name) for field in dataclasses.fields(WrappedFunction)}
        known["mutated_input_idxs"] = (*mutated, *range(takes, takes + len(outputs)))
        known["placeholders"] = (*wrapped.placeholders[:takes], *placeholders)
        manager.ids_to_funcs[function_id] = OwnFunction(**known, own=own)
