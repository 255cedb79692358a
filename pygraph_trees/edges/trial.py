"""The trial of a recording's lanes: its operations run one after another and side by side in turn, in real calls.

A :class:`Trial` takes the place of its graph's ``replay``. Between two blocks of calls, just after a launch, the
captured graph gets its other edges and is instantiated again. Nothing waits for the GPU.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pygraph_trees.cuda.progress import CudaDevice, without_disturbing_captures
from pygraph_trees.reasons import Reason, Why

from .order import Pair
from .rewriting import Chain, GraphLost

WARM_UP = 16  # replays before the first block
BLOCK, ALL = 8, WARM_UP + 4 * 8  # chain, lanes, chain, lanes
_LEAST_FALL, _LEAST_FALL_US = 0.03, 3.0  # of the time between marks

Replay = tuple[bool, float, Any]  # whether the GPU was idle before; launch, and time between marks around it, in us


@dataclass(frozen=True, slots=True)
class Tried:
    """Medians of measured replays."""

    chain_us: float  # of the GPU, from the first operation to the last
    lanes_us: float
    launch_us: float  # how much longer the host takes to launch lanes
    pays: bool


def compared(chain: Sequence[Replay], lanes: Sequence[Replay]) -> Tried:
    """The result of the replays of both forms; each half of them is a block."""
    # If the GPU is idle, it waits for the launch between the marks.
    gpu_us, lanes_us = (median(max(0.0, us - idle * launch) for idle, launch, us in way) for way in (chain, lanes))
    more_us = median(launch for _, launch, _ in lanes) - median(launch for _, launch, _ in chain)
    is_idle = median(idle for idle, *_ in (*chain, *lanes)) > 0.5
    before_us, after_us = (median(us for *_, us in way) for way in (chain, lanes))
    # If the GPU is idle, the host may set the pace. It must not lose more than calls gain that wait for the GPU.
    least_us = max(_LEAST_FALL_US, _LEAST_FALL * before_us, more_us if is_idle else 0.0)
    # Whatever else changes the GPU's pace, such as its clock, must not favour the blocks of one form.
    is_clear = max(_us_by_block(lanes)) < min(_us_by_block(chain))
    return Tried(gpu_us, lanes_us, more_us, before_us - after_us >= least_us and is_clear)


def _us_by_block(way: Sequence[Replay]) -> list[float]:
    blocks = way[: len(way) // 2], way[len(way) // 2 :]
    return [median(us for *_, us in block) for block in blocks]


class Trial:
    """The replays of one graph until its form is chosen; refers weakly to the graph, which holds it."""

    def __init__(
        self,
        graph: Any,
        chain: Chain,
        edges: Sequence[Pair],
        device: CudaDevice,
        instantiate: Callable[[Any], None],
        waits: Callable[[], bool],
        ended: Callable[[Tried | Why], None],
    ) -> None:
        """The graph is instantiated as captured, and by ``instantiate`` after a change of its edges.

        ``waits`` tells if nothing is to be measured yet. ``ended`` is given the result, or why the graph is lost.
        """
        self._graph, self._chain, self._edges = weakref.ref(graph), chain, edges
        self._device, self._instantiate, self._waits, self._ended = device, instantiate, waits, ended
        self._replays, self._is_chain, self._is_lost = 0, True, False
        self._measured: dict[bool, list[tuple[bool, float, Any, Any]]] = {True: [], False: []}  # by form: the chain?

    def __call__(self) -> None:
        """Replays the graph."""
        if (graph := self._graph()) is None or self._is_lost:
            raise GraphLost(why="it was not instantiated again")
        place = self._replays - WARM_UP
        # A block's first launch uploads the graph, and sets all of its nodes.
        is_measured = 0 < place < ALL - WARM_UP and place % BLOCK > 0
        was_idle, begin = (self._device.is_idle(), self._device.mark()) if is_measured else (False, None)
        start = time.perf_counter_ns()
        type(graph).replay(graph)
        if self._waits():
            return
        if is_measured:
            launch_us = (time.perf_counter_ns() - start) / 1e3
            self._measured[self._is_chain].append((was_idle, launch_us, begin, self._device.mark()))
        self._replays += 1
        if self._replays > ALL:
            self._decide(graph)
        elif self._replays < ALL and self._replays > WARM_UP and place % BLOCK == BLOCK - 1:
            self._change(graph)

    def _decide(self, graph: Any) -> None:
        """Ends the trial, if the GPU has caught up."""
        us_between = self._device.us_between
        chain, lanes = (
            [(idle, launch, us_between(*marks)) for idle, launch, *marks in self._measured[form]]
            for form in (True, False)
        )
        if any(us is None for *_, us in (*chain, *lanes)):
            return
        tried = compared(chain, lanes)
        if tried.pays == self._is_chain:
            self._change(graph)
        if not self._is_lost:
            del graph.replay  # and so this object
            self._ended(tried)

    def _change(self, graph: Any) -> None:
        """Gives the graph its other form for the next replay."""
        try:
            with without_disturbing_captures():
                self._chain.replace(self._edges) if self._is_chain else self._chain.restore()
                self._instantiate(graph)
            self._is_chain = not self._is_chain
        except BaseException as error:  # an interrupt may come anywhere
            self._is_lost = True
            self._ended(Reason.LANES_LOST(error=f"{type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise
