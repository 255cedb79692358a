"""Realistic programs that pass CPU values to the GPU at each call.

Their results are close to eager's, and each program is in one CUDA graph without a graph break, except one, which has a
second partition.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from indirection import Facts, IndirectionTestCase
from packages import is_torchvision_broken
from placement import CALLS_EACH
from real_programs import REAL, noise_schedule, tokens
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees


class TestRealPrograms(IndirectionTestCase):
    @parametrize("build", REAL, name_fn=lambda build: build.__name__)
    def test_one_graph(self, build):
        if build is tokens and is_torchvision_broken():
            self.skipTest("transformers imports torchvision, which was built for another torch")
        program, inputs = build(self.device, small=True)
        graphed = torch.compile(program, mode="reduce-overhead")
        with torch.backends.cudnn.flags(allow_tf32=False):  # otherwise another layout gives another result
            for call in range(CALLS_EACH):
                # CPU inputs change at each call.
                given_ = [t.flip(0).clone() if t.device.type == "cpu" and call % 2 else t.clone() for t in inputs]
                torch.compiler.cudagraph_mark_step_begin()
                self.assertEqual(graphed(*given_), program(*given_), atol=1e-4, rtol=1e-4)
        (graph,) = pygraph_trees.report().graphs
        self.assertEqual(sum(p.graphed for p in graph.partitions), 1)
        self.assertEqual(len(graph.partitions), 2 if build is noise_schedule else 1)
        self.assertEqual(pygraph_trees.report().breaks, ())
        self.assertGraphed(Facts.now(), CALLS_EACH)


instantiate_parametrized_tests(TestRealPrograms)

if __name__ == "__main__":
    run_tests()
