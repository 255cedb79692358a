"""Lanes are used only where they pay: a forecast without lanes, a limit of memory, then a trial of real replays.

Captures are on the fake driver. Each replay of the fake graph notes the edges that its instantiation has, and the fake
GPU takes another time for each form. Whatever is interrupted or fails, a replay launches once, and the edges of the
instantiated graph are known.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from captured_operations import BranchesTestCase, OnLanes, custom, ops, side_by_side
from fake_trees import bare_manager
from test_live_inputs import LiveInputsTestCase
from test_live_inputs import at as tensor_at
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.edges import data_flow
from pygraph_trees.edges.branches import Branching
from pygraph_trees.edges.data_flow import DataFlow, Forecast
from pygraph_trees.edges.lanes import BYTES_PER_US
from pygraph_trees.edges.rewriting import GraphLost
from pygraph_trees.edges.trial import ALL, BLOCK, WARM_UP, Trial, Tried, compared
from pygraph_trees.reasons import Reason
from pygraph_trees.report.log import FunctionLog, GraphLog, RecordingLog
from pygraph_trees.report.text import function_notes
from pygraph_trees.selection import profiles
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions import lanes
from pygraph_trees.trees.functions.function import FunctionModel
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.recordings import captured_graph, recording
from pygraph_trees.trees.recordings.captured_graph import try_lanes

AUTO = Settings("off", "auto", "always", branches="auto")
MB = 1 << 20


def forecast_of(*operations, us=0.0, shared=False):
    """Of operations, each with the numbers of those whose results it reads, or None if it may not move."""
    found, made = Forecast(), []
    with mock.patch.object(data_flow, "BYTES_PER_US", BYTES_PER_US if shared else 1e12):
        for read in operations:
            made.append(torch.empty(1))
            given = [*((made[number], False) for number in read or ()), (made[-1], True)]
            found.captured(given, int(us * BYTES_PER_US), may_move=read is not None)
        return (*found.choose(), found)


def chains(count, length):
    """Operations of chains, in turn; a chain's first one reads nothing."""
    return [() if at < count else (at - count,) for at in range(count * length)]


class TestForecast(BranchesTestCase):
    def test_as_many_lanes_as_pay(self):
        """An operation takes 2.5 us, and a hop to another lane 1.5."""
        fork = [(), (0,), (0,), (1, 2)]  # two at a time, between two others: 10 us, or 9
        for operations, expected in (
            (chains(1, 40), 0),
            (chains(2, 4), 0),  # 20 us or 10: not more than 10 less
            (chains(2, 5), 2),
            (chains(4, 5), 4),
            ([*fork, *((at - 1,) for at in range(4, 60))], 0),  # less than 8%
        ):
            count, why, found = forecast_of(*operations)
            self.assertEqual(count, expected, why)
            self.assertEqual(found.us(1), 2.5 * len(operations))
            self.assertIs(why.reason, Reason.ON_LANES if count else Reason.LITTLE_GAIN)

    def test_operations_that_share_all_bandwidth_do_not_gain(self):
        self.assertEqual([forecast_of(*chains(4, 5), us=99, shared=shared)[0] for shared in (True, False)], [0, 4])

    def test_a_capture_without_lanes_forecasts_what_lanes_give(self):
        """By data flow, although memory is used again; unknown operations are barriers."""
        plain, onto = OnLanes(), OnLanes()
        log, branching, ends = side_by_side(plain, count=3, length=6, on_lanes=False)
        on_lanes, _, others = side_by_side(onto, count=3, length=6)
        self.assertEqual((plain.lanes_used(), onto.lanes_used(), len(ends)), (1, 3, len(others)))
        self.assertEqual((branching.forecast.choose()[0], log.branches.lanes), (4, 1))
        self.assertEqual((log.branches.lanes_us, log.branches.chain_us), (on_lanes.branches.lanes_us, 45.0))
        for only_forecast in (False, True):
            log, found, _ = side_by_side(OnLanes(), count=3, length=6, on_lanes=False, only_forecast=only_forecast)
            self.assertEqual(
                (log.branches is None, found.forecast.choose()), (only_forecast, (4, branching.forecast.choose()[1]))
            )
            captured = OnLanes()
            a, b = captured.tensor(), captured.tensor()
            with captured.noted(a, b, on_lanes=False, only_forecast=only_forecast) as unknown:
                for _ in range(12):
                    custom([a], [b])
                    ops.cat.out([a], out=captured.made())
            self.assertEqual(unknown.forecast.choose()[0], 0)

    def test_a_tensor_in_the_place_of_a_dead_one_is_another_one(self):
        flow, storages = DataFlow(), set()
        for _ in range(50):
            made = torch.empty(1)
            storages.add(made.untyped_storage()._cdata)
            self.assertEqual(flow.ahead([(made, True)]), set())
            flow.note([(made, True)])
            del made
        self.assertEqual(len(storages), 50)


class TestRule(TestCase):
    def test_what_pays(self):
        def replays(us, launch, idle=False):
            return [(idle, launch, us + launch * idle)] * 4

        for chain, others, idle, expected in (
            ((100, 5), (97, 5), False, True),
            ((100, 5), (97.1, 5), False, False),  # less than 3 us
            ((1000, 5), (971, 5), False, False),  # less than 3%
            ((1000, 5), (970, 50), False, True),  # the launch is hidden
            ((1000, 5), (950, 20), True, True),
            ((1000, 5), (950, 25), True, False),  # less than 3%, with the launch
            ((100, 5), (80, 20), True, False),  # the host loses more than a call that waits gains
            ((100, 5), (80, 10), True, True),
        ):
            found = compared(replays(*chain, idle), replays(*others, idle))
            self.assertEqual(found.pays, expected, found)
            self.assertEqual((found.chain_us, found.launch_us), (chain[0], others[1] - chain[1]))
        one_interrupted = [*replays(100, 5), (False, 900, 9000)]
        self.assertTrue(compared(one_interrupted, replays(90, 5)).pays)
        for chain, others, expected in (
            ((100, 100), (90, 90), True),
            ((110, 90), (100, 80), False),
        ):  # faster and faster
            blocks = [[*replays(first, 5), *replays(second, 5)] for first, second in (chain, others)]
            self.assertEqual(compared(*blocks).pays, expected)


class Graph:
    """A captured graph; each replay has the edges of the instantiation that it launches."""

    def __init__(self, captured: OnLanes, addresses=lambda: None) -> None:
        self.captured, self.launched, self.refuses = captured, [], []
        self.addresses = addresses
        self.instantiate()

    def instantiate(self) -> None:
        if self.refuses:
            raise self.refuses.pop()
        self.edges = self.captured.edges()

    def replay(self) -> None:
        self.launched.append(self.edges)


class TestTrial(BranchesTestCase):
    chain_us, lanes_us = 100.0, 80.0

    def setUp(self):
        super().setUp()
        self.captured = OnLanes()
        self.log, self.branching, self.kept = side_by_side(self.captured)
        self.graph = Graph(self.captured)
        self.chain, self.found = self.graph.edges, []
        self.waits, self.is_behind, self.rebound, self.marks = False, False, 0, 0
        how = self, self.instantiate, lambda: self.waits, self.found.append
        self.graph.replay = Trial(self.graph, self.branching.chain, self.branching.edges, *how)

    # The GPU
    def is_idle(self):
        return False

    def mark(self):
        self.marks += 1
        return len(self.graph.launched)

    def us_between(self, begin, end):
        self.assertEqual(end, begin + 1)
        is_chain = self.graph.launched[begin] == self.chain
        return None if self.is_behind else self.chain_us if is_chain else self.lanes_us

    def instantiate(self, graph):
        self.rebound += 1
        graph.instantiate()

    def replay(self, count=1):
        for _ in range(count):
            before = len(self.graph.launched)
            self.graph.replay()
            self.assertEqual(len(self.graph.launched), before + 1)

    def forms(self):
        """The lengths of the runs of one form, the chain's first."""
        return [len([*run]) for _, run in itertools.groupby(self.graph.launched, lambda edges: edges == self.chain)]

    def test_blocks_alternate_and_the_faster_form_stays(self):
        for lanes_us, last, changes in ((80.0, [BLOCK + 10], 3), (99.0, [BLOCK + 1, 9], 4)):
            self.setUp()
            self.lanes_us = lanes_us
            self.replay(ALL + 10)
            self.assertEqual(self.forms(), [WARM_UP + BLOCK, BLOCK, BLOCK, *last])
            (found,) = self.found
            self.assertEqual((found.chain_us, found.lanes_us, found.pays), (100.0, lanes_us, lanes_us == 80.0))
            self.assertEqual((self.rebound, self.marks), (changes, 8 * (BLOCK - 1)))  # not a block's first replay
            self.assertNotIn("replay", vars(self.graph))
            self.assertEqual(self.captured.edges(), self.graph.edges)

    def test_nothing_waits_for_the_gpu_or_measures_beside_another_trial(self):
        self.waits = self.is_behind = True
        self.replay(100)
        self.assertEqual(self.forms(), [100])
        self.waits = False
        self.replay(ALL + 20)
        self.assertEqual((self.found, self.forms()[-1]), ([], BLOCK + 20))
        self.is_behind = False
        self.replay()
        self.assertTrue(self.found[0].pays)

    def test_a_graph_that_cannot_be_changed_is_not_launched_again(self):
        for error in (RuntimeError("no memory"), KeyboardInterrupt(), "cuGraphAddDependencies_v2"):
            self.setUp()
            if isinstance(error, str):
                self.captured.api.fail(error)
            else:
                self.graph.refuses.append(error)
            self.replay(WARM_UP + BLOCK - 1)
            with contextlib.suppress(KeyboardInterrupt):
                self.replay()  # its launch succeeded
            self.assertEqual([why.reason for why in self.found], [Reason.LANES_LOST])
            self.assertRaises(GraphLost, self.graph.replay)
            self.assertEqual(self.forms(), [WARM_UP + BLOCK])

    def test_interrupted_launches_do_not_count(self):
        with mock.patch.object(Graph, "replay", mock.Mock(side_effect=KeyboardInterrupt)):
            for _ in range(ALL):
                self.assertRaises(KeyboardInterrupt, self.graph.replay)
        self.replay(ALL)
        self.assertEqual((self.forms(), self.found), ([WARM_UP + BLOCK, BLOCK, BLOCK, BLOCK], []))

    def test_an_interrupted_change_is_made_later(self):
        change = Trial._change
        for number, lanes_us, is_before in itertools.product((1, 2, 3, 4), (80.0, 99.0), (True, False)):
            self.setUp()
            self.lanes_us, calls = lanes_us, itertools.count(1)

            def interrupted(trial, graph, calls=calls, number=number, is_before=is_before):
                now = next(calls) == number
                if not (now and is_before):
                    change(trial, graph)
                if now:
                    raise KeyboardInterrupt

            with mock.patch.object(Trial, "_change", interrupted):
                for _ in range(ALL + 10):
                    with contextlib.suppress(KeyboardInterrupt):
                        self.graph.replay()
            self.assertEqual([found.pays for found in self.found], [lanes_us == 80.0])
            self.assertEqual(self.graph.launched[-1] == self.chain, lanes_us == 99.0)

    def test_the_trial_ends_with_its_graph(self):
        self.replay(WARM_UP + BLOCK + 1)
        gone = weakref.ref(self.graph)
        del self.graph
        self.assertIsNone(gone())  # without the collector
        self.assertEqual(self.found, [])


class TestNumbers(TestCase):
    """How many lanes a function gets, in this process and in a later one."""

    def setUp(self):
        super().setUp()
        self.stored = {}
        self.enterContext(mock.patch.object(lanes, "binding", SimpleNamespace(extension=1)))
        self.enterContext(mock.patch.object(profiles, "machine", lambda device: {"gpu": "fake"}))
        folder = SimpleNamespace(find=self.stored.get, store=lambda found: self.stored.update({found.key: found}))
        self.enterContext(mock.patch.object(profiles.Profiles, "default", lambda: folder))

    def function(self, settings=AUTO, code="abc", mode="inference", **more):
        graph = GraphLog("Net", "0/0", mode, (), code=code)
        return FunctionModel(lambda inputs: [], settings, FunctionLog("Net", "0/0", mode, 1, {}, graph=graph, **more))

    def record(self, function, function_id="f", inputs=(), used=4):
        """A recording; returns what it is, the reason to make it again, and its log."""
        function.lanes.look_up(function_id, inputs, 0)
        node = SimpleNamespace(
            **{"graph": "torch's", "log": RecordingLog(), "cuda_graphs_pool": (0, 7)},
            wrapped_function=SimpleNamespace(model=function, id=function_id),
        )
        with mock.patch.object(recording.compat, "is_kernel_free", lambda function: False):
            flag, count = recording.Recording._branches_flag(node)
        log = side_by_side(OnLanes(max(count, 1)), count=min(used, max(count, 1)))[0] if flag != "off" else node.log
        if flag == "forecast":
            log = RecordingLog(why_no_branches=Reason.ON_LANES(lanes=4))
            function.lanes.numbers[function_id] = lanes.Number(4, log.why_no_branches, is_final=False)
        return (flag, count), function.lanes.recorded(function_id, log), log

    def tried(self, function, lanes_us, function_id="f", **more):
        *_, log = self.record(function, function_id, **more)
        function.lanes.tried(function_id, log, Tried(100.0, lanes_us, 2.0, lanes_us < 97))
        return log

    def test_the_first_recording_has_no_lanes_and_the_second_one_a_trial_until_a_thread_has_measured(self):
        """Each thread's manager has ids of its own, as other integers have."""
        function = self.function()
        for id_ in ("one", "other"):
            found, why, _ = self.record(function, id_)
            self.assertEqual((found, why.reason, why.facts), (("forecast", 0), Reason.ON_LANES, {"lanes": 4}))
        for _ in range(2):  # the first trial was interrupted
            self.assertEqual(self.record(function, "one")[:2], (("auto", 4), None))
        self.tried(function, 99.0, "one")
        self.assertEqual(self.record(function, "other")[0], ("auto", 4))  # its own trial decides
        self.assertEqual(self.record(function, "a third")[0], ("off", 0))

    def test_a_result_holds_for_later_recordings_and_processes(self):
        for lanes_us, code, expected in ((80.0, "a", ("always", 4)), (99.0, "b", ("off", 0))):
            function = self.function(code=code)
            self.record(function)
            log = self.tried(function, lanes_us)
            facts = log.branches.measured_us, log.why_no_branches is None
            self.assertEqual(facts, ((100.0, lanes_us), lanes_us == 80.0))
            for other, function_id in ((function, "f"), (self.function(code=code), "of another process")):
                found, why, log = self.record(other, function_id)
                self.assertEqual((found, why), (expected, None))
                shown = other.lanes.numbers[function_id].why
                self.assertIn(f"on 4 lanes, a replay takes {lanes_us:.3g} us of the GPU, and 2 more to launch", shown)
                if lanes_us == 99.0:
                    self.assertEqual(log.why_no_branches, shown)
            for other, inputs in (
                (self.function(code=code), [torch.ones(3)]),
                (self.function(code=code, mode="forward"), ()),
                (self.function(replace(AUTO, outputs="upstream"), code=code), ()),
            ):
                self.assertEqual(self.record(other, inputs=inputs)[0], ("forecast", 0))
        self.assertEqual(sorted(found.lanes for found in self.stored.values()), [0, 4])

    def test_what_was_measured_under_a_profiler_is_not_kept(self):
        function = self.function()
        self.record(function)
        with mock.patch.object(lanes, "is_disturbed", lambda: True):
            self.tried(function, 80.0)
        self.assertEqual((self.stored, self.record(function)[0]), ({}, ("always", 4)))

    def test_places_of_the_same_step_wait_for_the_recording_again(self):
        """Their memory would count as that of lanes."""
        function, manager, free = self.function(), bare_manager(), [500 * MB]
        why = self.record(function)[1]
        manager.reclaiming.record_again("f", why, 1)
        self.enterContext(mock.patch.object(Manager, "pool", SimpleNamespace(nbytes=lambda: 1000 * MB)))
        self.enterContext(mock.patch.object(recording.pools, "free_bytes", lambda device, pool: free[0]))
        self.enterContext(mock.patch.object(recording.pools, "OWNED", {(0, 7): manager}))
        self.assertIsNone(manager.reclaiming.why_again("f"))  # the open path still has the first recording
        self.assertEqual(self.record(function)[:2], (("off", 0), why))
        manager.reclaiming.forgotten = {}
        self.assertEqual(manager.reclaiming.why_again("f"), why)
        self.assertEqual(self.record(function)[:2], (("auto", 4), None))
        free[0] -= 1
        found, again, log = self.record(function)
        self.assertEqual((found, again, log.why_no_branches.reason), (("off", 0), None, Reason.LANES_NO_ROOM))

    def test_a_pool_that_grows_too_much_gives_lanes_up(self):
        for pool, known, grown, expected in (
            (200, 1, [127], None),
            (200, 1, [129], 129),
            (2200, 1, [280], None),
            (2200, 2, [200, 60], None),
            (2200, 2, [200, 90], 290),
            (200, 2, [127, 0], None),
            (200, 0, [190], None),  # in a new pool, all memory is new
            (200, 1, [100, 100], None),  # so it is at another place
        ):
            function, memory = self.function(), lanes.LanesMemory()
            function.lanes.numbers["f"] = lanes.Number(4, Reason.ON_LANES(lanes=4))
            for _ in range(known):
                self.assertIsNone(memory.recorded("f", function.lanes, RecordingLog(), pool * MB))
            for nbytes in grown:
                log = side_by_side(OnLanes(4), count=4)[0]
                log.pool_bytes = nbytes * MB
                why = memory.recorded("f", function.lanes, log, pool * MB)
            self.assertEqual(why and why.facts["nbytes"], expected and expected * MB)
            self.assertEqual(self.record(function)[0], ("off", 0) if expected else ("always", 4))

    def test_lanes_that_cannot_be_used_are_not_tried_again(self):
        for why in (Reason.NO_CHAIN(why="of the test"), Reason.LANES_LOST(error="of the test")):
            function = self.function()
            self.record(function)
            *_, log = self.record(function)
            function.lanes.tried("f", log, why)
            found, _, again = self.record(function)
            facts = log.why_no_branches, found, again.why_no_branches, self.stored
            self.assertEqual(facts, (why, ("off", 0), why, {}))

    def test_ranks_must_not_differ_and_launches_must_be_ordered(self):
        for extension, has_collective, reason in ((1, True, Reason.RANKS), (None, False, Reason.NO_NATIVE)):
            with mock.patch.object(lanes, "binding", SimpleNamespace(extension=extension)):
                found, _, log = self.record(self.function(has_collective=has_collective))
            self.assertEqual((found, log.why_no_branches.reason), (("off", 0), reason))

    def test_the_report_tells_both_times_and_the_reason(self):
        function = self.function()
        self.record(function)
        text = "\n".join(function_notes(replace(function.log, recordings=[self.tried(function, 99.0)]).record()))
        self.assertRegex(text, "captured on 4, without 11 edges of the chain; measured 100 us, on lanes 99\n")
        self.assertRegex(text, "no branches, because on 4 lanes, a replay takes 99 us .* one after another, 100 us")


class TestRecordedAgain(TestCase):
    """With :func:`bare_manager`, whose pool has 1,000 MB."""

    def setUp(self):
        super().setUp()
        functions = {id_: SimpleNamespace(model=TestNumbers.function(None)) for id_ in "fg"}
        self.enterContext(mock.patch.object(Manager, "pool", SimpleNamespace(nbytes=lambda: 1000 * MB)))
        self.manager = bare_manager(ids_to_funcs=functions)
        self.manager._candidates[1] = "found"

    def again(self):
        return self.manager.reclaiming.why_again("f"), self.manager.why_start_over

    def test_the_manager_records_a_function_again_or_gives_the_pool_back(self):
        on_lanes, grew = Reason.ON_LANES(lanes=2), Reason.LANES_GREW(nbytes=5)
        for once_more, too_large in ((None, None), (on_lanes, None), (None, grew)):
            self.setUp()
            model = mock.Mock(**{"lanes.recorded.return_value": once_more})
            with mock.patch.object(lanes.LanesMemory, "recorded", lambda *_, why=too_large: why):
                self.manager._let_lanes_rerecord(model, "f", RecordingLog(number=3))
            self.manager.reclaiming.forgotten.clear()
            self.assertEqual(self.again(), (once_more, too_large))
            self.assertEqual(self.manager._candidates, {} if once_more or too_large else {1: "found"})

    def test_lanes_that_do_not_pay_give_their_memory_back(self):
        """Not during a trial, and not before a recording that has to be made again."""
        cases = (65, 0, 4, 65), (40, 40, 0, 80), (63, 99, 4, None)
        for meanwhile, (f, g, count, expected) in itertools.product(("", "trial", "again"), cases):
            self.setUp()
            log = RecordingLog(is_tried=meanwhile == "trial")
            self.manager.roots = {"h": [SimpleNamespace(log=log, children={})]}
            if meanwhile == "again":
                self.manager.reclaiming.record_again("g", Reason.ON_LANES(lanes=2), 0)
            for id_, grown, number in (("f", f, 0), ("g", g, count)):
                self.grow(id_, grown)
                self.manager.ids_to_funcs[id_].model.lanes.numbers[id_] = lanes.Number(number, None)
            self.manager.free_memory_of_lanes()
            found = self.manager.why_start_over
            self.assertEqual(found and found.facts["nbytes"], expected * MB if expected and not meanwhile else None)

    def grow(self, function_id, nbytes, pool=10_000):
        """Records a function on lanes, after it has been warmed up."""
        function, memory = self.manager.ids_to_funcs[function_id].model.lanes, self.manager.reclaiming.lanes
        function.numbers[function_id] = lanes.Number(4, Reason.ON_LANES(lanes=4))
        log = side_by_side(OnLanes(4), count=4)[0]
        log.pool_bytes = nbytes * MB
        memory.known[function_id] += 1
        return memory.recorded(function_id, function, log, pool * MB)

    def test_lanes_keep_their_share_in_the_next_pool(self):
        memory = self.manager.reclaiming.lanes
        self.assertIsNone(self.grow("f", 100, 1000))
        self.assertIsNone(self.grow("g", 20, 1000))
        self.manager.ids_to_funcs["g"].model.lanes.numbers["g"].count = 0
        memory.leave_pool(self.manager.ids_to_funcs)
        self.assertEqual(memory.known.total(), 0)
        self.assertIsNone(self.grow("g", 28, 100))
        self.assertEqual(self.grow("g", 1, 100).facts["nbytes"], 129 * MB)
        memory.leave_pool(())
        self.assertIsNone(self.grow("f", 100, 100))

    def test_once_the_pool_has_grown_too_much_no_other_function_gets_lanes(self):
        numbers = TestNumbers()
        numbers.setUp()
        self.addCleanup(numbers.doCleanups)
        self.enterContext(mock.patch.object(recording.pools, "OWNED", {(0, 7): self.manager}))
        self.enterContext(mock.patch.object(recording.pools, "free_bytes", lambda *_: 1000 * MB))
        function, tried, has_lanes = (numbers.function(code=code) for code in "abc")
        numbers.record(tried)
        numbers.record(has_lanes)
        numbers.tried(has_lanes, 80.0)
        why = self.grow("f", 200, 100)
        for other, expected in ((function, ("off", 0)), (tried, ("off", 0)), (has_lanes, ("always", 4))):
            found, _, log = numbers.record(other)
            self.assertEqual((found, log.why_no_branches), (expected, None if expected[1] else why))

    def test_with_a_collective_lanes_change_no_recordings(self):
        """A rank that makes one again also drops those that follow, of collectives too."""
        reclaiming = self.manager.reclaiming
        reclaiming.record_again("f", Reason.ON_LANES(lanes=2), 1)
        reclaiming.record_again("g", moved := Reason.MOVED(kind="static", names="x"), 1)
        model = TestNumbers.function(None, has_collective=True)
        with mock.patch.object(Manager.__mro__[1], "add_function", mock.Mock(side_effect=KeyError)):
            self.assertRaises(KeyError, self.manager.add_function, model, [])
        self.assertEqual((reclaiming._again, reclaiming.forgotten), ({"g": moved}, {"g": 1}))
        self.assertIs(reclaiming.lanes.why_full.reason, Reason.RANKS_BESIDE)
        addresses = SimpleNamespace(chooser=(chooser := SimpleNamespace()))
        recorded = SimpleNamespace(live=SimpleNamespace(addresses=addresses), log=RecordingLog())
        self.manager._let_chooser_rerecord(recorded, "f")
        chooser.ready(Reason.TABLE_BUILT())
        self.assertFalse(reclaiming.awaits("f"))
        self.manager._let_lanes_rerecord(mock.Mock(**{"lanes.recorded.return_value": None}), "f", RecordingLog())
        with mock.patch.object(lanes.LanesMemory, "recorded", lambda *_: Reason.LANES_GREW(nbytes=5)):
            self.manager._let_lanes_rerecord(mock.Mock(**{"lanes.recorded.return_value": None}), "f", RecordingLog())
        self.assertIsNotNone(self.grow("f", 5000))
        self.manager.free_memory_of_lanes()
        self.assertIsNone(self.manager.why_start_over)

    def test_the_pool_is_left_when_a_step_begins_unless_an_error_wants_it_at_once(self):
        left, why = [], Reason.LANES_GREW(nbytes=5)
        self.manager.reclaiming.start_over = lambda manager, why: left.append(why)
        self.manager.current_node = node = mock.Mock()
        for begins, are_dead in ((False, False), (True, False), (False, True)):  # the last without any backward
            self.manager.start_over_later(why)
            node.all_outputs_are_dead.return_value = are_dead
            with mock.patch.object(Manager, "can_start_new_generation", lambda manager, begins=begins: begins):
                self.manager._start_over()
            self.assertEqual(left, [why] * (begins or are_dead))
            left.clear()
        node.all_outputs_are_dead.return_value = False
        self.manager.start_over_later(why)
        with mock.patch.object(Manager, "can_start_new_generation", lambda manager: False):
            self.manager.failed(RuntimeError("of the driver"), "f")
            self.manager._start_over()
        self.assertIn("of the driver", left[0])


class TestLiveGraph(LiveInputsTestCase):
    """A trial of a graph whose inputs move, with everything but the edges and the clocks."""

    def setUp(self):
        super().setUp()
        self.a, self.b = tensor_at(0), tensor_at(0)
        self.live, self.graph = self.record(self.one_kernel(), self.a, self.b)
        self.chain, self.manager = mock.Mock(units=[]), bare_manager()
        self.function, branching = mock.Mock(**{"model.log.is_tried": False}), Branching(log := RecordingLog())
        branching.chain = self.chain
        clocks = SimpleNamespace(is_idle=lambda: True, mark=lambda: 0, us_between=lambda *marks: 5.0)
        self.enterContext(mock.patch.object(captured_graph, "CudaDevice", lambda device: clocks))
        self.enterContext(mock.patch.object(captured_graph.pools, "OWNED", {(0, 7): self.manager}))
        known = {"live": self.live, "log": log, "device": 0, "cuda_graphs_pool": (0, 7), "graph": self.graph}
        try_lanes(SimpleNamespace(wrapped_function=self.function, **known), branching)
        self.assertTrue(log.is_tried)
        self.live.finish()

    def replay(self, count):
        for number in range(count):
            self.a = tensor_at(0) if number % 3 else self.a
            self.begin(self.live, self.a, self.b)
            self.graph.replay()
            self.live.finish()
            self.assertEqual(self.graph.launched[-1], [[self.a.data_ptr(), self.b.data_ptr()]])

    def result(self):
        ((function_id, _, found),) = [call.args for call in self.function.model.lanes.tried.call_args_list]
        self.assertIs(function_id, self.function.id)
        return found

    def test_each_launch_has_the_addresses_of_its_call(self):
        self.replay(ALL + 3)
        self.assertFalse(self.result().pays)
        self.assertEqual(self.graph.instances, 5)  # and back to the chain
        self.assertEqual((self.chain.replace.call_count, self.chain.restore.call_count), (2, 2))
        self.assertIsNone(self.manager.reclaiming.why_again(self.function.id))

    def test_a_graph_that_is_lost_is_recorded_again(self):
        self.replay(WARM_UP + BLOCK - 1)
        self.graph.refuses.append(RuntimeError("no memory"))
        self.replay(1)
        self.assertIs(self.result().reason, Reason.LANES_LOST)
        self.manager.reclaiming.forgotten.clear()
        self.assertEqual(self.manager.reclaiming.why_again(self.function.id), self.result())
        gone = weakref.ref(self.graph)
        del self.graph, self.live
        self.assertIsNotNone(gone())  # torch would destroy its executable graph again


if __name__ == "__main__":
    run_tests()
