"""The memory that a run of generated code allocates: found, and exchanged for own memory while the run is captured.
Addresses in a graph pool, compared with a walk through its segments, and streams that use outputs there. Which inputs
generated code overwrites, as its source tells.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import traceback
import types
import unittest
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from fake_trees import Plain, bare_manager
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_inductor_cache
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection.pool import PoolRanges, segments_of
from pygraph_trees.native import binding
from pygraph_trees.outputs.allocations import Allocations, Block, Storage, View, generated_by_inductor, run_generated
from pygraph_trees.report.log import FunctionLog, GraphLog
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions.function import FunctionModel
from pygraph_trees.trees.managers.verification import Verification, VerificationFailed
from pygraph_trees.trees.pools import pools as owned
from pygraph_trees.trees.recordings.attempts import overwritten_inputs

F32 = torch.float32
# As Inductor writes it: an output that reuses a buffer's memory, a scratch buffer, an output, and a library's outputs.
CODE = """
def call(args):
    x, = args
    args.clear()
    buf0 = empty_strided_cuda((4,), (1,), torch.float32)
    torch.mul(x, 2, out=buf0)
    buf1 = buf0; del buf0  # reuse
    buf1.add_(1)
    buf2 = empty_strided_cuda((2, 4), (4, 1), torch.float32)
    buf2.copy_(buf1)
    buf3 = empty_strided_cuda((2,), (1,), torch.float32)
    torch.sum(buf2, 1, out=buf3)
    del buf2
    buf4 = library(x)
    inside()
    return (buf1, buf3, x, buf4[1:], buf4[:2])
"""
FIRST, SECOND = Block((0,), 0), Block((1,), 2)
COPIED, LIBRARY = Block((0,), None), Block((3, 4), None)


def generated(code=CODE, **names):
    """Returns the function ``call`` of a module of generated code that allocates on the CPU."""
    module = types.ModuleType("generated")
    module.torch, module.made, module.inside, module.library = torch, [], lambda: None, lambda x: x * 3

    def allocate(size, stride, dtype):
        module.made.append(tuple(size))
        return torch.empty_strided(size, stride, dtype=dtype)

    module.empty_strided_cuda = allocate
    vars(module).update(names)
    exec(code, vars(module))
    return module.call


def wanted(x):
    return [x * 2 + 1, (x * 2 + 1).sum().repeat(2), x, (x * 3)[1:], (x * 3)[:2]]


def function(call=None, *, mode="inference", partitions=1, has_collective=False, outputs="keep", indirection="auto"):
    settings = Settings(placement="off", indirection=indirection, selective="always", outputs=outputs)
    log = FunctionLog("f", "0/0", mode, 1, {}, GraphLog("f", "0/0", mode, (), functions=partitions))
    log.has_collective = has_collective
    return FunctionModel(call or generated(), settings, log)


def captured(is_captured=True):
    return mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: is_captured)


def addresses(*tensors):
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


class TestAllocations(TestCase):
    def setUp(self):
        super().setUp()
        self.x = torch.arange(4.0)
        self.use(CODE)

    def use(self, code, **names):
        self.call = generated(code, **names)
        self.names = self.call.__globals__

    def run_with(self, watch):
        return watch.finished(run_generated(self.call, [self.x], watch))

    def found(self):
        outputs = self.run_with(watch := Allocations())
        return watch.storages(outputs, lambda address: address not in addresses(self.x))

    def test_outputs_are_found_in_the_storages_that_the_run_allocates(self):
        """An input is none of them. Libraries allocate in the graph pool."""
        first, second, library = self.found()
        self.assertEqual(first, Storage((View(0, (4,), (1,), 0, F32),), 0, 16, (4,), (1,), F32))
        self.assertEqual(second, Storage((View(1, (2,), (1,), 0, F32),), 2, 8, (2,), (1,), F32))
        views = View(3, (3,), (1,), 1, F32), View(4, (2,), (1,), 0, F32)
        self.assertEqual(library, Storage(views, None, 16, (16,), (1,), torch.uint8))
        self.assertEqual((first.block, second.block, library.block), (FIRST, SECOND, LIBRARY))
        others = "buf3[1:], buf3.view(torch.int32), buf1[:0], None, 7, buf4.to(torch.cfloat).conj(), buf3._neg_view()"
        self.use(CODE.replace("buf1, buf3, x, buf4[1:], buf4[:2]", others))
        whole = View(1, (2,), (1,), 0, torch.int32)
        self.assertEqual(self.found(), (Storage((View(0, (1,), (1,), 1, F32), whole), 2, 8, (2,), (1,), F32),))

    def test_memory_that_a_freed_buffer_had_is_a_librarys(self):
        buffer = torch.empty(2, 4)

        def at_buffer(*_):  # a new storage in the same memory each time
            return torch.from_dlpack(torch.utils.dlpack.to_dlpack(buffer))

        def allocate(size, stride, dtype):
            return at_buffer() if size == (2, 4) else torch.empty_strided(size, stride, dtype=dtype)

        self.use(CODE.replace("buf3, x, buf4[1:], buf4[:2]", "buf4"), empty_strided_cuda=allocate, library=at_buffer)
        self.assertEqual([storage.block for storage in self.found()], [FIRST, Block((1,), None)])

    def test_given_memory_is_used_instead(self):
        """Generated code gets it, in the layout that it asks for; the storages of libraries are copied to it."""
        given = {FIRST: torch.empty(2, 2).t(), SECOND: torch.empty(2), LIBRARY: torch.empty(16, dtype=torch.uint8)}
        outputs = self.run_with(Allocations(given))
        self.assertEqual(list(outputs), wanted(self.x))
        self.assertEqual(addresses(*outputs), addresses(*list(given.values())[:2], self.x, *[given[LIBRARY]] * 2))
        self.assertEqual(self.names["made"], [(2, 4)])
        outputs = self.run_with(Allocations({COPIED: given[FIRST]}))  # generated, but copied
        self.assertEqual((list(outputs), addresses(outputs[0])), (wanted(self.x), addresses(given[FIRST])))

    def test_memory_that_does_not_fit_is_not_used(self):
        """It has another size, or the outputs are no longer in one storage."""
        given = torch.empty(8)[::2]
        for block, other in ((FIRST, given), (COPIED, given), (LIBRARY, given), (Block((0, 3), None), torch.empty(4))):
            outputs = self.run_with(Allocations({block: other}))
            self.assertEqual(list(outputs), wanted(self.x))
            self.assertNotIn(other.data_ptr(), addresses(*outputs))

    def test_a_method_runs_with_its_own_names_and_the_module_stays_as_it_is(self):
        """So do the functions that it calls: those of subgraphs, and of partitions."""
        runner = types.SimpleNamespace()
        for head, tail in (
            ("def call(self, args):", ""),
            ("def subgraph(args):", "def call(self, args):\n    return subgraph(args)"),
            ("def partition(args):", "def call(self, args):\n    return self.partitions[0](args)"),
        ):
            self.use(CODE.replace("def call(args):", head) + tail)
            runner.partitions = [self.names.get("partition")]
            names, given = dict(self.names), torch.empty(4)
            watch = Allocations({FIRST: given})
            outputs = run_generated(types.MethodType(self.call, runner), [self.x], watch)
            self.assertEqual((list(outputs), addresses(outputs[0])), (wanted(self.x), addresses(given)))
            self.assertEqual((self.names, runner.partitions), (names, [names.get("partition")]))
            gone = weakref.ref(watch)
            del watch
            self.assertIsNone(gone())  # no cycle is left

    def test_a_traceback_tells_the_module_of_a_run_that_raised(self):
        """What its frames hold is freed once it is known that they are not the program's."""
        self.use(CODE, library=lambda _: 1 / 0)
        found = []
        try:
            self.run_with(Allocations())
        except ZeroDivisionError as error:  # unittest would drop its traceback
            found += [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "call"]
        self.assertEqual([frame.f_globals for frame in found], [{"__name__": "generated"}])

    def test_code_that_inductor_did_not_generate_cannot_be_watched(self):
        self.assertTrue(generated_by_inductor(self.call))
        for other in (wanted, len, torch.nn.Linear(1, 1), types.MethodType(wanted, 1)):
            self.assertFalse(generated_by_inductor(other))


class TestFunction(TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.function = torch.arange(4.0), function()
        self.function.outputs.takes, self.function.outputs.call.blocks = 1, (FIRST, LIBRARY)
        self.given = [torch.empty(4), torch.empty(16, dtype=torch.uint8)]

    def test_only_a_captured_run_writes_to_own_memory(self):
        """And only if it is that of the present blocks."""
        now = self.function.outputs.call.blocks
        for blocks, is_captured, is_written in (([FIRST], True, False), (now, False, False), (now, True, True)):
            self.function.outputs.call.blocks, inputs = blocks, [self.x, *self.given]
            with captured(is_captured):
                outputs = self.function(inputs)
            self.assertEqual((inputs, list(outputs)), ([], wanted(self.x)))
            self.assertEqual(addresses(outputs[0], outputs[4]) == addresses(*self.given), is_written)
        gone = [weakref.ref(tensor) for tensor in self.given]
        del self.given, outputs
        gc.collect()
        self.assertEqual([reference() for reference in gone], [None, None])  # nobody keeps it
        self.assertEqual(list(self.function([self.x])), wanted(self.x))  # without own memory
        other = FunctionModel.of(lambda inputs: [len(inputs)], is_backward=False, is_inference=True)
        self.assertEqual(other([self.x] * 3), [3])

    def test_a_gradient_that_is_returned_twice_has_two_memories_in_a_recording(self):
        """Autograd takes both over. It copies one that un-graphed code gives twice, as it is the same tensor."""
        code = (
            "def call(args):\n    (x,) = args\n    args.clear()\n    y = x * 2\n    return (y, None, y, None, 7, 7, y)"
        )
        for mode, is_watched, is_recorded, count in (
            *(("backward", False, False, 1), ("backward", True, False, 3), ("backward", False, True, 3)),
            *(("inference", True, False, 1), ("inference", False, True, 1)),
        ):
            made = function(generated(code), mode=mode)
            made.outputs.call.watch = Allocations() if is_watched else None
            with captured(is_recorded), mock.patch.object(torch.cuda, "is_initialized", lambda: True):
                found = list(made([self.x]))
            self.assertEqual(found, [self.x * 2, None, self.x * 2, None, 7, 7, self.x * 2])
            self.assertEqual(len(set(addresses(found[0], found[2], found[6]))), count)

    def test_calls_of_the_same_code_during_another_allocate(self):
        """A finalizer, an operator of the program or another thread can make one."""
        names, calls = self.function.model.__globals__, []

        def inside():
            names["inside"] = lambda: None
            with ThreadPoolExecutor(1) as other:
                for function in (self.function, self.function.model):
                    calls.append(other.submit(function, [self.x + 5]).result(60))
            calls.append(self.function([self.x + 5]))

        names["inside"] = inside
        with captured():
            outputs = self.function([self.x, *self.given])
        self.assertEqual((list(outputs), addresses(outputs[0])), (wanted(self.x), addresses(self.given[0])))
        self.assertEqual([list(found) for found in calls], [wanted(self.x + 5)] * 3)

    def test_only_one_run_is_watched(self):
        self.function.outputs.call.watch = watch = Allocations()
        outputs = self.function([self.x])
        self.function([self.x + 1])
        self.assertIsNone(self.function.outputs.call.watch)
        self.assertEqual([storage.block for storage in watch.storages(outputs, lambda _: False)], [FIRST, SECOND])


def verified(model, result):
    """A recording whose graph copies ``result(x)``, allocated by a library, to its last input."""
    given, live = [], mock.Mock(items=[Plain(index=0), Plain(index=1)], outputs={0: (1, None)})
    live.addresses = Plain(prepare=lambda inputs: given.__setitem__(slice(None), inputs), extra_copies=0)
    live.addresses.extra_copied_bytes = 0
    live.output, live.kernels_of = lambda index, view: given[index], lambda index: []
    made = mock.Mock(wrapped_function=Plain(model=model, placeholders=()), live=live, own=Plain(takes=1))
    made.static_input_idxs = made.reconstructed_inputs = ()
    made.replay_for_verification = lambda: given[1].copy_(result(given[0]))
    return made


class TestVerification(TestCase):
    def check(self, result):
        x = torch.arange(4.0)
        code = (
            "def call(args):\n    x, = args\n    args.clear()\n"
            "    assert (x.shape, x.stride()) == ((4,), (1,))\n    return (torch.mul(x, 2),)"
        )
        model = function(generated(code))
        model.outputs.takes, model.outputs.call.blocks = 1, (COPIED,)
        with captured(False):
            Verification([x, torch.full_like(x * 2, -1)], [0]).check(verified(model, result), [x * 2], "f")

    def test_own_memory_is_compared_as_an_output(self):
        """The graph writes to own memory; un-graphed code does not."""
        self.check(lambda x: x * 2)
        self.assertRaisesRegex(VerificationFailed, "output 0", self.check, lambda x: x * 3)


MIB = 1 << 20
_CUDA = int(torch._C._autograd.DeviceType.CUDA)

gaps_and_sizes = st.tuples(st.integers(0, 3), st.integers(1, 3))  # gap 0: segments that touch
pools = st.lists(gaps_and_sizes, max_size=12).flatmap(
    lambda pairs: st.permutations(
        [
            {"address": (sum(g + n for g, n in pairs[:i]) + pairs[i][0]) * 2 * MIB, "total_size": pairs[i][1] * 2 * MIB}
            for i in range(len(pairs))
        ]
    )
)


def holds(segments, address: int) -> bool:
    return any(s["address"] <= address < s["address"] + s["total_size"] for s in segments)


class TestPoolRanges(TestCase):
    def test_a_snapshot_leaves_the_pools_id_as_it_was(self):
        """Torch's releases each number that it is given, up to 2.14. Python keeps only the small ones for ever."""
        pool = (0, int("1000"))
        held = sys.getrefcount(pool[1])

        def snapshot(pool_id, include_traces):
            for number in (*pool_id, include_traces):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
            return []

        with mock.patch.object(torch.cuda, "memory_snapshot", snapshot):
            for _ in range(3):
                self.assertEqual(segments_of(pool), [])
        self.assertEqual(sys.getrefcount(pool[1]), held)

    @settings(max_examples=200, deadline=None)
    @example([([], False, [0, 1, 1 << 47])])  # an empty pool is asked once
    @given(st.lists(st.tuples(pools, st.booleans(), st.lists(st.integers(0, 80 * MIB), max_size=4)), max_size=6))
    def test_what_lies_in_a_segment_is_held_until_ranges_are_forgotten(self, steps):
        snapshot = mock.Mock(side_effect=lambda: iter(segments))
        ranges, known, snapshots = PoolRanges(snapshot), None, 0
        for segments, forgotten, addresses in steps:
            if forgotten:
                ranges.forget()
                known = None
            edges = [edge for s in segments for edge in (s["address"], s["address"] + s["total_size"])]
            for address in (*addresses, *(edge + by for edge in edges for by in (-1, 0, 1))):
                if known is None:
                    known, snapshots = segments, snapshots + 1
                self.assertEqual(ranges.holds(address), holds(known, address), hex(address))
            self.assertEqual(snapshot.call_count, snapshots)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestStreams(TestCase):
    def test_streams_that_use_an_output_are_known_until_its_step_ends(self):
        manager, pool = bare_manager(), (0, 77)
        manager.current_gen = 3
        output, other = torch.ones(4), torch.ones(4)
        one, two = (torch.Stream(device_type=_CUDA, device_index=0, stream_id=number) for number in (33, 35))
        self.enterContext(mock.patch.object(owned, "OWNED", WeakValueDictionary({pool: manager})))
        self.enterContext(mock.patch.object(owned, "holds", lambda _, storage: storage.data_ptr() != other.data_ptr()))
        for tensor, stream in ((output, one), (output[1:], one), (output, two), (other, one)):
            owned.note_stream(tensor, stream)
        self.assertEqual(owned.streams_that_use(pool, output.untyped_storage()), [one, two])
        self.assertEqual(owned.streams_that_use(pool, other.untyped_storage()), [])
        self.assertEqual(owned.streams_that_use((0, 78), output.untyped_storage()), [])
        manager.current_gen = 4
        self.assertEqual(owned.streams_that_use(pool, output.untyped_storage()), [])
        owned.note_stream(output, two)
        self.assertEqual(owned.streams_that_use(pool, output.untyped_storage()), [two])
        self.assertRaises(TypeError, manager.streams_in_use, output)
        self.assertRaises(TypeError, manager.note_use, "no tensor", 0, 33)


WEIGHT = torch.rand(8, 8)


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x @ WEIGHT) * scale


class TestOverwrittenInputs(TestCase):
    def test_a_donated_buffer_is_overwritten(self):
        found: dict[bool, Any] = {}
        overwritten: dict[bool, frozenset[int]] = {}
        upstream = CompiledFxGraph.post_compile

        def post_compile(artifact: Any, inputs: Any, constants: Any, kwargs: Any) -> None:
            code, backward = artifact.current_callable, bool(kwargs["is_backward"])
            found[backward], overwritten[backward] = code, overwritten_inputs(code, 3, is_backward=backward)
            upstream(artifact, inputs, constants, kwargs)

        with fresh_inductor_cache(), mock.patch.object(CompiledFxGraph, "post_compile", post_compile):
            torch.compile(scaled)(torch.rand(4, 8), torch.rand(4, 8, requires_grad=True)).sum().backward()
        self.assertEqual(overwritten, {False: set(), True: {0}})  # of the product and the tangent
        # Its file is gone, the next ones do not unpack inputs: Inductor may have generated C++.
        for code in (found[True], torch.nn.Identity(), functools.partial(scaled), scaled):
            self.assertEqual(overwritten_inputs(code, 2, is_backward=True), {0, 1})
            self.assertEqual(overwritten_inputs(code, 2, is_backward=False), set())


if __name__ == "__main__":
    run_tests()
