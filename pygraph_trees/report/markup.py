"""Pieces of HTML for the page: escaped text, tables, and elements that open.

Each function takes plain text or HTML, as its docstring says, and returns HTML. Plain text is escaped here; HTML is
inserted unchanged, so its author must escape what comes from a program.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page."""

    anchor: str
    title: str
    body: str  # HTML


def escaped(text: object) -> str:
    return html.escape(str(text))


def preformatted(text: object) -> str:
    """Plain text in its own lines and columns."""
    return f"<pre>{escaped(text)}</pre>"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = (), label: str = "") -> str:
    """A table of plain text; ``words`` are the columns of sentences, which may wrap."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="words"' if number in words else "" for number in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{k}>{escaped(c)}</{tag}>" for c, k in zip(cells, kinds, strict=True)) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    name = label or "table: " + ", ".join(cell for cell in head if cell)
    return scrolled(f"<table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table>", name)


def scrolled(body: str, label: str) -> str:
    """HTML that scrolls separately if it is wider than the page; ``label`` is plain text."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(label)}">{body}</div>'


def opened(summary: str, body: str, *, anchor: str = "") -> str:
    """An element that opens; both arguments are HTML. ``anchor`` is the target of links to it."""
    place = f' id="{anchor}"' if anchor else ""
    return f"<details{place}><summary>{summary}</summary><div>{body}</div></details>"


def link(anchor: str, text: str) -> str:
    """A link to a place on the page; ``text`` is plain."""
    return f'<a href="#{anchor}">{escaped(text)}</a>'
