"""Calls of compiled functions without Dynamo's guards: whatever a guard reads is seen when it changes.

Eager is the oracle. Dynamo's own guards run at the first 64 calls that skip them, and an error is raised if one fails.
"""

import gc
import threading
import unittest
import weakref
from unittest import mock

import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.testing import CompileCounter
from torch._inductor import config

import pygraph_trees
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason
from pygraph_trees.trees.hooks import direct_calls, guard_facts

SCALE = [2.0]
FACTOR = torch.ones(4)


def helper(x):
    return x + 1


def other_helper(x):
    return x + 2


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


class Net(nn.Module):
    power = 2

    def __init__(self):
        super().__init__()
        self.part, self.number, self.items = Part(), 3, [1, 2]
        self.names, self.layers = {"a": 1.5}, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.config = type("Config", (), {})()
        self.config.bias = 0.5

    def forward(self, x, y=None, *more, flag=True, **named):
        x = helper(self.part(x)) * self.number + self.items[0] + len(self.items) + self.config.bias
        for layer in self.layers:
            x = layer(x) * self.power
        if y is not None:
            x = x + y
        for tensor in (*more, *named.values()):
            x = x + tensor
        if self.names.get("a") and flag:
            x = x * self.names["a"]
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
        self.addCleanup(torch._dynamo.reset)

    def compiled(self, fn, mode="check", **options):
        """Compiled so that each call without guards is checked."""
        made = torch.compile(fn, backend=options.pop("backend", self.counter), **options)
        self.enter(made, mode)
        return made

    def enter(self, made, mode="check"):
        wrapper = made.forward if isinstance(made, nn.Module) else made
        backend = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))["callback"].cell_contents
        direct_calls.enter(wrapper, eval_frame.innermost_backend(backend), mode)

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

    def assert_as_eager(self, made, eager, *args, **kwargs):
        found, expected = made(*args, **kwargs), eager(*args, **kwargs)
        torch.testing.assert_close(found, expected)
        self.assertEqual(found.requires_grad, expected.requires_grad)


def with_data(tensor, data):
    tensor.data = data


# What changes a module's results, or not; and whether the next call may skip the guards.
CHANGES = {
    "nothing": (lambda m: None, True),
    "an optimizer's step": (lambda m: m.part.linear.weight.data.add_(1), True),
    "a gradient": (lambda m: setattr(m.part.linear.weight, "grad", torch.zeros(4, 4)), True),
    "other data": (lambda m: with_data(m.part.linear.weight, rows(4, 4)), True),
    "load_state_dict": (lambda m: m.load_state_dict(Net().state_dict()), True),
    "strides": (lambda m: with_data(m.part.linear.weight, rows(4, 4).t()), False),
    "dtypes": (lambda m: m.double(), False),
    "requires_grad": (lambda m: m.part.linear.weight.requires_grad_(False), False),
    "a parameter": (lambda m: setattr(m.part.linear, "weight", nn.Parameter(rows(4, 4))), False),
    "a parameter's class": (
        lambda m: setattr(m.part.linear.weight, "__class__", type("P", (nn.Parameter,), {})),
        False,
    ),
    "no bias": (lambda m: setattr(m.part.linear, "bias", None), False),
    "a marked dimension": (lambda m: torch._dynamo.mark_dynamic(m.part.linear.weight, 0), False),
    "a module": (lambda m: setattr(m, "part", OtherPart()), False),
    "a module's class": (lambda m: setattr(m.part, "__class__", OtherPart), False),
    "a module's dictionary": (lambda m: m.part.__dict__.update(linear=nn.Linear(4, 4)), False),
    "another dictionary": (lambda m: setattr(m.config, "__dict__", {"bias": 0.75}), False),
    "a layer more": (lambda m: m.layers.append(nn.Linear(4, 4)), False),
    "layers in another order": (lambda m: setattr(m, "layers", m.layers[::-1]), False),
    "train": (lambda m: m.train(), False),
    "a number": (lambda m: setattr(m, "number", 4), False),
    "a number's type": (lambda m: setattr(m, "number", 3.0), False),
    "an attribute of another object": (lambda m: setattr(m.config, "bias", 0.25), False),
    "an item": (lambda m: m.items.__setitem__(0, 5), False),
    "a longer list": (lambda m: m.items.append(5), False),
    "a dictionary's value": (lambda m: m.names.update(a=2.5), False),
    "an empty dictionary": (lambda m: m.names.clear(), False),
    "a class's attribute": (lambda m: setattr(Net, "power", 3), False),
    "a method without a guard": (lambda m: setattr(nn.Linear, "forward", lambda self, x: x), True),
    "its method": (lambda m: setattr(Net, "forward", lambda self, x: x + 1), False),
    "its own method": (lambda m: setattr(m, "forward", lambda x: x + 2), False),
    "a global function": (lambda m: globals().update(helper=other_helper), False),
    "a global list": (lambda m: SCALE.__setitem__(0, 3.0), False),
    "a hook": (lambda m: m.register_forward_hook(lambda *a: a[2] * 2), False),
    "a hook before": (lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 2,)), False),
}
# What changes all calls.
STATES = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a function mode": lambda: torch.overrides.BaseTorchFunctionMode(),
    "a dispatch mode": lambda: torch.utils._python_dispatch.BaseTorchDispatchMode(),
    "a default device": lambda: torch.device("cpu"),
    "a stance": lambda: torch.compiler.set_stance("force_eager"),
    "the profiler": lambda: torch.profiler.profile(),
}


class TestChanges(DirectTest):
    def restore(self):
        for place, name, value in self.before:
            setattr(place, name, value) if not isinstance(place, dict) else place.__setitem__(name, value)
        SCALE[0] = 2.0

    def setUp(self):
        super().setUp()
        self.addCleanup(self.restore)
        self.before = [
            (Net, "power", 2),
            (Net, "forward", Net.forward),
            (nn.Linear, "forward", nn.Linear.forward),
            (globals(), "helper", helper),
        ]

    def test_a_change_of_what_guards_read_is_seen(self):
        for name, (change, is_taken) in CHANGES.items():
            with self.subTest(name):
                torch._dynamo.reset()
                model, x = Net().eval(), rows()
                made = self.compiled(model)
                self.settle(made, x)
                generation = torch._dynamo.mutation_guard.GenerationTracker.generation
                change(model)
                x = x.to(next(model.parameters()).dtype)
                try:
                    found, was_taken, whys = self.calls(made, x)
                    if is_taken and "method" not in name:
                        torch.testing.assert_close(found, model(x))
                except RuntimeError:  # dtypes differ; torch raises it
                    was_taken, whys = False, {None}
                finally:
                    self.restore()
                self.assertEqual((was_taken, bool(whys)), (is_taken, not is_taken))
                # Torch's trees see by this number that a call has begun.
                self.assertEqual(torch._dynamo.mutation_guard.GenerationTracker.generation, generation + 1)

    def test_a_state_of_the_thread_or_the_process_is_seen(self):
        for name, state in STATES.items():
            with self.subTest(name):
                torch._dynamo.reset()
                model, x = Net().eval(), rows()
                made = self.compiled(model)
                self.settle(made, x)
                with state():
                    found, was_taken, _ = self.calls(made, x)
                    expected = model(x)
                torch.testing.assert_close(found, expected)
                self.assertEqual((found.requires_grad, was_taken), (expected.requires_grad, False))
                self.assertTrue(self.calls(made, x)[1])
        for switch, value in (
            (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
            (torch.set_default_dtype, torch.get_default_dtype()),
            (torch.set_num_threads, torch.get_num_threads()),
        ):
            self.addCleanup(switch, value)
            switch({bool: True, torch.dtype: torch.float64}.get(type(value), 1 if value == 2 else 2))
            self.assertFalse(self.calls(made, x)[1], switch)
            switch(value)
            self.assertTrue(self.calls(made, x)[1], switch)

    @torch._dynamo.config.patch(recompile_limit=64)
    def test_a_change_of_arguments_is_seen(self):
        model = Net().eval()
        made = self.compiled(model, dynamic=False)
        x = rows()
        self.settle(made, x)
        marked, odd = rows(), rows()
        torch._dynamo.mark_dynamic(marked, 0)
        odd.attribute = 1
        for args, kwargs, is_taken in (
            ((rows(),), {}, True),
            ((x[:2],), {}, False),
            ((rows(4, 3).t(),), {}, False),
            ((rows(5, 4)[2:],), {}, True),  # static shapes do not depend on the offset
            ((rows(requires_grad=True),), {}, False),
            ((nn.Parameter(rows()),), {}, False),
            ((x, x), {}, False),
            ((x, rows(), rows()), {}, False),
            ((x,), {"flag": False}, False),
            ((x,), {"extra": rows()}, False),
            ((x,), {"y": None}, True),
            ((marked,), {}, False),
            ((odd,), {}, False),
        ):
            with self.subTest(args=args, kwargs=kwargs):
                self.settle(made, x)
                self.assertEqual(self.calls(made, *args, **kwargs)[1], is_taken)
                self.assert_as_eager(made, model, *args, **kwargs)
        self.assertRaisesRegex(TypeError, "missing 1 required", made)
        made = self.compiled(model, dynamic=False)
        self.settle(made, x, rows(), rows(), extra=rows())
        self.assertFalse(self.calls(made, x, x, rows(), extra=rows())[1])
        self.assertFalse(self.calls(made, x, rows(), rows(), other=rows())[1])
        self.settle(made, x, rows(4))
        self.assertFalse(self.calls(made, x, model.part.norm.running_mean)[1])

    def test_a_forgotten_guard_raises_under_check(self):
        forgetful = guard_facts.facts_of

        def facts_of(*given):
            facts = forgetful(*given)
            facts.dropped |= {source for source in facts.kept if "items" in source}
            return facts

        model, x = Net().eval(), rows()
        with mock.patch.object(direct_calls, "facts_of", facts_of):
            made = self.compiled(model)
            self.settle(made, x)
        model.items[0] = 9
        with self.assertRaisesRegex(direct_calls.GuardsDiffer, "Net.forward was about to skip"):
            made(x)


class TestFunctions(DirectTest):
    def test_globals_closures_and_defaults_are_seen(self):
        model = Net().eval()

        def function(x, factor=2.0, *, offset=1.0):
            return model(x) * factor + offset

        made = self.compiled(function)
        self.settle(made, *[rows()])
        for change in (
            lambda: setattr(function, "__defaults__", (3.0,)),
            lambda: function.__kwdefaults__.update(offset=2.0),
            lambda: setattr(function, "__kwdefaults__", {"offset": 4.0}),
            lambda: function.__closure__[0].__setattr__("cell_contents", Net().eval()),
            lambda: setattr(function, "__code__", (lambda x, factor=2.0, *, offset=1.0: model(x) - factor).__code__),
        ):
            change()
            args = [rows()]
            found, was_taken, _ = self.calls(made, *args)
            torch.testing.assert_close(found, function(*args))
            self.assertFalse(was_taken)
            self.settle(made, *args)

    def test_two_modules_share_code_and_each_has_its_memo(self):
        one, other, x = Net().eval(), Net().eval(), rows()
        made = [self.compiled(model) for model in (one, other)]
        for _ in range(8):
            for function, model in zip(made, (one, other), strict=True):
                self.assert_as_eager(function, model, x)
        self.assertTrue(all(self.calls(function, x)[1] for function in made))

    def test_other_backends_and_regions_keep_their_code(self):
        model, x, others = Net().eval(), rows(), CompileCounter()
        one, other = self.compiled(model), self.compiled(model, backend=others)
        for made in (one, other, one, other):
            self.settle(made, x)
        self.assertEqual((self.counter.frame_count, others.frame_count), (1, 1))

    def test_several_sizes_have_a_memo_each(self):
        for dynamic in (False, True):
            torch._dynamo.reset()
            model = Net().eval()
            made = self.compiled(model, dynamic=dynamic)
            for _ in range(8):
                for size in (3, 5, 7):
                    self.assert_as_eager(made, model, rows(size, 4))
            self.assertTrue(all(self.calls(made, rows(size, 4))[1] for size in (3, 5, 7, 3)))

    def test_a_reset_and_an_entry_without_its_object_are_seen(self):
        model, x = Net().eval(), rows()
        made = self.compiled(model)
        self.settle(made, x)
        torch._dynamo.reset()
        _, was_taken, whys = self.calls(made, x)
        self.assertEqual((was_taken, whys, self.counter.frame_count), (False, {Reason.DIRECT_CHANGED}, 2))
        entry = eval_frame._debug_get_cache_entry_list(Net.forward.__code__)[0]
        self.settle(made, x)
        eval_frame._debug_get_cache_entry_list(Net.forward.__code__)[0].guard_manager.extra_state.invalidate(
            entry, torch._dynamo.guards.DeletedGuardManagerWrapper("a test")
        )
        self.assertEqual((self.calls(made, x)[1], self.counter.frame_count), (False, 3))

    def test_graph_breaks_errors_and_hooks_are_torchs(self):
        def broken(x):
            torch._dynamo.graph_break()
            return helper(x)

        def tail(x):
            return broken(x + 1)

        hooked = Net().eval()
        hooked.register_forward_hook(lambda *a: a[2] * 2)
        for function, reason in (
            (broken, Reason.GRAPH_BREAKS),
            (tail, Reason.GRAPH_BREAKS),
            (hooked, Reason.MODULE_HOOKED),
        ):
            made = self.compiled(function)
            args = [rows()]
            for _ in range(4):
                self.assert_as_eager(made, function, *args)
            self.assertIn(reason, self.calls(made, *args)[2])

    def test_an_error_of_compiled_code_is_the_programs(self):
        class Failing(Exception):
            pass

        def backend(graph, inputs):
            def run(*args):
                if fails:
                    raise Failing("here")
                return graph(*args)

            return run

        fails = []
        made = self.compiled(Net().eval(), backend=backend)
        self.settle(made, rows())
        fails.append(True)
        before = direct_calls.counts()[0]
        self.assertRaisesRegex(Failing, "here", made, rows())
        self.assertEqual(direct_calls.counts()[0], before + 1)
        fails.clear()
        self.assertTrue(self.calls(made, rows())[1])

    def test_transforms_nested_calls_and_recursion_are_seen(self):
        model, x = Net().eval(), rows()
        inner = self.compiled(model)
        self.settle(inner, x)
        batch = rows(2, 3, 4)
        torch.testing.assert_close(torch.vmap(inner)(batch), torch.vmap(model)(batch))
        outer = torch.compile(lambda x: inner(x) + 1, backend=self.counter)
        torch.testing.assert_close(outer(x), model(x) + 1)

        def backend(graph, inputs):
            return lambda *args: [self.made(x[:2])] if any(len(a) == 3 for a in args) else graph(*args)

        self.made = self.compiled(nn.Linear(4, 4), backend=backend, dynamic=False)
        for _ in range(4):
            self.assertEqual(self.made(x).shape, (2, 4))


class TestLife(DirectTest):
    def test_threads_with_their_own_modes_get_their_own_results(self):
        model, wrong = Net().eval(), []
        made = self.compiled(model)

        def run(is_grad):
            x = rows()
            with torch.set_grad_enabled(is_grad):
                expected = model(x)
                for _ in range(200):
                    found = made(x)
                    if found.requires_grad != is_grad or not torch.allclose(found, expected):
                        wrong.append(is_grad)

        for is_grad in (True, False):
            with torch.set_grad_enabled(is_grad):
                self.settle(made, rows())
        before = direct_calls.counts()[0]
        threads = [threading.Thread(target=run, args=(i % 2 == 0,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((wrong, self.counter.frame_count), ([], 2))
        self.assertGreater(direct_calls.counts()[0], before)

    def test_a_module_that_is_gone_is_freed(self):
        model, x = Net().eval(), rows()
        model.made = self.compiled(model.part)
        self.settle(model.made, x)
        gone = [weakref.ref(one) for one in (x, model.part.linear, model.part.linear.weight, model)]
        del x
        model.part.linear = nn.Linear(4, 4)
        gc.collect()
        self.assertEqual([reference() for reference in gone], [None] * 3 + [model])
        del model
        torch._dynamo.reset()
        gc.collect()
        self.assertEqual([reference() for reference in gone], [None] * 4)

    def test_flags_choose_and_uninstalling_puts_torchs_call_back(self):
        x = rows()
        for options, mode in (
            ({"triton.cudagraphs": True, "triton.pygraph_entry": "direct"}, True),
            ({"triton.cudagraphs": True, "triton.pygraph_entry": "check"}, True),
            ({"triton.cudagraphs": True}, False),
            ({"triton.pygraph_entry": "direct"}, False),
        ):
            model = nn.Sequential(nn.Linear(4, 4)).eval()
            made = torch.compile(model, options=options)
            self.assertEqual("pygraph_direct" in vars(made.forward), mode, options)
            self.assertIn("pygraph_direct" in vars(made.forward), (mode,))
        with config.patch({"triton.cudagraphs": True, "triton.pygraph_entry": "direct"}):
            made = torch.compile(model)
            for _ in range(3):
                torch.testing.assert_close(made(x), model(x))
        self.assertTrue(self.calls(made, x)[1])
        original = eval_frame._TorchDynamoContext.__call__
        pygraph_trees.uninstall()
        self.addCleanup(pygraph_trees.install)
        before = sum(binding.extension.counted_direct_calls())
        torch.testing.assert_close(made(x), model(x))
        self.assertEqual(sum(binding.extension.counted_direct_calls()), before)
        self.assertNotIn("pygraph_direct", vars(made.forward))
        self.assertIs(eval_frame._TorchDynamoContext.__call__, original.__wrapped__)


if __name__ == "__main__":
    unittest.main()
