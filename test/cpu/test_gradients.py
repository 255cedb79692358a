"""Gradients in real autograd backwards: the recording's own tensors, or other tensors on their memory."""

import unittest
from unittest import mock

import torch
from accumulating import Doing
from fake_trees import MODE, Trees, some
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.hooks import backward_edges


class CompiledFunction(torch.autograd.Function):
    """Stands for a compiled step, under the name AOTAutograd uses. Its backward returns what ``call`` gives."""

    @staticmethod
    def forward(ctx, call, look, *parameters):
        ctx.call, ctx.look = call, look
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        outputs = ctx.call([])
        ctx.look(outputs)
        return None, None, *outputs


def hold(into, by):
    """Registers a hook that keeps the gradients it is given and leaves them as they are."""
    return by(lambda *given_: into.extend(t for g in given_ for t in (g if isinstance(g, (list, tuple)) else (g,))))


def accumulates(parameter):
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


# Observers of gradients. Each takes the parameters, the forward's output, and a list to keep the gradients in.
SEEN = {
    "a hook": lambda ps, y, into: hold(into, ps[1].register_hook),
    "a hook of two": lambda ps, y, into: hold(into, lambda h: torch.autograd.graph.register_multi_grad_hook(ps, h)),
    "before the accumulation": lambda ps, y, into: hold(into, accumulates(ps[2]).register_prehook),
    "after the accumulation": lambda ps, y, into: hold(into, accumulates(ps[0]).register_hook),
    "a hook that may put on others": lambda ps, y, into: ps[1].register_post_accumulate_grad_hook(
        lambda p: into.append(p.grad.clone())
    ),
    "after the backward": lambda ps, y, into: hold(into, y.grad_fn.register_hook),
}
UNSEEN = {
    "nobody": lambda ps, y, into: None,
    "a hook of the tangent": lambda ps, y, into: y.register_hook(lambda gradient: None),
    "a parameter that has one": lambda ps, y, into: setattr(ps[1], "grad", torch.zeros(4)),
}


@unittest.skipIf(binding.extension is None, "not built for this torch")
@mock.patch.object(cudagraph_trees.MarkStepBox, "mark_step_counter", 0)
class TestGradients(TestCase):
    """A recording gives its own gradients if nobody sees them, and otherwise other tensors on the same memory."""

    OWN = ((0, (4,), (1,), 0), (1, (4,), (1,), 0), (2, (4,), (1,), 0))

    def setUp(self):
        super().setUp()
        torch._C._set_cached_tensors_enabled(True)
        self.addCleanup(torch._C._set_cached_tensors_enabled, False)
        self.looks = []
        self.call = self.recorded(some(3), self.OWN)

    def recorded(self, cached, views):
        """Makes these tensors the gradients of a recording, and returns its entry."""
        for tensor in cached:
            tensor.untyped_storage()  # as torch's own reference to the storage does
            torch._C._add_cached_tensor(tensor)
            self.addCleanup(torch._C._remove_cached_tensor, tensor)
        self.cached, self.trees = cached, Trees({}, cached, mode=MODE.BACKWARD)
        count = len(cached)
        return self.trees.entry(views=views, own=range(count), picks=range(count, 2 * count))

    def step(self, node=CompiledFunction, call=None):
        parameters = [torch.ones(4, requires_grad=True) for _ in range(3)]
        return parameters, node.apply(call or self.call, self.look, *parameters)

    def look(self, given_):
        """Notes which gradients are the recording's own. Keeps none: a held gradient is not taken over."""
        self.assertEqual([g.data_ptr() for g in given_], [c.data_ptr() for c in self.cached])
        self.assertEqual([g.clone() for g in given_], self.cached)
        self.looks.append([g is c for g, c in zip(given_, self.cached, strict=True)])

    def is_own(self):
        """For each gradient of the last call, whether it is the recording's own tensor."""
        return self.looks.pop()

    def test_gradients_are_others_if_somebody_sees_them(self):
        for seen, ways in ((True, SEEN), (False, UNSEEN)):
            for name, look in ways.items():
                with self.subTest(name=name):
                    parameters, y = self.step()
                    held = []
                    handle = look(parameters, y, held)
                    y.backward()
                    self.assertEqual(self.is_own(), [not seen] * 3)
                    addresses = {tensor.data_ptr() for tensor in held if tensor is not None}
                    self.assertEqual(bool(addresses), seen)
                    for parameter in parameters:
                        if parameter.grad.data_ptr() in addresses:
                            self.assertEqual(name, "after the accumulation")  # torch takes the gradient over first
                    del handle
        self.assertEqual(self.trees.searched, [])

    def test_a_gradient_that_a_hook_keeps_is_not_changed_with_the_parameters(self):
        """Also if Inductor's code returns the function's outputs as they are."""
        self.call = self.trees.entry()
        for is_kept in (True, False):
            parameters, y = self.step()
            held = []
            handle = hold(held, parameters[1].register_hook) if is_kept else None
            y.backward()
            self.assertEqual(self.is_own(), [not is_kept] * 3)
            parameters[1].grad.mul_(100)
            self.assertEqual(held, self.cached[1:2] if is_kept else [])
            self.assertEqual(parameters[0].grad.data_ptr(), self.cached[0].data_ptr())
            del handle

    def test_gradients_are_others_outside_of_the_compiled_node(self):
        """A hook calls the backward in a node of another kind, or another program's node does."""
        _, y = self.step()
        other = torch.ones(4, requires_grad=True)
        other.register_post_accumulate_grad_hook(lambda _: y.grad_fn.apply(torch.ones(())) and None)
        other.sum().backward()
        self.assertEqual(self.is_own(), [False] * 3)

        class Another(CompiledFunction): ...

        _, y = self.step(Another)
        y.backward()
        self.assertEqual(self.is_own(), [False] * 3)

    def test_gradients_that_the_node_accumulates_itself(self):
        """They are the recording's own unless a hook has been put on a parameter since the backward began."""
        node = type("CompiledFunction", (CompiledFunction,), {"_aot_id": 0})
        backward_edges.mark(node._backward_cls)
        count = 10
        call = self.recorded(some(count), [(i, (4,), (1,), 0) for i in range(count)])
        for seen in (False, True):
            parameters, held = [torch.ones(4, requires_grad=True) for _ in range(count)], []
            y = node.apply(call, self.look, *parameters)
            if seen:
                y = Doing.apply(y, lambda p=parameters[5], held=held: hold(held, p.register_hook))
            before = backward_edges.counts()[0]
            y.backward()
            self.assertEqual(backward_edges.counts()[0] - before, 1)
            self.assertEqual(self.is_own(), [not seen] * count)
            self.assertEqual([p.grad for p in parameters], self.cached)
            for i, (parameter, cached) in enumerate(zip(parameters, self.cached, strict=True)):
                self.assertEqual(parameter.grad.data_ptr() == cached.data_ptr(), not (seen and i == 5))
            self.assertEqual(held, self.cached[5:6] if seen else [])

    def test_gradients_that_go_on_into_another_backward_are_others(self):
        """A parameter that needs no gradient is no reason to give others."""
        for through, needs, own in ((torch.Tensor.exp, True, False), (lambda p: p, False, True)):
            parameters = [torch.ones(4, requires_grad=needs or number != 1) for number in range(3)]
            y = CompiledFunction.apply(self.call, self.look, parameters[0], through(parameters[1]), parameters[2])
            y.backward()
            self.assertEqual(self.is_own(), [own] * 3)
            self.assertEqual(parameters[1].grad is not None, needs)

    def test_a_backward_inside_another_is_looked_at_for_itself(self):
        """A backward that a hook of another backward runs is judged on its own."""
        for seen in (False, True):
            inner, y = self.step()
            if seen:
                inner[0].register_hook(lambda gradient: None)
            outer = torch.ones(4, requires_grad=True)
            outer.register_hook(torch.enable_grad()(lambda _, y=y: y.backward()))
            outer.sum().backward()
            self.assertEqual(self.is_own(), [not seen] * 3)

    def test_gradients_beside_views_kept_inputs_and_constants(self):
        """Views, kept inputs, constants and plain outputs are returned next to the gradients."""
        for more, own in (([], [1, 0]), ([(1, (2,), (2,), 1)], [0, 1])):
            views = [self.OWN[0], self.OWN[2], *more]
            picks = [1, 5, *range(4, 4 + len(views)), 4 + len(views), 3]  # by row: outputs, kept, views, constants
            call = self.trees.entry(kept=[0], views=views, own=own, picks=picks, constants=(7,))
            kept = torch.zeros(1)
            for sees in (False, True):
                found, parameter = [], torch.ones(4, requires_grad=True)
                if sees:
                    parameter.register_hook(lambda gradient: None)
                CompiledFunction.apply(lambda _: found.extend(call([kept])) or [None], len, parameter).backward()  # noqa: B023
                gradients = [self.cached[index] for index in (1, 2, 0, 2)]
                self.assertEqual([one is c for one, c in zip(found, gradients, strict=False)], [not sees] * 4)
                self.assertEqual([one.data_ptr() for one in found[:4]], [c.data_ptr() for c in gradients])
                self.assertEqual(found[4:-2], [torch.ones(2)] * len(more))
                self.assertEqual(found[-2], 7)
                self.assertIs(found[-1], kept)

    def test_gradients_of_a_backward_of_aotautograd(self):
        """A real compiled backward wraps the call that gives a recording's gradients."""
        found = []

        def backward_compiler(graph, _):
            call = None

            def backward(inputs):
                nonlocal call
                outputs = graph(*inputs)
                inputs.clear()
                gradients = [output for output in outputs if isinstance(output, torch.Tensor)]
                if call is None:
                    views = [(number, tuple(g.shape), g.stride(), 0) for number, g in enumerate(gradients)]
                    call = self.recorded([gradient.clone() for gradient in gradients], views)
                for cached, gradient in zip(self.cached, gradients, strict=True):
                    cached.copy_(gradient)
                given_ = call([])
                found.append([g is c for g, c in zip(given_, self.cached, strict=True)])
                rest = iter(given_)
                return [next(rest) if isinstance(output, torch.Tensor) else output for output in outputs]

            backward._boxed_call = True
            return backward

        model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()), torch.randn(2, 4)
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        forward_compiler = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
        backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=backward_compiler)
        compiled = torch.compile(model, backend=backend)

        def backward(**arguments):
            model.zero_grad()
            compiled(x).square().sum().backward(**arguments)
            self.assertEqual([p.grad for p in model.parameters()], list(wanted))
            return found.pop()

        with torch._functorch.config.patch(donated_buffer=False):
            for _ in range(2):
                self.assertEqual(backward(), [True] * 2)
                self.assertEqual([p.grad.data_ptr() for p in model.parameters()], [c.data_ptr() for c in self.cached])
            torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
            self.assertEqual(found.pop(), [False] * 2)
            # AOTAutograd calls it in another function's forward then, where gradients are off.
            self.assertEqual(backward(create_graph=True), [False] * 2)
            self.assertEqual([cached.requires_grad for cached in self.cached], [False] * 2)
            model[0].bias.register_hook(lambda gradient: None)
            self.assertEqual(backward(), [False] * 2)


if __name__ == "__main__":
    run_tests()
