"""Inputs of a recording, such as parameters that move or changing shapes, and random numbers: replays draw new ones."""

from __future__ import annotations

import torch
from parity import WHOLE_GRAPH, Context, ParityTestCase, in_parity
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@instantiate_parametrized_tests
class TestTreeInputs(ParityTestCase):
    by_address = True

    @in_parity(shape=((0, ()), (0, ())), fail_count=2)
    def test_parameter_storage_is_swapped(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model)
        first, second = model.weight.data, torch.randn(4, 8, device=ctx.device)
        with torch.no_grad():
            for data in (first, first, first, second, second, first, second):
                model.weight.data = data
                ctx.record(compiled(torch.randn(4, 8, device=ctx.device)))

    @in_parity(functions=1, recordings=3, fail_count=3)
    def test_marked_without_a_guard(ctx: Context) -> None:
        f = ctx.compile(lambda table, x: table * x + 1)
        tables = [torch.randn(4, 8, device=ctx.device) for _ in range(3)]
        for table in tables:
            torch._dynamo.mark_static_address(table, guard=False)
        for index in (0, 0, 0, 1, 1, 2, 0, 1, 2):
            ctx.record(f(tables[index], torch.randn(4, 8, device=ctx.device)))

    @parametrize("offsets", [(0, 0, 0, 1, 2, 16, 3, 0), (1, 1, 1, 2, 0, 5)], name_fn=lambda offsets: str(offsets[0]))
    def test_misaligned_after_aligned_or_from_the_start(self, offsets: tuple[int, ...]) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(scale)
            base = torch.randn(80, device=ctx.device)
            for offset in offsets:
                ctx.record(f(base[offset : offset + 64]))

        self.assertGreaterEqual(self.parity(program).tree.recordings, 1)

    @in_parity(nodes=lambda nodes: nodes[0].expanded_dims == ((1,),))
    def test_expanded(ctx: Context) -> None:
        f = ctx.compile(scale)
        for _ in range(4):
            ctx.record(f(torch.randn(4, 1, device=ctx.device).expand(4, 8)))

    def test_overlapping_strides(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(scale)
            for _ in range(4):
                ctx.record(f(torch.randn(16, device=ctx.device).as_strided((4, 4), (2, 1))))
            ctx.fact("skips", ctx.counter("cudagraph_skips"))

        # Upstream gives partitions up without counting it.
        self.assertEqual(self.parity(program).counter("cudagraph_skips"), 0)
        parity = self.parity(program, config=WHOLE_GRAPH)
        # Newer versions copy such inputs element by element.
        self.assertEqual(parity.noted("skips") > 0, parity.tree is None)

    # The first number is a constant of the first compilation; each later one has its own recording.
    @in_parity(functions=3, recordings=3)
    def test_whole_numbers(ctx: Context) -> None:
        f = ctx.compile(lambda x, n: x * n + n)
        for n in (2, 2, 2, 3, 3, 3, 4, 4, 4, 3, 4):
            ctx.record(f(torch.randn(4, 8, device=ctx.device), n))

    @in_parity(functions=3, recordings=3, skips=0)
    def test_shapes_change(ctx: Context) -> None:
        f = ctx.compile(lambda x: x.sum(0) * x.size(0), dynamic=True)
        for size in (4, 4, 4, 8, 8, 8, 4, 8, 16, 16, 4):
            ctx.record(f(torch.randint(-4, 4, (size, 8), device=ctx.device).float()))

    @in_parity(
        functions=11, logs=lambda logs: sum("We have observed 9 distinct sizes" in line for _, line in logs) == 1
    )
    def test_too_many_shapes_are_warned_of(ctx: Context) -> None:
        f = ctx.compile(scale, dynamic=True)
        for size in range(2, 13):
            ctx.record(f(torch.randn(size, 8, device=ctx.device)))

    @in_parity(oracle=False, overwritten=True)
    def test_output_of_the_last_call_as_input_without_a_copy(ctx: Context) -> None:
        f = ctx.compile(lambda h: h.cos() * 0.5)
        h = torch.randn(4, 8, device=ctx.device)
        for _ in range(6):
            try:
                h = f(h)
                ctx.fact("output", h)
            except Exception as error:
                ctx.fact("error", error)
                h = torch.ones(4, 8, device=ctx.device)


def distinct(tensors: list[torch.Tensor]) -> int:
    """The number of different tensors among ``tensors``."""
    return len({tensor.numpy().tobytes() for tensor in tensors})


@instantiate_parametrized_tests
class TestTreeRandom(ParityTestCase):
    by_address = True

    @parametrize("eager_kernels", [False, True])
    def test_numbers_differ_from_call_to_call(self, eager_kernels: bool) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x))
            for _ in range(6):
                ctx.record(f(torch.ones(16, 16, device=ctx.device)))

        parity = self.parity(program, oracle=False, config={"fallback_random": eager_kernels})
        self.assertEqual(distinct(parity.tensors), 6)
        self.assertGreaterEqual(parity.tree.recordings, 1)

    @in_parity(oracle=False, tensors=lambda tensors: distinct(tensors) == 1)
    def test_generator_state_repeats_the_numbers(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * torch.randn_like(x))
        for _ in range(4):
            f(torch.ones(16, 16, device=ctx.device))
        state = torch.cuda.get_rng_state()
        ctx.record(f(torch.ones(16, 16, device=ctx.device)))
        torch.cuda.set_rng_state(state)
        ctx.record(f(torch.ones(16, 16, device=ctx.device)))

    @in_parity(
        oracle=False,
        notes=lambda notes: {note.value for note in notes if note.label == "same mask"} == {True},
        tensors=lambda tensors: distinct(tensors) == 5,
    )
    def test_mask_of_the_forward_is_that_of_the_backward(ctx: Context) -> None:
        f = ctx.compile(lambda x: torch.nn.functional.dropout(x, 0.5) * 2)
        for _ in range(5):
            x = torch.ones(16, 16, device=ctx.device, requires_grad=True)
            y = f(x)
            y.sum().backward()
            ctx.fact("same mask", bool(((y != 0) == (x.grad != 0)).all()))
            ctx.fact("output", y)

    @in_parity(oracle=False, depth=2, tensors=lambda tensors: distinct(tensors) == 12)
    def test_two_recordings_draw_from_one_generator(ctx: Context) -> None:
        @ctx.compile
        def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x + torch.rand_like(x)
            torch._dynamo.graph_break()
            return y, y - x + torch.rand_like(x)

        for _ in range(4):
            y, z = f(torch.zeros(8, 8, device=ctx.device))
            ctx.record(y, z, torch.rand(4, device=ctx.device))


if __name__ == "__main__":
    run_tests()
