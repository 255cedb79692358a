"""The CPU lane: a garbage collection in a test visits only objects of that test, and no test starts a native build."""

from __future__ import annotations

import gc
import os

from torch._dynamo import guards
from torch._logging._internal import trace_log

guards.profile_guard_manager = lambda *_: 0.0  # slow: it flushes the CPU's caches after each compilation
trace_log.handlers.clear()  # with pytest's handlers, torch describes each compilation for its structured trace
trace_log.addHandler = lambda handler: None
os.environ.setdefault("PYGRAPH_BUILD", "0")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
