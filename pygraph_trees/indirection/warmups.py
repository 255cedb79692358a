"""Which live inputs of a function may get slots in a table: its warm-ups tell.

:class:`Warmups` wraps each warm-up of one manager. It notes the kernels that are given addresses of live inputs
(:data:`.table.pointer_table.READERS`), or builds their variants at once. Only inputs that variants take get slots when
the function is recorded. It wraps nothing if launches cannot be watched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .retired import release_retired
from .routes import why_not_placeholder
from .table.launches import available, noting
from .table.pointer_table import READERS, TAKEN, Reader, taken_by_variants

if TYPE_CHECKING:
    from .pool import PoolRanges


class Warmups:
    """Notes which inputs may get a slot, for the functions that one manager warms up."""

    def __init__(self) -> None:
        self._step: Any = None
        self._live: set[int] = set()  # addresses of such inputs in this step

    @contextlib.contextmanager
    def begin(
        self,
        function: Any,
        step: Any,
        inputs: Sequence[Any],
        static: Collection[int],
        device: int,
        pool: PoolRanges,
        *,
        is_backward: bool,
        builds: bool,
    ) -> Iterator[None]:
        """Wraps a function's warmup: notes which kernels read live inputs and, if ``builds``, builds variants."""
        release_retired(is_locked=True)  # upstream warms up under the capture lock
        if step != self._step:
            self._step, self._live = step, set()
        addresses = {}
        with contextlib.suppress(RuntimeError):  # an output that was overwritten; upstream raises when it reads it
            addresses = {
                index: value.data_ptr()
                for index, value in enumerate(inputs if available() else ())
                if isinstance(value, torch.Tensor)
                # A forward's live inputs are still static for its backward, and will be found to be live.
                if index not in static or (is_backward and value.data_ptr() in self._live)
                if why_not_placeholder(value, device, value.is_cuda and pool.holds(value.data_ptr())) is None
            }
        if not addresses:
            yield
            return
        self._live.update(addresses.values())
        with noting(addresses) as found:
            yield
        known = READERS.setdefault(function, {})
        for key, inputs_of in found.items():
            if builds:
                TAKEN[function] = taken_by_variants(function) | Reader(*key, frozenset(inputs_of)).build()
            else:
                known[key] = Reader(*key, frozenset(inputs_of).union(known[key].inputs if key in known else ()))
