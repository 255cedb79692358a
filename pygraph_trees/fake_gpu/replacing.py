"""Replaces attributes temporarily.

:func:`replaced` takes owners, attribute names and new values, and sets them inside a ``with``. On exit, even after an
exception, each attribute is the original object again; replacements are undone in reverse order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as restoring:
        for owner, name, new in replacements:
            restoring.enter_context(mock.patch.object(owner, name, new, create=True))
        yield
