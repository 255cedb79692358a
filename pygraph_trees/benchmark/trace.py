"""Reads what ran on the GPU during one call from a profiler's trace.

:func:`profile_call` runs a call once under ``torch.profiler`` and passes the Chrome trace to :func:`read_trace`, a pure
function. A kernel is *graphed* if its record names a graph node, or if its correlation id is a graph launch's. If no
profiler is available or it fails, the result is None and the figures are missing.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class GpuWork:
    """GPU work of one call."""

    kernels_total: int
    kernels_graphed: int
    graph_ms: float  # time in which anything inside a graph ran; overlaps count once
    total_ms: float  # time in which anything ran, in graphs or outside; overlaps count once
    graph_launches: int
    timeline: tuple[Span, ...] = ()


def read_trace(trace: Mapping[str, Any]) -> GpuWork:
    """The GPU work in a Chrome trace as ``torch.profiler`` exports it."""
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    calls = sorted((event for event in events if event.get("cat") in _CALLS), key=lambda event: float(event["ts"]))
    launches = [
        event["args"]["correlation"] for event in calls if _is_launch(event) and "correlation" in event.get("args", {})
    ]
    launched = {correlation: number for number, correlation in enumerate(launches)}
    work = [event for event in events if event.get("cat") in _WORK]
    graphed = [event for event in work if _is_graphed(event.get("args", {}), launched)]
    return GpuWork(
        kernels_total=sum(event["cat"] == "kernel" for event in work),
        kernels_graphed=sum(event["cat"] == "kernel" for event in graphed),
        graph_ms=_busy_us(graphed) / 1e3,
        total_ms=_busy_us(work) / 1e3,
        graph_launches=len(launches),
        timeline=_timeline(calls, work, launched),
    )


def _timeline(
    calls: Sequence[Mapping[str, Any]], work: Sequence[Mapping[str, Any]], launched: Mapping[Any, int]
) -> tuple[Span, ...]:
    calls = [event for event in calls if event.get("name") not in _WAITS]
    if not work:
        return ()
    begin = min(float(event["ts"]) for event in (*calls, *work))
    spans: list[Span] = []
    for lane, some in (("host", calls), ("gpu", work)):
        own = []
        for event in some:
            args = event.get("args", {})
            graphed = _is_graphed(args, launched) if lane == "gpu" else _is_launch(event)
            launch = launched.get(args.get("correlation")) if graphed else None
            launches = None if launch is None else (launch, launch)
            own.append(Span(lane, graphed, float(event["ts"]) - begin, float(event.get("dur", 0)), launches))
        spans += _joined(own)
    return tuple(spans)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The spans of one lane; consecutive spans of one kind are joined if the gap is small.

    Work of different graph launches stays separate, unless that gives too many spans.
    """
    spans = sorted(spans, key=lambda span: span.start_us)
    gaps = sorted(b.start_us - a.end_us for a, b in itertools.pairwise(spans))
    most = max(1.0, gaps[-_MOST_SPANS] if len(gaps) >= _MOST_SPANS else 0.0)
    apart = _joined_within(spans, most, across_launches=False)
    return apart if len(apart) <= _MOST_SPANS else _joined_within(spans, most, across_launches=True)


def _joined_within(spans: Sequence[Span], most_us: float, *, across_launches: bool) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        before = joined[-1] if joined else None
        if (
            before
            and before.graphed == span.graphed
            and (across_launches or before.launches == span.launches)
            and span.start_us - before.end_us <= most_us
        ):
            end = max(before.end_us, span.end_us)
            joined[-1] = before._replace(us=end - before.start_us, launches=_spanned(before.launches, span.launches))
        else:
            joined.append(span)
    return joined


def _spanned(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    """From the first launch to the last; None if either is unknown."""
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _is_launch(call: Mapping[str, Any]) -> bool:
    return str(call.get("name", "")).startswith(_LAUNCHES)


def _is_graphed(args: Mapping[str, Any], launched: Mapping[Any, int]) -> bool:
    return bool(args.get("graph node id")) or args.get("correlation") in launched


def _busy_us(events: Iterable[Mapping[str, Any]]) -> float:
    busy, end = 0.0, float("-inf")
    for start, stop in sorted((float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0))) for e in events):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


def profile_call(call: Callable[[], object], wait: Callable[[], None]) -> GpuWork | None:
    """The GPU work of one call; None if it cannot be observed."""
    if not torch.cuda.is_available():
        return None
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            wait()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
                call()
                wait()
            profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8", errors="replace") as file:
                work = read_trace(json.load(file, strict=False))
    except Exception as error:
        log.warning("no GPU profile: %s", error)
        return None
    return work if work.kernels_total else None
