"""Live inputs of a recording, on a driver that checks its callers: each launch reads the inputs of its call.

Inputs and their placeholder tensors are CPU tensors; the latter report placeholder addresses. A launch would read what
the instantiated graph holds at that time: the address of an input, of a copy, or of a placeholder tensor.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_driver import CUresult, FakeApi
from fake_native import addresses_over
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.copy_nodes import MemsetNode
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection import choosing, live_input, retired
from pygraph_trees.indirection import inputs as live_inputs
from pygraph_trees.indirection.choosing import choose
from pygraph_trees.indirection.inputs import LiveInputs
from pygraph_trees.indirection.pool import PoolRanges
from pygraph_trees.indirection.routes import Route
from pygraph_trees.reasons import Reason

KERNEL, MEMCPY, MEMSET = (f"cuGraphExec{kind}NodeSetParams" for kind in ("Kernel", "Memcpy", "Memset"))
POINT_COPY, POINT_FILL = (f"cuGraph{kind}NodeSetParams" for kind in ("Memcpy", "Memset"))
OTHER = 0x7A00_0000_0000  # an address that nothing has
IN_POOL = "a mutated input is in the graph pool"
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
    made = torch.empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.shape, tensor.stride())
    made = made.as_subclass(PlaceholderTensor)
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
    """A captured graph; launching it returns what its nodes hold, and replaying it notes that."""

    def __init__(self, api: FakeApi, nodes: Sequence[Any]) -> None:
        self._api = api
        self._nodes = [node for node in nodes if isinstance(node, int)]
        self._graph = api.make_graph(*nodes)
        self.instances, self.launched = 0, list[list[list[int]]]()
        self._exec: int | None = None
        self.refuses: list[Exception] = []  # raised by attempts to instantiate it

    def raw_cuda_graph(self) -> int:
        return self._graph

    def instantiate(self) -> None:
        self.instances += 1
        if self.refuses:
            raise self.refuses.pop()
        self._exec = self._api.instantiate(self._graph)

    def raw_cuda_graph_exec(self) -> int:
        if self._exec is None:
            raise RuntimeError("You cannot access it until instantiate() has been called")
        return self._exec

    def launch(self) -> list[list[int]]:
        return [words(self._api.exec_parameters(self._exec, node)) for node in self._nodes]

    def replay(self) -> None:
        self.launched.append(self.launch())


class Event:
    """An event after the latest launch on a stream; it is over if the test case says that the GPU is idle there."""

    def __init__(self, test: LiveInputsTestCase) -> None:
        self.test = test

    def record(self, stream: Any) -> None:
        self.stream = stream.cuda_stream

    def query(self) -> bool:
        return self.stream in self.test.idle


class LiveInputsTestCase(TestCase):
    native = False  # whether kernels are set in C

    def setUp(self) -> None:
        super().setUp()
        self.restart()
        self.synchronized: list[int] = []  # the devices that were waited for
        self.stream = 0  # the current one
        self.idle: set[int] = set()  # streams on which all launches are over
        self.enterContext(mock.patch.object(live_input, "placeholder_tensor", placeholder_tensor))
        self.enterContext(mock.patch.object(choosing, "why_not_placeholder", lambda tensor, device, in_pool: None))
        current = lambda device: SimpleNamespace(cuda_stream=self.stream, synchronize=lambda: None)  # noqa: E731
        streams = {"current_stream": current, "is_current_stream_capturing": lambda: False}
        devices = {"synchronize": self.synchronized.append, "device": lambda device: contextlib.nullcontext()}
        self.enterContext(mock.patch.multiple(torch.cuda, **streams, **devices, Event=lambda: Event(self)))
        self.addCleanup(retired._retired.clear)

    def restart(self) -> None:
        """Makes a new driver and a new pool."""
        retired._retired.clear()
        _rooms.clear()
        self.api = FakeApi()
        self.driver = Driver(self.api)
        if self.native:
            self.driver.address_of = addresses_over(self.api)
        self.segments: list[dict[str, int]] = []
        self.snapshot = mock.Mock(side_effect=lambda: self.segments)
        self.pool = PoolRanges(self.snapshot)

    def put_in_pool(self, *tensors: torch.Tensor) -> None:
        self.segments += [{"address": t.data_ptr(), "total_size": t.nbytes} for t in tensors]
        self.pool.forget()

    def choose(self, *inputs: Any, device: int = 0, candidates: Sequence[int] | None = None, **more: Any) -> Any:
        """Live inputs, and why the other candidates are copied."""
        before = list(inputs)
        indices = range(len(inputs)) if candidates is None else candidates
        chosen = choose(self.driver, device, before, indices, pool=self.pool, **{"mutated": (), "refused": {}} | more)
        self.assertEqual([id(value) for value in before], [id(value) for value in inputs])
        return chosen

    def record(
        self, nodes: Nodes, *inputs: Any, outputs: Any = (), is_of_backward: bool = False, **more: Any
    ) -> tuple[LiveInputs, Graph]:
        """A recording that is about to be launched for the first time."""
        live, reasons = self.choose(*inputs, **more)
        self.assertEqual(reasons, {})
        assert live is not None
        live.outputs.update(outputs)
        live.is_of_backward = is_of_backward
        graph = self.capture(nodes, live)
        live.set_up(graph)
        return live, graph

    def replayable(self, *given: Any, **more: Any) -> tuple[LiveInputs, Graph]:
        """A recording, as :meth:`record` makes it, that was launched once."""
        live, graph = self.record(*given, **more)
        live.finish()
        return live, graph

    def capture(self, nodes: Nodes, live: LiveInputs) -> Graph:
        items = sorted(live.items, key=lambda item: item.index)
        return Graph(self.api, nodes([item.placeholder_tensor.data_ptr() for item in items]))

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

    def first_unheld(self, addresses: list[int]) -> list[int]:
        """The nodes of a graph in which no node holds the first address."""
        return [self.api.make_kernel(addresses[1:])]

    def check_call(self, live: LiveInputs, graph: Graph, *inputs: torch.Tensor) -> None:
        """The launch of a call with these inputs has their addresses."""
        self.assertEqual(self.call(live, graph, *inputs), [[t.data_ptr() for t in inputs]])


class TestAddresses(LiveInputsTestCase):
    """Rules 3 to 6: which addresses a graph holds."""

    def test_each_launch_has_its_addresses_and_unchanged_ones_cost_no_call(self):
        for packed in (False, True):
            live, graph = self.record(self.one_kernel(packed=packed), a := at(0), b := at(0))
            self.assertEqual((self.routes(live), self.api.leaks()), ({0: None, 1: None}, []))
            self.assertEqual(graph.launch(), [[a.data_ptr(), b.data_ptr()]])
            live.finish()
            for _ in range(3):
                a, b = at(0), at(0)
                self.check_call(live, graph, a, b)
            self.assertEqual((live.addresses.extra_copies, graph.instances), (0, 1))
            self.api.calls.clear()
            self.pool.forget()
            self.snapshot.reset_mock()
            for _ in range(3):
                self.check_call(live, graph, a, b)
            self.assertEqual((self.api.calls, self.snapshot.call_count), ([], 1))  # the pool is looked up again, once
            self.check_call(live, graph, a, at(0))
            self.assertEqual(self.api.calls, [KERNEL])

    def test_an_aligned_input_is_not_copied_to_where_a_misaligned_one_was_recorded(self):
        for nodes, copies in ((self.one_kernel(), [0]), (self.first_unheld, [])):
            live, graph = self.replayable(nodes, at(4), at(0))
            for _ in range(2):
                self.assertEqual(live.addresses.prepare([at(512), at(0)]), Reason.BETTER_ALIGNED())
                self.call(live, graph, at(4), at(0))
            self.assertIsNone(live.addresses.prepare([at(8), at(0)]))
            self.assertEqual(list(live.addresses.temporary), copies)

    def test_a_thread_that_has_not_used_the_gpu_is_given_a_context(self):
        """Without one the driver crashes when nodes are set. If it is refused, the recording is passed over."""
        live, graph = self.replayable(self.one_kernel(), at(0), at(0))
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self.check_call, live, graph, at(0), at(0)).result()
        self.check_call(live, graph, at(0), at(0))
        self.assertEqual(self.api.calls.count("cuCtxSetCurrent"), 1)
        for _ in range(2):  # C++ leaves it to Python, which asks again
            self.api.fail("cuCtxGetCurrent")
        self.assertIn("cuCtxGetCurrent", live.addresses.prepare([at(0), at(0)]))
        self.assertEqual(live.addresses.prepare([at(0), at(0)]), "a driver call failed")

    def test_an_address_in_the_storage_of_a_current_input_is_reached(self):
        first, later, other = at(0)[:8], at(0), at(0)
        live, graph = self.record(self.one_kernel(), first, other)
        # The whole storage counts: a tensor saved for the backward can be another view of the input.
        begin, nbytes = first.untyped_storage().data_ptr(), first.untyped_storage().nbytes()
        inside = [begin, first.data_ptr(), begin + nbytes - 1, other.data_ptr()]
        self.assertEqual(list(filter(live.addresses.reaches, (*inside, 0, begin - 1, begin + nbytes))), inside)
        live.finish()
        self.call(live, graph, later, other)
        self.assertEqual([live.addresses.reaches(t.data_ptr()) for t in (first, later, other)], [False, True, True])

    def test_after_an_interrupted_instantiation_none_is_used(self):
        """Torch destroys the one before first."""
        live, graph = self.replayable(self.one_kernel(), at(0), at(0))
        with mock.patch.object(graph, "instantiate", side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, live.instantiate_again, graph)
        self.assertEqual(live.addresses.prepare([at(0), at(0)]), Reason.BROKEN())
        live.instantiate_again(graph)
        self.check_call(live, graph, at(0), at(0))

    def test_another_instantiation_gets_all_addresses_of_the_next_call(self):
        def nodes(found):
            return [self.api.make_kernel(found), self.api.make_memcpy(found[0], OTHER, 8)][: 2 - is_fast]

        for is_fast in (False, True):  # C++ sets kernels alone
            a, b, other = at(0), at(0), at(0)
            live, graph = self.replayable(nodes, a, b)
            self.call(live, graph, other, b)
            for first, copied in ((a, other), (a, a), (other, a)):
                live.instantiate_again(graph)
                if not is_fast:  # memory that is gone would be refused
                    self.assertEqual(graph.launch()[1], [copied.data_ptr(), OTHER])
                native = live.addresses.native
                if native is not None and is_fast:
                    self.assertFalse(native.patch([first.data_ptr(), b.data_ptr()]))
                for again in (first, other, a):
                    expected = [[again.data_ptr(), b.data_ptr()], [again.data_ptr(), OTHER]][: 2 - is_fast]
                    self.assertEqual(self.call(live, graph, again, b), expected)
                if self.native and native is not None and is_fast:
                    self.assertTrue(native.patch([other.data_ptr(), b.data_ptr()]))
                    self.assertEqual(graph.launch(), [[other.data_ptr(), b.data_ptr()]])

    def test_all_consumers_of_an_input_agree(self):
        """A copy node may join a patched input and a copied one."""

        # The last kernel holds the second input's address where it may be something else.
        def nodes(found):
            hidden = self.api.make_kernel([b"\1\0\0\0" + found[1].to_bytes(8, "little")])
            return [self.api.make_kernel(found), self.api.make_memcpy(found[0], found[1], 64), hidden]

        live, graph = self.replayable(nodes, a := at(0), at(0))
        self.assertIsNone(self.routes(live)[0])
        self.assertRegex(str(self.routes(live)[1]), "may be something else")
        self.assertEqual(graph.launch()[:2], [[a.data_ptr(), live.items[1].recorded]] * 2)
        a = at(0)
        self.assertEqual(self.call(live, graph, a, at(0))[:2], [[a.data_ptr(), live.items[1].recorded]] * 2)

    def test_a_view_is_recorded_with_its_storage_or_without(self):
        storage = torch.rand(1 << 12)
        for whole in (1 << 20, 0):
            with mock.patch.object(live_input, "WHOLE_STORAGE", whole):
                live, _ = self.choose(storage[128:256])
            (item,) = live.items
            self.assertEqual(item.lead, 512 if whole else 0)
            reached = item.placeholder_tensor.untyped_storage().data_ptr() if whole else item.recorded
            copy = self.api.make_memcpy(item.recorded + 4, OTHER, 8)
            graph = Graph(self.api, [self.api.make_kernel([item.recorded, reached]), copy])
            live.set_up(graph)
            for start in (128, 256, 0):
                view = storage[start : start + 128] if start else at(storage[128:].data_ptr() % 512, (128,))
                address = view.data_ptr()
                self.assertEqual(self.call(live, graph, view), [[address, address - item.lead], [address + 4, OTHER]])


CALLS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 16, 4])), min_size=3, max_size=3))


class TestCopies(LiveInputsTestCase):
    """Rules 2, 4 and 9: which inputs are copied, when, and which are copied back."""

    def test_an_input_without_a_known_address_is_copied_to_its_placeholder(self):
        hidden = "a host node may hide its address"
        for more, reasons in (([], {0: UNHELD, 1: None}), (["HOST"], {0: hidden, 1: hidden})):
            a, b = at(0), at(0, (1 << 20,))  # not in one granule
            live, graph = self.record(lambda found, more=more: [*self.first_unheld(found), *more], a, b)
            self.assertEqual(self.routes(live), reasons)
            copied = [item for item in live.items if reasons[item.index]]
            self.assertEqual([item for item in live.items if self.api.is_mapped(item.recorded)], copied)
            self.assertEqual([item.placeholder_tensor for item in copied], [a, b][: len(copied)])
            live.finish()
            self.api.calls.clear()
            for _ in range(2):
                inputs = [at(4), b]  # a copy takes any alignment
                before = [t.clone() for t in inputs]
                self.begin(live, *inputs)
                self.assertEqual(graph.launch(), [[live.items[1].recorded if reasons[1] else b.data_ptr()]])
                for item in copied:
                    self.assertEqual(item.placeholder_tensor, before[item.index])
                    item.placeholder_tensor.zero_()
                live.finish()
                self.assertEqual(inputs, before)  # not mutated, so not copied back
            self.assertEqual(self.api.calls, [])

    def test_autograd_does_not_see_that_copies_go_back(self):
        """It does not see what kernels write either: AOTAutograd counts the writes that autograd must see."""
        weight = torch.rand(4, 8, requires_grad=True)
        for nodes, residue in ((self.one_kernel(), 16), (self.first_unheld, 0)):
            live, _ = self.replayable(nodes, at(0), at(0), mutated=[0])
            a = at(residue)
            before, saved, expected = a._version, (weight * a).sum(), a + 1
            self.begin(live, a, at(0))
            live.addresses.temporary.get(0, live.items[0].placeholder_tensor).add_(1)
            live.finish()
            self.assertEqual((a, a._version), (expected, before))
            saved.backward()

    def test_copies_are_made_in_any_mode(self):
        """Tensors made in inference mode cannot be written to outside of it."""
        for recorded_inside, called_inside in itertools.product((True, False), repeat=2):
            with torch.inference_mode(recorded_inside):
                inputs = at(0), at(4), at(0)
                live, _ = self.replayable(self.first_unheld, *inputs, mutated=[1], refused={1: "told so"})
            with torch.inference_mode(called_inside):
                a, b, c = at(0), at(4), at(16)  # copied to a placeholder, copied both ways, copied for the call
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
            live, _ = self.record(self.first_unheld, a := view(), at(0))
            self.assertEqual(live.items[0].placeholder_tensor, a)
            self.assertEqual(live.items[0].placeholder_tensor.stride(), a.stride())
            for residue in (0, 8):
                copy = live_inputs.copy_at(a, residue)
                self.assertEqual((copy, copy.stride(), copy.data_ptr() % 512), (a, a.stride(), residue))

    def test_an_input_that_does_not_fit_is_copied_for_the_call(self):
        """Zeros without memory have no address: a kernel that is given 0, or an offset from it, would read there."""
        zeros = torch._efficientzerotensor(256)
        cut = zeros[128:160]  # as autograd does it; the address is 512, which would fit
        self.assertEqual((cut._is_zerotensor(), cut.data_ptr()), (True, 512))
        for recorded, given_, fitting, mutated in (
            (at(0), at(16), at(0), ()),
            (at(0), at(16), at(0), (0,)),
            (at(68), at(72), at(132), ()),  # the last one is the same modulo 16
            (at(0), zeros.as_strided((4, 8), (8, 1)), at(0), ()),
            (at(0, (2, 4, 4)), zeros.as_strided((2, 4, 4), (1, 2, 8)), at(0, (2, 4, 4)), ()),
            (at(0, (32,)), cut, at(0, (32,)), ()),
        ):
            live, graph = self.replayable(self.one_kernel(), recorded, mutated=mutated)
            seen = torch.zeros(given_.shape) if given_._is_zerotensor() else given_.clone()
            for count in (1, 2):  # the same address once more: it is copied once more
                self.begin(live, given_)
                copy, address = live.addresses.temporary[0], live.addresses.temporary[0].data_ptr()
                self.assertEqual((graph.launch(), address % 512), ([[address]], recorded.data_ptr() % 512))
                self.assertNotEqual(address, given_.data_ptr())
                self.assertEqual((copy, live.addresses.extra_copies), (seen, count))
                copy.add_(1)
                live.finish()
                seen += 1 if mutated else 0
                self.assertEqual(given_, seen)
                self.check_call(live, graph, fitting)
            self.assertEqual((live.addresses.extra_copies, live.addresses.extra_copied_bytes), (2, 2 * seen.nbytes))

    def test_an_address_in_the_middle_of_an_input_stays_aligned(self):
        """A kernel was chosen for the alignment of that address, not of the first element's."""
        live, graph = self.replayable(lambda found: [self.api.make_kernel([found[0], found[0] + 112])], at(16))
        for residue, copies in ((0, 1), (32, 2), (144, 2), (16, 2)):
            a = at(residue)
            ((first, second),) = self.call(live, graph, a)
            self.assertEqual((second - first, second % 128, live.addresses.extra_copies), (112, 0, copies))
            self.assertEqual(first == a.data_ptr(), residue % 128 == 16)

    def test_a_call_inside_a_change_of_addresses_is_passed_over(self):
        """A finalizer can make such a call. The graph still holds the addresses it is believed to hold."""
        live, graph = self.replayable(self.one_kernel(), at(0))
        a, b = at(0), at(0)
        original, answers = live.addresses._find_all, []

        def find_all(*given_):
            if not answers:
                answers.append(None)
                answers[:] = [live.addresses.prepare([b])]
            return original(*given_)

        with mock.patch.object(live.addresses, "_find_all", find_all):
            self.assertIsNone(live.addresses.prepare([a]))
        self.assertRegex(answers[0], "another call")
        for given_ in (a, a, b):
            self.check_call(live, graph, given_)

    def test_managed_inputs_that_stay_are_patched(self):
        self.put_in_pool(h := at(0), g := at(0))
        live, graph = self.replayable(self.one_kernel(), h, managed=[0])
        self.assertEqual(graph.launch(), [[h.data_ptr()]])
        for tensor, stays in ((h, True), (g, True), (g, False), (g, True), (h, False)):
            self.assertIsNone(live.addresses.prepare([tensor], stays=lambda t, answer=stays: answer))
            live.take([tensor])
            ((launched,),) = graph.launch()
            self.assertEqual((launched == tensor.data_ptr(), self.pool.holds(launched)), (stays, stays))
            live.finish()
        self.assertEqual(live.addresses.extra_copies, 2)

    def test_an_interrupt_leaves_known_addresses(self):
        for before in (lambda *given_: None, live_inputs.Patches.apply):

            def interrupted(*given_, before=before):
                before(*given_)
                raise KeyboardInterrupt

            live, graph = self.replayable(self.one_kernel(), a := at(0))
            self.check_call(live, graph, a)
            with mock.patch.object(live_inputs.Patches, "apply", interrupted), self.assertRaises(KeyboardInterrupt):
                live.addresses.prepare([at(0)])
            self.check_call(live, graph, a)

    def test_a_negated_tangent_or_a_conjugate_view_is_passed_over(self):
        """Dynamo guards a forward's inputs, but nothing guards tangents."""
        real, imaginary = at(0, (4,)), torch.zeros(8, dtype=torch.complex64)
        for plain, view, is_of_backward, expected in (
            (real, torch._neg_view(real), True, Reason.IS_VIEW()),
            (real, torch._neg_view(real), False, None),
            (imaginary, imaginary.conj(), False, Reason.IS_VIEW()),
        ):
            live, graph = self.replayable(self.one_kernel(), plain, is_of_backward=is_of_backward)
            for _ in range(2):  # also once it is settled
                self.check_call(live, graph, plain)
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

    def test_a_mutated_input_in_the_pool_is_refused(self):
        """Whether it is patched or copied back, it would overwrite what the graph put in the pool."""
        self.put_in_pool(h := at(0))
        for nodes in (self.one_kernel(), self.first_unheld):
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
            a, b, c = at(16), at(0), at(0)
            before = c.clone()
            self.assertIsNone(live.addresses.prepare([a, at(0)]))
            copy = weakref.ref(live.addresses.temporary[0])
            live.drop()
            self.assertIsNone(copy())
            self.assertIsNone(live.addresses.prepare([a, at(0)]))
            self.check_call(live, graph, c, b)
            self.assertEqual(c, before)
            self.assertIsNone(live.addresses.prepare([a, at(0)]))
            a.add_(1)  # after the copy for the call that was not made
            self.begin(live, a, b)
            copy = live.addresses.temporary[0]
            self.assertEqual((graph.launch(), copy), ([[copy.data_ptr(), b.data_ptr()]], a))
            live.finish()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors])  # inherited
    @given(CALLS, st.booleans())
    def test_any_sequence_of_calls(self, calls, with_copy):
        """A patched input, a patched and mutated one, and a copied one; each is one of few, some in the pool."""
        self.restart()
        tensors = {(n, residue): at(residue) for n in range(4) for residue in (0, 16, 4)}
        self.put_in_pool(*(t for (n, _), t in tensors.items() if n == 3))

        def nodes(found):
            last = self.api.make_memcpy(found[0], OTHER, 8) if with_copy else self.api.make_kernel([found[0], OTHER])
            return [self.api.make_kernel(found[:2]), last]

        live, graph = self.replayable(nodes, *(at(0) for _ in range(3)), mutated=[1])
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
            self.assertEqual([t.data_ptr() % 512 for t in read], [0, 0])
            read[1].add_(1)
            live.finish()
            self.assertEqual(inputs[1], before[1] + 1)


class TestOutputs(LiveInputsTestCase):
    """Rule 1: outputs in the memory of live inputs."""

    VIEW = ((4,), (2,), 8, torch.float32)

    def test_an_output_is_a_view_of_the_input_of_its_call(self):
        live, _ = self.record(self.one_kernel(), a := at(0))
        for a_now in (a, at(0), at(16)):
            if a_now is not a:
                self.begin(live, a_now)
            view = live.output(0, self.VIEW)
            self.assertIs(live.output(0, None), a_now)
            self.assertEqual(view.data_ptr(), a_now.data_ptr() + 32)
            self.assertEqual(view.untyped_storage().data_ptr(), a_now.untyped_storage().data_ptr())
            live.finish()
            self.assertEqual(view, a_now.flatten()[8:16:2])

    def test_an_input_that_is_only_returned_is_not_copied(self):
        for outputs, expected in (({}, UNHELD), ({3: (0, None)}, None)):
            live, _ = self.record(self.first_unheld, at(0), at(0), outputs=outputs)
            self.assertEqual(self.routes(live), {0: expected, 1: None})

    def test_an_output_on_an_input_in_the_pool_is_a_view_of_a_copy(self):
        for nodes in (self.one_kernel(), self.first_unheld):  # patched, and copied
            live, _ = self.replayable(nodes, at(0), at(0))
            self.put_in_pool(h := at(0))
            before = h.clone()
            self.begin(live, h, at(0))
            whole, view = live.output(0, None), live.output(0, self.VIEW)
            live.finish()
            h.zero_()  # by the graph
            self.begin(live, at(0), at(0))  # the next call
            self.assertEqual((whole, view), (before, before.flatten()[8:16:2]))
            self.assertEqual(view.data_ptr(), whole.data_ptr() + 32)

    def test_an_output_on_a_misaligned_input_is_aligned_as_in_the_recording(self):
        """A backward may have been compiled for that."""
        live, _ = self.record(self.one_kernel(), at(0))
        self.begin(live, given := at(4))
        whole, view = live.output(0, None), live.output(0, self.VIEW)
        live.finish()
        self.assertEqual((whole, view), (given, given.flatten()[8:16:2]))
        self.assertEqual([t.data_ptr() % 16 for t in (given, whole, view)], [4, 0, 0])

    def test_an_output_on_an_input_that_is_overwritten_is_where_the_launch_wrote(self):
        for nodes in (self.one_kernel(), self.first_unheld):  # patched, and copied
            live, _ = self.replayable(nodes, at(0), at(0), overwritten=[0], outputs={0: (0, None)})
            for offset in (0, 4):
                self.begin(live, given := at(offset), at(0))
                copies = live.addresses.temporary, live._copied.get(0)
                written = given if not any(copies) else copies[0].get(0, copies[1] and copies[1].placeholder_tensor)
                written.fill_(7)
                self.assertEqual(live.output(0, None), torch.full((4, 8), 7.0))
                self.assertEqual(bool((given == 7).all()), written is given)
                live.finish()

    def test_a_view_in_another_dtype_is_of_a_copy_if_the_input_has_no_such_elements(self):
        """Un-graphed, a misaligned or negated input is copied before it is seen as complex numbers."""
        make = "_construct_CUDA_Tensor_From_Storage_And_Metadata"  # from metadata and a storage; on a GPU only
        self.enterContext(mock.patch.object(torch._C, make, lambda *made_from: made_from, create=True))
        for nodes in (self.one_kernel(), self.first_unheld):  # patched, and copied
            live, _ = self.record(nodes, a := at(0), at(0))
            metadata, storage = live.output(0, ((8,), (1,), 3, torch.complex64))
            whole = a.untyped_storage()
            self.assertEqual((storage.data_ptr(), metadata["nbytes"]), (whole.data_ptr(), whole.nbytes()))
            self.assertEqual(metadata["data_ptr"] + 8 * metadata["storage_offset"], a.data_ptr() + 24)
            self.assertEqual((metadata["dtype"], metadata["size"], metadata["stride"]), (torch.complex64, (8,), (1,)))
            live.finish()
            for moved in (at(4), torch._neg_view(at(4))):
                self.begin(live, moved, at(0))
                metadata, _ = live.output(0, ((15,), (1,), 1, torch.complex64))
                copy = live.addresses.temporary[0]
                start = metadata["data_ptr"] + 8 * metadata["storage_offset"]
                self.assertEqual((copy, start), (moved, copy.data_ptr() + 8))
                live.finish()
            self.begin(live, torch._efficientzerotensor((4, 8)), at(0))  # it has no memory in any dtype
            self.assertNotEqual(live.output(0, (*self.VIEW[:3], torch.float16))[0]["data_ptr"], 0)
            for output in (live.output(0, None), live.output(0, self.VIEW)):
                self.assertFalse(output._is_zerotensor())
                self.assertEqual(output, torch.zeros(output.shape))
            live.finish()


class TestChoice(LiveInputsTestCase):
    """Rules 2, 7 and 8: which inputs are recorded at placeholder addresses."""

    def test_only_candidates_that_are_tensors_and_not_refused_are_chosen(self):
        refused = {0: "the driver refused its address"}
        for inputs, more, indices, reasons in (
            ((at(0), 3, at(0), None, at(0)), {"candidates": [1, 2, 3, 4]}, [2, 4], {}),
            ((at(0), at(0)), {"refused": refused}, [1], refused),
        ):
            live, found = self.choose(*inputs, **more)
            self.assertEqual(([item.index for item in live.items], found), (indices, reasons))
        self.restart()
        self.assertEqual(self.choose(3, at(0), candidates=[0]), (None, {}))
        with mock.patch.object(choosing, "why_not_placeholder", lambda *args: "it has no elements"):
            self.assertEqual(self.choose(at(0)), (None, {0: "it has no elements"}))
        self.assertEqual(self.api.calls, [])

    def test_inputs_in_the_pool_are_told_from_others(self):
        tensors = [at(0), at(0).as_subclass(type("OnCuda", (torch.Tensor,), {"is_cuda": True})), at(0)]
        self.put_in_pool(*tensors[1:])
        rule = lambda tensor, device, in_pool: f"in the pool of {device}" if in_pool else None  # noqa: E731
        with mock.patch.object(choosing, "why_not_placeholder", rule):
            live, reasons = self.choose(*tensors, device=2)
        self.assertEqual(([item.index for item in live.items], reasons), ([0, 2], {1: "in the pool of 2"}))

    def test_outputs_are_found_anywhere_in_the_memory_of_an_input(self):
        """If there are gaps between its rows, its memory is larger than its elements."""
        gaps = torch.rand(40)[3:].as_strided((4, 2), (8, 1))
        live, _ = self.record(self.one_kernel(), gaps, at(0), at(0), mutated=[0], refused={0: "told so"})
        (held,) = (item for item in live.items if item.index == 0)
        whole = held.placeholder_tensor
        for part in (whole, whole[0], whole[3], whole[3, 1:], whole[:0]):
            self.assertIs(live.storages[part.untyped_storage().data_ptr()], held)
        outside, _ = self.choose(at(0))  # only at placeholder addresses
        for recording, other in ((live, torch.ones(3)), (outside, torch.ones(3)), (live, torch.empty(0))):
            self.assertNotIn(other.untyped_storage().data_ptr(), recording.storages)


class TestLifetimes(LiveInputsTestCase):
    """Rule 7: which memory is kept, and given back when nothing runs in it."""

    def hidden(self, device: int = 0) -> tuple[LiveInputs, Graph]:
        return self.replayable(lambda found: ["HOST"], at(0), device=device)

    def drop(self, *devices: int, streams: Iterable[int] = (), end: Any = LiveInputs.finish) -> None:
        """Lets recordings die; the first one was launched on these streams, or only prepared if ``end`` drops calls."""
        recordings = [self.hidden(device) for device in devices]
        for self.stream in streams:
            self.begin(recordings[0][0], at(0))
            end(recordings[0][0])
        self.api.calls.clear()
        self.synchronized.clear()
        recordings.clear()
        gc.collect()

    def assertWaitedFor(self, *devices: int) -> None:
        """Memory is held until the next recording waits for these devices."""
        self.assertNotEqual(self.api.leaks(), [])
        for _ in range(2):
            self.choose()
            self.assertEqual((self.api.leaks(), sorted(self.synchronized)), ([], list(devices)))

    def test_memory_of_a_copy_lives_as_long_as_its_graph(self):
        kept, held = [*self.hidden()], self.api.leaks()
        self.assertEqual(len(held), 1, held)  # a mapping
        while kept:  # the recording goes first, then its graph
            self.choose()
            self.assertEqual((self.api.leaks(), self.synchronized), (held, []))
            del kept[0]
            gc.collect()
        self.assertEqual(self.api.leaks(), held)  # launches may be queued
        self.assertWaitedFor(0)

    def test_memory_is_given_back_with_its_graph_once_nothing_runs_there(self):
        """Each stream that it was launched on is asked; nothing waits, and captures elsewhere continue."""
        for streams, end, self.idle, is_over in (
            ((), LiveInputs.finish, {0}, True),
            ((0, 0), LiveInputs.finish, {0}, True),
            ((0,), LiveInputs.drop, {0}, False),  # copies are queued, and nothing is launched
            ((7, 0), LiveInputs.finish, {0}, False),
            ((7, 0), LiveInputs.finish, {7}, False),
            ((7, 0), LiveInputs.finish, {0, 7}, True),
            (range(100), LiveInputs.finish, set(range(100)), False),  # more streams than are followed
        ):
            self.drop(0, streams=streams, end=end)
            self.assertEqual((not self.api.leaks(), not retired._retired, self.synchronized), (is_over, is_over, []))
            self.assertEqual({self.api.calls[0], self.api.calls[-1]}, {"cuThreadExchangeStreamCaptureMode"})
            self.assertEqual(self.api.capture_mode, self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
            if not is_over:
                self.assertWaitedFor(0)

    def test_it_is_kept_while_another_graph_is_captured(self):
        self.idle = {0}
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            self.drop(0)
            retired.release_retired()
            self.assertNotEqual(self.api.leaks(), [])
        retired.release_retired()
        self.assertEqual((self.api.leaks(), self.synchronized), ([], []))

    def test_it_is_waited_for_if_the_driver_cannot_tell(self):
        self.idle = {0}
        for fault in ("query", "call"):
            if fault == "call":
                self.api.fail("cuThreadExchangeStreamCaptureMode")
            with mock.patch.object(Event, "query", side_effect=RuntimeError("captured") if fault == "query" else None):
                self.drop(0)
            with mock.patch.object(Event, "query", lambda event: False):
                self.assertWaitedFor(0)

    def test_nobody_is_waited_for_while_another_thread_captures(self):
        """Each device is waited for once, and the lock is held meanwhile."""
        lock, held = threading.Lock(), []

        def synchronize(device):
            held.append(lock.locked())
            self.synchronized.append(device)

        self.enterContext(mock.patch.object(retired, "capture_lock", lambda: lock))
        self.enterContext(mock.patch.object(torch.cuda, "synchronize", synchronize))
        self.drop(1, 2, 1)
        with lock:
            retired.release_retired()
            self.assertEqual((len(self.api.leaks()), self.synchronized), (3, []))
            self.choose()  # under the lock, as upstream records
            self.assertEqual((self.api.leaks(), sorted(self.synchronized)), ([], [1, 2]))
        self.drop(1, 2)
        retired.release_retired()
        self.assertEqual((self.api.leaks(), sorted(self.synchronized)), ([], [1, 2]))
        self.assertEqual((held, lock.locked()), ([True] * 4, False))

    def test_a_graph_may_go_while_others_are_given_back(self):
        second = [self.hidden()]
        self.drop(0)
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

    def test_an_error_or_an_interrupt_leaks_nothing(self):
        """Neither one while a placeholder tensor is made, nor one while memory is waited for."""
        for error in (RuntimeError("no"), KeyboardInterrupt()):
            for target, name, attempt in (
                (live_input, "placeholder_tensor", lambda: self.choose(at(0))),
                (torch.cuda, "synchronize", retired.release_retired),
            ):
                self.drop(0)
                with mock.patch.object(target, name, side_effect=error), self.assertRaises(type(error)):
                    attempt()
                retired.release_retired()
                self.assertEqual(self.api.leaks(), [])


class TestFailures(LiveInputsTestCase):
    """Rule 10: every call of the driver may fail."""

    SIZES = ((4, 8), (4, 8), (4, 8), (512, 512))
    MUTATED = (1, 2)
    hide: tuple[int, ...] = ()
    code = CUresult.CUDA_ERROR_OUT_OF_MEMORY

    def inputs(self) -> list[torch.Tensor]:
        return [at(0, size) for size in self.SIZES]

    def fail(self, call: str, after: int = 0, times: int = 1) -> None:
        for _ in range(times):
            self.api.fail(call, after, self.code)

    def nodes(self, found: Mapping[int, int]) -> list[Any]:
        """Kernels of both forms, a copy and a fill; no node holds the inputs in ``self.hide``."""
        held = [found[index] for index in sorted(found) if index not in self.hide]
        return [
            self.api.make_kernel([*held, 5]),
            self.api.make_kernel([b"ab", *held], packed=True),
            self.api.make_memcpy(held[0], held[-1], 64),
            self.api.make_memset(held[-1] + 8, 8),
            "EMPTY",
        ]

    def attempt(self, inputs: list[torch.Tensor]) -> tuple[LiveInputs | None, Graph]:
        """A captured graph before it is set up; upstream copies inputs that are not live to its own places."""
        live, reasons = self.choose(*inputs, mutated=self.MUTATED)
        self.places = {index: OTHER + 0x1000 * index for index in reasons}
        self.places |= {item.index: item.placeholder_tensor.data_ptr() for item in (live.items if live else ())}
        self.assertEqual(sorted(self.places), list(range(len(inputs))))
        self.assertFalse(set(reasons) & set(self.MUTATED), "a mutation that would be lost")
        return live, Graph(self.api, self.nodes(self.places))

    def check_launch(self, live: LiveInputs, graph: Graph, inputs: list[torch.Tensor]) -> None:
        """The launch of a call reads and writes its inputs."""
        used = {item.index: item.placeholder_tensor for item in live.items}
        where = dict(self.places)
        for item in live.items:
            if live.decisions[item.index].route is Route.PATCH:
                used[item.index] = inputs[item.index]
                where[item.index] = inputs[item.index].data_ptr()
            else:
                self.assertTrue(torch.equal(item.placeholder_tensor, inputs[item.index]))
                is_placeholder = isinstance(item.placeholder_tensor, PlaceholderTensor)
                self.assertEqual(self.api.is_mapped(item.recorded), is_placeholder)
        held = [where[index] for index in sorted(where) if index not in self.hide]
        launched = graph.launch()
        self.assertEqual((launched[0], launched[1][1:]), ([*held, 5], held))
        self.assertEqual(launched[2:4], [[held[0], held[-1]], [held[-1] + 8]])
        expected = [t + 1 if index in self.MUTATED else t.clone() for index, t in enumerate(inputs)]
        for index in self.MUTATED:  # as the graph does
            used[index].add_(1)
        live.finish()
        self.assertTrue(all(map(torch.equal, inputs, expected)))

    def test_each_call_of_a_recording_may_fail(self):
        """It may fail once, or for good."""
        seen = set()
        for self.hide in ((), (1,), (0, 1, 2)):
            self.restart()
            live, graph = self.attempt(self.inputs())
            live.set_up(graph)
            calls = Counter([*self.api.calls, "cuCtxGetCurrent"])  # which the fake does not list
            del live, graph, calls["cuThreadExchangeStreamCaptureMode"]  # made by finalizers
            for call, count in calls.items():
                seen.add(call)
                for after, times in (*((after, 1) for after in range(count)), (0, 200)):
                    with self.subTest(hide=self.hide, call=call, after=after, times=times):
                        self.check_failure(call, after, times)
        nodes = {KERNEL, MEMCPY, MEMSET, POINT_COPY, POINT_FILL}
        self.assertLessEqual({*nodes, "cuMemCreate", "cuMemMap", *GIVING_BACK, "cuCtxGetCurrent"}, seen)

    def check_failure(self, call: str, after: int, times: int) -> None:
        self.restart()
        self.fail(call, after, times)
        inputs = self.inputs()
        with mock.patch.object(retired._log, "warning") as warned:
            live, graph = self.attempt(inputs)
            # The copy's memory could not be mapped at its address, and the graph's addresses are unknown.
            if times > 1 and self.hide and call == "cuMemUnmap":
                self.assertRaisesRegex(DriverError, call, live.set_up, graph)
                self.assertEqual(graph.instances, 0)
                return
            if live is not None:
                live.set_up(graph)
                self.check_launch(live, graph, inputs)
            if times == 1:
                self.assertEqual(self.api._failures[call], [])
            if live is not None and (times == 1 or call not in (KERNEL, MEMCPY, MEMSET)):
                for _ in range(2):
                    inputs = self.inputs()
                    self.begin(live, *inputs)
                    self.check_launch(live, graph, inputs)
            for reason in self.routes(live).values() if live else ():
                self.assertRegex(reason or "because of this", r"\w+ \w+")
            del live, graph
            self.choose()
        if self.api.leaks():
            self.assertIn(call, GIVING_BACK)
            if times == 1:
                self.assertEqual(warned.call_count, 1)

    def test_copies_are_pointed_back_where_the_graph_cannot_be_instantiated(self):
        inputs = self.inputs()
        live, graph = self.attempt(inputs)
        graph.refuses = [DriverError(call="cuGraphInstantiate", code=self.code.name)]
        live.set_up(graph)
        self.assertEqual({decision.route for decision in live.decisions.values()}, {Route.COPY})
        self.assertEqual(MemsetNode(self.driver, graph._nodes[3]).target, self.places[3] + 8)
        self.check_launch(live, graph, inputs)

    def test_memory_that_the_allocator_held_is_taken_from_it(self):
        """It is taken for a copy, and for placeholders if the driver is out of memory."""
        live, _ = self.choose(*self.inputs())
        self.fail("cuMemCreate")
        emptied = self.enterContext(mock.patch.object(torch.cuda, "empty_cache"))
        live.set_up(Graph(self.api, ["HOST"]))
        emptied.assert_called_once_with()
        self.assertEqual({d.route for d in live.decisions.values()}, {Route.COPY})
        for code, calls, reasons in ((self.code, 1, []), (CUresult.CUDA_ERROR_NOT_SUPPORTED, 0, [0, 3])):
            self.restart()
            emptied.reset_mock()
            self.api.fail("cuMemCreate", 0, code)
            live, found = self.choose(*self.inputs(), mutated=self.MUTATED)
            self.assertEqual((emptied.call_count, live.has_placeholders, sorted(found)), (calls, bool(calls), reasons))

    def test_each_call_of_a_replay_may_fail(self):
        for call, after in ((KERNEL, 0), (KERNEL, 1), (MEMCPY, 0), (MEMSET, 0)):
            with self.subTest(call=call, after=after):
                self.restart()
                live, graph = self.attempt(self.inputs())
                live.set_up(graph)
                live.finish()
                self.api.calls.clear()
                self.assertIsNone(live.addresses.prepare(self.inputs()))
                self.assertEqual(Counter(self.api.calls), Counter([KERNEL, KERNEL, MEMCPY, MEMSET]))
                self.fail(call, after)
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
                again.set_up(Graph(self.api, self.nodes({i.index: i.recorded for i in again.items})))
                self.assertEqual(reasons | self.routes(again), dict.fromkeys(range(4)) | live.addresses.refused)
                self.assertEqual(reasons, {} if index in self.MUTATED else live.addresses.refused)


if __name__ == "__main__":
    run_tests()
