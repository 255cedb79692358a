"""Placeholder addresses: ranges of virtual memory that stand for live inputs while a function is recorded.

:class:`Placeholders` takes what each input's storage needs (:class:`Extent`: bytes, address modulo 512) and gives each
a :class:`Placeholder`: a range as large and as aligned, mapped, readable and writable, with a guard on both sides.
Captured work never runs there, so one piece of physical memory backs all of it, again and again. A word of the captured
graph inside a placeholder or its guards is that input's address:

- Nothing else lives there: all placeholders of a process are disjoint parts of its :class:`Arena`, which is never given
  back, and no later recording gets an address again, because kernels carry stale words of earlier launches.
- No two int32 side by side look like one: the low halves of the addresses lie in [0x9000_0000, 0xF000_0000), which as
  an int32 is negative, and far from zero, so that sizes and strides are never inside, whatever the high half is. This
  does not hold past the first 1.5 GiB of a larger input. What kernels divide by is a factor of 32 bits, which may look
  so, with a shift of at most 32 behind it (``IntDivider`` of ATen, ``FastDivmod`` of CUTLASS): high halves are greater,
  where the driver's addresses allow it. :func:`stands_out` tells.

Small inputs share pages, with guards of 64 KiB; a large one has granules of its own, with a granule on both sides. A
mapping costs 45 us whatever its size, made usable and taken away again, and takes memory as a whole
(CUDA_ERROR_NOT_SUPPORTED else; both measured, driver 580). So there is one piece of memory, as large as all inputs
together as far as the budget goes, which is what upstream would copy them to. Inputs lie side by side where it is
mapped; one that is larger than the piece lies on several mappings, 32 at most.

A constructor that raises leaves nothing mapped or held, and ``close`` gives back everything, interrupts
included; only what a call is just returning or taking back as an interrupt strikes may be lost (a handle).
Nobody synchronizes here: whoever calls ``close`` knows that no launched work uses a materialised placeholder any
longer.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pygraph_trees.errors import DriverError

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

ALIGNMENT = 512
SMALL_NBYTES = 1 << 20
SMALL_GUARD_NBYTES = 64 << 10
PAGE_NBYTES = 2 << 20
MAX_MAPPINGS = 32  # of one input
MAX_PIECE_NBYTES = 256 << 20  # but where 32 of them do not make up an input

LOW_HALF_START, LOW_HALF_END = 0x9000_0000, 0xF000_0000
LEAST_HIGH_HALF = 64

# Addresses cost nothing. The driver chooses where: hints at other places are not taken (driver 580).
_ARENA_NBYTES = (1 << 40, 1 << 36)  # asked for in turn, then just what a recording needs: a process may be limited
_WINDOW = 1 << 32


class Extent(NamedTuple):
    """What one input's storage needs."""

    nbytes: int
    residue: int  # address modulo 512 that the placeholder's start must have


class Placeholder(NamedTuple):
    """One input's range: [start, end) is the storage's extent, [low, high) that and its guards."""

    start: int
    nbytes: int
    low: int
    high: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def is_far_from(self, address: int) -> bool:
        """Whether an address of its guards is not so much nearer to it that it can be nobody else's."""
        if address < self.start:
            return 4 * (self.start - address) > self.start - self.low
        return 4 * (address - self.end) > self.high - self.end


@dataclass(slots=True)
class _Block:
    """A range that is mapped as a whole, with the same memory again and again."""

    start: int
    nbytes: int
    piece: int  # bytes of the memory
    mapped: list[int] = field(default_factory=list)  # addresses of the mappings that there are
    usable: bool = False


@dataclass(frozen=True, slots=True)
class _AddressLayout:
    """Where everything of one recording lies."""

    high: int  # all is below
    piece: int  # bytes of the memory behind it
    placeholders: tuple[Placeholder, ...]
    units: tuple[tuple[int, int], ...]  # by placeholder: start and bytes of its page, or of its own granules
    block_of: tuple[int, ...]  # by placeholder
    blocks: tuple[tuple[int, int], ...]  # start and bytes


class Arena:
    """Reserved addresses of a process, given out from low to high and never taken back; then there is another one."""

    _of: ClassVar[weakref.WeakKeyDictionary[Driver, Arena]] = weakref.WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._next = 0  # what is free begins here
        self._end = 0

    @classmethod
    def place(cls, driver: Driver, extents: Sequence[Extent], granularity: int, budget: int = 0) -> _AddressLayout:
        """Addresses for the extents that nobody had before. Raises :class:`DriverError` where none can be reserved."""
        with cls._lock:
            arena = cls._of.setdefault(driver, Arena())
            layout = _lay_out(extents, granularity, arena._next, budget)
            if layout.high > arena._end:
                arena._reserve(driver, _lay_out(extents, granularity, 0, budget).high)
                layout = _lay_out(extents, granularity, arena._next, budget)
            arena._next = layout.high
            return layout

    def _reserve(self, driver: Driver, needed: int) -> None:
        least = _round_up(needed, PAGE_NBYTES)
        for nbytes in (*(most for most in _ARENA_NBYTES if most > needed), least):
            try:
                address = driver.reserve(nbytes + _WINDOW)
            except DriverError:
                if nbytes == least:
                    raise
                continue
            begin = _round_up(address, _WINDOW)
            self._end = begin + nbytes
            high = LEAST_HIGH_HALF * _WINDOW
            self._next = high if begin < high <= self._end - needed else begin
            return


class Placeholders:
    """The placeholders of one recording.

    Raises :class:`DriverError` where the driver refuses a call, and leaves nothing behind then.
    """

    placeholders: tuple[Placeholder, ...]  # in the order of the extents
    low: int  # of all placeholders and what lies between them; low == high where there are no extents
    high: int

    def __init__(self, driver: Driver, device: int, extents: Sequence[Extent], budget: int = 0) -> None:
        """``budget``: bytes of memory that may lie behind them for the sake of few mappings."""
        self._driver = driver
        self._device = device
        self._handles: list[int] = []  # of physical memory, until it is mapped: mappings outlive their handle
        self._blocks: tuple[_Block, ...] = ()  # of the memory that all share
        self._own: dict[int, _Block] = {}  # by the start of a unit: memory of its own
        self._layout: _AddressLayout | None = None
        self.placeholders = ()
        if extents:
            self._layout = layout = Arena.place(driver, extents, driver.granularity(device), budget)
            self.placeholders = layout.placeholders
            self._blocks = tuple(_Block(*block, layout.piece) for block in layout.blocks)
            try:
                self._map_shared(layout.piece)
            except BaseException:
                with contextlib.suppress(DriverError):
                    self.close()
                raise
        bounds = sorted(
            (placeholder.low, placeholder.high, index) for index, placeholder in enumerate(self.placeholders)
        )
        self._lows = [low for low, _, _ in bounds]
        self._highs = [high for _, high, _ in bounds]
        self._sorted = [index for _, _, index in bounds]
        self.low, self.high = (self._lows[0], self._highs[-1]) if bounds else (0, 0)

    def find(self, address: int) -> int | None:
        """The index of the placeholder whose [low, high) holds an address, guards included."""
        position = bisect.bisect_right(self._lows, address) - 1
        return self._sorted[position] if position >= 0 and address < self._highs[position] else None

    def materialise(self, index: int) -> None:
        """Gives a placeholder memory of its own, kept until ``close``: what hid its address reads and writes there.

        A page of small placeholders is materialised as a whole; other placeholders near by may lose the memory that all
        share. After a :class:`DriverError` the placeholder may be unmapped.
        """
        assert self._layout is not None
        start, nbytes = self._layout.units[index]
        own = self._own.setdefault(start, _Block(start, nbytes, nbytes))
        if own.usable:
            return
        self._unmap(self._blocks[self._layout.block_of[index]])
        self._handles.append(self._driver.create_memory(nbytes, self._device))
        self._unmap(own)
        self._map(own, self._handles[-1])
        self._release_handles()

    def release_memory(self, kept: Collection[int] | None = None) -> None:
        """Unmaps and frees the shared memory; materialised placeholders stay.

        Args:
            kept: of these only those that are kept stay, and what lies on a page with them.
        """
        for block in self._blocks:
            self._unmap(block)
        if kept is not None and self._layout is not None:
            starts = {self._layout.units[index][0] for index in kept}
            for start in [start for start in self._own if start not in starts]:
                self._unmap(self._own[start])
                del self._own[start]
        self._release_handles()

    def close(self) -> None:
        """Gives back everything. What is refused raises after all the rest is done; the next call tries it anew."""
        refused: DriverError | None = None
        blocks = (*self._blocks, *self._own.values())
        steps: list[Callable[[], None]] = [functools.partial(self._unmap, block) for block in blocks]
        for step in (*steps, self._release_handles):
            try:
                step()
            except DriverError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def _map_shared(self, piece: int) -> None:
        self._handles.append(self._driver.create_memory(piece, self._device))
        for block in self._blocks:
            self._map(block, self._handles[-1])
        self._release_handles()
        # Kernels over lists of tensors carry what is on the stack: where a page begins, too, far in front of an input.
        self._driver.overwrite_stack()

    def _map(self, block: _Block, memory: int) -> None:
        for address in range(block.start, block.start + block.nbytes, block.piece):
            try:
                self._driver.map_memory(address, block.piece, memory)
            except DriverError:
                raise
            except BaseException:
                self._unmap_if_mapped(address, block.piece)
                raise
            block.mapped.append(address)
        self._driver.allow_access(block.start, block.nbytes, self._device)
        block.usable = True

    def _unmap(self, block: _Block) -> None:
        block.usable = False
        while block.mapped:
            address = block.mapped.pop()
            try:
                self._driver.unmap(address, block.piece)
            except DriverError:
                block.mapped.append(address)
                raise
            except BaseException:
                self._unmap_if_mapped(address, block.piece)
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


class _Unit(NamedTuple):
    """A page of small placeholders, or a large one with its guards; offsets are from the start of the unit."""

    nbytes: int  # a page, or a large placeholder's granules
    guard: int  # bytes in front of them and behind
    members: list[tuple[int, Placeholder]]  # with the index of the extent


def _needed(unit: _Unit) -> int:
    return unit.nbytes + 2 * unit.guard


def _units(extents: Sequence[Extent], granularity: int) -> list[_Unit]:
    page = _round_up(PAGE_NBYTES, granularity)
    units: list[_Unit] = []
    large: list[_Unit] = []
    members: list[tuple[int, Placeholder]] = []
    end = 0  # of the placeholders of the page
    for index, extent in enumerate(extents):
        if extent.nbytes >= SMALL_NBYTES:
            nbytes, start = _round_up(extent.residue + extent.nbytes, granularity), granularity + extent.residue
            placeholder = Placeholder(start, extent.nbytes, 0, nbytes + 2 * granularity)
            large.append(_Unit(nbytes, granularity, [(index, placeholder)]))
            continue
        placeholder = _small_placeholder(extent, end)
        if placeholder.high > page:
            units.append(_Unit(page, 0, members))
            members, placeholder = [], _small_placeholder(extent, 0)
        members.append((index, placeholder))
        end = placeholder.high
    if members:
        units.append(_Unit(page, 0, members))
    return units + large


def _lay_out(extents: Sequence[Extent], granularity: int, frontier: int, budget: int) -> _AddressLayout:
    """Plans from an address on: what shares blocks by size, the larger ones first, then what has its own."""
    units = _units(extents, granularity)
    most = sum(map(_needed, units))
    least = max(-(-unit.nbytes // MAX_MAPPINGS) for unit in units)
    piece = _round_up(max(least, min(most, budget, MAX_PIECE_NBYTES)), granularity)
    shared = min(piece, MAX_PIECE_NBYTES)
    units.sort(key=lambda unit: (_needed(unit) > shared, -_needed(unit)))
    placeholders: dict[int, Placeholder] = {}
    places: dict[int, tuple[int, int]] = {}
    block_of: dict[int, int] = {}
    blocks: list[tuple[int, int]] = []
    free: list[tuple[int, int, int]] = []  # of blocks that are shared: where they go on, the bytes left, their number
    end = _round_up(frontier, granularity)
    for unit in units:
        needed = _needed(unit)
        found = next((i for i, (_, room, _) in enumerate(free) if room >= needed), None)
        if found is None and needed <= shared:
            found, low = len(free), _with_low_half(end, piece, granularity)
            free.append((low, shared, len(blocks)))
            blocks.append((low, piece))
            end = low + piece
        if found is not None:
            low, room, block = free[found]
            free[found] = low + needed, room - needed, block
        else:
            nbytes, block = _round_up(unit.nbytes, piece), len(blocks)
            low = _with_low_half(end, nbytes + 2 * unit.guard, granularity)
            blocks.append((low + unit.guard, nbytes))
            end = low + nbytes + 2 * unit.guard
        place = low + unit.guard, unit.nbytes
        for index, (start, nbytes, begin, behind) in unit.members:
            placeholders[index] = Placeholder(low + start, nbytes, low + begin, low + behind)
            places[index] = place
            block_of[index] = block
    order = range(len(extents))
    return _AddressLayout(
        high=end,
        piece=piece,
        placeholders=tuple(placeholders[index] for index in order),
        units=tuple(places[index] for index in order),
        block_of=tuple(block_of[index] for index in order),
        blocks=tuple(blocks),
    )


def _small_placeholder(extent: Extent, low: int) -> Placeholder:
    start = _round_up(low + SMALL_GUARD_NBYTES, ALIGNMENT) + extent.residue
    return Placeholder(start, extent.nbytes, low, _round_up(start + extent.nbytes + SMALL_GUARD_NBYTES, ALIGNMENT))


def stands_out(address: int) -> bool:
    """Whether no two int32 look like an address: no sizes or strides, and no factor with a shift."""
    return LOW_HALF_START <= address % _WINDOW < LOW_HALF_END and address >= LEAST_HIGH_HALF * _WINDOW


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
