"""Tables of the pages of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Columns as a Markdown table, the first ``left`` ones left-aligned and the others right-aligned."""
    ruler = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ruler, *rows))
