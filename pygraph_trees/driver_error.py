"""What a driver call that fails raises: :class:`DriverError`, with the call's name and the code's.

What the bindings or the installed driver lack has the code :data:`NOT_FOUND`.
"""

from __future__ import annotations

from typing import Any

from .exc import PygraphError

NOT_FOUND = "NOT_FOUND"


class DriverError(PygraphError):
    template = "{call} returned {code}"


class InvalidValue(DriverError):
    """What some calls answer to a good question: there is no such thing."""


def refused(call: str, code: Any) -> DriverError:
    """The error for a code that is not success."""
    name = getattr(code, "name", str(code))
    return (InvalidValue if name == "CUDA_ERROR_INVALID_VALUE" else DriverError)(call=call, code=name)
