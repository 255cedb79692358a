"""Inputs that cannot be patched and driver calls that fail: right results, a working recording, and a reason."""

from __future__ import annotations

import contextlib
import importlib

import torch
import torch.nn.functional as F
from indirection import FLAG, Facts, IndirectionTestCase, Program, by_name, compiled, run, tensor
from isolated import run_isolated
from parity import OURS, marked
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from user_operators import chunk_cat, cloned, host_call, zeroed

import pygraph_trees
from pygraph_trees.cuda.copy_nodes import MemcpyNode, MemsetNode
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.errors import DriverError
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
    for call in marked(range(5)):
        x.fill_(call)
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


@instantiate_parametrized_tests
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
        for call in marked(range(6)):
            x = torch.full((100,), complex(1, call), device=self.device).conj().imag
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
            for way in marked((fn, graphed)):
                x = torch.full((64,), call + 1.0, device=self.device, requires_grad=True)
                y = way(x)
                z = torch.complex(torch.zeros_like(y), y)
                (z.conj() if call > 4 else z).backward(torch.tensor(1j, device=self.device))
                gradients.append(x.grad.clone())
            self.assertEqual(gradients[1], gradients[0], msg=f"call {call}")


def all_kinds_of_nodes(x, y, c):
    zeroed(c)
    return (x.sin() @ y).relu(), cloned(y), cloned(x) + 1


NODES = Program("all kinds of nodes", all_kinds_of_nodes, (tensor(64, 65), tensor(65, 32), tensor(1000)), None)


@contextlib.contextmanager
def counting(owner, name, *, fails=False):
    """Counts the calls of a method, which may fail."""
    original, own = getattr(owner, name), vars(owner).get(name)
    counted = []

    def call(self, *args):
        counted.append(name)
        if fails:
            raise DriverError(call=name, code="INJECTED")
        return original(self, *args)

    setattr(owner, name, call)
    try:
        yield counted
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class TestIndirectionFailures(IndirectionTestCase):
    def test_every_kind_of_node_is_patched(self):
        """Kernel nodes are set through the driver's bindings if the graph has others."""
        with contextlib.ExitStack() as stack:
            counts = [stack.enter_context(counting(kind, "set")) for kind in (KernelNode, MemcpyNode, MemsetNode)]
            facts = self.check(NODES)
        self.assertEqual((facts.copied_bytes, facts.why), (0, ()), str(facts))
        self.assertTrue(all(map(len, counts)), [len(count) for count in counts])

    def test_the_reason_names_the_call(self):
        with counting(Driver, "create_memory", fails=True):
            run(NODES, compiled(NODES.fn), self.device)
        facts = Facts.now()
        self.assertGreater(facts.copied_bytes, 0)
        self.assertTrue(facts.why and all("create_memory returned INJECTED" in why for why in facts.why), str(facts))

    def test_exceptions_in_warm_ups(self):
        """The program's own exceptions, in one function's warm-ups; another function's recording is replayed."""
        failing: list[bool] = []

        @torch.library.custom_op("pygraph_indirection_test::failing", mutates_args=())
        def fails(x: torch.Tensor) -> torch.Tensor:
            if failing and x.is_cuda:
                raise ValueError("of the program")
            return x * 2

        fails.register_fake(lambda x: torch.empty_like(x))
        other, graphed = compiled(lambda x: x.cos() + 1).graphed, compiled(lambda x: fails(x).sin()).graphed
        for call in marked(range(9)):
            failing[:] = [True] if call < 4 else []
            x = torch.full((1 << 16,), float(call), device=self.device)
            self.assertEqual(other(x), x.cos() + 1)
            if failing:
                self.assertRaisesRegex(ValueError, "of the program", graphed, x)
            else:
                self.assertEqual(graphed(x), (x * 2).sin())
        functions = pygraph_trees.report().functions
        self.assertEqual(sum(len(function.recordings) for function in functions), 2, str(functions))
        self.assertEqual({function.ungraphed_reason for function in functions}, {None})
        self.assertEqual(functions[0].ungraphed_calls, 0)

    def test_interrupt_while_recording(self):
        """An interrupt in the model during its capture reaches the caller, and the function works afterwards."""
        armed = []

        @torch.library.custom_op("pygraph_indirection_test::interrupted", mutates_args=())
        def interrupted(x: torch.Tensor) -> torch.Tensor:
            if armed and x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise KeyboardInterrupt("in the model")
            return x * 2

        interrupted.register_fake(lambda x: torch.empty_like(x))
        graphed = compiled(lambda x: interrupted(x).sin()).graphed
        for call in marked(range(8)):
            armed[:] = [True] if call in (1, 2) else []
            x = torch.full((1 << 16,), float(call), device=self.device)
            if armed:
                with self.assertRaisesRegex(KeyboardInterrupt, "in the model"):
                    graphed(x)
            else:
                self.assertEqual(graphed(x), (x * 2).sin())
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.copied_bytes), (1, 0), str(facts))


if __name__ == "__main__":
    run_tests()
