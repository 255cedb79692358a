"""Random programs whose inputs move, alias and are written to, against eager.

``PYGRAPH_FUZZ_PROGRAMS`` is their number, 300 by default; ``tools/fuzz`` runs for a given time. They run in other
processes: eager itself has kernels that fault on misaligned inputs, and a fault ends a process.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from indirection import IndirectionTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from fuzzing.around import Around
from fuzzing.campaign import Campaign, run
from fuzzing.case import Case, Input
from fuzzing.check import check
from fuzzing.faults import Fault
from fuzzing.uses import USES

from pygraph_trees.trees.functions.dispatch import PER_THREAD

USES_ALL_GPUS = True  # its processes share them
PROGRAMS = int(os.environ.get("PYGRAPH_FUZZ_PROGRAMS", "300"))
SECONDS = 120.0
HANGS = {7: (79,)}  # by seed: programs that hang in torch.compile alone (torch 2.11), and would each take minutes
JOBS = max(4, (os.cpu_count() or 1) // 3)  # it is the longest of the lane


def first(indirection, *_):
    return indirection


@instantiate_parametrized_tests
class TestIndirectionRandom(IndirectionTestCase):
    def log(self, done, total, text):
        """Whoever ends the process finds out how far it came."""
        if done - self.logged >= 20:
            self.logged = done
            print(f"{done:.0f} s of {total:.0f}: {text}", file=sys.stderr, flush=True)

    logged = 0.0

    @parametrize("indirection,programs,seed", [("auto", PROGRAMS, 7), ("table", PROGRAMS // 3, 8)], name_fn=first)
    def test_random_programs(self, indirection, programs, seed):
        drawn = programs + programs // 3  # some cannot run in eager, or differ under torch.compile too
        limits = {"reduce_s": 20.0, "left_out": HANGS.get(seed, ())}
        campaign = Campaign("cuda", "ours", "compile", SECONDS, seed, drawn, JOBS, **limits)
        with mock.patch.dict(os.environ, PYGRAPH_INDIRECTION=indirection):
            outcome = run(campaign, self.log, lambda failure: print(f"fails: {failure}", file=sys.stderr))
        for failure in outcome.failures:
            self.fail(f"{failure.message}\n\n{failure.case.text()}")
        counts = outcome.counts
        if counts.cases < drawn:  # a slow machine
            self.assertGreaterEqual(counts.cases, drawn // 4, str(counts))
            programs, drawn = 3 * counts.cases // 4, counts.cases
        self.assertGreaterEqual(counts.cases - counts.invalid, 0.8 * drawn, str(counts))
        # Torch refuses saved tensors with other strides, and in some versions threads that have not called before.
        self.assertLess(counts.torch_differs, 0.2 * drawn, str(counts))
        self.assertGreaterEqual(counts.cases - counts.invalid - counts.torch_differs, programs, str(counts))
        if programs >= 100:
            self.assertGreaterEqual(len(counts.uses), len(USES) - 1, counts.table())
            self.assertGreater(counts.inside, 0, str(counts))
        # This compares replays, not calls that ran un-graphed.
        self.assertGreater(counts.replays, counts.cases / 2, str(counts))
        # Before torch 2.13, calls in other threads run un-graphed.
        self.assertLess(sum(counts.ungraphed.values()), (0.2 if PER_THREAD else 0.4) * counts.calls, str(counts))

    def test_what_programs_do_around_a_call(self):
        matrices = tuple(Input(name, (8, 8)) for name in "ab")
        trained = Case(matrices, ("v0 = torch.tanh(a) * b", "v1 = v0.sum(0)"), ("v0", "v1"), 6, backward=True)
        inferred = replace(trained, backward=False)
        for case, around in (
            (trained, Around(saved="clone", saved_when="later")),
            (trained, Around(saved="float64")),
            (trained, Around(saved="transposed", saved_when="later")),
            (trained, Around(tangents=(("v0", "zero"),))),
            (trained, Around(tangents=(("v0", "missing"), ("v1", "expanded zero")))),
            (trained, Around(tangents=(("v1", "neg"),))),
            (trained, Around(events=(("output hook", "same"), ("accumulated", "other")))),
            (inferred, Around(garbage="same", threshold=1)),
            (inferred, Around(garbage="other", events=(("forward hook", "collect"),))),
            (inferred, Around(where="stream")),
            (inferred, Around(where="second device")),
            (inferred, Around(thread="call", thread_when="later")),
            (inferred, Around(keeps=3, step_of=2)),
            (inferred, Around(where="three streams")),
            (inferred, Around(beside=(("stream", "same"), ("thread", "other")))),
            (inferred, Around(captures="every other")),
            (inferred, Around(reads="every other")),
            (trained, Around(holds="graph", holds_when="every other")),
            (trained, Around(holds="detached loss", holds_when="later")),
            (inferred, Around(faults=(Fault("limit", 1, 1), Fault("at a call", 2, 40)))),
            (trained, Around(faults=(Fault("signal", 1, 200), Fault("limit", 2, 0)))),
        ):
            with self.subTest(str(around)):
                case = replace(case, around=around)
                verdict = check(case, self.device, under_test="ours", control="compile")
                if verdict.torch_differs is None:
                    self.assertEqual(verdict.calls, case.calls)
                    self.assertEqual(verdict.inside > 0, bool(around.targets))

    def test_programs_that_were_hard(self):
        for case in (
            Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)",), ("a",), 6),
            Case(
                (Input("a", (8, 8), place="reused"), Input("w", (8, 8), place="same", parameter=True)),
                ("v0 = torch.tanh(a @ w)", "v1 = a[1:] * 2"),  # a is the previous v0, which is gone afterwards
                ("v0", "v1"),
                6,
                feedback=((0, "a"),),
            ),
            Case(
                (Input("a", (9,), place="reused"), Input("b", (5,), shares="a", shift=3, layout="misaligned")),
                ("b.add_(1)", "v0 = a * 2"),
                ("v0", "b"),
                6,
            ),
            Case(  # what a call has set is not set again by a second run of its code
                (Input("a", (8, 8)), Input("d", (64, 2), place="reused", parameter=True)),
                ("d.data = torch.tanh(d.data)", "v0 = a * 2"),
                ("v0",),
                6,
                around=Around(faults=(Fault("signal", 1, 40960),)),
            ),
        ):
            with self.subTest(case.text()):
                check(case, self.device, under_test="ours", control="compile", exactly="compile")


if __name__ == "__main__":
    run_tests()
