"""The fuzzer finds the fault of a wrong compiler: its program is made small, printed, noted and run again."""

import functools
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from torch.testing._internal.common_utils import run_tests

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools"), str(HERE)]

from commands import WithFolder, run
from fuzzing import check, command_line, ledger
from fuzzing.case import read

SEED = 27  # its first program is small


def twice(graph, inputs):
    """A Dynamo backend that is wrong: it calls the graph twice."""
    return lambda *args: (graph(*args), graph(*args))[1]


EXPANDED = """Case(
    inputs=(Input('a', (2, 1)), Input('b', (2, 1), layout='expanded')),
    body=('v0 = torch.ops.fuzzing.copied(a)',),
    returns=('b', 'v0'),
    feedback=((0, 'b'),),
    around=Around(faults=(Fault(kind='exception', call=1, moment=1),)),
)"""


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

    def test_an_expanded_tensor_that_was_fed_back_is_restored_after_a_fault(self):
        (path := self.folder / "case.py").write_text(EXPANDED)
        self.assertEqual(self._main(path)[:2], (0, "agrees with eager\n"))

    def test_constants_that_torch_computes_otherwise_on_the_cpu_are_torchs(self):
        wrong, differing = check.InexactConstant("other bits"), {"ours"}
        wrong.names = frozenset({"['output'][0]"})

        def compare(case, alive, way, reference, tolerance, *, device, exact=None, **_):
            if exact is not False and (way in differing or f"{way} on {device.type}" in differing):
                raise wrong
            return check.Verdict(1)

        run = functools.partial(check.check, read(EXPANDED), torch.device("cuda", 0), under_test="ours")
        with mock.patch.object(check, "_compare", compare):
            self.assertRaises(check.InexactConstant, run, control="compile")
            differing.add("compile on cpu")
            self.assertRaises(check.InexactConstant, run)
            self.assertEqual(run(control="compile").torch_differs, "other bits")

    def test_the_ledgers_table_is_in_contributing(self):
        text = (HERE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
        self.assertIn(f"\n\n{ledger.table(ledger.read())}\n\n", text)


if __name__ == "__main__":
    run_tests()
