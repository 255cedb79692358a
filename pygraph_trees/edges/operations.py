"""The operations of one capture: their nodes, and the memory that they are known to access.

Calls of operators and launches of Inductor's Triton kernels are noted, with the capture's last nodes before and after
each. An operation that may access more memory than is declared is not :attr:`~Operation.known`. Calls do not change,
except that :mod:`.streams` may run them on the streams of lanes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection.table.launches import parameters, sole_launcher
from pygraph_trees.reasons import Reason, Why

from .data_flow import Forecast, Given, storage_of
from .streams import Streams
from .units import Access, Range, Regions

_LIBRARIES = ("aten", "pygraph_trees")  # namespaces of operators whose schemas are believed
_PLAIN = (torch.Tensor, int, float, str, type(None))  # arguments of kernels
# Operators that write to arguments that their schemas do not mark, or read addresses in device memory.
_NOT_BELIEVED = re.compile(r"batch_norm|rnn|lstm|gru|grouped")
_WINDOW = 9  # elements of a tensor that a kernel of Inductor's reads in one iteration, as in pooling
_LOOKS_UP = re.compile(r"embedding|gather|index|take")  # operators that read the rows that indices name


@dataclass(frozen=True, slots=True)
class Operation:
    """One call that captured nodes."""

    before: tuple[int, ...]  # the capture's last nodes before the call
    after: tuple[int, ...]
    known: bool  # whether it accesses nothing but what is declared and what its nodes hold addresses of
    declared: tuple[Access, ...]  # whole storages
    alive: Regions  # storages that are alive after it, and where no temporary of its own can have been
    nbytes: int  # of its tensors, as far as it reads them
    lane: int = 0


class Operations(TorchDispatchMode):
    """Notes the operations of one capture on one stream; for control flow, too, a call is noted as one operation."""

    supports_higher_order_operators = True

    def __init__(
        self,
        driver: Driver,
        stream: int,
        current_stream: Callable[[], int],
        allocated: Callable[[], int] | None,
        tensors: Iterable[torch.Tensor],
        streams: Streams | None = None,
        forecast: Forecast | None = None,
    ) -> None:
        """The arguments are those of :func:`.branches.noting`; without ``allocated``, only the forecast is made."""
        super().__init__()
        self._streams, self._forecast = streams, forecast
        self.found: list[Operation] = []
        self.why_not: Why | None = None  # why they are not all of the capture's operations
        self._driver, self._stream, self._current_stream, self._allocated = driver, stream, current_stream, allocated
        self._storages: dict[int, tuple[StorageWeakRef, Range | None]] = {}  # that were seen, and where they last were
        self._is_inside = False  # another operation, which accounts for what it calls
        self._latest: tuple[int, ...] = ()  # the last nodes after an operation
        self._accesses([(tensor, False) for tensor in tensors])

    def leave(self) -> None:
        """Pops this mode if an interrupt left it on torch's stack, where it would run the program's operators."""
        if any(mode is self for mode in _get_current_dispatch_mode_stack()):
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        library = getattr(func, "namespace", None)
        known = library in _LIBRARIES and not _NOT_BELIEVED.search(str(func))
        given = _tensors_of(func, args, kwargs)
        # Operators of this package keep copies by stream, so they stay on one.
        may_move = known and library == "aten"
        indices = [tensor.numel() for tensor, _ in given if tensor.dtype in (torch.int32, torch.int64)]
        rows = sum(indices) if _LOOKS_UP.search(str(func)) else None

        def read(tensor: torch.Tensor) -> int:
            return tensor.numel() if rows is None else min(tensor.numel(), rows * math.prod(tensor.shape[1:]))

        return self._note(
            lambda _: func(*args, **kwargs), given, known, self._current_stream(), read, may_move=may_move
        )

    def launch(self, run: Callable[..., Any], autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launches a Triton kernel, as :meth:`.launches.Tap.scope` asks."""
        names = parameters(sole_launcher(autotuner))
        given = [
            (value, not (name.startswith("in_ptr") and name not in autotuner.mutated_arg_names))
            for name, value in itertools.zip_longest(names, args, fillvalue="")
            if isinstance(value, torch.Tensor)
        ]
        # A descriptor, for example, has an address, but is no tensor.
        known = bool(names) and not autotuner.custom_kernel and all(isinstance(value, _PLAIN) for value in args)
        sizes = [value for name, value in zip(names, args, strict=False) if name.endswith("numel")]  # of its loops

        def read(tensor: torch.Tensor) -> int:
            return min(tensor.numel(), _WINDOW * math.prod(sizes)) if sizes else tensor.numel()

        def call(stream: int) -> Any:
            return run(autotuner, *args, **{**kwargs, "stream": stream})

        return self._note(call, given, known, kwargs["stream"], read, may_move=known)

    def _note(
        self,
        call: Callable[[int], Any],
        given: Given,
        known: bool,
        stream: int,
        read: Callable[[torch.Tensor], int],
        *,
        may_move: bool,
    ) -> Any:
        """Notes a call, which is given the stream to launch on: this one, or a lane's if it may move there.

        ``read`` returns the most elements of a tensor that it accesses.
        """
        if self._is_inside:
            return call(stream)
        before = self._last()
        streams = self._streams if stream == self._stream and self.why_not is None else None
        lane = 0
        if streams is not None:
            if before != self._latest:
                streams.may_be_used()  # by nodes outside of all operations
            lane = streams.choose(given, may_move=may_move)  # may move memory that nothing has used
        memory = None if self._allocated is None else (self._accesses(given), self._alive(), self._allocated())
        self._is_inside = True
        try:
            result = call(stream) if streams is None else streams.run(lane, call)
        finally:
            self._is_inside = False
            if streams is not None and not known:
                streams.may_be_used()  # through something that is no tensor, such as a descriptor
        made = [(leaf, True) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._latest = after = self._last()
        if stream != self._stream:
            self.why_not = self.why_not or Reason.OTHER_STREAMS()
        if after != before:
            sizes = {id(tensor): read(tensor) * tensor.element_size() for tensor, _ in [*given, *made]}
            nbytes = sum(sizes.values())
            if memory is not None:
                declared, kept = self._declared(*memory, given, made)
                self.found.append(Operation(before, after, known, declared, kept, nbytes, lane))
            if streams is not None:
                streams.captured(lane, [*given, *made], nbytes)
            if self._forecast is not None:
                self._forecast.captured([*given, *made], nbytes, may_move=may_move)
        return result

    def _declared(
        self, declared: list[Access], alive: set[Range], allocated: int, given: Given, made: Given
    ) -> tuple[tuple[Access, ...], Regions]:
        """What an operation accesses, and what is alive after it; the first three are from before it."""
        assert self._allocated is not None
        self._accesses(given)  # it may have resized one
        returned = self._accesses(made)
        results = {(access.start, access.end) for access in returned} - alive
        if self._allocated() - allocated == len(results):  # no temporary, whose place a result could have taken
            alive |= results
        return (*declared, *returned), Regions(alive & self._alive())

    def allocated(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that generated code has allocated, if no operation of the capture has used it yet."""
        if self._streams is not None and not self._is_inside:
            self._streams.allocated(tensor)

    def _last(self) -> tuple[int, ...]:
        """The nodes that the next node of the capture follows."""
        try:
            return tuple(self._driver.captured_last(self._stream))
        except DriverError as error:
            self.why_not = self.why_not or Reason.UNREAD(error=str(error))
            return ()

    def _accesses(self, given: Given) -> list[Access]:
        """Accesses to the tensors' storages, which are seen from now on."""
        found = []
        for tensor, write in given:
            if (storage := storage_of(tensor)) is not None:
                span, seen = _span(storage), self._storages.get(storage._cdata)
                self._storages[storage._cdata] = StorageWeakRef(storage) if seen is None else seen[0], span
                if span is not None:
                    found.append(Access(*span, write))
        return found

    def _alive(self) -> set[Range]:
        """The storages that were seen and are alive."""
        found = set()
        for key, (reference, span) in list(self._storages.items()):
            if reference.expired():
                del self._storages[key]
            elif span is not None:
                found.add(span)
        return found


def span_of(tensor: torch.Tensor) -> Range | None:
    """The memory of a tensor's storage; None if there is none."""
    storage = storage_of(tensor)
    return None if storage is None else _span(storage)


def _span(storage: torch.UntypedStorage) -> Range | None:
    start, nbytes = storage.data_ptr(), storage.nbytes()
    return (start, start + nbytes) if start and nbytes else None


def _tensors_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Given:
    """The tensors that an operator is given, each with whether it is written; all are, if there is no schema."""
    if (schema := getattr(func, "_schema", None)) is None:
        return [(leaf, True) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    return [
        (leaf, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in schema.arguments
        for leaf in pytree.tree_leaves(given.get(argument.name))
        if isinstance(leaf, torch.Tensor)
    ]
