"""Placeholder addresses: ranges of virtual memory that stand for live inputs while a function is recorded.

:class:`Placeholders` takes size and address modulo 512 of each input's storage, and gives each a mapped range with a
guard on both sides. Nothing else is ever there, and one piece of physical memory backs all ranges. A constructor that
raises unmaps what it mapped. :meth:`Placeholders.close` gives back everything; no launched work may still use a
materialised placeholder. README.md explains the addresses.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import torch

from pygraph_trees.errors import DriverError

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

_T = TypeVar("_T")

ALIGNMENT = 512
SMALL_NBYTES = 1 << 20
SMALL_GUARD_NBYTES = 60 << 10
PAGE_NBYTES = 2 << 20
MAX_MAPPINGS = 32  # of one input
MAX_PIECE_NBYTES = 248 << 20  # two with their guards fit between the bounds below; more for inputs of over 32 of them

# Halves of addresses that numbers do not have; README.md tells which.
LOW_HALF_START, LOW_HALF_END = 0x9000_0000, 0xB000_0000
LEAST_HIGH_HALF = 64
# Where storages begin, modulo 64 KiB and without their residue: tiny ones, which end in the same 64 KiB, and others.
LOW_QUARTERS, LOW_QUARTER_NBYTES, TINY_NBYTES = (0x8A00, 0xFE00), 64 << 10, 12 << 10

# Addresses cost nothing. The driver chooses them: it ignores hints at other places (driver 580).
_ARENA_NBYTES = (1 << 40, 1 << 36)  # tried in turn, then only what a recording needs: a process may be limited
_WINDOW = 1 << 32


def with_memory(make: Callable[[], _T]) -> _T:
    """Calls ``make``; if the driver has no memory, frees what the allocator holds in reserve and calls it again."""
    try:
        return make()
    except DriverError as error:
        if error.fields["code"] != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
    torch.cuda.empty_cache()
    return make()


class Extent(NamedTuple):
    """Size and alignment that one input's storage needs."""

    nbytes: int
    residue: int  # address modulo 512 that the placeholder's start must have


class Placeholder(NamedTuple):
    """One input's range: the storage is [start, end), with its guards [low, high)."""

    start: int
    nbytes: int
    low: int
    high: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def is_far_from(self, address: int) -> bool:
        """Whether an address in the guards is so far from the storage that it may belong to another input."""
        if address < self.start:
            return 4 * (self.start - address) > self.start - self.low
        return 4 * (address - self.end) > self.high - self.end


@dataclass(slots=True)
class _Block:
    """A range in which the same memory is mapped again and again."""

    start: int
    nbytes: int
    piece: int  # bytes of the memory
    mapped: list[int] = field(default_factory=list)  # addresses that are mapped now
    usable: bool = False


@dataclass(frozen=True, slots=True)
class _AddressLayout:
    """The addresses of one recording's placeholders and blocks."""

    high: int  # the end of all of them
    piece: int  # bytes of the memory that backs them
    placeholders: tuple[Placeholder, ...]
    units: tuple[tuple[int, int], ...]  # by placeholder: start and bytes of its page, or of its own granules
    block_of: tuple[int, ...]  # by placeholder
    blocks: tuple[tuple[int, int], ...]  # start and bytes


class Arena:
    """Reserved addresses of a process, given out from low to high and never taken back. A full one is replaced."""

    _of: ClassVar[weakref.WeakKeyDictionary[Driver, Arena]] = weakref.WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    _next = _end = 0  # of the free addresses

    @classmethod
    def place(cls, driver: Driver, extents: Sequence[Extent], granularity: int, budget: int = 0) -> _AddressLayout:
        """New addresses for the extents. Raises :class:`DriverError` if none can be reserved."""
        with cls._lock:
            arena = cls._of.setdefault(driver, Arena())
            layout = _lay_out(extents, granularity, arena._next, budget)
            if layout.high > arena._end:
                arena._reserve(driver, _lay_out(extents, granularity, 0, budget).high)
                layout = _lay_out(extents, granularity, arena._next, budget)
            arena._next = layout.high
            return layout

    def _reserve(self, driver: Driver, needed: int) -> None:
        address, nbytes = None, _round_up(needed, PAGE_NBYTES)
        for most in (most for most in _ARENA_NBYTES if most > needed):
            with contextlib.suppress(DriverError):
                address, nbytes = driver.reserve(most + _WINDOW), most
                break
        begin = _round_up(driver.reserve(nbytes + _WINDOW) if address is None else address, _WINDOW)
        self._end = begin + nbytes
        high = LEAST_HIGH_HALF * _WINDOW
        self._next = high if begin < high <= self._end - needed else begin


class Placeholders:
    """The placeholders of one recording."""

    def __init__(self, driver: Driver, device: int, extents: Sequence[Extent], budget: int = 0) -> None:
        """``budget``: bytes of memory that may back them so that few mappings are needed."""
        self._driver = driver
        self._device = device
        self._handles: list[int] = []  # of physical memory, until it is mapped: mappings outlive their handle
        self._blocks: tuple[_Block, ...] = ()  # where the shared memory is mapped
        self._own: dict[int, _Block] = {}  # by start of a materialised unit
        self._layout: _AddressLayout | None = None
        self.placeholders: tuple[Placeholder, ...] = ()  # in the order of the extents
        self.kept: Sequence[object] = ()  # tensors in ordinary memory, freed together with the placeholders
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
        self._bounds = sorted((held.low, held.high, index) for index, held in enumerate(self.placeholders))
        # Of the range that contains all placeholders; equal without extents.
        self.low, self.high = (self._bounds[0][0], self._bounds[-1][1]) if self._bounds else (0, 0)

    def find(self, address: int) -> int | None:
        """The index of the placeholder whose [low, high) holds an address, guards included."""
        position = bisect.bisect_right(self._bounds, address, key=operator.itemgetter(0)) - 1
        _, high, index = self._bounds[position] if position >= 0 else (0, 0, 0)
        return index if address < high else None

    def may_be_between(self, address: int) -> bool:
        """Whether an address between two placeholders may be a pointer: the halves of others were never given out."""
        return self.low <= address < self.high and LOW_HALF_START <= address % _WINDOW < LOW_HALF_END

    def materialise(self, index: int) -> None:
        """Gives a placeholder, with others on its page, memory until ``close``, for kernels that hide its address.

        Neighbours may lose the shared memory. After a :class:`DriverError` the placeholder may be unmapped.
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
        """Unmaps and frees the shared memory. Materialised placeholders stay, or those on the pages of ``kept``."""
        for block in self._blocks:
            self._unmap(block)
        if kept is not None and self._layout is not None:
            for start in self._own.keys() - {self._layout.units[index][0] for index in kept}:
                self._unmap(self._own[start])
                del self._own[start]
        self._release_handles()

    def close(self) -> None:
        """Gives back everything. A refusal raises :class:`DriverError` at the end; the next call tries again."""
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
        # Kernels over lists of tensors carry stale words of the stack, which may be the start of a page, far from the
        # inputs on it.
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
        # Only the driver knows whether the interrupt came before or after its call. The range is ours either way.
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
    guard: int  # bytes before and after them
    members: list[tuple[int, Placeholder]]  # with the index of the extent

    @property
    def needed(self) -> int:
        return self.nbytes + 2 * self.guard


def _units(extents: Sequence[Extent], granularity: int) -> list[_Unit]:
    page = end = _round_up(PAGE_NBYTES, granularity)  # the end of the placeholders on the latest page
    units: list[_Unit] = []
    members: list[tuple[int, Placeholder]] = []  # of the latest page
    for index, extent in enumerate(extents):
        if extent.nbytes >= SMALL_NBYTES:
            start = granularity + _low_quarter(extent)
            nbytes = _round_up(start + extent.nbytes, granularity) - granularity
            placeholder = Placeholder(start, extent.nbytes, 0, nbytes + 2 * granularity)
            units.append(_Unit(nbytes, granularity, [(index, placeholder)]))
            continue
        placeholder = _small_placeholder(extent, end)
        if placeholder.high > page:
            members, placeholder = [], _small_placeholder(extent, 0)
            units.append(_Unit(page, 0, members))
        members.append((index, placeholder))
        end = placeholder.high
    return units


def _lay_out(extents: Sequence[Extent], granularity: int, frontier: int, budget: int) -> _AddressLayout:
    """Plans from an address on: units that share blocks, larger ones first, then units with blocks of their own."""
    units = _units(extents, granularity)
    most = sum(unit.needed for unit in units)
    least = max(-(-unit.nbytes // MAX_MAPPINGS) for unit in units)
    piece = _round_up(max(least, min(most, budget, MAX_PIECE_NBYTES)), granularity)
    shared = min(piece, MAX_PIECE_NBYTES)
    units.sort(key=lambda unit: (unit.needed > shared, -unit.needed))
    found_at: dict[int, tuple[Placeholder, tuple[int, int], int]] = {}  # placeholder, unit, number of the block
    blocks: list[tuple[int, int]] = []
    free: list[tuple[int, int, int]] = []  # of each shared block: its first free address, bytes left, number
    end = _round_up(frontier, granularity)
    for unit in units:
        found = next((i for i, (_, room, _) in enumerate(free) if room >= unit.needed), None)
        if found is None:
            is_shared = unit.needed <= shared
            nbytes, guard = (piece, 0) if is_shared else (_round_up(unit.nbytes, piece), unit.guard)
            low, block = _with_low_half(end, nbytes + 2 * guard, granularity), len(blocks)
            blocks.append((low + guard, nbytes))
            end = low + nbytes + 2 * guard
            if is_shared:
                free.append((low + unit.needed, shared - unit.needed, block))
        else:
            low, room, block = free[found]
            free[found] = low + unit.needed, room - unit.needed, block
        place = low + unit.guard, unit.nbytes
        for index, (start, nbytes, first, last) in unit.members:
            found_at[index] = Placeholder(low + start, nbytes, low + first, low + last), place, block
    placeholders, places, block_of = zip(*(found_at[index] for index in range(len(extents))), strict=True)
    return _AddressLayout(end, piece, placeholders, places, block_of, tuple(blocks))


def _small_placeholder(extent: Extent, low: int) -> Placeholder:
    quarter = _low_quarter(extent)
    start = _round_up(low + SMALL_GUARD_NBYTES - quarter, LOW_QUARTER_NBYTES) + quarter
    return Placeholder(start, extent.nbytes, low, _round_up(start + extent.nbytes + SMALL_GUARD_NBYTES, ALIGNMENT))


def _low_quarter(extent: Extent) -> int:
    return LOW_QUARTERS[extent.nbytes > TINY_NBYTES] + extent.residue


def stands_out(address: int) -> bool:
    """Whether no two numbers of 32 bits look like this address: no sizes, strides or usual scalars."""
    return LOW_HALF_START <= address % _WINDOW < LOW_HALF_END and address >= LEAST_HIGH_HALF * _WINDOW


def _with_low_half(address: int, nbytes: int, granularity: int) -> int:
    """The next address from which the low halves of ``nbytes`` bytes, or of as many as possible, are in bounds."""
    wanted = min(nbytes, LOW_HALF_END - LOW_HALF_START)
    base, low_half = address // _WINDOW * _WINDOW, address % _WINDOW
    if low_half < LOW_HALF_START:
        address = base + LOW_HALF_START
    elif low_half + wanted > LOW_HALF_END:
        address = base + _WINDOW + LOW_HALF_START
    return _round_up(address, granularity)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
