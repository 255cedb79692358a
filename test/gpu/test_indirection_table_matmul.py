"""The tests of ``test_indirection_matmul.py``, with a table of addresses."""

from __future__ import annotations

import test_indirection_matmul as by_patch
from torch.testing._internal.common_utils import run_tests


class TestMatmulByTable(by_patch.TestIndirectionMatmul):
    indirection = "table"


if __name__ == "__main__":
    run_tests()
