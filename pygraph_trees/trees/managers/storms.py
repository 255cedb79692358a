"""Stops functions that warm up and record more than they replay.

:class:`Sizes` chooses the sets of integers with which a function is graphed, and :func:`why_stopped` tells that a
function must not be recorded again. Both work with bounded memory, and are asked only if ``pygraph_selective`` is
"auto". :func:`is_endless` tells that a path must end, although a backward seems pending.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pygraph_trees.reasons import Reason, Why

from ..pools.liveness import release_unneeded

if TYPE_CHECKING:
    from pygraph_trees.report.log import RecordingLog

FIRST_SIZES = 16  # graphed at once
MOST_SIZES = 128  # graphed at all
COMES_AGAIN = 4  # calls with a later set before it is graphed
REFUSED = 16  # consecutive calls that are not graphed, after which later ones take the shortest way
MOST_WAITING = 1024  # sets whose calls are counted
MOST_RECORDINGS = 16  # of a function at one place in the tree; from then on, it needs as many replays as recordings
MOST_ON_PATH = 256  # the same limit for a path, and for all; making a recording takes longer the longer the path is
MOST_DEAD = 16  # forwards without live outputs at the beginning of a path, before it must end
MOST_ON_ENDLESS = 64  # recordings on a path, after which forwards without live outputs count wherever they are


_graphing_new: list[None] = []  # an item for each program that is being prepared


@contextlib.contextmanager
def graphing_new_sizes() -> Iterator[None]:
    """Inside, sets of integers are graphed at their first call, up to :data:`MOST_SIZES`."""
    _graphing_new.append(None)
    try:
        yield
    finally:
        _graphing_new.pop()


class Sizes:
    """The sets of integers with which one function is graphed."""

    def __init__(self) -> None:
        self._graphed: set[Hashable] = set()
        self._waiting: dict[Hashable, int] = {}  # calls of other sets, the newest last
        self.refused = 0  # consecutive calls that are not graphed

    def are_graphed(self, integers: Hashable) -> bool:
        """Counts a call with these integers, and returns whether it is graphed."""
        graphed, waiting = self._graphed, self._waiting
        if integers in graphed:
            self.refused = 0
            return True
        calls = waiting.pop(integers, 0) + 1
        comes_again = calls >= COMES_AGAIN or _graphing_new
        if len(graphed) < FIRST_SIZES or (comes_again and len(graphed) < MOST_SIZES):
            graphed.add(integers)
            self.refused = 0
            return True
        self.refused += 1
        while len(waiting) >= MOST_WAITING:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread may change it meanwhile
                waiting.pop(next(iter(waiting)), None)
        waiting[integers] = min(calls, COMES_AGAIN)
        return False


def why_stopped(siblings: Sequence[Any], on_path: Sequence[Any], newest: Sequence[RecordingLog] = ()) -> Why | None:
    """Why a function runs un-graphed from now on, instead of being recorded again; None if it is recorded.

    Args:
        siblings: its recordings at the place where it would be recorded.
        on_path: its recordings on the path to that place; on a path that never ends, their number has no limit.
        newest: its newest recordings anywhere. Each place may have few, if each step takes another path.
    """
    here, there = _logs(siblings), _logs(on_path)
    for found, most in ((here, MOST_RECORDINGS), (there, MOST_ON_PATH), (newest, MOST_ON_PATH)):
        # The first recordings may have been replayed for days.
        some = [recording for recording in found if not recording.was_interrupted][-4 * most :]
        count, replays = len(some), sum(recording.replays for recording in some)
        if count >= most and replays < count:
            return Reason.STORM(count=count, replays=replays, last=some[-1].reason)
    return None


def _logs(nodes: Sequence[Any]) -> list[RecordingLog]:
    return [log for node in nodes if (log := getattr(node, "log", None)) is not None]


def is_endless(path: Sequence[Any], is_forward: Callable[[Any], bool], *, others: int = 0) -> bool:
    """Whether a path becomes longer at each call, because forwards are called whose backward never comes.

    Upstream begins no step while a backward may be pending, because its inputs must stay. This path begins with
    forwards without live outputs, whose backwards cannot be pending. If the program keeps an early output, most of a
    long path consists of such forwards. The caller must keep other outputs that are alive.

    ``others``: forwards that ran un-graphed meanwhile.
    """
    if len(path) <= MOST_DEAD:
        return False

    def begins_dead() -> bool:
        dead = list(itertools.takewhile(_is_dead, path))
        return len(dead) >= MOST_DEAD and sum(map(is_forward, dead)) + others >= MOST_DEAD

    if begins_dead() or (release_unneeded(path[-1].cuda_graphs_pool) and begins_dead()):
        return True
    # Looking at all recordings takes long, so it is not done at each call.
    return len(path) % MOST_ON_ENDLESS == 0 and 2 * sum(map(is_forward, filter(_is_dead, path))) > len(path)


def _is_dead(node: Any) -> bool:
    return not any(held and held() for held in node.outputs_weakrefs)
