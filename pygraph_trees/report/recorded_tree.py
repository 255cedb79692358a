"""All recordings of a report as one tree across functions, drawn as nested lists.

A recording follows the one that was replayed or recorded before it, mostly of another function: a backward follows its
forward, a graph the one before the graph break. Recordings that follow one another are elements of one list, and where
several follow the same one, each begins a list inside of it: what stands further to the right is a choice between
recordings, however many graphs a step has.

A recording's number is its manager's, so trees of several threads, devices or ways may have the same ones. A parent
that cannot be told apart so is none: the recording is drawn as the first of a tree, and says what it follows.
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
    """Where the section of a function of the report is."""
    return f"function-{index}"


def recording_anchor(index: int, position: int) -> str:
    """Where the tree has a recording: function in the report, and which of its recordings."""
    return f"recording-{index}-{position}"


def facts(recording: RecordingRecord) -> str:
    """What a recording holds and what became of it, as plain text."""
    inside = "? kernels" if recording.kernels is None else counted(recording.kernels, "kernel")
    extra = f", {counted(recording.extra_copies, 'input')} copied for one call" if recording.extra_copies else ""
    return f"{inside}, {counted(recording.replays, 'replay')}, {recording.record_s * 1e3:.1f} ms to record{extra}"


def recorded_tree(functions: Sequence[FunctionRecord]) -> str:
    """The tree as HTML, with a link from each recording to the section of its function."""
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
    """Paths without a branch are ``ol``, branches are ``ul``; no recording comes twice, and none is left out."""
    seen: set[str] = set()
    yield '<ul class="tree">'
    # Records that follow each other in a circle have no root.
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
