"""Integers that kernels count, and numbers in their source, have the values that the CPU computes."""

import importlib.util
import re
import unittest
from pathlib import Path

import torch
import torch.nn.functional as F
from commands import WithFolder, forked, python
from test_fake_gpu import on_gpu
from torch._inductor import config
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.fake_gpu import lower
from pygraph_trees.placement.stored import lower_stored, stored
from pygraph_trees.report.records import PLACED

SIZE = 1 << 19  # numbers; too large to be computed once
MADE, ONCE, STAGED = "made on the GPU", "computed once, a constant on the GPU", "staged"
# Values that are computed on the GPU, of the device that counts. Inductor alone would count with 32 bits, or drop a
# conversion.
COUNTED = {
    "multiples": lambda _: torch.arange(SIZE) * 100_000_000,
    "squares": lambda _: torch.arange(SIZE) * torch.arange(SIZE).flip(0),
    "large and small": lambda _: (torch.arange(SIZE) * 1_000_003) % 4096,
    "chosen": lambda _: torch.where(torch.arange(SIZE) > 5, torch.arange(SIZE), 0) * torch.arange(SIZE) * 9,
    "filled": lambda _: torch.arange(SIZE) * torch.full((SIZE,), 1 << 20),
    "looked up": lambda _: torch.arange(SIZE)[torch.arange(SIZE).flip(0)] * (1 << 20),
    "with a factor": lambda _: torch.add(torch.arange(SIZE).flip(0), torch.arange(SIZE), alpha=65537),
    "buckets": lambda _: (torch.arange(SIZE) - SIZE // 2).clamp(-100, 100).abs() // 3 % 5 * (1 << 40),
    "sums of two": lambda _: torch.arange(2 * SIZE).view(-1, 2).sum(1) * (1 << 30),
    "masks": lambda _: torch.arange(SIZE).bool().long() * 3,
    "32 bits": lambda _: (torch.arange(SIZE) * (1 << 20)).int().long(),
    "halves": lambda _: torch.arange(SIZE).half().double(),
    "singles": lambda _: torch.arange(1 << 24, (1 << 24) + SIZE).float().double(),
    "negated": lambda _: -torch.arange(SIZE).float(),
    "there and back": lambda device: torch.arange(SIZE, device=device).cpu().to(device) * (1 << 26),
    "computed with": lambda device: torch.arange(SIZE, device=device).cpu() * (1 << 26),
    "masks from there": lambda device: torch.arange(SIZE, device=device).bool().cpu().to(device).long() * 7,
    "singles from there": lambda device: torch.arange(1 << 24, (1 << 24) + SIZE, device=device).to(
        "cpu", torch.float32
    ),
    "halves from there": lambda device: (torch.arange(SIZE, device=device) + 4000).half().cpu(),
}


class TestLowered(WithFolder):
    """Programs for an absent GPU: how values get to it, and what the kernels compute."""

    def placed(self, program, *inputs):
        with config.patch({"triton.cudagraphs": True, "triton.pygraph_placement": "full", "fx_graph_cache": False}):
            (graph,) = lower(program, inputs)
        return {value.value: value.how for value in graph.gm.meta[PLACED]}, graph

    @unittest.skipUnless(importlib.util.find_spec("triton"), "needs Triton's interpreter")
    def test_kernels_have_the_values_of_the_cpu(self):
        kernels = []
        for name, value in COUNTED.items():
            hows, graph = self.placed(lambda x: x + value("cuda").to("cuda"), on_gpu(SIZE, dtype=torch.float64))  # noqa: B023
            self.assertLessEqual(set(hows.values()), {MADE, "taken where it came from"}, name)
            (kernel,) = re.findall(r"(?s)async_compile\.triton\('\w+', \'\'\'(.*?)\'\'\'", graph.source_code)
            kernels.append((kernel, torch.zeros(SIZE, dtype=torch.float64)))
        path = self.folder / "kernels.pt"
        torch.save(kernels, path)
        with forked("torch"):
            done = python(str(Path(__file__).resolve().parents[1] / "interpreted_kernels.py"), str(path))
        self.assertEqual(done.returncode, 0, done.stderr)
        for value, found in zip(COUNTED.values(), torch.load(path), strict=True):
            self.assertEqual(found, value("cpu").double(), rtol=0, atol=0)

    def test_how_values_get_to_the_gpu(self):
        """Large constants of integers are staged: Inductor would compute a copied constant on the GPU."""
        ids, byte, small = (torch.zeros(26, dtype=dtype) for dtype in (torch.int64, torch.uint8, torch.int8))
        for hows, value, *inputs in (
            ({"iota": MADE, "mul": MADE, "add": MADE, "arg0_1": STAGED}, lambda ids: ids + torch.arange(26) * 3, ids),
            ({"iota": ONCE}, lambda: torch.arange(1 << 40, (1 << 40) + 8)),
            ({"mul": ONCE}, lambda: torch.arange(26, dtype=torch.int8) * torch.tensor(100, dtype=torch.int8)),
            # small integers wrap
            ({"mul": STAGED}, lambda v: (v // 5) * 200, byte),
            ({"mul": STAGED}, lambda v: torch.relu(v) * 100, small),
            # a view of a constant keeps its strides: otherwise its copy would stay
            ({"pow_1": ONCE, "slice_1": MADE}, lambda: torch.arange(200, dtype=torch.uint8).square()[::2]),
            ({"pow_1": STAGED}, lambda: torch.arange(SIZE) ** 2),
            ({"mul": STAGED}, lambda: torch.arange(SIZE) ** 2 * 0.1),
            ({"convert_element_type": STAGED}, lambda: (torch.arange(SIZE) / 61).long()),
            ({"sin": "copied"}, lambda: torch.arange(SIZE).sin()),
            ({"polar": ONCE}, lambda: torch.polar(torch.arange(4.0), torch.ones(4)).to("cuda", torch.complex128)),
        ):
            x = on_gpu(dtype=torch.float64)  # of one element, so that it has any size
            found, graph = self.placed(lambda x, *v: x + value(*v).to("cuda"), x, *inputs)  # noqa: B023
            self.assertEqual(found, hows)
            self.assertEqual("cpp_fused" in graph.source_code, set(hows.values()) == {STAGED})

    def test_large_numbers_made_of_sizes_stay_on_the_cpu(self):
        """A kernel computes them with 32 bits."""
        for value, how in (
            (lambda n: torch.full((n,), n * n * (1 << 20)), STAGED),
            (lambda n: torch.arange(n) + n * n * (1 << 20) % 1000, STAGED),
            (lambda n: torch.arange(n) + n * n, MADE),
        ):
            with torch._dynamo.config.patch(assume_static_by_default=False):
                hows, _ = self.placed(lambda x: x + value(x.shape[0]).to("cuda"), on_gpu(300))  # noqa: B023
            self.assertEqual([*hows.values()][-1], how)

    def test_a_number_made_of_sizes_is_rounded_to_half_precision(self):
        """A kernel would keep it in single precision, 2049 for example, which half precision does not have."""
        value = lambda n: torch.full((3,), n, dtype=torch.float16)  # noqa: E731
        with torch._dynamo.config.patch(assume_static_by_default=False):
            hows, graph = self.placed(lambda x: x[:3] + value(len(x)).to("cuda").float(), on_gpu(2049))
        self.assertEqual([*hows.values()], [MADE])
        self.assertIn(".to(tl.float16)", graph.source_code)

    def test_rows_that_a_pass_made_views_of_one(self):
        """Inductor replaces a running sum of equal numbers by multiples, expanded; the copy has the rows themselves."""
        hows, _ = self.placed(lambda x: x + torch.full((2, 16), 0.1).cumsum(-1).to("cuda"), on_gpu(2, 16))
        self.assertLessEqual(set(hows.values()), {MADE, ONCE})

    def test_a_stored_mask_is_vectorized_on_the_cpu(self):
        """Inductor computes a GPU value of constants alone on the CPU if it is copied there."""
        lower_stored()
        mask = lambda x: stored(torch.arange(70) > 3).float() + x  # noqa: E731
        bits = lambda x: stored(stored(torch.arange(70)).bool()).long() * 3 + x  # noqa: E731
        for program in (mask, bits):
            x = torch.ones(70)
            self.assertEqual(torch.compile(program)(x), program(x))

    def test_a_number_that_was_computed_once_is_loaded_if_it_exceeds_single_precision(self):
        value = lambda: torch.arange(3, dtype=torch.float64).sqrt().sum()  # noqa: E731
        _, graph = self.placed(lambda x: x + value().to("cuda").float().double(), on_gpu(40, dtype=torch.float64))
        self.assertNotIn("2.414", graph.source_code)

    def test_an_integer_that_was_computed_once_is_no_part_of_what_is_counted(self):
        """A kernel would compute the expression with 32 bits."""
        value = lambda: torch.arange(SIZE) * (torch.arange(64).sum() + 1_000_003)  # noqa: E731
        hows, graph = self.placed(lambda x: x + value().to("cuda"), on_gpu(SIZE, dtype=torch.int64))
        self.assertEqual(hows["mul"], MADE)
        self.assertNotIn(str(1_000_003 + 63 * 32), graph.source_code)

    def test_bytes_that_are_read_as_another_type(self):
        """A kernel converts what it counts to the type before, or loads it if the sizes differ."""
        floats = on_gpu(8, dtype=torch.float64)
        _, graph = self.placed(lambda x: x + torch.arange(8).view(torch.float64).to("cuda"), floats)
        source = graph.source_code
        self.assertLess(source.index(".to(tl.int64)"), source.index(".to(tl.float64, bitcast=True)"))
        wide = on_gpu(8, dtype=torch.int64)
        _, graph = self.placed(lambda x: x + torch.arange(16, dtype=torch.int32).view(torch.int64).to("cuda"), wide)
        self.assertEqual(graph.source_code.count("def triton_"), 2)

    def test_negative_indices_that_the_cpu_refuses(self):
        indices = [-1, 0, 1, 2, 3]
        for program, table, size in (
            (lambda x, t: x + t.gather(0, torch.tensor(indices)).to("cuda"), torch.rand(5), (5,)),
            (lambda x, t: x + F.embedding(torch.tensor(indices), t).to("cuda"), torch.rand(9, 4), (5, 4)),
        ):
            hows, graph = self.placed(program, on_gpu(*size), table)
            self.assertNotIn("made on the GPU", [how for name, how in hows.items() if name in ("gather", "embedding")])
            self.assertNotIn("device_assert", graph.source_code)

    def test_a_complex_number_keeps_its_shape(self):
        _, graph = self.placed(lambda x: x + torch.polar(torch.tensor(1.0), torch.tensor(-0.0)), on_gpu())
        (added,) = graph.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        self.assertEqual(added.meta["val"].shape, ())

    def test_transposed_complex_numbers_are_returned(self):
        """Their constant would be pairs of numbers, which a kernel arranges, and no kernel arranges complex numbers."""
        value = lambda: torch.polar(torch.arange(8.0), torch.ones(8)).view(2, 4).t()  # noqa: E731
        hows, _ = self.placed(lambda x: (x + 1, value().to("cuda")), on_gpu(4))
        self.assertEqual([*hows.values()][-1], STAGED)


if __name__ == "__main__":
    run_tests()
