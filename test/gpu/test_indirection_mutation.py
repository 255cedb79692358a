"""Live inputs that are mutated: graphed, mutated in place, exactly once a call, and no graph is skipped for it."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from indirection import (
    KEPT,
    VERIFY,
    Facts,
    IndirectionTestCase,
    Program,
    assert_same_bits,
    by_name,
    compiled,
    run,
    tensor,
)
from parity import marked
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from transcript import LogLines


@torch.library.custom_op("pygraph_indirection_test::increase", mutates_args=("x",))
def increase(x: torch.Tensor, amount: float) -> None:
    x.add_(amount)


@torch.library.custom_op("pygraph_indirection_test::increase_all", mutates_args=("xs",))
def increase_all(xs: list[torch.Tensor], amount: float) -> None:
    torch._foreach_add_(xs, amount)


@torch.library.custom_op("pygraph_indirection_test::fused_adam", mutates_args=("p", "m", "v", "steps"))
def fused_adam(
    p: list[torch.Tensor],
    g: list[torch.Tensor],
    m: list[torch.Tensor],
    v: list[torch.Tensor],
    steps: list[torch.Tensor],
) -> None:
    torch._foreach_add_(steps, 1)
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False}
    torch._fused_adam_(p, g, m, v, [], steps, maximize=False, **settings)


@torch.library.custom_op("pygraph_indirection_test::copy_into", mutates_args=("target",))
def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def adam_beside_others(a, b, p, g, m, v, step):
    """A fused optimizer after a Triton kernel and a copy, whose launches look up the attributes of their pointers."""
    y = a * 2
    copy_into(b, a)
    fused_adam([p], [g], [m], [v], [step])
    return y


@torch.library.custom_op("pygraph_indirection_test::unscale", mutates_args=("grads", "found"))
def unscale(grads: list[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)


def kv_cache(k, v, position, new_k, new_v, q):
    k.index_copy_(2, position, new_k)
    v.index_copy_(2, position, new_v)
    return F.scaled_dot_product_attention(q, k, v)


def kv_cache_by_slice(k, v, new_k, new_v, q):
    k[:, :, 7:9] = new_k
    v[:, :, 7:9] = new_v
    return (q @ k.mT).softmax(-1) @ v


def adam(p, g, m, v, step):
    step.add_(1)
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(m / (1 - 0.9**step), (v / (1 - 0.99**step)).sqrt() + 1e-8, value=-0.1)


def moving_average(*xs):
    half = len(xs) // 2
    torch._foreach_lerp_(list(xs[:half]), list(xs[half:]), 0.25)


def clip(*grads):
    norm = torch.stack(torch._foreach_norm(list(grads))).norm()
    torch._foreach_mul_(list(grads), (1 / (norm + 1e-6)).clamp(max=1.0))
    return norm


def batch_norm(x, mean, var, weight, bias):
    return F.batch_norm(x, mean, var.abs_(), weight, bias, training=True, momentum=0.1)


def increased(c, x):
    c.add_(x)


def with_two_kernels(c, x, w):
    c[0].copy_(x)
    return c @ w


def settle_adam(given):
    """Makes second moments positive, and steps start at 0."""
    for position in range(9, 12):
        given[str(position)].abs_()
    for position in range(12, 15):
        given[str(position)].zero_()


def settle_one_adam(given):
    given["5"].abs_()
    given["6"].zero_()


def writes(statement):
    """A program that calls one function, and returns a value computed from its first argument."""

    def program(c, *others):
        statement(c, *others)
        return c * 2

    return program


ROWS = tensor(64, dtype="int64", values="order")
IN_PLACE = [
    Program("add", writes(lambda c, x: c.add_(x)), (tensor(1 << 18),) * 2),
    Program("add one number", writes(lambda c: c.add_(1)), (tensor(dtype="int64", values="below 9"),)),
    Program("copy", writes(lambda c, x: c.copy_(x)), (tensor(300, 65), tensor(300, 65, dtype="float16"))),
    Program("only written", lambda c, x: c.copy_(x.sin()), (tensor(4096),) * 2),
    Program("zeros", writes(lambda c: c.zero_()), (tensor(1 << 20),)),
    Program("clamp", writes(lambda c: c.clamp_(-0.5, 0.5)), (tensor(333, 3, dtype="bfloat16"),)),
    Program("mask", writes(lambda c, m: c.masked_fill_(m, 0.25)),
            (tensor(99, 9), tensor(99, 9, dtype="bool", values="mask"))),
    Program("row and matmul", with_two_kernels, (tensor(64, 128), tensor(128), tensor(128, 32))),
    Program("column", writes(lambda c, x: c[:, 3].add_(x)), (tensor(65, 33), tensor(65))),
    Program("transposed", writes(lambda c, x: c.mul_(x)), (tensor(64, 65, layout="transposed"), tensor(64, 65))),
    Program("sliced", writes(lambda c, x: c.mul_(x)), (tensor(64, 65, layout="sliced"), tensor(64, 65))),
    Program("misaligned", writes(lambda c, x: c.add_(x)), (tensor(4097, layout="misaligned"), tensor(4097))),
    Program("misaligned half",
            writes(lambda c, x: c.add_(x)), (tensor(8192, dtype="float16", layout="misaligned"),) * 2),
    Program("misaligned to matmul", lambda c, x: c.add_(x) @ c,
            (tensor(256, 256, layout="misaligned"), tensor(256, 256))),
    Program("both read and written", lambda a, b: (a.add_(b), b.mul_(a), a + b)[2], (tensor(5000),) * 2),
    Program("twice in a row", writes(lambda c, w: c.copy_(c @ w).add_(c @ w)), (tensor(128, 128),) * 2),
    Program("returned", lambda c, x: c.add_(x), (tensor(777),) * 2),
    Program("returned in part", lambda c, x: (c.add_(x)[1:], c.view(-1), x), (tensor(77, 7),) * 2),
    Program("nothing returned", increased, (tensor(512),) * 2),
    Program("shared storage", lambda a, b: (a.add_(1), b.mul_(2), a.sum())[2],
            (tensor(1000), tensor(1000, shares="0", shift=1024))),
    Program("matmul out", lambda c, a, b: c.addmm_(a, b), (tensor(64, 32), tensor(64, 48), tensor(48, 32))),
]  # fmt: skip

INDEXED = [
    Program("index copy", writes(lambda c, i, x: c.index_copy_(0, i, x)), (tensor(64, 40), ROWS, tensor(64, 40))),
    Program("index put", writes(lambda c, i, x: c.index_put_((i,), x)), (tensor(64, 40), ROWS, tensor(64, 40))),
    Program("accumulate integers", writes(lambda c, i, x: c.index_put_((i,), x, accumulate=True)),
            (tensor(9, dtype="int64", values="below 9"), *(tensor(99, dtype="int64", values="below 9"),) * 2)),
    Program("scatter", writes(lambda c, i, x: c.scatter_(0, i, x)), (tensor(64), ROWS, tensor(64))),
    Program("scatter add", writes(lambda c, i, x: c.scatter_add_(0, i, x)),
            (tensor(9, dtype="int32", values="below 9"), tensor(99, dtype="int64", values="below 9"),
             tensor(99, dtype="int32", values="below 9"))),
    Program("kv cache", kv_cache, (*(tensor(2, 4, 128, 64, dtype="bfloat16"),) * 2,
            tensor(1, dtype="int64", values="below 128"), *(tensor(2, 4, 1, 64, dtype="bfloat16"),) * 3)),
    Program("kv cache by slice", kv_cache_by_slice, (*(tensor(2, 4, 64, 32),) * 2, *(tensor(2, 4, 2, 32),) * 2,
            tensor(2, 4, 1, 32))),
]  # fmt: skip

LISTS = [
    Program("foreach add", lambda *xs: torch._foreach_add_(xs[:9], xs[9:], alpha=-0.5), (tensor(31, 3),) * 18),
    Program("moving average", moving_average, tuple(tensor(i + 1, 5) for i in range(8)) * 2),
    Program("clipped gradients", clip, tuple(tensor(100 * i + 1) for i in range(6))),
    Program("adam by hand", adam, (*(tensor(257, 33),) * 3, tensor(257, 33), tensor())),
    Program("batch norm", batch_norm, (tensor(16, 8, 14, 14), *(tensor(8),) * 4)),
    Program("custom operator", writes(lambda c: increase(c, 0.5)), (tensor(1 << 16),)),
    Program("custom operator on a view", writes(lambda c: increase(c[1:], 0.5)), (tensor(99, 3),)),
    Program("custom operator on 200", lambda *xs: increase_all(list(xs), 1.0), (tensor(7),) * 200),
    Program("fused adam", lambda *t: fused_adam(list(t[:3]), list(t[3:6]), list(t[6:9]), list(t[9:12]), list(t[12:])),
            (*(tensor(65, 9),) * 12, *(tensor(),) * 3), settle=settle_adam),
    Program("fused adam beside others", adam_beside_others,
            (tensor(33), tensor(33), *(tensor(65, 9),) * 4, tensor()), settle=settle_one_adam),
    Program("unscaled gradients", lambda f, s, *g: unscale(list(g), f, s), (tensor(), tensor(), *(tensor(500),) * 5)),
]  # fmt: skip


@instantiate_parametrized_tests
class TestIndirectionMutation(IndirectionTestCase):
    verify = "on"

    def written(self, program):
        with warnings.catch_warnings(record=True) as caught, LogLines() as log:
            warnings.simplefilter("always")
            self.check(program, KEPT)
        told = [str(w.message) for w in caught] + [line for _, line in log.lines]
        self.assertEqual([line for line in told if "skipping cudagraphs" in line], [])

    @parametrize("program", [*IN_PLACE, *INDEXED, *LISTS], name_fn=by_name)
    def test_writes(self, program):
        self.written(program)

    def test_writes_to_an_output_of_the_step_before(self):
        """The call that records the mutating function, and all later ones, keep their writes."""

        def update(h):
            return h.add_(1).sum()

        produced, updated = compiled(lambda x: x * 2).graphed, compiled(update).graphed
        x = torch.ones(64, device=self.device)
        torch.compiler.cudagraph_mark_step_begin()
        produced(x)
        updated(torch.zeros(64, device=self.device))
        for _ in marked(range(3)):
            h = produced(x)
        torch.compiler.cudagraph_mark_step_begin()
        updated(h)
        assert_same_bits(h, torch.full_like(x, 3), "an output of the step before: ")
        for call in marked(range(6)):
            own = torch.full_like(x, call)
            total = updated(own)
            assert_same_bits(own, torch.full_like(x, call + 1), f"call {call}: ")
            assert_same_bits(total, own.sum(), f"call {call}: ")
        self.assertGreater(Facts.now().replays, 3)

    def test_a_custom_operator_runs_once_a_warmup_and_once_a_recording(self):
        calls = []

        @torch.library.custom_op("pygraph_indirection_test::counted", mutates_args=("x",))
        def counted(x: torch.Tensor) -> None:
            calls.append(x.data_ptr())
            x.add_(1)

        graphed = compiled(lambda x: counted(x)).graphed
        x = torch.zeros(4, device=self.device)
        with torch._inductor.config.patch({VERIFY: "off"}):  # verification runs it again
            for call in range(1, 6):
                graphed(x)
                self.assertEqual(len(calls), min(call, 2))
                self.assertEqual(x, torch.full_like(x, call))

    def test_what_was_misaligned_and_what_becomes_misaligned(self):
        for first, later in ((0, 1), (1, 0), (0, 4), (2, 0), (0, 2)):
            with self.subTest(first=first, later=later):
                torch._dynamo.reset()

                def program(c, x):
                    c.add_(x)
                    return c.sin()

                ways = compiled(program)
                blocks = [torch.zeros(1100, device=self.device) for _ in range(2)]
                for call, offset in enumerate((first, first, first, later, first, later, later)):
                    x = torch.full((1000,), call + 1.0, device=self.device)
                    results = []
                    for block, way in marked(zip(blocks, (ways.plain, ways.graphed), strict=True)):
                        results.append(way(block[offset : offset + 1000], x).clone())
                    assert_same_bits([results[1], blocks[1]], [results[0], blocks[0]], f"call {call}")

    def test_inputs_that_turn_out_to_be_one(self):
        ways = compiled(lambda c, x: (c.add_(x), c * x)[1])
        blocks = [torch.ones(2048, device=self.device) for _ in range(2)]
        for call in range(8):
            results = []
            for block, way in marked(zip(blocks, (ways.plain, ways.graphed), strict=True)):
                c, x = block[:1024], block[1024:] if call < 4 else block[:1024]
                results.append(way(c, x).clone())
            assert_same_bits([results[1], blocks[1]], [results[0], blocks[0]], f"call {call}")

    def test_mask_that_cannot_be_graphed(self):
        def program(cache, mask, x):
            cache[mask] = x
            return cache.sin() * 2

        inputs = (tensor(64, 8), tensor(64, 8, dtype="bool", values="mask"), tensor())
        self.check(Program("mask", program, inputs, graphed=False, copied=None), KEPT)

    def test_written_in_the_middle_of_three_parts(self):
        def program(c, x):
            c.add_(x)
            host = (x * 2).cpu() + 1
            c.mul_(host.to(c.device))
            return c.sum(0)

        self.check(Program("parts", program, (tensor(64, 8), tensor(64, 8)), graphed=False, copied=None), KEPT)

    def test_storage_that_is_set(self):
        def program(c, x):
            c.data = x
            return c + 1

        ways = compiled(program)
        for call in range(5):
            results = []
            for way in marked((ways.plain, ways.graphed)):
                c, x = (torch.full((64,), float(value), device=self.device) for value in (-1, call))
                results.append([way(c, x).clone(), c.clone(), c.data_ptr() == x.data_ptr()])
            assert_same_bits(results[1], results[0], f"call {call}")

    def test_training_with_statistics_as_inputs(self):
        def program(x, mean, weight):
            mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return ((x - mean) * weight).sin()

        ways = compiled(program)
        means = [torch.zeros(16, device=self.device) for _ in range(2)]
        for call in range(6):
            generator = torch.Generator(self.device).manual_seed(call)
            x = torch.randn(32, 16, device=self.device, generator=generator)
            results = []
            for mean, way in marked(zip(means, (ways.plain, ways.graphed), strict=True)):
                weight = torch.full((16,), 0.5, device=self.device, requires_grad=True)
                way(x, mean, weight).sum().backward()
                results.append(weight.grad.clone())
            assert_same_bits([results[1], means[1]], [results[0], means[0]], f"call {call}")

    def test_a_lost_mutation_is_found(self):
        program = Program("lost", lambda c, x: c.add_(x), (tensor(99),) * 2)
        lost = compiled(program.fn)
        with self.assertRaisesRegex(AssertionError, "memory"):
            run(program, type(lost)(program.fn, lambda c, x: program.fn(c.clone(), x)), self.device, ("kept",))


class TestMutationByTable(TestIndirectionMutation):
    """Inputs that Triton kernels read are given through slots; nothing else differs."""

    indirection = "table"


if __name__ == "__main__":
    run_tests()
