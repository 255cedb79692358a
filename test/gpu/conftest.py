"""Runs a part of a file's tests for tools/gpu_suite.

``PYGRAPH_TEST_PART=1/3`` runs every third test, from the second one on. Without the variable all tests run. The parts
of a file are disjoint and together hold all of its tests.
"""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first, count = map(int, os.environ.get("PYGRAPH_TEST_PART", "0/1").split("/"))
    items[:] = items[first::count]
