"""Outputs that outlive their step: moved out of memory that the next step overwrites; from then on in own memory."""

import contextlib
import functools
import itertools
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from fake_trees import LIMITS, MODE, Plain, Trees, bare_manager, deaths, some
from test_allocations import COPIED, FIRST, LIBRARY, SECOND, addresses, captured, function, generated
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import CUDAWarmupNode, ExecutionState, StorageWeakRefWrapper, TensorWeakRef
from torch._inductor.cudagraph_utils import PlaceholderInfo, WrappedFunction
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees.trees.recordings.recording  # noqa: F401  torch's own recordings are told apart
from pygraph_trees.cuda.extent import copy_bits
from pygraph_trees.indirection.routes import Decision, Route
from pygraph_trees.native import binding
from pygraph_trees.outputs import policy
from pygraph_trees.outputs.allocations import Block
from pygraph_trees.outputs.own_memory import OwnMemory
from pygraph_trees.reasons import Reason
from pygraph_trees.report.records import MovedOutput
from pygraph_trees.trees.functions import containment
from pygraph_trees.trees.managers import input_rules
from pygraph_trees.trees.managers import manager as trees_manager
from pygraph_trees.trees.managers.calls import Upstream
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.recordings.kept_outputs import keeps_outputs, kept_indices, move_alive, why_not_moved

POOL = (0, 38)
X = torch.arange(4.0)


class TestCopies(TestCase):
    def test_bits_of_any_dtype_and_layout(self):
        dtypes = torch.float32, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn
        for dtype, mode in itertools.product(dtypes, (torch.inference_mode, torch.no_grad)):
            bits = torch.randint(0, 2, (3, 4, 5)).to(dtype)
            sources = [bits, bits.permute(2, 0, 1), torch.randint(0, 2, (7,)).to(dtype)[1:]]
            targets = [torch.empty_like(source).zero_() for source in sources]
            with mode():
                copy_bits(targets, sources)
            for found, wanted in zip(targets, sources, strict=True):
                self.assertEqual(found.stride(), wanted.stride())
                self.assertTrue(torch.equal(found.to(torch.complex64), wanted.to(torch.complex64)))
        # A NaN keeps its bits too.
        source = torch.tensor([0x7F800001, 0x7FC00123], dtype=torch.int32).view(torch.float32)
        copy_bits([target := torch.zeros(2)], [source])
        self.assertEqual(target.view(torch.int32), source.view(torch.int32))

    def test_outputs_are_torchs_without_the_native_parts_or_the_patches(self):
        self.assertFalse(keeps_outputs(lambda inputs: inputs))  # from before the patches
        with mock.patch.object(binding, "extension", None):
            self.assertEqual(why_not_moved(), "the native parts are missing")
            self.assertFalse(keeps_outputs(function()))


class Node:
    """The outputs of a recording or a warm-up; ``pool`` stands for memory of the graph pool."""

    def __init__(self, *outputs, parent=None, outputs_are="keep"):
        self.wrapped_function = Plain(model=function(outputs=outputs_are))
        self.cuda_graphs_pool = POOL
        self._path_from_root = [*(parent._path_from_root if parent else ()), self]
        self.outputs_weakrefs = [None if o is None else StorageWeakRefWrapper(o) for o in outputs]
        self.tensor_weakrefs = [None if o is None else TensorWeakRef(o) for o in outputs]
        self.remove_node_cached_tensors = mock.Mock()

    @property
    def moved(self):
        """The outputs that moved, and how often their recording has dropped its own ones."""
        return dict(self.wrapped_function.model.log.moved), self.remove_node_cached_tensors.call_count


def in_pool(pool, begin, count):
    """A tensor in memory of the pool that it does not own, like a replay's outputs."""
    storage = torch._C._construct_storage_from_data_pointer(pool.data_ptr() + 4 * begin, pool.device, 4 * count)
    return torch.empty(0).set_(storage, 0, (count,), (1,))


@unittest.skipIf(why_not_moved() is not None, f"{why_not_moved()}")
class TestMoving(TestCase):
    def setUp(self):
        super().setUp()
        self.pool = torch.arange(64.0)

    def move(self, node):
        """Moves the outputs that are alive; then their old memory is overwritten."""
        move_alive(node)
        self.pool.fill_(-1)

    def test_tensors_views_and_storages_keep_their_values(self):
        """Outputs that share a storage move together."""
        output, other = in_pool(self.pool, 8, 8).split(4)
        node, view, alias = Node(output, other), output[1:3], output.view(torch.int32)
        storage, before = output.untyped_storage(), output.data_ptr()
        self.move(node)
        self.assertEqual((output, other), (torch.arange(8.0, 12.0), torch.arange(12.0, 16.0)))
        self.assertEqual((view, alias), (torch.arange(9.0, 11.0), torch.arange(8.0, 12.0).view(torch.int32)))
        self.assertEqual([of.data_ptr() for of in (storage, other.untyped_storage())], [output.data_ptr()] * 2)
        self.assertNotEqual(output.data_ptr(), before)
        self.assertEqual(node.moved, ({0: (1, 32)}, 1))
        self.assertTrue(all(held.expired() for held in node.outputs_weakrefs))
        output += 1
        self.assertEqual(view, torch.arange(10.0, 12.0))

    def test_what_moved_is_dead_for_its_recording_and_not_moved_again(self):
        """Unless the recording returns it again; the report counts moves by output."""
        node = Node(None, output := in_pool(self.pool, 0, 4))
        move_alive(node)
        self.assertTrue(node.outputs_weakrefs[1].expired())
        address = output.data_ptr()
        move_alive(node)
        self.assertEqual((output.data_ptr(), node.moved), (address, ({1: (1, 16)}, 1)))
        node.outputs_weakrefs[1] = StorageWeakRefWrapper(output)
        move_alive(node)
        self.assertEqual(node.wrapped_function.model.log.record().moved_outputs, (MovedOutput(1, 2, 32),))

    def test_memory_that_an_output_owns_is_given_back(self):
        """Outputs of a warm-up and of the recorded call own theirs."""
        node = Node(output := torch.ones(4))
        del node.remove_node_cached_tensors  # a warm-up has none
        storage = StorageWeakRefWrapper(output)
        move_alive(node)
        self.assertEqual(output, torch.ones(4))
        self.assertFalse(storage.expired())  # it is the same
        self.assertTrue(node.outputs_weakrefs[0].expired())

    def test_all_recordings_of_a_path(self):
        """Recordings without outputs that are alive keep their tensors."""
        outputs = [in_pool(self.pool, 4 * n, 4) for n in range(4)]
        first = Node(in_pool(self.pool, 16, 4))
        forward = Node(outputs[0], None, outputs[1], parent=first)
        backward = Node(outputs[2], outputs[3], parent=forward)
        del outputs[1], outputs[1]  # the numbers 1 and 2 are dead
        self.move(backward)
        self.assertEqual(outputs, [torch.arange(4.0), torch.arange(12.0, 16.0)])
        self.assertEqual((first.moved, forward.moved, backward.moved), (({}, 0), ({0: (1, 16)}, 1), ({1: (1, 16)}, 1)))

    def test_outputs_as_upstream_stay(self):
        kept, other = in_pool(self.pool, 0, 4), in_pool(self.pool, 4, 4)
        node = Node(kept, parent=Node(other, outputs_are="upstream"))
        self.move(node)
        self.assertEqual((kept, other), (torch.arange(4.0), torch.full((4,), -1.0)))
        node.live_indices_after_graph = [(0, 0), (1, 0)]
        self.assertEqual(kept_indices(node), [(1, 0)])

    def test_a_leaf_that_needs_a_gradient_and_what_autograd_saved(self):
        output = in_pool(self.pool, 0, 4).requires_grad_()
        loss = (output * output).sum()
        version = output._version
        with torch.inference_mode():
            self.move(Node(output))
        loss.backward()
        self.assertEqual(output.grad, 2 * torch.arange(4.0))
        self.assertEqual(output._version, version)
        loss = (output * output).sum()
        with torch.no_grad():
            output += 1
        self.assertRaisesRegex(RuntimeError, "modified by an inplace operation", loss.backward)

    def test_without_memory_nothing_changes(self):
        node = Node(output := in_pool(self.pool, 0, 4))
        address = output.data_ptr()
        with mock.patch.object(torch, "empty_like", side_effect=torch.OutOfMemoryError):
            self.assertRaises(torch.OutOfMemoryError, move_alive, node)
        self.assertEqual((output.data_ptr(), node.moved), (address, ({}, 0)))
        self.assertFalse(node.outputs_weakrefs[0].expired())

    def test_memory_is_exchanged_between_storages_of_one_size(self):
        exchange = binding.extension.exchange_memory
        self.assertRaisesRegex(ValueError, "same size", exchange, torch.ones(2), torch.ones(3))
        self.assertRaises(TypeError, exchange, torch.ones(2), 3)


@instantiate_parametrized_tests
@unittest.skipIf(why_not_moved() is not None, f"{why_not_moved()}")
class TestSteps(TestCase):
    """A manager moves outputs when a step begins, whatever state its path is in."""

    def setUp(self):
        super().setUp()
        self.moved = []
        self.enterContext(mock.patch.object(trees_manager, "move_alive", self.moved.append))
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
        for forgotten, ends in (([], True), ([3], False), ([3], True)):
            self.manager.reclaiming.forgotten, self.manager.current_node = forgotten, object()
            end = functools.partial(setattr, self.manager, "current_node", None) if ends else lambda: None
            with mock.patch.object(Upstream, ended, lambda *_, end=end: end()):
                getattr(self.manager, ended)(7)
            self.assertEqual(given_back.call_count, int(bool(forgotten) and ends))

    def test_before_the_pool_is_freed(self):
        """A lost GPU does not prevent the end."""
        fails = mock.patch.object(trees_manager, "move_alive", side_effect=torch.OutOfMemoryError("none"))
        with self.starts(False), mock.patch.object(Upstream, "shutdown", mock.Mock()) as shutdown:
            self.manager.shutdown()
            self.assertEqual((self.moved, shutdown.call_count), ([self.manager.current_node], 1))
            with fails, self.assertLogs("pygraph_trees.trees", "WARNING") as logs:
                self.manager.shutdown()
        self.assertEqual(shutdown.call_count, 2)
        self.assertIn("none", logs.output[0])

    def test_before_the_last_function_takes_its_manager_along(self):
        container = cudagraph_trees.TreeManagerContainer(0)
        container.tree_manager, container.live_cudagraphify_fns = self.manager, 2
        for moved, left in (([], self.manager), ([self.manager.current_node], None)):
            container.finalize_cudagraphify_fn()
            self.assertEqual((self.moved, container.tree_manager), (moved, left))

    @parametrize("outputs", ["keep", "upstream"])
    def test_a_function_decides_when_it_is_added(self, outputs):
        """The report says why outputs are not kept."""
        self.manager.keeps_outputs = False
        with mock.patch.object(Upstream, "add_function", lambda *_: (Plain(keywords={"function_id": 1}), [])):
            Manager.add_function(self.manager, function(outputs=outputs), [])
            self.assertEqual(self.manager.keeps_outputs, outputs == "keep")
            with mock.patch.object(trees_manager, "why_not_moved", lambda: "no"):
                Manager.add_function(self.manager, model := function(outputs=outputs), [])
        self.assertEqual(model.log.record().why_not_kept, "no" if outputs == "keep" else None)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestFastPath(TestCase):
    def trees(self, outliving=(), *, begins=True, keeps=True):
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

    def check(self, trees, ended):
        self.assertEqual(len(trees.entry()([self.x])), 1)
        self.assertEqual(trees.manager.ended, ended)

    def test_python_is_asked_only_if_an_output_is_alive_when_a_step_begins(self):
        self.x, self.outputs = torch.ones(4), some(2)
        self.check(self.trees((0, 1)), 0)
        held = self.outputs[1][1:]
        self.check(self.trees((0, 1)), 1)
        self.check(self.trees((0,)), 0)
        self.check(self.trees(), 0)
        self.check(self.trees((0, 1), begins=False), 0)
        self.check(self.trees((0, 1), keeps=False), 0)
        for last in (Plain(), Plain(native=None)):  # a path without a fast path
            trees = self.trees()
            trees.before = last
            trees.put(trees.candidates(trees.native))
            self.check(trees, 1)
        del held


class _OnCpu(OwnMemory):
    def __init__(self, blocks, storages, device, *facts):
        super().__init__(blocks, storages, torch.device("cpu"), *facts)


def many(count):
    made = "".join(f"    buf{n} = empty_strided_cuda((4,), (1,), torch.float32)\n" for n in range(count))
    return generated(f"def call(args):\n{made}    return ({''.join(f'buf{n}, ' for n in range(count))})")


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestPolicy(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(policy, "OwnMemory", _OnCpu))
        pool = mock.Mock(nbytes=lambda: 0, holds=lambda address: False)
        self.enterContext(mock.patch.multiple(Manager, pool=pool, _warming_up=lambda *_: contextlib.nullcontext()))
        self.again, self.path = [], []
        self.manager = bare_manager()
        self.manager.reclaiming.record_again = lambda id_, why, newest: self.again.append(id_)
        self.policy, self.functions = self.manager.output_policy, self.manager.ids_to_funcs

    def add(self, model):
        """Adds a function that was not warmed up; returns its id."""
        id_, names = len(self.functions), (PlaceholderInfo("x", None, [], None),)
        self.functions[id_] = WrappedFunction(model, [], id_, (), names, (0,), **LIMITS)
        return id_

    def warm_up(self, model, x=X, meanwhile=lambda: None):
        id_ = self.add(model)
        with self.policy.watched(self.manager, id_, [x]) as found:
            meanwhile()
            outputs = model([x])
        found(outputs, lambda address: True)
        self.path.append(model)
        return id_

    def check_own_memory(self, model, id_, change=lambda: None):
        """A run has its outputs in the memory that its call was given, whatever changes meanwhile."""
        with captured(), self.policy.call(self.manager, id_, inputs := [X]):
            given = inputs[1:]
            change()
            self.assertEqual(addresses(*model(inputs)[:2]), addresses(*given))

    def outlive(self, *outputs, steps=1):
        """These outputs are alive when a step ends."""
        for _ in range(steps):
            for id_, number in outputs:
                self.functions[id_].model.log.output_moved(number, 16)
            self.policy.moved(self.manager, self.path)

    def call(self, id_, times=1):
        """Returns the blocks of the last call. After five calls whose outputs are dead, their memory is kept."""
        for _ in range(times):
            with self.policy.call(self.manager, id_, inputs := [X]):
                own = getattr(self.functions[id_], "own", None)
                self.nbytes = [value.untyped_storage().nbytes() for value in inputs[1:]]
        self.assertEqual(len(self.nbytes), 0 if own is None else len(own))
        return [] if own is None else list(own.blocks)

    def item(self, id_):
        """The memory that is kept for a function's first block."""
        return self.functions[id_].own.native.item(0)

    def recorded(self, id_, *refused, outputs=None, pool_bytes=0):
        """Notes a recording; ``refused``: the inputs that it copies, ``outputs``: those on own memory."""
        own = self.functions[id_].own
        indices = range(own.takes, own.takes + len(own))
        outputs = {index: (index, None) for index in indices} if outputs is None else outputs
        decisions = {n: Decision(Route.COPY, "?") if n in refused else Decision(Route.PATCH, None) for n in indices}
        live = Plain(decisions=decisions, outputs=outputs) if outputs else None
        self.policy.recorded(self.manager, Plain(own=own, live=live, wrapped_function=self.functions[id_]), pool_bytes)

    def test_memory_is_freed_if_its_function_runs_ungraphed_or_another_one_lacks_memory(self):
        for lacks_memory in (False, True):
            self.call(id_ := self.warm_up(model := function()), times=5)
            self.assertIsNotNone(self.item(id_))
            error = torch.OutOfMemoryError("2 GiB") if lacks_memory else None
            model.why_ungraphed = None if lacks_memory else Reason.FAILED(error="?")
            other = self.add(function(lambda inputs: self.assertIsNone(self.item(id_)) or [X]))
            is_mocks = mock.patch.object(containment, "is_of_program", lambda _: False)
            with mock.patch.object(Upstream, "run", side_effect=error), is_mocks:
                self.manager._run_contained([X], other if lacks_memory else id_)
            self.assertIsNone(self.item(id_))

    def test_outputs_of_inference_have_own_memory_after_the_warm_up(self):
        """Those that its code allocates, if it is the graph's only partition and has no collective."""
        id_ = self.warm_up(model := function())
        self.assertEqual(self.call(id_), [FIRST, SECOND])
        wrapped = self.functions[id_]
        self.assertEqual(wrapped.mutated_input_idxs, (0, 1, 2))
        self.assertEqual([p.name for p in wrapped.placeholders], ["x", "output 0", "output 1"])
        self.check_own_memory(model, id_)
        added = function()
        added.dispatch.add()
        forward = function(mode="forward", has_collective=True)
        forward.first_inside = 1
        copied = [COPIED, Block((1,), None), LIBRARY]
        for other, expected in (
            *((other, []) for other in (added, function(mode="forward"), function(partitions=2))),
            *((function(mode=mode, has_collective=True), []) for mode in ("forward", "backward")),
            (function(has_collective=True, partitions=2), copied),
            (forward, copied[:1]),
        ):
            self.assertEqual(self.call(self.warm_up(other)), expected)
        self.assertEqual(self.functions[1].mutated_input_idxs, (0,))

    def test_how_long_an_output_is_held_changes_nothing_if_ranks_must_record_alike(self):
        id_ = self.warm_up(function(mode="backward"))
        self.manager.reclaiming.is_alike = True
        self.outlive((id_, 0), steps=3)
        self.assertEqual((self.call(id_), self.again, self.policy.changing), ([], [], []))
        for seen, expected in ((1, [FIRST]), (5, [FIRST, SECOND, LIBRARY])):  # from the beginning, also of libraries
            forward = function(mode="forward")
            forward.first_inside = seen
            self.assertEqual(self.call(self.warm_up(forward)), expected)

    def test_all_that_outlived_a_step_follow_one_that_outlived_two(self):
        """In the functions from its own on, which are recorded again anyway: a forward and its backward together."""
        early, forward, backward = (self.warm_up(function(mode=m)) for m in ("backward", "forward", "backward"))
        self.manager._candidates["known"] = {}
        self.outlive((early, 0), (forward, 1), (backward, 0), (backward, 2))
        self.assertEqual((bool(self.policy.changing), self.manager._candidates), (False, {"known": {}}))
        with self.policy.call(self.manager, forward, inputs := [X]):
            self.outlive((forward, 1))
            state = bool(self.policy.changing), self.manager._candidates, len(inputs), self.again
            self.assertEqual(state, (True, {}, 1, []))  # this call goes on without memory
        calls = [self.call(id_) for id_ in (early, forward, backward)]
        self.assertEqual((calls, sorted(self.again)), ([[], [SECOND], [FIRST]], [forward, backward]))
        self.outlive()
        self.assertFalse(self.policy.changing)
        self.assertEqual([self.functions[id_].model.outputs.changes for id_ in (early, forward, backward)], [0, 1, 1])

    def test_outputs_change_three_times_and_the_last_time_all_that_the_program_sees(self):
        cases = ("forward", 4, [1, 2, 4]), ("forward", None, [1, 2, 3]), ("backward", None, [1, 2, 5])
        for mode, inside, counts in (*cases, ("inference", None, [1, 2, 5])):
            del self.again[:], self.path[:]
            id_ = self.warm_up(function(many(5), mode=mode, partitions=2))
            self.functions[id_].model.first_inside = inside
            for number, count in enumerate([*counts, counts[-1]]):
                self.outlive((id_, number), steps=2)
                self.assertEqual(len(self.call(id_)), count)
            self.outlive((id_, 4), steps=2)
            self.assertEqual((len(self.call(id_)), len(self.again)), (counts[-1], 3))

    def test_an_output_that_cannot_be_given_by_address_is_copied_and_otherwise_stays_in_the_pool(self):
        id_ = self.warm_up(model := function())
        earlier, model.refused = self.functions[id_], {0: "its own", 1: "hidden"}
        self.recorded(id_)
        self.assertEqual((self.call(id_), self.again), ([FIRST, SECOND], []))
        self.recorded(id_, 1)
        self.assertEqual((self.call(id_), model.refused), ([COPIED, SECOND], {0: "its own"}))
        now, self.functions[id_] = self.functions[id_], earlier
        self.recorded(id_, 1)  # a recording with the earlier memory
        self.functions[id_] = now
        self.assertEqual((self.call(id_), self.again), ([COPIED, SECOND], [id_]))
        self.recorded(id_, outputs={0: (1, None)})  # a library allocated the other one where a buffer had been
        self.assertEqual(self.call(id_), [COPIED, Block((1,), None)])
        self.recorded(id_, 1)
        self.outlive((id_, 0), steps=3)
        self.assertEqual((self.call(id_), len(self.again)), ([Block((1,), None)], 3))
        self.recorded(id_, outputs={})  # no input is given by address
        self.assertEqual((self.call(id_), self.functions[id_].mutated_input_idxs), ([], (0,)))

    def test_which_storages_qualify(self):
        """Outputs in one storage are one block, also in a library's. Inputs do not. A collective needs copies."""
        cases = (0, False, [FIRST]), (2, False, []), (4, False, [LIBRARY]), (0, True, [COPIED])
        for number, has_collective, expected in cases:
            id_ = self.warm_up(function(mode="backward", has_collective=has_collective))
            self.outlive((id_, number), steps=2)
            self.assertEqual((self.call(id_), self.again), (expected, [id_] * len(expected)))
            del self.again[:], self.path[:]
        code = "def call(args):\n    return (torch.ones(4),)"  # given a tangent without memory
        id_ = self.warm_up(function(generated(code), mode="backward"), torch._efficientzerotensor(4))
        self.outlive((id_, 0), steps=2)
        self.assertEqual(self.call(id_), [COPIED])

    def test_without_memory_own_memory_is_released_and_a_call_tries_once_more(self):
        held, failing = self.warm_up(function()), self.add(function())
        self.call(held, times=5)
        self.assertIsNotNone(self.item(held))
        take = mock.Mock(side_effect=[torch.OutOfMemoryError, [X], *[torch.OutOfMemoryError] * 2])
        self.functions[failing] = Plain(model=function(), own=Plain(native=mock.Mock(take=take), blocks=()))
        with self.policy.call(self.manager, failing, inputs := [X]):
            self.assertEqual((len(inputs), self.item(held)), (2, None))
        with self.assertRaises(torch.OutOfMemoryError), self.policy.call(self.manager, failing, [X]):
            self.fail("it is called")

    def test_kept_memory_is_limited_by_the_pools_bytes(self):
        """Functions that were used last keep it; the one that was used last always does."""
        ids = [self.warm_up(function()) for _ in range(3)]
        for id_ in (2, 0, 1):
            self.call(id_, times=5)
        self.assertEqual(self.policy.held_bytes(self.manager), 72)
        for pool_bytes, held in ((48, [24, 24, 24]), (47, [24, 24, 0]), (0, [0, 24, 0])):
            self.recorded(ids[0], pool_bytes=pool_bytes)
            self.assertEqual([self.functions[id_].own.native.held_bytes for id_ in ids], held)
            self.assertEqual([24 * (self.item(id_) is not None) for id_ in ids], held)  # the rest is free at once

    def test_a_function_of_integers_has_own_memory_for_each_set_of_values(self):
        """Unless its allocations differ: then outputs are in the pool until they are copied."""
        code = (
            "def call(args):\n    x, = args\n    args.clear()\n"
            "    scratch = x.numel() > 6 and empty_strided_cuda((4,), (1,), torch.float32)\n"
            "    buf = empty_strided_cuda((x.numel(),), (1,), torch.float32)\n    return (buf.copy_(x),)"
        )
        ids = [self.warm_up(model := function(generated(code)))]
        model.dispatch.add(self.manager, None, {0: 6})
        ids += [self.warm_up(model, torch.arange(count)) for count in (6.0, 7.0)]
        self.assertEqual([self.call(id_) for id_ in ids], [[FIRST], [FIRST], []])
        self.recorded(ids[1], 1)
        calls = [(self.call(id_), self.nbytes) for id_ in ids]
        self.assertEqual((calls, self.again), ([([COPIED], [nbytes]) for nbytes in (16, 24, 28)], ids))

    def test_a_manager_watches_the_first_warm_up_and_releases_memory_with_the_function(self):
        """Not of code that Inductor did not generate, or of functions that use no addresses or do not keep outputs."""
        self.enterContext(mock.patch.object(Upstream, "run_eager", lambda _, x, id_: self.functions[id_].model(x)))
        kept, others = function(), [function(lambda inputs: [inputs[0] + 1]), function(outputs="upstream"), function()]
        self.enterContext(mock.patch.object(input_rules, "uses_addresses", lambda model: model is not others[-1]))
        for model in (kept, *others):
            self.manager.run_eager([X], id_ := self.add(model))
            expected = [FIRST, SECOND] if model is kept else []
            self.assertEqual((self.call(id_, times=5), id_ in self.policy.storages), (expected, model is kept))
        self.manager.reclaiming.forget, own = mock.Mock(), self.functions[0].own
        self.manager.run_eager([X], 0)
        self.assertIs(self.functions[0].own, own)
        self.assertIsNotNone(self.item(0))
        self.manager.forget(kept)
        self.assertIsNone(self.item(0))

    def test_a_warm_up_that_is_stopped_is_made_again(self):
        def stopped(manager, inputs, id_):
            manager.warmed_up_functions.add(id_)
            raise KeyboardInterrupt

        self.enterContext(mock.patch.object(Upstream, "run_eager", stopped))
        for was_warm in (False, True):
            id_ = self.add(function())
            self.manager.warmed_up_functions = {id_} if was_warm else set()
            self.assertRaises(KeyboardInterrupt, self.manager.run_eager, [X], id_)
            self.assertEqual(id_ in self.manager.warmed_up_functions, was_warm)

    def test_a_path_with_a_warm_up_that_failed_ends(self):
        """Torch before 2.13 asserts as many outputs as stack traces, and with indirection off, it still does."""
        traces = ["trace"] * 2

        def failing(manager, inputs, id_):
            wrapped = manager.ids_to_funcs[id_]
            manager.current_node = CUDAWarmupNode(wrapped, None, (0, 7), None, 0, traces, None, False, None)
            manager.path_state = ExecutionState.WARMUP
            raise ValueError("of the program")

        self.enterContext(mock.patch.object(Upstream, "run_eager", failing))
        for indirection, left in (("off", traces), ("auto", [])):
            id_ = self.add(function(indirection=indirection))
            self.assertRaises(ValueError, self.manager.run_eager, [X], id_)
            self.assertEqual(self.manager.current_node.stack_traces, left)
        self.assertEqual(len(traces), 2)  # the function's own
        self.manager.disable_invalidate_aliases = False
        with mock.patch.object(Manager, "can_start_new_generation", lambda *_: True):
            Upstream.try_end_curr_warmup(self.manager, id_)
        self.assertIsNone(self.manager.current_node)

    def test_the_manager_of_another_thread_changes_the_outputs(self):
        """A call that is under way uses the memory that it has. This manager follows once it moves an output."""
        id_ = self.warm_up(model := function())
        self.check_own_memory(model, id_, lambda: setattr(model.outputs, "blocks", model.outputs.blocks[:1]))
        self.assertEqual((self.call(id_), self.again), ([FIRST, SECOND], []))
        for _ in range(2):
            self.policy.moved(self.manager, self.path)
            self.assertEqual((self.call(id_), self.again), ([FIRST], [id_]))

    def test_a_run_of_another_thread_is_not_watched(self):
        model = function()
        with ThreadPoolExecutor(1) as other:
            id_ = self.warm_up(model, meanwhile=lambda: other.submit(model, [X]).result(60))
        self.assertEqual(self.call(id_), [FIRST, SECOND])


if __name__ == "__main__":
    run_tests()
