"""Records of torch's structured trace, collected while a test listens."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Artifact:
    name: str
    metadata: dict[str, Any]
    content: dict[str, Any]


@contextlib.contextmanager
def artifacts() -> Iterator[list[Artifact]]:
    """This package's artifacts that are written inside the context."""
    found: list[Artifact] = []

    def emit(record: Any) -> None:
        what = record.metadata.get("artifact", {})
        if what.get("name", "").startswith("pygraph_"):
            assert what["encoding"] == "json", what
            found.append(Artifact(what["name"], record.metadata, json.loads(record.payload)))

    with listening(emit):
        yield found


@contextlib.contextmanager
def listening(emit: Any) -> Iterator[None]:
    """Passes all records to ``emit``."""
    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    trace_log = logging.getLogger("torch.__trace")
    trace_log.addHandler(handler)
    try:
        yield
    finally:
        trace_log.removeHandler(handler)
