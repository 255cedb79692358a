"""A compiled function saves the same tensors for its backward as with torch's method, and raises the same errors."""

from __future__ import annotations

import unittest
from contextlib import nullcontext
from unittest import mock

import torch
from torch import nn
from torch._dynamo import reset
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._inductor import config
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_patches
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason
from pygraph_trees.trees.hooks import saved_state

SavedState = getattr(runtime_wrappers, "_AutogradSavedState", None)
SEEN = []  # by modes


class Context(FunctionCtx):
    pygraph_entry_is_short = True


def see(self, func, types, args=(), kwargs=None):
    SEEN.append(func)
    return func(*args, **(kwargs or {}))


def state_of(count, unchecked=0, symints=0, opaque=0, dynamic=None, kept=None):
    metadata = object.__new__(ViewAndMutationMeta)
    metadata.num_forward, metadata.num_tensors_saved_with_no_vc_check = 1, unchecked
    metadata.num_symints_saved_for_bw, metadata.num_opaque_objects_saved_for_bw = symints, opaque
    metadata.dynamic_saved_tensors_idxs = dynamic or {}
    metadata.saved_tensor_is_graph_input = kept or [False] * count
    return SavedState(metadata)


def described(value, given):
    """A tensor's place in the list, or what can be seen of a new one."""
    if not isinstance(value, torch.Tensor):
        return value
    places = [i for i, one in enumerate(given) if one is value]
    told = [type(value), value._is_view(), value.requires_grad, value.data_ptr(), value.stride(), value.grad_fn]
    return places or told, value, vars(value).copy()


@unittest.skipIf(SavedState is None or binding.extension is None, "torch 2.11, or the parts in C++ are not built")
class TestMethod(TestCase):
    def setUp(self):
        super().setUp()
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.upstream = SavedState.save_from_forward
        self.torchs = mock.Mock(side_effect=self.upstream)
        self.saving = saved_state.saving(self.torchs)
        self.base = torch.arange(6.0)
        self.plain = [self.base, nn.Parameter(torch.ones(2)), torch.ones(0), torch.zeros(2, dtype=torch.int64)]
        self.views = [self.base[:2], self.base.view(2, 3).t()]

    def check(self, given, is_ours, mode=None, **counts):
        """Compares what is saved, which calls a mode sees, and the error; returns them."""
        state = state_of(len(given) - 1 - counts.get("symints", 0) - counts.get("opaque", 0), **counts)
        found = []
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
        whys = saved_state.counts()[1]
        self.assertGreaterEqual(whys[Reason.SAVES_OTHERS()], 3)
        self.assertGreaterEqual(whys[Reason.NOT_PLAIN()], 1)

    def test_errors_are_torchs(self):
        for given, counts, told in (
            ([None, self.base, 3], {}, "expected all tensors_saved_with_vc_check"),
            ([None, self.base, None], {"unchecked": 1}, "expected all tensors_saved_no_vc_check"),
            ([None, self.base, "3"], {"symints": 1}, "expected all symint_outs"),
            ([None, self.base, 3], {"opaque": 1}, "expected all opaque_object_outs"),
        ):
            self.assertIn(told, self.check(given, False, **counts)[2])
        self.assertIn("must not be None", self.check([None, self.base], True, unchecked=None)[2])
        self.check((None, *self.views), False)  # a tuple

    def test_a_torch_that_saves_otherwise_is_left_alone(self):
        for more in ({"also": []}, {"symints": ()}):
            upstream = mock.Mock(side_effect=lambda state, ctx, given, more=more: vars(ctx).update(more))
            with self.assertLogs("pygraph_trees.trees", "WARNING"):
                self.assertIs(saved_state.saving(upstream), upstream)


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
        before = saved_state.counts()
        found = self.trained()
        self.assertGreater(len(found[1]), 3)
        if SavedState is not None and binding.extension is not None:
            self.assertEqual(saved_state.counts()[0] - before[0], 2)
        with config.patch("triton.pygraph_entry", "off"):
            self.assertEqual(self.trained(), found)
        self.assertLess(saved_state.counts()[0] - before[0], 3)
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.assertEqual(self.trained(), found)


if __name__ == "__main__":
    run_tests()
