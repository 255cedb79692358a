"""A command's main function, called in this process: its exit status, and what it wrote to both streams."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any


def run(main: Callable[[list[str]], Any], *arguments: str) -> tuple[Any, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(arguments))
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()
