"""Programs that mix CPU and GPU: eager is the oracle, for values, devices, types, strides and memory."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from indirection import Facts, IndirectionTestCase
from placement_programs import CALLS, PROGRAMS, TABLE, Mixed
from real_programs import REAL, noise_schedule
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees

CALLS_EACH = 6


def name_of(program: Mixed) -> str:
    return f"{program.family}_{program.name}".replace(" ", "_").replace(",", "")


def flat(outputs):
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


class TestPlacement(IndirectionTestCase):
    def assertLikeEager(self, found, wanted, given_, own, rounds, where):
        """``given_`` are the inputs of the compiled call and ``own`` those of eager's."""
        self.assertEqual(len(found), len(wanted), where)
        for one, other in zip(found, wanted, strict=True):
            for what in ("device", "dtype", "shape"):
                self.assertEqual(getattr(one, what), getattr(other, what), where)
            self.assertEqual(one.stride(), other.stride(), where)
            if rounds and one.is_floating_point():
                self.assertEqual(one, other, msg=where)
            else:
                self.assertEqual(one, other, rtol=0, atol=0, msg=where)
        self.assertEqual(aliases(found, given_), aliases(wanted, own), where)
        for one, other in zip(given_, own, strict=True):
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
                found = [t.clone() if t.device.type == "cuda" and not any(t is i for i in inputs) else t for t in found]
                if program.name == "randomness":
                    continue  # other numbers than eager's
                wanted = flat(program.fn(*own))
                self.assertEqual(calls, len(CALLS) - before - calls)
                self.assertLikeEager(found, wanted, [], [], program.rounds, f"{how}, call {call}")
        return Facts.now()

    @parametrize("program", PROGRAMS, name_fn=name_of)
    @parametrize("how", ["full", "exact"])
    def test_family(self, program, how):
        facts = self.check(program, how)
        graphed, outside = program.full if how == "full" else program.exact or program.full
        (graph,) = pygraph_trees.report().graphs
        self.assertEqual(sum(p.graphed for p in graph.partitions), graphed)
        self.assertEqual(len(graph.partitions) - graphed, outside)
        self.assertGraphed(facts, CALLS_EACH)

    def test_queued_replays_read_their_own_inputs(self):
        """None waits for the GPU, which is busy; each has its number."""
        busy = torch.randn(4096, 4096, device=self.device)
        graphed = torch.compile(lambda x, s, v: x * s + v.to("cuda"), mode="reduce-overhead")
        x, v = torch.ones(64, device=self.device), torch.zeros(64)
        s = torch.tensor(0.0)
        kept = []
        for call in range(40):
            if call == 10:
                for _ in range(20):
                    busy = (busy @ busy).clamp(-1, 1)
            s.fill_(call)
            v.numpy()[:] = call / 64
            torch.compiler.cudagraph_mark_step_begin()
            kept.append(graphed(x, s, v).clone())
        for call, found in enumerate(kept):
            self.assertEqual(found, torch.full((64,), call + call / 64, device=self.device))

    def test_a_look_up_by_a_number_is_reported(self):
        """Dynamo breaks the graph there, or compiles it for each number."""
        graphed = torch.compile(lambda x, t: x * TABLE[t].to("cuda"), mode="reduce-overhead")
        for call in range(3):
            x, t = torch.ones(64, device=self.device), torch.tensor(call)
            torch.compiler.cudagraph_mark_step_begin()
            self.assertEqual(graphed(x, t), x * TABLE[t].to("cuda"))
        (broken,) = pygraph_trees.report().breaks
        self.assertIn("TABLE[t]", broken.source)

    def test_large_inputs_are_copied_outside(self):
        graphed = torch.compile(lambda x, v: x + v.to("cuda").sum(), mode="reduce-overhead")
        v = torch.ones(8 << 20)
        for call in range(5):
            v[0] = call
            torch.compiler.cudagraph_mark_step_begin()
            self.assertEqual(graphed(torch.zeros(4, device=self.device), v)[0].item(), v.sum().item())


class TestRealPrograms(IndirectionTestCase):
    @parametrize("build", REAL, name_fn=lambda build: build.__name__)
    def test_one_graph(self, build):
        program, inputs = build(self.device, small=True)
        graphed = torch.compile(program, mode="reduce-overhead")
        for call in range(CALLS_EACH):
            # Those on the CPU are others at each call.
            given_ = [t.flip(0).clone() if t.device.type == "cpu" and call % 2 else t.clone() for t in inputs]
            torch.compiler.cudagraph_mark_step_begin()
            self.assertEqual(graphed(*given_), program(*given_), atol=1e-4, rtol=1e-4)
        (graph,) = pygraph_trees.report().graphs
        self.assertEqual(sum(p.graphed for p in graph.partitions), 1)
        self.assertEqual(len(graph.partitions), 2 if build is noise_schedule else 1)
        self.assertEqual(pygraph_trees.report().breaks, ())
        self.assertGraphed(Facts.now(), CALLS_EACH)


def aliases(outputs, inputs):
    """Which share their memory, by number."""
    memory = [t.untyped_storage().data_ptr() for t in [*inputs, *outputs]]
    return [memory.index(address) for address in memory]


instantiate_parametrized_tests(TestPlacement)
instantiate_parametrized_tests(TestRealPrograms)

if __name__ == "__main__":
    run_tests()
