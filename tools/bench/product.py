"""The hash of the measured code: a test that changes does not outdate results."""

from __future__ import annotations

import functools

from pygraph_trees.code_hash import PRODUCT, code_hash


@functools.cache
def product_hash() -> str:
    """The hash of both packages without the tests, 64 hexadecimal digits."""
    return code_hash(folders=PRODUCT)
