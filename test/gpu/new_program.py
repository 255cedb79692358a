"""Runs the text of a program in a new process, for settings of a process and for signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def printed(program: str, *arguments: object, folders: tuple[Path, ...] = (), **environment: str) -> Any:
    """What the output's last line holds as JSON; ``folders`` go on the import path. AssertionError on failure."""
    path = os.pathsep.join([str(ROOT), *map(str, folders), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])
