"""How many lanes the recordings of one function get, with ``pygraph_branches="auto"``.

The first recording has none. If its forecast promises enough, the function is recorded again on lanes, and a trial
decides whether they stay. What was measured is kept on disk for later processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pygraph_trees.edges.trial import Tried
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.selection.decision import Execution
from pygraph_trees.selection.profiles import Kept
from pygraph_trees.settings import Settings, is_disturbed

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog, RecordingLog

_MOST, _MOST_BYTES = 0.15, 128 << 20  # that lanes may take besides the graph pool, whichever is more
_MOST_UNPAID, _MOST_UNPAID_BYTES = 0.05, 64 << 20  # the same, of lanes that do not pay


@dataclass(slots=True)
class Number:
    """A number of lanes."""

    count: int  # 0: operations run one after another
    why: Why
    is_final: bool = True  # otherwise a trial follows
    more_bytes: int | None = None  # by which the graph pool grew when the function was first recorded on lanes


class Lanes:
    """The numbers of lanes of one function, by upstream's id of it: one for each set of its integers."""

    def __init__(self, settings: Settings, log: FunctionLog) -> None:
        self._settings, self._log = settings, log
        self._kept: dict[Any, Kept] = {}  # by id
        self.numbers: dict[Any, Number] = {}

    def look_up(self, function_id: Any, inputs: Sequence[Any], device: int) -> None:
        """Before a recording: asks whether an earlier process has decided."""
        log, code = self._log, None if self._log.graph is None else self._log.graph.code
        if self._settings.branches != "auto" or function_id in self._kept or function_id in self.numbers:
            return
        if log.has_collective:
            self.numbers[function_id] = Number(0, Reason.RANKS())
        elif code is not None:  # the key of the generated code is known
            matters = {**asdict(self._settings), "lanes of": log.partition, "mode": log.mode}
            self._kept[function_id] = kept = Kept(code, log.name, device, matters)
            if (found := kept.find(inputs)) is not None:
                self.numbers[function_id] = Number(found.lanes, Reason.LANES_MEASURED(text=found.text))

    def give_up(self, function_id: Any, why: Why) -> Why:
        before = self.numbers.get(function_id)
        self.numbers[function_id] = Number(0, why, more_bytes=None if before is None else before.more_bytes)
        return why

    def recorded(
        self, function_id: Any, log: RecordingLog, pool_bytes: int, others: Iterable[Number] = ()
    ) -> Why | None:
        """After a recording: why it must be made again.

        ``pool_bytes``: of the graph pool before it; ``others``: the numbers of the functions that share the pool.
        """
        number = self.numbers.get(function_id)
        if number is None or not number.count or log.branches is None:
            return None
        if log.branches.lanes == 1:  # it made the forecast
            return None if number.is_final else number.why
        if number.is_final or number.more_bytes is not None:  # an earlier one has shown how much memory it takes
            return None
        before = sum(other.more_bytes or 0 for other in others)
        if before + log.pool_bytes > max(_MOST * (pool_bytes - before), _MOST_BYTES):
            return self.give_up(function_id, Reason.LANES_GREW(nbytes=log.pool_bytes))
        number.more_bytes = max(0, log.pool_bytes)
        return None

    def tried(self, function_id: Any, log: RecordingLog, found: Tried | Why) -> None:
        """Takes the result of a recording's trial."""
        log.is_tried, branches = False, log.branches
        assert branches is not None
        if isinstance(found, Why):
            log.why_no_branches = self.give_up(function_id, found)
            return
        times = f"{found.lanes_us:.3g} us of the GPU, and {found.launch_us:.2g} more to launch"
        text = f"on {branches.lanes} lanes, a replay takes {times}; one after another, {found.chain_us:.3g} us"
        more_bytes = self.numbers[function_id].more_bytes
        number = Number(branches.lanes * found.pays, Reason.LANES_MEASURED(text=text), more_bytes=more_bytes)
        self.numbers[function_id] = number
        log.why_no_branches = None if found.pays else number.why
        log.branches = replace(branches, measured_us=(found.chain_us, found.lanes_us))
        if function_id in self._kept and not is_disturbed():
            self._kept[function_id].store(Execution.GRAPHED, text, number.count)


def why_memory_is_wasted(numbers: Iterable[Number], pool_bytes: Callable[[], int]) -> Why | None:
    """Why all recordings that share a graph pool are made again: on lanes that do not pay, some take too much of it."""
    unpaid = [number for number in numbers if not number.count and number.more_bytes]
    nbytes = sum(number.more_bytes or 0 for number in unpaid)
    if nbytes <= _MOST_UNPAID_BYTES or nbytes <= _MOST_UNPAID * pool_bytes():
        return None
    for number in unpaid:
        number.more_bytes = None  # given back now
    return Reason.LANES_UNPAID(nbytes=nbytes)
