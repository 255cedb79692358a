"""Renders HTML from the Jinja templates in ``templates/``.

:func:`render` escapes all text that it is given. HTML is :class:`markupsafe.Markup`, which :func:`render` returns and
other templates insert unchanged.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .text import called, cause_line, counted, facts, function_notes, mode_and_part, nbytes, title

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).with_name("templates")
_IN_TEMPLATES = (called, cause_line, counted, facts, function_notes, mode_and_part, nbytes, title)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page."""

    anchor: str
    title: str
    body: Markup


def render(template: str, **values: Any) -> Markup:
    """Renders the template ``NAME.html``; a missing value raises :class:`jinja2.UndefinedError`."""
    from markupsafe import Markup

    return Markup(_environment().get_template(f"{template}.html").render(values))


def preformatted(text: object) -> Markup:
    """Plain text in its own lines and columns."""
    from markupsafe import Markup

    return Markup("<pre>{}</pre>").format(str(text))


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        extensions=["jinja2.ext.do"],
        loader=FileSystemLoader(_TEMPLATES),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update({function.__name__: function for function in _IN_TEMPLATES})
    return environment
