"""Random programs of a few steps on CPU and GPU, for hypothesis, and their graphs."""

import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

GPU = torch.device("cuda", 0)


def traced(program, inputs):
    """The graph of a program for inputs, which are on the CPU, as if each were on the device given with it."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [
            mode.from_tensor(x)
            if place_ == "cpu"
            else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=GPU)
            for x, place_ in inputs
        ]
        return make_fx(program, tracing_mode="real")(*fakes)


UNARY = {
    "neg": torch.neg,
    "plus": lambda x: x + 1,
    "times": lambda x: x * 2,
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0) % 1009,  # so that floating-point numbers stay small enough to be exact
    "float": lambda x: x.float(),
    "long": lambda x: x.long(),
    "view": lambda x: x.view(2, 2).t().reshape(4),
    "first": lambda x: x[0],
    "sin": lambda x: x.float().sin(),
}
BINARY = {"add": torch.add, "mul": lambda x, y: x * y % 1009, "max": torch.maximum, "less": lambda x, y: (x < y).long()}


@st.composite
def programs(draw, *, rounds=True):
    """Steps of a program, and its inputs, of four numbers or one each; with ``rounds``, some steps round."""
    inputs = [
        (
            torch.arange(1, 5) * (n + 1) if draw(st.booleans()) else torch.tensor(n + 2),
            draw(st.sampled_from(["cpu", "gpu"])),
        )
        for n in range(draw(st.integers(1, 4)))
    ]
    unary = [name for name in UNARY if rounds or name != "sin"]
    steps = []
    count = len(inputs)
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["unary", "binary", "move", "make", "index", "mutate"]))
        one, other = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        name = draw(st.sampled_from(sorted(unary if kind == "unary" else BINARY)))
        steps.append((kind, one, other, name, draw(st.sampled_from(["cpu", "gpu"]))))
        count += 1
    outputs = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True))
    return inputs, steps, outputs


def run_steps(steps, outputs):
    def program(*inputs):
        values = list(inputs)
        for kind, one, other, name, where in steps:
            x, y = values[one], values[other]
            device = GPU if where == "gpu" else torch.device("cpu")
            if kind == "unary":
                usable = x.dim() == 1 or name not in ("flip", "cumsum", "view", "first")
                values.append(UNARY[name](x) if usable else x + 0)
            elif kind == "binary":
                on_cpu, on_gpu = (x, y) if x.device.type == "cpu" else (y, x)
                if x.device != y.device and (on_cpu.dim() or not on_gpu.dim()):
                    y = y.to(x.device)
                values.append(BINARY[name](x, y.to(x.device) if name == "max" else y))
            elif kind == "move":
                values.append(torch.ops.prims.device_put(x, device) if x.device != device else x + 0)
            elif kind == "make":
                values.append(torch.arange(4, device=device) if name < "max" else torch.full((), 3, device=device))
            elif kind == "index":
                index = (y.long() % 4).abs().expand(4)
                values.append(
                    x[index] if x.dim() and (index.device == x.device or index.device.type == "cpu") else x + 1
                )
            else:
                values.append(torch.where(x > 2, x, 0))
        return [values[n] if n >= len(inputs) else values[n] + 0 for n in outputs]

    return program
