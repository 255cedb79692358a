"""Names the kernels of replayed graphs in a profiler's trace: module, line, compile id, function.

Captured kernels have the order of the calls in generated code (``report/calls.py``). Triton kernels are found by name;
those of libraries between two of them are divided among the operators by kind. A doubtful one stays unnamed.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pygraph_trees.cuda.driver import driver
from pygraph_trees.errors import DriverError, PygraphError
from pygraph_trees.report.calls import Call
from pygraph_trees.report.log import FunctionLog, journal
from pygraph_trees.report.text import called
from pygraph_trees.trees.pools.pools import managers

from .inspection import is_launch, recordings

# The kinds of kernels, each with the pattern of their names; the first one that fits counts.
_KINDS = (
    ("T", re.compile(r"triton_")),  # of another function
    ("A", re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)),
    ("H", re.compile(r"splitKreduce|cublasLt::epilogue|reduce_1Block")),  # comes after a matmul's kernel
    ("G", re.compile(r"nvjet|gemm|gemv|xmma|cutlass|dot_kernel", re.IGNORECASE)),
    ("O", re.compile("")),
)
# What some operators launch, by the operator's name; others may launch anything.
_MATMUL, _WITH_BIAS = re.compile("GH*"), re.compile("O?GH*")  # the bias may be copied first
_LAUNCHED = {"mm": _MATMUL, "bmm": _MATMUL} | dict.fromkeys(("addmm", "bias_addmm", "baddbmm"), _WITH_BIAS)
_ATTENTION = re.compile("[AO]+")
_ANYTHING = re.compile("[AGHO]*")
_COPIES = re.compile("O*")  # of outputs that a library allocates, to their own memory
_MOST = 100  # calls, or kernels, between two Triton kernels; more are not divided
_OURS = "pygraph_"  # kernels that give a graph its inputs

Facts = dict[str, Any]  # as they stand in a trace


class NotATrace(PygraphError, ValueError):
    template = "{path}: {problem}; expected a trace that torch.profiler exported, as .json or .json.gz"


def name_kernels(trace: str | os.PathLike[str]) -> tuple[int, int]:
    """Names the kernels of replayed graphs in a Chrome trace of this process, in the file itself.

    A named kernel's ``args`` have ``module``, ``line``, ``compile id``, ``function`` and ``number in graph``, as far as
    they are known. Kernels of functions that are no longer in the report, and of other graphs, have none. Returns how
    many kernels got a module or a line, and how many ran in CUDA graphs. Raises :class:`NotATrace` unless ``trace`` is
    a file that ``export_chrome_trace`` of ``torch.profiler`` wrote, ``.json`` or ``.json.gz``, and can be written.
    """
    path = Path(trace)
    opened = gzip.open if path.suffix == ".gz" else open
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:  # names of kernels may hold any byte
            found = json.loads(file.read(), strict=False)
        if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
            raise NotATrace(path=path, problem="it has no list of traceEvents")
        named = name_events(found["traceEvents"], journal.functions)
        with opened(beside, "wt", encoding="utf-8") as file:
            json.dump(found, file)
        beside.replace(path)
    except (OSError, EOFError, zlib.error, json.JSONDecodeError) as error:
        raise NotATrace(path=path, problem=getattr(error, "strerror", None) or error) from error
    return named


def name_events(events: Sequence[dict[str, Any]], functions: Sequence[FunctionLog]) -> tuple[int, int]:
    """Names the kernels of these functions among a trace's events."""
    by_graph, known = _by_graph(functions), dict[tuple[int, tuple[str, ...]], list[Facts]]()
    named = count = 0
    for kernels in _launches(events):
        names = tuple(str(kernel["name"]) for kernel in kernels)
        graph = _node(kernels[0]) >> 32
        if (graph, names) not in known:
            known[graph, names] = _facts(names, [by_graph[graph]] if graph in by_graph else functions)
        for number, (kernel, facts) in enumerate(zip(kernels, known[graph, names], strict=True)):
            kernel["args"] |= facts | ({"number in graph": number} if facts else {})
            named += not facts.keys().isdisjoint(("module", "line"))
        count += len(kernels)
    return named, count


def _launches(events: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The kernels of each launch of a graph, in the order in which they were captured."""
    launched = {event.get("args", {}).get("correlation") for event in events if is_launch(event)} - {None}
    found = defaultdict[tuple[Any, Any], list[dict[str, Any]]](list)
    for event in events:
        args = event.get("args", {})
        if event.get("cat") == "kernel" and (_node(event) or args.get("correlation") in launched):
            found[args.get("device"), args.get("correlation")].append(event)
    for kernels in found.values():
        # Ids of nodes count up. Older traces have none: then kernels are in the order in which they ran.
        yield sorted(kernels, key=lambda event: (_node(event), float(event["ts"])))


def _node(event: Mapping[str, Any]) -> int:
    """The id of a kernel's node, whose upper half is the id of the instantiated graph; 0 if it is not known."""
    return int(event.get("args", {}).get("graph node id") or 0)


def _by_graph(functions: Sequence[FunctionLog]) -> dict[int, FunctionLog]:
    """The functions by the ids of their recordings' graphs; none before CUDA 13.1."""
    owners = {id(recording): function for function in functions for recording in function.recordings}
    found: dict[int, FunctionLog] = {}
    if (api := driver()) is None:
        return found
    with contextlib.suppress(DriverError, RuntimeError):  # a graph may be gone
        for node in recordings(managers()):
            if (function := owners.get(id(getattr(node, "log", None)))) is not None and node.graph is not None:
                (number,) = api.call("cuGraphExecGetId", api.api.CUgraphExec(node.graph.raw_cuda_graph_exec()))
                found[int(number)] = function
    return found


def _facts(names: Sequence[str], functions: Sequence[FunctionLog]) -> list[Facts]:
    """The facts about each kernel of a launch that all functions with these kernels agree on."""
    agreed: list[Facts] = []
    for function in functions:
        calls = _calls_of(names, function) or ()
        of_function = {"compile id": function.compile_id, "function": called(function.record())} if calls else {}
        facts = [{} if call is None else {"module": call.module, "line": call.line} | of_function for call in calls]
        found = [{key: value for key, value in each.items() if value is not None} for each in facts]
        if agreed and found:
            found = [dict(one.items() & other.items()) for one, other in zip(agreed, found, strict=True)]
        agreed = found or agreed
    return agreed or [{} for _ in names]


def _calls_of(names: Sequence[str], function: FunctionLog) -> list[Call | None] | None:
    """The call of each kernel, as far as known; None unless these are the function's kernels, with one of Triton's."""
    calls = function.calls
    wanted = [i for i, call in enumerate(calls) if call.kernel is not None]
    kernels = {calls[i].kernel for i in wanted}
    found = [i for i, name in enumerate(names) if name in kernels]
    if not wanted or [names[i] for i in found] != [calls[i].kernel for i in wanted]:
        return None
    owners: dict[int, Call] = {at: calls[i] for i, at in zip(wanted, found, strict=True)}
    ends_in_copies = any(made.copied_bytes for log in function.recordings for made in log.outputs)
    gaps = zip(pairwise((-1, *wanted, len(calls))), pairwise((-1, *found, len(names))), strict=True)
    for (before, after), (first, last) in gaps:
        # Kernels that give the graph its inputs are left out.
        places = [i for i in range(first + 1, last) if not names[i].startswith(_OURS)]
        between = calls[before + 1 : after]
        kinds = "".join(next(kind for kind, pattern in _KINDS if pattern.search(names[i])) for i in places)
        copies = [_COPIES] if ends_in_copies and after == len(calls) else []
        names_of_calls = [str(call.operator).removeprefix("aten.").partition(".")[0] for call in between]
        usual = [_ATTENTION if "attention" in name else _LAUNCHED.get(name, _ANYTHING) for name in names_of_calls]
        for patterns in (usual, [_ANYTHING] * len(between)):
            each = _owners(kinds, [*patterns, *copies]) if max(len(places), len(between)) <= _MOST else None
            if each is not None:
                owners |= {places[at]: between[number] for at, number in each.items() if number < len(between)}
                break
    return [owners.get(i) for i in range(len(names))]


def _owners(text: str, patterns: Sequence[re.Pattern[str]]) -> dict[int, int] | None:
    """By place of a letter: the only pattern that may match it if all match the text in turn; None if they do not."""
    borders = [{0}]  # where each pattern may begin, and where the last one may end
    for pattern in patterns:
        ends = range(len(text) + 1)
        borders.append({j for i in borders[-1] for j in ends if pattern.fullmatch(text, i, j)})
    borders[-1] &= {len(text)}
    for number, pattern in reversed(list(enumerate(patterns))):
        after = borders[number + 1]
        borders[number] = {i for i in borders[number] if any(pattern.fullmatch(text, i, j) for j in after)}
    if not borders[0]:
        return None
    sure = (range(max(begins), min(ends)) for begins, ends in pairwise(borders))
    return {at: number for number, places in enumerate(sure) for at in places}
