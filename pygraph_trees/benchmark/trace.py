"""Reads what ran on the GPU during one call from a profiler's trace.

:func:`profile_call` runs a call under ``torch.profiler`` and passes the Chrome trace to :func:`read_trace`, a pure
function; :func:`side_by_side` makes one trace of several. A kernel is *graphed* if its record names a graph node, or if
its correlation id is a graph launch's. If no profiler is available or it fails, the result is None and the figures are
missing.
"""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

log = logging.getLogger(__name__)

_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_WAITS = ("cudaDeviceSynchronize", "cuCtxSynchronize")  # after the profiled call
_MOST_SPANS = 200  # per lane; beyond that, the closest spans are joined


class Span(NamedTuple):
    """A span of activity, in µs since the first one."""

    lane: str  # "host", for calls of CUDA, or "gpu"
    graphed: bool  # a launch of a graph, or work inside one
    start_us: float
    us: float
    launches: tuple[int, int] | None = None  # first and last graph launch that it belongs to, from 0, if known

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


class GpuWork(NamedTuple):
    """GPU work of one call; the names are those of a measurement's figures, except for the launches."""

    kernels_total: int
    kernels_graphed: int
    gpu_ms: float  # time in which anything inside a graph ran; overlaps count once
    gpu_total_ms: float  # time in which anything ran, in graphs or outside; overlaps count once
    graph_launches: int
    timeline: tuple[Span, ...] = ()


def read_trace(trace: Mapping[str, Any]) -> GpuWork:
    """The GPU work in a Chrome trace as ``torch.profiler`` exports it."""
    events = sorted((e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"), key=lambda e: float(e["ts"]))
    calls = [event for event in events if event.get("cat") in _CALLS and event.get("name") not in _WAITS]
    work = [event for event in events if event.get("cat") in _WORK]
    begin = min((float(event["ts"]) for event in (*calls, *work)), default=0.0)
    ids = [e["args"]["correlation"] for e in calls if is_launch(e) and "correlation" in e.get("args", {})]
    numbers = {correlation: number for number, correlation in enumerate(ids)}

    def span(lane: str, event: Mapping[str, Any]) -> Span:
        args = event.get("args", {})
        launch = numbers.get(args.get("correlation"))
        is_launched = launch is not None or bool(args.get("graph node id"))
        graphed = is_launched if lane == "gpu" else is_launch(event)
        launches = (launch, launch) if graphed and launch is not None else None
        return Span(lane, graphed, float(event["ts"]) - begin, float(event.get("dur", 0)), launches)

    host, gpu = ([span(lane, event) for event in some] for lane, some in (("host", calls), ("gpu", work)))
    kernels = [made for event, made in zip(work, gpu, strict=True) if event["cat"] == "kernel"]
    return GpuWork(
        kernels_total=len(kernels),
        kernels_graphed=sum(kernel.graphed for kernel in kernels),
        gpu_ms=_busy_ms([each for each in gpu if each.graphed]),
        gpu_total_ms=_busy_ms(gpu),
        graph_launches=len(ids),
        timeline=(*_shown(host), *_shown(gpu)) if gpu else (),
    )


def is_launch(call: Mapping[str, Any]) -> bool:
    """Whether an event is the host's launch of a graph."""
    return str(call.get("name", "")).startswith(_LAUNCHES)


def _busy_ms(spans: Iterable[Span]) -> float:
    return sum(each.us for each in _joined([each._replace(graphed=True) for each in spans], 0.0)) / 1e3


def _shown(spans: Sequence[Span]) -> list[Span]:
    """The spans of one lane; close ones of a kind are joined, those of several launches only if there are too many."""
    gaps = sorted(b.start_us - a.end_us for a, b in itertools.pairwise(spans))
    most_us = max(1.0, gaps[-_MOST_SPANS] if len(gaps) >= _MOST_SPANS else 0.0)
    apart = _joined(spans, most_us, across_launches=False)
    return apart if len(apart) <= _MOST_SPANS else _joined(spans, most_us)


def _joined(spans: Iterable[Span], most_us: float, *, across_launches: bool = True) -> list[Span]:
    """Joins spans, which are in order of time, to the one before if they are of one kind and no further apart."""
    joined: list[Span] = []
    for span in spans:
        before = joined[-1] if joined else span
        is_same = before.graphed == span.graphed and (across_launches or before.launches == span.launches)
        if joined and is_same and span.start_us - before.end_us <= most_us:
            both = before.launches + span.launches if before.launches and span.launches else ()
            launches = (min(both), max(both)) if both else None
            end_us = max(before.end_us, span.end_us)
            joined[-1] = before._replace(us=end_us - before.start_us, launches=launches)
        else:
            joined.append(span)
    return joined


def side_by_side(traces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One trace of several, by name: each begins at 0, and its processes have numbers and names of their own."""
    joined: list[dict[str, Any]] = []
    pids: dict[tuple[str, Any], int] = {}
    for name, trace in traces.items():
        begin = min((float(event["ts"]) for event in trace["traceEvents"] if event.get("ph") == "X"), default=0.0)
        for event in trace["traceEvents"]:
            made = event | {"pid": pids.setdefault((name, event.get("pid")), len(pids) + 1)}
            if event.get("name") == "process_name":
                made["args"] = {"name": f"{name}: {event['args']['name']}"}
            elif event.get("ph") != "M" and "ts" in event:
                made["ts"] = float(event["ts"]) - begin
            if "id" in event:  # of an arrow
                made["id"] = f"{name} {event['id']}"
            if event.get("name") != "process_sort_index":  # the ways follow one another
                joined.append(made)
    return {"traceEvents": joined}


def profile_call(call: Callable[[], object], wait: Callable[[], None]) -> tuple[GpuWork | None, dict[str, Any]]:
    """The GPU work of a call, which is made twice: the first one has work of the profiler's own. None if that fails.

    Also returns the Chrome trace, without events if that fails.
    """
    nothing: dict[str, Any] = {"traceEvents": []}
    if not torch.cuda.is_available():
        return None, nothing
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            wait()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA],
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
                on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
                acc_events=True,
            ) as profiler:
                for _ in range(2):
                    call()
                    wait()
                    profiler.step()
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
            work = read_trace(trace)
    except Exception as error:
        log.warning("no GPU profile: %s", error)
        return None, nothing
    return (work if work.kernels_total else None), trace
