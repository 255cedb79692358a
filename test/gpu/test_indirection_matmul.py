"""Matmuls that read live inputs: no byte is copied, whichever library or kernel computes them."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import torch
import torch.nn.functional as F
from indirection import ByTable, IndirectionTestCase, Program, by_name, named, tensor
from parity import BOTH_SIDES
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

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


def small_integers(given: Mapping[str, torch.Tensor]) -> None:
    for value in given.values():
        value.mul_(2).round_()


@instantiate_parametrized_tests
class TestIndirectionMatmul(IndirectionTestCase):
    verify = "on"

    @parametrize("program", MATMUL, name_fn=by_name)
    def test_matmul(self, program):
        self.check(program)

    @parametrize("program", HOPPER, name_fn=by_name)
    def test_matmul_of_sm90(self, program):
        if torch.cuda.get_device_capability() < (9, 0):
            self.skipTest("needs compute capability 9.0")
        self.check(program)

    @parametrize("backward", [False, True])
    def test_templates_of_triton(self, backward):
        """Those of ``mode="max-autotune"``; the two ways may choose other ones, but these sums are exact."""
        inputs = tensor(128, 64), tensor(64, 256), tensor(256)
        program = Program(
            "template", lambda x, w, b: (x @ w + b).relu() @ w.mT, inputs, settle=small_integers, backward=backward
        )
        options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON", "test_configs.max_mm_configs": 2}
        with (
            mock.patch.dict(BOTH_SIDES, deterministic=False),  # which tunes nothing
            torch._inductor.config.patch(options),
            fresh_cache(),  # of choices
        ):
            self.check(program)
        self.assertGreater(counters["inductor"]["select_algorithm_autotune"], 0)


@instantiate_parametrized_tests
class TestMatmulByTable(ByTable):
    verify = "on"

    @parametrize("program", named(MATMUL, "vector"), name_fn=by_name)
    def test_matmul(self, program):
        self.check(program)


if __name__ == "__main__":
    run_tests()
