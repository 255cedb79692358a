"""How many lanes the recordings of one function get, with ``pygraph_branches="auto"``.

The first recording has none. If its forecast promises enough, the function is recorded again on lanes, and a trial
decides whether they stay. What was measured is kept on disk for later processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pygraph_trees.edges.trial import Tried
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.selection.decision import Execution
from pygraph_trees.selection.profiles import Kept
from pygraph_trees.settings import Settings, is_disturbed

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog, RecordingLog

_MOST, _MOST_BYTES = 0.15, 128 << 20  # that lanes may add to a graph pool, whichever is more
_MOST_UNPAID, _MOST_UNPAID_BYTES = 0.05, 64 << 20  # the same, of lanes that do not pay


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
        elif binding.extension is None:  # only C++ puts launches of different executable graphs in order
            self.numbers[function_id] = Number(0, Reason.NO_NATIVE())
        elif code is not None:  # the key of the generated code is known
            matters = {**asdict(self._settings), "lanes of": log.partition, "mode": log.mode}
            self._kept[function_id] = kept = Kept(code, log.name, device, matters)
            if (found := kept.find(inputs)) is not None:
                self.numbers[function_id] = Number(found.lanes, Reason.LANES_MEASURED(text=found.text))

    def wants(self, function_id: Any) -> bool:
        """Whether a function is recorded on lanes."""
        number = self.numbers.get(function_id)
        return number is not None and number.count > 0

    def give_up(self, function_id: Any, why: Why) -> Why:
        self.numbers[function_id] = Number(0, why)
        return why

    def decide(self, function_id: Any, number: Number, text: str) -> None:
        """Notes a number, and for later processes, too, unless a trial follows."""
        self.numbers[function_id] = number
        if number.is_final and function_id in self._kept and not is_disturbed():
            self._kept[function_id].store(Execution.GRAPHED, text, number.count)

    def recorded(self, function_id: Any, log: RecordingLog) -> Why | None:
        """After a recording in the captured order: why it must be made again, on lanes."""
        number = self.numbers.get(function_id)
        if number is None or number.is_final or not number.count:
            return None
        return number.why if log.branches is None and log.why_no_branches is number.why else None

    def tried(self, function_id: Any, log: RecordingLog, found: Tried | Why) -> None:
        """Takes the result of a recording's trial."""
        log.is_tried, branches = False, log.branches
        assert branches is not None
        if isinstance(found, Why):
            log.why_no_branches = self.give_up(function_id, found)
            return
        times = f"{found.lanes_us:.3g} us of the GPU, and {found.launch_us:.2g} more to launch"
        text = f"on {branches.lanes} lanes, a replay takes {times}; one after another, {found.chain_us:.3g} us"
        number = Number(branches.lanes * found.pays, Reason.LANES_MEASURED(text=text))
        log.why_no_branches = None if found.pays else number.why
        log.branches = replace(branches, measured_us=(found.chain_us, found.lanes_us))
        self.decide(function_id, number, text)


class LanesMemory:
    """How much of a manager's graph pool is there only because of lanes."""

    def __init__(self) -> None:
        self.known: Counter[Any] = Counter()  # by function: its warm-ups, and recordings in the captured order
        self.why_full: Why | None = None  # why no other function gets lanes
        self._grown: dict[Any, tuple[Lanes, int]] = {}  # by function: growth of the pool by recordings after these

    def recorded(self, function_id: Any, lanes: Lanes, log: RecordingLog, pool_bytes: int) -> Why | None:
        """After a recording: why the pool must be left; the function has one lane from then on.

        ``pool_bytes``: of the pool after it.
        """
        if log.branches is None or log.branches.lanes == 1:
            self.known[function_id] += 1
        elif lanes.wants(function_id) and self.known[function_id]:  # others need memory in any case
            self.known[function_id] -= 1
            before = self._grown.get(function_id, (lanes, 0))[1]
            self._grown[function_id] = lanes, before + max(0, log.pool_bytes)
            nbytes = sum(nbytes for _, nbytes in self._grown.values())
            if log.pool_bytes > 0 and nbytes > max(_MOST * (pool_bytes - nbytes), _MOST_BYTES):
                self.why_full = Reason.LANES_GREW(nbytes=nbytes)
                lanes.decide(function_id, Number(0, self.why_full), str(self.why_full))
                return self.why_full
        return None

    def why_wasted(self, pool_bytes: Callable[[], int]) -> Why | None:
        """After a trial: why the pool must be left."""
        nbytes = sum(nbytes for id_, (lanes, nbytes) in self._grown.items() if not lanes.wants(id_))
        if nbytes <= _MOST_UNPAID_BYTES or nbytes <= _MOST_UNPAID * pool_bytes():
            return None
        return Reason.LANES_UNPAID(nbytes=nbytes)

    def leave_pool(self, functions: Container[Any]) -> None:
        """Those of ``functions`` that have lanes will make the next pool as much larger."""
        self.known.clear()
        self._grown = {id_: found for id_, found in self._grown.items() if id_ in functions and found[0].wants(id_)}
