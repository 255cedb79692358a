"""Another process compiles the kernels for a function's table, and each step loads one of them."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from commands import WithFolder
from fake_trees import Plain
from test_launches import FakeAutotuner, autotuners, of_inductor, on_gpu
from torch.testing._internal.common_utils import TestCase, run_tests
from triton.compiler import ASTSource

from pygraph_trees.indirection.table import builds, launches
from pygraph_trees.indirection.table import pointer_table as table
from pygraph_trees.indirection.table.builds import Job, Worker, job_of
from pygraph_trees.indirection.table.pointer_table import Reader


class FakeWorker:
    """A worker that is done when the test says so."""

    def __init__(self, jobs: Sequence[Job]) -> None:
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
        self.function, self.started = Plain(), list[FakeWorker]()
        self.built = list[Any]()  # kernels
        inputs = frozenset({("in_ptr0", 0)})
        self.readers = [Reader(FakeAutotuner(kernel), frozenset({"in_ptr0"}), inputs) for kernel in ("a", "b", "c")]
        self.error: Exception | None = None
        of_functions, taken = (weakref.WeakKeyDictionary[Any, Any]() for _ in range(2))
        self.enterContext(mock.patch.multiple(table, readers_of=lambda function: self.readers, TAKEN=taken))
        self.enterContext(mock.patch.multiple(builds, job_of=self.job_of, _builds=of_functions))
        self.enterContext(mock.patch.object(Worker, "start", self.start))
        self.enterContext(mock.patch.object(launches, "build", self.build))

    def begin(self) -> None:
        builds.begin(self.function)

    def job_of(self, autotuner: FakeAutotuner, names: frozenset[str]) -> Job | None:
        return None if autotuner.fn.__name__ == "b" else Job(compile, autotuner.fn.__name__, names)

    def start(self, jobs: Sequence[Job]) -> FakeWorker:
        if self.error is not None:
            raise self.error
        self.started.append(FakeWorker(jobs))
        return self.started[-1]

    def build(self, autotuner: FakeAutotuner, names: frozenset[str]) -> Any:
        self.assertEqual(self.started[-1].inside, 1)  # it is loaded from the worker's cache
        self.assertEqual(table.taken_by_variants(self.function), frozenset())  # all are taken at once, at the end
        self.built.append(autotuner.fn.__name__)
        return SimpleNamespace(slots=names)

    def go_on(self) -> bool | None:
        return builds.go_on(self.function)

    def test_one_is_loaded_at_a_step(self) -> None:
        self.begin()
        self.assertEqual([self.go_on(), self.go_on()], [None, None])
        self.assertFalse(builds.is_over(self.function))
        (worker,) = self.started
        self.assertEqual([job.args[0] for job in worker.jobs], ["a", "c"])
        worker.compiled = {0, 1}
        for built in ([], ["a"]):
            self.assertIsNone(self.go_on())
            self.assertEqual(self.built, built)
        self.assertIs(self.go_on(), True)
        self.assertEqual(self.built, ["a", "c"])
        self.assertEqual(table.taken_by_variants(self.function), {0})
        self.begin()
        self.assertIs(self.go_on(), True)  # another recording asks
        self.assertTrue(builds.is_over(self.function))
        self.assertEqual((len(self.built), len(self.started)), (2, 1))
        for function in (self.function, Plain()):  # the latter has no build
            builds.give_up(function)
            self.assertEqual(table.taken_by_variants(function), frozenset())
            self.assertTrue(builds.is_over(function))

    def test_all_steps_can_be_taken_at_once(self) -> None:
        """The process that compiles is waited for, within a limit."""
        self.begin()
        builds.finish(0.03)
        self.assertFalse(builds.is_over(self.function))
        self.enterContext(mock.patch.object(FakeWorker, "done", lambda worker: {0, 1}))
        builds.finish(60.0)
        self.assertTrue(builds.is_over(self.function))
        self.assertEqual(self.built, ["a", "c"])

    def test_a_build_that_fails_is_over(self) -> None:
        with self.subTest("no process can be made"), self.assertLogs("pygraph_trees.indirection", "WARNING") as logs:
            self.error = OSError("of the test")
            self.begin()
            self.assertIs(self.go_on(), False)
            self.assertIs(self.go_on(), False)  # it is not tried again
        self.assertEqual(len(logs.output), 1)
        self.assertIn("of the test", logs.output[0])
        with self.subTest("no kernel can be compiled elsewhere"):
            self.error, self.readers, self.function = None, self.readers[1:2], Plain()
            self.begin()
            self.assertIs(self.go_on(), False)
            self.assertEqual(self.started, [])

    def test_a_finalizer_may_begin_one(self) -> None:
        """It waits for no lock: a finalizer may run while this thread holds the lock."""
        with builds._lock:
            self.begin()
            self.assertIsNone(self.go_on())  # another thread is building
        self.assertIn(self.function, builds._builds)


PRESENCE = """
import contextlib
from pygraph_trees.fake_gpu import absent_gpu
from torch._inductor.runtime import triton_helpers
triton_helpers.set_driver_to_gpu = lambda: None
contextlib.ExitStack().enter_context(absent_gpu())
"""


class TestWorker(WithFolder):
    """The real process compiles kernels that Inductor generates for an absent GPU."""

    def job(self, *names: str) -> tuple[Any, Job, list[Any]]:
        """A kernel's autotuner, the job of compiling it with these slots, and the job's arguments."""
        self.enterContext(of_inductor(self.folder))
        (autotuner,) = autotuners(self.folder, lambda x, y: (x.sin() + y).sum(-1), on_gpu(64, 64), on_gpu(64, 64))
        autotuner.launchers = [SimpleNamespace(config=autotuner.configs[0])]
        job = job_of(autotuner, frozenset(names))
        return autotuner, job, list(job.args)

    def wait(self, worker: Worker) -> set[int]:
        end = time.monotonic() + 300
        while (done := worker.done()) is None:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        return done

    def test_what_it_compiles_is_found(self) -> None:
        autotuner, job, (path, kernel, *options) = self.job("in_ptr0", "in_ptr1")
        self.assertEqual(Path(path), self.folder / f"{kernel}.py")
        # The process has no GPU either.
        Path(path).write_text(PRESENCE + Path(path).read_text())
        jobs = [Job(job.func, path, "none of that name", *options), job]
        (self.folder / "triton").mkdir()  # nothing is imported from the working folder
        (self.folder / "triton" / "__init__.py").write_text("raise ImportError")
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)
        worker = Worker.start(jobs)
        os.chdir(before)
        self.assertIsNone(Worker.start([job]))  # one at a time
        self.assertEqual(self.wait(worker), {1})
        # Wherever this process looks by then.
        is_compiled = mock.patch.object(ASTSource, "make_ir", side_effect=AssertionError("it is compiled already"))
        for elsewhere in (None, str(self.folder / "elsewhere")):
            with mock.patch.dict(os.environ):
                os.environ.pop("TRITON_CACHE_DIR")
                if elsewhere is not None:
                    os.environ["TRITON_CACHE_DIR"] = elsewhere
                with is_compiled, worker.cache():
                    _, slots = launches.compile_variant(autotuner, *options)
                self.assertEqual(os.environ.get("TRITON_CACHE_DIR"), elsewhere)
        self.assertEqual(slots, {"in_ptr0", "in_ptr1"})

    def test_kernels_that_no_other_process_could_compile(self) -> None:
        hooked = SimpleNamespace(config=SimpleNamespace(pre_hook=lambda: None))  # cannot be sent
        for name, value in (("filename", None), ("filename", "none.py"), ("launchers", []), ("launchers", [hooked])):
            autotuner = FakeAutotuner()
            autotuner.filename = __file__  # type: ignore[attr-defined]
            autotuner.launchers[0].config = None
            self.assertIsNotNone(job_of(autotuner, frozenset()))
            setattr(autotuner, name, value)
            self.assertIsNone(job_of(autotuner, frozenset()), name)

    def fake(self, code: str) -> Worker:
        """A worker whose process runs ``code`` instead."""
        popen = functools.partial(subprocess.Popen, ["/bin/sh", "-c", code])
        with mock.patch.object(subprocess, "Popen", lambda command, **more: popen(**more)):
            return Worker.start([])

    def test_a_process_that_fails(self) -> None:
        with self.assertLogs("pygraph_trees.indirection", "WARNING") as logs:
            self.assertEqual(self.wait(self.fake("echo 0; echo other; exit 3")), {0})
        self.assertIn("ended with 3", logs.output[0])

    def test_a_process_that_hangs(self) -> None:
        """What it had done by then counts."""
        worker = self.fake("echo 0; echo 1; sleep 1000")
        process = worker._process
        time.sleep(0.5)
        self.assertIsNone(worker.done())
        with mock.patch.object(builds, "_MOST_S", 0.0), self.assertLogs("pygraph_trees.indirection", "WARNING") as logs:
            self.assertEqual(worker.done(), {0, 1})
        self.assertIn("did not end in time", logs.output[0])
        self.assertIsNotNone(process.poll())

    def test_a_program_that_is_no_python(self) -> None:
        for frozen, executable in ((True, sys.executable), (False, "/usr/bin/editor"), (False, None)):
            with (
                mock.patch.multiple(sys, frozen=frozen, executable=executable, create=True),
                self.assertRaisesRegex(OSError, "is no Python"),
            ):
                Worker.start([])

    def test_it_ends_with_who_holds_it(self) -> None:
        """Another worker can start then, and also after one that could not be started."""
        worker = self.fake("sleep 1000")
        process = worker._process
        del worker
        self.assertEqual(process.returncode, -9)
        for _ in range(2):
            with mock.patch.object(subprocess, "Popen", side_effect=OSError("of the test")), self.assertRaises(OSError):
                Worker.start([])
        self.wait(self.fake("true"))


if __name__ == "__main__":
    run_tests()
