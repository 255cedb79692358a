"""The tests of ``test_indirection_mutation.py``, with a table of addresses.

The flag is "table", so inputs that Triton kernels read are given through slots. The assertions are those of the patch
route.
"""

from __future__ import annotations

import test_indirection_mutation as by_patch
from torch.testing._internal.common_utils import run_tests


class TestMutationByTable(by_patch.TestIndirectionMutation):
    indirection = "table"


if __name__ == "__main__":
    run_tests()
