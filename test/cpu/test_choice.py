"""A function that is measured: which managers learn of its un-graphed calls, and whether a trial has the memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.trees.hooks import choice


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
