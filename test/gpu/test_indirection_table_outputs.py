"""The tests of ``test_indirection_outputs.py``, with a table of addresses.

The flag is "table", so inputs that Triton kernels read are given through slots. The assertions are those of the patch
route.
"""

from __future__ import annotations

import test_indirection_outputs as by_patch
from torch.testing._internal.common_utils import run_tests


class TestOutputsByTable(by_patch.TestIndirectionOutputs):
    indirection = "table"


if __name__ == "__main__":
    run_tests()
