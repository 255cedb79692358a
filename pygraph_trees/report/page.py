"""Renders the report as one self-contained HTML page: no network, no script, light and dark, wide and narrow.

:func:`page` takes a report's records and, for a measured program, the sections that ``benchmark`` adds. Elements that
open are ``details`` elements, which work with a keyboard. The element ``#report`` holds the records as JSON for tools.
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .markup import Section, render
from .recorded_tree import recorded_tree
from .records import (
    IN_POOL,
    ON_INPUT,
    OWN_MEMORY,
    FunctionRecord,
    GraphRecord,
    InputRecord,
    OutputRecord,
    PartitionInput,
    Snapshot,
)
from .text import counted, environment_lines, nbytes, problems

if TYPE_CHECKING:
    from markupsafe import Markup

_MOST_ROWS = 400  # of one table of inputs
_FEW_ROWS = 24  # a longer table of inputs is closed: hundreds of parameters are no news
_CSS = Path(__file__).with_name("page.css")
_GIVEN = {"patch": "by address", "table": "by table", "copy": "copied", "stage": "staged"}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a strip, which leads to ``anchor``."""

    count: int  # of kernels: its width and its text
    kind: str  # "in" or "out" of a CUDA graph
    anchor: str
    name: str


def page(
    report: Snapshot,
    first: Sequence[Section] = (),
    *,
    name: str = "CUDA graphs",
    verdict: Sequence[str] = (),
    more: Mapping[str, object] | None = None,
) -> str:
    """Renders the page.

    Args:
        first: sections before those of the report
        verdict: plain lines at the top
        more: entries of the page's JSON besides the report's
    """
    wrong = problems(report)
    sections = [
        *([Section("problems", "Problems", render("problems", problems=wrong))] if wrong else []),
        *first,
        Section("functions", "Functions", _functions(report.functions)),
        Section("tree", "Tree of recordings", recorded_tree(report.functions)),
        Section("graphs", "Compiled graphs", _graphs(report.graphs)),
    ]
    before = render("summary", verdict=verdict, facts=_facts(report))
    return document(name, _environment(report), before, sections, {**asdict(report), **(more or {})})


def document(
    name: str, lines: Iterable[str], before: Markup | str, sections: Sequence[Section], data: Mapping[str, object]
) -> str:
    """A page with a heading, sections that can be reached from links, and data as JSON.

    Args:
        lines: plain text under the heading.
        before: HTML before the sections.
    """
    from markupsafe import Markup

    # A character that could end the element is written as an escape, which JSON reads as the same character.
    content = Markup(json.dumps(data, indent=1).replace("<", "\\u003c"))
    css = Markup(_CSS.read_text(encoding="utf-8"))
    return render("document", name=name, lines=lines, before=before, sections=sections, data=content, css=css)


def _environment(report: Snapshot) -> list[str]:
    versions, patches, *off = environment_lines(report.environment)
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return [f"{versions}; {patches}", *off, f"{now}, {_command()}"]


def _command() -> str:
    """The command as a user types it, without the folders of the program."""
    if not sys.argv or not sys.argv[0]:
        return "Python"
    program, *arguments = sys.argv
    if Path(program).name == "__main__.py":
        return f"python -m {Path(program).parent.name} {shlex.join(arguments)}".rstrip()
    return shlex.join([Path(program).name, *arguments])


def _facts(report: Snapshot) -> dict[str, str]:
    """Figures of the whole report; empty if nothing was compiled."""
    if not report.functions and not report.graphs:
        return {}
    newest = [f.recordings[-1] for f in report.functions if f.recordings]
    inside = sum(r.kernels or 0 for r in newest)
    return {
        "functions": str(len(report.functions)),
        "recordings": str(report.recordings),
        "replays": f"{report.replays:,}",
        "kernels in graphs": str(inside) if any(r.kernels is not None for r in newest) else "-",
        "kernels outside": str(sum(g.kernels_outside for g in report.graphs)),
        "copied at each replay": nbytes(sum(r.copied_bytes for r in newest)),
        "graph pool": nbytes(sum(f.pool_bytes for f in report.functions)),
    }


def _functions(functions: Sequence[FunctionRecord]) -> Markup:
    return render(
        "functions",
        functions=functions,
        few=_FEW_ROWS,
        most=_MOST_ROWS,
        input_rows=_input_rows,
        kinds_of=lambda inputs: ", ".join(f"{n} {kind}" for kind, n in Counter(i.kind for i in inputs).items()),
        places_of=_places_of,
    )


_PLACES = {OWN_MEMORY: "in own memory", IN_POOL: "in the graph pool", ON_INPUT: "on an input"}


def _places_of(outputs: Sequence[OutputRecord]) -> str:
    """How many outputs are where, with their bytes and what each replay does for them."""
    found = []
    for place, words in _PLACES.items():
        there = [output for output in outputs if output.place == place]
        if there:
            nodes, copied = sum(output.nodes for output in there), sum(output.copied_bytes for output in there)
            set_ = f", {counted(nodes, 'node')} set a replay" if nodes else ""
            by_graph = f", {nbytes(copied)} copied" if copied else ""
            found.append(f"{len(there)} {words} ({nbytes(sum(output.nbytes for output in there))}{set_}{by_graph})")
    return ", ".join(found)


def _input_rows(inputs: Sequence[InputRecord]) -> list[list[str]]:
    """A row for each input: first those that are copied, then other live ones."""
    return [
        [
            i.name or str(i.index),
            i.kind + (", written to" if i.mutated else ""),
            _GIVEN.get(i.route or "", "-"),
            nbytes(i.nbytes),
            nbytes(i.copied_bytes) if i.copied_bytes else "-",
            i.device or "-",
            i.why_copied or "",
        ]
        for i in sorted(inputs, key=lambda i: (-i.copied_bytes, i.kind != "live", i.index))
    ]


def _graphs(graphs: Sequence[GraphRecord]) -> Markup:
    return render("graphs", graphs=graphs, most=_MOST_ROWS, parts_of=_parts_of, read_rows=_read_rows)


def _parts_of(graph: GraphRecord, index: int) -> list[Part]:
    """The partitions of a graph, as parts of a strip."""
    parts = []
    for number, p in enumerate(graph.partitions, 1):
        is_graphed = p.graphed and not graph.dropped
        by_kind = ", ".join(f"{count} {kind}" for kind, count in p.kernels.items()) or "nothing"
        name = f"part {number}, {'graphed' if is_graphed else 'outside'}: {by_kind}"
        kind = "in" if is_graphed else "out"
        parts.append(Part(p.gpu_kernels, kind, f"graph-{index}-part-{number}", name))
    return parts


def _read_rows(inputs: Sequence[PartitionInput]) -> list[list[str]]:
    """A row for each input of a partition."""
    return [
        [
            i.name,
            "the graph" if i.graph_input else "another part",
            i.device,
            i.dtype,
            "symbolic" if i.nbytes is None else nbytes(i.nbytes),
            ", ".join(f"{count} {kind}" for kind, count in i.consumers.items()) or "-",
        ]
        for i in inputs
    ]
