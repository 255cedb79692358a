"""tools/lane.py: every file runs, whatever happens to the others, and an interrupt leaves no process running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import lane
from torch.testing._internal.common_utils import TestCase, run_tests

# The tool without its imports of torch, which these files do not need.
TOOL = "import sys; sys.path.insert(0, sys.argv.pop(1)); import lane; lane.PRELOADED = (); sys.exit(lane.main())"
FILES = {
    "test_passes": "import pytest\ndef test_a(): print('quiet')\n@pytest.mark.skip\ndef test_b(): pass\n",
    "test_fails": "def test_a(): pass\ndef test_b(): assert 1 == 2, 'told'\n",
    "test_dies": "import os\ndef test_a(): pass\ndef test_b(): os._exit(9)\n",
    "test_broken": "import nowhere_at_all\n",
}
HANGS = """
import subprocess, sys, time
from pathlib import Path
def test_a():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(__file__).with_name("pids").write_text(str(sleeper.pid))
    time.sleep(60)
"""


class TestLane(TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def start(self, *names: str) -> subprocess.Popen[str]:
        files = [str(self.folder / f"{name}.py") for name in names]
        command = [sys.executable, "-c", TOOL, str(ROOT / "tools"), "--jobs", "2", *files]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # If a shell started the tests in the background, interrupts are ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def test_failures_of_a_file_are_its_own_and_come_last(self) -> None:
        for name, text in FILES.items():
            (self.folder / f"{name}.py").write_text(text)
        tool = self.start(*FILES)
        printed = tool.communicate()[0]
        self.assertEqual(tool.returncode, 1, printed)
        for line in (
            r"test_passes\.py: 1 passed, 1 skipped in \d+ s \(\d+ s of processors\)",
            r"test_fails\.py: 1 passed, 1 failed in \d+ s \(\d+ s of processors\)",
            r"test_dies\.py: 1 died in \d+ s",
            r"test_broken\.py: 1 error, 1 died in \d+ s \(\d+ s of processors\)",
            r"2 passed, 1 failed, 1 error, 1 skipped, 2 died in \d+ s, 4 processes",
        ):
            self.assertRegex(printed, f"(?m)^(.*/)?{line}$")
        details = printed[printed.index("=" * 20) :]
        for text in ("AssertionError: told", "ended with exit status 9", "nowhere_at_all"):
            self.assertIn(text, details)
        self.assertNotIn("quiet", printed)
        tool = self.start("test_passes")
        self.assertRegex(tool.communicate()[0], r"1 passed, 1 skipped in \d+ s, 1 processes\n$")
        self.assertEqual(tool.returncode, 0)

    def test_an_interrupt_ends_what_was_started(self) -> None:
        (self.folder / "test_hangs.py").write_text(HANGS)
        for number in (signal.SIGINT, signal.SIGTERM):
            tool, pids = self.start("test_hangs"), self.folder / "pids"
            while not (pids.exists() and pids.read_text()):
                self.assertIsNone(tool.poll())
                time.sleep(0.05)
            sleeper = int(pids.read_text())
            pids.unlink()
            tool.send_signal(number)
            if number == signal.SIGTERM:  # ``timeout`` sends it twice; the second does not interrupt the cleanup
                tool.send_signal(number)
            tool.communicate(timeout=50)
            self.assertNotEqual(tool.returncode, 0)
            self.assertTrue(self.is_gone(sleeper))

    @staticmethod
    def is_gone(pid: int) -> bool:
        """Returns whether the process ends within some seconds; a zombie counts as ended."""
        for _ in range(100):
            try:
                os.kill(pid, 0)
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    return True
            except (ProcessLookupError, FileNotFoundError):
                return True
            time.sleep(0.05)
        return False


class TestOrder(TestCase):
    def test_gpu_files_share_a_process_and_slow_ones_start_first(self) -> None:
        files = sorted((ROOT / "test").glob("*/test_*.py"))
        gpu, *others = lane.groups_of(files)
        self.assertEqual({file.parent.name for file in gpu}, {"gpu"})
        self.assertTrue(all(len(group) == 1 and group[0].parent.name == "cpu" for group in others))
        self.assertEqual(tuple(group[0].stem for group in others[: len(lane.SLOWEST)]), lane.SLOWEST)
        self.assertEqual(sorted([*gpu, *(file for group in others for file in group)]), files)


if __name__ == "__main__":
    run_tests()
