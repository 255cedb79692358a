"""Rewritten graphs that mix CPU and GPU: the same values in the same places, and less for the GPU to wait for."""

import copy
import importlib.util
import math
import re
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from last_place import COUNT, EQUAL, NEAR, STAYS, numbers
from mixed_programs import GPU, programs, run_steps, traced
from placement_programs import EXACT, PROGRAMS
from real_programs import REAL, noise_schedule, tokens
from torch import fx
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.fake_gpu import absent_gpu, lower
from pygraph_trees.placement import place, place_for_graphs
from pygraph_trees.placement.nodes import is_copy_between_devices, is_on_cpu, is_on_gpu
from pygraph_trees.placement.plan import How
from pygraph_trees.reasons import Reason
from pygraph_trees.report.compiled import partitions_of
from pygraph_trees.report.records import PLACED, WHY_NOT_PLACED

EXAMPLES = settings(max_examples=100, deadline=None)


class OnCpu(fx.Interpreter):
    """Runs a graph with both devices on the CPU."""

    def call_function(self, target, args, kwargs):
        on_cpu = lambda a: torch.device("cpu") if isinstance(a, torch.device) else a  # noqa: E731
        args, kwargs = fx.node.map_aggregate((args, kwargs), on_cpu)
        found = super().call_function(target, args, kwargs)
        # A copy between devices never returns its source.
        return found.clone() if target is torch.ops.prims.device_put.default else found


class TestPlacement(TestCase):
    def check(self, program, inputs, **how):
        """Runs both graphs on the CPU and compares them; returns the rewritten one and what was done."""
        with absent_gpu("sm_90"):
            before = traced(program, inputs)
            after = copy.deepcopy(before)
            placed = place(after.graph, **how)
            after.recompile()
        real = [x.clone() for x, _ in inputs]
        wanted = OnCpu(before).run(*[x.clone() for x in real])
        found = OnCpu(after).run(*[x.clone() for x in real])
        results = (module.graph.output_node().args[0] for module in (after, before))
        for one, other, *nodes in zip(found, wanted, *results, strict=True):
            self.assertEqual(one, other, rtol=0, atol=0, exact_dtype=True)
            self.assertEqual(one.stride(), other.stride())
            self.assertEqual(*((v.device, v.dtype, v.shape, v.stride()) for v in (node.meta["val"] for node in nodes)))
        memory, expected = ([t.untyped_storage().data_ptr() for t in values] for values in (found, wanted))
        self.assertEqual([memory.index(m) for m in memory], [expected.index(m) for m in expected])
        return after, placed

    def test_a_large_input_is_read_at_the_call_if_only_a_view_is_copied_without_waiting(self):
        put, large = torch.ops.prims.device_put.default, torch.rand(100_000)
        for view, is_late in ((lambda x: x, True), (lambda x: x.expand(2, -1), False)):  # the CPU gathers its elements
            module, _ = self.placed_program(lambda x, y: put(view(x), GPU, True) + y, large, torch.rand(1))  # noqa: B023
            self.assertEqual([n.args[2] for n in module.graph.nodes if n.target is put], [is_late])

    @EXAMPLES
    @given(programs(), st.booleans())
    def test_any_program(self, drawn, exact):
        inputs, steps, outputs = drawn
        after, placed = self.check(run_steps(steps, outputs), inputs, exact=exact)
        if placed.why_not is None:
            for node in after.graph.nodes:
                if is_copy_between_devices(node) and is_on_gpu(node):
                    self.assertFalse(is_on_cpu(node.args[0]) and node.args[0].op == "placeholder", node)

    def test_single_precision_math_on_inputs_moves_unless_results_may_be_further_apart(self):
        for name, function in {**EQUAL, **NEAR, **STAYS}.items():
            with self.subTest(name):
                program = lambda v, x: torch.ops.prims.device_put(function(v), GPU)  # noqa: B023, E731
                module, placed = self.placed_program(program, torch.zeros(COUNT), torch.zeros(1))
                if name in STAYS:
                    self.assertTrue(any("input" not in stay.why for stay in placed.stays), placed.stays)
                    continue
                self.assertTrue(all(stay.how is How.STAGED and "input" in stay.why for stay in placed.stays))
                found = OnCpu(module).run(numbers(), torch.zeros(1))
                self.assertEqual(found, function(numbers()), rtol=0, atol=0, exact_dtype=True)

    def test_what_the_gpu_would_round_otherwise_is_not_read_by_what_jumps(self):
        for read, moves in (
            (lambda v, x: v.floor(), False),
            (lambda v, x: v.long(), False),
            (lambda v, x: v == 1.0, False),
            (lambda v, x: torch.div(v, 3, rounding_mode="floor") + x, False),
            (lambda v, x: ((v * 2).bfloat16() + 1 > 0.5) * x, False),
            (lambda v, x: (v == torch.ones(64, device=x.device)) * x, False),
            (lambda v, x: torch.bucketize(v, torch.arange(9.0, device=x.device)), False),
            (lambda v, x: (v * v - v).log1p() + x, False),
            (lambda v, x: (v * v - v).sqrt() + x, False),
            (lambda v, x: (v * v + 1).sqrt() + x, True),
            (lambda v, x: v * x + v.sin(), True),
            (lambda v, x: (v * x).floor(), True),  # of a value that only the GPU has
        ):
            program = lambda v, x: read(torch.ops.prims.device_put(v / 41, GPU), x)  # noqa: B023, E731
            module, placed = self.placed_program(program, v := torch.arange(0, 64 * 41, 41.0), torch.rand(64))
            jumps = [stay.why.reason for stay in placed.stays if stay.why.reason is not Reason.INPUT]
            self.assertEqual(jumps, [Reason.READ_BY_JUMP] * (not moves))
            self.assertEqual(OnCpu(module).run(v, torch.ones(64)), read(v / 41, torch.ones(64)))

    def placed_program(self, program, on_cpu, on_gpu):
        with absent_gpu("sm_90"):
            module = traced(program, [(on_cpu, "cpu"), (on_gpu, "gpu")])
            placed = place(module.graph)
            module.recompile()
        return module, placed

    def test_an_integer_that_half_precision_is_compared_with_is_rounded_to_it(self):
        """The CPU rounds it. Inductor does since torch 2.13, and earlier compares in single precision."""
        program = lambda v, x: torch.ops.prims.device_put(v.half() == 2049, GPU)  # noqa: E731
        module, _ = self.placed_program(program, v := torch.arange(2046.0, 2054), torch.rand(8))
        (compared,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.eq.Scalar)
        self.assertEqual((compared.args[1], is_on_gpu(compared)), (2048, True))
        self.assertEqual(OnCpu(module).run(v, torch.rand(8)), v.half() == 2049)

    def test_several_gpus(self):
        """The graph is left alone, and the reason is noted."""
        with absent_gpu("sm_90"), FakeTensorMode() as mode:
            graph = fx.Graph()
            on_cpu, *on_gpus = (graph.placeholder(name) for name in "cab")
            on_cpu.meta["val"] = torch.empty(4)
            for index, node in enumerate(on_gpus):
                node.meta["val"] = FakeTensor(mode, torch.empty(4, device="meta"), torch.device("cuda", index))
            moved = graph.call_function(torch.ops.prims.device_put.default, (on_cpu, GPU))
            moved.meta["val"] = torch.empty(4, device=GPU)
            graph.output((moved, *on_gpus))
            before = str(graph)
            placed = place(graph)
        self.assertEqual((str(graph), placed.why_not, placed.moves), (before, "it has several GPUs", []))


ONE = torch.tensor([1])


def plus(function):
    """A program that adds what a function gives to a tensor on the GPU."""
    return lambda x, *given: x + function(*given).to("cuda")


def written_to_a_row(x, v):
    y = x * v.to("cuda", non_blocking=True)
    rows = torch.zeros(4, 64)
    rows[1] = x
    return y, rows


def written_to(x, v):
    copy = v.to("cuda", non_blocking=True)
    v.copy_(torch.zeros(64))
    return x * copy


def calls(graph, *names):
    return [n for n in graph.gm.graph.nodes if n.op == "call_function" and any(s in str(n.target) for s in names)]


def devices(nodes):
    return [node.meta["val"].device.type for node in nodes]


def staged(graph):
    (node,) = calls(graph, "pygraph_trees.staged.default")
    return node


class TestLowered(TestCase):
    """Partitions of the code that Inductor generates for a fake GPU."""

    def partitions(self, program, inputs, how):
        torch._dynamo.reset()
        with torch._inductor.config.patch({"triton.pygraph_placement": how}):
            (graph,) = lower(program, inputs)
        found = [part.graphed for part in partitions_of(graph.graph.scheduler)]
        return graph, (sum(found), len(found) - sum(found))

    def full(self, program, *inputs, size=64):
        """The graph of a program of ``size`` numbers on the GPU and of ``inputs``, and its partitions of each kind."""
        return self.partitions(program, (torch.empty(size, device="meta"), *inputs), "full")

    def test_families(self):
        for how, programs_ in (("full", PROGRAMS), ("exact", EXACT)):
            for program in programs_:
                with self.subTest(program.family, name=program.name, how=how):
                    _, found = self.partitions(program.fn, [item.make("meta", 0) for item in program.inputs], how)
                    self.assertEqual(found, (how == "exact" and program.exact) or program.full)

    def test_real_programs(self):
        for build in REAL:
            with self.subTest(build.__name__):
                if build is tokens and importlib.util.find_spec("transformers") is None:
                    raise unittest.SkipTest("transformers is not installed")
                program, inputs = build("meta", small=True)
                self.assertEqual(self.partitions(program, inputs, "off")[1], (1, 1))
                # The CPU looks up steps of the noise schedule, so a step out of bounds is an error.
                self.assertEqual(self.partitions(program, inputs, "full")[1], (1, int(build is noise_schedule)))

    def test_kernels_round_to_half_precision_as_the_cpu(self):
        """In a kernel, half precision is single precision until it is stored."""
        half, brain = torch.float16, torch.bfloat16
        for program, source, *inputs in (
            (plus(lambda v: v.to(half).flip(0).float()), r"\.to\(tl\.float16\)"),
            (plus(lambda v: v.to(brain).flip(0).float()), r"\.to\(tl\.bfloat16\)"),
            (plus(lambda v: v.to(half) > 0.1), r"\.to\(tl\.float16\)"),
            (plus(lambda v: v.to(brain) > 0.1), rf"{torch.tensor(0.1, dtype=brain).item()}, tl\.float32"),
            # A value from the GPU that was stored for the copy.
            (lambda x, v: x + v.cuda() * ((x * 0.3).to(half).cpu() > 0.1).cuda(), r"\.to\(tl\.float16\)"),
            (lambda x, v: torch.copysign(x, (-v).to("cuda")), r"-1\.0"),  # also the sign of a zero
            # Numbers beside half precision are rounded too.
            (plus(lambda v, number: torch.where(v > 0.5, v, number)), r"\.to\(tl\.bfloat16\)", torch.tensor(0.1)),
            (plus(lambda v, number: v.masked_fill(v > 0.5, number)), r"\.to\(tl\.bfloat16\)", torch.tensor(0.1)),
            (plus(lambda v, _: torch.constant_pad_nd(v, [0, 32], 257)[32:]), r"\.to\(tl\.bfloat16\)", torch.tensor(0)),
        ):
            with self.subTest(source=source):
                graph, found = self.full(program, torch.rand(64).to(brain if inputs else None), *inputs)
                self.assertEqual(found, (1, 0))
                self.assertRegex(graph.source_code, source)

    def test_minus_zero_as_a_number_stays_on_the_cpu_or_is_loaded(self):
        for function in (
            lambda v: torch.where(v > 0.5, v, -0.0),
            lambda v: v.masked_fill(v > 0.5, -0.0),
            lambda v: v + -0.0,
        ):
            program = lambda x, v: torch.copysign(x, function(v).to("cuda"))  # noqa: B023, E731
            graph, _ = self.full(program, torch.rand(64))
            self.assertIn("staged", graph.source_code + str(graph.gm.graph))
            loads = "_folded_constant0_cuda0" in graph.source_code
            self.assertEqual("tl.where" in graph.source_code, loads)
            self.assertNotRegex(graph.source_code, r"tl\.full\(\[1\], -?0\.0, tl\.float32\)" if loads else "tl.where")

    def test_what_a_kernel_would_compute_otherwise(self):
        """Such operators stay on the CPU; the same operators with other types move."""
        halves, integers, small = torch.rand(64).bfloat16(), torch.arange(64), torch.ones(64, 9, dtype=torch.int8)
        mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)

        def masked(v):
            written = v.clone()
            written[mask, torch.tensor([4, 4])] = 1.0
            return written.sum()

        for program, inputs, name, moves in (
            (lambda v, i: v == i, (halves, integers), "eq", False),
            (lambda v: v < torch.tensor(0.1), (halves,), "lt", False),
            (lambda v, i: v.float() == i, (halves, integers), "eq", True),
            (lambda v: v < 0.1, (halves,), "lt", True),
            (lambda v: v.sum(1, dtype=torch.int8), (small,), "sum", False),
            (lambda v: v.prod(1, dtype=torch.uint8), (small,), "prod", False),
            (lambda v: v.cumsum(1, dtype=torch.int16)[:, 0], (small,), "cumsum", False),
            (lambda v: v.view(64, 1).sum(1), (integers,), "sum", True),
            (lambda v: (v > 0.5).view(torch.uint8), (integers.float(),), "view.dtype", False),
            (lambda v: v.view(torch.int32), (integers.float(),), "view.dtype", True),
            (lambda v: v.view(torch.bool), (torch.ones(64, dtype=torch.uint8),), "view.dtype", False),
            (lambda v: v.clamp(min=1e-50), (integers.float(),), "clamp", False),
            (lambda v: v.clamp(min=1e-30), (integers.float(),), "clamp", True),
            (masked, (torch.zeros(2, 5, 3),), "index_put", False),
        ):
            with self.subTest(name, moves=moves):
                graph, _ = self.full(plus(program), *inputs)
                found = calls(graph, f"aten.{name}.") or calls(graph, f"aten.{name}")
                self.assertEqual(devices(found), ["cuda" if moves else "cpu"])

    def test_fractions_of_sizes(self):
        """A kernel would compute them in single precision."""
        for program, moves in (
            (lambda v, n: v + math.ceil(n / 3), False),
            (lambda v, n: v + int(math.sqrt(n)), False),
            (lambda v, n: (v > n / 3).long(), False),
            (lambda v, n: v + (n * n + 1) // 2, True),
        ):
            with self.subTest(moves=moves), torch._dynamo.config.patch(assume_static_by_default=False):
                graph, _ = self.full(lambda x, v: x.sum() + program(v, x.shape[0]).to("cuda"), torch.arange(7))  # noqa: B023
                types = torch.int64, torch.bool
                found = [n for n in calls(graph, "aten.add.Tensor", "aten.gt.Scalar") if n.meta["val"].dtype in types]
                self.assertEqual(devices(found), ["cuda" if moves else "cpu"])

    def test_narrow_integers_that_go_to_the_cpu_and_back(self):
        """In the CPU's memory, which has their type, they wrap; in a kernel that kept them, they would not."""
        types = (torch.uint8, False), (torch.int16, False), (torch.int32, True), (torch.bool, True), (None, True)
        for dtype, moves in types:
            function = lambda x: x > 0 if dtype is None else torch.arange(300, device="cuda").to(dtype)  # noqa: B023, E731
            graph, _ = self.full(lambda x: x * function(x).cpu().cuda(), size=300)  # noqa: B023
            self.assertEqual(not any(map(is_on_cpu, graph.gm.graph.nodes)), moves)

    def test_constants_that_are_looked_up_where_they_may_not_be(self):
        """On the CPU, an index out of bounds is an error; on the GPU, it ends all work."""
        lookups = (
            lambda v: v[[0, 3, 5]],
            lambda v: v.gather(0, torch.tensor([0, 3, 5])),
            lambda v: v.index_select(0, torch.tensor([0, 3, 5])),
            lambda v: v.expand(9, -1)[[0, 3, 5], [0, 3, 5]],
            lambda v: torch.nn.functional.embedding(torch.tensor([0, 3, 5]), v[:, None])[:, 0],
        )
        cases = [(function, (torch.rand(count),), count == 6) for count in (5, 6) for function in lookups]
        cases += [(lambda: torch.arange(5.0)[[0, 3, 5]], (), False)]
        cases += [(lambda v: v[torch.arange(3) * 2], (torch.rand(5),), True)]
        for function, inputs, is_on_gpu_ in cases:
            graph, _ = self.full(plus(function), *inputs, size=3)
            self.assertEqual(devices(calls(graph, "index", "gather", "embedding")), ["cuda" if is_on_gpu_ else "cpu"])
        with torch._dynamo.config.patch(assume_static_by_default=False):
            graph, _ = self.full(plus(lookups[0]), torch.rand(9), size=3)
        self.assertEqual(devices(calls(graph, "aten.index")), ["cpu"])

    def test_what_is_staged_can_stand_for_it(self):
        """The graph is given memory for its elements alone, in which code cannot take views with other strides. The
        program copies a part of an input with gaps in its stream; a copy on the CPU would read it at the call."""
        rows, wide = torch.rand(128, 256), torch.rand(128, 512)[:, :256]
        view, computed, nothing = r"^reinterpret_tensor\(arg", r"^buf\d+$", r"^$"
        for function, value, staged_is in (
            (lambda v: v[3].to("cuda"), rows, view),
            (lambda v: v.t()[:, 3].to("cuda"), rows, view),
            (lambda v: v[3, 4], wide, computed),
            (lambda v: v.lgamma()[3].to("cuda"), rows, computed),
            (lambda v: v.sort(0).values[3].to("cuda"), rows, computed),
            (lambda v: v.split(64)[1].view(-1)[:256].to("cuda"), rows, view),
            (lambda v: v[3].to("cuda"), wide, nothing),
            (lambda v: v[3].to("cuda", non_blocking=True), wide, nothing),
            (lambda v: v[1, 3].to("cuda"), rows.expand(2, 128, 256), nothing),
        ):
            graph, _ = self.full(lambda x, v: x * function(v), value, size=256)  # noqa: B023
            hosts = re.findall(r"pygraph_trees\.staged\.default\(buf\d+, (.*?)(?:, \d)?\)\n", graph.source_code)
            self.assertEqual(len(hosts), int("pygraph_trees.staged" in graph.source_code))
            self.assertRegex("".join(hosts), staged_is)
            if staged_is is nothing:
                self.assertNotIn("cpp_fused", graph.source_code)

    def test_when_a_program_reads_it(self):
        """The program waits for what it takes from the GPU, and reads the tensor on the CPU after that."""
        product = lambda function: lambda x, v: x * function(v)  # noqa: E731
        beside = lambda function: lambda x, v: (x * v.to("cuda", non_blocking=True), function(x))  # noqa: E731
        waits, one = HostRead.IN_ORDER, (1, 0)
        for program, read, partitions, *value in (
            (product(lambda v: v.to("cuda")), waits, one),
            (product(lambda v: v.to("cuda", non_blocking=True)), HostRead.LATER, one),
            (product(lambda v: v.to("cuda", non_blocking=True) + v.to("cuda")), waits, one),
            (product(lambda v: (v * 2).to("cuda", non_blocking=True)), HostRead.AT_ONCE, one),
            (product(lambda v: v[0]), HostRead.AT_ONCE, one),
            (product(lambda v: v.view(8, 8).to("cuda", non_blocking=True).view(-1)), HostRead.LATER, one),
            (product(lambda v: v.view(8, 8).to("cuda").view(-1)), waits, one),
            (product(lambda v: v[:32].to("cuda", non_blocking=True).repeat(2)), HostRead.LATER, one),
            (product(lambda v: v[:32].to("cuda", non_blocking=True).repeat(2) + v[0]), waits, one),
            (product(lambda v: torch.zeros(64, device="cuda").copy_(v)), waits, one),
            # The program waits for another copy, and so for this one too.
            (product(lambda v: v.to("cuda", non_blocking=True) + torch.arange(64).flip(0).to("cuda")), waits, one),
            (beside(lambda x: x.cpu()), waits, None),
            (beside(lambda x: x.cpu().to("cuda", non_blocking=True)), waits, None),
            (beside(lambda x: torch.empty(64).copy_(x)), waits, None),
            (beside(lambda x: torch.zeros(4, 64).index_copy_(0, ONE, x[None].cpu())), waits, None),
            (beside(lambda x: torch.zeros(4, 64).select_scatter(x.cpu(), 0, 1)), waits, None),
            (beside(lambda x: x.nonzero().sum()), waits, None),
            (beside(lambda x: torch.cond(x[0] > 0, torch.sin, torch.cos, (x,))), waits, None),
            (beside(lambda x: (x[x.long()], x.sort()[1])), HostRead.LATER, None),
            (lambda x, v: x * (v * x.cpu()).to("cuda", non_blocking=True), waits, None),
            (written_to_a_row, waits, None),
            (written_to, waits, None),
            (lambda x, v: torch.where(x > 0, v, x), waits, None, torch.tensor(2.0)),
            (lambda x, i: x[i], waits, None, torch.arange(64)),
        ):
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
                graph, found = self.full(program, *(value or [torch.rand(64)]))
            with self.subTest(program=calls(graph, "aten")):
                self.assertEqual((staged(graph).args[2], found), (read, partitions or found))

    def test_symbolic_sizes(self):
        """A view of an input without gaps needs no work on the CPU, whatever its size."""
        value = torch.rand(128, 256)
        gaps = torch.rand(128, 512)[:, :256]
        for given_, wanted in ((value, (1, 0)), (value[:, ::1].t().t(), (1, 0)), (gaps, (1, 1))):
            with torch._dynamo.config.patch(assume_static_by_default=False):
                graph, found = self.full(lambda x, v: x * v[3].to("cuda"), given_, size=256)
            shapes = [node.meta["val"] for node in graph.gm.graph.find_nodes(op="placeholder")]
            self.assertTrue(any(isinstance(shape, torch.SymInt) for shape in shapes))
            self.assertEqual(found, wanted)

    def test_a_number_that_only_the_cpu_needs_is_not_given_to_a_graph(self):
        """Each of its values would need a recording."""
        for program, moves in (
            (lambda x, v, n: x.masked_fill((v > n).to("cuda"), 0), False),
            (lambda x, v, n: x.masked_fill((v > n).to("cuda"), 0) + n, True),
            (lambda x, v, n: x + torch.full((64,), n).to("cuda"), True),  # upstream does the same
        ):
            with self.subTest(moves=moves), torch._dynamo.config.patch(assume_static_by_default=False):
                found = self.records(program, torch.arange(64), 5)
                others = [why for _, why, _ in found if why not in (None, "it is an input")]
                self.assertEqual(others, [] if moves else [Reason.NUMBER_FOR_CPU()])

    def test_as_many_numbers_as_the_data_say(self):
        def program(x, v, mask):
            written = torch.zeros(64)
            written[mask] = v[mask]
            return x * written.to("cuda")

        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            found = self.records(program, torch.rand(64), torch.rand(64) > 0.5)
        self.assertEqual([how for how, *_ in found], ["staged"])

    def test_nothing_is_staged_in_branches_and_loops(self):
        """A copy inside them has no node in the graph that could be given an address."""

        def program(x, v):
            branches = (lambda x, v: x * v.to("cuda"), lambda x, v: x - v.to("cuda"))
            return torch.cond(x.sum() > 0, *branches, (x, v)) + v.to("cuda")

        graph, _ = self.full(program, torch.rand(64))
        self.assertEqual(graph.source_code.count("pygraph_trees.staged.default("), 1)

        def loop(x, v):
            return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * v.to("cuda")), (torch.tensor(0), x))

        graph, _ = self.full(loop, torch.rand(64))
        self.assertNotIn("pygraph_trees.staged", graph.source_code)
        self.assertEqual(devices(graph.gm.graph.output_node().args[0]), ["cpu", "cuda"])

    def test_one_of_several_values_on_several_devices(self):
        """The value is on the CPU, although the tuple it comes from is not."""

        def program(x):
            count, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + 1), (torch.tensor(0), x))
            return x * count.to("cuda")

        graph, _ = self.full(program)
        self.assertIsNone(graph.gm.meta[WHY_NOT_PLACED])
        (count,) = [record for record in graph.gm.meta[PLACED] if record.value.startswith("getitem")]
        self.assertEqual((count.how, count.why), ("staged", "it is computed from values of several devices"))

    def test_copies_outside_are_waited_for_as_in_the_program(self):
        """After waiting, the program may write to its tensor."""
        for blocking in (True, False):
            program = lambda x, v: x * v.to("cuda", non_blocking=not blocking)  # noqa: B023, E731
            graph, found = self.full(program, torch.rand(1 << 20), size=1 << 20)
            self.assertEqual(found, (1, 1))
            self.assertIn(f".copy_(arg0_1, {not blocking})", graph.source_code.replace("arg1_1", "arg0_1"))

    def test_a_wrapper_in_cpp_stages_nothing(self):
        with torch._inductor.config.patch({"cpp_wrapper": True}), absent_gpu("sm_90"):
            inputs = [(torch.rand(4), "gpu"), (torch.rand(4), "cpu")]
            module = traced(lambda x, v: x * torch.ops.prims.device_put(v, GPU), inputs)
            with torch._inductor.config.patch({"triton.cudagraphs": True, "triton.pygraph_placement": "full"}):
                self.assertTrue(place_for_graphs(module.graph, lambda: True))
        self.assertEqual([record.how for record in module.meta[PLACED]], ["copied"])

    def test_without_addresses(self):
        """Values that graphs cannot copy themselves are copied outside the graphs."""
        for flags in ({"triton.pygraph_indirection": "off"}, {"triton.cudagraph_trees": False}):
            for function in (lambda v: v, lambda v: v + 1):
                with self.subTest(flags), torch._inductor.config.patch(flags):
                    graph, found = self.full(plus(function), torch.rand(64))
                    self.assertEqual(found, (1, 1))
                    self.assertNotIn("pygraph_trees.staged", graph.source_code)

    def records(self, program, *inputs):
        """For each CPU value that the GPU needs: what became of it, why, and the line of the program."""
        graph, _ = self.full(program, *inputs)
        self.assertIsNone(graph.gm.meta[WHY_NOT_PLACED])
        lines = [(record.source or "").partition(": ")[::2] for record in graph.gm.meta[PLACED]]
        self.assertTrue(all(place.startswith(__file__) for place, _ in lines if place), lines)
        return [(r.how, r.why, line) for r, (_, line) in zip(graph.gm.meta[PLACED], lines, strict=True)]

    def test_what_became_of_values_and_why(self):
        """Constants that are created on the GPU or folded have tests of their own."""

        def returned_too(x, v):
            more = v + 1
            return more, x + more.to("cuda")

        def random(x, v):
            noise = torch.rand(64)
            return x + noise.to("cuda")

        def product(x, v):
            squares = v[:, None] @ v[None]
            return x + squares.to("cuda")[0]

        def of_a_user(x, v):
            louder = torch.ops.pygraph_test_placement.loud(v)
            return x + louder.to("cuda")

        def made(x, v):
            evens = torch.arange(64) * 2
            return x + evens.to("cuda")

        for program, *wanted in (
            (returned_too, ("made on the GPU", None, "more = v + 1"), ("staged", "it is an input", "")),
            (random, ("staged", "it is random", "noise = torch.rand(64)")),
            (product, ("staged", "its result may differ on the GPU", "squares = v[:, None] @ v[None]")),
            (of_a_user, ("staged", "it is a custom operator", "louder = torch.ops.pygraph_test_placement.loud(v)")),
        ):
            with self.subTest(program.__name__):
                self.assertEqual(self.records(program, torch.rand(64)), wanted)
        found = {(how, line) for how, _, line in self.records(made, torch.rand(64))}
        self.assertEqual(found, {("made on the GPU", "evens = torch.arange(64) * 2")})

    def test_what_is_written_to_is_written_to_on_the_cpu(self):
        graph, _ = self.full(plus(lambda v: v.add_(1)), torch.rand(64))
        self.assertIn("cpp_fused", graph.source_code)

    def test_too_many_bytes_to_be_staged(self):
        copied = "copied", f"it is an input, and {(320 << 10) + 4} bytes are too many to stage"
        for nbytes, wanted in ((320 << 10, ("staged", "it is an input")), ((320 << 10) + 4, copied)):
            (record,) = self.records(lambda x, v: x.sum() + v.to("cuda"), torch.rand(nbytes // 4))
            self.assertEqual(record[:2], wanted)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            chosen = lambda x, v, mask: x.sum() + v[mask].to("cuda").sum()  # noqa: E731
            ((how, why, _),) = self.records(chosen, torch.rand(64), torch.rand(64) > 0.5)
        self.assertEqual((how, why.rpartition(", and ")[2]), ("copied", "its size is not known"))

    def test_scalars_of_numpy(self):
        for program in (lambda x, s: x * s, lambda x, s: x * torch.as_tensor(s).to("cuda")):
            for scalar in (numpy.float32(2.5), numpy.int64(3)):
                graph, found = self.full(program, scalar)
                self.assertEqual((found, [record.how for record in graph.gm.meta[PLACED]]), ((1, 0), ["staged"]))

    def test_small_constants_that_stay_on_the_cpu_need_no_kernel_in_cpp(self):
        span = lambda x, *_: (x.sin(), 512 - (count := torch.tensor(min(len(x), 64))), 512 + count)  # noqa: E731
        for program, inputs, in_cpp in (
            (span, (), False),
            (lambda x: (*span(x), torch.ones(17)), (), True),
            (lambda x, v: (*span(x), v + 1), (torch.ones(2),), True),
            (lambda x: (x, *(torch.full((), n) for n in range(5))), (), True),
        ):
            graph, _ = self.full(program, *inputs)
            self.assertEqual("cpp_fused" in graph.source_code, in_cpp)
            self.assertEqual("aten.full.default([], " in graph.source_code, not in_cpp)

    def test_constants_that_only_the_gpu_reads_are_part_of_its_kernels(self):
        def masked(x, *_):
            x = x.clone()
            x[x > 0.5] = 0.0  # stays on the CPU for Inductor, which writes it into the kernel
            return x

        self.assertEqual(self.full(masked)[1], (1, 0))
        graph, _ = self.full(lambda x: (masked(x), torch.tensor(1.0)))
        self.assertEqual(graph.source_code.count("aten.full.default("), 1)  # that of the other constant

    def test_truth_values_of_symbolic_sizes_are_no_constants_that_aten_makes(self):
        with torch._dynamo.config.patch(assume_static_by_default=False):
            graph, _ = self.full(lambda x: (x + 1, torch.full((), len(x) > 3)))
        self.assertIn("cpp_fused", graph.source_code)

    def test_the_code_is_as_without_placement_if_there_is_nothing_to_do(self):
        """Inductor stores tuning results under a hash with the kernel's name, so both ways run the same kernels."""

        def scaled(x):
            scale = torch.sqrt(torch.tensor(x.size(-1) * 3, dtype=torch.float))
            return (x / scale.to(x.dtype)).softmax(-1)

        half = torch.empty(64, 64, device="meta", dtype=torch.bfloat16)
        for program in (lambda x: x.sin() @ x, lambda x: torch.arange(64, device="cuda") + x, scaled):
            codes = [self.partitions(program, (half,), how)[0].source_code for how in ("off", "full")]
            self.assertEqual(*["\n".join(line for line in code.splitlines() if line[:1] != "#") for code in codes])


if __name__ == "__main__":
    run_tests()
