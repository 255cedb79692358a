"""The tests of ``test_indirection_endurance.py``, with a table of addresses.

The flag is "table", so inputs that Triton kernels read are given through slots. The assertions are those of the patch
route, and some programs must take the table.
"""

from __future__ import annotations

import test_indirection_endurance as by_patch
from indirection import Facts
from torch.testing._internal.common_utils import run_tests

RUNS_ALONE = True  # it reads the memory in use of the whole GPU


class TestEnduranceByTable(by_patch.TestIndirectionEndurance):
    indirection = "table"

    def test_fresh_addresses(self):
        super().test_fresh_addresses()
        self.assertIn("table", Facts.now().routes)


if __name__ == "__main__":
    run_tests()
