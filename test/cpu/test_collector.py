"""Python's garbage collector is off while any thread records or replays, and afterwards it is as before."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import unittest
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.pools import collector
from pygraph_trees.trees.pools.collector import paused


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


if __name__ == "__main__":
    run_tests()
