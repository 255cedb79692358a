"""Nodes of every kind, a driver call that fails, and an interrupt during a capture.

Results are right, the recording works, and the report gives the reason. ``test/cpu/test_live_inputs.py`` has a failure
of each call.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from indirection import Facts, IndirectionTestCase, Program, compiled, run, tensor
from torch.testing._internal.common_utils import run_tests
from user_operators import cloned, zeroed

import pygraph_trees
from pygraph_trees.cuda.copy_nodes import MemcpyNode, MemsetNode
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.errors import DriverError


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
        """Kernel nodes are set one by one through the driver's bindings, as without the native modules."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Driver, "set_kernels", lambda driver, exec_, nodes: None))
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
        for call in range(9):
            failing[:] = [True] if call < 4 else []
            x = torch.full((1 << 16,), float(call), device=self.device)
            torch.compiler.cudagraph_mark_step_begin()
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
        for call in range(8):
            armed[:] = [True] if call in (1, 2) else []
            x = torch.full((1 << 16,), float(call), device=self.device)
            torch.compiler.cudagraph_mark_step_begin()
            if armed:
                with self.assertRaisesRegex(KeyboardInterrupt, "in the model"):
                    graphed(x)
            else:
                self.assertEqual(graphed(x), (x * 2).sin())
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.copied_bytes), (1, 0), str(facts))


if __name__ == "__main__":
    run_tests()
