"""Outputs that are live inputs, views of them, or saved for the backward: each replay rebuilds them."""

import torch
import torch.nn.functional as F
from indirection import Facts, IndirectionTestCase, Program, assert_same_bits, by_name, compiled, tensor
from parity import marked
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


def through_the_host(*kept):
    """A program in three parts, with the middle one on the CPU; the first part makes ``kept``."""

    def program(x, y):
        first = [make(x, y) for make in kept]
        host = (y * 2).cpu() + 1
        return (*first, host.to(y.device) * y + x.sum())

    return program


MATRIX = tensor(65, 33)
RETURNED = [
    Program("alone", lambda x: x, (MATRIX,), graphed=False),
    Program("with a result", lambda x: (x, x + 1), (MATRIX,)),
    Program("twice", lambda x: (x, x * 2, x), (MATRIX,)),
    Program("one of two", lambda x, y: (y, x @ y.mT), (MATRIX, MATRIX)),
    Program("in a dict", lambda x, y: {"x": x, "sum": (x + y, [y])}, (MATRIX, MATRIX)),
    Program("detached", lambda x: (x.detach(), x.sin()), (MATRIX,)),
    Program("slice", lambda x: (x[1:], x[:, 2:5].exp()), (MATRIX,)),
    Program("slice of columns", lambda x: (x[:, 2:5], x.sum()), (MATRIX,)),
    Program("transposed", lambda x: (x.t(), x.softmax(0)), (MATRIX,)),
    Program("flat", lambda x: (x.view(-1), x + 1), (MATRIX,)),
    Program("expanded", lambda x: (x.expand(4, 65, 33), x * 3), (MATRIX,)),
    Program("unsqueezed and itself", lambda x: (x[None], x, x.cos()), (MATRIX,)),
    Program("other dtype", lambda x: (x.view(torch.int32), x + 1), (MATRIX,)),
    Program("real parts", lambda x: (torch.view_as_real(x), torch.view_as_real(x * 2)),
            (tensor(64, dtype="complex64"),)),
    Program("strided", lambda x: (torch.as_strided(x, (5, 5), (3, 2), x.storage_offset() + 1), x + 1), (MATRIX,)),
    Program("of misaligned", lambda x: (x[3:], x.tanh()), (tensor(1000, layout="misaligned"),)),
    Program("of expanded", lambda x: (x[1:], x.sum(0)), (tensor(9, 33, layout="expanded"),)),
    Program("of shared storage", lambda x, y: (x[1:], y, x.sum() + y.sum()),
            (tensor(500), tensor(300, shares="0", shift=512))),
    Program("split", lambda x: (*x.split(13), x.mean()), (MATRIX,)),
    Program("chunk of attention", lambda x: (x.chunk(3, -1)[0], F.scaled_dot_product_attention(*x.chunk(3, -1))),
            (tensor(2, 4, 64, 96, dtype="bfloat16"),)),
    Program("written and returned", lambda x, y: (x.mul_(y), x[1:], y[2:]), (MATRIX, MATRIX)),
    Program("no elements", lambda x, y: (x, y + 1), (tensor(0, 33), MATRIX)),
]  # fmt: skip

PARTS = [
    Program("itself", through_the_host(lambda x, y: x), (MATRIX, MATRIX)),
    Program("a view", through_the_host(lambda x, y: x[1:]), (MATRIX, MATRIX)),
    Program("a view and a result", through_the_host(lambda x, y: y.t(), lambda x, y: x.sin()), (MATRIX, MATRIX)),
    Program("read on both sides", through_the_host(lambda x, y: (x @ y.mT).relu()), (MATRIX, MATRIX)),
]

SAVED = [
    Program("pointwise", lambda x: x.sin() * x, (MATRIX,), backward=True),
    Program("matmul", lambda x, w: x @ w, (tensor(64, 128), tensor(128, 32)), backward=True),
    Program("linear and loss", lambda x, w, b, t: F.mse_loss(F.linear(x, w, b).relu(), t),
            (tensor(32, 64), tensor(16, 64), tensor(16), tensor(32, 16)), backward=True),
    Program("layer norm", lambda x, w, b: F.layer_norm(x, (64,), w, b), (tensor(32, 64), tensor(64), tensor(64)),
            backward=True),
    Program("convolution", F.conv2d, (tensor(4, 8, 16, 16), tensor(8, 8, 3, 3), tensor(8)), backward=True),
    Program("attention", F.scaled_dot_product_attention, (tensor(2, 4, 64, 32, dtype="float64"),) * 3, backward=True),
    Program("returned too", lambda x, w: (x, x @ w, w.t()), (tensor(64, 32), tensor(32, 64)), backward=True),
    Program("a view is saved", lambda x, w: x[1:].sin() * w, (tensor(65, 32), tensor(64, 32)), backward=True),
    Program("not contiguous", lambda x, w: (x * w).cos(),
            (tensor(64, 32, layout="transposed"), tensor(64, 32)), backward=True),
]  # fmt: skip


@instantiate_parametrized_tests
class TestIndirectionOutputs(IndirectionTestCase):
    verify = "on"

    @parametrize("program", [*RETURNED, *PARTS], name_fn=by_name)
    def test_returned_or_passed_through_parts(self, program):
        self.check(program)

    @parametrize("program", SAVED, name_fn=by_name)
    def test_saved_for_backward(self, program):
        facts = self.check(program)
        # Forward inputs that the backward takes are never found to have moved.
        self.assertEqual((facts.recordings, facts.reasons), (facts.functions, ()), str(facts))

    def chained(self, first, second, calls=8):
        """The facts of two functions, with new inputs; the second one gets all results of the first."""
        plain, graphed = zip(*((w.plain, w.graphed) for w in (compiled(first), compiled(second))), strict=True)
        for call in range(calls):
            results = []
            for f, g in marked((plain, graphed)):
                generator = torch.Generator(self.device).manual_seed(call)
                x = torch.randn(64, 48, device=self.device, generator=generator)
                results.append([t.clone() for t in g(*f(x))] + [x])
            assert_same_bits(results[1], results[0], f"call {call}")
        return Facts.now()

    def test_the_next_function_is_not_recorded_again(self):
        for name, first in (
            ("itself", lambda x: (x, x + 1)),
            ("view", lambda x: (x[1:], x * 2)),
            ("transposed", lambda x: (x.t(), x.sin())),
        ):
            with self.subTest(name):
                torch._dynamo.reset()
                before = Facts.now()
                facts = self.chained(first, lambda a, b: (a.exp().sum(), b.cos()))
                self.assertEqual(facts.recordings - before.recordings, 2, str(facts))
                self.assertEqual(facts.reasons, (), str(facts))
                self.assertEqual(facts.replays - before.replays, 2 * 6, str(facts))
                self.assertEqual(facts.copied_bytes, 0, str(facts))

    def test_the_next_function_writes_to_it(self):
        facts = self.chained(lambda x: (x, x + 1), lambda a, b: (a.mul_(b), b.sum()))
        self.assertEqual((facts.recordings, facts.reasons, facts.skips), (2, (), 0), str(facts))

    def test_outputs_do_not_keep_the_input_alive(self):
        graphed = compiled(lambda x: (x[1:], x + 1)).graphed
        for _ in marked(range(4)):
            graphed(torch.ones(1 << 20, device=self.device))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in marked(range(6)):
            graphed(torch.ones(1 << 20, device=self.device))
        self.assertEqual(torch.cuda.memory_allocated(), before)

    def test_conjugates_kept_for_the_backward(self):
        """Complex products save lazily conjugated views of live inputs and of results."""
        programs = {
            "of an input": lambda x, w: torch.mm(x, w),
            "of a product": lambda x, w: x * w,
            "of a result": lambda x, w: (x @ w).conj() @ w,
            "of a transform": lambda x, w: torch.fft.fft(x) * w,
            "of columns": lambda x, w: x[:, ::2] * w[:, ::2],
        }
        for name, program in programs.items():
            graphed = torch.compile(program, mode="reduce-overhead")
            for call in range(6):
                gradients = []
                for way in marked((program, graphed)):
                    generator = torch.Generator(self.device).manual_seed(call)
                    options = {"dtype": torch.complex64, "device": self.device, "generator": generator}
                    x, w = torch.randn(16, 16, **options), torch.randn(16, 16, **options).requires_grad_()
                    way(x, w).abs().sum().backward()
                    gradients.append(w.grad.clone())
                self.assertEqual(gradients[1], gradients[0], rtol=1e-4, atol=1e-4, msg=f"{name}, call {call}")

    def test_a_saved_input_that_is_written_later_is_an_error(self):
        graphed = compiled(lambda x: x.sin() * 2).graphed
        for _ in marked(range(4)):
            x = torch.ones(64, device=self.device)
            leaf = torch.ones(64, device=self.device, requires_grad=True)
            x = x * leaf
            y = graphed(x)
            with torch.no_grad():
                x.add_(1)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                y.sum().backward()


class TestOutputsByTable(TestIndirectionOutputs):
    """Inputs that Triton kernels read are given through slots; nothing else differs."""

    indirection = "table"


if __name__ == "__main__":
    run_tests()
