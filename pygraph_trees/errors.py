"""The project's errors and warnings: one class each, with a message template.

An error takes the template's fields as keywords, keeps them as attributes, and can be pickled. Code chooses a path by
the class, never by the text. Errors of one part are defined there.
"""

from __future__ import annotations

from typing import Any


class _Templated(Exception):
    template = "{message}"  # formatted with the fields given as keywords

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(self.template.format(**fields))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.fields)


def _restored(kind: type[_Templated], fields: dict[str, Any]) -> _Templated:
    """An error or warning with these fields, made without the constructor of its class, which may take others."""
    made = kind.__new__(kind)
    _Templated.__init__(made, **fields)
    return made


class PygraphError(_Templated):
    """The base of all errors."""


class PygraphWarning(_Templated, UserWarning):
    """The base of all warnings."""


class Reported(PygraphError):
    """The base of errors from checks that the user enabled; they are never contained."""


NOT_FOUND = "NOT_FOUND"  # stands for the code of a call that the bindings or the installed driver lack


class DriverError(PygraphError):
    """A driver call failed; carries the names of the call and the code."""

    template = "{call} returned {code}"


class InvalidValue(DriverError):
    """The driver rejects a value, with which some calls answer that a thing does not exist."""


def refused(call: str, code: Any) -> DriverError:
    """The error for a code other than success."""
    name = getattr(code, "name", str(code))
    return (InvalidValue if name == "CUDA_ERROR_INVALID_VALUE" else DriverError)(call=call, code=name)
