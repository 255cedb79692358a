"""Changes that a program makes to outputs that it drops or keeps, and interrupts while outputs are moved."""

import contextlib
import inspect
import sys
import weakref
from itertools import count, product
from unittest import mock
from weakref import WeakValueDictionary

import torch
from fake_trees import Trees, some
from recordings_on_cpu import SIZE, Function, OnCpuTestCase
from torch._inductor.cudagraph_trees import CompilationMode, ExecutionState, StorageWeakRefWrapper, TensorWeakRef
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.trees.hooks import entry_points
from pygraph_trees.trees.pools import capture_lock, pools
from pygraph_trees.trees.pools.liveness import Deaths
from pygraph_trees.trees.recordings import kept_outputs
from pygraph_trees.trees.recordings.recording import Recording

INFERENCE, FORWARD, BACKWARD = CompilationMode.INFERENCE, CompilationMode.FORWARD, CompilationMode.BACKWARD


def all_of(value):
    return torch.full((SIZE,), float(value))


def under_autograd(function):
    """Returns a callable that calls ``function`` as the forward of an autograd function; gradients pass unchanged."""

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return function.call(float(value[0]))[0]

        @staticmethod
        def backward(ctx, gradient):
            function.manager.running_forwards_with_pending_backwards = False
            return gradient

    return Graphed.apply


def begin_step_ungraphed(function):
    """Runs a forward un-graphed, which ends the path; another function may then write to the memory."""
    function.manager.current_gen = 0
    function.manager.note_ungraphed([], is_forward=True)


class TouchedTestCase(OnCpuTestCase):
    def check_steps(self, function, held=(), values=()):
        """The function gives right outputs at further calls, and held ones keep their values."""
        for step in (5, 6):
            found = function.call(step)
            self.assertEqual(found, [all_of(step)] * len(found))
        self.assertEqual(list(held), [all_of(value) for value in values])


@instantiate_parametrized_tests
class TestDropped(TouchedTestCase):
    """The program changes an output and drops it."""

    def check_next(self, function, value=4.0, *, fast=True):
        (found,) = function.call(value, fast=fast)
        self.assertEqual(found, all_of(value))
        self.assertEqual((found.requires_grad, found.grad, found.retains_grad), (False, None, False))
        self.assertEqual(found.grad_dtype, torch.float32)
        return found

    @parametrize("fast", [False, True])
    @parametrize(
        "change", ["unsqueeze_", "requires_grad_", "retain_grad", "hook", "grad_dtype", "tag", "dtype", "negated"]
    )
    def test_what_is_left_on_an_output(self, change, fast):
        function, hooked = Function(), []
        (output,) = function.call(3.0)
        if change in ("tag", "grad_dtype"):
            setattr(output, change, torch.float64)
        elif change in ("dtype", "negated"):
            output.data = output.view(torch.int32) if change == "dtype" else torch._neg_view(output)
        elif change == "retain_grad":
            output.requires_grad_().retain_grad()
            (output * 2).sum().backward()
        elif change == "hook":
            output.requires_grad_().register_post_accumulate_grad_hook(hooked.append)
            output.sum().backward()
            self.assertIs(hooked.pop(), output)
        else:
            getattr(output, change)(*((0,) if change == "unsqueeze_" else ()))
        del output
        found = self.check_next(function, fast=fast)
        self.assertFalse(hasattr(found, "tag"))
        found.add_(1).requires_grad_().sum().backward()
        self.assertEqual(hooked, [])

    @parametrize("fast", [False, True])
    def test_a_tangent(self, fast):
        """It is of the output that the program changed, and lasts as long as the level of forward-mode autograd."""
        function = Function()
        with forward_ad.dual_level():
            (output,) = function.call(3.0)
            output.add_(forward_ad.make_dual(all_of(1), all_of(5)))
            self.assertEqual(forward_ad.unpack_dual(output).tangent, all_of(5))
            del output
            self.assertIsNone(forward_ad.unpack_dual(self.check_next(function, fast=fast)).tangent)

    @parametrize("is_held", [False, True])
    def test_an_ungraphed_forward_that_begins_a_step(self, is_held):
        function = Function(outputs=2)
        held = function.call(3.0)[:is_held]
        self.assertIs(function.manager.path_state, ExecutionState.EXECUTION)
        begin_step_ungraphed(function)
        self.assertIsNone(function.manager.current_node)
        self.check_steps(function, held, [3] * is_held)

    @parametrize("fast", [False, True])
    @parametrize("mode,is_recorded", [*product((INFERENCE, BACKWARD), (False, True)), (FORWARD, False)])
    def test_changes_in_place(self, mode, is_recorded, fast):
        """They belong to one step, also if autograd records them: a trained bias for a frozen backbone's features."""
        function, bias = Function(mode=mode), torch.ones(SIZE, requires_grad=is_recorded)
        for step in (3, 4, 5):
            (output,) = function.call(step, fast=fast)
            if is_recorded:
                self.assertFalse(output.requires_grad)
            elif step > 3:
                self.assertEqual(output._version, 0)
            output.add_(bias).mul_(2)
            self.assertEqual(output, all_of(2 * step + 2))
            if is_recorded:
                self.assertEqual(torch.autograd.grad(output.sum(), bias), (all_of(2),))
            del output

    def test_code_that_runs_while_outputs_are_dropped(self):
        """Such code may ask which outputs are alive."""
        function, asked = Function(outputs=2), []
        outputs = function.call(3.0)
        ask = lambda: asked.append([held() for held in function.recording.outputs_weakrefs])  # noqa: E731
        weakref.finalize(outputs[0], ask).atexit = False
        outputs.clear()
        self.assertEqual(function.call(4.0), [all_of(4)] * 2)
        self.assertEqual(len(asked), 1)

    @parametrize("fast", [False, True])
    @parametrize("change", ["nothing", "data", "set_"])
    @parametrize("is_other_held", [False, True])
    @parametrize("kept", ["nothing", "view", "storage", "typed storage"])
    def test_memory(self, kept, is_other_held, change, fast):
        """The program may keep an output's memory and give the output other memory, which is its own."""
        function, other = Function(), all_of(77)
        (output,) = function.call(3.0)
        keep = {"view": output.detach, "storage": output.untyped_storage, "typed storage": output.storage}
        held = keep[kept]() if kept in keep else None
        if change != "nothing":
            given = other if is_other_held else other.clone()
            if change == "data":
                output.data = given
            else:
                output.set_(given)
            if kept != "nothing":
                output.untyped_storage()  # torch remembers the object
        del output, keep
        self.check_next(function, fast=fast).zero_()
        self.check_next(function, 5.0, fast=fast)
        function.end()
        self.assertEqual(other, all_of(77))
        if kept != "nothing":
            self.assertEqual(torch.empty(0).set_(held.untyped() if kept == "typed storage" else held), all_of(3))

    @parametrize("holds", ["nothing", "the output", "the other"])
    @parametrize("change", ["swapped", "swapped with a view", "grown", "emptied", "lazily cloned"])
    @parametrize("mode", [INFERENCE, BACKWARD])
    def test_memory_that_is_exchanged_resized_or_shared(self, change, holds, mode):
        """Each way works as with any other tensor, and what the program holds keeps its values."""
        function = Function(mode=mode)
        (output,) = function.call(3.0)
        other = output.detach() if change == "swapped with a view" else all_of(77)
        if change.startswith("swapped"):
            torch.utils.swap_tensors(output, other)
        elif change == "grown":
            output.resize_(2 * SIZE)[SIZE:] = 8
        elif change == "emptied":
            output.untyped_storage().resize_(0)
            output.untyped_storage().resize_(4 * SIZE)
            output.fill_(9)
        else:
            with mock.patch.multiple(pools, OWNED=WeakValueDictionary({0: function.manager}), holds=lambda *_: True):
                other = entry_points.outside_of_pools(torch._lazy_clone)(output)
        wanted = output.clone(), other.clone()
        held = {"the output": [output], "the other": [other]}.get(holds, [])
        del output, other
        for step, fast in ((4, True), (5, False), (6, True)):
            self.check_next(function, step, fast=fast)
        for found in held:
            self.assertEqual(found, wanted[holds == "the other"])
        function.end()

    @parametrize("fast", [False, True])
    def test_an_output_without_elements(self, fast):
        """It is new at each call, so what the program does to one is not seen in the next."""
        function = Function(2, ends_empty=True)
        first, second = function.call(3.0, fast=fast), function.call(4.0, fast=fast)
        self.assertIsNot(first[1], second[1])
        torch.add(torch.ones(3), 1, out=first[1])
        for empty in (second[1], function.call(5.0, fast=fast)[1]):
            self.assertEqual((empty.shape, empty.stride(), empty.dtype), ((0,), (1,), torch.float32))
        self.assertEqual((first[0], second[0]), (all_of(3), all_of(4)))

    def test_last_outputs_wait_for_all_streams(self):
        """The last replay may still be queued on another stream, on which the program then reads its output."""
        function, done = Function(), []
        (output,) = function.call(3.0)
        copy = mock.patch.object(kept_outputs, "copy_bits", lambda to, source: done.append("copy"))
        with mock.patch.object(capture_lock, "wait_for_device", lambda index: done.append("wait") or True), copy:
            function.end()
        self.assertEqual(done, ["wait", "copy", "wait", "wait"])
        del output

    @parametrize("has_graph,is_inside", [(False, False), (False, True), (True, False)])
    def test_untouched_outputs_are_returned_again(self, has_graph, is_inside):
        """C++ does it without Python, even if autograd has used them, and in inference mode from its second call on."""
        function = Function(mode=FORWARD if has_graph else INFERENCE)
        graphed = under_autograd(function)
        leaf, objects = torch.ones(SIZE, requires_grad=True), set()
        made_again = mock.patch.object(Recording, "reconstruct_outputs", side_effect=AssertionError("it asked Python"))
        with torch.inference_mode(is_inside):
            if is_inside:
                function.call(2.0)
            self.enterContext(made_again)
            for step in range(3, 7):
                output = graphed(leaf * step) if has_graph else function.call(step)[0]
                self.assertEqual(output, all_of(step))
                for name in ("_dynamo_propagated_dynamic_indices", "_dynamo_weak_dynamic_indices"):
                    setattr(output, name, frozenset({0}))  # as AOTAutograd does for outputs with symbolic sizes
                if has_graph:
                    output.sum().backward()
                objects.add(id(output))
                del output
        self.assertEqual(len(objects), 1)


@instantiate_parametrized_tests
class TestKept(TouchedTestCase):
    """The program changes an output, or keeps a part of it, and goes on."""

    @parametrize("has_view", [False, True])
    def test_other_memory_of_an_output_that_is_kept(self, has_view):
        function = Function()
        (output,) = function.call(3.0)
        views = [output[:]] * has_view
        output.data = all_of(77)
        self.check_steps(function, [output, *views], [77, *[3] * has_view])

    @parametrize("of_storage", [False, True])
    @parametrize("then", ["C++ replays", "Python replays", "an ungraphed forward begins a step"])
    def test_weak_references_when_memory_may_be_overwritten(self, then, of_storage):
        """They are dead by then, as in eager, and do not give the program a tensor that another step writes to."""
        function, seen = Function(), []
        (output,) = function.call(3.0)
        held = weakref.ref(output.untyped_storage() if of_storage else output)
        del output

        def launched():
            seen.append(held())
            function.pool.fill_(function.value)

        if then == "an ungraphed forward begins a step":
            begin_step_ungraphed(function)
            self.assertIsNone(held())
        with mock.patch.object(function.recording.graph, "replay", launched):
            self.assertEqual(function.call(4.0, fast=then != "Python replays"), [all_of(4)])
        self.assertEqual(seen, [None])

    @parametrize("state", [ExecutionState.RECORDING, ExecutionState.WARMUP])
    def test_other_memory_of_a_first_output(self, state):
        """Upstream makes the remaining first outputs of a recording unreadable, and frees their memory."""
        function = Function()
        output, node, manager = all_of(3), function.recording, function.manager
        node.outputs_weakrefs[:], node.tensor_weakrefs[:] = [StorageWeakRefWrapper(output)], [TensorWeakRef(output)]
        manager.current_node, manager.path_state, manager.current_gen = node, state, -99
        manager.disable_invalidate_aliases = False
        kept_outputs.note_launch_of(node, 0)
        output.data = all_of(77)
        invalidated = []
        note = lambda *_: invalidated.append(1)  # noqa: E731
        with mock.patch.object(torch._C, "_set_storage_access_error_msg", note, create=True):
            end = manager.try_end_curr_recording if state == ExecutionState.RECORDING else manager.try_end_curr_warmup
            end(function.id)
        self.assertEqual((invalidated, output), ([], all_of(77)))


def interrupted(owner, name, at):
    """Replaces a function by one that is interrupted at the call of this number."""
    before, calls = getattr(owner, name), count(1)

    def call(*arguments):
        if next(calls) == at:
            raise KeyboardInterrupt
        return before(*arguments)

    return mock.patch.object(owner, name, call)


@instantiate_parametrized_tests
class TestInterrupts(TouchedTestCase):
    @parametrize("where", ["_exchange", "_forget", "remove_node_cached_tensors", "remove_extra_reference"])
    @parametrize("is_kept", [False, True])
    def test_while_outputs_are_moved_or_dropped(self, where, is_kept):
        """The interrupt is at the second output, at the only recording, or once torch has forgotten the tensors, but
        not yet all the references that it expects to them. All later outputs are right."""
        function = Function(outputs=2)
        outputs = function.call(3.0)
        if where == "remove_extra_reference" and not is_kept:
            outputs[0].tag = 1
            outputs.clear()
        owners = {"remove_node_cached_tensors": Recording, "remove_extra_reference": StorageWeakRefWrapper}
        with interrupted(owners.get(where, kept_outputs), where, 1 if where in owners else 2):
            self.assertRaises(KeyboardInterrupt, function.call, 4.0)
        self.assertEqual(outputs, [all_of(3)] * len(outputs))
        if not is_kept:
            outputs.clear()
        self.check_steps(function, outputs, [3, 3] * is_kept)

    @parametrize("is_kept", [False, True])
    def test_while_a_path_is_about_to_end(self, is_kept):
        """The interrupt is inside a step; the program keeps the traceback, as an interactive session does."""
        function = Function(mode=FORWARD)
        manager = function.manager
        first = function.call(3.0)
        manager.current_gen = manager.get_curr_generation()
        kept = []

        def trace(frame, event, _):
            is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
            if event == "return" and not is_generator and manager._begins_step is not None and kept == []:
                kept.append(frame.f_code.co_name)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            manager.try_end_curr_execution()
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(before)
        self.assertEqual(len(kept), 2)
        manager.running_forwards_with_pending_backwards = False
        if not is_kept:
            first.clear()
        self.check_steps(function, first, [3] * is_kept)

    def test_while_references_are_redirected(self):
        """The interrupt is at the first reference. None is freed twice, which would crash."""
        function = Function(outputs=2)
        before = StorageWeakRef.__del__

        def interrupted(reference):
            before(reference)
            raise KeyboardInterrupt

        for step in range(50):
            outputs = function.call(step)
            with (
                contextlib.suppress(KeyboardInterrupt),  # in a destructor, an interrupt is only reported
                mock.patch.object(StorageWeakRef, "__del__", interrupted),
                mock.patch.object(sys, "unraisablehook"),
            ):
                function.call(-1)
            del outputs
            self.assertEqual(function.call(step), [all_of(step)] * 2)

    def test_while_cached_outputs_are_made(self):
        function = Function(outputs=3)
        function.recording.remove_node_cached_tensors()
        with interrupted(torch._C, "_add_cached_tensor", 2), self.assertRaises(KeyboardInterrupt):
            function.call(1.0)
        self.check_steps(function)


class TestInputsThatMoveMeanwhile(OnCpuTestCase):
    def test_no_launch_with_the_address_that_was_compared(self):
        """The release of outputs before a launch, and its last check, may run finalizers that move an input."""
        for is_last_check in (False, True):
            x, outputs, alive = torch.ones(4), some(1), [True]
            held = outputs[0]

            def move(x=x):
                x.data = torch.zeros(4)
                return True

            if is_last_check:
                asked = Deaths([(outputs, [lambda: 7], 0, 0)], lambda: False)
                asked.ask = move
            else:
                asked = Deaths([(outputs, [lambda alive=alive: alive.pop() if alive else None], 0, 0)], move)
            trees = Trees({0: x}, some(1), **{"after" if is_last_check else "before": asked})
            self.assertIsNone(trees.entry()([x]))
            self.assertEqual((trees.graph.launches, held.shape), (0, outputs[0].shape))


if __name__ == "__main__":
    run_tests()
