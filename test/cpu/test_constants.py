"""Values from constants have eager's bits: which are folded, made on the GPU or left on the CPU, and why."""

import copy
import re
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch
from constant_programs import FAMILIES, count, same_bits, square
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_programs import GPU, traced
from test_placement_graphs import OnCpu
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees import placement
from pygraph_trees.fake_gpu import absent_gpu, lower
from pygraph_trees.placement import place
from pygraph_trees.placement.folding import MOST_EVALUATED_NBYTES, MOST_FOLDED_NBYTES
from pygraph_trees.placement.nodes import is_on_cpu
from pygraph_trees.report.compiled import partitions_of
from pygraph_trees.report.records import PLACED

SIZE = 24
NOT_ON_GPUS = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32}
NOT_ON_GPUS |= {getattr(torch, "bcomplex32", torch.complex32)}  # since torch 2.14
FOLDED = "computed once, a constant on the GPU"
VALUES = {f"{program.family}: {program.name}": program.value for program in FAMILIES}


class Lowered:
    """A program whose values from constants go to the GPU, lowered for an absent GPU."""

    def __init__(self, *values, symbolic=False, size=SIZE):
        def program(x):
            return x + 1, *(value(x.shape[0] if symbolic else size).to("cuda") for value in values)

        with (
            torch._inductor.config.patch({"triton.pygraph_placement": "full"}),
            torch._dynamo.config.patch(assume_static_by_default=not symbolic),
        ):
            self.graph = lowered(program, size)
        self.partitions = [part.graphed for part in partitions_of(self.graph.graph.scheduler)]
        self.placed = self.graph.gm.meta[PLACED]
        self.whys = [record.why for record in self.placed if record.why]
        graph = self.graph.gm.graph
        takes_size = any(isinstance(node.meta["val"], torch.SymInt) for node in graph.find_nodes(op="placeholder"))
        self.values = OnCpu(self.graph.gm).run(*[size] * takes_size, torch.zeros(size))[1:]
        self.hows = [how_of(node) for node in graph.output_node().args[0][1:]]


def how_of(output):
    """How a value gets to the GPU: copied if anything that it reads is copied, else folded if anything is folded."""
    hows, todo = {"made"}, [output]
    while todo:
        node = todo.pop()
        for source in node.all_input_nodes:
            if is_on_cpu(source) and not is_on_cpu(node):
                root = source.args[0] if source.target is torch.ops.aten.clone.default else source
                hows.add("folded" if str(root.target).startswith("_folded_constant") else "copied")
            else:
                todo.append(source)
    return next(how for how in ("copied", "folded", "made") if how in hows)


class TestLoweredConstants(TestCase):
    def check(self, values, wanted, **how):
        """Asserts that each value, by name, has the bits that the CPU computes and gets to the GPU as wanted."""
        lowered = Lowered(*values.values(), **how)
        for name, value, found, became in zip(values, values.values(), lowered.values, lowered.hows, strict=True):
            with self.subTest(name, **how):
                expected = value(how.get("size", SIZE))
                self.assertTrue(same_bits(found, expected), f"{found} {expected}")
                self.assertEqual(became, wanted[name])
        return lowered

    def check_also_exact(self, values, wanted, **how):
        """Checks values, and that under "exact" the graph becomes the same."""
        are_same = []

        def place_both(graph, *, exact, placed, **how):
            other = copy.deepcopy(graph.owning_module)
            place(other.graph, exact=True, **how)
            place(graph, exact=exact, placed=placed, **how)
            are_same.append((exact, str(graph) == str(other.graph)))

        with mock.patch.object(placement, "place", place_both):
            lowered = self.check(values, wanted, **how)
        self.assertEqual(are_same, [(False, True)])
        return lowered

    def test_static_sizes(self):
        """There is one graph for any value; values that the GPU cannot make with the same bits are folded."""
        wanted = {f"{program.family}: {program.name}": program.static for program in FAMILIES}
        lowered = self.check_also_exact(VALUES, wanted)
        self.assertEqual(lowered.partitions, [True])
        self.assertNotIn("cpp_fused", lowered.graph.source_code)
        self.assertEqual(lowered.whys, [])

    def test_symbolic_sizes(self):
        """Values that are exact on the GPU are made there; the others stay on the CPU, with a reason."""
        wanted = dict(zip(VALUES, [program.dynamic for program in FAMILIES], strict=True))
        for why in self.check_also_exact(VALUES, wanted, symbolic=True).whys:
            self.assertRegex(why, "not known when the graph is compiled|indices may be out of bounds")

    def test_sizes_made_of_sizes_in_many_ways(self):
        def value(n):
            a, b = n, n + 1
            for _ in range(60):
                a, b = b, a + b
            return torch.full((3,), a, dtype=torch.int64)

        (why,) = Lowered(value, symbolic=True).whys
        self.assertIn("a large number computed from sizes", why)

    def test_a_product_of_vectors(self):
        """Torch makes it a sum, which rounds otherwise: the CPU computes it in each call, of folded bytes that wrap."""
        lowered = Lowered(lambda _: (row := torch.arange(100, dtype=torch.int8) * 3 * 0.1)[None] @ row[:, None])
        self.assertIn("its result may differ in the last place", *lowered.whys)
        self.assertNotIn("L*x0", lowered.graph.source_code)

    def test_large_values(self):
        """Above 1 MiB, and above 4 MiB, nothing is folded."""
        size = (5 << 20) // 4
        values, wanted = {}, {}
        for name, value, how in (
            ("squares", lambda n: count(n) * count(n), "made"),
            ("truncated", lambda n: (count(n) / 61).long(), "copied"),
            ("rounded", lambda n: count(n) * 0.1 + 0.3, "copied"),
            ("of a small one", lambda n: (count(1024) / 3).exp()[:, None] * (count(n >> 10) / 3), "copied"),
        ):
            for n in (size, (MOST_FOLDED_NBYTES >> 1) + 1024):
                values[f"{name}, {n}"] = lambda _, value=value, n=n: value(n)
                wanted[f"{name}, {n}"] = how
        why = f"its result may differ in the last place, and {size * 4} bytes are too many for a constant"
        self.assertIn(why, " ".join(self.check(values, wanted).whys))

    def test_every_type(self):
        """A folded value of any type is on the GPU with its bits."""
        values, wanted = {}, {}
        for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str):
            try:
                (torch.arange(12) / 3).exp().to(dtype).clone()
            except (RuntimeError, NotImplementedError):
                continue  # the CPU has no such conversion
            for size in (12, 3):
                values[f"{dtype}, {size}"] = lambda _, dtype=dtype, size=size: (torch.arange(size) / 3).exp().to(dtype)
                wanted[f"{dtype}, {size}"] = "copied" if dtype in NOT_ON_GPUS else "folded"
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            values[f"{dtype}, infinite"] = lambda _, dtype=dtype: (torch.arange(12) / torch.zeros(12)).to(dtype)
            wanted[f"{dtype}, infinite"] = "copied"
        self.check(values, wanted)
        self.assertGreater(len(values), 30)
        folded = [value for name, value in values.items() if wanted[name] == "folded"]
        self.assertEqual(Lowered(*folded).partitions, [True])

    def test_signs_of_zeros_in_small_values(self):
        """Inductor writes small constants into kernels as numbers; those that lose bits there are loaded."""
        for value in (
            lambda _: -torch.arange(2) * 0.0,
            lambda _: (-torch.arange(2) * 0.0)[0],
            lambda _: torch.arange(4) * torch.tensor([1e38, -1e38, 0.0, 1.0]) * 1e10,
            lambda _: 1 / (torch.arange(2) * -0.0),
            lambda _: torch.tensor([1.5, -0.0]),
            lambda _: torch.tensor([1.5, -0.0], dtype=torch.float16).double(),
        ):
            lowered = Lowered(value)
            self.assertTrue(same_bits(lowered.values[0], value(0)))
            self.assertIn("_folded_constant0_cuda0", lowered.graph.source_code)
        for value in (lambda _: (torch.arange(3) / 7).exp(), lambda _: torch.tensor([1.5, 0.0])):
            self.assertNotIn("_folded_constant0_cuda0", Lowered(value).graph.source_code)

    def test_one_constant_for_several_readers_and_views(self):
        """What is returned too stays on the CPU; the report names what was folded, and its line."""

        def program(x):
            table = (torch.arange(64) / 9).exp()
            return x * table.to("cuda"), x.view(8, 8) + table.view(8, 8).t().to("cuda"), table[:8].to("cuda") + 1

        graph = lowered(program)
        self.assertEqual(len([n for n in graph.gm.graph.nodes if str(n.target).startswith("_folded")]), 1)
        self.assertNotIn("cpp_fused", graph.source_code)
        (record,) = [record for record in graph.gm.meta[PLACED] if record.how == FOLDED]
        self.assertRegex(record.source, r"test_constants.py:\d+ in program: table = \(torch.arange\(64\) / 9\).exp\(\)")
        graph = lowered(lambda x: (x * (value := (torch.arange(64) / 9).exp()).to("cuda"), value))
        devices = [node.meta["val"].device.type for node in graph.gm.graph.output_node().args[0]]
        self.assertEqual((devices, [record.how for record in graph.gm.meta[PLACED]]), (["cuda", "cpu"], [FOLDED]))
        self.assertIn("cpp_fused", graph.source_code)

    def test_parts_of_a_kernel_do_not_wait_for_each_other(self):
        """All parts of a foreach kernel run at once: none reads what another one writes."""

        def program(x):
            value = (torch.arange(SIZE, dtype=torch.float64) * 3).log().to("cuda")
            scaled = value.clamp(-1, 1) * x
            return sum(torch._foreach_mul([scaled, scaled, x, x], 0.25)), value

        graph = lowered(program, SIZE)
        calls = re.findall(r"triton_for_fused\w*\.run\((.*)\)", graph.source_code)
        buffers = [re.findall(r"\bbuf\d+", arguments) for arguments in calls]
        self.assertEqual([len(set(names)) for names in buffers], [len(names) for names in buffers])
        self.assertTrue(any(buffers))

    def test_nothing_is_folded_in_branches(self):
        """Inductor has no constants in branches; small values that would lose bits are left to torch."""
        for value, why in (
            (lambda: (count(64) / 9).exp(), "branch or a loop"),
            (lambda: torch.tensor([-0.0, 1.0]), "its value would lose bits as literals in a kernel"),
        ):

            def program(x, value=value):
                return torch.cond(x.sum() > 0, lambda x: x + value().to("cuda"), lambda x: x - 1, (x,))

            graph = lowered(program, len(value()))
            self.assertNotIn("_folded_constant", graph.source_code)
            (record,) = (record for record in graph.gm.true_graph_0.meta[PLACED] if record.why)
            self.assertEqual(record.how, "copied")
            self.assertIn(why, record.why)

    def test_in_other_states_of_torch(self):
        """Modes and types that are set around a compilation do not affect the values."""
        value = lambda n: square(n).float() @ (square(n) / 3)  # noqa: E731
        wanted = value(SIZE)
        for state in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.device("cpu")):
            with self.subTest(str(state)):
                module, _ = placed_graph(value)
                after = copy.deepcopy(module)
                with state, absent_gpu("sm_90"):
                    place(after.graph)
                after.recompile()
                self.assertTrue(same_bits(OnCpu(after).run(torch.zeros(SIZE))[1], wanted))
                self.assertFalse(next(after.buffers()).is_inference())


def lowered(program, size=64):
    """The graph of a program of one input on the GPU, lowered for an absent GPU."""
    torch._dynamo.reset()
    (graph,) = lower(program, (torch.empty(size, device="meta"),))
    return graph


def placed_graph(value):
    """The graph of a program whose value from constants goes to the GPU, as it is and rewritten."""
    with absent_gpu("sm_90"):
        before = traced(lambda x: (x + 1, torch.ops.prims.device_put(value(SIZE), GPU)), [(torch.zeros(SIZE), "gpu")])
        before.graph.eliminate_dead_code()
        after = copy.deepcopy(before)
        after.meta["placed"] = place(after.graph)
        after.recompile()
    return before, after


class TestFoldedGraphs(TestCase):
    def test_what_fails_stays_with_a_reason(self):
        """The error is one of the call, as in eager."""
        for value, why in (
            (lambda n: (count(n) * 2)[count(n) * 2], "may be out of bounds, which is an error on the CPU"),
            (lambda n: count(n) // (count(n) * 0), "the CPU cannot compute it when the graph is compiled; see the log"),
        ):
            _, after = placed_graph(value)
            (stay,) = after.meta["placed"].stays
            self.assertIn(why, stay.why)
            self.assertRaises((IndexError, RuntimeError), OnCpu(after).run, torch.zeros(SIZE))

    def test_what_is_written_to_is_no_constant(self):
        held = torch.arange(64.0)

        def program(x):
            held.add_(1)
            return x + 1, torch.ops.prims.device_put(held.exp(), GPU)

        with absent_gpu("sm_90"):
            module = traced(program, [(torch.zeros(64), "gpu")])
            self.assertNotIn(FOLDED, [move.how.value for move in place(module.graph).moves])
        self.assertEqual(list(module.buffers()), [buffer for buffer in module.buffers() if buffer is held])

    def test_the_sum_of_what_is_computed_is_bounded(self):
        many = MOST_EVALUATED_NBYTES // 4 // 1024
        before, after = placed_graph(lambda n: ((count(many) / 3)[:, None] * count(1024)).sum(1))
        (stay,) = after.meta["placed"].stays
        self.assertRegex(stay.why, r"\d+ bytes are too many to compute when the graph is compiled")
        self.assertEqual(OnCpu(after).run(torch.zeros(SIZE)), OnCpu(before).run(torch.zeros(SIZE)))

    def test_memory_that_is_not_set_is_not_folded(self):
        _, after = placed_graph(lambda n: torch.empty(n).exp())
        self.assertNotIn(FOLDED, [move.how.value for move in after.meta["placed"].moves])

    def test_random_chains(self):
        """Chains of any types and operators have the bits that the CPU computes, and leave no work for a call."""
        hows = []

        @settings(max_examples=120, deadline=None)
        @given(chains())
        def check(chain):
            try:
                wanted = chain(SIZE)
            except (RuntimeError, NotImplementedError):
                return  # the CPU has no such operator
            _, after = placed_graph(chain)
            placed = after.meta["placed"]
            self.assertEqual(placed.stays, [])
            hows.append(FOLDED in [move.how.value for move in placed.moves])
            self.assertTrue(same_bits(OnCpu(after).run(torch.zeros(SIZE))[1], wanted))
            left = [n for n in after.graph.nodes if n.op == "call_function" and is_on_cpu(n)]
            self.assertEqual([n.target for n in left], [torch.ops.aten.clone.default] * len(left))

        check()
        self.assertGreater(sum(hows), 3)  # draws differ from run to run
        self.assertGreater(len(hows) - sum(hows), 3)


TYPES = [
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float32, torch.float64,
    torch.float16, torch.bfloat16,
]  # fmt: skip
UNARY = {
    "plus": lambda x: x + 1,
    "times": lambda x: x * 0.1,
    "over": lambda x: x / 61,
    "negated": lambda x: -x if x.dtype != torch.bool else ~x,
    "exponential": lambda x: x.exp(),
    "root": lambda x: x.sqrt(),
    "sine": lambda x: x.sin(),
    "floor": lambda x: x.floor(),
    "large": lambda x: x * 1e38,
    "rectified": lambda x: x.relu(),
    "clamped": lambda x: x.clamp(-3, 3),
    "flipped": lambda x: x.flip(0),
    "column": lambda x: x.view(4, -1).t().reshape(-1),
    "running sum": lambda x: x.cumsum(0),
    "running product": lambda x: x.cumprod(0),
    "sorted": lambda x: x.sort(stable=True).values,
    "product": lambda x: (x.view(4, -1) @ x.view(-1, 4)).flatten().repeat(2)[: x.numel()],
    "is large": lambda x: x > 2,
    "triangle": lambda x: x.view(4, -1).triu(1).reshape(-1),
    "filled": lambda x: x.masked_fill(x > 2, 0.3) if x.is_floating_point() else x.masked_fill(x > 2, 3),
    "reversed look-up": lambda x: x[torch.arange(x.numel() - 1, -1, -1)],
}
BINARY = {
    "add": torch.add,
    "sub": lambda x, y: x - y if torch.bool not in (x.dtype, y.dtype) else x ^ y.bool(),
    "mul": torch.mul,
    "div": torch.div,
    "max": lambda x, y: torch.maximum(x, y),
    "min": lambda x, y: torch.minimum(x, y),
    "less": lambda x, y: x < y,
    "where": lambda x, y: torch.where(x > y, x, y),
}


@st.composite
def chains(draw):
    """A function of a size that computes a value from constants alone."""
    names, values = st.sampled_from(sorted([*UNARY, *BINARY, "to", "to"])), st.integers(0, 3)
    steps = draw(st.lists(st.tuples(names, values, values, st.sampled_from(TYPES)), min_size=1, max_size=8))

    def chain(n):
        values = [torch.arange(n), torch.full((n,), 0.3), torch.ones(n, dtype=torch.int32) * 7]
        for name, one, other, dtype in steps:
            x, y = values[-1 - one % len(values)], values[-1 - other % len(values)]
            if name == "to":
                values.append(x.to(dtype))
            else:
                values.append(UNARY[name](x) if name in UNARY else BINARY[name](x, y))
        return values[-1]

    return chain


if __name__ == "__main__":
    run_tests()
