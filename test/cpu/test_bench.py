"""The benchmark: its workloads, processes, command line, and the scripts that measure one thing. Needs no GPU."""

from __future__ import annotations

import importlib
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils import _pytree as pytree

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tools"), str(Path(__file__).resolve().parent)]

import captured
from bench import causes, choices, command_line, everything, graph_host, many, routes
from bench import summary as pages
from bench import training_loops as loops
from bench.everything import TIME_IS_UP, Done, Step, run_all
from bench.isolated import Job
from bench.loading import load_workloads

from pygraph_trees.benchmark import Effort, Measurement, Program, Results
from pygraph_trees.benchmark.differences import snapshot
from pygraph_trees.benchmark.results import file_stem

WORKLOADS = load_workloads()

# Overrides under which workloads run on a CPU in a second.
SMALL = {"EOS": {"shape": (8, 8, 8)}, "TKE": {"shape": (16, 16, 8)}, "DR-T": {"batch": 4, "items": 50}}
SMALL |= {"BERT": {"batch": 2, "sequence": 32, "layers": 1, "hidden": 64}, "LCNET": {"batch": 1, "size": 32}}
SMALL |= {"MMC": {"size": 32, "layers": 1, "width": 96}, "ST": {"time": 16, "count": 6, "layers": 1, "width": 64}}
SMALL |= {"DLRM": {"batch": 8, "rows": 100}, "DCGAN": {"batch": 4, "width": 8}, "VM": {"size": 64}}
# The packages that workloads need besides torch.
PACKAGES = dict.fromkeys(("LCNET", "TEFD"), "timm") | dict.fromkeys(("DNET", "VM"), "torchvision")
_OF_TRANSFORMERS = "BERT BERT-I BSCG DBV2 DGPT2 DMLM MBERT MTCG-I MTCG-T STCLM XLNET-I XLNET-T"
PACKAGES |= dict.fromkeys(_OF_TRANSFORMERS.split(), "transformers")
FROM_THE_CPU = ("DALLE2", "MMC", "ST")  # one input of each
PARAMETERS = {"ALNET": 61_100_840, "BERT": 109_514_298, "BSCG": 87_508_992, "DALLE2": 291_121_803, "MBERT": 24_582_914}
PARAMETERS |= {"DBV2": 884_596_226, "DCGAN": 2_765_568, "DGPT2": 81_912_576, "DMLM": 139_244_121, "DNET": 7_978_856}
PARAMETERS |= {"LCNET": 1_880_856, "MTCG-T": 300_176_768, "STCLM": 12_032_512, "TEFD": 6_587_354, "VM": 44_454_513}
PARAMETERS |= {"DR-I": 2 * (197951 * 512 + 512 * 512 + 512 * 1024) + 512 * 4 + 1024 + 197951, "XLNET-I": 116_750_336}


class TestWorkloads(TestCase):
    def test_they_build_in_full_size_and_run_in_small(self):
        """Numbers of parameters are those of the models' papers."""
        self.assertLessEqual({*SMALL, *PACKAGES, *PARAMETERS, *FROM_THE_CPU}, set(WORKLOADS))
        for name, workload in WORKLOADS.items():
            with self.subTest(name):
                try:
                    importlib.import_module(PACKAGES.get(name, "torch"))
                except (ImportError, OSError, RuntimeError):  # also of a torchvision for another torch version
                    raise unittest.SkipTest(f"{PACKAGES[name]} is not installed") from None
                program = workload.build(torch.device("meta"))
                self.assertEqual((program.name, program.mode, program.batch), (name, workload.mode, workload.batch))
                inputs = pytree.tree_leaves((program.args, dict(program.kwargs)))
                self.assertEqual(sum(t.device.type == "cpu" for t in inputs), name in FROM_THE_CPU)
                if name in PARAMETERS:
                    self.assertEqual(sum(p.numel() for p in program.fn.parameters()), PARAMETERS[name])
                if name in SMALL:
                    program = workload.build("cpu", **SMALL[name])
                    found = snapshot(program.step(program.fn, program.args, program.kwargs))
                    self.assertTrue(found and all(t.isfinite().all() for _, t in found))


_WORKLOADS = """
    import os
    from types import SimpleNamespace

    import torch

    import pygraph_trees.benchmark.measure as measure
    from pygraph_trees.benchmark import Program

    measure.wake_compiler = lambda device: None  # no C++ to compile, which takes a while

    def good(device):
        return Program(lambda x: x @ x, (torch.ones(2, 2),), name="GOOD")

    def raises(device):
        raise RuntimeError("out of luck")

    def dies(device):  # when it is timed
        measure.time_block = lambda *args: os._exit(7)
        return Program(lambda x: x + 1, (torch.ones(2),), name="DIES")

    WORKLOADS = {
        name: SimpleNamespace(name=name, mode="inference", batch=1, build=build, doc="A workload.")
        for name, build in (("GOOD", good), ("RAISES", raises), ("DIES", dies))
    }
"""


class WithFolder(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class TestCommandLine(WithFolder):
    def _main(self, *arguments, code="this"):
        """Runs as if there were a GPU, with workloads on the CPU."""
        (self.folder / "__init__.py").write_text(textwrap.dedent(_WORKLOADS))
        blank = Results("a GPU", "1", "2.11.0", "3", "3.12", "today", code, 1)
        with (
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch("pygraph_trees.benchmark.results.here", return_value=blank),
            mock.patch("bench.isolated.Job", lambda *of, **more: Job(*of, device="cpu", **more)),
            mock.patch("bench.quiet.wait_until_quiet"),
        ):
            options = ("--workloads", str(self.folder), "--rounds", "1", "--ways", "eager")
            return captured.run(command_line.main, *arguments, *options)

    def test_a_workload_that_fails_fails_alone_and_is_run_again(self):
        """Results of other code are neither kept nor extended, and times to compile are those of a process alone."""
        out = self.folder / "x.json"
        status, shown, _ = self._main("GOOD", "RAISES", "DIES", "--jobs", "3", "--out", str(out))
        self.assertEqual(status, 1)
        errors = {"GOOD": "^None$", "RAISES": "RuntimeError: out of luck", "DIES": "exit status 7"}
        for record in Results.read(out).records:
            self.assertRegex(str(record.error), errors[record.workload])
            self.assertEqual((record.latency_ms or 0) > 0, record.workload == "GOOD")
            self.assertIsNone(record.compile_s)
        status, shown, _ = self._main("GOOD", "RAISES", "--resume", "--out", str(out))
        self.assertEqual((status, "[1/1] RAISES" in shown), (1, True))
        self.assertEqual({r.workload for r in Results.read(out).records}, set(errors))
        self.assertEqual(self._main("GOOD", "--resume", "--out", str(out), code="other")[0], 0)
        self.assertEqual({(r.workload, r.compile_s is None) for r in Results.read(out).records}, {("GOOD", False)})
        kept, before = self.folder / f"{file_stem('a GPU', '2.11.0')}.json", out.read_bytes()
        out.rename(kept)
        with mock.patch.object(command_line, "RESULTS_FOLDER", self.folder):
            status, shown, _ = self._main("GOOD")
        self.assertEqual((status, "differs in code_hash" in shown, kept.read_bytes()), (2, True, before))

    def test_usage(self):
        status, out, _ = captured.run(command_line.main, "--list")
        self.assertEqual((status, [line.split()[0] for line in out.splitlines()]), (0, list(WORKLOADS)))
        with mock.patch("torch.cuda.is_available", return_value=False):
            usages = (("EOS", "need a GPU"), ("DLRRM", "did you mean DLRM?"), ("EOS --ways jit", "no way 'jit'"))
            for wrong, problem in usages:
                status, out, err = captured.run(command_line.main, *wrong.split())
                self.assertEqual((status, out), (2, ""))
                self.assertIn(problem, err)
            for module in (choices, graph_host, many, routes):
                with mock.patch.object(sys, "argv", ["a script"]):
                    status, out, _ = captured.run(lambda _, main=module.main: main())
                self.assertEqual((status, "need a GPU" in out), (2, True), module.__name__)
            self.assertEqual([captured.run(everything.main, *wrong)[0] for wrong in ([], ["recordin"])], [2, 2])


class TestScripts(TestCase):
    """They time upstream and ours in turn; here on the CPU, where both are the same code."""

    PROGRAM = Program(lambda x: x @ x, (torch.ones(2, 2),), name="SMALL")

    def test_routes(self):
        effort, given = Effort(rounds=2, block_s=0.001), ("patch", "auto")
        with mock.patch.object(routes.Consumers, "forward", lambda self, x, y: x @ y):  # no C++ to compile
            found = routes.measure(2, 3, False, given, effort, torch.device("cpu"))
        self.assertEqual(set(found["samples"]), {f"{route} {rate}" for route in given for rate in routes.RATES})

    def test_parts_make_up_the_whole(self):
        found = graph_host.measure("SMALL", self.PROGRAM, 2, 3)
        ways = [(record["way"], record["regime"]) for record in found]
        self.assertEqual(ways, [(way, regime) for way in ("upstream", "ours") for regime in ("same", "fresh")])
        for record in found:
            self.assertEqual((record["launch"], record["gpu"]), (0.0, None))  # no GPU, so nothing is launched
            self.assertTrue(0 < record["trees"] < record["host"] <= record["latency"], record)
            self.assertAlmostEqual(record["outside"], record["host"] - record["trees"])

    def test_loops_of_one_process_are_measured_although_another_fails(self):
        jobs = [loops.Job(model, "eager", "cpu") for model in ("mlp", "missing")]
        results = [loops.result(one) for one in loops.measure(jobs, "CE", 2, 200.0, lambda text: None, warm=1)]
        self.assertEqual([(r["model"], r["loop"]) for r in results], [(j.model, loop) for j in jobs for loop in "CE"])
        for found in results[:2]:
            self.assertEqual((found.get("error"), found["rounds"]), (None, 2))
            self.assertLess(found["apart"], 1e-6)
            self.assertGreater(found["done_us"], found["forward_us"])
        self.assertEqual({found["error"] for found in results[2:]}, {"KeyError: 'missing'"})


class TestEverything(WithFolder):
    def done(self, **of):
        return Done(self.folder / "done.txt", {"code_hash": "first", **of})

    def run_all(self, codes, **options):
        steps = [Step(name, [sys.executable, "-c", code], "a step") for name, code in codes.items()]
        return captured.run(lambda _: run_all(steps, self.folder, "gpu-torch", self.done(), **options))[:2]

    def test_goes_on_where_it_was_cut(self):
        count = self.folder / "count"
        codes = {"one": f"open({str(count)!r}, 'a').write('x')", "slow": "import time; time.sleep(60)"}
        self.assertEqual(self.run_all({"one": codes["one"]})[0], 0)
        status, shown = self.run_all(codes, left_s=lambda: 1.0)
        self.assertEqual((status, "one: done before" in shown, count.read_text()), (TIME_IS_UP, True, "x"))
        self.assertEqual((self.run_all({"one": codes["one"]}, again=True)[0], count.read_text()), (0, "xx"))

    def test_a_step_that_fails_fails_alone(self):
        status, shown = self.run_all({"one": "raise SystemExit(5)", "other": ""})
        self.assertEqual((status, shown.splitlines()[-1]), (1, "failed: one"))
        self.assertEqual(["one" in self.done(), "other" in self.done()], [False, True])
        self.assertNotIn("other", self.done(code_hash="second"))  # of other code, all is done again


GOOD = {"latency_ms": 1.0, "throughput_ms": 0.9, "host_us": 50.0, "gpu_ms": 0.8, "copied_bytes": 0, "recordings": 1}
GOOD |= {"kernels_graphed": 5, "kernels_total": 5, "compile_s": 2.0, "record_s": 0.01, "peak_bytes": 1 << 30}
GOOD |= {"max_diff_upstream": 0.0}


def measured(workload, way, regime="same", **figures):
    return Measurement(workload, "inference", 1, way, regime, **{**GOOD, **figures})


def results(*records, date="2026-01-01", gpu="H200"):
    return Results(gpu, "580", "2.11", "3.6", "3.12", date, "abcdef" * 10, 3, records)


def both(workload, ours, upstream=None, others=()):
    ways = (("upstream", upstream or {"latency_ms": 2.0}), ("ours", ours), *others)
    return [measured(workload, way, regime, **figures) for regime in ("same", "fresh") for way, figures in ways]


class TestSummary(TestCase):
    def test_each_workload_is_taken_from_the_latest_file(self):
        old = results(*both("A", {}), *both("B", {"latency_ms": 9.0}), date="2026-02-01")
        files = {Path("new.json"): results(*both("B", {}), date="2026-03-01"), Path("old.json"): old}
        files[Path("else.json")] = results(*both("C", {}), gpu="A100")
        found = pages.summarise(files, ["C", "B", "A"])
        self.assertEqual({n: str(p) for n, p in found.source.items()}, {"A": "old.json", "B": "new.json"})
        self.assertEqual((list(found.left_out), list(found.missing)), ([Path("else.json")], ["C"]))
        self.assertIn("else.json is of another GPU or torch", pages.page(found))

    def test_what_is_worse_or_failed_is_said(self):
        no_graphs = [("compile", {"latency_ms": 0.5, "throughput_ms": 2.0})]
        failed = [measured("A", "upstream"), measured("A", "ours").failed("out of\nmemory")]
        for records, wanted in (
            (both("A", {}, others=[("compile", {"latency_ms": 1.0})]), r"^\Z"),
            (both("A", {}, others=no_graphs), "latency 1.000 ms, no graphs 0.500"),
            (both("A", {"copied_bytes": 5000}), "5.0 kB copied"),
            (both("A", {"peak_bytes": 2 << 30}), "2.1 GB of GPU memory at a call's peak, upstream 1.1 GB"),
            (both("A", {"max_diff_upstream": 1e-3}, {"max_diff_upstream": 1e-4}), "at most 0.001"),
            (failed, "^.*ours.*: failed: out of memory"),
        ):
            with self.subTest(wanted):
                found = pages.summarise({Path("a.json"): results(*records)}, [])
                self.assertRegex("\n".join(pages.regressions(found)), wanted)

    def test_a_file_becomes_a_page_or_is_refused(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            results(*both("A", {})).write(folder / "good.json")
            (folder / "bad.json").write_text("{")
            for file, wanted in (("good", ""), ("bad", "is no result file"), ("none", "No such file")):
                arguments = (str(folder / f"{file}.json"), "--out", str(folder / "out"))
                status, _, said = captured.run(pages.main, *arguments)
                self.assertEqual(bool(status), file != "good")
                self.assertIn(wanted, said)
            self.assertIn("| A |", (folder / "out" / "README.md").read_text(encoding="utf-8"))

    def test_results_that_are_here(self):
        """The page and the README's table are made from the files."""
        folder = pages.RESULTS_FOLDER
        files, starts = (pages.read_all(place.glob("*.json")) for place in (folder, folder / pages.START_FOLDER))
        found = pages.summarise(files, list(WORKLOADS), starts)
        text, readme = (path.read_text(encoding="utf-8") for path in (folder / "README.md", pages.README))
        newest = max(found.files.values(), key=lambda file: file.date)
        training = pages.loops_table.latest(folder, newest.gpu, newest.torch)
        self.assertEqual(text, pages.page(found, training))
        self.assertEqual(readme, pages.with_table(readme, pages.short_table(found, training)))
        self.assertLessEqual({*causes.DIFFERENT, *causes.NOT_MEASURED, *causes.UNTIMED}, {*WORKLOADS})


if __name__ == "__main__":
    run_tests()
