"""The tests of ``test_indirection_kernels.py``, with a table of addresses.

The flag is "table", so inputs that Triton kernels read are given through slots. The assertions are those of the patch
route, and some programs must take the table.
"""

from __future__ import annotations

import test_indirection_kernels as by_patch
from torch.testing._internal.common_utils import run_tests

# Programs whose work is all done by library kernels.
_WITHOUT_TRITON = {"complex", "norms"}


class TestKernelsByTable(by_patch.TestIndirectionKernels):
    indirection = "table"

    def check(self, program, *args, **options):
        facts = super().check(program, *args, **options)
        if program.name not in _WITHOUT_TRITON:
            self.assertIn("table", facts.routes, str(facts))
        return facts


if __name__ == "__main__":
    run_tests()
