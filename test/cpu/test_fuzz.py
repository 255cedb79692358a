"""The fuzzer finds the faults of wrong compilers and of nothing else; its programs are drawn, printed and read back."""

from __future__ import annotations

import functools
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
from fuzzing.around import Around
from fuzzing.case import Case, Input, read
from fuzzing.check import Mismatch, check
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


# Each is wrong in one way.
stale = _wrong(_stale)  # reads the tensors of its first call for ever
twice = _wrong(lambda: lambda g, args: (g(*args), g(*args))[1])
unwritten = _wrong(lambda: lambda g, args: g(*(a.clone() for a in args)))  # what it writes to its arguments is lost
buffered = _wrong(_buffered)  # a call's results are written over those of the call before
dies = _wrong(lambda: lambda g, args: os._exit(9))
aliased = _wrong(lambda: lambda g, args: (args[0], *g(*args)[1:]))  # the first output is the first argument
aliased_and_other = _wrong(lambda: lambda g, args: (args[0], g(*args)[1] + 1))

PLAIN = Case((Input("a", (2, 3)), Input("b", (2, 3))), ("v0 = a * b",), ("v0",))
MUTATING = Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)", "v1 = b + 1"), ("v1",))


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
            ("buffered", replace(plain, around=Around(garbage="same")), Mismatch, ""),
            ("buffered", replace(plain, around=Around(step_of=2)), Mismatch, ""),
        ):
            with self.subTest(backend=backend, case=case):
                check(case, CPU, under_test="aot_eager")
                with self.assertRaises(error) as caught:
                    check(case, CPU, under_test=f"test_fuzz:{backend}", control="aot_eager")
                self.assertIn(text, str(caught.exception))

    def test_a_fault_that_the_control_has_too_hides_no_other_one(self):
        """The control's other faults do not count."""
        case = Case((Input("a", (4,)),), ("v0 = a + 0", "v1 = a * 2"), ("v0", "v1"), 3)
        run = functools.partial(check, case, CPU)
        found = run(under_test="test_fuzz:aliased", control="test_fuzz:aliased_and_other")
        self.assertIn("outputs are in", str(found.torch_differs))
        for control in ("aot_eager", "test_fuzz:aliased"):
            with self.assertRaises(Mismatch):
                run(under_test="test_fuzz:aliased_and_other", control=control)


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


if __name__ == "__main__":
    run_tests()
