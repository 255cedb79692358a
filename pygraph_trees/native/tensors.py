"""Questions about many tensors at once: their addresses, whether they are still referenced, and operations on lists.

Each function prepares a question that is then asked again and again. The answers come from C++ (``tensors.cpp``) if it
was built for the torch in use, otherwise from Python and torch; the answers are equal. ``extension`` is the module in
C++, or None, and ``why_without`` tells why a module that is built is not used.
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

why_without: str | None = None  # why the module in C++ is not used although it is built


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
    """Uses the module in C++ no longer. Must be called before any of its objects is made."""
    global extension, why_without
    if extension is not None:
        extension, why_without = None, why


class _Thread(threading.local):
    """A number for each thread that asks; no other thread ever gets it."""

    def __init__(self) -> None:
        self.number = next(_numbers)


_numbers = itertools.count(1)
_thread = _Thread()


def thread_id() -> int:
    """A number that identifies this thread among all threads, also those that have ended."""
    return _thread.number if extension is None else int(extension.thread_id())


class Counter:
    """A number that Python and C++ change; the class in C++ if it was built."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


def new_counter() -> Counter:
    found: Counter = Counter() if extension is None else extension.Counter()
    return found


def packed(numbers: Sequence[int]) -> bytes:
    """The numbers as consecutive uint64, the form in which the module in C++ takes them."""
    return struct.pack(f"{len(numbers)}Q", *numbers)


class Whereabouts:
    """Asks for the addresses of some tensors of a list or tuple, if others are where they should be.

    ``ask`` returns the addresses, one for each index in ``asked``, or None if one of the others has moved.
    """

    def __init__(self, fixed: Sequence[int], addresses: Sequence[int], asked: Sequence[int] = ()) -> None:
        """``addresses``: the required addresses of the tensors at the indices ``fixed``, one for each."""
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
    """Asks whether some outputs are all dead; calling ``ask`` returns the answer.

    A place has the list of its recording's cached outputs, the list of torch's weak references to all of its outputs,
    and the output's index in both. A cached output without other references is dead; for any other output, torch's
    reference decides.
    """

    def __init__(
        self, places: Sequence[tuple[list[Any], list[Any], int]], release_unneeded: Callable[[], bool] | None = None
    ) -> None:
        """``release_unneeded``: drops unneeded references to such outputs, and returns whether there were any."""
        self.places, self._release_unneeded = tuple(places), release_unneeded
        # Runs of outputs of the same recording, the form in which the module in C++ takes them.
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
    """Asks for the first choice, from a number on, that is not ruled out for some tensors; else returns their number.

    A choice is ruled out if its question would be answered with no or None. Only C++ sees that outputs are referenced,
    and not always.
    """
    if extension is not None:
        packed = tuple((where.places, () if deaths is None else deaths.groups) for where, deaths in choices)
        return partial(extension.first_fit, packed)

    def ask(begin: int, tensors: Sequence[Any]) -> int:
        rest = range(begin, len(choices))
        return next((n for n in rest if choices[n][0].ask(tensors) is not None), len(choices))

    return ask


def candidate_filter(choices: Sequence[tuple[Whereabouts, Deaths | None]]) -> Callable[[int, list[Any]], int]:
    """Asks as :func:`first_fit` does, for choices that are asked often: it looks at each output and input once.

    Without C++ too, it rules out choices that need an output to be dead that Python references. Once at most one choice
    is left, it asks nothing more, so the result may not fit.
    """
    count, size = len(choices), (len(choices) + 63) // 64 * 8
    held: dict[tuple[int, int], tuple[list[Any], int]] = {}  # by list and index: bits of the choices ruled out
    places: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))  # by index, address: bits
    for number, (where, deaths) in enumerate(choices):
        for index, address in struct.iter_unpack("2Q", where.places):
            places[index][address] |= 1 << number
        for cached, _, index in () if deaths is None else deaths.places:
            _, before = held.get((id(cached), index), (cached, 0))
            held[id(cached), index] = cached, before | 1 << number
    outputs = [(cached, index, those) for (_, index), (cached, those) in held.items()]
    # An input that all choices need at the same address distinguishes none of them.
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
            # The output gets no name here, since references are counted: the list's and the argument's.
            if index < len(cached) and getrefcount(cached[index]) > 2 and cached[index] is not None:
                left &= ~those
        for index, those, by_address in inputs:
            if not left & (left - 1):
                break
            left &= ~those | by_address.get(tensors[index].data_ptr(), 0)
        return (left & -left).bit_length() - 1 if left else count

    return ask


def once_more(cached: list[Any], others: Sequence[Any]) -> Callable[[], list[Any] | None]:
    """Returns the cached outputs of a recording, with those that are not cached taken from ``others``.

    None if an output is neither cached nor in ``others``, which has ``NotImplemented`` for it, if torch must process
    it, or without C++.
    """
    return (lambda: None) if extension is None else partial(extension.outputs, cached, list(others))


def released(indices: Sequence[int]) -> Callable[[list[Any]], None]:
    """Puts None at these indices of a list."""
    if extension is not None:
        return partial(extension.release, packed(indices))

    def release(items: list[Any]) -> None:
        for index in indices:
            items[index] = None

    return release


def chosen(indices: Sequence[int], count: int) -> Callable[[list[Any]], None] | None:
    """Reduces a list of ``count`` items to those at ``indices``, in their order; None if that changes nothing."""
    if list(indices) == list(range(count)):
        return None
    if extension is not None and sorted(indices) == list(range(count)):
        return partial(extension.permute, packed(indices))

    def choose(items: list[Any]) -> None:
        items[:] = [items[index] for index in indices]

    return choose
