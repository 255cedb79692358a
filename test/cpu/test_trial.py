"""Trials: the way and the measurements of each call, and that every call is made once."""

import functools
import gc
import inspect
import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.report.log import Count, FunctionLog, GraphLog, RecordingLog, journal
from pygraph_trees.report.naming import compile_id
from pygraph_trees.report.records import InputRecord
from pygraph_trees.selection import functions as selection
from pygraph_trees.selection import trial as trials
from pygraph_trees.selection.decision import Execution
from pygraph_trees.selection.profiles import Profile
from pygraph_trees.selection.trial import Environment, Phase, Trial, TrialMember, Turn
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions.function import Aligned, FunctionModel, entered
from pygraph_trees.trees.hooks import choice
from pygraph_trees.trees.managers.manager import Manager

PLAIN = 80  # kernels: more than a trial would be held for
HEAVY = {"ungraphed": (20.0, 40.0), "graphed": (90.0, 40.0)}  # un-graphed is better


class World:
    """A host and a GPU whose times are set by the tests."""

    def __init__(self):
        self.now_ns = 0
        self.gpu_until_us = 0.0
        self.gpu_is_late = False  # whether the GPU never reaches a mark

    @property
    def now_us(self):
        return self.now_ns / 1e3

    def is_idle(self):
        return self.gpu_until_us <= self.now_us

    def mark(self):
        return max(self.now_us, self.gpu_until_us)

    def us_between(self, begin, end):
        return None if self.gpu_is_late or end > self.now_us else end - begin

    def work(self, host_us, gpu_us, pieces=1):
        """The GPU begins a piece once the host has launched it."""
        begin_us = self.now_us
        for piece in range(1, pieces + 1):
            self.gpu_until_us = max(begin_us + host_us * piece / pieces, self.gpu_until_us) + gpu_us / pieces
        self.now_ns += int(host_us * 1e3)

    def wait(self):
        self.now_ns = max(self.now_ns, int(self.gpu_until_us * 1e3) + 1)


class Function(Environment):
    """A function that takes the given times, and is replayed from its third graphed call on."""

    def __init__(self, world, trial, ungraphed=(100.0, 50.0), graphed=(10.0, 40.0), kernels=4, mode="inference"):
        self.world, self.trial, self.kernels = world, trial, kernels
        self.times = {Execution.UNGRAPHED: ungraphed, Execution.GRAPHED: graphed}
        self.log = FunctionLog("Net", "0/0", mode, 1, {})
        self.went, self.calls = [], []
        self.ended, self.handed, self.why_not_tried = self.went.append, lambda: 0, lambda: None
        self.member = TrialMember(self.log, lambda inputs: self.graph(inputs), self.ungraph, world, self)
        trial.join(self.member)

    def ungraph(self, inputs):
        self.calls.append("u")
        self.log.runs += 1
        self.world.work(*self.times[Execution.UNGRAPHED], self.kernels)
        return self.outputs(inputs)

    def graph(self, inputs):
        self.calls.append("g")
        number = self.calls.count("g")
        if number == 1:
            self.log.warmups += 1
            self.world.work(1e4, 1e3)
        elif number == 2:
            self.log.recordings.append(RecordingLog(0, kernels=self.kernels, counter=Count(1), has_fast_path=False))
            self.world.work(1e5, 1e3)
        else:
            self.log.recordings[-1].counter.value += 1
            self.world.work(*self.times[Execution.GRAPHED])
        self.log.runs += number <= 2
        return self.outputs(inputs)

    def outputs(self, inputs):
        return [int(x) + 1 for x in inputs if type(x) is float]

    def __call__(self, *inputs, sizes=()):
        return self.trial.call(self.member, [*map(float, inputs), *sizes])


def if_aligned(inputs, static):
    """The indices of aligned inputs, for which code that needs alignment is compiled."""
    return [index for index, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.data_ptr() % 16 == 0]


class TrialTestCase(TestCase):
    def setUp(self):
        self.world, self.turn = World(), Turn()
        self.enterContext(mock.patch.object(trials.time, "perf_counter_ns", lambda: self.world.now_ns))

    def trial(self, found=None):
        """A trial whose memory has ``found``. Replays are on the slow path, so that few kernels leave a doubt."""
        self.memory = mock.Mock(find=mock.Mock(return_value=found))
        return Trial(turn=self.turn, memory=self.memory)

    def one(self, steps=0, **function):
        """A trial and its only function, after some steps."""
        trial = self.trial()
        function = Function(self.world, trial, **function)
        self.steps(steps, function)
        return trial, function

    def pair(self):
        """A trial, its forward and its backward."""
        trial, modes = self.trial(), ("forward", "backward")
        return trial, *(Function(self.world, trial, kernels=2, mode=mode) for mode in modes)

    def measured(self, function, *ways):
        return sum(function.member.made(way) for way in ways or Execution)

    def steps(self, count, *functions, wait=True):
        for number in range(count):
            for function in functions:
                self.assertEqual(function(number), [number + 1])
            if wait:
                self.world.wait()


class TestPlain(TrialTestCase):
    """Functions that are decided without a measurement."""

    def test_what_is_plain(self):
        """Many kernels are graphed, large copies are not, and what would disturb others is not tried."""
        for kernels, nbytes, why_not, way, said in (
            (PLAIN, 0, None, Execution.GRAPHED, "graphed: 80 launches in one replay"),
            (1, 1 << 27, None, Execution.UNGRAPHED, "un-graphed: 1 launch in one replay, 134 MB copied"),
            (1, 0, "of the test", Execution.GRAPHED, "graphed: of the test"),
        ):
            trial, function = self.one(**HEAVY, kernels=kernels)
            function.why_not_tried = lambda why_not=why_not: why_not
            self.steps(2, function)
            if nbytes:
                copied = InputRecord(0, "x", "live", "cuda:0", nbytes, nbytes, False, "copy", "of the test")
                function.log.recordings[-1].inputs = (copied,)
            self.steps(5, function)
            self.assertEqual((trial.is_over, function.went, trial.compared), (True, [way], None))
            self.assertEqual("".join(function.calls), "gg" + ("g" if way is Execution.GRAPHED else "u") * 5)
            self.assertIn(said, function.log.decision)
            self.assertEqual(function.log.trial_runs, 0)
            self.memory.store.assert_not_called()

    def test_functions_of_a_step_are_looked_at_once_all_are_recorded(self):
        """They are measured if the nodes of a recording are not known."""
        for kernels, phase, went in ((PLAIN, Phase.OVER, [Execution.GRAPHED]), (None, Phase.MEASURING, [])):
            trial = self.trial()
            functions = [Function(self.world, trial, kernels=1), Function(self.world, trial, kernels=kernels)]
            self.steps(2, *functions)
            self.assertIs(trial.phase, Phase.RECORDING)
            self.steps(1, *functions)
            self.assertEqual((trial.phase, [function.went for function in functions]), (phase, [went] * 2))

    def test_a_remembered_decision_is_not_measured(self):
        for way in Execution:
            trial = self.trial(Profile("key", "Net", way, f"{way.value}: by far", 86400.0 * 2))
            functions = [Function(self.world, trial), Function(self.world, trial)]
            self.steps(4, *functions)
            for function in functions:
                self.assertEqual(function.calls, ["g" if way is Execution.GRAPHED else "u"] * 4)
            for function in (*functions, Function(self.world, trial)):  # the last one joins late
                self.assertRegex(function.log.decision, f"^{way.value}: by far, as measured on 1970-01-0[23]$")
                self.assertEqual((function.went, function.log.trial_runs), ([way], 0))
            self.memory.find.assert_called_once_with([0])
            self.memory.store.assert_not_called()


class TestTrial(TrialTestCase):
    def test_graphs_that_pay_are_kept(self):
        trial, function = self.one(30)
        # Warm-up, recording, an unmeasured replay, an unmeasured un-graphed call, and five pairs.
        self.assertEqual("".join(function.calls), "gggg" + "uuu" + "gg" + "uu" + "gg" + "u" + "g" * 16)
        self.assertEqual((trial.is_over, function.went), (True, [Execution.GRAPHED]))
        # From idle: the GPU's 50 us are over 12.5 after the last of four launches in 100; a replay takes 10 and 40.
        found = trial.compared.latency
        self.assertEqual((found.graphed_us, found.ungraphed_us), (50.0, 112.5))
        self.assertEqual(function.log.decision, "graphed: 50 us a call against 112 us (4 launches in one replay)")
        self.assertEqual(function.log.record().ungraphed_calls, 0)
        self.memory.find.assert_called_once()
        self.memory.store.assert_called_once_with(Execution.GRAPHED, function.log.decision)

    def test_graphs_that_do_not_pay(self):
        """A forward whose backward is not graphed does not wait for a backward."""
        for mode in ("inference", "forward"):
            trial, function = self.one(30, **HEAVY, kernels=1, mode=mode)
            self.assertEqual((function.went, trial.way), ([Execution.UNGRAPHED], Execution.UNGRAPHED))
            self.assertEqual("".join(function.calls)[-5:], "uuuuu")
            self.assertRegex(function.log.decision, "^un-graphed: 60 us a call against 130 us")
            self.assertEqual(self.memory.store.called, mode == "inference")  # in another process it may train

    def test_finalizers_call_while_measured_calls_are_counted(self):
        counted = TrialMember(FunctionLog("Net", None, "inference", 1, {}), None, None, None, None)
        for _ in range(4):  # the first one is not measured
            counted.add(SimpleNamespace(way=Execution.GRAPHED))
        left = iter(range(1, 100))

        class Garbage:
            """Makes a measured call and more garbage when it is collected."""

            def __init__(self):
                self.itself = self

            def __del__(self):
                counted.add(SimpleNamespace(way=Execution.GRAPHED))
                if next(left, None):
                    Garbage()

        self.addCleanup(gc.set_threshold, *gc.get_threshold())
        gc.collect()
        Garbage()
        gc.set_threshold(1)  # each allocation collects
        self.assertGreater(counted.made(Execution.GRAPHED), 3)
        gc.set_threshold(0)

    def test_one_trial_at_a_time(self):
        """The other function is graphed until the first one is decided."""
        first, second = (Function(self.world, self.trial()) for _ in range(2))
        self.steps(40, first, second)
        self.assertEqual((first.went, second.went), ([Execution.GRAPHED], [Execution.GRAPHED]))
        ways = "".join(first.calls), "".join(second.calls)
        self.assertGreater(ways[1].index("u"), ways[0].rindex("u"))

    def test_a_trial_whose_functions_are_not_called_or_gone_loses_its_turn(self):
        first, second, third = (Function(self.world, self.trial()) for _ in range(3))
        self.steps(5, first)
        self.steps(300, second)
        self.assertEqual((first.went, second.went), ([], [Execution.GRAPHED]))
        self.steps(5, third)
        del third
        gc.collect()
        self.steps(40, first)
        self.assertEqual(first.went, [Execution.GRAPHED])

    def test_nobody_waits_for_the_gpu(self):
        """If the GPU does not catch up, calls keep going the same way until it has."""
        trial, function = self.one()
        self.world.gpu_is_late = True
        self.steps(3 * trials._MOST_STEPS, function)
        self.assertEqual((trial.is_over, function.calls[-1]), (False, function.calls[-trials._MOST_STEPS]))
        self.world.gpu_is_late = False
        self.steps(1, function)
        self.assertEqual((trial.is_over, function.went), (True, [Execution.GRAPHED]))

    def test_a_function_that_cannot_be_recorded_runs_ungraphed(self):
        """A warm-up distinguishes it from a function whose thread has no trees. Later, there may be memory for it."""
        for warmups, lacked, way in ((1, 0, Execution.UNGRAPHED), (1, 3, Execution.GRAPHED), (0, 0, Execution.GRAPHED)):
            trial, function = self.one()
            function.log.warmups, function.graph, function.log.lacked = warmups, function.outputs, lacked
            function.log.not_graphed("it mutates an input")
            self.steps(trials._MOST_STEPS + 4, function)
            found = trial.is_over, trial.way, function.log.ungraphed_reason
            self.assertEqual(found, (True, way, "it mutates an input"))

    def test_a_function_that_leaves_ends_its_trial_if_it_was_alone(self):
        trial = self.trial()
        first, second = (Function(self.world, trial, kernels=1) for _ in range(2))
        self.steps(5, first, second)
        trial.leave(first.member)
        self.steps(5, second)
        self.assertFalse(trial.is_over)
        trial.leave(second.member)
        self.assertTrue(trial.is_over)

    def test_many_trials_leave_a_trial_its_turn(self):
        waiting, holder = [self.trial() for _ in range(300)], self.trial()
        for _ in range(1000):
            self.assertTrue(self.turn.take(holder))
            self.assertFalse(any(map(self.turn.take, waiting)))

    def test_a_trial_that_asks_for_the_turn_waits_for_no_other_thread(self):
        """That thread may run a finalizer that waits for this trial."""
        first, second, found = self.trial(), self.trial(), []

        def is_over(holder):
            if not found:
                found.append("asked")
                other = threading.Thread(target=lambda: found.append(self.turn.take(second)), daemon=True)
                other.start()
                other.join(10)
            return False

        holder = type("Holder", (), {"is_over": property(is_over)})()
        self.assertTrue(self.turn.take(holder))
        found.append(self.turn.take(first))
        self.assertEqual(found, ["asked", False, False])

    def test_calls_are_measured_after_the_gpu_is_done_with_them(self):
        """A loop may be far ahead of the GPU, which is the slower one with the graph in the second case."""
        for steps, ungraphed, graphed, way in (
            (30, (10.0, 100.0), (5.0, 90.0), Execution.GRAPHED),
            (400, (100.0, 1000.0), (20.0, 1100.0), Execution.UNGRAPHED),
        ):
            trial, function = self.one(ungraphed=ungraphed, graphed=graphed, kernels=1)
            self.steps(steps, function, wait=False)
            self.world.wait()
            self.steps(2, function)
            found = trial.compared.throughput
            least = min(ungraphed[1], graphed[1])
            self.assertEqual((trial.way, found.graphed_us, found.ungraphed_us), (way, graphed[1], least))

    def test_work_of_functions_downstream_counts(self):
        """It is their additional work if this function were not graphed."""
        for handed, way in ((0, Execution.UNGRAPHED), (40, Execution.GRAPHED)):
            trial, function = self.one(ungraphed=(50.0, 5.0), graphed=(60.0, 5.0), kernels=1)
            function.handed = lambda handed=handed: handed
            self.steps(40, function)
            self.assertEqual(trial.way, way)

    def test_a_step_goes_one_way(self):
        """The backward joins after the first forward."""
        trial, forward = self.one(kernels=1)
        forward(0)
        backward = Function(self.world, trial, graphed=(5.0, 20.0))
        backward(0)
        self.steps(39, forward, backward)
        self.assertEqual((forward.calls, forward.went), (backward.calls, backward.went))
        self.assertEqual(forward.log.decision, backward.log.decision)
        self.assertEqual(sum(facts.launches for facts in trial.compared.facts), 5)

    def test_a_forward_and_its_backward_go_one_way(self):
        """They do so even if other calls come in between, as in pipelines, and if forwards have no backward.

        Such forwards come in each step, for evaluation or after an exception, or once, before training. In a step,
        positive numbers are forwards of micro-batches, the negative ones their backwards; each has two partitions.
        """
        pipelines = (
            [1, 2, -1, 3, -2, 4, -3, -4],
            [1, 2, 3, 4, -1, 5, -2, 6, -3, 7, -4, 8, -5, -6, -7, -8],
            [1, 2, 3, -1, -2, -3],
            [1, 2, 3, -3, -2, -1],
        )
        endless = [1, 2, *itertools.chain.from_iterable((n, 2 - n) for n in range(3, 3000))]
        without = ([1, 2, -2], [1, 2, 3, 4, 5, -5], [1, *[2, -2] * 1000], [1, 2, -2, -2], [1, 1, -1])
        modes = ("forward", "forward", "backward", "backward")
        for schedule, times in (
            *itertools.product(pipelines, ({}, HEAVY)),
            *((one, {}) for one in (*without, endless)),
        ):
            with self.subTest(schedule=schedule[:16], **times):
                trial, ways, pairs, most = self.trial(), {}, set(), 400 if schedule in without else 200
                functions = [Function(self.world, trial, kernels=2, mode=mode, **times) for mode in modes]
                for number in itertools.islice(itertools.cycle(schedule), most - 1):
                    called = functions[:2] if number > 0 else functions[2:]
                    before = self.measured(called[-1])
                    for function in called:
                        function(0)
                    self.world.wait()
                    self.assertEqual(called[0].calls, called[1].calls)
                    if number > 0:
                        ways[number] = called[0].calls[-1]
                    elif self.measured(called[-1]) != before:
                        pairs.add(ways[-number] + called[0].calls[-1])
                    if trial.is_over:
                        break
                self.assertIsNotNone(trial.compared)
                self.assertTrue(schedule is endless or pairs == {"gg", "uu"}, pairs)

    def test_a_block_that_is_called_many_times_in_a_step_is_decided(self):
        """All forwards come first, and the way changes only once per step."""
        for partitions, count in itertools.product((1, 2), (1, 4, 12, 13, 24, 32, 64, 100)):
            with self.subTest(partitions=partitions, count=count):
                trial = self.trial()
                made = functools.partial(Function, self.world, trial, **HEAVY)
                forwards, backwards = ([made(mode=mode) for _ in range(partitions)] for mode in ("forward", "backward"))
                step = [function for row in (forwards, backwards[::-1]) for _ in range(count) for function in row]
                self.steps(20, *step)
                self.assertEqual(trial.way, Execution.UNGRAPHED)
                for function in (*forwards, *backwards):
                    self.assertEqual(function.calls, forwards[0].calls)
                    for begin in range(0, len(function.calls), count):
                        self.assertEqual(len(set(function.calls[begin : begin + count])), 1)

    def test_calls_that_are_not_of_whole_steps_end_the_trial_without_a_decision(self):
        """Many forwards or backwards may be of one step, but not endlessly many; nor is a function awaited so long."""
        for modes, begin, repeated, most in (
            (("forward", "backward"), "fbfbfb", "f", trials._MOST_CALLS),
            (("forward", "backward"), "fbfbf", "b", trials._MOST_CALLS),
            (("inference", "inference"), "fb", "f", trials._MOST_STEPS - 1),
        ):
            trial, made = self.trial(), 0
            functions = [Function(self.world, trial, kernels=2, mode=mode) for mode in modes]
            self.steps(1, *(functions["fb".index(name)] for name in begin))
            while not trial.is_over and made < 1000:
                self.steps(1, functions["fb".index(repeated)])
                made += 1
            self.assertEqual((made, trial.compared), (most + 1, None))
            self.assertEqual([function.went for function in functions], [[Execution.GRAPHED]] * 2)

    def test_nobody_waits_for_a_change(self):
        """A finalizer that comes during a change calls functions, and waits for a backward in another thread."""
        trial, forward, backward = self.pair()
        inside = []

        def finalize():
            if not inside:
                inside.append(forward(5))
                inside.append(autograd.submit(backward, 6).result(timeout=60))

        forward.why_not_tried = finalize
        with ThreadPoolExecutor(1) as autograd:
            self.steps(60, forward, lambda x: autograd.submit(backward, x).result())
        self.assertEqual(inside, [[6], [7]])
        self.assertIsNotNone(trial.compared)
        self.assertEqual((forward.went, backward.went), ([Execution.GRAPHED], [Execution.GRAPHED]))

    def test_a_call_that_records_again_is_not_measured(self):
        _, function = self.one(8)
        before = self.measured(function, Execution.GRAPHED)
        again = RecordingLog(1, kernels=4, other_nodes=0, has_fast_path=False)
        with mock.patch.object(self.world, "work", lambda *times: function.log.recordings.append(again)):
            self.steps(1, function)
        self.assertEqual((function.calls[-1], self.measured(function, Execution.GRAPHED)), ("g", before))

    def test_only_like_is_compared_with_like(self):
        """A decision is kept for the first call's sizes only: the memory was asked for those.

        The GPU takes as many microseconds as the size. Sizes that do not come again are graphed undecided.
        """
        for sizes, ungraphed, graphed, found, stored in (
            ([100] * 8 + [400] * 20 + [100, 400] * 20, 60.0, 30.0, (160, 130), 1),
            ([400] * 8 + [100] * 20 + [400, 100] * 20, 60.0, 30.0, (460, 430), 1),
            ([100] + [400] * 30, 60.0, 30.0, (460, 430), 0),
            ([100] * 8 + [400] * (trials._MOST_STEPS + 2), 30.0, 60.0, None, 0),
        ):
            trial, function = self.one(kernels=1)
            for size in sizes:
                was_over, gpu_us = trial.is_over, float(size)
                function.times = {Execution.UNGRAPHED: (ungraphed, gpu_us), Execution.GRAPHED: (graphed, gpu_us)}
                self.steps(1, functools.partial(function, sizes=(size,)))
            latency = trial.compared and trial.compared.latency
            self.assertEqual(latency and (latency.ungraphed_us, latency.graphed_us), found)
            self.assertEqual((was_over, function.went), (found is not None, [Execution.GRAPHED]))
            self.assertEqual((trial.way, self.memory.store.call_count), (Execution.GRAPHED, stored))

    def test_a_decision_that_is_not_clear_is_not_kept(self):
        trial, function = self.one()
        for number in range(40):
            function.times = {way: (100.0 + 40.0 * (number % 5) * (number % 2), 5.0) for way in Execution}
            self.steps(1, function)
        self.assertEqual((trial.way, trial.compared.is_clear), (Execution.GRAPHED, False))
        self.memory.store.assert_not_called()

    def test_a_disturbed_measurement_is_not_kept(self):
        for disturbed, stored in (
            (mock.patch.object(torch.autograd.profiler, "_is_profiler_enabled", True), 0),
            (mock.patch.dict("os.environ", CUDA_LAUNCH_BLOCKING="1"), 0),
            (mock.patch.object(sys, "getprofile", lambda: print), 0),
            (torch._inductor.config.patch({"triton.force_cudagraph_sync": True}), 0),
            (mock.patch.dict("os.environ", CUDA_LAUNCH_BLOCKING="0"), 1),
        ):
            trial, function = self.one(7)
            with disturbed:
                self.steps(1, function)
            self.steps(30, function)
            self.assertEqual((trial.way, self.memory.store.call_count), (Execution.GRAPHED, stored))

    def interrupted(self, run, other, line):
        """Calls ``run``, and in another thread ``other`` after ``line`` lines of trial code. Returns whether ``run``
        had so many lines. If ``other`` blocks, ``run`` continues after a moment."""
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
        """It ends while a function is called, or while another one joins."""
        for steps, joins in ((4, False), (8, False), (14, False), (1, True)):
            for line in itertools.count():
                trial, function = self.one(steps)
                made, others = [], []
                run = functools.partial(Function, self.world, trial) if joins else functools.partial(function, 1)
                if not self.interrupted(lambda: made.append(run()), lambda: others.append(function(5)), line):  # noqa: B023
                    break
                if joins:
                    self.assertEqual(made[0].went, [Execution.GRAPHED])
                else:
                    self.assertEqual((made, len(function.calls)), ([[2]], steps + 2))
                self.assertEqual((trial.is_over, function.went, others), (True, [Execution.GRAPHED], [[6]]))
                self.assertEqual(self.measured(function), 0)  # nothing is left to read
            self.assertGreater(line, 5 if joins else 40)

    def test_an_error_of_the_program_does_not_end_the_trial(self):
        trial, function = self.one(5)
        failing = mock.patch.object(self.world, "work", side_effect=ValueError("theirs"))
        with failing, self.assertRaisesRegex(ValueError, "theirs"):
            function(1)
        self.steps(30, function)
        self.assertTrue(trial.is_over)


class TestTrialOf(TestCase):
    AUTO = Settings("off", "auto", "auto")

    def of(self, graph, compile_id, settings=AUTO, *, mode="forward", **log):
        log = FunctionLog("Net", compile_id, mode, log.pop("partition", 1), {}, graph=graph, **log)
        return selection.trial_of(log, settings, 0, has_fast_path=True)

    def test_a_trial_is_held_only_if_it_is_asked_for(self):
        """Nor with a collective, whose ranks would choose for themselves. Nobody keeps it without its functions."""
        kept = weakref.ref(self.of(None, "8/0"))
        gc.collect()
        self.assertIsNone(kept())
        self.assertIsNone(self.of(None, "8/0", mode="inference", has_collective=True))
        with mock.patch.object(selection, "may_wait_for_others", lambda: True):
            self.assertIsNone(self.of(None, "8/0"))
        for way in ("always", "never"):
            self.assertIsNone(self.of(None, "8/0", replace(self.AUTO, selective=way)))

    def test_partitions_and_the_backward_are_decided_together(self):
        """A forward has one backward: a function from a cache has only a compile id, and ids start again."""
        forward, again, backward, other = (GraphLog("Net", "7/0", "forward", ()) for _ in range(4))
        first = self.of(forward, "7/0")
        for _ in range(2):  # partitions
            self.assertIs(self.of(forward, "7/0"), first)
            self.assertIs(self.of(backward, "7/0", mode="backward"), first)
        self.assertIsNot(self.of(other, "7/0", mode="backward"), first)
        self.assertIsNot(self.of(backward, "7/1"), first)
        self.assertIsNot(self.of(again, "7/0"), first)  # compiled again
        self.assertIsNot(self.of(None, None), self.of(None, None))

    def test_programs_of_one_compile_id(self):
        """DDP's buckets share one, and their backwards are compiled after all forwards."""

        def of(number, mode):
            graph, context = GraphLog("Net", "3/0", mode, ()), TracingContext(None)
            context.aot_graph_name = [f"{number}_{mode}"]
            with tracing(context):
                first, second = (self.of(graph, "3/0", mode=mode) for _ in range(2))  # partitions
            self.assertIs(first, second)
            return first

        trials = [of(number, "forward") for number in (4, 5)]
        self.assertIs(of(5, "backward"), trials[1])
        self.assertIs(of(4, "backward"), trials[0])
        self.assertNotIn(of(6, "backward"), trials)  # its forward is not graphed

    def test_forward_and_backward_of_a_program_have_the_same_key(self):
        found = []

        def compiler(graph, inputs):
            found.append((compile_id(), selection._program(compile_id())))
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
        for _ in range(2):
            torch._dynamo.reset()
            with torch._functorch.config.patch(enable_autograd_cache=False):
                compiled = torch.compile(lambda x: x.sin() * x, backend=backend)
                compiled(torch.ones(2, requires_grad=True)).sum().backward()
        identities, programs = zip(*found, strict=True)
        self.assertEqual([identities.index(identity) for identity in identities], [0] * 4)
        self.assertEqual([programs.index(program) for program in programs], [0, 0, 2, 2])

    def test_a_finalizer_that_needs_a_trial_while_one_is_made(self):
        found, made = [], Trial

        def make(**given):
            if not found:
                found.append(None)
                found[0] = self.of(None, "9/1")
            return made(**given)

        with mock.patch.object(selection, "Trial", make):
            thread = threading.Thread(target=lambda: found.append(self.of(None, "9/0")), daemon=True)
            thread.start()
            thread.join(60)
        self.assertFalse(thread.is_alive())
        self.assertEqual(list(map(type, found)), [Trial, Trial])

    def test_a_profile_is_of_the_code_and_the_settings(self):
        """Partitions are decided one by one in inference, and together in training."""
        given = []
        self.enterContext(mock.patch.object(selection, "Kept", lambda *args: given.append(args)))
        for mode, partition in (("forward", 1), ("inference", 1), ("inference", 2)):
            graph = GraphLog("Net", "7/2", mode, (), code="cabc")
            self.of(graph, "7/2", replace(self.AUTO, outputs="upstream"), mode=mode, partition=partition)
        *called, matters = given[0]
        self.assertEqual(called, ["cabc", "Net 7/2 forward 1", 0])
        self.assertEqual((matters["indirection"], matters["outputs"], matters["fast path"]), ("auto", "upstream", True))
        self.assertEqual([matters["partition"] for *_, matters in given], ["all", 1, 2])
        self.of(GraphLog("Net", "7/3", "forward", ()), "7/3")  # the key of its code is not known
        self.assertEqual(len(given), 3)


class TestChoice(TrialTestCase):
    def model(self, fn=lambda inputs: [x * 2 for x in inputs]):
        with journal.compiling(GraphLog("Net", "5/0", "inference", ())):
            model = FunctionModel.of(fn, is_backward=False, is_inference=True)
        model.log.compile_id = "5/0"
        model.settings = Settings("off", "auto", "auto")
        return model

    def enter(self, model, run, mutated=()):
        with mock.patch.object(choice, "CudaDevice", lambda device: self.world):
            return entered(model, run, Aligned(model, (), mutated), choice.chooser(0))

    def test_ungraphed_calls_give_the_pool_back_once_no_output_is_held(self):
        for answers, tries in (([False, False, True], 3), ([False] * 100, choice._MOST_TRIES)):
            model, manager = self.model(), mock.Mock(spec=Manager, give_pool_back=mock.Mock(side_effect=answers))
            with mock.patch.object(cudagraph_trees, "get_manager", lambda *args, **kwargs: manager):  # noqa: B023
                call = self.enter(model, lambda inputs: self.fail("graphed"))
                call.kept.end(Execution.UNGRAPHED, None)
                for _ in range(100):
                    self.assertEqual(call([torch.ones(2)]), [torch.full((2,), 2.0)])
            self.assertEqual(manager.give_pool_back.call_count, tries)
            manager.forget.assert_called_once_with(model)
            self.assertRegex(model.log.ungraphed_reason, "faster un-graphed")
            gone = weakref.ref(model)
            manager.reset_mock()  # the mock holds its arguments
            del model, call
            gc.collect()
            self.assertIsNone(gone())

    def test_torch_lets_go_of_what_is_compiled(self):
        """It holds a function as long as its compiled callable lives, and the trees as long as there is a function."""

        class Trees:  # the parts of a manager that matter
            def __init__(self, device, **options):  # options since torch 2.15
                self.ids_to_funcs, self.device = {}, device

            def add_function(self, model, inputs, *args, **kwargs):
                self.ids_to_funcs[len(self.ids_to_funcs)] = SimpleNamespace(model=model)
                fn = functools.partial(self.run, model=weakref.ref(model))
                cudagraph_trees.get_container(self.device).add_strong_reference(fn)
                model.dispatch.add()
                return fn, fn(inputs)

            def run(self, inputs, model):
                log = model().log
                log.recordings = log.recordings or [RecordingLog(number=0, kernels=1, other_nodes=0)]
                log.recordings[0].counter.value += 1
                return [x * 2 for x in inputs]

        upstream = inspect.unwrap(cudagraph_trees.cudagraphify_impl)
        for way in Execution:
            with (
                self.subTest(way=way.value),
                mock.patch.object(cudagraph_trees, "CUDAGraphTreeManager", Trees),
                mock.patch.object(trials, "decide", lambda compared: way),  # noqa: B023
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

    def test_the_first_call_decides_which_inputs_must_be_aligned(self):
        """A graphed call consumes its inputs; code compiled for aligned inputs computes wrong values with others."""
        base = torch.zeros(16)
        aligned, misaligned = base[:8], base[1:9]
        for first, sees in ((aligned, 0), (misaligned, 4)):
            seen = []
            model = self.model(lambda inputs, seen=seen: seen.append(inputs[0].data_ptr() % 16))
            with mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", if_aligned):
                call = self.enter(model, list.clear)
                call([first])
                call.kept.end(Execution.UNGRAPHED, None)
                call([misaligned])
                call([misaligned])
            self.assertEqual(seen, [sees] * 2)


if __name__ == "__main__":
    run_tests()
