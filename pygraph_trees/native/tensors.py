"""Questions about many tensors at once: where they lie, and whether anybody holds them; and lists of them.

Each function prepares one question, which is then asked again and again. The answers come from C++
(``native/tensors.cpp``) where that was built for the torch that is in use, and from Python and torch elsewhere; they
are the same.

On a machine without a GPU (torch 2.11, Python 3.12) C++ and Python take, in µs: whether 200 parameters lie where
they did 2.3 and 14.6, where 28 inputs lie 0.9 and 3.2, whether 149 outputs are dead 1.7 and, with torch's own
references, 130, to give 149 outputs once more 0.7 and 8 (130 and 8 in an earlier run). Where other work has filled the
caches in between, the first two take 17 and 80, and 10 and 29, and C++ the others 16 and 6. C++ asks for the memory of
all tensors at once; one after another took 1.8 for the 200, but 22 instead of 15 with full caches, in another run.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from sys import getrefcount
from typing import Any

import torch

why_without: str | None = None  # why the part in C++ is built and not used


def _load() -> Any:
    """The module in C++; None if it is not built for this torch, or cannot be loaded."""
    global why_without
    try:
        return importlib.import_module("pygraph_trees.native._fast_path")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        why_without = f"it cannot be loaded: {error}"
        return None


extension = _load()


def do_without_extension(why: str) -> None:
    """From now on the part in C++ is not used; to be called before anything was made of it."""
    global extension, why_without
    if extension is not None:
        extension, why_without = None, why


class _Thread(threading.local):
    """A number for each thread that asks, which no later one gets."""

    def __init__(self) -> None:
        self.number = next(_numbers)


_numbers = itertools.count(1)
_thread = _Thread()


def thread_id() -> int:
    """Tells this thread from all others, also from those that have ended."""
    return _thread.number if extension is None else int(extension.thread_id())


def packed(numbers: Sequence[int]) -> bytes:
    """As uint64 one behind another, which is how the part in C++ takes them."""
    return struct.pack(f"{len(numbers)}Q", *numbers)


class Whereabouts:
    """Asks where some tensors of a list or a tuple lie, provided that others of it lie where they should.

    ``ask`` gives the addresses, one for each index in ``asked``; None where one of the others has moved.
    """

    def __init__(self, fixed: Sequence[int], addresses: Sequence[int], asked: Sequence[int] = ()) -> None:
        """``addresses``: where the tensors at the indices ``fixed`` should lie, one for each."""
        self.places = packed(list(itertools.chain.from_iterable(zip(fixed, addresses, strict=True))))
        if extension is not None:
            self.ask: Callable[[Sequence[Any]], list[int] | None] = partial(
                extension.addresses, self.places, packed(asked)
            )
            return
        by_index: list[int | None] = [None] * (max(fixed, default=-1) + 1)
        for index, address in zip(fixed, addresses, strict=True):
            by_index[index] = address
        wanted, others = list(fixed), list(asked)

        def ask(tensors: Sequence[Any]) -> list[int] | None:
            if not torch._C._tensors_data_ptrs_at_indices_equal(list(tensors), by_index, wanted):
                return None
            return [tensors[index].data_ptr() for index in others]

        self.ask = ask


class Deaths:
    """Asks whether nobody holds any of some outputs; calling ``ask`` gives the answer.

    A place has the list of its recording's cached outputs, that of torch's weak references to all of its outputs, and
    the output's index in both. An output that is cached and that nobody else holds is dead; of each other one torch's
    reference is asked.
    """

    def __init__(
        self, places: Sequence[tuple[list[Any], list[Any], int]], release_unneeded: Callable[[], bool] | None = None
    ) -> None:
        """``release_unneeded``: lets go of what may hold some though nobody needs it, and says whether anything was."""
        self.places, self._release_unneeded = tuple(places), release_unneeded
        # Runs of outputs of one recording, as the part in C++ takes them.
        runs = [list(run) for _, run in itertools.groupby(self.places, key=lambda place: id(place[0]))]
        self.groups = tuple((run[0][0], packed([index for _, _, index in run])) for run in runs)
        self._are_dead: Callable[[], bool] = self._ask_each if extension is None else self._ask

    def ask(self) -> bool:
        return self._are_dead() or (
            self._release_unneeded is not None and self._release_unneeded() and self._are_dead()
        )

    def _ask(self) -> bool:
        position, count = extension.count_dead(self.groups, 0), len(self.places)
        while position < count:
            _, references, index = self.places[position]
            if references[index]() is not None:
                return False
            position = extension.count_dead(self.groups, position + 1)
        return True

    def _ask_each(self) -> bool:
        return all(references[index]() is None for _, references, index in self.places)


def first_fit(choices: Sequence[tuple[Whereabouts, Deaths | None]]) -> Callable[[int, Sequence[Any]], int]:
    """Which choice is the first, from a number on, that is not ruled out for some tensors; else their number.

    Ruled out is what would say no, or None; but that outputs are held is only seen by C++, and by it not always.
    """
    if extension is not None:
        packed = tuple((where.places, () if deaths is None else deaths.groups) for where, deaths in choices)
        return partial(extension.first_fit, packed)

    def ask(begin: int, tensors: Sequence[Any]) -> int:
        rest = range(begin, len(choices))
        return next((n for n in rest if choices[n][0].ask(tensors) is not None), len(choices))

    return ask


def candidate_filter(choices: Sequence[tuple[Whereabouts, Deaths | None]]) -> Callable[[int, list[Any]], int]:
    """Does what :func:`first_fit` does, for choices that are asked often: of each output and each input once.

    Ruled out is also without C++ who needs an output to be dead that Python holds. Once at most one choice is left
    nothing more is asked: what is found may not fit, as with :func:`first_fit`.
    """
    count, size = len(choices), (len(choices) + 63) // 64 * 8
    held: dict[tuple[int, int], tuple[list[Any], int]] = {}  # by list and index: who is ruled out
    places: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))  # who needs which address
    for number, (where, deaths) in enumerate(choices):
        for index, address in struct.iter_unpack("2Q", where.places):
            places[index][address] |= 1 << number
        for cached, _, index in () if deaths is None else deaths.places:
            _, before = held.get((id(cached), index), (cached, 0))
            held[id(cached), index] = cached, before | 1 << number
    outputs = [(cached, index, those) for (_, index), (cached, those) in held.items()]
    # Where an input should lie for all of them tells none apart.
    inputs = [
        (index, functools.reduce(operator.or_, by_address.values()), dict(by_address))
        for index, by_address in places.items()
        if set(by_address.values()) != {(1 << count) - 1}
    ]
    if extension is not None:

        def row(those: int) -> bytes:
            return those.to_bytes(size, "little")

        found: Callable[[int, list[Any]], int] = extension.CandidateFilter(
            count,
            [(cached, index, row(those)) for cached, index, those in outputs],
            [(index, row(all_), {a: row(those) for a, those in by.items()}) for index, all_, by in inputs],
        )
        return found

    def ask(begin: int, tensors: list[Any]) -> int:
        left = (1 << count) - 1 >> begin << begin
        for cached, index, those in outputs:
            if not left & (left - 1):
                break
            # Without a name for the output: references are counted, the list's and the argument's.
            if index < len(cached) and getrefcount(cached[index]) > 2 and cached[index] is not None:
                left &= ~those
        for index, those, by_address in inputs:
            if not left & (left - 1):
                break
            left &= ~those | by_address.get(tensors[index].data_ptr(), 0)
        return (left & -left).bit_length() - 1 if left else count

    return ask


def once_more(cached: list[Any], others: Sequence[Any]) -> Callable[[], list[Any] | None]:
    """The cached outputs of a recording, with what is not cached taken from ``others``.

    None where an output is neither cached nor among the others, which have ``NotImplemented`` for it, or where torch
    has to do something to it (and always without C++).
    """
    return (lambda: None) if extension is None else partial(extension.outputs, cached, list(others))


def released(indices: Sequence[int]) -> Callable[[list[Any]], None]:
    """Puts None in these places of a list."""
    if extension is not None:
        return partial(extension.release, packed(indices))

    def release(items: list[Any]) -> None:
        for index in indices:
            items[index] = None

    return release


def chosen(indices: Sequence[int], count: int) -> Callable[[list[Any]], None] | None:
    """Makes a list of ``count`` items hold those at ``indices``, in their order; None where it does already."""
    if list(indices) == list(range(count)):
        return None
    if extension is not None and sorted(indices) == list(range(count)):
        return partial(extension.permute, packed(indices))

    def choose(items: list[Any]) -> None:
        items[:] = [items[index] for index in indices]

    return choose
