"""Ghost addresses: ranges of virtual memory that stand for live inputs while a function is recorded.

:class:`Ghosts` takes what each input's storage needs (:class:`Extent`: bytes, address modulo 512) and gives each a
:class:`Ghost`: a range as large and as aligned, mapped, readable and writable, with a guard on both sides. Captured
work never runs there, so one piece of physical memory backs all of it, again and again. A word of the captured graph
inside a ghost or its guards is that input's address:

- Nothing else lives there: all ghosts of a process are disjoint parts of its :class:`Arena`, which is never given
  back, and no later recording gets an address again, because kernels carry stale words of earlier launches.
- No two int32 side by side look like one: the low halves of the addresses lie in [0x9000_0000, 0xF000_0000), which as
  an int32 is negative, and far from zero, so that sizes and strides are never inside, whatever the high half is. This
  does not hold past the first 1.5 GiB of a larger input.

Small inputs share pages, with mapped guards of 64 KiB; a large one has granules of its own, with an unmapped granule
on both sides. Mapping costs 23 us a call and takes memory as a whole (CUDA_ERROR_NOT_SUPPORTED else, driver 580), so
all inputs that are larger than a granule share a second piece: as large as the largest of them as far as the budget
goes, which is what upstream would copy them to, and else as large as it takes to map it in 32 calls.

A constructor that raises leaves nothing mapped or held, and ``close`` gives back everything, interrupts
included; only what a call is just returning or taking back as an interrupt strikes may be lost (a handle).
Nobody synchronizes here: whoever calls ``close`` knows that no launched work uses a materialised ghost any longer.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pygraph_trees.driver import Driver, DriverError

ALIGNMENT = 512
SMALL_NBYTES = 1 << 20
SMALL_GUARD_NBYTES = 64 << 10
PAGE_NBYTES = 2 << 20
MAX_MAPPINGS = 32  # of one input, or of one page of small ones
MAX_PIECE_NBYTES = 64 << 20  # but where 32 of them do not make up an input

LOW_HALF_START, LOW_HALF_END = 0x9000_0000, 0xF000_0000

# Addresses cost nothing. The driver chooses where: hints at other places are not taken (driver 580).
_ARENA_NBYTES = (1 << 40, 1 << 36)  # asked for in turn, then just what a recording needs: a process may be limited
_WINDOW = 1 << 32


@dataclass(frozen=True, slots=True)
class Extent:
    """What one input's storage needs."""

    nbytes: int
    residue: int  # address modulo 512 that the ghost's start must have


@dataclass(frozen=True, slots=True)
class Ghost:
    """One input's range: [start, end) is the storage's extent, [low, high) that and its guards."""

    start: int
    nbytes: int
    low: int
    high: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(slots=True)
class _Block:
    """A range that is mapped as a whole: one large ghost, or a page of small ones."""

    start: int
    nbytes: int
    piece: int  # bytes of the shared memory that is mapped there again and again; memory is mapped as a whole or not
    mapped: list[tuple[int, int]] = field(default_factory=list)  # address and bytes of each mapping that there is
    own: bool = False  # backed by memory of its own


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything of one recording lies, from the arena's start."""

    high: int
    ghosts: tuple[Ghost, ...]
    blocks: tuple[tuple[int, int, int], ...]  # address, bytes, and of the memory that is mapped there
    block_of: tuple[int, ...]  # by ghost

    def moved(self, by: int) -> _Plan:
        ghosts = tuple(Ghost(g.start + by, g.nbytes, g.low + by, g.high + by) for g in self.ghosts)
        blocks = tuple((start + by, nbytes, piece) for start, nbytes, piece in self.blocks)
        return _Plan(self.high + by, ghosts, blocks, self.block_of)


class Arena:
    """Reserved addresses of a process, given out from low to high and never taken back; then there is another one."""

    _of: ClassVar[weakref.WeakKeyDictionary[Driver, Arena]] = weakref.WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._start = 0  # a multiple of the window
        self._used = 0  # from there on
        self._nbytes = 0

    @classmethod
    def place(cls, driver: Driver, extents: Sequence[Extent], granularity: int, budget: int = 0) -> _Plan:
        """Addresses for the extents that nobody had before. Raises :class:`DriverError` where none can be reserved."""
        with cls._lock:
            arena = cls._of.setdefault(driver, Arena())
            plan = _plan(extents, granularity, arena._used, budget)
            if plan.high > arena._nbytes:
                plan = _plan(extents, granularity, 0, budget)
                arena._reserve(driver, plan.high)
            arena._used = plan.high
            return plan.moved(arena._start)

    def _reserve(self, driver: Driver, needed: int) -> None:
        least = _round_up(needed, PAGE_NBYTES)
        for nbytes in (*(most for most in _ARENA_NBYTES if most > needed), least):
            try:
                address = driver.reserve(nbytes + _WINDOW)
            except DriverError:
                if nbytes == least:
                    raise
                continue
            self._start, self._used, self._nbytes = _round_up(address, _WINDOW), 0, nbytes
            return


class Ghosts:
    """The ghosts of one recording.

    Raises :class:`DriverError` where the driver refuses a call, and leaves nothing behind then.
    """

    ghosts: tuple[Ghost, ...]  # in the order of the extents
    low: int  # of all ghosts and what lies between them; low == high where there are no extents
    high: int

    def __init__(self, driver: Driver, device: int, extents: Sequence[Extent], budget: int = 0) -> None:
        """``budget``: bytes of memory that may lie behind them for the sake of few mappings."""
        self._driver = driver
        self._device = device
        self._handles: list[int] = []  # of physical memory, until it is mapped: mappings outlive their handle
        self._blocks: tuple[_Block, ...] = ()
        self.ghosts = ()
        self._block_of: tuple[int, ...] = ()
        if extents:
            granularity = driver.granularity(device)
            plan = Arena.place(driver, extents, granularity, budget)
            self.ghosts, self._block_of = plan.ghosts, plan.block_of
            self._blocks = tuple(_Block(*block) for block in plan.blocks)
            try:
                self._map_shared()
            except BaseException:
                with contextlib.suppress(DriverError):
                    self.close()
                raise
        self.low = min((ghost.low for ghost in self.ghosts), default=0)
        self.high = max((ghost.high for ghost in self.ghosts), default=0)
        self._sorted = sorted(range(len(self.ghosts)), key=lambda index: self.ghosts[index].low)
        self._lows = [self.ghosts[index].low for index in self._sorted]

    def find(self, address: int) -> int | None:
        """The index of the ghost whose [low, high) holds an address, guards included."""
        position = bisect.bisect_right(self._lows, address) - 1
        if position < 0:
            return None
        index = self._sorted[position]
        return index if address < self.ghosts[index].high else None

    def materialise(self, index: int) -> None:
        """Gives a ghost memory of its own, kept until ``close``: what hid its address reads and writes there.

        A page of small ghosts is materialised as a whole. After a :class:`DriverError` the ghost may be unmapped.
        """
        block = self._blocks[self._block_of[index]]
        if block.own:
            return
        self._handles.append(self._driver.create_memory(block.nbytes, self._device))
        self._unmap(block)
        self._map(block, self._handles[-1], block.nbytes)
        block.own = True
        self._release_handles()

    def release_memory(self) -> None:
        """Unmaps and frees the shared memory; materialised ghosts stay."""
        for block in self._blocks:
            if not block.own:
                self._unmap(block)
        self._release_handles()

    def close(self) -> None:
        """Gives back everything. What is refused raises after all the rest is done; the next call tries it anew."""
        refused: DriverError | None = None
        steps: list[Callable[[], None]] = [functools.partial(self._unmap, block) for block in self._blocks]
        for step in (*steps, self._release_handles):
            try:
                step()
            except DriverError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def _map_shared(self) -> None:
        shared: dict[int, int] = {}
        for block in self._blocks:
            if block.piece not in shared:
                shared[block.piece] = self._driver.create_memory(block.piece, self._device)
                self._handles.append(shared[block.piece])
            self._map(block, shared[block.piece], block.piece)
        self._release_handles()

    def _map(self, block: _Block, memory: int, nbytes: int) -> None:
        for address in range(block.start, block.start + block.nbytes, nbytes):
            try:
                self._driver.map_memory(address, nbytes, memory)
            except DriverError:
                raise
            except BaseException:
                self._unmap_if_mapped(address, nbytes)
                raise
            block.mapped.append((address, nbytes))
        self._driver.allow_access(block.start, block.nbytes, self._device)

    def _unmap(self, block: _Block) -> None:
        while block.mapped:
            address, nbytes = block.mapped.pop()
            try:
                self._driver.unmap(address, nbytes)
            except DriverError:
                block.mapped.append((address, nbytes))
                raise
            except BaseException:
                self._unmap_if_mapped(address, nbytes)
                raise

    def _unmap_if_mapped(self, address: int, nbytes: int) -> None:
        # An interrupt strikes before a call has worked or after: only the driver knows. The range is ours either way.
        with contextlib.suppress(DriverError):
            self._driver.unmap(address, nbytes)

    def _release_handles(self) -> None:
        while self._handles:
            handle = self._handles.pop()
            try:
                self._driver.release_memory(handle)
            except DriverError:
                self._handles.append(handle)
                raise


def _plan(extents: Sequence[Extent], granularity: int, frontier: int, budget: int) -> _Plan:
    """Plans above a place that is told from the start of a window."""
    ghosts: dict[int, Ghost] = {}
    block_of: dict[int, int] = {}
    blocks: list[tuple[int, int, int]] = []
    largest = max((extent.nbytes for extent in extents), default=0) + ALIGNMENT
    piece = _round_up(max(-(-largest // MAX_MAPPINGS), min(largest, budget, MAX_PIECE_NBYTES)), granularity)
    cursor = end = _round_up(frontier, granularity)  # the next free address; the end of what is planned, a page's too
    for index in sorted(range(len(extents)), key=lambda index: extents[index].nbytes >= SMALL_NBYTES):
        extent = extents[index]
        if extent.nbytes < SMALL_NBYTES:
            ghost = _small_ghost(extent, cursor)
            if ghost.high > end:
                nbytes = _round_up(PAGE_NBYTES, granularity)
                cursor = _with_low_half(end, nbytes, granularity)
                blocks.append((cursor, nbytes, granularity))
                end = cursor + nbytes
                ghost = _small_ghost(extent, cursor)
            cursor = ghost.high
        else:
            needed = extent.residue + extent.nbytes
            mapped = granularity if needed <= granularity else piece
            nbytes = _round_up(needed, mapped)
            low = _with_low_half(end, nbytes + 2 * granularity, granularity)
            blocks.append((low + granularity, nbytes, mapped))
            end = low + nbytes + 2 * granularity
            ghost = Ghost(low + granularity + extent.residue, extent.nbytes, low, end)
        ghosts[index] = ghost
        block_of[index] = len(blocks) - 1
    order = range(len(extents))
    return _Plan(
        high=end,
        ghosts=tuple(ghosts[index] for index in order),
        blocks=tuple(blocks),
        block_of=tuple(block_of[index] for index in order),
    )


def _small_ghost(extent: Extent, low: int) -> Ghost:
    start = _round_up(low + SMALL_GUARD_NBYTES, ALIGNMENT) + extent.residue
    return Ghost(start, extent.nbytes, low, _round_up(start + extent.nbytes + SMALL_GUARD_NBYTES, ALIGNMENT))


def _with_low_half(address: int, nbytes: int, granularity: int) -> int:
    """The first address from here where the low halves of so many bytes are in bounds (of as many as can be)."""
    wanted = min(nbytes, LOW_HALF_END - LOW_HALF_START)
    base, low_half = address // _WINDOW * _WINDOW, address % _WINDOW
    if low_half < LOW_HALF_START:
        address = base + LOW_HALF_START
    elif low_half + wanted > LOW_HALF_END:
        address = base + _WINDOW + LOW_HALF_START
    return _round_up(address, granularity)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
