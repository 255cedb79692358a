"""Lanes: sequences of units that run side by side.

:class:`Choice` gives units their lanes, and :func:`schedule` gives every lane an order; :func:`lane_edges` adds that
order to the one that memory requires, so that a graph needs no more streams than lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from .order import Pair, reduced
from .units import Unit

LANES = (2, 4)  # numbers of them
HOP_US = 1.5  # from the end of a unit to the start of one in another lane
FLOOR_US = 2.5  # of a unit, however few bytes it takes
BYTES_PER_US = 2.5e6  # of the GPU's memory


def time_us(nbytes: int) -> float:
    """The predicted time of a unit whose tensors have so many bytes."""
    return max(FLOOR_US, nbytes / BYTES_PER_US)


class Choice:
    """Gives each unit, in the captured order, the lane on which it can start first."""

    def __init__(self, count: int) -> None:
        self.lanes: list[int] = []  # by unit
        self._ends: list[float] = []
        self._free = [0.0] * count  # by lane: when its last unit has ended

    @property
    def end(self) -> float:
        """When the last unit has ended."""
        return max(self._free)

    def start(self, lane: int, ahead: Iterable[int]) -> float:
        """When a unit can start on a lane, after others that it must follow."""
        return max(self._free[lane], *(self._ends[one] + HOP_US * (self.lanes[one] != lane) for one in ahead), 0.0)

    def best(self, ahead: Iterable[int]) -> int:
        ahead = list(ahead)
        return min(range(len(self._free)), key=lambda lane: (self.start(lane, ahead), -self._free[lane]))

    def put(self, lane: int, ahead: Iterable[int], time_us: float) -> None:
        """Adds the next unit."""
        self._free[lane] = end = self.start(lane, ahead) + time_us
        self._ends.append(end)
        self.lanes.append(lane)


def schedule(pairs: Sequence[Pair], lanes: Sequence[int], times_us: Sequence[float]) -> tuple[list[int], float]:
    """The order in which units start, and the time until the last one has ended, in us.

    List scheduling: a free lane starts the one of its ready units that has the longest path to the end.
    """
    after: list[list[int]] = [[] for _ in lanes]
    waits = [0] * len(lanes)
    path = list(times_us)
    for earlier, later in reversed(pairs):
        after[earlier].append(later)
        waits[later] += 1
        hop_us = HOP_US * (lanes[earlier] != lanes[later])
        path[earlier] = max(path[earlier], times_us[earlier] + hop_us + path[later])
    arrival = [0.0] * len(lanes)  # when the units that it must follow have ended
    arriving: dict[int, list[tuple[float, int]]] = {lane: [] for lane in lanes}
    ready: dict[int, list[tuple[float, int]]] = {lane: [] for lane in lanes}
    free = dict.fromkeys(lanes, 0.0)
    events: list[tuple[float, int]] = []  # times at which a lane may start a unit

    def arrive(unit: int) -> None:
        heappush(arriving[lanes[unit]], (arrival[unit], unit))
        heappush(events, (arrival[unit], lanes[unit]))

    for unit, count in enumerate(waits):
        if not count:
            arrive(unit)
    order: list[int] = []
    while events:
        now, lane = heappop(events)
        while arriving[lane] and arriving[lane][0][0] <= now:
            _, unit = heappop(arriving[lane])
            heappush(ready[lane], (-path[unit], unit))
        if free[lane] > now or not ready[lane]:
            continue
        _, unit = heappop(ready[lane])
        order.append(unit)
        free[lane] = end = now + times_us[unit]
        heappush(events, (end, lane))
        for later in after[unit]:
            arrival[later] = max(arrival[later], end + HOP_US * (lanes[later] != lane))
            waits[later] -= 1
            if not waits[later]:
                arrive(later)
    return order, max(free.values(), default=0.0)


def lane_edges(units: Sequence[Unit], needs: Sequence[int], times_us: Sequence[float]) -> list[Pair]:
    """The fewest edges that keep the required order and run each lane's units one after another.

    Edges inside a lane come first, since the first successor of a node stays on its stream.
    """
    lanes = [unit.lane for unit in units]
    pairs = reduced(needs)
    order, _ = schedule(pairs, lanes, times_us)
    place = {unit: i for i, unit in enumerate(order)}
    ahead = [0] * len(order)  # by place, as sets of places
    for earlier, later in pairs:
        ahead[place[later]] |= 1 << place[earlier]
    last: dict[int, int] = {}  # by lane
    for i, unit in enumerate(order):
        if lanes[unit] in last:
            ahead[i] |= 1 << last[lanes[unit]]
        last[lanes[unit]] = i
    found = [(order[earlier], order[later]) for earlier, later in reduced(ahead)]
    return sorted(found, key=lambda pair: lanes[pair[0]] != lanes[pair[1]])
