"""Recordings and their memory are given back: those of functions that are no longer graphed, and of whole managers."""

import itertools
import math
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from fake_trees import Plain, bare_manager
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection import retired
from pygraph_trees.report.log import Count, RecordingLog
from pygraph_trees.trees.hooks import entry_points
from pygraph_trees.trees.hooks.choice import handed_on, recordings_below
from pygraph_trees.trees.managers import input_rules, reclaiming
from pygraph_trees.trees.managers import manager as trees_manager
from pygraph_trees.trees.managers.calls import Upstream
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.pools import pools


def end_path(manager):
    """Ends the path, as upstream does once none of its outputs is needed."""
    manager.current_node = None


def recording(number=0, **attributes):
    """A recording that was replayed three times; by default, it has neither outputs nor successors."""
    lists = {name: [] for name in ("outputs_weakrefs", "older_outputs", "unaliased_in_all_paths")}
    known = {"children": {}, "graph": "captured", "native": "in C++", "log": RecordingLog(counter=Count(3)), **lists}
    return mock.Mock(id=SimpleNamespace(id=number), **(known | attributes))


def output(is_held=False):
    """Torch's reference to an output."""
    return mock.Mock(**dict.fromkeys(("expired.return_value", "ref.expired.return_value"), not is_held))


class WithoutGpu(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))


class TestForgotten(WithoutGpu):
    """Recordings of functions that are no longer graphed."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(input_rules, "why_not_staged", lambda *_: None))
        self.enterContext(mock.patch.object(Manager, "is_graphed", lambda *_: True))
        self.released = self.enterContext(mock.patch("pygraph_trees.trees.managers.reclaiming.release_retired"))
        ends = lambda manager: self.may_end and end_path(manager)  # noqa: E731
        self.enterContext(mock.patch.object(Upstream, "try_end_curr_execution", ends))
        self.may_end, self.model = True, object()
        self.below = recording(1)
        self.first = recording(children={1: [self.below]})
        functions = enumerate((self.model, None), 1)
        self.manager = bare_manager(
            ids_to_funcs={number: SimpleNamespace(model=model, mutated_input_idxs=()) for number, model in functions},
            warmed_up_functions={1, 2},
            path_state=cudagraph_trees.ExecutionState.EXECUTION,
            roots={2: [self.first]},
            current_node=self.first,
        )

    def run_upstream(self, inputs, function_id):
        """Finds a root, in a state in which no recording has a fast path."""
        self.manager.current_node, self.manager.path_state = self.first, cudagraph_trees.ExecutionState.EXECUTION
        return inputs

    def test_forgotten_recordings_are_given_back_when_a_step_begins(self):
        """It works even if no step has a fast path, so that each step begins after the previous one's recording."""
        self.may_end = False  # an output is still held
        with mock.patch.object(Upstream, "_run", self.run_upstream):
            self.manager.reclaiming.record_again(1, "it is recorded again", 1)
            self.manager.forget(self.model)
            self.manager._run([], 2)
            self.assertEqual((self.first.children[1], self.released.call_count), ([self.below], 0))
            self.may_end = True
            self.manager._run([], 2)
        self.assertEqual((self.first.children, self.released.call_count), ({}, 1))
        self.assertEqual((self.below.graph, self.below.native), (None, None))
        self.below.remove_node_cached_tensors.assert_called_once_with()
        self.first.remove_node_cached_tensors.assert_not_called()
        self.assertEqual((self.first.graph, self.manager.reclaiming.forgotten), ("captured", {}))
        self.assertIsNone(self.manager.reclaiming.why_again(1))

    def test_recordings_to_be_made_again_are_given_back_at_the_next_step(self):
        """The current step keeps replaying; the reason for recording again is given once."""
        self.manager._candidates[2] = "candidates"
        self.manager.reclaiming.record_again(2, "of the test", 0)
        self.assertEqual((self.manager._candidates, self.manager.current_node), ({}, self.first))
        self.assertEqual((self.first.graph, self.manager.roots), ("captured", {2: [self.first]}))
        self.assertIsNone(self.manager._find(self.manager, 2, True))
        self.assertEqual((self.manager.roots, self.first.graph, self.below.graph), ({}, None, None))
        self.assertIsNone(self.manager.current_node)
        self.assertEqual([self.manager.reclaiming.why_again(2) for _ in range(2)], ["of the test", None])

    def test_recordings_that_were_made_since_stay(self):
        newer, self.first.id.id = recording(7), 4
        self.manager.roots[2].append(newer)
        for newest in (5, 3):  # the first call counts
            self.manager.reclaiming.record_again(2, "of the test", newest)
        end_path(self.manager)
        self.manager.reclaiming.give_back(self.manager)
        self.assertEqual((self.manager.roots, self.first.graph, newer.graph), ({2: [newer]}, None, "captured"))

    def test_a_chosen_table_has_a_function_recorded_again_and_does_not_keep_the_manager(self):
        chooser = SimpleNamespace(ready=None)
        for found in (None, chooser):
            live = SimpleNamespace(addresses=SimpleNamespace(chooser=found))
            self.manager._let_chooser_rerecord(SimpleNamespace(live=live, log=SimpleNamespace(number=0)), 2)
        chooser.ready("of the test")
        self.assertEqual([*self.manager.reclaiming.forgotten], [2])
        self.manager.reclaiming.forgotten.clear()
        self.assertEqual(self.manager.reclaiming.why_again(2), "of the test")
        gone = weakref.ref(self.manager)
        del self.manager
        self.assertIsNone(gone())
        chooser.ready("of the test")  # the manager is gone


class TestPool(WithoutGpu):
    """The graph pool, which is given back with its last recording unless an output is still held."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(pools, "OWNED", {(0, 7): None}))
        self.emptied = self.enterContext(mock.patch.object(torch.cuda, "empty_cache"))
        self.new = self.enterContext(mock.patch.object(Manager, "__init__", autospec=True, side_effect=self.made))

    def made(self, manager, device_index):
        manager.graph, manager.stream, manager.cuda_graphs_thread_pool = "new graph", "stream", (0, 9)

    def recorded(self, *nodes, **outputs):
        """A manager with one function, which has some recordings or one with these outputs, and its model."""
        nodes, model = list(nodes) or [recording(**outputs)], object()
        functions = {1: SimpleNamespace(model=model)}
        return bare_manager(ids_to_funcs=functions, roots={1: nodes}, graph="first graph"), model

    def test_the_pool_is_given_back_with_its_last_recording_unless_an_output_is_held(self):
        """Outputs that were replaced by others count too."""
        older = output(is_held=True)
        outputs = {"outputs_weakrefs": [output(), None], "unaliased_in_all_paths": [True, False]}
        manager, model = self.recorded(older_outputs=[older], **outputs)
        self.assertFalse(manager.give_pool_back())  # nothing was given back yet
        manager.forget(model)
        self.assertFalse(manager.give_pool_back())
        self.assertEqual((manager.graph, self.new.call_count), ("first graph", 0))
        older.expired.return_value = True
        manager.reclaiming.record_again(1, "a reason", 0)
        manager.reclaiming.forgotten.clear()
        self.assertFalse(manager.give_pool_back())  # it is about to be used
        manager.reclaiming.why_again(1)
        self.assertTrue(manager.give_pool_back())
        self.assertFalse(manager.give_pool_back())  # once
        found = manager.graph, manager.stream, manager.cuda_graphs_thread_pool, [*pools.OWNED]
        self.assertEqual(found, ("new graph", "stream", (0, 9), [(0, 9)]))
        self.assertEqual((self.new.call_count, self.emptied.call_count), (1, 1))
        manager, model = self.recorded(outputs_weakrefs=[output()], unaliased_in_all_paths=[True])
        manager.forget(model)
        self.assertEqual(manager.graph, "new graph")

    def test_to_start_over_takes_another_pool_although_an_output_is_held(self):
        (broken := output(is_held=True)).expired.side_effect = AssertionError("of torch's reference")
        for reference, is_held in ((output(is_held=True), True), (output(), False), (broken, True)):
            manager, _ = self.recorded(outputs_weakrefs=[reference], unaliased_in_all_paths=[True])
            with mock.patch.object(reclaiming, "_in_use", []) as in_use:
                manager.reclaiming.start_over(manager, "an error")
                self.assertEqual([graph for graph, _ in in_use], ["first graph"] if is_held else [])
            self.assertEqual((manager.graph, manager.roots), ("new graph", {}))
            self.assertEqual(manager.reclaiming.why_again(1), "an error")
        lists = {"outputs_weakrefs": [output()], "older_outputs": [output(is_held=True)]}
        manager, _ = self.recorded(recording(**{"remove_node_cached_tensors.side_effect": AssertionError}, **lists))
        with mock.patch.object(reclaiming, "_in_use", []) as in_use:
            manager.reclaiming.start_over(manager, "an error")
            self.assertEqual([graph for graph, _ in in_use], ["first graph"])

    def test_the_pool_stays_if_outputs_are_made_at_each_replay(self):
        """Only the newest outputs are known, and older ones may be held; for upstream's recordings, none is known."""
        outputs = {"outputs_weakrefs": [output(), None, output()], "unaliased_in_all_paths": [True, False, False]}
        for log, is_back in ((RecordingLog(), True), (RecordingLog(counter=Count(5)), False), (None, False)):
            manager, model = self.recorded(log=log, **outputs)
            manager.forget(model)
            self.assertEqual((manager.graph == "new graph", manager.give_pool_back()), (is_back, False))

    def test_the_old_pool_stays_if_nothing_was_recorded_or_no_new_one_can_be_made(self):
        manager, model = self.recorded()
        manager.roots.clear()
        manager.forget(model)
        self.assertFalse(manager.give_pool_back())
        self.new.assert_not_called()
        manager, model = self.recorded()
        self.new.side_effect = RuntimeError("out of memory")
        with self.assertLogs("pygraph_trees.trees", "WARNING") as logs:
            manager.forget(model)
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
                self.assertFalse(manager.give_pool_back())
            self.assertEqual(self.new.call_count, 1)
            self.assertFalse(manager.give_pool_back())  # it is tried again
        self.assertEqual((self.new.call_count, manager.graph), (2, "first graph"))
        self.assertIn("out of memory", logs.output[0])

    def test_what_is_known_of_a_pool_goes_with_it(self):
        """Each thread that ends, and each set of models that is dropped and made again, leaves a pool."""
        manager, _ = self.recorded()
        manager.cuda_graphs_thread_pool = 0, 8
        known = [weakref.ref(manager.pool)]
        self.assertIs(known[0](), manager.pool)
        manager.cuda_graphs_thread_pool = 0, 9
        known.append(weakref.ref(manager.pool))
        self.assertEqual([known[0](), known[1]()], [None, manager.pool])
        del manager
        self.assertIsNone(known[1]())

    def test_a_manager_that_is_shut_down_has_nothing_to_give_back(self):
        manager, model = self.recorded()
        manager.reclaiming.record_again(1, "of the test", 0)
        manager.shutdown()
        self.assertEqual(manager.reclaiming.forgotten, {})
        manager.forget(model)
        self.assertFalse(manager.give_pool_back())
        manager.reclaiming.give_back(manager)
        self.assertEqual(handed_on(manager, SimpleNamespace(trial=object())), 0)

    def test_from_another_thread_it_is_the_managers_own_that_does_it(self):
        manager, model = self.recorded(node := recording())
        manager._candidates[1] = "candidates"
        manager.forget(model, later=True)
        self.assertEqual((manager.roots, manager._candidates), ({1: [node]}, {}))
        self.assertEqual([*manager.reclaiming.forgotten], [1])

    def test_an_open_path_is_ended_if_that_takes_nothing_from_anybody(self):
        """``give_pool_back`` ends it."""
        ends = ("try_end_curr_execution", "clear_current_path_state_and_set_to_none")
        self.enterContext(mock.patch.multiple(Upstream, **dict.fromkeys(ends, end_path)))
        state = cudagraph_trees.ExecutionState
        for path_state, are_dead, is_ended in (
            (state.EXECUTION, False, True),  # upstream ends it at a new step
            (state.RECORDING, True, True),
            (state.RECORDING, False, False),  # upstream would take the outputs away
            (state.WARMUP, True, False),
        ):
            manager, _ = self.recorded(node := recording())
            manager.current_node = mock.Mock(**{"all_outputs_are_dead.return_value": are_dead})
            manager.path_state, manager.reclaiming.forgotten = path_state, {1: math.inf}
            manager.give_pool_back()
            self.assertEqual(manager.roots, {} if is_ended else {1: [node]})


class TestShutdown(WithoutGpu):
    """A reset of all trees gives back the memory of recordings, even if the recordings are still referenced."""

    def setUp(self):
        super().setUp()
        self.waits = self.enterContext(mock.patch.object(torch.cuda, "synchronize"))
        self.closed = []

    def retire(self, device):
        retired.retire(mock.Mock(), device, SimpleNamespace(close=lambda: self.closed.append(device)))

    def test_graphs_go_before_their_memory_is_given_back(self):
        """Each recording's graph is also held by its part in C++."""
        nodes, released = [recording(graph=Plain()) for _ in range(2)], []
        nodes[0].children = {1: nodes[1:]}
        for node in nodes:
            node.native = Plain(graph=node.graph)
        gone = [weakref.ref(node.graph) for node in nodes]
        manager = bare_manager(roots={2: nodes[:1]}, current_node=nodes[0])
        with mock.patch.object(trees_manager, "release_retired", lambda: released.append([graph() for graph in gone])):
            manager.shutdown()
        self.assertEqual((released, manager.roots), ([[None, None]], None))

    def test_each_device_is_waited_for_once(self):
        """A reset gives back what is left after the managers."""
        for device in (0, 1, 0):
            self.retire(device)
        self.assertEqual((self.closed, self.waits.call_count), ([], 0))
        bare_manager().shutdown()
        waited = sorted(call.args[0] for call in self.waits.call_args_list)
        self.assertEqual((sorted(self.closed), waited), ([0, 0, 1], [0, 1]))
        self.closed.clear()
        self.retire(0)
        entry_points.reset_cudagraph_trees(lambda: self.assertEqual(self.closed, []))()
        self.assertEqual(self.closed, [0])

    def test_trees_of_other_threads_cache_tensors_after_a_reset(self):
        """They do so even while the reset frees what it drops, because other threads may run then."""
        order, containers = [], {0: mock.Mock()}
        weakref.finalize(containers[0], order.append, "freed")
        upstream = lambda: (cudagraph_trees._set_cached_tensors_enabled(False), containers.clear())  # noqa: E731
        local = SimpleNamespace(tree_manager_containers=containers)
        with mock.patch.multiple(cudagraph_trees, local=local, _set_cached_tensors_enabled=order.append):
            entry_points.reset_cudagraph_trees(upstream)()
        self.assertEqual(order, [False, True, "freed"])


class TestHandedOn(TestCase):
    """Outputs in the graph pool that a function hands to other functions."""

    def node(self, model, number, managed=(), depth=0, **children):
        """``managed``: depth and output of each managed input."""
        return recording(
            number,
            wrapped_function=SimpleNamespace(model=model),
            cudagraph_managed_idxs=list(range(len(managed))),
            live_cudagraph_managed_path_refs=list(managed),
            _path_from_root=iter(range(depth + 1)),
            children=dict(enumerate(children.values())),
        )

    def test_the_newest_recording_says_what_is_handed_on(self):
        own, other = object(), object()
        first, partition, neighbour, plain = (SimpleNamespace(trial=trial) for trial in (own, own, other, None))
        # Outputs of another function's later recording, at depth 2, do not count; of several recordings, one is
        # replayed.
        last = self.node(neighbour, 6, ((1, 1), (2, 0)))
        older, newer = self.node(plain, 4, ((1, 0),) * 9), self.node(plain, 5, ((1, 0), (1, 0), (1, 1), None))
        follower = self.node(partition, 3, ((1, 0),), a=[last], b=[older, newer])
        newest = self.node(first, 2, depth=1, a=[follower])
        above = self.node(neighbour, 0, a=[newest])
        manager = bare_manager(roots={1: [self.node(first, 1)], 2: [above], 3: [self.node(neighbour, 7, ((0, 0),))]})
        self.assertEqual(handed_on(manager, first), 4)
        self.assertEqual(handed_on(manager, SimpleNamespace(trial=own)), 0)
        manager.roots = {1: [self.node(first, 1)]}
        self.assertEqual(handed_on(manager, first), 0)

    def test_recordings_that_a_trial_would_cause_to_be_made_again(self):
        """A block is called in each layer of a step: recordings after its first call count."""
        own, other = object(), object()
        block, layer, backward = (SimpleNamespace(trial=trial) for trial in (own, other, own))
        nodes = [self.node(model, number) for number, model in enumerate([block, layer] * 16 + [backward])]
        for node, following in itertools.pairwise(nodes):
            node.children = {0: [following]}
        manager = bare_manager(roots={0: [self.node(layer, 99)], 1: nodes[:1]})
        self.assertEqual(recordings_below(manager, block), 16)
        self.assertEqual(recordings_below(manager, layer), 16)  # 15 blocks and a backward
        self.assertEqual(recordings_below(manager, SimpleNamespace(trial=None)), 0)


if __name__ == "__main__":
    run_tests()
