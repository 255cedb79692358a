"""The page and plots of all results: which file each workload is taken from, and what is reported as worse."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
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
from bench.paper import FIGURES
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.benchmark.results import REGIMES, Measurement, Results, ResultsFormatError
from pygraph_trees.benchmark.ways import WAYS

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

    def test_times_to_compile_from_a_file_of_their_own(self):
        untimed = {"compile_s": None, "record_s": None}
        names, bare = ("A", "C"), {"latency_ms": 2.0, **untimed}
        files = {Path("a.json"): results(*both("B", {}), *(m for name in names for m in both(name, untimed, bare)))}
        slow = {"compile_s": 9.0, "record_s": 0.5, "latency_ms": None}
        starts = {
            Path("mine.json"): results(*both("A", slow), *both("B", slow)),
            Path("else.json"): results(*(m for n in names for m in both(n, {**slow, "compile_s": 7.0})), gpu="A100"),
            Path("newer.json"): results(*both("C", slow), torch="2.12"),
        }
        found = pages.summarise(files, ["A", "B", "C"], starts)
        a, b, c = found.workloads
        self.assertEqual([a.get("ours", "same", name) for name in slow], [9.0, 0.5, 1.0])
        self.assertEqual(b.get("ours", "same", "compile_s"), 2.0)
        self.assertEqual(c.get("ours", "same", "compile_s"), 7.0)
        text = pages.page(found)
        for path, gpu, name in (("mine.json", "H200", "A"), ("else.json", "A100", "C")):
            line = f"](start/{path}): 2026-01-01, {gpu}, code abcdefabcdef: times to compile and record of {name}\n"
            self.assertIn(line, text)
        self.assertNotIn("newer.json", text)
        self.assertIn("**A**: 9.5 s to compile and record, upstream 2.0", text)

    def test_the_ratio_of_each_round(self):
        ways = {"ours": (1.0, 2.0, 4.0), "upstream": (2.0, 2.0, 2.0)}
        records = [measured("A", way, samples={"latency_ms": rounds}) for way, rounds in ways.items()]
        (found,) = pages.summarise({Path("a.json"): results(*records)}, []).workloads
        self.assertEqual(found.rounds("latency_ms", "same"), [2.0, 1.0, 0.5])
        self.assertEqual([found.rounds("latency_ms", "fresh"), found.rounds("host_us", "same")], [[], []])

    def test_nothing_is_worse(self):
        alone = self.lines(*both("A", {}))
        self.assertEqual(alone, ["without a figure of no graphs, so compared with upstream alone: A"])
        self.assertEqual(self.lines(*both("A", {}, others=[("compile", {"latency_ms": 1.0})])), [])
        untold = self.lines(*both("A", {"compile_s": None}, others=[("compile", {"latency_ms": 1.0})]))
        self.assertEqual(untold, ["without times to compile and record, so not compared in them: A"])

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

    def test_the_rounds_of_what_is_slower(self):
        rounds = {"ours": (2.0, 3.0, 4.0), "upstream": (1.0, 1.5, 20.0)}
        records = [
            measured("A", way, latency_ms=found[1], samples={"latency_ms": found}) for way, found in rounds.items()
        ]
        self.assertIn(
            "**A**, same inputs: latency 3.000 ms (rounds 2.000 to 4.000), "
            "upstream 1.500 (rounds 1.000 to 20.00) (2.00 times as long)",
            self.lines(*records),
        )

    def test_causes_that_a_file_cannot_tell(self):
        found = pages.summarise({Path("a.json"): results(*both("DBV2", {"max_diff_upstream": 0.5}))}, ["DBV2", "TEFD"])
        text = pages.page(found)
        self.assertRegex(text, r"\*\*DBV2\*\*: outputs differ from upstream's by at most 0.5; Inductor times")
        self.assertRegex(text, r"## Not measured\n\n- \*\*TEFD\*\*: not ready after")
        self.assertIn("| geometric mean of 1 |", pages.short_table(found))
        self.assertNotIn("geometric mean", pages.short_table(dataclasses.replace(found, missing=["TEFD", "EOS"])))
        untimed = pages.summarise({Path("a.json"): results(*both("VM", {"compile_s": None}))}, [])
        self.assertRegex(pages.page(untimed), r"so not compared in them: VM \(its first call caches")
        for name in (*causes.DIFFERENT, *causes.NOT_MEASURED, *causes.UNTIMED):
            self.assertIn(name, load_workloads())
        for cause in causes.DIFFERENT.values():
            for path in re.findall(r"\]\(([^)]+)\)", cause):
                self.assertTrue((RESULTS_FOLDER / path).is_file(), path)

    def test_a_route_that_would_have_been_faster(self):
        others = [("ours:patch", {"latency_ms": 0.96}), ("ours:table", {"latency_ms": 1.2})]
        lines = "\n".join(self.lines(*both("A", {"latency_ms": 1.0}, others=others)))
        self.assertIn("**A**, fresh inputs: latency 1.000 ms, ours, all by address 0.960", lines)
        self.assertNotIn("all by", "\n".join(self.lines(*both("A", {"latency_ms": 0.98}, others=others))))
        failed = measured("A", "ours:table").failed("why")
        self.assertIn("**A**, ours, all by table, same inputs: failed: why", self.lines(*both("A", {}), failed))

    def test_a_failure_comes_first_and_has_no_figures(self):
        records = [measured("A", "upstream"), measured("A", "ours").failed("out of\nmemory")]
        self.assertEqual(self.lines(*records)[0], "**A**, ours, same inputs: failed: out of memory")
        text = pages.page(pages.summarise({Path("a.json"): results(*records)}, []))
        self.assertIn("| A | 1.000 | - |", text)

    def test_a_workload_that_failed_in_every_way_is_one_line(self):
        failed = [measured("A", way, regime).failed("no end after 5 s") for way in WAYS for regime in REGIMES]
        self.assertEqual(self.lines(*failed), ["**A**, in every way: failed: no end after 5 s"])
        failed[0] = failed[0].failed("out of memory")
        self.assertEqual(len(self.lines(*failed)), len(WAYS) * len(REGIMES))

    def test_page(self):
        records = [*both("EOS", {"latency_ms": 1.0}), *both("B", {"latency_ms": 0.5})]
        text = pages.page(pages.summarise({Path("a.json"): results(*records)}, []), ["speedup"])
        self.assertIn("| geometric mean of 2 |  |  | 2.83x |", text)
        self.assertIn(FIGURES["EOS"], text)
        beside = pages.summarise({Path("a.json"): results(*records, *both("BERT-I", {"latency_ms": 0.1}))}, [])
        self.assertIn("| geometric mean of 2 |  |  | 2.83x |", pages.page(beside))
        self.assertIn("| BERT-I |", pages.page(beside))
        self.assertIn('srcset="plots/speedup-dark.svg"', text)
        self.assertLess(text.index("Worse than upstream"), text.index("## Latency"))

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            good, other, bad = (Path(folder) / name for name in ("good.json", "other.json", "zbad.json"))
            results(*both("A", {})).write(good)
            other.write_text(json.dumps({"gpu": "H200", "results": []}))
            self.assertEqual(list(pages.read_all([good, other])), [good])
            self.assertEqual(pages.main([str(good), "--out", str(Path(folder) / "out"), "--no-plots"]), 0)
            self.assertIn("| A |", (Path(folder) / "out" / "README.md").read_text(encoding="utf-8"))
            for text in ("{", "5"):
                bad.write_text(text)
                with self.assertRaises(ResultsFormatError):
                    pages.read_all([bad])
            for path, wanted in ((bad, "zbad.json is no result file"), (bad.with_name("none.json"), "No such file")):
                said = io.StringIO()
                with self.assertRaises(SystemExit), contextlib.redirect_stderr(said):
                    pages.main([str(path), "--out", folder])
                self.assertIn(wanted, said.getvalue())
        with self.assertRaisesRegex(ValueError, "no result file"):
            pages.summarise({}, [])

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
        self.assertEqual(text, pages.page(found, plots))
        readme = pages.README.read_text(encoding="utf-8")
        self.assertEqual(readme, pages.with_table(readme, pages.short_table(found)))

    def test_table_of_the_readme(self):
        alone = [measured("C", "ours")]  # without upstream there is nothing to compare
        records = [*both("A", {"latency_ms": 1.0}), *both("B", {"latency_ms": 0.5, "copied_bytes": 2000}), *alone]
        table = pages.short_table(pages.summarise({Path("a.json"): results(*records)}, []))
        self.assertEqual(len(table.splitlines()), 5)
        self.assertIn("| B | 2.000 | 0.500 | 4.00x | 50 → 50 | 0 B → 2.0 kB |", table)
        self.assertIn(
            "| program | reduce-overhead, ms | ours, ms |", table
        )  # a way that was not measured has no column
        for name in pages._TITLES:
            self.assertIn(name, pages.load_workloads(pages.WORKLOADS_FOLDER))
        self.assertIn("| geometric mean of 2 |  |  | 2.83x |", table)
        part = pages.short_table(pages.summarise({Path("a.json"): results(*records)}, ["A", "B", "D"]))
        self.assertNotIn("geometric mean", part)  # the mean of a part of the programs says little
        text = f"before\n{pages.BEGIN}\nold\n{pages.END}\nbehind\n"
        self.assertEqual(pages.with_table(text, "new"), text.replace("old", "new"))
        for broken in ("no marks", pages.BEGIN):
            with self.assertRaisesRegex(ValueError, "has no lines"):
                pages.with_table(broken, table)

    def test_the_readme_shows_five_of_several_kinds(self):
        """It also shows mean speedups over upstream, and over the better of upstream and no graphs."""
        no_graphs = [("compile", {"latency_ms": 1.0})]
        records = [record for name in pages._SHOWN for record in both(name, {"latency_ms": 0.5}, others=no_graphs)]
        found = pages.summarise({Path("a.json"): results(*records)}, [])
        lines = pages.short_table(found).splitlines()
        titles = [pages._TITLES.get(name, name) for name in pages._SHOWN[:5]]
        self.assertEqual([line.split("|")[1].strip() for line in lines[2:7]], titles)
        self.assertEqual(len(lines), 2 + 5 + 1)
        # BERT-I is not from the paper.
        self.assertRegex(lines[-1], r"geometric mean of 8 \|.*\| 4.00x, 2.00x over the better way \|")
        self.assertIn("| geometric mean of 8 |  |  |  | 4.00x | 2.00x |", pages.page(found))


if __name__ == "__main__":
    run_tests()
