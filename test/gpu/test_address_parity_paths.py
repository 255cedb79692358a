"""More programs of ``test_trees_*`` with inputs by address, run as in ``test_address_parity.py``.

The test cases cover outputs, generations, paths and partitions. Values, errors and random states that a program notes
must be equal to those under upstream.
"""

from __future__ import annotations

import test_trees_generations
import test_trees_outputs
import test_trees_partitions
import test_trees_paths
from test_address_parity import ByAddress as _ByAddress
from torch.testing._internal.common_utils import run_tests


class TestOutputsByAddress(_ByAddress, test_trees_outputs.TestTreeOutputs):
    pass


class TestGenerationsByAddress(_ByAddress, test_trees_generations.TestTreeGenerations):
    pass


class TestPathsByAddress(_ByAddress, test_trees_paths.TestTreePaths):
    pass


class TestPartitionsByAddress(_ByAddress, test_trees_partitions.TestTreePartitions):
    pass


if __name__ == "__main__":
    run_tests()
