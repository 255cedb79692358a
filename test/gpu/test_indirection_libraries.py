"""Library kernels that read live inputs, by family: no byte is copied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from indirection import Facts, IndirectionTestCase, Program, by_name, compiled, tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.indirection.placeholder import PAGE_NBYTES

SDPA = F.scaled_dot_product_attention

CONVOLUTION = [
    Program("one dimension", lambda x, w: F.conv1d(x, w, padding=2), (tensor(8, 32, 1000), tensor(64, 32, 5))),
    Program("two dimensions", F.conv2d, (tensor(8, 16, 56, 56), tensor(32, 16, 3, 3), tensor(32))),
    Program("channels last", lambda x, w: F.conv2d(x, w, stride=2),
            (tensor(8, 64, 28, 28, dtype="float16", layout="channels_last"),
             tensor(64, 64, 3, 3, dtype="float16", layout="channels_last"))),
    Program("three dimensions", F.conv3d, (tensor(2, 4, 8, 16, 16), tensor(8, 4, 3, 3, 3))),
    Program("depthwise", lambda x, w: F.conv2d(x, w, groups=32), (tensor(4, 32, 28, 28), tensor(32, 1, 3, 3))),
    Program("transposed", lambda x, w: F.conv_transpose2d(x, w, stride=2), (tensor(4, 8, 14, 14), tensor(8, 4, 2, 2))),
    Program("pooled", lambda x, w: F.max_pool2d(F.conv2d(x, w).relu(), 2), (tensor(4, 3, 64, 64), tensor(8, 3, 5, 5))),
    Program("resized", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (tensor(2, 3, 64, 64),)),
]  # fmt: skip

QKV = (tensor(2, 8, 256, 64, dtype="bfloat16"),) * 3
ATTENTION = [
    Program("bfloat16", SDPA, QKV),
    Program("causal", lambda q, k, v: SDPA(q, k, v, is_causal=True), (tensor(1, 4, 333, 128, dtype="float16"),) * 3),
    Program("float32", SDPA, (tensor(2, 4, 128, 64),) * 3),
    Program("float64", SDPA, (tensor(2, 4, 64, 32, dtype="float64"),) * 3),
    Program("mask", SDPA, (*QKV, tensor(2, 1, 256, 256, dtype="bool", values="mask"))),
    Program("added mask", SDPA, (*QKV, tensor(2, 8, 256, 256, dtype="bfloat16"))),
    Program("projected", lambda x, w: SDPA(*(x @ w).view(2, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)),
            (tensor(2, 128, 256, dtype="bfloat16"), tensor(256, 768, dtype="bfloat16"))),
]  # fmt: skip
CUDNN_ATTENTION = Program(
    "cudnn", lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0], QKV
)

IDS = tensor(4096, dtype="int64", values="below 1000")
EMBEDDING = [
    Program("large table", F.embedding, (IDS, tensor(100_000, 64))),
    Program("int32 indices", F.embedding,
            (tensor(64, 32, dtype="int32", values="below 500"), tensor(500, 128, dtype="float16"))),
    Program("bag", F.embedding_bag, (tensor(512, 8, dtype="int64", values="below 1000"), tensor(1000, 64))),
    Program("bag of sums", lambda i, w: F.embedding_bag(i, w, mode="sum"),
            (tensor(512, 8, dtype="int64", values="below 1000"), tensor(1000, 17))),
    Program("eight tables", lambda i, *w: torch.cat([F.embedding(i, t) for t in w], 1),
            (IDS, *(tensor(1000, 16),) * 8)),
    Program("gather", lambda x, i: torch.gather(x, 1, i),
            (tensor(256, 100), tensor(256, 50, dtype="int64", values="below 100"))),
    Program("index select", lambda x, i: torch.index_select(x, 0, i), (tensor(1000, 129), IDS)),
    Program("two indices", lambda x, i, j: x[i, :, j], (tensor(1000, 3, 1000, dtype="float16"), IDS, IDS)),
    Program("scattered integers", lambda i, v: v.new_zeros(1000).scatter_add(0, i, v), (IDS, IDS)),
    Program("accumulated integers", lambda x, i, v: x.index_put((i,), v, accumulate=True),
            (tensor(1000, dtype="int64", values="below 9"), IDS, IDS)),
]  # fmt: skip

SORT = [
    Program("long", lambda x: x.sort().values, (tensor(1 << 21),)),
    Program("rows", lambda x: x.sort(-1), (tensor(64, 1024),)),
    Program("stable", lambda x: x.argsort(dim=0, stable=True), (tensor(20_000, 3, dtype="int32", values="below 100"),)),
    Program("topk", lambda x: x.topk(5), (tensor(128, 5000, dtype="bfloat16"),)),
    Program("kth value", lambda x: x.kthvalue(7, 1).values, (tensor(32, 3000, dtype="float64"),)),
    Program("median", lambda x: x.median(1).values, (tensor(64, 777),)),
    Program("searchsorted", lambda x, y: torch.searchsorted(x.sort().values, y), (tensor(10_000), tensor(500))),
    Program("bucketize", lambda x, y: torch.bucketize(y, x),
            (tensor(1000, dtype="int64", values="order"), tensor(5000, dtype="int64", values="below 1000"))),
    Program("cummax", lambda x: x.cummax(1).values, (tensor(32, 4096),)),
]  # fmt: skip

# Each input is larger than one of the driver's granules, so its placeholder takes several.
LARGE = [
    Program("convolution", lambda x, w: F.conv2d(x, w, padding=1),
            (tensor(16, 512, 14, 14), tensor(512, 512, 3, 3))),
    Program("matmul", torch.mm, (tensor(2048, 1536, dtype="bfloat16"), tensor(1536, 2048, dtype="bfloat16"))),
    Program("attention", SDPA, (tensor(2, 8, 2048, 64, dtype="bfloat16"),) * 3),
    Program("embedding", F.embedding,
            (tensor(1 << 19, dtype="int64", values="below 100000"), tensor(100_000, 9))),
]  # fmt: skip

FFT = [
    Program("real", lambda x: torch.view_as_real(torch.fft.rfft(x)), (tensor(64, 1024),)),
    Program("complex", lambda x: torch.view_as_real(torch.fft.fft(x, dim=0)), (tensor(1000, 16, dtype="complex64"),)),
    Program("back", lambda x: torch.fft.irfft(x, n=500), (tensor(32, 251, dtype="complex64"),)),
    Program("images", lambda x: torch.fft.fft2(x).abs(), (tensor(4, 64, 63, dtype="float64"),)),
]


def dominant(given: dict[str, torch.Tensor]) -> None:
    """Adds to the diagonal so that the matrix is invertible and its lower triangle positive definite."""
    given["0"].diagonal(dim1=-2, dim2=-1).add_(given["0"].shape[-1])
    if "2" in given:  # pivots that exchange no rows
        given["2"].copy_(torch.arange(1, given["2"].shape[-1] + 1, dtype=torch.int32))


def linalg(name: str, fn: object, *inputs: object) -> list[Program]:
    return [
        Program(
            f"{name}, {batch}",
            fn,
            tuple(tensor(*batch_shape, *shape, dtype=dtype) for shape, dtype in inputs),
            # The library that solves a single matrix depends on earlier work, and one library leaves unreadable nodes.
            None if batch == "one" else 0,
            settle=dominant,
        )
        for batch, batch_shape in (("one", ()), ("eight", (8,)))
    ]


SQUARE, SIDE, PIVOTS = ((48, 48), "float32"), ((48, 5), "float32"), ((48,), "int32")
LINALG = [
    *linalg("triangular", lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), SQUARE, SIDE),
    *linalg("cholesky", lambda a: torch.linalg.cholesky_ex(a).L, SQUARE),
    *linalg("inverse", lambda a: torch.linalg.inv_ex(a).inverse, SQUARE),
    *linalg("lu", lambda a, b, p: torch.linalg.lu_solve(a, p, b), SQUARE, SIDE, PIVOTS),
]


@instantiate_parametrized_tests
class TestIndirectionLibraries(IndirectionTestCase):
    verify = "on"

    @parametrize("program", [*CONVOLUTION, *ATTENTION, *EMBEDDING, *SORT, *FFT, *LINALG], name_fn=by_name)
    def test_libraries(self, program):
        self.check(program)

    def test_attention_of_cudnn(self):
        if torch.cuda.get_device_capability() < (8, 0):
            self.skipTest("needs compute capability 8.0")
        self.check(CUDNN_ATTENTION)

    @parametrize("program", LARGE, name_fn=by_name)
    def test_large(self, program):
        self.check(program)
        recordings = [r for f in pygraph_trees.report().functions for r in f.recordings]
        nbytes = [i.nbytes for r in recordings for i in r.inputs if i.kind == "live"]
        self.assertEqual(len(nbytes), len(program.inputs))
        self.assertGreater(min(nbytes), PAGE_NBYTES)


def residual(x, first, second, skip):
    h = F.conv2d(F.conv2d(x, first, padding=1).relu(), second, padding=1)
    return (h + F.conv2d(x, skip)).relu()


def u_net(x, down, middle, up, last):
    large = F.conv2d(x, down, padding=1).relu()
    small = F.conv2d(F.max_pool2d(large, 2), middle, padding=1).relu()
    return F.conv2d(torch.cat([large, F.conv_transpose2d(small, up, stride=2)], 1), last)


def cnn(x, first, second, last):
    h = F.max_pool2d(F.conv2d(x, first).relu(), 2)
    h = F.max_pool2d(F.conv2d(h, second).relu(), 2)
    return (h.flatten(1) @ last).log_softmax(1)


NETWORKS = {
    "residual": (residual, (8, 16, 28, 28), (32, 16, 3, 3), (32, 32, 3, 3), (32, 16, 1, 1)),
    "u_net": (u_net, (2, 3, 64, 64), (16, 3, 3, 3), (32, 16, 3, 3), (32, 16, 2, 2), (2, 32, 1, 1)),
    "cnn": (cnn, (32, 1, 28, 28), (32, 1, 3, 3), (64, 32, 3, 3), (1600, 10)),
}
LAYOUTS = {
    "float32": (torch.float32, torch.contiguous_format),
    "float16, channels last": (torch.float16, torch.channels_last),
}


@instantiate_parametrized_tests
class TestGradientsOfConvolutions(IndirectionTestCase):
    """With cuDNN's own choice of kernels, whose atomic additions may give other roundings at each launch."""

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False))

    def made(self, shape: tuple[int, ...], layout: str) -> torch.Tensor:
        dtype, memory_format = LAYOUTS[layout]
        tensor = torch.randn(shape, device=self.device, dtype=dtype) * 0.2
        return (tensor.to(memory_format=memory_format) if len(shape) == 4 else tensor).requires_grad_()

    @parametrize("layout", list(LAYOUTS), name_fn=lambda layout: layout.split(",")[0])
    @parametrize("network", list(NETWORKS))
    def test_weights_that_are_inputs(self, network: str, layout: str) -> None:
        fn, *shapes = NETWORKS[network]
        ways, room = compiled(fn), 1e-3 if LAYOUTS[layout][0] is torch.float32 else 5e-2
        for call in range(6):
            given = [self.made(shape, layout) for shape in shapes]
            found = []
            torch.compiler.cudagraph_mark_step_begin()
            for way in (ways.graphed, ways.plain):
                output = way(*given)
                gradients = torch.autograd.grad(output.square().mean() * 100, given)
                found.append([output.detach().clone(), *(g.clone() for g in gradients)])
                del output, gradients
            for number, (one, other) in enumerate(zip(*found, strict=True)):
                apart = (one.double() - other.double()).norm() / other.double().norm()
                self.assertLess(float(apart), room, f"call {call}, result {number}")
        facts = Facts.now()
        self.assertEqual((facts.copied_bytes, facts.why, facts.ungraphed_calls), (0, (), 0), str(facts))
        self.assertGreater(facts.replays, 0, str(facts))


if __name__ == "__main__":
    run_tests()
