"""The fuzzer finds the faults of wrong compilers and of nothing else; its programs are drawn, printed and read back."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools"), str(HERE)]

import captured
from fuzzing import command_line
from fuzzing.around import EVENTS, HOLDS, PLACES_TO_RUN, SAVED, TANGENTS, THREADS, Around
from fuzzing.case import Case, Input, read
from fuzzing.check import InvalidCase, Mismatch, Raised, Verdict, check
from fuzzing.faults import OPERATOR, Fault
from fuzzing.programs import program
from fuzzing.reduction import reductions

CPU = torch.device("cpu")
SEED = 1


def _wrong(start):
    """A Dynamo backend: for each graph, ``start`` returns what is called in its place with the graph and arguments."""

    def backend(graph, inputs):
        change = start()
        return lambda *args: change(graph, args)

    return backend


def _stale():
    first = []
    return lambda g, args: (first.append(args) if not first else None, g(*first[0]))[1]


def _beside(g, args):
    args[0].as_strided((1,), (1,), args[0].storage_offset() - 1).zero_()
    return g(*args)


def _buffered():
    buffers = {}

    def change(g, args):
        outputs = list(g(*args))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for i, output in enumerate(outputs):
            if output.untyped_storage().data_ptr() not in given:
                outputs[i] = buffers.setdefault(i, output.detach()).copy_(output.detach())
        gc.collect(1)
        return tuple(outputs)

    return change


def _tires():
    calls = iter(range(5))
    return lambda g, args: g(*args) if next(calls, None) is not None else torch.ones(2).view(3)


# Each is wrong in one way.
stale = _wrong(_stale)  # reads the tensors of its first call for ever
twice = _wrong(lambda: lambda g, args: (g(*args), g(*args))[1])
unwritten = _wrong(lambda: lambda g, args: g(*(a.clone() for a in args)))  # what it writes to its arguments is lost
beside = _wrong(lambda: _beside)  # writes in front of its first argument
copies = _wrong(lambda: lambda g, args: tuple(o.clone() for o in g(*args)))
halves = _wrong(lambda: lambda g, args: tuple(o * 0.5 + (o * 0.5).detach() for o in g(*args)))  # of gradients
buffered = _wrong(_buffered)  # a call's results are written over those of the call before
tires = _wrong(_tires)  # raises from the sixth call on
dies = _wrong(lambda: lambda g, args: os._exit(9))

PLAIN = Case((Input("a", (2, 3)), Input("b", (2, 3))), ("v0 = a * b",), ("v0",))
MUTATING = Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)", "v1 = b + 1"), ("v1",))
FAULTY = Case((Input("a", (4,), place="kept"),), ("a.mul_(0.5)", f"v2 = {OPERATOR}(a)"), ("v2", "a"), 7)
TRAINED = Case(
    (Input("a", (3, 4)), Input("b", (3, 4), place="same"), Input("w", (3, 4), parameter=True)),
    ("v0 = torch.sin(a) * b * w", "v1 = torch.complex(a, b)", "v2 = v0.sum()"),
    ("v0", "v1", "v2"),
    4,
    backward=True,
)


class TestCases(TestCase):
    def test_a_seed_and_a_number_give_a_program_whose_text_is_read_back(self):
        found = [program(SEED, number) for number in range(40)]
        self.assertEqual([program(SEED, number) for number in reversed(range(40))], found[::-1])
        self.assertEqual(len({case.text() for case in found}), 40)
        for case in (*found, *(smaller for one in found[:9] for smaller in reductions(one))):
            self.assertEqual(read(f"# a comment\n{case.text()}"), case)
        for text in ("", "3", "Case(", "Input('a', (2,))", PLAIN.text().replace("(2, 3)", "(2, 3), layout='fortran'")):
            with self.assertRaises(ValueError):
                read(text)


class TestCheck(TestCase):
    def test_faults_of_wrong_compilers_are_found(self):
        """A compiler that is right agrees with eager on the same programs."""
        plain = Case((Input("a", (4,)),), ("v0 = torch.tanh(a)", "v1 = v0 * 2"), ("v1",), 4)
        for backend, case, error, text in (
            ("stale", Case((Input("a", (3,), place="fresh"),), ("v0 = a * 2",), ("v0",)), Mismatch, "call 1"),
            ("twice", MUTATING, Mismatch, "'memory'"),
            ("unwritten", MUTATING, Mismatch, "'memory'"),
            ("beside", PLAIN, Mismatch, "'memory'"),
            ("copies", Case((Input("a", (4,)),), ("v0 = a[1:]",), ("v0",)), Mismatch, "outputs lie in"),
            ("tires", replace(PLAIN, calls=6), Raised, "raised RuntimeError"),
            ("halves", replace(PLAIN, backward=True), Mismatch, "'gradient'"),
            ("buffered", replace(plain, around=Around(garbage="same")), Mismatch, ""),
            ("buffered", replace(plain, around=Around(step_of=2)), Mismatch, ""),
        ):
            with self.subTest(backend=backend, case=case):
                check(case, CPU, under_test="aot_eager")
                with self.assertRaises(error) as caught:
                    check(case, CPU, under_test=f"test_fuzz:{backend}", control="aot_eager")
                self.assertIn(text, str(caught.exception))

    def test_a_right_compiler_agrees(self):
        """With random programs, and whatever happens around the calls."""
        for case in (
            *(program(SEED, number) for number in range(15)),
            *(replace(TRAINED, around=Around(saved=kind)) for kind in SAVED),
            *(replace(TRAINED, around=Around(tangents=(("v0", kind),))) for kind in {*TANGENTS} - {"conj", "none"}),
            *(replace(TRAINED, around=Around(thread=kind, garbage="same", threshold=3)) for kind in THREADS),
            *(replace(TRAINED, around=Around(where=where)) for where in PLACES_TO_RUN),
            *(replace(TRAINED, around=Around(holds=kind, keeps=3, step_of=2)) for kind in HOLDS),
        ):
            with self.subTest(case.text()):
                self.assertEqual(check(case, CPU, under_test="aot_eager").calls, case.calls)
        for event in EVENTS:  # functions that are called from hooks
            case = replace(TRAINED, around=Around(saved="identity", events=((event, "other"),)))
            self.assertGreaterEqual(check(case, CPU, under_test="aot_eager").inside, TRAINED.calls, event)
        faults = (Fault("exception", 0, 1), Fault("interrupt", 2, 1), Fault("at a call", 3, 1))
        case = replace(FAULTY, around=Around(faults=faults))
        self.assertEqual(check(case, CPU, under_test="torch._dynamo.backends.debugging:eager").caught, 3)

    def test_what_is_not_our_fault(self):
        """A fault that torch has too; what eager cannot run; a difference that only an exact comparison forbids."""
        verdict = check(PLAIN, CPU, under_test="test_fuzz:stale", control="test_fuzz:stale")
        self.assertIn("call 1", str(verdict.torch_differs))
        self.assertIsNone(check(PLAIN, CPU, under_test="aot_eager", control="eager").torch_differs)
        with self.assertRaises(InvalidCase):
            check(replace(PLAIN, body=("v0 = a @ b",)), CPU, under_test="aot_eager")
        self.assertEqual(check(PLAIN, CPU, under_test="aot_eager", exactly="eager").calls, PLAIN.calls)
        with self.assertRaises(Mismatch):
            check(PLAIN, CPU, under_test="aot_eager", exactly="test_fuzz:stale")
        # Eager gives b no gradient and compiled code zeros, which is no difference. Inductor ignores the negative bit.
        around = Around(tangents=(("v0", "neg"), ("v1", "missing")))
        body = ("v0 = torch.tanh(a)", "v1 = torch.sin(b)")
        case = Case((Input("a", (4,)), Input("b", (4,))), body, ("v0", "v1"), 1, backward=True, around=around)
        self.assertEqual(check(case, CPU, under_test="aot_eager", control="compile"), Verdict(1))
        verdict = check(case, CPU, under_test="inductor", control="compile")
        self.assertIn("['gradient'][0] differs", str(verdict.torch_differs))


class TestCommand(TestCase):
    def _main(self, *arguments):
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # for the processes
        with mock.patch("torch.cuda.is_available", return_value=False), mock.patch.dict(os.environ, PYTHONPATH=path):
            return captured.run(command_line.main, *map(str, arguments))

    def test_failing_programs_are_made_small_printed_and_run_again(self):
        for backend, cause, seconds in (("twice", "against eager", 10), ("dies", "exit status 9", 1)):
            with self.subTest(backend), tempfile.TemporaryDirectory() as folder:
                way = ("--way", f"test_fuzz:{backend}")
                limits = ("--seed", SEED, "--cases", 60, "--jobs", 1, "--reduce", seconds, "--out", folder)
                status, out, _ = self._main(*way, *limits)
                self.assertEqual(status, 1)
                (path,) = Path(folder).iterdir()
                case = read(path.read_text())
                self.assertIn(cause, out)
                self.assertIn(case.text(), out)
                if backend == "twice":
                    self.assertLessEqual(len(case.body), 3)
                    self.assertEqual(self._main(*way, path)[0], 1)
                self.assertEqual(self._main(path)[0], 0)

    def test_programs_that_agree(self):
        status, out, err = self._main("--seed", SEED, "--cases", 3, "--jobs", 2)
        self.assertEqual(status, 0)
        self.assertIn("\n3 programs, ", out)
        self.assertIn("there is no GPU", err)
        self.assertIn(program(SEED, 2).text(), self._main("--seed", SEED, "--program", 2)[1])

    def test_wrong_usage(self):
        for wrong in ("--way ours", "--exact", "--jobs 0", "--cases 0", "--program 3", "/no/such/file", __file__):
            status, out, err = self._main(*wrong.split())
            self.assertEqual((status, out), (2, ""))
            self.assertRegex(err, "error: .+")


if __name__ == "__main__":
    run_tests()
