"""Training loops as people write them, and their measurement in this process.

A loop is a function that makes one :class:`~bench.trained_models.Update` of a step with a numbered batch. In a
:class:`Walk`, it notes the host time of the forward and the backward. :class:`Loops` runs, checks and measures the
loops of one model in one way. No part of the measured package is imported, so upstream runs without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from bench.trained_models import Update

MICRO_BATCHES = 4
_KEPT = 50  # losses
_SETTLE = 6  # un-timed steps at the start of each turn
_SINGLE, _BLOCK = 14, 20  # steps with a wait after each, and steps without waits


@dataclass(slots=True)
class Walk:
    """State that the loops of one process share: clocks, kept losses, and whether upstream's graphs need care."""

    is_careful: bool  # whether gradients are accumulated outside of the graph pool, and steps are marked
    forward_ns: int = 0
    backward_ns: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)
    seen: list[torch.Tensor | None] | None = None  # copies of the last gradients; None if they are not wanted

    def forward(self, update: Update, number: int) -> tuple[torch.Tensor, ...]:
        begin = perf_counter_ns()
        losses = update.losses(number)
        self.forward_ns += perf_counter_ns() - begin
        return losses

    def backward(self, loss: torch.Tensor) -> None:
        begin = perf_counter_ns()
        loss.backward()
        self.backward_ns += perf_counter_ns() - begin

    def look(self, update: Update) -> None:
        if self.seen is not None:
            self.seen = [None if p.grad is None else p.grad.detach().clone() for p in update.parameters]


def _total(losses: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else losses[0] + losses[1]


def zero_grad_last(update: Update, number: int, walk: Walk) -> None:
    walk.backward(_total(walk.forward(update, number)))
    walk.look(update)
    update.optimizer.step()
    update.optimizer.zero_grad()


def zero_grad_first(update: Update, number: int, walk: Walk) -> None:
    update.optimizer.zero_grad()
    walk.backward(_total(walk.forward(update, number)))
    walk.look(update)
    update.optimizer.step()


def zero_grad_after_forward(update: Update, number: int, walk: Walk) -> None:
    loss = _total(walk.forward(update, number))
    update.optimizer.zero_grad()
    walk.backward(loss)
    walk.look(update)
    update.optimizer.step()


def losses_kept(update: Update, number: int, walk: Walk) -> None:
    losses = walk.forward(update, number)
    walk.backward(_total(losses))
    walk.look(update)
    update.optimizer.step()
    update.optimizer.zero_grad()
    walk.kept += [loss.detach() for loss in losses]
    del walk.kept[:-_KEPT]


def clipped(update: Update, number: int, walk: Walk) -> None:
    walk.backward(_total(walk.forward(update, number)))
    walk.look(update)
    nn.utils.clip_grad_norm_(update.parameters, 1.0)
    update.optimizer.step()
    update.optimizer.zero_grad(set_to_none=False)


def accumulated(update: Update, number: int, walk: Walk) -> None:
    """Upstream's graphs overwrite gradients, so a careful program adds them to its own memory and marks steps."""
    if walk.is_careful:
        for parameter in update.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    for part in range(MICRO_BATCHES):
        if walk.is_careful:
            torch.compiler.cudagraph_mark_step_begin()
        walk.backward(_total(walk.forward(update, number + part)) / MICRO_BATCHES)
    walk.look(update)
    update.optimizer.step()
    update.optimizer.zero_grad(set_to_none=not walk.is_careful)


Loop = Callable[[Update, int, Walk], None]
_TITLED: dict[str, tuple[Loop, str]] = {
    "A": (zero_grad_last, "zero_grad last"),
    "B": (zero_grad_first, "zero_grad first"),
    "C": (zero_grad_after_forward, "zero_grad after the forward"),
    "E": (losses_kept, "losses kept"),
    "F": (clipped, "clipped, zeroed in place"),
    "G": (accumulated, "four micro-batches"),
}
LOOPS, TITLES = ({name: titled[part] for name, titled in _TITLED.items()} for part in (0, 1))


class Loops:
    """The loops of one model in one way. They share the process, as in a notebook."""

    def __init__(self, updates: Sequence[Update], device: torch.device, *, is_careful: bool) -> None:
        self._updates, self._device = updates, device
        self._walk = Walk(is_careful)
        self._number = 0
        self._marks = 0  # the counter of marked steps, hidden from the loops that mark none

    def steps(self, name: str, count: int) -> None:
        loop = LOOPS[name]
        for _ in range(count):
            self._step(loop)
        self._wait()

    def settle(self, name: str, count: int) -> dict[str, Any]:
        """Makes the first steps of a loop and checks its values.

        Returns the distance of its gradients from eager's, relative to eager's, and the error in the kept losses.
        """
        with self._turn(name):
            self.steps(name, count)
            apart = [self._apart(LOOPS[name], update) for update in self._updates]
            self._number += 1
            wrong = self._wrong_losses() if name == "E" else None
        gc.collect()
        gc.freeze()  # otherwise each collection before a turn would take a fifth of a second
        torch.cuda.empty_cache()
        return {"apart": max(apart), "kept_losses": wrong}

    def measure(self, name: str) -> dict[str, Any]:
        """Measures one turn of a loop: µs and allocations per step, and the peak memory of the turn."""
        loop, walk = LOOPS[name], self._walk
        with self._turn(name), _collector_off():
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self.steps(name, _SETTLE)
            single: dict[str, list[float]] = {key: [] for key in ("forward_us", "backward_us", "host_us", "done_us")}
            for _ in range(_SINGLE):
                walk.forward_ns = walk.backward_ns = 0
                begin = perf_counter_ns()
                self._step(loop)
                returned = perf_counter_ns()
                self._wait()
                taken = walk.forward_ns, walk.backward_ns, returned - begin, perf_counter_ns() - begin
                for values, ns in zip(single.values(), taken, strict=True):
                    values.append(ns / 1e3)
            before, counted = self._memory()["allocation.all.allocated"], _counters()
            begin = perf_counter_ns()
            for _ in range(_BLOCK):
                self._step(loop)
            self._wait()
            step_us = (perf_counter_ns() - begin) / _BLOCK / 1e3
            memory, counted = self._memory(), _counters() - counted
        return {
            **{key: statistics.median(values) for key, values in single.items()},
            "step_us": step_us,
            "allocations": (memory["allocation.all.allocated"] - before) / _BLOCK,
            "peak_bytes": memory["allocated_bytes.all.peak"],
            "reserved_bytes": memory["reserved_bytes.all.peak"],  # with graph pools
            "recordings": _recordings(self._device),
            "steps_counted": _BLOCK,
            "counters": dict(counted),
        }

    def abandon(self) -> None:
        """Drops the gradients after an exception in a loop."""
        self._walk.seen = None
        for update in self._updates:
            update.optimizer.zero_grad()

    def _step(self, loop: Loop) -> None:
        for update in self._updates:
            loop(update, self._number, self._walk)
            update.after()
        self._number += 1

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Wraps a turn of a loop, so that it begins without gradients and without other loops' step marks."""
        for update in self._updates:
            update.optimizer.zero_grad()
        if self._device.type != "cuda" or name != "G":
            yield
            return
        from torch._inductor.cudagraph_trees import MarkStepBox

        MarkStepBox.mark_step_counter = self._marks
        try:
            yield
        finally:
            self._marks, MarkStepBox.mark_step_counter = MarkStepBox.mark_step_counter, 0

    def _apart(self, loop: Loop, update: Update) -> float:
        parts = range(self._number, self._number + (MICRO_BATCHES if loop is accumulated else 1))
        wanted = [torch.zeros_like(parameter) for parameter in update.parameters]
        for number in parts:
            found = torch.autograd.grad(_total(update.plain(number)), update.parameters, allow_unused=True)
            for total, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    total += gradient / len(parts)
        self._walk.seen = []
        loop(update, self._number, self._walk)
        update.after()
        seen, self._walk.seen = self._walk.seen, None
        differences = [w if s is None else s - w for s, w in zip(seen or (), wanted, strict=True)]
        return float(_norm(differences) / _norm(wanted))

    def _wrong_losses(self) -> str | None:
        """The error in losses that are read some steps later; None if there is none."""
        self._walk.kept.clear()
        read: list[float] = []
        for _ in range(4):
            self._step(losses_kept)
            read += [float(loss) for loss in self._walk.kept[len(read) :]]
        try:
            found = [float(loss) for loss in self._walk.kept]
        except RuntimeError as error:
            return f"reading raises {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        finally:
            self._walk.kept.clear()
        different = sum(one != other for one, other in zip(found, read, strict=True))
        return f"{different} of {len(read)} have other values" if different else None

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _memory(self) -> Mapping[str, int]:
        """Torch's statistics of the GPU's memory; all 0 on the CPU."""
        return torch.cuda.memory_stats(self._device) if self._device.type == "cuda" else Counter()


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _recordings(device: torch.device) -> int:
    """The recordings in this process's trees."""
    if device.type != "cuda":
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    found, pending = 0, [] if manager is None else [node for nodes in (manager.roots or {}).values() for node in nodes]
    while pending:
        found += 1
        pending += [child for children in pending.pop().children.values() for child in children]
    return found


def _counters() -> Counter[str]:
    """All counts in the package's report and of its fast path; empty without the package."""
    package = sys.modules.get("pygraph_trees")
    if package is None:
        return Counter()
    found: Counter[str] = Counter()
    for function in package.report().functions:
        for record in (function, *function.recordings):
            _add(found, record)
        for moved in function.moved_outputs:
            found["moved_outputs"] += moved.times
            found["moved_bytes"] += moved.nbytes
    extension = sys.modules["pygraph_trees.native.binding"].extension
    if extension is not None:
        found.update(dict(zip(("asked", "fast", "in_python"), extension.counts(), strict=True)))
    return found


_FACTS = frozenset({"partition", "partitions", "number", "parent", "kernels", "other_nodes", "pool_bytes"})


def _add(found: Counter[str], record: Any) -> None:
    """Adds the record's integers, by name, and those of its dictionaries, by name and key."""
    for one in dataclasses.fields(record):
        value = getattr(record, one.name)
        if isinstance(value, int) and not isinstance(value, bool) and one.name not in _FACTS:
            found[one.name] += value
        elif isinstance(value, dict):
            for key, count in value.items():
                if isinstance(count, int):
                    found[f"{one.name}: {key}"] += count
