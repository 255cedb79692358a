"""Of the CPU lane: a garbage collection in a test walks only what the test made, and no test starts a native build."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("PYGRAPH_BUILD", "0")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
