"""Routes chosen by what replays cost: the rule, who looks when, variants compiled by another process."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
from hypothesis import given
from hypothesis import strategies as st
from test_fast_path import Trees as FakeTrees
from test_launches import FakeAutotuner, autotuners, of_inductor, on_gpu
from test_live_inputs import LiveInputsTestCase, at
from test_patcher import requires_cpp
from torch.testing._internal.common_utils import TestCase, run_tests
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pygraph_trees.indirection import replay_costs, route_choice
from pygraph_trees.indirection.replay_costs import Looks, Middle, Took
from pygraph_trees.indirection.route_choice import (
    AWAITED,
    EVERY,
    EXPECTED,
    ByAddress,
    Seen,
    TableWatch,
    Watch,
    by_address_us,
    by_table_us,
    is_slower,
    lost_us,
    saved_us,
    text_of,
    wants_table,
)
from pygraph_trees.indirection.routes import Route
from pygraph_trees.indirection.table import pointer_table as table
from pygraph_trees.indirection.table import variant_launchers, variant_worker
from pygraph_trees.indirection.table.launch_clock import LaunchClock
from pygraph_trees.indirection.table.pointer_table import Reader
from pygraph_trees.indirection.table.variant_worker import Job, Worker, WriterJob, compile_jobs, job_of
from pygraph_trees.report.log import FunctionLog, RecordingLog
from pygraph_trees.trees import recording

LOOKS = route_choice.LOOKS


def seen(set_nodes: float = 33.0, **more: Any) -> Seen:
    found = dict(set_us=0.9, set_nodes=set_nodes, holders=34, readers=33, waiting=1.0, slots=66)
    return Seen(**(found | more))


class TestRule(TestCase):
    def test_many_nodes_that_are_waited_for(self) -> None:
        self.assertTrue(wants_table(seen()))
        self.assertExpectedInline(
            text_of(seen()).replace(" (", "\n("),
            """\
by address: 29.7 us of a replay against 8.65 us by a table, which is being made
(33 of 34 nodes can read there)""",
        )
        self.assertExpectedInline(
            text_of(seen(), is_used=True),
            """table: 8.65 us of a replay against 29.7 us by address, as expected (33 of 34 nodes can read there)""",
        )

    def test_few_nodes(self) -> None:
        few = seen(5.0, holders=5, readers=5, slots=5)
        self.assertFalse(wants_table(few))
        self.assertExpectedInline(
            text_of(few), """by address: 4.5 us of a replay against 2.96 us by a table (5 of 5 nodes can read there)"""
        )

    def test_inputs_that_hardly_ever_move(self) -> None:
        self.assertFalse(wants_table(seen(33 / 16)))

    def test_a_gpu_that_is_waited_for(self) -> None:
        hidden = seen(waiting=0.25)
        self.assertFalse(wants_table(hidden))
        self.assertExpectedInline(
            text_of(hidden).replace(" (", "\n("),
            """\
by address: 29.7 us of a replay against 8.65 us by a table
(hidden behind the GPU's work in 75% of them)""",
        )

    def test_nodes_that_are_no_kernels_of_triton(self) -> None:
        self.assertFalse(wants_table(seen(readers=0)))
        self.assertFalse(wants_table(seen(readers=5)))

    @given(
        st.floats(0.01, 10),
        st.floats(0, 200),
        st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
        st.floats(0, 1),
    )
    def test_any(self, set_us: float, set_nodes: float, nodes: tuple[int, int], waiting: float) -> None:
        holders, readers = nodes
        found = Seen(set_us, set_nodes, holders, readers, waiting)
        self.assertAlmostEqual(saved_us(found), by_address_us(found) - by_table_us(found))
        if wants_table(found):
            self.assertLess(by_table_us(found), by_address_us(found))
        more = Seen(set_us, set_nodes + 1, holders, readers, waiting)
        if set_nodes >= 1:  # the writer is set already
            self.assertGreaterEqual(saved_us(more) + 1e-9, saved_us(found))
        self.assertEqual(AWAITED in text_of(found), wants_table(found))


BY_ADDRESS = Took(set_us=10.0, share=1.0, gpu=Middle(50.0, 1.0), step=Middle(100.0, 2.0))


class Function:
    """What can be held weakly, and is told what is found."""

    def __init__(self) -> None:
        self.log = FunctionLog("f", None, "inference", 1, {})


def reader(kernel: str, autotuner: Any = None) -> Reader:
    made = FakeAutotuner(kernel) if autotuner is None else autotuner
    return Reader(made, frozenset({"in_ptr0"}), frozenset({("in_ptr0", 0)}))


class FakeClock:
    """Of which launches take what the test says."""

    def __init__(self) -> None:
        self.us: float | None = 50.0
        self.timed = 0
        self._is_timed = False

    def time_next(self) -> None:
        self.timed += 1
        self._is_timed = True

    def took_us(self) -> float | None:
        took, self._is_timed = self.us if self._is_timed else None, False
        return took


class WatchTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.function = Function()
        self.log = self.function.log
        self.replays, self.set_calls, self.idle = 0, 0, True
        self.told: list[str] = []
        self.now, self.step_us = 0.0, 100.0
        self.ready = self.begun = 0
        self.is_over = False
        self.names: Sequence[str | None] = ["kernel"] * 33 + [None]
        for name, value in (
            ("readers_of", lambda function: [reader("kernel"), reader("other")]),
            ("go_on", self.go_on),
            ("begin", self.begin),
            ("is_over", lambda function: self.is_over),
            ("is_begun", lambda function: self.begun > 0),
        ):
            patch = mock.patch.object(route_choice, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.changes: list[bool] = []
        patch = mock.patch.object(FunctionLog, "route_was_found", self.tell)
        patch.start()
        self.addCleanup(patch.stop)
        patch = mock.patch.object(replay_costs, "time", SimpleNamespace(perf_counter=lambda: self.now))
        patch.start()
        self.addCleanup(patch.stop)
        self.steps: list[bool | None] = []
        self.clock = FakeClock()
        self.watch = self.made(Watch)

    def made(self, kind: type[Watch]) -> Watch:
        watch = kind(
            self.function,
            0,
            replays=lambda: self.replays,
            is_idle=lambda: self.idle,
            clock=self.clock,
            sizes="sizes",
        )
        watch.ready = self.is_ready
        return watch

    def tell(self, text: str, *, is_change: bool = True) -> None:
        self.told.append(text)
        self.changes.append(is_change)

    def is_ready(self, why: str) -> None:
        self.ready += 1
        self.reason = why

    def begin(self, function: Any, device: int, why: str, before: Any) -> None:
        self.begun += 1
        self.why, self.before = why, before
        self.assertEqual(before.sizes, "sizes")

    def go_on(self, function: Any) -> bool | None:
        self.assertIs(function, self.function)
        return self.steps.pop(0)

    def replay(self, times: int, nodes: int = 34, us: float = 33.0) -> int:
        """Replays, each of which sets nodes, one of many in Python; how often there was a look."""
        looks = 0
        for _ in range(times):
            self.set_calls += nodes
            if self.replays % EVERY == EVERY - 1 and self.watch.is_due() and nodes:
                looks += 1
                self.watch.look(us, nodes, self.set_calls, lambda: self.names)
            self.replays += 1
            self.now += self.step_us * 1e-6
        return looks


class TestWatch(WatchTestCase):
    def test_a_table_is_found_to_be_faster(self) -> None:
        self.assertEqual(self.replay(EVERY * LOOKS), LOOKS)
        took = self.before.took
        self.assertEqual((took.set_us, took.share, took.gpu), (30.0, 1.0, Middle(50.0, 0.0)))
        self.assertAlmostEqual(took.step.us, 100.0)
        (text,) = self.told
        self.assertRegex(
            text, r"^by address: 30 us of a replay against .* us by a table, which is being made \(33 of 34"
        )
        self.assertRegex(self.why, r"^table: .* us of a replay against 30 us by address")
        self.steps = [None, None, True]
        self.replay(2 * EVERY)
        self.assertEqual(self.ready, 0)
        self.assertEqual(self.replay(100 * EVERY), 1)  # the last step, and it is over
        self.assertEqual((self.ready, self.steps, len(self.told), self.begun), (1, [], 1, 1))

    def test_another_recording_has_begun_it(self) -> None:
        self.begun, self.steps = 1, [None, True]
        self.assertEqual(self.replay(10 * EVERY), 2)
        self.assertEqual((self.ready, self.told), (1, []))

    def test_functions_wait_for_each_other(self) -> None:
        """So that what is behind one is recorded anew once; not for one that is never ready."""
        others: dict[Any, Any] = {0: SimpleNamespace(is_over=False)}
        told = []
        waiting = Watch(self.function, 0, replays=lambda: 0, is_idle=lambda: True, clock=self.clock)
        waiting.ready = lambda why: told.append("other")
        self.begun, self.steps = 1, [True] * 3 * route_choice._PATIENCE
        with (
            mock.patch.object(route_choice, "_building", others),
            mock.patch.object(route_choice, "_waiting", weakref.WeakSet([waiting])),
        ):
            self.replay(3 * EVERY)
            self.assertEqual((self.ready, told), (0, []))
            others[0].is_over = True
            self.assertEqual(self.replay(20 * EVERY), 1)
            self.assertEqual((self.ready, told), (1, ["other"]))
            self.assertFalse(route_choice._waiting)
            others[0].is_over = False
            self.watch._next = 0
            self.replay(2 * route_choice._PATIENCE * EVERY)
        self.assertEqual(self.ready, 2)

    def test_what_another_thread_adds_meanwhile(self) -> None:
        tries = 0

        def found() -> Iterator[int]:
            nonlocal tries
            tries += 1
            yield 1
            if tries < 3:
                raise RuntimeError("dictionary changed size during iteration")
            yield 2

        self.assertEqual((route_choice._all_of(found), tries), ([1, 2], 3))

    def test_where_nothing_could_be_compiled(self) -> None:
        self.replay(EVERY * LOOKS)
        self.steps = [None, False]
        self.assertEqual(self.replay(100 * EVERY), 2)
        self.assertEqual(self.ready, 0)
        self.assertEqual(self.told[1:], ["by address: no kernel could be compiled to read a table"])

    def test_another_recording_was_told(self) -> None:
        self.begun, self.steps, self.is_over = 1, [False], True
        self.assertEqual(self.replay(100 * EVERY), 1)
        self.assertEqual((self.ready, self.told), (0, []))

    def test_looks_become_rare(self) -> None:
        self.idle = False
        self.assertEqual(self.replay(EVERY * LOOKS), LOOKS)
        self.assertTrue(self.told[0].startswith("by address"))
        self.assertEqual(self.replay(EVERY * (LOOKS - 1)), 0)
        self.assertEqual(self.replay(EVERY * LOOKS), LOOKS)
        self.assertEqual(self.replay(EVERY * (4 * LOOKS - 1)), 0)
        self.assertEqual((len(self.told), self.changes), (2, [False, False]))

    def test_a_program_that_changes(self) -> None:
        self.idle = False
        self.replay(EVERY * (LOOKS + 1))
        self.idle, self.steps = True, [True]
        self.replay(EVERY * (2 * LOOKS + 2))
        self.assertEqual((self.ready, len(self.told), self.changes), (1, 2, [False, True]))

    def test_replays_that_set_nothing_count(self) -> None:
        while len(self.told) < 1:
            self.replay(EVERY - 1, nodes=0)
            self.replay(1)
        self.assertIn("by address: 0.234 us of a replay", self.told[0])  # 30 of them in each 128th

    def test_what_python_does_around_the_nodes_is_not_theirs(self) -> None:
        self.names = ["kernel"] * 4
        self.replay(EVERY * LOOKS, nodes=4, us=6.6)
        self.assertIn("by address: 3.6 us of a replay", self.told[0])
        self.assertEqual(self.begun, 0)

    def test_nothing_is_looked_at_for_a_function_that_is_gone(self) -> None:
        del self.function
        self.assertEqual(self.replay(EVERY * (LOOKS + 2)), LOOKS + 2)
        self.assertEqual(self.told, [])

    def test_it_holds_no_function(self) -> None:
        gone = weakref.ref(self.function)
        del self.function
        self.assertIsNone(gone())

    def test_whatever_goes_wrong_there(self) -> None:
        with (
            mock.patch.object(self.watch, "_is_idle", side_effect=RuntimeError("of the test")),
            self.assertLogs("pygraph_trees.indirection", "WARNING") as logs,
        ):
            self.assertEqual(self.replay(EVERY * 10), 1)  # and never again
        self.assertIn("of the test", logs.output[0])


def by_table(gpu_us: float = 50.0, step_us: float = 100.0, **more: Any) -> Took:
    took = {"set_us": 2.0, "share": 1.0, "gpu": Middle(gpu_us, 1.0), "step": Middle(step_us, 2.0)}
    return Took(**(took | more))


class TestJudgement(TestCase):
    """Of 10 us that the host takes by address, a table leaves 2."""

    def test_what_the_gpu_takes_more(self) -> None:
        self.assertFalse(is_slower(by_table(57.9), BY_ADDRESS))
        self.assertFalse(is_slower(by_table(60.9), BY_ADDRESS))  # as little as nobody would begin one for
        self.assertTrue(is_slower(by_table(61.1), BY_ADDRESS))
        self.assertTrue(is_slower(by_table(61.1, step_us=103.0), BY_ADDRESS))

    def test_figures_that_vary(self) -> None:
        self.assertFalse(is_slower(by_table(gpu=Middle(65.0, 10.0)), BY_ADDRESS))
        self.assertTrue(is_slower(by_table(gpu=Middle(75.0, 10.0)), BY_ADDRESS))

    def test_a_program_that_waits_for_the_host_alone(self) -> None:
        """The GPU is idle before each replay, and yet nobody waits for what it takes."""
        self.assertFalse(is_slower(by_table(90.0, step_us=92.0), BY_ADDRESS))
        self.assertTrue(is_slower(by_table(90.0, step_us=97.0), BY_ADDRESS))  # within what they vary
        elsewhere = by_table(90.0, step_us=50.0, share=0.5)  # steps that cannot be compared
        self.assertTrue(is_slower(elsewhere, BY_ADDRESS))

    def test_addresses_that_change_more_often_now(self) -> None:
        seldom = Took(set_us=30.0, share=0.1, gpu=Middle(50.0, 1.0), step=Middle(100.0, 2.0))
        self.assertFalse(is_slower(by_table(70.0), seldom))  # by address they would take 30 by now
        self.assertTrue(is_slower(by_table(60.0, share=0.1), seldom))

    def test_what_nobody_has_measured(self) -> None:
        for one, other in ((by_table(gpu=None), BY_ADDRESS), (by_table(90.0), by_table(gpu=None))):
            self.assertIsNone(lost_us(one, other))
            self.assertFalse(is_slower(one, other))

    @given(*[st.floats(0, 1000) for _ in range(4)], st.floats(0, 1), st.floats(0, 1))
    def test_any(self, host: float, gpu: float, other_host: float, other_gpu: float, one: float, two: float) -> None:
        took = Took(host, one, Middle(gpu, 0.0), Middle(100.0, 0.0))
        before = Took(other_host, two, Middle(other_gpu, 0.0), Middle(100.0, 0.0))
        more = gpu + one * host - other_gpu - one * other_host
        self.assertAlmostEqual(lost_us(took, before) or 0.0, more, places=6)
        if abs(more - route_choice._LEAST_SAVED_US) > 1e-6:
            self.assertEqual(is_slower(took, before), more > route_choice._LEAST_SAVED_US)


class TestTableWatch(WatchTestCase):
    """A table that is there: each replay sets the writer alone."""

    def setUp(self) -> None:
        super().setUp()
        self.building = SimpleNamespace(
            before=ByAddress(BY_ADDRESS, "sizes"), verdict=None, why=self.why_expected(), gpu_lost_us=0.0
        )
        self.left: list[Any] = []
        for name, value in (
            ("_building", weakref.WeakKeyDictionary({self.function: self.building})),
            ("_with_table", weakref.WeakKeyDictionary()),
            ("leave", self.left.append),
        ):
            patch = mock.patch.object(route_choice, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.watch = self.made(TableWatch)

    @staticmethod
    def why_expected() -> str:
        return text_of(seen(), is_used=True)

    def replays_by_table(self, gpu_us: float | None, looks: int = 2 * LOOKS) -> int:
        self.clock.us = gpu_us
        return self.replay(EVERY * looks, nodes=1, us=5.0)  # 3 of these is what Python does

    def test_it_is_faster(self) -> None:
        self.assertEqual(
            self.replays_by_table(52.0), LOOKS + 1
        )  # a launch is timed at a look, and asked for at the next
        self.assertEqual((self.left, self.ready, self.clock.timed), ([], 0, LOOKS + 1))
        (text,) = self.told
        self.assertExpectedInline(
            text.replace(", ", ",\n"),
            """\
table: 2 us of a replay and 52 of the GPU's,
against 10 us of a replay and 50 of the GPU's by address""",
        )
        self.assertEqual(self.building.verdict, text)
        self.watch = self.made(TableWatch)  # of another recording
        self.assertEqual(self.replays_by_table(90.0), 1)
        self.assertEqual((len(self.told), self.ready), (1, 0))

    def test_it_takes_the_gpu_longer_than_it_saves(self) -> None:
        other = self.made(TableWatch)  # of a recording for other sizes, or in another thread
        self.assertEqual(self.replays_by_table(62.0), LOOKS + 1)
        self.assertEqual((self.left, self.ready), ([self.function], 2))
        self.assertFalse(other.is_due())
        self.assertEqual(self.reason, "its inputs are given by address again")
        self.assertExpectedInline(
            self.told[0].replace(", ", ",\n"),
            """\
by address: 10 us of a replay and 50 of the GPU's,
against 2 us of a replay and 62 of the GPU's by a table""",
        )

    def test_the_gpu_no_longer_waits(self) -> None:
        self.assertEqual(self.replays_by_table(57.0), LOOKS + 1)
        self.assertEqual((self.left, self.building.gpu_lost_us), ([], 7.0))
        other = self.made(TableWatch)  # of a recording that is made later
        self.assertEqual(self.replays_by_table(57.0, 10 * LOOKS), 2 * LOOKS)  # it waits still, and pauses become longer
        self.idle = False
        self.replays_by_table(None, 100 * LOOKS)
        self.assertEqual((self.left, self.ready), ([self.function], 2))
        self.assertFalse(self.watch.is_due() or other.is_due())
        self.assertExpectedInline(
            self.told[-1],
            """by address: the GPU's work hides what the host does by now, and a table adds 7 us to it""",
        )
        self.assertEqual((len(self.told), self.building.verdict), (2, self.told[-1]))

    def test_a_gpu_that_takes_about_as_long_with_a_table(self) -> None:
        self.replays_by_table(52.0)
        self.idle = False
        self.assertLessEqual(self.replays_by_table(None, 100 * LOOKS), 1)
        self.assertEqual((self.left, self.ready, len(self.told)), ([], 0, 1))

    def test_what_cannot_be_judged(self) -> None:
        self.idle = False
        self.assertEqual(self.replays_by_table(90.0, 5 * LOOKS), 4 * LOOKS)
        self.assertFalse(self.watch.is_due())
        self.assertEqual((self.left, self.ready, self.clock.timed), ([], 0, 0))
        (text,) = self.told
        self.assertIn(EXPECTED, self.why_expected())
        self.assertRegex(text, r"^table: .* by address \(33 of 34")

    def test_other_sizes(self) -> None:
        self.building.before = ByAddress(BY_ADDRESS, "others")
        self.assertEqual(self.replays_by_table(90.0, 5 * LOOKS), 1)
        self.assertEqual((self.left, self.ready, self.told), ([], 0, []))

    def test_who_asks_in_a_capture(self) -> None:
        with mock.patch.object(self.watch, "_is_idle", return_value=None):
            self.replays_by_table(90.0)
        self.assertEqual((self.told, self.clock.timed), ([], 0))

    def test_it_holds_no_function(self) -> None:
        gone = weakref.ref(self.function)
        del self.function
        self.assertIsNone(gone())


class TestLooks(TestCase):
    def test_figures(self) -> None:
        clock, now = FakeClock(), [0.0]
        looks = Looks(clock)
        with mock.patch.object(replay_costs, "time", SimpleNamespace(perf_counter=lambda: now[0])):
            for number, (us, count, is_idle) in enumerate([(8.0, 4, True), (2.0, 2, True), (6.0, 6, False)] * 4):
                clock.us = 40.0 + number
                looks.add(us, count, 100 * number, 200 * number, is_idle=is_idle)
                now[0] += 0.01 if number != 5 else 0.5
        self.assertEqual((len(looks), looks.timed), (12, 8))  # each that found it idle has one behind it
        self.assertEqual((looks.node_us(), looks.nodes(), looks.waiting()), (1.0, 2.0, 8 / 12))
        took = looks.took()
        self.assertEqual((took.set_us, took.share), (6.0, 0.5))
        self.assertEqual(took.gpu, Middle.of([41.0, 42.0, 44.0, 45.0, 47.0, 48.0, 50.0, 51.0]))
        self.assertAlmostEqual(took.step.us, 100.0)
        looks.clear()
        self.assertEqual((len(looks), looks.timed), (0, 0))
        looks.add(1.0, 1, 0, 0, is_idle=True)  # what was timed before is of a time long gone
        self.assertEqual(looks.timed, 0)

    def test_too_few_that_were_timed(self) -> None:
        clock = FakeClock()
        looks = Looks(clock)
        for number in range(replay_costs.LEAST_TIMED):
            looks.add(1.0, 1, 100 * number, 100 * number, is_idle=True)
        self.assertIsNone(looks.took().gpu)
        looks.add(1.0, 1, 900, 900, is_idle=True)
        self.assertIsNotNone(looks.took().gpu)


class FakeEvent:
    """Of a stream whose time the test sets."""

    now, is_done = 0.0, True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        assert stream == "of 3"
        self.at = FakeEvent.now

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


class TestLaunchClock(TestCase):
    class Graph:
        launches = 0

        def replay(self) -> None:
            self.launches += 1
            FakeEvent.now += 0.25  # ms

    def setUp(self) -> None:
        super().setUp()
        self.graph, self.is_capturing = self.Graph(), False
        graph = weakref.ref(self.graph)
        self.clock = LaunchClock(graph, 3)
        for name, value in (
            ("Event", FakeEvent),
            ("current_stream", lambda device: f"of {device}"),
            ("is_current_stream_capturing", lambda: self.is_capturing),
        ):
            patch = mock.patch.object(torch.cuda, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def test_one_launch(self) -> None:
        self.assertIsNone(self.clock.took_us())
        self.clock.time_next()
        self.assertIsNone(self.clock.took_us())
        self.graph.replay()
        self.assertEqual(vars(self.graph), {"launches": 1})
        self.graph.replay()
        self.assertEqual((self.graph.launches, self.clock.took_us()), (2, 250.0))
        self.assertIsNone(self.clock.took_us())  # once

    def test_the_gpu_is_at_it(self) -> None:
        self.clock.time_next()
        self.graph.replay()
        with mock.patch.object(FakeEvent, "is_done", new=False):
            self.assertIsNone(self.clock.took_us())
        self.clock.time_next()  # the next one alone counts
        self.assertIsNone(self.clock.took_us())
        self.graph.replay()
        self.assertEqual(self.clock.took_us(), 250.0)

    def test_a_launch_within_the_launch(self) -> None:
        """A finalizer may make one at any time."""
        self.clock.time_next()
        timed = self.graph.replay
        self.graph.replay()
        timed()
        self.assertEqual((self.graph.launches, vars(self.graph)), (2, {"launches": 2}))

    def test_events_that_cannot_be_recorded(self) -> None:
        for failing in (1, 2):
            records = [None] * (failing - 1) + [RuntimeError("of the test"), None]
            self.clock.time_next()
            with mock.patch.object(FakeEvent, "record", side_effect=records):
                self.graph.replay()
            self.assertEqual((self.graph.launches, self.clock.took_us()), (failing, None))

    def test_while_somebody_captures(self) -> None:
        self.is_capturing = True
        self.clock.time_next()
        self.graph.replay()
        self.assertEqual((self.graph.launches, self.clock.took_us()), (1, None))

    def test_a_launch_that_fails(self) -> None:
        self.clock.time_next()
        failing = mock.patch.object(self.Graph, "replay", side_effect=RuntimeError("of the test"))
        with failing, self.assertRaisesRegex(RuntimeError, "of the test"):
            self.graph.replay()
        self.assertEqual((vars(self.graph), self.clock.took_us()), ({}, None))

    def test_it_holds_no_graph(self) -> None:
        self.clock.time_next()
        gone = weakref.ref(self.graph)
        del self.graph
        self.assertIsNone(gone())
        self.clock.time_next()

    def test_one_that_takes_no_attributes(self) -> None:
        graph = mock.Mock(spec_set=["launches"])
        clock = LaunchClock(lambda: graph, 3)
        clock.time_next()
        self.assertIsNone(clock.took_us())


class FakeWorker:
    """Does its work when it is told to."""

    def __init__(self, jobs: Sequence[Job | WriterJob]) -> None:
        self.jobs, self.compiled, self.inside = list(jobs), None, 0

    def done(self) -> set[int] | None:
        return self.compiled

    @contextlib.contextmanager
    def cache(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1


class TestBuilding(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.function, self.started = Function(), list[FakeWorker]()
        self.built = list[Any]()  # kernels and writers
        self.readers = [reader(name) for name in ("a", "b", "c")]
        self.free = True
        self.error: Exception | None = None
        for target, name, value in (
            (route_choice, "readers_of", lambda function: self.readers),
            (route_choice, "job_of", self.job_of),
            (route_choice, "current_target", lambda: "a target"),
            (route_choice, "load_writer", lambda device, width: self.load((device, width))),
            (route_choice.Worker, "start", self.start),
            (torch.cuda, "device", lambda device: contextlib.nullcontext(self.assertEqual(device, 3))),
            (route_choice, "_building", weakref.WeakKeyDictionary()),
            (table, "_taken", weakref.WeakKeyDictionary()),
            (variant_launchers, "build", self.build),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def begin(self) -> None:
        route_choice.begin(self.function, 3, "why", ByAddress(BY_ADDRESS, "sizes"))

    def job_of(self, autotuner: FakeAutotuner, names: frozenset[str]) -> Job | None:
        return None if autotuner.fn.__name__ == "b" else Job("path", autotuner.fn.__name__, None, names)

    def start(self, jobs: Sequence[Job | WriterJob]) -> FakeWorker | None:
        if self.error is not None:
            raise self.error
        if not self.free:
            return None
        self.started.append(FakeWorker(jobs))
        return self.started[-1]

    def load(self, what: Any) -> None:
        self.assertEqual(self.started[-1].inside, 1)  # it is looked for where it was put
        self.assertEqual(table.taken_by_variants(self.function), frozenset())  # all at once, in the end
        self.built.append(what)

    def build(self, autotuner: FakeAutotuner, names: frozenset[str]) -> Any:
        self.load(autotuner.fn.__name__)
        return SimpleNamespace(slots=names)

    def go_on(self) -> bool | None:
        return route_choice.go_on(self.function)

    def test_one_is_loaded_at_a_step(self) -> None:
        self.assertFalse(route_choice.is_begun(self.function))
        self.begin()
        self.assertEqual((route_choice.is_begun(self.function), route_choice.is_over(self.function)), (True, False))
        self.assertEqual([self.go_on(), self.go_on()], [None, None])
        (worker,) = self.started
        *kernels, writer = worker.jobs
        self.assertEqual([job.kernel for job in kernels], ["a", "c"])
        self.assertEqual(writer, WriterJob(8, "a target"))
        worker.compiled = {0, 1, 2}
        self.assertIsNone(self.go_on())
        self.assertEqual(self.built, [])
        self.assertIsNone(self.go_on())
        self.assertEqual(self.built, [(3, 8)])
        self.assertIsNone(self.go_on())
        self.assertIs(self.go_on(), True)
        self.assertEqual(self.built, [(3, 8), "c", "a"])
        self.assertEqual(
            (table.taken_by_variants(self.function), route_choice.why_by_table(self.function)), ({0}, "why")
        )
        self.begin()
        self.assertIs(self.go_on(), True)  # another recording asks
        self.assertTrue(route_choice.is_over(self.function))
        self.assertEqual((len(self.built), len(self.started)), (3, 1))

    def test_what_was_not_compiled_is_not_loaded(self) -> None:
        self.begin()
        self.go_on()
        self.started[0].compiled = {1}
        self.assertEqual([self.go_on(), self.go_on()], [None, True])
        self.assertEqual(self.built, ["c"])

    def test_nothing_was_compiled(self) -> None:
        self.begin()
        self.go_on()
        self.started[0].compiled = set()
        self.assertIs(self.go_on(), False)

    def test_none_can_be(self) -> None:
        self.readers = self.readers[1:2]
        self.begin()
        self.assertIs(self.go_on(), False)
        self.assertEqual(self.started, [])

    def test_another_function_has_the_worker(self) -> None:
        self.free = False
        self.begin()
        self.assertEqual([self.go_on(), self.go_on()], [None, None])
        self.free = True
        self.assertIsNone(self.go_on())
        self.assertEqual(len(self.started), 1)

    def test_no_process_can_be_made(self) -> None:
        self.error = OSError("of the test")
        self.begin()
        with self.assertLogs("pygraph_trees.indirection", "WARNING") as logs:
            self.assertIs(self.go_on(), False)
        self.assertIn("of the test", logs.output[0])
        self.assertIs(self.go_on(), False)  # and is not tried again
        with route_choice._lock:
            self.assertIsNone(self.go_on())  # another thread is at it

    def test_a_writer_that_cannot_be_loaded(self) -> None:
        self.begin()
        self.go_on()
        self.started[0].compiled = {0, 1, 2}
        self.go_on()
        with (
            mock.patch.object(route_choice, "load_writer", side_effect=RuntimeError("of the test")),
            self.assertLogs("pygraph_trees.indirection", "WARNING"),
        ):
            self.assertIs(self.go_on(), False)
        self.assertTrue(route_choice.is_over(self.function))

    def test_all_writers_that_it_may_need(self) -> None:
        inputs = frozenset(("in_ptr0", index) for index in range(40))
        self.readers = [Reader(FakeAutotuner("a"), frozenset({"in_ptr0"}), inputs)]
        self.begin()
        self.go_on()
        self.assertEqual([job.width for job in self.started[0].jobs[1:]], [8, 32, 128])

    def test_what_is_left_for_good(self) -> None:
        self.test_one_is_loaded_at_a_step()
        route_choice.leave(self.function)
        self.assertEqual(table.taken_by_variants(self.function), frozenset())
        self.assertTrue(route_choice.is_over(self.function))
        other = Function()
        route_choice.leave(other)  # that had none

    def test_a_finalizer_may_begin_one(self) -> None:
        """Nobody waits for a lock: it may be called while this thread holds it."""
        with route_choice._lock:
            self.begin()
        self.assertTrue(route_choice.is_begun(self.function))

    def test_without_a_target_there_is_no_writer(self) -> None:
        with mock.patch.object(route_choice, "current_target", side_effect=RuntimeError("no GPU")):
            self.begin()
            self.go_on()
        self.assertEqual([job.kernel for job in self.started[0].jobs], ["a", "c"])


PRESENCE = """
import contextlib
from pygraph_trees.fake_gpu import absent_gpu
from torch._inductor.runtime import triton_helpers
triton_helpers.set_driver_to_gpu = lambda: None
contextlib.ExitStack().enter_context(absent_gpu())
"""


class TestWorker(TestCase):
    """The process itself; kernels that Inductor generates for a GPU that is not there."""

    def setUp(self) -> None:
        super().setUp()
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    def autotuners(self) -> list[Any]:
        self.stack.enter_context(of_inductor(self.folder))
        found = list(autotuners(self.folder, lambda x, y: (x.sin() + y).sum(-1), on_gpu(64, 64), on_gpu(64, 64)))
        for autotuner in found:
            autotuner.launchers = [SimpleNamespace(config=autotuner.configs[0])]
        return found

    def wait(self, worker: Worker) -> set[int]:
        end = time.monotonic() + 300
        while (done := worker.done()) is None:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        return done

    def test_what_it_compiles_is_found(self) -> None:
        (autotuner,) = self.autotuners()
        job = job_of(autotuner, frozenset({"in_ptr0", "in_ptr1"}))
        assert job is not None
        self.assertEqual(Path(job.path), self.folder / f"{job.kernel}.py")
        # The process has no GPU either.
        Path(job.path).write_text(PRESENCE + Path(job.path).read_text())
        target = GPUTarget("cuda", 90, 32)
        jobs = [Job(job.path, "none of that name", job.config, job.names), job, WriterJob(8, target)]
        (self.folder / "triton").mkdir()  # nothing of the folder that it is begun in is imported
        (self.folder / "triton" / "__init__.py").write_text("raise ImportError")
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)
        worker = Worker.start(jobs)
        os.chdir(before)
        assert worker is not None
        self.assertIsNone(Worker.start([job]))  # one at a time
        self.assertEqual(self.wait(worker), {1, 2})
        # Wherever this process looks by then.
        is_compiled = mock.patch.object(ASTSource, "make_ir", side_effect=AssertionError("it is compiled already"))
        for elsewhere in (None, str(self.folder / "elsewhere")):
            with mock.patch.dict(os.environ):
                os.environ.pop("TRITON_CACHE_DIR")
                if elsewhere is not None:
                    os.environ["TRITON_CACHE_DIR"] = elsewhere
                with is_compiled, worker.cache():
                    _, slots = variant_launchers.compile_variant(autotuner, job.config, job.names)
                    table.compile_writer(8, target)
                self.assertEqual(os.environ.get("TRITON_CACHE_DIR"), elsewhere)
        self.assertEqual(slots, job.names)

    def test_jobs_one_by_one(self) -> None:
        (autotuner,) = self.autotuners()
        job = job_of(autotuner, frozenset({"in_ptr0"}))
        assert job is not None
        gone = Job(str(self.folder / "none.py"), job.kernel, job.config, job.names)
        other = Job(job.path, job.kernel, job.config, frozenset({"xnumel"}))  # which is no pointer
        self.assertEqual(list(compile_jobs([gone, job, other])), [1])

    def test_kernels_that_no_other_process_could_compile(self) -> None:
        for name, value in (("filename", None), ("filename", "none.py"), ("launchers", [])):
            autotuner = FakeAutotuner()
            autotuner.filename = __file__  # type: ignore[attr-defined]
            autotuner.launchers[0].config = None
            self.assertIsNotNone(job_of(autotuner, frozenset()))
            setattr(autotuner, name, value)
            self.assertIsNone(job_of(autotuner, frozenset()), name)
        autotuner = FakeAutotuner()
        autotuner.filename = __file__  # type: ignore[attr-defined]
        autotuner.launchers[0].config = SimpleNamespace(pre_hook=lambda: None)  # cannot be sent
        self.assertIsNone(job_of(autotuner, frozenset()))

    def fake(self, code: str) -> Worker:
        """One that runs this instead."""
        original = variant_worker.subprocess.Popen

        def popen(command: list[str], **more: Any) -> Any:
            return original(["/bin/sh", "-c", code], **more)

        with mock.patch.object(variant_worker.subprocess, "Popen", popen):
            worker = Worker.start([])
        assert worker is not None
        return worker

    def test_a_process_that_fails(self) -> None:
        worker = self.fake("echo 0; echo other; exit 3")
        with self.assertLogs("pygraph_trees.indirection", "WARNING") as logs:
            self.assertEqual(self.wait(worker), {0})
        self.assertIn("ended with 3", logs.output[0])

    def test_a_process_that_hangs(self) -> None:
        worker = self.fake("sleep 1000")
        process = worker._process
        self.assertIsNone(worker.done())
        with (
            mock.patch.object(variant_worker, "_MOST_S", 0.0),
            self.assertLogs("pygraph_trees.indirection", "WARNING"),
        ):
            self.assertEqual(worker.done(), set())
        self.assertIsNotNone(process.poll())

    def test_one_that_nobody_asks_any_longer(self) -> None:
        """Another function's does not wait for it."""
        worker = self.fake("echo 0")
        worker._process.wait()
        other = self.fake("true")
        self.assertEqual((worker.done(), self.wait(other)), ({0}, set()))

    def test_what_it_had_done_by_then(self) -> None:
        worker = self.fake("echo 0; echo 1; sleep 1000")
        time.sleep(0.5)
        with (
            mock.patch.object(variant_worker, "_MOST_S", 0.0),
            self.assertLogs("pygraph_trees.indirection", "WARNING") as logs,
        ):
            self.assertEqual(worker.done(), {0, 1})
        self.assertIn("did not end in time", logs.output[0])

    def test_whatever_is_on_the_path(self) -> None:
        path = ["", self.folder, str(self.folder)]
        with mock.patch.object(sys, "path", path), mock.patch.object(os, "getcwd", side_effect=FileNotFoundError):
            self.assertEqual(self.wait(self.fake('test "$PYTHONPATH" = ' + str(self.folder) + " && echo 7")), {7})

    def test_a_program_that_is_no_python(self) -> None:
        for frozen, executable in ((True, sys.executable), (False, "/usr/bin/editor"), (False, None)):
            with (
                mock.patch.object(sys, "frozen", frozen, create=True),
                mock.patch.object(sys, "executable", executable),
                self.assertRaisesRegex(OSError, "is no Python"),
            ):
                Worker.start([])

    def test_it_ends_with_who_holds_it(self) -> None:
        worker = self.fake("sleep 1000")
        process = worker._process
        del worker
        self.assertEqual(process.returncode, -9)
        self.wait(self.fake("true"))  # there can be another one

    def test_no_process_can_be_made(self) -> None:
        for _ in range(2):
            with (
                mock.patch.object(variant_worker.subprocess, "Popen", side_effect=OSError("of the test")),
                self.assertRaises(OSError),
            ):
                Worker.start([])
        self.wait(self.fake("true"))


class TestLiveInputs(LiveInputsTestCase):
    """Who looks at replays, with kernels set in Python."""

    def watched(self, kernels: int = 3) -> tuple[Any, Any, list[Any], list[Any], Any]:
        sets = [[at(0), at(0)] for _ in range(2)]
        live, reasons = self.choose(*sets[0])
        self.assertEqual(reasons, {})
        graph = self.capture(lambda found: [self.api.make_kernel([*found, n]) for n in range(kernels)], live)
        looks: list[Any] = []

        def look(us: float, count: int, set_calls: int, holders: Any) -> None:
            self.assertEqual(live._seen, [t.data_ptr() for t in self.given])
            self.assertGreater(us, 0)
            looks.append((count, set_calls, holders()))

        watch = SimpleNamespace(due=True, look=look)
        watch.is_due = lambda: watch.due
        live.watch = watch
        self.given = sets[0]
        live.set_up(graph)
        live.finish()
        return live, graph, sets, looks, watch

    def replay(self, live: Any, graph: Any, inputs: Any) -> None:
        self.given = inputs
        launched = self.call(live, graph, *inputs)
        self.assertEqual(launched[0][:2], [t.data_ptr() for t in inputs])

    def test_looks_where_nodes_are_set(self) -> None:
        live, graph, sets, looks, watch = self.watched()
        looks.clear()
        watch.due = False
        for inputs in (*sets, *sets):
            self.replay(live, graph, inputs)
        self.assertEqual(looks, [])
        watch.due = True
        before = live._patches.set_calls
        for _ in range(2 * EVERY):
            self.replay(live, graph, sets[0])
            self.replay(live, graph, sets[1])
        self.assertEqual(live._patches.set_calls - before, 4 * EVERY * 3)
        self.assertEqual(len(looks), 4 * EVERY)
        count, set_calls, holders = looks[-1]
        self.assertEqual((count, len(holders)), (3, 3))
        self.assertLessEqual(set_calls, live._patches.set_calls)
        # Not where nothing changes.
        looks.clear()
        for _ in range(2 * EVERY):
            self.replay(live, graph, sets[1])
        self.assertEqual(looks, [])


@requires_cpp
class TestLiveInputsNative(TestLiveInputs):
    """The same with kernels set in C++, which leaves one call of many to Python."""

    native = True

    def test_the_whole_way(self) -> None:
        """A fast replay in C++ asks the recording, which asks who looks; addresses are those of two sets."""
        live, graph, sets, looks, watch = self.watched()
        replays = SimpleNamespace(count=0, next=EVERY // 2)
        watch.is_due = lambda: replays.count >= replays.next
        look = watch.look

        def looked(*given: Any) -> None:
            look(*given)
            replays.next = replays.count + EVERY // 2

        watch.look = looked
        for inputs in (*sets, *sets):
            self.replay(live, graph, inputs)
        looks.clear()
        trees = FakeTrees({}, [torch.zeros(1)], live=live)
        entry = trees.entry(order=())
        for number in range(20 * EVERY):
            self.given = sets[number % 2]
            self.assertEqual(len(entry(list(self.given))), 1)
            self.assertEqual(graph.launch()[0][:2], [t.data_ptr() for t in self.given])
            replays.count += 1
        self.assertEqual(len(looks), 20)
        self.assertEqual({count for count, _, _ in looks}, {3})
        self.assertEqual(trees.handed, [])

    def test_nobody_is_asked_without_a_watch(self) -> None:
        sets = [[at(0), at(0)] for _ in range(2)]
        live, graph = self.record(self.one_kernel(7), *sets[0])
        live.finish()
        for inputs in (*sets, *sets):
            self.call(live, graph, *inputs)
        with mock.patch.object(live, "_hold", side_effect=AssertionError("C++ does it")):
            for _ in range(2 * EVERY):
                self.call(live, graph, *sets[0])
                self.call(live, graph, *sets[1])


class TestRecording(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.model: Any = Function()
        self.key = object(), frozenset({"in_ptr0"})
        self.enter(mock.patch.object(route_choice, "_building", weakref.WeakKeyDictionary()))
        self.enter(mock.patch.object(table, "_taken", weakref.WeakKeyDictionary()))
        self.enter(mock.patch.dict(table._readers, {self.model: {self.key: reader("kernel")}}))

    def enter(self, manager: Any) -> None:
        manager.__enter__()
        self.addCleanup(manager.__exit__, None, None, None)

    def building(self, **state: Any) -> Any:
        route_choice.begin(self.model, 0, "table: why", ByAddress(BY_ADDRESS, "sizes"))
        building = route_choice._building[self.model]
        vars(building).update(state)
        return building

    def watch(self, log: RecordingLog, *, has_table: bool = False) -> Watch | None:
        return recording._watch(self.model, "sizes", log, 0, FakeClock(), has_table=has_table)

    def test_which_recordings_are_watched(self) -> None:
        log = RecordingLog()
        self.assertIsNotNone(self.watch(log))
        with mock.patch.dict(table._readers, {self.model: {}}):  # no kernel could
            self.assertIsNone(self.watch(log))
        building = self.building()
        self.assertIsNotNone(self.watch(log))  # it goes on with what is begun
        building.give_up()
        self.assertIsNone(self.watch(log))
        self.assertIs(type(self.watch(log, has_table=True)), TableWatch)

    def test_what_it_asks(self) -> None:
        stream, log = SimpleNamespace(), RecordingLog()
        cases = (True, False, AWAITED), (False, False, "hidden"), (True, True, None)
        for is_idle, is_capturing, text in cases:
            stream.query = lambda is_idle=is_idle: is_idle
            route_choice._building.clear()
            with (
                mock.patch.object(torch.cuda, "current_stream", lambda device: stream),
                mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: is_capturing),  # noqa: B023
            ):
                log.replays, set_calls, self.model.log.route = 0, 0, None
                watch = self.watch(log)
                assert watch is not None
                while self.model.log.route is None and log.replays < LOOKS * EVERY:
                    log.replays += 1
                    set_calls += 50
                    if log.replays % EVERY == 0:
                        self.assertTrue(watch.is_due())
                        watch.look(50.0, 50, set_calls, lambda: ["kernel"] * 50)
                if text is None:  # who captures may not be asked
                    self.assertIsNone(self.model.log.route)
                else:
                    self.assertIn(text, self.model.log.route)
                self.assertEqual(log.replays, LOOKS * EVERY)

    def test_what_is_told_of_one_with_a_table(self) -> None:
        live = SimpleNamespace(decisions={0: SimpleNamespace(route=Route.PATCH)})
        building = self.building(_left=None)
        for left, taken, route, told in (
            (None, {0}, Route.TABLE, None),  # not yet
            ([], set(), Route.PATCH, None),
            ([], {0}, Route.TABLE, "table: why"),
            ([], {0}, Route.PATCH, "by address: there is no table, whose kernels are made"),
        ):
            building._left, self.model.log.route, live.decisions[0].route = left, None, route
            table._taken[self.model] = taken
            for inputs in (None, live):
                recording._tell_route(self.model, inputs)
            self.assertEqual(self.model.log.route, told)
        live.decisions[0].route, building.verdict, live.watch = Route.TABLE, "table: as measured", self
        recording._tell_route(self.model, cast("Any", live))
        self.assertEqual((self.model.log.route, live.watch), ("table: as measured", self))
        live.decisions[0].route = Route.PATCH
        recording._tell_route(self.model, cast("Any", live))
        self.assertIsNone(live.watch)  # there is nothing to judge
        recording._tell_route(cast("Any", Function()), cast("Any", live))


if __name__ == "__main__":
    run_tests()
