"""Operations of a capture and what they access: no interleaving of a random program's operations that the accesses
allow changes what a kernel reads, every node is in one unit, and whatever is not certain is a barrier.

Tensors are in a small pool on the CPU. Operators and launches capture kernels on the fake driver, with temporaries
between the tensors, and the executor knows what each kernel really does.
"""

from __future__ import annotations

import weakref
from types import FunctionType, SimpleNamespace
from unittest import mock

import torch
from captured_operations import ATEN, UNKNOWN, BranchesTestCase, Captured, FakeAutotuner, custom, ops
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.edges import lanes
from pygraph_trees.edges.branches import noting
from pygraph_trees.edges.operations import span_of
from pygraph_trees.edges.rewriting import Chain
from pygraph_trees.edges.units import Access
from pygraph_trees.reasons import Reason
from pygraph_trees.report.log import FunctionLog, RecordingLog
from pygraph_trees.report.text import function_notes
from pygraph_trees.settings import Settings
from pygraph_trees.trees.recordings.captured_graph import branches_noted


class TestAccesses(BranchesTestCase):
    def units_after(self, run, *tensors, inputs=(), captured=None):
        captured = captured or Captured()
        tensors = tensors or [captured.tensor() for _ in range(4)]
        with self.operations(captured, *tensors) as operations:
            run(captured, *tensors)
        return captured.units(operations, [tensors[i] for i in inputs])

    def test_a_kernel_writes_all_pointers_but_inputs_that_it_does_not_mutate(self):
        for mutated, expected in ((), (False, False, True)), (("in_ptr1",), (False, True, True)):

            def run(captured, a, b, c, d, mutated=mutated):
                FakeAutotuner(captured, mutated).run(a, b, c, 8, stream=captured.stream)

            (unit,) = self.units_after(run)
            self.assertFalse(unit.barrier)
            self.assertEqual(tuple(access.write for access in unit.accesses), expected)

    def test_of_a_large_table_only_what_is_looked_up_counts(self):
        """A kernel reads at most some elements in each iteration, and an operator the rows that its indices name."""
        captured = Captured()
        table, index, out = captured.tensor(64).view(16, 4), captured.tensor().view(torch.int64), captured.tensor()

        with self.operations(captured, table, index, out) as operations:
            ops.index_select.out(table, 0, index, out=out)
            FakeAutotuner(captured).run(table, index, out, 2, stream=captured.stream)
            ops.cat.out([table], out=out)
        self.assertEqual([operation.nbytes for operation in operations.found], [4 + 8 + 1, 2 * 9 + 8 + 8, 64 + 8])

    def test_an_address_in_another_storage_is_a_write_of_all_of_it(self):
        def run(captured, a, b, c, d):
            captured.work = lambda read, written, name: captured.kernel(read, [*written, d], name=name)
            ops.cat.out([a, b], out=c)
            named["d"] = Access(*span_of(d), True)

        named = {}
        (unit,) = self.units_after(run)
        self.assertIn(named["d"], unit.accesses)
        self.assertEqual(len(unit.accesses), 4)

    def test_only_operations_with_temporaries_write_around_their_results(self):
        def run(captured, a, b, *others):
            made.extend(ops.cat.default([one]) for one in (a, b))

        made: list[torch.Tensor] = []
        for nbytes, needs in ((0, [0, 0]), (8, [0, 1])):
            captured = Captured()
            captured.temporary = nbytes
            units = self.units_after(run, captured=captured)
            chain = Chain(captured.dependencies, captured.graph, captured.driver.nodes(captured.graph), units)
            self.assertEqual(chain.needs, needs)

    def test_a_result_is_written_although_no_address_of_it_is_found(self):
        def run(captured, a, b, c, d):
            hidden = captured.kernel
            captured.kernel = lambda read, written, **more: hidden(read, written, hidden=bool(written), name=ATEN)
            made.append(ops.cat.default([a, b]))

        made: list[torch.Tensor] = []
        (unit,) = self.units_after(run)
        self.assertIn(Access(*span_of(made[0]), True), unit.accesses)

    def test_what_is_written_to_an_input_comes_before_reads_of_any_other(self):
        """Another call may pass inputs that overlap. Operations that only read inputs stay apart."""

        def run(captured, a, b, c, d):
            ops.cat.out([a], out=c)
            a.add_(a)
            ops.cat.out([b], out=d)

        for inputs, expected in (((0, 1), [0, 1, 2]), ((0,), [0, 1, 0])):
            captured = Captured()
            units = self.units_after(run, inputs=inputs, captured=captured)
            chain = Chain(captured.dependencies, captured.graph, captured.driver.nodes(captured.graph), units)
            self.assertEqual([need.bit_length() for need in chain.needs], expected)

    def test_whatever_is_not_certain_is_a_barrier(self):
        def aten(name=ATEN, change=lambda captured: None):
            def run(captured, a, b, c, d):
                captured.name = name
                change(captured)
                ops.cat.out([a, b], out=c)

            return run

        def with_node(kind):
            def change(captured):
                captured.work = lambda *_: captured.api.append(captured.stream, captured.api._make_kind(kind, None))

            return aten(change=change)

        def cooperative(captured):
            captured.work = lambda read, written, name: captured.api.cooperative.add(captured.kernel(read, written))

        def triton(change):
            def run(captured, a, b, c, d):
                change(kernel := FakeAutotuner(captured))
                kernel.run(a, b, c, 8, stream=captured.stream)

            return run

        cases = {
            "an operator of another library": lambda captured, a, b, c, d: custom([a], [b]),
            "an operator whose schema is wrong": lambda captured, a, b, c, d: ops.native_batch_norm.out(
                a, b, b, c, d, True, 0.1, 0.1, out=c, save_mean=c, save_invstd=c
            ),
            "an unknown kernel": aten(UNKNOWN),
            "a kernel without a name": aten(None),
            "a grouped matmul": aten("_ZN7cutlass13device_kernelIN2at4cuda12_GLOBAL__N_1"),
            "a node outside": lambda captured, a, b, c, d: captured.kernel([a], [b]),
            "a kernel that waits for all of its blocks": aten(change=cooperative),
            "a user's kernel": triton(lambda kernel: setattr(kernel, "custom_kernel", True)),
            "a kernel whose parameters have no names": triton(lambda kernel: kernel.launchers.append(len)),
            "a kernel that cannot be read": aten(
                change=lambda captured: captured.api.lack("cuGraphKernelNodeGetParams")
            ),
            **{kind: with_node(kind) for kind in ("HOST", "GRAPH", "CONDITIONAL", "EVENT_RECORD", "WAIT_EVENT")},
        }
        for what, run in cases.items():
            with self.subTest(what):
                self.assertEqual([unit.barrier for unit in self.units_after(run)], [True])
        self.assertEqual([unit.barrier for unit in self.units_after(aten())], [False])

    def test_copies_and_fills_are_read(self):
        def run(captured, a, b, c, d):
            base, nbytes, api = a.data_ptr(), 8, captured.api
            nodes = {
                "fill": api.make_memset(base, nbytes),
                "copy": api.make_memcpy(base, b.data_ptr(), nbytes),
                "from host": api.make_memcpy(0x7000, b.data_ptr(), nbytes, "HOST"),
                "to host": api.make_memcpy(base, 0x7000, nbytes, "DEVICE", "HOST"),
                "elsewhere": api.make_memset(0x7000, nbytes),  # where the driver knows no memory
            }
            for node in nodes.values():
                captured.work = lambda *_, node=node: api.append(captured.stream, node)
                ops.cat.out([a], out=b)
            expected.update(a=span_of(a), b=span_of(b))

        expected: dict[str, tuple[int, int]] = {}
        fill, copy, from_host, *others = self.units_after(run)
        self.assertIn(Access(*expected["a"], True), fill.accesses)  # although the operator only declares a read
        self.assertEqual(set(copy.accesses), {Access(*expected["a"], False), Access(*expected["b"], True)})
        self.assertIn(Access(0x7000, 0x7008, False), from_host.accesses)
        self.assertEqual([unit.barrier for unit in others], [True, True])


class TestReport(BranchesTestCase):
    def noted(self, run, captured=None, *, stream=None):
        captured, log = captured or Captured(), RecordingLog()
        tensors = [captured.tensor() for _ in range(6)]
        current = iter([captured.stream])  # then another one
        asked = lambda: next(current, stream or captured.stream), lambda: captured.allocated
        with captured, noting(log, captured.driver, captured.dependencies, *asked, tensors, ()):
            run(captured, *tensors)
        return log

    def test_two_branches_are_half_as_deep(self):
        def run(captured, a, b, c, d, e, f):
            for _ in range(2):
                for one, out in ((a, c), (b, d)):
                    ops.cat.out([one], out=out)
                    FakeAutotuner(captured).run(out, out, one, 8, stream=captured.stream)

        log = self.noted(run)
        found = log.branches
        self.assertEqual((found.operations, found.barriers, found.edges, found.depth), (8, 0, 6, 4))
        self.assertEqual((found.chain_us, found.lanes_us), (8 * lanes.FLOOR_US, dict.fromkeys((2, 4), 10.0)))
        line = "branches: 8 operations, 4 deep, 0 barriers, 6 edges; predicted 20 us, on 2 lanes 10, on 4 lanes 10"
        self.assertIn(line, [*function_notes(FunctionLog("f", "0/0", "inference", 1, {}, recordings=[log]).record())])

    def test_a_barrier_and_a_chain_are_as_deep_as_they_are_long(self):
        def chain(captured, a, b, c, d, e, f):
            for one, out in ((a, b), (b, c), (c, d)):
                ops.cat.out([one], out=out)

        def barrier(captured, a, b, c, d, e, f):
            ops.cat.out([a], out=b)
            custom([c], [d])
            ops.cat.out([e], out=f)

        for run, barriers in ((chain, 0), (barrier, 1)):
            found = self.noted(run).branches
            self.assertEqual((found.operations, found.barriers, found.edges, found.depth), (3, barriers, 2, 3))
            self.assertEqual(found.lanes_us[2], found.chain_us)

    def test_a_reason_stands_where_no_order_can_be_told(self):
        def allocates(captured, *tensors):
            captured.api.append(captured.stream, captured.api._make_kind("MEM_ALLOC", None))

        def side_by_side(captured, a, b, c, d, *others):
            ops.cat.out([a], out=b)
            captured.api._captured_last[captured.stream] = []
            ops.cat.out([c], out=d)

        def operator(captured, a, b, *others):
            ops.cat.out([a], out=b)

        def unread(call, after=0):
            captured = Captured()
            captured.api.fail(call, after)
            return captured

        for run, captured, stream, reason in (
            (allocates, None, None, Reason.ALLOCATES),
            (operator, None, 7, Reason.OTHER_STREAMS),
            (side_by_side, None, None, Reason.NO_CHAIN),
            (operator, unread("cuStreamGetCaptureInfo", 1), None, Reason.UNREAD),
            (operator, unread("cuGraphGetEdges_v2"), None, Reason.UNREAD),
            (operator, unread("cuGraphGetNodes"), None, Reason.UNREAD),
        ):
            log = self.noted(run, captured, stream=stream)
            self.assertEqual((log.branches, log.why_no_branches.reason), (None, reason))
            function = FunctionLog("f", "0/0", "inference", 1, {}, recordings=[log])
            self.assertIn(f"no branches, because {log.why_no_branches}", [*function_notes(function.record())])

    def test_inputs_can_be_freed_during_a_capture(self):
        captured = Captured()
        tensors = [captured.tensor()]
        held, asked = weakref.ref(tensors[0]), (lambda: captured.stream, lambda: captured.allocated)
        with (
            captured,
            noting(RecordingLog(), captured.driver, captured.dependencies, *asked, tensors.copy(), tensors.copy()),
        ):
            tensors.clear()
            self.assertIsNone(held())

    def test_bindings_of_cuda_12_are_asked_for_edges_with_data(self):
        captured = Captured()
        captured.api.have("cuStreamGetCaptureInfo_v3")
        self.noted(lambda captured, a, b, *others: ops.cat.out([a], out=b), captured)
        self.assertEqual(captured.api.calls[:2], ["cuStreamGetCaptureInfo_v3"] * 2)

    def test_the_flag_concerns_graphs(self):
        """``test_lane_capture.py`` has what it does."""
        nodes = (self.node("off"), self.node("report", graph=None), self.node("report"), self.node("always"))
        flags = [node._branches_flag() for node in nodes]
        self.assertEqual(flags, [("off", 0), ("off", 0), ("report", 0), ("always", 4)])
        self.assertEqual(Settings.current().branches, "off")

    def test_a_recording_without_branches_says_why(self):
        not_generated = self.node("report")
        not_generated.wrapped_function.model.model = abs
        for node, reason in (
            (self.node("report", live=SimpleNamespace(has_table=True)), Reason.READS_TABLE),
            (not_generated, Reason.NOT_GENERATED),
            (self.node("report"), Reason.NO_DRIVER),
        ):
            with mock.patch("pygraph_trees.trees.recordings.captured_graph.driver", lambda: None):
                branches_noted(node, [], "report")
            self.assertEqual(node.log.why_no_branches.reason, reason)

    def test_managed_inputs_and_own_memory_may_not_overlap_others(self):
        seen = []
        patches = {"driver": lambda: 1, "dependencies": lambda: 2, "noting": lambda *args: seen.append(args)}
        tensors = [torch.zeros(1) for _ in range(4)]
        node, frozen = self.node("report", own=SimpleNamespace(takes=3), cudagraph_managed_idxs=[1]), torch.zeros(1)
        names = {"empty_strided_cuda": len, "constant0": frozen}
        node.wrapped_function.model.model = FunctionType((lambda: 0).__code__, names)
        with mock.patch.multiple("pygraph_trees.trees.recordings.captured_graph", **patches):
            branches_noted(node, tensors, "report")
        *_, given, elsewhere, streams, watching = seen[0]
        self.assertEqual((streams, watching), (None, None))
        found = [*map(id, given)], [*map(id, elsewhere)]
        self.assertEqual(found, ([*map(id, tensors)], [id(tensors[0]), id(tensors[2]), id(frozen)]))


if __name__ == "__main__":
    run_tests()
