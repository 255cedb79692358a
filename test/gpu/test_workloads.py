"""Three small programs of the benchmark: replays take the fast path, with inputs at new addresses in each call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import torch
from bench.workloads import WORKLOADS
from indirection import Facts, IndirectionTestCase
from packages import is_torchvision_broken
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch.utils import _pytree as pytree

from pygraph_trees.native import binding

SMALL: dict[str, dict[str, Any]] = {
    "BERT-I": {"layers": 2, "sequence": 64},
    "DLRM": {"batch": 256, "rows": 10_000},
    "TKE": {"shape": (64, 64, 8)},
}
CALLS = 12


class TestWorkloads(IndirectionTestCase):
    outputs = "keep"

    def setUp(self) -> None:
        super().setUp()
        always = torch._inductor.config.patch({"triton.pygraph_selective": "always"})
        self.enterContext(always)  # no call is part of a measurement

    @parametrize("name", SMALL)
    def test_fast_path(self, name: str) -> None:
        if name == "BERT-I" and is_torchvision_broken():
            self.skipTest("transformers imports torchvision, which was built for another torch")
        program = WORKLOADS[name].build(self.device, **SMALL[name])
        graphed = torch.compile(program.fn, mode="reduce-overhead")
        before = binding.extension.counts() if binding.extension is not None else None
        used = []  # so that addresses differ
        with program.context():
            wanted = pytree.tree_leaves(program.fn(*program.args, **program.kwargs))
            for call in range(CALLS):
                used.append(pytree.tree_map_only(torch.Tensor, torch.clone, (program.args, dict(program.kwargs))))
                args, kwargs = used[-1]
                for found, other in zip(pytree.tree_leaves(graphed(*args, **kwargs)), wanted, strict=True):
                    self.assertEqual(found, other, atol=5e-2, rtol=5e-2, msg=f"call {call}")
        facts = Facts.now()
        self.assertEqual((facts.copied_bytes, facts.ungraphed_calls), (0, 0), str(facts))
        self.assertIn("patch", facts.routes)
        self.assertGreaterEqual(facts.replays, CALLS - 4, str(facts))
        if before is not None:
            fast = binding.extension.counts()[1] - before[1]
            self.assertGreaterEqual(fast, facts.replays - facts.recordings, str(facts))


instantiate_parametrized_tests(TestWorkloads)

if __name__ == "__main__":
    run_tests()
