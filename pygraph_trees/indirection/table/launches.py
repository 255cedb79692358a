"""Notes and redirects launches of Inductor's Triton kernels while a table is in use, in the thread that enters a scope.

:func:`noting`, around a warmup, tells which kernels are given the addresses of live inputs, and by which parameters.
:func:`through`, around a capture, launches a kernel through the variant that takes most of its inputs with slots, or
unchanged; it compiles and loads nothing. ``CachingAutotuner.run`` is wrapped (:class:`Tap`) only while a scope is open.
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
    """The methods of a table that a capture calls."""

    def slot(self, address: int) -> torch.Tensor | None:
        """The slot that holds an address; None if no slot does."""

    def is_read_by(self, variant: VariantLauncher, address: int) -> None:
        """Notes that a captured variant reads an address from its slot; the table must keep the variant alive."""


class _Watcher(Protocol):
    def launch(self, run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class _Here(threading.local):
    watcher: _Watcher | None = None  # of this thread


_here = _Here()


class Tap:
    """Puts the wrapper on while a scope is open. The code that installs patches offers the function that does so."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._put_on: Callable[[], Callable[[], None]] | None = None
        self._take_off: Callable[[], None] | None = None
        self._held = 0

    @property
    def is_offered(self) -> bool:
        return self._put_on is not None

    def offer(self, put_on: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Offers ``put_on``, which applies the wrapper and returns the function that removes it.

        The returned function withdraws the offer.
        """
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
    """Wraps ``CachingAutotuner.run``: the thread's watcher makes the launch if there is one."""

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
    """A kernel, and the parameters that were given addresses, the same ones in one launch or several."""

    autotuner: Any
    names: frozenset[str]
    given: frozenset[tuple[str, int]]  # parameter and address


@contextlib.contextmanager
def noting(addresses: Collection[int]) -> Iterator[list[Reading]]:
    """Notes which kernels are given one of these addresses inside the scope; the list is filled at its end."""
    notes, found = _Notes(frozenset(addresses)), list[Reading]()
    with _watching(notes):
        yield found
    for autotuner, choices in notes.seen.items():
        found += [Reading(autotuner, names, frozenset(given)) for names, given in choices.items()]


@contextlib.contextmanager
def through(table: SlotTable) -> Iterator[None]:
    """Launches kernels with the slots of a table in place of the addresses in the slots."""
    with _watching(_Through(table)):
        yield


class _Notes:
    def __init__(self, addresses: frozenset[int]) -> None:
        self._addresses = addresses
        # By autotuner, then by set of parameters: which parameter was given which address.
        self.seen: dict[Any, dict[frozenset[str], set[tuple[str, int]]]] = {}

    def launch(self, run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Read before the launch: the arguments may be gone after it.
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
        """Position and slot of each parameter that is given an address with a slot."""
        found = {}
        for position, (name, value) in enumerate(zip(variant_launchers.parameters(launcher), args, strict=False)):
            slot = self._table.slot(value.data_ptr()) if isinstance(value, torch.Tensor) else None
            if slot is not None:
                found[name] = position, slot
        return found
