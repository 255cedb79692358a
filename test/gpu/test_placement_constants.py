"""Values from constants have eager's bits on the GPU, for known, symbolic and large sizes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from constant_programs import INTEGERS, NO_KERNEL, ODD, ROUNDED, count, same_bits, square
from indirection import Facts, reset
from parity import marked
from placement import CALLS_EACH, PlacementTestCase
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees

PLACEMENT = "triton.pygraph_placement"
BY_FAMILY = {"no kernel": NO_KERNEL, "rounded": ROUNDED, "odd": ODD, "integers": INTEGERS}
FOLDED = "computed once, a constant on the GPU"


@instantiate_parametrized_tests
class TestConstantsOnGpu(PlacementTestCase):
    def assertSameBits(self, found, wanted, where):
        self.assertEqual(found.device.type, "cuda", where)
        self.assertTrue(same_bits(found, wanted), f"{where}: {found} {wanted}")

    def assertOneGraph(self, calls):
        (graph,) = pygraph_trees.report().graphs
        self.assertEqual([part.graphed for part in graph.partitions], [True])
        self.assertGraphed(Facts.now(), calls)
        return graph

    @parametrize("family", [*BY_FAMILY], name_fn=lambda family: family.replace(" ", "_"))
    @parametrize("how", ["full", "exact"])
    def test_static_sizes(self, family, how):
        """There is one CUDA graph, and each of its replays gives eager's bits."""
        programs = BY_FAMILY[family]

        def program(x):
            return x + 1, *(one.value(24).to("cuda") for one in programs)

        with torch._inductor.config.patch({PLACEMENT: how}):
            graphed = torch.compile(program, mode="reduce-overhead", dynamic=False)
            for call in marked(range(CALLS_EACH)):
                _, *found = graphed(torch.full((24,), float(call), device=self.device))
                for one, value in zip(programs, found, strict=True):
                    self.assertSameBits(value, one.value(24), f"{one.name}, call {call}")
        graph = self.assertOneGraph(CALLS_EACH)
        self.assertEqual({placed.how for placed in graph.placed} & {"staged", "copied"}, set())

    @parametrize("family", [*BY_FAMILY], name_fn=lambda family: family.replace(" ", "_"))
    @parametrize("mark", [False, True])
    def test_symbolic_sizes(self, family, mark):
        """Values made on the GPU have eager's bits; copied values have those of Inductor's CPU code."""
        # The CPU's instructions decide what an out-of-range number becomes as integer; eager's differ from Inductor's.
        programs = [one for one in BY_FAMILY[family] if one.name not in ("infinities to integers", "to int32")]

        def program(x):
            return x + 1, *(one.value(x.shape[0]).to("cuda") for one in programs)

        graphed = torch.compile(program, mode="reduce-overhead", dynamic=None if mark else True)
        for size in marked((24, 40, 24, 97, 40, 24, 97, 40, 97)):
            x = torch.rand(size, device=self.device)
            if mark:
                torch._dynamo.mark_dynamic(x, 0)
            moved, *found = graphed(x)
            self.assertEqual(moved, x + 1, rtol=0, atol=0)
            for one, value in zip(programs, found, strict=True):
                wanted = one.value(size)
                if one.eager:
                    self.assertSameBits(value, wanted, f"{one.name}, {size}")
                else:
                    more = {"rtol": 0, "atol": 1} if not wanted.is_floating_point() else {}
                    self.assertEqual(value.cpu(), wanted, msg=f"{one.name}, {size}", **more)
        for graph in pygraph_trees.report().graphs:
            self.assertIn(True, [part.graphed for part in graph.partitions])

    def test_large_values(self):
        """Values of more than 1 MiB, and of more than 4 MiB, are made on the GPU or copied.

        Of copied ones, Inductor computes floating-point numbers on the GPU.
        """
        values = {
            "truncated": lambda n: (count(n) / 61).long(),
            "squares": lambda n: count(n) * count(n),
            "of integers beyond 32 bits": lambda n: (count(n) * 100_003 % 4099).float(),
            "integers": lambda _: square(600, torch.int32) @ square(600, torch.int32),
            "matrix product": lambda _: square(600).float() @ square(600).float(),  # of integers, so exact in any order
        }
        rounded = {
            "rounded": lambda n: count(n) * 0.1 + 0.3,
            "of small ones": lambda n: (count(1024) / 900).exp()[:, None] * (count(n >> 10) / 3),
        }
        for size in ((1 << 18) + 1024, (5 << 20) // 4):
            reset()

            def program(x, size=size):
                return x + 1, *(value(size).to("cuda") for value in (*values.values(), *rounded.values()))

            graphed = torch.compile(program, mode="reduce-overhead", dynamic=False)
            for call in marked(range(3)):
                _, *found = graphed(torch.full((24,), float(call), device=self.device))
                for (name, value), one in zip({**values, **rounded}.items(), found, strict=True):
                    if name in values:
                        self.assertSameBits(one, value(size), f"{name}, {size}")
                    else:
                        self.assertEqual(one.cpu(), value(size), msg=f"{name}, {size}")

    def test_every_type(self):
        """Constants of every type are read unchanged and, if the GPU can, in a kernel."""
        types = [
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
            torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
            torch.float64, torch.complex64, torch.complex128,
        ]  # fmt: skip
        values = [lambda s=size, d=dtype: (torch.arange(s) / 3).exp().to(d) for dtype in types for size in (12, 3, 1)]

        def program(x):
            return x + 1, *(value().to("cuda") for value in values)

        graphed = torch.compile(program, mode="reduce-overhead", dynamic=False)
        for _ in marked(range(CALLS_EACH)):
            _, *found = graphed(torch.rand(24, device=self.device))
            for value, one in zip(values, found, strict=True):
                self.assertSameBits(one, value(), str(one.dtype))
        self.assertOneGraph(CALLS_EACH)

    def test_numbers_that_a_kernel_reads(self):
        """Inductor writes small values into kernels: zeros of either sign, infinities, NaN and the smallest numbers."""

        def signs():
            return -torch.arange(2) * 0.0

        def kinds():
            return torch.arange(1, 7) * torch.tensor([1e38, -1e39, 1e-45, -0.0, float("nan"), 0.1]) * 7

        def program(x):
            one = torch.copysign(x[:2], signs().to("cuda"))
            other = torch.where(x > 0.5, x, signs()[1].to("cuda"))
            return one, other, kinds().to("cuda"), torch.copysign(x, kinds()[3].to("cuda")), kinds().half().to("cuda")

        def eager(x):
            x = x.cpu()
            one, other = torch.copysign(x[:2], signs()), torch.where(x > 0.5, x, signs()[1])
            return one, other, kinds(), torch.copysign(x, kinds()[3]), kinds().half()

        graphed = torch.compile(program, mode="reduce-overhead", dynamic=False)
        for _ in marked(range(CALLS_EACH)):
            x = torch.rand(24, device=self.device)
            for number, (found, wanted) in enumerate(zip(graphed(x), eager(x), strict=True)):
                self.assertSameBits(found, wanted, str(number))
        self.assertOneGraph(CALLS_EACH)

    def test_a_constant_that_is_written_to_in_a_call(self):
        """Each call has its own copy of a constant that it returns, or that an operator mutates."""

        def program(x):
            table = (torch.arange(24) / 9).exp().to("cuda")
            kept = (torch.arange(24) / 7).exp().to("cuda")
            table.add_(x)
            return table, kept, kept.view(4, 6)[1]

        graphed = torch.compile(program, mode="reduce-overhead", dynamic=False)
        for call in marked(range(CALLS_EACH)):
            x = torch.full((24,), float(call), device=self.device)
            outputs = graphed(x)
            found = [value.clone() for value in outputs]
            for value, wanted in zip(found, program(x), strict=True):
                self.assertSameBits(value, wanted, f"call {call}")
            for value in outputs:
                value.fill_(-1)

    def test_gradients_through_constants(self):
        def program(x):
            return (x * (torch.arange(24) / 9).exp().to("cuda")).sin().sum()

        graphed = torch.compile(program, mode="reduce-overhead", dynamic=False)
        for _ in marked(range(CALLS_EACH)):
            x = torch.rand(24, device=self.device).requires_grad_()
            own = x.detach().clone().requires_grad_()
            graphed(x).backward()
            program(own).backward()
            self.assertEqual(x.grad, own.grad)

    def test_artifacts_from_caches(self):
        """A graph from Inductor's cache has its folded values, and the report says so."""

        def program(x):
            return x + (torch.arange(24) / 61).long().to("cuda"), (torch.arange(24).half() * 0.1 + 0.3).to("cuda")

        x, placed = torch.rand(24, device=self.device), []
        # Under "deterministic" upstream finds nothing in its cache.
        with fresh_cache(), torch._inductor.config.patch({"fx_graph_cache": True, "deterministic": False}):
            for _ in range(2):
                torch._dynamo.reset()
                reset()
                graphed = torch.compile(program, mode="reduce-overhead", dynamic=False)
                for _ in marked(range(CALLS_EACH)):
                    for number, (found, wanted) in enumerate(zip(graphed(x), program(x), strict=True)):
                        self.assertSameBits(found, wanted, str(number))
                placed.append(self.assertOneGraph(CALLS_EACH).placed)
            self.assertEqual(placed[0], placed[1])
            self.assertEqual({one.how for one in placed[0]}, {FOLDED})
            self.assertEqual(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"], 1)
            self.assertEqual(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_bypass"], 0)


if __name__ == "__main__":
    run_tests()
