"""Routes chosen by what replays cost: the rule, who looks when, variants compiled by another process."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
from hypothesis import given
from hypothesis import strategies as st
from test_launches import FakeAutotuner, autotuners, of_inductor, on_gpu
from test_live_inputs import LiveInputsTestCase, at
from test_patcher import requires_cpp
from torch.testing._internal.common_utils import TestCase, run_tests
from triton.compiler import ASTSource

from pygraph_trees.coverage.log import RecordingLog
from pygraph_trees.indirection import route_choice, table, variant_launchers, variant_worker
from pygraph_trees.indirection.route_choice import (
    EVERY,
    Seen,
    Watch,
    by_address_us,
    by_table_us,
    saved_us,
    text_of,
    wants_table,
)
from pygraph_trees.indirection.table import Reader
from pygraph_trees.indirection.variant_worker import Job, Worker, compile_jobs, job_of
from pygraph_trees.trees import recording

LOOKS = route_choice.LOOKS


def seen(set_nodes: float = 33.0, **more: Any) -> Seen:
    found = dict(set_us=0.9, set_nodes=set_nodes, holders=34, readers=33, waiting=1.0)
    return Seen(**(found | more))


class TestRule(TestCase):
    def test_many_nodes_that_are_waited_for(self) -> None:
        self.assertTrue(wants_table(seen()))
        self.assertExpectedInline(
            text_of(seen()), """table: 13.1 us of a replay against 29.7 us by address (33 of 34 nodes can read there)"""
        )

    def test_few_nodes(self) -> None:
        few = seen(5.0, holders=5, readers=5)
        self.assertFalse(wants_table(few))
        self.assertExpectedInline(
            text_of(few), """by address: 4.5 us of a replay against 3.8 us by a table (5 of 5 nodes can read there)"""
        )

    def test_inputs_that_hardly_ever_move(self) -> None:
        self.assertFalse(wants_table(seen(33 / 16)))

    def test_a_gpu_that_is_waited_for(self) -> None:
        hidden = seen(waiting=0.25)
        self.assertFalse(wants_table(hidden))
        self.assertExpectedInline(
            text_of(hidden),
            """\
by address: 29.7 us of a replay against 13.1 us by a table (hidden behind the GPU's work in 75% of them)""",
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
        self.assertEqual(text_of(found).startswith("table"), wants_table(found))


class Function:
    """Anything that can be held weakly."""


def reader(kernel: str, autotuner: Any = None) -> Reader:
    made = FakeAutotuner(kernel) if autotuner is None else autotuner
    return Reader(made, frozenset({"in_ptr0"}), frozenset({("in_ptr0", 0)}))


class WatchTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.function = Function()
        self.replays, self.set_calls, self.idle = 0, 0, True
        self.told: list[str] = []
        self.ready = 0
        self.names: Sequence[str | None] = ["kernel"] * 33 + [None]
        for target, name, value in (
            (route_choice, "readers_of", lambda function: [reader("kernel"), reader("other")]),
            (route_choice, "go_on", self.go_on),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.steps: list[bool | None] = []
        self.watch = Watch(
            self.function, replays=lambda: self.replays, is_idle=lambda: self.idle, told=self.told.append
        )
        self.watch.ready = self.is_ready

    def is_ready(self) -> None:
        self.ready += 1

    def go_on(self, function: Any) -> bool | None:
        self.assertIs(function, self.function)
        return self.steps.pop(0)

    def replay(self, times: int, nodes: int = 34, us: float = 30.0) -> int:
        """Replays, each of which sets nodes; how often there was a look."""
        looks = 0
        for _ in range(times):
            self.set_calls += nodes
            if self.watch.is_due() and nodes:
                looks += 1
                self.watch.look(us, nodes, self.set_calls, lambda: self.names)
            self.replays += 1
        return looks


class TestWatch(WatchTestCase):
    def test_a_table_is_found_to_be_faster(self) -> None:
        self.assertEqual(self.replay(EVERY), 0)
        self.assertEqual(self.replay(EVERY * LOOKS), LOOKS)
        (text,) = self.told
        self.assertIn("30 us by address (33 of 34", text)
        self.assertTrue(text.startswith("table"), text)
        self.steps = [None, None, True]
        self.replay(2 * EVERY)
        self.assertEqual(self.ready, 0)
        self.assertEqual(self.replay(100 * EVERY), 1)  # the last step, and it is over
        self.assertEqual((self.ready, self.steps, len(self.told)), (1, [], 1))

    def test_where_nothing_could_be_compiled(self) -> None:
        self.replay(EVERY * (LOOKS + 1))
        self.steps = [None, False]
        self.assertEqual(self.replay(100 * EVERY), 2)
        self.assertEqual(self.ready, 0)
        self.assertEqual(self.told[1:], ["by address: no kernel could be compiled to read a table"])

    def test_looks_become_rare(self) -> None:
        self.idle = False
        self.assertEqual(self.replay(EVERY * (LOOKS + 1)), LOOKS)
        self.assertTrue(self.told[0].startswith("by address"))
        self.assertEqual(self.replay(EVERY * (LOOKS - 1)), 0)
        self.assertEqual(self.replay(EVERY * LOOKS), LOOKS)
        self.assertEqual(self.replay(EVERY * (4 * LOOKS - 1)), 0)
        self.assertEqual(len(self.told), 2)

    def test_a_program_that_changes(self) -> None:
        self.idle = False
        self.replay(EVERY * (LOOKS + 1))
        self.idle, self.steps = True, [True]
        self.replay(EVERY * (2 * LOOKS + 2))
        self.assertEqual((self.ready, len(self.told)), (1, 2))

    def test_replays_that_set_nothing_count(self) -> None:
        while len(self.told) < 1:
            self.replay(1)
            self.replay(63, nodes=0)
        self.assertIn("by address: 0.469 us of a replay", self.told[0])  # 30 of them in each 64th

    def test_nothing_is_looked_at_for_a_function_that_is_gone(self) -> None:
        del self.function
        self.assertEqual(self.replay(EVERY * (LOOKS + 2)), LOOKS + 1)
        self.assertEqual(self.told, [])

    def test_it_holds_no_function(self) -> None:
        gone = weakref.ref(self.function)
        del self.function
        self.assertIsNone(gone())


class FakeWorker:
    """Does its work when it is told to."""

    free = True

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.compiled = list(jobs), None

    def done(self) -> set[int] | None:
        return self.compiled


class TestBuilding(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.function, self.started, self.built = Function(), list[FakeWorker](), list[str]()
        self.readers = [reader(name) for name in ("a", "b", "c")]
        self.free = True
        self.error: Exception | None = None
        for target, name, value in (
            (route_choice, "readers_of", lambda function: self.readers),
            (route_choice, "job_of", self.job_of),
            (route_choice.Worker, "start", self.start),
            (route_choice, "_building", weakref.WeakKeyDictionary()),
            (table, "_taken", weakref.WeakKeyDictionary()),
            (variant_launchers, "build", self.build),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def job_of(self, autotuner: FakeAutotuner, names: frozenset[str]) -> Job | None:
        return None if autotuner.fn.__name__ == "b" else Job("path", autotuner.fn.__name__, None, names)

    def start(self, jobs: Sequence[Job]) -> FakeWorker | None:
        if self.error is not None:
            raise self.error
        if not self.free:
            return None
        self.started.append(FakeWorker(jobs))
        return self.started[-1]

    def build(self, autotuner: FakeAutotuner, names: frozenset[str]) -> Any:
        self.built.append(autotuner.fn.__name__)
        return SimpleNamespace(slots=names)

    def go_on(self) -> bool | None:
        return route_choice.go_on(self.function)

    def test_one_is_loaded_at_a_step(self) -> None:
        self.assertEqual([self.go_on(), self.go_on()], [None, None])
        (worker,) = self.started
        self.assertEqual([job.kernel for job in worker.jobs], ["a", "c"])
        worker.compiled = {0, 1}
        self.assertIsNone(self.go_on())
        self.assertEqual(self.built, [])
        self.assertIsNone(self.go_on())
        self.assertEqual(len(self.built), 1)
        self.assertIs(self.go_on(), True)
        self.assertEqual(sorted(self.built), ["a", "c"])
        self.assertIs(self.go_on(), True)  # another recording asks
        self.assertEqual((len(self.built), len(self.started)), (2, 1))

    def test_what_was_not_compiled_is_not_loaded(self) -> None:
        self.go_on()
        self.started[0].compiled = {1}
        self.assertEqual([self.go_on(), self.go_on()], [None, True])
        self.assertEqual(self.built, ["c"])

    def test_nothing_was_compiled(self) -> None:
        self.go_on()
        self.started[0].compiled = set()
        self.assertIs(self.go_on(), False)

    def test_none_can_be(self) -> None:
        self.readers = self.readers[1:2]
        self.assertIs(self.go_on(), False)
        self.assertEqual(self.started, [])

    def test_another_function_has_the_worker(self) -> None:
        self.free = False
        self.assertEqual([self.go_on(), self.go_on()], [None, None])
        self.free = True
        self.assertIsNone(self.go_on())
        self.assertEqual(len(self.started), 1)

    def test_no_process_can_be_made(self) -> None:
        self.error = OSError("of the test")
        with self.assertLogs("pygraph_trees.indirection", "WARNING") as logs:
            self.assertIs(self.go_on(), False)
        self.assertIn("of the test", logs.output[0])
        self.assertIs(self.go_on(), False)  # and is not tried again
        with route_choice._lock:
            self.assertIsNone(self.go_on())  # another thread is at it


PRESENCE = """
import contextlib
from pygraph_trees.absent_gpu import absent_gpu
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
        worker = Worker.start([Job(job.path, "none of that name", job.config, job.names), job])
        assert worker is not None
        self.assertIsNone(Worker.start([job]))  # one at a time
        self.assertEqual(self.wait(worker), {1})
        with mock.patch.object(ASTSource, "make_ir", side_effect=AssertionError("it is compiled already")):
            _, slots = variant_launchers.compile_variant(autotuner, job.config, job.names)
        self.assertEqual(slots, job.names)

    def test_jobs_one_by_one(self) -> None:
        (autotuner,) = self.autotuners()
        job = job_of(autotuner, frozenset({"in_ptr0"}))
        assert job is not None
        gone = Job(str(self.folder / "none.py"), job.kernel, job.config, job.names)
        other = Job(job.path, job.kernel, job.config, frozenset({"xnumel"}))  # which is no pointer
        self.assertEqual(compile_jobs([gone, job, other]), [1])

    def test_kernels_that_no_other_process_could_compile(self) -> None:
        for name, value in (("filename", None), ("filename", "none.py"), ("launchers", [])):
            autotuner = FakeAutotuner()
            autotuner.filename = __file__  # type: ignore[attr-defined]
            autotuner.launchers[0].config = None
            self.assertIsNotNone(job_of(autotuner, frozenset()))
            setattr(autotuner, name, value)
            self.assertIsNone(job_of(autotuner, frozenset()), name)

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
        self.assertEqual(len(looks), self.expected_looks(4 * EVERY))
        count, set_calls, holders = looks[-1]
        self.assertEqual((count, len(holders)), (3, 3))
        self.assertLessEqual(set_calls, live._patches.set_calls)
        # Not where nothing changes.
        looks.clear()
        for _ in range(2 * EVERY):
            self.replay(live, graph, sets[1])
        self.assertEqual(looks, [])

    def expected_looks(self, calls: int) -> int:
        return calls


@requires_cpp
class TestLiveInputsNative(TestLiveInputs):
    """The same with kernels set in C++, which leaves one call of many to Python."""

    native = True

    def expected_looks(self, calls: int) -> int:
        return calls // EVERY

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
    def test_which_recordings_are_watched(self) -> None:
        model: Any = Function()
        told: list[str] = []
        model.log = SimpleNamespace(route_was_found=told.append)
        log = RecordingLog()
        key = object(), frozenset({"in_ptr0"})
        cases = (
            ("auto", {key: reader("kernel")}, (), True),
            ("auto", {}, (), False),  # no kernel could
            ("auto", {key: reader("kernel")}, {0}, False),  # there is a table already
            ("patch", {key: reader("kernel")}, (), False),
            ("table", {key: reader("kernel")}, (), False),
        )
        for flag, readers, taken, is_watched in cases:
            model.settings = SimpleNamespace(indirection=flag)
            with (
                self.subTest(flag=flag, readers=readers, taken=taken),
                mock.patch.dict(table._readers, {model: readers}),
                mock.patch.dict(table._taken, {model: set(taken)}),
            ):
                watch = recording._watch(model, log, 0)
                self.assertEqual(watch is not None, is_watched)
        stream = SimpleNamespace()
        with (
            mock.patch.dict(table._readers, {model: {key: reader("kernel")}}),
            mock.patch.object(torch.cuda, "current_stream", lambda device: stream),
        ):
            model.settings = SimpleNamespace(indirection="auto")
            for is_idle, text in ((True, "table: "), (False, "by address: ")):
                stream.query = lambda is_idle=is_idle: is_idle
                log.replays, set_calls = 0, 0
                watch = recording._watch(model, log, 0)
                assert watch is not None
                while len(told) < 1:
                    log.replays += 1
                    set_calls += 50
                    if watch.is_due():
                        watch.look(50.0, 50, set_calls, lambda: ["kernel"] * 50)
                self.assertTrue(told.pop().startswith(text))
                self.assertEqual(log.replays, LOOKS * EVERY)


if __name__ == "__main__":
    run_tests()
