"""Small inputs on the CPU that kernel nodes hold by value: each launch gets those of its call, and nothing waits."""

import gc
import importlib.util
import struct
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from fake_driver import CUresult
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast_path import Trees as FakeTrees
from test_live_inputs import KERNEL, at, words
from test_staging import StagingTestCase, numbers
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda import value_kernel
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.indirection import choosing
from pygraph_trees.indirection.addresses import Addresses
from pygraph_trees.indirection.routes import Route
from pygraph_trees.indirection.staged_inputs import NotStaged
from pygraph_trees.native import binding
from pygraph_trees.placement import staging as operator

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8)


def observation(call=0, size=(32, 64)):
    return torch.arange(float(torch.Size(size).numel())).view(size) + 1000 * call


def stage(value, read=HostRead.IN_ORDER):
    torch.ops.pygraph_trees.staged(torch.empty(0), value, int(read))


class ValuesTestCase(StagingTestCase):
    value_kernel = staticmethod(value_kernel.value_kernel)

    def setUp(self):
        super().setUp()
        self.on_gpu = []
        is_on_cpu = lambda tensor: not any(tensor is other for other in self.on_gpu)  # noqa: E731
        self.enterContext(mock.patch.object(choosing, "may_be_staged", is_on_cpu))
        self.enterContext(mock.patch.multiple(operator, _is_captured=lambda _: True, _stream=lambda _: self.stream))

    def record(self, *inputs, read=HostRead.IN_ORDER, nodes=lambda found: [], stages=None, fails=lambda: None):
        """A recording that is about to be launched; its kernels hold the values of the inputs that are not ``on_gpu``.

        Args:
            nodes: other nodes, from the recorded addresses of all inputs.
            stages: calls the operator, given the placeholder tensors of the staged inputs; once for each by default.
            fails: takes part of the driver away once the graph is captured.
        """
        live = self.chosen(*inputs)
        graph = self.capture(nodes, live)
        staged = [item.placeholder_tensor for item in live.items if item.index in live._staged.indices]
        before, self.stream = self.stream, self.api.make_stream()
        self.api.capture(self.stream, graph._graph)  # launches on the current stream become nodes of the graph
        with operator.observed(*live.staged_copies) as found:
            for tensor in staged if stages is None else ():
                stage(tensor, read)
            if stages is not None:
                stages(*staged)
        self.api.capture(self.stream, 0, "NONE")
        self.stream = before
        self.writers = [node for node in self.api._graphs[graph._graph] if node not in graph._nodes]
        fails()
        live.set_up(graph, found.reads, found.copied)
        return live, graph

    def launched(self, graph):
        """The bytes that each kernel writes in a launch."""
        found = []
        for node in self.writers:
            block = self.api.exec_parameters(graph._exec, node)
            target, nbytes = struct.unpack_from("QI", block)
            self.assertEqual(target % 16, 0)
            found.append(block[16 : 16 + nbytes])
        return found

    def values(self, live, written, *like):
        """The values of tensors like these in the bytes that the first kernel writes."""
        begin = live._staged.staging._recorded.data_ptr()
        found = []
        for item, tensor in zip(live.items[-len(like) :], like, strict=True):
            memory = bytearray(written[0][item.recorded - begin :][: item.nbytes])
            dense = torch.frombuffer(memory, dtype=torch.uint8).view(item.placeholder_tensor.dtype)
            found.append(dense.as_strided(tensor.shape, item.placeholder_tensor.stride()))
        return found

    def check(self, make):
        live, graph = self.record(*make(0))
        self.assertEqual({decision.route for decision in live.decisions.values()}, {Route.STAGE})
        self.assertFalse(live.copies_some)
        queued = [self.launched(graph)]
        live.finish()
        for call in range(1, 4):
            given_ = make(call)
            self.begin(live, *given_)
            queued.append(self.launched(graph))
            live.finish()
            for value in given_:
                if value.is_contiguous():
                    value.zero_()  # the program may write to it at once
        for call, written in enumerate(queued):
            self.assertEqual(self.values(live, written, *make(call)), make(call), rtol=0, atol=0)
        self.assertEqual((self.blocks, self.queue.waits), ([], 0))


class TestInPython(ValuesTestCase):
    def test_each_launch_has_the_values_of_its_call(self):
        for make in (
            lambda call: [observation(call)],
            lambda call: [observation(call), torch.tensor(call)],
            lambda call: numbers(call, DTYPES),
            lambda call: [observation(call, (8, 4)).t(), torch.tensor([call % 2 == 0] * 3)],
            lambda call: [observation(call, (8, 8))[:, ::2], observation(call, (3, 1)).expand(3, 5)],
            lambda call: [observation(call, (5,)).to(torch.uint8)],
            *(lambda call, count=count: [torch.full((count,), float(call))] for count in (1, 64, 65, 4096)),
        ):
            self.check(make)

    def test_one_node_is_set_for_each_call(self):
        """The kernel is loaded once for all recordings."""
        for _ in range(3):
            live, _ = self.replayable(*numbers(0))
        self.assertEqual(self.api.calls.count("cuModuleLoadData"), 1)
        for call in range(1, 4):
            self.api.calls.clear()
            self.begin(live, *numbers(call))
            self.assertEqual(self.api.calls, [KERNEL])

    def test_when_there_are_buffers(self):
        """Kernels hold up to 32,736 bytes, of inputs that are not pinned."""
        for count, is_by_value in ((8184, True), (8185, False)):
            live = self.chosen(torch.ones(count))
            self.assertEqual((live.staged_copies[1] is not None, live.copies_some), (is_by_value, not is_by_value))
        with (
            mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True),
            mock.patch.object(torch.cuda, "synchronize"),
        ):
            self.assertIsNone(self.chosen(observation()).staged_copies[1])
        for call in ("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"):
            self.restart()
            self.api.fail(call, 0, CUresult.CUDA_ERROR_NOT_SUPPORTED)
            with self.assertLogs("pygraph_trees.cuda", "WARNING") as logs:
                for _ in range(2):
                    self.assertIsNone(self.chosen(observation()).staged_copies[1])
            self.assertRegex(logs.output[0], f"{call} returned CUDA_ERROR_NOT_SUPPORTED")
            self.assertEqual((len(logs.output), self.api.calls.count("cuModuleLoadData")), (1, 1))

    def test_a_pinned_value_is_waited_for_unless_the_program_reads_it_at_once(self):
        """The driver reads it at the call, and the GPU may still have to write to it."""
        for read, waits in ((HostRead.AT_ONCE, False), (HostRead.IN_ORDER, True), (HostRead.LATER, True)):
            live, graph = self.replayable(observation(), read=read)
            value = observation(3)
            self.waited.side_effect = lambda: value.add_(1)  # noqa: B023
            with mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True):
                self.begin(live, value)
            self.assertEqual(self.values(live, self.launched(graph), value), [observation(3) + waits])

    def test_values_that_look_like_addresses_are_no_addresses(self):
        """While the graph is captured, its nodes hold zeros."""
        x = at(0)
        self.on_gpu = [x]
        low = self.record(x, torch.tensor(0))[0].items[0].recorded
        numbers_ = [low + (2 << 20) * i for i in range(64)]
        live, graph = self.replayable(x, torch.tensor(numbers_), nodes=self.one_kernel_of_the_first)
        self.assertEqual([d.route for d in live.decisions.values()], [Route.PATCH, Route.STAGE])
        other = at(0)
        self.begin(live, other, torch.tensor(numbers_) + 1)
        self.assertEqual(graph.launch()[0], [other.data_ptr()])
        self.assertEqual(words(self.launched(graph)[0]), [number + 1 for number in numbers_])

    def one_kernel_of_the_first(self, found):
        return [self.api.make_kernel([found[0]])]

    def test_a_part_that_is_read_again_has_a_node_of_its_own(self):
        """Compiled code may write to a value in place. All nodes are set at each call."""

        def stages(first, second):
            for value in (first, second, first, first[8:24]):
                stage(value)

        live, graph = self.replayable(torch.zeros(64), torch.tensor(0.0), stages=stages)
        wanted = [torch.arange(64.0), torch.tensor(7.0)]
        self.begin(live, *wanted)
        together, again, part = self.launched(graph)
        self.assertEqual(self.values(live, [together], *wanted), wanted)
        self.assertEqual(again, torch.arange(64.0).numpy().tobytes())
        self.assertEqual(part, torch.arange(8.0, 24.0).numpy().tobytes())

    def test_an_input_that_is_read_by_other_means_is_not_staged(self):
        """A copy node would read the block when the GPU reaches it, and a constant would keep its first value."""
        for more in (
            {"nodes": lambda found: [self.api.make_memcpy(found[0], 0x100, 4, "HOST")]},
            {"stages": lambda first, second: stage(first)},
            {"fails": lambda: self.api.fail("cuGraphGetNodes", 0, CUresult.CUDA_ERROR_INVALID_VALUE)},
            {"fails": lambda: self.api.fail(KERNEL, 0, CUresult.CUDA_ERROR_INVALID_VALUE)},
        ):
            self.assertRaises(NotStaged, self.record, torch.tensor(1.0), torch.tensor(2.0), **more)

    def test_a_refused_node_refuses_all_that_it_holds(self):
        live, _ = self.replayable(*numbers(0))
        for _ in range(2):  # C++ asks first
            self.api.fail(KERNEL, 0, CUresult.CUDA_ERROR_INVALID_VALUE)
        self.assertRegex(live.addresses.prepare(numbers(1)), "refused an address")
        self.assertEqual(list(live.addresses.refused), list(range(48)))
        self.assertEqual(live.addresses.prepare(numbers(1)), "a driver call failed")


@unittest.skipIf(binding.extension is None, "the part in C++ was not built")
class TestInCpp(TestInPython):
    """The same with the reader of nodes, and replays without Python."""

    native = True

    def entry(self, live, order=None, **more):
        self.trees = FakeTrees({}, [torch.zeros(1)], live=live, **more)
        return self.trees.entry(order=order)

    def steady(self, count, *values):
        """A recording of an input on the GPU and these values, which was called with the former at each place."""
        self.restart()
        self.on_gpu = [at(0) for _ in range(count)]
        live, graph = self.replayable(self.on_gpu[0], *values, nodes=self.one_kernel_of_the_first)
        for place in self.on_gpu * 2:
            self.call(live, graph, place, *values)
        return live, graph, self.on_gpu

    def without_python(self):
        return mock.patch.object(Addresses, "prepare", side_effect=AssertionError("C++ does it"))

    @settings(deadline=None, max_examples=30)
    @given(st.sampled_from([None, [2, 0, 1], [1, 2, 0]]), st.lists(st.integers(0, 2), max_size=8))
    def test_a_steady_call_is_in_cpp_alone(self, order, calls):
        live, graph, places = self.steady(3, observation(), torch.tensor(0))
        entry = self.entry(live, order)
        queued = []
        with self.without_python():
            for call, which in enumerate(calls):
                inputs = [places[which], observation(call), torch.tensor(call)]
                self.assertEqual(len(entry([inputs[(order or range(3)).index(place)] for place in range(3)])), 1)
                inputs[1].zero_()
                queued.append((graph.launch()[0], self.launched(graph)))
        for call, ((address,), written) in enumerate(queued):
            self.assertEqual(address, places[calls[call]].data_ptr())
            wanted = [observation(call), torch.tensor(call)]
            self.assertEqual(self.values(live, written, *wanted), wanted)
        self.assertEqual((self.trees.graph.launches, self.trees.recording.calls), (len(calls), []))

    def test_an_input_that_is_also_returned(self):
        """No input is on the GPU."""
        live, graph = self.replayable(torch.tensor(0))
        live.outputs[0] = 0, None
        entry = self.entry(live, others=[None])
        with self.without_python():
            for call in range(1, 4):
                value = torch.tensor(call)
                (output,) = entry([value])
                self.assertIs(output, value)
                self.assertEqual(words(self.launched(graph)[0]), [call])
        self.assertEqual(live.addresses.sets.value, 4)

    def test_python_writes_what_is_laid_out_differently(self):
        """Then C++ launches, and the next plain value is written in C++ again."""
        live, graph = self.replayable(observation(0, (4, 4)))
        entry = self.entry(live)
        wide, plain = observation(1, (4, 8)), observation(5, (4, 4))
        for value in (
            *(wide[:, ::2], wide[:, :4].t(), observation(1, (4, 1)).expand(4, 4)),
            *(torch._neg_view(observation(1, (4, 4))), observation(1, (4, 4)).double()),
            *(torch._efficientzerotensor((4, 4)), torch.ones(4, 4, dtype=torch.int64)),
        ):
            with mock.patch.object(Addresses, "prepare", autospec=True, side_effect=Addresses.prepare) as asked:
                self.assertIsNotNone(entry([value]))
            self.assertEqual(asked.call_count, 1)
            found = self.values(live, self.launched(graph), value)
            self.assertEqual(found, [value.float().resolve_neg()], rtol=0, atol=0)
            with self.without_python():
                self.assertIsNotNone(entry([plain]))
            self.assertEqual(self.values(live, self.launched(graph), plain), [plain])
        self.assertEqual(self.trees.recording.calls, [])

    @given(st.integers(0, 2))
    def test_what_is_refused_once_is_set_by_python(self, after):
        live, graph, places = self.steady(2, torch.tensor(0))
        entry = self.entry(live)
        self.api.fail(KERNEL, after)
        for call, place in enumerate((places[0], places[1], places[0])):
            self.assertIsNotNone(entry([place, torch.tensor(call)]))
            self.assertEqual((graph.launch()[0], words(self.launched(graph)[0])), ([place.data_ptr()], [call]))

    def test_python_replays_if_cpp_cannot_set_nodes(self):
        self.driver = Driver(self.api)
        live, graph = self.replayable(torch.tensor(0))
        self.assertIsNone(live.addresses.native)
        self.assertIsNotNone(self.entry(live)([torch.tensor(3)]))
        self.assertEqual(words(self.launched(graph)[0]), [3])

    def test_the_memory_of_values_lives_as_long_as_it_is_written_to(self):
        live, graph = self.replayable(observation())
        sets, before = live.addresses.sets, live.addresses.sets.value
        entry = FakeTrees({}, [torch.zeros(1)], live=live).entry()
        del live
        gc.collect()
        self.assertIsNotNone(entry([observation(2)]))
        self.assertEqual(self.launched(graph)[0], observation(2).numpy().tobytes())
        self.assertEqual(sets.value - before, 1)


class TestKernel(TestCase):
    def test_it_assembles_for_every_width_and_gpu(self):
        spec = importlib.util.find_spec("triton")
        ptxas = Path(spec.origin if spec else "").parent / "backends/nvidia/bin/ptxas"
        if not ptxas.exists():
            self.skipTest("there is no ptxas of triton")
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "kernel.ptx"
        for width in value_kernel.WIDTHS:
            path.write_text(value_kernel.source(width))
            for arch in ("sm_70", "sm_80", "sm_90"):
                command = [ptxas, "-v", f"-arch={arch}", path, "-o", path.with_suffix(".cubin")]
                made = subprocess.run(command, capture_output=True, text=True)
                self.assertEqual(made.returncode, 0, made.stderr)
                self.assertRegex(made.stderr, "0 bytes stack frame")  # no thread has a copy of the parameters


if __name__ == "__main__":
    run_tests()
