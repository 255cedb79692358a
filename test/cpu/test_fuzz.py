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
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import captured
import torch
from torch.testing._internal.common_utils import TestCase, run_tests

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).resolve().parent)]

from fuzzing import campaign, command_line
from fuzzing.around import (
    BESIDE,
    EVENTS,
    HOLDS,
    PLACES_TO_RUN,
    SAVED,
    TANGENTS,
    TARGETS,
    THREADS,
    WHEN,
    Around,
)
from fuzzing.case import LAYOUTS, PLACES, Case, Input, read
from fuzzing.check import InexactConstant, InvalidCase, Mismatch, NotGraphedAgain, Raised, check
from fuzzing.faults import OF_OPERATOR, OPERATOR, Fault
from fuzzing.memory import strides_of
from fuzzing.operations import OPERATIONS
from fuzzing.programs import program
from fuzzing.reduction import reduce, reductions
from fuzzing.runner import module_of
from fuzzing.uses import USES, uses

from pygraph_trees.benchmark import Program
from pygraph_trees.cli.explain import partitions
from pygraph_trees.fake_gpu import absent_gpu, lower
from pygraph_trees.fake_gpu.tracing import NothingToLowerError

CPU = torch.device("cpu")
SEED = 1

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

def breaks(graph, inputs):
    """Wrong after an exception."""
    caught = []
    def change(g, args):
        try:
            return tuple(o * 2 if caught else o for o in g(*args))
        except Exception:
            caught.append(None)
            raise
    return _wrong(graph, change)

def deadly(graph, inputs):
    if "softmax" in graph.code or " + " in graph.code:
        os._exit(9)
    return graph
'''

PLAIN = Case((Input("a", (2, 3)), Input("b", (2, 3))), ("v0 = a * b",), ("v0",))
MUTATING = Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)",), ("a",))
RETURNING = Case((Input("a", (4,)),), ("v0 = a[1:]", "v1 = a + 1"), ("v0", "v1"))
# A program with a backward, to which everything that can surround its calls applies.
TRAINED = Case(
    (Input("a", (3, 4)), Input("b", (3, 4), place="same"), Input("w", (3, 4), parameter=True)),
    ("v0 = torch.sin(a) * b * w", "v1 = torch.complex(a, b)", "v2 = v0.sum()"),
    ("v0", "v1", "v2"),
    4,
    backward=True,
)


class TestCases(TestCase):
    def test_a_seed_and_a_number_give_a_program_whose_text_is_read_back(self) -> None:
        found = [program(SEED, number) for number in range(40)]
        self.assertEqual([program(SEED, number) for number in reversed(range(40))], found[::-1])
        self.assertEqual(len({case.text() for case in found}), 40)
        for case in found:
            self.assertEqual(read(f"# a comment\n{case.text()}"), case)

    def test_what_is_no_case(self) -> None:
        for text in ("", "3", "Case(", "Case()", "Input('a', (2,))", "nothing"):
            with self.assertRaisesRegex(ValueError, "this is no case"):
                read(text)
        for right, wrong in (("(2, 3))", "(2, 3), layout='fortran')"), ("saved='cpu'", "saved='disk'")):
            with self.assertRaisesRegex(ValueError, "is one of"):
                read(replace(PLAIN, around=Around(saved="cpu")).text().replace(right, wrong))
        with self.assertRaisesRegex(ValueError, "not unique"):
            Case((Input("a", (1,)), Input("a", (1,))), (), ("a",))

    def test_all_that_can_be_drawn_is_drawn(self) -> None:
        """A few hundred programs have each operation, layout, place and use."""
        written: set[str] = set()
        layouts: set[str] = set()
        places: set[str] = set()
        used: set[str] = set()

        def draw(case: Case) -> None:
            used.update(uses(case))
            layouts.update(i.layout for i in case.inputs)
            places.update(i.place for i in case.inputs)
            for name, is_there in (
                ("feedback", case.feedback),
                ("parameter", case.parameters),
                ("shares", any(i.shares for i in case.inputs)),
                ("returns an input", {i.name for i in case.inputs} & set(case.returns)),
            ):
                used.update([name] if is_there else [])

        def noting(operation: Any) -> Any:
            def write(scope: Any) -> str:
                text: str = operation.write(scope)
                written.add(operation.write.__name__)
                return text

            return type(operation)(operation.family, write, operation.mutates)

        with mock.patch("fuzzing.programs.OPERATIONS", [noting(o) for o in OPERATIONS]):
            for number in range(600):
                draw(program(SEED, number, graphs=True))
        self.assertEqual(written, {o.write.__name__ for o in OPERATIONS})
        self.assertEqual((layouts, places), (set(LAYOUTS), set(PLACES)))
        self.assertEqual(used, {*USES, "feedback", "parameter", "shares", "returns an input"})


class WithWrongBackends(TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        path = mock.patch.object(sys, "path", [folder.name, *sys.path])
        path.start()
        for cleanup in (folder.cleanup, path.stop, lambda: sys.modules.pop("wrong_backends", None)):
            cls.addClassCleanup(cleanup)
        Path(folder.name, "wrong_backends.py").write_text(BACKENDS)

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
    def test_random_programs_agree_under_aot_eager(self) -> None:
        for number in range(15):
            case = program(SEED, number)
            with self.subTest(case.text()):
                self.assertEqual(check(case, CPU, under_test="aot_eager", control=None).calls, case.calls)

    def test_faults_of_wrong_compilers_are_found(self) -> None:
        places = [tuple(replace(i, place=place) for i in PLAIN.inputs) for place in ("alternate", "fresh", "reused")]
        trained = Case((Input("a", (3,)), Input("b", (3,))), ("v0 = a * b",), ("v0", "a"), backward=True)
        for case, backend, text in (
            *(
                (replace(PLAIN, inputs=inputs), "stale", "call 1: wrong_backends:stale against eager: ['output'][0]")
                for inputs in places
            ),
            (MUTATING, "twice", "differs by"),
            (
                replace(MUTATING, body=(*MUTATING.body, "v1 = b + 1"), returns=("v1",)),
                "twice",
                "['memory']['a'] differs",
            ),
            (PLAIN, "beside", "['memory']['a'] differs by 7"),
            (RETURNING, "copies", "outputs lie in (None, None), expected ('a + 65', None)"),
            (replace(PLAIN, calls=6), "tires", "raised RuntimeError: tired"),
            (trained, "halves", "['gradient'][0] differs"),
        ):
            with self.subTest(backend=backend, case=case):
                check(case, CPU, under_test="aot_eager")
                self.assertIn(text, self._mismatch(case, backend))

    def test_statements_that_torch_treats_specially(self) -> None:
        """Control flow, an intermediate that is resized, and a parameter that forward writes to."""
        found: dict[str, Case] = {}
        for number in range(300):
            case = program(SEED, number)
            for kind in ("torch.cond(", "torch.while_loop(", "scan(", ".resize_(", ".data.mul_(", ".data = "):
                if any(kind in line for line in case.body) and len(case.body) < 6:
                    found.setdefault(kind, case)
        self.assertEqual(len(found), 6)
        for kind, case in found.items():
            with self.subTest(kind, case=case.text()):
                self.assertEqual(check(case, CPU, under_test="aot_eager").calls, case.calls)

    def test_what_torch_does_wrong_is_not_ours(self) -> None:
        verdict = check(PLAIN, CPU, under_test="wrong_backends:stale", control="wrong_backends:stale")
        self.assertIn("call 1", str(verdict.torch_differs))
        self.assertEqual(verdict.calls, 0)
        self.assertIsNone(check(PLAIN, CPU, under_test="aot_eager", control="eager").torch_differs)

    def test_a_wrong_result_where_torch_raises_is_a_failure(self) -> None:
        """Torch's own code refuses the conjugate bit. Refusing it too is no failure, a wrong result is one."""
        conj = replace(TRAINED, around=Around(tangents=(("v1", "conj"),)))
        self.assertIsNotNone(check(conj, CPU, under_test="aot_eager", control="aot_eager").torch_differs)
        with self.assertRaises(Mismatch) as caught:
            check(conj, CPU, under_test="wrong_backends:halves", control="aot_eager")
        self.assertNotIsInstance(caught.exception, Raised)

    def test_exact(self) -> None:
        self.assertEqual(check(PLAIN, CPU, under_test="aot_eager", exactly="eager").calls, 4)
        with self.assertRaisesRegex(Mismatch, "against wrong_backends:stale"):
            check(PLAIN, CPU, under_test="aot_eager", exactly="wrong_backends:stale")

    def test_invalid(self) -> None:
        with self.assertRaisesRegex(InvalidCase, "call 0: "):
            check(Case((Input("a", (2, 3)),), ("v0 = a @ a",), ("v0",)), CPU, under_test="aot_eager")


class TestAround(WithWrongBackends):
    def _agrees(self, around: Around, case: Case = TRAINED) -> int:
        """Returns how many calls are made from inside other calls, for a program that a right backend compiles."""
        verdict = check(replace(case, around=around), CPU, under_test="aot_eager")
        self.assertEqual(verdict.calls, case.calls)
        return verdict.inside

    def test_a_right_compiler_agrees_whatever_happens_around_its_calls(self) -> None:
        for around in (
            *(Around(saved=kind) for kind in SAVED),
            *(Around(saved="transposed", saved_when=when) for when in WHEN),
            *(Around(tangents=(("v2" if kind == "none" else "v0", kind),)) for kind in TANGENTS if kind != "conj"),
            *(Around(thread=kind, garbage="same", threshold=3) for kind in THREADS),
            *(Around(where=where) for where in PLACES_TO_RUN),
            *(Around(holds=kind) for kind in HOLDS),
            *(Around(holds="graph", holds_when=when, reads=when, captures="later") for when in WHEN),
            *(Around(beside=((place, target),), inner_backward=True) for place in BESIDE for target in TARGETS),
            *(Around(keeps=keeps, step_of=step_of) for keeps, step_of in ((3, 1), (0, 2), (1, 3))),
        ):
            with self.subTest(around=around):
                self._agrees(around)
        with self.assertRaisesRegex(InvalidCase, "scalar outputs"):
            self._agrees(Around(tangents=(("v0", "none"),)))

    def test_functions_are_called_from_hooks_and_finalizers(self) -> None:
        before = gc.get_threshold()
        for around, calls in (
            *((Around(saved="identity", events=((event, "other"),)), TRAINED.calls) for event in EVENTS),
            (Around(events=(("output hook", "same"),), inner_backward=True), TRAINED.calls),
            (Around(garbage="same", threshold=1), 2),
            (Around(beside=(("thread", "same"), ("stream", "other"))), 2 * (TRAINED.calls - 2)),
            (Around(garbage="other", events=(("forward hook", "collect"),)), 2),
        ):
            self.assertGreaterEqual(self._agrees(around), calls, around)
        gc.disable()
        try:
            self.assertEqual(self._agrees(Around(garbage="same")), 0)  # nothing collects
        finally:
            gc.enable()
        self.assertEqual(gc.get_threshold(), before)

    def test_what_is_around_finds_faults_that_calls_in_sequence_do_not(self) -> None:
        kept = Case((Input("a", (3, 4)),), ("v0 = torch.sin(a)", "v1 = v0 * 2"), ("v0", "v1"), 3, backward=True)
        plain = Case((Input("a", (4,)),), ("v0 = torch.tanh(a)", "v1 = v0 * 2"), ("v1",), 4)
        for backend, case, finds, does_not in (
            ("ignores_strides", kept, Around(saved="transposed"), Around(tangents=(("v1", "expanded"),), keeps=3)),
            ("misreads_zeros", kept, Around(tangents=(("v1", "zero"),)), Around(tangents=(("v0", "missing"),))),
            ("buffered", plain, Around(garbage="same"), Around()),
            ("buffered", plain, Around(step_of=2), Around()),
            ("in_main_thread", PLAIN, Around(thread="worker", thread_when="later"), Around(keeps=1)),
            ("in_main_thread", PLAIN, Around(beside=(("thread", "same"),)), Around(beside=(("stream", "same"),))),
        ):
            with self.subTest(backend=backend, finds=finds):
                self.assertTrue(self._is_found(replace(case, around=finds), backend))
                self.assertFalse(self._is_found(replace(case, around=does_not), backend))

    def test_a_fault_inside_of_another_call_says_where(self) -> None:
        case = replace(PLAIN, around=Around(events=(("forward hook", "other"),)))
        with self.assertRaisesRegex(Raised, "a call from forward hook of call 2 raised RuntimeError"):
            check(case, CPU, under_test="wrong_backends:tires")


class TestFaults(WithWrongBackends):
    CASE = Case(
        (Input("a", (4,), place="kept"), Input("w", (4,), place="kept", parameter=True)),
        ("a.mul_(0.5).add_(w)", "w.data = w.data * 0.5", f"v2 = {OPERATOR}(a)", "v3 = torch.sin(v2)"),
        ("v3", "a"),
        7,
    )

    def _caught(self, case: Case, way: str, *faults: Fault) -> int:
        return check(replace(case, around=Around(faults=faults)), CPU, under_test=way).caught

    def test_a_call_that_fails_is_made_again_with_its_inputs_as_they_were(self) -> None:
        for kind in OF_OPERATOR:
            self.assertEqual(
                self._caught(self.CASE, "torch._dynamo.backends.debugging:eager", Fault(kind, 0, 1), Fault(kind, 2, 1)),
                2,
            )
            self.assertEqual(
                self._caught(self.CASE, "torch._dynamo.backends.debugging:eager", Fault(kind, 2, 2)), 0
            )  # one run a call
        trained = replace(TRAINED, body=(f"v0 = {OPERATOR}(a) * b * w", *TRAINED.body[1:]))
        self.assertEqual(self._caught(trained, "aot_eager", Fault("exception", 1, 2)), 1)  # in the backward

    def test_interrupts_come_in_the_code_around_the_graphs(self) -> None:
        case = replace(self.CASE, body=(self.CASE.body[0], *self.CASE.body[2:]))  # Inductor reorders the other line
        self.assertEqual(self._caught(case, "compile", Fault("at a call", 2, 1), Fault("at a call", 3, 3)), 2)
        self.assertEqual(self._caught(case, "aot_eager", Fault("at a call", 2, 1 << 20)), 0)
        self.assertLessEqual(self._caught(case, "compile", Fault("signal", 2, 1), Fault("signal", 3, 50)), 2)
        self.assertEqual(self._caught(case, "compile", Fault("limit", 2, 1)), 0)  # needs a GPU
        self.assertIsNone(sys.getprofile())

    def test_lasting_effects_of_a_fault_are_found(self) -> None:
        with self.assertRaisesRegex(Mismatch, r"call 2: .*\['output'\]\[0\] differs"):
            self._caught(self.CASE, "wrong_backends:breaks", Fault("exception", 2, 1))
        ungraphed = itertools.chain([0, 2], itertools.repeat(0))
        with mock.patch("fuzzing.check._ungraphed_calls", lambda: next(ungraphed)), self.assertRaises(NotGraphedAgain):
            self._caught(self.CASE, "aot_eager", Fault("interrupt", 1, 1))


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

    def test_moved_constants_are_compared_bit_by_bit(self) -> None:
        self.assertEqual((self.CASE.constants, self.CASE.moved_constants), ({"v0", "v1"}, {"v2"}))
        check(self.CASE, CPU, under_test="aot_eager")
        for backend, ungraphed in (("positive_zeros", "last_place"), ("last_place", "positive_zeros")):
            wrong = f"wrong_backends:{backend}"
            with mock.patch("fuzzing.check.UNGRAPHED", f"wrong_backends:{ungraphed}"), self.assertRaisesRegex(
                InexactConstant, r"\['output'\]\[1\] is a constant, and has other bits: element \d is"
            ):  # fmt: skip
                check(self.CASE, CPU, under_test=wrong, control=wrong)


class TestExplained(TestCase):
    def test_random_programs_are_lowered_for_a_gpu_that_is_not_there(self) -> None:
        for number in range(15):
            case = program(SEED, number)
            with self.subTest(case.text()):
                self._is_lowered(case)

    def _is_lowered(self, case: Case) -> None:
        special = re.search(r"torch\.(cond|while_loop)|scan\(|\.data", case.source())
        if special or any(item.shares for item in case.inputs):
            return  # meta tensors have no memory to share, and the others are not graphed
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
            around=Around(saved="cpu", events=(("pack", "collect"), ("unpack", "same")), thread="worker", step_of=3),
        )

        def fails(case: Case) -> bool:
            around = case.around
            is_kept = ("unpack", "same") in around.events and around.step_of > 1
            return "return v1" in case.source() and case.calls >= 2 and is_kept

        around = Around(events=(("unpack", "same"),), step_of=2)
        body = ("v1 = torch.softmax(b, 1)",)
        wanted = Case((Input("b", (2, 2), place="same"),), body, ("v1",), calls=2, around=around)
        self.assertEqual(reduce(case, fails, 200), wanted)

    def test_tries_are_bounded(self) -> None:
        tried: list[Case] = []
        self.assertIs(reduce(PLAIN, lambda smaller: bool(tried.append(smaller)), 3), PLAIN)
        self.assertEqual(len(tried), 3)

    def test_steps_give_cases_that_can_be_printed(self) -> None:
        for smaller in (smaller for number in range(25) for smaller in reductions(program(SEED, number))):
            self.assertEqual(read(smaller.text()), smaller)
            names = {i.name for i in smaller.inputs} | set(re.findall(r"^(\w+) = ", "\n".join(smaller.body), re.M))
            self.assertLessEqual(set(smaller.returns), names)
            self.assertLessEqual({name for _, name in smaller.feedback}, names)


class TestCampaign(TestCase):
    def _run(self, backend: str, most_cases: int, jobs: int = 1, **more: Any) -> tuple[campaign.Outcome, list[str]]:
        told: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "wrong_backends.py").write_text(BACKENDS)
            path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
            with mock.patch.dict(os.environ, PYTHONPATH=path):
                plan = campaign.Campaign(
                    "cpu", backend, None, None, 120.0, seed=1, most_cases=most_cases, jobs=jobs, **more
                )
                outcome = campaign.run(plan, lambda done, total, text: told.append(text))
        return outcome, told

    def test_programs_are_counted(self) -> None:
        outcome, told = self._run("aot_eager", most_cases=5, jobs=2)
        self.assertIsNone(outcome.failure)
        self.assertEqual((outcome.counts.cases, told[-1]), (5, str(outcome.counts)))
        self.assertGreaterEqual(outcome.counts.calls, 10)
        self.assertTrue(outcome.counts.uses)

    def test_several_failures_are_collected(self) -> None:
        outcome, _ = self._run("wrong_backends:twice", most_cases=60, jobs=2, most_failures=2, reduce_s=0.0)
        self.assertEqual(len(outcome.failures), 2)
        for failure in outcome.failures:
            self.assertEqual(failure.case, program(1, failure.number))

    def test_a_wrong_result_is_made_small(self) -> None:
        outcome, _ = self._run("wrong_backends:twice", most_cases=60)
        assert outcome.failure is not None
        self.assertIn("against eager", outcome.failure.message)
        self.assertLessEqual(len(outcome.failure.case.body), 3, outcome.failure.case.text())
        self.assertLessEqual(outcome.failure.case.calls, 3)  # an index can leave things where they are

    def test_the_program_that_kills_a_process_is_a_failure(self) -> None:
        with mock.patch.object(campaign, "_MOST_TRIES", 1):
            outcome, _ = self._run("wrong_backends:deadly", most_cases=100)
        assert outcome.failure is not None
        self.assertIn("exit status 9", outcome.failure.message)
        case = outcome.failure.case  # the other function has a sum as well
        self.assertTrue(re.search(r"softmax|sum\(| \+ ", case.source()) or "other" in case.around.targets, case.text())


class TestCommand(TestCase):
    def _main(self, *arguments: str) -> tuple[int, str, str]:
        with mock.patch("torch.cuda.is_available", return_value=False):
            return captured.run(command_line.main, *arguments)

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
        for wrong, text in (
            (["--way", "ours"], "--way ours needs a GPU"),
            (["--exact"], "need a GPU"),
            (["--jobs", "0"], "at least one job"),
            (["--cases", "0"], "at least one job"),
            (["--program", "3"], "--program needs --seed"),
        ):
            status, _, err = self._main(*wrong)
            self.assertEqual(status, 2)
            self.assertIn(text, err)

    def test_failure_is_printed_and_written(self) -> None:
        failure = campaign.Failure(PLAIN, "call 1: it differs", 7)
        outcome = campaign.Outcome(campaign.Counts(cases=3, calls=9, torch_differs=1), [failure])
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("fuzzing.command_line.run", return_value=outcome) as run,
        ):
            status, out, _ = self._main("--minutes", "2", "--seed", "5", "--jobs", "2", "--out", folder)
            self.assertEqual(read(Path(folder, "5-7.py").read_text()), PLAIN)
        self.assertEqual(status, 1)
        self.assertIn("seed 5, 2 jobs\n3 programs, 9 calls; 1 where torch differs from eager as well", out)
        self.assertIn("call 1: it differs\n\nCase(", out)
        plan = run.call_args[0][0]
        self.assertEqual((plan.seconds, plan.seed, plan.under_test, plan.jobs), (120.0, 5, "aot_eager", 2))
        self.assertEqual((plan.control, plan.exactly), (None, None))

    def test_controls_on_a_gpu(self) -> None:
        for arguments, control, exactly in (
            ([], "compile", None),
            (["--way", "upstream"], "compile", None),
            (["--control", "compile", "--exact"], "compile", "compile"),
        ):
            with (
                mock.patch("torch.cuda.is_available", return_value=True),
                mock.patch("fuzzing.command_line.run", return_value=campaign.Outcome()) as run,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                self.assertEqual(command_line.main([*arguments, "--cases", "7"]), 0)
            plan = run.call_args[0][0]
            found = (plan.device, plan.control, plan.exactly, plan.seconds, plan.most_cases)
            self.assertEqual(found, ("cuda", control, exactly, 3600.0, 7))


if __name__ == "__main__":
    run_tests()
