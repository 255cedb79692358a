"""Torch's version of a function for each thread; autograd's own threads are stood in for by backwards on the CPU."""

import contextlib
import gc
import itertools
import sys
import threading
import unittest
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch
from torch._guards import CompileContext, CompileId, compile_context
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason
from pygraph_trees.report.log import Count, FunctionLog, RecordingLog
from pygraph_trees.trees.functions import home, threads
from pygraph_trees.trees.functions.containment import passes
from pygraph_trees.trees.functions.dispatch import Dispatch
from pygraph_trees.trees.functions.function import entered
from pygraph_trees.trees.hooks import manager_container
from pygraph_trees.trees.pools import capture_lock

ID = CompileId(frame_id=3, frame_compile_id=1)


class Run:
    """Torch's version of a function, made with the identifier of a compilation."""

    def __init__(self, made):
        self.number, self.compile_id = len(made), CompileContext.current_compile_id()
        made.append(weakref.ref(self))

    def __call__(self, inputs):
        return [self.number, self.compile_id, *inputs]


def on(thread, work, *arguments, **named):
    return thread.submit(work, *arguments, **named).result(60)


def in_backward(call):
    """The result of a call during a backward of this thread."""
    found = []
    y = torch.ones(2, requires_grad=True) * 2
    y.register_hook(lambda _: found.append(call()))
    y.sum().backward()
    return found[0]


class TestThreads(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(threads, "_local", threading.local()))
        self.made, self.log = [], FunctionLog("model", None, "inference", 1, {})
        with compile_context(CompileContext(ID)):
            ungraphed = lambda inputs: ["un-graphed", *inputs]  # noqa: E731
            self.run_ = threads.for_each_thread(lambda: Run(self.made), self.log, ungraphed)

    def call(self):
        return self.run_(["x"])

    def backwards(self):
        """Of a thread that has trees."""
        threads.mark()
        return [in_backward(self.call) for _ in range(2)]

    def test_what_is_stashed_keeps_a_reference(self):
        """Torch 2.11 takes none, but releases one later. An interrupt may come just after the call."""

        def stashed(name, value):
            kept.extend([value] * takes)
            if interrupts:
                raise KeyboardInterrupt

        for interrupts, takes in itertools.product((False, True), repeat=2):
            kept, value = [], object()
            patch = mock.patch.object(torch._C, "_stash_obj_in_tls", stashed)
            with patch, contextlib.suppress(KeyboardInterrupt):
                threads.stash("a name", value)
            self.assertEqual(sys.getrefcount(value), 3 + (interrupts and takes))

    def test_each_thread_has_its_own(self):
        """Also for its backwards."""
        self.assertEqual(self.call(), [0, ID, "x"])
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            for _ in range(2):
                for number, thread in enumerate((first, second), 1):
                    self.assertEqual(on(thread, self.backwards), [[number, ID, "x"]] * 2)
                    self.assertEqual(on(thread, self.call), [number, ID, "x"])

    def test_nothing_is_left_of_a_thread_that_has_ended(self):
        self.call()
        for number in range(1, 4):
            with ThreadPoolExecutor(1) as thread:
                self.assertEqual(on(thread, self.backwards)[0], [number, ID, "x"])
                self.assertIsNotNone(self.made[number]())
            self.assertIsNone(self.made[number]())
        self.assertIsNotNone(self.made[0]())
        self.run_ = None
        gc.collect()
        self.assertIsNone(self.made[0]())

    def test_threads_that_end_before_they_replay(self):
        """As in a server with a thread for each request."""
        for replays, last in ((0, "un-graphed"), (100, threads.MOST_ENDED)):
            self.setUp()
            self.log.recordings.append(RecordingLog(counter=Count(replays)))
            for number in range(threads.MOST_ENDED + 1):
                with ThreadPoolExecutor(1) as thread:
                    found = on(thread, self.call)[0]
                self.assertEqual(found, number if number < threads.MOST_ENDED else last)
            self.assertEqual(self.log.ungraphed_reason, None if replays else Reason.SHORT_LIVED())
        self.setUp()
        for _ in range(threads.MOST_ENDED):
            with ThreadPoolExecutor(1) as thread:
                on(thread, self.call)
        with ThreadPoolExecutor(1) as thread:  # one that goes on
            found = [on(thread, self.call)[0] for _ in range(threads.MOST_REFUSED + 2)]
        self.assertEqual(found, ["un-graphed"] * threads.MOST_REFUSED + [threads.MOST_ENDED] * 2)

    def test_backwards_of_threads_without_trees_have_the_same(self):
        def backward():
            self.assertIsNone(in_backward(threads.mark))
            return in_backward(self.call)

        self.call()
        for _ in range(2):
            with ThreadPoolExecutor(1) as thread:
                self.assertEqual(on(thread, backward), [1, ID, "x"])

    def test_containers(self):
        """Each thread has its own, which its backwards use. Others' backwards leave none in autograd's thread."""
        with mock.patch.object(manager_container, "local", threading.local()):
            local = manager_container.local
            get = manager_container.get_container(lambda index: local.tree_manager_containers.setdefault(index, []))

            def containers():
                own = get(0)
                return own, torch._C._get_obj_in_tls("tree_manager_containers")[0], in_backward(lambda: get(0))

            def of_others(is_per_thread=True):
                with mock.patch.object(manager_container, "PER_THREAD", is_per_thread):
                    return (in_backward if is_per_thread else lambda work: work())(lambda: get(0)), dict(vars(local))

            with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as third:
                found = [on(thread, containers) for thread in (first, second)]
                others = [on(third, of_others)]
                on(third, threads.mark)  # it still has no trees
                others.append(on(third, of_others))
                others.append(on(third, of_others, False))  # as all calls before torch 2.13
        for own, kept, in_its_backward in found:
            self.assertIs(own, kept)
            self.assertIs(own, in_its_backward)
        self.assertIsNot(found[0][0], found[1][0])
        for its, kept in others:
            self.assertIs(its, others[0][0])
            self.assertEqual(kept, {})

    @unittest.skipIf(binding.extension is None, "not built for this torch")
    def test_cpp_tells_a_backward_from_other_calls_and_from_backwards_of_other_threads(self):
        number = binding.extension.thread_of_trees

        def numbers():
            before = in_backward(number)
            threads.mark()
            return [before, number(), *(in_backward(number) for _ in range(2))]

        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            found = [on(thread, numbers) for thread in (one, other)]
        for before, here, backward, again in found:
            self.assertEqual((before, again), (here, backward))
        for _ in range(20):  # no thread has the number of one that has ended
            with ThreadPoolExecutor(1) as thread:
                found.append([on(thread, number), on(thread, number)])
        self.assertEqual(len({value for values in found for value in values}), 24)


class TestHome(TestCase):
    """Before torch 2.13, one thread uses the graphs of a device."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.multiple(home, PER_THREAD=False, _homes={}, IDLE_S=0.0))
        self.managers = [mock.Mock(device_index=0, turns=0, asides=0, **{"end_step.return_value": True})]
        self.enterContext(mock.patch.object(home.pools, "managers", lambda: self.managers))
        self.logs = {mode: FunctionLog("model", None, mode, 1, {}) for mode in ("inference", "forward", "backward")}
        self.ways = {mode: home.way_elsewhere(0, log, "un-graphed", "noted") for mode, log in self.logs.items()}
        self.first, self.second, self.third = (self.enterContext(ThreadPoolExecutor(1)) for _ in range(3))

    def call(self, thread, mode, is_graphed=True):
        around = in_backward if mode == "backward" else lambda work: work()
        return on(thread, around, lambda: self.ways[mode](is_graphed))

    def is_elsewhere(self, thread, mode="inference"):
        return self.call(thread, mode) is not None

    def keep_busy(self):
        """The home thread has made calls whenever another one asks."""
        type(self.managers[0]).turns = mock.PropertyMock(side_effect=itertools.count(step=10))

    def test_others_run_ungraphed_until_it_ends(self):
        """The manager is told of a backward that it awaits."""
        self.keep_busy()
        self.assertEqual([self.call(self.first, mode) for mode in self.logs], [None] * 3)
        self.assertEqual([self.call(self.second, mode) for mode in self.logs], ["un-graphed", "un-graphed", "noted"])
        for thread, is_out in ((self.second, True), (self.third, False)):
            self.assertEqual(on(thread, in_backward, lambda: home.is_left_out(0)), is_out)
        self.assertEqual([self.call(self.third, mode) for mode in ("backward", "inference")], ["noted", "un-graphed"])
        self.assertEqual({log.ungraphed_reason for log in self.logs.values()}, {Reason.OTHER_THREAD()})
        self.assertTrue(on(self.second, home.may_use, 1))  # of another device
        dispatch = Dispatch()
        dispatch.replayers = {1: "of the first thread"}
        self.first.shutdown()
        self.assertEqual([self.call(self.second, mode) for mode in self.logs], [None] * 3)
        self.assertEqual(dispatch.replayers, {})
        on(self.third, home.leave, unmarked=True)
        self.assertTrue(self.is_elsewhere(self.third))
        on(self.second, home.leave, unmarked=False)
        self.assertFalse(self.is_elsewhere(self.third))

    def test_another_takes_over_from_an_idle_one_whose_path_can_end(self):
        (manager,) = self.managers
        self.assertFalse(self.is_elsewhere(self.first))
        self.assertTrue(self.is_elsewhere(self.second, "forward"))  # it sees now how many calls there were
        for change in ({"return_value": False}, {"side_effect": torch.OutOfMemoryError}):
            with self.subTest(change), mock.patch.object(manager, "end_step", mock.Mock(**change)):
                self.assertTrue(self.is_elsewhere(self.second))
                self.assertFalse(on(self.first, home.is_used_elsewhere, 0))
        with mock.patch.object(manager, "end_step", side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, self.is_elsewhere, self.second)
            self.assertFalse(on(self.first, home.is_used_elsewhere, 0))
        self.assertTrue(on(self.second, in_backward, lambda: home.is_left_out(0)))  # a backward of its own forward
        manager.turns += 1
        self.assertTrue(self.is_elsewhere(self.second))
        home._homes[0].calls += 5  # of managers that were reset
        self.assertTrue(self.is_elsewhere(self.second))
        self.assertFalse(self.is_elsewhere(self.first))  # a call, perhaps of a function that has no manager of ours
        self.assertTrue(self.is_elsewhere(self.second))
        with mock.patch.object(home, "IDLE_S", 3600.0):
            self.assertTrue(self.is_elsewhere(self.second))
        self.assertEqual(self.call(self.third, "backward"), "noted")
        manager.asides += 1
        manager.turns += 1  # of the call that was noted, and not graphed
        self.assertFalse(self.is_elsewhere(self.second, "forward"))
        manager.end_step.assert_called_with(if_dead=True)
        self.assertTrue(self.is_elsewhere(self.first))
        self.assertFalse(self.is_elsewhere(self.first))
        self.first.shutdown()
        self.assertFalse(self.is_elsewhere(self.second))

    def test_another_takes_over_once_the_functions_of_the_first_one_are_gone(self):
        self.managers.clear()  # one may be in the making
        found = [self.is_elsewhere(thread) for thread in (self.first, self.second, self.second)]
        self.assertEqual(found, [False, True, False])

    def test_each_device_has_its_own(self):
        self.managers.append(mock.Mock(device_index=1, turns=0, asides=0, **{"end_step.return_value": True}))
        for device in (0, 1):
            self.assertTrue(on(self.first, home.may_use, device))
        taken = []
        for _ in range(2):
            self.managers[0].turns += 1  # the first thread goes on there
            taken.append(on(self.second, home.takes_over, 1))
        self.assertEqual(taken, [False, True])
        self.assertFalse(on(self.first, home.may_use, 1))
        self.assertTrue(on(self.first, home.may_use, 0))

    def test_calls_that_are_not_graphed_claim_nothing(self):
        self.assertIsNone(self.call(self.first, "inference", is_graphed=False))
        self.assertIsNone(self.call(self.second, "inference"))
        self.assertEqual(self.call(self.first, "inference", is_graphed=False), "un-graphed")
        self.assertIsNone(self.logs["inference"].ungraphed_reason)
        self.assertFalse(on(self.third, lambda: not home.is_used_elsewhere(0)))

    def test_backwards_of_threads_without_other_calls_use_graphs_that_no_thread_has_used(self):
        for _ in range(2):
            with ThreadPoolExecutor(1) as thread:
                self.assertIsNone(self.call(thread, "backward"))
        self.keep_busy()
        self.assertFalse(on(self.first, home.is_used_elsewhere, 0))  # captures end their paths
        for is_dead in (False, True):  # outputs; otherwise no forward would ever be graphed
            self.managers[0].end_step.return_value = is_dead
            with ThreadPoolExecutor(1) as thread:
                self.assertEqual(self.call(thread, "forward"), None if is_dead else "un-graphed")
        home._homes.clear()
        self.assertIsNone(self.call(self.third, "backward"))
        for unmarked in (False, True):
            on(self.first, home.leave, unmarked=unmarked)
            self.assertEqual(home._user(0), None if unmarked else home._unmarked)
        with ThreadPoolExecutor(1) as thread:
            self.assertIsNone(self.call(thread, "forward"))
        self.assertEqual(self.call(self.second, "backward"), "noted")  # otherwise no forward would be graphed again
        self.assertIsNone(self.call(self.third, "forward"))
        # A forward that a backward runs again, in a thread without a mark, does not take over either.
        self.assertEqual(on(self.second, in_backward, lambda: self.ways["forward"](True)), "un-graphed")

    def test_functions_that_are_given_no_addresses_are_kept_apart_too(self):
        aligned, settings = mock.Mock(return_value="un-graphed"), SimpleNamespace(indirection="off")
        function = SimpleNamespace(is_entered=False, settings=settings)
        way = home.way_elsewhere(0, self.logs["inference"], aligned, aligned)
        run = entered(function, lambda inputs: "graphed", aligned, way_elsewhere=way)
        self.keep_busy()
        self.assertEqual([on(thread, run, []) for thread in (self.first, self.second)], ["graphed", "un-graphed"])
        aligned.decide.assert_called_once_with([])

    def test_one_of_several_that_come_at_once_wins(self):
        barrier = threading.Barrier(8)
        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(8) as threads:
            for _ in range(20):
                home._homes.clear()
                self.assertEqual(sum(threads.map(lambda _: (barrier.wait(60), home.may_use(0))[1], range(8))), 1)

    def test_a_reset_leaves_the_trees_of_devices_that_another_thread_uses(self):
        containers = {0: "used here", 1: "used elsewhere", 2: "unused"}
        shared = {"tree_manager_containers": containers, "tree_manager_locks": {0: None}}
        local = threading.local()
        self.enterContext(mock.patch.multiple(manager_container, local=local, PER_THREAD=False, _of_others=shared))
        vars(local).update(shared)
        for device in (0, 3):  # the last one's call ended before a manager was made
            self.assertTrue(home.may_use(device))
        on(self.first, home.may_use, 1)
        with manager_container.without_others():
            found = dict(local.tree_manager_containers)
            local.tree_manager_containers.clear()  # as upstream does
            for _ in local.tree_manager_locks:  # another thread makes a manager meanwhile
                shared["tree_manager_locks"][1] = None
        self.assertEqual(found, {0: "used here", 2: "unused"})
        self.assertIs(local.tree_manager_containers, containers)
        self.assertEqual(containers, {1: "used elsewhere"})
        self.assertEqual([on(self.second, home.may_use, device) for device in (0, 1, 3)], [True, False, True])
        vars(local).clear()
        with mock.patch.object(torch._C, "_is_key_in_tls", return_value=False), manager_container.without_others():
            pass  # upstream resets nothing of a thread without trees
        self.assertFalse(home.may_use(0))


class TestCaptures(TestCase):
    """The lock is torch's, which holds it, or our own."""

    def setUp(self):
        super().setUp()
        self.lock, self.done = threading.Lock(), threading.Event()
        self.enterContext(mock.patch.object(capture_lock, "capture_lock", lambda: self.lock))

    @contextlib.contextmanager
    def capturing(self, is_torchs):
        kind = mock.patch.object(capture_lock, "IS_TORCHS", is_torchs)
        with kind, self.lock if is_torchs else contextlib.nullcontext(), capture_lock.locked_by_torch():
            self.assertTrue(self.lock.locked())
            yield

    def move(self):
        with capture_lock.idle_device(0), capture_lock.idle_device(0):  # one may cause another
            self.assertTrue(self.lock.locked())
            self.done.set()

    def test_outputs_are_moved_once_no_other_thread_captures_and_a_thread_does_not_wait_for_its_own_capture(self):
        for is_torchs in (True, False):
            self.done.clear()
            with ThreadPoolExecutor(1) as other:
                with self.capturing(is_torchs):
                    moving = other.submit(self.move)
                    self.assertFalse(self.done.wait(0.1))
                moving.result(60)
            self.assertEqual((self.done.is_set(), self.lock.locked()), (True, False))
            with self.capturing(is_torchs):
                self.move()
                self.assertTrue(self.lock.locked())
            self.move()
            self.assertFalse(self.lock.locked())

    def test_nothing_is_moved_while_a_capture_of_the_program_prevents_waits(self):
        """The call runs un-graphed, and the next one begins the step."""
        with mock.patch.object(torch.cuda, "is_initialized", lambda: True):
            for error in (RuntimeError("operation not permitted when stream is capturing"), None):
                refused = self.assertRaises(capture_lock.DeviceBusy) if error else contextlib.nullcontext()
                with mock.patch.object(torch.cuda, "synchronize", side_effect=error), refused as raised:
                    self.move()
                self.assertEqual((self.done.is_set(), self.lock.locked()), (error is None, False))
                self.assertTrue(error is None or passes(raised.exception))


if __name__ == "__main__":
    run_tests()
