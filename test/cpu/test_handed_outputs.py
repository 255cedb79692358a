"""Outputs in memory that each call provides, and the allocation of generated code that holds each output."""

from __future__ import annotations

import gc
import sys
import threading
import types
import unittest
import weakref
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
from bare_manager import bare_manager
from fake_trees import Live, Plain, Trees
from torch._inductor.cudagraph_utils import PlaceholderInfo
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection.routes import Decision, Route
from pygraph_trees.native import binding
from pygraph_trees.report.log import FunctionLog, GraphLog
from pygraph_trees.settings import Settings
from pygraph_trees.trees import handing_out, input_rules
from pygraph_trees.trees.allocations import (
    Allocations,
    Memory,
    generated_by_inductor,
    is_watching,
    memory_of_libraries,
    watching,
)
from pygraph_trees.trees.function import FunctionModel
from pygraph_trees.trees.handed_outputs import Handed, OutputPlan, Templates, given_memory
from pygraph_trees.trees.verification import Verification, VerificationFailed

CPU = torch.device("cpu")
# Code as Inductor writes it: a freed buffer, an output that reuses its memory, a scratch buffer, and an output.
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
    inside()
    return (buf1, buf3, x)
"""


def generated(code=CODE, **names):
    """Returns the function ``call`` of a module of generated code that allocates on the CPU."""
    module = types.ModuleType("generated")
    module.torch, module.made, module.inside = torch, [], lambda: None

    def allocate(size, stride, dtype):
        module.made.append(tuple(size))
        return torch.empty_strided(size, stride, dtype=dtype)

    module.empty_strided_cuda = allocate
    vars(module).update(names)
    exec(code, vars(module))
    return module.call


def wanted(x):
    return [x * 2 + 1, (x * 2 + 1).sum().repeat(2), x]


def function(call=None, *, outputs="keep", mode="inference", partitions=1):
    settings = Settings(placement="off", indirection="auto", selective="always", outputs=outputs)
    graph = GraphLog("f", "0/0", mode, (), functions=partitions)
    return FunctionModel(call or generated(), settings, FunctionLog("f", "0/0", mode, 1, {}, graph))


class TestAllocations(TestCase):
    def setUp(self):
        super().setUp()
        self.call = generated()
        self.names = self.call.__globals__
        self.x = torch.arange(4.0)

    def found(self):
        with watching(self.call, watch := Allocations()):
            outputs = self.call([self.x])
        self.assertEqual(list(outputs), wanted(self.x))
        return watch.memory_of(outputs)

    def test_each_output_is_found_in_its_allocation(self):
        expected = {0: Memory(0, (4,), (1,), torch.float32), 1: Memory(2, (2,), (1,), torch.float32)}
        self.assertEqual(self.found(), expected)  # the input is not an allocation

    def test_given_memory_is_used_instead(self):
        memory = self.found()
        self.names["made"].clear()
        given = [torch.empty(4), torch.empty(2)]
        templates = Templates(Handed.of(memory), memory, CPU, OutputPlan())
        with watching(self.call, templates.allocations(given)):
            outputs = self.call([self.x])
        self.assertIs(outputs[0], given[0])
        self.assertIs(outputs[1], given[1])
        self.assertEqual(list(outputs), wanted(self.x))
        self.assertEqual(self.names["made"], [(2, 4)])

    def test_memory_of_another_layout_is_not_used(self):
        for other in (torch.empty(5), torch.empty(8)[::2], torch.empty(4, dtype=torch.float64)):
            with watching(self.call, Allocations({0: other})):
                outputs = self.call([self.x])
            self.assertIsNot(outputs[0], other)
            self.assertEqual(outputs[0], self.x * 2 + 1)

    def test_views_and_empty_outputs(self):
        code = CODE.replace("return (buf1, buf3, x)", "return (buf3[1:], buf3, buf1[:0], None, 7)")
        self.call = generated(code)
        with watching(self.call, watch := Allocations()):
            outputs = self.call([self.x])
        self.assertEqual({n: m.number for n, m in watch.memory_of(outputs).items()}, {0: 2})

    def test_an_output_in_memory_that_a_freed_buffer_had_is_not_in_its_allocation(self):
        code = CODE.replace("del buf2\n", "del buf2\n    buf4 = library()\n").replace("buf3, x)", "buf4)")
        buffer = torch.empty(8)

        def at_buffer():
            """A new storage in the same memory each time."""
            return torch.from_dlpack(torch.utils.dlpack.to_dlpack(buffer)).view(2, 4)

        def allocate(size, stride, dtype):
            return at_buffer() if size == (2, 4) else torch.empty_strided(size, stride, dtype=dtype)

        self.call = generated(code, empty_strided_cuda=allocate, library=at_buffer)
        with watching(self.call, watch := Allocations()):
            outputs = self.call([self.x])
        self.assertEqual(outputs[1].data_ptr(), buffer.data_ptr())
        self.assertEqual({n: m.number for n, m in watch.memory_of(outputs).items()}, {0: 0})

    def test_outputs_that_a_library_allocates(self):
        own, base = torch.empty(2, 3).t(), torch.empty(8)
        outputs = [own, base[:4], base, base, torch.empty(4, 4)[:, 0], torch.empty(0), None, 3, torch.empty(5)[1:]]
        outputs += [torch.empty(2, dtype=torch.complex64).conj(), torch.empty(1).expand(3), self.x]
        found = memory_of_libraries(outputs, lambda address: address != self.x.data_ptr())
        self.assertEqual(found, {0: Memory(None, (3, 2), (1, 3), torch.float32)})

    def test_the_graph_copies_the_output_of_a_library(self):
        memory = {1: Memory(None, (2,), (1,), torch.float32), 0: Memory(0, (4,), (1,), torch.float32)}
        given = [torch.empty(2), torch.empty(4)]
        for is_capturing in (True, False):
            watch = Templates(Handed.of(memory), memory, CPU, OutputPlan()).allocations(given)
            with (
                mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: is_capturing),  # noqa: B023
                watching(self.call, watch),
            ):
                outputs = watch.finished(self.call([self.x]))
            self.assertEqual(list(outputs), wanted(self.x))
            self.assertIs(outputs[0], given[1])
            self.assertEqual(outputs[1] is given[0], is_capturing)

    def test_an_output_of_another_layout_is_not_copied(self):
        for other in (torch.empty(3), torch.empty(4)[::2], torch.empty(2, dtype=torch.int64)):
            with (
                mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
                watching(self.call, watch := Allocations(copied_to={1: other})),
            ):
                outputs = watch.finished(self.call([self.x]))
            self.assertIsNot(outputs[1], other)

    def test_the_module_is_as_before_afterwards(self):
        before = self.names["empty_strided_cuda"]
        self.names["inside"] = mock.Mock(side_effect=ValueError)
        with self.assertRaises(ValueError), watching(self.call, Allocations()):
            self.call([self.x])
        self.assertIs(self.names["empty_strided_cuda"], before)
        self.assertFalse(is_watching())
        with watching(self.call, Allocations()), watching(self.call, Allocations()):
            self.assertIsNot(self.names["empty_strided_cuda"], before)
        self.assertIs(self.names["empty_strided_cuda"], before)

    def test_another_thread_allocates_as_before(self):
        given, others = torch.empty(4), []

        def inside():
            self.names["inside"] = lambda: None
            thread = threading.Thread(target=lambda: others.append(self.call([self.x + 5])))
            thread.start()
            thread.join(60)

        self.names["inside"] = inside
        with watching(self.call, Allocations({0: given})):
            outputs = self.call([self.x])
        self.assertIs(outputs[0], given)
        self.assertEqual(list(others[0]), wanted(self.x + 5))
        self.assertIsNot(others[0][0], given)

    def test_code_that_inductor_did_not_generate(self):
        def plain(inputs):
            return inputs

        self.assertTrue(generated_by_inductor(self.call))
        for other in (plain, len, torch.nn.Linear(1, 1), types.MethodType(plain, 1)):
            self.assertFalse(generated_by_inductor(other))
        with watching(plain, Allocations()):
            self.assertFalse(is_watching())


class TestFunction(TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.function = torch.arange(4.0), function()
        self.function.outputs.takes = 1
        handed = Handed((0, 1), (0, 2))
        found = {0: Memory(0, (4,), (1,), torch.float32), 1: Memory(2, (2,), (1,), torch.float32)}
        self.templates = Templates(handed, found, CPU, self.function.outputs)

    def test_inputs_that_are_memory_for_outputs(self):
        given = self.templates.allocate()
        self.assertEqual(
            [(tuple(t.shape), t.stride(), t.dtype) for t in given],
            [((4,), (1,), torch.float32)] + [((2,), (1,), torch.float32)],
        )
        inputs = [self.x, *given]
        with given_memory(self.templates):
            outputs = self.function(inputs)
        self.assertEqual(inputs, [])
        self.assertEqual(list(outputs), wanted(self.x))
        self.assertIs(outputs[0], given[0])

    def test_a_call_without_memory_allocates(self):
        with given_memory(self.templates):
            self.assertEqual(list(self.function([self.x])), wanted(self.x))

    def test_a_call_inside_of_another_gets_memory_of_its_own(self):
        """A finalizer or an operator of the program can make one: the same code, with the same order of allocations."""
        inner = []

        def inside():
            self.function.model.__globals__["inside"] = lambda: None
            inner.append(self.function([self.x + 5]))

        self.function.model.__globals__["inside"] = inside
        given = self.templates.allocate()
        with given_memory(self.templates):
            outputs = self.function([self.x, *given])
        self.assertEqual(list(outputs), wanted(self.x))
        self.assertEqual(list(inner[0]), wanted(self.x + 5))

    def test_the_memory_of_a_call_is_not_anothers(self):
        """A function that was never warmed up takes as many inputs as the other one hands out outputs."""
        other, seen = FunctionModel.of(lambda inputs: [len(inputs)], is_backward=False, is_inference=True), []
        with given_memory(self.templates):
            seen += other([self.x, torch.ones(1)])
        self.assertEqual(seen, [2])

    def test_only_one_run_is_watched(self):
        self.function.outputs.watch = watch = Allocations()
        outputs = self.function([self.x])
        self.function([self.x + 1])
        self.assertIsNone(self.function.outputs.watch)
        self.assertEqual({n: m.number for n, m in watch.memory_of(outputs).items()}, {0: 0, 1: 2})

    def test_nothing_given_is_kept(self):
        given = self.templates.allocate()
        gone = [weakref.ref(tensor) for tensor in given]
        with given_memory(self.templates):
            outputs = self.function([self.x, *given])
        del outputs, given
        gc.collect()
        self.assertEqual([reference() for reference in gone], [None, None])


class _Verified:
    """A recording whose graph copies ``result(x)``, allocated by a library, to its last input."""

    static_input_idxs, reconstructed_inputs = (), ()

    def __init__(self, model, templates, result):
        self.wrapped_function, self.templates, self._result = Plain(model=model, placeholders=()), templates, result
        self.items, self.outputs = [Plain(index=0), Plain(index=1)], {0: (1, None)}
        self.live = self.addresses = self
        self.extra_copies = self.extra_copied_bytes = 0

    def prepare(self, inputs):
        self._given = list(inputs)

    def replay_for_verification(self):
        self._given[1].copy_(self._result(self._given[0]))

    def output(self, index, view):
        return self._given[index]

    def kernels_of(self, index):
        return []

    def _nothing(self, *_):
        pass

    take = copy_in = finish = drop = _copy_inputs_and_remove_from_src = _nothing


class TestVerification(TestCase):
    def check(self, result, x=None):
        x = torch.arange(4.0) if x is None else x
        code = (
            "def call(args):\n    x, = args\n    args.clear()\n"
            f"    assert (tuple(x.shape), x.stride()) == {(tuple(x.shape), x.stride())}\n"
            "    return (torch.mul(x, 2),)"
        )
        model = function(generated(code))
        model.outputs.takes, found = 1, {0: Memory(None, tuple(x.shape), (x * 2).stride(), x.dtype)}
        templates = Templates(Handed.of(found), found, CPU, model.outputs)
        is_capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
        with is_capturing, given_memory(templates):
            inputs = [x, *(memory.fill_(-1) for memory in templates.allocate())]
            Verification(inputs, [0]).check(_Verified(model, templates, result), [x * 2], "f")

    def test_the_output_of_a_library(self):
        """The graph writes it to the memory it was given; un-graphed, it has its own memory."""
        self.check(lambda x: x * 2)
        with self.assertRaisesRegex(VerificationFailed, "output 0"):
            self.check(lambda x: x * 3)

    def test_inputs_keep_the_layouts_that_were_compiled_for(self):
        """Compiled code asserts them, also for inputs on the CPU and for views that a copy resolves."""
        numbers = torch.arange(8.0)
        for x in (numbers[::2], numbers[:1].expand(4), torch._neg_view(numbers[::2]), torch.empty(4, 0).t()):
            self.check(lambda x: x * 2, x)
        self.check(lambda x: x * 2, torch.complex(numbers, -numbers)[1::2].conj())


@unittest.skipIf(binding.extension is None, "outputs are torch's")
class TestHandingOut(TestCase):
    ID = 7

    def setUp(self):
        super().setUp()
        for name in ("uses_addresses", "knows_its_writes"):
            self.enterContext(mock.patch.object(input_rules, name, lambda model: True))
        self.enterContext(mock.patch.object(handing_out.torch, "device", lambda *_: CPU))
        self.x, self.again = torch.arange(4.0), []

    def manager(self, model, mutated=()):
        names = [PlaceholderInfo("x", None, [], None)]
        wrapped = _Wrapped(model, mutated, names)
        manager = bare_manager(ids_to_funcs={self.ID: wrapped})
        manager.reclaiming = Plain(record_again=lambda id_, why: self.again.append((id_, why)))
        return manager

    def warmed_up(self, model, manager):
        inputs = [self.x]
        with manager.handing_out.watched(manager, self.ID, inputs) as found:
            outputs = model(inputs)
        found(outputs, lambda address: address != self.x.data_ptr())
        return manager

    def inputs(self, manager):
        inputs = [self.x]
        with manager.handing_out.call(manager, self.ID, inputs):
            pass
        return [tuple(value.shape) for value in inputs]

    def test_outputs_of_inference_are_handed_out_after_the_warm_up(self):
        manager = self.warmed_up(model := function(), self.manager(model, mutated=(0,)))
        self.assertEqual(self.inputs(manager), [(4,), (4,), (2,)])
        wrapped = manager.ids_to_funcs[self.ID]
        self.assertEqual(wrapped.mutated_input_idxs, (0, 1, 2))
        self.assertEqual([p.name for p in wrapped.placeholders], ["x", "output 0", "output 1"])
        inputs = [self.x]
        with manager.handing_out.call(manager, self.ID, inputs):
            given = inputs[1:]
            outputs = model(inputs)
        self.assertIs(outputs[1], given[1])
        self.assertEqual(list(outputs), wanted(self.x))

    def test_a_tangent_without_memory(self):
        self.x = torch._efficientzerotensor(4)
        model = function(generated("def call(args):\n    return (torch.ones(4),)"), mode="backward")
        manager = self.manager(model)
        with manager.handing_out.watched(manager, self.ID, [self.x]) as found:
            outputs = model([self.x])
        found(outputs, lambda address: True)
        node = Plain(wrapped_function=Plain(model=model))
        for _ in range(2):
            model.log.output_moved(0, 16)
            manager.handing_out.moved(manager, [node])
        self.assertEqual((model.outputs.handed.outputs, model.outputs.handed.allocations), ((0,), (None,)))

    def test_others_are_not_at_first(self):
        for model in (function(mode="forward"), function(partitions=2), function(outputs="upstream")):
            manager = self.warmed_up(model, self.manager(model))
            self.assertEqual(self.inputs(manager), [(4,)])
            self.assertEqual(manager.ids_to_funcs[self.ID].mutated_input_idxs, ())

    def test_code_that_is_not_generated_and_functions_without_addresses(self):
        model = function(lambda inputs: [inputs[0] + 1])
        self.assertEqual(self.inputs(self.warmed_up(model, self.manager(model))), [(4,)])
        with mock.patch.object(input_rules, "uses_addresses", lambda model: False):
            model = function()
            self.assertEqual(self.inputs(self.warmed_up(model, self.manager(model))), [(4,)])

    def test_an_output_that_outlived_two_steps_is_handed_out(self):
        model = function(mode="backward")
        manager, node = self.warmed_up(model, self.manager(model)), Plain(wrapped_function=Plain(model=model))
        for times in range(2):
            self.assertEqual((self.again, self.inputs(manager)), ([], [(4,)]))
            manager._candidates["known"] = {}
            model.log.output_moved(1, 8)
            manager.handing_out.moved(manager, [node])
            self.assertEqual((bool(manager._candidates), manager.handing_out.changes_next), (times == 0, times == 1))
        self.assertEqual(self.inputs(manager), [(4,), (2,)])
        self.assertEqual([id_ for id_, _ in self.again], [self.ID])
        manager.handing_out.moved(manager, [node])
        self.assertEqual(len(self.again), 1)

    def test_the_call_that_finds_it_goes_on_without_memory(self):
        model = function(mode="backward")
        manager, node = self.warmed_up(model, self.manager(model)), Plain(wrapped_function=Plain(model=model))
        inputs = [self.x]
        with manager.handing_out.call(manager, self.ID, inputs):
            for _ in range(2):
                model.log.output_moved(1, 8)
                manager.handing_out.moved(manager, [node])
            self.assertEqual((len(inputs), self.again), (1, []))
            self.assertEqual(manager.ids_to_funcs[self.ID].mutated_input_idxs, ())
        self.assertEqual(self.inputs(manager), [(4,), (2,)])

    def test_an_output_of_a_library_is_after_it_outlived_two_steps(self):
        code = CODE.replace("torch.sum(buf2, 1, out=buf3)", "buf3 = torch.sum(buf2, 1)")
        model = function(generated(code))
        manager, node = self.warmed_up(model, self.manager(model)), Plain(wrapped_function=Plain(model=model))
        self.assertEqual((model.outputs.handed.outputs, self.inputs(manager)), ((0,), [(4,), (4,)]))
        for _ in range(2):
            model.log.output_moved(1, 8)
            manager.handing_out.moved(manager, [node])
        self.assertEqual(self.inputs(manager), [(4,), (4,), (2,)])
        self.assertEqual(
            dict(zip(model.outputs.handed.outputs, model.outputs.handed.allocations, strict=True)), {0: 0, 1: None}
        )

    def test_an_output_without_an_allocation_never_is(self):
        model = function(mode="backward")
        manager, node = self.warmed_up(model, self.manager(model)), Plain(wrapped_function=Plain(model=model))
        for _ in range(3):
            model.log.output_moved(2, 16)
            manager.handing_out.moved(manager, [node])
        self.assertEqual((self.again, model.outputs.not_handed, self.inputs(manager)), ([], {2}, [(4,)]))

    def test_an_output_that_cannot_be_given_by_address_stays_in_the_pool(self):
        manager = self.warmed_up(model := function(), self.manager(model))
        with manager.handing_out.call(manager, self.ID, []):
            templates = handing_out.templates_of_call()
        model.refused = {0: "its own", 1: "hidden"}
        decisions = {1: Decision(Route.COPY, "hidden"), 2: Decision(Route.PATCH, None)}
        returned = {0: (1, None), 1: (2, None)}
        node = Plain(templates=templates, live=Plain(decisions=decisions, outputs=returned))
        manager.handing_out.recorded(manager, model, node)
        self.assertEqual(self.inputs(manager), [(4,), (2,)])
        self.assertEqual((len(self.again), model.outputs.not_handed, model.refused), (1, {0}, {0: "its own"}))
        manager.handing_out.recorded(manager, model, node)  # this recording was made with earlier templates
        self.assertEqual(len(self.again), 1)

    def test_memory_in_which_no_output_is_returned_is_not_given_again(self):
        """A library allocated the output where an earlier buffer had been."""
        manager = self.warmed_up(model := function(), self.manager(model))
        with manager.handing_out.call(manager, self.ID, []):
            templates = handing_out.templates_of_call()
        decisions = {index: Decision(Route.PATCH, None) for index in (1, 2)}
        live = Plain(decisions=decisions, outputs={1: (2, None)})
        manager.handing_out.recorded(manager, model, Plain(templates=templates, live=live))
        self.assertEqual((self.inputs(manager), model.outputs.not_handed), ([(4,), (2,)], {0}))

    def test_all_stay_if_no_input_is_given_by_address(self):
        manager = self.warmed_up(model := function(), self.manager(model))
        with manager.handing_out.call(manager, self.ID, []):
            node = Plain(templates=handing_out.templates_of_call(), live=None)
        manager.handing_out.recorded(manager, model, node)
        self.assertEqual((self.inputs(manager), model.outputs.handed), ([(4,)], Handed()))

    def test_a_call_inside_of_another_has_templates_of_its_own(self):
        manager = self.warmed_up(model := function(), self.manager(model))
        with manager.handing_out.call(manager, self.ID, []):
            with manager.handing_out.call(manager, "another", inputs := [self.x]):
                self.assertIsNone(handing_out.templates_of_call())
            self.assertIsNotNone(handing_out.templates_of_call())
        self.assertEqual(len(inputs), 1)


class _Wrapped:
    """Upstream's WrappedFunction with only the fields that are read; ``dataclasses.replace`` works on it."""

    def __new__(cls, model, mutated, placeholders):
        from torch._inductor.cudagraph_utils import WrappedFunction

        made = WrappedFunction.__new__(WrappedFunction)
        for name in WrappedFunction.__dataclass_fields__:
            object.__setattr__(made, name, None)
        for name, value in (("model", model), ("mutated_input_idxs", mutated), ("placeholders", placeholders)):
            object.__setattr__(made, name, value)
        return made


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestFastPath(TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.y = torch.arange(4.0), torch.arange(2.0)
        found = {0: Memory(0, (4,), (1,), torch.float32), 1: Memory(2, (2, 3), (3, 1), torch.float64)}
        self.templates = Templates(Handed.of(found), found, CPU, OutputPlan())

    def trees(self, templates, **arguments):
        """Trees with a recording that returns its third and fourth inputs, which are memory for outputs."""
        live = Live([0, 2, 3], None, outputs={0: (2, None), 1: (3, None)})
        trees = Trees({1: self.y}, [None, None], live=live, templates=templates, **arguments)
        trees.live.native.unsettle()
        return trees

    def test_each_call_gets_new_memory(self):
        trees = self.trees(self.templates)
        trees.function.handed = self.templates.native
        call, held = trees.entry(), []
        for _ in range(3):
            inputs = [self.x, self.y]
            held.append(call(inputs))
            self.assertEqual(inputs, [])
        seen = {tensor.data_ptr() for outputs in held for tensor in outputs}
        self.assertEqual(len(seen), 6)
        for first, second in held:
            self.assertEqual((first.shape, second.shape), ((4,), (2, 3)))
            self.assertEqual((first.dtype, second.dtype), (torch.float32, torch.float64))
        self.assertEqual(trees.graph.launches, 3)
        asked, addresses = trees.live.prepared[-1]
        self.assertEqual(addresses[1:], [tensor.data_ptr() for tensor in held[-1]])
        self.assertEqual(len(asked), 4)

    def test_in_another_order(self):
        trees = self.trees(self.templates)
        trees.function.handed = self.templates.native
        outputs = trees.entry(order=[1, 0])([self.y, self.x])
        self.assertEqual([tuple(output.shape) for output in outputs], [(4,), (2, 3)])
        self.assertEqual(trees.live.prepared[-1][1][0], self.x.data_ptr())

    def test_a_refused_call_has_its_inputs_back(self):
        trees = self.trees(self.templates)
        trees.function.handed = self.templates.native
        trees.live.answer = lambda: "no"
        for order, given in ((None, [self.x, self.y]), ([1, 0], [self.y, self.x])):
            inputs = list(given)
            self.assertIsNone(trees.entry(order=order)(inputs))
            self.assertEqual(len(inputs), 2)
            self.assertTrue(all(one is other for one, other in zip(inputs, given, strict=True)))

    def test_a_recording_with_other_memory_is_passed_over(self):
        for recorded, given in ((self.templates, None), (None, self.templates), (self.templates, self.others())):
            trees = self.trees(recorded)
            trees.function.handed = () if given is None else given.native
            inputs = [self.x, self.y]
            self.assertIsNone(trees.entry()(inputs))
            self.assertEqual((len(inputs), trees.live.prepared), (2, []))

    def others(self):
        found = {0: Memory(0, (1,), (1,), torch.float32), 1: Memory(2, (1,), (1,), torch.float64)}
        return Templates(Handed.of(found), found, CPU, OutputPlan())

    def test_a_replay_in_python_is_given_them_too(self):
        trees = self.trees(self.templates, in_python=True)
        trees.function.handed = self.templates.native
        trees.entry()([self.x, self.y])
        self.assertEqual([tuple(value.shape) for value in trees.recording.calls[0]], [(4,), (2,), (4,), (2, 3)])

    def test_without_memory_python_is_asked(self):
        huge = {0: Memory(0, (1 << 60,), (1,), torch.float32)}
        templates = Templates(Handed.of(huge), huge, CPU, OutputPlan())
        trees = self.trees(templates)
        trees.function.handed = templates.native
        inputs = [self.x, self.y]
        self.assertIsNone(trees.entry()(inputs))
        self.assertEqual(len(inputs), 2)


if __name__ == "__main__":
    run_tests()
