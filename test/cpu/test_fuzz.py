"""The fuzzer finds the faults of wrong compilers and of nothing else; a failing program is made small and printed."""

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools"), str(HERE)]

from commands import WithFolder, run
from fuzzing import command_line, ledger
from fuzzing.around import Around
from fuzzing.case import Case, Input, read
from fuzzing.check import Mismatch, check

CPU = torch.device("cpu")
SEED = 27  # its first program is small


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

MUTATING = Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)", "v1 = b + 1"), ("v1",))


class TestCheck(TestCase):
    def test_faults_of_wrong_compilers_are_found(self):
        """A compiler that is right agrees with eager on the same programs."""
        plain = Case((Input("a", (4,)),), ("v0 = torch.tanh(a)", "v1 = v0 * 2"), ("v1",), 4)
        for backend, case, text in (
            ("stale", Case((Input("a", (3,), place="fresh"),), ("v0 = a * 2",), ("v0",)), "call 1"),
            ("unwritten", MUTATING, "'memory'"),
            ("buffered", replace(plain, around=Around(garbage="same")), ""),
        ):
            with self.subTest(backend=backend, case=case):
                check(case, CPU, under_test="aot_eager")
                with self.assertRaisesRegex(Mismatch, text):
                    check(case, CPU, under_test=f"test_fuzz:{backend}", control="aot_eager")


class TestCommand(WithFolder):
    def _main(self, *arguments):
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # for the processes
        with mock.patch("torch.cuda.is_available", return_value=False), mock.patch.dict(os.environ, PYTHONPATH=path):
            return run(command_line.main, *map(str, arguments))

    def test_a_failing_program_is_made_small_printed_noted_and_run_again(self):
        way, limits = ("--way", "test_fuzz:twice"), ("--seed", SEED, "--cases", 60, "--jobs", 1, "--reduce", 4)
        noted = self.folder / "ledger.json"
        status, out, _ = self._main(*way, *limits, "--out", self.folder / "failing", "--ledger", noted)
        (path,) = (self.folder / "failing").iterdir()
        (entry,) = ledger.read(noted)
        self.assertRegex(*entry.failures, f"^{path.stem}: call ")
        self.assertEqual((entry.programs, entry.everything), (entry.counts["cases"], False))
        case = read(path.read_text())
        self.assertEqual((status, "against eager" in out, case.text() in out), (1, True, True))
        self.assertLessEqual(len(case.body), 3)
        self.assertEqual((self._main(*way, path)[0], self._main(path)[0]), (1, 0))

    def test_the_ledgers_table_is_in_contributing(self):
        text = (HERE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
        self.assertIn(f"\n\n{ledger.table(ledger.read())}\n\n", text)


if __name__ == "__main__":
    run_tests()
