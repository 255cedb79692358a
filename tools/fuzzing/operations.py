"""The operations of the programs: one function each, which takes its operands from a :class:`~fuzzing.scope.Scope`.

An operation returns the source of a new value or, if it writes to an operand, of a whole statement. Families are kinds
of GPU kernels: code that Inductor generates, and libraries that ATen calls. Values stay within a few units in any
chain, and no operation has jumps in floating point, so a small difference stays small. The order of the operations is
part of what a seed means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .constants import begin, combination, continued
from .faults import OPERATOR
from .scope import NoRoom, Scope, Value

Write = Callable[[Scope], str]


@dataclass(frozen=True, slots=True)
class Operation:
    """A way to continue a program."""

    family: str
    write: Write
    mutates: bool  # a statement instead of a new value


OPERATIONS: list[Operation] = []


def _operation(family: str, mutates: bool = False) -> Callable[[Write], Write]:
    def add(write: Write) -> Write:
        OPERATIONS.append(Operation(family, write, mutates))
        return write

    return add


def _on(family: str, mutates: bool = False, **operand: Any) -> Callable[[Callable[[Scope, Value], str]], Write]:
    """For an operation on an operand that is drawn before anything else: one that :meth:`Scope.tensor` finds."""
    draw = Scope.written if mutates else Scope.tensor
    return lambda write: _operation(family, mutates)(lambda s: write(s, draw(s, **operand)))


_operation("pointwise")(lambda s: f"torch.{s.one_of('tanh', 'sigmoid', 'sin', 'cos', 'abs', 'neg')}({s.tensor()})")


@_on("pointwise")
def binary(s: Scope, x: Value) -> str:
    return s.one_of("{0} * {1}", "({0} + {1}) * 0.5", "torch.maximum({0}, {1})").format(x, s.tensor(shape=x.shape))


_on("pointwise", least_rank=1)(lambda s, x: f"({x} - {s.tensor(shape=x.shape[-1:])}) * 0.5")
_on("pointwise")(lambda s, x: f"torch.where({s.mask(x.shape)}, {x}, {s.tensor(shape=x.shape)})")
_on("pointwise")(lambda s, x: f"{x}.to(torch.{s.one_of('float32', 'float64', 'bfloat16', 'float16')})")


@_on("reduction", least_rank=1)
def reduce(s: Scope, x: Value) -> str:
    return f"{x}.{s.one_of('mean', 'amax', 'amin')}({s.dimension(x)}, keepdim={s.one_of(True, False)})"


_on("reduction", least_rank=1)(lambda s, x: f"torch.softmax({x}, {s.dimension(x)})")


@_on("reduction", least_rank=1)
def layer_norm(s: Scope, x: Value) -> str:
    last = x.shape[-1:]
    weight, bias = s.tensor(shape=last, dtype=x.dtype), s.tensor(shape=last, dtype=x.dtype)
    return f"torch.tanh(F.layer_norm({x}, {list(last)}, {weight}, {bias}, 0.1))"


@_on("matmul", rank=2)
def mm(s: Scope, a: Value) -> str:
    b = s.tensor(shape=(a.shape[1], s.size()), dtype=a.dtype)
    return f"({a} @ {b}) * {_share(a.shape[1])}"


@_on("matmul", rank=2)
def addmm(s: Scope, a: Value) -> str:
    b = s.tensor(shape=(a.shape[1], s.size()), dtype=a.dtype)
    bias = s.tensor(shape=b.shape[1:], dtype=a.dtype)
    return f"torch.addmm({bias}, {a}, {b}, beta=0.5, alpha={_share(2 * a.shape[1])})"


@_on("matmul", least_rank=2)
def linear(s: Scope, x: Value) -> str:
    weight = s.tensor(shape=(s.size(), x.shape[-1]), dtype=x.dtype)
    return f"F.linear({x}, {weight}) * {_share(x.shape[-1])}"


@_on("matmul", rank=3)
def bmm(s: Scope, a: Value) -> str:
    b = s.tensor(shape=(a.shape[0], a.shape[2], s.size()), dtype=a.dtype)
    return f"torch.bmm({a}, {b}) * {_share(a.shape[2])}"


@_on("convolution", rank=4)
def conv2d(s: Scope, x: Value) -> str:
    side, channels = s.one_of(1, 3), s.size()
    weight = s.tensor(shape=(channels, x.shape[1], side, side), dtype=x.dtype)
    return f"F.conv2d({x}, {weight}, padding={side // 2}) * {_share(side * side * x.shape[1])}"


@_on("attention", rank=4)
def attention(s: Scope, q: Value) -> str:
    k, v = (s.tensor(shape=q.shape, dtype=q.dtype) for _ in range(2))
    return f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={s.one_of(True, False)})"


_on("embedding", rank=2)(lambda s, table: f"F.embedding({s.index((s.size(),), table.shape[0])}, {table})")


@_on("embedding", rank=2, dtypes=("float32", "float64"))
def embedding_bag(s: Scope, table: Value) -> str:
    return f"F.embedding_bag({s.index((s.size(), s.size()), table.shape[0])}, {table}, mode='mean')"


@_on("indexing", least_rank=1)
def index_select(s: Scope, x: Value) -> str:
    d = s.dimension(x)
    return f"torch.index_select({x}, {d}, {s.index((s.size(),), x.shape[d])})"


_on("indexing", rank=2)(lambda s, x: f"torch.gather({x}, 1, {s.index(x.shape, x.shape[1])})")
_on("indexing", least_rank=2)(lambda s, x: f"{x}[..., {s.index((s.size(),), x.shape[-1])}]")
_on("scan and sort", least_rank=1)(lambda s, x: f"torch.sort({x}, stable=True, dim={s.dimension(x)}).values")
_on("scan and sort", least_rank=1)(lambda _, x: f"torch.topk({x}, {min(2, x.shape[-1])}).values")


@_on("scan and sort", least_rank=1)
def cumsum(s: Scope, x: Value) -> str:
    d = s.dimension(x)
    return f"torch.cumsum({x}, {d}) * {_share(x.shape[d])}"


@_on("copy", least_rank=1)
def cat(s: Scope, x: Value) -> str:
    others = [s.tensor(shape=x.shape, dtype=x.dtype) for _ in range(s.one_of(1, 2, 5))]
    return f"torch.{s.one_of('cat', 'stack')}([{', '.join(map(str, [x, *others]))}])"


@_operation("copy")
def copy(s: Scope) -> str:
    form = s.one_of("{}.clone()", "{}.contiguous()", "torch.zeros_like({})", "{}.flip(0)")
    return form.format(s.tensor(least_rank=1))


@_on("view", least_rank=2)
def view(s: Scope, x: Value) -> str:
    form = s.one_of("{}.transpose(-1, -2)", "{}[..., 1:]", "{}.unsqueeze(0)", "{}[0]", "{}.reshape(-1)", "{}[:]")
    return form.format(x)


@_operation("foreach")
def foreach(s: Scope) -> str:
    if s.has("torch._foreach_lerp_"):
        raise NoRoom
    x = s.tensor()
    others = [s.tensor(shape=x.shape, dtype=x.dtype) for _ in range(s.one_of(1, 3))]
    return f"sum(torch._foreach_mul([{', '.join(map(str, [x, *others]))}], {_share(1 + len(others))}))"


@_operation("foreach", mutates=True)
def foreach_in_place(s: Scope) -> str:
    """The only one of its program: up to torch 2.13, Inductor merges two into a kernel whose blocks race."""
    if s.has("torch._foreach_"):
        raise NoRoom
    x = s.written()
    values = [x, *(s.written(shape=x.shape, dtype=x.dtype, apart_from=[x]) for _ in range(s.one_of(0, 2)))]
    values = list(dict.fromkeys(values))
    operand = s.tensor(shape=x.shape, dtype=x.dtype, apart_from=values)
    listed = ", ".join(map(str, values))
    return f"torch._foreach_lerp_([{listed}], [{', '.join([str(operand)] * len(values))}], 0.25)"


_on("complex", dtypes=("float32", "float64"))(
    lambda s, x: f"torch.complex({x}, {s.tensor(shape=x.shape, dtype=x.dtype)})"
)


@_operation("constants")
def constant_chain(s: Scope) -> str:
    made = s.constant(begin(s))
    for _ in range(s.one_of(1, 2, 3, 4)):
        with contextlib.suppress(NoRoom):  # this dtype lacks some operators
            made = s.constant(continued(s, s.constants[-1]))
    x = s.tensor(shape=made.shape)
    return combination(s.move(x), str(made.dtype).removeprefix("torch."), x)


_operation("custom operator")(lambda s: f"{OPERATOR}({s.tensor()})")


@_operation("control flow")
def cond(s: Scope) -> str:
    x, predicate = s.tensor(), s.one_of("{}", "{}.cpu()").format(s.mask(()))
    s.like(f"torch.cos({x})")
    return f"torch.cond({predicate}, lambda _t: torch.sin(_t), lambda _t: torch.cos(_t) * 0.5, ({x},))"


@_operation("control flow")
def while_loop(s: Scope) -> str:
    """At least one iteration: without any, eager returns its operand and torch.compile a copy."""
    x, last = s.tensor(), s.index((), 4)
    start = s.one_of("{0}", "{0}.clone()") if x.tensor.is_contiguous() else "{0}.contiguous()"
    s.like(f"torch.sin({x})")
    loop = f"lambda _i, _t: _i <= {last}, lambda _i, _t: (_i + 1, torch.sin(_t) + 0.1)"
    return f"torch.while_loop({loop}, (torch.zeros_like({last}), {start.format(x)}))[1]"


@_on("control flow", least_rank=2)
def scan(s: Scope, x: Value) -> str:
    s.like(f"torch.sin({x})")
    step = "lambda _c, _t: ((_c + _t) * 0.5, (_c - _t) * 0.5)"
    return f"torch._higher_order_ops.scan({step}, torch.zeros_like({x}[0]), {x}, dim=0)[1]"


@_operation("in place", mutates=True)
def resize(s: Scope) -> str:
    x = s.intermediate()
    return f"{x}.resize_({x.shape[0]}, {s.size()}).fill_(0.25)"


@_operation("data", mutates=True)
def parameter_data(s: Scope) -> str:
    """The only one of its program: torch.compile rejects a parameter that is both given other memory and written to."""
    if s.has(".data"):
        raise NoRoom
    forms = ["{0}.data.mul_(0.5)", "{0}.data *= 0.5"]
    if s.mutations:  # with gradients, torch.compile loses that of the other memory
        forms += ["{0}.data = {0}.data * 0.5", "{0}.data = torch.tanh({0}.data)"]
    return s.one_of(*forms).format(s.parameter())


@_on("in place", mutates=True)
def arithmetic_in_place(s: Scope, x: Value) -> str:
    y = s.tensor(shape=x.shape, apart_from=[x])
    forms = "{0}.mul_({1})", "{0}.mul_(0.5).add_({1}, alpha=0.5)", "{0}.copy_({1})", "{0}.clamp_(-0.5, 0.5)"
    return s.one_of(*forms).format(x, y)


_on("in place", mutates=True)(lambda _, x: f"{x}.zero_()")
_on("in place", mutates=True)(lambda s, x: f"{x}.masked_fill_({s.mask(x.shape)}, 0.25)")
_on("in place", mutates=True, least_rank=1)(lambda s, x: f"{x}[0] = {s.tensor(shape=x.shape[1:], apart_from=[x])}")


@_on("indexing", mutates=True, least_rank=1)
def index_copy(s: Scope, x: Value) -> str:
    source = s.tensor(shape=x.shape, dtype=x.dtype, apart_from=[x])
    return f"{x}.index_copy_(0, {s.order(x.shape[0])}, {source})"


@_on("indexing", mutates=True, rank=2)
def index_put(s: Scope, x: Value) -> str:
    source = s.tensor(shape=x.shape, dtype=x.dtype, apart_from=[x])
    return f"{x}[:, {s.order(x.shape[1])}] = {source}"


_operation("graph break", mutates=True)(lambda _: "torch._dynamo.graph_break()")


def _share(count: int) -> float:
    """A factor that turns a sum of ``count`` values into a mean."""
    return 1.0 / max(1, count)
