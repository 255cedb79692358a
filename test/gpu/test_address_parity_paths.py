"""More programs of ``test_trees_*`` with inputs by address, run as in ``test_address_parity.py``.

The test cases cover outputs, generations, paths and partitions. Values, errors and random states that a program notes
must be equal to those under upstream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import test_trees_generations
import test_trees_outputs
import test_trees_partitions
import test_trees_paths
import torch
from parity import OURS, run_side
from test_address_parity import ByAddress as _ByAddress
from test_address_parity import with_flags
from torch.testing._internal.common_utils import run_tests

if TYPE_CHECKING:
    from parity import Context


class TestOutputsByAddress(_ByAddress, test_trees_outputs.TestTreeOutputs):
    pass


class TestGenerationsByAddress(_ByAddress, test_trees_generations.TestTreeGenerations):
    def test_reset_of_the_trees(self) -> None:
        """Torch asserts that the trees are there; here, calls run un-graphed."""

        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x.sin() + 1)
            for call in range(8):
                if call == 4:
                    torch._inductor.cudagraph_trees.reset_cudagraph_trees()
                x = torch.randn(4, 8, device=ctx.device)
                ctx.record(f(x) - (x.sin() + 1))

        found = with_flags(run_side)(program, OURS)
        self.assertIsNone(found.crash, found.traceback)
        self.assertLess(max(note.value.value.abs().max() for note in found.notes), 1e-5)


class TestPathsByAddress(_ByAddress, test_trees_paths.TestTreePaths):
    pass


class TestPartitionsByAddress(_ByAddress, test_trees_partitions.TestTreePartitions):
    pass


if __name__ == "__main__":
    run_tests()
