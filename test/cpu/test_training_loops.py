"""The benchmark of training loops, tried on the CPU, and its tables."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench import loops_table
from bench.training_loops import Job, measure, result
from torch.testing._internal.common_utils import TestCase, run_tests


class TestTrainingLoops(TestCase):
    def test_loops_of_one_process_are_measured_although_another_fails(self):
        jobs = [Job("mlp", "eager", "cpu"), Job("missing", "eager", "cpu")]
        said: list[str] = []
        results = [result(one) for one in measure(jobs, "CEG", 2, 200.0, said.append, warm=1)]
        self.assertEqual([(r["model"], r["loop"]) for r in results], [(j.model, loop) for j in jobs for loop in "CEG"])
        measured, failed = results[:3], results[3:]
        for found in measured:
            self.assertEqual((found.get("error"), found["rounds"], found["kept_losses"]), (None, 2, None))
            self.assertLess(found["apart"], 1e-6)
            self.assertGreater(found["done_us"], found["forward_us"])
            self.assertLessEqual(found["spread"]["step_us"][0], found["step_us"])
        self.assertEqual({found["error"] for found in failed}, {"KeyError: 'missing'"})
        self.assertIn("missing, eager: KeyError: 'missing'", said)
        self.assertIn("| C zero_grad after the forward |", loops_table.table(measured))
        self.assertIsNone(loops_table.readme_row([{"results": results}]))
        times = {"compile": 8.0, "upstream": 4.0, "ours": 2.0}
        bert = [
            {"model": "bert", "way": way, "loop": loop, "done_us": factor * us, "host_us": us}
            for loop, factor in (("A", 1), ("B", 4))
            for way, us in times.items()
        ]
        bert += [{"model": "bert", "way": way, "loop": "C", "error": "RuntimeError: overwritten"} for way in times]
        row = loops_table.readme_row([{"results": bert}, {"results": bert[:2], "ranks": 2}])
        self.assertEqual(row, {"loops": 2, "done_us": {way: 2 * us for way, us in times.items()}, "host_us": times})
        (line,) = (line for line in loops_table.problems(bert) if "upstream" in line)
        self.assertEqual(line, "**bert**, C, upstream: failed: RuntimeError: overwritten")


if __name__ == "__main__":
    run_tests()
