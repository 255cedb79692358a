"""``TORCH_LOGS="+pygraph"`` works when the package is imported first, and by the package's name in any order."""

from __future__ import annotations

from new_process import python
from torch.testing._internal.common_utils import TestCase, run_tests

SAY = "import logging; log = logging.getLogger('pygraph_trees.report'); log.info('an info'); log.debug('a debug')"


class TestTorchLogs(TestCase):
    def test_a_name_works_if_its_owner_is_imported_first(self):
        """The short name also works next to other names, and the variable stays unchanged. Logs are off by default."""
        for first, then, logs, info, debug in (
            ("pygraph_trees", "torch", "+pygraph", True, True),
            ("pygraph_trees", "torch", "pygraph", True, False),
            ("pygraph_trees", "torch", "+pygraph, graph_breaks", True, True),
            ("torch", "pygraph_trees", "+pygraph_trees", True, True),
            ("pygraph_trees", "torch", "recompiles", False, False),
        ):
            code = f"import {first}, {then}, os; print(os.environ['TORCH_LOGS'])\n{SAY}"
            done = python("-c", code, TORCH_LOGS=logs)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, logs), done.stderr)
            self.assertEqual(("an info" in done.stderr, "a debug" in done.stderr), (info, debug), done.stderr)

    def test_entry_point_installs_nothing(self):
        code = (
            "import sys, torch\nfrom inductor_patches import register\n"
            "register(); register(); print('pygraph_trees' in sys.modules)"
        )
        done = python("-c", code, TORCH_LOGS="recompiles")
        self.assertEqual(done.stdout.strip(), "False", done.stderr)


if __name__ == "__main__":
    run_tests()
