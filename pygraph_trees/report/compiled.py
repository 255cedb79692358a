"""Follows a graph through Inductor, from its scheduling to the installation of its artifact.

:func:`describing_partitions` notes the partitions, :func:`attach` stores them on the artifact as plain data, and
:func:`put_to_use` makes a :class:`~.log.GraphLog` of them. If a graph cannot be described, the failure is logged, and
the report shows it without partitions.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch._inductor import config

from pygraph_trees.compat import graph_policy
from pygraph_trees.reasons import Reason, Why

from . import partitions
from .calls import Call, calls_of
from .log import GraphLog, journal, partition_from_json
from .naming import compile_id, mode_name, program_line, program_name
from .records import PLACED, WHY_NOT_PLACED, Partition, Placed

_log = logging.getLogger("pygraph_trees.report")
_ATTRIBUTE = "pygraph_coverage"  # a Scheduler's partitions; a CompiledFxGraph's, as JSON, with the model's name
_REBINDING = ("aten.set_.", "aten.resize_.", "aten.shallow_copy_data_", "inductor.resize_storage_bytes_")


def describing_partitions(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.graph_partition``, which also stores a description of the partitions on the scheduler."""

    @functools.wraps(upstream)
    def graph_partition(self: Any) -> Any:
        parts, signatures = upstream(self)
        try:
            setattr(self, _ATTRIBUTE, partitions.describe(self, parts, signatures))
        except Exception:
            _log.warning("partitions could not be described", exc_info=True)
        return parts, signatures

    return graph_partition


def partitions_of(scheduler: Any) -> tuple[Partition, ...]:
    """The partitions that :func:`describing_partitions` stored on a scheduler; without any, the whole graph as one."""
    found: tuple[Partition, ...] | None = getattr(scheduler, _ATTRIBUTE, None)
    return partitions.whole(scheduler) if found is None else found


def attach(artifact: Any, graph: Any, gm: torch.fx.GraphModule) -> None:
    try:
        scheduler = getattr(graph, "scheduler", None)
        found = () if scheduler is None else partitions_of(scheduler)
        known = {
            "model": partitions.model_name(gm),
            "partitions": [asdict(p) for p in found],
            "placed": [asdict(placed) for placed in gm.meta.get(PLACED, ())],
            "why_not_placed": gm.meta.get(WHY_NOT_PLACED),
            "code": _code(getattr(artifact, "source_code", "")),
            "rebinds_storage": rebinds_storage(gm),
            "calls": [list(map(tuple, calls)) for calls in calls_of(getattr(artifact, "source_code", ""), gm)],
        }
        setattr(artifact, _ATTRIBUTE, known)
    except Exception:
        _log.warning("a compiled graph could not be described", exc_info=True)


def rebinds_storage(gm: torch.fx.GraphModule) -> bool:
    """Whether an operation of a graph, or of a branch or a loop in it, replaces the memory of a tensor."""
    graphs = [module.graph for module in gm.modules() if hasattr(module, "graph")]
    return any(str(node.target).startswith(_REBINDING) for graph in graphs for node in graph.nodes)


def why_not_replayed(artifact: Any) -> Why | None:
    """Says why a replay would not do what a compiled graph does; None if no reason is known."""
    known = getattr(artifact, _ATTRIBUTE, None)
    source = "" if known else str(getattr(artifact, "source_code", ""))
    rebinds = known["rebinds_storage"] if known else any(name in source for name in _REBINDING)
    return Reason.REBINDS() if rebinds else None


@contextmanager
def put_to_use(artifact: Any, graph_kwargs: Any, *, wanted: bool, dropped: str | None) -> Iterator[None]:
    """Wraps ``post_compile`` of a graph for which CUDA graphs are ``wanted``; notes it, or why it is dropped."""
    if not (wanted or artifact.disabled_cudagraphs_reason) or "cuda" not in artifact.device_types:
        yield
        return
    log = _log_of(artifact, graph_kwargs)
    with journal.compiling(log):
        yield
    is_wrapped = bool(graph_kwargs["cudagraphs"])
    log.dropped = dropped or (_why_dropped(artifact, is_wrapped=is_wrapped) if log.functions == 0 else None)
    journal.add_graph(log)


def _log_of(artifact: Any, graph_kwargs: Any) -> GraphLog:
    """The log of a graph, compiled or from a cache; without partitions if they cannot be read."""
    identity, known = compile_id(), getattr(artifact, _ATTRIBUTE, None) or {}
    forward = journal.graph_of(identity)
    # AOTAutograd's cache passes less of `graph_kwargs` than a compilation; the artifact keeps what it was made of.
    log = GraphLog(
        model=program_name() or (forward.model if forward else known.get("model", "unknown")),
        compile_id=identity,
        mode=mode_name(is_backward=graph_kwargs["is_backward"], is_inference=artifact.fx_kwargs["is_inference"]),
        partitions=(),
        rebinds_storage=known.get("rebinds_storage", True),
        source=program_line() or (forward.source if forward else None),
    )
    try:
        log.partitions = tuple(partition_from_json(p) for p in known.get("partitions", ()))
        log.placed = tuple(Placed(**placed) for placed in known.get("placed", ()))
        log.why_not_placed = known.get("why_not_placed")
        log.code = known.get("code")
        log.calls = tuple(tuple(Call(*call) for call in calls) for calls in known.get("calls", ()))
    except Exception:
        _log.warning("the description of a compiled graph could not be read", exc_info=True)
    return log


def _code(source: str) -> str | None:
    """A key of generated code, the same in every process: a comment counts earlier compilations."""
    lines = (line for line in source.splitlines() if not line.lstrip().startswith("#"))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if source else None


def _why_dropped(artifact: Any, *, is_wrapped: bool) -> str:
    has_policy = graph_policy(config) is not None
    if has_policy and is_wrapped:
        return Reason.POLICY_WRAPS()
    if artifact.disabled_cudagraphs_reason:
        return str(artifact.disabled_cudagraphs_reason)
    info = artifact.cudagraph_info
    if info is not None and info.cudagraph_fail_reasons:
        return ", ".join(info.cudagraph_fail_reasons)
    return Reason.POLICY_REFUSES() if has_policy else Reason.NO_PART()
