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


def is_counted(program, *inputs, **how):
    """Whether a GPU may count what a program returns."""
    (output,) = make_fx(program, **how)(*inputs).graph.find_nodes(op="output")
    return Counting().why_not_counted(output.args[0]) is None


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
            lambda: torch.arange(4096).view(-1, 16).sum(1),  # a longer reduction reads what was computed
        ):
            self.assertTrue(is_counted(program))

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
            self.assertFalse(is_counted(program))

    def test_numbers_that_are_known_at_the_call(self):
        x = torch.ones(64)
        for program, fits in (
            (lambda x: torch.full((), x.shape[0]), True),
            (lambda x: torch.arange(100) + torch.scalar_tensor(x.shape[0], dtype=torch.int64), True),
            (lambda x: torch.arange(100) * torch.scalar_tensor(x.shape[0], dtype=torch.int64), False),
            (lambda x: torch.arange(100) * (torch.full((3,), 0) + x.shape[0])[0], False),
            (lambda x: torch.arange(x.shape[0]).sum(), True),  # a longer reduction reads what was computed
            (lambda x: torch.arange(2 * x.shape[0]).view(-1, 2).sum(1) * (1 << 30), False),
        ):
            self.assertEqual(is_counted(program, x, tracing_mode="symbolic"), fits)

    def test_the_factor_of_a_sum_with_a_loaded_number(self):
        for factor, fits in ((1, True), (65537, False)):
            program = lambda v: torch.add(v, torch.arange(1 << 19), alpha=factor)  # noqa: B023, E731
            self.assertEqual(is_counted(program, torch.tensor(3)), fits)


class TestLowered(TestCase):
    """Programs for an absent GPU: how values get to it, and what the kernels compute."""

    def placed(self, program, *inputs):
        with config.patch({"triton.cudagraphs": True, "triton.pygraph_placement": "full", "fx_graph_cache": False}):
            (graph,) = lower(program, inputs)
        return {value.value: value.how for value in graph.gm.meta[PLACED]}, graph

    def gpu(self, *size, dtype=torch.float32):
        return torch.empty(size, dtype=dtype, device="meta")

    def test_how_values_get_to_the_gpu(self):
        """The CPU has 64 bits, and its memory has the type of the copy."""
        once, made, whole = "computed once, a constant on the GPU", "made on the GPU", torch.int64
        size = 1 << 19  # too large to be computed once
        ids, byte, small = (torch.zeros(26, dtype=dtype) for dtype in (torch.int64, torch.uint8, torch.int8))
        added = {"add": made, "arg0_1": "staged"}
        for hows, dtype, value, *inputs in (
            # what does not fit is computed once
            ({"mul": once, **added}, whole, lambda ids: ids + torch.arange(26) * 100_000_000, ids),
            ({"iota": made, "mul": made, **added}, whole, lambda ids: ids + torch.arange(26) * 3, ids),
            ({"mul": once}, whole, lambda: torch.arange(26, dtype=torch.int8) * torch.tensor(100, dtype=torch.int8)),
            ({"mul": once}, whole, lambda: torch.arange(200, dtype=torch.uint8).split(100)[1] * 100),
            # small integers wrap
            ({"mul": "staged"}, whole, lambda v: (v // 5) * 200, byte),
            ({"mul": "staged"}, whole, lambda v: torch.relu(v) * 100, small),
            # a view of a constant keeps its strides: otherwise its copy would stay
            ({"pow_1": once, "slice_1": made}, whole, lambda: torch.arange(200, dtype=torch.uint8).square()[::2]),
            # Inductor would turn a copied constant, or all of what the GPU counts, into a computation on the GPU.
            ({"pow_1": "staged"}, whole, lambda: torch.arange(size) ** 2),
            ({"mul": "staged"}, whole, lambda: torch.arange(size, device="cuda").cpu() * (1 << 20)),
            ({"sin": "copied"}, torch.float32, lambda: torch.arange(size).sin()),
        ):
            x = self.gpu(dtype=dtype)  # of one element, so that it has any size
            found, graph = self.placed(lambda x, *v: x + value(*v).to("cuda"), x, *inputs)  # noqa: B023
            self.assertEqual(found, hows)
            self.assertEqual("cpp_fused" in graph.source_code, set(hows.values()) == {"staged"})
            self.assertNotIn("100000000", graph.source_code)

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

    def test_what_is_rounded_as_on_the_cpu(self):
        number, size = (1 << 24) + 1, 1 << 19  # too large to be computed once
        v, half, ids = torch.rand(40), torch.zeros(20, dtype=torch.float16), torch.zeros(20, dtype=torch.int64)

        def sums(start):
            """Inductor adds up counted floating-point numbers as integers, without rounding each sum."""
            counted = torch.arange(start, start + size).float()
            return (counted + counted + counted).double()

        integer = f"tl.full([1], {number}.0, tl.float32)"
        for text, is_there, value, *inputs in (
            ("0.10000000149011612", True, lambda v: v * torch.full((40,), 0.1), v),
            (integer, True, lambda v: v * torch.tensor(number), v),
            (integer, True, lambda v: v * torch.full((40,), number, dtype=torch.float32), v),
            (".to(tl.float16)", True, lambda half, ids: torch.cat([half, ids]), half, ids),
            ("mul_rn", False, lambda: sums(0)),
            ("mul_rn", True, lambda: sums(9_000_001)),
            # Inductor converts a number in a kernel's source without rounding it, so such a number is loaded.
            (str(number), False, lambda v: v * (torch.arange(2).sum() - 1 + number), v),
        ):
            x = self.gpu(len(value(*inputs)), dtype=torch.float64)
            _, graph = self.placed(lambda x, *v: x + value(*v).to("cuda"), x, *inputs)  # noqa: B023
            self.assertEqual(text in graph.source_code, is_there, text)

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

    def test_a_number_that_is_known_at_the_call_is_rounded(self):
        with torch._dynamo.config.patch(assume_static_by_default=False):
            _, graph = self.placed(
                lambda x, v, k: x + (v * torch.tensor(k)).to("cuda"), self.gpu(40), torch.rand(40), 5
            )
        self.assertIn("tl.full([1], 1.0, tl.float32)", graph.source_code)

    def test_a_number_that_was_computed_once_is_loaded_if_it_exceeds_single_precision(self):
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


if __name__ == "__main__":
    run_tests()
