"""Outputs that are handed out: a graph writes them to memory that each call allocates, as un-graphed code does.

If a library allocates an output, the graph ends with a copy to that memory. A function that hands out outputs has
additional inputs, a tensor for each, which it writes to and returns. :class:`Handed` says which outputs these are, and
:class:`Templates` makes the tensors. During a call, the function's templates tell generated code and recordings what
its last inputs are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .allocations import Allocations, Memory


@dataclass(frozen=True, slots=True)
class Handed:
    """The outputs that a function hands out: their numbers, and the number of the allocation of each."""

    outputs: tuple[int, ...] = ()
    allocations: tuple[int | None, ...] = ()  # None: a library's, copied by the graph

    @staticmethod
    def of(memory: Mapping[int, Memory]) -> Handed:
        return Handed(tuple(memory), tuple(found.number for found in memory.values()))

    def without(self, outputs: Collection[int]) -> Handed:
        kept = [pair for pair in zip(self.outputs, self.allocations, strict=True) if pair[0] not in outputs]
        return Handed(tuple(output for output, _ in kept), tuple(number for _, number in kept))

    def fits(self, memory: Mapping[int, Memory]) -> bool:
        """Whether these outputs were found in these allocations."""
        pairs = zip(self.outputs, self.allocations, strict=True)
        return all(output in memory and memory[output].number == number for output, number in pairs)


class Templates:
    """Makes the tensors that a call of a function is given for its outputs."""

    def __init__(self, handed: Handed, memory: Mapping[int, Memory], device: torch.device, plan: OutputPlan) -> None:
        """
        Args:
            memory: the function's allocations by output, which ``handed`` must fit.
            plan: the function's.
        """
        found = [memory[output] for output in handed.outputs]
        meta = [torch.empty_strided(m.size, m.stride, dtype=m.dtype, device="meta") for m in found]
        self.handed, self.plan = handed, plan
        self.native = (torch.empty(0, device=device), *meta)  # the form in which C++ takes them

    def __len__(self) -> int:
        return len(self.native) - 1

    def allocate(self) -> list[torch.Tensor]:
        like, *meta = self.native
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=like.device) for t in meta]

    def allocations(self, tensors: Sequence[torch.Tensor]) -> Allocations:
        """``tensors``: as :meth:`allocate` makes them."""
        places = list(zip(self.handed.outputs, self.handed.allocations, tensors, strict=True))
        return Allocations(
            {number: tensor for _, number, tensor in places if number is not None},
            {output: tensor for output, number, tensor in places if number is None},
        )


@dataclass(slots=True)
class OutputPlan:
    """Which outputs of one function are handed out from its next call on."""

    takes: int = 0  # how many inputs Inductor gives the function, once it was added to a manager
    handed: Handed = Handed()
    not_handed: set[int] = field(default_factory=set)  # outputs that cannot be handed out
    watch: Allocations | None = None  # watches the next run of the compiled code

    def allocations(self, inputs: list[torch.Tensor]) -> Allocations | None:
        """The allocations of a run with these inputs, if they are watched or replaced.

        Inputs after the first :attr:`takes` are memory for outputs. They are removed.
        """
        templates = templates_of_call()
        # They may be another function's, if its code or a finalizer calls this one.
        is_given = templates is not None and templates.plan is self and len(inputs) == self.takes + len(templates)
        if templates is not None and is_given:
            given = inputs[self.takes :]
            del inputs[self.takes :]
            return templates.allocations(given)
        watch, self.watch = self.watch, None
        return watch


class _Call(threading.local):
    templates: Templates | None = None


_call = _Call()


def templates_of_call() -> Templates | None:
    """The templates from which this thread's call of a manager made its last inputs; None if it made none."""
    return _call.templates


@contextlib.contextmanager
def given_memory(templates: Templates | None) -> Iterator[None]:
    """Wraps a call of a manager whose last inputs were made from ``templates``."""
    before, _call.templates = _call.templates, templates
    try:
        yield
    finally:
        _call.templates = before
