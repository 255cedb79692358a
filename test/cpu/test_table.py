"""The table of a recording: its writer, and live inputs that have slots, on a driver that checks its callers."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_trees import bare_recording
from test_live_inputs import KERNEL, Graph, LiveInputsTestCase, at
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.cuda import value_kernel
from pygraph_trees.indirection import warmups as warmups_module
from pygraph_trees.indirection.inputs import LiveInputs
from pygraph_trees.indirection.placeholder import stands_out
from pygraph_trees.indirection.routes import Route
from pygraph_trees.indirection.table import launches
from pygraph_trees.indirection.table import pointer_table as tables
from pygraph_trees.indirection.table.launches import VariantLauncher
from pygraph_trees.indirection.warmups import Warmups
from pygraph_trees.trees.recordings import recording

TABLE, PATCH = Route.TABLE, Route.PATCH
WIDTH = 64  # bytes that the writer takes
WRITER = f"pygraph_put_{WIDTH}"


class TestSlots(LiveInputsTestCase):
    """Live inputs with slots; the test makes the writer's nodes, and there are no kernels that read slots."""

    def setUp(self) -> None:
        super().setUp()
        self.written: list[tuple[int, ...]] = []
        self.memory: list[torch.Tensor] = []
        writer = SimpleNamespace(width=WIDTH, launch=self.write)
        self.enterContext(mock.patch.object(tables, "value_kernel", lambda *_: writer))
        empty = torch.empty

        def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("dtype") is not torch.int64:
                return empty(*args, **kwargs)
            self.memory.append(empty(*args, dtype=torch.int64))
            return self.memory[-1]

        self.enterContext(mock.patch.object(torch, "empty", on_cpu))

    def write(self, stream: int, target: int, values: bytes) -> None:
        self.written.append(struct.unpack(f"{len(values) // 8}Q", values))
        ctypes.memmove(target, values, len(values))

    def chosen(self, *inputs: torch.Tensor, tabled: Collection[int] | None = None) -> LiveInputs:
        """``tabled``: inputs that have slots; None for all."""
        return self.choose(*inputs, tabled=range(len(inputs)) if tabled is None else tabled)[0]

    def variant(self, *slots: str) -> VariantLauncher:
        return VariantLauncher("reader", frozenset(slots), print)

    def tabled(
        self,
        count: int,
        read: Sequence[int],
        held: Sequence[int] = (),
        slots: Sequence[int] | None = None,
    ) -> tuple[LiveInputs, Graph]:
        """A recording whose kernels read some inputs from slots, and hold the addresses of some themselves."""
        live = self.chosen(*(at(0) for _ in range(count)), tabled=slots)
        table = live._table
        with live.captured():
            for position in read:
                address = live.items[position].recorded
                self.assertEqual(table._slots[address].tolist(), [address])
                table._is_read_by(self.variant("in_ptr0"), address)
        (*_, addresses) = self.written
        wanted = [item.recorded for item in live.items]
        self.assertEqual(list(addresses), [address for i, address in enumerate(wanted) if slots is None or i in slots])
        values = struct.pack(f"{len(addresses)}Q", *addresses)
        writer = [self.memory[-1].data_ptr(), struct.pack("I", len(values)), values.ljust(WIDTH, b"\0")]
        nodes = [self.api.make_kernel(writer, name=WRITER)]
        if held:
            nodes.append(self.api.make_kernel([wanted[i] for i in held]))
        graph = Graph(self.api, nodes)
        live.set_up(graph)
        return live, graph

    def decided(self, live: LiveInputs) -> list[Route]:
        return [decision.route for _, decision in sorted(live.decisions.items())]

    def test_one_node_for_all(self) -> None:
        live, graph = self.tabled(2, read=(0, 1))
        self.assertEqual(self.decided(live), [TABLE, TABLE])
        self.assertEqual(self.api.leaks(), [])
        for _ in range(3):
            live.finish()
            a, b = at(0), at(0)
            self.api.calls.clear()
            self.begin(live, a, b)
            self.assertEqual(self.api.calls, [KERNEL])
            self.assertEqual(graph.launch()[0][2:4], [a.data_ptr(), b.data_ptr()])
        self.assertEqual(live.kernels_of(0), [WRITER, "reader"])

    def test_no_table_without_need(self) -> None:
        """There are no placeholders, or no variant takes an input, or launches cannot be watched."""
        live, _ = self.choose(at(0), mutated={0}, refused={0: "of the test"}, tabled=[0])
        self.assertFalse(live.has_table)
        for tabled, tap in (((), launches.tap), ((7,), launches.tap), ((0,), launches.Tap())):
            with mock.patch.object(launches, "tap", tap):
                live = self.chosen(at(0), tabled=tabled)
            self.assertFalse(live.has_table)
            live.set_up(self.capture(self.one_kernel(), live))
            self.assertEqual(self.decided(live), [PATCH])
        self.assertEqual(self.written, [])

    def test_slots_for_those_alone_that_a_variant_takes_and_kernels_that_hold_an_address_beside(self) -> None:
        for read, held, slots, routes in ((1, (0,), (1, 7), [PATCH, TABLE]), (0, (0, 1), None, [TABLE, PATCH])):
            live, graph = self.tabled(2, read=(read,), held=held, slots=slots)
            self.assertEqual(live.items[0].recorded in live._table._slots, slots is None)
            self.assertEqual(self.decided(live), routes)
            live.finish()
            inputs = at(0), at(0)
            a, b = (tensor.data_ptr() for tensor in inputs)
            writer, kernel = self.call(live, graph, *inputs)
            self.assertEqual((writer[2:4], kernel), ([b, 0], [a]) if slots else ([a, b], [a, b]))

    def test_the_graph_holds_the_addresses(self) -> None:
        stream, graph = self.api.make_stream(), self.api.make_graph()
        with mock.patch.object(tables, "value_kernel", value_kernel.value_kernel):
            live = self.chosen(at(0), at(0))
        self.stream = stream
        self.api.capture(stream, graph)
        live.captured()
        (writer,) = self.api._graphs[graph]
        block = self.api.exec_parameters(self.api.instantiate(graph), writer)
        recorded = [item.recorded for item in live.items]
        self.assertEqual(struct.unpack_from("QQQQ", block), (self.memory[-1].data_ptr(), 16, *recorded))

    def test_placeholders_at_low_addresses(self) -> None:
        """There are no others if little may be reserved. The writer's bytes are addresses, whatever they look like."""
        self.api._next_range, self.api.most_reserved = 0x3_0240_0000, 80 << 30
        live, _ = self.tabled(3, read=(0, 1, 2), held=(0,))
        self.assertFalse(stands_out(live.items[0].recorded))
        self.assertEqual({decision.route for decision in live.decisions.values()}, {Route.TABLE})

    def test_a_writer_that_cannot_be_loaded_is_tried_once(self) -> None:
        with (
            mock.patch.object(tables, "value_kernel", value_kernel.value_kernel),
            self.assertLogs("pygraph_trees.cuda", "WARNING") as logs,
        ):
            self.api.fail("cuModuleLoadData")
            for _ in range(3):
                live = self.chosen(at(0))
                self.assertFalse(live.has_table)
                live.set_up(self.capture(self.one_kernel(), live))
                self.assertEqual(self.decided(live), [PATCH])
            self.assertEqual(len(logs.output), 1)
            self.assertTrue(self.chosen(*(at(0) for _ in range(33))).has_table)  # another width

    def test_many_inputs(self) -> None:
        live = self.chosen(*(at(0) for _ in range(140)))
        slots = [item.recorded for item in live.items]
        live.captured()
        self.assertEqual([len(written) for written in self.written], [WIDTH // 8] * 17 + [4])
        (memory,) = self.memory
        self.assertEqual(memory.tolist(), slots)
        for position in (0, 127, 128, 139):
            self.assertEqual(live._table._slots[slots[position]].data_ptr(), memory.data_ptr() + 8 * position)

    def test_warmup_looks_at_what_may_have_a_slot(self) -> None:
        static, live, pooled = at(0), at(0), at(0)
        overwritten = mock.Mock(spec=torch.Tensor, data_ptr=mock.Mock(side_effect=RuntimeError("overwritten")))
        noting = mock.Mock(side_effect=lambda addresses: contextlib.nullcontext({}))
        warmups = Warmups()

        def looked_at(*inputs: Any, step: int = 1, is_backward: bool = False) -> Any:
            noting.reset_mock()
            with warmups.begin(print, step, inputs, [0], 0, self.pool, is_backward=is_backward, builds=True):
                return [set(call.args[0].values()) for call in noting.mock_calls]

        why_not = lambda tensor, device, in_pool: "it is that" if tensor is pooled else None  # noqa: E731
        of_live = [{live.data_ptr()}]
        with mock.patch.multiple(warmups_module, noting=noting, why_not_placeholder=why_not):
            self.assertEqual(looked_at(static, 3, live, pooled, None), of_live)
            # A backward's static inputs that were live in its forward; no others, and not in another step.
            self.assertEqual(looked_at(live), [])
            self.assertEqual(looked_at(static, is_backward=True), [])
            self.assertEqual(looked_at(live, is_backward=True), of_live)
            self.assertEqual(looked_at(live, step=2, is_backward=True), [])
            self.assertEqual(looked_at(static, overwritten), [])  # upstream reports this itself
            with mock.patch.object(launches, "tap", launches.Tap()):
                self.assertEqual(looked_at(static, live), [])

    def test_warmup_finds_the_inputs_that_variants_take(self) -> None:
        """If nothing is built yet, it finds the inputs that could be read from slots."""
        a, b, c = at(0), at(0), at(0)
        given = [(f"in_ptr{n}", t.data_ptr()) for n, t in enumerate((a, b, c))]

        def noting(addresses: dict[int, int]) -> Any:
            inputs = {(name, i) for name, address in given for i, at in addresses.items() if at == address}
            return contextlib.nullcontext({("its autotuner", frozenset(dict(given))): inputs})

        def warm_up(function: Any, *inputs: Any, builds: bool) -> None:
            with Warmups().begin(function, 1, inputs, [0], 0, self.pool, is_backward=False, builds=builds):
                pass

        one, other = (lambda: None), (lambda: None)
        with (
            mock.patch.multiple(warmups_module, noting=noting, why_not_placeholder=lambda *_: None),
            mock.patch.object(launches, "build", lambda *_: self.variant("in_ptr1")),
        ):
            warm_up(one, a, 3, b, c, builds=True)
            self.assertEqual((tables.taken_by_variants(one), tables.taken_by_variants(other)), ({2}, set()))
            for inputs in ((a, 3, b, c), (a, 3, c, b)):  # the findings of all warmups of a function count
                warm_up(other, *inputs, builds=False)
            (reader,) = tables.readers_of(other)
            self.assertEqual(reader.inputs, {(name, index) for name in ("in_ptr1", "in_ptr2") for index in (2, 3)})
            self.assertEqual((reader.build(), tables.taken_by_variants(other)), ({2, 3}, set()))  # until it is taken

    def test_a_capture_begins_with_the_writer(self) -> None:
        done = mock.MagicMock(model=mock.Mock(return_value=[3]))
        live = SimpleNamespace(items=(), has_staged=False, staged_copies=(None, None), kinds=Counter())
        live.captured, live.set_up = done.captured, done.set_up
        function = SimpleNamespace(model=None)
        node = bare_recording(live=live, graph="upstream's", stream="of captures", wrapped_function=function)
        with (
            mock.patch.object(torch.cuda, "current_stream", lambda device: done),
            mock.patch.object(recording.Upstream, "_record", lambda node, model, inputs: model(inputs)),
            mock.patch.object(recording, "kept_graph", lambda inputs: "kept"),
        ):
            node._record(done.model, [3])
        # What torch set on that stream before the capture must not overwrite what the first replay sets.
        order = ["captured", "captured().__enter__", "model", "captured().__exit__", "wait_stream", "set_up"]
        self.assertEqual([name for name, *_ in done.mock_calls], order)
        done.wait_stream.assert_called_once_with("of captures")


if __name__ == "__main__":
    run_tests()
