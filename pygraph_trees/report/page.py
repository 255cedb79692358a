"""Renders the report as one self-contained HTML page: no network, no script, light and dark, wide and narrow.

:func:`page` takes a report's records and, for a measured program, the sections that ``benchmark`` adds. Elements that
open are ``details`` elements, which work with a keyboard. The element ``#report`` holds the records as JSON for tools.
All text that comes from a program is escaped.
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from .markup import Section, counted, escaped, link, opened, table
from .recorded_tree import facts, function_anchor, recorded_tree, recording_anchor
from .records import (
    FunctionRecord,
    GraphBreak,
    GraphRecord,
    InputRecord,
    Partition,
    PartitionInput,
    RecordingRecord,
    Snapshot,
)
from .text import called, cause_line, environment_lines, kernels, mode_and_part, nbytes, problems, title

_MOST_ROWS = 400  # of one table of inputs
_MOST_STEPS = 8  # paths through the trees
_CSS = Path(__file__).with_name("page.css")


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
    body = "".join(f'<li class="bad">{escaped(line)}</li>' for line in wrong)
    sections = [
        *([Section("problems", "Problems", f"<ul>{body}</ul>")] if wrong else []),
        *first,
        Section("functions", "Functions", _functions(report.functions)),
        Section("tree", "Tree of recordings", recorded_tree(report.functions)),
        Section("step", "Steps, as they were recorded", _steps(report.functions)),
        Section("graphs", "Compiled graphs", _graphs(report.graphs)),
    ]
    sections += breaks_section(report.breaks)
    top = "".join(f"<p><strong>{escaped(line)}</strong></p>" for line in verdict)
    return document(name, _environment(report), top + _facts(report), sections, {**asdict(report), **(more or {})})


def breaks_section(breaks: Sequence[GraphBreak]) -> list[Section]:
    """The section on graph breaks, if there are any."""
    rows = [[str(b.count), b.reason, b.source or "-"] for b in breaks]
    body = table(["times", "what Dynamo did not trace", "where"], rows, words=(1, 2))
    return [Section("breaks", "Graph breaks", body)] if breaks else []


def document(
    name: str, lines: Iterable[str], before: str, sections: Sequence[Section], data: Mapping[str, object]
) -> str:
    """A page with a heading, sections that can be reached from links, and data as JSON.

    Args:
        lines: plain text under the heading.
        before: HTML before the sections.
    """
    links = "".join(f'<li><a href="#{s.anchor}">{escaped(s.title)}</a></li>' for s in sections)
    parts = "".join(f'<section id="{s.anchor}"><h2>{escaped(s.title)}</h2>{s.body}</section>' for s in sections)
    under = "".join(f'<p class="quiet">{escaped(line)}</p>' for line in lines)
    # A character that could end the element is written as an escape, which JSON reads as the same character.
    content = json.dumps(data, indent=1).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(name)}: pygraph_trees</title>\n"
        f"<style>\n{_CSS.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#content">To the content</a>\n'
        f'<header><h1>{escaped(name)}</h1>{under}<nav aria-label="Sections"><ul>{links}</ul></nav>'
        f'</header>\n<main id="content" tabindex="-1">{before}{parts}</main>\n'
        f'<script type="application/json" id="report">{content}</script>\n</body>\n</html>\n'
    )


def _environment(report: Snapshot) -> list[str]:
    versions, patches, *off = environment_lines(report.environment)
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return [f"{versions}; {patches}", *off, f"{now}, {shlex.join(sys.argv) or 'Python'}"]


def _facts(report: Snapshot) -> str:
    newest = [f.recordings[-1] for f in report.functions if f.recordings]
    inside = sum(r.kernels or 0 for r in newest)
    facts = {
        "functions": str(len(report.functions)),
        "recordings": str(report.recordings),
        "replays": f"{report.replays:,}",
        "kernels in graphs": str(inside) if any(r.kernels is not None for r in newest) else "-",
        "kernels outside": str(sum(g.kernels_outside for g in report.graphs)),
        "copied at each replay": nbytes(sum(r.copied_bytes for r in newest)),
        "graph pool": nbytes(sum(f.pool_bytes for f in report.functions)),
    }
    if not report.functions and not report.graphs:
        use = '<code>torch.compile(model, mode="reduce-overhead")</code>'
        return f"<p>Nothing was compiled for CUDA graphs yet. Use {use}.</p>"
    cells = "".join(f"<div><dt>{escaped(k)}</dt><dd>{escaped(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{cells}</dl>'


def _functions(functions: Sequence[FunctionRecord]) -> str:
    if not functions:
        return "<p>There are none.</p>"
    return "".join(_function(index, function) for index, function in enumerate(functions))


def _function(index: int, function: FunctionRecord) -> str:
    last = function.recordings[-1] if function.recordings else None
    summary = (
        f"<strong>{escaped(title(function))}</strong> {mode_and_part(function)} "
        f'<span class="quiet">{counted(len(function.recordings), "recording")}, {counted(function.replays, "replay")}'
    )
    if last is not None:
        summary += (
            f", {'?' if last.kernels is None else last.kernels} kernels, {nbytes(last.copied_bytes)} copied a replay"
        )
    summary += "</span>"
    body = ""
    if function.ungraphed_calls:
        why = function.ungraphed_reason or "the limit of re-recordings, or capture failed"
        body += f'<p class="bad">{counted(function.ungraphed_calls, "call")} un-graphed: {escaped(why)}</p>'
        summary += ' <strong class="bad">un-graphed calls</strong>'
    if function.decision:
        body += f"<p>Measured: {escaped(function.decision)}.</p>"
    if function.route:
        body += f"<p>Inputs are given {escaped(function.route)}.</p>"
    costs = [counted(function.warmups, "warm-up"), f"{function.record_s:.3f} s to record"]
    body += f"<p>{'; '.join([*costs, f'{nbytes(function.pool_bytes)} of the graph pool'])}.</p>"
    if function.recordings:
        body += f"<h3>Recordings</h3>{_recordings(index, function.recordings)}"
    if last is not None:
        body += f"<h3>Inputs of recording {last.number}</h3>{_inputs(last.inputs)}"
    settings = ", ".join(f"{name} {value}" for name, value in function.settings.items())
    return opened(
        summary, f'{body}<p class="quiet">Compiled with: {escaped(settings)}.</p>', anchor=function_anchor(index)
    )


def _recordings(index: int, recordings: Sequence[RecordingRecord]) -> str:
    """The recordings, each with a link to its place in the tree."""
    rows = []
    for position, r in enumerate(recordings):
        behind = "" if r.parent is None else f", behind recording {r.parent}"
        name = link(recording_anchor(index, position), f"recording {r.number}")
        why = f'<span class="quiet">{escaped(r.reason + behind)}</span>'
        rows.append(f"<li>{name} {escaped(facts(r))}; {why}</li>")
    return f'<ul class="rows">{"".join(rows)}</ul>'


def _inputs(inputs: Sequence[InputRecord]) -> str:
    # Readers look for copied inputs first, then for live ones.
    order = sorted(inputs, key=lambda i: (-i.copied_bytes, i.kind != "live", i.index))
    rows = [
        [
            i.name or str(i.index),
            i.kind + (", written to" if i.mutated else ""),
            {"patch": "by address", "table": "by table", "copy": "copied", "stage": "staged"}.get(i.route or "", "-"),
            nbytes(i.nbytes),
            nbytes(i.copied_bytes) if i.copied_bytes else "-",
            i.device or "-",
            i.why_copied or "",
        ]
        for i in order[:_MOST_ROWS]
    ]
    by_kind = ", ".join(f"{count} {kind}" for kind, count in Counter(i.kind for i in inputs).items())
    more = f"<p>The first {_MOST_ROWS} of {len(inputs)}.</p>" if len(inputs) > _MOST_ROWS else ""
    head = ["input", "kind", "given", "size", "copied", "device", "because"]
    shown = table(head, rows, words=(6,), label="inputs")
    # Hundreds of parameters are no news.
    return f"<p>{escaped(by_kind)}</p>" + (opened(f"all {len(inputs)}", shown + more) if len(inputs) > 24 else shown)


def _steps(functions: Sequence[FunctionRecord]) -> str:
    """The most replayed paths through the trees; the width of each recording shows its kernels."""
    counts = Counter(r.number for f in functions for r in f.recordings)
    if any(count > 1 for count in counts.values()):
        return "<p>There are trees of several threads, devices or ways, whose recordings have the same numbers.</p>"
    nodes = {
        r.number: (f, r, recording_anchor(index, position))
        for index, f in enumerate(functions)
        for position, r in enumerate(f.recordings)
    }
    # Replays of a recording after which none of its children was replayed.
    ended = Counter({number: r.replays for number, (_, r, _) in nodes.items()})
    for _, r, _ in nodes.values():
        if r.parent in nodes:
            ended[r.parent] -= r.replays
    ends = [number for number, steps in ended.most_common() if steps > 0]
    strips = []
    for end in ends[:_MOST_STEPS]:
        path: list[int] = []
        number: int | None = end
        while number in nodes and number not in path:
            path.append(number)
            number = nodes[number][1].parent
        strips.append(_step([nodes[number] for number in reversed(path)], ended[end]))
    if not strips:
        return "<p>Nothing was replayed.</p>"
    left = len(ends) - _MOST_STEPS
    more = f"<p>And {counted(left, 'way')} more, which steps took less often.</p>" if left > 0 else ""
    return "<p>One row a step: its graphs in the order in which they are launched.</p>" + "".join(strips) + more


def _step(path: Sequence[tuple[FunctionRecord, RecordingRecord, str]], steps: int) -> str:
    drawn = _strip((r.kernels or 0, str(r.number), "in", anchor, _what(f, r)) for f, r, anchor in path)
    label = "; ".join(_what(f, r) for f, r, _ in path)
    return f'<h3>{counted(steps, "step")}</h3>{drawn}<p class="quiet">{escaped(label)}</p>'


def _strip(parts: Iterable[tuple[int, str, str, str, str]]) -> str:
    """A strip of parts, each with its number of kernels as width, a text, a kind, a link target and a name.

    A part is a link for pointing devices only. It is hidden from assistive technology, because its target says the
    same.
    """
    drawn = "".join(
        f'<a class="{kind}" href="#{anchor}" tabindex="-1" style="flex-grow:{max(1, count)}" title="{escaped(name)}">'
        f"{escaped(text)}</a>"
        for count, text, kind, anchor, name in parts
    )
    return f'<div class="strip" aria-hidden="true">{drawn}</div>'


def _what(function: FunctionRecord, recording: RecordingRecord) -> str:
    count = "?" if recording.kernels is None else recording.kernels
    return f"recording {recording.number}: {called(function)}, {count} kernels"


def _graphs(graphs: Sequence[GraphRecord]) -> str:
    legend = (
        '<p><span class="key in"></span> inside of a CUDA graph, <span class="key out"></span> outside; '
        "a part shows how many GPU kernels it has.</p>"
    )
    if not graphs:
        return "<p>There are none.</p>"
    return legend + "".join(_graph(index, graph) for index, graph in enumerate(graphs))


def _graph(index: int, graph: GraphRecord) -> str:
    outside = graph.kernels_outside
    state = (
        '<strong class="bad">not graphed</strong>'
        if graph.dropped
        else f'<span class="{"bad" if outside else "good"}">{escaped(kernels(outside))} outside</span>'
    )
    summary = f"<strong>{escaped(title(graph))}</strong> {graph.mode} {state}"
    return opened(summary, "".join(_graph_body(index, graph)))


def _graph_body(index: int, graph: GraphRecord) -> Iterator[str]:
    if graph.dropped:
        yield f'<p class="bad">Not graphed: {escaped(" ".join(graph.dropped.split()))}</p>'
    if graph.partitions:
        yield from _partitions(index, graph)
    if graph.why_not_placed:
        yield f"<p>Values of the CPU stay there, because {escaped(graph.why_not_placed)}.</p>"
    if graph.placed:
        rows = [[p.value, p.how, p.why or "", p.source or "-"] for p in graph.placed]
        head = ["value of the CPU", "what became of it", "because", "where"]
        yield "<h3>Values of the CPU</h3>" + table(head, rows, words=(1, 2, 3))


def _partitions(index: int, graph: GraphRecord) -> Iterator[str]:
    """A strip of the partitions, followed by the details of each."""
    strip, rows = [], []
    for number, part in enumerate(graph.partitions, 1):
        is_graphed = part.graphed and not graph.dropped
        by_kind = ", ".join(f"{count} {kind}" for kind, count in part.kernels.items()) or "nothing"
        name = f"part {number}, {'graphed' if is_graphed else 'outside'}: {by_kind}"
        anchor, kind = f"graph-{index}-part-{number}", "in" if is_graphed else "out"
        strip.append((part.gpu_kernels, str(part.gpu_kernels), kind, anchor, name))
        shown = _partition(part, f'<span class="key {kind}"></span> {escaped(name)}')
        rows.append(f'<li id="{anchor}">{shown}</li>')
    yield f'{_strip(strip)}<ul class="rows">{"".join(rows)}</ul>'


def _partition(part: Partition, name: str) -> str:
    """The cause that splits a partition off, its inputs and its outputs; ``name`` is HTML."""
    first, *more = part.causes or (None,)
    if first is not None:
        others = f", and {counted(len(more), 'other operation')}" if more else ""
        name += f'<span class="cause">because of {escaped(cause_line(first))}{others}</span>'
    body = ""
    if more:
        rows = [[cause.reason, cause.op, cause.source or "-"] for cause in part.causes]
        body += table(["because of", "operation", "where"], rows, words=(1, 2))
    if part.inputs:
        body += "<h3>Inputs</h3>" + _partition_inputs(part.inputs)
    if part.outputs:
        body += f"<h3>Outputs</h3><p>{escaped(', '.join(part.outputs))}</p>"
    return opened(name, body) if body else f'<div class="row">{name}</div>'


def _partition_inputs(inputs: Sequence[PartitionInput]) -> str:
    rows = [
        [
            i.name,
            "the graph" if i.graph_input else "another part",
            i.device,
            i.dtype,
            "symbolic" if i.nbytes is None else nbytes(i.nbytes),
            ", ".join(f"{count} {kind}" for kind, count in i.consumers.items()) or "-",
        ]
        for i in inputs[:_MOST_ROWS]
    ]
    more = f"<p>The first {_MOST_ROWS} of {len(inputs)}.</p>" if len(inputs) > _MOST_ROWS else ""
    return table(["input", "of", "device", "dtype", "size", "read by"], rows, label="inputs of a part") + more
