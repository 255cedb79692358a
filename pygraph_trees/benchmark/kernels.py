"""Names the kernels of replayed graphs in a profiler's trace: module, line, compile id, function.

:func:`name_kernels` adds these facts to a trace that this process wrote. Nothing is gathered for it when a function is
recorded or replayed. Captured kernels have the order of the calls in generated code (:mod:`pygraph_trees.report
.calls`): Triton kernels are found by their names, and between two of them, the kernels of libraries are divided among
the operators by the kinds of kernels that these launch. A kernel that may be another call's stays unnamed.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pygraph_trees.cuda.driver import driver
from pygraph_trees.errors import DriverError, PygraphError
from pygraph_trees.report.calls import Call
from pygraph_trees.report.log import FunctionLog, journal
from pygraph_trees.report.text import called
from pygraph_trees.trees.pools.pools import managers

from .graphs import recordings
from .trace import is_launch

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


class Named(NamedTuple):
    """How many kernels of graphs in a trace got a module or a line."""

    named: int
    kernels: int


def name_kernels(trace: str | os.PathLike[str]) -> Named:
    """Names the kernels of replayed graphs in a Chrome trace of this process, in the file itself.

    Args:
        trace: a file that ``export_chrome_trace`` of ``torch.profiler`` wrote, ``.json`` or ``.json.gz``.

    Returns:
        How many kernels were named, of all that ran in CUDA graphs. A named kernel's ``args`` have ``module``,
        ``line``, ``compile id``, ``function`` and ``number in graph``, as far as they are known. Kernels of functions
        that are no longer in the report, of other graphs, and those that may be several calls' have none.

    Raises:
        NotATrace: the file cannot be read or written, or is no such trace.
    """
    path = Path(trace)
    is_packed = path.suffix == ".gz"
    try:
        content = path.read_bytes()
        # Kernel names may hold any byte.
        text = (gzip.decompress(content) if is_packed else content).decode(errors="replace")
        found = json.loads(text, strict=False)
    except (OSError, EOFError, ValueError) as error:
        raise NotATrace(path=path, problem=getattr(error, "strerror", None) or error) from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise NotATrace(path=path, problem="it has no list of traceEvents")
    named = name_events(found["traceEvents"], journal.functions)
    written, beside = json.dumps(found).encode(), path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(gzip.compress(written) if is_packed else written)
        beside.replace(path)
    except OSError as error:
        raise NotATrace(path=path, problem=error.strerror) from error
    return named


def name_events(events: Sequence[dict[str, Any]], functions: Sequence[FunctionLog]) -> Named:
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
    return Named(named, count)


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
    api = driver()
    with contextlib.suppress(DriverError, RuntimeError):  # a graph may be gone
        for node in recordings(managers()) if api is not None else ():
            function = owners.get(id(getattr(node, "log", None)))
            if api is not None and function is not None and node.graph is not None:
                (number,) = api.call("cuGraphExecGetId", api.api.CUgraphExec(node.graph.raw_cuda_graph_exec()))
                found[int(number)] = function
    return found


def _facts(names: Sequence[str], functions: Sequence[FunctionLog]) -> list[Facts]:
    """The facts about each kernel of a launch that all functions with these kernels agree on."""
    agreed: list[Facts] | None = None
    for function in functions:
        calls = _calls_of(names, function)
        if calls is None:
            continue
        of_function = {"compile id": function.compile_id, "function": called(function.record())}
        found: list[Facts] = []
        for call in calls:
            facts = {} if call is None else {"module": call.module, "line": call.line} | of_function
            found.append({key: value for key, value in facts.items() if value is not None})
        pairs = zip(agreed, found, strict=True) if agreed is not None else zip(found, found, strict=True)
        agreed = [dict(one.items() & other.items()) for one, other in pairs]
    return [{} for _ in names] if agreed is None else agreed


def _calls_of(names: Sequence[str], function: FunctionLog) -> list[Call | None] | None:
    """The call that launched each kernel, as far as it is known; None if these are not the kernels of the function.

    There must be a Triton kernel: one matmul looks like another.
    """
    calls = function.calls
    wanted = [i for i, call in enumerate(calls) if call.kernel is not None]
    kernels = {calls[i].kernel for i in wanted}
    found = [i for i, name in enumerate(names) if name in kernels]
    if not wanted or [names[i] for i in found] != [calls[i].kernel for i in wanted]:
        return None
    ends_in_copies = any(made.copied_bytes for log in function.recordings for made in log.record().outputs)
    owners: list[Call | None] = [None] * len(names)
    for i, at in zip(wanted, found, strict=True):
        owners[at] = calls[i]
    for (begin, end), (first, last) in zip(_gaps(wanted, len(calls)), _gaps(found, len(names)), strict=True):
        # Kernels that give the graph its inputs are left out.
        places = [i for i in range(first, last) if not names[i].startswith(_OURS)]
        last_of_all = [_COPIES] if ends_in_copies and end == len(calls) else []
        divided = _divided([names[i] for i in places], calls[begin:end], last_of_all)
        for i, owner in zip(places, divided, strict=True):
            owners[i] = owner
    return owners


def _gaps(places: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    """What is before, between and after these places, each as the first one and the one after the last."""
    return zip((0, *(place + 1 for place in places)), (*places, end), strict=True)


def _divided(names: Sequence[str], calls: Sequence[Call], others: Sequence[re.Pattern[str]]) -> list[Call | None]:
    """The call of each kernel of libraries; None if several may have launched it. ``others`` come after the calls."""
    kinds = "".join(next(kind for kind, pattern in _KINDS if pattern.search(name)) for name in names)
    if max(len(names), len(calls)) <= _MOST:
        for patterns in (map(_pattern, calls), [_ANYTHING] * len(calls)):
            owners = _owners(kinds, [*patterns, *others])
            if owners is not None:
                sole = [min(each) if len(each) == 1 else len(calls) for each in owners]
                return [calls[i] if i < len(calls) else None for i in sole]
    return [None] * len(names)


def _pattern(call: Call) -> re.Pattern[str]:
    """The kernels that an operator launches, by their kinds."""
    name = str(call.operator).removeprefix("aten.").partition(".")[0]
    return _ATTENTION if "attention" in name else _LAUNCHED.get(name, _ANYTHING)


def _owners(text: str, patterns: Sequence[re.Pattern[str]]) -> list[set[int]] | None:
    """For each letter, the patterns that may match it if all match the text one after another; None if they do not."""
    begins, matches = {0}, list[set[tuple[int, int]]]()
    for pattern in patterns:
        matches.append({(i, j) for i in begins for j in range(i, len(text) + 1) if pattern.fullmatch(text, i, j)})
        begins = {j for _, j in matches[-1]}
    if len(text) not in begins:
        return None
    owners, ends = [set[int]() for _ in text], {len(text)}
    for number in reversed(range(len(patterns))):
        used = [(i, j) for i, j in matches[number] if j in ends]
        for i, j in used:
            for at in range(i, j):
                owners[at].add(number)
        ends = {i for i, _ in used}
    return owners
