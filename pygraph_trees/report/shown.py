"""A result that prints as text, shows itself in a notebook, and becomes JSON or a self-contained page.

A subclass is a dataclass of records, and says what its text and its page are.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .markup import preformatted


@dataclass(frozen=True, slots=True)
class Shown:
    def to_text(self) -> str:
        raise NotImplementedError

    def _page(self) -> str:
        raise NotImplementedError

    def to_json(self) -> str:
        """All records as a JSON object, with their names as keys."""
        return json.dumps(asdict(self), indent=1)

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page for a browser, also written to ``path`` if given."""
        text = self._page()
        if path is not None:
            # Arguments of the command line that are not UTF-8 contain surrogates.
            Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
        return text

    def _repr_html_(self) -> str:
        return preformatted(self.to_text())

    def __str__(self) -> str:
        return self.to_text()
