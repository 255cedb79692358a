"""Live inputs of a recording, on a driver that checks its callers: each launch reads the inputs of its call.

Inputs and their placeholder tensors are CPU tensors; the latter report placeholder addresses. A launch would read what
the instantiated graph holds at that time: the address of an input, of a copy, or of a placeholder tensor.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_driver import CUresult, FakeApi
from fake_native import native_over
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection import addresses, choosing, live_input, placeholder_tensors, retired
from pygraph_trees.indirection import inputs as live_inputs
from pygraph_trees.indirection.choosing import choose
from pygraph_trees.indirection.inputs import LiveInputs
from pygraph_trees.indirection.pool import PoolRanges
from pygraph_trees.indirection.routes import Route

KERNEL, MEMCPY, MEMSET = (f"cuGraphExec{kind}NodeSetParams" for kind in ("Kernel", "Memcpy", "Memset"))
POINT_COPY, POINT_FILL = (f"cuGraph{kind}NodeSetParams" for kind in ("Memcpy", "Memset"))
OTHER = 0x7A00_0000_0000  # an address that nothing has
IN_POOL = "a mutated input lies in the graph pool"
UNHELD = "no node holds its address"
GIVING_BACK = ("cuMemUnmap", "cuMemRelease")

Nodes = Callable[[list[int]], list[Any]]  # nodes of a graph, from the addresses of the placeholder tensors


class PlaceholderTensor(torch.Tensor):
    """A tensor that reports a placeholder address."""

    start: int
    lead: int

    def data_ptr(self) -> int:
        return self.start + self.lead

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.start)


def placeholder_tensor(start: int, span: Any, tensor: torch.Tensor, device: int) -> torch.Tensor:
    storage = torch.zeros(span.nbytes, dtype=torch.uint8).untyped_storage()
    offset = span.lead // tensor.element_size()
    made = (
        torch.empty(0, dtype=tensor.dtype)
        .set_(storage, offset, tensor.shape, tensor.stride())
        .as_subclass(PlaceholderTensor)
    )
    made.start, made.lead = start, span.lead
    return made


_rooms: list[torch.Tensor] = []  # keeps memory alive, so that addresses are not reused


def at(residue: int, size: Sequence[int] = (4, 8)) -> torch.Tensor:
    """A tensor with random content, at an address that is ``residue`` modulo 512."""
    count = int(torch.Size(size).numel())
    room = torch.rand(count + 256)
    _rooms.append(room)
    begin = (residue - room.data_ptr()) % 512 // 4
    return room[begin : begin + count].view(*size)


def words(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]


class Graph:
    """A captured graph; launching it returns what its nodes hold."""

    def __init__(self, api: FakeApi, nodes: Sequence[Any]) -> None:
        self._api = api
        self._nodes = [node for node in nodes if isinstance(node, int)]
        self._graph = api.make_graph(*nodes)
        self.instances = 0

    def raw_cuda_graph(self) -> int:
        return self._graph

    def instantiate(self) -> None:
        self.instances += 1
        self._exec = self._api.instantiate(self._graph)

    def raw_cuda_graph_exec(self) -> int:
        return self._exec

    def launch(self) -> list[list[int]]:
        return [words(self._api.exec_parameters(self._exec, node)) for node in self._nodes]


class Event:
    """An event after the latest launch on a stream; it is over if the test case says that the GPU is idle."""

    def __init__(self, is_idle: Callable[[int], bool]) -> None:
        self._is_idle = is_idle

    def record(self, stream: Any) -> None:
        self.stream = stream.cuda_stream

    def query(self) -> bool:
        return self._is_idle(self.stream)


class LiveInputsTestCase(TestCase):
    native = False  # whether kernels are set in C

    def setUp(self) -> None:
        super().setUp()
        self.restart()
        self.synchronized: list[int] = []
        self.entered: list[int] = []
        self.stream = 0  # the current one
        self.idle: set[int] = set()  # streams on which all launches are over
        for target, name, value in (
            (live_input, "placeholder_tensor", placeholder_tensor),
            (choosing, "why_not_placeholder", lambda tensor, device, in_pool: None),
            (torch.cuda, "synchronize", self.synchronized.append),
            (torch.cuda, "device", self.enter),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_stream", self.current_stream),
            (torch.cuda, "Event", lambda: Event(lambda stream: stream in self.idle)),
        ):
            self.enterContext(mock.patch.object(target, name, value))
        self.addCleanup(retired._retired.clear)

    def current_stream(self, device: int) -> Any:
        return SimpleNamespace(cuda_stream=self.stream, synchronize=lambda: None)

    def enter(self, device: int) -> contextlib.AbstractContextManager[None]:
        self.entered.append(device)
        return contextlib.nullcontext()

    def restart(self) -> None:
        """Makes a new driver and a new pool."""
        retired._retired.clear()
        _rooms.clear()
        self.api = FakeApi()
        self.driver = Driver(self.api, native_over(self.api) if self.native else None)
        self.segments: list[dict[str, int]] = []
        self.snapshots = 0
        self.pool = PoolRanges(self._snapshot)

    def _snapshot(self) -> list[dict[str, int]]:
        self.snapshots += 1
        return self.segments

    def put_in_pool(self, *tensors: torch.Tensor) -> None:
        self.segments += [{"address": t.data_ptr(), "total_size": t.nbytes} for t in tensors]
        self.pool.forget()

    def choose(
        self,
        *inputs: Any,
        mutated: Collection[int] = (),
        refused: Mapping[int, str] | None = None,
        candidates: Sequence[int] | None = None,
        device: int = 0,
        managed: Collection[int] = (),
        own: Mapping[int, bool] | None = None,
    ) -> tuple[LiveInputs | None, dict[int, str]]:
        before = list(inputs)
        chosen = choose(
            self.driver,
            device,
            before,
            range(len(inputs)) if candidates is None else candidates,
            set(mutated),
            self.pool,
            refused or {},
            managed,
            own=own or {},
        )
        self.assertTrue(all(one is other for one, other in zip(before, inputs, strict=True)))
        return chosen

    def record(self, nodes: Nodes, *inputs: Any, **more: Any) -> tuple[LiveInputs, Graph]:
        """A recording that is about to be launched for the first time."""
        live, reasons = self.choose(*inputs, **more)
        self.assertEqual(reasons, {})
        assert live is not None
        graph = self.capture(nodes, live)
        live.set_up(graph)
        return live, graph

    def replayable(self, nodes: Nodes, *inputs: Any, **more: Any) -> tuple[LiveInputs, Graph]:
        """A recording that was launched once."""
        live, graph = self.record(nodes, *inputs, **more)
        live.finish()
        return live, graph

    def capture(self, nodes: Nodes, live: LiveInputs) -> Graph:
        by_index = {item.index: item.placeholder_tensor.data_ptr() for item in live.items}
        return Graph(self.api, nodes([by_index[i] for i in sorted(by_index)]))

    def begin(self, live: LiveInputs, *inputs: Any) -> None:
        """Makes a call up to its launch."""
        self.assertIsNone(live.addresses.prepare(inputs))
        taken = list(inputs)
        live.take(taken)
        taken.clear()  # as upstream does
        live.copy_in()

    def call(self, live: LiveInputs, graph: Graph, *inputs: Any) -> list[list[int]]:
        self.begin(live, *inputs)
        launched = graph.launch()
        live.finish()
        return launched

    def routes(self, live: LiveInputs) -> dict[int, str | None]:
        """By index: why an input is copied, or None if it is patched."""
        for decision in live.decisions.values():
            self.assertEqual(decision.route is Route.COPY, decision.reason is not None)
        return {index: decision.reason for index, decision in sorted(live.decisions.items())}

    def one_kernel(self, *more: int | bytes, **options: Any) -> Nodes:
        return lambda addresses: [self.api.make_kernel([*addresses, *more], **options)]


class TestAddresses(LiveInputsTestCase):
    """Rules 3 to 6: which addresses a graph holds."""

    def test_each_launch_has_its_addresses_and_unchanged_ones_cost_no_call(self):
        for packed in (False, True):
            a, b = at(0), at(0)
            live, graph = self.record(self.one_kernel(packed=packed), a, b)
            self.assertEqual((self.routes(live), self.api.leaks()), ({0: None, 1: None}, []))
            self.assertEqual(graph.launch(), [[a.data_ptr(), b.data_ptr()]])
            live.finish()
            for _ in range(3):
                a, b = at(0), at(0)
                self.assertEqual(self.call(live, graph, a, b), [[a.data_ptr(), b.data_ptr()]])
            self.assertEqual((live.addresses.extra_copies, graph.instances), (0, 1))
            self.api.calls.clear()
            self.pool.forget()
            before = self.snapshots
            for _ in range(3):
                self.assertEqual(self.call(live, graph, a, b), [[a.data_ptr(), b.data_ptr()]])
            self.assertEqual((self.api.calls, self.snapshots), ([], before + 1))  # the pool is looked up again, once
            self.call(live, graph, a, at(0))
            self.assertEqual(self.api.calls, [KERNEL])

    def test_a_thread_that_has_not_used_the_gpu_is_given_a_context(self):
        """Without one the driver crashes when nodes are set."""
        live, graph = self.replayable(self.one_kernel(), at(0), at(0))
        a, b = at(0), at(0)
        launched = []
        thread = threading.Thread(target=lambda: launched.extend(self.call(live, graph, a, b)))
        thread.start()
        thread.join()
        self.assertEqual(launched, [[a.data_ptr(), b.data_ptr()]])
        c = at(0)
        self.assertEqual(self.call(live, graph, c, b), [[c.data_ptr(), b.data_ptr()]])
        self.assertEqual(self.api.calls.count("cuCtxSetCurrent"), 1)

    def test_a_recording_is_passed_over_if_the_context_is_refused(self):
        live, _ = self.replayable(self.one_kernel(), at(0), at(0))
        for _ in range(2):  # C++ leaves it to Python, which asks again
            self.api.fail("cuCtxGetCurrent")
        self.assertIn("cuCtxGetCurrent", live.addresses.prepare([at(0), at(0)]))
        self.assertEqual(live.addresses.prepare([at(0), at(0)]), "a driver call failed")

    def test_an_address_in_the_storage_of_a_current_input_is_reached(self):
        first, later, other = at(0)[:8], at(0), at(0)
        live, graph = self.record(self.one_kernel(), first, other)
        # The whole storage counts: a tensor saved for the backward can be another view of the input.
        begin, nbytes = first.untyped_storage().data_ptr(), first.untyped_storage().nbytes()
        inside = begin, first.data_ptr(), begin + nbytes - 1, other.data_ptr()
        self.assertEqual([live.addresses.reaches(address) for address in inside], [True] * 4)
        self.assertEqual([live.addresses.reaches(address) for address in (0, begin - 1, begin + nbytes)], [False] * 3)
        live.finish()
        self.call(live, graph, later, other)
        self.assertEqual([live.addresses.reaches(t.data_ptr()) for t in (first, later, other)], [False, True, True])

    def test_copies_and_fills_are_set_at_each_replay(self):
        """They take the memory of inputs, not that of placeholders."""

        def nodes(found):
            return [
                self.api.make_memcpy(found[0] + 8, OTHER, 8),
                self.api.make_memcpy(found[1], found[0], 64),
                self.api.make_memset(found[1] + 16, 16),
                self.api.make_kernel([found[0]]),
            ]

        a, b = at(0), at(0)
        live, graph = self.record(nodes, a, b)
        self.assertEqual((self.routes(live), graph.instances), ({0: None, 1: None}, 1))
        self.assertTrue(all(self.api.is_reserved(item.recorded) for item in live.items))
        for first, second in ((a, b), (a, b), (at(0), at(0)), (at(0), at(16))):
            self.api.calls.clear()
            self.begin(live, first, second)
            kernels = [KERNEL] * (first is not a)
            self.assertEqual(Counter(self.api.calls), Counter([MEMCPY, MEMCPY, MEMSET, *kernels]))
            start, read = first.data_ptr(), live.addresses.temporary.get(1, second).data_ptr()
            self.assertEqual(graph.launch(), [[start + 8, OTHER], [read, start], [read + 16], [start]])
            live.finish()

    def test_all_consumers_of_an_input_agree(self):
        """A copy node may join a patched input and a copied one."""

        # The last kernel holds the second input's address where it may be something else.
        def nodes(found):
            hidden = self.api.make_kernel([b"\1\0\0\0" + found[1].to_bytes(8, "little")])
            return [self.api.make_kernel(found), self.api.make_memcpy(found[0], found[1], 64), hidden]

        a, b = at(0), at(0)
        live, graph = self.record(nodes, a, b)
        self.assertIsNone(self.routes(live)[0])
        self.assertRegex(str(self.routes(live)[1]), "may be something else")
        self.assertEqual(graph.launch()[:2], [[a.data_ptr(), live.items[1].recorded]] * 2)
        live.finish()
        a, b = at(0), at(0)
        self.assertEqual(self.call(live, graph, a, b)[:2], [[a.data_ptr(), live.items[1].recorded]] * 2)

    def test_placeholder_tensors_are_as_aligned_as_the_inputs(self):
        tensors = [at(0), at(16), at(132), at(508)]
        live, _ = self.choose(*tensors)
        self.assertEqual([i.recorded % 512 for i in live.items], [0, 16, 132, 508])
        self.assertEqual([i.placeholder_tensor.data_ptr() for i in live.items], [i.recorded for i in live.items])
        for item in live.items:
            self.assertIs(live.storages[item.placeholder_tensor.untyped_storage().data_ptr()], item)
        self.assertNotIn(tensors[0].untyped_storage().data_ptr(), live.storages)
        live.release()

    def test_a_view_is_recorded_with_its_storage_or_without(self):
        storage = torch.rand(1 << 12)
        for whole in (1 << 20, 0):
            with mock.patch.object(placeholder_tensors, "WHOLE_STORAGE", whole):
                live, _ = self.choose(storage[128:256])
                (item,) = live.items
                self.assertEqual(item.lead, 512 if whole else 0)
                reached = item.placeholder_tensor.untyped_storage().data_ptr() if whole else item.recorded
                graph = self.capture(
                    lambda found, reached=reached: [
                        self.api.make_kernel([*found, reached]),
                        self.api.make_memcpy(found[0] + 4, OTHER, 8),
                    ],
                    live,
                )
                live.set_up(graph)
                for start in (128, 256, 0):
                    view = storage[start : start + 128] if start else at(storage[128:].data_ptr() % 512, (128,))
                    address = view.data_ptr()
                    expected = [[address, address - item.lead], [address + 4, OTHER]]
                    self.assertEqual(self.call(live, graph, view), expected)

    def test_a_node_that_hides_addresses_makes_all_copied(self):
        a, b = at(0), at(0)
        live, graph = self.record(lambda found: [self.api.make_kernel(found), "HOST"], a, b)
        self.assertEqual(self.routes(live), dict.fromkeys((0, 1), "a host node may hide its address"))
        stands = [item.placeholder_tensor.data_ptr() for item in live.items]
        for inputs in ((a, b), (at(0), at(64))):
            self.begin(live, *inputs)
            self.assertEqual(graph.launch(), [stands])
            self.assertEqual([item.placeholder_tensor for item in live.items], list(inputs))
            live.finish()
        self.assertNotIn(KERNEL, self.api.calls)


CALLS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 16, 4])), min_size=3, max_size=3))


class TestCopies(LiveInputsTestCase):
    """Rules 2, 4 and 9: which inputs are copied, when, and which are copied back."""

    def hidden(self, *inputs: Any, **more: Any) -> tuple[LiveInputs, Graph]:
        """A recording whose first input no node holds."""
        return self.record(lambda found: [self.api.make_kernel(found[1:])], *inputs, **more)

    def test_an_input_without_a_known_address_is_copied_to_its_placeholder(self):
        a, b = at(0), at(0, (1 << 20,))  # not in one granule
        live, graph = self.hidden(a, b)
        self.assertEqual(self.routes(live), {0: UNHELD, 1: None})
        item = live.items[0]
        self.assertEqual(item.placeholder_tensor, a)
        self.assertEqual([self.api.is_mapped(i.recorded) for i in live.items], [True, False])
        live.finish()
        for _ in range(2):
            a = at(4)  # a copy takes any alignment
            before = a.clone()
            self.begin(live, a, b)
            self.assertEqual((graph.launch(), item.placeholder_tensor), ([[b.data_ptr()]], before))
            item.placeholder_tensor.zero_()
            live.finish()
            self.assertEqual(a, before)  # not mutated, so not copied back

    def test_autograd_does_not_see_that_copies_go_back(self):
        """It does not see what kernels write either: AOTAutograd counts the writes that autograd must see."""
        weight = torch.rand(4, 8, requires_grad=True)
        for nodes, residue in ((self.one_kernel(), 16), (lambda found: [self.api.make_kernel(found[1:])], 0)):
            live, _ = self.replayable(nodes, at(0), at(0), mutated=[0])
            a = at(residue)
            before, saved = a._version, (weight * a).sum()
            self.begin(live, a, at(0))
            copy = live.addresses.temporary.get(0, live.items[0].placeholder_tensor)
            expected = a + 1
            copy.add_(1)
            live.finish()
            self.assertEqual((a, a._version), (expected, before))
            saved.backward()

    def test_copies_are_made_in_any_mode(self):
        """Tensors made in inference mode cannot be written to outside of it."""
        for recorded_inside in (True, False):
            with torch.inference_mode(recorded_inside):
                inputs = at(0), at(4), at(0)
                live, _ = self.hidden(*inputs, mutated=[1], refused={1: "told so"})
                live.finish()
            for called_inside in (True, False):
                with torch.inference_mode(called_inside):
                    a, b, c = at(0), at(0), at(16)  # copied to a placeholder, copied both ways, copied for the call
                    expected = b + 1
                    self.begin(live, a, b, c)
                    copies = {item.index: item.placeholder_tensor for item in live.items}
                    self.assertEqual((copies[0], copies[1], live.addresses.temporary[2]), (a, b, c))
                    copies[1].data.add_(1)
                    live.finish()
                    self.assertEqual(b, expected)

    def test_a_copy_keeps_layouts_with_gaps_and_overlaps(self):
        for view in (
            lambda: torch.rand(9, 9)[1:7:2, 2:8:3],
            lambda: torch.rand(1, 6).expand(4, 6),
            lambda: torch.rand(5, 7).t(),
            lambda: torch.tensor(2.5),
        ):
            a, b = view(), at(0)
            live, _ = self.hidden(a, b)
            self.assertEqual(live.items[0].placeholder_tensor, a)
            self.assertEqual(live.items[0].placeholder_tensor.stride(), a.stride())
            for residue in (0, 8):
                copy = live_inputs.copy_at(a, residue)
                self.assertEqual((copy, copy.stride(), copy.data_ptr() % 512), (a, a.stride(), residue))

    def test_a_misaligned_input_is_copied_for_the_call(self):
        for recorded, given_, fitting, mutated in ((0, 16, 0, ()), (0, 16, 0, (0,)), (68, 72, 132, ())):
            live, graph = self.replayable(self.one_kernel(), at(recorded), mutated=mutated)
            a = at(given_)
            before = a.clone()
            for count in (1, 2):  # the same address once more: it is copied once more
                self.begin(live, a)
                copy = live.addresses.temporary[0]
                self.assertEqual((graph.launch(), copy.data_ptr() % 512), ([[copy.data_ptr()]], recorded))
                self.assertNotEqual(copy.data_ptr(), a.data_ptr())
                self.assertEqual((copy, live.addresses.extra_copies), (a, count))
                copy.add_(1)
                live.finish()
                self.assertEqual(a, before + count if mutated else before)
            a = at(fitting)  # the same modulo 16
            self.assertEqual(self.call(live, graph, a), [[a.data_ptr()]])
            self.assertEqual((live.addresses.extra_copies, live.addresses.extra_copied_bytes), (2, 2 * before.nbytes))

    def test_zeros_without_memory_are_copied_for_the_call(self):
        """They have no address: a kernel that is given 0, or an offset from 0, reads at that address."""
        for shape, stride, offset in (
            ((4, 8), (8, 1), 0),
            ((32,), (1,), 0),
            ((2, 4, 4), (1, 2, 8), 0),
            ((32,), (1,), 128),  # as autograd cuts them; their address is 512, which fits
        ):
            live, graph = self.replayable(self.one_kernel(), at(0, shape))
            for number in range(3):
                zeros = torch._efficientzerotensor(256).as_strided(shape, stride, offset)
                self.begin(live, zeros)
                self.assertEqual((zeros._is_zerotensor(), zeros.data_ptr()), (True, 4 * offset))
                copy = live.addresses.temporary[0]
                self.assertEqual((graph.launch(), copy), ([[copy.data_ptr()]], torch.zeros(shape)))
                self.assertNotEqual(copy.data_ptr(), zeros.data_ptr())
                live.finish()
                self.assertEqual(live.addresses.extra_copies, number + 1)
                a = at(0, shape)
                self.assertEqual(self.call(live, graph, a), [[a.data_ptr()]])

    def test_an_address_in_the_middle_of_an_input_stays_aligned(self):
        """A kernel was chosen for the alignment of that address, not of the first element's."""
        live, graph = self.replayable(lambda found: [self.api.make_kernel([found[0], found[0] + 112])], at(16))
        for residue, copies in ((0, 1), (32, 2), (144, 2), (16, 2)):
            a = at(residue)
            self.begin(live, a)
            first, second = graph.launch()[0]
            self.assertEqual((second - first, second % 128, live.addresses.extra_copies), (112, 0, copies))
            self.assertEqual(first == a.data_ptr(), residue % 128 == 16)
            live.finish()

    def test_a_call_inside_a_change_of_addresses_is_passed_over(self):
        """A finalizer can make such a call. The graph still holds the addresses it is believed to hold."""
        live, graph = self.replayable(self.one_kernel(), at(0))
        a, b = at(0), at(0)
        original, answers = live.addresses._why_not, []

        def why_not(inputs):
            if not answers:
                answers.append(None)
                answers[:] = [live.addresses.prepare([b])]
            return original(inputs)

        with mock.patch.object(live.addresses, "_why_not", why_not):
            self.assertIsNone(live.addresses.prepare([a]))
        self.assertRegex(answers[0], "another call")
        for given_ in (a, a, b):
            self.assertEqual(self.call(live, graph, given_), [[given_.data_ptr()]])

    def test_managed_inputs_that_stay_are_patched(self):
        h, g = at(0), at(0)
        self.put_in_pool(h, g)
        live, graph = self.record(self.one_kernel(), h, managed=[0])
        self.assertEqual(graph.launch()[0], [h.data_ptr()])
        live.finish()
        for tensor, stays in ((h, True), (g, True), (g, False), (g, True), (h, False)):
            self.assertIsNone(live.addresses.prepare([tensor], stays=lambda t, answer=stays: answer))
            live.take([tensor])
            ((launched,),) = graph.launch()
            self.assertEqual(launched == tensor.data_ptr(), stays)
            self.assertEqual(self.pool.holds(launched), stays)
            live.finish()
        self.assertEqual(live.addresses.extra_copies, 2)

    def test_an_interrupt_leaves_known_addresses(self):
        apply = live_inputs.Patches.apply

        def before(patches, *addresses):
            raise KeyboardInterrupt

        def after(patches, *addresses):
            apply(patches, *addresses)
            raise KeyboardInterrupt

        for interrupted in (before, after):
            a, b = at(0), at(0)
            live, graph = self.replayable(self.one_kernel(), a)
            self.assertEqual(self.call(live, graph, a), [[a.data_ptr()]])
            with mock.patch.object(live_inputs.Patches, "apply", interrupted), self.assertRaises(KeyboardInterrupt):
                live.addresses.prepare([b])
            self.assertEqual(self.call(live, graph, a), [[a.data_ptr()]])

    def test_a_negated_tangent_or_a_conjugate_view_is_passed_over(self):
        """Dynamo guards a forward's inputs, but nothing guards tangents."""
        real, imaginary = at(0, (4,)), torch.zeros(8, dtype=torch.complex64)
        for plain, view, is_of_backward, expected in (
            (real, torch._neg_view(real), True, "an input is a negated view"),
            (real, torch._neg_view(real), False, None),
            (imaginary, imaginary.conj(), False, "an input is a conjugate view"),
        ):
            live, _ = self.choose(plain)
            live.is_of_backward = is_of_backward
            graph = self.capture(self.one_kernel(), live)
            live.set_up(graph)
            live.finish()
            for _ in range(2):  # also once it is settled
                self.assertEqual(self.call(live, graph, plain), [[plain.data_ptr()]])
                self.assertEqual(live.addresses.prepare([view]), expected)

    def test_an_input_that_was_copied_for_a_call_can_die_before_the_launch(self):
        live, _ = self.replayable(self.one_kernel(), at(0), at(0))
        inputs = [at(0), at(68), None]  # the second is copied for the call
        kept, gone = weakref.ref(inputs[0]), weakref.ref(inputs[1])
        self.assertIsNone(live.addresses.prepare(inputs))
        live.take(inputs, only_ours=True)
        self.assertEqual(inputs, [None] * 3)
        self.assertEqual((kept() is None, gone() is None), (False, True))
        live.finish()
        self.assertIsNone(kept())

    def test_addresses_of_earlier_calls_may_come_back_in_any_order(self):
        """This holds however many addresses there were."""
        live, graph = self.record(self.one_kernel(), at(0), at(16))
        pairs = [(at(0), at(16)) for _ in range(5)]
        with mock.patch.object(addresses, "_MOST_KNOWN", 3), mock.patch.object(addresses, "_MOST_FITTING", 2):
            for turn in (0, 1, 0, 1, 2, 3, 4, 3, 0, 4, 4, 2):
                a, b = pairs[turn]
                self.assertEqual(self.call(live, graph, a, b), [[a.data_ptr(), b.data_ptr()]])
                self.assertLessEqual(len(live.addresses._known), 3)
            a, b = pairs[0][0], pairs[1][1]  # each was there before, never together
            self.assertEqual(self.call(live, graph, a, b), [[a.data_ptr(), b.data_ptr()]])
        self.assertEqual(live.addresses.extra_copies, 0)

    def test_a_mutated_input_in_the_pool_is_refused(self):
        """Whether it is patched or copied back, it would overwrite what the graph put in the pool."""
        h = at(0)
        self.put_in_pool(h)
        for hides in (False, True):
            nodes = (lambda found: [self.api.make_kernel(found[1:])]) if hides else self.one_kernel()
            live, graph = self.replayable(nodes, at(0), at(0), mutated=[0])
            before = graph.launch()
            self.api.calls.clear()
            self.assertEqual(live.addresses.prepare([h, at(0)]), IN_POOL)
            self.assertEqual((graph.launch(), self.api.calls, live.addresses.refused), (before, [], {}))
            a, b = at(0), at(0)
            self.assertEqual(self.call(live, graph, a, b)[0][-1], b.data_ptr())
            self.assertIsNone(live.addresses.prepare([a, h]))

    def test_a_call_that_is_prepared_and_not_made_leaves_no_trace(self):
        for mutated in ((), (0,)):
            live, graph = self.replayable(self.one_kernel(), at(0), at(0), mutated=mutated)
            a, b = at(16), at(0)
            self.assertIsNone(live.addresses.prepare([a, at(0)]))
            copy = weakref.ref(live.addresses.temporary[0])
            live.drop()
            self.assertIsNone(copy())
            self.assertIsNone(live.addresses.prepare([a, at(0)]))
            c = at(0)
            expected = c.clone()
            self.assertEqual((self.call(live, graph, c, b), c), ([[c.data_ptr(), b.data_ptr()]], expected))
            self.assertIsNone(live.addresses.prepare([a, at(0)]))
            a.add_(1)  # after the copy for the call that was not made
            self.begin(live, a, b)
            self.assertEqual(graph.launch(), [[live.addresses.temporary[0].data_ptr(), b.data_ptr()]])
            self.assertEqual(live.addresses.temporary[0], a)
            live.finish()

    @settings(max_examples=60, deadline=None)
    @given(CALLS, st.booleans())
    def test_any_sequence_of_calls(self, calls, with_copy):
        self.check_any_sequence_of_calls(calls, with_copy)

    def check_any_sequence_of_calls(self, calls, with_copy):
        """A patched input, a patched and mutated one, and a copied one; each is one of few, some in the pool."""
        self.restart()
        tensors = {(n, residue): at(residue) for n in range(4) for residue in (0, 16, 4)}
        self.put_in_pool(*(t for (n, _), t in tensors.items() if n == 3))
        live, graph = self.record(
            lambda found: [
                self.api.make_kernel(found[:2]),
                self.api.make_memcpy(found[0], OTHER, 8) if with_copy else self.api.make_kernel([found[0], OTHER]),
            ],
            *(at(0) for _ in range(3)),
            mutated=[1],
        )
        live.finish()
        for places in calls:
            inputs = [tensors[place] for place in places]
            if places[1][0] == 3:
                self.assertEqual(live.addresses.prepare(inputs), IN_POOL)
                continue
            before = [t.clone() for t in inputs]
            self.begin(live, *inputs)
            launched, read = graph.launch(), [live.addresses.temporary.get(i, inputs[i]) for i in (0, 1)]
            for (n, residue), tensor, t in zip(places, inputs, read, strict=False):
                self.assertEqual(t is tensor, residue == 0 and n != 3)
            self.assertEqual(launched, [[t.data_ptr() for t in read], [read[0].data_ptr(), OTHER]])
            self.assertEqual([*read, live.items[2].placeholder_tensor], before)
            self.assertTrue(all(t.data_ptr() % 512 == 0 for t in read))
            read[1].add_(1)
            live.finish()
            self.assertEqual(inputs[1], before[1] + 1)


class TestOutputs(LiveInputsTestCase):
    """Rule 1: outputs in the memory of live inputs."""

    VIEW = ((4,), (2,), 8, torch.float32)

    def test_an_output_is_a_view_of_the_input_of_its_call(self):
        a = at(0)
        live, _ = self.record(self.one_kernel(), a)
        for a_now in (a, at(0), at(16)):
            if a_now is not a:
                self.begin(live, a_now)
            view = live.output(0, self.VIEW)
            self.assertIs(live.output(0, None), a_now)
            self.assertEqual(view.data_ptr(), a_now.data_ptr() + 32)
            self.assertEqual(view.untyped_storage().data_ptr(), a_now.untyped_storage().data_ptr())
            live.finish()
            self.assertEqual(view, a_now.flatten()[8:16:2])

    def in_dtype(self, live: LiveInputs, view: tuple[Any, ...]) -> Any:
        """What torch would make an output in another dtype than its input's from."""
        name = "_construct_CUDA_Tensor_From_Storage_And_Metadata"
        with mock.patch.object(torch._C, name, lambda metadata, storage: (metadata, storage), create=True):
            return live.output(0, view)

    def test_an_output_may_be_a_view_in_another_dtype(self):
        a = torch.rand(64)[16:48]
        live, _ = self.record(self.one_kernel(), a)
        for dtype, itemsize in ((torch.float16, 2), (torch.complex64, 8)):
            metadata, storage = self.in_dtype(live, ((8,), (1,), 3, dtype))
            self.assertEqual(storage.data_ptr(), a.untyped_storage().data_ptr())
            self.assertEqual((metadata["data_ptr"], metadata["nbytes"]), (storage.data_ptr(), 256))
            self.assertEqual(metadata["storage_offset"] * itemsize, 16 * 4 + 3 * itemsize)
            self.assertEqual((metadata["dtype"], metadata["size"], metadata["stride"]), (dtype, (8,), (1,)))

    def test_an_input_that_is_only_returned_is_not_copied(self):
        for outputs, expected in (({}, UNHELD), ({3: (0, None)}, None)):
            live, _ = self.choose(at(0), at(0))
            live.outputs.update(outputs)
            live.set_up(self.capture(lambda found: [self.api.make_kernel(found[1:])], live))
            self.assertEqual(self.routes(live), {0: expected, 1: None})

    def test_an_output_on_an_input_in_the_pool_is_a_view_of_a_copy(self):
        h, a, b = at(0), at(0), at(0)
        for nodes in (self.one_kernel(), lambda found: [self.api.make_kernel(found[1:])]):  # patched, and copied
            live, _ = self.replayable(nodes, a, b)
            self.put_in_pool(h)
            before = h.clone()
            self.begin(live, h, at(0))
            whole, view = live.output(0, None), live.output(0, self.VIEW)
            live.finish()
            h.zero_()  # by the graph
            self.begin(live, at(0), at(0))  # the next call
            self.assertEqual((whole, view), (before, before.flatten()[8:16:2]))
            self.assertEqual(view.data_ptr(), whole.data_ptr() + 32)
            h.copy_(before)

    def test_a_view_is_of_a_copy_if_the_input_has_no_such_elements(self):
        """Un-graphed, a misaligned or negated input is copied before it is seen as complex numbers."""
        for nodes in (self.one_kernel(), lambda found: [self.api.make_kernel(found[1:])]):  # patched, and copied
            live, _ = self.replayable(nodes, at(0), at(0))
            for moved in (at(4), torch._neg_view(at(4))):
                self.begin(live, moved, at(0))
                metadata, _ = self.in_dtype(live, ((15,), (1,), 1, torch.complex64))
                copy = live.addresses.temporary[0]
                self.assertEqual(copy, moved)
                self.assertEqual(metadata["data_ptr"] + 8 * metadata["storage_offset"], copy.data_ptr() + 8)
                live.finish()
            self.begin(live, torch._efficientzerotensor((4, 8)), at(0))  # it has no memory in any dtype
            self.assertNotEqual(self.in_dtype(live, (*self.VIEW[:3], torch.float16))[0]["data_ptr"], 0)
            for output in (live.output(0, None), live.output(0, self.VIEW)):
                self.assertFalse(output._is_zerotensor())
                self.assertEqual(output, torch.zeros(output.shape))
            live.finish()


class TestChoice(LiveInputsTestCase):
    """Rules 2, 7 and 8: which inputs are recorded at placeholder addresses."""

    def test_only_candidates_that_are_tensors_and_not_refused_are_chosen(self):
        for inputs, more, indices, reasons in (
            ((at(0), 3, at(0), None, at(0)), {"candidates": [1, 2, 3, 4]}, [2, 4], {}),
            (
                (at(0), at(0)),
                {"refused": {0: "the driver refused its address"}},
                [1],
                {0: "the driver refused its address"},
            ),
        ):
            live, found = self.choose(*inputs, **more)
            self.assertEqual(([item.index for item in live.items], found), (indices, reasons))
            live.release()
        self.api.calls.clear()
        self.assertEqual(self.choose(3, at(0), candidates=[0]), (None, {}))
        with mock.patch.object(choosing, "why_not_placeholder", lambda *args: "it has no elements"):
            self.assertEqual(self.choose(at(0)), (None, {0: "it has no elements"}))
        self.assertEqual([call for call in self.api.calls if call != "cuThreadExchangeStreamCaptureMode"], [])

    def test_inputs_in_the_pool_are_told_from_others(self):
        tensors = [at(0), at(0).as_subclass(OnCuda), at(0)]
        self.put_in_pool(*tensors[1:])
        rule = lambda tensor, device, in_pool: f"in the pool of {device}" if in_pool else None  # noqa: E731
        with mock.patch.object(choosing, "why_not_placeholder", rule):
            live, reasons = self.choose(*tensors, device=2)
        self.assertEqual(([item.index for item in live.items], reasons), ([0, 2], {1: "in the pool of 2"}))
        live.release()

    def test_outputs_are_found_anywhere_in_the_memory_of_an_input(self):
        """If there are gaps between its rows, its memory is larger than its elements."""
        gaps = torch.rand(40)[3:].as_strided((4, 2), (8, 1))
        live, _ = self.record(self.one_kernel(), gaps, at(0), at(0), mutated=[0], refused={0: "told so"})
        (held,) = (item for item in live.items if item.index == 0)
        for part in (
            held.placeholder_tensor,
            held.placeholder_tensor[0],
            held.placeholder_tensor[3],
            held.placeholder_tensor[3, 1:],
            held.placeholder_tensor[:0],
        ):
            self.assertIs(live.item_under(part), held)
        for other in (torch.ones(3), torch.empty(0)):
            self.assertIsNone(live.item_under(other))
        live.release()


class OnCuda(torch.Tensor):
    is_cuda = True


class TestLifetimes(LiveInputsTestCase):
    """Rule 7: which memory is kept, and given back when nothing runs in it."""

    def hidden(self, device: int = 0) -> tuple[LiveInputs, Graph]:
        live, graph = self.replayable(lambda found: ["HOST"], at(0), device=device)
        return live, graph

    def drop(self, recordings: list[Any]) -> None:
        """Lets the recordings die."""
        recordings.clear()
        gc.collect()

    def assertWaitedFor(self, *devices: int) -> None:
        """Memory is held until the next recording waits for these devices."""
        self.assertNotEqual(self.api.leaks(), [])
        self.synchronized.clear()
        self.choose()
        self.assertEqual((self.api.leaks(), sorted(self.synchronized)), ([], list(devices)))
        self.choose()
        self.assertEqual(len(self.synchronized), len(devices))

    def test_memory_of_a_copy_lives_as_long_as_its_graph(self):
        live, graph = self.hidden()
        held = self.api.leaks()
        self.assertEqual(len(held), 1, held)  # a mapping
        self.choose()
        self.assertEqual((self.api.leaks(), self.synchronized), (held, []))
        del live
        gc.collect()
        self.choose()
        self.assertEqual(self.api.leaks(), held)
        del graph
        gc.collect()
        self.assertEqual(self.api.leaks(), held)  # launches may be queued
        self.assertWaitedFor(0)

    def test_memory_is_given_back_with_its_graph_once_nothing_runs_there(self):
        """Nothing waits, and captures elsewhere continue."""
        for calls in (0, 2):
            recordings = [self.hidden()]
            for _ in range(calls):
                self.call(*recordings[0], at(0))
            self.idle = {0}
            self.api.calls.clear()
            self.drop(recordings)
            self.assertEqual((self.api.leaks(), self.synchronized, list(retired._retired)), ([], [], []))
            self.assertEqual({self.api.calls[0], self.api.calls[-1]}, {"cuThreadExchangeStreamCaptureMode"})
            self.assertEqual(self.api.capture_mode, self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def test_each_stream_that_it_was_launched_on_is_asked(self):
        """With more streams than are followed, it is waited for."""
        for others, idle, is_over in (
            *(((7,), {0}, False), ((7,), {7}, False), ((7,), {0, 7}, True)),
            (range(100), set(range(100)), False),
        ):
            recordings = [self.hidden()]
            for self.stream in (*others, 0):
                self.call(*recordings[0], at(0))
            self.idle = idle
            self.synchronized.clear()
            self.drop(recordings)
            self.assertEqual((not self.api.leaks(), self.synchronized), (is_over, []))
            if not is_over:
                self.assertWaitedFor(0)

    def test_it_is_waited_for_if_copies_are_queued_and_nothing_is_launched(self):
        recordings = [self.hidden()]
        self.idle = {0}
        self.begin(recordings[0][0], at(0))
        recordings[0][0].drop()
        self.drop(recordings)
        self.assertWaitedFor(0)

    def test_it_is_kept_while_another_graph_is_captured(self):
        recordings = [self.hidden()]
        self.idle = {0}
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            self.drop(recordings)
            retired.release_retired()
            self.assertNotEqual(self.api.leaks(), [])
        retired.release_retired()
        self.assertEqual((self.api.leaks(), self.synchronized), ([], []))

    def test_it_is_waited_for_if_the_driver_cannot_tell(self):
        for fault in ("query", "call"):
            recordings = [self.hidden()]
            self.idle = {0}
            if fault == "call":
                self.api.fail("cuThreadExchangeStreamCaptureMode")
            with mock.patch.object(Event, "query", side_effect=RuntimeError("captured") if fault == "query" else None):
                self.drop(recordings)
            with mock.patch.object(Event, "query", lambda event: False):
                self.assertWaitedFor(0)

    def test_nobody_is_waited_for_while_another_thread_captures(self):
        """Each device is waited for once, and the lock is held meanwhile."""
        lock, held = threading.Lock(), []

        def synchronize(device):
            held.append(lock.locked())
            self.synchronized.append(device)

        self.drop([self.hidden(device) for device in (1, 2, 1)])
        self.synchronized.clear()
        with (
            mock.patch.object(retired, "capture_lock", lambda: lock),
            mock.patch.object(torch.cuda, "synchronize", synchronize),
        ):
            with lock:
                retired.release_retired()
                self.assertEqual((len(self.api.leaks()), self.synchronized), (3, []))
                self.choose()  # under the lock, as upstream records
                self.assertEqual((self.api.leaks(), sorted(self.synchronized)), ([], [1, 2]))
            self.drop([self.hidden(device) for device in (1, 2)])
            retired.release_retired()
        self.assertEqual((self.api.leaks(), sorted(self.synchronized)), ([], [1, 1, 2, 2]))
        self.assertEqual((held, lock.locked()), ([True] * 4, False))

    def test_a_graph_may_go_while_others_are_given_back(self):
        first, second = self.hidden(), [self.hidden()]
        del first
        gc.collect()
        with mock.patch.object(torch.cuda, "synchronize", lambda device: second.clear() or gc.collect()):
            self.choose()
        self.assertEqual(len(self.api.leaks()), 1)
        self.choose()
        self.assertEqual(self.api.leaks(), [])

    def test_an_unfinished_recording_gives_its_memory_back(self):
        """It gives back its inputs too. One that may have run is waited for."""
        for may_have_run in (False, True):
            inputs = [at(0), at(0, (1024, 1024))]
            given_ = weakref.ref(inputs[0])
            live, _graph = self.record(lambda found: ["HOST"], *inputs) if may_have_run else self.choose(*inputs)
            held = self.api.leaks()
            self.assertNotEqual(held, [])
            live.release()
            inputs.clear()
            self.assertIsNone(given_())
            self.assertEqual((self.api.leaks(), self.synchronized), (held if may_have_run else [], []))
            self.choose()
            self.assertEqual((self.api.leaks(), self.synchronized), ([], [0] * may_have_run))

    def test_a_placeholder_tensor_that_cannot_be_made_leaks_nothing(self):
        for error in (RuntimeError("no"), KeyboardInterrupt()):
            with (
                mock.patch.object(live_input, "placeholder_tensor", side_effect=error),
                self.assertRaises(type(error)),
            ):
                self.choose(at(0))
            self.assertEqual(self.api.leaks(), [])


class TestFailures(LiveInputsTestCase):
    """Rule 10: every call of the driver may fail."""

    SIZES = ((4, 8), (4, 8), (4, 8), (512, 512))
    MUTATED = (1, 2)
    code = CUresult.CUDA_ERROR_OUT_OF_MEMORY

    def inputs(self) -> list[torch.Tensor]:
        return [at(0, size) for size in self.SIZES]

    def assertSame(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        self.assertTrue(all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)))

    def nodes(self, hide: Sequence[int]) -> Nodes:
        """Kernels of both forms, a copy and a fill; no node holds the inputs in ``hide``."""

        def made(found: dict[int, int]) -> list[Any]:
            held = [address for i, address in found.items() if i not in hide]
            return [
                self.api.make_kernel([*held, 5]),
                self.api.make_kernel([b"ab", *held], packed=True),
                self.api.make_memcpy(held[0], held[-1], 64),
                self.api.make_memset(held[-1] + 8, 8),
                "EMPTY",
            ]

        return made

    def attempt(self, hide: Sequence[int], inputs: list[torch.Tensor]) -> tuple[LiveInputs | None, Graph, dict]:
        """Sets up a graph as a recording does; upstream copies inputs that are not live to its own places."""
        live, reasons = self.choose(*inputs, mutated=self.MUTATED)
        places = {i: OTHER + 0x1000 * i for i in reasons}
        places |= {item.index: item.placeholder_tensor.data_ptr() for item in (live.items if live else ())}
        self.assertEqual(sorted(places), list(range(len(inputs))))
        self.assertFalse(set(reasons) & set(self.MUTATED), "a mutation that would be lost")
        graph = Graph(self.api, self.nodes(hide)(dict(sorted(places.items()))))
        if live is not None:
            live.set_up(graph)
        return live, graph, places

    def check_launch(self, live, graph, places, hide, inputs) -> None:
        """The launch of a call reads and writes its inputs."""
        if live is None:
            return
        items = {item.index: item for item in live.items}
        where = dict(places)
        for index, decision in live.decisions.items():
            item = items[index]
            if decision.route is Route.PATCH:
                where[index] = inputs[index].data_ptr()
            else:
                self.assertSame([item.placeholder_tensor], [inputs[index]])
                is_placeholder = isinstance(item.placeholder_tensor, PlaceholderTensor)
                self.assertEqual(self.api.is_mapped(item.recorded), is_placeholder)
        held = [where[i] for i in sorted(where) if i not in hide]
        launched = graph.launch()
        self.assertEqual(launched[0], [*held, 5])
        self.assertEqual(launched[1][1:], held)
        self.assertEqual(launched[2:4], [[held[0], held[-1]], [held[-1] + 8]])
        expected = [t + 1 if i in self.MUTATED else t.clone() for i, t in enumerate(inputs)]
        for index in self.MUTATED:  # as the graph does
            patched = live.decisions[index].route is Route.PATCH
            (inputs[index] if patched else items[index].placeholder_tensor).add_(1)
        live.finish()
        self.assertSame(inputs, expected)

    def recording_calls(self, hide: Sequence[int]) -> Counter[str]:
        self.restart()
        self.attempt(hide, self.inputs())
        calls = [call for call in self.api.calls if call != "cuThreadExchangeStreamCaptureMode"]  # made by finalizers
        return Counter([*calls, "cuCtxGetCurrent"])  # which the fake does not list

    def test_each_call_of_a_recording_may_fail(self):
        """It may fail once, or for good."""
        seen = set()
        for hide in ((), (1,), (0, 1, 2)):
            for call, count in self.recording_calls(hide).items():
                seen.add(call)
                for after, times in (*((after, 1) for after in range(count)), (0, 200)):
                    with self.subTest(hide=hide, call=call, after=after, times=times):
                        self.check_failure(hide, call, after, times)
        nodes = {KERNEL, MEMCPY, MEMSET, POINT_COPY, POINT_FILL}
        self.assertLessEqual({*nodes, "cuMemCreate", "cuMemMap", *GIVING_BACK, "cuCtxGetCurrent"}, seen)

    def check_failure(self, hide: Sequence[int], call: str, after: int, times: int) -> None:
        self.restart()
        for _ in range(times):
            self.api.fail(call, after, self.code)
        inputs = self.inputs()
        with mock.patch.object(retired._log, "warning") as warned:
            # The copy's memory could not be mapped at its address, and the graph's addresses are unknown.
            if times > 1 and hide and call == "cuMemUnmap":
                with self.assertRaisesRegex(DriverError, call):
                    self.attempt(hide, inputs)
                return
            live, graph, places = self.attempt(hide, inputs)
            self.check_launch(live, graph, places, hide, inputs)
            if times == 1:
                self.assertEqual(self.api._failures[call], [])
            if live is not None and (times == 1 or call not in (KERNEL, MEMCPY, MEMSET)):
                for _ in range(2):
                    inputs = self.inputs()
                    self.begin(live, *inputs)
                    self.check_launch(live, graph, places, hide, inputs)
            for reason in self.routes(live).values() if live else ():
                self.assertRegex(reason or "because of this", r"\w+ \w+")
            del live, graph
            self.choose()
        if self.api.leaks():
            self.assertIn(call, GIVING_BACK)
            if times == 1:
                self.assertEqual(warned.call_count, 1)

    def captured(self) -> tuple[LiveInputs, Graph, list[torch.Tensor]]:
        """A recording before it is set up, after a restart."""
        self.restart()
        inputs = self.inputs()
        live, _ = self.choose(*inputs, mutated=self.MUTATED)
        return live, self.capture(lambda found: self.nodes(())(dict(enumerate(found))), live), inputs

    def test_copies_that_cannot_be_set_are_pointed_back_at_the_placeholders(self):
        for call, times, instances in (
            (POINT_COPY, 1, 1),
            (POINT_COPY, 20, 1),
            (POINT_FILL, 1, 1),
            (POINT_FILL, 20, 1),
            ("cuCtxGetCurrent", 1, 2),
            (KERNEL, 1, 2),
            (MEMSET, 1, 2),
        ):
            with self.subTest(call=call, times=times):
                live, graph, inputs = self.captured()
                for _ in range(times):
                    self.api.fail(call, 0, self.code)
                live.set_up(graph)
                self.check_all_copied(live, graph, inputs, instances)

    def test_copies_are_pointed_back_where_the_graph_cannot_be_instantiated(self):
        live, graph, inputs = self.captured()
        instantiate, pointed = graph.instantiate, []

        def refused_once() -> None:
            if graph.instances == 0:
                graph.instances += 1
                pointed.append(self.driver.memset_node(graph._nodes[3]).target)
                raise DriverError(call="cuGraphInstantiate", code=self.code.name)
            instantiate()

        graph.instantiate = refused_once
        live.set_up(graph)
        self.assertEqual(pointed, [inputs[3].data_ptr() + 8])
        self.check_all_copied(live, graph, inputs, 2)

    def check_all_copied(self, live, graph, inputs, instances) -> None:
        placeholders = [item.recorded for item in live.items]
        self.assertEqual({decision.route for decision in live.decisions.values()}, {Route.COPY})
        self.assertEqual(graph.instances, instances)
        self.assertEqual(graph.launch()[2:], [[placeholders[0], placeholders[3]], [placeholders[3] + 8]])
        self.assertTrue(all(self.api.is_mapped(placeholder) for placeholder in placeholders))
        self.check_launch(live, graph, dict(enumerate(placeholders)), (), inputs)

    def test_without_memory_for_a_copy_nothing_is_launched(self):
        """In that case nothing is recorded, nothing is launched, and nothing is lost."""
        live, _ = self.choose(*self.inputs())
        graph = Graph(self.api, ["HOST"])
        for _ in range(20):
            self.api.fail("cuMemCreate", 0, self.code)
        with self.assertRaisesRegex(DriverError, "cuMemCreate"):
            live.set_up(graph)
        self.assertEqual(graph.instances, 0)
        live.release()
        self.choose()
        self.assertEqual(self.api.leaks(), [])

    def test_memory_that_the_allocator_held_is_taken_from_it(self):
        """It is taken for a copy, and for placeholders if the driver is out of memory."""
        live, _ = self.choose(*self.inputs())
        self.api.fail("cuMemCreate", 0, self.code)
        with mock.patch.object(torch.cuda, "empty_cache") as emptied:
            live.set_up(Graph(self.api, ["HOST"]))
        emptied.assert_called_once_with()
        self.assertEqual({d.route for d in live.decisions.values()}, {Route.COPY})
        for code, calls in ((self.code, 1), (CUresult.CUDA_ERROR_NOT_SUPPORTED, 0)):
            self.restart()
            self.api.fail("cuMemCreate", 0, code)
            with mock.patch.object(torch.cuda, "empty_cache") as emptied:
                live, reasons = self.choose(*self.inputs(), mutated=self.MUTATED)
            self.assertEqual((emptied.call_count, live.has_placeholders), (calls, bool(calls)))
            self.assertEqual(sorted(reasons), [] if calls else [0, 3])

    def test_an_interrupt_while_memory_is_waited_for_loses_none(self):
        live, graph = self.record(lambda a: [self.api.make_kernel(a), "HOST"], at(0))
        del live, graph
        self.assertNotEqual(self.api.leaks(), [])
        with (
            mock.patch.object(torch.cuda, "synchronize", side_effect=KeyboardInterrupt),
            self.assertRaises(KeyboardInterrupt),
        ):
            retired.release_retired()
        retired.release_retired()
        self.assertEqual(self.api.leaks(), [])

    def test_each_call_of_a_replay_may_fail(self):
        def recorded():
            self.restart()
            live, graph, _ = self.attempt((), self.inputs())
            live.finish()
            self.api.calls.clear()
            return live, graph

        live, _ = recorded()
        self.assertIsNone(live.addresses.prepare(self.inputs()))
        calls = Counter(self.api.calls)
        self.assertEqual(calls, Counter([KERNEL, KERNEL, MEMCPY, MEMSET]))
        for call, after in ((call, after) for call, count in calls.items() for after in range(count)):
            with self.subTest(call=call, after=after):
                live, _ = recorded()
                self.api.fail(call, after, self.code)
                inputs = [at(4), *self.inputs()[1:]]  # the first one is copied for the call
                why = live.addresses.prepare(inputs)
                self.assertRegex(str(why), f"^{call} refused an address of input .: {self.code.name}$")
                self.assertEqual(live.addresses.temporary, {})
                ((index, reason),) = live.addresses.refused.items()
                self.assertRegex(reason, f"^the driver refused its address: {call}")
                # Later calls are refused whatever their inputs: some nodes hold new addresses, and some old ones.
                self.api.calls.clear()
                for given in (inputs, self.inputs()):
                    self.assertEqual(live.addresses.prepare(given), "a driver call failed")
                self.assertEqual(self.api.calls, [])
                # The next recording does not use the address of this input.
                again, reasons = self.choose(*self.inputs(), mutated=self.MUTATED, refused=live.addresses.refused)
                again.set_up(Graph(self.api, self.nodes(())({i.index: i.recorded for i in again.items})))
                expected = dict.fromkeys(range(4)) | live.addresses.refused
                self.assertEqual(reasons | self.routes(again), expected)
                self.assertEqual(reasons, {} if index in self.MUTATED else live.addresses.refused)


if __name__ == "__main__":
    run_tests()
