"""Numbers that kernels count: which of them have the CPU's values, and where the others come from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.fake_gpu import lower
from pygraph_trees.placement.counting import Counting
from pygraph_trees.report.records import PLACED

# Maps an operation's name to a function of a value and a number.
OPERATIONS = {
    "+": lambda x, n: x + n,
    "-": lambda x, n: n - x,
    "*": lambda x, n: x * n,
    "%": lambda x, n: x % (abs(n) + 1),
    "//": lambda x, n: x // (abs(n) + 1),
    "clamp": lambda x, n: x.clamp(-abs(n), abs(n)),
    "at least": lambda x, n: x.clamp(min=n),
    "square": lambda x, _: x.square(),
    "negative": lambda x, _: -x,
    "turned": lambda x, _: x.flip(0)[None],
    "as bytes": lambda x, _: x.to(torch.uint8),
    "as halves": lambda x, _: x.half().to(x.dtype),
    "as singles": lambda x, _: x.float().to(x.dtype),
}
numbers = st.one_of(st.integers(-10, 10), st.integers(-(1 << 33), 1 << 33))
steps = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), numbers), max_size=5)


def result(graph):
    """The node that a graph returns."""
    (output,) = graph.find_nodes(op="output")
    return output.args[0]


class TestIntervals(TestCase):
    @settings(max_examples=300)
    @given(st.integers(-(1 << 34), 1 << 34), st.integers(1, 1 << 20), st.integers(1, 300), steps)
    def test_what_is_counted_is_what_32_bits_without_conversions_give(self, start, step, count, drawn):
        def program(counted, *, converts=True):
            for name, number in drawn:
                if converts or not name.startswith("as "):
                    counted = OPERATIONS[name](counted, number)
            return counted.long()

        made = torch.arange(start, start + step * count, step)
        try:
            program(made)
        except RuntimeError:  # a number does not fit the type of bytes
            return
        graph = make_fx(lambda: program(torch.arange(start, start + step * count, step)))().graph
        for node in graph.nodes:
            if node.op == "call_function" and Counting().why_not_counted(node) is not None:
                return
        if not any(name.startswith("as ") for name, _ in drawn) or program(made).dtype == torch.int64:
            self.assertLess(int(made.abs().max()), 1 << 31)
            self.assertEqual(program(made.int(), converts=False), program(made))

    def test_numbers_that_fit(self):
        for program in (
            lambda: torch.arange(100) * 2 + 1,
            lambda: (torch.arange(5000) // 3).clamp(max=7) % 5,
            lambda: torch.arange(200).to(torch.uint8),
            lambda: torch.arange(1 << 12).float(),
            lambda: torch.arange(1 << 12) * torch.full((), 1 << 10),
            lambda: torch.full((4,), 1 << 40),
        ):
            graph = make_fx(program)().graph
            self.assertIsNone(Counting().why_not_counted(result(graph)))

    def test_numbers_that_do_not_fit(self):
        for program in (
            lambda: torch.arange(26) * 100_000_000,
            lambda: (torch.arange(4096) * 1000003) % 4096,
            lambda: torch.arange(1 << 40, (1 << 40) + 8),
            lambda: torch.arange(300).to(torch.uint8),
            lambda: torch.arange(3).bool(),
            lambda: torch.arange(4096).half(),
            lambda: torch.arange(4096, dtype=torch.int16) * 100,
            lambda: torch.arange(1 << 24, (1 << 24) + 4).float(),
            lambda: torch.arange(4096) * torch.full((4096,), 1 << 20),
            lambda: torch.arange(4096).view(64, 64) * torch.full((64, 1), 1 << 20).expand(64, 64),
            lambda: torch.full((), 100, dtype=torch.int8) + torch.arange(100, dtype=torch.int8),
            lambda: torch.arange(4096).view(64, 64).diagonal() * (1 << 20),
            lambda: torch.arange(4096).unfold(0, 64, 64) * (1 << 20),
            lambda: torch.arange(4096).split(2048)[1] * (1 << 20),
            lambda: torch.arange(4096).view(2, 2048).unbind()[1] * (1 << 20),
            lambda: torch.arange(4096)[torch.arange(4096).flip(0)] * (1 << 20),
            lambda: torch.arange(4096).view(2048, 2).sum(1) * (1 << 20),
            lambda: torch.arange(4096).view(2048, 2).amax(1) * (1 << 20),
            lambda: torch.arange(1 << 17).view(-1, 2).prod(1),
        ):
            graph = make_fx(program)().graph
            self.assertIsNotNone(Counting().why_not_counted(result(graph)))

    def test_numbers_that_are_known_at_the_call(self):
        for program, fits in (
            (lambda k: torch.full((), k), True),
            (lambda k: torch.arange(100) + torch.scalar_tensor(k, dtype=torch.int64), True),
            (lambda k: torch.arange(100) * torch.scalar_tensor(k, dtype=torch.int64), False),
            (lambda k: torch.arange(100) * (torch.full((3,), 0) + k)[0], False),
        ):
            graph = make_fx(lambda x: program(x.shape[0]), tracing_mode="symbolic")(torch.ones(64)).graph  # noqa: B023
            self.assertEqual(Counting().why_not_counted(result(graph)) is None, fits)

    def test_the_factor_of_a_sum_with_a_loaded_number(self):
        for factor, fits in ((1, True), (65537, False)):
            graph = make_fx(lambda v: torch.add(v, torch.arange(1 << 19), alpha=factor))(torch.tensor(3)).graph  # noqa: B023
            self.assertEqual(Counting().why_not_counted(result(graph)) is None, fits)

    def test_longer_reductions_read_what_was_computed(self):
        for program in (
            lambda n: torch.arange(n).sum(),
            lambda n: torch.arange(4096).view(-1, 16).sum(1),
        ):
            graph = make_fx(program, tracing_mode="symbolic")(64).graph
            self.assertIsNone(Counting().why_not_counted(result(graph)))

    def test_short_reductions_of_symbolic_sizes(self):
        graph = make_fx(lambda x: torch.arange(2 * len(x)).view(-1, 2).sum(1) * (1 << 30), tracing_mode="symbolic")(
            torch.ones(64)
        ).graph
        self.assertIsNotNone(Counting().why_not_counted(result(graph)))


class TestLowered(TestCase):
    """Programs for an absent GPU: how values get to it, and what the kernels compute."""

    def placed(self, program, *inputs):
        with config.patch({"triton.cudagraphs": True, "triton.pygraph_placement": "full", "fx_graph_cache": False}):
            (graph,) = lower(program, inputs)
        return {value.value: value.how for value in graph.gm.meta[PLACED]}, graph

    def gpu(self, *size, dtype=torch.float32):
        return torch.empty(size, dtype=dtype, device="meta")

    def test_what_does_not_fit_is_computed_once(self):
        ids = torch.zeros(26, dtype=torch.int64)
        hows, graph = self.placed(
            lambda x, ids: x + (ids + torch.arange(26) * 100_000_000).to("cuda"), self.gpu(26, dtype=torch.int64), ids
        )
        self.assertEqual(hows["mul"], "computed once, a constant on the GPU")
        self.assertNotIn("100000000", graph.source_code)
        hows, _ = self.placed(lambda x, ids: x + (ids + torch.arange(26) * 3).to("cuda"), self.gpu(26), ids)
        self.assertEqual(hows["mul"], "made on the GPU")

    def test_numbers_beside_what_is_counted_are_not_loaded(self):
        """Inductor puts them into the same expression, and follows it through views."""
        for counted in (
            lambda: torch.arange(100, dtype=torch.int8) * torch.tensor(100, dtype=torch.int8),
            lambda: torch.arange(200, dtype=torch.uint8).split(100)[1] * 100,
        ):
            hows, _ = self.placed(lambda x: x + counted().to("cuda"), self.gpu(100))  # noqa: B023
            self.assertEqual(hows, {"mul": "computed once, a constant on the GPU"})

    def test_what_the_gpu_counts_goes_to_the_cpu_and_back(self):
        """The CPU has 64 bits, and its memory has the type of the copy."""
        for program, hows in (
            (lambda n: n.cpu() * (1 << 20), {"device_put": "taken where it came from", "mul": "made on the GPU"}),
            (lambda n: n.cpu() * (1 << 26), {"mul": "staged"}),
            (lambda n: (n + 4000).half().cpu(), {"device_put": "staged"}),
            (lambda n: (n + (1 << 24)).to("cpu", torch.float32), {"device_put": "staged"}),
        ):
            found, _ = self.placed(
                lambda x: x + program(torch.arange(100, device="cuda")).to("cuda"),  # noqa: B023
                self.gpu(100, dtype=torch.float64),
            )
            self.assertEqual(found, hows)

    def test_a_view_of_a_constant_keeps_its_strides(self):
        """Otherwise its copy would stay, which Inductor computes on the GPU."""
        hows, _ = self.placed(
            lambda x: x + (torch.arange(200, dtype=torch.uint8).square())[::2].to("cuda"), self.gpu(100)
        )
        self.assertEqual(set(hows.values()), {"computed once, a constant on the GPU", "made on the GPU"})

    def test_numbers_of_single_precision_are_rounded(self):
        _, graph = self.placed(lambda x, v: x + (v * torch.full((40,), 0.1)).to("cuda"), self.gpu(40), torch.rand(40))
        self.assertIn("0.10000000149011612", graph.source_code)

    def test_what_is_counted_beyond_single_precision_is_rounded(self):
        """As the CPU does, which computes with single-precision numbers; too large to be computed once."""
        size = 1 << 19
        for start, rounds in ((0, False), (1 << 24, True)):
            _, graph = self.placed(
                lambda x: x + (torch.arange(start, start + size) * 0.3).to("cuda"),  # noqa: B023
                self.gpu(size),
            )
            before, _, _ = graph.source_code.partition(".to(tl.float64)")
            self.assertEqual(".to(tl.float32)" in before, rounds)

    def test_sums_of_what_is_counted_are_rounded(self):
        """Inductor adds up counted floating-point numbers as integers, without the CPU's rounding after each sum."""
        size = 1 << 19  # too large to be computed once
        for start, rounds in ((0, False), (9_000_001, True)):

            def program(x):
                counted = torch.arange(start, start + size).float()  # noqa: B023
                return x + (counted + counted + counted).double().to("cuda")

            _, graph = self.placed(program, self.gpu(size, dtype=torch.float64))
            self.assertEqual("mul_rn" in graph.source_code, rounds)

    def test_an_integer_beyond_single_precision_is_rounded(self):
        number = (1 << 24) + 1
        for filled in (lambda: torch.tensor(number), lambda: torch.full((40,), number, dtype=torch.float32)):
            _, graph = self.placed(
                lambda x, v: x + (v * filled()).to("cuda"),  # noqa: B023
                self.gpu(40),
                torch.rand(40),
            )
            self.assertIn(f"tl.full([1], {number}.0, tl.float32)", graph.source_code)

    def test_a_number_that_was_computed_once_is_loaded_if_it_exceeds_single_precision(self):
        """Inductor converts a number in a kernel's source to single precision and back without rounding it."""
        number = (1 << 24) + 1
        _, graph = self.placed(
            lambda x, v: x + (v * (torch.arange(2).sum() - 1 + number)).to("cuda"), self.gpu(40), torch.rand(40)
        )
        self.assertNotIn(str(number), graph.source_code)
        _, graph = self.placed(
            lambda x: x + torch.arange(3, dtype=torch.float64).sqrt().sum().to("cuda").float().double(),
            self.gpu(40, dtype=torch.float64),
        )
        self.assertNotIn("2.414", graph.source_code)

    def test_an_integer_that_was_computed_once_is_no_part_of_what_is_counted(self):
        """A kernel would compute the expression with 32 bits."""
        size = 1 << 19  # too large to be computed once
        hows, graph = self.placed(
            lambda x: x + (torch.arange(size) * (torch.arange(64).sum() + 1_000_003)).to("cuda"),
            self.gpu(size, dtype=torch.int64),
        )
        self.assertEqual(hows["mul"], "made on the GPU")
        self.assertNotIn(str(1_000_003 + 63 * 32), graph.source_code)

    def test_a_number_that_is_known_at_the_call_is_rounded(self):
        with torch._dynamo.config.patch(assume_static_by_default=False):
            _, graph = self.placed(
                lambda x, v, k: x + (v * torch.tensor(k)).to("cuda"), self.gpu(40), torch.rand(40), 5
            )
        self.assertIn("tl.full([1], 1.0, tl.float32)", graph.source_code)

    def test_large_constants_that_a_kernel_would_count_otherwise_are_staged(self):
        """Inductor turns the copy of a constant into a computation on the GPU."""
        size = 1 << 19
        squares = lambda x: x + (torch.arange(size) ** 2).to("cuda")  # noqa: E731
        hows, graph = self.placed(squares, self.gpu(size, dtype=torch.int64))
        self.assertEqual(hows, {"pow_1": "staged"})
        self.assertIn("cpp_fused", graph.source_code)
        hows, _ = self.placed(lambda x: x + torch.arange(size).sin().to("cuda"), self.gpu(size))
        self.assertEqual(hows, {"sin": "copied"})

    def test_large_numbers_that_the_gpu_counts_and_the_cpu_changes_are_staged(self):
        """Inductor would compute all of it on the GPU, without the CPU's 64 bits."""
        program = lambda x: x + (torch.arange(1 << 19, device="cuda").cpu() * (1 << 20)).to("cuda")  # noqa: E731
        hows, graph = self.placed(program, self.gpu(1 << 19, dtype=torch.int64))
        self.assertEqual(hows, {"mul": "staged"})
        self.assertIn("cpp_fused", graph.source_code)

    def test_bytes_that_are_read_as_another_type(self):
        """A kernel converts what it counts to the type before, or loads it if the sizes differ."""
        _, graph = self.placed(
            lambda x: x + torch.arange(8).view(torch.float64).to("cuda"), self.gpu(8, dtype=torch.float64)
        )
        source = graph.source_code
        self.assertLess(source.index(".to(tl.int64)"), source.index(".to(tl.float64, bitcast=True)"))
        wide = self.gpu(8, dtype=torch.int64)
        _, graph = self.placed(lambda x: x + torch.arange(16, dtype=torch.int32).view(torch.int64).to("cuda"), wide)
        self.assertEqual(graph.source_code.count("def triton_"), 2)

    def test_negative_indices_that_the_cpu_refuses(self):
        indices = [-1, 0, 1, 2, 3]
        for program, table, size in (
            (lambda x, t: x + t.gather(0, torch.tensor(indices)).to("cuda"), torch.rand(5), (5,)),
            (lambda x, t: x + F.embedding(torch.tensor(indices), t).to("cuda"), torch.rand(9, 4), (5, 4)),
        ):
            hows, graph = self.placed(program, self.gpu(*size), table)
            self.assertNotIn("made on the GPU", [how for name, how in hows.items() if name in ("gather", "embedding")])
            self.assertNotIn("device_assert", graph.source_code)

    def test_a_complex_number_keeps_its_shape(self):
        _, graph = self.placed(lambda x: x + torch.polar(torch.tensor(1.0), torch.tensor(-0.0)), self.gpu())
        (added,) = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        self.assertEqual(added.meta["val"].shape, ())

    def test_small_integers_wrap(self):
        for program, dtype in (
            (lambda x, v: x + ((v // 5) * 200).to("cuda"), torch.uint8),
            (lambda x, v: x + (torch.relu(v) * 100).to("cuda"), torch.int8),
        ):
            hows, _ = self.placed(program, self.gpu(3), torch.zeros(3, dtype=dtype))
            self.assertEqual(hows["mul"], "staged")

    def test_what_joins_half_precision_is_rounded(self):
        h, i = torch.zeros(4, dtype=torch.float16), torch.zeros(4, dtype=torch.int64)
        _, graph = self.placed(lambda x, h, i: x + torch.cat([h, i]).to("cuda"), self.gpu(8), h, i)
        self.assertIn(".to(tl.float16)", graph.source_code)


if __name__ == "__main__":
    run_tests()
