"""Notes and redirects launches of Inductor's Triton kernels while a table is in use, in the thread that enters a scope.

:func:`noting`, around a warmup, tells which kernels are given the addresses of live inputs, and by which parameters.
:func:`through`, around a capture, launches a kernel through the variant that takes most of its inputs with slots, or
unchanged; it compiles and loads nothing. ``CachingAutotuner.run`` is wrapped (:class:`Tap`) only while a scope is open.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .variant_launchers import VariantLauncher, parameters, sole_launcher, variant_of

Run = Callable[..., Any]
Launch = Callable[[Run, Any, tuple[Any, ...], dict[str, Any]], Any]  # upstream's method, autotuner, arguments


class _Here(threading.local):
    launch: Launch | None = None  # of this thread


_here = _Here()


class Tap:
    """Puts the wrapper on while a scope is open. The code that installs patches offers the function that does so."""

    def __init__(self) -> None:
        self.put_on: Callable[[], Callable[[], None]] | None = None
        self._lock = threading.RLock()
        self._take_off: Callable[[], None] | None = None
        self._held = 0  # scopes

    def offer(self, put_on: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Offers ``put_on``, which applies the wrapper and returns the function that removes it.

        The returned function withdraws the offer.
        """
        self.put_on = put_on
        self._change()

        def withdraw() -> None:
            self.put_on = None
            self._change()

        return withdraw

    @contextlib.contextmanager
    def scope(self, launch: Launch) -> Iterator[None]:
        """Inside this scope, ``launch`` makes the launches of this thread."""
        self._change(1)
        try:
            before, _here.launch = _here.launch, launch
            try:
                yield
            finally:
                _here.launch = before
        finally:
            self._change(-1)

    def _change(self, held: int = 0) -> None:
        """Counts scopes that begin or end, then puts the wrapper on or takes it off if that is due."""
        with self._lock:
            self._held += held
            wanted = self.put_on if self._held else None
            if wanted is None and self._take_off is not None:
                take_off, self._take_off = self._take_off, None
                take_off()
            elif wanted is not None and self._take_off is None:
                self._take_off = wanted()


tap = Tap()


def available() -> bool:
    """Whether launches can be watched on this torch."""
    return tap.put_on is not None


def watched(upstream: Run) -> Run:
    """Wraps ``CachingAutotuner.run``: in a scope, the scope makes the launch."""

    @functools.wraps(upstream)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch = _here.launch
        if launch is None or kwargs.get("benchmark_run"):
            return upstream(self, *args, **kwargs)
        return launch(upstream, self, args, kwargs)

    return run


@contextlib.contextmanager
def noting(addresses: Mapping[int, int]) -> Iterator[dict[tuple[Any, frozenset[str]], set[tuple[str, int]]]]:
    """Notes which kernels are given one of these addresses, by index of the input, inside the scope.

    By autotuner and by the parameters that one launch gives addresses, it yields each parameter and the index of its
    input.
    """
    found: dict[tuple[Any, frozenset[str]], set[tuple[str, int]]] = {}

    def launch(run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _addresses(args)  # before the launch: the arguments may be gone after it
        result = run(autotuner, *args, **kwargs)
        named = zip(parameters(sole_launcher(autotuner)), given, strict=False)
        inputs = {(name, i) for name, address in named for i, at in addresses.items() if at == address}
        if inputs:
            found.setdefault((autotuner, frozenset(name for name, _ in inputs)), set()).update(inputs)
        return result

    with tap.scope(launch):
        yield found


@contextlib.contextmanager
def through(slots: Mapping[int, torch.Tensor], note_reader: Callable[[VariantLauncher, int], None]) -> Iterator[None]:
    """Launches kernels with the slots, by address, in place of the addresses.

    ``note_reader`` is told of each captured variant and each address that it reads; it must keep the variant alive.
    """

    def launch(run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        launcher = sole_launcher(autotuner)
        named = enumerate(zip(parameters(launcher), _addresses(args), strict=False))
        found = {name: (position, address) for position, (name, address) in named if address in slots}
        variant = variant_of(launcher, found) if found else None
        if variant is None:
            return run(autotuner, *args, **kwargs)
        given = list(args)
        for name in variant.slots:
            position, address = found[name]
            given[position] = slots[address]
        result = variant.launch(autotuner, given, kwargs)
        for name in variant.slots:
            note_reader(variant, found[name][1])
        return result

    with tap.scope(launch):
        yield


def _addresses(args: tuple[Any, ...]) -> list[int]:
    """The addresses of a launch's tensors; 0 for other arguments."""
    return [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in args]
