"""Threads and torch's trees: which managers learn of a function that is measured, and which thread graphs it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from test_trial import World
from torch._inductor import compile_fx, config, cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.trees.hooks import choice


def in_thread(fn):
    """The result of ``fn`` in a thread that torch does not know."""
    found = []

    def work():
        try:
            found.append(fn())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def choice_of(function):
    """The object that the function's trial notifies of its decision."""
    return function.dispatch.call.__self__


class FakeManager:
    """Runs functions and counts the runs."""

    def __init__(self, device, **options):  # options since torch 2.15
        self.running_forwards_with_pending_backwards = False
        self.calls = 0

    def set_to_running_backward(self):
        self.running_forwards_with_pending_backwards = False

    def add_function(self, model, inputs, *args, **kwargs):
        def fn(inputs):
            self.calls += 1
            return model(inputs)

        cudagraph_trees.get_container(0).add_strong_reference(fn)
        outputs = fn(inputs)
        model.dispatch.add(of_integers=False)
        return fn, outputs


class ChoiceTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(cudagraph_trees, "CUDAGraphTreeManager", FakeManager))
        containers = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
        self.enterContext(mock.patch.dict(containers, clear=True))

    def manager(self):
        return cudagraph_trees.get_manager(0, create_if_none_exists=False)


class TestFlags(ChoiceTestCase):
    """Upstream's manager learns of un-graphed forwards and backwards."""

    def runs(self):
        return [choice.as_upstream_has_it(lambda inputs: inputs, mode, 0) for mode in ("forward", "backward")]

    def test_a_forward_awaits_its_backward(self):
        forward, backward = self.runs()
        forward([])
        self.assertTrue(self.manager().running_forwards_with_pending_backwards)
        backward([])
        self.assertFalse(self.manager().running_forwards_with_pending_backwards)

    def test_each_thread_awaits_its_own_backwards(self):
        """A step of one thread does not change which backwards another thread waits for."""
        forward, backward = self.runs()
        forward([])
        mine = self.manager()
        in_thread(lambda: backward([]))
        self.assertTrue(mine.running_forwards_with_pending_backwards)
        backward([])

        def other():
            forward([])
            return self.manager()

        its = in_thread(other)
        self.assertIsNot(its, mine)
        self.assertTrue(its.running_forwards_with_pending_backwards)
        self.assertFalse(mine.running_forwards_with_pending_backwards)


class TestThreads(ChoiceTestCase):
    """A function that doubles x is first called in one thread and graphed in another one."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(choice, "CudaDevice", lambda device: World()))
        self.enterContext(config.patch({"triton.pygraph_selective": "auto"}))
        self.x, self.doubled = torch.ones(1), [torch.ones(1) * 2]

    def double(self, inputs):
        return [x * 2 for x in inputs]

    def test_a_function_warmed_up_in_the_main_thread_serves_others(self):
        for mode in ("inference", "forward"):
            run = compile_fx.cudagraphify(
                self.double,
                static_input_idxs=(),
                device_index=0,
                stack_traces=[None],
                is_backward=False,
                is_inference=mode == "inference",
            )
            for _ in range(3):
                run([self.x])
            served = in_thread(lambda run=run: [run([self.x]) for _ in range(3)])
            self.assertEqual(served, [self.doubled] * 3)
            self.assertEqual(run([self.x]), self.doubled)
            self.assertIsNone(run.function.dispatch.call)


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
