"""Captures of operators and of launches, with what their kernels really access, on the fake driver.

Tensors are in a small pool on the CPU. Operators and launches capture kernels, with temporaries between the tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import torch
from fake_driver import KNOWN, FakeApi
from fake_trees import bare_recording
from interleaving import is_right
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import TestCase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.edges import Dependencies
from pygraph_trees.edges import accesses, branches
from pygraph_trees.edges.branches import noting
from pygraph_trees.edges.operations import Operations, span_of
from pygraph_trees.edges.streams import Streams
from pygraph_trees.edges.units import Access, Regions
from pygraph_trees.indirection.table import launches
from pygraph_trees.report.log import FunctionLog, RecordingLog
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions.function import FunctionModel

ATEN = "_ZN2at6native29vectorized_elementwise_kernelE"
UNKNOWN = "of_some_library"
POOL = 96  # bytes

_library = torch.library.Library("branches_test", "DEF")
_library.define("custom(Tensor[] given, Tensor(a!)[] out) -> ()")
_library.impl("custom", lambda given, out: None, "CPU")
ops = torch.ops.aten
custom = torch.ops.branches_test.custom.default


class Captured(TorchDispatchMode):
    """A capture of operators and of launches, with what their kernels really read and write.

    ``kernels``: how many the next call captures, each with a temporary of ``temporary`` bytes, which is free again
    before a result is allocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.api = FakeApi()
        self.stream, self.graph = self.api.make_stream(), self.api.make_graph()
        self.api.capture(self.stream, self.graph)
        self.driver, self.dependencies = Driver(self.api), Dependencies(self.api)
        self._memory = bytearray(POOL + 16)
        self.base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.api.allocations.append((self.base, POOL))
        self._storages: list[tuple[int, int, StorageWeakRef]] = []
        self.effects: dict[int, list[Access]] = {}  # by node
        self.kernels, self.temporary, self.name, self.allocated = 1, 0, ATEN, 0

    # -- memory

    def free(self, nbytes: int) -> int | None:
        """The first place between the tensors that are alive."""
        self._storages = [found for found in self._storages if not found[2].expired()]
        at = 0
        for start, end, _ in sorted(self._storages, key=lambda found: found[0]):
            if at + nbytes <= start:
                break
            at = max(at, end)
        return at if at + nbytes <= POOL else None

    def tensor(self, nbytes: int = 8) -> torch.Tensor | None:
        at = self.free(nbytes)
        if at is None:
            return None
        self.allocated += 1
        made = torch.frombuffer(memoryview(self._memory)[at : at + nbytes], dtype=torch.uint8)
        self._storages.append((at, at + nbytes, StorageWeakRef(made.untyped_storage())))
        return made

    # -- nodes

    def kernel(self, read, written, *, temporaries=(), name=ATEN, hidden=False) -> int:
        """Captures a kernel with the addresses of what it accesses, or with none."""
        found = [Access(*span_of(t), False) for t in read] + [Access(*span_of(t), True) for t in written]
        for at, nbytes in temporaries:
            found += [Access(self.base + at, self.base + at + nbytes, write) for write in (False, True)]
        words = [] if hidden else [access.start for access in found]
        node = self.api.make_kernel([*words, b"\x07\0\0\0"], name=name)
        self.api.append(self.stream, node)
        self.effects[node] = found
        return node

    def work(self, read, written, name) -> None:
        """What an operation captures before it allocates its result."""
        at = self.free(self.temporary) if self.temporary else None
        used = [] if at is None else [(at, self.temporary)]
        self.allocated += len(used)
        for number in range(self.kernels):
            self.kernel(read, written if number == self.kernels - 1 else [], temporaries=used, name=name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if func is ops.cat.default:
            self.work(leaves, [], self.name)
            made = self.tensor()
            assert made is not None
            self.kernel([], [made], name=self.name)
            return made
        if func in (ops.cat.out, ops.index_select.out):
            self.work(leaves, [kwargs["out"]], self.name)
            return kwargs["out"]
        if func is ops.add_.Tensor:
            self.work(leaves, leaves[:1], self.name)
            return args[0]
        if func is ops.native_batch_norm.out:
            self.work(leaves, [*leaves, *kwargs.values()], self.name)
            return kwargs["out"], kwargs["save_mean"], kwargs["save_invstd"]
        if func is custom:
            self.work(leaves, args[1], self.name)
            return None
        return func(*args, **kwargs)

    def units(self, operations: Operations, inputs=()):
        edges = self.dependencies.read(self.graph)
        elsewhere = Regions(filter(None, map(span_of, inputs)))
        return accesses.units_of(self.driver, self.driver.nodes(self.graph), edges, operations.found, elsewhere)

    def is_right(self, seeds: range) -> bool:
        return is_right(self.effects, self.api.edges(self.graph), seeds)


def operate(captured: Captured, kind: str, alive: list[torch.Tensor], numbers: Sequence[int]) -> bool:
    """Captures one operation of a random program on some of the tensors; returns whether the kind is one of these."""
    one, other, out = (alive[number % len(alive)] for number in numbers)
    if kind == "return" and captured.free(8) is not None:
        alive.append(ops.cat.default([one, other]))
    elif kind == "out":
        ops.cat.out([one, other], out=out)
    elif kind == "add":
        one.add_(other)
    elif kind == "unknown":
        with mock.patch.object(captured, "name", UNKNOWN):
            one.add_(other)
    elif kind == "custom":
        custom([one], [other])
    elif kind == "outside":
        captured.kernel([one], [other], hidden=True)
    else:
        return False
    return True


class FakeAutotuner:
    """A Triton kernel, whose launch captures a node."""

    custom_kernel = triton_interpret = False

    def __init__(self, captured: Captured, mutated=(), name=KNOWN) -> None:
        self._captured, self.mutated_arg_names, self._name = captured, mutated, name
        self.launchers = [lambda in_ptr0, in_ptr1, out_ptr0, xnumel, stream: None]

    def run(self, one, other, out, xnumel, stream):
        mutated = [t for t, name in ((one, "in_ptr0"), (other, "in_ptr1")) if name in self.mutated_arg_names]
        before, self._captured.stream = self._captured.stream, stream  # a launch does not ask for the current one
        self._captured.work([one, other], [out, *mutated], self._name)
        self._captured.stream = before


class FakeStream:
    def __init__(self, api: FakeApi, stream: int) -> None:
        self._api, self.cuda_stream = api, stream

    def wait_stream(self, other: FakeStream) -> None:
        self._api.wait(self.cuda_stream, other.cuda_stream)


class OnLanes(Captured):
    """A capture whose current stream may be a lane's. Memory that is moved is noted with its stream."""

    def __init__(self, lanes: int = 4) -> None:
        super().__init__()
        self.main = self.stream
        self.lanes = [FakeStream(self.api, self.api.make_stream() if lane else self.main) for lane in range(lanes)]
        self.streams = Streams(self.driver, self.dependencies, self.lanes, self.current)
        self.on: dict[int, int] = {}  # by node: its stream
        self.moved: list[int] = []  # by move: the stream
        self.held: list[torch.Tensor] = []

    @contextlib.contextmanager
    def current(self, stream):
        before, self.stream = self.stream, stream.cuda_stream
        try:
            yield
        finally:
            self.stream = before

    def kernel(self, *args, **kwargs):
        node = super().kernel(*args, **kwargs)
        self.on[node] = self.stream
        return node

    def made(self) -> torch.Tensor:
        """What generated code allocates, with memory that can be moved."""
        with _disable_current_modes():  # it calls no operator
            tensor = torch.empty(8, dtype=torch.uint8)
        self.held.append(tensor)  # addresses of the process must not be used again, unseen
        self.allocate(tensor)
        return tensor

    @contextlib.contextmanager
    def watching(self, note):
        self.allocate = note
        resize = torch.UntypedStorage.resize_

        def resized(storage, nbytes):
            if nbytes:
                assert self.api._streams[self.stream][1] == self.graph, "the lane has not joined the capture"
                self.moved.append(self.stream)
            return resize(storage, nbytes)

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    @contextlib.contextmanager
    def noted(self, *tensors, log=None, on_lanes=True, only_forecast=False):
        """Yields the edges to come, once the capture has begun."""
        log, allocated = log or RecordingLog(), None if only_forecast else lambda: self.allocated
        with (
            self,
            noting(
                *(log, self.driver, self.dependencies, lambda: self.stream, allocated, tensors, ()),
                streams=self.streams if on_lanes else None,
                watching=self.watching,
            ) as branching,
        ):
            yield branching

    def lanes_used(self) -> int:
        return len({*self.on.values()})

    def edges(self) -> set[tuple[int, int]]:
        return {*self.api.edges(self.graph)}

    def chain(self) -> set[tuple[int, int]]:
        return {*itertools.pairwise(self.driver.nodes(self.graph))}

    def launch(self, *args, mutated=()):
        FakeAutotuner(self, mutated).run(*args, 8, stream=self.main)


def side_by_side(captured, count=3, length=3, **options):
    """Chains of operations that share their input, each with memory of generated code."""
    source = captured.tensor()
    log = RecordingLog()
    with captured.noted(source, log=log, **options) as branching:
        ends = [source] * count
        for _, at in itertools.product(range(length), range(count)):
            out = captured.made()
            ops.cat.out([ends[at]], out=out)
            ends[at] = out
        assert captured.stream == captured.main
    return log, branching, ends


class BranchesTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.object(launches, "tap", tap := launches.Tap()))
        self.enterContext(mock.patch.object(branches, "tap", tap))
        self.addCleanup(tap.offer(self._put_on))

    def _put_on(self):
        patch = mock.patch.object(FakeAutotuner, "run", launches.watched(FakeAutotuner.run))
        patch.start()
        return patch.stop

    def node(self, flag, **more):
        """A recording of generated code with this value of the flag."""
        generated = SimpleNamespace(__globals__={"empty_strided_cuda": len})
        settings, log = Settings("off", "auto", "always", branches=flag), FunctionLog("f", None, "inference", 1, {})
        wrapped = SimpleNamespace(model=FunctionModel(generated, settings, log), id="f")
        known = dict.fromkeys(("live", "own", "stream")) | {"graph": "torch's", "log": RecordingLog()}
        return bare_recording(wrapped_function=wrapped, **known | more)

    @contextlib.contextmanager
    def operations(self, captured, *tensors):
        noted = Operations(
            captured.driver, captured.stream, lambda: captured.stream, lambda: captured.allocated, tensors
        )
        with captured, launches.tap.scope(noted.launch), noted:
            yield noted
