"""Generated kernels and matmuls that read live inputs: no byte is copied, whatever reads them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from indirection import IndirectionTestCase, Program, by_name, tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

POINTWISE = [
    Program("one kernel", lambda x: x.sin() + 1, (tensor(1 << 20),)),
    Program("three float64 inputs", lambda t, s, p: (t * s + p).abs().sqrt() - t,
            (tensor(1 << 20, dtype="float64"),) * 3),
    Program("broadcast", lambda x, y: x * y + x, (tensor(2048, 1), tensor(1, 1024))),
    Program("bfloat16 gelu", F.gelu, (tensor(1024, 1023, dtype="bfloat16"),)),
    Program("integers", lambda x, y: (x ^ y) + (x << 1), (tensor(1 << 19, dtype="int64", values="below 99"),) * 2),
    Program("mask", torch.where, (tensor(777, 513, dtype="bool", values="mask"), tensor(777, 513), tensor(777, 513))),
    Program("several outputs", lambda x: (x + 1, x * 2, x.cos().half()), (tensor(1 << 18),)),
    Program("complex", lambda x, y: x * y + 1, (tensor(1 << 16, dtype="complex64"),) * 2),
    Program("bytes", lambda x: x.float() / 255, (tensor(3, 224, 224, dtype="uint8", values="below 255"),)),
    Program("bessel function", lambda x: torch.special.i0e(x) + torch.special.zeta(x + 2, 2.5), (tensor(1 << 16),)),
    Program("pad, roll, flip", lambda x: F.pad(x.roll(3, 0).flip(1), (1, 2)), (tensor(513, 257),)),
    Program("cat and stack", lambda x, y: (torch.cat([x, y, x]), torch.stack([y, x])), (tensor(300, 65),) * 2),
]  # fmt: skip

REDUCTION = [
    Program("rows", lambda x: x.sum(1), (tensor(1024, 1024),)),
    Program("columns", lambda x: x.amax(0), (tensor(4096, 127),)),
    Program("all of it", lambda x: x.sum(), (tensor(1 << 22),)),
    Program("softmax", lambda x: x.softmax(1), (tensor(512, 4097, dtype="float16"),)),
    Program("layer norm", lambda x, w, b: F.layer_norm(x, (768,), w, b), (tensor(512, 768), tensor(768), tensor(768))),
    Program("variance", lambda x: torch.var_mean(x, 1), (tensor(333, 2049),)),
    Program("argmax", lambda x: x.argmax(-1), (tensor(128, 50257, dtype="bfloat16"),)),
    Program("logsumexp", lambda x: x.logsumexp(0), (tensor(2048, 64, dtype="float64"),)),
    Program("cumsum", lambda x: (x.cumsum(1), x.cumprod(0)), (tensor(64, 8192, dtype="float64"),)),
    Program("norms", lambda x, y: torch.stack(torch._foreach_norm([x, y])), (tensor(1 << 16), tensor(77))),
    Program("cross entropy", F.cross_entropy, (tensor(512, 1000), tensor(512, dtype="int64", values="below 1000"))),
]

MATMUL = [
    Program("bfloat16", torch.mm, (tensor(1024, 1024, dtype="bfloat16"),) * 2),
    Program("one row", torch.mm, (tensor(1, 4096, dtype="bfloat16"), tensor(4096, 1024, dtype="bfloat16"))),
    Program("float64", torch.mm, (tensor(300, 200, dtype="float64"), tensor(200, 100, dtype="float64"))),
    Program("bias", torch.addmm, (tensor(512), tensor(256, 384), tensor(384, 512))),
    Program("batches", torch.bmm, (tensor(16, 65, 127), tensor(16, 127, 33))),
    Program("linear", F.linear, (tensor(8, 77, 512, dtype="float16"), tensor(1536, 512, dtype="float16"))),
    Program("transposed", lambda x, y: x.mT @ y, (tensor(512, 256), tensor(512, 128))),
    Program("einsum", lambda x, y: torch.einsum("bij,bkj->bik", x, y), (tensor(4, 96, 64), tensor(4, 80, 64))),
    Program("vector", torch.mv, (tensor(2048, 2048), tensor(2048))),
    Program("baddbmm", torch.baddbmm, (tensor(8, 64, 32), tensor(8, 64, 48), tensor(8, 48, 32))),
    Program("integers", torch._int_mm, (tensor(128, 256, dtype="int8", values="below 99"),) * 1
            + (tensor(256, 128, dtype="int8", values="below 99"),)),
    Program("one input twice", lambda x: x @ x + x, (tensor(768, 768),)),
    Program("a chain", lambda x, a, b, c: ((x @ a).relu() @ b).relu() @ c,
            (tensor(64, 256), tensor(256, 512), tensor(512, 512), tensor(512, 8))),
    Program("30522 columns", F.linear, (tensor(8, 64, dtype="float16"), tensor(30522, 64, dtype="float16"))),
    Program("32000 columns", F.linear, (tensor(8, 64), tensor(32000, 64))),
    Program("32767 rows", F.linear, (tensor(32767, 64), tensor(24, 64))),
]  # fmt: skip

HOPPER = [
    Program(
        "scaled 8 bits",
        lambda x, w, s: torch._scaled_mm(x, w.t(), scale_a=s, scale_b=s, out_dtype=torch.bfloat16),
        (tensor(128, 256, dtype="float8_e4m3fn"), tensor(512, 256, dtype="float8_e4m3fn"), tensor()),
    ),
    Program(
        "groups",
        lambda x, w: torch._grouped_mm(x, w, torch.arange(64, 257, 64, device=x.device, dtype=torch.int32)),
        (tensor(256, 64, dtype="bfloat16"), tensor(4, 64, 128, dtype="bfloat16")),
    ),
]


def chain(*xs: torch.Tensor) -> torch.Tensor:
    """Two kernels an input, and matmuls between them."""
    total = xs[0]
    for x in xs[1:]:
        total = (total @ x).softmax(1) + x
    return total


MANY = [
    Program("64 small", lambda *xs: [x.sin() for x in xs], (tensor(33),) * 64),
    Program("64 of many sizes", lambda *xs: sum(x.sum() for x in xs), tuple(tensor(i + 1, 3) for i in range(64))),
    Program("28 inputs to 50 kernels", chain, (tensor(16, 16),) * 28),
    Program("200 to one", lambda *xs: torch._foreach_mul(list(xs), 2.0), (tensor(7),) * 200),
    Program("mixed dtypes", lambda a, b, c, d: (a.double() + b) * c + d,
            (tensor(99), tensor(99, dtype="float64"), tensor(99, dtype="int32", values="below 9"), tensor())),
]  # fmt: skip


class TestIndirectionKernels(IndirectionTestCase):
    verify = "on"

    @parametrize("program", POINTWISE, name_fn=by_name)
    def test_pointwise(self, program):
        self.check(program)

    @parametrize("program", REDUCTION, name_fn=by_name)
    def test_reduction(self, program):
        self.check(program)

    @parametrize("program", MATMUL, name_fn=by_name)
    def test_matmul(self, program):
        self.check(program)

    @parametrize("program", HOPPER, name_fn=by_name)
    def test_matmul_of_sm90(self, program):
        if torch.cuda.get_device_capability() < (9, 0):
            self.skipTest("needs compute capability 9.0")
        self.check(program)

    @parametrize("program", MANY, name_fn=by_name)
    def test_many(self, program):
        self.check(program)


instantiate_parametrized_tests(TestIndirectionKernels)

if __name__ == "__main__":
    run_tests()
