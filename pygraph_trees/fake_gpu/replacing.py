"""Replaces attributes temporarily.

:func:`replaced` takes owners, attribute names and new values, and sets them inside a ``with``. On exit, even after an
exception, each attribute is the original object again; replacements are undone in reverse order.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MISSING = object()


@contextlib.contextmanager
def replaced(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets the attributes, and restores the very objects from before, in reverse order."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, new in replacements:
            before.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in reversed(before):
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
