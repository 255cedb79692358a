"""Routes chosen by what replays cost: a function goes on as it was until its table is ready, and is right all the time.

Looks are taken at more replays here than they are elsewhere, so that the choice is made within some hundred calls.
"""

from __future__ import annotations

import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from indirection import Facts, IndirectionTestCase, Program, Ways, assert_same_bits, compiled, run, tensor
from test_indirection_table import thirty
from torch.testing._internal.common_utils import run_tests

import pygraph_trees
from pygraph_trees.indirection import inputs as live_inputs
from pygraph_trees.indirection import replay_costs, route_choice
from pygraph_trees.indirection.route_choice import Watch
from pygraph_trees.indirection.table import variant_launchers
from pygraph_trees.indirection.table.launch_clock import LaunchClock
from pygraph_trees.indirection.table.variant_launchers import VariantLauncher
from pygraph_trees.indirection.table.variant_worker import Worker, compile_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraph_trees.indirection.table.variant_worker import Job

START = Worker.start  # of a process
OFTEN = 4  # replays between two looks
NODE_US = 0.5  # that it takes to set a node, where nothing else runs on the machine
PROCESS_S = 300.0  # that a process may take which begins at a low priority, on a machine that is busy


class Here:
    """What compiles, in this process and at once."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def done(self) -> set[int]:
        return set(compile_jobs(self._jobs))

    def cache(self) -> AbstractContextManager[None]:
        return nullcontext()


CALLS = OFTEN * (route_choice.LOOKS + 3)  # within which it is chosen


class TestRouteChoice(IndirectionTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.by_table_us = 100.0  # of the GPU, where it is 100 by address
        self.timed = list[float]()
        took_us = LaunchClock.took_us

        def as_told(clock: LaunchClock) -> float | None:
            took = took_us(clock)
            if took is None:
                return None
            self.timed.append(took)
            return self.by_table_us if self.is_by_table() else 100.0

        look = Watch.look

        def looked(watch: Watch, us: float, count: int, *more: Any) -> None:
            self.assertGreater(us, 0)
            look(watch, NODE_US * count, count, *more)  # on a busy machine one node may take longer than thirty

        for module, name, value in (
            (route_choice, "EVERY", OFTEN),
            (Watch, "look", looked),
            (live_inputs, "EVERY", OFTEN),
            (LaunchClock, "took_us", as_told),
            (replay_costs, "time", SimpleNamespace(perf_counter=lambda: 0.0)),  # steps are as long as ever
            (variant_launchers, "_built", weakref.WeakKeyDictionary()),  # kernels live on from test to test
            (Worker, "start", Here),
        ):
            patch = mock.patch.object(module, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def fresh(self, *shape: int, number: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(number)
        return torch.randn(*shape, device=self.device, generator=generator) / 8

    def call(self, ways: Ways, number: int, count: int = 1, size: int = 64) -> None:
        """One that is waited for, with inputs that were not there before."""
        given = [self.fresh(size, size, number=number * count + i) for i in range(count)]
        self.held = [*getattr(self, "held", []), given][-4:]  # so that addresses change
        wanted = ways.plain(*given)
        torch.compiler.cudagraph_mark_step_begin()
        torch.cuda.synchronize()
        found = ways.graphed(*given)
        assert_same_bits(found, wanted, f"call {number}: ")

    def until(self, done: Callable[[], bool], call: Callable[[int], None], *, at_most_s: float = 60.0) -> int:
        """Calls until something is so; how many there were."""
        end, number = time.monotonic() + at_most_s, 0
        while not done():
            self.assertLess(time.monotonic(), end, str(pygraph_trees.report()))
            call(number)
            number += 1
        return number

    def found(self) -> list[str | None]:
        return [function.route for function in pygraph_trees.report().functions]

    def newest_routes(self) -> list[str | None]:
        """Of the live inputs of each function's newest recording."""
        functions = pygraph_trees.report().functions
        newest = [function.recordings[-1] for function in functions if function.recordings]
        return [i.route for recording in newest for i in recording.inputs if i.kind == "live"]

    def is_by_table(self) -> bool:
        return "table" in self.newest_routes()

    def test_many_kernels_of_fresh_inputs(self) -> None:
        ways = compiled(thirty)
        with mock.patch.object(Worker, "start", START):
            made = self.until(self.is_by_table, lambda number: self.call(ways, number), at_most_s=PROCESS_S)
        for number in range(made, made + 2 * CALLS):
            self.call(ways, number)
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.warmups, facts.ungraphed_calls), (2, 1, 0), str(facts))
        self.assertEqual((facts.copied_bytes, facts.replays), (0, made + 2 * CALLS - 3), str(facts))
        self.assertEqual(facts.reasons, ("its inputs are read from a table from now on",))
        (text,) = self.found()
        measured = r"[\d.]+ us of a replay and 100 of the GPU's"
        self.assertRegex(str(text), rf"^table: {measured}, against {measured} by address$")
        self.assertGreaterEqual(len(self.timed), 2 * route_choice.LOOKS - 2)
        for took_us in self.timed:
            self.assertTrue(1 < took_us < 1e5, str(self.timed))
        run(Program("behind it", thirty, (tensor(64, 64),)), ways, self.device)

    def test_a_table_that_takes_the_gpu_longer_than_it_saves(self) -> None:
        """Which nobody knows before it is tried: it is left for good."""
        ways, self.by_table_us = compiled(thirty), 1000.0
        made = self.until(self.is_by_table, lambda number: self.call(ways, number))
        left = made + self.until(lambda: not self.is_by_table(), lambda number: self.call(ways, made + number))
        for number in range(left, left + 3 * CALLS):
            self.call(ways, number)
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.copied_bytes, facts.ungraphed_calls), (3, 0, 0), str(facts))
        self.assertEqual(facts.reasons[1:], ("its inputs are given by address again",))
        (text,) = self.found()
        measured = "us of a replay and {} of the GPU's"
        self.assertRegex(
            str(text),
            rf"^by address: [\d.]+ {measured.format(100)}, against [\d.]+ {measured.format(1000)} by a table$",
        )
        self.assertEqual(self.newest_routes(), ["patch"])

    def test_what_is_left_for_one_size_is_left_for_all(self) -> None:
        ways, self.by_table_us = compiled(thirty, dynamic=True), 1000.0

        def call(number: int) -> None:
            self.call(ways, number, size=(64, 96)[number % 2])

        made = self.until(self.is_by_table, call)
        made += made % 2
        left = made + self.until(lambda: not self.is_by_table(), lambda number: call(made + number))
        for number in range(left, left + 4 * CALLS):
            call(number)
        facts = Facts.now()
        self.assertEqual((facts.copied_bytes, facts.ungraphed_calls), (0, 0), str(facts))
        self.assertEqual(facts.reasons.count("its inputs are given by address again"), 2, str(facts))
        self.assertTrue(all(str(text).startswith("by address: ") for text in self.found()), self.found())
        self.assertEqual(set(self.newest_routes()), {"patch"})

    def test_same_inputs(self) -> None:
        ways = compiled(thirty)
        given = self.fresh(64, 64, number=0)
        for _ in range(2 * CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            torch.cuda.synchronize()
            ways.graphed(given)
        self.assertEqual((self.found(), Facts.now().recordings), ([None], 1))

    def test_few_kernels(self) -> None:
        ways = compiled(lambda x, y: (x + y).softmax(1))
        for number in range(2 * CALLS):
            self.call(ways, number, 2)
        (text,) = self.found()
        self.assertTrue(str(text).startswith("by address: "), text)
        self.assertEqual(Facts.now().recordings, 1)

    def test_a_busy_gpu(self) -> None:
        big = torch.ones(8192, 8192, device=self.device, dtype=torch.bfloat16)

        def loaded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            product = big
            for _ in range(4):
                product = product @ big
            return thirty(x), product

        ways = compiled(loaded)
        given = [self.fresh(64, 64, number=number) for number in range(8)]
        for number in range(3 * CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            ways.graphed(given[number % 8])
        torch.cuda.synchronize()
        (text,) = self.found()
        self.assertIn("hidden behind the GPU's work", str(text))
        self.assertEqual(Facts.now().recordings, 1)

    def test_forced(self) -> None:
        with torch._inductor.config.patch({"triton.pygraph_indirection": "patch"}):
            ways = compiled(thirty)
            for number in range(2 * CALLS):
                self.call(ways, number)
        self.assertEqual((self.found(), Facts.now().recordings), ([None], 1))

    def test_no_other_process_can_be_made(self) -> None:
        ways = compiled(thirty)
        with mock.patch.object(Worker, "start", side_effect=OSError("of the test")):
            for number in range(2 * CALLS):
                self.call(ways, number)
        self.assertEqual(self.found(), ["by address: no kernel could be compiled to read a table"])
        self.assertEqual(Facts.now().recordings, 1)

    def test_a_table_that_cannot_be_recorded(self) -> None:
        """The call is made by address, and so are all later ones."""
        ways, failures = compiled(thirty), []

        def launch(variant: Any, autotuner: Any, *given: Any) -> Any:
            failures.append(autotuner)
            raise RuntimeError("of the test")

        with mock.patch.object(VariantLauncher, "launch", launch):
            self.until(lambda: bool(failures), lambda number: self.call(ways, number))
            for number in range(2 * CALLS):
                self.call(ways, number)
        facts = Facts.now()
        self.assertEqual((len(failures), facts.recordings, facts.copied_bytes), (1, 2, 0), str(facts))
        self.assertEqual(self.found(), ["by address: recording it with a table failed: of the test"])

    def test_training(self) -> None:
        ways = compiled(thirty)

        def step(number: int) -> None:
            x = self.fresh(64, 64, number=number)
            self.held = [*getattr(self, "held", []), x][-4:]
            torch.compiler.cudagraph_mark_step_begin()
            gradients = []
            for way in (ways.plain, ways.graphed):
                leaf = x.clone().requires_grad_()
                self.held.append(leaf)
                torch.cuda.synchronize()
                way(leaf).square().sum().backward()
                gradients.append(leaf.grad)
            assert_same_bits(gradients[1], gradients[0], f"step {number}: ")

        made = self.until(self.is_by_table, step)
        for number in range(made, made + 3 * CALLS):
            step(number)
        self.assertEqual((Facts.now().copied_bytes, Facts.now().ungraphed_calls), (0, 0))

    def test_functions_behind_each_other(self) -> None:
        """What is behind the one that is recorded anew is recorded again as well.

        It takes an output of the first, and stays by address: should a recording with a table fail, it could not be
        made in another way at the same call.
        """

        first, second = compiled(thirty), compiled(lambda x, y: thirty(x) + y)

        def graphed(x: torch.Tensor) -> torch.Tensor:
            y = first.graphed(x)
            torch.cuda.synchronize()  # else what is behind it is hidden behind the first one's work
            result: torch.Tensor = second.graphed(x, y)
            return result

        ways = Ways(lambda x: second.plain(x, first.plain(x)), graphed)
        made = self.until(self.is_by_table, lambda number: self.call(ways, number))
        for number in range(made, made + 20):
            self.call(ways, number)
        facts = Facts.now()
        self.assertEqual((facts.functions, facts.copied_bytes, facts.ungraphed_calls), (2, 0, 0), str(facts))
        self.assertEqual((facts.recordings, self.newest_routes()), (4, ["table", "patch"]), str(facts))

    def test_memory_is_that_of_one_recording(self) -> None:
        ways = compiled(thirty)
        self.call(ways, 0, size=1024)
        for number in range(1, 4):
            self.call(ways, number, size=1024)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        made = self.until(self.is_by_table, lambda number: self.call(ways, number, size=1024))
        for number in range(made, made + 8):
            self.call(ways, number, size=1024)
        torch.cuda.synchronize()
        self.assertLessEqual(torch.cuda.memory_reserved() - before, 4 << 20)


if __name__ == "__main__":
    run_tests()
