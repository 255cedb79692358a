"""The elements of a page, and what the page needs besides itself."""

from __future__ import annotations

import html.parser
import re


class Elements(html.parser.HTMLParser):
    """All elements with their attributes, and whether each one that was opened is closed where it should be."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.styles: list[str] = []  # of elements and of attributes
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.styles += [value or "" for name, value in attrs if name == "style"]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


_LOADS = frozenset({"link", "img", "iframe", "object", "embed", "base", "form", "audio", "video", "source", "image"})


def needed(text: str) -> list[str]:
    """Elements and styles that run or need anything besides the page; data in scripts and inner links do not count."""
    elements = Elements(text)
    found = []
    for tag, attributes in elements.found:
        names = [name for name in attributes if name in ("src", "srcset", "http-equiv") or name.startswith("on")]
        leads = [v for name, v in attributes.items() if name.endswith("href") and not (v or "").startswith("#")]
        runs = tag == "script" and attributes.get("type") != "application/json"
        if tag in _LOADS or names or leads or runs:
            found.append(f"{tag} {attributes}")
    return found + [style for style in elements.styles if re.search(r"@import|url\(|https?:", style)]
