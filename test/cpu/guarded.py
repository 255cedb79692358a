"""A module whose results depend on all that Dynamo guards, changes of it, and the base of tests of direct calls."""

import builtins
import unittest
from collections import OrderedDict
from types import ModuleType
from typing import ClassVar

import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.testing import CompileCounter

import pygraph_trees  # noqa: F401  its patches
from pygraph_trees.native import binding
from pygraph_trees.trees.hooks import direct_calls

SCALE = [2.0]
FACTOR = torch.ones(4)


def helper(x):
    return x + 1


def other_helper(x):
    return x + 2


def shifted(by):
    def shift(x, factor=2.0, *, more=0.5):
        return x * factor + by + more

    return shift


shift, tools = shifted(0.25), ModuleType("tools")
tools.bend = torch.sin


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


class OtherPart(Part):
    def forward(self, x):
        return self.norm(self.linear(x)) * 5


class Config:
    names: ClassVar = {"offset": "bias"}  # other names of attributes

    def __init__(self):
        self.bias, self.other = 0.5, 0.75

    def __getattribute__(self, name):
        return super().__getattribute__(super().__getattribute__("names").get(name, name))

    @property
    def twice(self):
        return self.bias * 2


class Net(nn.Module):
    power = 2

    def __init__(self):
        super().__init__()
        self.part, self.number, self.items = Part(), 3, [1, 2]
        self.names, self.layers = {"a": 1.5}, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.config = Config()
        self.ordered = OrderedDict(a=2.0)

    def forward(self, x, y=None, *more, flag=True, **named):
        x = helper(self.part(x)) * self.number + self.items[0] + len(self.items) + self.config.bias
        x = x + self.config.offset + self.config.twice + getattr(self.config, "extra", 0.0)
        for layer in self.layers:
            x = layer(x) * self.power
        if y is not None:
            x = x + y
        for tensor in (*more, *named.values(), *self.ordered.values()):
            x = x + tensor
        if self.names.get("a") and flag:
            x = x * self.names["a"]
        x = shift(tools.bend(x)) + abs(self.number)
        return x * SCALE[0] * FACTOR if torch.is_grad_enabled() else x.sin()


def rows(*shape, **options):
    return torch.randn(*(shape or (3, 4)), **options)


@unittest.skipUnless(binding.extension is not None and binding.extension.HAS_VERSIONS, "needs the parts in C++")
class DirectTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.counter = CompileCounter()
        self.assertTrue(direct_calls._is_as_expected())
        self.addCleanup(direct_calls._compare_last())  # `entering` does so around calls of torch's
        self.addCleanup(torch._dynamo.reset)

    def compiled(self, fn, entry="check", **options):
        """Compiled so that calls without guards are made, and checked."""
        made = torch.compile(fn, backend=options.pop("backend", self.counter), **options)
        wrapper = made.forward if isinstance(made, nn.Module) else made
        backend = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))["callback"].cell_contents
        direct_calls.enter(wrapper, eval_frame.innermost_backend(backend), entry)
        return made

    def calls(self, function, *args, **kwargs):
        """What it returns, whether Dynamo was left out, and else why."""
        before = direct_calls.counts()
        result = function(*args, **kwargs)
        after = direct_calls.counts()
        whys = {why.reason for why, count in after[1].items() if count > before[1].get(why, 0)}
        return result, after[0] > before[0], whys

    def settle(self, made, *args, **kwargs):
        for _ in range(300):  # memos are made more and more rarely
            if self.calls(made, *args, **kwargs)[1]:
                return
        self.fail(f"it is never called without guards: {direct_calls.counts()[1]}")

    def settled(self, fn, *args, **how):
        """A compiled function whose calls with these arguments leave Dynamo out."""
        made = self.compiled(fn, **how)
        self.settle(made, *args)
        return made

    def assert_as_eager(self, made, eager, *args, **kwargs):
        found, expected = made(*args, **kwargs), eager(*args, **kwargs)
        torch.testing.assert_close(found, expected)
        self.assertEqual(found.requires_grad, expected.requires_grad)


# Changes of a module `m`: after the first ones, its next call skips the guards, though a result may differ.
UNSEEN = """
m.part.linear.weight.data.add_(1)
m.part.linear.weight.grad = torch.zeros(4, 4)
m.part.linear.weight.data = rows(4, 4)
m.load_state_dict(Net().state_dict())
nn.Linear.forward = lambda self, x: x  # nothing guards it
""".strip().splitlines()
SEEN = """
m.part.linear.weight.data = rows(4, 4).t()
m.double()
m.part.linear.weight.requires_grad_(False)
m.part.linear.weight = nn.Parameter(rows(4, 4))
m.part.linear.bias.__class__ = type("P", (nn.Parameter,), {})
m.part.linear.bias = None
torch._dynamo.mark_dynamic(m.part.linear.weight, 0)
m.part = OtherPart()
m.part.__class__ = OtherPart
m.part.__dict__.update(linear=nn.Linear(4, 4))
m.config.__dict__ = {"bias": 0.75}
m.layers.append(nn.Linear(4, 4))
m.layers = m.layers[::-1]
m.train()
m.number = 4
m.number = 3.0
m.config.bias = 0.25
m.config.extra = 1.0
Config.extra = 1.5
Config.names["offset"] = "other"
Config.names = {"offset": "other"}
Config.twice = property(lambda self: self.other)
m.items[0] = 5
m.items.append(5)
m.names["a"] = 2.5
m.names.clear()
m.ordered["a"] = 2.5
Net.power = 3
Net.forward = lambda self, x: x + 1
m.forward = lambda x: x + 2
globals().update(helper=other_helper)
builtins.abs = lambda _: 7
helper.__code__ = other_helper.__code__
shift.__defaults__ = (3.0,)
shift.__kwdefaults__["more"] = 0.75
shift.__closure__[0].cell_contents = 2.5
tools.bend = torch.cos
SCALE[0] = 3.0
m.register_forward_hook(lambda *a: a[2] * 2)
m.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
""".strip().splitlines()


def change(text, module):
    """Makes one of these changes; returns the function that undoes it outside of the module."""
    before = dict(globals()), Net.power, Net.forward, nn.Linear.forward
    code, bend, builtin, names, twice = helper.__code__, tools.bend, abs, {**Config.names}, vars(Config)["twice"]
    exec(text, globals(), {"m": module})

    def undo():
        globals().update(before[0])
        helper.__code__, tools.bend, builtins.abs, shift.__defaults__ = code, bend, builtin, (2.0,)
        shift.__kwdefaults__["more"], shift.__closure__[0].cell_contents = 0.5, 0.25
        Net.power, Net.forward, nn.Linear.forward = before[1:]
        SCALE[0] = 2.0
        Config.names, Config.twice, Config.extra = names, twice, None
        del Config.extra

    return undo
