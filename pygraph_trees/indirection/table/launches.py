"""Launches of Inductor's Triton kernels, seen and changed where a table is in use.

Two scopes, each for the thread that enters it:

- :func:`noting`, around a function's warmup: which kernels are given the addresses of its live inputs, and by which
  parameters. Behind it the winners of autotuning are known, and their variants can be built.
- :func:`through`, around its capture: a kernel that is given the address of an input with a slot is launched through
  its variant, with the address of the slot, and all else as it was. Nothing is compiled or loaded there. Where there is
  no variant of just these parameters, the one that takes most of them is used, else the kernel is launched as it is;
  addresses that stay among its parameters are found there like any other.

The launch itself is ``CachingAutotuner.run``, which :func:`watched` wraps. The wrapper is put on with the first scope
of the process and taken off with the last (:class:`Tap`), so that launches cost nothing more at other times; in between
other threads pay one look at a variable.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import variant_launchers

if TYPE_CHECKING:
    from .variant_launchers import VariantLauncher

Run = Callable[..., Any]


class SlotTable(Protocol):
    """What a capture needs of a table."""

    def slot(self, address: int) -> torch.Tensor | None:
        """The slot that holds an address."""

    def is_read_by(self, variant: VariantLauncher, address: int) -> None:
        """A variant was captured that reads an address from its slot; it must live as long as the table."""


class _Watcher(Protocol):
    def launch(self, run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class _Here(threading.local):
    watcher: _Watcher | None = None  # of this thread


_here = _Here()


class Tap:
    """Where the wrapper is put on; whoever installs patches offers how."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._put_on: Callable[[], Callable[[], None]] | None = None
        self._take_off: Callable[[], None] | None = None
        self._held = 0

    @property
    def is_offered(self) -> bool:
        return self._put_on is not None

    def offer(self, put_on: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """From now on ``put_on``, which returns what undoes it, is called where it is needed; until what is returned
        is called."""
        with self._lock:
            self._put_on = put_on
            self._change()

        def withdraw() -> None:
            with self._lock:
                self._put_on = None
                self._change()

        return withdraw

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._held += 1
            self._change()
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                self._change()

    def _change(self) -> None:
        wanted = self._put_on if self._held else None
        if wanted is None and self._take_off is not None:
            take_off, self._take_off = self._take_off, None
            take_off()
        elif wanted is not None and self._take_off is None:
            self._take_off = wanted()


tap = Tap()


def available() -> bool:
    """Whether launches can be watched on this torch."""
    return tap.is_offered


def watched(upstream: Run) -> Run:
    """``CachingAutotuner.run`` as the thread's watcher has it."""

    @functools.wraps(upstream)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = _here.watcher
        if watcher is None or kwargs.get("benchmark_run"):
            return upstream(self, *args, **kwargs)
        return watcher.launch(upstream, self, args, kwargs)

    return run


@contextlib.contextmanager
def _watching(watcher: _Watcher) -> Iterator[None]:
    with tap.held():
        before, _here.watcher = _here.watcher, watcher
        try:
            yield
        finally:
            _here.watcher = before


@dataclass(frozen=True, slots=True)
class Reading:
    """A kernel, and those of its parameters that were given addresses in one launch or in several alike."""

    autotuner: Any
    names: frozenset[str]
    given: frozenset[tuple[str, int]]  # parameter and address


@contextlib.contextmanager
def noting(addresses: Collection[int]) -> Iterator[list[Reading]]:
    """Notes which kernels are given one of these addresses by what is run in it; the list is filled behind that."""
    notes, found = _Notes(frozenset(addresses)), list[Reading]()
    with _watching(notes):
        yield found
    for autotuner, choices in notes.seen.items():
        found += [Reading(autotuner, names, frozenset(given)) for names, given in choices.items()]


@contextlib.contextmanager
def through(table: SlotTable) -> Iterator[None]:
    """Launches kernels with the slots of a table in the place of the addresses that these hold."""
    with _watching(_Through(table)):
        yield


class _Notes:
    def __init__(self, addresses: frozenset[int]) -> None:
        self._addresses = addresses
        # By autotuner: sets of parameters, in order, with which of them was given which address.
        self.seen: dict[Any, dict[frozenset[str], set[tuple[str, int]]]] = {}

    def launch(self, run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Before the launch: what is given to it may be gone behind it.
        given = [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in args]
        result = run(autotuner, *args, **kwargs)
        launcher = variant_launchers.sole_launcher(autotuner)
        if launcher is not None:
            names = zip(variant_launchers.parameters(launcher), given, strict=False)
            found = {(name, address) for name, address in names if address in self._addresses}
            if found:
                choices = self.seen.setdefault(autotuner, {})
                choices.setdefault(frozenset(name for name, _ in found), set()).update(found)
        return result


class _Through:
    def __init__(self, table: SlotTable) -> None:
        self._table = table

    def launch(self, run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        launcher = variant_launchers.sole_launcher(autotuner)
        slots = {} if launcher is None else self._slots(launcher, args)
        variant = variant_launchers.variant_of(autotuner, launcher, slots) if slots else None
        if variant is None:
            return run(autotuner, *args, **kwargs)
        given = list(args)
        for name in variant.slots:
            position, slot = slots[name]
            given[position] = slot
        result = variant.launch(autotuner, given, kwargs)
        for name in variant.slots:
            self._table.is_read_by(variant, args[slots[name][0]].data_ptr())
        return result

    def _slots(self, launcher: Any, args: tuple[Any, ...]) -> Mapping[str, tuple[int, torch.Tensor]]:
        """By parameter that is given an address with a slot: its position, and the slot."""
        found = {}
        for position, (name, value) in enumerate(zip(variant_launchers.parameters(launcher), args, strict=False)):
            slot = self._table.slot(value.data_ptr()) if isinstance(value, torch.Tensor) else None
            if slot is not None:
                found[name] = position, slot
        return found
