"""The CPU lane: a garbage collection in a test visits only objects of that test, and no test starts a native build."""

from __future__ import annotations

import gc
import os

from torch._dynamo import guards

guards.profile_guard_manager = lambda *_: 0.0  # slow: it flushes the CPU's caches after each compilation
os.environ.setdefault("PYGRAPH_BUILD", "0")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
