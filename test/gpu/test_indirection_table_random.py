"""The tests of ``test_indirection_random.py``, with a table of addresses and a third of the programs.

The flag is "table", so inputs that Triton kernels read are given through slots. The assertions are those of the patch
route.
"""

from __future__ import annotations

import test_indirection_random as by_patch
from torch.testing._internal.common_utils import run_tests


class TestRandomByTable(by_patch.TestIndirectionRandom):
    indirection = "table"
    programs = by_patch.PROGRAMS // 3
    seed = 8


if __name__ == "__main__":
    run_tests()
