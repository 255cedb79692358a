"""What ended a process: code for aligned inputs that is given others, and errors that hold memory of the graph pool."""

from __future__ import annotations

from indirection import KeptTestCase
from new_program import printed
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

START = """
import gc, json, sys
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
import pygraph_trees


def rows(count, width, shift):
    block = torch.randn(count * width + shift, device="cuda")
    return block[shift:].view(count, width)
"""

# Each number of rows has its own graph; the first call with it gives misaligned rows, and others to be written to.
SIZES = """
def fn(x, c):
    c.add_(x)
    return (x * 2 + 1).sum(1), x.exp()

compiled = torch.compile(fn, mode="reduce-overhead", dynamic=True)
for count in (16, 32, 48):
    for call in range(6):
        shift = 1 if count > 16 and call % 2 == 0 else 0
        x, c = rows(count, 64, shift), rows(count, 64, shift if count < 48 else 1 - shift)
        twin = c.clone()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, c), fn(x, twin))
        torch.testing.assert_close(c, twin)
"""

# AOTAutograd's cache does not compare alignment.
CACHE = """
class Scaled(torch.nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.weight = torch.nn.Parameter(rows(16, 64, shift % 2))

    def forward(self, x):
        return (x * self.weight + 1).sum(1), x.exp()

with fresh_cache():
    for shift in (0, 1, 2):
        torch._dynamo.reset()
        module = Scaled(shift)
        compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
        for call in range(6):
            x = rows(16, 64, shift // 2)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), module(x))
assert counters["aot_autograd"]["autograd_cache_hit"] == 2, counters
"""

# The frame of the program's operator holds memory of the pool as long as the error is held. What runs next after the
# recording of the first graph gets the allocator's state as of that recording, in which this memory is free.
HELD = """
fails = False

@torch.library.custom_op("lost_gpu_test::moody", mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    if fails:
        raise ValueError("the operator fails")
    return x * 2

@moody.register_fake
def _(x):
    return torch.empty_like(x)

def fn(x, end):
    y = (x + 1).relu()
    torch._dynamo.graph_break()
    return ENDS[end](y)

ENDS = {"first": torch.sin, "moody": lambda y: moody(y.exp()) + 1, "last": torch.cos}
compiled = torch.compile(fn, mode="reduce-overhead")

def check(end):
    x = torch.randn(256, 1024, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, end), fn(x, end))

for _ in range(4):
    check("first")
held, fails = [], True
try:
    check("moody")
except ValueError as error:
    held.append(error)
fails = False
check("last")
assert held
held.clear()
gc.collect()
for _ in range(4):
    for end in ENDS:
        check(end)
"""

END = """
torch.cuda.synchronize()
print(json.dumps(sum(f.replays for f in pygraph_trees.report().functions)))
"""


@instantiate_parametrized_tests
class TestLostGpu(KeptTestCase):
    @parametrize("program", ["SIZES", "CACHE", "HELD"])
    def test_values_are_right(self, program):
        self.assertGreater(printed(START + globals()[program] + END), 0)


if __name__ == "__main__":
    run_tests()
