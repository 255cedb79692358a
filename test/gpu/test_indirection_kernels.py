"""Generated kernels that read live inputs: no byte is copied, for any number of kernels and inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from indirection import IndirectionTestCase, Program, by_name, tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.load(x_ptr + offsets, mask=inside) + tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, total, mask=inside)


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum of two contiguous tensors of the same shape."""
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out


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
    Program("of the user", lambda x, y: added(x, y) * 2, (tensor(5000),) * 2),
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


def chain(*xs: torch.Tensor) -> torch.Tensor:
    """Two kernels for each input, with matmuls between them."""
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


@instantiate_parametrized_tests
class TestIndirectionKernels(IndirectionTestCase):
    verify = "on"

    @parametrize("program", [*POINTWISE, *REDUCTION, *MANY], name_fn=by_name)
    def test_kernels(self, program):
        self.check(program)


if __name__ == "__main__":
    run_tests()
