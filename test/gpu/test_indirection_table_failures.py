"""The tests of ``test_indirection_failures.py``, with a table of addresses.

The flag is "table", so inputs that Triton kernels read are given through slots. The assertions are those of the patch
route, and some programs must take the table.
"""

from __future__ import annotations

import test_indirection_failures as by_patch
from indirection import ByTable
from torch.testing._internal.common_utils import run_tests


class TestFailuresByTable(ByTable, by_patch.TestIndirectionFailures):
    tabled = frozenset({"all kinds of nodes"})


if __name__ == "__main__":
    run_tests()
