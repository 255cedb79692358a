"""The values that an unfinished program has so far, from which its operations take operands.

Each statement runs on meta tensors when it is drawn, which gives shapes and dtypes and shows which values share memory.
An operand is an existing value that fits, or a new input. If the program cannot have one, :class:`NoRoom` is raised.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from .case import LAYOUTS, PLACES, Input
from .memory import strides_of

T = TypeVar("T")

SIZES = (1, 2, 3, 8, 16, 33, 64)
MOST_INPUTS = 9
MOST_CONSTANTS = 1 << 14  # elements of a constant


class Draws(random.Random):
    """Random choices of one program: they depend on the seed and its number alone, not on the programs before it."""

    def several(self, choices: Sequence[T], most: int, least: int = 1) -> list[T]:
        """Different choices in a random order, at most as many as there are."""
        return self.sample(choices, min(len(choices), self.randint(least, most)))

    def chance(self, one_in: int) -> bool:
        return self.randrange(one_in) == 0


class NoRoom(Exception):
    """An operation needs an operand that the program cannot have."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A name in the program with a meta tensor that represents it."""

    name: str
    tensor: torch.Tensor
    root: str  # the input, or the statement's value, whose memory it shares

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return self.name


class Scope:
    """Draws the operands of one program.

    Args:
        main: the floating-point dtype of most inputs.
        mutations: whether values may be written to.
    """

    def __init__(self, draws: Draws, main: str, mutations: bool) -> None:
        self._draws = draws
        self._like: str | None = None
        self._main = main
        self.mutations = mutations
        self.inputs: list[Input] = []
        self.values: list[Value] = []
        self.body: list[str] = []
        self.constants: list[str] = []  # computed on the CPU from numbers alone
        self.moved: list[str] = []  # constants moved to the device of an input
        self._tensors: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}

    def one_of(self, *choices: T) -> T:
        return self._draws.choice(choices)

    def size(self) -> int:
        return self.one_of(*SIZES)

    def dimension(self, value: Value) -> int:
        """One of the dimensions of a value, counted from the front."""
        return self.one_of(*range(len(value.shape)))

    def tensor(
        self,
        *,
        rank: int | None = None,
        least_rank: int = 0,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        dtypes: Sequence[str] | None = None,
        apart_from: Iterable[Value] = (),
    ) -> Value:
        """A floating-point operand; ``apart_from`` excludes values that may share its memory."""
        roots = {v.root for v in apart_from}
        allowed = [dtype] if dtype is not None else dtypes

        def fits(value: Value) -> bool:
            return (
                value.tensor.is_floating_point()
                and value.tensor.numel() > 0
                and (shape is None or value.shape == tuple(shape))
                and (rank is None or len(value.shape) == rank)
                and len(value.shape) >= least_rank
                and (allowed is None or value.dtype in allowed)
                and value.root not in roots
            )

        found = [v for v in self.values if fits(v)]
        if found and (len(self.inputs) >= MOST_INPUTS or not self._draws.chance(4)):
            return self.one_of(*found)
        if shape is None:
            wanted = self.one_of(*range(max(1, least_rank), 5)) if rank is None else rank
            shape = tuple(self.size() if i < 2 else self.one_of(1, 2, 8, 16) for i in range(wanted))
        if allowed is None:
            allowed = [self._main] if not self._draws.chance(6) else ["float32"]
        return self._input(tuple(shape), self.one_of(*allowed), "unit", share=not roots)

    def written(self, **wanted: Any) -> Value:
        """An operand, as of :meth:`tensor`, that can be written to: no two of its elements share an address."""
        if not self.mutations:
            raise NoRoom
        value = self.tensor(**wanted)
        if not _separate(value.tensor):
            raise NoRoom
        return value

    def like(self, text: str) -> None:
        """Sets an expression like that of the next statement, for one that does not run on meta tensors."""
        self._like = text

    def parameter(self) -> Value:
        """A floating-point parameter without shared memory."""
        names = [i.name for i in self.inputs if i.parameter]
        found = [v for v in self.values if v.name in names and _separate(v.tensor)]
        if found:
            return self.one_of(*found)
        shape = (self.size(),) if self._draws.chance(2) else (self.size(), self.size())
        made = self._input(shape, self._main, "unit", parameter=True)
        if not _separate(made.tensor):
            raise NoRoom
        return made

    def intermediate(self) -> Value:
        """A value of the program that is no view and shares memory with no other, and may be written to."""
        found = [v for v in self.values if v.root == v.name and not v.name.isalpha() and v.tensor.is_contiguous()]
        found = [v for v in found if sum(other.root == v.root for other in self.values) == 1 and v.shape]
        if not found or not self.mutations:
            raise NoRoom
        return self.one_of(*found)

    def has(self, text: str) -> bool:
        """Whether a statement contains ``text``."""
        return any(text in line for line in self.body)

    def mask(self, shape: Sequence[int]) -> Value:
        return self._input(tuple(shape), "bool", "mask")

    def index(self, shape: Sequence[int], below: int) -> Value:
        """Integers from 0 to ``below`` - 1."""
        return self._input(tuple(shape), "int64", f"below {below}")

    def order(self, count: int) -> Value:
        """Each of ``count`` indices once."""
        return self._input((count,), "int64", "order")

    def add(self, text: str, *, value: bool) -> None:
        """Appends a statement, with a name for its value if it has one; it, or one like it, runs on meta tensors."""
        name = f"v{len(self.body)}"
        line = f"{name} = {text}" if value else text
        with torch.no_grad():
            exec(line if self._like is None else f"{name} = {self._like}", self._tensors)
        self._like = None
        self.body.append(line)
        if value:
            tensor = self._tensors[name]
            storage = tensor.untyped_storage()._cdata
            root = next((v.root for v in self.values if v.tensor.untyped_storage()._cdata == storage), name)
            self.values.append(Value(name, tensor, root))

    def constant(self, text: str) -> torch.Tensor:
        """Appends a statement that computes on the CPU from numbers alone, and runs it."""
        name = f"v{len(self.body)}"
        try:
            with torch.no_grad():
                made = eval(text, self._tensors)
        except (RuntimeError, TypeError, ZeroDivisionError) as error:  # unsupported for this dtype or shape
            raise NoRoom from error
        if made.numel() > MOST_CONSTANTS:
            raise NoRoom
        self._tensors[name] = made
        self.body.append(f"{name} = {text}")
        self.constants.append(name)
        return made

    def move(self, x: Value) -> str:
        """Appends a statement that moves the latest constant to the device of ``x``; returns its name."""
        name = f"v{len(self.body)}"
        text = f"{self.constants[-1]}.to({x}.device)"
        self._tensors[name] = eval(text, self._tensors)
        self.body.append(f"{name} = {text}")
        self.moved.append(name)
        return name

    def state(self) -> tuple[int, ...]:
        """A state for :meth:`forget`."""
        return tuple(map(len, self._lists()))

    def forget(self, state: tuple[int, ...]) -> None:
        """Restores an earlier state."""
        for items, count in zip(self._lists(), state, strict=True):
            del items[count:]

    def mutated_parameters(self) -> bool:
        """Whether a statement writes to a parameter."""
        return self.has(".data") or any(i.parameter for i in self._mutated())

    def waits(self) -> bool:
        """Whether a call waits for the GPU, or copies from the CPU, which a graph of the program cannot capture."""
        return bool(self.constants) or self.has("torch.cond(") or self.has("torch.while_loop(") or self.has("scan(")

    def mutated_inputs(self) -> bool:
        """Whether a statement writes to an input."""
        return self.has(".data") or bool(self._mutated())

    def _mutated(self) -> list[Input]:
        return [i for i in self.inputs if self._tensors[i.name]._version]

    def _lists(self) -> tuple[list[Any], ...]:
        return self.inputs, self.values, self.body, self.constants, self.moved

    def _input(
        self, shape: tuple[int, ...], dtype: str, values: str, share: bool = False, parameter: bool = False
    ) -> Value:
        if len(self.inputs) >= MOST_INPUTS + 3:
            raise NoRoom
        plain = values == "order" or not shape
        item = Input(
            name="abcdefghijklmnopqrstuvwxyz"[len(self.inputs)],
            shape=shape,
            dtype=dtype,
            values=values,
            layout="contiguous" if plain else self.one_of(*(["contiguous"] * 6), *LAYOUTS[1:]),
            place=self.one_of(*PLACES),
            parameter=parameter or (values == "unit" and self._draws.chance(6)),
        )
        root = item.name
        owners = [i for i in self.inputs if (i.dtype, i.values, i.shares, i.parameter) == (dtype, values, None, False)]
        if share and owners and not item.parameter and self._draws.chance(8):
            owner = self.one_of(*owners)
            item = replace(item, layout="contiguous", shares=owner.name, shift=self.one_of(0, 1, 16))
            root = owner.name
        self.inputs.append(item)
        tensor = torch.empty_strided(shape, strides_of(item), dtype=item.torch_dtype, device="meta")
        self._tensors[item.name] = tensor
        self.values.append(Value(item.name, tensor, root))
        return self.values[-1]


def _separate(tensor: torch.Tensor) -> bool:
    """Whether no two elements of a strided tensor share an address."""
    reach = 0
    steps = ((abs(stride), size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for stride, size in sorted(steps):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
