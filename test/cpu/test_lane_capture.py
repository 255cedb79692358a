"""Captures on lanes: the captured order is a chain of the operations, memory that generated code allocates comes from
the lane that uses it, and the edges that the graph gets change no value. Whatever fails, the graph keeps its chain.
"""

import contextlib
import functools
import itertools
import sys
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from captured_operations import BranchesTestCase, FakeStream, OnLanes, custom, operate, ops, side_by_side
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor import config
from torch._inductor.codegen import wrapper
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import run_tests
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import pygraph_trees
from pygraph_trees.edges import branches, operations, streams
from pygraph_trees.outputs import allocations
from pygraph_trees.reasons import Reason
from pygraph_trees.report.log import RecordingLog
from pygraph_trees.trees.functions.lanes import Number
from pygraph_trees.trees.recordings import recording

FOLLOW = "cuStreamUpdateCaptureDependencies_v2"


class TestLaneCapture(BranchesTestCase):
    def test_each_chain_has_a_lane_and_memory_of_it(self):
        captured = OnLanes()
        _, branching, ends = side_by_side(captured)
        streams = [captured.on[node] for node in captured.driver.nodes(captured.graph)]
        self.assertEqual(streams, streams[:3] * 3)
        self.assertEqual(captured.moved, [stream for stream in streams if stream != captured.main])
        branching.replace(captured.graph)
        nodes = captured.driver.nodes(captured.graph)
        self.assertEqual(captured.edges(), {*zip(nodes, nodes[3:], strict=False)})
        self.assertTrue(captured.is_right(range(8)))
        self.assertEqual(len(ends), 3)

    def test_one_chain_stays_on_its_stream(self):
        captured = OnLanes()
        log, branching, _ = side_by_side(captured, count=1)
        self.assertEqual((captured.lanes_used(), log.branches.lanes, captured.moved), (1, 1, []))
        before = [*captured.api.calls]
        branching.replace(captured.graph)
        self.assertEqual(captured.api.calls, before)
        self.assertNotIn(FOLLOW, before)

    def test_a_chain_with_more_edges_is_reduced(self):
        """The driver refuses to leave out an edge while it captures."""
        with mock.patch.object(branches, "SIDE_BY_SIDE", False):
            captured = OnLanes()
            captured.api.lack(FOLLOW, "bindings")
            log, branching, ends = side_by_side(captured)
        self.assertGreater(captured.edges(), captured.chain())
        branching.replace(captured.graph)
        self.assertEqual((captured.edges(), log.why_no_branches, len(ends)), (captured.chain(), None, 3))

    def test_a_failure_leaves_the_captured_edges(self):
        for fails, graph in (("cuGraphRemoveDependencies_v2", 0), ("cuGraphAddDependencies_v2", 0), ("", 1)):
            captured = OnLanes()
            log, branching, ends = side_by_side(captured)
            if fails:
                captured.api.fail(fails)
            with self.assertLogs("pygraph_trees.edges"):
                branching.replace(captured.graph + graph)
            self.assertEqual((log.branches, log.why_no_branches.reason), (None, Reason.NO_CHAIN))
            self.assertEqual((captured.edges(), len(ends)), (captured.chain(), 3))

    def test_memory_that_may_be_used_is_not_moved(self):
        captured = OnLanes()
        source = captured.tensor()
        with captured.noted(source):
            captured.made()
            one, other, third = captured.made(), captured.made(), captured.made()
            address = other.data_ptr()
            ops.cat.out([source], out=one)
            captured.kernel([source], [other])  # outside of all operations
            ops.cat.out([source], out=other)
            self.assertEqual((captured.moved, other.data_ptr()), ([], address))
            fourth = captured.made()
            ops.cat.out([source], out=fourth)
            self.assertEqual(len(captured.moved), 1)
            ops.cat.out([source], out=third)  # allocated before the node
            ops.cat.out([source], out=fourth)  # no longer the first use
        self.assertEqual(len(captured.moved), 1)
        self.assertEqual(captured.edges(), captured.chain())

    def test_memory_that_an_operation_allocates_inside_is_not_moved(self):
        captured = OnLanes()
        source, held = captured.tensor(), []
        captured.work = lambda read, written, name: (held.append(captured.made()), captured.kernel(read, written))
        with captured.noted(source):
            ops.cat.out([source], out=captured.made())
            del captured.work
            for _ in range(3):
                ops.cat.out([source], out=held[0])
        self.assertEqual(captured.moved, [])

    def test_memory_that_an_unknown_operation_may_have_written_is_not_moved(self):
        """It may be given the memory as something that is no tensor, such as a descriptor."""
        for unknown in ("operator", "kernel"):
            captured = OnLanes()
            source, other = captured.tensor(), captured.tensor()
            with captured.noted(source, other):
                hidden = captured.made()
                address = hidden.data_ptr()
                captured.work = lambda *_: captured.kernel([source], [hidden])  # noqa: B023
                if unknown == "operator":
                    custom([source], [other])
                else:
                    captured.launch(source, source, object())
                del captured.work
                for _ in range(3):
                    ops.cat.out([source, hidden], out=captured.made())
            self.assertEqual(hidden.data_ptr(), address)

    def test_a_lane_is_joined_although_it_has_no_memory(self):
        captured = OnLanes()
        source = captured.tensor()
        with captured.noted(source), self.assertRaises(torch.OutOfMemoryError):
            ops.cat.out([source], out=captured.made())
            full = mock.Mock(side_effect=[None, torch.OutOfMemoryError])
            with mock.patch.object(torch.UntypedStorage, "resize_", full):
                ops.cat.out([source], out=captured.made())
        self.assertEqual(captured.edges(), captured.chain())

    def test_what_may_do_anything_stays_on_the_captures_stream(self):
        captured = OnLanes()
        a, b, c, d = (captured.tensor() for _ in range(4))
        with captured.noted(a, b, c, d):
            ops.cat.out([a], out=b)
            custom([a], [c])
            ops.cat.out([a], out=d)
        self.assertEqual([stream == captured.main for stream in captured.on.values()][1], True)
        self.assertEqual(captured.edges(), captured.chain())

    def test_another_stream_leaves_lanes_alone(self):
        captured = OnLanes()
        a, b, c, d = (captured.tensor() for _ in range(4))
        other, log = FakeStream(captured.api, captured.api.make_stream()), RecordingLog()
        with captured.noted(a, b, c, d, log=log):
            ops.cat.out([a], out=b)
            ops.cat.out([a], out=c)
            other.wait_stream(captured.lanes[0])
            with captured.current(other):
                ops.cat.out([a], out=d)
            captured.lanes[0].wait_stream(other)
            ops.cat.out([a], out=d)
        main = captured.main
        self.assertEqual([*captured.on.values()], [main, captured.lanes[1].cuda_stream, other.cuda_stream, main])
        self.assertEqual((log.branches, log.why_no_branches.reason), (None, Reason.OTHER_STREAMS))
        self.assertLessEqual(captured.chain(), captured.edges())

    def test_an_interrupt_at_the_end_leaves_no_mode_of_torchs(self):
        """It would run the program's own operators."""

        def interrupted(*args):
            if interrupts:
                raise interrupts.pop()
            leave(*args)

        captured, leave, interrupts = OnLanes(), TorchDispatchMode.__exit__, [KeyboardInterrupt]
        patch = mock.patch.object(TorchDispatchMode, "__exit__", interrupted)
        with contextlib.suppress(KeyboardInterrupt), patch, captured.noted(source := captured.tensor()):
            ops.cat.out([source], out=captured.made())
        self.assertEqual((interrupts, _get_current_dispatch_mode_stack()), ([], []))

    def test_an_error_at_any_line_joins_the_lane(self):
        """Such as one that a handler of signals raises."""
        files = streams.__file__, operations.__file__
        for number in itertools.count():
            captured, left = OnLanes(), None
            source, lines = captured.tensor(), itertools.count()

            def trace(frame, event, arg, lines=lines, number=number):
                if frame.f_code.co_filename not in files:
                    return None
                if event == "line" and next(lines) == number:
                    sys.settrace(None)
                    raise TimeoutError
                return trace

            with contextlib.suppress(TimeoutError):
                with captured.noted(source):
                    ops.cat.out([source], out=captured.made())
                    out = captured.made()
                    sys.settrace(trace)
                    try:
                        ops.cat.out([source], out=out)
                    finally:
                        sys.settrace(None)
                    left = next(lines)
                self.assertIsNotNone(left)  # otherwise the error passes
            self.assertEqual(captured.stream, captured.main)
            if left is not None:
                break
            for lane in captured.lanes[1:]:
                if captured.driver.capturing_graph(lane.cuda_stream) is not None:
                    last = captured.driver.captured_last(lane.cuda_stream)
                    self.assertLessEqual({*last}, {*captured.driver.captured_last(captured.main)}, number)
        self.assertGreater(number, 100)

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["new", "new", "out", "add", "triton", "mutate", "return", "custom", "unknown", "outside"]
                ),
                *(st.integers(0, 5) for _ in range(3)),  # tensors, by number
                st.integers(0, 2),  # bytes of temporaries, in units
                st.integers(1, 2),  # kernels
                st.booleans(),  # whether a tensor dies afterwards
            ),
            min_size=2,
            max_size=14,
        ),
        st.integers(1, 4),
        st.booleans(),
    )
    def test_no_interleaving_changes_what_a_kernel_reads(self, program, lanes, prunes):
        captured = OnLanes(lanes)
        if not prunes:
            captured.api.lack(FOLLOW, "bindings")
        alive = [captured.tensor() for _ in range(3)]
        log = RecordingLog()
        with captured.noted(*alive, log=log) as branching:
            for kind, *numbers, temporary, kernels, dies in program:
                one, other, out = (alive[number % len(alive)] for number in numbers)
                captured.temporary, captured.kernels = 8 * temporary, kernels
                if kind == "new":
                    made = captured.made()
                    ops.cat.out([one, other], out=made)
                    alive.append(made)
                elif not operate(captured, kind, alive, numbers):
                    captured.launch(one, other, out, mutated=["in_ptr1"] if kind == "mutate" else [])
                if dies and len(alive) > 3:
                    del alive[3]
        self.assertIsNone(log.why_no_branches)
        (self.assertEqual if prunes else self.assertLessEqual)(captured.chain(), captured.edges())
        self.assertTrue(captured.is_right(range(2)))
        branching.replace(captured.graph)
        self.assertIsNone(log.why_no_branches)
        self.assertTrue(captured.is_right(range(6)))


class TestRecording(BranchesTestCase):
    def test_a_graph_gets_its_edges_before_it_is_instantiated(self):
        """With the flag off, nothing is asked and torch's graph is used. In a trial, the graph first has its chain."""
        why = Reason.ON_LANES(lanes=2)
        on_lanes = ["edges of 7", "instantiate"]
        for flag, number, expected in (
            ("off", None, ["capture"]),
            ("report", None, ["capture", "noted"]),
            ("always", None, ["capture", "4 lanes", "noted", *on_lanes]),
            ("auto", None, ["capture", "noted"]),
            ("auto", Number(2, why, is_final=False), ["capture", "2 lanes", "noted", "instantiate", "trial"]),
            ("auto", Number(2, why), ["capture", "2 lanes", "noted", *on_lanes]),
            ("auto", Number(0, why), ["capture"]),
            ("auto", Number(2, why, is_final=False), "no memory"),
        ):
            steps = []

            @contextlib.contextmanager
            def noted(node, inputs, flag, lanes, steps=steps):
                if flag == "off":
                    yield None
                    return
                steps += [f"{lanes} lanes"] * (lanes > 0)
                forecast = SimpleNamespace(choose=lambda: (2, why))
                yield SimpleNamespace(replace=lambda graph: steps.append(f"edges of {graph}"), forecast=forecast)
                steps.append("noted")

            def capture(node, model, inputs, steps=steps, expected=expected):
                steps.append("capture")
                self.assertEqual(torch.utils._python_dispatch._get_current_dispatch_mode_stack(), [])
                if expected == "no memory":
                    raise torch.OutOfMemoryError
                return model(inputs)

            kept = SimpleNamespace(raw_cuda_graph=lambda: 7, instantiate=functools.partial(steps.append, "instantiate"))
            patches = {
                **{"kept_graph": lambda inputs, kept=kept: kept, "branches_noted": noted},
                **{"captured_nodes": Counter, "progress_of": lambda model: None},
                "try_lanes": lambda node, branching, steps=steps: steps.append("trial"),
            }
            node = self.node(flag)
            numbers = node.wrapped_function.model.lanes.numbers
            numbers.update({} if number is None else {"f": number})
            with (
                mock.patch.multiple(recording, **patches),
                mock.patch.object(recording.Upstream, "_record", capture),
                mock.patch.multiple(torch.cuda, current_stream=mock.MagicMock(), device=contextlib.nullcontext),
            ):
                if expected == "no memory":
                    self.assertRaises(torch.OutOfMemoryError, node._record, lambda inputs: [], [])
                    self.assertEqual((numbers["f"].count, numbers["f"].why.reason), (0, Reason.NO_CHAIN))
                    continue
                node._record(lambda inputs: [], [])
            self.assertEqual(steps, expected)
            self.assertEqual(node.graph is kept, "instantiate" in expected)
            if flag == "auto" and number is None:  # what the forecast promises
                self.assertEqual(numbers, {"f": Number(2, why, is_final=False)})
            is_told = flag == "auto" and number in (None, Number(0, why))
            self.assertEqual(node.log.why_no_branches, why if is_told else None)

    def test_generated_code_tells_what_it_allocates(self):
        names = {"empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)}
        exec("def call(dtypes):\n    return [empty_strided_cuda((4,), (1,), dtype) for dtype in dtypes]", names)
        own, found, call = torch.empty(4), [], names["call"]
        given = allocations.Allocations({allocations.Block((0,), 1): own})
        with allocations.watching(found.append):
            (first,) = allocations.run_generated(call, [torch.float32])
            second, third = allocations.run_generated(call, [torch.float32] * 2, given)
        allocations.run_generated(call, [torch.float32])
        self.assertEqual([*map(id, found)], [id(first), id(second)])
        self.assertEqual(third.data_ptr(), own.data_ptr())  # own memory stays where it is


class TestBuffers(BranchesTestCase):
    def test_buffers_of_a_gpu_are_not_used_again_if_lanes_may_be(self):
        state, graph = wrapper.MemoryPlanningState(), SimpleNamespace(cpp_wrapper=False)
        on_gpu, on_cpu = ((torch.device(kind), torch.float32, "8", True) for kind in ("cuda", "cpu"))
        for key in (on_gpu, on_cpu):
            state.push(key, SimpleNamespace(is_reused=False))
        pygraph_trees.install()
        for flag, graphed, cpp_wrapper, expected in (
            ("off", True, False, True),
            ("report", True, False, True),
            ("auto", True, False, False),
            ("always", True, False, False),
            ("auto", False, False, True),
            ("auto", True, True, True),
        ):
            graph.cpp_wrapper = cpp_wrapper
            flags = {"triton.pygraph_branches": flag, "triton.cudagraphs": graphed}
            with config.patch(flags), V.set_graph_handler(graph):
                self.assertEqual((on_gpu in state, on_cpu in state), (expected, True), flags)
                self.assertFalse((on_gpu[0], torch.float16) in state)


if __name__ == "__main__":
    run_tests()
