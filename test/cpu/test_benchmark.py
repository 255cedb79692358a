"""The measuring machinery: programs, input sets, clocks, the reader of traces, and a whole comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import cudagraph_trees
from torch._subclasses import FakeTensorMode
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.two_tensor import TwoTensor

import inductor_patches
import pygraph_trees
from pygraph_trees.benchmark import Comparison, Effort, Program, compare, measure, verify
from pygraph_trees.benchmark.inspection import Span, read_trace, side_by_side
from pygraph_trees.benchmark.measure import CALLS, call_until_chosen, is_steady, schedule, time_block
from pygraph_trees.benchmark.program import NoLossError, Ring
from pygraph_trees.benchmark.ways import NotPatchedError, OwnInductor, UnknownWayError, Way, make_ways, patches_on
from pygraph_trees.fake_gpu import absent_gpu
from pygraph_trees.report.log import FunctionLog, GraphLog, journal

FAST = Effort(rounds=2, block_s=0.0, calls=(2, 2), settle_calls=1, warm_calls=(5, 8), ring=3, fresh_caches=False)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


class TestProgram(TestCase):
    def test_a_step_gives_outputs_or_the_loss_and_the_gradients_of_this_step(self):
        """Each step begins one of trees, and runs in the context. Gradients of inputs are given too."""
        model, x = _model(), torch.randn(3, 4)
        program = Program(model, (x,), context=torch.no_grad)
        with mock.patch("torch.compiler.cudagraph_mark_step_begin") as begin:
            out = program.step(model, program.args, program.kwargs)
        begin.assert_called_once()
        self.assertEqual((out.requires_grad, out), (False, model(x).detach()))
        program = Program(model, (x,), training=True)
        expected = model(x).sum().detach(), list(torch.autograd.grad(model(x).sum(), list(model.parameters())))
        for _ in range(2):
            self.assertEqual(program.step(model, program.args, program.kwargs), expected)
        program.clear_gradients(program.args, program.kwargs)
        self.assertTrue(all(p.grad is None for p in model.parameters()))
        x = torch.randn(3, requires_grad=True)
        program = Program(lambda x: {"loss": (x * x).sum()}, kwargs={"x": x}, training=True)
        self.assertEqual(program.step(program.fn, program.args, program.kwargs)[1], [2 * x.detach()])
        with self.assertRaisesRegex(NoLossError, "got Tensor"):
            Program(lambda: torch.ones(2), training=True).step(lambda: torch.ones(2), (), {})

    def test_resident_bytes(self):
        """Shared storage counts once, and wrapper subclasses, which have no memory, by the tensors in them."""
        x, module = torch.zeros(100), torch.nn.Module()
        self.assertEqual(Program(lambda *a: None, (x, x[50:])).resident_nbytes, 400)
        module.weight = torch.nn.Parameter(TwoTensor(torch.zeros(100), TwoTensor(torch.zeros(100), torch.zeros(100))))
        self.assertEqual(Program(module, (torch.zeros(10),)).resident_nbytes, 1240)

    def test_the_device_is_that_of_what_a_function_closes_over(self):
        """The benchmark waits for this device even if all inputs are elsewhere."""
        with absent_gpu("sm_90"), FakeTensorMode():
            model, table = torch.nn.Linear(2, 2, device="cuda"), torch.ones(2, device="cuda")
            for fn, device in ((lambda: model, "cuda"), (lambda: table, "cuda"), (lambda: later, "cpu")):
                self.assertEqual(Program(fn, (torch.ones(2),)).device.type, device)
        later = None


class TestRing(TestCase):
    def test_consecutive_calls_have_other_addresses(self):
        """There are as many sets of inputs as the budget allows, and at least two."""
        program = Program(lambda *a: None, (torch.randn(10), torch.randn(3)))
        ring = Ring(program, sets=3)
        fresh = list(itertools.islice(ring.fresh, 4)) + list(itertools.islice(ring.fresh, 4))
        for before, after in itertools.pairwise(fresh):
            for x, y in zip(before.args, after.args, strict=True):
                self.assertNotEqual(x.data_ptr(), y.data_ptr())
                self.assertEqual(x, y)
        same = list(itertools.islice(ring.same, 2))
        self.assertIs(same[0].args[0], same[1].args[0])
        for nbytes, sets in ((4 * 13 * 4, 4), (0, 2)):
            with mock.patch("pygraph_trees.benchmark.program.budget_nbytes", lambda device, nbytes=nbytes: nbytes):
                self.assertEqual(len(Ring(program, sets=8).sets), sets)

    def test_clones_keep_layout_and_aliasing(self):
        base, x = torch.randn(6, 8), torch.complex(torch.arange(4.0), torch.ones(4))
        views = base.t(), base[1:, 3:5], torch.ones(1, 4).expand(5, 4), x.conj(), torch._neg_view(x.real), x.conj().imag
        program = Program(lambda *a: None, views, {"w": {"x": torch.ones(2, requires_grad=True)}})
        own, clone = Ring(program, sets=2).sets
        for one, other in zip(own.args, clone.args, strict=True):
            self.assertEqual((other.stride(), other.storage_offset()), (one.stride(), one.storage_offset()))
            self.assertEqual((other.is_conj(), other.is_neg()), (one.is_conj(), one.is_neg()))
            self.assertEqual(one, other)
        self.assertEqual(clone.args[0].untyped_storage().data_ptr(), clone.args[1].untyped_storage().data_ptr())
        self.assertTrue(clone.kwargs["w"]["x"].requires_grad and clone.kwargs["w"]["x"].is_leaf)


class TestTiming(TestCase):
    def test_ways_take_turns_in_changing_order(self):
        self.assertEqual("".join(schedule("abcd", 3)), "abcd" + "dcba" + "bcda")

    def test_calls_are_steady_with_equal_times_and_no_new_recording(self):
        for times, recordings, expected in (
            ([1.0] * 4, [1] * 4, False),
            ([1.0] * 5, [1] * 5, True),
            ([1.0] * 8, [1] * 7 + [2], False),
            ([1.0] * 5 + [3.0], [1] * 6, False),
        ):
            self.assertEqual(is_steady(times, recordings), expected)

    def test_a_block_goes_through_the_inputs_in_order(self):
        self.assertEqual([Effort().block_calls(s) for s in (1.0, 0.01, 1e-6, 0.0)], [10, 20, 200, 200])
        seen, waits = [], []
        block = time_block(seen.append, itertools.count(), calls=3, settle=2, wait=lambda: waits.append(len(seen)))
        self.assertEqual((seen, waits), (list(range(8)), [2, 3, 3, 4, 4, 5, 5, 8]))
        self.assertLessEqual(block["host_us"] / 1e3, block["latency_ms"])
        self.assertLessEqual(block["latency_ms"], block["latency_p90_ms"])


class TestSettling(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.first = len(journal.functions)

    def function(self, route: str | None, *, awaits_table: bool = False) -> FunctionLog:
        found = FunctionLog("f", None, "inference", 1, {}, route=route, awaits_table=awaits_table)
        journal.add_function(found)
        return found

    def calls(self, share: float = 1.0, each_s: float = 1e-4, then: Callable[[int], None] = lambda number: None) -> int:
        """The number of calls that are made."""
        count = 0

        def call() -> None:
            nonlocal count
            count += 1
            then(count)

        with mock.patch.object(measure, "time", SimpleNamespace(monotonic=lambda: count * each_s)):
            call_until_chosen(call, self.first, share)
        return count

    def test_calls_end_when_a_route_can_be_chosen(self) -> None:
        """Inputs that move in some calls need more calls; if calls are long, they end after some seconds."""
        for route in (None, "by address: few kernels"):
            self.assertEqual([self.calls(share) for share in (1.0, 0.5, 0.0)], [CALLS, 2 * CALLS, CALLS])
            self.assertEqual(self.calls(each_s=0.5), 6)
            self.function(route)

    def test_calls_go_on_until_a_chosen_table_is_in_use(self) -> None:
        """For a minute at most, and only for functions of this program."""
        self.function(None)
        waiting = self.function("by address, until a table", awaits_table=True)
        self.assertEqual(self.calls(each_s=0.1), 600)

        def then(number: int) -> None:
            if number == 3 * CALLS:
                waiting.route_was_found("by table: many kernels")

        self.assertEqual([self.calls(then=then), self.calls()], [3 * CALLS, CALLS])
        self.function("by address, until a table", awaits_table=True)
        self.first = len(journal.functions)
        self.assertEqual(self.calls(), CALLS)


def _event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


class TestTrace(TestCase):
    def test_a_trace_tells_what_is_inside_of_graphs(self):
        events = [
            {"ph": "M", "name": "process_name", "args": {}},
            _event("cuda_runtime", "cudaLaunchKernel", 100, 2, correlation=1),
            _event("cuda_runtime", "cudaGraphLaunch", 103, 2, correlation=2),
            _event("cuda_driver", "cuGraphLaunch", 106, 2, correlation=3),
            _event("cuda_runtime", "cudaDeviceSynchronize", 109, 500),
            _event("kernel", "outside", 110, 5, correlation=1),
            _event("kernel", "inside", 120, 10, correlation=2),
            _event("kernel", "inside, at the same time", 125, 10, correlation=2),
            _event("gpu_memcpy", "inside, right after", 135.5, 4, correlation=3),
            _event("kernel", "inside by node", 150, 1, correlation=77, **{"graph node id": 9}),
            _event("kernel", "outside by node", 160, 1, correlation=78, **{"graph node id": 0}),
            _event("gpu_memset", "outside, soon after", 161.5, 2, correlation=79),
        ]
        spans = [("host", False, 0, 2, None), ("host", True, 3, 2, (0, 0)), ("host", True, 6, 2, (1, 1))]
        spans += [("gpu", False, 10, 5, None), ("gpu", True, 20, 15, (0, 0)), ("gpu", True, 35.5, 4, (1, 1))]
        spans += [("gpu", True, 50, 1, None), ("gpu", False, 60, 3.5, None)]  # the last two were close
        figures = {"kernels_total": 5, "kernels_graphed": 3, "gpu_ms": 0.020, "gpu_total_ms": 0.028}
        figures["timeline"] = tuple(Span(*span) for span in spans)
        for names, known in ((["a", "b"], ("a", "b")), (["a"], ())):
            self.assertEqual(read_trace({"traceEvents": events}, names), {**figures, "launches": known})
        self.assertEqual(read_trace({"traceEvents": []}), {})

    def test_traces_side_by_side(self):
        """Each begins at 0, in processes of its own; arrows stay within a trace."""

        def trace(start):
            name = {"ph": "M", "name": "process_name", "pid": 7, "ts": 0, "args": {"name": "python"}}
            arrow = {"ph": "s", "name": "ac2g", "id": 5, "pid": 7, "ts": start + 1}
            return {"traceEvents": [name, arrow, {**_event("kernel", "k", start, 2), "pid": 0}]}

        found = side_by_side({"eager": trace(100), "ours": trace(900)})["traceEvents"]
        self.assertEqual([event["pid"] for event in found], [1, 1, 2, 3, 3, 4])
        self.assertEqual([event["ts"] for event in found], [0, 1, 0] * 2)
        self.assertEqual([event["args"]["name"] for event in found[::3]], ["eager: python", "ours: python"])
        self.assertNotEqual(found[1]["id"], found[4]["id"])


class TestDifferences(TestCase):
    def test_the_largest_difference_is_found(self):
        """A snapshot survives a write."""
        x = torch.tensor([1.0, float("inf"), float("nan")])
        before = x.clone()
        a = verify.snapshot({"x": x, "n": torch.tensor([1, 5])})
        x.zero_()
        b = verify.snapshot({"x": before + 0.5, "n": torch.tensor([1, 2])})
        self.assertEqual(list(verify.differences(a, a)), [("['x']", 0.0), ("['n']", 0.0)])
        self.assertEqual((list(verify.differences(a, b)), a[0][1]), ([("['x']", 0.5), ("['n']", 3.0)], before))

    def test_outputs_that_cannot_be_compared_are_a_problem(self):
        one = verify.snapshot([torch.ones(2)])
        for other, problem in (
            ([torch.ones(3)], "shape"),
            ([torch.ones(2, dtype=torch.float64)], "dtype"),
            ([torch.ones(2, device="meta")], "device"),
            ([torch.ones(2), torch.ones(2)], "2 output tensors"),
            ([torch.tensor([1.0, float("nan")])], "NaN"),
        ):
            ((_, found),) = verify.differences(verify.snapshot(other), one)
            self.assertIn(problem, found)


class TestWays(TestCase):
    def test_ours_may_be_asked_for_with_flags(self):
        default = torch._inductor.config.triton.pygraph_outputs
        for name, *flags in (
            ("ours", "auto", "auto", default),
            ("ours:patch", "patch", "always", default),
            ("ours:table", "table", "always", default),
            ("ours:graphed", "auto", "always", default),
            ("ours:keep", "auto", "always", "keep"),
            ("ours:overwrite", "auto", "always", "upstream"),
        ):
            (way,) = make_ways(Program(lambda: None), [name])
            self.assertTrue(way.patched)
            with way.active():
                triton = torch._inductor.config.triton
                self.assertEqual([triton.pygraph_indirection, triton.pygraph_selective, triton.pygraph_outputs], flags)
        self.assertEqual(torch._inductor.config.triton.pygraph_selective, "auto")
        for name in ("jit", "upstream:patch", "ours:off", "ours:"):
            self.assertRaisesRegex(UnknownWayError, f"got '{name}'", make_ways, Program(lambda: None), ["eager", name])

    def test_ours_needs_the_patches(self):
        off = mock.patch.object(inductor_patches, "status", lambda: [inductor_patches.Status("trees", "disabled", ())])
        with off, self.assertRaisesRegex(NotPatchedError, "disabled"):
            make_ways(Program(fn=torch.sin, args=(torch.zeros(1),)), ["ours"])

    def test_patches_are_on_for_ours_alone_and_as_before_afterwards(self):
        """Each way with graphs has trees of its own."""
        ways, trees = make_ways(Program(lambda: None)), cudagraph_trees.get_container(0)
        self.addCleanup(inductor_patches.install if patches_on() else inductor_patches.uninstall)
        for start in (True, False):
            inductor_patches.install() if start else inductor_patches.uninstall()
            seen = []
            for way in ways:
                with way.active():
                    self.assertEqual(patches_on(), way.name == "ours")
                    seen.append(cudagraph_trees.get_container(0))
                self.assertEqual((patches_on(), len(way.managers)), (start, 0))
            self.assertEqual([container is trees for container in seen], [True, True, False, False])
            self.assertIsNot(seen[2], seen[3])
            with self.assertRaises(ZeroDivisionError), ways[-1].active():
                1 / 0  # noqa: B018
            self.assertEqual(patches_on(), start)
            self.assertIs(cudagraph_trees.get_container(0), trees)

    def test_ways_do_not_share_compiled_code(self):
        program = Program(lambda x: x @ x, (torch.randn(8, 8),), context=torch.no_grad)  # needs no kernel
        with mock.patch.object(OwnInductor, "__call__", autospec=True, side_effect=OwnInductor.__call__) as compiled:
            for way in make_ways(program, ["compile", "upstream", "ours"]) * 2:
                with way.active():
                    out = program.step(way.callable, program.args, program.kwargs)
                self.assertEqual(out, program.args[0] @ program.args[0])
        with_graphs = [call.args[0].config.get("triton.cudagraphs", False) for call in compiled.call_args_list]
        self.assertEqual(with_graphs, [False, True, True])


class TestComparison(TestCase):
    def test_four_ways_on_the_cpu(self):
        program = Program(_model(), (torch.randn(3, 4),), context=torch.no_grad, name="toy", batch=3)
        steps: list[tuple[int, int]] = []
        stages: list[tuple[str, int]] = []
        for stage, found in Comparison(
            program, effort=FAST, progress=lambda done, total, text: steps.append((done, total))
        ).stages():
            stages.append((stage, sum(m.latency_ms is not None for m in found)))
        expected = itertools.product(("eager", "compile", "upstream", "ours"), ("same", "fresh"))
        self.assertEqual([(m.way, m.regime) for m in found], list(expected))
        for m in found:
            self.assertEqual((m.workload, m.mode, m.batch, m.error), ("toy", "inference", 3, None))
            for figure in (m.latency_ms, m.latency_p90_ms, m.throughput_ms, m.host_us, m.compile_s):
                self.assertGreater(figure, 0)
            self.assertLess(m.max_diff, 1e-5)
            self.assertEqual({len(values) for values in m.samples.values()}, {FAST.rounds})
            self.assertEqual(m.ring, 1 if m.regime == "same" else 3)
            of_the_gpu = {m.gpu_ms, m.copied_bytes, m.kernels_total, m.recordings, m.peak_bytes}
            self.assertEqual((of_the_gpu, m.routes), ({None}, []))
        self.assertEqual([m.max_diff_upstream for m in found if m.way == "ours"], [0.0, 0.0])
        expected = [("preparing", 0)] * 3 + [("prepared", 0), ("settled", 0), ("timed", 8), ("inspected", 8)]
        self.assertEqual(stages, expected)
        self.assertEqual(steps[-1][0], steps[-1][1])
        self.assertEqual(steps, sorted(steps))

    def test_a_way_that_reads_the_inputs_of_another_call_is_found_out(self):
        """A training step and a program that writes to its inputs are not mistaken for it."""
        kept: list[torch.Tensor] = []

        def stale(x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            return kept[0] * 2

        doubling = Program(lambda x: x * 2, (torch.ones(3),))
        writing = Program(lambda x: x.add_(1).clone(), (torch.zeros(3),))
        trained = Program(_model(), (torch.randn(3, 4),), training=True)
        for program, ours, last in ((doubling, stale, 2.0), (writing, writing.fn, 0.0), (trained, trained.fn, 0.0)):
            ways = [Way(name, fn, patched=False, trees=None) for name, fn in (("eager", program.fn), ("ours", ours))]
            with mock.patch("pygraph_trees.benchmark.measure.make_ways", lambda *_, ways=ways: ways):
                found = compare(program, effort=FAST)
            self.assertEqual([(m.error, m.max_diff) for m in found], [(None, d) for d in (0.0, 0.0, 0.0, last)])
        self.assertTrue(all(p.grad is None for p in trained.fn.parameters()))


class TestVerify(TestCase):
    """Results that were not compared do not count as equal."""

    def verified(self, fn, *args, recorded=()):
        """``pygraph_trees.verify`` on a machine that seems to have a GPU, with these recordings."""
        looks = itertools.chain([True], itertools.repeat(False))  # only verify itself is told so
        recordings = mock.patch("pygraph_trees.benchmark.verify.recordings", lambda managers: list(recorded))
        with mock.patch.object(torch.cuda, "is_available", lambda: next(looks)), recordings:
            pygraph_trees.verify(fn, *args)

    def test_arguments_of_wrapper_subclasses_stay_such(self):
        """Each call gets a copy, and the tensors in the copies of earlier calls are overwritten."""
        given, seen = TwoTensor(torch.ones(2), torch.arange(2.0)).requires_grad_(), []

        @torch.compiler.disable
        def noted(x):
            seen.append(x)
            self.assertEqual((type(x), x.requires_grad, x.a, x.b), (TwoTensor, True, torch.ones(2), torch.arange(2.0)))
            return x.a + x.b

        self.verified(lambda x: noted(x), given, recorded=[object()])
        self.assertGreaterEqual(len(seen), 6)
        self.assertTrue(all(x.a.isnan().all() and x.b.isnan().all() for x in seen))
        self.assertTrue(given.a.isfinite().all() and given.b.isfinite().all())

    def test_what_a_copy_shares_with_an_argument_is_not_overwritten(self):
        given = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
        copied = verify._elsewhere(given)
        self.assertIs(copied.offsets(), given.offsets())
        verify._spoil(copied, verify._storages([given]))
        self.assertTrue(copied.values().isnan().all())
        self.assertEqual((given.offsets().tolist(), given.values()), ([0, 2, 6], torch.ones(6, 3)))

    def test_without_a_recording_nothing_is_verified(self):
        """The reasons are those that the report has of the calls that were verified."""

        @torch.compiler.disable
        def logged(x):
            journal.add_graph(GraphLog("M", "0/0", "inference", (), dropped="cpu device"))
            journal.add_function(FunctionLog("M", "2/0", "inference", 1, {}, ungraphed_reason="mutated inputs"))

        journal.add_graph(GraphLog("M", "0/0", "inference", (), dropped="before"))
        unknown = "nothing of it was compiled for a GPU"
        for fn, why in ((torch.sin, unknown), (lambda x: None, unknown), (logged, "cpu device; mutated inputs")):
            with self.assertRaisesRegex(verify.NothingVerified, rf"no part of it ran in a CUDA graph \({why}\)$"):
                self.verified(fn, torch.ones(3, 4))

    def test_a_recorded_program_is_compared(self):
        self.verified(lambda x: x @ x, torch.ones(3, 3), recorded=[object()])
        draws = itertools.count()
        with self.assertRaises(verify.DiffersUngraphed):
            self.verified(torch.compiler.disable(lambda x: x + next(draws)), torch.ones(3), recorded=[object()])


if __name__ == "__main__":
    run_tests()
