"""Calls programs that mix CPU and GPU, and compares them with eager.

Values, devices, types and strides must be equal, and the same outputs must share memory. The report must count as many
partitions as the program announces.
"""

from __future__ import annotations

import torch
from indirection import Facts, IndirectionTestCase
from placement_programs import CALLS, TABLE, Mixed

import pygraph_trees

CALLS_EACH = 6


def name_of(program: Mixed) -> str:
    return f"{program.family}_{program.name}".replace(" ", "_").replace(",", "")


def flat(outputs):
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


class PlacementTestCase(IndirectionTestCase):
    def assertLikeEager(self, found, wanted, rounds, where):
        self.assertEqual(len(found), len(wanted), where)
        for one, other in zip(found, wanted, strict=True):
            for what in ("device", "dtype", "shape"):
                self.assertEqual(getattr(one, what), getattr(other, what), where)
            self.assertEqual(one.stride(), other.stride(), where)
            if rounds and one.is_floating_point():
                self.assertEqual(one, other, msg=where)
            else:
                self.assertEqual(one, other, rtol=0, atol=0, msg=where)

    def check(self, program, how):
        with torch._inductor.config.patch({"triton.pygraph_placement": how}):
            graphed = torch.compile(program.fn, mode="reduce-overhead")
            for call in range(CALLS_EACH):
                inputs, own = ([item.make(self.device, call) for item in program.inputs] for _ in range(2))
                if program.family == "closed over":
                    TABLE.add_(call)  # in place, between calls
                if program.name == "randomness":
                    torch.manual_seed(call)
                before = len(CALLS)
                torch.compiler.cudagraph_mark_step_begin()
                found = flat(graphed(*inputs))
                calls = len(CALLS) - before
                shared = aliases(found, inputs)
                if program.name == "randomness":
                    continue  # random numbers differ from eager's
                wanted = flat(program.fn(*own))
                self.assertEqual(calls, len(CALLS) - before - calls)
                where = f"{how}, call {call}"
                self.assertLikeEager(found, wanted, program.rounds, where)
                self.assertEqual(shared, aliases(wanted, own), where)
                for one, other in zip(inputs, own, strict=True):
                    self.assertEqual(one, other, rtol=0, atol=0, msg=where)
        return Facts.now()

    def check_family(self, program, how):
        facts = self.check(program, how)
        graphed, outside = program.full if how == "full" else program.exact or program.full
        (graph,) = pygraph_trees.report().graphs
        self.assertEqual(sum(p.graphed for p in graph.partitions), graphed)
        self.assertEqual(len(graph.partitions) - graphed, outside)
        self.assertGraphed(facts, CALLS_EACH)
        if program.family == "number" and graphed == 1:
            self.assertCopied(facts, 0)
            staged = sum(placed.how == "staged" for placed in graph.placed)
            self.assertEqual(facts.routes.count("stage"), staged)


def aliases(outputs, inputs):
    """For each value, the number of the memory that it shares with others; NumPy's scalars have none."""
    tensors = [t for t in [*inputs, *outputs] if isinstance(t, torch.Tensor)]
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    return [memory.index(address) for address in memory]
