"""Programs that mix CPU and GPU, at least three per family, and the number of partitions of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

GPU = "cuda"


@dataclass(frozen=True)
class Input:
    """A tensor on the GPU or the CPU. With ``below``, its elements are integers below it.

    With ``columns``, it is the first columns of a wider tensor. A ``scalar`` is NumPy's, without dimensions.
    """

    size: tuple[int, ...] = (64,)
    where: str = "gpu"
    below: int | None = None
    columns: bool = False
    dtype: torch.dtype | None = None  # None: single precision or, for integers, int64
    scalar: bool = False

    def make(self, device: Any, seed: int) -> Any:
        """``device`` stands for the GPU; it may be "meta"."""
        generator = torch.Generator().manual_seed(seed)
        size = (*self.size[:-1], 2 * self.size[-1]) if self.columns else self.size
        if self.below is None:
            made = torch.rand(size, generator=generator)
        else:
            made = torch.randint(0, self.below, size, generator=generator)
        if self.columns:
            made = made[..., : self.size[-1]]
        made = made.to(self.dtype or made.dtype)
        if self.scalar:
            return made.numpy()[()]
        return made if self.where == "cpu" else made.to(device)


@dataclass(frozen=True)
class Mixed:
    family: str
    name: str
    fn: Callable[..., Any]
    inputs: tuple[Input, ...]
    full: tuple[int, int] = (1, 0)  # partitions that are graphed, and that are not
    exact: tuple[int, int] | None = None  # the same with floating-point numbers left to the CPU; None: as full
    rounds: bool = True  # whether the last place may differ from eager's


X = Input()
V = Input(where="cpu")
NUMBER = Input((), where="cpu")
INTEGER = Input((), where="cpu", below=8)
DOUBLE = Input((), where="cpu", dtype=torch.float64)
IDS = Input((16,), where="cpu", below=8)
TABLE = torch.arange(64.0)
COUNTS = numpy.arange(64, dtype=numpy.float32)
SCALE = torch.nn.Parameter(torch.full((64,), 0.5), requires_grad=False)

LIBRARY = torch.library.Library("pygraph_test_placement", "DEF")
ANYWHERE = "CompositeExplicitAutograd"
for _schema, _fn, _fake, _key in (
    (
        "at_least(Tensor x, Tensor bound) -> Tensor",
        lambda x, bound: x.clamp(min=bound.item()),
        lambda x, _: torch.empty_like(x),
        ANYWHERE,
    ),
    ("loud(Tensor x) -> Tensor", lambda x: _called("loud", x).clone(), torch.empty_like, ANYWHERE),
    ("louder(Tensor x) -> Tensor", lambda x: _called("louder", x) * 2, torch.empty_like, ANYWHERE),
    ("next_after(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like, "CPU"),
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_schema.split("(")[0], _fn, _key)
    torch.library.register_fake("pygraph_test_placement::" + _schema.split("(")[0], _fake, lib=LIBRARY)
CALLS: list[tuple[str, float]] = []  # of operators with a side effect: the operator's name, and the sum of its input
OPERATORS = torch.ops.pygraph_test_placement
at_least, loud, louder, next_after = OPERATORS.at_least, OPERATORS.loud, OPERATORS.louder, OPERATORS.next_after


def _called(name, x):
    CALLS.append((name, x.sum().item()))
    return x


def _causal(x):
    mask = torch.ones(64, 64, dtype=torch.bool).triu(1).to(GPU)
    return (x[:, None] * x).masked_fill(mask, -1e9).softmax(1)


def _product(x, ids):
    """A product of integer matrices, which the GPU does not have."""
    return x.sin() * (ids.view(4, 4) @ ids.view(4, 4)).sum().to(GPU)


def _last(x, ids):
    """The CPU keeps the last of several values that are written to one place."""
    return x * torch.zeros(64).index_put((ids,), torch.arange(16.0)).to(GPU)


def _swap(x, y):
    kept = x.cpu()
    x.copy_(y)
    y.copy_(kept.to(GPU))
    return x.sin()


def _old(x, y):
    kept = x.cpu().view(8, 8)
    x.add_(y)
    y.copy_(kept.to(GPU).view(64))
    return y + 1


def _columns(x, table):
    ordered = table.sort(0).values
    return x[ordered[:, 0]] - x[ordered[:, 1]], ordered.to(GPU)


def _relative(x):
    position = torch.arange(16)[:, None] - torch.arange(16)
    bucket = position.abs().clamp(max=7)
    return x.view(16, 4) @ x.view(4, 16) + TABLE.to(GPU)[bucket.to(GPU)]


OUTSIDE = (1, 1)
WIDE = Input((128, 256), where="cpu", columns=True)  # there are gaps between its rows
TABLE_OF_IDS = Input((64, 256), where="cpu", below=64)
ROW = Input((256,))
PROGRAMS = [
    Mixed("literal", "index", lambda x: x.view(8, 8)[:, torch.tensor([0, 3, 5])] * 2, (X,), rounds=False),
    Mixed("literal", "list", lambda x: x.view(8, 8)[:, [0, 3, 5, 1, 2, 6, 7, 4, 0, 1]] * 2, (X,), rounds=False),
    Mixed("literal", "table", lambda x: x + torch.tensor([[1.0] * 64, [2.0] * 64]).to(GPU), (X,), rounds=False),
    Mixed(
        "constructors",
        "chain",
        lambda x: x * (torch.arange(64) + 1).float().pow(-0.5).exp().to(GPU),
        (X,),
        rounds=False,
    ),
    Mixed(
        "constructors",
        "product of matrices",
        lambda x: x.view(8, 8) * (torch.arange(8)[:, None] @ torch.arange(8)[None]).to(GPU),
        (X,),
        rounds=False,
    ),
    Mixed(
        "constructors", "truncated quotients", lambda x: x * (torch.arange(64) / 61).long().to(GPU), (X,), rounds=False
    ),
    Mixed("constructors", "half", lambda x: x * (torch.arange(64).half() * 0.1 + 0.3).to(GPU), (X,), rounds=False),
    Mixed("constructors", "integers", lambda x: x * (torch.arange(64) % 3 + 1).to(GPU), (X,), rounds=False),
    Mixed("constructors", "causal mask", _causal, (X,)),
    Mixed("constructors", "relative positions", _relative, (X,)),
    Mixed("closed over", "vector", lambda x: x.sin() * TABLE.to(GPU) + 1, (X,)),
    Mixed("closed over", "indexed", lambda x, i: x.sin() * TABLE.to(GPU)[i], (X, Input((64,), below=64))),
    Mixed("closed over", "used twice", lambda x: (x + TABLE.to(GPU)) * TABLE.to(GPU).sum(), (X,)),
    Mixed("closed over", "parameter", lambda x: x * SCALE.to(GPU) + SCALE.exp().to(GPU), (X,), exact=OUTSIDE),
    Mixed(
        "look-up", "several", lambda x, i: x.view(16, 4) * TABLE[i].to(GPU)[:, None], (X, IDS), OUTSIDE, rounds=False
    ),
    Mixed("look-up", "one, computed with", lambda x, i: x * TABLE[i[:1]].sqrt().to(GPU), (X, IDS), OUTSIDE),
    Mixed("look-up", "literal", lambda x: x * TABLE[torch.arange(63, -1, -1)].to(GPU), (X,), rounds=False),
    Mixed("input", "vector", lambda x, v: x.sin() * v.to(GPU) + x.sum(), (X, V)),
    Mixed("input", "ids", lambda x, i: torch.nn.functional.embedding(i.to(GPU), x.view(8, 8)), (X, IDS), rounds=False),
    Mixed("input", "index", lambda x, i: x.sin()[i] + 1, (X, IDS)),
    Mixed("input", "mask", lambda x, i: x.where((i > 3).to(GPU)[:, None], 0.0), (Input((16, 4)), IDS), rounds=False),
    Mixed("input", "math before the copy", lambda x, v: x * (v * 2 + 1).exp().to(GPU), (X, V), exact=OUTSIDE),
    Mixed("input", "integers before the copy", lambda x, i: x[(i * 2 % 7).to(GPU)] + 1, (X, IDS), rounds=False),
    Mixed(
        "input",
        "row of a large one",
        lambda x, v: x * v[3].to(GPU),
        (ROW, Input((128, 256), where="cpu")),
        rounds=False,
    ),
    Mixed("input", "row of columns", lambda x, v: x * v[3].to(GPU), (ROW, WIDE), OUTSIDE, rounds=False),
    Mixed("input", "number of columns", lambda x, v: x * v[3, 4], (ROW, WIDE), OUTSIDE, rounds=False),
    Mixed("input", "column", lambda x, i: x[i[:, 0]] * 2, (X, TABLE_OF_IDS), OUTSIDE, rounds=False),
    Mixed(
        "input", "column and all", lambda x, i: (x[i[:, 0]], i.to(GPU).sum()), (X, TABLE_OF_IDS), OUTSIDE, rounds=False
    ),
    Mixed(
        "input",
        "columns of a computed one",
        _columns,
        (X, Input((64, 2), where="cpu", below=64)),
        OUTSIDE,
        rounds=False,
    ),
    Mixed(
        "input",
        "row of a computed one",
        lambda x, v: x * v.lgamma()[3].to(GPU),
        (Input((1025,)), Input((64, 1025), where="cpu")),
        OUTSIDE,
    ),
    Mixed("input", "to half precision", lambda x, v: x * v.to(torch.bfloat16).to(GPU).float(), (X, V), rounds=False),
    Mixed("number", "as it is", lambda x, s: x.sin() * s + x, (X, NUMBER)),
    Mixed("number", "computed with", lambda x, s: x.sin() * (s + 1).sqrt(), (X, NUMBER), exact=OUTSIDE),
    Mixed("number", "one element", lambda x, s: x.sin() * s.to(GPU) + x, (X, Input((1,), where="cpu"))),
    Mixed("number", "NumPy array", lambda x: x * torch.from_numpy(COUNTS).to(GPU), (X,), rounds=False),
    Mixed("number", "for the CPU too", lambda x, s: at_least(x.sin(), s) * s + x.cos(), (X, NUMBER), (2, 1)),
    Mixed("number", "for the CPU alone", lambda x, s: at_least(x.sin(), s).cos(), (X, NUMBER), (2, 1)),
    Mixed("number", "for the CPU, computed with", lambda x, s: at_least(x, s + 1) * s, (X, NUMBER), (1, 1)),
    Mixed(
        "number",
        "for an operator of the CPU, an integer",
        lambda x, s: x * s * next_after(s).to(GPU),
        (X, INTEGER),
        OUTSIDE,
    ),
    Mixed(
        "number",
        "for an operator of the CPU, in double precision",
        lambda x, s: (x.sin() * s).sum() + next_after(s),
        (X, DOUBLE),
        OUTSIDE,
    ),
    Mixed("number", "NumPy scalar", lambda x, s: x * s, (X, Input((), "cpu", scalar=True)), rounds=False),
    Mixed(
        "number",
        "NumPy scalar, an integer",
        lambda x, s: x + torch.as_tensor(s).to(GPU),
        (X, Input((), "cpu", below=8, scalar=True)),
        rounds=False,
    ),
    Mixed("round trip", "alone", lambda x: (x.sin().cpu().to(GPU) * 2).cos(), (X,)),
    Mixed("round trip", "with math", lambda x: ((x.sin().cpu() + 1).to(GPU) * 2).cos(), (X,), exact=(2, 1)),
    Mixed("round trip", "another type", lambda x: (x.sin().cpu().double().to(GPU) * 2).cos(), (X,)),
    Mixed("round trip", "returned", lambda x: (x, x.cpu().to(GPU), x + 1), (X,), rounds=False),
    Mixed("round trip", "between two that are written to", _swap, (X, X)),
    Mixed("round trip", "of what is written to", _old, (X, X), rounds=False),
    Mixed(
        "returned",
        "constructor",
        lambda x: (x + torch.arange(64).to(GPU), torch.arange(64)),
        (X,),
        OUTSIDE,
        rounds=False,
    ),
    Mixed("returned", "computed from one", lambda x: (x + 1, torch.arange(64) * 2 + 1), (X,), OUTSIDE, rounds=False),
    Mixed("returned", "computed from an input", lambda x, v: (x * v.to(GPU), v + 1), (X, V), OUTSIDE, rounds=False),
    Mixed("to the CPU", "a sum", lambda x: (x.sin() * 2).sum().cpu(), (X,), OUTSIDE),
    Mixed("to the CPU", "and computed with there", lambda x: (x.sin() * 2).cpu() + 1, (X,), OUTSIDE),
    Mixed("to the CPU", "one of two", lambda x: (x.cos(), x.sin().cpu()), (X,), OUTSIDE),
    Mixed("stays", "randomness", lambda x: x.sin() * torch.rand(64).to(GPU), (X,), OUTSIDE),
    Mixed("stays", "what is written to", lambda x, v: x.sin() * v.add_(1).to(GPU), (X, V), OUTSIDE),
    Mixed("stays", "the last of several", _last, (X, IDS), OUTSIDE, rounds=False),
    Mixed("stays", "one of equals", lambda x, i: x[i.sort().indices.to(GPU)].sin(), (X, IDS), OUTSIDE),
    Mixed("stays", "a sum of fractions", lambda x, v: x.sin() * v.cumsum(0).to(GPU), (X, V), OUTSIDE),
    Mixed("stays", "a product of matrices", _product, (X, IDS), OUTSIDE),
    Mixed("stays", "a side effect", lambda x, v: x.sin() * loud(v).to(GPU), (X, V), OUTSIDE),
]
# Those that run with "exact", too: results are not rounded, or partitions differ; and the first one of each family.
EXACT = [
    p for n, p in enumerate(PROGRAMS) if p.exact or not p.rounds or p.family not in [q.family for q in PROGRAMS[:n]]
]
