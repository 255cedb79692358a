"""Arranges all recordings of a report as one tree across functions, as nested lists.

Successive recordings are elements of one list; if several follow the same recording, each begins a nested list. Numbers
belong to a manager and may repeat: a recording whose parent is ambiguous starts a tree and names what it follows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from .markup import render
from .records import FunctionRecord, RecordingRecord
from .text import called


@dataclass(frozen=True, slots=True)
class Node:
    function: FunctionRecord
    recording: RecordingRecord
    place: tuple[int, int]  # index of the function in the report, and of the recording in it; anchors are made of it


def recorded_tree(functions: Sequence[FunctionRecord]) -> Markup:
    """The tree as HTML, with a link from each recording to its function's section."""
    nodes = [Node(f, r, (index, at)) for index, f in enumerate(functions) for at, r in enumerate(f.recordings)]
    numbers: Counter[int | None] = Counter(node.recording.number for node in nodes)
    below: dict[int | None, list[Node]] = defaultdict(list)  # by number of the parent; None: there is not exactly one
    for node in sorted(nodes, key=lambda node: node.recording.number):
        parent = node.recording.parent
        below[parent if numbers[parent] == 1 else None].append(node)
    steps = list(_lists([*below[None], *nodes], below))  # records in a cycle have no root
    return render("tree", steps=steps, called=called, why=partial(_why, numbers), ambiguous=len(numbers) < len(nodes))


def _lists(roots: Sequence[Node], below: Mapping[int | None, Sequence[Node]]) -> Iterator[Node | str]:
    """Recordings and tags. Unbranched paths are ``ol``, branches are ``ul``; every recording appears exactly once."""
    seen: set[tuple[int, int]] = set()
    for root in roots:
        pending: list[Node | str] = [root]
        while pending:
            if isinstance(node := pending.pop(), str):
                yield node
                continue
            if node.place in seen:
                continue
            yield "<li><ol>"
            while True:
                seen.add(node.place)
                yield node
                followers = [f for f in below.get(node.recording.number, ()) if f.place not in seen]
                if len(followers) != 1:
                    break
                yield "</li>"
                (node,) = followers
            yield "<ul>" if followers else "</li></ol></li>"
            pending += ["</ul></li></ol></li>", *reversed(followers)] if followers else []


def _why(numbers: Counter[int | None], recording: RecordingRecord) -> str:
    """The reason why it was made and, if its parent is ambiguous, what it follows."""
    if recording.parent is None or numbers[recording.parent] == 1:
        return recording.reason
    which = "several recordings have this number" if recording.parent in numbers else "it is not in this report"
    return f"{recording.reason}, after recording {recording.parent} ({which})"
