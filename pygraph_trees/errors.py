"""Every error and warning of the project: one class each, its message a template.

An error is raised with the template's fields by keyword, keeps them as attributes, and formats itself. Code chooses a
path by the class, never by the text.
"""

from __future__ import annotations

from typing import Any


class PygraphError(Exception):
    """Base of all errors: ``template`` is formatted with the fields given by keyword."""

    template = "{message}"

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(self.template.format(**fields))


class PygraphWarning(UserWarning):
    """Base of all warnings; raised through :func:`warnings.warn` with a formatted template."""

    template = "{message}"

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        super().__init__(self.template.format(**fields))


NOT_FOUND = "NOT_FOUND"  # the code of what the bindings or the installed driver lack


class DriverError(PygraphError):
    """A call of the driver that failed, with the call's name and the code's."""

    template = "{call} returned {code}"


class InvalidValue(DriverError):
    """What some calls answer to a good question: there is no such thing."""


def refused(call: str, code: Any) -> DriverError:
    """The error for a code that is not success."""
    name = getattr(code, "name", str(code))
    return (InvalidValue if name == "CUDA_ERROR_INVALID_VALUE" else DriverError)(call=call, code=name)
