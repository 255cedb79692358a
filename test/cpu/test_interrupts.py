"""An interrupt waits until the trees have changed, and reaches the program then."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.locks import run_if_free
from pygraph_trees.trees.pools import interrupts
from pygraph_trees.trees.pools.interrupts import deferred


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

        class Buffer:
            pass

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

        def profile(*_: Any) -> None:
            if next(left, None) is None:
                sys.setprofile(None)
                raise KeyboardInterrupt

        for moment in range(60):
            left = iter(range(moment))
            with contextlib.suppress(KeyboardInterrupt):
                sys.setprofile(profile)
                block()
                sys.setprofile(None)
            self.assertFalse(lock.locked(), f"moment {moment}")
        self.assertIsNotNone(next(left, None))


if __name__ == "__main__":
    run_tests()
