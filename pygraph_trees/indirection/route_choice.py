"""Whether a recording's inputs are given by address or through a table, chosen by what its replays are found to cost.

At first each node that holds an address is set. A :class:`Watch` looks at a replay now and then: what it takes to set a
node on this machine, how many are set in a replay, and whether the GPU has nothing to do then, so that the program
waits for the host. With a table one node is set, whatever reads the addresses, but the GPU has a kernel more to run,
and some a load more: :func:`saved_us` is the difference. Where it is clear, the kernels are compiled elsewhere
(:mod:`.variant_worker`) and loaded, one at a look; when all are there the function is recorded anew, once. What the
GPU takes for a replay is measured before and behind that: where a table costs it more than the host saves, a
:class:`TableWatch` has the function recorded by address again, for good. So it does later on, where a table costs the
GPU more and the GPU no longer waits for the host.

Rules over plain facts, and a walk through states. What the GPU is expected to take for a table is an H200's, from
kernels measured there; all else is measured where it runs. For large kernels it is too little: each block loads its
addresses before anything else, and those of an ocean model, 30 us each, took 2 us more with a table.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .replay_costs import Clock, Looks, Took
from .table.pointer_table import (
    WIDTHS,
    Reader,
    current_target,
    load_writer,
    readers_of,
    take,
    take_no_longer,
    taken_by_variants,
    widths_for,
)
from .table.variant_worker import Job, Worker, WriterJob, job_of

EVERY = 128  # replays from one look to the next, about
LOOKS = 8  # that a choice needs
AWAITED = "which is being made"  # in what is told, while a table is
EXPECTED = "as expected"  # in what is told, while a table is used and not judged yet

_MOST_PAUSE = 1 << 20  # replays
_LEAST_SAVED_US = 3.0
_LEAST_WAITING = 0.75
_PATIENCE = 64  # looks that a function waits for others
_MOST_LOOKS = 4 * LOOKS  # that a table gets until it is judged
_AS_OFTEN = 0.1  # by which shares of calls may differ where the times from one to the next are compared
_AROUND_US = 3.0  # of what a look measures, that Python does around the nodes; most replays are set by C++

_log = logging.getLogger("pygraph_trees.indirection")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """What replays were found to cost."""

    set_us: float  # of the host, to set one node
    set_nodes: float  # in a replay, in the mean
    holders: int  # nodes that hold addresses
    readers: int  # of these, kernels that could read them in a table
    waiting: float  # how often the GPU had nothing to do when a replay was about to begin, from 0 to 1
    slots: int = 0  # addresses that the readers would read there, all together


@dataclass(frozen=True, slots=True)
class Costs:
    """What a table takes of the GPU's time, as measured with kernels of 1 to 4 us (``tools/bench/slots.py``)."""

    writer_us: float = 1.4
    reader_us: float = 0.1  # each
    slot_us: float = 0.033  # each that one reads


def by_address_us(seen: Seen) -> float:
    return seen.set_us * seen.set_nodes


def by_table_us(seen: Seen, costs: Costs = Costs()) -> float:
    """The same with a table; what no variant reads is set as before."""
    still = 1 - seen.readers / max(1, seen.holders)
    set_nodes = min(1.0, seen.set_nodes) + still * seen.set_nodes
    return seen.set_us * set_nodes + costs.writer_us + costs.reader_us * seen.readers + costs.slot_us * seen.slots


def saved_us(seen: Seen, costs: Costs = Costs()) -> float:
    """What a table saves of a replay from idle to idle; less than nothing where it costs more."""
    return by_address_us(seen) - by_table_us(seen, costs)


def wants_table(seen: Seen) -> bool:
    return seen.waiting >= _LEAST_WAITING and saved_us(seen) >= _LEAST_SAVED_US


def lost_us(table: Took, address: Took) -> float | None:
    """What a replay from idle to idle takes longer with a table than it took by address; None where nobody knows.

    What was measured by address may have had new addresses at another share of its calls.
    """
    if table.gpu is None or address.gpu is None:
        return None
    return table.gpu.us - address.gpu.us - table.share * (address.set_us - table.set_us)


def is_slower(table: Took, address: Took) -> bool:
    """Whether a table clearly costs more than it saves.

    Not where the program steps faster by now: it may wait for the host alone, and what the GPU does is hidden then.
    """
    lost = lost_us(table, address)
    if lost is None or table.gpu is None or address.gpu is None:
        return False
    is_as_often = abs(table.share - address.share) <= _AS_OFTEN
    if is_as_often and address.step.us - table.step.us > address.step.about + table.step.about:
        return False
    return lost > max(_LEAST_SAVED_US, table.gpu.about + address.gpu.about)


def gpu_lost_us(table: Took, address: Took) -> float:
    """What the GPU clearly takes longer with a table; 0 where that is in doubt."""
    if table.gpu is None or address.gpu is None:
        return 0.0
    lost = table.gpu.us - address.gpu.us
    return lost if lost > max(_LEAST_SAVED_US, table.gpu.about + address.gpu.about) else 0.0


def measured_text(table: Took, address: Took, *, is_used: bool) -> str:
    """``table: 2 us of a replay and 57.9 of the GPU's, against 10 us of a replay and 50 of the GPU's by address``."""

    def text(took: Took) -> str:
        assert took.gpu is not None
        return f"{table.share * took.set_us:.3g} us of a replay and {took.gpu.us:.4g} of the GPU's"

    if is_used:
        return f"table: {text(table)}, against {text(address)} by address"
    return f"by address: {text(address)}, against {text(table)} by a table"


def hidden_text(gpu_lost_us: float) -> str:
    """For a table that the program no longer waits less with."""
    return f"by address: the GPU's work hides what the host does by now, and a table adds {gpu_lost_us:.3g} us to it"


def text_of(seen: Seen, *, is_used: bool = False) -> str:
    """One line: ``by address: 4.5 us of a replay against 3.8 us by a table (5 of 5 nodes can read there)``.

    ``is_used``: whether there is a table by now.
    """
    address, table = f"{by_address_us(seen):.3g} us", f"{by_table_us(seen):.3g} us"
    note = f"{seen.readers} of {seen.holders} nodes can read there"
    if is_used:
        return f"table: {table} of a replay against {address} by address, {EXPECTED} ({note})"
    if wants_table(seen):
        return f"by address: {address} of a replay against {table} by a table, {AWAITED} ({note})"
    if seen.waiting < _LEAST_WAITING:
        note = f"hidden behind the GPU's work in {1 - seen.waiting:.0%} of them"
    return f"by address: {address} of a replay against {table} by a table ({note})"


@dataclass(frozen=True, slots=True)
class ByAddress:
    """What replays took when a table was begun, and of which sizes."""

    took: Took
    sizes: Hashable


class Watch:
    """Of the replays of one recording whose inputs are given by address."""

    def __init__(
        self,
        function: Any,
        device: int,
        *,
        replays: Callable[[], int],
        is_idle: Callable[[], bool | None],
        clock: Clock,
        sizes: Hashable = None,
    ) -> None:
        """
        Args:
            function: its ``log`` is told what is found, in words.
            replays: how many there were.
            is_idle: whether the GPU has nothing to do; None where that cannot be asked.
            clock: told before a launch to time it.
            sizes: tells recordings of other sizes from this one, where the function has such.
        """
        self._function, self._device = weakref.ref(function), device
        self._replays, self._is_idle, self._looks = replays, is_idle, Looks(clock)
        self.sizes = sizes
        self.ready: Callable[[str], None] | None = None  # called, with a reason, where it is to be recorded anew
        # Who sets nodes in C++ leaves every 128th replay to Python, which did not look at all of those before.
        self._between = EVERY // 2
        self._next: float = self._between
        self._pause = EVERY * LOOKS
        self._patience = _PATIENCE

    def is_due(self) -> bool:
        return self._replays() >= self._next

    def look(self, us: float, count: int, set_calls: int, holders: Callable[[], Sequence[str | None]]) -> None:
        """Behind the setting of nodes for a call, before its launch. It may load a kernel, or begin a process.

        Never raises: there will be no more looks.

        Args:
            us, count: how long that took, and how many they were.
            set_calls: the sum of all so far.
            holders: of each node that holds an address the name of its kernel, None where it is none.
        """
        try:
            self._look(us, count, set_calls, holders)
        except Exception as error:
            _log.warning("how inputs are given is not chosen: %s: %s", type(error).__name__, error)
            self._next = float("inf")

    def _look(self, us: float, count: int, set_calls: int, holders: Callable[[], Sequence[str | None]]) -> None:
        function, replays = self._function(), self._replays()
        self._next = replays + self._between
        is_idle = self._is_idle()
        if function is None or not count or is_idle is None:
            return
        if is_begun(function):
            self._go_on(function)
            return
        self._looks.add(max(0.0, us - _AROUND_US), count, replays, set_calls, is_idle=is_idle)
        if len(self._looks) == LOOKS:
            self._choose(function, replays, Counter(holders()))

    def _choose(self, function: Any, replays: int, names: Counter[str | None]) -> None:
        slots = {reader.kernel: len(reader.names) for reader in readers_of(function)}
        seen = Seen(
            set_us=self._looks.node_us(),
            set_nodes=self._looks.nodes(),
            holders=names.total(),
            readers=sum(names[kernel] for kernel in slots),
            waiting=self._looks.waiting(),
            slots=sum(names[kernel] * count for kernel, count in slots.items()),
        )
        took = self._looks.took()
        self._looks.clear()
        function.log.route_was_found(text_of(seen), is_change=wants_table(seen))
        if wants_table(seen):
            begin(function, self._device, text_of(seen, is_used=True), ByAddress(took, self.sizes))
        else:
            self._next = replays + self._pause
            self._pause = min(4 * self._pause, _MOST_PAUSE)

    def _go_on(self, function: Any) -> None:
        was_over = is_over(function)
        done = go_on(function)
        if done is None:
            return
        if not done:
            self._next = float("inf")
            if not was_over:  # else it was said why
                function.log.route_was_found("by address: no kernel could be compiled to read a table")
            return
        # What is behind a function in a step is recorded anew with it: functions wait for each other.
        _waiting.add(self)
        self._patience -= 1
        if self._patience and any(not building.is_over for building in _all_of(_building.values)):
            return
        for watch in _all_of(lambda: _waiting):
            watch._next = float("inf")
            if watch.ready is not None:
                watch.ready("its inputs are read from a table from now on")
        _waiting.clear()


class TableWatch(Watch):
    """Of the replays of a recording with a table: whether they are faster, and whether they stay so."""

    def __init__(self, function: Any, device: int, **more: Any) -> None:
        super().__init__(function, device, **more)
        _with_table.setdefault(function, weakref.WeakSet()).add(self)

    def _look(self, us: float, count: int, set_calls: int, holders: Callable[[], Sequence[str | None]]) -> None:
        function, replays = self._function(), self._replays()
        self._next = replays + self._between
        is_idle = self._is_idle()
        if function is None or not count or is_idle is None:
            return
        building = _building.get(function)
        is_judged = building is not None and building.verdict is not None
        if building is None or building.before.sizes != self.sizes or (is_judged and not building.gpu_lost_us):
            self._next = float("inf")  # what is found for some sizes holds for all
            return
        self._looks.add(max(0.0, us - _AROUND_US), count, replays, set_calls, is_idle=is_idle)
        if not is_judged:
            if self._looks.timed >= LOOKS or len(self._looks) >= _MOST_LOOKS:
                self._judge(function, building)
                self._rest(replays if building.gpu_lost_us else float("inf"))
        elif len(self._looks) == LOOKS:
            if self._looks.waiting() <= 1 - _LEAST_WAITING:
                building.verdict = hidden_text(building.gpu_lost_us)
                function.log.route_was_found(building.verdict)
                self._leave(function)
            self._rest(replays)

    def _rest(self, replays: float) -> None:
        """Until the next looks, unless there shall be none."""
        self._looks.clear()
        self._next = max(self._next, replays + self._pause)
        self._pause = min(4 * self._pause, _MOST_PAUSE)

    def _judge(self, function: Any, building: _Building) -> None:
        table, address = self._looks.took(), building.before.took
        is_used = not is_slower(table, address)
        if lost_us(table, address) is None:
            building.verdict = building.why.replace(f", {EXPECTED}", "")
        else:
            building.verdict = measured_text(table, address, is_used=is_used)
        function.log.route_was_found(building.verdict)
        building.gpu_lost_us = gpu_lost_us(table, address)
        if not is_used:
            self._leave(function)

    def _leave(self, function: Any) -> None:
        leave(function)
        watches = _with_table.pop(function, ())
        for watch in _all_of(lambda: watches):
            watch._next = float("inf")
            if watch.ready is not None:
                watch.ready("its inputs are given by address again")


def _all_of(found: Callable[[], Iterable[T]]) -> list[T]:
    """What is there now, while another thread may add to it."""
    while True:
        with contextlib.suppress(RuntimeError):  # it did just now
            return list(found())


_waiting: weakref.WeakSet[Watch] = weakref.WeakSet()  # those whose functions could be recorded anew
_with_table: weakref.WeakKeyDictionary[Any, weakref.WeakSet[TableWatch]] = weakref.WeakKeyDictionary()  # by function
_lock = threading.Lock()  # one function may have recordings in several threads; nobody waits for it
_building: weakref.WeakKeyDictionary[Any, _Building] = weakref.WeakKeyDictionary()


def begin(function: Any, device: int, why: str, before: ByAddress) -> None:
    """The first step towards a table for a function; ``why``: what it is told when it has one."""
    _building.setdefault(function, _Building(readers_of(function), device, why, before))


def is_begun(function: Any) -> bool:
    return function in _building


def is_over(function: Any) -> bool:
    """Whether all that could be built is, or nothing could be."""
    building = _building.get(function)
    return building is not None and building.is_over


def why_by_table(function: Any) -> str | None:
    building = _building.get(function)
    return None if building is None else building.verdict or building.why


def leave(function: Any) -> None:
    """No table for this function, and none again."""
    take_no_longer(function)
    building = _building.get(function)
    if building is not None:
        building.give_up()


def go_on(function: Any) -> bool | None:
    """A step towards a table for a function: None where there are more to come, else whether variants were built."""
    if not _lock.acquire(blocking=False):
        return None
    try:
        building = _building[function]
        try:
            building.go_on(function)
        except Exception as error:  # no process can be made, say
            _log.warning("kernels were not compiled to read addresses from a table: %s", error)
            building.give_up()
        return bool(taken_by_variants(function)) if building.is_over else None
    finally:
        _lock.release()


class _Building:
    """Of the variants of a function's kernels, and of writers: compiled by a process, then loaded one at a time."""

    def __init__(self, readers: Collection[Reader], device: int, why: str, before: ByAddress) -> None:
        self.why, self.before = why, before
        self.verdict: str | None = None  # once replays with a table were compared with those by address
        self.gpu_lost_us = 0.0  # by then: what the GPU takes longer with one
        self._device = device
        self._readers: list[Reader] = list(readers)
        self._worker: Worker | None = None
        self._jobs: list[tuple[Reader | int, Job | WriterJob]] = []
        self._left: list[Reader | int] | None = None  # to be loaded, once it is known which; a width is a writer's
        self._taken: set[int] = set()

    @property
    def is_over(self) -> bool:
        return self._left == []

    def give_up(self) -> None:
        self._left, self._worker = [], None

    def go_on(self, function: Any) -> None:
        if self._worker is None and self._left is None:
            self._start()
        elif self._left is None and self._worker is not None:
            compiled = self._worker.done()
            if compiled is not None:
                self._left = [what for number, (what, _) in enumerate(self._jobs) if number in compiled]
        elif self._left and self._worker is not None:
            what = self._left[-1]
            with self._worker.cache():
                if isinstance(what, Reader):
                    self._taken |= what.build()
                else:
                    load_writer(self._device, what)
            if len(self._left) == 1 and self._taken:
                take(function, self._taken)  # all at once: a recording that is made meanwhile is as it was
            self._left.pop()
        if self.is_over:
            self._worker = None

    def _start(self) -> None:
        if Worker.is_busy():
            return
        found = [(reader, job_of(reader.autotuner, reader.names)) for reader in self._readers]
        jobs: list[tuple[Reader | int, Job | WriterJob]] = [(reader, job) for reader, job in found if job is not None]
        if not jobs:
            self.give_up()
            return
        with contextlib.suppress(Exception):  # without a target a writer is compiled when it is needed
            with torch.cuda.device(self._device):
                target = current_target()
            most = max(widths_for(len({index for reader in self._readers for _, index in reader.inputs})))
            jobs += [(width, WriterJob(width, target)) for width in WIDTHS if width <= most]  # some may get no slot
        self._worker, self._jobs = Worker.start([job for _, job in jobs]), jobs
