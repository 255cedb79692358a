"""Inputs on the CPU: each launch reads what its call was given, however many launches are queued."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from fake_driver import CUresult
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live_inputs import LiveInputsTestCase
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.host_reads import HostRead
from pygraph_trees.indirection import staging
from pygraph_trees.indirection.inputs import NotStaged, choose
from pygraph_trees.indirection.routes import Route
from pygraph_trees.indirection.staging import MOST_BUFFERS, Staging
from pygraph_trees.placement import staging as operator
from pygraph_trees.trees.recording import without_staged

TARGET = 0x7B00_0000_0000  # memory of the graph's own
CALL = "cuGraphExecMemcpyNodeSetParams"


class Queue:
    """Launches that the GPU has not come to yet, in order."""

    def __init__(self):
        self.done = self.queued = 0
        self.waits = 0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, queue):
        self.queue = queue

    def record(self, stream):
        self.behind = self.queue.queued

    def query(self):
        return self.queue.done >= self.behind

    def synchronize(self):
        self.queue.waits += not self.query()
        self.queue.done = max(self.queue.done, self.behind)


class StagingTestCase(LiveInputsTestCase):
    def setUp(self):
        super().setUp()
        self.queue = Queue()
        for target, name, value in (
            (staging, "pinned_like", lambda tensor: torch.empty_like(tensor, device="cpu")),
            (torch.cuda, "Event", self.queue.event),
            (torch.cuda, "current_stream", lambda device: None),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)


class TestBuffers(StagingTestCase):
    def test_any_size_and_layout(self):
        """Whatever the layout of the first value and of the next one: each is read in the layout of the buffer."""
        for side in (4, 300):
            wide = torch.arange(float(side * side)).view(side, side)
            layouts = {
                "dense": wide,
                "transposed": wide.t(),
                "every second one": torch.arange(2.0 * side * side).view(side, 2 * side)[:, ::2],
                "expanded": torch.arange(float(side)).expand(side, side),
                "negated": torch._neg_view(wide),
                "of booleans": wide % 3 == 0,
                "conjugated": torch.complex(wide, wide).conj(),
                "a gradient's": wide.clone().requires_grad_(),
            }
            for first_name, first in layouts.items():
                for name, value in layouts.items():
                    if value.dtype == first.dtype:
                        with self.subTest(first_name, then=name, side=side):
                            buffers = Staging([first.detach()])
                            buffers.put([value])
                            (memory,) = buffers.stand_ins
                            self.assertEqual(memory, value.detach().resolve_neg().resolve_conj(), rtol=0, atol=0)

    def test_outside_of_graphs_the_copy_is_waited_for(self):
        """The program may write to its tensor as soon as the call is done; what is captured waits for nothing."""
        for capturing, ours in itertools.product((True, False), (True, False)):
            with (
                mock.patch.object(operator, "_is_captured", lambda _: capturing),  # noqa: B023
                mock.patch.object(torch.Tensor, "copy_", autospec=True, side_effect=lambda t, *a, **k: t) as copy,
                operator.observed() if ours else contextlib.nullcontext(),
            ):
                torch.ops.pygraph_trees.staged(torch.empty(0), torch.zeros(4))
            # Torch raises where a graph of the program's own is captured.
            self.assertEqual(copy.call_args.kwargs, {"non_blocking": capturing and ours})

    def test_what_is_queued_is_not_written_to(self):
        @settings(max_examples=200, deadline=None)
        @given(st.lists(st.sampled_from(["launch", "launch", "put", "done"]), max_size=60), st.booleans())
        def check(steps, fixed):
            self.queue.done = self.queue.queued = 0
            buffers = Staging([torch.zeros(4)])
            buffers.is_fixed = fixed
            queued = []  # address and what the launch is to read
            for number, step in enumerate(steps, 1):
                if step == "done":
                    self.queue.done = min(self.queue.done + 1, self.queue.queued)
                else:
                    value = torch.full((4,), float(number))
                    (address,) = buffers.put([value])
                    self.assertEqual(list((ctypes.c_float * 4).from_address(address)), value.tolist())
                    if step == "launch":
                        self.queue.queued += 1
                        buffers.launched(None)
                        queued.append((address, value.tolist()))
                for address, value in queued[self.queue.done :]:
                    self.assertEqual(list((ctypes.c_float * 4).from_address(address)), value)
            self.assertLessEqual(len(buffers._buffers), 1 if fixed else MOST_BUFFERS)

        check()

    def test_pinned_memory_is_read_when_the_program_reads_it(self):
        """A copy to it that the GPU has not made yet may be one that the program's copy comes behind."""
        stream = mock.Mock()
        for read, pinned, waits, in_place in (
            (None, True, True, False),
            (HostRead.IN_ORDER, True, True, False),
            (HostRead.AT_ONCE, True, False, False),
            (HostRead.LATER, True, False, True),
            (HostRead.LATER, False, False, False),
            (HostRead.IN_ORDER, False, False, False),
        ):
            with (
                self.subTest(read=read, pinned=pinned),
                mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: pinned),  # noqa: B023
                mock.patch.object(torch.cuda, "current_stream", lambda device: stream),
                mock.patch.object(torch.cuda, "synchronize") as synchronize,
            ):
                value = torch.zeros(4)
                synchronize.side_effect = stream.synchronize.side_effect = lambda *_: value.add_(1)  # noqa: B023
                buffers = Staging([value], 0)
                self.assertEqual(buffers.stand_ins[0].tolist(), [float(pinned)] * 4)
                buffers.take([0], {} if read is None else {0: read})
                (address,) = buffers.put([value])
                self.assertEqual(address == value.data_ptr(), in_place)
                self.assertEqual(list((ctypes.c_float * 4).from_address(address)), [float(pinned + waits)] * 4)
                self.assertEqual(stream.synchronize.call_count, waits)
                stream.reset_mock()

    def test_pinned_memory_that_is_read_later_is_kept(self):
        """Until the GPU has read it; who has another layout is copied."""
        with (
            mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True),
            mock.patch.object(torch.cuda, "current_stream", lambda device: mock.Mock()),
        ):
            value = torch.arange(8.0).view(2, 4)
            buffers = Staging([torch.zeros(2, 4)])
            buffers.take([0], {0: HostRead.LATER})
            self.assertEqual(buffers.put([value]), [value.data_ptr()])
            kept = weakref.ref(value)
            del value
            self.queue.queued += 1
            buffers.launched(None)
            self.assertNotEqual(buffers.put([torch.ones(2, 4)]), [])  # another buffer, as that one is read
            gc.collect()
            self.assertIsNotNone(kept())
            self.queue.done = self.queue.queued
            for _ in range(3):
                buffers.put([torch.ones(2, 4)])
                self.queue.queued += 1
                buffers.launched(None)
            other = torch.arange(8.0).view(4, 2).t()
            (address,) = buffers.put([other])
            self.assertNotEqual(address, other.data_ptr())
            self.assertEqual(list((ctypes.c_float * 8).from_address(address)), other.contiguous().view(-1).tolist())

    def test_nobody_is_kept_whom_the_gpu_has_read(self):
        """Also where buffers are not used again."""
        with mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True):
            buffers = Staging([torch.zeros(4)])
            buffers.take([0], {0: HostRead.LATER})
            kept = []
            for number in range(12):
                value = torch.full((4,), float(number))
                kept.append(weakref.ref(value))
                if number == 6:
                    self.queue.done = self.queue.queued  # it keeps up from now on
                self.assertEqual(buffers.put([value]), [value.data_ptr()])
                self.assertEqual(buffers.in_place, [0])
                self.queue.queued += 1
                buffers.launched(None)
                if number >= 6:
                    self.queue.done = self.queue.queued
            del value
            self.assertEqual([number for number, found in enumerate(kept) if found() is not None], [11])

    def test_one_tensor_in_two_places(self):
        with (
            mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True),
            mock.patch.object(torch.cuda, "current_stream", lambda device: mock.Mock()),
        ):
            buffers = Staging([torch.zeros(4), torch.zeros(4)])
            buffers.take([0, 1], {0: HostRead.LATER})
            value = torch.full((4,), 7.0)
            for address in buffers.put([value, value]):
                self.assertEqual(list((ctypes.c_float * 4).from_address(address)), [7.0] * 4)
            self.assertEqual(buffers.in_place, [0])

    def test_what_the_graph_reads_of_it_is_observed(self):
        """In this thread, while it is asked."""
        values = [torch.zeros(4), torch.ones(4)]
        with operator.observed() as found:
            torch.ops.pygraph_trees.staged(torch.empty(0), values[0], int(HostRead.LATER))
            with operator.observed() as inner, ThreadPoolExecutor(1) as other:
                torch.ops.pygraph_trees.staged(torch.empty(0), values[1])
                other.submit(torch.ops.pygraph_trees.staged, torch.empty(0), values[0]).result()
        torch.ops.pygraph_trees.staged(torch.empty(0), values[0])
        self.assertEqual(found, [(values[0].data_ptr(), HostRead.LATER)])
        self.assertEqual(inner, [(values[1].data_ptr(), HostRead.IN_ORDER)])

    def test_it_waits_where_all_are_queued(self):
        buffers = Staging([torch.zeros(4)])
        for number in range(MOST_BUFFERS + 2):
            buffers.put([torch.full((4,), float(number))])
            self.queue.queued += 1
            buffers.launched(None)
            self.assertEqual(self.queue.waits, max(0, number + 1 - MOST_BUFFERS))

    def test_it_outlives_what_is_queued(self):
        """Its memory is somebody else's when it is gone."""
        buffers = Staging([torch.zeros(4)])
        self.queue.queued = 1
        buffers.launched(None)
        del buffers
        self.assertEqual((self.queue.done, self.queue.waits), (1, 1))

    def test_any_mode(self):
        parameter = torch.nn.Parameter(torch.ones(4))
        with torch.inference_mode():
            buffers = Staging([torch.zeros(4)])
        buffers.put([parameter])
        self.assertFalse(buffers._next.memories[0].requires_grad)
        with torch.inference_mode():
            buffers.put([torch.ones(4)])
        self.assertEqual(buffers._next.memories[0], torch.ones(4))

    def test_one_buffer_where_the_gpu_keeps_up(self):
        buffers = Staging([torch.zeros(4)])
        for number in range(5):
            buffers.put([torch.full((4,), float(number))])
            self.queue.queued = self.queue.done = number
            buffers.launched(None)
        self.assertEqual((len(buffers._buffers), self.queue.waits), (1, 0))

    def test_strides(self):
        for value in (torch.rand(3, 4).t(), torch.rand(4, 1).expand(4, 3), torch.rand(4, 6)[:, ::2], torch.tensor(2)):
            buffers = Staging([value])
            self.assertEqual(buffers.stand_ins[0], value)
            buffers.put([value * 2])
            self.assertEqual(buffers._next.memories[0], value * 2)


class TestLiveInputs(StagingTestCase):
    def record(self, nodes, *inputs, returned=()):
        live, reasons = choose(self.driver, 0, list(inputs), range(len(inputs)), set(), self.pool, {}, stage=True)
        self.assertEqual(reasons, {})
        live.outputs.update({number: (index, None) for number, index in enumerate(returned)})
        graph = self.capture(nodes, live)
        live.set_up(graph)
        return live, graph

    def test_parts_that_are_read_at_several_times_are_read_in_order(self):
        inputs = [torch.zeros(4) for _ in range(4)]
        live, _ = choose(self.driver, 0, inputs, range(4), set(), self.pool, {}, stage=True)
        starts = [item.recorded for item in live.items]
        reads = [
            *((starts[0], HostRead.LATER), (starts[0] + 8, HostRead.LATER)),
            *((starts[1], HostRead.LATER), (starts[1] + 8, HostRead.AT_ONCE)),
            *((starts[2] + 12, HostRead.AT_ONCE), (1, HostRead.LATER)),
        ]
        expected = {0: HostRead.LATER, 1: HostRead.IN_ORDER, 2: HostRead.AT_ONCE}
        self.assertEqual(live._by_number(reads), expected)

    def copies(self, addresses):
        return [self.api.make_memcpy(a, TARGET + 4096 * n, 16, "HOST") for n, a in enumerate(addresses)]

    def read(self, launched):
        """What each copy of a launch would read."""
        return [list((ctypes.c_float * 4).from_address(source)) for source, _ in launched]

    def test_each_launch_reads_its_call(self):
        a, b = torch.full((4,), 1.0), torch.full((4,), 2.0)
        live, graph = self.record(self.copies, a, b)
        self.assertEqual([d.route for d in live.decisions.values()], [Route.STAGE] * 2)
        self.assertTrue(live.copies_some)
        self.assertEqual(self.read(graph.launch()), [[1.0] * 4, [2.0] * 4])
        self.queue.queued += 1
        live.finish()
        launched = []
        for call in range(3, 12):
            a.fill_(call)  # in place, which no address tells
            launched.append((self.call(live, graph, a, b), call))
            self.queue.queued += 1
        for held, call in launched[-MOST_BUFFERS:]:
            self.assertEqual(self.read(held), [[float(call)] * 4, [2.0] * 4])

    def test_no_node_reads_it(self):
        """Its value may have been read while the graph was recorded, and every replay would have that one."""
        with self.assertRaisesRegex(NotStaged, "input 1 lies on the CPU"):
            self.record(lambda addresses: self.copies(addresses[:1]), torch.zeros(4), torch.zeros(4))

    def test_returned_alone(self):
        """A later partition needs it; it is not copied, and is the call's own."""
        a, b = torch.ones(4), torch.zeros(4)
        live, graph = self.record(lambda addresses: self.copies(addresses[:1]), a, b, returned=[1])
        self.assertIs(live.output(*live.outputs[0]), b)
        self.assertEqual(self.read(graph.launch()), [[1.0] * 4])
        live.finish()
        other = torch.full((4,), 7.0)
        self.assertIsNone(live.prepare([a.mul_(2), other]))
        live.take([a, other])
        self.assertIs(live.output(*live.outputs[0]), other)
        self.assertEqual(self.read(graph.launch()), [[2.0] * 4])

    def test_outputs_that_lie_on_it(self):
        """Upstream is shown none of them; each call's are made of its own input."""
        live, _ = choose(self.driver, 0, [torch.arange(8.0)], [0], set(), self.pool, {}, stage=True)
        (item,) = live.items
        other = torch.zeros(2)
        shown = without_staged([item.stand_in, 3, item.stand_in[2:6], other], live)
        self.assertEqual([value if value is None else type(value) for value in shown], [None, int, None, torch.Tensor])
        self.assertIs(shown[3], other)
        live.set_up(self.capture(self.copies, live))
        live.finish()
        value = torch.arange(8.0) * 2
        live.take([value])
        made = {position: live.output(*made_of) for position, made_of in live.outputs.items()}
        self.assertIs(made[0], value)
        self.assertEqual((made[2], made[2].data_ptr()), (value[2:6], value[2:6].data_ptr()))

    def test_no_call_where_the_gpu_keeps_up(self):
        live, graph = self.record(self.copies, torch.zeros(4), torch.zeros(4))
        self.queue.queued = self.queue.done = 1
        live.finish()
        del self.api.calls[:]
        for call in range(4):
            launched = self.call(live, graph, torch.full((4,), float(call)), torch.full((4,), -float(call)))
            self.assertEqual(self.read(launched), [[float(call)] * 4, [-float(call)] * 4])
            self.queue.queued = self.queue.done = self.queue.queued + 1
        self.assertNotIn(CALL, self.api.calls)

    def test_a_refused_buffer(self):
        """The input is named whose copy the driver does not set."""
        live, _ = self.record(self.copies, torch.ones(4), torch.zeros(4))
        self.queue.queued += 1
        live.finish()
        self.api.fail(CALL, 1, CUresult.CUDA_ERROR_INVALID_VALUE)
        self.assertRegex(live.prepare([torch.ones(4), torch.zeros(4)]), "refused an address")
        self.assertEqual(list(live.refused), [1])

    def test_a_graph_that_cannot_be_read(self):
        """The graph reads one buffer always: a call waits until the launch before has read it."""
        live, _ = choose(self.driver, 0, [torch.ones(4)], [0], set(), self.pool, {}, stage=True)
        graph = self.capture(self.copies, live)
        self.api.fail("cuGraphGetNodes", 0, CUresult.CUDA_ERROR_INVALID_VALUE)
        live.set_up(graph)
        live.finish()
        for call in range(3):
            self.queue.queued += 1
            self.assertEqual(self.read(self.call(live, graph, torch.full((4,), float(call)))), [[float(call)] * 4])
        self.assertEqual(self.queue.waits, 2)


if __name__ == "__main__":
    run_tests()
