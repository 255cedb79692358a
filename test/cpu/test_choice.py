"""A function that is measured: which managers learn of its un-graphed calls, and whether a trial has the memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch
from bare_manager import bare_manager
from recordings_on_cpu import SIZE, Function, OnCpuTestCase
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.trees.hooks import choice
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.steps import Upstream


class FakeManager:
    def __init__(self, device, **options):  # options since torch 2.15
        self.running_forwards_with_pending_backwards = False

    def set_to_running_backward(self):
        self.running_forwards_with_pending_backwards = False


class TestFlags(TestCase):
    def test_upstreams_manager_awaits_the_backward_of_an_ungraphed_forward(self):
        """A step of one thread does not change which backwards another thread waits for."""
        self.enterContext(mock.patch.object(cudagraph_trees, "CUDAGraphTreeManager", FakeManager))
        containers = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
        self.enterContext(mock.patch.dict(containers, clear=True))
        forward, backward = (
            choice.as_upstream_has_it(lambda inputs: inputs, mode, 0) for mode in ("forward", "backward")
        )

        def forward_and_manager():
            forward([])
            return cudagraph_trees.get_manager(0, create_if_none_exists=False)

        mine = forward_and_manager()
        with ThreadPoolExecutor(1) as other:
            other.submit(backward, []).result()
            self.assertTrue(mine.running_forwards_with_pending_backwards)
            backward([])
            self.assertFalse(mine.running_forwards_with_pending_backwards)
            its = other.submit(forward_and_manager).result()
        self.assertIsNot(its, mine)
        self.assertTrue(its.running_forwards_with_pending_backwards)
        self.assertFalse(mine.running_forwards_with_pending_backwards)


class TestUngraphed(OnCpuTestCase):
    """What our manager makes of un-graphed calls between graphed ones."""

    def calls(self, manager):
        self.enterContext(mock.patch.object(cudagraph_trees, "get_manager", lambda *_, **__: manager))
        self.enterContext(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        return (choice.as_upstream_has_it(lambda inputs: ["un-graphed"], mode, 0) for mode in ("forward", "backward"))

    def test_a_forward_begins_a_step_unless_another_call_has_the_turn_and_a_backward_does_not(self):
        """Outputs that are held keep their values; a forward awaits its backward."""
        function, other = Function(mode=cudagraph_trees.CompilationMode.BACKWARD), ["of another call"]
        manager = function.manager
        forward, backward = self.calls(manager)
        for call, is_taken, begins in ((backward, False, False), (forward, True, False), (forward, False, True)):
            (output,) = function.call(3.0)
            node, manager.current_gen = manager.current_node, 0
            self.assertTrue(not is_taken or manager.take_turn(other))
            self.assertEqual(call([]), ["un-graphed"])
            manager.end_turn(other)
            self.assertIs(manager.current_node, None if begins else node)
            self.assertEqual(manager.current_gen == manager.get_curr_generation(), not is_taken)
            self.assertEqual(manager.running_forwards_with_pending_backwards, call is forward)
            backward([])
            function.call(4.0)
            self.assertEqual(output, torch.full((SIZE,), 3.0))

    def test_a_path_ends_in_any_state(self):
        for state in ("execution", "recording", "warmup"):
            path_state = cudagraph_trees.ExecutionState[state.upper()]
            manager = bare_manager(path_state=path_state, current_node=object(), current_gen=-7)
            forward, _ = self.calls(manager)
            with (
                mock.patch.object(Upstream, "can_start_new_generation", lambda _: True),
                mock.patch.object(Manager, f"try_end_curr_{state}") as ended,
            ):
                forward([])
            ended.assert_called_once()


class TestRoom(TestCase):
    def test_a_trial_takes_no_more_memory_than_the_process_may(self):
        manager = SimpleNamespace(pool_bytes=100, device_index=0)
        for free, fraction, reserved, allocated, has_room in (
            (500, 1.0, 300, 200, True),
            (500, 0.35, 300, 200, False),  # 50 bytes may be taken
            (500, 0.45, 300, 200, True),
            (50, 1.0, 300, 200, False),
            (50, 1.0, 300, 40, True),  # 160 bytes that torch has reserved are in no pool
        ):
            with (
                mock.patch("torch.cuda.mem_get_info", return_value=(free, 1000)),
                mock.patch("torch.cuda.get_per_process_memory_fraction", return_value=fraction),
                mock.patch("torch.cuda.memory_reserved", return_value=reserved),
                mock.patch("torch.cuda.memory_allocated", return_value=allocated),
            ):
                self.assertEqual(choice.has_room_for_another(manager), has_room)


if __name__ == "__main__":
    run_tests()
