"""The hash of the measured code: a test that changes does not outdate results."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from pygraph_trees import code_hash

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def product_hash() -> str:
    """:func:`pygraph_trees.code_hash.code_hash` of both packages alone, 64 hexadecimal digits."""
    spec = importlib.util.spec_from_file_location("bench_code_hash", code_hash.__file__)
    assert spec is not None and spec.loader is not None
    own = importlib.util.module_from_spec(spec)  # in which to leave out the tests
    spec.loader.exec_module(own)
    own._COVERED = ("pygraph_trees", "inductor_patches")
    found: str = own.code_hash(ROOT)
    return found
