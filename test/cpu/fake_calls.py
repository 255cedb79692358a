"""What all calls of the fake driver share: results, handles, and failures that a test asks for; and edges of graphs."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PROGRAMMATIC = 0x01_00_01  # CUgraphEdgeData: type, ports of the later and of the earlier node


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801


class Handle:
    def __init__(self, value: int | Handle = 0) -> None:
        self._value = int(value)

    def __int__(self) -> int:
        return self._value


class View:
    """A field that is a bare pointer into its struct: reading it after the struct died is a use after free."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def _read(self):
        owner = self._owner()
        assert owner is not None, f"{self._name} outlived its struct"
        return owner.__dict__[self._name]

    def __int__(self) -> int:
        return self._read()


@dataclass
class Failure:
    after: int  # how many calls succeed before
    code: CUresult
    raises: BaseException | None


class FakeCalls:
    """Lists the calls in order, and makes chosen ones fail. Asking for a call that is not defined here fails."""

    CUresult = CUresult

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._handles = itertools.count(0x1000, 0x10)
        self._failures: dict[str, list[Failure]] = defaultdict(list)
        self._lacking: dict[str, str] = {}

    def fail(self, call: str, after=0, code=CUresult.CUDA_ERROR_INVALID_VALUE, raises: BaseException | None = None):
        """Makes a call fail once, without effect, after ``after`` more that succeed: with ``code``, or by raising."""
        assert hasattr(type(self), call), f"no call {call}"
        self._failures[call].append(Failure(after, code, raises))

    def lack(self, call: str, where: str = "driver") -> None:
        """Takes a call away from the "driver" or from the "bindings"."""
        assert where in ("driver", "bindings") and hasattr(type(self), call), (call, where)
        self._lacking[call] = where

    def have(self, call: str) -> None:
        """Undoes :meth:`lack`."""
        del self._lacking[call]

    def __getattribute__(self, name: str):
        where = object.__getattribute__(self, "_lacking").get(name) if name.startswith("cu") else None
        if where == "bindings":
            raise AttributeError(name)
        if where == "driver":

            def absent(*args):
                self.calls.append(name)
                raise RuntimeError(f'Function "{name}" not found')

            return absent
        assert not name.startswith("cu") or hasattr(type(self), name), f"no call {name}"
        return object.__getattribute__(self, name)

    def _enter(self, call: str) -> CUresult:
        self.calls.append(call)
        failures = self._failures[call]
        due = next((failure for failure in failures if failure.after <= 0), None)
        for failure in failures:
            failure.after -= 1
        if due is not None:
            failures.remove(due)
            if due.raises is not None:
                raise due.raises
            return due.code
        return CUresult.CUDA_SUCCESS

    def _answer(self, call: str, *values):
        result = self._enter(call)
        return (result, *(values if result == 0 else (None for _ in values)))


def as_int(value: int | Handle) -> int:
    assert isinstance(value, (int, Handle)), value
    return int(value)


class FakeEdges(FakeCalls):
    """Edges of graphs, by the calls of the driver's library that take data; arguments are ctypes objects.

    A call that fails may have changed some of its edges: ``changed_before_failure`` of them. ``misadds`` makes the next
    addition go wrong without an error: its last edge is "lost", or it is an "early" one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graphs: dict[int, list[int]] = {}
        self._edges: dict[int, dict[tuple[int, int], int]] = {}
        self._streams: dict[int, tuple[Any, int]] = {}  # status and graph
        self._captured_last: dict[int, list[int]] = {}  # nodes by stream
        self.changed_before_failure = 0
        self.misadds: str | None = None

    def edges(self, graph: int) -> dict[tuple[int, int], int]:
        """The data of each edge by its nodes, in the order in which they were added."""
        return self._edges.setdefault(graph, {})

    def connect(self, graph: int, edges: Iterable[tuple[int, int, int]]) -> None:
        """Adds edges, given as nodes and data, without a call."""
        for before, after, data in edges:
            assert {before, after} <= {*self._graphs[graph]}, f"{before:#x} or {after:#x} is in another graph"
            self.edges(graph)[before, after] = data

    def cuStreamUpdateCaptureDependencies_v2(self, stream: Any, nodes: Any, data: Any, count: Any, flags: Any) -> int:
        assert data is None and len(nodes) == count.value and flags.value == 1
        if (code := self._enter("cuStreamUpdateCaptureDependencies_v2")) == 0:
            assert self._streams[stream.value][1], "the stream captures nothing"
            self._captured_last[stream.value] = list(nodes)
        return code

    def cuGraphGetEdges_v2(self, graph: Any, before: Any, after: Any, data: Any, count: Any) -> int:
        edges = [(*nodes, kind) for nodes, kind in reversed(self.edges(graph.value).items())]
        if (code := self._enter("cuGraphGetEdges_v2")) == 0:
            arrays = [array for array in (before, after, data) if array is not None]
            assert len(arrays) in (0, 3) and all(len(array) == len(edges) == count._obj.value for array in arrays)
            for array, column in zip(arrays, zip(*edges, strict=True), strict=False):
                array[:] = column
            count._obj.value = len(edges)
        return code

    def cuGraphAddDependencies_v2(self, graph: Any, before: Any, after: Any, data: Any, count: Any) -> int:
        added = list(zip(before, after, data, strict=True))
        assert len(added) == count.value > 0
        if code := self._enter("cuGraphAddDependencies_v2"):
            added = added[: self.changed_before_failure]
        elif self.misadds:
            (*_, last), misadds, self.misadds = added, self.misadds, None
            added[-1:] = [] if misadds == "lost" else [(*last[:2], PROGRAMMATIC)]
        if len({edge[:2] for edge in added} - {*self.edges(graph.value)}) < len(added):
            return CUresult.CUDA_ERROR_INVALID_VALUE
        self.connect(graph.value, added)
        return code

    def cuGraphRemoveDependencies_v2(self, graph: Any, before: Any, after: Any, data: Any, count: Any) -> int:
        removed = list(zip(before, after, data, strict=True))
        assert len(removed) == count.value > 0
        code = self._enter("cuGraphRemoveDependencies_v2")
        for *nodes, kind in removed[: self.changed_before_failure] if code else removed:
            assert self.edges(graph.value).pop(tuple(nodes)) == kind
        return code
