"""Runs a program under upstream's trees and under ours, and checks that it cannot tell them apart.

A *program* takes a :class:`Context`: it compiles functions, calls them and notes facts. It runs in eager (the oracle
for some notes), without the patches, and with the patches but all features off. The transcripts of the two compiled
runs must be equal. If they differ, upstream runs again, since a process's first run sets up state. An unannounced
exception fails the test. With inputs by address, only the facts that a program's user sees must be equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import os
import sys
import threading
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Tests count recordings and replays, which must not depend on measurements; test_selection*.py set the flag themselves.
os.environ.setdefault("PYGRAPH_SELECTIVE", "always")

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase
from transcript import (
    ErrorNote,
    LogLines,
    Note,
    Transcript,
    comparable_counters,
    comparable_warnings,
    differences,
    note_of,
    oracle_differences,
)
from tree_facts import TreeFacts, class_problems, device_manager, tree_facts

EAGER, UPSTREAM, OURS = "eager", "upstream", "ours"

requires_cuda = unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device: these tests capture CUDA graphs")
requires_two_gpus = unittest.skipUnless(torch.cuda.device_count() > 1, "needs two CUDA devices")
FLAGS_OFF = {
    "triton.pygraph_placement": "off",
    "triton.pygraph_indirection": "off",
    "triton.pygraph_selective": "always",
    "triton.pygraph_outputs": "upstream",
}
# Ours gives inputs by address. Placement must not change a bit, and replays take the fast path.
FLAGS_BY_ADDRESS = {"triton.pygraph_placement": "exact", "triton.pygraph_outputs": "upstream"}

# Both runs compile everything in this process. A kernel has one configuration, because a benchmark in the first
# run only would leave its buffers in the pool and could choose differently.
BOTH_SIDES = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "compile_threads": 1,
    "deterministic": True,
    "triton.autotune_pointwise": False,
}


Program = Callable[["Context"], None]
T = TypeVar("T")

# One recording for a whole compiled function; by default upstream records each partition.
WHOLE_GRAPH = {"graph_partition": False}


class ParityError(AssertionError):
    """The program's findings under our trees differ from those under upstream's."""


@dataclasses.dataclass
class Context:
    """The part of the harness that a program uses."""

    side: str
    device: str
    transcript: Transcript
    flags: Mapping[str, str]  # of our run
    graphs: bool = True  # whether this machine can capture CUDA graphs
    backend: str | None = None  # for compiled functions instead of inductor's
    _kept: list[Any] = dataclasses.field(default_factory=list)
    _patches: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _installed: bool = False
    _mixed: bool = False  # the program installs or uninstalls while it runs

    @property
    def compiled(self) -> bool:
        return self.side != EAGER

    def compile(self, function: Any = None, *, keep: bool = True, **options: Any) -> Any:
        """``torch.compile`` with graphs, or the function itself in the eager run; also a decorator.

        Compiled functions live until the recordings are read at the end, unless ``keep`` is false.
        """
        if function is None:
            return functools.partial(self.compile, keep=keep, **options)
        if not self.compiled:
            return function
        if self.backend is not None:
            options = {"backend": self.backend, **{k: v for k, v in options.items() if k in ("dynamic", "fullgraph")}}
        elif "backend" not in options and "options" not in options:
            options.setdefault("mode", "reduce-overhead")
        result = torch.compile(function, **options)
        if keep:
            self._kept += [function, result]
        return result

    def call(self, function: Any, *shapes: tuple[int, ...], count: int = 4) -> None:
        """Calls ``function`` with new random tensors, by default one of shape (4, 8), and notes what it returns."""
        for _ in range(count):
            self.record(function(*(torch.randn(shape, device=self.device) for shape in shapes or [(4, 8)])))

    def train(self, function: Any, *modules: torch.nn.Module, count: int = 4) -> None:
        """Takes steps with new inputs of shape (4, 8); notes the gradients of each input and of all parameters."""
        for _ in range(count):
            x = torch.randn(4, 8, device=self.device, requires_grad=True)
            function(x).square().sum().backward()
            self.record(x.grad, [parameter.grad for module in modules for parameter in module.parameters()])
            for module in modules:
                module.zero_grad()

    def record(self, *values: Any, label: str | None = None, oracle: bool = True) -> None:
        """Notes tensors (copied at once), errors and plain facts."""
        for value in values:
            notes = self.transcript.notes
            notes.append(Note(label or f"value {len(notes)}", note_of(value), oracle))

    def fact(self, label: str, value: Any) -> None:
        """Notes a fact that must be equal in the compiled runs, but not in eager."""
        self.record(value, label=label, oracle=False)

    def attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the result of ``function``; if it raises, notes the error and returns None."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.fact(f"error {len(self.transcript.notes)}", error)
            _release(error)
            return None

    def raises(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Calls ``function``, which should raise; notes the error, or the absence of one."""
        before = len(self.transcript.notes)
        self.attempt(function, *args, **kwargs)
        if len(self.transcript.notes) == before:
            self.fact(f"no error {before}", None)

    def tree(self, label: str | None = None) -> TreeFacts | None:
        """Notes the recordings of this thread's manager as they are now."""
        if not (self.compiled and self.graphs):
            return None
        manager, container = device_manager(torch.cuda.current_device())
        facts = None if manager is None else tree_facts(manager, container)
        if not self._mixed:
            problems = class_problems(manager, self.side == OURS)
            if problems:
                raise ParityError(f"{self.side}: {'; '.join(problems)}")
        self.transcript.trees[label or f"tree {len(self.transcript.trees)}"] = facts
        return facts

    def counter(self, name: str) -> int:
        """The present value of one of Inductor's counters."""
        return counters["inductor"][name]

    def install(self) -> None:
        """In our run, installs the patches with :attr:`flags`; from then on classes may be mixed."""
        self._mixed = True
        if self.side == OURS:
            self._enter()

    def uninstall(self) -> None:
        """In our run, uninstalls the patches."""
        self._mixed = True
        if self.side == OURS:
            self._leave()

    def _enter(self) -> None:
        import inductor_patches

        inductor_patches.install()
        if not self._installed:
            self._patches.enter_context(torch._inductor.config.patch(dict(self.flags)))
        self._installed = True

    def _leave(self) -> None:
        import inductor_patches

        self._patches.close()
        self._installed = False
        inductor_patches.uninstall()


def _release(error: BaseException) -> None:
    """Drops the frames that an error holds, with the tensors in them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def run_threads(threads: Sequence[threading.Thread], errors: Sequence[BaseException], seconds: float) -> None:
    """Starts threads and waits for them; raises the first of the errors that they note, or if one does not end."""
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"threads are not over after {seconds:.0f} s")


def calls(function: Callable[..., Any], *shapes: tuple[int, ...], count: int = 4, **options: Any) -> Program:
    """A program that compiles ``function`` with ``options`` and calls it as :meth:`Context.call` does."""
    return lambda ctx: ctx.call(ctx.compile(function, **options), *shapes, count=count)


def marked(items: Iterable[T]) -> Iterator[T]:
    """These items; a step begins before each."""
    for item in items:
        torch.compiler.cudagraph_mark_step_begin()
        yield item


def clean() -> None:
    """Resets the process to a state in which nothing is compiled."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        torch.cuda.synchronize()
        reset_cudagraph_trees()
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    counters.clear()
    torch.manual_seed(0)


def _random_state(graphs: bool) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if graphs:
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: hashlib.sha256(state.numpy().tobytes()).hexdigest()[:16] for name, state in states.items()}


def both_sides() -> dict[str, Any]:
    """Those of :data:`BOTH_SIDES` that the installed torch has."""
    return {name: value for name, value in BOTH_SIDES.items() if name in torch._inductor.config._config}


def run_side(
    program: Program,
    side: str,
    *,
    device: str = "cuda",
    graphs: bool = True,
    backend: str | None = None,
    config: Mapping[str, Any] | None = None,
    dynamo_config: Mapping[str, Any] | None = None,
    installed: bool | None = None,
    flags: Mapping[str, str] = FLAGS_OFF,
) -> Transcript:
    """Runs ``program`` once. ``installed`` tells whether our run starts with the patches in (default: yes)."""
    transcript = Transcript(side)
    context = Context(side, device, transcript, flags, graphs, backend)
    start_installed = side == OURS if installed is None else installed and side == OURS
    if graphs:
        import inductor_patches

        inductor_patches.uninstall()
    clean()
    collecting = gc.isenabled()
    with contextlib.ExitStack() as stack:
        if graphs:
            stack.callback(context._leave)
        stack.callback(clean)
        if graphs:
            if start_installed:
                context._enter()
            if side == UPSTREAM:
                stack.enter_context(_random_numbers_in_order())
        stack.enter_context(torch._inductor.config.patch({**both_sides(), **(config or {})}))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(torch._dynamo.config.patch(dict(dynamo_config or {})))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        log = stack.enter_context(LogLines())
        # A collection during a run would end lifetimes at a moment that depends on the amount of allocations.
        if collecting:
            stack.callback(gc.enable)
            gc.disable()
        before = torch.cuda.memory_allocated() if graphs else None
        try:
            program(context)
        except Exception as error:
            transcript.crash = ErrorNote.of(error)
            transcript.traceback = "".join(traceback.format_exception(error))
            _release(error)
        if graphs:
            torch.cuda.synchronize()
            context.tree("end")
            torch._C._cuda_clearCublasWorkspaces()
            transcript.allocated_bytes = torch.cuda.memory_allocated() - before
        transcript.random = _random_state(graphs)
        transcript.counters = comparable_counters(counters)
        transcript.warnings = comparable_warnings(caught)
        transcript.logs = list(log.lines)
        context._kept.clear()
    return transcript


@contextlib.contextmanager
def _random_numbers_in_order() -> Iterator[None]:
    """Lets the first replay of a recording of upstream's wait for the stream of the capture.

    On that stream, torch sets the offset of the graph's random numbers to 0 before the capture. The replay sets it on
    the current stream, and a busy GPU may do this first: the replay then draws the numbers of the program's first call.
    """
    node = cudagraph_trees.CUDAGraphNode
    upstream = node._record

    @functools.wraps(upstream)
    def _record(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = upstream(self, *args, **kwargs)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return outputs

    with mock.patch.object(node, "_record", _record):
        yield


@functools.cache
def prime() -> None:
    """Lets torch set up, once per process, the state of its first compilation."""

    def program(ctx: Context) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Softmax(dim=-1)).to(ctx.device)
        compiled = ctx.compile(model)
        for _ in range(3):
            model.zero_grad(set_to_none=True)  # gradients are in the pool: accumulating would read overwritten memory
            compiled(torch.randn(8, 32, device=ctx.device)).sum().backward()
            with torch.no_grad():
                compiled(torch.randn(8, 32, device=ctx.device))

    transcript = run_side(program, UPSTREAM)
    if transcript.crash is not None:
        raise RuntimeError(f"torch.compile does not work here:\n{transcript.traceback}")
    # Each run collects garbage twice; the objects that torch has loaded so far need not be walked each time.
    gc.freeze()


def compare_sides(
    program: Program, *, oracle: bool = True, tolerance: Mapping[str, float] | None = None, **options: Any
) -> Transcript:
    """Our findings, which are upstream's and agree with eager's; raises :class:`ParityError` with every difference."""
    upstream = run_side(program, UPSTREAM, **options)
    if upstream.crash is not None:
        raise ParityError(f"the program does not run under upstream:\n{upstream.traceback}")
    ours = run_side(program, OURS, **options)
    if ours.crash is not None:
        raise ParityError(f"the program runs under upstream, not under ours:\n{ours.traceback}")
    found = differences(upstream, ours)
    if found:
        upstream = run_side(program, UPSTREAM, **options)
        found = differences(upstream, ours)
    if oracle:
        eager = run_side(program, EAGER, **options)
        if eager.crash is not None:
            raise ParityError(f"the program does not run in eager:\n{eager.traceback}")
        found += oracle_differences(eager, ours, **(tolerance or {}))
    if found:
        more = f"\nand {len(found) - 25} more" if len(found) > 25 else ""
        raise ParityError(f"{len(found)} differences\n" + "\n".join(found[:25]) + more)
    return ours


def compare_by_address(program: Program, seen: Transcript, **options: Any) -> None:
    """Runs ``program`` with inputs by address; raises :class:`ParityError` unless its user sees what ``seen`` has.

    Recordings, memory, counters and warnings may differ; values, errors and the state of random generators may not.
    """
    ours = run_side(program, OURS, flags=FLAGS_BY_ADDRESS, **options)
    if ours.crash is not None:
        raise ParityError(f"the program raises with inputs by address:\n{ours.traceback}")
    found = differences(_seen(seen), _seen(ours))
    if found:
        raise ParityError("with inputs by address:\n" + "\n".join(found[:25]))


def _seen(transcript: Transcript) -> Transcript:
    """The facts that a program's user sees."""
    notes = [dataclasses.replace(note, label=note.label.split()[0]) for note in transcript.notes if _is_seen(note)]
    return Transcript(transcript.side, notes=notes, random=transcript.random)


def _is_seen(note: Note) -> bool:
    return note.oracle or isinstance(note.value, ErrorNote) or note.label.startswith("no error ")


@requires_cuda
class ParityTestCase(TestCase):
    """Base of the tests of graph trees."""

    # Programs use the same few shapes; a long message shows where the runs differ.
    maxDiff = None
    by_address = False  # whether programs also run with inputs by address

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        prime()

    def parity(self, program: Program, *, by_address: bool | None = None, **options: Any) -> Transcript:
        """Runs ``program`` under upstream and ours, with eager as the oracle, and fails on any difference."""
        found = compare_sides(program, **options)
        if self.by_address if by_address is None else by_address:
            own = {name: value for name, value in options.items() if name not in ("oracle", "tolerance")}
            compare_by_address(program, found, **own)
        return found

    def assertError(self, error: ErrorNote | None, kind: str, pattern: str) -> None:
        """``error`` is of the class named ``kind`` and ``pattern`` is found in its message."""
        self.assertIsNotNone(error, "no error was raised")
        assert error is not None
        self.assertEqual(error.type.rpartition(".")[2], kind)
        self.assertRegex(error.message, pattern)

    def assertOverwritten(self, error: ErrorNote | None) -> None:
        # Since torch 2.15, the message tells gradients from other outputs.
        self.assertError(error, "RuntimeError", "accessing (gradient )?tensor output of CUDAGraphs .* overwritten")


def first_is(kind: str, text: str) -> Callable[[list[ErrorNote]], bool]:
    """The condition that the first error is of the class named ``kind``, with this text in its message."""
    return lambda errors: errors[0].type.rpartition(".")[2] == kind and text in errors[0].message


def in_parity(
    *, skips: int | None = None, least_recordings: int = 0, overwritten: bool = False, **more: Any
) -> Callable[[Program], Callable[[ParityTestCase], None]]:
    """Makes a test of a program: it runs in parity, and what was found or its tree has these values by attribute, or
    meets these conditions.

    ``overwritten``: the first error is that an output was overwritten. Other arguments are those of ``parity``.
    """
    options = {
        name: more.pop(name)
        for name in ("config", "dynamo_config", "oracle", "installed", "by_address")
        if name in more
    }

    def decorate(program: Program) -> Callable[[ParityTestCase], None]:
        def test(self: ParityTestCase) -> None:
            found = self.parity(program, **options)
            if skips is not None:
                self.assertEqual(found.counter("cudagraph_skips"), skips)
            if overwritten:
                self.assertOverwritten(found.errors[0])
            if least_recordings:
                self.assertGreaterEqual(found.tree.recordings, least_recordings)
            for name, wanted in more.items():
                has = getattr(found if hasattr(found, name) else found.tree, name)
                self.assertTrue(wanted(has) if callable(wanted) else has == wanted, f"{name} is {has}, not {wanted}")

        test.__name__, test.__qualname__, test.__doc__ = program.__name__, program.__qualname__, program.__doc__
        return test

    return decorate
