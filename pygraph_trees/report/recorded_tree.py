"""Draws all recordings of a report as one tree across functions, as nested lists.

A recording follows the one that was replayed or recorded before it, often of another function. Successive recordings
are elements of one list. If several follow the same recording, each begins a nested list, so indentation shows choices
and not steps. Numbers belong to a manager and may repeat. A recording whose parent is ambiguous starts a tree, and says
what it follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .markup import counted, escaped, link, scrolled
from .records import FunctionRecord, RecordingRecord
from .text import called


@dataclass(frozen=True, slots=True)
class Node:
    """A recording in the tree."""

    function: FunctionRecord
    recording: RecordingRecord
    function_anchor: str
    anchor: str


def function_anchor(index: int) -> str:
    """The anchor of a function's section in the report."""
    return f"function-{index}"


def recording_anchor(index: int, position: int) -> str:
    """The anchor of a recording in the tree: index of the function in the report, and of the recording in it."""
    return f"recording-{index}-{position}"


def facts(recording: RecordingRecord) -> str:
    """A recording's contents and history, as plain text."""
    inside = "? kernels" if recording.kernels is None else counted(recording.kernels, "kernel")
    extra = f", {counted(recording.extra_copies, 'input')} copied for one call" if recording.extra_copies else ""
    return f"{inside}, {counted(recording.replays, 'replay')}, {recording.record_s * 1e3:.1f} ms to record{extra}"


def recorded_tree(functions: Sequence[FunctionRecord]) -> str:
    """The tree as HTML, with a link from each recording to its function's section."""
    nodes = [
        Node(f, r, function_anchor(index), recording_anchor(index, position))
        for index, f in enumerate(functions)
        for position, r in enumerate(f.recordings)
    ]
    if not nodes:
        return "<p>Nothing was recorded.</p>"
    numbers = Counter(node.recording.number for node in nodes)
    by_number = {node.recording.number: node for node in nodes if numbers[node.recording.number] == 1}
    roots, below = [], dict[str, list[Node]]()
    for node in sorted(nodes, key=lambda node: node.recording.number):
        parent = by_number.get(node.recording.parent) if node.recording.parent is not None else None
        if parent is None:
            roots.append(node)
        else:
            below.setdefault(parent.anchor, []).append(node)
    note = (
        "<p>Each recording follows the one above it; where several follow the same one, each begins a branch. "
        "A link leads to the recording's function.</p>"
    )
    if len(by_number) < len(nodes):
        note += (
            "<p>There are trees of several threads, devices or ways, whose recordings have the same numbers: "
            "what follows one of these stands apart.</p>"
        )
    return note + scrolled("".join(_lists(nodes, roots, below, numbers)), "tree of recordings")


def _lists(
    nodes: Sequence[Node], roots: Sequence[Node], below: Mapping[str, Sequence[Node]], numbers: Mapping[int, int]
) -> Iterator[str]:
    """Unbranched paths are ``ol``, branches are ``ul``; every recording appears exactly once."""
    seen: set[str] = set()
    yield '<ul class="tree">'
    # Records in a cycle have no root.
    for root in (*roots, *nodes):
        pending: list[Node | str] = [root]
        while pending:
            node = pending.pop()
            if isinstance(node, str):
                yield node
                continue
            if node.anchor in seen:
                continue
            yield "<li><ol>"
            while True:
                seen.add(node.anchor)
                yield f'<li id="{node.anchor}">{_drawn(node, numbers)}'
                followers = [f for f in below.get(node.anchor, ()) if f.anchor not in seen]
                if len(followers) != 1:
                    break
                yield "</li>"
                (node,) = followers
            if followers:
                yield "<ul>"
                pending += ["</ul></li></ol></li>", *reversed(followers)]
            else:
                yield "</li></ol></li>"
    yield "</ul>"


def _drawn(node: Node, numbers: Mapping[int, int]) -> str:
    function, recording = node.function, node.recording
    why = recording.reason
    if recording.parent is not None and numbers.get(recording.parent, 0) != 1:
        which = "of which there are several" if recording.parent in numbers else "of which nothing is known"
        why += f", behind recording {recording.parent}, {which}"
    return (
        f'<div class="about"><span class="node">recording {recording.number}</span> '
        f"{link(node.function_anchor, called(function))}: {escaped(why)} "
        f'<span class="quiet">{escaped(facts(recording))}</span></div>'
    )
