"""Calls a program un-graphed and under parameter indirection side by side, while its inputs move, and proves the same
bits after each call.

A :class:`Program` is a function of tensors and their description. :func:`run` compiles it once by ``torch.compile``
without CUDA graphs, the reference, and once with ``mode="reduce-overhead"``, and calls both with equal values at
addresses of their own under each *regime*: one address, two in turn, a new one each call, and a new one each call while
others write where the old one was. Memory, values and guards are those of ``tools/fuzzing/memory.py``. Equal bit for
bit must be: outputs with strides and device, gradients, which input an output is or in whose memory it lies, the memory
of all inputs with their guards, and at the end of a regime all memory that an earlier call was given.

What the report says of it comes back as :class:`Facts`. :class:`IndirectionTestCase` checks them against what the
program announces: a recording a function and no more, each later call a replay, the bytes copied and their reasons.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from fuzzing.case import Case, Input
from fuzzing.memory import Memory
from parity import BOTH_SIDES, clean, requires_cuda
from torch._dynamo.utils import counters
from torch.testing._internal.common_utils import TestCase
from torch.utils import _pytree as pytree

import pygraph_trees
from pygraph_trees.report.summary import clear

if TYPE_CHECKING:
    from pygraph_trees.report.records import InputRecord

    Settle = Callable[[Mapping[str, torch.Tensor]], None]

REGIMES = ("same", "alternate", "fresh", "reused")
KEPT = ("kept", *REGIMES)  # the first: written once, so that what is done to an input adds up
FLAG = "triton.pygraph_indirection"
VERIFY = "triton.pygraph_verify"


class Mismatch(AssertionError):
    """The two ways differ in a bit."""


def tensor(*shape: int, dtype: str = "float32", values: str = "unit", layout: str = "contiguous", **more: Any) -> Input:
    """An input of a program; its name and its place are set when it is run. ``shares="1"`` is by position."""
    return Input("", shape, dtype, layout, values=values, **more)


@dataclass(frozen=True, slots=True)
class Program:
    """A function of tensors, what it is given, and what is expected of its recordings."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Input, ...]
    copied: int | str | None = 0  # 0 bytes, a pattern of the reason, or None: 0 bytes, or any with a reason
    graphed: bool = True  # False: whether and how often it is graphed is upstream's matter
    settle: Settle | None = None  # changes the values, by position "0", "1", ..., before each call
    backward: bool = False  # gradients of all floating-point inputs are taken
    seeded: bool = False  # draws random numbers

    def case(self, place: str) -> Case:
        """The inputs under a regime; their names, and so their values, are the regime's own."""
        named = (
            replace(item, name=f"{place} {i}", place=place, shares=item.shares and f"{place} {item.shares}")
            for i, item in enumerate(self.inputs)
        )
        return Case(tuple(named), (), (), backward=self.backward)


@dataclass(frozen=True, slots=True)
class Ways:
    """A function, callable un-graphed and graphed."""

    plain: Callable[..., Any]
    graphed: Callable[..., Any]


def compiled(fn: Callable[..., Any], **options: Any) -> Ways:
    plain, graphed = (torch.compile(fn, mode=mode, **options) for mode in (None, "reduce-overhead"))
    return Ways(_pinned(plain), _pinned(graphed))


def _pinned(callable_: Callable[..., Any]) -> Callable[..., Any]:
    """Sets what both ways are compiled with at each call: torch leaves ``deterministic`` off behind a compilation."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._inductor.config.patch(_both()):
            return callable_(*args, **kwargs)

    return call


def _both() -> dict[str, Any]:
    return {name: value for name, value in BOTH_SIDES.items() if name in torch._inductor.config._config}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the report says of all functions, and Inductor's count of what it skipped."""

    functions: int
    recordings: int
    warmups: int
    replays: int
    ungraphed_calls: int
    skips: int
    copied_bytes: int  # by a replay of each recording
    routes: tuple[str | None, ...]  # of the live inputs
    why: tuple[str, ...]  # of each copied input
    reasons: tuple[str, ...]  # of recordings behind the first of a function

    @staticmethod
    def now() -> Facts:
        functions = pygraph_trees.report().functions
        recordings = [r for f in functions for r in f.recordings]
        live: list[InputRecord] = [i for r in recordings for i in r.inputs if i.kind == "live"]
        return Facts(
            functions=len(functions),
            recordings=len(recordings),
            warmups=sum(f.warmups for f in functions),
            replays=sum(f.replays for f in functions),
            ungraphed_calls=sum(f.ungraphed_calls for f in functions),
            skips=counters["inductor"]["cudagraph_skips"],
            copied_bytes=sum(r.copied_bytes for r in recordings),
            routes=tuple(i.route for i in live),
            why=tuple(str(i.why_copied) for i in live if i.copied_bytes),
            reasons=tuple(r.reason for f in functions for r in f.recordings[1:]),
        )


def assert_same_bits(found: Any, wanted: Any, where: str) -> None:
    """Raises :class:`Mismatch` unless both hold the same leaves, tensors bit for bit."""
    ours, theirs = (pytree.tree_flatten_with_path(value)[0] for value in (found, wanted))
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        raise Mismatch(f"{where}: {len(ours)} values, expected {len(theirs)}")
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        problem = _apart(one, other)
        if problem is not None:
            raise Mismatch(f"{where}{pytree.keystr(path)}: {problem}")


def _apart(one: Any, other: Any) -> str | None:
    if not isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor):
        return None if one == other else f"{one!r}, expected {other!r}"
    for what in ("shape", "dtype", "device", "requires_grad"):
        if getattr(one, what) != getattr(other, what):
            return f"{what} is {getattr(one, what)}, expected {getattr(other, what)}"
    if one.numel() > 1 and one.stride() != other.stride():
        return f"strides are {one.stride()}, expected {other.stride()}"
    mine, its = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    if torch.equal(mine, its):
        return None
    first = int((mine != its).nonzero()[0]) // one.element_size()
    return f"element {first} of {one.numel()} is {one.reshape(-1)[first]}, expected {other.reshape(-1)[first]}"


class _Side:
    """One way of calling a program, with memory of its own."""

    def __init__(self, program: Program, callable_: Callable[..., Any], device: torch.device) -> None:
        self._program = program
        self._callable = callable_
        self._device = device
        self._memory: Memory | None = None
        self.seen: list[torch.Tensor] = []  # blocks of the calls of this regime

    def enter(self, regime: str) -> None:
        self._keep = regime != "reused"
        self._memory = Memory(self._program.case(regime), self._device)
        self.seen = []

    def call(self, number: int) -> dict[str, Any]:
        """What the next call leaves behind; outputs are the function's own."""
        assert self._memory is not None
        given = self._memory.prepare(number)
        program = self._program
        if program.settle is not None and (number == 0 or self._memory.case.inputs[0].place != "kept"):
            with torch.no_grad():
                program.settle({name.split()[1]: t.detach() for name, t in given.items()})
        if program.seeded:
            torch.manual_seed(number)
        arguments = [given[item.name] for item in self._memory.case.inputs]
        with torch.enable_grad() if program.backward else torch.no_grad():
            outputs = self._callable(*arguments)
            flat = [o for o in pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor)]
            aliases = [self._alias(o, given) for o in flat]
            gradients = self._gradients(flat, arguments)
        blocks = dict(self._memory.blocks)
        if self._keep:
            self.seen += blocks.values()
        return {"output": outputs, "gradient": gradients, "memory": blocks, "alias": aliases}

    def _gradients(self, outputs: list[torch.Tensor], given: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        outputs = [o for o in outputs if o.requires_grad]
        leaves = [t for t in given if t.requires_grad]
        if not outputs or not leaves:
            return ()
        return torch.autograd.grad(outputs, leaves, [torch.full_like(o, 0.5) for o in outputs], allow_unused=True)

    def _alias(self, output: torch.Tensor, given: Mapping[str, torch.Tensor]) -> str | None:
        """The input that an output is, or where in which input's memory it lies."""
        assert self._memory is not None
        same = [name for name, t in given.items() if t is output]
        if same:
            return f"is {same[0]}"
        return self._memory.place_of(output)


def run(
    program: Program,
    ways: Ways,
    device: torch.device,
    regimes: Sequence[str] = REGIMES,
    calls: int = 3,
) -> int:
    """Calls ``program`` both ways under each regime, and compares; the number of calls.

    Raises:
        Mismatch: a call left other bits behind than the un-graphed one.
    """
    plain, graphed = (_Side(program, way, device) for way in (ways.plain, ways.graphed))
    for regime in regimes:
        plain.enter(regime)
        graphed.enter(regime)
        for number in range(calls):
            wanted = plain.call(number)
            torch.compiler.cudagraph_mark_step_begin()
            found = graphed.call(number)
            assert_same_bits(found, wanted, f"{program.name}, {regime}, call {number}: ")
            del wanted, found
        assert_same_bits(graphed.seen, plain.seen, f"{program.name}, {regime}: memory of earlier calls ")
    return calls * len(regimes)


def reset() -> None:
    """The state of a process that has compiled nothing and reported nothing."""
    clean()
    clear()


@requires_cuda
class IndirectionTestCase(TestCase):
    """Base of the tests of indirection: the flag is on, and each test begins in a clean state."""

    device = torch.device("cuda", 0)
    indirection = "auto"  # the flag
    verify = "off"  # "on": each recording is replayed once more, with its inputs elsewhere and the old ones poisoned

    def setUp(self) -> None:
        super().setUp()
        reset()
        self.addCleanup(reset)
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(torch._inductor.config.patch({**_both(), FLAG: self.indirection, VERIFY: self.verify}))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True))

    def check(self, program: Program, regimes: Sequence[str] = REGIMES, calls: int = 3, **options: Any) -> Facts:
        """Runs ``program`` and asserts what it announces; options are those of ``torch.compile``."""
        made = run(program, compiled(program.fn, **options), self.device, regimes, calls)
        facts = Facts.now()
        if program.graphed:
            # What is kept for backward can be static there: it is found to move, and recorded once more.
            self.assertGraphed(facts, made, again=facts.functions if program.backward else 0)
        self.assertCopied(facts, program.copied)
        return facts

    def assertGraphed(self, facts: Facts, calls: int, again: int = 0) -> None:
        """Each function warmed up and was recorded once, but for ``again`` recordings; all other calls were replays."""
        self.assertGreater(facts.functions, 0, str(facts))
        self.assertEqual((facts.ungraphed_calls, facts.skips), (0, 0), str(facts))
        self.assertEqual(facts.warmups, facts.functions, str(facts))
        self.assertIn(facts.recordings - facts.functions, range(again + 1), str(facts))
        self.assertEqual(facts.replays, facts.functions * calls - facts.warmups - facts.recordings, str(facts))

    def assertCopied(self, facts: Facts, expected: int | str | None) -> None:
        """The live inputs were copied as :attr:`Program.copied` says."""
        if expected == 0:
            if facts.copied_bytes or facts.why:
                self.fail(f"copied: {facts}")
            return
        if expected is not None:
            self.assertGreater(len(facts.why), 0, str(facts))
            self.assertGreater(facts.copied_bytes, 0, str(facts))
        for reason in facts.why:
            self.assertRegex(reason, expected or r"\w+ \w+")


class ByTable(IndirectionTestCase):
    """Base beside that of tests of the patch route, which then run with a table; some programs must take it."""

    indirection = "table"
    tabled: frozenset[str] = frozenset()  # their names: a kernel of Triton's reads an input of them

    def check(self, program: Program, *args: Any, **options: Any) -> Facts:
        facts = super().check(program, *args, **options)
        if program.name in self.tabled:
            self.assertIn("table", facts.routes, str(facts))
        return facts


def by_name(program: Program) -> str:
    """A test's name for :func:`torch.testing._internal.common_utils.parametrize`."""
    return "".join(c if c.isalnum() else "_" for c in program.name)
