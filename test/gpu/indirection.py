"""Runs a program un-graphed and with indirection while its inputs move, and compares all bits after each call.

:func:`run` calls a :class:`Program` both ways under each *regime*: one address, two in turn, a new one each call, and a
new one while other work overwrites the old one. Outputs, strides, aliases, gradients and the memory of all inputs, with
guards, must be equal. :class:`IndirectionTestCase` checks the report's :class:`Facts`: recordings, replays, copied
bytes and reasons.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test"), str(ROOT / "tools")]

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from fuzzing.case import Case, Input
from fuzzing.memory import Memory
from parity import both_sides, clean, requires_cuda
from torch._dynamo.utils import counters
from torch.testing._internal.common_utils import TestCase
from torch.utils import _pytree as pytree

import pygraph_trees
from pygraph_trees.report.records import InputRecord
from pygraph_trees.report.summary import clear
from pygraph_trees.trees.recordings.kept_outputs import why_not_moved

Settle = Callable[[Mapping[str, torch.Tensor]], None]

REGIMES = ("same", "alternate", "fresh", "reused")
KEPT = ("kept", *REGIMES)  # in the first, inputs are written once, so that mutations add up
FLAG = "triton.pygraph_indirection"
VERIFY = "triton.pygraph_verify"
OUTPUTS = "triton.pygraph_outputs"


class Mismatch(AssertionError):
    """The graphed call differs from the un-graphed one in a bit."""


def tensor(*shape: int, dtype: str = "float32", values: str = "unit", layout: str = "contiguous", **more: Any) -> Input:
    """An input of a program; a run sets its name and place. ``shares="1"`` names another input by position."""
    return Input("", shape, dtype, layout, values=values, **more)


@dataclass(frozen=True, slots=True)
class Program:
    """A function of tensors, its inputs, and the expectations for its recordings."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Input, ...]
    copied: int | str | None = 0  # 0 bytes, a pattern of the reason, or None: 0 bytes, or any with a reason
    graphed: bool = True  # False: upstream decides whether and how often it is graphed
    settle: Settle | None = None  # changes the values, by position "0", "1", ..., before each call
    backward: bool = False  # whether gradients of all floating-point inputs are taken
    seeded: bool = False  # whether it draws random numbers

    def case(self, place: str) -> Case:
        """The inputs under a regime; their names, and therefore their values, depend on the regime."""
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
    """Sets the options of both ways at each call, since a compilation leaves torch's ``deterministic`` off."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._inductor.config.patch(both_sides()):
            return callable_(*args, **kwargs)

    return call


@dataclass(frozen=True, slots=True)
class Facts:
    """The report's facts about all functions, and Inductor's count of skipped graphs."""

    functions: int
    recordings: int
    warmups: int
    replays: int
    ungraphed_calls: int
    skips: int
    copied_bytes: int  # by a replay of each recording
    routes: tuple[str | None, ...]  # of the live inputs
    why: tuple[str, ...]  # of each copied input
    reasons: tuple[str, ...]  # of each recording after a function's first one

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
    """Raises :class:`Mismatch` unless both have equal leaves; tensors must be equal bit for bit."""
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
    """One way of calling a program, with its own memory."""

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
        """Makes the next call and returns its results and memory; outputs are the function's own tensors."""
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
        """The input that an output is, or the input whose memory it is in, with the place there."""
        assert self._memory is not None
        same = [name for name, t in given.items() if t is output]
        if same:
            return f"is {same[0]}"
        return self._memory.place_of(output)


def run(program: Program, ways: Ways, device: torch.device, regimes: Sequence[str] = REGIMES, calls: int = 3) -> int:
    """Calls ``program`` both ways under each regime, compares, and returns the number of calls.

    Raises:
        Mismatch: the results of a call differ from those of the un-graphed one.
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
    """Resets the process to a state in which nothing is compiled or reported."""
    clean()
    clear()


@requires_cuda
class IndirectionTestCase(TestCase):
    """Base of the tests of indirection: the flag is on, and each test starts in a clean state."""

    device = torch.device("cuda", 0)
    indirection = "auto"  # the flag
    outputs = "upstream"  # so that outputs are managed inputs of later functions
    verify = "off"  # "on": each recording is replayed again with its inputs elsewhere and the old ones poisoned

    def setUp(self) -> None:
        super().setUp()
        reset()
        self.addCleanup(reset)
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        flags = {FLAG: self.indirection, VERIFY: self.verify, OUTPUTS: self.outputs}
        stack.enter_context(torch._inductor.config.patch({**both_sides(), **flags}))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True))

    def graphed(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """``fn`` compiled for CUDA graphs; ``options`` go to ``torch.compile``."""
        return torch.compile(fn, mode="reduce-overhead", **options)

    def check(self, program: Program, regimes: Sequence[str] = REGIMES, calls: int = 3, **options: Any) -> Facts:
        """Runs ``program`` and asserts what it announces; ``options`` go to ``torch.compile``."""
        made = run(program, compiled(program.fn, **options), self.device, regimes, calls)
        facts = Facts.now()
        if program.graphed:
            # A tensor saved for the backward can be static there; it is found to move, and recorded again.
            self.assertGraphed(facts, made, again=facts.functions if program.backward else 0)
        self.assertCopied(facts, program.copied)
        return facts

    def assertSameCalls(self, ways: Ways, calls: Iterable[Sequence[Any]]) -> Facts:
        """Calls both ways with the arguments of each call, which are not mutated: the bits must be equal."""
        for number, given in enumerate(calls):
            wanted = ways.plain(*given)
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits(ways.graphed(*given), wanted, f"call {number}: ")
        return Facts.now()

    def assertGraphed(self, facts: Facts, calls: int, again: int = 0) -> None:
        """Each function had one warmup, one recording and ``again`` more; all other calls were replays."""
        self.assertGreater(facts.functions, 0, str(facts))
        self.assertEqual((facts.ungraphed_calls, facts.skips), (0, 0), str(facts))
        self.assertEqual(facts.warmups, facts.functions, str(facts))
        self.assertIn(facts.recordings - facts.functions, range(again + 1), str(facts))
        self.assertEqual(facts.replays, facts.functions * calls - facts.warmups - facts.recordings, str(facts))

    def assertCopied(self, facts: Facts, expected: int | str | None) -> None:
        """The live inputs were copied as :attr:`Program.copied` announces."""
        if expected == 0:
            if facts.copied_bytes or facts.why:
                self.fail(f"copied: {facts}")
            return
        if expected is not None:
            self.assertGreater(len(facts.why), 0, str(facts))
            self.assertGreater(facts.copied_bytes, 0, str(facts))
        for reason in facts.why:
            self.assertRegex(reason, expected or r"\w+ \w+")


class KeptTestCase(IndirectionTestCase):
    """Base of tests whose outputs are kept; skipped without the parts in C++."""

    outputs = "keep"

    def setUp(self) -> None:
        if why_not_moved() is not None:
            self.skipTest(f"outputs are not kept: {why_not_moved()}")
        super().setUp()


class ByTable(IndirectionTestCase):
    """Base of tests with a table; in each program that they check, a Triton kernel reads an input from it."""

    indirection = "table"

    def check(self, program: Program, *args: Any, **options: Any) -> Facts:
        facts = super().check(program, *args, **options)
        self.assertIn("table", facts.routes, str(facts))
        return facts


def by_name(program: Program) -> str:
    """A test's name for :func:`torch.testing._internal.common_utils.parametrize`."""
    return "".join(c if c.isalnum() else "_" for c in program.name)


def named(programs: Sequence[Program], *names: str) -> list[Program]:
    """The programs with these names, which must exist."""
    found = {program.name: program for program in programs}
    return [found[name] for name in names]
