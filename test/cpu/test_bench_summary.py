"""The page and plots of all results: which file each workload is taken from, and what is reported as worse."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench import causes
from bench import summary as pages
from bench.folders import RESULTS_FOLDER
from bench.loading import load_workloads
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.benchmark.results import Measurement, Results

GOOD = {
    "latency_ms": 1.0,
    "throughput_ms": 0.9,
    "host_us": 50.0,
    "gpu_ms": 0.8,
    "copied_bytes": 0,
    "kernels_graphed": 5,
    "kernels_total": 5,
    "recordings": 1,
    "compile_s": 2.0,
    "record_s": 0.01,
    "peak_bytes": 1 << 30,
    "max_diff_upstream": 0.0,
}


def measured(workload, way, regime="same", **figures):
    return Measurement(workload, "inference", 1, way, regime, **{**GOOD, **figures})


def results(*records, date="2026-01-01", gpu="H200", torch="2.11"):
    return Results(gpu, "580", torch, "3.6", "3.12", date, "abcdef" * 10, 3, records)


def both(workload, ours, upstream=None, others=()):
    """Upstream and ours in both regimes, and other ways."""
    upstream = upstream or {"latency_ms": 2.0}
    ways = (("upstream", upstream), ("ours", ours), *others)
    return [measured(workload, way, regime, **figures) for regime in ("same", "fresh") for way, figures in ways]


class TestSummary(TestCase):
    def lines(self, *records):
        return list(pages.regressions(pages.summarise({Path("a.json"): results(*records)}, [])))

    def test_each_workload_is_taken_from_the_latest_file(self):
        files = {
            Path("new.json"): results(*both("B", {"latency_ms": 1.0}), date="2026-03-01"),
            Path("old.json"): results(*both("A", {}), *both("B", {"latency_ms": 9.0}), date="2026-02-01"),
            Path("older.json"): results(*both("A", {}), date="2026-01-01"),
            Path("else.json"): results(*both("C", {}), date="2026-01-01", gpu="A100"),
        }
        found = pages.summarise(files, ["C", "B", "A"])
        self.assertEqual([w.name for w in found.workloads], ["B", "A"])
        self.assertEqual(found.workloads[0].get("ours", "same", "latency_ms"), 1.0)
        self.assertEqual({n: str(p) for n, p in found.source.items()}, {"A": "old.json", "B": "new.json"})
        self.assertEqual((list(found.left_out), list(found.missing)), ([Path("else.json")], ["C"]))
        text = pages.page(found)
        self.assertIn("else.json is of another GPU or torch", text)
        self.assertNotIn("older.json", text)
        self.assertIn("## Not measured\n\n- **C**: not run\n", text)

    def test_nothing_is_worse(self):
        self.assertEqual(self.lines(*both("A", {}, others=[("compile", {"latency_ms": 1.0})])), [])

    def test_what_is_worse_is_said(self):
        no_graphs = [("compile", {"latency_ms": 0.5, "throughput_ms": 2.0})]
        for ours, upstream, others, wanted in (
            ({}, None, no_graphs, r"\*\*A\*\*, same inputs: latency 1.000 ms, no graphs 0.500 \(2.00 times as long\)"),
            ({"throughput_ms": 3.0}, None, [], r"fresh inputs: time a call without waits 3.000 ms, upstream 0.900"),
            ({"copied_bytes": 5000}, None, [], "5.0 kB copied at each replay"),
            ({"peak_bytes": 2 << 30}, None, [], "2.1 GB of GPU memory at a call's peak, upstream 1.1 GB"),
            ({"compile_s": 3.0}, None, [], "3.0 s to compile and record, upstream 2.0"),
            ({"max_diff_upstream": 1e-3}, {"max_diff_upstream": 1e-4}, [], "at most 0.001; two runs of upstream's"),
        ):
            with self.subTest(wanted):
                self.assertRegex("\n".join(self.lines(*both("A", ours, upstream, others))), wanted)

    def test_causes_in_the_page_are_of_workloads_and_files(self):
        for name in (*causes.DIFFERENT, *causes.NOT_MEASURED, *causes.UNTIMED):
            self.assertIn(name, load_workloads())
        for cause in causes.DIFFERENT.values():
            for path in re.findall(r"\]\(([^)]+)\)", cause):
                self.assertTrue((RESULTS_FOLDER / path).is_file(), path)

    def test_a_failure_comes_first_and_has_no_figures(self):
        records = [measured("A", "upstream"), measured("A", "ours").failed("out of\nmemory")]
        self.assertEqual(self.lines(*records)[0], "**A**, ours, same inputs: failed: out of memory")
        text = pages.page(pages.summarise({Path("a.json"): results(*records)}, []))
        self.assertIn("| A | 1.000 | - |", text)

    def test_a_file_becomes_a_page_or_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            good, bad = Path(folder) / "good.json", Path(folder) / "bad.json"
            results(*both("A", {})).write(good)
            self.assertEqual(pages.main([str(good), "--out", str(Path(folder) / "out"), "--no-plots"]), 0)
            self.assertIn("| A |", (Path(folder) / "out" / "README.md").read_text(encoding="utf-8"))
            bad.write_text("{")
            for path, wanted in ((bad, "bad.json is no result file"), (bad.with_name("none.json"), "No such file")):
                said = io.StringIO()
                with self.assertRaises(SystemExit), contextlib.redirect_stderr(said):
                    pages.main([str(path), "--out", folder])
                self.assertIn(wanted, said.getvalue())

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_plots(self):
        """The same figures give the same files, even if ours is slower."""
        from bench.plots import THEMES, draw

        found = pages.summarise(
            {Path("a.json"): results(*both("A", {}), *both("B", {"latency_ms": 4.0, "copied_bytes": 1 << 20}))}, []
        )
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            names = draw(found, Path(one))
            draw(found, Path(other))
            for name in names:
                for theme in THEMES:
                    files = [Path(folder) / f"{name}-{theme}.svg" for folder in (one, other)]
                    self.assertEqual(files[0].read_bytes(), files[1].read_bytes())
                svg = (Path(one) / f"{name}-light.svg").read_text(encoding="utf-8")
                self.assertIn(">A<", svg)
                self.assertIn(">B<", svg)
            self.assertIn(">0.50<", (Path(one) / "speedup-light.svg").read_text(encoding="utf-8"))

    def test_results_that_are_here(self):
        """The page in the results folder is made from the files beside it."""
        folder = pages.RESULTS_FOLDER
        files = pages.read_all(folder.glob("*.json"))
        starts = pages.read_all((folder / pages.START_FOLDER).glob("*.json"))
        found = pages.summarise(files, list(pages.load_workloads(pages.WORKLOADS_FOLDER)), starts)
        text = (folder / "README.md").read_text(encoding="utf-8")
        plots = [part.partition("-dark.svg")[0] for part in text.split('srcset="plots/')[1:]]
        self.assertGreater(len(plots), 0)
        for name in plots:
            for end in ("light.svg", "dark.svg"):
                self.assertTrue((folder / "plots" / f"{name}-{end}").is_file(), f"{name}-{end}")
        newest = max(found.files.values(), key=lambda file: file.date)
        training = pages.loops_table.latest(folder, newest.gpu, newest.torch)
        self.assertEqual(text, pages.page(found, plots, training))
        readme = pages.README.read_text(encoding="utf-8")
        self.assertEqual(readme, pages.with_table(readme, pages.short_table(found, training)))

    def test_table_of_the_readme(self):
        """A mean of a part of the programs is not shown, and neither is a way that was not measured."""
        records = [*both("A", {"latency_ms": 1.0}), *both("B", {"latency_ms": 0.5, "copied_bytes": 2000})]
        table = pages.short_table(pages.summarise({Path("a.json"): results(*records)}, []))
        for line in (
            "| program | reduce-overhead, ms | ours, ms |",
            "| B | 2.000 | 0.500 | 4.00x | 50 → 50 | 0 B → 2.0 kB |",
            "| geometric mean of 2 |  |  | 2.83x |",
        ):
            self.assertIn(line, table)
        part = pages.short_table(pages.summarise({Path("a.json"): results(*records)}, ["A", "B", "D"]))
        self.assertNotIn("geometric mean", part)
        text = f"before\n{pages.BEGIN}\nold\n{pages.END}\nbehind\n"
        self.assertEqual(pages.with_table(text, "new"), text.replace("old", "new"))
        with self.assertRaisesRegex(ValueError, "has no lines"):
            pages.with_table("no marks", table)


if __name__ == "__main__":
    run_tests()
