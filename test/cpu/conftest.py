"""The CPU lane: a garbage collection in a test visits only objects of that test, and no test starts a native build."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("PYGRAPH_BUILD", "0")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
