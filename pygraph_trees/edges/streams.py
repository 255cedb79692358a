"""Captures operations on the streams of lanes, one after another: each lane has memory and workspaces of its own.

The captured order stays the chain: an operation follows the one before, on whatever lane that was, and the capture's
own stream, which is lane 0, then follows the operation. Torch's allocator and the libraries keep memory by stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pygraph_trees.errors import DriverError

from .data_flow import DataFlow, Given, storage_of
from .lanes import Choice, time_us

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.cuda.edges import Dependencies


class Streams:
    """The streams of one capture's lanes, and which operation goes where."""

    def __init__(
        self,
        driver: Driver,
        dependencies: Dependencies,
        lanes: Sequence[Any],
        current: Callable[[Any], contextlib.AbstractContextManager[Any]] = torch.cuda.stream,
    ) -> None:
        """``lanes``: torch's streams; the first one captures, the others join it when they are first used."""
        self._driver, self._dependencies, self._lanes, self._current = driver, dependencies, lanes, current
        self._choice = Choice(len(lanes))
        self._unused: dict[int, StorageWeakRef] = {}  # memory of generated code that no operation has seen
        self._flow = DataFlow()

    @property
    def used(self) -> int:
        """The number of lanes with operations."""
        return len({*self._choice.lanes})

    def allocated(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that generated code has allocated, for an operation that is not known yet."""
        storage = tensor.untyped_storage()
        self._unused[storage._cdata] = StorageWeakRef(storage)

    def may_be_used(self) -> None:
        """All that was allocated so far may have been used."""
        self._unused.clear()

    def choose(self, given: Given, *, may_move: bool) -> int:
        """The lane of the next operation, and of memory that it uses first; lane 0 if it may use other streams."""
        lane = self._choice.best(self._flow.ahead(given)) if may_move else 0
        if lane:
            main, other = self._lanes[0], self._lanes[lane]
            other.wait_stream(main)  # joins the capture first, since only then memory is the graph pool's
            self._follow(other, main)  # and no longer the lane's last operation
        for tensor, _ in given:
            self._move(tensor, lane)
        return lane

    def _move(self, tensor: torch.Tensor, lane: int) -> None:
        """Allocates a tensor's memory again, on a lane, if nothing can have used it."""
        if (storage := storage_of(tensor)) is None:
            return
        unused = self._unused.pop(storage._cdata, None)
        if unused is not None and not unused.expired() and lane:
            nbytes = storage.nbytes()
            storage.resize_(0)  # it holds nothing yet
            with self._current(self._lanes[lane]):
                storage.resize_(nbytes)

    def run(self, lane: int, call: Callable[[int], Any]) -> Any:
        """Runs an operation on its chosen lane, after all that is captured so far and before all that comes."""
        main, other = self._lanes[0], self._lanes[lane]
        if not lane:
            return call(main.cuda_stream)
        with self._current(other):
            result = call(other.cuda_stream)
        main.wait_stream(other)
        self._follow(main, other)
        return result

    def join(self) -> None:
        """After an error: lets the capture's stream follow all lanes, without which the capture cannot end."""
        for lane in self._lanes[1:]:
            with contextlib.suppress(Exception):  # the first error counts; the capture may be over
                if self._driver.capturing_graph(lane.cuda_stream) is not None:
                    self._lanes[0].wait_stream(lane)

    def captured(self, lane: int, given: Given, nbytes: int) -> None:
        """Notes an operation that has captured nodes, with its results; ``nbytes``: of its tensors."""
        self._choice.put(lane, self._flow.ahead(given), time_us(nbytes))
        self._flow.note(given)

    def _follow(self, stream: Any, other: Any) -> None:
        """A stream that waits for another one follows it only; without this, there are edges that are not needed."""
        with contextlib.suppress(DriverError):
            self._dependencies.follow(stream.cuda_stream, self._driver.captured_last(other.cuda_stream))
