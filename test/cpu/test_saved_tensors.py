"""Tensors that are saved for a backward: how they are saved, and what hooks on saved tensors make of them."""

import textwrap
import unittest
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from commands import forked, python
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo import reset
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._inductor import config, graph
from torch._inductor.utils import tensor_is_aligned
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_patches
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason
from pygraph_trees.trees.hooks import host_work, saved_tensors
from pygraph_trees.trees.hooks.saved_tensors import conform, conforming, layouts_of


def conformed(saved, returned):
    """What a backward is given for a saved tensor, or for one of such a layout, if hooks return ``returned``."""
    layouts = map(tuple, layouts_of([saved])) if isinstance(saved, torch.Tensor) else [saved]
    conform(list(layouts), inputs := [returned])
    return inputs[0]


class TestConform(TestCase):
    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
            lambda sizes: st.tuples(st.just(sizes), *[st.permutations(range(len(sizes)))] * 2)
        )
    )
    def test_elements_survive_whatever_the_layout(self, drawn):
        sizes, *orders = drawn
        value = torch.arange(float(torch.tensor(sizes).prod())).view(sizes)
        saved, returned = (
            value.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
            for order in orders
        )
        found = conformed(saved, returned)
        self.assertEqual(found, saved)
        alike = zip(sizes, found.stride(), saved.stride(), strict=True)
        self.assertTrue(all(size < 2 or a == b for size, a, b in alike))

    def test_with_symbolic_sizes_the_order_of_strides_counts(self):
        """The sizes of the call do not matter."""
        layout = (0, torch.float32, torch.device("cpu"), None, (60, 1, 15, 3))  # channels last, of an example
        value = torch.randn(3, 2, 5, 7)
        for returned in (value, value.to(memory_format=torch.channels_last)):
            found = conformed(layout, returned)
            self.assertTrue(found.is_contiguous(memory_format=torch.channels_last))
            self.assertEqual(found, value)
            self.assertEqual(found is returned, returned is not value)

    def test_tensors_of_other_sizes_or_classes_are_left_alone(self):
        """They have other sizes or another class, or differ in a stride that affects no element."""

        class Other(torch.Tensor): ...

        saved = torch.randn(3, 1)
        alike = saved.as_strided((3, 1), (1, 77))
        for returned in (torch.randn(3), torch.randn(4, 1), saved.as_subclass(Other), 3, None, alike):
            self.assertIs(conformed(saved, returned), returned)
        conform(layouts_of([saved]), inputs := [])
        self.assertEqual(inputs, [])

    def test_zeros_without_memory_get_some(self):
        found = conformed(torch.ones(2, 3), torch._efficientzerotensor((2, 3)))
        self.assertEqual((found._is_zerotensor(), found), (False, torch.zeros(2, 3)))


class TestAttach(TestCase):
    """Facts that are noted when Inductor compiles a backward, here for the CPU."""

    def attached(self, fn, *args, dynamic=False):
        found, upstream = [], saved_tensors.attach

        def note(artifact, graph):
            upstream(artifact, graph)
            found.append(getattr(artifact, saved_tensors.ATTRIBUTE, None))

        torch._dynamo.reset()
        with (
            mock.patch.object(saved_tensors, "attach", note),
            config.patch({"triton.cudagraphs": True, "fx_graph_cache": False}),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            torch.compile(fn, dynamic=dynamic)(*args).sum().backward()
        forward, backward = found
        self.assertIsNone(forward)
        return backward

    def test_an_artifact_holds_strides_and_types_of_each_input(self):
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        layouts = self.attached(torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), x)
        self.assertIn(((2, 3, 8, 8), (192, 1, 24, 3)), {(sizes, strides) for _, _, _, sizes, strides in layouts})
        kinds = {(dtype, device.type) for _, dtype, device, _, _ in layouts}
        self.assertEqual(kinds - {(torch.bool, "cpu")}, {(torch.float32, "cpu")})
        inputs = [torch.empty_strided(sizes, strides, dtype=dtype) for _, dtype, _, sizes, strides in layouts]
        conform([(n, *rest) for n, (_, *rest) in enumerate(layouts)], kept := list(inputs))
        self.assertTrue(all(a is b for a, b in zip(inputs, kept, strict=True)))

    def test_symbolic_sizes_are_not_held(self):
        x, w = torch.randn(5, 7), torch.randn(7, 3, requires_grad=True)
        layouts = self.attached(lambda x: x @ w, x, dynamic=True)  # saves a transposed view
        (example,) = {strides for _, _, _, sizes, strides in layouts if sizes is None and strides[0] == 1}
        self.assertEqual(example, (1, 7))
        self.assertFalse([sizes for _, _, _, sizes, strides in layouts if len(strides) == 2 and sizes is not None])

    def test_an_artifact_holds_which_inputs_its_code_takes_to_be_aligned(self):
        made, x = [], torch.ones(9)
        torch._dynamo.reset()
        with (
            mock.patch.object(saved_tensors, "attach", lambda artifact, _: made.append(artifact)),
            mock.patch.object(graph, "should_assume_input_aligned", tensor_is_aligned),  # on the CPU, too
            config.patch({"triton.cudagraphs": True, "fx_graph_cache": False}),
        ):
            torch.compile(torch.add, dynamic=False)(x[1:], x[:8])
        self.assertEqual([artifact.pygraph_aligned for artifact in made], [[1]])

    def test_a_graph_that_cannot_be_described_compiles_all_the_same(self):
        artifact = SimpleNamespace()
        with self.assertLogs("pygraph_trees.trees", "WARNING"):
            saved_tensors.attach(artifact, SimpleNamespace(is_backward=True))
        self.assertFalse(hasattr(artifact, saved_tensors.ATTRIBUTE))

    def test_an_ungraphed_artifact_is_left_to_torch(self):
        artifact = SimpleNamespace(**{saved_tensors.ATTRIBUTE: self.id()})
        saved_tensors.leave(artifact)
        saved_tensors.leave(other := SimpleNamespace())
        self.assertEqual((vars(artifact), vars(other)), ({saved_tensors.ATTRIBUTE: None}, {}))


class TestCalls(TestCase):
    @forked("compiler")
    def test_calls_after_hooks_conform_their_inputs(self):
        """Each way has a process of its own: once hooks were set, a process remembers it until it ends."""
        program = """
            import os, sys, torch, torch._dynamo
            is_native = not os.fork()  # whether the part in C++ is used, if it was built
            from pygraph_trees.native import binding
            if not is_native:
                binding.extension = None
            from pygraph_trees.trees.hooks.entry_points import calling
            from types import SimpleNamespace
            from torch.autograd.graph import saved_tensors_hooks

            seen = []
            call = calling(lambda self, inputs: seen.append(inputs[0].stride()))
            saved = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
            layout = (0, torch.float32, torch.device("cpu"), tuple(saved.shape), saved.stride())
            class Graph:
                current_callable = None
                __call__ = call
                def __init__(self, **more):
                    vars(self).update(more)
            backward, forward = Graph(pygraph_saved=[layout]), Graph()
            backward([saved.contiguous()])  # nobody set hooks: layouts are not looked at
            # Code outside of recordings would read the memory of a negated tangent as it is.
            for graph, is_resolved in ((backward, True), (forward, False)):
                graph(inputs := [torch._neg_view(saved)])
                assert inputs[0].is_neg() != is_resolved and torch.equal(inputs[0], -saved), graph
            del seen[1:]
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                forward([saved])
            backward([saved.contiguous()])
            backward((saved.contiguous(),))
            backward([saved])
            forward([saved.contiguous()])
            rows, nhwc = saved.contiguous().stride(), saved.stride()
            assert seen == [rows, nhwc, nhwc, rows, nhwc, rows], seen
            if is_native:
                os._exit(0)
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        """
        done = python("-c", textwrap.dedent(program))
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_function_of_another_compiler_keeps_its_first_layout(self):
        seen = []
        with mock.patch.object(saved_tensors, "_set", False):
            backward, forward = (
                conforming(lambda inputs: seen.append(inputs[0].stride()), is_backward=is_backward)
                for is_backward in (True, False)
            )
            value = torch.randn(3, 4)
            other = value.t().contiguous().t()
            for call in (backward, forward):
                call([value])
                call([other])
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                forward([other])
            backward([other])
            forward([other])
        rows, columns = value.stride(), other.stride()
        self.assertEqual(seen, [rows, columns, rows, columns, columns, rows, columns])


SavedState = getattr(runtime_wrappers, "_AutogradSavedState", None)
SEEN = []  # by modes


class Context(FunctionCtx):
    pygraph_entry_is_short = True


def see(self, func, types, args=(), kwargs=None):
    SEEN.append(func)
    return func(*args, **(kwargs or {}))


def described(value, given):
    """A tensor's place in the list, or what can be seen of a new one."""
    if not isinstance(value, torch.Tensor):
        return value
    told = [type(value), value._is_view(), value.requires_grad, value.data_ptr(), value.stride(), value.grad_fn]
    return [i for i, one in enumerate(given) if one is value] or told, value, vars(value).copy()


@unittest.skipIf(SavedState is None or binding.extension is None, "torch 2.11, or the parts in C++ are not built")
class TestMethod(TestCase):
    def setUp(self):
        super().setUp()
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.upstream = SavedState.save_from_forward
        self.torchs = mock.Mock(side_effect=self.upstream)
        self.saving = host_work.saving(self.torchs)
        self.base = torch.arange(6.0)
        self.plain = [self.base, nn.Parameter(torch.ones(2)), torch.ones(0), torch.zeros(2, dtype=torch.int64)]
        self.views = [self.base[:2], self.base.view(2, 3).t()]

    def check(self, given, is_ours, mode=None, *, unchecked=0, symints=0, opaque=0, dynamic=None, kept=None):
        """Compares what is saved, which calls a mode sees, and the error; returns them."""
        metadata, found = object.__new__(ViewAndMutationMeta), []
        metadata.num_forward, metadata.num_tensors_saved_with_no_vc_check = 1, unchecked
        metadata.num_symints_saved_for_bw, metadata.num_opaque_objects_saved_for_bw = symints, opaque
        metadata.dynamic_saved_tensors_idxs = dynamic or {}
        metadata.saved_tensor_is_graph_input = kept or [False] * (len(given) - 1 - symints - opaque)
        state = SavedState(metadata)
        for save in (self.upstream, self.saving):
            self.torchs.reset_mock(), SEEN.clear()
            ctx, error = Context(), ""
            try:
                with mode or nullcontext():
                    save(state, ctx, type(given)(given))
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            lists = vars(ctx).items()
            saved = {name: [type(values), *(described(value, given) for value in values)] for name, values in lists}
            found.append((saved, SEEN.copy(), error))
        self.assertEqual(found[1], found[0])
        self.assertEqual(self.torchs.called, not is_ours)
        return found[0]

    def test_plain_tensors_and_views(self):
        for unchecked in (0, 1, 3, 6):
            saved, _, _ = self.check([None, *self.plain, *self.views], True, unchecked=unchecked)
            self.assertEqual([len(found) - 1 for found in saved.values()], [6 - unchecked, unchecked, 0, 0])
        self.check([None, *self.views, *self.views, *self.plain], True, unchecked=6, kept=[True, False] * 4)
        with torch.inference_mode():
            self.check([None], True)
            self.check([None, *self.views, torch.ones(2), torch.ones(4)[:2]], True)

    def test_modes_see_the_same_calls(self):
        functions = type("Functions", (TorchFunctionMode,), {"__torch_function__": see})()
        self.assertIn(torch.Tensor._is_view, self.check([None, *self.plain, *self.views], False, functions)[1])
        operators = type("Operators", (TorchDispatchMode,), {"__torch_dispatch__": see})()
        self.assertIn(torch.ops.aten.detach.default, self.check([None, *self.plain, *self.views], True, operators)[1])

    def test_subclasses_numbers_objects_and_dynamic_sizes_are_torchs(self):
        self.check([None, *self.views, self.base[2:].as_subclass(type("Subclass", (torch.Tensor,), {}))], False)
        self.assertEqual(self.check([None, *self.views, 3, 2.5], False, symints=2)[0]["symints"][1:], [3, 2.5])
        self.check([None, *self.views, torch.Generator()], False, opaque=1)
        self.check([None, torch.ones(2), *self.views], False, unchecked=1, dynamic={0: {0}, 2: {1}})
        whys = host_work.forwards()[1]
        self.assertGreaterEqual(whys[Reason.SAVES_OTHERS()], 3)
        self.assertGreaterEqual(whys[Reason.NOT_PLAIN()], 1)

    def test_errors_are_torchs(self):
        for values, counts, told in (
            ([None, self.base, 3], {}, "expected all tensors_saved_with_vc_check"),
            ([None, self.base, None], {"unchecked": 1}, "expected all tensors_saved_no_vc_check"),
            ([None, self.base, "3"], {"symints": 1}, "expected all symint_outs"),
            ([None, self.base, 3], {"opaque": 1}, "expected all opaque_object_outs"),
        ):
            self.assertIn(told, self.check(values, False, **counts)[2])
        self.assertIn("must not be None", self.check([None, self.base], True, unchecked=None)[2])
        self.check((None, *self.views), False)  # a tuple

    def test_a_torch_that_saves_otherwise_is_left_alone(self):
        for more in ({"also": []}, {"symints": ()}):
            upstream = mock.Mock(side_effect=lambda state, ctx, given, more=more: vars(ctx).update(more))
            with self.assertLogs("pygraph_trees.trees", "WARNING"):
                self.assertIs(host_work.saving(upstream), upstream)


class TestTraining(TestCase):
    def trained(self):
        """What steps save of inputs that are views, and give hooks; gradients; the error of a changed tensor."""
        reset()
        torch.manual_seed(0)
        net, packed = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid()), []
        step = torch.compile(net, backend="aot_eager", fullgraph=True)
        x = torch.randn(8, 4, requires_grad=True)[:4]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            step(x).sum().backward()
        out = step(x)
        saved = [(t, t is net[2].weight, t._is_view()) for t in out.grad_fn.saved_tensors]
        net[2].weight.detach().add_(1)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation") as raised:
            out.sum().backward()
        return packed, saved, [parameter.grad for parameter in net.parameters()], str(raised.exception)

    @config.patch("triton.cudagraphs", True)  # other functions are left to torch
    def test_a_step_is_the_same_with_and_without_the_patches(self):
        before = host_work.forwards()
        found = self.trained()
        self.assertGreater(len(found[1]), 3)
        if SavedState is not None and binding.extension is not None:
            self.assertEqual(host_work.forwards()[0] - before[0], 2)
        with config.patch("triton.pygraph_entry", "off"):
            self.assertEqual(self.trained(), found)
        self.assertLess(host_work.forwards()[0] - before[0], 3)
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.assertEqual(self.trained(), found)


if __name__ == "__main__":
    run_tests()
