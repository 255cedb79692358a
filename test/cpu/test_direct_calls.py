"""Calls of compiled functions without Dynamo's guards: whatever a guard reads is seen when it changes."""

import copy
import dis
import functools
import gc
import inspect
import itertools
import sys
import threading
import unittest
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import CellType, SimpleNamespace
from unittest import mock

import torch
from guarded import SEEN, UNSEEN, Config, DirectTest, Net, change, helper, rows, tools
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.testing import CompileCounter
from torch._inductor import config

import pygraph_trees
from pygraph_trees.compat import dynamic_mark
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason
from pygraph_trees.trees.hooks import direct_calls, guard_facts
from pygraph_trees.trees.hooks.attributes import METHOD, Absent, attribute_of

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
    def test_a_change_of_what_guards_read_is_seen(self):
        tracker = torch._dynamo.mutation_guard.GenerationTracker
        for text in UNSEEN + SEEN:
            if "builtins" in text and torch.__version__ >= "2.15":
                continue  # torch alone then dies when it compiles again
            with self.subTest(text):
                torch._dynamo.reset()
                model, x = Net().eval(), rows()
                made = self.settled(model, x)
                generation = tracker.generation
                undo = change(text, model)
                self.addCleanup(undo)
                x = x.to(next(model.parameters()).dtype)
                found, was_taken, whys = self.calls(made, x)
                if was_taken and "#" not in text:
                    torch.testing.assert_close(found, model(x))
                undo()
                self.assertEqual((was_taken, bool(whys)), (text in UNSEEN, text in SEEN))
                # Torch's trees see by this number that a call has begun.
                self.assertEqual(tracker.generation, generation + 1)

    def test_a_state_of_the_thread_or_the_process_is_seen(self):
        for model, (name, state) in itertools.product((nn.Linear(4, 4), Net().eval()), STATES.items()):
            with self.subTest(name, of=type(model)):
                torch._dynamo.reset()
                x = rows()
                made = self.settled(model, x)
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

    def test_a_trace_by_fx_is_seen(self):
        made = self.settled(lambda x: x.sin(), x := rows())
        with self.assertRaisesRegex(RuntimeError, "FX to symbolically trace"):
            torch.fx.symbolic_trace(lambda: self.calls(made, x))
        self.settle(made, x)

    def test_the_last_guards_compare_objects_that_facts_hold(self):
        class Shared(nn.Linear):
            def forward(self, x, *more):
                x = super().forward(*more, x) * self.config.bias
                return x + self.part.config.bias + self.holder.config.bias

        model, x, noted = Shared(4, 4), rows(), []
        model.config, model.part, model.holder = Config(), nn.Identity(), Config()
        model.part.config = model.holder.config = model.config
        single = guard_facts.single
        with mock.patch.object(direct_calls, "single", lambda *given: noted.append(single(*given)) or noted[-1]):
            made = self.settled(model, x)
            self.assertEqual({name for _, name in noted[-1]}, {None, "__class__", "more"})
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                self.assertFalse(self.calls(made, x)[1])
                self.settle(made, x)
        self.assertTrue(self.calls(made, x)[1])
        for place in (model.holder, model.part):
            self.settle(made, x)
            place.config = Config()
            self.assertFalse(self.calls(made, x)[1])

    @torch._dynamo.config.patch(recompile_limit=64)
    def test_a_change_of_arguments_is_seen(self):
        model = Net().eval()
        made = self.settled(model, x := rows(), dynamic=False)
        marked, odd = rows(), rows()
        torch._dynamo.mark_dynamic(marked, 0)
        odd.attribute = 1
        alike = "rows()", "rows(5, 4)[2:]", "x, y=None"  # static shapes do not depend on the offset
        others = "x[:2]", "rows(4, 3).t()", "rows(requires_grad=True)", "nn.Parameter(rows())", "marked", "odd"
        others += "x, x", "x, rows(), rows()", "x, flag=False", "x, extra=rows()"
        for text in alike + others:
            with self.subTest(text):
                args, kwargs = eval(f"(lambda *args, **kwargs: (args, kwargs))({text})", globals(), locals())
                self.settle(made, x)
                self.assertEqual(self.calls(made, *args, **kwargs)[1], text in alike)
                self.assert_as_eager(made, model, *args, **kwargs)
        used = rows()
        setattr(used, dynamic_mark(), {0})  # as compiled code does with what it saves for a backward
        self.settle(made, x)
        self.assertTrue(self.calls(made, used)[1])
        self.assertRaisesRegex(TypeError, "missing 1 required", made)
        made = self.compiled(model, dynamic=False)
        self.settle(made, x, rows(), rows(), extra=rows())
        self.assertFalse(self.calls(made, x, x, rows(), extra=rows())[1])
        self.assertFalse(self.calls(made, x, rows(), rows(), other=rows())[1])
        self.settle(made, x, rows(4))
        self.assertFalse(self.calls(made, x, model.part.norm.running_mean)[1])

    def test_a_forgotten_guard_raises_under_check(self):
        forgetful = guard_facts.facts_of

        def facts_of(*given, **options):
            facts = forgetful(*given, **options)
            facts.dropped |= {source for source in facts.kept if "items" in source}
            return facts

        model, x = Net().eval(), rows()
        with mock.patch.object(direct_calls, "facts_of", facts_of):
            made = self.settled(model, x)
        model.items[0] = 9
        self.assertRaisesRegex(direct_calls.GuardsDiffer, "forward was about to skip", made, x)

    def test_a_wrong_input_raises_under_check(self):
        model, x = Net().eval(), rows()
        made = self.compiled(model)
        for _ in range(3):
            self.settle(made, x)
        (memo,) = vars(made.forward)["pygraph_direct"].memos
        memo.gather([model.part.linear.bias], memo.function)
        self.assertRaisesRegex(direct_calls.GuardsDiffer, "forward was about to skip", made, x)

    def test_no_garbage_is_collected_while_dynamos_guards_run(self):
        seen, utils = {"_memo": set(), "_verify": set()}, torch._functorch._aot_autograd.utils
        real = utils.top_saved_tensors_hooks

        def hooks():  # a guard that is in Python
            frame = sys._getframe()
            while (frame := frame.f_back) is not None:
                seen.get(frame.f_code.co_name, set()).add(gc.isenabled())
            return real()

        x = rows().requires_grad_()
        with mock.patch.object(utils, "top_saved_tensors_hooks", hooks):
            made = self.settled(Net().eval(), x)
            self.assertTrue(self.calls(made, x)[1])
        self.assertEqual(seen, {"_memo": {False}, "_verify": {False}})


class TestAttributes(DirectTest):
    """What the attributes of an object of the program depend on."""

    ANSWERED = """
    self.number
    self.number + 1 if self.name else self.other
    (self.number, None)
    self.number in self.names
    self.names.get("a", self.number)
    self.number if self.names["a"] else f"{self.items}"
    self.items
    self.__dict__.get("number") * 2
    self.__class__
    self.of_class
    """.strip().splitlines()
    REFUSED = """
    len(self.name)
    self.items[0]
    1 if self.items else 2
    [x for x in self.items]
    (lambda: self.number)()
    self == 1
    f"{self}"
    1 if self else 2
    self.items is self.items
    f"{self.names}"
    self.__dict__
    super().number
    other
    self.names.pop("a") or self.items.number
    """.strip().splitlines()

    def test_answers_depend_on_facts_alone(self):
        for text in self.ANSWERED + self.REFUSED:
            kind = type("Kind", (), {"of_class": 7, "method": lambda self: 1})
            kind.read = property(eval(f"lambda self: {text}"))
            value, steps = kind(), []
            value.number, value.name, value.items, value.names = 3, "n", [1], {"a": "b"}
            with self.subTest(text):
                if text in self.REFUSED:
                    self.assertRaises(LookupError, attribute_of, value, "read", steps)
                    self.assertEqual(steps, [])
                else:
                    self.assertEqual(attribute_of(value, "read", steps), value.read)
                    self.assertIn(("function", vars(kind)["read"].fget, None, None), steps)

    def test_errors_may_come_of_what_is_hidden(self):
        def read(self):
            try:
                return self.missing
            except AttributeError:
                return 3

        kind = type("Kind", (), {"read": property(read), "unread": property(lambda self: self.missing)})
        self.assertRaises(LookupError, attribute_of, kind(), "read", [])
        for name in ("unread", "missing"):
            self.assertRaises(Absent, attribute_of, kind(), name, [])
        kind.__getattr__ = lambda self, name: 1
        for name in ("unread", "missing"):
            self.assertRaises(LookupError, attribute_of, kind(), name, [])
        self.assertIs(attribute_of(kind(), "__getattr__", []), METHOD)

        def named(self, *, number=3.0):
            return number

        kind.named = property(named)
        self.assertRaises(LookupError, attribute_of, kind(), "named", [])

    def test_changes_of_a_class_are_seen(self):
        for text in ('Kind.__name__ = "Other"', "Kind.more = 1", "Base.more = 1", "Kind.__bases__ = (Config,)"):
            base = type("Base", (), {})
            kind = type("Kind", (base,), {})
            memo = binding.extension.Memo(
                function=None, check=None, guards=None, kept=None, steps=[("class", kind, None, None)], variables=[]
            )
            self.assertTrue(memo.holds({}, {}))
            exec(text, {"Kind": kind, "Base": base, "Config": Config})
            self.assertFalse(memo.holds({}, {}), text)

    def test_a_direct_call_runs_neither_guards_nor_code_for_what_facts_hold(self):
        model, x, seen = Net().eval(), rows(), set()
        made = self.compiled(model, "direct")
        for _ in range(2):
            self.settle(made, x)
        sys.setprofile(lambda frame, event, _: seen.add(frame.f_code))
        try:
            _, was_taken, _ = self.calls(made, x)
        finally:
            sys.setprofile(None)
        self.assertTrue(was_taken)
        self.assertNotIn(Config.__getattribute__.__code__, seen)
        (memo,) = vars(made.forward)["pygraph_direct"].memos
        self.assertNotIn("_modules", [x.argval for x in dis.get_instructions(memo.function)])
        self.assertRaises(ValueError, memo.gather, [x], memo.function)
        self.assertRaisesRegex(RuntimeError, "only a direct call", memo.function, model, x)


class TestInputs(DirectTest):
    """The inputs of the compiled code, which C++ gives."""

    def test_numbers_differ_from_call_to_call(self):
        tensors = [torch.full((2, 3), float(n)) for n in range(3)]
        for function in (lambda a, b, c, n: (a + b + c) * n, lambda a, b, c, n: (a + b + c) * n * a.shape[0]):
            torch._dynamo.reset()
            made = self.compiled(function, "direct")
            for n in (5, 5, 5, 6, *[2] * 12, 9, 11):
                torch.testing.assert_close(made(*[*tensors, n]), function(*tensors, n))

    def test_tensors_change_places(self):
        def turn(x, kept):
            kept["a"], kept["b"] = kept["b"], kept["a"]
            return x + kept["a"] * 10 - kept["b"]

        def ring(x, kept):
            kept[0], kept[1], kept[2] = kept[1], kept[2], kept[0]
            return x + kept[0] * 100 + kept[1] * 10 + kept[2]

        x, tensors = torch.zeros(3), [torch.full((3,), float(n)) for n in range(3)]
        for function, kept in ((turn, dict(zip("abc", tensors, strict=True))), (ring, tensors)):
            made, own = self.compiled(function, "direct"), kept.copy()
            for _ in range(12):
                torch.testing.assert_close(made(*[x, kept]), function(x, own))
            self.assertTrue(self.calls(made, *[x, kept])[1])

    @torch.no_grad()
    def test_memory_is_only_collected_while_nothing_is_borrowed(self):
        """Before Python 3.12, a new tuple may start the collector, whose callbacks may free what a module has held."""

        def replace(phase, info):
            if self.module is not None:
                self.module[0].weight, self.module = other, None
                self.garbage = [bytearray(b"\xff" * 64) for _ in range(200)]

        self.module, x, other = None, rows(2, 4), nn.Parameter(torch.zeros(4, 4))
        self.addCleanup(gc.callbacks.remove, replace)
        self.addCleanup(gc.enable)
        self.addCleanup(gc.set_threshold, *gc.get_threshold())
        gc.callbacks.append(replace)
        for count in range(6, 16):
            torch._dynamo.reset()
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(15)))
            made = self.compiled(model, "direct", backend="eager")
            for _ in range(3):
                self.settle(made, x)
            gc.collect()
            gc.disable()
            made(x)
            expected, self.module = model(x), model
            gc.set_threshold(gc.get_count()[0] + count, 1000, 1000)
            gc.enable()
            found = made(x)
            gc.disable()
            self.assertTrue(any(torch.equal(found, one) for one in (expected, model(x))), count)
            self.module = None

    def test_a_thread_that_compares_meets_the_end_of_the_first_direct_call(self):
        """The other one began it before; only afterwards does C++ give inputs."""

        def cloned(root, facts):
            clone = guard_facts.cloned(root, facts)
            facts.are_distinct = False
            check, nodes = (lambda variables: (self.waits(), clone.check(variables))[1]), list
            return SimpleNamespace(check=check, get_leaf_guards=nodes, get_child_managers=nodes)

        def backend(graph, inputs):
            return lambda *args: (self.waits(), graph(*args))[1]

        model, x, steps = nn.Linear(4, 4), rows(2, 4), []
        self.waits = lambda: None
        with mock.patch.object(direct_calls, "cloned", cloned):
            made = self.compiled(model, "direct", backend=backend)
            while not vars(made.forward)["pygraph_direct"].memos:
                made(x)
            made(x)  # a memo's first call is torch's
        is_compared, has_ended = threading.Event(), threading.Event()

        def waits():
            steps.append(threading.current_thread())
            if len(steps) == 2:  # the other thread's compiled code; its guards were the first
                thread.start()
                is_compared.wait(60)
            elif len(steps) == 3:  # this thread's guards
                is_compared.set()
                has_ended.wait(60)

        found = []
        thread, self.waits = threading.Thread(target=lambda: found.append(made(x))), waits
        found.append(made(x))
        has_ended.set()
        thread.join()
        for one in found:
            torch.testing.assert_close(one, model(x))
        self.assertEqual(len(found), 2)

    def test_arguments_are_not_kept(self):
        for entry in ("direct", "check"):
            model = nn.Linear(4, 4)
            made = self.compiled(model, entry, dynamic=False)
            gone = []
            for size in (*range(1, 9), *[9] * 6):
                x = rows(size, 4)
                gone.append(weakref.ref(x))
                made(x)
                del x
            gc.collect()
            self.assertEqual([reference() for reference in gone], [None] * len(gone))


class TestFunctions(DirectTest):
    @torch.no_grad()
    def test_closures_and_defaults_are_seen(self):
        model = Net().eval()

        def function(x, factor=2.0, *, offset=1.0):
            return model(x) * factor + offset

        made = self.settled(function, rows())
        for do in (
            lambda: setattr(function, "__defaults__", (3.0,)),
            lambda: function.__kwdefaults__.update(offset=2.0),
            lambda: setattr(function, "__kwdefaults__", {"offset": 4.0}),
            lambda: function.__closure__[0].__setattr__("cell_contents", Net().eval()),
            lambda: setattr(function, "__code__", (lambda x, factor=2.0, *, offset=1.0: model(x) - factor).__code__),
        ):
            do()
            args = [rows()]
            found, was_taken, _ = self.calls(made, *args)
            torch.testing.assert_close(found, function(*args))
            self.assertFalse(was_taken)
            self.settle(made, *args)

    @torch.no_grad()
    def test_another_function_at_the_same_address_is_seen(self):
        """Its closure is where the old one was, but the memory of a spare cell, freed last, becomes its cell."""

        def scaled(by):
            return lambda x: x * by

        for by in range(3, 11):
            torch._dynamo.reset()
            scale, spare, x = scaled(2.0), [CellType()], rows()
            made = self.settled(lambda x: scale(x), x)  # noqa: B023
            scale = None
            spare.clear()
            scale = scaled(float(by))
            torch.testing.assert_close(self.calls(made, x)[0], x * by)

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
        x = rows()
        made = self.settled(Net().eval(), x)
        torch._dynamo.reset()
        _, was_taken, whys = self.calls(made, x)
        self.assertEqual((was_taken, whys, self.counter.frame_count), (False, {Reason.DIRECT_CHANGED}, 2))
        self.settle(made, x)
        (entry,) = eval_frame._debug_get_cache_entry_list(Net.forward.__code__)
        deleted = torch._dynamo.guards.DeletedGuardManagerWrapper("a test")
        entry.guard_manager.extra_state.invalidate(entry, deleted)
        self.assertEqual((self.calls(made, x)[1], self.counter.frame_count), (False, 3))

    def test_functions_that_compiled_code_makes(self):
        """Dynamo's code for them has constants that cannot be hashed."""

        class Makes(nn.Module):
            def forward(self, x):
                return x.sin(), lambda z: z * 2

        made, x = self.compiled(Makes()), rows()
        for _ in range(6):
            found, double = made(x)
            torch.testing.assert_close([found, double(x)], [x.sin(), x * 2])

    def test_an_attribute_that_the_class_of_tensors_gets(self):
        class Scaled(nn.Linear):
            def forward(self, x):
                return x * (3.0 if hasattr(self.bias, "quant") else self.bias)

        x = rows()
        for function, of in ((lambda x: x * getattr(x, "quant", 3.0), torch.Tensor), (Scaled(4, 4), nn.Parameter)):
            made = self.settled(function, x, entry="direct")
            with mock.patch.object(of, "quant", 5.0, create=True):
                self.assert_as_eager(made, function, x)

    def test_inside_of_a_transform(self):
        """A memo that was made there would end the caller's transform."""
        function = lambda: torch.arange(4.0) * 2  # noqa: E731
        self.compiled(function)()
        made, x = self.compiled(function), rows()
        for _ in range(4):
            torch.testing.assert_close(torch.vmap(lambda x: made(*[]) * x)(x), torch.arange(4.0) * 2 * x)

    def test_attributes_that_are_copied_and_a_signature_of_the_programs(self):
        one, other = (self.compiled(fn) for fn in (lambda x: x + 1, lambda x: x * 2))
        for made in (one, other):
            self.settle(made, x := rows())
        functools.update_wrapper(other, one)
        torch.testing.assert_close([one(*[x]), other(*[x])], [x + 1, x * 2])
        self.assertIsNone(copy.deepcopy(vars(one)["pygraph_direct"]))

        def named(x, n=1, m=2):
            return x * n - m

        named.__signature__ = inspect.signature(lambda x, m=2, n=1: None)
        made = self.compiled(named)
        for values in ((3, 4), (3, 4), (3, 4), (4, 3), (4, 3), (4, 3)):
            torch.testing.assert_close(made(*[x, *values]), named(x, *values))

    def test_profilers_and_interrupts_of_the_program(self):
        """Of a memo's first call, and while a memo is made."""

        @torch._dynamo.disable
        def look(x):
            seen.append(sys.getprofile())
            if sets:
                sys.setprofile(sets.pop())
            return x

        seen, sets, x = [], [], rows()
        profile, made = mock.Mock(return_value=None), self.compiled(lambda x: look(x + 1))
        self.addCleanup(sys.setprofile, None)
        for _ in range(4):
            sets.append(profile)
            made(x)
            self.assertIs(sys.getprofile(), profile)
            sys.setprofile(None)
        self.assertEqual(seen, [None] * 4)
        noting = binding.extension.call_noting_codes
        self.assertRaises(KeyboardInterrupt, noting, codes := {}, mock.Mock(side_effect=KeyboardInterrupt), (), {})
        self.assertEqual((sys.getrefcount(codes), noting({}, rows, (), {})[1]), (2, True))  # nothing is left
        with mock.patch.object(direct_calls, "_memo", side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, self.compiled(lambda x: x - 1), x)

    def test_graph_breaks_errors_and_hooks_are_torchs(self):
        def backend(graph, inputs):
            return lambda *args: (runs.append(1), graph(*args))[1]

        def broken(x):
            torch._dynamo.graph_break()
            return helper(x)

        def tail(x):
            return broken(x + 1)

        hooked = Net().eval()
        hooked.register_forward_hook(lambda *a: a[2] * 2)
        breaks, hooks, args = Reason.GRAPH_BREAKS, Reason.MODULE_HOOKED, [rows()]
        for function, reason in ((broken, breaks), (tail, breaks), (hooked, hooks)):
            made, runs, counts = self.compiled(function, backend=backend), [], set()
            for _ in range(4):
                self.assert_as_eager(made, function, *args)
                counts.add(len(runs))
                runs.clear()
            self.assertEqual(len(counts), 1)  # no call ran a part as it was not compiled
            self.assertIn(reason, self.calls(made, *args)[2])

    def test_an_error_of_compiled_code_is_the_programs(self):
        def backend(graph, inputs):
            return lambda *args: fails.pop() / 0 if fails else graph(*args)

        fails = []
        made = self.settled(Net().eval(), rows(), backend=backend)
        fails.append(1)
        before = direct_calls.counts()[0]
        self.assertRaises(ZeroDivisionError, made, rows())
        self.assertEqual(direct_calls.counts()[0], before + 1)
        self.assertTrue(self.calls(made, rows())[1])

    def test_transforms_nested_calls_and_recursion_are_seen(self):
        model, x = Net().eval(), rows()
        inner = self.settled(model, x)
        batch = rows(2, 3, 4)
        torch.testing.assert_close(torch.vmap(inner)(batch), torch.vmap(model)(batch))
        outer = torch.compile(lambda x: inner(x) + 1, backend=self.counter)
        torch.testing.assert_close(outer(x), model(x) + 1)

        def backend(graph, inputs):
            return lambda *args: [self.made(x[:2])] if any(len(a) == 3 for a in args) else graph(*args)

        self.made = self.compiled(nn.Linear(4, 4), backend=backend, dynamic=False)
        for _ in range(4):
            self.assertEqual(self.made(x).shape, (2, 4))


class TestCompiledModules(DirectTest):
    """Their calls are direct at once if they would only call `forward`."""

    def test_what_a_program_puts_around_forward_is_called(self):
        def doubled(forward):
            return functools.wraps(forward)(lambda *args: forward(*args) * 2)

        x = rows()
        for text in (
            "made.forward = doubled(made.forward)",
            "made.forward = torch.no_grad()(made.forward)",
            "made.register_forward_hook(lambda *a: a[2] * 2)",
            "made._compiled_call_impl = lambda x: x * 3",
            "OptimizedModule.forward = property(lambda self: lambda x: x * 3)",
            "nn.Module._call_impl = lambda self, *args: 5",
        ):
            with self.subTest(text):
                torch._dynamo.reset()
                model = Net().eval()
                made, plain = self.settled(model, x), torch.compile(model, backend="eager")
                self.assertTrue(self.calls(made, x)[1])
                names = {"nn": nn, "torch": torch, "doubled": doubled, "OptimizedModule": eval_frame.OptimizedModule}
                original = nn.Module._call_impl
                for module in (made, plain):
                    exec(text, {**names, "made": module})
                found, expected = made(x), plain(x)
                if "forward" in vars(eval_frame.OptimizedModule):
                    del eval_frame.OptimizedModule.forward
                if nn.Module._call_impl is not original:  # setting it changes what memos know
                    nn.Module._call_impl = original
                torch.testing.assert_close(found, expected)
                if isinstance(found, torch.Tensor):
                    self.assertEqual(found.requires_grad, expected.requires_grad)

    def test_a_tuple_at_the_address_of_another_one_is_seen(self):
        """It was an attribute of a module of Python, whose objects are not kept alive."""
        x = rows()
        made = self.compiled(lambda x: x * tools.pair[1])
        for number in range(3, 9):
            tools.pair = object, float(number)
            for _ in range(4):
                torch.testing.assert_close(made(*[x]), x * number)
            del tools.pair


class TestLife(DirectTest):
    def test_a_finalizer_of_a_replaced_attribute_gets_the_new_one(self):
        """Python's quick store of an attribute frees the old value before it changes the dictionary's version."""

        class Thing:
            def __init__(self, number):
                self.number = number

            def __del__(self):
                found.extend([made(*[x, config]), config.thing.number] if self.number == 1.0 else [])

        def store(own, value):
            own.thing = value

        made, x, found = self.compiled(lambda x, own: x + own.thing.number, "direct"), rows(2), []
        config, other = Config(), Config()
        config.__dict__, other.__dict__ = {"thing": Thing(1.0)}, {"thing": 0}  # with keys of their own
        self.settle(made, x, config)
        for number in range(200):
            store(other, number)  # Python specializes the store
        self.settle(made, x, config)
        store(config, Thing(5.0))
        torch.testing.assert_close(found[0], x + found[1])

    def test_finalizers_may_call_compiled_functions_at_any_time(self):
        """Dynamo does not see frames inside of profile functions in Python, nor while Python's audit hooks run."""

        def backend(graph, inputs):
            return lambda *args: runs.append(1) or graph(*args)

        class Litter:
            def __init__(self):
                self.cycle = self

            @torch._dynamo.disable  # it may run inside of compiled functions
            def __del__(self):
                if left:
                    left.pop()
                    other(x)
                    Litter()

        x, runs, left = rows(), [], []
        other = torch.compile(lambda x: x * 2, backend=backend)
        other(x)
        self.addCleanup(gc.set_threshold, *gc.get_threshold())
        for _ in range(4):
            made = self.compiled(lambda x: sum(torch.sin(x) for _ in range(9)))
            made(x)  # compiles
            left, runs = [1] * 500, []
            [Litter() for _ in range(20)].clear()
            gc.set_threshold(1)
            for _ in range(4):
                made(x)
            gc.set_threshold(1000)
            count, left = len(left), []
            self.assertEqual(len(runs), 500 - count)

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
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(run, (True, False, True, False)))
        # How often Dynamo compiles is left open: with such threads, it also compiles again without direct calls.
        self.assertEqual(wrong, [])
        self.assertGreater(direct_calls.counts()[0], before)

    def test_a_module_that_is_gone_is_freed(self):
        model, x = Net().eval(), rows()
        model.made = self.settled(model.part, x)
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
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
        model[1].weight = model[0].weight  # which a guard compares
        for graphs in (True, False):
            for entry in ("off", "short", "check", "direct"):
                made = torch.compile(model, options={"triton.cudagraphs": graphs, "triton.pygraph_entry": entry})
                self.assertEqual("pygraph_direct" in vars(made.forward), graphs and entry in ("check", "direct"))
        direct = {"triton.cudagraphs": True, "triton.pygraph_entry": "direct"}
        filtered = torch.compile(model, options={**direct, "guard_filter_fn": lambda found: [True] * len(found)})
        self.assertNotIn("pygraph_direct", vars(filtered.forward))
        # Since torch 2.14, this is the default.
        with config.patch(direct), torch._dynamo.config.patch(use_lamba_guard_for_object_aliasing=False):
            made = torch.compile(model)
            for _ in range(3):
                torch.testing.assert_close(made(x), model(x))
        self.assertTrue(self.calls(made, x)[1])
        original = eval_frame._TorchDynamoContext.__call__
        pygraph_trees.uninstall()
        before = sum(binding.extension.counted_direct_calls())
        torch.testing.assert_close(made(x), model(x))
        self.assertEqual(sum(binding.extension.counted_direct_calls()), before)
        self.assertNotIn("pygraph_direct", vars(made.forward))
        self.assertIs(eval_frame._TorchDynamoContext.__call__, original.__wrapped__)
        pygraph_trees.install()
        self.settle(made, x)


if __name__ == "__main__":
    unittest.main()
