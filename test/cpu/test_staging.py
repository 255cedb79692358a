"""Inputs on the CPU: each launch reads what its call was given, however many launches are queued."""

import ctypes
import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch
from fake_driver import CUresult
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live_inputs import LiveInputsTestCase, at
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda import progress
from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.indirection import choosing, staging
from pygraph_trees.indirection.routes import Route
from pygraph_trees.indirection.staged_inputs import NotStaged
from pygraph_trees.indirection.staging import MOST_BUFFERS, Staging
from pygraph_trees.placement import staging as operator
from pygraph_trees.trees.functions.outputs import without_staged

TARGET = 0x7B00_0000_0000  # memory that belongs to the graph
CALL = "cuGraphExecMemcpyNodeSetParams"


class Event:
    def __init__(self, queue):
        self.queue = queue

    def record(self, stream):
        self.place = self.queue.queued

    def query(self):
        self.queue.asked()
        return self.queue.done >= self.place

    def synchronize(self):
        self.queue.waits += not self.query()
        self.queue.done = max(self.queue.done, self.place)


class StagingTestCase(LiveInputsTestCase):
    def setUp(self):
        super().setUp()
        # Launches that the GPU reaches in order; ``asked`` is called at each question and wait.
        self.queue = SimpleNamespace(done=0, queued=0, waits=0, asked=lambda: None)
        self.blocks = []  # that were allocated
        self.waited = mock.Mock()  # waits for a stream
        stream = lambda device: SimpleNamespace(cuda_stream=self.stream, synchronize=self.waited)  # noqa: E731
        self.enterContext(mock.patch.multiple(torch.cuda, Event=lambda: Event(self.queue), current_stream=stream))
        self.enterContext(mock.patch.multiple(staging, pinned_bytes=self.pinned_bytes, value_kernel=self.value_kernel))

    def value_kernel(self, *_):
        """There is none: inputs are copied from pinned memory."""

    def pinned_bytes(self, nbytes):
        self.blocks.append(torch.full((nbytes,), 0xA5, dtype=torch.uint8))
        return self.blocks[-1]

    def pin(self, are_pinned=True):
        """From now on, all tensors on the CPU are pinned."""
        self.enterContext(mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: are_pinned))

    def launch(self, buffers):
        """Queues a launch that reads the values that were put last."""
        self.queue.queued += 1
        buffers.launched(None)

    def chosen(self, *inputs):
        return self.choose(*inputs, stage=True)[0]


def read_at(address, like):
    """A tensor like another one, made from the memory at an address."""
    memory = bytearray(ctypes.string_at(address, like.numel() * like.element_size()))
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).view(like.shape)


class TestBuffers(StagingTestCase):
    def test_values_of_any_size_and_layout_are_read(self):
        """Each value is read in the layout of the buffer, whatever its own layout and that of the first value."""
        for side in (4, 300):
            wide = torch.arange(float(side * side)).view(side, side)
            layouts = {
                "dense": wide,
                "transposed": wide.t(),
                "every second one": torch.arange(2.0 * side * side).view(side, 2 * side)[:, ::2],
                "expanded": torch.arange(float(side)).expand(side, side),
                "negated": torch._neg_view(wide),
                "zeros without memory": torch._efficientzerotensor((side, side)),  # a tangent may be such zeros
                "of booleans": wide % 3 == 0,
                "conjugated": torch.complex(wide, wide).conj(),
                "a gradient's": wide.clone().requires_grad_(),
            }
            for (first_name, first), (name, value) in itertools.product(layouts.items(), repeat=2):
                if value.dtype == first.dtype:
                    with self.subTest(first_name, then=name, side=side):
                        buffers = Staging([first.detach()])
                        buffers.put([value])
                        wanted = torch.zeros_like(wide) if value._is_zerotensor() else value.detach()
                        (memory,) = buffers.placeholder_tensors
                        self.assertEqual(memory, wanted.resolve_neg().resolve_conj(), rtol=0, atol=0)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from(["launch", "launch", "put", "done"]), max_size=60), st.booleans())
    def test_a_queued_buffer_is_not_written_to(self, steps, fixed):
        """Every input in it keeps its value."""
        shapes = (4,), (9000,), (4, 3)

        def values(number):
            small, large, wide = (torch.full(shape, float(number)) for shape in shapes)
            return [small, large, wide.t()]

        self.queue.done = self.queue.queued = 0
        buffers = Staging(values(0))
        buffers.is_fixed = fixed
        offsets = [tensor.data_ptr() - buffers.together.data_ptr() for tensor in buffers.placeholder_tensors]
        queued = []  # the address, and the number whose values the launch must read
        for number, step in enumerate(steps, 1):
            if step == "done":
                self.queue.done = min(self.queue.done + 1, self.queue.queued)
                continue
            (address,) = buffers.put(values(number))
            if step == "launch":
                self.launch(buffers)
                queued.append((address, number))
            for begin, wanted in (*queued[self.queue.done :], (address, number)):
                for offset, value in zip(offsets, values(wanted), strict=True):
                    self.assertTrue(torch.equal(read_at(begin + offset, value), value))
        self.assertLessEqual(len({address for address, _ in queued}), 1 if fixed else MOST_BUFFERS)

    def test_pinned_memory_is_read_when_the_program_reads_it(self):
        """The program's copy may follow a copy into that memory which the GPU has not made yet."""
        for read, pinned, waits, in_place in (
            (None, True, True, False),
            (HostRead.IN_ORDER, True, True, False),
            (HostRead.AT_ONCE, True, False, False),
            (HostRead.LATER, True, False, True),
            (HostRead.LATER, False, False, False),
        ):
            with self.subTest(read=read, pinned=pinned), mock.patch.object(torch.cuda, "synchronize") as synchronize:
                self.pin(pinned)
                self.waited.reset_mock()
                value = torch.zeros(4)
                synchronize.side_effect = self.waited.side_effect = lambda *_: value.add_(1)  # noqa: B023
                buffers = Staging([value], 0)
                self.assertEqual(buffers.placeholder_tensors[0].tolist(), [float(pinned)] * 4)
                buffers.take([0], {} if read is None else {0: read}, [0])
                (address,) = buffers.put([value])
                self.assertEqual(address == value.data_ptr(), in_place)
                self.assertEqual(read_at(address, value).tolist(), [float(pinned + waits)] * 4)
                self.assertEqual(self.waited.call_count, waits)

    def test_pinned_memory_that_is_read_later_is_kept(self):
        """It is kept until the GPU has read it, also if buffers are not used again."""
        self.pin()
        buffers, kept = Staging([torch.zeros(4)]), []
        buffers.take([0], {0: HostRead.LATER}, [0])
        for number in range(12):
            value = torch.full((4,), float(number))
            kept.append(weakref.ref(value))
            if number == 6:
                self.assertEqual([found() is None for found in kept], [False] * 7)
                self.queue.done = self.queue.queued  # it keeps up from now on
            self.assertEqual((buffers.put([value]), buffers.in_place), ([value.data_ptr()], [0]))
            self.launch(buffers)
            if number >= 6:
                self.queue.done = self.queue.queued
        del value
        self.assertEqual([number for number, found in enumerate(kept) if found() is not None], [11])

    def test_a_pinned_value_is_copied_if_its_layout_differs(self):
        """One value may be given for two inputs, and be copied for one of them."""
        self.pin()
        for value, count, in_place in ((torch.arange(8.0).view(4, 2).t(), 1, []), (torch.full((2, 4), 7.0), 2, [0])):
            buffers = Staging([torch.zeros(2, 4) for _ in range(count)], 0)
            buffers.take(list(range(count)), {0: HostRead.LATER}, list(range(count)))
            addresses = buffers.put([value] * count)
            self.assertEqual([read_at(address, torch.zeros(2, 4)) for address in addresses], [value] * count)
            self.assertEqual((buffers.in_place, addresses[0] == value.data_ptr()), (in_place, in_place == [0]))

    def test_reads_of_a_captured_graph_are_observed(self):
        """Only reads of this thread inside the context count."""
        values = [torch.zeros(4), torch.ones(4)]
        with operator.observed() as found:
            torch.ops.pygraph_trees.staged(torch.empty(0), values[0], int(HostRead.LATER))
            with operator.observed() as inner, ThreadPoolExecutor(1) as other:
                torch.ops.pygraph_trees.staged(torch.empty(0), values[1])
                other.submit(torch.ops.pygraph_trees.staged, torch.empty(0), values[0]).result()
        torch.ops.pygraph_trees.staged(torch.empty(0), values[0])
        self.assertEqual(found.reads, [(values[0].data_ptr(), HostRead.LATER)])
        self.assertEqual(inner.reads, [(values[1].data_ptr(), HostRead.IN_ORDER)])

    def test_it_waits_if_all_buffers_are_queued_and_before_it_dies(self):
        """Otherwise its memory may be allocated again. While another thread captures in the global mode, such questions
        and waits are errors that end the capture."""
        before, found = self.api.capture_mode, []
        self.pin()
        self.queue.asked = self.waited.side_effect = lambda: found.append(self.api.capture_mode)
        with mock.patch.object(progress, "driver", lambda: self.driver), mock.patch.object(torch.cuda, "synchronize"):
            buffers = Staging([torch.zeros(4)])
            for number in range(MOST_BUFFERS + 2):
                buffers.put([torch.full((4,), float(number))])
                self.launch(buffers)
                self.assertEqual(self.queue.waits, max(0, number + 1 - MOST_BUFFERS))
            del buffers
        self.assertEqual(self.queue.done, self.queue.queued)
        self.assertEqual(self.waited.call_count, MOST_BUFFERS + 2)
        self.assertGreater(len(found), 2 * MOST_BUFFERS)
        self.assertEqual(set(found), {self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED})
        self.assertIs(self.api.capture_mode, before)

    def test_buffers_work_in_inference_mode_and_outside(self):
        parameter = torch.nn.Parameter(torch.ones(4))
        with torch.inference_mode():
            buffers = Staging([torch.zeros(4)])
        buffers.put([parameter])
        self.assertFalse(buffers.placeholder_tensors[0].requires_grad)
        with torch.inference_mode():
            buffers.put([torch.full((4,), 2.0)])
        self.assertEqual(buffers.placeholder_tensors[0], torch.full((4,), 2.0))


NUMBERS = 48


def numbers(call, dtypes=(torch.float32,)):
    return [torch.tensor(call * 100 + number).to(dtypes[number % len(dtypes)]) for number in range(NUMBERS)]


class TestOneBlock(StagingTestCase):
    """All inputs of a recording are in one block, and one copy takes those that may share it."""

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(1, 700), st.sampled_from([1, 2, 4, 8, 16])), min_size=1, max_size=12))
    def test_places_in_the_block_are_aligned_and_disjoint(self, sizes):
        """Each place is aligned as torch's own allocation would be, and overlaps with no other."""
        dtypes = {1: torch.bool, 2: torch.half, 4: torch.int32, 8: torch.double, 16: torch.complex128}
        buffers = Staging([torch.ones(count, dtype=dtypes[size]) for count, size in sizes])
        begin, spans = self.blocks[-1].data_ptr(), []
        for tensor in buffers.placeholder_tensors:
            start = tensor.data_ptr() - begin
            self.assertEqual(start % (512 if tensor.nbytes >= 512 else 64), 0)
            self.assertEqual(tensor, torch.ones_like(tensor))
            spans.append((start, start + tensor.nbytes))
        spans.sort()
        self.assertTrue(all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)))
        self.assertLessEqual(spans[-1][1], (self.blocks[-1] if buffers.together is None else buffers.together).numel())

    def test_placeholder_tensors_have_storages_of_their_own(self):
        """A recording identifies them by their storages; each holds the block."""
        placeholder_tensors = Staging(numbers(0)).placeholder_tensors
        storages = map(torch.Tensor.untyped_storage, placeholder_tensors)
        found = {(memory.data_ptr(), memory.nbytes()) for memory in storages}
        self.assertEqual((len(found), {nbytes for _, nbytes in found}), (NUMBERS, {4}))
        block = weakref.ref(self.blocks.pop())
        gc.collect()
        self.assertIsNotNone(block())
        del placeholder_tensors
        gc.collect()
        self.assertIsNone(block())

    def test_an_input_that_comes_from_the_gpu_is_not_read_as_memory_of_the_cpu(self):
        """Saved-tensor hooks may return it on another device."""
        buffers, moved = Staging([torch.zeros(20_000)]), []
        with mock.patch.object(ctypes, "memmove", lambda *given_: moved.append(given_)):
            buffers.put([torch.ones(20_000)])
            self.assertEqual(len(moved), 1)
            with mock.patch.object(torch.Tensor, "is_cpu", False):
                buffers.put([torch.ones(20_000)])
        self.assertEqual(len(moved), 1)


class TestOperator(StagingTestCase):
    """The operator's results while a graph is captured; the CPU stands in for the GPU."""

    def setUp(self):
        super().setUp()
        self.stream = 1
        self.enterContext(mock.patch.multiple(operator, _is_captured=lambda _: True, _stream=lambda _: self.stream))

    def staged(self, host, read=HostRead.IN_ORDER):
        return torch.ops.pygraph_trees.staged(torch.empty(0), host, int(read))

    def test_one_copy_serves_all(self):
        """A stream has a copy of its own: nothing orders its reads after another stream's copy."""
        values = [*numbers(7, (torch.float32, torch.int64, torch.bool)), torch.rand(3, 5).t(), torch.rand(500)]
        buffers = Staging(values)
        with operator.observed(buffers.together) as found:
            there = [self.staged(placeholder_tensor) for placeholder_tensor in buffers.placeholder_tensors]
            (copy,) = found._copies.values()
            self.assertEqual(found.copied, [buffers.together.data_ptr()])
            self.assertEqual(there, values, rtol=0, atol=0)
            self.assertEqual([value.stride() for value in there], [value.stride() for value in values])
            self.assertEqual({value.untyped_storage().data_ptr() for value in there}, {copy.data_ptr()})
            self.assertEqual(len(found.reads), len(values))
            self.stream = 2
            again = self.staged(buffers.placeholder_tensors[0])
            self.assertEqual(found.copied, [buffers.together.data_ptr()] * 2)
        self.assertEqual(again, values[0])
        self.assertNotEqual(again.untyped_storage().data_ptr(), copy.data_ptr())

    def test_no_bytes_are_given_twice(self):
        """Compiled code may write to a value in place. Parts are aligned, as it assumes."""
        buffers = Staging([torch.arange(64.0), torch.tensor(1.0)])
        value = buffers.placeholder_tensors[0]
        with operator.observed(buffers.together) as found:
            whole, again, part = self.staged(value), self.staged(value), self.staged(value[16:48])
            self.assertEqual(found.copied, [value.data_ptr(), value.data_ptr(), value.data_ptr() + 64])
            whole.zero_()
        self.assertEqual(len({t.untyped_storage().data_ptr() for t in (whole, again, part)}), 3)
        self.assertEqual((again, part), (torch.arange(64.0), torch.arange(16.0, 48.0)))
        with operator.observed(buffers.together):
            for begin, is_shared in ((0, True), (16, True), (33, False)):
                part = self.staged(value[begin : begin + 15])
                self.assertEqual(part, torch.arange(64.0)[begin : begin + 15])
                self.assertEqual(part.untyped_storage().nbytes() > 60, is_shared)
                self.assertEqual(part.data_ptr() % 64, 0)

    def test_values_outside_the_block_are_copied_alone(self):
        buffers = Staging([torch.zeros(100_000), torch.tensor(1.0), torch.tensor(2.0)])
        outside = torch.tensor(3.0)
        with operator.observed(buffers.together) as found:
            self.assertEqual(self.staged(buffers.placeholder_tensors[0]).untyped_storage().nbytes(), 400_000)
            self.assertEqual(self.staged(outside), outside)
            self.assertEqual(self.staged(torch.empty(0, 3)).shape, (0, 3))
            self.assertEqual(found._copies, {})
        with operator.observed() as found:
            self.assertEqual(self.staged(buffers.placeholder_tensors[1]), torch.tensor(1.0))

    def test_a_part_with_gaps_is_read_from_the_memory_that_is_written_at_each_call(self):
        """Torch would gather its elements on the CPU, once."""
        wide, original, sources = torch.arange(64.0).view(8, 8), torch.Tensor.copy_, []

        def copy(to, of, non_blocking=False):
            sources.append(of)
            return original(to, of)

        for staged in (Staging([wide, torch.tensor(1.0)]), Staging([wide])):
            for part in (lambda v: v[:, 3], lambda v: v[1:5, 2:7], lambda v: v[0, :1].expand(4)):
                sources.clear()
                with operator.observed(staged.together), mock.patch.object(torch.Tensor, "copy_", copy):
                    found = self.staged(part(staged.placeholder_tensors[0]))
                self.assertEqual(found, part(wide))
                begin, nbytes = staged.recorded[0]
                self.assertTrue(sources[0].is_contiguous())
                self.assertTrue(begin <= sources[0].data_ptr() < begin + nbytes)

    def test_outputs_have_memory_of_their_own(self):
        """Code may return the memory of a value that it no longer needs; views of one value still share memory. Nobody
        holds the copy afterwards: upstream counts live memory in the graph pool."""
        buffers = Staging([torch.arange(8.0), torch.tensor(5), torch.arange(6.0).view(2, 3)])
        with operator.observed(buffers.together) as found:
            a, b, c = (self.staged(placeholder_tensor) for placeholder_tensor in buffers.placeholder_tensors)
            other = torch.ones(2)
            outputs = found.with_own_memory((a, other, b, None, a[2:4], c.t(), a.view(torch.int32), a[8:], 7))
            begin, copy = a.untyped_storage().data_ptr(), weakref.ref(next(iter(found._copies.values())))
            del a, b, c
        gc.collect()
        self.assertIsNone(copy())
        self.assertIs(outputs[1], other)
        self.assertEqual((outputs[3], outputs[8]), (None, 7))
        wanted = [torch.arange(8.0), torch.tensor(5), torch.arange(2.0, 4.0), torch.arange(6.0).view(2, 3).t()]
        self.assertEqual([outputs[i] for i in (0, 2, 4, 5)], wanted)
        self.assertEqual(outputs[6].view(torch.float32), wanted[0])
        self.assertEqual((outputs[5].stride(), outputs[7].shape), ((1, 3), (0,)))
        memory = [outputs[i].untyped_storage().data_ptr() for i in (0, 4, 6, 2, 5)]
        self.assertEqual((len(set(memory[:3])), len(set(memory)), begin in memory), (1, 3, False))
        self.assertEqual(outputs[0].untyped_storage().nbytes(), 32)
        same = [other, 7]
        self.assertIs(found.with_own_memory(same), same)


class TestUngraphed(TestCase):
    """Copies outside of the graphs that we record."""

    def copies(self, host, read, *, captured=False, pinned=False):
        """The copies of a value to the GPU: whether its own memory is read, and whether the copy is non-blocking."""
        made = []

        def copy(to, of, non_blocking=False):
            made.append((of is host, non_blocking))
            return original(to, of)

        original = torch.Tensor.copy_
        with (
            mock.patch.object(operator, "_is_between_devices", lambda there, host: True),
            mock.patch.object(operator, "_is_captured", lambda there: captured),
            mock.patch.object(operator, "_pinned", lambda host: host.clone()),
            mock.patch.multiple(torch.Tensor, is_pinned=lambda tensor: pinned, copy_=copy),
        ):
            found = operator._staged(torch.empty(0), host, int(read))
        self.assertEqual(found, host.resolve_conj().resolve_neg())
        self.assertEqual(found.stride(), torch.empty_like(host).stride())
        return made

    def test_a_copy_waits_only_if_the_program_s_own_would(self):
        """It would for pinned memory, to which the GPU may still have to write, and the program may write afterwards. A
        graph that the program captures reads its memory itself: a copy that waits makes torch raise there."""
        layouts = torch.tensor(3.0), torch.rand(4, 5).t(), torch.rand(4, 6)[:, ::2], torch.ones(2).bool()
        for read, pinned in itertools.product(HostRead, (False, True)):
            itself = pinned and read is not HostRead.AT_ONCE
            ungraphed = itself, not itself or read is HostRead.LATER
            captured = True, read is HostRead.LATER and pinned
            with self.subTest(read=read, pinned=pinned):
                for host in layouts:
                    self.assertEqual(self.copies(host, read, pinned=pinned), [ungraphed])
                self.assertEqual(self.copies(torch.rand(4), read, captured=True, pinned=pinned), [captured])
        with operator.observed() as found:  # observed, and not captured
            self.assertEqual(self.copies(torch.rand(4), HostRead.AT_ONCE), [(False, True)])
        self.assertEqual(len(found.reads), 1)
        for host in (torch.complex(torch.rand(4), torch.rand(4)).conj(), torch._neg_view(torch.rand(4))):
            self.assertEqual(self.copies(host, HostRead.IN_ORDER), [(False, True)])  # it is resolved

    def test_pinned_memory_is_on_the_cpu_whatever_the_default_device_is(self):
        """``torch.set_default_device("cuda")`` gives ``torch.empty`` a device if the caller gives none."""
        with mock.patch.object(torch, "empty") as made:
            staging.pinned_bytes(64)
        self.assertEqual(made.call_args.kwargs["device"], "cpu")


class TestLiveInputs(StagingTestCase):
    def record(self, nodes, *inputs, returned=(), unread=()):
        """``unread``: inputs that no call of the operator read while the graph was captured."""
        live = self.chosen(*inputs)
        live.outputs.update({number: (index, None) for number, index in enumerate(returned)})
        graph = self.capture(nodes, live)
        live.set_up(graph, self.reads(live, unread))
        return live, graph

    def reads(self, live, unread=()):
        return [(item.recorded, HostRead.IN_ORDER) for item in live.items if item.index not in unread]

    def test_parts_that_are_read_at_several_times_are_read_in_order(self):
        live = self.chosen(*(torch.zeros(4) for _ in range(3)))
        (one, other, _), later = (item.recorded for item in live.items), HostRead.LATER
        reads = (one, later), (one + 8, later), (other, later), (other + 8, HostRead.AT_ONCE), (1, later)
        live._staged.note_reads(reads)
        self.assertEqual(live._staged._reads, {0: later, 1: HostRead.IN_ORDER})

    def copies(self, addresses):
        return [self.api.make_memcpy(a, TARGET + 4096 * n, 16, "HOST") for n, a in enumerate(addresses)]

    def read(self, launched):
        """The values that each copy of a launch would read."""
        return [read_at(source, torch.zeros(4)).tolist() for source, _ in launched]

    def test_an_input_that_is_only_returned_is_not_copied(self):
        """A later partition needs it; it is not copied, and each call returns its own input."""
        a, b = torch.ones(4), torch.zeros(4)
        live, graph = self.record(lambda addresses: self.copies(addresses[:1]), a, b, returned=[1], unread=[1])
        for given_ in (b, torch.full((4,), 7.0)):
            if given_ is not b:
                self.begin(live, a.mul_(2), given_)
            self.assertIs(live.output(*live.outputs[0]), given_)
            self.assertEqual(self.read(graph.launch()), [a.tolist()])
            live.finish()

    def test_outputs_on_a_staged_input_are_of_the_input_of_their_call(self):
        """Upstream sees none of them; each call's outputs are made from its own input."""
        live = self.chosen(torch.arange(8.0))
        (item,) = live.items
        other = torch.zeros(2)
        shown = without_staged([item.placeholder_tensor, 3, item.placeholder_tensor[2:6], other], live)
        self.assertEqual([value if value is None else type(value) for value in shown], [None, int, None, torch.Tensor])
        self.assertIs(shown[3], other)
        live.set_up(self.capture(self.copies, live), self.reads(live))
        live.finish()
        value = torch.arange(8.0) * 2
        live.take([value])
        made = {position: live.output(*made_of) for position, made_of in live.outputs.items()}
        self.assertIs(made[0], value)
        self.assertEqual((made[2], made[2].data_ptr()), (value[2:6], value[2:6].data_ptr()))

    def record_numbers(self, *more, unread=(), own=()):
        """Records 48 numbers and more, which one node copies, and another node for each input in ``own``."""

        def nodes(addresses):
            return [self.common(), *(self.api.make_memcpy(addresses[i], TARGET + 8192, 4, "HOST") for i in own)]

        return self.record(nodes, *numbers(0), *more, unread=unread)

    def common(self):
        """The node that copies the whole block."""
        return self.api.make_memcpy(self.blocks[-1].data_ptr(), TARGET, self.blocks[-1].numel(), "HOST")

    def test_one_node_copies_all_numbers(self):
        """Each call patches one block and one node, and each launch reads its own numbers."""
        for own in ((), (5,)):  # a second copy of a number is given the address of its part
            del self.blocks[:]
            self.live, graph = self.record_numbers(own=own)
            self.assertEqual({d.route for d in self.live.decisions.values()}, {Route.STAGE})
            self.assertEqual((len(self.blocks), self.live.copies_some), (1, True))
            launched, given_ = [(graph.launch(), 0)], numbers(0)
            self.queue.queued += 1
            self.live.finish()
            for call in range(1, 6):
                del self.api.calls[:]
                torch._foreach_copy_(given_, numbers(call))  # in place, which no address tells
                launched.append((self.call(self.live, graph, *given_), call))
                self.queue.queued += 1
                self.assertEqual(self.api.calls.count(CALL), 1 + len(own))
            self.assertEqual(len({node[0][0] for node, _ in launched}), 6)
            for ((source, target), *others), call in launched:
                self.assertEqual(target, TARGET)
                places = [source + item.recorded - self.blocks[0].data_ptr() for item in self.live.items]
                self.assertEqual([read_at(place, torch.tensor(0.0)) for place in places], numbers(call), rtol=0, atol=0)
                self.assertEqual([read_at(s, torch.tensor(0.0)) for s, _ in others], [numbers(call)[i] for i in own])
            self.queue.done = self.queue.queued
            del self.api.calls[:]
            self.call(self.live, graph, *numbers(6))
            self.call(self.live, graph, *numbers(7))
            self.assertNotIn(CALL, self.api.calls)  # the same block each time

    def test_staged_inputs_and_patched_ones_go_together(self):
        """A patched address may be at the same offset in a kernel's parameters as the noted source in a copy node."""
        x, s, t = at(0), torch.tensor(1.0), torch.tensor(2.0)
        with mock.patch.object(choosing, "may_be_staged", lambda tensor: tensor.dim() == 0):
            live = self.chosen(x, s, t)
        graph = self.capture(lambda found: [self.common(), self.api.make_kernel([1, 2, found[0]])], live)
        live.set_up(graph, self.reads(live), [self.blocks[0].data_ptr()])
        self.assertEqual(graph.launch()[1], [1, 2, x.data_ptr()])
        self.queue.queued += 1
        live.finish()
        other = at(0)
        (source, _), kernel = self.call(live, graph, other, s * 3, t * 3)
        self.assertEqual(kernel, [1, 2, other.data_ptr()])
        self.assertEqual([read_at(source, s), read_at(source + 64, s)], [torch.tensor(3.0), torch.tensor(6.0)])

    def test_an_input_is_not_staged_unless_it_is_read_through_copies_of_its_memory_that_are_found(self):
        """A common copy also includes an input that is read by other means; later launches would read its old value. A
        copy that the driver does not describe would always read the same values, even if another one is found."""
        first = lambda addresses: self.copies(addresses[:1])  # noqa: E731

        def copied_twice(undescribed, away=0):
            live = self.chosen(*numbers(0))
            second = live.items[5].recorded
            own = lambda: self.api.make_memcpy(second, TARGET + 8192, 4, "HOST")  # noqa: E731
            graph = self.capture(lambda _: [self.common(), own()], live)
            if undescribed is not None:
                self.api.fail("cuGraphMemcpyNodeGetParams", undescribed, CUresult.CUDA_ERROR_INVALID_VALUE)
            live.set_up(graph, self.reads(live), [self.blocks[-1].data_ptr(), second - away])

        copied_twice(None)
        for why, record in (
            ("input 1 is on the CPU", lambda: self.record(first, torch.zeros(4), torch.zeros(4), unread=[1])),
            ("input 17 is on the CPU", lambda: self.record_numbers(unread=[17])),
            ("input 48 is on the CPU", lambda: self.record_numbers(torch.zeros(100_000))),  # gathered on the CPU
            ("input 0 is on the CPU", lambda: copied_twice(0)),
            ("input 5 is on the CPU", lambda: copied_twice(1)),
            ("", lambda: copied_twice(None, away=1)),  # memory that belongs to no buffer
        ):
            self.assertRaisesRegex(NotStaged, why, record)

    def test_one_buffer_is_used_if_the_graph_cannot_be_read(self):
        """The graph always reads the same buffer: a call waits until the previous launch has read it."""
        live = self.chosen(torch.ones(4))
        graph = self.capture(self.copies, live)
        self.api.fail("cuGraphGetNodes", 0, CUresult.CUDA_ERROR_INVALID_VALUE)
        live.set_up(graph, self.reads(live))
        live.finish()
        for call in range(3):
            self.queue.queued += 1
            self.assertEqual(self.read(self.call(live, graph, torch.full((4,), float(call)))), [[float(call)] * 4])
        self.assertEqual(self.queue.waits, 2)


if __name__ == "__main__":
    run_tests()
