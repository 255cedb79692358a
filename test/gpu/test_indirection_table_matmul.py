"""The tests of ``test_indirection_matmul.py``, with a table of addresses.

The flag is "table", so inputs that Triton kernels read are given through slots. The assertions are those of the patch
route, and some programs must take the table.
"""

from __future__ import annotations

import test_indirection_matmul as by_patch
from indirection import ByTable
from torch.testing._internal.common_utils import run_tests


class TestMatmulByTable(ByTable, by_patch.TestIndirectionMatmul):
    tabled = frozenset({"vector"})


if __name__ == "__main__":
    run_tests()
