"""Outputs that outlive their step: moved out of memory that the next step overwrites."""

from __future__ import annotations

import itertools
import unittest
from unittest import mock

import torch
from bare_manager import bare_manager
from fake_trees import MODE, Plain, Trees, deaths, fail, some
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import ExecutionState, StorageWeakRefWrapper, TensorWeakRef
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees.trees.recordings.recording  # noqa: F401  torch's own recordings are told apart
from pygraph_trees.cuda.extent import copy_bits
from pygraph_trees.native import binding
from pygraph_trees.report.log import FunctionLog
from pygraph_trees.report.records import MovedOutput
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions.function import FunctionModel
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.steps import Upstream
from pygraph_trees.trees.recordings.kept_outputs import keeps_outputs, kept_indices, move_alive, why_not_moved

POOL = (0, 38)


def function(outputs="keep"):
    settings = Settings(placement="off", indirection="auto", selective="always", outputs=outputs)
    return FunctionModel(fail, settings, FunctionLog("f", "0/0", "inference", 1, {}))


class TestCopies(TestCase):
    @parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
    def test_bits_of_any_dtype_and_layout(self, dtype):
        bits = torch.randint(0, 2, (3, 4, 5)).to(dtype)
        odd = torch.randint(0, 2, (7,)).to(dtype)[1:]
        sources = [bits, bits.permute(2, 0, 1), odd]
        for mode in (torch.inference_mode, torch.no_grad):
            targets = [torch.empty_like(source).zero_() for source in sources]
            with mode():
                copy_bits(targets, sources)
            for found, wanted in zip(targets, sources, strict=True):
                self.assertEqual(found.stride(), wanted.stride())
                self.assertTrue(torch.equal(found.to(torch.complex64), wanted.to(torch.complex64)))

    def test_nan_keeps_its_bits(self):
        source = torch.tensor([0x7F800001, 0x7FC00123], dtype=torch.int32).view(torch.float32)
        copy_bits([target := torch.zeros(2)], [source])
        self.assertEqual(target.view(torch.int32), source.view(torch.int32))


class Node:
    """The outputs of a recording or a warm-up; ``pool`` stands for memory of the graph pool."""

    def __init__(self, *outputs, parent=None, outputs_are="keep", caches=True):
        self.wrapped_function = Plain(model=function(outputs_are))
        self.cuda_graphs_pool, self.parent = POOL, parent
        self.outputs_weakrefs = [None if o is None else StorageWeakRefWrapper(o) for o in outputs]
        self.tensor_weakrefs = [None if o is None else TensorWeakRef(o) for o in outputs]
        self.dropped = 0
        if caches:
            self.remove_node_cached_tensors = self.drop

    def drop(self):
        self.dropped += 1

    @property
    def _path_from_root(self):
        return [*(self.parent._path_from_root if self.parent else ()), self]

    @property
    def moved(self):
        return dict(self.wrapped_function.model.log.moved)


def in_pool(pool, begin, count):
    """A tensor in memory of the pool that it does not own, like a replay's outputs."""
    storage = torch._C._construct_storage_from_data_pointer(pool.data_ptr() + 4 * begin, pool.device, 4 * count)
    return torch.empty(0).set_(storage, 0, (count,), (1,))


@unittest.skipIf(why_not_moved() is not None, f"{why_not_moved()}")
class TestMoving(TestCase):
    def setUp(self):
        super().setUp()
        self.pool = torch.arange(64.0)

    def overwrite(self):
        self.pool.fill_(-1)

    def test_tensors_views_and_storages_keep_their_values(self):
        output = in_pool(self.pool, 8, 4)
        view, storage, before = output[1:3], output.untyped_storage(), output.data_ptr()
        alias = output.view(torch.int32)
        node = Node(output)
        move_alive(node)
        self.overwrite()
        self.assertEqual(output, torch.arange(8.0, 12.0))
        self.assertEqual(view, torch.arange(9.0, 11.0))
        self.assertEqual(alias, torch.arange(8.0, 12.0).view(torch.int32))
        self.assertEqual(storage.data_ptr(), output.data_ptr())
        self.assertNotEqual(output.data_ptr(), before)
        self.assertEqual((node.moved, node.dropped), ({0: (1, 16)}, 1))
        output += 1
        self.assertEqual(view, torch.arange(10.0, 12.0))

    def test_what_moved_is_dead_for_its_recording_and_not_moved_again(self):
        """Unless the recording returns it again; the report counts moves by output."""
        output = in_pool(self.pool, 0, 4)
        node = Node(None, output)
        move_alive(node)
        self.assertTrue(node.outputs_weakrefs[1].expired())
        address = output.data_ptr()
        move_alive(node)
        self.assertEqual((output.data_ptr(), node.moved), (address, {1: (1, 16)}))
        node.outputs_weakrefs[1] = StorageWeakRefWrapper(output)
        move_alive(node)
        record = node.wrapped_function.model.log.record()
        self.assertEqual(record.moved_outputs, (MovedOutput(1, 2, 32),))

    def test_memory_that_an_output_owns_is_given_back(self):
        """Outputs of a warm-up and of the recorded call own theirs."""
        output = torch.ones(4)
        freed = StorageWeakRefWrapper(output)
        node = Node(output, caches=False)
        move_alive(node)
        self.assertEqual(output, torch.ones(4))
        self.assertFalse(freed.expired())  # the storage is the same
        self.assertTrue(node.outputs_weakrefs[0].expired())
        self.assertEqual(node.moved, {0: (1, 16)})

    def test_outputs_that_share_a_storage_move_together(self):
        whole = in_pool(self.pool, 0, 8)
        first, second = whole[:4], whole[4:]
        node = Node(first, second)
        move_alive(node)
        self.overwrite()
        self.assertEqual((first, second), (torch.arange(4.0), torch.arange(4.0, 8.0)))
        self.assertEqual(first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr())
        self.assertTrue(all(held.expired() for held in node.outputs_weakrefs))
        self.assertEqual(node.moved, {0: (1, 32)})

    def test_all_recordings_of_a_path(self):
        """Recordings without outputs that are alive keep their tensors."""
        outputs = [in_pool(self.pool, 4 * n, 4) for n in range(4)]
        first = Node(in_pool(self.pool, 16, 4))
        forward = Node(outputs[0], None, outputs[1], parent=first)
        backward = Node(outputs[2], outputs[3], parent=forward)
        del outputs[1], outputs[1]  # the numbers 1 and 2 are dead
        move_alive(backward)
        self.overwrite()
        self.assertEqual(outputs, [torch.arange(4.0), torch.arange(12.0, 16.0)])
        self.assertEqual((forward.moved, backward.moved), ({0: (1, 16)}, {1: (1, 16)}))
        self.assertEqual((first.dropped, first.moved, forward.dropped, backward.dropped), (0, {}, 1, 1))

    def test_outputs_as_upstream_stay(self):
        kept, other = in_pool(self.pool, 0, 4), in_pool(self.pool, 4, 4)
        forward = Node(other, outputs_are="upstream")
        node = Node(kept, parent=forward)
        move_alive(node)
        self.overwrite()
        self.assertEqual((kept, other), (torch.arange(4.0), torch.full((4,), -1.0)))
        node.live_indices_after_graph = [(0, 0), (1, 0)]
        self.assertEqual(kept_indices(node), [(1, 0)])

    def test_a_leaf_that_needs_a_gradient_and_what_autograd_saved(self):
        output = in_pool(self.pool, 0, 4).requires_grad_()
        loss = (output * output).sum()
        version = output._version
        with torch.inference_mode():
            move_alive(Node(output))
        self.overwrite()
        loss.backward()
        self.assertEqual(output.grad, 2 * torch.arange(4.0))
        self.assertEqual(output._version, version)
        loss = (output * output).sum()
        with torch.no_grad():
            output += 1
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_without_memory_nothing_changes(self):
        output = in_pool(self.pool, 0, 4)
        node, address = Node(output), output.data_ptr()
        with mock.patch.object(torch, "empty_like", side_effect=torch.OutOfMemoryError):
            self.assertRaises(torch.OutOfMemoryError, move_alive, node)
        self.assertEqual((output.data_ptr(), node.moved, node.dropped), (address, {}, 0))
        self.assertFalse(node.outputs_weakrefs[0].expired())

    def test_memory_is_exchanged_between_storages_of_one_size(self):
        exchange = binding.extension.exchange_memory
        self.assertRaisesRegex(ValueError, "same size", exchange, torch.ones(2), torch.ones(3))
        self.assertRaisesRegex(TypeError, "expected a tensor", exchange, torch.ones(2), 3)


class TestWithoutMoving(TestCase):
    def test_outputs_are_torchs_without_the_native_parts_or_the_patches(self):
        self.assertFalse(keeps_outputs(lambda inputs: inputs))  # from before the patches
        with mock.patch.object(binding, "extension", None):
            self.assertEqual(why_not_moved(), "the native parts are missing")
            self.assertFalse(keeps_outputs(function()))


@unittest.skipIf(why_not_moved() is not None, f"{why_not_moved()}")
class TestSteps(TestCase):
    """A manager moves outputs when a step begins, whatever state its path is in."""

    def setUp(self):
        super().setUp()
        self.moved = []
        self.enterContext(mock.patch("pygraph_trees.trees.managers.manager.move_alive", self.moved.append))
        self.enterContext(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        self.manager = bare_manager(current_node=Plain(_path_from_root=[]), path_state=ExecutionState.EXECUTION)
        self.manager.keeps_outputs = True

    def starts(self, answer):
        return mock.patch.object(Upstream, "can_start_new_generation", lambda _: answer)

    @parametrize("name", ["execution", "recording", "warmup"])
    def test_before_a_path_ends(self, name):
        """If a step begins, the program does not capture, and outputs are not as upstream."""
        node = self.manager.current_node
        arguments, ended = () if name == "execution" else (7,), f"try_end_curr_{name}"
        for begins, captures, keeps in itertools.product((False, True), repeat=3):
            self.moved.clear()
            self.manager.keeps_outputs, upstream = keeps, []
            with (
                mock.patch.object(Upstream, ended, lambda *given, to=upstream: to.append((given[1:], [*self.moved]))),
                mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures),
                self.starts(begins),
            ):
                getattr(self.manager, ended)(*arguments)
            self.assertEqual(upstream, [(arguments, [node] if begins and keeps and not captures else [])])

    @parametrize("name", ["recording", "warmup"])
    def test_recordings_are_given_back_before_the_call_makes_new_ones(self, name):
        """Otherwise the next call would give back the new ones too."""
        given_back = self.enterContext(mock.patch.object(type(self.manager.reclaiming), "give_back"))
        ended, self.manager.keeps_outputs = f"try_end_curr_{name}", False

        def end(manager, _):
            manager.current_node = None

        for forgotten, ends in (([], True), ([3], False), ([3], True)):
            self.manager.reclaiming.forgotten, self.manager.current_node = forgotten, object()
            with mock.patch.object(Upstream, ended, end if ends else lambda *_: None):
                getattr(self.manager, ended)(7)
            self.assertEqual(given_back.call_count, int(bool(forgotten) and ends))

    def test_before_the_pool_is_freed(self):
        node = self.manager.current_node
        with self.starts(False), mock.patch.object(Upstream, "shutdown", lambda _: None):
            self.manager.shutdown()
        self.assertEqual(self.moved, [node])

    def test_before_the_last_function_takes_its_manager_along(self):
        container = cudagraph_trees.TreeManagerContainer(0)
        container.tree_manager, container.live_cudagraphify_fns = self.manager, 2
        node = self.manager.current_node
        container.finalize_cudagraphify_fn()
        self.assertEqual(self.moved, [])
        container.finalize_cudagraphify_fn()
        self.assertEqual((self.moved, container.tree_manager), ([node], None))

    def test_a_lost_gpu_does_not_prevent_the_end(self):
        with (
            self.starts(False),
            mock.patch.object(Upstream, "shutdown", mock.Mock()) as shutdown,
            mock.patch(
                "pygraph_trees.trees.managers.manager.move_alive", side_effect=torch.OutOfMemoryError("none is free")
            ),
            self.assertLogs("pygraph_trees.trees", "WARNING") as logs,
        ):
            self.manager.shutdown()
        shutdown.assert_called_once()
        self.assertIn("none is free", logs.output[0])

    @parametrize("outputs", ["keep", "upstream"])
    def test_a_function_decides_when_it_is_added(self, outputs):
        """The report says why outputs are not kept."""
        self.manager.keeps_outputs = False
        with mock.patch.object(Upstream, "add_function", lambda *_: (Plain(keywords={"function_id": 1}), [])):
            Manager.add_function(self.manager, function(outputs), [])
            self.assertEqual(self.manager.keeps_outputs, outputs == "keep")
            with mock.patch("pygraph_trees.trees.managers.manager.why_not_moved", lambda: "no"):
                Manager.add_function(self.manager, model := function(outputs), [])
        self.assertEqual(model.log.record().why_not_kept, "no" if outputs == "keep" else None)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestFastPath(TestCase):
    def setUp(self):
        super().setUp()
        self.x = torch.ones(4)
        self.outputs = some(2)

    def trees(self, *, begins=True, keeps=True, outliving=()):
        trees = Trees({0: self.x}, some(1), mode=MODE.INFERENCE)
        last = Trees({0: self.x}, self.outputs, outliving=deaths(self.outputs, *outliving) if outliving else None)
        last.recording.outputs.clear()  # they hold the outputs
        trees.before = last.recording
        trees.before.native = last.native
        trees.put(trees.candidates(trees.native))
        trees.manager.keeps_outputs = keeps
        if not begins:
            trees.manager.current_gen = cudagraph_trees.CUDAGraphTreeManager.get_curr_generation()
        return trees

    def calls(self, trees):
        outputs = trees.entry()([self.x])
        self.assertEqual(len(outputs), 1)
        return trees.manager.ended

    def test_python_is_asked_only_if_an_output_is_alive_when_a_step_begins(self):
        self.assertEqual(self.calls(self.trees(outliving=(0, 1))), 0)
        held = self.outputs[1][1:]
        self.assertEqual(self.calls(self.trees(outliving=(0, 1))), 1)
        self.assertEqual(self.calls(self.trees(outliving=(0,))), 0)
        self.assertEqual(self.calls(self.trees()), 0)
        self.assertEqual(self.calls(self.trees(outliving=(0, 1), begins=False)), 0)
        self.assertEqual(self.calls(self.trees(outliving=(0, 1), keeps=False)), 0)
        del held

    def test_a_path_without_a_fast_path_is_ended_by_python(self):
        trees = self.trees()
        for last in (Plain(), Plain(native=None)):
            trees.before = last
            trees.put(trees.candidates(trees.native))
            trees.manager.ended, trees.manager.current_gen = 0, -5
            self.assertEqual(self.calls(trees), 1)


instantiate_parametrized_tests(TestCopies)
instantiate_parametrized_tests(TestSteps)

if __name__ == "__main__":
    run_tests()
