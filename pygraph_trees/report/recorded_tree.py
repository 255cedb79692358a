"""Arranges all recordings of a report as one tree across functions, as nested lists.

A recording follows the one that was replayed or recorded before it, often of another function. Successive recordings
are elements of one list. If several follow the same recording, each begins a nested list, so indentation shows choices
and not steps. Numbers belong to a manager and may repeat. A recording whose parent is ambiguous starts a tree and names
what it follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .markup import render
from .records import FunctionRecord, RecordingRecord

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Node:
    """A recording in the tree."""

    function: FunctionRecord
    recording: RecordingRecord
    place: tuple[int, int]  # index of the function in the report, and of the recording in it; anchors are made of it


@dataclass(frozen=True, slots=True)
class Step:
    """A recording with the reason why it was made, or tags of lists."""

    node: Node | None
    why: str = ""
    tag: Markup | str = ""


def recorded_tree(functions: Sequence[FunctionRecord]) -> Markup:
    """The tree as HTML, with a link from each recording to its function's section."""
    nodes = [
        Node(f, r, (index, position)) for index, f in enumerate(functions) for position, r in enumerate(f.recordings)
    ]
    numbers = Counter(node.recording.number for node in nodes)
    by_number = {node.recording.number: node for node in nodes if numbers[node.recording.number] == 1}
    roots, below = [], dict[tuple[int, int], list[Node]]()
    for node in sorted(nodes, key=lambda node: node.recording.number):
        parent = by_number.get(node.recording.parent) if node.recording.parent is not None else None
        if parent is None:
            roots.append(node)
        else:
            below.setdefault(parent.place, []).append(node)
    steps = list(_lists(nodes, roots, below, numbers))
    return render("tree", steps=steps, ambiguous=len(by_number) < len(nodes))


def _lists(
    nodes: Sequence[Node],
    roots: Sequence[Node],
    below: Mapping[tuple[int, int], Sequence[Node]],
    numbers: Mapping[int, int],
) -> Iterator[Step]:
    """Unbranched paths are ``ol``, branches are ``ul``; every recording appears exactly once."""
    from markupsafe import Markup

    seen: set[tuple[int, int]] = set()
    # Records in a cycle have no root.
    for root in (*roots, *nodes):
        pending: list[Node | None] = [root]
        while pending:
            node = pending.pop()
            if node is None:
                yield Step(None, tag=Markup("</ul></li></ol></li>"))
                continue
            if node.place in seen:
                continue
            yield Step(None, tag=Markup("<li><ol>"))
            while True:
                seen.add(node.place)
                yield Step(node, _why(node, numbers))
                followers = [f for f in below.get(node.place, ()) if f.place not in seen]
                if len(followers) != 1:
                    break
                yield Step(None, tag=Markup("</li>"))
                (node,) = followers
            yield Step(None, tag=Markup("<ul>" if followers else "</li></ol></li>"))
            pending += [None, *reversed(followers)] if followers else []


def _why(node: Node, numbers: Mapping[int, int]) -> str:
    recording = node.recording
    if recording.parent is None or numbers.get(recording.parent, 0) == 1:
        return recording.reason
    which = "several recordings have this number" if recording.parent in numbers else "it is not in this report"
    return f"{recording.reason}, after recording {recording.parent} ({which})"
