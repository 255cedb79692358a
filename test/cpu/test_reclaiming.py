"""Recordings and their memory are given back: those of functions that are no longer graphed, and of whole managers."""

from __future__ import annotations

import itertools
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from bare_manager import bare_manager
from fake_trees import Plain
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection import retired
from pygraph_trees.report.log import Count, RecordingLog
from pygraph_trees.trees.hooks import entry_points
from pygraph_trees.trees.hooks.choice import handed_on, recordings_below
from pygraph_trees.trees.managers import input_rules, reclaiming
from pygraph_trees.trees.managers import manager as trees_manager
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.steps import Upstream
from pygraph_trees.trees.pools import pools


def end_path(manager):
    """Ends the path, as upstream does once none of its outputs is needed."""
    manager.current_node = None


def number(value):
    """The id of a recording."""
    return SimpleNamespace(id=value)


class TestForgotten(TestCase):
    """Recordings of functions that are no longer graphed."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        self.enterContext(mock.patch.object(input_rules, "why_not_staged", lambda *_: None))
        self.enterContext(mock.patch.object(Manager, "is_graphed", lambda *_: True))
        self.released = self.enterContext(mock.patch("pygraph_trees.trees.managers.reclaiming.release_retired"))
        ends = lambda manager: self.may_end and end_path(manager)  # noqa: E731
        self.enterContext(mock.patch.object(Upstream, "try_end_curr_execution", ends))
        self.may_end = True
        self.model = object()
        own = {"outputs_weakrefs": [], "older_outputs": [], "unaliased_in_all_paths": []}
        self.below = mock.Mock(id=number(1), children={}, graph="captured", **own)
        self.first = mock.Mock(id=number(0), children={1: [self.below]}, graph="captured", **own)
        functions = {
            number: SimpleNamespace(model=model, mutated_input_idxs=())
            for number, model in ((1, self.model), (2, None))
        }
        self.manager = bare_manager(
            ids_to_funcs=functions,
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
        self.assertEqual((self.first.children, self.below.graph, self.released.call_count), ({}, None, 1))
        self.below.remove_node_cached_tensors.assert_called_once_with()
        self.assertIsNone(self.below.native)
        self.first.remove_node_cached_tensors.assert_not_called()
        self.assertEqual((self.first.graph, self.manager.reclaiming.forgotten), ("captured", []))
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
        newer = mock.Mock(id=number(7), children={}, graph="captured")
        self.manager.roots[2].append(newer)
        self.first.id = number(4)
        for newest in (5, 3):  # the first call counts
            self.manager.reclaiming.record_again(2, "of the test", newest)
        end_path(self.manager)
        self.manager.reclaiming.give_back(self.manager)
        self.assertEqual((self.manager.roots, self.first.graph, newer.graph), ({2: [newer]}, None, "captured"))

    def test_no_candidates_are_left_of_what_is_given_back(self):
        """Candidates that were found before the recording could be given back are dropped, even if no path is open."""
        for is_open in (True, False):
            with self.subTest(is_open=is_open):
                self.first.children, self.manager.roots = {1: [self.below]}, {2: [self.first]}
                self.manager._candidates |= {1: "what is given back", 2: "others"}
                self.manager.reclaiming.forgotten = [1]
                self.manager.current_node = self.first if is_open else None
                self.manager._find(self.manager, 2, False)
                self.assertEqual((self.manager.reclaiming.forgotten, self.first.children), ([], {}))
                self.assertNotIn(1, self.manager._candidates)

    def test_a_chosen_table_has_a_function_recorded_again_and_does_not_keep_the_manager(self):
        chooser = SimpleNamespace(ready=None)
        lives = [SimpleNamespace(addresses=SimpleNamespace(chooser=found)) for found in (None, chooser)]
        for live in (None, *lives):
            self.manager._let_chooser_rerecord(SimpleNamespace(live=live, log=SimpleNamespace(number=0)), 2)
        chooser.ready("of the test")
        self.assertEqual(self.manager.reclaiming.forgotten, [2])
        self.manager.reclaiming.forgotten.clear()
        self.assertEqual(self.manager.reclaiming.why_again(2), "of the test")
        gone = weakref.ref(self.manager)
        del self.manager
        self.assertIsNone(gone())
        chooser.ready("of the test")  # the manager is gone


class Fresh(Manager):
    """Manager that counts how often one is made, each with another pool."""

    made = 0

    def __init__(self, device_index):
        self.graph, self.stream, self.cuda_graphs_thread_pool = "graph", "stream", (0, 9)
        Fresh.made += 1


class TestPool(TestCase):
    """The graph pool, which is given back with its last recording unless an output is still held."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))

    def node(self):
        node = mock.Mock(children={}, graph="graph", native="in C++", outputs_weakrefs=[], older_outputs=[])
        node.unaliased_in_all_paths, node.log, node.id = [], RecordingLog(counter=Count(3)), number(0)
        return node

    def recorded(self, node, kind=Manager, **state):
        """A manager with one function, which has one recording, and the function's model."""
        model = object()
        return bare_manager(kind, ids_to_funcs={1: SimpleNamespace(model=model)}, roots={1: [node]}, **state), model

    def test_the_pool_is_given_back_with_its_last_recording_unless_an_output_is_held(self):
        for is_held in (False, True):
            Fresh.made, node = 0, self.node()
            # Outputs that were replaced by others count too.
            node.outputs_weakrefs, node.unaliased_in_all_paths = [mock.Mock(expired=lambda: True), None], [True, False]
            node.older_outputs = [mock.Mock(expired=lambda: not is_held)]  # noqa: B023
            manager, model = self.recorded(node, Fresh, graph="first graph")
            with (
                mock.patch.object(pools, "OWNED", dict.fromkeys([(0, 7), (0, 9)])) as owned,
                mock.patch.object(torch.cuda, "empty_cache") as emptied,
            ):
                self.assertFalse(manager.give_pool_back())  # nothing was given back yet
                manager.forget(model)
                self.assertEqual((Fresh.made, emptied.call_count), (0, 0) if is_held else (1, 1))
                self.assertEqual(manager.graph, "first graph" if is_held else "graph")
                if is_held:
                    self.assertFalse(manager.give_pool_back())
                    is_held = False
                    manager.reclaiming.record_again(1, "a reason", 0)
                    manager.reclaiming.forgotten.clear()
                    self.assertFalse(manager.give_pool_back())  # it is about to be used
                    manager.reclaiming.why_again(1)
                    self.assertTrue(manager.give_pool_back())
                self.assertEqual((manager.cuda_graphs_thread_pool, manager.stream), ((0, 9), "stream"))
                self.assertEqual([*owned], [(0, 9)])
                self.assertFalse(manager.give_pool_back())  # once
            self.assertEqual((Fresh.made, emptied.call_count), (1, 1))

    def test_to_start_over_takes_another_pool_although_an_output_is_held(self):
        for is_held in (True, False):
            node = self.node()
            node.outputs_weakrefs = [mock.Mock(expired=lambda held=is_held: not held)]
            node.unaliased_in_all_paths = [True]
            manager, _ = self.recorded(node, Fresh, graph="first graph")
            with (
                mock.patch.object(pools, "OWNED", {(0, 7): None}),
                mock.patch.object(torch.cuda, "empty_cache"),
                mock.patch.object(reclaiming, "_in_use", []) as in_use,
            ):
                manager.reclaiming.start_over(manager, "an error")
                self.assertEqual([graph for graph, _ in in_use], ["first graph"] if is_held else [])
            self.assertEqual((manager.graph, manager.roots), ("graph", {}))
            self.assertEqual(manager.reclaiming.why_again(1), "an error")

    def test_the_pool_stays_if_outputs_are_made_at_each_replay(self):
        """Only the newest outputs are known, and older ones may be held; for upstream's recordings, none is known."""
        for log, is_back in ((RecordingLog(), True), (RecordingLog(counter=Count(5)), False), (None, False)):
            node = self.node()
            node.outputs_weakrefs = [mock.Mock(expired=lambda: True), None, mock.Mock(expired=lambda: True)]
            node.unaliased_in_all_paths, node.log = [True, False, False], log
            manager, model = self.recorded(node)
            made = mock.Mock(side_effect=RuntimeError("it would be given back"))
            with mock.patch.object(Manager, "__init__", made):
                manager.forget(model)
                manager.give_pool_back()
            self.assertEqual(made.called, is_back)

    def test_the_old_pool_stays_if_nothing_was_recorded_or_no_new_one_can_be_made(self):
        model = object()
        with mock.patch.object(Manager, "__init__", side_effect=AssertionError("a new one")):
            manager = bare_manager(ids_to_funcs={1: SimpleNamespace(model=model)})
            manager.forget(model)
            self.assertFalse(manager.give_pool_back())
        manager, model = self.recorded(self.node(), graph="graph")
        with (
            mock.patch.object(Manager, "__init__", side_effect=RuntimeError("out of memory")) as made,
            self.assertLogs("pygraph_trees.trees", "WARNING") as logs,
        ):
            manager.forget(model)
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
                self.assertFalse(manager.give_pool_back())
            self.assertEqual(made.call_count, 1)
            self.assertFalse(manager.give_pool_back())  # it is tried again
        self.assertEqual((made.call_count, manager.graph), (2, "graph"))
        self.assertIn("out of memory", logs.output[0])

    def test_a_manager_that_is_shut_down_has_nothing_to_give_back(self):
        model = object()
        manager = bare_manager(ids_to_funcs={1: SimpleNamespace(model=model)}, roots={1: []})
        manager.reclaiming.record_again(1, "of the test", 0)
        manager.shutdown()
        self.assertEqual(manager.reclaiming.forgotten, [])
        manager.forget(model)
        self.assertFalse(manager.give_pool_back())
        manager.reclaiming.give_back(manager)
        self.assertEqual(handed_on(manager, SimpleNamespace(trial=object())), 0)

    def test_from_another_thread_it_is_the_managers_own_that_does_it(self):
        manager, model = self.recorded(node := self.node())
        manager._candidates[1] = "candidates"
        manager.forget(model, later=True)
        self.assertEqual((manager.roots, manager._candidates), ({1: [node]}, {}))
        self.assertEqual(manager.reclaiming.forgotten, [1])

    def test_an_open_path_is_ended_if_that_takes_nothing_from_anybody(self):
        """``give_pool_back`` ends it."""
        state = cudagraph_trees.ExecutionState
        for path_state, are_dead, is_ended in (
            (state.EXECUTION, False, True),  # upstream ends it at a new step
            (state.RECORDING, True, True),
            (state.RECORDING, False, False),  # upstream would take the outputs away
            (state.WARMUP, True, False),
        ):
            node = self.node()
            last = mock.Mock(all_outputs_are_dead=lambda are_dead=are_dead: are_dead)
            manager = bare_manager(roots={1: [node]}, current_node=last, path_state=path_state)
            manager.reclaiming.forgotten = [1]
            with (
                mock.patch.object(Upstream, "try_end_curr_execution", end_path),
                mock.patch.object(Upstream, "clear_current_path_state_and_set_to_none", end_path),
                mock.patch.object(Manager, "__init__", side_effect=RuntimeError("not now")),
            ):
                manager.give_pool_back()
            self.assertEqual(manager.roots, {} if is_ended else {1: [node]})


class TestShutdown(TestCase):
    """A reset of all trees gives back the memory of recordings, even if the recordings are still referenced."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        self.waits = self.enterContext(mock.patch.object(torch.cuda, "synchronize"))
        self.closed = []

    def retire(self, device):
        retired.retire(mock.Mock(), device, SimpleNamespace(close=lambda: self.closed.append(device)))

    def test_graphs_go_before_their_memory_is_given_back(self):
        """Each recording's graph is also held by its part in C++."""
        nodes, released = [mock.Mock(children={}, graph=Plain()) for _ in range(2)], []
        nodes[0].children = {1: nodes[1:]}
        for node in nodes:
            node.native = SimpleNamespace(graph=node.graph)
        gone = [weakref.ref(node.graph) for node in nodes]
        manager = bare_manager(roots={2: nodes[:1]}, current_node=nodes[0])
        with mock.patch.object(trees_manager, "release_retired", lambda: released.append([graph() for graph in gone])):
            manager.shutdown()
        self.assertEqual((released, manager.roots), ([[None, None]], None))

    def test_each_device_is_waited_for_once(self):
        for device in (0, 1, 0):
            self.retire(device)
        self.assertEqual((self.closed, self.waits.call_count), ([], 0))
        bare_manager().shutdown()
        waited = sorted(call.args[0] for call in self.waits.call_args_list)
        self.assertEqual((sorted(self.closed), waited), ([0, 0, 1], [0, 1]))

    def test_a_reset_gives_back_what_is_left_after_the_managers(self):
        self.retire(0)
        order = []
        entry_points.reset_cudagraph_trees(lambda: order.append(list(self.closed)))()
        self.assertEqual((order, self.closed), ([[]], [0]))

    def test_trees_of_other_threads_cache_tensors_after_a_reset(self):
        """They do so even while the reset frees what it drops, because other threads may run then."""
        order, containers = [], {0: mock.Mock()}
        weakref.finalize(containers[0], order.append, "freed")

        def upstream():
            cudagraph_trees._set_cached_tensors_enabled(False)
            containers.clear()

        local = SimpleNamespace(tree_manager_containers=containers)
        with (
            mock.patch.object(cudagraph_trees, "local", local),
            mock.patch.object(cudagraph_trees, "_set_cached_tensors_enabled", order.append),
        ):
            entry_points.reset_cudagraph_trees(upstream)()
        self.assertEqual(order, [False, True, "freed"])


class TestHandedOn(TestCase):
    """Outputs in the graph pool that a function hands to other functions."""

    def node(self, model, number, managed=(), depth=0, **children):
        """``managed``: depth and output of each managed input."""
        return SimpleNamespace(
            id=SimpleNamespace(id=number),
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
        roots = {1: [self.node(first, 1)], 2: [above], 3: [self.node(neighbour, 7, ((0, 0),))]}
        manager = bare_manager(roots=roots)
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
