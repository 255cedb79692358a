"""Trials: which way each call goes, what is measured of it, and that every call is made once."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests
from traced import artifacts

from pygraph_trees import selection
from pygraph_trees.report.log import FunctionLog, GraphLog, RecordingLog, journal
from pygraph_trees.report.naming import compile_id
from pygraph_trees.selection import trial as trials
from pygraph_trees.selection.decision import Comparison, Decision, Handed, Objective, Rules, Way
from pygraph_trees.selection.profiles import Profile
from pygraph_trees.selection.shift import ShiftRules
from pygraph_trees.selection.trial import Contestant, Trial
from pygraph_trees.settings import InvalidFlag, Settings
from pygraph_trees.trees import choice, pools
from pygraph_trees.trees import function as function_module
from pygraph_trees.trees.function import FunctionModel, entered
from pygraph_trees.trees.manager import Manager, Upstream

RULES = Rules()


class World:
    """A host and a GPU whose times are what the tests say."""

    def __init__(self):
        self.now_ns = 0
        self.gpu_until_us = 0.0
        self.rooms_made = 0
        self.behind = False  # whether the GPU is never seen to be done

    @property
    def now_us(self):
        return self.now_ns / 1e3

    def is_idle(self):
        return self.gpu_until_us <= self.now_us

    def mark(self):
        return max(self.now_us, self.gpu_until_us)

    def make_room(self):
        self.rooms_made += 1

    def us_between(self, begin, end):
        return None if self.behind or end > self.now_us else end - begin

    def work(self, host_us, gpu_us):
        self.now_ns += int(host_us * 1e3)
        self.gpu_until_us = max(self.now_us, self.gpu_until_us) + gpu_us

    def wait(self):
        self.now_ns = max(self.now_ns, int(self.gpu_until_us * 1e3) + 1)


class Function:
    """A function that takes as long as it is said to, graphed from its third graphed call on."""

    def __init__(self, world, trial, ungraphed=(100.0, 50.0), graphed=(10.0, 40.0), kernels=4, mode="inference"):
        self.world, self.times, self.kernels = world, {Way.UNGRAPHED: ungraphed, Way.GRAPHED: graphed}, kernels
        self.log = FunctionLog("Net", "0/0", mode, 1, {})
        self.went, self.graphed_calls, self.began = [], 0, 0
        run, told = (self.graph, self.ungraph), (self.went.append, self.begin, lambda: self.handed, lambda: self.room)
        self.handed = Handed()
        self.room = True
        self.contestant = Contestant(trial, self.log, *run, world, *told)
        trial.join(self.contestant)
        self.calls = []

    def ungraph(self, inputs):
        self.calls.append("u")
        self.log.runs += 1
        self.world.work(*self.times[Way.UNGRAPHED])
        return self.outputs(inputs)

    def graph(self, inputs):
        self.calls.append("g")
        self.graphed_calls += 1
        if self.graphed_calls == 1:
            self.log.warmups += 1
            self.log.runs += 1
            self.world.work(1e4, 1e3)
        elif self.graphed_calls == 2:
            self.log.recordings.append(RecordingLog(number=0, kernels=self.kernels, other_nodes=0, replays=1))
            self.log.runs += 1
            self.world.work(1e5, 1e3)
        else:
            self.log.recordings[-1].replays += 1
            self.world.work(*self.times[Way.GRAPHED])
        return self.outputs(inputs)

    def begin(self):
        self.began += 1

    def look(self, number, sizes=()):
        return self.contestant.look([float(number), *sizes])

    def outputs(self, inputs):
        return [int(x) + 1 for x in inputs if type(x) is float]

    def __call__(self, *inputs, sizes=()):
        return self.contestant([*map(float, inputs), *sizes])


class TrialTestCase(TestCase):
    def setUp(self):
        self.world = World()
        patcher = mock.patch.object(trials.time, "perf_counter_ns", lambda: self.world.now_ns)
        patcher.start()
        self.addCleanup(patcher.stop)

    def steps(self, count, *functions, wait=True):
        for number in range(count):
            for function in functions:
                self.assertEqual(function(number), [number + 1])
            if wait:
                self.world.wait()


class TestTrial(TrialTestCase):
    def test_graphs_that_pay(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.steps(30, function)
        ways = "".join(function.calls)
        self.assertEqual(ways, "u" * 7 + "g" * 23)
        self.assertEqual((trial.is_over, function.went, trial.decision.way), (True, [Way.GRAPHED], Way.GRAPHED))
        # From idle: the GPU's 50 us are over 12.5 after the last of four launches of 100; a replay takes 10 and 40.
        found = trial.decision.compared
        self.assertEqual((found.graphed_us, found.ungraphed_us), (50.0, 110.0))
        self.assertEqual(function.log.decision, "graphed: 50 us a call against 110 us (4 kernels)")
        self.assertEqual(function.log.record().ungraphed_calls, 0)

    def test_graphs_that_do_not(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial, ungraphed=(20.0, 40.0), graphed=(90.0, 40.0), kernels=1)
        self.steps(30, function)
        self.assertEqual((function.went, trial.decision.way), ([Way.UNGRAPHED], Way.UNGRAPHED))
        self.assertEqual("".join(function.calls)[-5:], "uuuuu")
        self.assertRegex(function.log.decision, "^un-graphed: 60 us a call against 130 us")

    def test_throughput_is_another_question(self):
        ways = {}
        for objective in Objective:
            trial = Trial(objective)
            self.steps(60, Function(self.world, trial, ungraphed=(60.0, 40.0), graphed=(50.0, 40.0), kernels=9))
            ways[objective] = trial.decision.way
        self.assertEqual(ways, {Objective.LATENCY: Way.UNGRAPHED, Objective.THROUGHPUT: Way.GRAPHED})

    def test_few_calls_are_measured(self):
        for noise in (0.0, 30.0):
            trial = Trial(Objective.LATENCY)
            function = Function(self.world, trial)
            contestant, times = function.contestant, dict(function.times)
            for number in range(80):
                shift = noise * (number % 3)
                function.times = {way: (host + shift, gpu) for way, (host, gpu) in times.items()}
                self.steps(1, function)
                measured = sum(contestant.made(way) for way in Way)
                self.assertLessEqual(measured, RULES.most_calls)
            self.assertTrue(trial.is_over)

    def test_nobody_waits_for_the_gpu(self):
        """Calls of a GPU that is behind go on the way they go, for so long."""
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.world.behind = True
        self.steps(trials._MOST_STEPS + 2, function)
        self.assertEqual((trial.is_over, trial.decision, function.went), (True, None, [Way.GRAPHED]))
        self.assertIsNone(function.log.decision)

    def test_what_the_gpu_is_done_with_later(self):
        trial = Trial(Objective.THROUGHPUT)
        function = Function(self.world, trial, ungraphed=(10.0, 100.0), graphed=(5.0, 90.0))
        self.steps(60, function, wait=False)
        self.world.wait()
        self.steps(2, function)
        self.assertEqual(trial.decision.way, Way.GRAPHED)
        self.assertEqual((trial.decision.compared.graphed_us, trial.decision.compared.ungraphed_us), (90.0, 90.0))

    def test_functions_downstream_count(self):
        """What they would do more if this one were not graphed."""
        for handed, way in ((Handed(), Way.UNGRAPHED), (Handed(patched=40), Way.GRAPHED)):
            trial = Trial(Objective.LATENCY)
            function = Function(self.world, trial, ungraphed=(50.0, 5.0), graphed=(60.0, 5.0), kernels=1)
            function.handed = handed
            self.steps(40, function)
            self.assertEqual(trial.decision.way, way)

    def test_a_step_goes_one_way(self):
        trial = Trial(Objective.LATENCY)
        forward = Function(self.world, trial)
        backward = None
        for number in range(40):
            forward(number)
            if backward is None:
                backward = Function(self.world, trial, graphed=(5.0, 20.0))
            backward(number)
            self.world.wait()
        self.assertEqual(forward.calls, backward.calls)
        self.assertEqual(forward.went, backward.went)
        self.assertEqual(forward.log.decision, backward.log.decision)
        self.assertEqual(trial.decision.compared.kernels, 8)

    def test_nothing_changes_before_the_backward_was_called(self):
        trial = Trial(Objective.LATENCY)
        forward = Function(self.world, trial, mode="forward")
        backward = Function(self.world, trial, mode="backward")
        self.steps(10, forward, backward)
        self.assertEqual(forward.calls[-1], "g")
        self.steps(40, forward)
        self.assertFalse(trial.is_over)
        self.steps(10, forward, backward)
        self.assertTrue(trial.is_over)
        self.assertIsNotNone(trial.decision)

    def test_a_forward_whose_backward_is_not_graphed(self):
        """Nobody waits for it."""
        trial = Trial(Objective.LATENCY)
        forward = Function(self.world, trial, ungraphed=(20.0, 40.0), graphed=(90.0, 40.0), kernels=1, mode="forward")
        self.steps(30, forward)
        self.assertEqual((forward.went, trial.decision.way), ([Way.UNGRAPHED], Way.UNGRAPHED))

    def test_many_backwards_of_a_forward(self):
        trial = Trial(Objective.LATENCY)
        forward, backward = (Function(self.world, trial, mode=mode) for mode in ("forward", "backward"))
        forward(0)
        self.world.behind = True
        for number in range(trials._MOST_STEPS):
            backward(number)
            self.assertLessEqual(len(backward.contestant._pending), RULES.most_calls)
        self.assertFalse(trial.is_over)
        backward(0)
        self.assertEqual((trial.is_over, forward.went, backward.went), (True, [Way.GRAPHED], [Way.GRAPHED]))

    def test_several_graphs_in_a_step(self):
        """Each has a trial of its own, and their backwards come in the reverse order."""
        pairs = []
        for _ in range(3):
            trial = Trial(Objective.LATENCY)
            pairs.append([Function(self.world, trial, mode=mode) for mode in ("forward", "backward")])
        self.steps(40, *(forward for forward, _ in pairs), *(backward for _, backward in reversed(pairs)))
        for functions in pairs:
            for function in functions:
                self.assertEqual(function.went, [Way.GRAPHED])
                self.assertIsNotNone(function.log.decision)

    def test_memory_of_the_first_way_is_given_back(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.steps(7, function)
        self.assertEqual(self.world.rooms_made, 0)
        self.steps(30, function)
        self.assertEqual(self.world.rooms_made, 1)

    def test_it_ends_once(self):
        """Another thread may call while it is decided."""
        memory = mock.Mock(find=mock.Mock(return_value=None))
        trial = Trial(Objective.LATENCY, memory=memory)
        function = Function(self.world, trial)

        def meanwhile(*args):
            trial._end(Way.GRAPHED, None, None)
            return Decision(Way.UNGRAPHED, mock.Mock())

        with mock.patch.object(trials, "decide", meanwhile), mock.patch.object(Decision, "text", "why"):
            self.steps(30, function)
        self.assertEqual((function.went, function.log.decision), ([Way.GRAPHED], None))
        memory.store.assert_not_called()

    def test_one_that_comes_late_follows(self):
        trial = Trial(Objective.LATENCY)
        self.steps(30, Function(self.world, trial))
        late = Function(self.world, trial)
        self.assertEqual((late.went, late.log.decision), ([Way.GRAPHED], trial.decision.text))
        self.steps(3, late)
        self.assertEqual(late.calls, ["g"] * 3)

    def test_a_backward_that_never_comes(self):
        trial = Trial(Objective.LATENCY)
        forward, backward = Function(self.world, trial), Function(self.world, trial)
        self.steps(1, forward, backward)
        self.steps(trials._MOST_STEPS + 1, forward)
        self.assertEqual((trial.is_over, forward.went, backward.went), (True, [Way.GRAPHED], [Way.GRAPHED]))

    def test_what_is_recorded_again_is_not_measured(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.steps(11, function)
        before = function.contestant.made(Way.GRAPHED)
        original = function.graph

        def again(inputs):
            function.log.recordings.append(RecordingLog(number=1, kernels=4, other_nodes=0))
            return original(inputs)

        function.contestant._run[Way.GRAPHED] = again
        self.steps(1, function)
        self.assertEqual(function.contestant.made(Way.GRAPHED), before)

    def test_one_that_is_always_recorded_again(self):
        ways = {}
        for record_us in (5e4, 101.0):
            memory = mock.Mock(find=mock.Mock(return_value=None))
            trial = Trial(Objective.LATENCY, memory=memory)
            function = Function(self.world, trial)

            def again(inputs, function=function, record_us=record_us):
                function.log.recordings.append(RecordingLog(number=1, kernels=4, other_nodes=0, replays=1))
                self.world.work(record_us, 50.0)
                return function.outputs(inputs)

            function.contestant._run[Way.GRAPHED] = again
            self.steps(trials._MOST_STEPS + 1, function)
            ways[record_us] = function.went
            self.assertIsNone(trial.decision)
            memory.store.assert_not_called()
        self.assertEqual(ways, {5e4: [Way.UNGRAPHED], 101.0: [Way.GRAPHED]})

    def sized(self, sizes, trial, ungraphed, graphed):
        """A function of one kernel, called with such sizes; the GPU takes a microsecond for each of them."""
        function = Function(self.world, trial, kernels=1)
        for size in sizes:
            function.times = {Way.UNGRAPHED: (ungraphed, float(size)), Way.GRAPHED: (graphed, float(size))}
            self.assertEqual(function(0, sizes=(size,)), [1])
            self.world.wait()
        return function

    def test_only_like_is_compared_with_like(self):
        for first, second in ((100, 400), (400, 100)):
            memory = mock.Mock(find=mock.Mock(return_value=None))
            trial = Trial(Objective.LATENCY, memory=memory)
            self.sized([first] * 7 + [second] * 20 + [first, second] * 20, trial, 60.0, 30.0)
            found = trial.decision.compared
            self.assertEqual((found.ungraphed_us, found.graphed_us), (60.0 + first, 30.0 + first))
            memory.store.assert_called_once()

    def test_sizes_that_do_not_come_again(self):
        trial = Trial(Objective.LATENCY)
        function = self.sized([100] * 7 + [400] * trials._MOST_STEPS, trial, 30.0, 60.0)
        self.assertFalse(trial.is_over)
        self.assertEqual(function(0, sizes=(400,)), [1])
        self.assertEqual((trial.is_over, trial.decision, function.went), (True, None, [Way.GRAPHED]))

    def test_what_was_measured_of_other_sizes_is_not_kept(self):
        """The memory was asked for those of the first call."""
        memory = mock.Mock(find=mock.Mock(return_value=None))
        trial = Trial(Objective.LATENCY, memory=memory)
        self.sized([100] + [400] * 30, trial, 60.0, 30.0)
        self.assertEqual(trial.decision.way, Way.GRAPHED)
        memory.store.assert_not_called()

    def test_what_was_disturbed_is_not_kept(self):
        for disturbed, stored in (
            (contextlib.nullcontext(), 1),
            (mock.patch.object(torch.autograd.profiler, "_is_profiler_enabled", True), 0),
            (mock.patch.dict("os.environ", CUDA_LAUNCH_BLOCKING="1"), 0),
            (mock.patch.dict("os.environ", CUDA_LAUNCH_BLOCKING="0"), 1),
        ):
            memory = mock.Mock(find=mock.Mock(return_value=None))
            trial = Trial(Objective.LATENCY, memory=memory)
            function = Function(self.world, trial)
            self.steps(5, function)
            with disturbed:
                self.steps(1, function)
            self.steps(30, function)
            self.assertEqual((trial.decision.way, memory.store.call_count), (Way.GRAPHED, stored))

    def test_another_thread_ends_it(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.steps(2, function)
        thread = threading.Thread(target=lambda: function(5))
        thread.start()
        thread.join()
        self.assertEqual((function.went, function.calls), ([Way.GRAPHED], ["u", "u", "g"]))

    def interrupted(self, run, other, line):
        """Runs, and in another thread something else where so many lines of a trial's were done.

        Returns whether there were so many. What the other thread has to wait for is not waited for.
        """
        thread, left = threading.Thread(target=other), line

        def trace(frame, event, arg):
            nonlocal left
            if frame.f_code.co_filename != trials.__file__:
                return None
            if event == "line" and not thread.ident:
                left -= 1
                if left < 0:
                    thread.start()
                    thread.join(0.01)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run()
        finally:
            sys.settrace(before)
        if thread.ident:
            thread.join()
        return thread.ident is not None

    def test_another_thread_ends_it_anywhere(self):
        for steps in (4, 7, 10, 15):
            for line in itertools.count():
                trial = Trial(Objective.LATENCY)
                function = Function(self.world, trial)
                self.steps(steps, function)
                found = []
                if not self.interrupted(lambda: found.append(function(1)), lambda: found.append(function(5)), line):  # noqa: B023
                    break
                self.assertEqual((sorted(found), len(function.calls)), ([[2], [6]], steps + 2))
                self.assertEqual((trial.is_over, function.went), (True, [Way.GRAPHED]))
                self.assertEqual(len(function.contestant._pending), 0)
            self.assertGreater(line, 40)

    def test_one_that_joins_while_another_thread_ends_it(self):
        for line in itertools.count():
            trial = Trial(Objective.LATENCY)
            function = Function(self.world, trial)
            self.steps(1, function)
            joined = []
            if not self.interrupted(lambda: joined.append(Function(self.world, trial)), lambda: function(5), line):  # noqa: B023
                break
            self.assertEqual((function.went, joined[0].went), ([Way.GRAPHED], [Way.GRAPHED]))
        self.assertGreater(line, 5)

    def test_a_backward_has_a_thread_of_its_own(self):
        trial = Trial(Objective.LATENCY)
        forward, backward = Function(self.world, trial), Function(self.world, trial)
        with ThreadPoolExecutor(1) as other:
            self.steps(30, forward, lambda x: other.submit(backward, x).result())
        self.assertEqual((forward.went, backward.went), ([Way.GRAPHED], [Way.GRAPHED]))
        self.assertIsNotNone(trial.decision)

    def test_an_error_of_the_program(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.steps(3, function)
        broken = SimpleNamespace(work=mock.Mock(side_effect=ValueError("theirs")))
        with mock.patch.object(function, "world", broken), self.assertRaisesRegex(ValueError, "theirs"):
            function(1)
        self.steps(30, function)
        self.assertTrue(trial.is_over)

    @given(st.lists(st.tuples(st.booleans(), st.floats(1, 500), st.floats(1, 500)), min_size=60, max_size=150))
    def test_every_call_is_made_once(self, drawn):
        self.world = World()
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        for number, (wait, host_us, gpu_us) in enumerate(drawn):
            function.times = {Way.UNGRAPHED: (host_us, gpu_us), Way.GRAPHED: (gpu_us, host_us)}
            self.assertEqual(function(number), [number + 1])
            self.assertEqual(len(function.calls), number + 1)
            if wait:
                self.world.wait()
        self.assertLessEqual(len(function.went), 1)
        self.assertLessEqual("".join(function.calls).count("ug") + "".join(function.calls).count("gu"), 2)


class TestRenewal(TrialTestCase):
    """Trials that begin anew, because calls are no longer what was measured."""

    HEAVY = types.MappingProxyType({"ungraphed": (20.0, 40.0), "graphed": (90.0, 40.0)})  # un-graphed is better
    LOOKS = ShiftRules().looks

    def decided(self, trial, *functions):
        self.steps(60, *functions)
        self.assertTrue(trial.is_over)
        return trial.decision.way

    def becomes(self, function, ungraphed, graphed):
        function.times = {Way.UNGRAPHED: ungraphed, Way.GRAPHED: graphed}

    def looks(self, count, *functions):
        """Steps of calls that are looked at, as long as there is a decision; how many."""
        for number in range(count):
            for function in functions:
                if function.contestant._trial.is_over:
                    self.assertEqual(function.look(number), [number + 1])
                else:
                    self.assertEqual(function(number), [number + 1])
            self.world.wait()
            if not functions[0].contestant._trial.is_over:
                return number + 1
        return count

    def test_calls_as_before_are_not_measured_again(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.decided(trial, function)
        self.assertEqual(self.looks(200, function), 200)
        self.assertEqual((trial.is_over, function.began, function.went), (True, 0, [Way.GRAPHED]))

    def test_graphs_that_no_longer_pay(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.assertEqual(self.decided(trial, function), Way.GRAPHED)
        self.looks(2 * self.LOOKS, function)
        self.becomes(function, **self.HEAVY)
        self.assertLess(self.looks(100, function), 4 * self.LOOKS)
        self.assertEqual((trial.is_over, function.began), (False, 1))
        before = len(function.calls)
        self.steps(200, function)
        self.assertEqual((trial.decision.way, function.went), (Way.UNGRAPHED, [Way.GRAPHED, Way.UNGRAPHED]))
        self.assertRegex(function.log.decision, "^un-graphed: 45 us a call against 130 us")
        # Three measurements, each of so many calls and of those that are left out.
        measured = "".join(function.calls[before:]).rstrip("u")
        self.assertLessEqual(len(measured), RULES.flips_after * (RULES.most_calls + 4))

    def test_each_decision_is_traced(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        with artifacts() as found:
            self.decided(trial, function)
            self.assertEqual([artifact.content["decision"] for artifact in found], [function.log.decision])
            self.looks(2 * self.LOOKS, function)
            self.steps(30, function)  # replays
            self.assertEqual(len(found), 1)
            self.becomes(function, **self.HEAVY)
            self.looks(100, function)
            self.steps(300, function)
        graphed, ungraphed = (artifact.content for artifact in found)
        self.assertEqual((graphed["ungraphed_reason"], len(graphed["recordings"])), (None, 1))
        self.assertEqual(ungraphed["decision"], function.log.decision)
        self.assertRegex(ungraphed["decision"], "^un-graphed: ")
        self.assertRegex(ungraphed["ungraphed_reason"], "measured to be faster")

    def test_graphs_that_pay_now(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial, **self.HEAVY)
        self.assertEqual(self.decided(trial, function), Way.UNGRAPHED)
        self.looks(2 * self.LOOKS, function)
        self.becomes(function, (100.0, 50.0), (10.0, 40.0))
        self.looks(100, function)
        self.steps(200, function)
        self.assertEqual((trial.decision.way, function.went), (Way.GRAPHED, [Way.UNGRAPHED, Way.GRAPHED]))

    def test_another_load_for_which_the_same_is_better(self):
        memory = mock.Mock(find=mock.Mock(return_value=None))
        trial = Trial(Objective.LATENCY, memory=memory)
        function = Function(self.world, trial)
        self.decided(trial, function)
        first = trial.decision
        self.looks(2 * self.LOOKS, function)
        self.becomes(function, (400.0, 200.0), (40.0, 160.0))
        self.looks(100, function)
        self.steps(60, function)
        self.assertEqual((trial.decision.way, trial.decision.against), (Way.GRAPHED, 0))
        self.assertIsNot(trial.decision, first)
        self.assertEqual([call.args for call in memory.store.call_args_list], [(first,), (trial.decision,)])
        memory.find.assert_called_once()

    def test_what_spoke_against_it_for_a_moment(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.decided(trial, function)
        self.looks(2 * self.LOOKS, function)
        self.becomes(function, **self.HEAVY)
        self.looks(100, function)
        for _ in range(100):
            self.steps(1, function)
            if trial._standing.against:  # one of three measurements
                break
        self.assertFalse(trial.is_over)
        self.becomes(function, (100.0, 50.0), (10.0, 40.0))
        self.steps(60, function)
        self.assertEqual((trial.decision.way, function.went), (Way.GRAPHED, [Way.GRAPHED, Way.GRAPHED]))

    def test_a_step_goes_one_way(self):
        """Whoever finds that calls are others, and whether the others of its step were called by then."""
        for finder in (0, 1):
            for modes in (("inference", "inference"), ("forward", "backward")):
                with self.subTest(finder=finder, modes=modes):
                    trial = Trial(Objective.LATENCY)
                    functions = [Function(self.world, trial, mode=mode) for mode in modes]
                    self.decided(trial, *functions)
                    self.looks(2 * self.LOOKS, *functions)
                    self.becomes(functions[finder], **self.HEAVY)
                    self.becomes(functions[1 - finder], (100.0, 50.0), (10.0, 40.0))
                    self.looks(100, *functions)
                    self.assertFalse(trial.is_over)
                    self.steps(200, *functions)
                    self.assertTrue(trial.is_over)
                    self.assertEqual(functions[0].calls, functions[1].calls)
                    self.assertEqual(functions[0].went, functions[1].went)

    def test_sizes_that_change_all_the_time(self):
        """Such calls are like no other; where they change for good, they are compared."""
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        for number in range(60):
            function(number, sizes=(8,))
            self.world.wait()
        self.assertTrue(trial.is_over)
        for number in range(400):
            size = 8 * (1 + number % 3)
            self.becomes(function, (20.0, 40.0 * size), (90.0, 40.0 * size))
            self.assertEqual(function.look(number, (size,)), [number + 1])
            self.world.wait()
        self.assertEqual(function.began, 0)
        for number in range(100):
            self.becomes(function, (20.0, 400.0 * (number // 50)), (90.0, 400.0 * (number // 50)))
            called = function.look if trial.is_over else function
            called(number, sizes=(8 * (1 + number // 50),))
            self.world.wait()
        self.assertEqual(function.began, 1)

    def test_what_was_given_before_is_not_what_is_measured(self):
        trial = Trial(Objective.LATENCY)
        forward, backward = (Function(self.world, trial, mode=mode) for mode in ("forward", "backward"))

        def step(number, size):
            for function in (forward, backward):
                function(number, sizes=(size,) if function is forward else ())
            self.world.wait()

        for number in range(60):
            step(number, 8)
        self.assertTrue(trial.is_over)
        trial.begin_anew()  # in the forward's call: its backward is to come
        backward(0)
        backward(0)
        self.assertEqual((trial._integers, backward.contestant.made(Way.GRAPHED)), (None, 0))
        for number in range(60):
            step(number, 16)
        self.assertTrue(trial.is_over)
        self.assertEqual(trial._integers, (16,))
        self.assertEqual(len(forward.went), 2)

    def test_no_memory_for_both_ways(self):
        """Of what is graphed: its recordings stay while it is run un-graphed."""
        for times, begins in (({}, 0), (self.HEAVY, 1)):
            trial = Trial(Objective.LATENCY)
            function = Function(self.world, trial, **times)
            self.decided(trial, function)
            function.room = False
            trial.begin_anew()
            self.assertEqual((function.began, trial.is_over), (begins, not begins))

    def test_another_thread_that_ends_it(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.decided(trial, function)
        self.assertFalse(trial.is_elsewhere)
        trial.begin_anew()
        with ThreadPoolExecutor(1) as other:
            self.assertEqual(other.submit(function, 3).result(), [4])
        self.assertEqual((trial.is_over, trial.is_elsewhere), (True, True))

    def test_what_spoke_against_it_long_ago(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.decided(trial, function)
        trial.decision = replace(trial.decision, against=2)
        trial.begin_anew()
        self.assertEqual(trial._standing.against, 0)

    def test_so_many_times_at_most(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.decided(trial, function)
        for number in range(10):
            self.looks(100, function)
            factor = 1.0 + 9.0 * (number % 2)
            self.becomes(function, (100.0 * factor, 50.0 * factor), (10.0 * factor, 40.0 * factor))
            self.looks(100, function)
            self.steps(60, function)
        self.assertEqual(function.began, trials._MOST_RENEWALS)
        self.assertFalse(trial.may_be_renewed())
        with mock.patch.object(self.world, "mark", side_effect=AssertionError("it is not measured")):
            self.assertEqual(function.look(3), [4])

    def test_what_cannot_be_measured_again_stays(self):
        for times in ({}, self.HEAVY):
            trial = Trial(Objective.LATENCY)
            function = Function(self.world, trial, **times)
            way = self.decided(trial, function)
            standing = trial.decision
            self.looks(2 * self.LOOKS, function)
            self.becomes(function, (1e3, 1e3), (1e3, 1e3))
            self.looks(100, function)
            self.world.behind = True
            self.steps(trials._MOST_STEPS + 2, function)
            self.world.behind = False
            self.assertEqual((trial.is_over, trial.decision, function.went), (True, standing, [way, way]))

    def test_another_thread_measures_nothing(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.decided(trial, function)
        with (
            ThreadPoolExecutor(1) as other,
            mock.patch.object(self.world, "mark", side_effect=AssertionError("it is not measured")),
        ):
            self.assertEqual(other.submit(function.look, 3).result(), [4])

    def test_without_a_decision_there_is_nothing_to_renew(self):
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        self.world.behind = True
        self.steps(trials._MOST_STEPS + 2, function)
        self.assertFalse(trial.may_be_renewed())
        trial.begin_anew()
        self.assertEqual((trial.is_over, function.began), (True, 0))

    def test_functions_that_are_gone(self):
        trial = Trial(Objective.LATENCY)
        functions = [Function(self.world, trial) for _ in range(3)]
        self.decided(trial, *functions)
        first, *others = functions
        gone = weakref.ref(others.pop().contestant)
        del functions
        gc.collect()
        self.assertIsNone(gone())
        trial.begin_anew()
        self.assertEqual([f.began for f in (first, *others)], [1, 1])
        self.steps(60, first, *others)
        self.assertTrue(trial.is_over)
        del first  # whose calls begin steps
        gc.collect()
        trial.begin_anew()
        self.assertEqual((trial.is_over, others[0].began), (True, 1))

    @given(st.lists(st.tuples(st.booleans(), st.floats(1, 500), st.floats(1, 500)), min_size=100, max_size=200))
    def test_every_call_is_made_once(self, drawn):
        self.world = World()
        trial = Trial(Objective.LATENCY)
        function = Function(self.world, trial)
        for number, (wait, host_us, gpu_us) in enumerate(drawn):
            self.becomes(function, (host_us, gpu_us), (gpu_us, host_us))
            called = function.look if trial.is_over else function
            self.assertEqual(called(number), [number + 1])
            self.assertEqual(len(function.calls), number + 1)
            if wait:
                self.world.wait()
        self.assertLessEqual(function.began, trials._MOST_RENEWALS)


class TestMemory(TrialTestCase):
    """Decisions of earlier processes."""

    def memory(self, profile=None):
        return mock.Mock(find=mock.Mock(return_value=profile))

    def profile(self, way, age_s=0.0):
        decision = Decision(way, Comparison(Objective.LATENCY, 54.0, 91.0, 2.0, 10, 1, 0))
        return Profile("key", "Net", "GPU", time.time() - age_s, decision)

    def test_nothing_is_measured(self):
        for way in Way:
            memory = self.memory(self.profile(way, 86400 * 2))
            trial = Trial(Objective.LATENCY, memory=memory)
            functions = [Function(self.world, trial), Function(self.world, trial)]
            self.steps(4, *functions)
            late = Function(self.world, trial)
            for function in functions:
                self.assertEqual(function.calls, ["g" if way is Way.GRAPHED else "u"] * 4)
                self.assertRegex(function.log.decision, f"^{way.value}: .* as measured 2 days ago$")
                self.assertEqual((function.went, function.log.trial_runs), ([way], 0))
            self.assertEqual((late.went, late.log.decision), ([way], functions[0].log.decision))
            memory.find.assert_called_once_with([0])
            memory.store.assert_not_called()

    def test_what_was_decided_is_kept(self):
        memory = self.memory()
        trial = Trial(Objective.LATENCY, memory=memory)
        self.steps(40, Function(self.world, trial))
        memory.find.assert_called_once()
        memory.store.assert_called_once_with(trial.decision)

    def test_what_was_not_measured_is_not(self):
        memory = self.memory()
        trial = Trial(Objective.LATENCY, memory=memory)
        self.world.behind = True
        self.steps(200, Function(self.world, trial))
        self.assertTrue(trial.is_over)
        memory.store.assert_not_called()


class TestTrialOf(TestCase):
    AUTO = Settings("off", "auto", "auto")

    def of(self, graph, compile_id, settings=AUTO, *, is_backward=False):
        log = FunctionLog("Net", compile_id, "backward" if is_backward else "inference", 1, {}, graph=graph)
        return selection.trial_of(log, settings, 0)

    def test_who_is_decided_together(self):
        one, other = (GraphLog("Net", "7/0", "inference", ()) for _ in range(2))
        first = self.of(one, "7/0")
        self.assertIs(self.of(one, "7/0"), first)  # another partition
        self.assertIs(self.of(other, "7/0", is_backward=True), first)
        self.assertIsNot(self.of(other, "7/1"), first)
        self.assertIsNot(self.of(other, "7/0"), first)  # compiled anew
        self.assertIsNot(self.of(None, None), self.of(None, None))

    def test_programs_of_one_compile_id(self):
        """DDP's buckets, whose backwards are compiled when all forwards were."""

        def named(name):
            context = TracingContext(None)
            context.aot_graph_name = [name]
            return tracing(context)

        trials = []
        for number in (4, 5):
            with named(f"{number}_forward"):
                trials.append(self.of(GraphLog("Net", "3/0", "forward", ()), "3/0"))
        for number, trial in reversed(list(zip((4, 5), trials, strict=True))):
            backward = GraphLog("Net", "3/0", "backward", ())
            with named(f"{number}_backward"):
                for _ in range(2):  # partitions
                    self.assertIs(self.of(backward, "3/0", is_backward=True), trial)
        with named("6_backward"):  # its forward is not graphed
            self.assertNotIn(self.of(GraphLog("Net", "3/0", "backward", ()), "3/0", is_backward=True), trials)

    def test_a_forward_has_one_backward(self):
        """Where what comes from a cache has a compile id alone, and that begins anew."""
        forward, backward, other = (GraphLog("Net", "4/0", mode, ()) for mode in ("forward", "backward", "backward"))
        trial = self.of(forward, "4/0")
        for _ in range(2):
            self.assertIs(self.of(backward, "4/0", is_backward=True), trial)
        self.assertIsNot(self.of(other, "4/0", is_backward=True), trial)

    def test_what_a_program_is_known_by(self):
        found = []

        def compiler(graph, inputs):
            found.append((compile_id(), selection._program(compile_id())))
            return make_boxed_func(graph.forward)

        for _ in range(2):
            torch._dynamo.reset()
            with torch._functorch.config.patch(enable_autograd_cache=False):
                backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
                torch.compile(lambda x: x.sin() * x, backend=backend)(
                    torch.ones(2, requires_grad=True)
                ).sum().backward()
        self.assertEqual(len({identity for identity, _ in found}), 1)
        programs = [program for _, program in found]
        self.assertEqual(len(programs), 4)
        self.assertEqual((programs[0], programs[2]), (programs[1], programs[3]))
        self.assertNotEqual(programs[0], programs[2])

    def test_nobody_keeps_it_whose_functions_are_gone(self):
        kept = weakref.ref(self.of(None, "6/0"))
        gc.collect()
        self.assertIsNone(kept())

    def test_only_where_it_is_asked_for(self):
        for way in ("always", "never"):
            self.assertIsNone(self.of(None, "8/0", replace(self.AUTO, selective=way)))

    def test_what_is_kept_is_that_of_the_code(self):
        graph = GraphLog("Net", "7/2", "inference", (), code="cabc")
        memory = self.of(graph, "7/2")._memory
        self.assertEqual((memory._code, memory._what), ("cabc", "Net 7/2 inference 1"))
        self.assertEqual(memory._settings, {"objective": "latency", "indirection": "auto", "placement": "off"})
        self.assertIsNone(self.of(GraphLog("Net", "7/3", "inference", ()), "7/3")._memory)

    def test_objective(self):
        found = self.of(None, "9/0", replace(self.AUTO, objective="throughput"))
        self.assertIs(found._objective, Objective.THROUGHPUT)
        from torch._inductor import config

        wrong = config.patch({"triton.pygraph_objective": "latencies"})
        with self.assertRaisesRegex(InvalidFlag, "Did you mean 'latency'"), wrong:
            pass


class TestChoice(TrialTestCase):
    def model(self, fn=lambda inputs: [x * 2 for x in inputs]):
        graph = GraphLog("Net", "5/0", "inference", ())
        with journal.compiling(graph):
            model = FunctionModel.of(fn, is_backward=False, is_inference=True)
        model.log.compile_id = "5/0"
        model.settings = Settings("off", "auto", "auto")
        return model

    def enter(self, model, run, mutated=()):
        with mock.patch.object(choice, "GpuWatch", lambda device: self.world):
            return entered(model, run, choice.chooser((), mutated, 0))

    def test_always_has_no_trial(self):
        model = self.model()
        model.settings = replace(model.settings, selective="always")
        run = self.enter(model, lambda inputs: ["graphed"])
        self.assertIsNone(model.instead)
        self.assertEqual(run([torch.ones(2)]), ["graphed"])

    def test_from_the_first_call_to_steady_replays(self):
        calls = []

        def compiled(inputs):
            self.world.work(100.0, 50.0)
            return [x * 2 for x in inputs]

        def replay(inputs, function_id):
            calls.append("fast")
            model.log.recordings[0].replays += 1
            self.world.work(5.0, 5.0)
            return ["fast"]

        class Replayer:  # what can be referred to weakly
            replay_fast, turn = staticmethod(replay), None

        model, manager = self.model(compiled), Replayer()

        def run(inputs):
            calls.append("run")
            if len(calls) == 2:  # recorded, and on the fast path from now on
                model.log.recordings.append(RecordingLog(number=0, kernels=1, other_nodes=0))
                model.add(of_integers=False)
                model.has_fast_path_in(manager, 3)
            return ["graphed"]

        call = self.enter(model, run)
        x = torch.ones(2)
        for _ in range(7):
            self.assertEqual(call([x]), [x * 2])
            self.world.wait()
        self.assertEqual((call([x]), call([x])), (["graphed"], ["graphed"]))
        self.assertIsNone(model.manager())  # kept back, for who looks for it elsewhere
        for _ in range(30):
            self.assertEqual(call([x]), ["fast"])
            self.world.wait()
        self.assertIsNone(model.instead)
        self.assertIs(model.manager(), manager)
        self.assertEqual(calls.count("run"), 2)

    def test_calls_behind_it_are_looked_at_now_and_then(self):
        """One of so many, whichever way was taken; and a function is tried again."""
        for way in Way:
            model, looks = self.model(), []
            manager = mock.Mock(spec=Manager)
            with (
                self.subTest(way=way.value),
                mock.patch.object(function_module, "LOOK_EVERY", 10),
                mock.patch.object(cudagraph_trees, "get_manager", lambda *args, **kwargs: manager),  # noqa: B023
            ):
                model._counting._left = 10
                call = self.enter(model, lambda inputs: ["graphed"])
                contestant, trial = model.instead, model.trial
                model.add(of_integers=False)
                self.assertIsNone(model.manager())
                with mock.patch.object(Contestant, "look", lambda self, inputs: looks.append(inputs) or ["look"]):  # noqa: B023
                    trial._end(way, Decision(way, mock.Mock()), "why")
                    found = [call([torch.ones(2)]) for _ in range(95)]
                # A replay off the fast path is asked for twice.
                self.assertIn(found.count(["look"]), (8, 9) if way is Way.UNGRAPHED else (15, 16))
                self.assertEqual(len(looks), found.count(["look"]))
                # Where calls are others, they come to the contestant.
                trial.begin_anew()
                self.assertIs(model.instead, contestant)
                self.assertIsNone(model.manager())
                trial._end(way, None, None)  # for good
                with mock.patch.object(self.world, "mark", side_effect=AssertionError("there is no decision")):
                    for _ in range(50):
                        call([torch.ones(2)])
                gone = weakref.ref(model)
                manager.give_pool_back.assert_called() if way is Way.UNGRAPHED else None
                manager.reset_mock()  # holds what it was called with
                del model, call, contestant, trial
                gc.collect()
                self.assertIsNone(gone())

    def test_torch_lets_go_of_what_is_compiled(self):
        """It holds a function as long as what it made of it lives, and the trees as long as there is one."""

        class Trees:  # what of a manager matters
            def __init__(self, device):
                self.ids_to_funcs, self.device = {}, device

            def add_function(self, model, inputs, *args, **kwargs):
                self.ids_to_funcs[len(self.ids_to_funcs)] = SimpleNamespace(model=model)
                fn = functools.partial(self.run, model=weakref.ref(model))
                cudagraph_trees.get_container(self.device).add_strong_reference(fn)
                model.add(of_integers=False)
                return fn, fn(inputs)

            def run(self, inputs, model):
                log = model().log
                log.recordings = log.recordings or [RecordingLog(number=0, kernels=1, other_nodes=0)]
                log.recordings[0].replays += 1
                return [x * 2 for x in inputs]

        upstream = inspect.unwrap(cudagraph_trees.cudagraphify_impl)
        for way in Way:
            with (
                self.subTest(way=way.value),
                mock.patch.object(cudagraph_trees, "CUDAGraphTreeManager", Trees),
                mock.patch.object(cudagraph_trees, "get_input_idxs_to_check", lambda *args: []),
                mock.patch.object(cudagraph_trees, "remove_unaligned_input_idxs", lambda inputs, static: static),
                mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *args: []),
                mock.patch.object(trials, "decide", lambda compared, *_: Decision(way, compared)),  # noqa: B023
            ):
                model = self.model()
                given = {"device_index": 0, "is_backward": False, "is_inference": True}
                call = self.enter(model, upstream(model, [torch.ones(2)], (), **given))
                for _ in range(60):
                    self.assertEqual(call([torch.ones(2)]), [torch.full((2,), 2.0)])
                self.assertRegex(model.log.decision, f"^{way.value}: ")
                container = cudagraph_trees.get_container(0)
                trees, gone = weakref.ref(container.tree_manager), weakref.ref(model)
                self.assertEqual(container.live_cudagraphify_fns, 1)
                del model, call
                gc.collect()
                self.assertEqual((container.live_cudagraphify_fns, trees(), gone()), (0, None, None))
                cudagraph_trees.local.tree_manager_containers.clear()

    def test_ungraphed_from_then_on(self):
        model = self.model()
        call = self.enter(model, lambda inputs: self.fail("graphed"))
        manager = mock.Mock(spec=Manager)
        with mock.patch.object(cudagraph_trees, "get_manager", lambda *args, **kwargs: manager):
            model.instead.end(Way.UNGRAPHED, None)
        x = torch.ones(2)
        self.assertEqual(call([x]), [x * 2])
        manager.forget.assert_called_once_with(model, later=False)
        self.assertRegex(model.log.ungraphed_reason, "measured to be faster")

    def test_misaligned_inputs_are_written_to_as_well(self):
        def write(inputs):
            (x,) = inputs
            self.assertEqual(x.data_ptr() % 16, 0)
            x.add_(1)
            return []

        base = torch.zeros(9)
        with mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda inputs, static: [0]):
            call = self.enter(self.model(write), lambda inputs: self.fail("graphed"), mutated=(0,))
            call([base[1:]])
        self.assertEqual(base, torch.tensor([0.0] + [1.0] * 8))


class TestHandedOn(TestCase):
    """What other functions take of a function's outputs in the graph pool."""

    def node(self, model, number, managed=(), outputs=(), depth=0, **children):
        """``managed``: depth and output, of each managed input."""
        return SimpleNamespace(
            id=SimpleNamespace(id=number),
            wrapped_function=SimpleNamespace(model=model),
            cudagraph_managed_idxs=list(range(len(managed))),
            live_cudagraph_managed_path_refs=list(managed),
            outputs_metadata=[*({"nbytes": nbytes} for nbytes in outputs), 7, None],
            _path_from_root=iter(range(depth + 1)),
            children=dict(enumerate(children.values())),
        )

    def test_by_the_newest_recording(self):
        own, other = object(), object()
        first, partition, neighbour, plain = (SimpleNamespace(trial=trial) for trial in (own, own, other, None))
        manager = Manager.__new__(Manager)
        # What another's recording behind it gives, at depth 2, is not this one's; of several recordings one is
        # replayed.
        last = self.node(neighbour, 6, ((1, 1), (2, 0)))
        older, newer = self.node(plain, 4, ((1, 0),) * 9), self.node(plain, 5, ((1, 0), (1, 0), (1, 1), None))
        behind = self.node(partition, 3, ((1, 0),), outputs=(9,), a=[last], b=[older, newer])
        newest = self.node(first, 2, outputs=(100, 500), depth=1, a=[behind])
        above = self.node(neighbour, 0, a=[newest])
        manager.roots = {1: [self.node(first, 1, outputs=(9,))], 2: [above], 3: [self.node(neighbour, 7, ((0, 0),))]}
        self.assertEqual(sorted(manager.handed_on(first)), [100, 100, 500, 500])
        self.assertEqual(manager.handed_on(SimpleNamespace(trial=own)), [])
        manager.roots = {1: [self.node(first, 1)]}
        self.assertEqual(manager.handed_on(first), [])


class TestForget(TestCase):
    def setUp(self):
        super().setUp()
        patch = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.start()
        self.addCleanup(patch.stop)

    def node(self, **children):
        node = mock.Mock(children={int(key[1:]): nodes for key, nodes in children.items()})
        node.graph, node.native, node.outputs_weakrefs, node.older_outputs = "graph", "in C++", [], []
        node.unaliased_in_all_paths, node.log = [], RecordingLog(replays=3)
        return node

    def test_recordings_and_those_behind_them(self):
        model, other = object(), object()
        manager = Manager.__new__(Manager)
        manager._ways, manager._forgotten, manager._anew, manager._left = {}, [], {1: "why"}, None
        manager._is_unknown = False
        manager.graph = "its own"
        manager.ids_to_funcs = {1: SimpleNamespace(model=model), 2: SimpleNamespace(model=other)}
        below, last = self.node(), self.node()
        gone, leaf = self.node(f2=[below]), self.node(f1=[last])
        manager.roots = {1: [gone], 2: [leaf]}
        manager.path_state = cudagraph_trees.ExecutionState.EXECUTION
        manager._current_node = self.node()
        with mock.patch.object(Upstream, "try_end_curr_execution", lambda manager: None):
            manager.forget(model)
            self.assertEqual(set(manager.roots), {1, 2})  # a path is open
        manager._current_node = None
        manager.path_state = cudagraph_trees.ExecutionState.NONE
        with mock.patch.object(Upstream, "_run", lambda manager, inputs, function_id: "upstream's"):
            self.assertEqual(manager._run([], 2), "upstream's")
        self.assertEqual((manager.roots, leaf.children, manager._forgotten), ({2: [leaf]}, {}, []))
        for node in (gone, below, last):
            node.remove_node_cached_tensors.assert_called_once()
            self.assertIsNone(node.graph)
            self.assertIsNone(node.native)
        self.assertEqual(manager._anew, {})
        self.assertEqual(leaf.graph, "graph")
        leaf.remove_node_cached_tensors.assert_not_called()
        self.assertFalse(manager.give_pool_back())  # there is another recording

    def test_the_pool_behind_the_last_recording(self):
        """It is given back where nobody holds an output that lies there."""
        made = []

        class Fresh(Manager):
            def __init__(self, device_index):
                self.graph, self.stream, self.cuda_graphs_thread_pool = "graph", "stream", (0, 9)
                made.append(device_index)

        for is_held in (False, True):
            model, manager = object(), Fresh.__new__(Fresh)
            manager._ways, manager._forgotten, manager._anew, manager._left = {}, [], {}, None
            manager._is_unknown = False
            manager._made_with, manager.graph, manager.stream = ((3,), {}), "first graph", "first stream"
            manager.cuda_graphs_thread_pool = 0, 7
            manager.ids_to_funcs = {1: SimpleNamespace(model=model)}
            node = self.node()
            # Also of outputs that others have taken the place of.
            node.outputs_weakrefs, node.unaliased_in_all_paths = [mock.Mock(expired=lambda: True), None], [True, False]
            node.older_outputs = [mock.Mock(expired=lambda: not is_held)]  # noqa: B023
            manager.roots, manager._current_node = {1: [node]}, None
            manager.path_state = cudagraph_trees.ExecutionState.NONE
            made.clear()
            owned = {(0, 7), (0, 9)}
            with (
                mock.patch.object(pools, "OWNED", owned),
                mock.patch.object(torch.cuda, "empty_cache") as emptied,
            ):
                self.assertFalse(manager.give_pool_back())  # nothing was given back yet
                manager.forget(model)
                self.assertEqual((made, emptied.call_count), ([], 0) if is_held else ([3], 1))
                self.assertEqual(manager.graph, "first graph" if is_held else "graph")
                if is_held:
                    self.assertFalse(manager.give_pool_back())
                    is_held = False
                    manager._anew[1] = "a reason"
                    self.assertFalse(manager.give_pool_back())  # it is about to be used
                    manager._anew.clear()
                    self.assertTrue(manager.give_pool_back())
                self.assertEqual((manager.cuda_graphs_thread_pool, manager.stream), ((0, 9), "stream"))
                self.assertEqual((owned, manager._left), ({(0, 9)}, None))
                self.assertFalse(manager.give_pool_back())  # once
            self.assertEqual((made, emptied.call_count), ([3], 1))

    def a_pool(self, **state):
        """A manager with nothing to give back."""
        manager = Manager.__new__(Manager)
        given = {"_ways": {}, "_forgotten": [], "_anew": {}, "_left": None, "graph": "graph", "roots": {}, "stream": 0}
        given |= {
            "_made_with": ((0,), {}),
            "_current_node": None,
            "cuda_graphs_thread_pool": (0, 7),
            "ids_to_funcs": {},
        }
        given |= {"path_state": cudagraph_trees.ExecutionState.NONE, "_is_unknown": False}
        for name, value in (given | state).items():
            setattr(manager, name, value)
        return manager

    def test_outputs_that_are_made_anew_at_each_replay(self):
        """Of these only the newest are known, and somebody may hold others; of upstream's own recordings, who knows."""
        for log, is_back in ((RecordingLog(), True), (RecordingLog(replays=5), False), (None, False)):
            model, node = object(), self.node()
            node.outputs_weakrefs = [mock.Mock(expired=lambda: True), None, mock.Mock(expired=lambda: True)]
            node.unaliased_in_all_paths, node.log = [True, False, False], log
            manager = self.a_pool(ids_to_funcs={1: SimpleNamespace(model=model)}, roots={1: [node]})
            made = mock.Mock(side_effect=RuntimeError("it would be given back"))
            with mock.patch.object(Manager, "__init__", made):
                manager.forget(model)
                manager.give_pool_back()
            self.assertEqual((manager._is_unknown, made.called), (not is_back, is_back))

    def test_nothing_is_begun_anew_where_nothing_was_recorded(self):
        model = object()
        manager = self.a_pool(ids_to_funcs={1: SimpleNamespace(model=model)})
        with mock.patch.object(Manager, "__init__", side_effect=AssertionError("a new one")):
            manager.forget(model)
            self.assertFalse(manager.give_pool_back())
        self.assertIsNone(manager._left)

    def test_a_pool_that_cannot_be_begun(self):
        manager = self.a_pool(_left=[])
        with (
            mock.patch.object(Manager, "__init__", side_effect=RuntimeError("out of memory")),
            self.assertLogs("pygraph_trees.trees", "WARNING") as logs,
        ):
            self.assertFalse(manager.give_pool_back())
        self.assertIn("out of memory", logs.output[0])
        self.assertEqual((manager.graph, manager._left), ("graph", []))

    def test_what_was_shut_down_has_nothing(self):
        model = object()
        manager = self.a_pool(_left=[], _forgotten=[1], ids_to_funcs={1: SimpleNamespace(model=model)}, roots={1: []})
        manager.shutdown()
        self.assertEqual((manager._left, manager._forgotten), (None, []))
        manager.forget(model)
        self.assertFalse(manager.give_pool_back())
        manager._forget()
        self.assertEqual(manager.handed_on(SimpleNamespace(trial=object())), [])

    def test_not_while_somebody_captures(self):
        manager = self.a_pool(_left=[])
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            self.assertFalse(manager.give_pool_back())

    def test_from_another_thread_it_is_the_managers_own_that_does_it(self):
        model, node = object(), self.node()
        manager = self.a_pool(ids_to_funcs={1: SimpleNamespace(model=model)}, roots={1: [node]}, _ways={1: "a way"})
        manager.forget(model, later=True)
        self.assertEqual((manager.roots, manager._ways, manager._forgotten), ({1: [node]}, {}, [1]))

    def test_a_path_that_was_open(self):
        """It is ended at a look, where that takes nothing from anybody."""
        state = cudagraph_trees.ExecutionState
        for path_state, are_dead, is_ended in (
            (state.EXECUTION, False, True),  # upstream ends it at a new step
            (state.RECORDING, True, True),
            (state.RECORDING, False, False),  # upstream would take the outputs away
            (state.WARMUP, True, False),
        ):
            node = self.node()
            last = mock.Mock(all_outputs_are_dead=lambda are_dead=are_dead: are_dead)
            manager = self.a_pool(_forgotten=[1], roots={1: [node]}, _current_node=last, path_state=path_state)

            def end(manager):
                manager.current_node = None

            with (
                mock.patch.object(Upstream, "try_end_curr_execution", end),
                mock.patch.object(Upstream, "clear_current_path_state_and_set_to_none", end),
                mock.patch.object(Manager, "__init__", side_effect=RuntimeError("not now")),
            ):
                manager.give_pool_back()
            self.assertEqual(manager.roots, {} if is_ended else {1: [node]})


if __name__ == "__main__":
    run_tests()
