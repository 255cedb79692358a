"""The tests of ``test_indirection_libraries.py``, with a table of addresses.

The flag is "table", so inputs that Triton kernels read are given through slots. The assertions are those of the patch
route, and some programs must take the table.
"""

from __future__ import annotations

import test_indirection_libraries as by_patch
from indirection import ByTable
from torch.testing._internal.common_utils import run_tests


class TestLibrariesByTable(ByTable, by_patch.TestIndirectionLibraries):
    tabled = frozenset({"large table", "int32 indices", "gather", "index select", "two indices", "embedding"})


if __name__ == "__main__":
    run_tests()
