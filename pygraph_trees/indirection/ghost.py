"""Ghost addresses: ranges of virtual memory that stand for live inputs while a function is recorded.

:class:`Ghosts` takes what each input's storage needs (:class:`Extent`: bytes, address modulo 512) and gives each a
:class:`Ghost`: a range as large and as aligned, mapped, readable and writable, with a guard on both sides. Captured
work never runs there, so one piece of physical memory backs all of it, again and again. A word of the captured graph
inside a ghost or its guards is that input's address:

- Nothing else lives there: the ghosts of a recording are disjoint parts of one reservation, and no later recording of
  this process gets any of its addresses, because kernels carry stale words of earlier launches. Reservations rise; a
  range that the driver chose itself, since it did not take the hint, stays reserved for good.
- No two int32 side by side look like one: the low halves of the addresses lie in [0x9000_0000, 0xF000_0000), which as
  an int32 is negative, and far from zero, so that sizes and strides are never inside, whatever the high half is. This
  does not hold past the first 1.5 GiB of a larger input, nor where the driver did not take the hint.

Small inputs share pages, with mapped guards of 64 KiB; a large one has granules of its own, with an unmapped granule
on both sides. Mapping costs 23 us a call, so the shared memory is as large as it takes to map any input in 32 calls.

A constructor that raises leaves nothing mapped, reserved or held, and ``close`` gives back everything, interrupts
included; only what a call is just returning or taking back as an interrupt strikes may be lost (a handle, a range).
Nobody synchronizes here: whoever calls ``close`` knows that no launched work uses a materialised ghost any longer.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pygraph_trees.driver import Driver, DriverError

ALIGNMENT = 512
SMALL_NBYTES = 1 << 20
SMALL_GUARD_NBYTES = 64 << 10
PAGE_NBYTES = 2 << 20
MAX_MAPPINGS = 32  # of one input, or of one page of small ones

LOW_HALF_START, LOW_HALF_END = 0x9000_0000, 0xF000_0000

# Far from where systems put heaps, libraries and the driver's own reservations; 47-bit, what x86-64 processes have.
_frontier = 0x2B6D_0000_0000
_frontier_lock = threading.Lock()


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
    mapped: list[tuple[int, int]] = field(default_factory=list)  # address and bytes of each mapping that there is
    own: bool = False  # backed by memory of its own


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything of one recording lies."""

    low: int
    high: int
    ghosts: tuple[Ghost, ...]
    blocks: tuple[tuple[int, int], ...]  # address and bytes
    block_of: tuple[int, ...]  # by ghost

    def moved(self, by: int) -> _Plan:
        ghosts = tuple(Ghost(g.start + by, g.nbytes, g.low + by, g.high + by) for g in self.ghosts)
        blocks = tuple((start + by, nbytes) for start, nbytes in self.blocks)
        return _Plan(self.low + by, self.high + by, ghosts, blocks, self.block_of)


class Ghosts:
    """The ghosts of one recording; all of them lie in one reservation.

    Raises :class:`DriverError` where the driver refuses a call, and leaves nothing behind then.
    """

    ghosts: tuple[Ghost, ...]  # in the order of the extents
    low: int  # of the whole reservation; low == high where there are no extents
    high: int

    def __init__(self, driver: Driver, device: int, extents: Sequence[Extent]) -> None:
        self._driver = driver
        self._device = device
        self._reserved = False
        self._handles: list[int] = []  # of physical memory, until it is mapped: mappings outlive their handle
        self._blocks: tuple[_Block, ...] = ()
        granularity = driver.granularity(device) if extents else 1
        plan = _plan_at_frontier(extents, granularity)
        hint = plan.low
        try:
            if extents:
                plan = plan.moved(self._reserve(hint, plan.high - plan.low) - hint)
            self.low, self.high = plan.low, plan.high
            self.ghosts, self._block_of = plan.ghosts, plan.block_of
            self._blocks = tuple(_Block(start, nbytes) for start, nbytes in plan.blocks)
            if extents:
                self._map_shared(granularity)
        except BaseException:
            with contextlib.suppress(DriverError):
                self.close()
            raise
        # Kept where the driver chose the range: it could choose it again. After a failure it may, nothing was recorded.
        self._reserved = self._reserved and self.low == hint
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
        """Unmaps and frees the shared memory; materialised ghosts stay, and so does the reservation."""
        for block in self._blocks:
            if not block.own:
                self._unmap(block)
        self._release_handles()

    def close(self) -> None:
        """Gives back everything. What is refused raises after all the rest is done; the next call tries it anew."""
        refused: DriverError | None = None
        steps: list[Callable[[], None]] = [functools.partial(self._unmap, block) for block in self._blocks]
        for step in (*steps, self._release_handles, self._free):
            try:
                step()
            except DriverError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def _reserve(self, hint: int, nbytes: int) -> int:
        try:
            self.low = self._driver.reserve(nbytes, hint)
        except DriverError:
            self.low = self._driver.reserve(nbytes)
        self.high = self.low + nbytes
        self._reserved = True
        return self.low

    def _free(self) -> None:
        if not self._reserved or any(block.mapped for block in self._blocks):
            return
        self._reserved = False
        try:
            self._driver.free_reserved(self.low, self.high - self.low)
        except DriverError:
            self._reserved = True
            raise

    def _map_shared(self, granularity: int) -> None:
        largest = max(block.nbytes for block in self._blocks)
        nbytes = _round_up(-(-largest // MAX_MAPPINGS), granularity)
        self._handles.append(self._driver.create_memory(nbytes, self._device))
        for block in self._blocks:
            self._map(block, self._handles[-1], nbytes)
        self._release_handles()

    def _map(self, block: _Block, memory: int, memory_nbytes: int) -> None:
        end = block.start + block.nbytes
        for address in range(block.start, end, memory_nbytes):
            nbytes = min(memory_nbytes, end - address)
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


def _plan_at_frontier(extents: Sequence[Extent], granularity: int) -> _Plan:
    """Plans above all earlier plans of the process."""
    global _frontier
    with _frontier_lock:
        plan = _plan(extents, granularity, _frontier)
        _frontier = plan.high
    return plan


def _plan(extents: Sequence[Extent], granularity: int, frontier: int) -> _Plan:
    ghosts: dict[int, Ghost] = {}
    block_of: dict[int, int] = {}
    blocks: list[tuple[int, int]] = []
    cursor = end = _round_up(frontier, granularity)  # the next free address; the end of what is planned, a page's too
    for index in sorted(range(len(extents)), key=lambda index: extents[index].nbytes >= SMALL_NBYTES):
        extent = extents[index]
        if extent.nbytes < SMALL_NBYTES:
            ghost = _small_ghost(extent, cursor)
            if ghost.high > end:
                nbytes = _round_up(PAGE_NBYTES, granularity)
                cursor = _with_low_half(end, nbytes, granularity)
                blocks.append((cursor, nbytes))
                end = cursor + nbytes
                ghost = _small_ghost(extent, cursor)
            cursor = ghost.high
        else:
            nbytes = _round_up(extent.residue + extent.nbytes, granularity)
            low = _with_low_half(end, nbytes + 2 * granularity, granularity)
            blocks.append((low + granularity, nbytes))
            end = low + nbytes + 2 * granularity
            ghost = Ghost(low + granularity + extent.residue, extent.nbytes, low, end)
        ghosts[index] = ghost
        block_of[index] = len(blocks) - 1
    order = range(len(extents))
    return _Plan(
        low=min((ghost.low for ghost in ghosts.values()), default=end),
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
    base, low_half = address >> 32 << 32, address & 0xFFFF_FFFF
    if low_half < LOW_HALF_START:
        address = base + LOW_HALF_START
    elif low_half + wanted > LOW_HALF_END:
        address = base + (1 << 32) + LOW_HALF_START
    return _round_up(address, granularity)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
