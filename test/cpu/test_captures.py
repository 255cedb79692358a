"""Calls that the program captures in a graph of its own, outputs that such a graph may read, the kind of outputs in
inference mode, and calls while the program allocates in a pool of its own.

Dynamo compiles again for another mode only if a guard on a tensor tells it. A function without tensors, a compilation
whose guards are skipped, and a backward are replayed in any mode. Their tensors must be of the kind that un-graphed
code makes in the mode of the call: an inference tensor cannot be changed in place or saved for a backward outside.
"""

import contextlib
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock
from weakref import WeakValueDictionary

import torch
from fake_trees import bare_recording, replay_with, replaying
from recordings_on_cpu import SIZE, Function, OnCpuTestCase
from test_trees import double, inference
from torch._inductor.cudagraph_trees import CompilationMode
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.reasons import Reason
from pygraph_trees.trees.functions import function as trees_function
from pygraph_trees.trees.functions.function import Aligned, aligning, entered, staying
from pygraph_trees.trees.hooks import choice, entry_points
from pygraph_trees.trees.managers import calls
from pygraph_trees.trees.pools import capture_lock, pools, program_pools


@instantiate_parametrized_tests
class TestCalls(TestCase):
    def entered(self, model, mutated=(), selective="always"):
        function = inference(model, indirection="auto", selective=selective)
        run = mock.Mock(side_effect=lambda inputs: ["graphed"])
        with mock.patch.object(choice, "CudaDevice", lambda device: SimpleNamespace()):
            return function, run, entered(function, run, Aligned(function, (), mutated), choice.chooser(0))

    @parametrize("selective", ["always", "auto", "never"])
    def test_a_call_that_the_program_captures_runs_ungraphed(self, selective):
        function, run, call = self.entered(lambda inputs: [x * 2 for x in inputs], selective=selective)
        with mock.patch.object(trees_function, "is_captured", lambda: True):
            for _ in range(3):
                self.assertEqual(call([torch.ones(2)]), [torch.full((2,), 2.0)])
        self.assertEqual((run.call_count, function.log.warmups, function.log.trial_runs), (0, 0, 0))
        self.assertEqual(function.log.record().ungraphed_calls, 3)
        self.assertIs(function.log.ungraphed_reason.reason, Reason.CAPTURED)
        if selective != "auto":  # a trial may take any way
            self.assertEqual(call([torch.ones(2)]), ["graphed"])

    def adding(self, seen):
        """Code that adds to its input, and notes how the input is aligned."""
        return lambda inputs: (seen.append(inputs[0].data_ptr() % 16), inputs[0].add_(1), [])[2]

    def test_writes_to_a_misaligned_input_are_kept(self):
        memory, seen = torch.zeros(9), []
        _, run, call = self.entered(self.adding(seen), mutated=(0,))
        with (
            mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: [0]),
            mock.patch.object(trees_function, "is_captured", lambda: True),
        ):
            call([memory[1:]])
        self.assertEqual((memory.tolist(), seen, run.call_count), ([0.0] + [1.0] * 8, [0], 0))

    def test_inputs_that_the_code_takes_to_be_aligned_are_copied_from_the_first_call_on(self):
        """Torch's caches may give code that was compiled for aligned inputs."""
        maps = [SimpleNamespace(input_index_mapping=[2, None, 0]), SimpleNamespace(input_index_mapping=[1])]
        graph = SimpleNamespace(inputs_to_check=[1], fx_kwargs={"static_input_idxs": [2]}, partition_maps=maps)
        self.assertEqual([*entry_points._assumed(graph)], [{0}, {0}])
        graph.pygraph_aligned = [2]
        self.assertEqual([*entry_points._assumed(graph)], [{0}, set()])
        with mock.patch.object(entry_points, "graph_policy", lambda _: object()):  # the graph is not partitioned
            self.assertEqual([*entry_points._assumed(graph)], [{2}])
        graph.partition_maps = None
        self.assertEqual([*entry_points._assumed(graph)], [{2}])

        memory, seen = torch.zeros(9), []
        run = self.adding(seen)
        token = trees_function.ASSUMED.set(iter([{0}]))
        self.addCleanup(trees_function.ASSUMED.reset, token)
        functions = [inference(run) for _ in range(2)]
        self.assertEqual([function.assumed for function in functions], [{0}, None])
        with mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []):
            for function in functions:
                static = staying([memory[1:]], function.assumed, [0])  # for upstream; an un-graphed call has all
                for call in (
                    entry_points._aligned_first(run, function.assumed, static, {0}),
                    Aligned(function, [0], {0}),
                ):
                    call([memory[1:]])
            self.assertEqual(staying([memory], {0}, [0]), [0])
            self.assertIs(aligning(run, {0}, [memory], [0], {0}, besides_upstream=True), run)  # it stays aligned
        self.assertEqual((memory.tolist(), seen), ([0.0] + [4.0] * 8, [0, 0, 4, 4]))
        # Upstream would copy it, too, and lose what is written.
        with mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: [0]):
            entry_points._aligned_first(run, set(), (), {0})([memory[1:]])
            self.assertIs(aligning(run, {0}, [memory], (), (), besides_upstream=True), run)  # upstream copies it
        self.assertEqual((memory.tolist(), seen[4:]), ([0.0] + [5.0] * 8, [0]))

    def test_nothing_is_captured_before_the_gpu_is_used(self):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", side_effect=AssertionError):
            self.assertFalse(capture_lock.is_captured())


@instantiate_parametrized_tests
class TestOutputs(OnCpuTestCase):
    def setUp(self):
        super().setUp()
        self.began = []
        self.begin = entry_points.capture_begin(lambda graph, **kwargs: self.began.append(kwargs))

    def begin_in(self, function, **kwargs):
        with (
            mock.patch.object(pools, "OWNED", WeakValueDictionary(ours=function.manager)),
            mock.patch.object(entry_points, "LEAVES_BROKEN_CAPTURES", False),
        ):
            self.begin(None, **kwargs)

    @parametrize("mode", [CompilationMode.INFERENCE, CompilationMode.FORWARD, CompilationMode.BACKWARD])
    def test_outputs_leave_the_pool_before_the_program_captures(self, mode):
        """Its graph reads them at their addresses, at each replay."""
        function = Function(outputs=2, mode=mode)
        (kept, dropped), pool = function.call(3.0), function.pool.untyped_storage()
        del dropped
        self.begin_in(function)
        address = kept.data_ptr()
        self.assertFalse(pool.data_ptr() <= address < pool.data_ptr() + pool.nbytes())
        for value in (4.0, 5.0):
            self.assertEqual(function.call(value), [torch.full((SIZE,), value)] * 2)
        self.assertEqual((kept, kept.data_ptr()), (torch.full((SIZE,), 3.0), address))
        self.assertEqual(self.began, [{}])

    def test_an_ungraphed_call_leaves_the_stream_of_earlier_outputs(self):
        """Otherwise they would be moved to memory of a stream that did not make them."""
        function = Function()
        (_output,) = function.call(3.0)
        function.recording.native.stream = 77
        model = function.manager.ids_to_funcs[function.id].model
        model.why_ungraphed, model.model = Reason.FAILED(error="of the test"), lambda inputs: inputs
        function.manager.run([torch.ones(1)], function.id)
        self.assertEqual(function.recording.native.stream, 77)

    def test_an_output_is_shared_once_there_is_memory(self):
        """Or an error is raised: its memory in the pool must not be shared."""
        function = Function()
        (output,) = function.call(3.0)
        pool, empty = function.pool.untyped_storage().data_ptr(), torch.empty_like
        full, fails = mock.Mock(side_effect=torch.OutOfMemoryError("none")), iter([True] * 3)
        with mock.patch.object(torch, "empty_like", lambda *given: (full if next(fails, False) else empty)(*given)):
            function.manager.move_out(output.untyped_storage())
        self.assertNotEqual(output.data_ptr(), pool)
        (output,) = function.call(4.0)
        with (
            mock.patch.object(torch, "empty_like", full),
            mock.patch.object(calls.time, "monotonic", itertools.count().__next__),
        ):
            self.assertRaises(torch.OutOfMemoryError, function.manager.move_out, output.untyped_storage())

    def test_a_recording_captures_without_that(self):
        function = Function()
        (output,) = function.call(3.0)
        before = output.data_ptr()
        self.begin_in(function, pool="ours")
        with capture_lock.locked_by_torch():  # a new manager's, whose pool is not known yet
            self.begin_in(function, pool="new")
        with ThreadPoolExecutor(1) as other:
            other.submit(self.begin_in, function).result()
        function.manager.take_turn(turn := [])
        with self.assertLogs("pygraph_trees.trees", "WARNING"):
            self.begin_in(function)  # for example in an operator that a call runs
        function.manager.end_turn(turn)
        self.assertEqual((output.data_ptr(), len(self.began)), (before, 4))

    def test_a_capture_begins_although_there_is_no_memory_for_outputs(self):
        function = Function()
        (output,) = function.call(3.0)
        with (
            mock.patch.object(torch, "empty_like", side_effect=torch.OutOfMemoryError("no memory")),
            self.assertLogs("pygraph_trees.trees", "WARNING"),
        ):
            self.begin_in(function)
        self.assertEqual((len(self.began), output), (1, torch.full((SIZE,), 3.0)))
        self.assertFalse(function.manager.is_taken)
        self.assertIsNone(function.manager._begins_step)


class TestFailedCaptures(TestCase):
    def test_the_allocations_of_a_failed_capture_end(self):
        """But not if it goes on, because another thread or stream should have ended it, nor those of a recording."""
        error, ends = torch.AcceleratorError("of the driver"), [(1, (0, 9))]
        for pool, raised, is_captured, wanted in (
            (None, error, False, [(1, (0, 3))]),
            ((0, 9), error, False, ends),
            ((0, 9), error, True, []),
            ((0, 9), RuntimeError("of torch"), False, []),
            ((0, 9), None, False, []),
            ("ours", error, False, []),
        ):
            graph, begun, ended = SimpleNamespace(), [], mock.Mock()
            with (
                mock.patch.multiple(entry_points, LEAVES_BROKEN_CAPTURES=True, end_allocations=ended),
                mock.patch.multiple(entry_points, is_captured=lambda value=is_captured: value),
                mock.patch.multiple(torch.cuda, graph_pool_handle=lambda: (0, 3), current_device=lambda: 1),
                mock.patch.object(pools, "OWNED", {"ours": None}),
                mock.patch.object(pools, "managers", list),
                contextlib.suppress(RuntimeError) if raised else contextlib.nullcontext(),
            ):
                entry_points.capture_begin(lambda graph, pool: begun.append(pool))(graph, pool)  # noqa: B023
                entry_points.capture_end(mock.Mock(side_effect=raised))(graph)
            self.assertEqual(([tuple(call.args) for call in ended.mock_calls], begun[0]), (wanted, pool or (0, 3)))

    def test_the_allocations_of_a_capture_that_does_not_begin_end(self):
        begins = entry_points.capture_begin(mock.Mock(side_effect=torch.AcceleratorError("of the driver")))
        with (
            mock.patch.multiple(entry_points, LEAVES_BROKEN_CAPTURES=True, end_allocations=mock.Mock()),
            mock.patch.object(torch.cuda, "current_device", lambda: 1),
        ):
            self.assertRaises(torch.AcceleratorError, begins, SimpleNamespace(), (0, 9))
            entry_points.end_allocations.assert_called_once_with(1, (0, 9))


INSIDE = [[True, False, False, True], [False, True, True, False]]  # whether each call is in inference mode


@instantiate_parametrized_tests
class TestInferenceMode(OnCpuTestCase):
    @parametrize("modes", INSIDE)
    @parametrize("mode", list(CompilationMode))
    @parametrize("fast", [False, True])
    def test_the_kind_of_an_output_is_that_of_its_call(self, fast, mode, modes):
        function = Function(outputs=2, mode=mode)
        for step, is_inside in enumerate(modes):
            function.manager.running_forwards_with_pending_backwards = False
            with torch.inference_mode(is_inside):
                outputs = function.call(step, fast=fast)
                self.assertEqual([output.is_inference() for output in outputs], [is_inside] * 2)
                outputs[0].add_(1)
            self.assertEqual(outputs[0], torch.full((SIZE,), step + 1.0))
            if not is_inside:
                self.assertGreaterEqual(outputs[0]._version, 1)  # an inference tensor would raise
                scale = torch.ones(SIZE, requires_grad=True)
                (scale * outputs[1]).sum().backward()
                self.assertEqual(scale.grad, outputs[1])
            del outputs

    @parametrize("modes", INSIDE)
    def test_outputs_that_are_held_while_the_mode_changes(self, modes):
        function, held = Function(), []
        for step, is_inside in enumerate(modes):
            with torch.inference_mode(is_inside):
                held += function.call(step)
        self.assertEqual([output.is_inference() for output in held], modes)
        self.assertEqual(held, [torch.full((SIZE,), float(step)) for step in range(4)])


@instantiate_parametrized_tests
class TestUpstreamCopies(TestCase):
    """Inputs that upstream copies to its own memory."""

    @parametrize("was_recorded_inside", [False, True])
    @parametrize("gives_addresses", [False, True])
    def test_an_input_is_copied_in_any_mode(self, gives_addresses, was_recorded_inside):
        recording = bare_recording(_gives_addresses=gives_addresses, expanded_dims={0: [], 1: [0]})
        recording.non_static_input_idx = recording.input_copy_idxs = [0, 1]
        with torch.inference_mode(was_recorded_inside):
            targets = [torch.zeros(4), torch.zeros(1).expand(4)]
        with torch.inference_mode(not was_recorded_inside):
            inputs = [torch.ones(4), torch.ones(1).expand(4)]
            recording._copy_inputs_and_remove_from_src(targets, inputs)
        self.assertEqual((targets, inputs), ([torch.ones(4)] * 2, [None, None]))


class TestProgramPools(TestCase):
    """Calls inside ``torch.cuda.use_mem_pool``, with torch's functions replaced by a list of the pools in use."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch("torch.cuda.is_current_stream_capturing", lambda: False))
        self.active, self.users = [], Counter()  # pools in torch's order
        memory, begins, ends = torch.cuda.memory, program_pools.begins(self.begin), program_pools.ends(self.end)
        for name, function, patched in (
            ("_cuda_beginAllocateCurrentThreadToPool", self.begin, begins),
            ("_cuda_endAllocateToPool", self.end, ends),
            ("_cuda_releasePool", self.release, self.release),
        ):
            self.enterContext(mock.patch.object(torch._C, name, function, create=True))
            self.enterContext(mock.patch.object(memory, name, patched))

    def begin(self, device, pool):
        self.users[pool] += 1
        self.active.append(pool)

    def end(self, device, pool):
        self.active.remove(pool)

    def release(self, device, pool):
        self.users[pool] -= 1

    def use(self, number):
        return torch.cuda.memory.use_mem_pool(SimpleNamespace(id=(0, number)), 0)

    def function(self):
        self.seen = []  # the pools in use, at each run

        def runs(kind):
            return lambda inputs: (self.seen.append((kind, *self.active)), double(inputs))[1]

        function = inference(runs("code"), indirection="auto")
        aligned = Aligned(function, (), ())
        self.enterContext(mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []))
        return function, aligned, entered(function, runs("graph"), aligned)

    def test_graphs_are_made_outside_and_code_runs_inside(self):
        """Pools are used again in their order, with as many users, also after an error."""
        function, aligned, call = self.function()
        call([1])
        with self.use(1), self.use(2):
            self.assertEqual(call([1]), [2])
            for needs_checks in (True, False):
                function.dispatch.go(aligned, is_graphed=False, needs_checks=needs_checks)
                self.assertEqual(call([1]), [2])
            function.dispatch.go(lambda inputs: inputs[7], is_graphed=False)
            self.assertRaises(IndexError, call, [1])
            self.assertEqual((self.active, set(self.users.values())), ([(0, 1), (0, 2)], {1}))
        self.assertEqual(self.seen, [("graph",), ("graph",), *[("code", (0, 1), (0, 2))] * 2])
        self.assertEqual((self.active, set(self.users.values()), program_pools._used), ([], {0}, {}))

    def test_replays_are_fast_outside(self):
        """Only calls of the thread that uses the pool leave it; C++ replays the others at once."""
        function, _, call = self.function()

        def replay(inputs, function_id):
            self.seen.append(("C++", *self.active))
            return [8]

        replay_with(function.dispatch, replaying(replay), 7)
        with self.use(1):
            self.assertEqual(call([1]), [8])
            self.seen.append(self.active.copy())
            with mock.patch.object(program_pools, "outside", side_effect=AssertionError):
                other = threading.Thread(target=call, args=([1],))
                other.start()
                other.join()
        self.assertEqual(call([1]), [8])
        self.assertEqual([seen for seen in self.seen if seen[0] != "graph"], [("C++",), [(0, 1)], ("C++",)])


if __name__ == "__main__":
    run_tests()
