"""Random programs are valid, laid out as they say, and printed so that they can be read back. The comparison finds the
faults of a wrong compiler, and failing programs are made small. Needs no GPU.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from fuzzing import campaign, command_line
from fuzzing.around import (
    ACTIONS,
    EVENTS,
    PLACES_TO_RUN,
    SAVED,
    TANGENTS,
    TARGETS,
    THREADS,
    WHEN,
    Around,
)
from fuzzing.case import LAYOUTS, PLACES, Case, Input, constants_of, read
from fuzzing.check import TOLERANCE, InexactConstant, InvalidCase, Mismatch, Raised, check, tolerance_of
from fuzzing.constants import DTYPES
from fuzzing.gradients import tangent
from fuzzing.memory import GUARD, Memory, extent_of, offset_of, strides_of
from fuzzing.observation import observe
from fuzzing.operations import OPERATIONS, constant_chain
from fuzzing.reduction import reduce, reductions
from fuzzing.runner import Runner, module_of
from fuzzing.saved import hooks
from fuzzing.scope import Scope
from fuzzing.strategies import around_of, cases
from fuzzing.uses import USES, uses

from pygraph_trees.benchmark import Program
from pygraph_trees.cli.explain import partitions
from pygraph_trees.fake_gpu import absent_gpu, lower
from pygraph_trees.fake_gpu.tracing import NothingToLowerError

CPU = torch.device("cpu")
# The same cases in every run: a failure in CI comes from the change, not from chance.
FIXED = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

# Each function is a Dynamo backend; replacing one word makes it wrong in one way.
BACKENDS = '''
import gc
import os
import threading

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

def _wrong(graph, change):
    def run(*args):
        return change(graph, args)
    return run

def stale(graph, inputs):
    """Reads the tensors of its first call for ever, as a graph does whose inputs are not given to it."""
    first = []
    return _wrong(graph, lambda g, args: (first.append(args) if not first else None, g(*first[0]))[1])

def twice(graph, inputs):
    return _wrong(graph, lambda g, args: (g(*args), g(*args))[1])

def beside(graph, inputs):
    """Writes to the element in front of its first argument."""
    def change(g, args):
        outputs = g(*args)
        args[0].as_strided((1,), (1,), args[0].storage_offset() - 1).zero_()
        return outputs
    return _wrong(graph, change)

def copies(graph, inputs):
    return _wrong(graph, lambda g, args: tuple(o.clone() for o in g(*args)))

def halves(graph, inputs):
    """Right values with half of their gradients."""
    return _wrong(graph, lambda g, args: tuple(o * 0.5 + (o * 0.5).detach() for o in g(*args)))

def raises(graph, inputs):
    def change(g, args):
        raise RuntimeError("storage not in pool")
    return _wrong(graph, change)

def buffered(graph, inputs):
    """New results lie in the same buffers at each call, where the next one writes over them."""
    buffers = {}
    def change(g, args):
        outputs = list(g(*args))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for i, output in enumerate(outputs):
            if output.untyped_storage().data_ptr() not in given:
                outputs[i] = buffers.setdefault(i, output.detach()).copy_(output.detach())
        gc.collect(1)
        return tuple(outputs)
    return _wrong(graph, change)

def _backward(change):
    def compile(graph, inputs):
        def backward(g, examples):
            def run(args):
                outputs = g(*change(list(args), examples))
                args.clear()
                return outputs
            run._boxed_call = True
            return run
        return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=backward)(graph, inputs)
    return compile

def _packed(tensor, example):
    """A tensor's memory read with the strides of the first call."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or tensor._is_zerotensor():
        return tensor
    return tensor.as_strided(tensor.shape, example.stride())

ignores_strides = _backward(lambda args, examples: [_packed(a, e) for a, e in zip(args, examples)])

def _refuse_strides(args, examples):
    for tensor, example in zip(args, examples):
        if isinstance(tensor, torch.Tensor) and tensor.stride() != example.stride():
            raise AssertionError("wrong strides")
    return args

checks_strides = _backward(_refuse_strides)

def _takes_zeros(args, examples):
    if any(isinstance(a, torch.Tensor) and a._is_zerotensor() for a in args):
        return [torch.ones_like(a) if isinstance(a, torch.Tensor) else a for a in args]
    return args

misreads_zeros = _backward(_takes_zeros)

def in_main_thread(graph, inputs):
    """Wrong in other threads."""
    main = threading.get_ident()
    return _wrong(graph, lambda g, args: g(*args) if threading.get_ident() == main else tuple(o * 2 for o in g(*args)))

def positive_zeros(graph, inputs):
    return _wrong(graph, lambda g, args: tuple(o + 0.0 if o.is_floating_point() else o for o in g(*args)))

def last_place(graph, inputs):
    def next_to(o):
        return torch.nextafter(o, o * 2) if o.dtype in (torch.float32, torch.float64) else o
    return _wrong(graph, lambda g, args: tuple(next_to(o) for o in g(*args)))

def tires(graph, inputs):
    """Raises from the sixth call on."""
    calls = []
    def change(g, args):
        calls.append(None)
        if len(calls) > 5:
            raise RuntimeError("tired")
        return g(*args)
    return _wrong(graph, change)

all_calls = []
def worn(graph, inputs):
    """Gives a wrong result from the twentieth call of the process on."""
    def change(g, args):
        all_calls.append(None)
        return tuple(o * 2 for o in g(*args)) if len(all_calls) > 20 else g(*args)
    return _wrong(graph, change)

def deadly(graph, inputs):
    if "softmax" in graph.code or " + " in graph.code:
        os._exit(9)
    return graph
'''

PLAIN = Case((Input("a", (2, 3)), Input("b", (2, 3))), ("v0 = a * b",), ("v0",))
MUTATING = Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)",), ("a",))
RETURNING = Case((Input("a", (4,)),), ("v0 = a[1:]", "v1 = a + 1"), ("v0", "v1"))


@st.composite
def _arounds(draw: Any) -> Around:
    """Draws what surrounds the calls of a program to which every kind of it applies."""
    scope = Scope(draw, "float32", mutations=False)
    x = scope.tensor()
    for text in (f"torch.complex({x}, {x})", f"{x}.sum()"):
        scope.add(text, value=True)
    return around_of(draw, scope, Case(tuple(scope.inputs), tuple(scope.body), ("v0", "v1"), backward=True), True)


@st.composite
def _chains(draw: Any) -> Scope:
    """Draws a scope with a chain of constants."""
    scope = Scope(draw, "float32", mutations=False)
    scope.add(constant_chain(scope), value=True)
    return scope


class TestCases(TestCase):
    @settings(FIXED, max_examples=40)
    @given(cases())
    def test_text_is_read_back(self, case: Case) -> None:
        self.assertEqual(read(case.text()), case)

    def test_text(self) -> None:
        case = Case((Input("a", (2,), place="same", parameter=True),), ("v0 = a + 1",), ("v0",), feedback=())
        self.assertEqual(
            case.text(),
            "Case(\n"
            "    inputs=(\n"
            "        Input('a', (2,), place='same', parameter=True),\n"
            "    ),\n"
            "    body=(\n"
            "        'v0 = a + 1',\n"
            "    ),\n"
            "    returns=('v0',),\n"
            ")\n",
        )

    def test_what_is_no_case(self) -> None:
        for text in ("", "3", "Case(", "Case()", "Input('a', (2,))", "nothing"):
            with self.assertRaisesRegex(ValueError, "this is no case"):
                read(text)
        with self.assertRaisesRegex(ValueError, "layout is one of"):
            read(PLAIN.text().replace("Input('a', (2, 3)", "Input('a', (2, 3), layout='fortran'"))
        with self.assertRaisesRegex(ValueError, "not unique"):
            Case((Input("a", (1,)), Input("a", (1,))), (), ("a",))
        with self.assertRaisesRegex(ValueError, "shares the memory"):
            Case((Input("a", (1,), shares="b"),), (), ("a",))
        for wrong in ("saved='disk'", "tangents=(('v0', 'one'),)", "events=(('pack', 'sleep'),)", "where_when='never'"):
            with self.assertRaisesRegex(ValueError, "is one of"):
                read(replace(PLAIN, around=Around(saved="cpu")).text().replace("saved='cpu'", wrong))

    def test_text_of_what_is_around(self) -> None:
        around = Around(saved="cpu", tangents=(("v0", "zero"),), threshold=3)
        text = replace(PLAIN, backward=True, around=around).text()
        self.assertIn("    around=Around(saved='cpu', tangents=(('v0', 'zero'),), threshold=3),\n", text)
        self.assertEqual(read(text).around, around)
        self.assertNotIn("around", replace(PLAIN, around=Around()).text())

    def test_source(self) -> None:
        self.assertEqual(PLAIN.source(), "def program(a, b):\n    v0 = a * b\n    return v0\n")
        held = Case((Input("a", (2,)), Input("w", (2,), parameter=True)), ("v0 = a * w",), ("v0", "a"))
        self.assertEqual(
            held.source(), "def forward(self, a):\n    w = self.w\n    v0 = a * w\n    return v0, a\n"
        )  # fmt: skip

    def test_all_that_can_be_drawn_is_drawn(self) -> None:
        written: set[str] = set()
        layouts: set[str] = set()
        places: set[str] = set()
        kinds: set[str] = set()
        used: set[str] = set()

        @settings(FIXED, max_examples=400)
        @given(cases())
        def draw(case: Case) -> None:
            used.update(uses(case))
            layouts.update(i.layout for i in case.inputs)
            places.update(i.place for i in case.inputs)
            kinds.update(
                name
                for name, there in {
                    "backward": case.backward,
                    "feedback": bool(case.feedback),
                    "parameter": bool(case.parameters),
                    "shares": any(i.shares for i in case.inputs),
                    "returns an input": bool({i.name for i in case.inputs} & set(case.returns)),
                    "returns several": len(case.returns) > 1,
                }.items()
                if there
            )

        def noting(operation: Any) -> Any:
            def write(scope: Any) -> str:
                text: str = operation.write(scope)
                written.add(operation.write.__name__)
                return text

            return type(operation)(operation.family, write, operation.mutates)

        with mock.patch("fuzzing.strategies.OPERATIONS", [noting(o) for o in OPERATIONS]):
            draw()
        self.assertEqual(written, {o.write.__name__ for o in OPERATIONS})
        self.assertEqual((layouts, places), (set(LAYOUTS), set(PLACES)))
        self.assertEqual(len(kinds), 6, kinds)
        self.assertEqual(used, set(USES))

    def test_no_foreach_operation_beside_one_that_writes(self) -> None:
        """Up to torch 2.13 Inductor merges the two into a kernel whose blocks race."""
        found: list[list[bool]] = []

        @settings(FIXED, max_examples=100)
        @given(cases())
        def draw(case: Case) -> None:
            found.append(["_foreach_lerp_" in line for line in case.body if "_foreach_" in line])

        with mock.patch(
            "fuzzing.strategies.OPERATIONS", [o for o in OPERATIONS if o.family in ("foreach", "pointwise")]
        ):
            draw()
        self.assertTrue(any(each == [True] for each in found))
        self.assertTrue(any(len(each) > 1 for each in found))
        self.assertFalse([each for each in found if len(each) > 1 and any(each)])

    def test_all_that_can_be_around_is_drawn(self) -> None:
        around: dict[str, set[Any]] = {f.name: set() for f in fields(Around)}

        @settings(FIXED, max_examples=800)
        @given(_arounds())
        def draw(drawn: Around) -> None:
            for name, values in around.items():
                value = getattr(drawn, name)
                values.update(value if isinstance(value, tuple) else [value])

        draw()
        for name, allowed in (
            ("saved", SAVED),
            ("saved_when", WHEN),
            ("garbage", TARGETS),
            ("thread", THREADS),
            ("where", PLACES_TO_RUN),
        ):
            self.assertEqual(around[name] - {None}, set(allowed), name)
        self.assertEqual({kind for _, kind in around["tangents"]}, set(TANGENTS))
        self.assertEqual({event for event, _ in around["events"]}, set(EVENTS))
        self.assertEqual({action for _, action in around["events"]}, set(ACTIONS))
        self.assertEqual((around["step_of"], around["keeps"]), ({1, 2, 3}, {0, 1, 3}))
        self.assertEqual(around["inner_backward"], {False, True})
        self.assertGreater(len(around["threshold"]), 10)


class TestMemory(TestCase):
    def _prepared(self, *inputs: Input, call: int = 0) -> tuple[Memory, dict[str, torch.Tensor]]:
        memory = Memory(Case(inputs, (), ("a",)), CPU)
        for number in range(call + 1):
            tensors = memory.prepare(number)
        return memory, dict(tensors)

    def test_layouts(self) -> None:
        strides = {layout: strides_of(Input("a", (2, 4, 6, 8), layout=layout)) for layout in LAYOUTS}
        plain = torch.empty(2, 4, 6, 8)
        self.assertEqual(strides["contiguous"], plain.stride())
        self.assertEqual(strides["misaligned"], plain.stride())
        self.assertEqual(strides["transposed"], torch.empty(2, 4, 8, 6).transpose(-1, -2).stride())
        self.assertEqual(strides["sliced"], torch.empty(2, 4, 6, 11)[..., :8].stride())
        self.assertEqual(strides["strided"], torch.empty(2, 4, 6, 16)[..., ::2].stride())
        self.assertEqual(strides["expanded"], torch.empty(1, 4, 6, 8).expand(2, 4, 6, 8).stride())
        self.assertEqual(strides["channels_last"], plain.to(memory_format=torch.channels_last).stride())
        self.assertEqual(strides["overlapping"], (96, 24, 4, 1))

    def test_extent_is_what_the_tensor_reaches(self) -> None:
        for layout in LAYOUTS:
            for shape in ((2, 4, 6, 8), (3, 1), (5,), (), (0, 4)):
                item = Input("a", shape, layout=layout)
                block = torch.zeros(extent_of(item) + 2 * GUARD)
                block.as_strided(shape, strides_of(item), offset_of(item)).fill_(1)
                first = offset_of(item)
                touched = block.nonzero().flatten().tolist()
                self.assertEqual((len(touched) > 0), 0 not in shape)
                if touched:
                    self.assertEqual((touched[0], touched[-1]), (first, first + extent_of(item) - 1), (layout, shape))

    def test_values_depend_on_name_and_call_alone(self) -> None:
        _, one = self._prepared(Input("a", (5, 7)), Input("b", (3,)), call=1)
        _, two = self._prepared(Input("a", (5, 7), place="same"), call=1)
        _, other = self._prepared(Input("a", (5, 7)), call=2)
        self.assertEqual(one["a"], two["a"])
        self.assertNotEqual(one["a"], other["a"])
        self.assertLessEqual(one["a"].abs().max().item(), 1.0)

    def test_kinds_of_values(self) -> None:
        inputs = [
            Input("a", (50,), "int64", values="below 3"),
            Input("b", (50,), "int64", values="order"),
            Input("c", (50,), "bool", values="mask"),
        ]
        _, tensors = self._prepared(*inputs)
        self.assertEqual(set(tensors["a"].tolist()), {0, 1, 2})
        self.assertEqual(sorted(tensors["b"].tolist()), list(range(50)))
        self.assertEqual(set(tensors["c"].tolist()), {True, False})
        with self.assertRaisesRegex(ValueError, "values are"):
            self._prepared(Input("a", (2,), values="many"))

    def test_places(self) -> None:
        def addresses(place: str) -> list[int]:
            memory = Memory(Case((Input("a", (100,), place=place),), (), ("a",)), CPU)
            return [memory.prepare(call)["a"].data_ptr() for call in range(6)]

        self.assertEqual(len(set(addresses("same"))), 1)
        self.assertEqual(len(set(addresses("kept"))), 1)
        self.assertEqual(len(set(addresses("fresh"))), 6)
        alternate = addresses("alternate")
        self.assertEqual((alternate[::2], alternate[1::2]), ([alternate[0]] * 3, [alternate[1]] * 3))
        self.assertNotEqual(alternate[0], alternate[1])
        # Consecutive addresses differ; later ones may be in memory that was freed.
        reused = addresses("reused")
        self.assertTrue(all(before != after for before, after in itertools.pairwise(reused)))

    def test_kept_values_are_the_programs(self) -> None:
        for place, expected in (("kept", 5.0), ("same", None)):
            memory = Memory(Case((Input("a", (3,), place=place),), (), ("a",)), CPU)
            memory.prepare(0)["a"].fill_(5.0)
            found = memory.prepare(1)["a"]
            self.assertEqual(bool((found == 5.0).all()), expected is not None)

    def test_shared_memory(self) -> None:
        memory, tensors = self._prepared(Input("a", (4,), place="fresh"), Input("b", (3,), shares="a", shift=2), call=2)
        self.assertEqual(tensors["b"].data_ptr() - tensors["a"].data_ptr(), 2 * 4)
        tensors["b"][0] = 9.0
        self.assertEqual(tensors["a"][2].item(), 9.0)
        self.assertEqual(list(memory.blocks), ["a"])
        self.assertEqual(memory.blocks["a"].numel(), GUARD + 5 + GUARD)

    def test_guards(self) -> None:
        memory, tensors = self._prepared(Input("a", (4,)))
        block = memory.blocks["a"].clone()
        self.assertEqual(block[:GUARD], torch.full((GUARD,), 7.0))
        self.assertEqual(block[GUARD + 4 :], torch.full((GUARD,), 7.0))
        self.assertEqual(block[GUARD : GUARD + 4], tensors["a"])


class WithWrongBackends(TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._folder = tempfile.TemporaryDirectory()
        Path(cls._folder.name, "wrong_backends.py").write_text(BACKENDS)
        sys.path.insert(0, cls._folder.name)

    @classmethod
    def tearDownClass(cls) -> None:
        sys.path.remove(cls._folder.name)
        sys.modules.pop("wrong_backends", None)
        cls._folder.cleanup()
        super().tearDownClass()

    def _mismatch(self, case: Case, backend: str) -> str:
        with self.assertRaises(Mismatch) as caught:
            check(case, CPU, under_test=f"wrong_backends:{backend}", control="aot_eager")
        return str(caught.exception)

    def _is_found(self, case: Case, backend: str) -> bool:
        """Returns whether the comparison finds a wrong backend wrong and a right one right."""
        check(case, CPU, under_test="aot_eager")
        try:
            check(case, CPU, under_test=f"wrong_backends:{backend}")
        except Mismatch:
            return True
        return False


class TestCheck(WithWrongBackends):
    @settings(FIXED, max_examples=15)
    @given(cases())
    def test_random_programs_agree_under_aot_eager(self, case: Case) -> None:
        try:
            self.assertEqual(check(case, CPU, under_test="aot_eager", control=None).calls, case.calls)
        except Mismatch as error:
            self.fail(f"{error}\n{case.text()}")

    def test_generated_code_agrees(self) -> None:
        for case in (PLAIN, MUTATING, RETURNING):
            check(case, CPU, under_test="inductor", control=None)

    def test_stale_addresses(self) -> None:
        for place in ("alternate", "fresh", "reused"):
            moved = Case((Input("a", (2, 3), place=place), Input("b", (2, 3), place="same")), PLAIN.body, ("v0",))
            self.assertIn("call 1: wrong_backends:stale against eager: ['output'][0]", self._mismatch(moved, "stale"))

    def test_swapped_parameter(self) -> None:
        case = Case((Input("a", (3,), place="same"), Input("w", (3,), parameter=True)), ("v0 = a * w",), ("v0",))
        check(case, CPU, under_test="aot_eager", control=None)

    def test_mutation_that_happens_twice(self) -> None:
        self.assertIn("differs by", self._mismatch(MUTATING, "twice"))
        hidden = Case(MUTATING.inputs, (*MUTATING.body, "v1 = b + 1"), ("v1",))
        self.assertIn("['memory']['a'] differs", self._mismatch(hidden, "twice"))

    def test_writes_beside_an_input(self) -> None:
        self.assertIn("['memory']['a'] differs by 7", self._mismatch(PLAIN, "beside"))

    def test_output_that_no_longer_aliases(self) -> None:
        self.assertIn("outputs lie in (None, None), expected ('a + 65', None)", self._mismatch(RETURNING, "copies"))

    def test_raises(self) -> None:
        self.assertIn("raised RuntimeError: storage not in pool", self._mismatch(PLAIN, "raises"))

    def test_what_torch_does_wrong_is_not_ours(self) -> None:
        verdict = check(PLAIN, CPU, under_test="wrong_backends:stale", control="wrong_backends:stale")
        self.assertIn("call 1", str(verdict.torch_differs))
        self.assertEqual(verdict.calls, 0)
        self.assertIsNone(check(PLAIN, CPU, under_test="aot_eager", control="eager").torch_differs)

    def test_exact(self) -> None:
        self.assertEqual(check(PLAIN, CPU, under_test="aot_eager", exactly="eager").calls, 4)
        with self.assertRaisesRegex(Mismatch, "against wrong_backends:stale"):
            check(PLAIN, CPU, under_test="aot_eager", exactly="wrong_backends:stale")

    def test_gradients(self) -> None:
        case = Case((Input("a", (3,)), Input("b", (3,))), ("v0 = a * b",), ("v0", "a"), backward=True)
        check(case, CPU, under_test="aot_eager", control=None)
        self.assertIn("['gradient'][0] differs", self._mismatch(case, "halves"))

    def test_input_without_a_gradient(self) -> None:
        case = Case((Input("a", (3,)), Input("b", (3,))), ("v0 = a * b.detach()",), ("v0",), backward=True)
        check(case, CPU, under_test="aot_eager", control=None)

    def test_feedback(self) -> None:
        fed = Case(
            (Input("a", (3,)), Input("b", (3,), place="same")), ("v0 = a * 0.5 + b",), ("v0",), 4, False, ((0, "a"),)
        )
        seen: list[torch.Tensor] = []
        returned: list[torch.Tensor] = []
        function = fed.function()

        def noting(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            seen.append(a)
            returned.append(function(a, b))
            return returned[-1]

        with mock.patch.object(Case, "function", lambda case: noting):
            check(fed, CPU, under_test="eager", control=None)
        one, two = seen[::2], seen[1::2]
        self.assertEqual([a is b for a, b in zip(returned[::2], one[1:], strict=False)], [True] * 3)
        self.assertEqual([a.data_ptr() != b.data_ptr() for a, b in zip(one, two, strict=True)], [True] * 4)
        self.assertEqual(one[1:], two[1:])
        self.assertNotEqual(one[1], Memory(fed, CPU).prepare(1)["a"])

    def test_what_a_recording_returned_is_handed_on_as_a_copy(self) -> None:
        """Both sides get copies: the output dies with its step, and both must return outputs in the same inputs."""
        fed = Case((Input("a", (3,)),), ("v0 = a * 0.5",), ("v0",), 4, False, ((0, "a"),))
        seen: list[torch.Tensor] = []
        returned: list[torch.Tensor] = []

        def noting(a: torch.Tensor) -> torch.Tensor:
            seen.append(a)
            returned.append(a * 0.5)
            return returned[-1]

        def way(fn: object, kind: str) -> object:
            return noting, contextlib.nullcontext, lambda: None, lambda: kind == "ours" and len(returned) < 5

        upstream = torch._inductor.config.patch({"triton.pygraph_outputs": "upstream"})
        with mock.patch("fuzzing.runner._way", way), upstream:
            check(fed, CPU, under_test="ours")
        given_on = [a is b for a, b in zip(returned, seen[2:], strict=False)]
        self.assertEqual(given_on, [False] * 4 + [True] * 2)

    def test_invalid(self) -> None:
        with self.assertRaisesRegex(InvalidCase, "call 0: "):
            check(Case((Input("a", (2, 3)),), ("v0 = a @ a",), ("v0",)), CPU, under_test="aot_eager")


# A program with a backward, to which everything that can surround its calls applies.
TRAINED = Case(
    (Input("a", (3, 4)), Input("b", (3, 4), place="same"), Input("w", (3, 4), parameter=True)),
    ("v0 = torch.sin(a) * b * w", "v1 = torch.complex(a, b)", "v2 = v0.sum()"),
    ("v0", "v1", "v2"),
    4,
    backward=True,
)


class TestAround(WithWrongBackends):
    def _agrees(self, around: Around, case: Case = TRAINED) -> int:
        """Returns how many calls are made from inside other calls, for a program that a right backend compiles."""
        verdict = check(replace(case, around=around), CPU, under_test="aot_eager")
        self.assertEqual(verdict.calls, case.calls)
        return verdict.inside

    def test_what_autograd_keeps_comes_back_equal(self) -> None:
        for kind in SAVED:
            for when in WHEN if kind == "transposed" else ("always",):
                self._agrees(Around(saved=kind, saved_when=when))

    def test_what_saved_tensor_hooks_do(self) -> None:
        matrix = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
        for kind in SAVED:
            seen: list[str] = []
            with hooks(kind, seen.append):
                kept = torch.sin(matrix).grad_fn._saved_self
            self.assertEqual(kept, matrix)
            self.assertEqual(seen, ["pack", "unpack"])
            # The matrix itself is transposed-contiguous.
            self.assertEqual(kept.data_ptr() == matrix.data_ptr(), kind in ("identity", "transposed"), kind)
            self.assertEqual(kept.stride() != matrix.stride(), kind in ("pinned", "contiguous"), kind)

    def test_what_tangents_are(self) -> None:
        output = torch.ones(3, requires_grad=True) * 2
        pair = torch.complex(output, output)
        given = {kind: tangent(kind, pair if kind == "conj" else output) for kind in TANGENTS if kind != "missing"}
        self.assertTrue(given["zero"]._is_zerotensor())
        self.assertEqual([given[k].stride() for k in ("expanded zero", "expanded")], [(0,), (0,)])
        self.assertIsNone(given["none"])
        self.assertTrue(given["neg"].is_neg())
        self.assertTrue(given["conj"].is_conj())
        self.assertEqual(given["neg"], tangent(None, output))
        self.assertEqual(given["expanded zero"], torch.zeros(3))

    def test_tangents(self) -> None:
        for kind in TANGENTS:
            if kind != "conj":
                self._agrees(Around(tangents=(("v2" if kind == "none" else "v0", kind),)))
        self._agrees(Around(tangents=tuple((name, "missing") for name in TRAINED.returns)))
        conj = replace(TRAINED, around=Around(tangents=(("v1", "conj"),)))
        check(conj, CPU, under_test="eager")
        # Torch's own code refuses the conjugate bit, so code that refuses it too has not failed.
        self.assertIsNotNone(check(conj, CPU, under_test="aot_eager", control="aot_eager").torch_differs)

    def test_tangent_that_does_not_fit(self) -> None:
        with self.assertRaisesRegex(InvalidCase, "scalar outputs"):
            check(replace(TRAINED, around=Around(tangents=(("v0", "none"),))), CPU, under_test="aot_eager")

    def test_functions_are_called_from_hooks(self) -> None:
        for event in EVENTS:
            for target in TARGETS:
                around = Around(saved="identity", events=((event, target),), inner_backward=target == "same")
                self.assertGreaterEqual(self._agrees(around), TRAINED.calls, (event, target))

    def test_functions_are_called_from_finalizers(self) -> None:
        for around in (
            Around(garbage="same", threshold=1),
            Around(garbage="other", threshold=5, inner_backward=True),
            Around(garbage="same", events=(("forward hook", "collect"),)),
            Around(garbage="other", events=(("accumulated", "collect"), ("output hook", "collect"))),
        ):
            self.assertGreaterEqual(self._agrees(around), 2, around)
        self.assertEqual(self._agrees(Around(garbage="same")), 0)  # nothing collects

    def test_what_is_changed_for_a_call_is_as_before(self) -> None:
        before = gc.get_threshold()
        self._agrees(Around(garbage="same", threshold=1))
        self.assertEqual(gc.get_threshold(), before)
        runner = Runner(replace(TRAINED, around=Around(events=(("output hook", "other"),))), "eager", CPU)
        runner.step()
        self.assertFalse(any(t._backward_hooks for t in runner._inputs().values()))

    def test_calls_and_backwards_in_other_threads(self) -> None:
        seen: list[tuple[str, int]] = []
        compute = Case.function

        def noting(case: Case) -> Any:
            fn = compute(case)

            def forward(self: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
                seen.append(("forward", threading.get_ident()))
                a = a * 1
                a.register_hook(lambda _: seen.append(("backward", threading.get_ident())))
                return fn(self, a, b)

            return forward

        here = threading.get_ident()
        for kind in THREADS:
            seen.clear()
            with mock.patch.object(Case, "function", noting):
                runner = Runner(replace(TRAINED, around=Around(thread=kind)), "eager", CPU)
                for _ in range(3):
                    runner.step()
                runner.close()
            forwards, backwards = ([t for what, t in seen if what == w] for w in ("forward", "backward"))
            self.assertEqual([t == here for t in forwards], [kind == "backward"] * 3)
            self.assertEqual([t == here for t in backwards], [False] * 3)
            if kind == "worker":
                self.assertEqual(len({*forwards, *backwards}), 1)
            self._agrees(Around(thread=kind, garbage="same", threshold=3))
        self._agrees(Around(thread="call", thread_when="later"))

    def test_streams_and_devices_are_left_alone_on_a_cpu(self) -> None:
        for where in PLACES_TO_RUN:
            self._agrees(Around(where=where))

    def test_earlier_outputs_of_a_step_are_read_again(self) -> None:
        for keeps, step_of in ((3, 1), (0, 2), (1, 3)):
            self._agrees(Around(keeps=keeps, step_of=step_of))
        runner = Runner(replace(TRAINED, around=Around(step_of=3)), "eager", CPU)
        names = [[n for n, _ in runner.step().outputs if "earlier" in n] for _ in range(4)]
        self.assertEqual([len(n) for n in names], [0, 6, 12, 0])  # three outputs and three gradients a call

    def test_wrong_strides_of_saved_tensors_are_found(self) -> None:
        case = Case((Input("a", (3, 4)),), ("v0 = torch.sin(a)", "v1 = v0 * 2"), ("v1",), 2, backward=True)
        self.assertTrue(self._is_found(replace(case, around=Around(saved="transposed")), "ignores_strides"))
        others = Around(tangents=(("v1", "expanded"),), keeps=3, threshold=7)
        self.assertFalse(self._is_found(replace(case, around=others), "ignores_strides"))

    def test_a_zero_tangent_that_is_misread_is_found(self) -> None:
        case = Case((Input("a", (3,)),), ("v0 = torch.sin(a)", "v1 = v0 * 2"), ("v0", "v1"), 3, backward=True)
        zero = replace(case, around=Around(tangents=(("v1", "zero"),)))
        self.assertTrue(self._is_found(zero, "misreads_zeros"))
        self.assertFalse(self._is_found(replace(zero, calls=2), "misreads_zeros"))  # two calls have plain tangents
        others = replace(case, around=Around(tangents=(("v0", "missing"),), saved="clone"))
        self.assertFalse(self._is_found(others, "misreads_zeros"))

    def test_results_of_another_call_are_found(self) -> None:
        case = Case((Input("a", (4,)),), ("v0 = torch.tanh(a)", "v1 = v0 * 2"), ("v1",), 4)
        self.assertFalse(self._is_found(case, "buffered"))  # calls in sequence do not show it
        for around in (
            Around(garbage="same"),
            Around(step_of=2),
            Around(events=(("forward hook", "same"),)),
        ):
            self.assertTrue(self._is_found(replace(case, around=around), "buffered"), around)

    def test_a_wrong_result_from_inside_says_where(self) -> None:
        case = Case((Input("a", (4,)),), ("v0 = a * 2",), ("v0",), around=Around(events=(("forward hook", "other"),)))
        where = r"a call from forward hook of call 0: \['output'\]\[0\] differs"
        with mock.patch("fuzzing.inner.observe", self._spoilt), self.assertRaisesRegex(Mismatch, where):
            check(case, CPU, under_test="aot_eager")

    @staticmethod
    def _spoilt(returns: Any, outputs: Any, *rest: Any) -> Any:
        """Observes outputs with a different error each time."""
        TestAround.spoilt += 1.0
        return observe(returns, tuple(o + TestAround.spoilt for o in outputs), *rest)

    spoilt = 0.0

    def test_an_error_from_inside_is_told(self) -> None:
        around = Around(events=(("forward hook", "other"),))
        case = replace(PLAIN, around=around)
        unfit = Case((Input("a", (2,)),), ("v0 = a.view(3)",), ("v0",))
        with (
            mock.patch("fuzzing.runner.OTHER", unfit),
            self.assertRaisesRegex(InvalidCase, "invalid for input of size"),
        ):
            check(case, CPU, under_test="aot_eager")
        message = "a call from forward hook of call 2 raised RuntimeError"
        with self.assertRaisesRegex(Raised, message):
            check(case, CPU, under_test="wrong_backends:tires")

    def test_wrong_in_other_threads(self) -> None:
        around = Around(thread="worker", thread_when="later")
        self.assertTrue(self._is_found(replace(PLAIN, around=around), "in_main_thread"))
        self.assertFalse(self._is_found(replace(PLAIN, around=Around(keeps=1)), "in_main_thread"))

    def test_a_wrong_result_where_torch_raises_is_a_failure(self) -> None:
        """Torch refuses saved tensors with other strides. Raising as well is not a failure, a wrong result is one."""
        case = replace(TRAINED, around=Around(saved="transposed"))
        refuses, ignores = "wrong_backends:checks_strides", "wrong_backends:ignores_strides"
        self.assertIn("wrong strides", str(check(case, CPU, under_test=refuses, control=refuses).torch_differs))
        with mock.patch("fuzzing.check.UNGRAPHED", "aot_eager"), self.assertRaises(Mismatch) as caught:
            check(case, CPU, under_test=ignores, control=refuses)
        self.assertNotIsInstance(caught.exception, Raised)
        with mock.patch("fuzzing.check.UNGRAPHED", ignores):  # un-graphed code is just as wrong
            self.assertIsNotNone(check(case, CPU, under_test=ignores, control=refuses).torch_differs)
        # A right result is accepted although torch raises.
        self.assertEqual(check(case, CPU, under_test="aot_eager", control=refuses).calls, case.calls)


class TestConstants(WithWrongBackends):
    CASE = Case(
        (Input("a", (3,)), Input("b", (3,))),
        (
            "v0 = torch.tensor([1.5, -0.0, float('nan')], dtype=torch.float32)",
            "v1 = v0 * 2",
            "v2 = v1.to(a.device)",
            "v3 = torch.nan_to_num(v2.to(a.dtype), 0.5, 1.0, -1.0).clamp(-1, 1) * a",
            "v4 = v3 + b",
        ),
        ("v4", "v2"),
    )

    def test_constants_are_found_in_a_program(self) -> None:
        self.assertEqual((self.CASE.constants, self.CASE.moved_constants), ({"v0", "v1"}, {"v2"}))
        body = ("a.mul_(2)", "v0 = torch.arange(3)", "v1 = a + v0", "v2 = v1.to(a.device)", "v3 = v0 @ v0", "v0[0] = 1")
        self.assertEqual(constants_of(body, ["a"]), ({"v0", "v3"}, set()))

    def test_moved_constants_are_compared_bit_by_bit(self) -> None:
        check(self.CASE, CPU, under_test="aot_eager")
        for backend, ungraphed in (("positive_zeros", "last_place"), ("last_place", "positive_zeros")):
            wrong = f"wrong_backends:{backend}"
            with mock.patch("fuzzing.check.UNGRAPHED", f"wrong_backends:{ungraphed}"), self.assertRaisesRegex(
                InexactConstant, r"\['output'\]\[1\] is a constant, and has other bits: element \d is"
            ):  # fmt: skip
                check(self.CASE, CPU, under_test=wrong, control=wrong)

    def test_bits_of_ungraphed_code_are_torchs_doing(self) -> None:
        wrong = "wrong_backends:positive_zeros"
        with mock.patch("fuzzing.check.UNGRAPHED", wrong), mock.patch("fuzzing.check.ROUNDING", (wrong,)):
            for control in (wrong, "aot_eager"):
                with mock.patch("fuzzing.check.ROUNDING", ()):
                    found = check(self.CASE, CPU, under_test=wrong, control=control)
                self.assertRegex(str(found.torch_differs), "is a constant, and has other bits: element 1 is 0.0")

    def test_ways_that_may_round_are_not_held_to_it(self) -> None:
        with mock.patch("fuzzing.check.ROUNDING", ("wrong_backends:last_place",)):
            check(self.CASE, CPU, under_test="wrong_backends:last_place")

    def test_tolerance_is_that_of_other_values(self) -> None:
        body = ("v0 = torch.ones(3, dtype=torch.bfloat16)", "v1 = v0.to(a.device)", "v2 = a * v1.float()")
        case = Case((Input("a", (3,)),), body, ("v2",))
        self.assertEqual(tolerance_of(case), TOLERANCE[torch.float32])
        self.assertEqual(
            tolerance_of(replace(case, body=(*body, "v3 = a.to(torch.bfloat16)"))), TOLERANCE[torch.bfloat16]
        )

    def test_every_dtype_is_drawn_and_moved(self) -> None:
        begun: set[str] = set()
        moved: set[torch.dtype] = set()

        @settings(FIXED, max_examples=600)
        @given(_chains())
        def draw(scope: Scope) -> None:
            begun.update(re.findall(r"dtype=torch\.(\w+)", scope.body[0]))
            names: dict[str, Any] = {"torch": torch}
            for line in scope.body[: len(scope.constants)]:
                exec(line, names)
            moved.add(names[scope.constants[-1]].dtype)
            self.assertEqual(
                constants_of(scope.body, [i.name for i in scope.inputs]), (set(scope.constants), set(scope.moved))
            )

        draw()
        self.assertEqual(begun, set(DTYPES))
        self.assertEqual(moved, {getattr(torch, dtype) for dtype in DTYPES})


class TestExplained(TestCase):
    @settings(FIXED, max_examples=25)
    @given(cases())
    def test_random_programs_are_lowered_for_a_gpu_that_is_not_there(self, case: Case) -> None:
        if any(item.shares for item in case.inputs):
            return  # meta tensors have no memory to share
        tensors = {
            item.name: torch.empty_strided(item.shape, strides_of(item), dtype=item.torch_dtype, device="meta")
            for item in case.inputs
        }
        fn = case.function()
        program = Program(
            module_of(fn, case, tensors) if case.parameters else fn, tuple(tensors[i.name] for i in case.arguments)
        )
        try:
            with absent_gpu("sm_90"):
                graphs = lower(program.fn, program.args, program.kwargs, "sm_90")
        except NothingToLowerError:
            self.assertFalse([line for line in case.body if "graph_break" not in line], case.text())
            return
        for graph in graphs:
            self.assertIsNone(graph.disabled_reason, case.text())
            for part in partitions(graph):
                if part.partition.graphed:
                    self.assertEqual(
                        {i.kind for i in part.inputs} - {"static", "managed", "live", "cpu"}, set(), case.text()
                    )


class TestReduction(TestCase):
    def test_everything_that_does_not_matter_goes(self) -> None:
        case = Case(
            inputs=(
                Input("a", (33, 8), layout="sliced", place="reused"),
                Input("b", (33, 8), place="fresh"),
                Input("c", (8,), "float64", shares=None),
                Input("d", (8,), "float64", shares="c", shift=1),
                Input("w", (33, 8), parameter=True),
            ),
            body=("v0 = a * w", "v1 = torch.softmax(b, 1)", "v2 = v0 + v1", "c.mul_(d)", "v4 = v2.sum()"),
            returns=("v4", "v1", "c"),
            calls=5,
            feedback=((1, "b"),),
        )
        found = reduce(case, lambda smaller: "return v1" in smaller.source() and smaller.calls >= 2, 100)
        self.assertEqual(
            found, Case((Input("b", (2, 2), place="same"),), ("v1 = torch.softmax(b, 1)",), ("v1",), calls=2)
        )

    def test_what_is_around_goes(self) -> None:
        around = Around(
            saved="cpu",
            saved_when="later",
            tangents=(("v0", "neg"), ("v2", "none")),
            events=(("pack", "collect"), ("unpack", "same"), ("output hook", "other")),
            garbage="same",
            threshold=7,
            inner_backward=True,
            thread="worker",
            thread_when="later",
            where="stream",
            where_when="later",
            keeps=3,
            step_of=3,
        )
        for wanted in (
            Around(saved="cpu"),
            Around(tangents=(("v2", "none"),)),
            Around(events=(("unpack", "same"),)),
            Around(garbage="same", threshold=7),
            Around(thread="worker", thread_when="later"),
            Around(where="stream"),
            Around(keeps=1),
            Around(step_of=2),
        ):
            kept = [f.name for f in fields(Around) if getattr(wanted, f.name) != f.default]

            def fails(case: Case, kept: list[str] = kept, wanted: Around = wanted) -> bool:
                values = [(getattr(case.around, name), getattr(wanted, name)) for name in kept]
                return all(set(w) <= set(f) if isinstance(w, tuple) else f and f >= w for f, w in values)

            self.assertEqual(reduce(replace(TRAINED, around=around), fails, 500).around, wanted)

    def test_a_special_tangent_goes_with_its_output(self) -> None:
        case = replace(TRAINED, around=Around(tangents=(("v0", "neg"), ("v2", "none"))))
        for smaller in reductions(case):
            self.assertLessEqual({name for name, _ in smaller.around.tangents}, set(smaller.returns))

    def test_an_operator_of_a_chain_goes(self) -> None:
        body = ("v0 = torch.arange(3)", "v1 = v0 * 2", "v2 = v1.exp()", "v3 = v2.to(a.device)")
        case = Case((Input("a", (2,)),), body, ("v3",))
        found = reduce(case, lambda smaller: "exp" in smaller.source() and bool(smaller.moved_constants), 50)
        self.assertEqual(found.body, ("v0 = torch.arange(3)", "v2 = v0.exp()", "v3 = v2.to(a.device)"))

    def test_tries_are_bounded(self) -> None:
        tried: list[Case] = []
        self.assertIs(reduce(PLAIN, lambda smaller: bool(tried.append(smaller)), 3), PLAIN)
        self.assertEqual(len(tried), 3)

    @settings(FIXED, max_examples=25)
    @given(cases())
    def test_steps_give_cases_that_can_be_printed(self, case: Case) -> None:
        for smaller in reductions(case):
            self.assertEqual(read(smaller.text()), smaller)
            names = {i.name for i in smaller.inputs} | set(re.findall(r"^(\w+) = ", "\n".join(smaller.body), re.M))
            self.assertLessEqual(set(smaller.returns), names)
            self.assertLessEqual({name for _, name in smaller.feedback}, names)


class TestCampaign(TestCase):
    @contextlib.contextmanager
    def _backends(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "wrong_backends.py").write_text(BACKENDS)
            path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
            with mock.patch.dict(os.environ, PYTHONPATH=path):
                yield

    def _run(self, backend: str, **changed: Any) -> tuple[campaign.Outcome, list[str]]:
        fields = {"control": None, "exactly": None, "seconds": 120.0, "seed": 1, "most_cases": 60, **changed}
        told: list[str] = []
        with self._backends():
            outcome = campaign.run(
                campaign.Campaign("cpu", backend, **fields), lambda done, total, text: told.append(text)
            )
        return outcome, told

    def test_nothing_wrong(self) -> None:
        outcome, told = self._run("aot_eager", most_cases=5, jobs=2)
        self.assertIsNone(outcome.failure)
        self.assertEqual(outcome.counts.cases, 5)
        self.assertGreaterEqual(outcome.counts.calls, 10)
        self.assertEqual(told[-1], str(outcome.counts))
        self.assertLessEqual(set(outcome.counts.uses), set(USES))
        self.assertGreater(sum(outcome.counts.uses.values()), 0)

    def test_a_wrong_result_is_made_small(self) -> None:
        outcome, _ = self._run("wrong_backends:twice")
        assert outcome.failure is not None
        self.assertIn("against eager", outcome.failure.message)
        self.assertLessEqual(len(outcome.failure.case.body), 3, outcome.failure.case.text())
        self.assertLessEqual(outcome.failure.case.calls, 3)  # an index can leave things where they are

    def test_a_failure_that_needs_what_ran_before_says_so(self) -> None:
        outcome, _ = self._run("wrong_backends:worn")
        assert outcome.failure is not None
        self.assertIn("(but not in a process of its own)", outcome.failure.message)

    def test_a_dead_process(self) -> None:
        with mock.patch.object(campaign, "_MOST_TRIES", 1):
            outcome, _ = self._run("wrong_backends:deadly", most_cases=100)
        assert outcome.failure is not None
        self.assertIn("exit status 9", outcome.failure.message)
        self.assertRegex(outcome.failure.case.source(), r"softmax|sum\(| \+ ")

    def test_a_process_that_dies_under_the_control_as_well(self) -> None:
        case, deadly = Case((Input("a", (2,)),), ("v0 = torch.softmax(a, 0)",), ("v0",)), "wrong_backends:deadly"
        plan = campaign.Campaign("cpu", deadly, "aot_eager", None, 60.0, 1)
        with self._backends(), campaign._alone(plan, case) as lost:
            self.assertIsNotNone(lost.cause)
            self.assertEqual(lost.last_case(), case)
            ran: list[tuple[str, bool]] = []

            @contextlib.contextmanager
            def alone(plan: campaign.Campaign, given: Case) -> Iterator[mock.Mock]:
                self.assertEqual(given, case)
                ran.append((plan.under_test, plan.compares))
                yield mock.Mock(cause="exit status 9" if plan.under_test == deadly else None)

            with mock.patch.object(campaign, "_alone", alone):
                with mock.patch.object(campaign, "UNGRAPHED", "eager"):
                    self.assertFalse(campaign._control_dies(plan, lost))
                    self.assertEqual(ran, [("aot_eager", False), ("eager", False)])
                    self.assertTrue(campaign._control_dies(replace(plan, control=deadly), lost))
                with mock.patch.object(campaign, "UNGRAPHED", deadly):
                    self.assertTrue(campaign._control_dies(plan, lost))
                self.assertFalse(campaign._control_dies(replace(plan, control=None), lost))
                self.assertFalse(campaign._control_dies(plan, mock.Mock(cause=None, last_case=lambda: case)))

    def test_counts_add_up(self) -> None:
        counts = campaign.Counts(cases=1, uses={"backward": 1})
        counts.add(campaign.Counts(cases=2, inside=3, uses={"backward": 1, "threads": 2}))
        self.assertEqual(counts, campaign.Counts(cases=3, inside=3, uses={"backward": 2, "threads": 2}))
        self.assertIn("3 programs, 0 calls, 3 from inside others", str(counts))
        table = ["     2 programs with backward", "     0 programs with saved-tensor hooks"]
        self.assertEqual(counts.table().splitlines()[:2], table)

    def test_a_broken_harness_says_so(self) -> None:
        with mock.patch.object(campaign, "WORKER", "fuzzing.nowhere"), self.assertRaisesRegex(
            RuntimeError, "died before its first case"
        ):  # fmt: skip
            self._run("aot_eager")


class TestCommand(TestCase):
    def _main(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("torch.cuda.is_available", return_value=False),
        ):
            try:
                status = command_line.main(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
        return status, out.getvalue(), err.getvalue()

    def test_runs_a_case_again(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "case.py")
            path.write_text(MUTATING.text())
            status, out, err = self._main(str(path))
            self.assertEqual((status, out), (0, "agrees with eager\n"))
            self.assertIn("there is no GPU", err)
            path.write_text(PLAIN.text().replace("a * b", "a @ b"))
            status, out, _ = self._main(str(path))
            self.assertEqual((status, out.split(":")[0]), (1, "InvalidCase"))
            path.write_text("nothing")
            self.assertEqual(self._main(str(path))[0], 2)
            self.assertIn("No such file", self._main(str(Path(folder, "other.py")))[2])

    def test_wrong_calls(self) -> None:
        status, _, err = self._main("--way", "ours")
        self.assertEqual(status, 2)
        self.assertIn("--way ours needs a GPU", err)
        for wrong in (["--exact"], ["--control", "upstream"]):
            self.assertIn("need a GPU", self._main(*wrong)[2])
        for wrong in (["--jobs", "0"], ["--minutes", "0"], ["--cases", "0"]):
            self.assertIn("at least one job", self._main(*wrong)[2])

    def test_failure_is_printed_and_written(self) -> None:
        failure = campaign.Failure(PLAIN, "call 1: it differs")
        outcome = campaign.Outcome(campaign.Counts(cases=3, calls=9, torch_differs=1), failure)
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("fuzzing.command_line.run", return_value=outcome) as run,
        ):
            path = Path(folder, "case.py")
            status, out, _ = self._main("--minutes", "2", "--seed", "5", "--jobs", "2", "--out", str(path))
            self.assertEqual(read(path.read_text()), PLAIN)
        self.assertEqual(status, 1)
        self.assertIn("seed 5, 2 jobs\n3 programs, 9 calls; 1 where torch differs from eager as well", out)
        self.assertIn("call 1: it differs\n\nCase(", out)
        plan = run.call_args[0][0]
        self.assertEqual((plan.seconds, plan.seed, plan.under_test, plan.jobs), (120.0, 5, "aot_eager", 2))
        self.assertEqual((plan.control, plan.exactly), (None, None))

    def test_a_number_of_programs(self) -> None:
        counts = campaign.Counts(cases=7, uses={"threads": 2})
        for arguments, seconds, most in (
            (["--cases", "7"], 3600.0, 7),
            (["--programs", "7", "--minutes", "1"], 60.0, 7),
            ([], 300.0, None),
        ):
            with mock.patch("fuzzing.command_line.run", return_value=campaign.Outcome(counts)) as run:
                status, out, _ = self._main(*arguments)
            self.assertEqual((status, out.count("     2 programs with threads\n")), (0, 1))
            plan = run.call_args[0][0]
            self.assertEqual((plan.seconds, plan.most_cases), (seconds, most))
            self.assertGreaterEqual(plan.jobs, 1)

    def test_controls_on_a_gpu(self) -> None:
        for arguments, control, exactly in (
            ([], "upstream", None),
            (["--way", "upstream"], "compile", None),
            (["--control", "compile", "--exact"], "compile", "compile"),
            (["--way", "compile"], None, None),
        ):
            with (
                mock.patch("torch.cuda.is_available", return_value=True),
                mock.patch("fuzzing.command_line.run", return_value=campaign.Outcome()) as run,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                self.assertEqual(command_line.main(arguments), 0)
            plan = run.call_args[0][0]
            self.assertEqual((plan.device, plan.control, plan.exactly), ("cuda", control, exactly))


if __name__ == "__main__":
    run_tests()
