"""The fuzzer finds the fault of a wrong compiler: its program is made small, printed, noted and run again."""

import contextlib
import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import run_tests

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools"), str(HERE)]

from commands import WithFolder, run
from fuzzing import check, command_line, everything, ledger, runner
from fuzzing.campaign import Counts
from fuzzing.case import Case, Input, read
from fuzzing.observation import Observation

from pygraph_trees.edges import branches
from pygraph_trees.edges.units import Access

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

    def test_wrong_constants_must_be_those_of_torchs_code_for_the_gpu_or_the_cpu(self):
        wrong, equal = check.InexactConstant("other bits"), set()
        wrong.names = frozenset({"['output'][0]"})

        def compare(case, alive, way, reference, tolerance, *, device, reference_device=None, **_):
            if reference == "eager" or (reference_device or device).type not in equal:
                raise wrong

        run = functools.partial(check.check, read(EXPANDED), torch.device("cuda", 0), under_test="ours")
        with mock.patch.object(check, "_compare", compare):
            self.assertRaises(check.Mismatch, run, control="compile")
            for device in ("cuda", "cpu"):
                equal.add(device)
                self.assertEqual(run(control="compile").torch_differs, "other bits")
                equal.clear()

    def test_sums_of_gradients_in_any_order_need_not_have_the_same_bits(self):
        def seen(name, apart):
            return Observation(((name, torch.tensor([1.0 + apart])),), (), (), (), ())

        agree = functools.partial(check._agree, tolerance=0.0, where="", exact=frozenset())
        for name, apart, rounded, fails in (
            ("['gradient'][0]", 1e-6, 16.0, False),
            ("['gradient'][0]", 1e-2, 16.0, True),
            ("['gradient'][0]", 1e-6, 4.0, True),
            ("['output'][0]", 1e-6, 16.0, True),
        ):
            with self.assertRaises(check.Mismatch) if fails else contextlib.nullcontext():
                agree(seen(name, apart), seen(name, 0.0), rounded=rounded)

    def test_bits_are_compared_where_the_reference_repeats_them(self):
        case, alive, varies = read(EXPANDED), mock.Mock(), mock.Mock(return_value=False)

        def compare(case, alive, way, reference, tolerance, *, device):
            if tolerance or (way != reference and way != "same") or (way == reference and varies()):
                raise check.Mismatch(f"{way} against {reference}")
            return check.Verdict(3)

        with mock.patch.object(check, "_compare", compare):
            bits = functools.partial(check.check_bits, case, torch.device("cpu"), reference="chain", alive=alive)
            self.assertEqual(bits("same"), 3)
            varies.side_effect = [False, False]
            self.assertRaisesRegex(check.Mismatch, "^other against chain$", bits, "other")
            varies.side_effect = [False, True]
            self.assertEqual(bits("other"), 0)

    def test_the_captured_order_holds_in_its_own_way_only(self):
        seen, observed = set(), runner.Runner._observed
        case = Case((Input("a", (4, 4)),), ("v0 = a * 2",), ("v0",), 2)

        def noted(self, given):
            seen.add((self.kind, branches.SIDE_BY_SIDE))
            return observed(self, given)

        with mock.patch.object(runner.Runner, "_observed", noted):
            check.check_bits(case, torch.device("cpu"), "ours", everything.CHAIN, mock.Mock())
        self.assertEqual(seen, {("ours", True), (everything.CHAIN, False)})

    def test_a_process_is_of_no_use_under_a_mode_that_was_left_active(self):
        with FakeTensorMode():
            self.assertTrue(check.is_lost(torch.device("cpu")))
        self.assertFalse(check.is_lost(torch.device("cpu")))

    def test_memory_is_overwritten_if_an_operation_wrote_it_and_it_is_free_in_a_pool(self):
        def segment(pool, **states):
            blocks = [{"address": 64 * i, "size": 64, "state": state} for i, state in enumerate(states.values())]
            return {"segment_pool_id": pool, "blocks": blocks}

        accesses = (Access(16, 32, True), Access(32, 48, False), Access(120, 200, True), Access(300, 310, True))
        operations = SimpleNamespace(found=[SimpleNamespace(declared=accesses)] * 2)
        segments = [
            segment((0, 1), a="inactive", b="active_allocated", c="inactive"),
            segment((0, 0), a="inactive", b="inactive", c="inactive", d="inactive", e="inactive"),
        ]
        with mock.patch("torch.cuda.memory_snapshot", return_value=segments):
            self.assertEqual(everything.freed(operations), [(16, 32), (128, 192)])

    def test_reasons_are_counted_and_name_a_program(self):
        counts = Counts(ungraphed={"busy": 2}, examples={"busy": 7})
        counts.add(Counts(cases=3, ungraphed={"busy": 1, "slow": 4}, examples={"busy": 0, "slow": 8}))
        self.assertEqual((counts.cases, counts.ungraphed), (3, {"busy": 3, "slow": 4}))
        lines = counts.table().splitlines()[-2:]
        self.assertEqual([line.split(":")[0].split()[-1] for line in lines], ["8", "7"])

    def test_the_ledger_is_in_contributing_and_its_number_in_the_readme(self):
        text = (HERE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
        self.assertIn(f"\n\n{ledger.table(ledger.read())}\n\n", text)
        programs = sum(entry.programs for entry in ledger.read())
        readme = (HERE.parents[1] / "README.md").read_text(encoding="utf-8")
        self.assertIn(f"{programs:,} random programs", " ".join(readme.split()))


if __name__ == "__main__":
    run_tests()
