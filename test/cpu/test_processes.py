"""tools/processes.py: a tool that is terminated also ends the processes it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from torch.testing._internal.common_utils import TestCase, run_tests

TOOL = """
import subprocess, sys, time
from processes import end, end_on_termination

end_on_termination()
started = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)"]
process = subprocess.Popen(started, start_new_session=True, stdout=subprocess.PIPE, text=True)
process.stdout.readline()
try:
    print(process.pid, flush=True)
    time.sleep(60)
finally:
    print("ending", flush=True)
    time.sleep(0.5)  # a second signal comes
    end(process)
    print("ended", flush=True)
"""


class TestTermination(TestCase):
    def test_what_was_started_ends_too(self):
        tool = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TOOL)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        )
        with tool:
            assert tool.stdout is not None
            started = int(tool.stdout.readline())
            tool.send_signal(signal.SIGTERM)
            self.assertEqual(tool.stdout.readline(), "ending\n")
            tool.send_signal(signal.SIGTERM)
            self.assertEqual(tool.stdout.read(), "ended\n")
        self.assertEqual(tool.returncode, 128 + signal.SIGTERM)
        with self.assertRaises(ProcessLookupError):
            os.kill(started, 0)


if __name__ == "__main__":
    run_tests()
