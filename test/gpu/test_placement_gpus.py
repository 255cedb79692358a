"""Programs that mix the CPU and several GPUs stay unchanged, and the report gives the reason.

Results are on eager's devices and have eager's bits, and nothing is recorded. The tests need two GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from indirection import Facts, IndirectionTestCase
from parity import requires_two_gpus
from placement import CALLS_EACH
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees

PROGRAMS = {
    "vector": lambda x, y, v: (x * v.to(x.device), y + v.to(y.device)),
    "constructor": lambda x, y, v: (x + torch.arange(64).to(x.device), y * torch.arange(64).to(y.device), v + 1),
    "number": lambda x, y, v: (x * v[0], y * v[0].to(y.device)),
    "from one to the other": lambda x, y, v: (x.cpu().to(y.device) + y, v.to(x.device) + x),
}


@requires_two_gpus
class TestSeveralGpus(IndirectionTestCase):
    @parametrize("name", PROGRAMS)
    def test_left_alone(self, name):
        program = PROGRAMS[name]
        graphed = torch.compile(program, mode="reduce-overhead")
        for call in range(CALLS_EACH):
            x, y = (torch.full((64,), call + 0.5, device=torch.device("cuda", gpu)) for gpu in (0, 1))
            v = torch.arange(64.0) + call
            torch.compiler.cudagraph_mark_step_begin()
            for found, wanted in zip(graphed(x, y, v), program(x, y, v), strict=True):
                self.assertEqual(found.device, wanted.device)
                self.assertEqual(found, wanted, rtol=0, atol=0)
        (graph,) = pygraph_trees.report().graphs
        self.assertEqual((graph.placed, graph.why_not_placed), ((), "it has several GPUs"))
        self.assertEqual(Facts.now().recordings, 0)


instantiate_parametrized_tests(TestSeveralGpus)

if __name__ == "__main__":
    run_tests()
