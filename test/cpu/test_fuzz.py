"""Random programs: that they are valid, laid out as they say and printed so that they can be read back; that the
comparison finds what a wrong compiler does; and that what fails becomes small. Needs no GPU.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, given, settings
from torch.testing._internal.common_utils import TestCase, run_tests

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from fuzzing import campaign, command_line
from fuzzing.case import LAYOUTS, PLACES, Case, Input, read
from fuzzing.check import InvalidCase, Mismatch, check, module_of
from fuzzing.memory import GUARD, Memory, extent_of, offset_of, strides_of
from fuzzing.operations import OPERATIONS
from fuzzing.reduction import reduce
from fuzzing.strategies import cases

from pygraph_trees.absent_gpu import absent_gpu, lower
from pygraph_trees.absent_gpu.tracing import NothingToLowerError
from pygraph_trees.comparison import Program
from pygraph_trees.explain import partitions

CPU = torch.device("cpu")
# The same cases in every run: what CI finds is of the change, not of the day.
FIXED = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

# Each is a Dynamo backend; replacing one word makes it wrong in one way.
BACKENDS = '''
import os

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

def deadly(graph, inputs):
    if "softmax" in graph.code:
        os._exit(9)
    return graph
'''

PLAIN = Case((Input("a", (2, 3)), Input("b", (2, 3))), ("v0 = a * b",), ("v0",))
MUTATING = Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)",), ("a",))
RETURNING = Case((Input("a", (4,)),), ("v0 = a[1:]", "v1 = a + 1"), ("v0", "v1"))


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

        @settings(FIXED, max_examples=400)
        @given(cases())
        def draw(case: Case) -> None:
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
        # Neighbours differ; later ones may come back to memory that was freed.
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


class TestCheck(TestCase):
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

    @settings(FIXED, max_examples=30)
    @given(cases())
    def test_random_programs_agree_under_aot_eager(self, case: Case) -> None:
        self.assertEqual(check(case, CPU, under_test="aot_eager", control=None).calls, case.calls)

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
        """To both sides: it is gone with its step, and outputs must lie in the same inputs on both."""
        fed = Case((Input("a", (3,)),), ("v0 = a * 0.5",), ("v0",), 4, False, ((0, "a"),))
        seen: list[torch.Tensor] = []
        returned: list[torch.Tensor] = []

        def noting(a: torch.Tensor) -> torch.Tensor:
            seen.append(a)
            returned.append(a * 0.5)
            return returned[-1]

        def way(fn: object, kind: str) -> object:
            return noting, contextlib.nullcontext, lambda: None, lambda: kind == "ours" and len(returned) < 5

        with mock.patch("fuzzing.check._way", way):
            check(fed, CPU, under_test="ours")
        given_on = [a is b for a, b in zip(returned, seen[2:], strict=False)]
        self.assertEqual(given_on, [False] * 4 + [True] * 2)

    def test_invalid(self) -> None:
        with self.assertRaisesRegex(InvalidCase, "call 0: "):
            check(Case((Input("a", (2, 3)),), ("v0 = a @ a",), ("v0",)), CPU, under_test="aot_eager")


class TestExplained(TestCase):
    @settings(FIXED, max_examples=25)
    @given(cases())
    def test_random_programs_are_lowered_for_a_gpu_that_is_not_there(self, case: Case) -> None:
        if any(item.shares for item in case.inputs):
            return  # tensors without memory do not share it
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
                    self.assertEqual({i.kind for i in part.inputs} - {"static", "managed", "live"}, set(), case.text())


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

    def test_tries_are_bounded(self) -> None:
        tried: list[Case] = []
        self.assertIs(reduce(PLAIN, lambda smaller: bool(tried.append(smaller)), 3), PLAIN)
        self.assertEqual(len(tried), 3)

    @settings(FIXED, max_examples=25)
    @given(cases())
    def test_steps_give_cases_that_can_be_printed(self, case: Case) -> None:
        from fuzzing.reduction import reductions

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
            outcome = campaign.run(campaign.Plan("cpu", backend, **fields), lambda done, total, text: told.append(text))
        return outcome, told

    def test_nothing_wrong(self) -> None:
        outcome, told = self._run("aot_eager", most_cases=11, jobs=2)
        self.assertIsNone(outcome.failure)
        self.assertEqual(outcome.counts.cases, 11)
        self.assertGreaterEqual(outcome.counts.calls, 20)
        self.assertEqual(told[-1], str(outcome.counts))

    def test_a_wrong_result_is_made_small(self) -> None:
        outcome, _ = self._run("wrong_backends:twice")
        assert outcome.failure is not None
        self.assertIn("against eager", outcome.failure.message)
        self.assertLessEqual(len(outcome.failure.case.body), 3, outcome.failure.case.text())
        self.assertLessEqual(outcome.failure.case.calls, 2)

    def test_a_dead_process(self) -> None:
        with mock.patch.object(campaign, "_MOST_TRIES", 2):
            outcome, _ = self._run("wrong_backends:deadly", most_cases=100)
        assert outcome.failure is not None
        self.assertIn("exit status 9", outcome.failure.message)
        self.assertIn("softmax", outcome.failure.case.source())

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
        for wrong in (["--jobs", "0"], ["--minutes", "0"]):
            self.assertIn("at least one job", self._main(*wrong)[2])

    def test_failure_is_printed_and_written(self) -> None:
        failure = campaign.Failure(PLAIN, "call 1: it differs")
        outcome = campaign.Outcome(campaign.Counts(cases=3, calls=9, torch_differs=1), failure)
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("fuzzing.command_line.run", return_value=outcome) as run,
        ):
            path = Path(folder, "case.py")
            status, out, _ = self._main("--minutes", "2", "--seed", "5", "--out", str(path))
            self.assertEqual(read(path.read_text()), PLAIN)
        self.assertEqual(status, 1)
        self.assertIn("seed 5\n3 programs, 9 calls; 1 where torch differs from eager as well", out)
        self.assertIn("call 1: it differs\n\nCase(", out)
        plan = run.call_args[0][0]
        self.assertEqual((plan.seconds, plan.seed, plan.under_test, plan.jobs), (120.0, 5, "aot_eager", 1))
        self.assertEqual((plan.control, plan.exactly), (None, None))

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
