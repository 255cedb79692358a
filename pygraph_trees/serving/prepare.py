"""Calls a program with all of its sizes until nothing is compiled, recorded, tried or built any more.

:func:`prepare` takes a program and its sizes, and returns a :class:`Prepared` with a row for each size. Outputs live
until the next call ends, as in a loop. What still changes at the limit of calls is marked. Errors of the program pass.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph_trees.indirection.route_rule import REPLAYS
from pygraph_trees.indirection.table import builds
from pygraph_trees.native.build import status
from pygraph_trees.report.log import FunctionLog, journal
from pygraph_trees.report.markup import Section, Shown, preformatted
from pygraph_trees.report.page import document
from pygraph_trees.report.text import counted, nbytes, table
from pygraph_trees.trees.managers.storms import graphing_new_sizes
from pygraph_trees.trees.pools import pools

_QUIET = 4  # calls in a row without a change, after which a size is settled
_MOST_ROUNDS = 8
_BUILD_S = 600.0  # limit of waiting for kernels that read a table
_KEPT = 2  # calls whose arguments stay alive, so that new ones have other addresses
_HEAD = ("size", "calls", "s", "replays", "un-graphed", "rec", "pool", "own", "other")


@dataclass(slots=True)
class PreparedSize:
    """A size: what its calls made, and what a call does now."""

    size: str = ""  # "[8, 64], 3": the shapes of tensors, and other values
    calls: int = 0
    seconds: float = 0.0
    settled: bool = False  # whether its last calls changed nothing
    replays: int = 0  # of graphs, in its last call
    ungraphed: tuple[str, ...] = ()  # for each function that its last call ran un-graphed: why
    recordings: int = 0
    pool_bytes: int = 0  # growth of the graph pools; smaller than 0 if recordings were given back
    own_bytes: int = 0  # growth of own memory of outputs
    other_bytes: int = 0  # growth of GPU memory outside of torch's allocator: executable graphs, loaded kernels


@dataclass(frozen=True, slots=True)
class Prepared(Shown):
    """What :func:`prepare` found, with a row for each size."""

    sizes: tuple[PreparedSize, ...]
    native: str  # whether the parts in C++ are used, and if not, why

    @property
    def settled(self) -> bool:
        return all(size.settled for size in self.sizes)

    def to_text(self) -> str:
        return "\n".join([table(_HEAD, [_row(size) for size in self.sizes]), *self._notes()])

    def _notes(self) -> list[str]:
        found = [f"native: {self.native}"] if self.native != "yes" else []
        for size in self.sizes:
            found += [f"{size.size}: un-graphed: {why}" for why in dict.fromkeys(size.ungraphed)]
            found += [] if size.settled else [f"{size.size}: still changes after {counted(size.calls, 'call')}"]
        return found

    def _page(self) -> str:
        section = Section("sizes", "Sizes", preformatted(self.to_text()))
        return document("Prepared sizes", (), "", [section], asdict(self))


def _row(size: PreparedSize) -> tuple[str, ...]:
    amounts = (size.pool_bytes, size.own_bytes, size.other_bytes)
    figures = (size.calls, f"{size.seconds:.1f}", size.replays, len(size.ungraphed), size.recordings)
    return (size.size, *map(str, figures), *(f"{'-' if n < 0 else ''}{nbytes(abs(n))}" for n in amounts))


def prepare(fn: Callable[..., Any], sizes: Iterable[Any], *, most_calls: int = 1000) -> Prepared:
    """Calls ``fn`` with each of the ``sizes`` until nothing changes any more; see :func:`pygraph_trees.prepare`."""
    found = [(entry, PreparedSize()) for entry in sizes]
    with graphing_new_sizes():
        for _ in range(_MOST_ROUNDS):  # a size may change what an earlier one has made
            outputs, is_over = None, True
            for entry, record in found:
                outputs, changed = _settle(fn, entry, record, outputs, most_calls)
                is_over = is_over and not changed
            if is_over or any(record.calls >= most_calls for _, record in found):
                break
    return Prepared(tuple(record for _, record in found), status())


def _settle(
    fn: Callable[..., Any], entry: Any, record: PreparedSize, outputs: Any, most_calls: int
) -> tuple[Any, bool]:
    """Makes calls with one of the sizes; returns the last one's outputs, and whether anything was made or decided.

    ``outputs``: of the call before, which die when the first call ends.
    """
    began, memory, made = time.perf_counter(), _memory(), _recordings()
    kept: deque[Any] = deque(maxlen=_KEPT)
    changed, quiet, needed = False, 0, _QUIET
    while quiet < needed and record.calls < most_calls:
        given = entry if isinstance(entry, torch.Tensor) or not callable(entry) else entry()
        record.size = record.size or ", ".join(map(_shown, pytree.tree_leaves(given))) or "-"
        args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
        kept.append(given)
        before = {id(log): (log.happened, log.runs, _replays(log), log.set_nodes) for log in journal.functions}
        outputs = fn(*(args if isinstance(args, (tuple, list)) else (args,)), **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        record.calls += 1
        is_quiet, needed = _look(record, before)
        quiet = quiet + 1 if is_quiet else 0
        changed = changed or not is_quiet
    record.settled = quiet >= needed
    record.seconds += time.perf_counter() - began
    record.recordings += _recordings() - made
    pool, own, other = (now - was for now, was in zip(_memory(), memory, strict=True))
    record.pool_bytes, record.own_bytes = record.pool_bytes + pool, record.own_bytes + own
    record.other_bytes += other
    return outputs, changed


def _replays(log: FunctionLog) -> list[int]:
    """Of each recording."""
    return [recording.replays for recording in list(log.recordings)]


def _look(record: PreparedSize, before: dict[int, tuple[Any, int, list[int], int]]) -> tuple[bool, int]:
    """Whether a call changed nothing, and how many such calls in a row are needed."""
    is_quiet, needed, record.replays, ungraphed = True, _QUIET, 0, []
    for log in journal.functions:
        happened, runs, replays, set_nodes = before.get(id(log), (None, 0, [], 0))
        is_quiet = is_quiet and happened == log.happened
        if (runs, replays) == (log.runs, _replays(log)):
            continue  # it was not called
        record.replays += log.replays - sum(replays)
        ungraphed += [str(log.record().why_ungraphed)] if log.runs > runs else []
        if log.awaits_table:
            builds.finish(_BUILD_S)
        counts = itertools.chain(replays, itertools.repeat(0))
        used = [
            recording for recording, count in zip(log.recordings, counts, strict=False) if recording.replays > count
        ]
        is_quiet = is_quiet and not (log.is_tried or any(recording.is_tried for recording in used))
        if log.is_choosing and log.set_nodes > set_nodes:  # its inputs move
            needed = 2 * REPLAYS
    record.ungraphed = tuple(ungraphed)
    return is_quiet, needed


def _shown(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else str(value)[:20]


def _recordings() -> int:
    return sum(len(log.recordings) for log in journal.functions)


def _memory() -> list[int]:
    """Bytes of graph pools, of own memory of outputs, and of the current GPU outside of torch's allocator."""
    managers = pools.managers()
    other = 0
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        other = total - free - torch.cuda.memory_reserved()
    own = sum(manager.output_policy.held_bytes(manager) for manager in managers)
    return [sum(manager.pool.nbytes() for manager in managers), own, other]
