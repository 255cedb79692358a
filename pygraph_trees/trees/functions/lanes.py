"""How many lanes the recordings of one function get, with ``pygraph_branches="auto"``.

The first recording has none. If its forecast promises enough, the function is recorded again on lanes, and a trial
decides whether they stay. What was measured is kept on disk for later processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pygraph_trees.edges.trial import Tried
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.selection.decision import Execution
from pygraph_trees.selection.profiles import Kept
from pygraph_trees.settings import Settings, is_disturbed

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog, RecordingLog

_MORE_MEMORY, _MORE_BYTES = 0.15, 128 << 20  # of the graph pool, whichever is more


@dataclass(slots=True)
class Number:
    """A number of lanes."""

    count: int  # 0: operations run one after another
    why: Why
    is_final: bool = True  # otherwise a trial follows


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
        self.numbers[function_id] = Number(0, why)
        return why

    def recorded(self, function_id: Any, log: RecordingLog, pool_bytes: int) -> Why | None:
        """After a recording: why it must be made again; ``pool_bytes``: of the graph pool before it."""
        number = self.numbers.get(function_id)
        if number is None or not number.count or log.branches is None:
            return None
        if log.branches.lanes == 1:  # it made the forecast
            return None if number.is_final else number.why
        if log.pool_bytes > max(_MORE_MEMORY * pool_bytes, _MORE_BYTES):
            return self.give_up(function_id, Reason.LANES_GREW(nbytes=log.pool_bytes))
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
        self.numbers[function_id] = number = Number(branches.lanes * found.pays, Reason.LANES_MEASURED(text=text))
        log.why_no_branches = None if found.pays else number.why
        log.branches = replace(branches, measured_us=(found.chain_us, found.lanes_us))
        if function_id in self._kept and not is_disturbed():
            self._kept[function_id].store(Execution.GRAPHED, text, number.count)
