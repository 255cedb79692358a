"""Python in a new process, which imports this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``environment``: variables besides those of this process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300)
