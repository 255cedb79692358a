"""Interrupts and garbage collections wait while trees change; afterwards they reach the program, and are as before."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import unittest
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from recordings_on_cpu import SIZE, Function, OnCpuTestCase
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.locks import run_if_free
from pygraph_trees.native import binding
from pygraph_trees.trees.functions.containment import cleaned_up
from pygraph_trees.trees.managers import reclaiming
from pygraph_trees.trees.pools import collector, interrupts
from pygraph_trees.trees.pools.collector import paused
from pygraph_trees.trees.pools.interrupts import deferred
from pygraph_trees.trees.pools.liveness import release_unneeded


def interrupted_at(moment: int, block: Callable[[], None]) -> bool:
    """Raises KeyboardInterrupt at a call, or at the return of a function in C, in a block; False if it ends before."""
    left = iter(range(moment))

    def profile(_: Any, event: str, __: Any) -> None:
        if event != "return" and next(left, None) is None:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sys.setprofile(profile)
        block()
        sys.setprofile(None)
    return next(left, None) is None


class TestDeferred(TestCase):
    def interrupt(self) -> None:
        signal.raise_signal(signal.SIGINT)

    def test_an_interrupt_comes_at_the_end(self) -> None:
        """Also if it came inside another such block."""
        for times, inner in ((2, contextlib.nullcontext), (1, deferred)):
            done = []
            with self.assertRaises(KeyboardInterrupt), deferred():
                with inner():
                    for _ in range(times):
                        self.interrupt()
                done.append(1)
            self.assertEqual(done, [1])
            self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
            with deferred():
                done.append(2)
            self.assertEqual(done, [1, 2])

    def test_it_comes_after_an_error(self) -> None:
        with self.assertRaises(KeyboardInterrupt) as caught, deferred():
            self.interrupt()
            raise ValueError
        self.assertIsInstance(caught.exception.__context__, ValueError)

    def test_a_handler_of_the_program(self) -> None:
        seen: list[Any] = []
        self.addCleanup(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        signal.signal(signal.SIGINT, lambda *given: seen.append(given))
        with deferred():
            self.interrupt()
            self.assertEqual(seen, [])
        self.assertEqual(len(seen), 1)
        with deferred():
            mine = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.assertIs(signal.getsignal(signal.SIGINT), signal.SIG_IGN)
        self.assertTrue(callable(mine))
        with deferred():
            self.interrupt()

    def test_locals_of_the_interrupted_frame_are_freed(self) -> None:
        """Otherwise memory of the graph pool that compiled code used would be alive after it has run."""

        class Buffer: ...

        def code() -> weakref.ref[Any]:
            buffer = Buffer()
            self.interrupt()
            return weakref.ref(buffer)

        with self.assertRaises(KeyboardInterrupt), deferred():
            found = code()()
        self.assertIsNone(found)

    def test_a_second_one_is_not_deferred_for_long(self) -> None:
        with mock.patch.object(interrupts, "PATIENCE_S", 0.0), self.assertRaises(KeyboardInterrupt), deferred():
            self.interrupt()
            self.interrupt()
            self.fail("the second one waits")

    def test_other_threads_leave_the_handler_alone(self) -> None:
        seen: list[Any] = []

        def run() -> None:
            with deferred():
                seen.append(signal.getsignal(signal.SIGINT))

        with ThreadPoolExecutor(1) as other:
            other.submit(run).result()
        self.assertEqual(seen, [signal.default_int_handler])


class TestRunIfFree(TestCase):
    def test_an_interrupt_at_any_call_or_return_leaves_no_lock_held(self) -> None:
        lock = threading.Lock()

        def block() -> None:
            self.assertTrue(run_if_free(lock, lambda: self.assertFalse(run_if_free(lock, self.fail))))

        for moment in itertools.count():
            was_interrupted = interrupted_at(moment, block)
            self.assertFalse(lock.locked(), f"moment {moment}")
            if not was_interrupted:
                return


class TestCleanedUp(TestCase):
    def test_an_interrupt_at_any_call_or_return_of_torch(self) -> None:
        """The pool takes no allocation afterwards; the stream is the program's, and has waited for the graphs'."""
        taking, waited = list[Any](), list[Any]()

        class Stream:
            device_index = 0
            wait_stream = staticmethod(waited.append)

        def end(device: int, pool: Any) -> None:
            if not taking:
                raise RuntimeError("not currently recording to the pool")
            taking.remove(pool)

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            current.append(stream)
            yield  # an error leaves the stream
            current.pop()

        of_program, of_graphs = Stream(), Stream()
        doubts = list[Any]()
        manager = SimpleNamespace(
            device_index=0, stream=of_graphs, cuda_graphs_thread_pool=(0, 1), note_doubt=doubts.append
        )
        for owner, name, function in (
            (torch._C, "_cuda_beginAllocateCurrentThreadToPool", lambda _, pool: taking.append(pool)),
            (torch._C, "_cuda_endAllocateToPool", end),
            (torch._C, "_cuda_releasePool", lambda *_: None),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "is_initialized", lambda: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_stream", lambda *_: current[-1]),
            (torch.cuda, "set_stream", lambda stream: current.append(stream)),
            (torch.cuda, "stream", on),
            (torch, "device", lambda _: nullcontext()),
            (torch.cuda, "device", lambda _: nullcontext()),
        ):
            self.enterContext(mock.patch.object(owner, name, function, create=True))

        def run() -> None:
            with cudagraph_trees._use_cuda_memory_pool_manager(0, (0, 1), of_graphs):
                ran.append((len(taking), current[-1]))

        def block() -> None:
            try:
                cleaned_up(manager, run)
            except BaseException as error:
                held.append(error)
                raise

        for moment in itertools.count():
            ran, held, current = list[Any](), list[BaseException](), [of_program]
            waited.clear()
            doubts.clear()
            was_interrupted = interrupted_at(moment, block)
            self.assertEqual((taking, current[-1]), ([], of_program), f"moment {moment}")
            self.assertTrue(of_graphs in waited or not ran, f"moment {moment}")
            self.assertTrue(doubts or not (held and ran), f"moment {moment}")
            taking.append((0, 1))  # by a later call, while the exception dies
            held.clear()
            self.assertEqual(len(taking), 1, f"moment {moment}")
            taking.clear()
            if not was_interrupted:
                break
        self.assertEqual(ran, [(1, of_graphs)])


@contextmanager
def another_thread_recording() -> Iterator[Callable[[], None]]:
    """Another thread records from here on; yields a function that ends it and waits for it."""
    recording = paused()
    with ThreadPoolExecutor(1) as other:
        other.submit(recording.__enter__).result(60)
        yield lambda: other.submit(recording.__exit__, None, None, None).result(60)


class TestSwitch(TestCase):
    """The switch in Python; :class:`TestSwitchInCpp` has the one in C++."""

    switch: Any = collector
    off = "_off"

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.object(binding, "extension", None))
        self.addCleanup(gc.enable)

    def test_it_waits_for_the_last_recording(self) -> None:
        for was_on in (True, False):
            (gc.enable if was_on else gc.disable)()
            with another_thread_recording() as end:
                with paused(), paused():
                    self.assertFalse(gc.isenabled())
                self.assertFalse(gc.isenabled())  # the other thread still records
                end()
            self.assertEqual(gc.isenabled(), was_on)

    def test_a_process_that_is_forked_while_another_thread_records(self) -> None:
        """The other thread does not exist in the child; the child itself may leave ``paused`` if it is inside."""
        for was_on, is_inside in itertools.product((True, False), repeat=2):
            (gc.enable if was_on else gc.disable)()
            with another_thread_recording() as end:
                with paused() if is_inside else nullcontext():
                    child = os.fork()
                    found = [gc.isenabled()]
                if child == 0:
                    for _ in range(2):
                        with paused():
                            found.append(gc.isenabled())
                        found.append(gc.isenabled())
                    os._exit(found != [was_on, False, was_on, False, was_on])
                self.assertEqual((os.waitpid(child, 0)[1], found), (0, [False]))
                end()
            self.assertEqual(gc.isenabled(), was_on)

    def test_an_interrupt_before_or_after_it_is_turned_off(self) -> None:
        off = getattr(self.switch, self.off)
        for is_late in (False, True):

            def interrupted(counted: list[bool], is_late: bool = is_late) -> None:
                if is_late:
                    off(counted)
                    self.assertFalse(gc.isenabled())
                raise KeyboardInterrupt

            with mock.patch.object(self.switch, self.off, interrupted), self.assertRaises(KeyboardInterrupt), paused():
                self.fail("unreachable")
            self.assertTrue(gc.isenabled())


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestSwitchInCpp(TestSwitch):
    switch, off = binding.extension, "collector_off"

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.object(binding, "extension", self.switch))

    def test_it_runs_at_last_if_other_threads_keep_it_off(self) -> None:
        """Not inside of this thread's own."""
        collected: list[str] = []
        note: Any = lambda phase, info: collected.append(phase)  # noqa: E731
        gc.callbacks.append(note)
        self.addCleanup(gc.callbacks.remove, note)
        self.addCleanup(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(1)
        with another_thread_recording() as end:
            collected.clear()
            for is_inside, expected in ((True, False), (False, True)):
                with paused() if is_inside else nullcontext():
                    made = []
                    for _ in range(1500):
                        with paused():
                            made.append([])
                found = bool(collected), gc.isenabled()
                self.assertEqual(found, (expected, False), len(made))
            end()
        self.assertTrue(gc.isenabled())

    def test_it_is_on_again_if_the_others_leave_while_it_runs_at_last(self) -> None:
        """A finalizer, or a handler of a signal, may let other threads run."""
        self.addCleanup(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(1)
        with another_thread_recording() as end:
            note: Any = lambda phase, info: gc.callbacks.remove(note) or end()  # noqa: E731
            gc.callbacks.append(note)
            for _ in range(1500):
                with paused():
                    made = [[]]
        self.assertEqual((note in gc.callbacks, gc.isenabled()), (False, True), made)


class TestOutputReference(TestCase):
    def test_an_interrupt_while_it_is_replaced_frees_nothing_twice(self):
        first, second = torch.ones(1).untyped_storage(), torch.ones(1).untyped_storage()
        held, free = cudagraph_trees.StorageWeakRefWrapper(first), mock.Mock(side_effect=[KeyboardInterrupt, None])
        held.ref._free_weak_ref = free
        with mock.patch.object(sys, "unraisablehook"), contextlib.suppress(KeyboardInterrupt):
            held.swap_weakref(second._weak_ref())
        self.assertEqual(held(), second._cdata)
        del held
        free.assert_called_once_with(first._cdata)


class TestFinalizer(TestCase):
    def test_one_that_runs_as_the_collector_is_turned_on(self) -> None:
        """This happens if the garbage contains a compiled function; up to Python 3.11 the finalizer runs at once."""
        calls: list[bool] = []

        def enable(enable: Any = gc.enable) -> None:
            enable()
            if not calls:
                with paused():  # in the finalizer
                    calls.append(gc.isenabled())

        def record() -> None:
            with mock.patch.object(gc, "enable", enable), paused():
                pass

        with mock.patch.object(binding, "extension", None):
            thread = threading.Thread(target=record, daemon=True)
            thread.start()
            thread.join(60)
        self.assertFalse(thread.is_alive())
        self.assertEqual((calls, gc.isenabled()), ([False], True))


class TestCollections(OnCpuTestCase):
    def test_none_comes_during_a_fast_replay(self):
        """Python 3.12 runs a scheduled collection even if the collector has been turned off by then."""
        function, seen = Function(), []
        self.addCleanup(gc.set_threshold, *gc.get_threshold())
        self.addCleanup(gc.callbacks.clear)
        gc.callbacks.append(lambda *_: seen.append(function.manager.is_taken))
        gc.set_threshold(50, 1, 1)
        held = [(function.call(1.0), [{0} for _ in range(number % 40)]) for number in range(400)]
        self.assertEqual((len(held), {*seen}), (400, {False}))

    def test_a_pool_is_kept_if_its_manager_ends_while_the_program_captures(self):
        function = Function()
        output, before = function.call(1.0), len(reclaiming._in_use)
        with mock.patch("torch.cuda.is_current_stream_capturing", lambda: True):
            function.manager.shutdown()
        reclaiming.release_pools()
        self.assertEqual((len(reclaiming._in_use), output[0][0].item()), (before + 1, 1.0))
        del output, function
        gc.collect()
        reclaiming.release_pools()
        self.assertEqual(len(reclaiming._in_use), before)

    def test_pools_are_released_while_others_are(self):
        dead = []

        def expired():  # as if a finalizer ran meanwhile
            if not dead:
                dead.append(True)
                reclaiming.release_pools()
            return True

        found = {"a": lambda: bool(dead), "b": lambda: bool(dead), "c": expired, "d": lambda: False}
        graphs = [(graph, [SimpleNamespace(expired=answer)]) for graph, answer in found.items()]
        with mock.patch.object(reclaiming, "_in_use", graphs):
            reclaiming.release_pools()
            self.assertEqual([graph for graph, _ in reclaiming._in_use], ["d"])

    def test_what_is_forgotten_during_a_call_is_given_back_later(self):
        function, inputs = Function(), []
        manager, model = function.manager, function.recording.wrapped_function.model
        manager.take_turn(inputs)
        manager.forget(model)
        self.assertFalse(manager.give_pool_back())
        self.assertEqual(manager.roots, {function.id: [function.recording]})
        manager.end_turn(inputs)
        with mock.patch.object(manager.reclaiming, "_leave_pool"):
            manager.give_pool_back()
        self.assertFalse(manager.roots.get(function.id))

    def test_a_finalizer_removes_outputs_while_they_are_detached(self):
        function, held = Function(2, cudagraph_trees.CompilationMode.FORWARD), threading.Event()
        weakref.finalize(held, function.recording.remove_node_cached_tensors).atexit = False
        output = function.call(1.0)[0].mul_(torch.ones(SIZE, requires_grad=True))
        output.grad_fn.metadata["held"] = held
        del held, output
        release_unneeded(function.recording.cuda_graphs_pool)
        self.assertFalse(any(function.recording.cached_tensor_outputs))


if __name__ == "__main__":
    run_tests()
