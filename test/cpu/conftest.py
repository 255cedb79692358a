"""Of the CPU lane: a garbage collection in a test walks what the test made, not all that was imported."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
