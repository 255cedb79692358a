"""Renders HTML from the Jinja templates in ``templates/``, and shows results.

:func:`render` escapes all text that it is given. HTML is :class:`markupsafe.Markup`, which :func:`render` returns and
other templates insert unchanged.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from . import text

if TYPE_CHECKING:
    from jinja2 import Environment

_IN_TEMPLATES = "amounts called cause_line counted facts function_notes mode_and_part nbytes placed_lines title"


@dataclass(frozen=True, slots=True)
class Section:
    anchor: str
    title: str
    body: Markup


def render(template: str, **values: Any) -> Markup:
    """Renders the template ``NAME.html``; a missing value raises :class:`jinja2.UndefinedError`."""
    return Markup(_environment().get_template(f"{template}.html").render(values))


def preformatted(shown: object) -> Markup:
    return Markup("<pre>{}</pre>").format(str(shown))


@dataclass(frozen=True, slots=True)
class Shown:
    """A dataclass of records that prints as text, shows itself in a notebook, and becomes JSON or a page."""

    def to_text(self) -> str:
        raise NotImplementedError

    def _page(self) -> str:
        raise NotImplementedError

    def to_json(self) -> str:
        """All records as a JSON object, with their names as keys."""
        return json.dumps(asdict(self), indent=1)

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page for a browser, also written to ``path`` if given."""
        html = self._page()
        if path is not None:
            # Arguments of the command line that are not UTF-8 contain surrogates.
            Path(path).write_text(html, encoding="utf-8", errors="backslashreplace")
        return html

    def _repr_html_(self) -> str:
        return preformatted(self.to_text())

    def __str__(self) -> str:
        return self.to_text()


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        extensions=["jinja2.ext.do"],
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update({name: getattr(text, name) for name in _IN_TEMPLATES.split()})
    return environment
