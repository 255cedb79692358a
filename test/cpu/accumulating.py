"""Compares backwards that accumulate gradients themselves with those of torch's engine, in every bit and layout."""

import functools
import unittest

import torch
from torch import nn
from torch._inductor import config
from torch.testing._internal.common_utils import TestCase

from pygraph_trees.native import binding
from pygraph_trees.trees.hooks import backward_edges

WORDS = torch.randint(0, 10, (4,))
LABELS = torch.randint(0, 8, (4,))
TRAINS = 11  # parameters


class Net(nn.Module):
    LAYERS = 5

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(self.LAYERS))

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Broken(Net):
    LAYERS = 6  # enough of them after the break

    def forward(self, x):
        x = torch.relu(self.layers[0](self.words(x)))
        torch._dynamo.graph_break()
        for layer in self.layers[1:]:
            x = torch.relu(layer(x))
        return x


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(super().forward(x))


class Small(Net):
    LAYERS = 3


def compiled(model):
    return torch.compile(model, backend="aot_eager")


def counted():
    """How many backwards were taken, and why others were not."""
    taken, others = backward_edges.counts()
    return taken, {why.reason: count for why, count in others.items()}


def gradient_of(parameter):
    """All that a program can see of a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    layout = (gradient.layout, None if gradient.is_sparse else gradient.stride(), gradient.dtype, type(gradient))
    return gradient.to_dense().clone(), layout, gradient.requires_grad, gradient._version


def names(node):
    return [None if next_ is None else type(next_).__name__ for next_, _ in node.next_functions]


def node_of(loss):
    """The node of the only compiled function."""
    node = loss.grad_fn
    while "CompiledFunction" not in type(node).__name__:
        node = node.next_functions[0][0]
    return node


@unittest.skipIf(binding.extension is None, "not built for this torch")
class BackwardTest(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(config.patch({"triton.cudagraphs": True}))  # aot_eager makes none
        self.addCleanup(torch._dynamo.reset)

    def run_with(self, entry, program, make):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        before = counted()
        with config.patch({"triton.pygraph_entry": entry}):
            try:
                result = program(model, compiled(model))
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        after = counted()
        why = {reason: count - before[1].get(reason, 0) for reason, count in after[1].items()}
        found = [gradient_of(p) for p in model.parameters()], [p.detach().clone() for p in model.parameters()], result
        return found, after[0] - before[0], {reason: count for reason, count in why.items() if count}

    def compare(self, program, make=Net, taken=0, why=None):
        """The program's gradients, parameters and result are the engine's; it is taken so often, or not, and why."""
        engine, *counts = self.run_with("off", program, make)
        self.assertEqual(counts, [0, {}])
        ours, *counts = self.run_with("short", program, make)
        self.assertEqual(counts, [taken, why or {}])
        self.assertEqual(ours, engine, rtol=0, atol=0)
        return ours[2]


def as_engine(taken=0, make=Net, why=None, result=None):
    """Makes a test of a program, as :meth:`BackwardTest.compare` does; ``result`` may be a function that checks it."""

    def test_of(program):
        @functools.wraps(program)
        def test(self):
            found = self.compare(program, make, taken, why)
            self.assertTrue(result(found), found) if callable(result) else self.assertEqual(found, result)

        return test

    return test_of


def step(model, call):
    call(WORDS).sum().backward()


def like_aot(gradients):
    """A function like AOTAutograd's that returns these gradients; marked if "short" is in force."""

    class CompiledFunction(torch.autograd.Function):
        _aot_id = 0
        boxed_grads_call = True

        @staticmethod
        def forward(ctx, *parameters):
            return torch.zeros((), requires_grad=True)

        @staticmethod
        def backward(ctx, *_):
            return tuple(gradients)

    if config.triton.pygraph_entry == "short":
        backward_edges.mark(CompiledFunction._backward_cls)
    return CompiledFunction


# Hooks on a parameter. Each one is put on by a function of the parameter and a list of what it sees.
HOOKS = {
    "tensor": lambda p, seen: p.register_hook(lambda g: seen.append(g.clone()) or g * 2),
    "after": lambda p, seen: p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    "node, before": lambda p, seen: _held(p, "register_prehook", lambda g: seen.append(g[0].clone()) or (g[0] * 3,)),
    "node, after": lambda p, seen: _held(p, "register_hook", lambda _, g: seen.append(g[0].clone())),
}


def _held(parameter, method, hook):
    """A parameter does not hold its node, and the node holds the hook."""
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    return node, getattr(node, method)(hook)


class Doing(torch.autograd.Function):
    """Returns a tensor, and takes an action when the backward reaches it; a hook would keep edges from being taken."""

    @staticmethod
    def forward(ctx, tensor, action):
        ctx.action = action
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.action()
        return gradient, None


def after_first(model, call, action):
    """A backward in which an action, given the loss, is taken once the backward has begun."""
    box = []
    box.append(Doing.apply(call(WORDS), lambda: action(box[0])).sum())
    box[0].backward()
    return box.pop()
