"""Routes chosen by the rule: a function's inputs are patched until its table is ready, and results are always right."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from indirection import Facts, IndirectionTestCase, Program, Ways, assert_same_bits, compiled, run, tensor
from torch.testing._internal.common_utils import run_tests

import pygraph_trees
from pygraph_trees.indirection import addresses
from pygraph_trees.indirection.route_rule import LEAST_KERNELS, RouteChooser
from pygraph_trees.indirection.table import launches
from pygraph_trees.indirection.table.builds import Job, Worker, compile_jobs

START = Worker.start  # of a process
INPUTS = 8
REPLAYS = 8  # that are counted before a choice, and from one step of a build to the next
CALLS = 3 * REPLAYS  # calls within which a route is chosen
PROCESS_S = 300.0  # for a process of low priority on a busy machine


def wide(*inputs: torch.Tensor) -> torch.Tensor:
    """Kernels that read all inputs, as many as a table needs and two more, with matmuls of results between them."""
    total = inputs[0]
    for _ in range(LEAST_KERNELS + 2):
        total = sum(inputs, (total @ total).softmax(1))
    return total


class Here:
    """A worker that compiles in this process, at once."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def done(self) -> set[int]:
        return set(compile_jobs(self._jobs))

    def cache(self) -> AbstractContextManager[None]:
        return nullcontext()


class TestRouteChoice(IndirectionTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.steps = 0  # of all choosers
        go_on = RouteChooser.go_on

        def counted(chooser: RouteChooser, *given: Any) -> bool:
            self.steps += 1
            return go_on(chooser, *given)

        for module, name, value in (
            (addresses, "REPLAYS", REPLAYS),
            (addresses, "LEAST_CHANGES", REPLAYS // 4),
            (RouteChooser, "go_on", counted),
            (launches, "_built", weakref.WeakKeyDictionary()),  # kernels live on from test to test
            (Worker, "start", Here),
        ):
            patch = mock.patch.object(module, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def fresh(self, *shape: int, number: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(number)
        return torch.randn(*shape, device=self.device, generator=generator) / 8

    def call(self, ways: Ways, number: int, count: int = INPUTS, size: int = 64) -> None:
        """Waits for the GPU, then makes a call with inputs at new addresses."""
        given = [self.fresh(size, size, number=number * count + i) for i in range(count)]
        self.held = [*getattr(self, "held", []), given][-4:]  # so that addresses change
        wanted = ways.plain(*given)
        torch.compiler.cudagraph_mark_step_begin()
        torch.cuda.synchronize()
        found = ways.graphed(*given)
        assert_same_bits(found, wanted, f"call {number}: ")

    def until(self, done: Callable[[], bool], call: Callable[[int], None], *, at_most_s: float = 60.0) -> int:
        """Makes calls until a condition holds; returns their number."""
        end, number = time.monotonic() + at_most_s, 0
        while not done():
            self.assertLess(time.monotonic(), end, str(pygraph_trees.report()))
            call(number)
            number += 1
        return number

    def found(self) -> list[str | None]:
        return [function.route for function in pygraph_trees.report().functions]

    def newest_routes(self) -> list[str | None]:
        """The routes of the live inputs of each function's newest recording."""
        functions = pygraph_trees.report().functions
        newest = [function.recordings[-1] for function in functions if function.recordings]
        return [i.route for recording in newest for i in recording.inputs if i.kind == "live"]

    def is_by_table(self) -> bool:
        return "table" in self.newest_routes()

    def test_many_kernels_that_read_fresh_inputs_get_a_table(self) -> None:
        ways = compiled(wide)
        with mock.patch.object(Worker, "start", START):
            made = self.until(self.is_by_table, lambda number: self.call(ways, number), at_most_s=PROCESS_S)
        steps = self.steps
        for number in range(made, made + 2 * CALLS):
            self.call(ways, number)
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.warmups, facts.ungraphed_calls), (2, 1, 0), str(facts))
        self.assertEqual((facts.copied_bytes, facts.replays), (0, made + 2 * CALLS - 3), str(facts))
        self.assertEqual(facts.reasons, ("its inputs are read from a table from now on",))
        (text,) = self.found()
        self.assertRegex(str(text), rf"^by table: \d+ kernels read {INPUTS} inputs whose addresses change$")
        self.assertEqual(self.steps, steps)  # no more steps follow
        run(Program("after it", wide, (tensor(64, 64),) * INPUTS), ways, self.device)

    def test_each_size_is_chosen_for(self) -> None:
        ways = compiled(wide, dynamic=True)

        def call(number: int) -> None:
            self.call(ways, number, size=(64, 96)[number % 2])

        def have_both_a_table() -> bool:
            recordings = [made for function in pygraph_trees.report().functions for made in function.recordings]
            return sum(any(i.route == "table" for i in made.inputs) for made in recordings) == 2

        made = self.until(have_both_a_table, call)
        for number in range(made, made + 2 * CALLS):
            call(number)
        facts = Facts.now()
        self.assertEqual((facts.copied_bytes, facts.ungraphed_calls), (0, 0), str(facts))
        self.assertTrue(all(str(text).startswith("by table: ") for text in self.found()), self.found())
        self.assertEqual(set(self.newest_routes()), {"table"})

    def test_inputs_are_patched_if_no_process_can_be_started(self) -> None:
        ways = compiled(wide)
        with mock.patch.object(Worker, "start", side_effect=OSError("of the test")):
            for number in range(2 * CALLS):
                self.call(ways, number)
        self.assertEqual(self.found(), ["by address: no kernel could be compiled to read a table"])
        self.assertEqual(Facts.now().recordings, 1)

    def test_a_table_that_cannot_be_recorded(self) -> None:
        """If a recording with a table fails, that call and all later ones are patched."""
        ways, failures, variant_of = compiled(wide), [], launches.variant_of

        def launch(*given: Any, **named: Any) -> Any:
            failures.append(given)
            torch.empty(-1)  # a statement that raises would be the program's

        def failing(launcher: Any, names: Any) -> Any:
            variant = variant_of(launcher, names)
            return None if variant is None else replace(variant, run=launch)

        with mock.patch.object(launches, "variant_of", failing):
            self.until(lambda: bool(failures), lambda number: self.call(ways, number))
            for number in range(2 * CALLS):
                self.call(ways, number)
        facts = Facts.now()
        self.assertEqual((len(failures), facts.recordings, facts.copied_bytes), (1, 2, 0), str(facts))
        (found,) = self.found()
        self.assertRegex(found, "by address: recording it with a table failed: .*negative dimension")

    def test_training(self) -> None:
        ways = compiled(wide)

        def step(number: int) -> None:
            given = [self.fresh(64, 64, number=INPUTS * number + i) for i in range(INPUTS)]
            self.held = [*getattr(self, "held", []), given][-4:]
            torch.compiler.cudagraph_mark_step_begin()
            gradients = []
            for way in (ways.plain, ways.graphed):
                leaves = [x.clone().requires_grad_() for x in given]
                self.held.append(leaves)
                torch.cuda.synchronize()
                way(*leaves).square().sum().backward()
                gradients.append([leaf.grad for leaf in leaves])
            assert_same_bits(gradients[1], gradients[0], f"step {number}: ")

        made = self.until(self.is_by_table, step)
        for number in range(made, made + 3 * CALLS):
            step(number)
        self.assertEqual((Facts.now().copied_bytes, Facts.now().ungraphed_calls), (0, 0))

    def test_functions_after_each_other(self) -> None:
        """A function after the one that gets a table is recorded again too.

        It takes an output of the first function and stays patched: if its recording with a table failed, it could not
        be recorded in another way at the same call.
        """

        first, second = compiled(wide), compiled(lambda y, *inputs: wide(*inputs) + y)

        def graphed(*inputs: torch.Tensor) -> torch.Tensor:
            y = first.graphed(*inputs)
            result: torch.Tensor = second.graphed(y, *inputs)
            return result

        ways = Ways(lambda *inputs: second.plain(first.plain(*inputs), *inputs), graphed)
        made = self.until(self.is_by_table, lambda number: self.call(ways, number))
        for number in range(made, made + 20):
            self.call(ways, number)
        facts = Facts.now()
        self.assertEqual((facts.functions, facts.copied_bytes, facts.ungraphed_calls), (2, 0, 0), str(facts))
        routes = ["table"] * INPUTS + ["patch"] * INPUTS
        self.assertEqual((facts.recordings, self.newest_routes()), (4, routes), str(facts))

    def test_memory_is_that_of_one_recording(self) -> None:
        ways = compiled(wide)
        self.call(ways, 0, size=1024)
        for number in range(1, 8):
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
