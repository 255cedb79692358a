"""Shows progress: a bar on a terminal, otherwise an occasional line.

:class:`Progress` is called with the steps done, the total and the name of the next step, as the benchmark does. It
writes to standard error, so standard output holds results only.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_BAR = 24  # columns
_LINE_EVERY_S = 10.0  # if no terminal redraws the bar


class Progress:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._redraws = self._stream.isatty()
        self._start = time.monotonic()
        self._last_line = -_LINE_EVERY_S

    def __call__(self, done: int, total: int, text: str) -> None:
        elapsed = time.monotonic() - self._start
        share = done / total if total else 1.0
        if self._redraws:
            filled = round(_BAR * share)
            bar = "#" * filled + "." * (_BAR - filled)
            line = f"[{bar}] {share:4.0%} {elapsed:4.0f} s  {text}"
            width = shutil.get_terminal_size((100, 24)).columns - 1
            self._stream.write(f"\r{line[:width].ljust(width)}{chr(10) if done == total else ''}")
        elif done == total or elapsed - self._last_line >= _LINE_EVERY_S:
            self._last_line = elapsed
            self._stream.write(f"{share:4.0%} {elapsed:4.0f} s  {text}\n")
        self._stream.flush()
