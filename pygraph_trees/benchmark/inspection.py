"""What one call does: the recordings that it replays, the bytes that they copy, its memory, and its work on the GPU.

Our recordings log replays and copied bytes. For upstream's, the bytes follow from the inputs, and ``run_graph`` is
wrapped for one call. Work is *graphed* if a trace gives it a graph node or the correlation id of a graph's launch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pygraph_trees.compat import lists_copied_inputs
from pygraph_trees.indirection.pool import segments_of
from pygraph_trees.report.text import called

log = logging.getLogger(__name__)

_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_WAITS = ("cudaDeviceSynchronize", "cuCtxSynchronize")  # after the profiled call
_MOST_SPANS = 200  # per lane; beyond that, the closest spans are joined


def recordings(managers: Iterable[Any]) -> list[Any]:
    """All recordings in the trees of ``managers``, parents before children."""
    found = [node for manager in managers for nodes in (manager.roots or {}).values() for node in nodes]
    for node in found:  # the list grows as it is read
        found += itertools.chain.from_iterable(node.children.values())
    return found


def copied_nbytes(node: Any) -> int:
    """Bytes of GPU inputs that a replay of ``node`` copies into the recording."""
    if hasattr(node, "log"):
        return sum(i.copied_bytes for i in node.log.record().inputs if (i.device or "").startswith("cuda"))
    copied = node.input_copy_idxs if lists_copied_inputs(node) else node.non_static_input_idx
    return sum(
        tensor.nbytes // math.prod(max(1, tensor.size(dim)) for dim in node.expanded_dims[i] or ())
        for i, tensor in ((i, node.reconstructed_inputs[i]) for i in copied)
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"
    )


def copied_for_one_call(managers: Iterable[Any]) -> int:
    """Bytes of inputs copied for single calls so far, in addition to those that each replay copies."""
    return sum(node.log.extra_copied_bytes for node in recordings(managers) if hasattr(node, "log"))


def pool_nbytes(managers: Iterable[Any], allocated: bool = False) -> int:
    """Bytes that the graph pools of ``managers`` reserve, or the part of them that is allocated now."""
    pools = {tuple(manager.cuda_graphs_thread_pool) for manager in managers}
    size = "allocated_size" if allocated else "total_size"
    return sum(segment[size] for pool in pools for segment in segments_of(pool))


@contextlib.contextmanager
def watch_replays(managers: Sequence[Any]) -> Iterator[Counter[Any]]:
    """Counts replays by recording while the block runs; the counter is complete when the block ends."""
    nodes = recordings(managers)
    before = {node: node.log.replays for node in nodes if hasattr(node, "log")}
    kind = next((type(node) for node in nodes if node not in before), None)  # upstream's have one class
    run_graph: Any = getattr(kind, "run_graph", None)
    seen: Counter[Any] = Counter()

    def counted(node: Any) -> Any:
        seen[node] += 1
        return run_graph(node)

    try:
        if kind is not None:
            kind.run_graph = counted
        yield seen
    finally:
        if kind is not None:
            kind.run_graph = run_graph
        seen.update({node: node.log.replays - count for node, count in before.items() if node.log.replays > count})


def launched(replays: Mapping[Any, int]) -> list[str]:
    """Names of what one call replays, in launch order; empty unless that is a path down a tree without repetitions."""

    def name(node: Any) -> str:
        function = node.wrapped_function
        if hasattr(node, "log") and hasattr(function.model, "log"):
            return f"{called(function.model.log.record())}, recording {node.log.number}"  # as in the report
        return f"function {function.id.id}, recording {node.id.id}"

    after = {getattr(node, "parent", None): node for node in replays}
    path = [node for parent, node in after.items() if parent not in replays][:1]
    while path and path[-1] in after:
        path.append(after[path[-1]])
    is_path = len(path) == len(replays) and all(count == 1 for count in replays.values())
    return list(map(name, path)) if is_path else []


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


def read_trace(trace: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """Figures from a trace of ``torch.profiler``; none without a kernel. Overlapping times count once."""
    events = sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: float(e["ts"]))
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
    figures = {
        "kernels_total": len(kernels),
        "kernels_graphed": sum(kernel.graphed for kernel in kernels),
        "gpu_ms": _busy_ms([each for each in gpu if each.graphed]),
        "gpu_total_ms": _busy_ms(gpu),
        "timeline": (*_shown(host), *_shown(gpu)),
        "launches": tuple(names) if len(names) == len(ids) else (),
    }
    return figures if kernels else {}


def is_launch(call: Mapping[str, Any]) -> bool:
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
            joined[-1] = before._replace(us=max(before.end_us, span.end_us) - before.start_us, launches=launches)
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


def profile_call(call: Callable[[], Sequence[str]], wait: Callable[[], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Profiles the second of two calls, which returns names of kernels: its figures and trace, empty if that fails."""
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
                    names = call()
                    wait()
                    profiler.step()
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        return read_trace(trace, names), trace
    except Exception as error:
        log.warning("no GPU profile: %s", error)
        return {}, {"traceEvents": []}
