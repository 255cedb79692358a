"""tools/bench/start_time.py: times from the start of processes, their caches, and failures."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(Path(__file__).resolve().parent)]

import captured
import torch
from bench import start_time
from bench.product import product_hash
from bench.start_time import Job, Start
from torch.testing._internal.common_utils import TestCase, run_tests

MISSED = {"fxgraph_cache_miss": 2, "autograd_cache_miss": 1, "autograd_cache_saved": 1}
HIT = {"fxgraph_cache_hit": 2, "autograd_cache_hit": 1}


main = functools.partial(captured.run, start_time.main)


def starts(way, stage, *seconds, counters=None, name="X"):
    counted = counters if counters is not None else MISSED if stage == "cold" else HIT
    return [Start(name, way, stage, s, s + 1, 0.5 * (way == "ours"), s / 2, counted) for s in seconds]


class TestProcesses(TestCase):
    def test_a_program_starts_cold_and_warm_in_both_ways(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            # No variable of the caller that is misspelt or disables the package reaches the processes. Inductor would
            # compile programs to find out which vector instructions work.
            with mock.patch.dict("os.environ", PYGRAPH_DISABLE="1", TORCHINDUCTOR_VEC_ISA_OK="0"):
                status, text, err = main("MLP", "--device", "cpu", "--repeats", "1", "--out", str(path))
            self.assertEqual((status, err), (0, ""), text)
            found = json.loads(path.read_text())
        self.assertEqual((found["torch"], found["code_hash"]), (torch.__version__, product_hash()))
        self.assertIn("triton", found)
        processes = [Start(**one) for one in found["processes"]]
        self.assertEqual(
            [(one.way, one.stage) for one in processes],
            [("torch", "cold"), ("ours", "cold"), ("torch", "warm"), ("ours", "warm")],
        )
        for one in processes:
            counted = {key: value for key, value in one.counters.items() if value}
            expected = MISSED if one.stage == "cold" else HIT
            self.assertEqual(counted, {key: 1 for key in expected})  # of one graph
            self.assertTrue(0 <= one.import_s < one.first_s < one.third_s, one)
            self.assertEqual(one.import_s > 0, one.way == "ours")
        self.assertEqual(found["results"], start_time.summary(processes))
        self.assertIn("MLP, warm, ours: fxgraph_cache_hit 1, autograd_cache_hit 1", text)

    def test_a_process_that_fails_is_named(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(start_time.StartFailed) as caught:
            start_time.run(Job("no such", "torch", "cold", "cpu"), Path(folder))
        self.assertIn("no such, torch, cold: the process ended with exit status 1", str(caught.exception))
        self.assertIn("KeyError", str(caught.exception))


class TestFigures(TestCase):
    def test_processes_become_medians_and_ratios(self):
        found = [
            *starts("torch", "cold", 20.0),
            *starts("ours", "cold", 30.0),
            *starts("torch", "warm", 10.0, 11.0, 50.0),
            *starts("ours", "warm", 9.0, 5.5, 5.5),
        ]
        rows = start_time.summary(found)
        self.assertEqual([(r["stage"], r["way"], r["first_s"], r["processes"]) for r in rows],
                         [("cold", "torch", 20.0, 1), ("cold", "ours", 30.0, 1),
                          ("warm", "torch", 11.0, 3), ("warm", "ours", 5.5, 3)])  # fmt: skip
        self.assertEqual([r["ratio_first"] for r in rows], [None, 1.5, None, 0.5])
        self.assertEqual(rows[3]["ratio_third"], 6.5 / 12.0)
        self.assertEqual(rows[3]["import_s"], 0.5)
        lines = start_time.table(rows).splitlines()
        self.assertEqual(len({len(line) for line in lines[:5]}), 1, lines[:5])
        self.assertIn("0.50", lines[4])

    def test_counters_that_differ_are_a_failure(self):
        same = [*starts("torch", "cold", 1.0), *starts("ours", "cold", 1.0)]
        warm = [*starts("torch", "warm", 1.0, 2.0), *starts("ours", "warm", 1.0, 2.0)]
        self.assertEqual(start_time.differing([*same, *warm]), [])
        bypassed = {"fxgraph_cache_hit": 4, "autograd_cache_bypass": 1}
        for ours, theirs in ((bypassed, HIT), (HIT, {}), ({**HIT, "autograd_cache_saved": 1}, HIT)):
            found = [*same, *starts("torch", "warm", 1.0, counters=theirs), *starts("ours", "warm", 1.0, counters=ours)]
            (line,) = start_time.differing(found)
            self.assertTrue(line.startswith("X, warm: torch "), line)
            with mock.patch.object(start_time, "measure", return_value=found):
                status, text, _ = main("MLP", "--device", "cpu")
            self.assertEqual(status, 1)
            self.assertIn(f"the caches' counters differ: {line}", text)

    def test_no_round_is_begun_that_would_not_fit(self):
        for seconds, rounds in ((1e9, 3), (0.0, 1)):
            ran = []

            def together(jobs, caches, ran=ran):
                ran.extend(jobs)
                return [one for job in jobs for one in starts(job.way, job.stage, 1.0, name=job.name)]

            with (
                mock.patch.object(start_time, "run_together", together),
                tempfile.TemporaryDirectory() as folder,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                start_time.measure(["A", "B"], Path(folder), repeats=3, seconds=seconds, device="cpu", smaller=False)
            self.assertEqual(sum(job.stage == "warm" for job in ran), rounds * 4)
            self.assertEqual([job.way for job in ran if (job.stage, job.name) == ("warm", "A")][:4],
                             ["torch", "ours", "ours", "torch"][: rounds * 2])  # fmt: skip


if __name__ == "__main__":
    run_tests()
