"""Renders the report as text.

:func:`render` takes a report and a width in columns, and returns tables and lines that fit the width. Long lists of
causes and reasons are shortened; the first column of a table shrinks if the width is small.
"""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from . import records

_MOST_CAUSES = 6  # of one graph
_MOST_REASONS = 4  # of one function
_USUAL_SLOW_CALLS = 16  # for warm-ups, recordings, and a decision
_MOST_OUTPUTS = 3  # of one function
_HEAD = ("function", "mode", "part", "kernels", "stat", "mgd", "live", "copied", "rec", "replays", "rec s", "pool")
_SHORT = {"inference": "inf", "forward": "fwd", "backward": "bwd"}


def nbytes(count: int) -> str:
    """``0 B``, ``812 B``, ``4.2 MB``: three digits at most, powers of 1000."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size >= 999.5:
            size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """``1 call``, ``1,200 calls``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amounts(counts: Mapping[str, int]) -> str:
    """``3 triton, 1 extern``."""
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, left: int = 1) -> str:
    """Columns, ``left`` ones left-aligned. In a short ``width`` the first shrinks, and longer names get a line."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    if width is not None:
        widths[0] = max(2, min(widths[0], width - sum(widths[1:]) - 2 * (len(head) - 1)))
    lines = []
    for row in (head, *rows):
        cells = list(row)
        if len(cells[0]) > widths[0]:
            lines.append(cells[0])
            cells[0] = ""
        aligned = [*map(str.ljust, cells[:left], widths), *map(str.rjust, cells[left:], widths[left:])]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def render(report: records.Snapshot, width: int) -> str:
    parts = ["\n".join(environment_lines(report.environment))]
    if not report.functions and not report.graphs:
        parts.append('Nothing was compiled for CUDA graphs yet. Use torch.compile(model, mode="reduce-overhead").')
    if report.functions:
        parts.append(table(_HEAD, [_row(f) for f in report.functions], width))
    for notes in (
        dict.fromkeys(f"{title(g)}: compiled from {g.source}" for g in report.graphs if g.source),
        [f"{_place(f)}: {note}" for f in report.functions for note in function_notes(f)],
        _graph_notes(report.graphs),
        [f"graph break, {break_line(b)}" for b in report.breaks],
    ):
        fill = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
        parts.append("\n".join(fill(note, subsequent_indent="    ") for note in notes))
    return "\n\n".join(filter(None, parts))


def environment_lines(environment: records.Environment) -> list[str]:
    """The versions; the patches that are on; the others, by state and reason."""
    on = [f.name for f in environment.features if f.state == "on"]
    others: dict[tuple[str, str | None], list[str]] = {}
    for f in environment.features:
        if f.state != "on":
            state = "waiting for torch's compiler" if f.state == "waiting" else f.state
            others.setdefault((state, f.reason), []).append(f.name)
    return [
        f"pygraph_trees {environment.pygraph_trees}, torch {environment.torch}, triton {environment.triton or 'none'}, "
        f"{environment.gpu or 'no GPU'}",
        f"patches on: {', '.join(on) or 'none'}; native: {environment.native}",
        *(
            f"patches {state}: {', '.join(names)}{f', {reason}' if reason else ''}"
            for (state, reason), names in others.items()
        ),
        *_host_work("gradients accumulated at once in {}", "backward", environment.backwards),
        *_host_work("tensors saved for backwards checked in C++ in {}", "forward", environment.forwards),
        *_host_work("arguments of autograd functions checked in C++ in {}", "call", environment.arguments),
        *_host_work("guards of Dynamo skipped in {}", "call", environment.calls),
    ]


def _host_work(what: str, unit: str, work: records.HostWork) -> Iterator[str]:
    """A line on how often C++ did the work, and how often torch, most frequent reasons first; none without work."""
    others = sorted(work.by_torch.items(), key=lambda item: -item[1])
    if work.at_once or others:
        reasons = "".join(f"; {count:,} by torch: {why}" for why, count in others)
        yield f"{what.format(counted(work.at_once, unit))}{reasons}"


def _row(function: records.FunctionRecord) -> tuple[str, ...]:
    last = function.recordings[-1] if function.recordings else None
    return (
        title(function),
        _SHORT[function.mode],
        f"{function.partition}/{function.partitions}",
        "-" if last is None or last.kernels is None else str(last.kernels),
        *("-" if last is None else str(last.count(kind)) for kind in ("static", "managed", "live")),
        "-" if last is None else nbytes(last.copied_bytes),
        str(len(function.recordings)),
        str(function.replays),
        f"{function.record_s:.2f}",
        nbytes(function.pool_bytes),
    )


def title(record: records.FunctionRecord | records.GraphRecord) -> str:
    return f"{record.model} {record.compile_id}" if record.compile_id else record.model


def called(function: records.FunctionRecord) -> str:
    """A name for a function: ``Net 0/0 forward, partition 2 of 3``."""
    return f"{title(function)} {mode_and_part(function)}"


def mode_and_part(function: records.FunctionRecord) -> str:
    part = f", partition {function.partition} of {function.partitions}" if function.partitions > 1 else ""
    return function.mode + part


def problems(report: records.Snapshot) -> list[str]:
    """Graph breaks, un-graphed functions, copied inputs, and operations outside of CUDA graphs, a line each."""
    found = [f"graph break, {break_line(b)}" for b in report.breaks]
    for f in report.functions:
        found += [f"{_place(f)}: {note}" for note in (*_ungraphed(f), *_copies(f))]
    for g in report.graphs:
        if g.dropped:
            found.append(_dropped(g))
        found += [f"{title(g)}, {g.mode}: outside of CUDA graphs: {cause_line(cause)}" for cause in g.causes]
    return found


def _ungraphed(function: records.FunctionRecord) -> Iterator[str]:
    if function.ungraphed_calls:
        yield f"{function.ungraphed_calls} calls un-graphed: {function.why_ungraphed}"


def _dropped(graph: records.GraphRecord) -> str:
    outside = counted(graph.kernels_outside, "GPU kernel")
    return f"{title(graph)}, {graph.mode}: not graphed, {outside}: {' '.join(str(graph.dropped).split())}"


def function_notes(function: records.FunctionRecord) -> Iterator[str]:
    """What happened to a function besides its figures, a line each, without its name."""
    reasons = Counter(r.reason for r in function.recordings[1:])
    for reason, times in reasons.most_common(_MOST_REASONS):
        yield f"recorded again{f' {times} times' if times > 1 else ''}: {reason}"
    if len(reasons) > _MOST_REASONS:
        yield f"recorded again for {len(reasons) - _MOST_REASONS} other reasons"
    yield from _copies(function)
    if function.decision:
        yield function.decision
    if function.route:
        yield f"inputs are passed {function.route}"
    for recording in function.recordings[-1:]:
        yield from branches(recording)
    yield from _outlived(function)
    yield from _slow(function)
    yield from _ungraphed(function)


def _slow(function: records.FunctionRecord) -> Iterator[str]:
    """Why calls took the slow path, if more did than until a function is recorded."""
    count = sum(function.slow_calls.values())
    if count > _USUAL_SLOW_CALLS and function.recordings:
        whys = sorted(function.slow_calls.items(), key=lambda found: -found[1])
        reasons = ", ".join(f"{calls} because {why}" for why, calls in whys)
        yield f"{count} calls took the slow path: {reasons}"


def branches(recording: records.RecordingRecord) -> Iterator[str]:
    """What branches gain or would gain, if that was asked for."""
    if (found := recording.branches) is not None:
        counts = [counted(found.operations, "operation"), f"{found.depth} deep"]
        counts += [counted(found.barriers, "barrier"), counted(found.edges, "edge")]
        times = [f"{found.chain_us:.0f} us", *(f"on {lanes} lanes {us:.0f}" for lanes, us in found.lanes_us.items())]
        text = f"branches: {', '.join(counts)}; predicted {', '.join(times)}"
        if found.lanes > 1:
            text += f"; captured on {found.lanes}, without {counted(found.dropped, 'edge')} of the chain"
        if found.measured_us:
            text += "; measured {:.3g} us, on lanes {:.3g}".format(*found.measured_us)
        yield text
    if recording.why_no_branches:
        yield f"no branches, because {recording.why_no_branches}"


def _outlived(function: records.FunctionRecord) -> Iterator[str]:
    """What became of outputs that were alive when the next step began."""
    own = {
        output.number for r in function.recordings[-1:] for output in r.outputs if output.place == records.OWN_MEMORY
    }
    # An output of a warm-up is mostly moved once, and has own memory from then on.
    moved = [output for output in function.moved_outputs if output.times > 1 or output.number not in own]
    moved.sort(key=lambda output: -output.nbytes)
    for output in moved[:_MOST_OUTPUTS]:
        since = ", in memory of its own since" if output.number in own else ""
        times = counted(output.times, "time")
        size = nbytes(output.nbytes)
        yield f"output {output.number} outlived its step: moved out of the graph pool {times}, {size}{since}"
    if others := moved[_MOST_OUTPUTS:]:
        total = nbytes(sum(output.nbytes for output in others))
        yield f"{counted(len(others), 'other output')} outlived steps: moved, {total}"
    if function.why_not_kept:
        yield f"outputs that outlive their step are overwritten, because {function.why_not_kept}"


def _copies(function: records.FunctionRecord) -> Iterator[str]:
    """The inputs that the newest recording copies by a rule, with the rule."""
    live = [i for i in function.recordings[-1].inputs if i.kind == "live"] if function.recordings else []
    copied_by_rule = [i for i in live if i.why_copied is not None and i.copied_bytes]
    for why in dict.fromkeys(i.why_copied for i in copied_by_rule):
        copied = [i for i in copied_by_rule if i.why_copied == why]
        total = nbytes(sum(i.copied_bytes for i in copied))
        yield f"copied: {len(copied)} of {len(live)} live inputs, {total}, because {why}"
    if extra := sum(r.extra_copies for r in function.recordings):
        total = nbytes(sum(r.extra_copied_bytes for r in function.recordings))
        why = "they were less aligned than recorded or lay in the graph pool"
        yield f"copied for one call: {extra} live inputs, {total}, because {why}"


def _place(function: records.FunctionRecord) -> str:
    return f"{title(function)}, {mode_and_part(function)}"


def _graph_notes(graphs: Sequence[records.GraphRecord]) -> Iterator[str]:
    for g in graphs:
        if g.dropped:
            yield _dropped(g)
            continue
        yield from _placed(g)
        if g.causes:
            yield f"{title(g)}, {g.mode}: {counted(g.kernels_outside, 'GPU kernel')} outside of CUDA graphs"
            yield from (f"  {line}" for line in first_lines([cause_line(cause) for cause in g.causes], _MOST_CAUSES))


def _placed(graph: records.GraphRecord) -> Iterator[str]:
    if graph.why_not_placed:
        yield f"{title(graph)}, {graph.mode}: CPU values stay on the CPU, because {graph.why_not_placed}"
    if by_how := Counter(placed.how for placed in graph.placed):
        yield f"{title(graph)}, {graph.mode}: CPU values: {amounts(by_how)}"
        yield from (f"  {line}" for line in placed_lines(graph.placed))


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Some of the lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def placed_lines(placed: Sequence[records.Placed]) -> list[str]:
    """The result of placement for each value, grouped by line of the program."""
    groups: dict[tuple[str, str | None, str | None], list[str]] = {}
    for value in placed:
        groups.setdefault((value.how, value.why, value.source), []).append(value.value)
    lines = [
        f"{how}: {', '.join(values)}{f', because {why}' if why else ''}{f', at {source}' if source else ''}"
        for (how, why, source), values in groups.items()
    ]
    return first_lines(lines, _MOST_CAUSES)


def facts(recording: records.RecordingRecord) -> str:
    inside = "? kernels" if recording.kernels is None else counted(recording.kernels, "kernel")
    extra = f", {counted(recording.extra_copies, 'input')} copied for one call" if recording.extra_copies else ""
    return f"{inside}, {counted(recording.replays, 'replay')}, {recording.record_s * 1e3:.1f} ms to record{extra}"


def break_line(found: records.GraphBreak) -> str:
    return f"{found.count}x: {found.reason}{_at(found.source)}{f'; advice: {found.advice}' if found.advice else ''}"


def cause_line(cause: records.Cause) -> str:
    return f"{cause.reason}: {cause.op}{_at(cause.source)}"


def _at(source: str | None) -> str:
    return f" at {source}" if source else ""
