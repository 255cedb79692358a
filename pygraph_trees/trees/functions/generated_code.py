"""The inputs whose memory generated code reuses.

Inductor lets code reuse the memory of an input that nobody else reads: a backward's saved tensors (*donated buffers*),
and buffers that one partition leaves to another. Such an input does not count as mutated, though a launch changes it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS = re.compile(r"\w+")
_INPUTS = re.compile(r"^ *(.+) = args$", re.MULTILINE)
_REUSES = re.compile(r" = (.+) # reuse$", re.MULTILINE)  # of a buffer, or of a view of it


def overwritten_inputs(model: Callable[..., Any], count: int, *, is_backward: bool) -> frozenset[int]:
    """The indices of these inputs of ``model``, by the comment that Inductor writes after each reuse.

    If the code cannot be read, these may be all ``count`` inputs of a backward, and none of another function.
    """
    text = _text_of(model)
    if (inputs := _INPUTS.search(text)) is None:
        return frozenset(range(count) if is_backward else ())
    reused = {word for right in _REUSES.findall(text) for word in _WORDS.findall(right)}
    return frozenset(index for index, name in enumerate(_WORDS.findall(inputs[1])) if name in reused)


def _text_of(model: Callable[..., Any]) -> str:
    """The lines of a function; "" if they cannot be read."""
    code = getattr(getattr(model, "__func__", model), "__code__", None)
    if code is None:
        return ""
    try:
        lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    last = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    return "\n".join(lines[code.co_firstlineno - 1 : last])
