"""Inputs that cannot be patched, always or at one call: right results, a working recording, a reason in the report.

Each program runs un-graphed and graphed while its inputs move (``indirection.py``). Both must leave the same bits, and
only the announced bytes may be copied.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from indirection import FLAG, Facts, IndirectionTestCase, Program, by_name, compiled, tensor
from isolated import run_isolated
from parity import OURS
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from user_operators import chunk_cat, host_call

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.indirection.live_input import memory_at, tensor_in

HIDDEN = "may hide its address|host array|no node holds its address"


def reads_freed_memory(ctx):
    api, device = Driver(importlib.import_module("cuda.bindings.driver")), torch.device("cuda", 0)
    torch.cuda.init()
    torch.zeros(1, device=device)
    nbytes = api.granularity(0)
    address, memory = api.reserve(nbytes), api.create_memory(nbytes, 0)
    api.map_memory(address, nbytes, memory)
    api.allow_access(address, nbytes, 0)
    x = tensor_in(memory_at(address, nbytes, device), (1024,), (1,), torch.float32, 0)
    f = ctx.compile(lambda x: x * 2)
    for call in range(5):
        x.fill_(call)
        torch.compiler.cudagraph_mark_step_begin()
        ctx.record(f(x))
    torch.cuda.synchronize()
    api.unmap(address, nbytes)
    torch.compiler.cudagraph_mark_step_begin()
    f(x)


PAIR = (tensor(64, 33), tensor(64, 33))
HIDING = [
    Program("address array", lambda x, y: chunk_cat([x, y]) * 2, PAIR, HIDDEN),
    Program("address array and another reader", lambda x, y: (chunk_cat([x, y]), x.sin()), PAIR, HIDDEN),
    Program("host node", lambda x: host_call(x) + 1, (tensor(1 << 16),), "a host node may hide its address"),
    Program("host node and others", lambda x, y: (host_call(x.sin()), x @ y.mT), PAIR, None),
]

RANDOM = [
    Program("dropout", lambda x: F.dropout(x, 0.5) * 2, (tensor(1 << 16),), seeded=True),
    Program("dropout around matmul", lambda x, w: F.dropout(F.dropout(x, 0.1) @ w, 0.2),
            (tensor(64, 128), tensor(128, 32)), seeded=True),
    Program("noise", lambda x: x + torch.randn_like(x) + torch.rand(65, 1, device=x.device),
            (tensor(65, 9),), seeded=True),
    Program("multinomial", lambda x: x.abs().multinomial(5, replacement=True), (tensor(16, 100),), seeded=True),
    Program("attention with dropout", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3),
            (tensor(2, 4, 128, 64, dtype="bfloat16"),) * 3, seeded=True),
    Program("trained dropout", lambda x, w: F.dropout(x * w, 0.5), PAIR, seeded=True, backward=True),
]  # fmt: skip


class TestIndirectionFallbacks(IndirectionTestCase):
    @parametrize("program", HIDING, name_fn=by_name)
    def test_hidden_addresses(self, program):
        self.check(program)

    @parametrize("program", RANDOM, name_fn=by_name)
    def test_random_numbers(self, program):
        self.check(program)

    def test_condition(self):
        def program(flag, x):
            return torch.cond(flag.any(), lambda x: x.sin(), lambda x: x.cos(), (x,))

        flag = tensor(1, dtype="bool", values="mask")
        self.check(Program("condition", program, (flag, tensor(64, 33)), None, graphed=False))

    def test_memory_that_was_freed(self):
        """Freed memory raises the graph's own error, as upstream's copy does; each case ends its process."""
        found = [
            run_isolated("test_indirection_fallbacks", "reads_freed_memory", OURS, config={FLAG: flag})
            for flag in ("off", self.indirection)
        ]
        for child in found:
            self.assertRegex(child["lost"][1], "illegal memory access")
        self.assertEqual(found[0]["lost"], found[1]["lost"])
        self.assertEqual(found[0]["facts"], found[1]["facts"])

    def test_conjugate_views(self):
        ways = compiled(lambda x: x * 2 + 1)
        calls = ([torch.full((100,), complex(call, 1), device=self.device).conj()] for call in range(6))
        self.assertSameCalls(ways, calls)

    def test_negated_views(self):
        """A copy resolves the negative bit; un-graphed, torch reads the memory as it is."""
        graphed = compiled(lambda x: x * 2 + 1).graphed
        for call in range(6):
            x = torch.full((100,), complex(1, call), device=self.device).conj().imag
            torch.compiler.cudagraph_mark_step_begin()
            result = graphed(x)
            if call:
                self.assertEqual(result, x * 2 + 1)
        self.assertRegex(Facts.now().why[0], "negated view")

    def test_negated_tangents(self):
        """A tangent that is negated at one call and not at the next gives the right gradients."""
        fn = lambda x: (x * x).sum()  # noqa: E731
        graphed = torch.compile(fn, mode="reduce-overhead")
        for call in range(9):
            gradients = []
            for way in (fn, graphed):
                x = torch.full((64,), call + 1.0, device=self.device, requires_grad=True)
                torch.compiler.cudagraph_mark_step_begin()
                y = way(x)
                z = torch.complex(torch.zeros_like(y), y)
                (z.conj() if call > 4 else z).backward(torch.tensor(1j, device=self.device))
                gradients.append(x.grad.clone())
            self.assertEqual(gradients[1], gradients[0], msg=f"call {call}")


instantiate_parametrized_tests(TestIndirectionFallbacks)

if __name__ == "__main__":
    run_tests()
