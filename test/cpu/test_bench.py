"""The benchmark and the examples: workloads, processes, command lines, and scripts that measure one thing."""

import importlib
import itertools
import json
import os
import sys
import textwrap
import unittest
from unittest import mock

import torch
from commands import ROOT, WithFolder, forked, run
from torch.testing._internal.common_utils import TestCase, run_tests

sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "examples")]

import works_with
from bench import causes, choices, command_line, decode, graph_host, soak
from bench import summary as pages
from bench import training_loops as loops
from bench.isolated import Job
from bench.result_files import Results
from bench.workloads import WORKLOADS

from pygraph_trees.benchmark import Program
from pygraph_trees.benchmark.verify import snapshot

# Overrides under which workloads run on a CPU in a second.
SMALL = {"EOS": {"shape": (8, 8, 8)}, "TKE": {"shape": (16, 16, 8)}, "DR-T": {"batch": 4, "items": 50}}
SMALL |= {"BERT": {"batch": 2, "sequence": 32, "layers": 1, "hidden": 64}, "LCNET": {"batch": 1, "size": 32}}
SMALL |= {"MMC": {"size": 32, "layers": 1, "width": 96}, "ST": {"time": 16, "count": 6, "layers": 1, "width": 64}}
SMALL |= {"DLRM": {"batch": 8, "rows": 100}, "DCGAN": {"batch": 4, "width": 8}, "VM": {"size": 64}}
# The packages that workloads need besides torch.
PACKAGES = dict.fromkeys(("LCNET", "TEFD"), "timm") | dict.fromkeys(("DNET", "VM"), "torchvision")
_OF_TRANSFORMERS = "BERT BERT-I BSCG DBV2 DGPT2 DMLM MBERT MTCG-I MTCG-T STCLM XLNET-I XLNET-T"
PACKAGES |= dict.fromkeys(_OF_TRANSFORMERS.split(), "transformers")


class TestWorkloads(TestCase):
    def test_they_build_in_full_size_and_run_in_small(self):
        self.assertLessEqual({*SMALL, *PACKAGES}, set(WORKLOADS))
        for name, workload in WORKLOADS.items():
            with self.subTest(name):
                try:
                    importlib.import_module(PACKAGES.get(name, "torch"))
                except (ImportError, OSError, RuntimeError):  # also of a torchvision for another torch version
                    raise unittest.SkipTest(f"{PACKAGES[name]} is not installed") from None
                program = workload.build(torch.device("meta"))
                self.assertEqual((program.name, program.mode, program.batch), (name, workload.mode, workload.batch))
                if name in SMALL:
                    program = workload.build("cpu", **SMALL[name])
                    found = snapshot(program.step(program.fn, program.args, program.kwargs))
                    self.assertTrue(found and all(t.isfinite().all() for _, t in found))


class TestCommandLine(WithFolder):
    CODE = """
        from types import SimpleNamespace

        import torch

        import pygraph_trees.benchmark.measure as measure
        from pygraph_trees.benchmark import Program

        measure.wake_compiler = lambda device: None  # no C++ to compile, which takes a while

        def good(device):
            return Program(lambda x: x @ x, (torch.ones(2, 2),), name="GOOD")

        def raises(device):
            raise RuntimeError("out of luck")

        WORKLOADS = {
            name: SimpleNamespace(name=name, mode="inference", batch=1, build=build, doc="A workload.")
            for name, build in (("GOOD", good), ("RAISES", raises))
        }
    """

    @forked("compiler")
    def test_a_workload_that_fails_fails_alone_and_is_run_again(self):
        """It runs as if there were a GPU, with workloads on the CPU."""
        (self.folder / "one_fails.py").write_text(textwrap.dedent(self.CODE))
        self.enterContext(mock.patch.dict(os.environ, PYTHONPATH=f"{self.folder}{os.pathsep}{ROOT}"))
        self.enterContext(mock.patch.object(sys, "path", [str(self.folder), *sys.path]))
        out = self.folder / "x.json"
        options = ("--workloads", "one_fails", "--rounds", "1", "--ways", "eager", "--out", str(out))
        for target, value in (
            ("torch.cuda.is_available", lambda: True),
            ("bench.command_line.here", lambda *args: Results("a GPU", "1", "2.11.0", "3", "3.12", "today", "this", 1)),
            ("bench.command_line.Job", lambda *of, **more: Job(*of, device="cpu", **more)),
            ("bench.command_line.wait_until_quiet", lambda *args: None),
        ):
            self.enterContext(mock.patch(target, value))
        for more, said in ((("--jobs", "2"), ""), (("--resume",), "[1/1] RAISES")):
            status, shown, _ = run(command_line.main, "GOOD", "RAISES", *options, *more)
            self.assertEqual((status, said in shown), (1, True), shown)
            for record in Results.read(out).records:
                expected = {"GOOD": "^None$", "RAISES": "RuntimeError: out of luck"}[record.workload]
                self.assertRegex(str(record.error), expected)
                self.assertEqual((record.latency_ms or 0) > 0, record.workload == "GOOD")

    def test_usage(self):
        status, out, _ = run(command_line.main, "--list")
        self.assertEqual((status, [line.split()[0] for line in out.splitlines()]), (0, list(WORKLOADS)))
        self.enterContext(mock.patch("torch.cuda.is_available", return_value=False))
        for module in (choices, decode, graph_host):
            with mock.patch.object(sys, "argv", ["a script"]):
                status, _, err = run(lambda _, main=module.main: main())
            self.assertEqual((status, "need a GPU" in err), (2, True), module.__name__)


class TestScripts(WithFolder):
    """They time upstream and ours in turn; here on the CPU, where both are the same code."""

    def test_parts_make_up_the_whole(self):
        found = graph_host.measure("SMALL", Program(lambda x: x @ x, (torch.ones(2, 2),), name="SMALL"), 2, 3)
        ways = [(record["way"], record["regime"]) for record in found]
        self.assertEqual(ways, [(way, regime) for way in ("upstream", "ours") for regime in ("same", "fresh")])
        self.assertIn("of upstream's", graph_host.table(found))
        for record in found:
            self.assertTrue(0 < record["trees"] < record["host"] <= record["latency"], record)
            self.assertAlmostEqual(record["outside"], record["host"] - record["trees"])

    @forked("compiler")
    def test_loops_of_one_process_are_measured_although_another_fails(self):
        jobs = [loops.Job(model, "eager", "cpu") for model in ("mlp", "missing")]
        results = [loops.result(one) for one in loops.measure(jobs, "CE", 2, 200.0, lambda text: None, warm=1)]
        self.assertEqual([(r["model"], r["loop"]) for r in results], [(j.model, loop) for j in jobs for loop in "CE"])
        for found in results[:2]:
            self.assertEqual((found.get("error"), found["rounds"]), (None, 2))
            self.assertLess(found["apart"], 1e-6)
        self.assertEqual({found["error"] for found in results[2:]}, {"KeyError: 'missing'"})

    @forked("compiler")
    def test_updates_that_the_program_captures_have_the_gradients_of_eager(self):
        (measured,) = loops.measure([loops.Job("sac", "captured", "cpu")], "A", 1, 200.0, mock.Mock(), 1)
        found = loops.result(measured)
        self.assertEqual((found.get("error"), found["rounds"]), (None, 1))
        self.assertLess(found["apart"], 1e-6)

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
    def test_tokens_are_generated(self):
        out, ways = self.folder / "decode.json", ("eager", "compile")
        with mock.patch.object(decode, "WAYS", ways):
            how = ("--device", "cpu", "--tokens", "8", "--rounds", "1")
            status, _, _ = run(decode.main, "small", *how, "--out", str(out))
        found = json.loads(out.read_text())["results"]
        self.assertEqual((status, tuple(one["way"] for one in found)), (0, ways))
        self.assertEqual([one["as_compile"] for one in found], [1.0] * 2)
        self.assertTrue(all(one["step_us"] > 0 for one in found), found)


class TestSoak(TestCase):
    def test_a_soak_counts_what_comes_once_it_is_warm(self):
        calls = itertools.count()

        def loop(over, times):
            while not over.wait(0.002):
                times.append(1.0 if next(calls) == 0 else 0.25)

        found = soak.soak([loop] * 2, seconds=0.2, warm_s=0.1)
        self.assertEqual((found["longest_us"], found["recordings"]), (250_000, 0))
        self.assertLess(10, found["calls"])
        self.assertLess(found["growth"]["host"], 1)


class TestSummary(TestCase):
    def test_results_that_are_here(self):
        """The page and the README's table are made from the files."""
        folder = pages.RESULTS_FOLDER
        files, starts = (pages.read_all(place.glob("*.json")) for place in (folder, folder / pages.START_FOLDER))
        found = pages.summarise(files, list(WORKLOADS), starts)
        text, readme = (path.read_text(encoding="utf-8") for path in (folder / "README.md", pages.README))
        newest = max(found.files.values(), key=lambda file: file.date)
        training = pages.loops_table.latest(folder, newest.gpu, newest.torch)
        self.assertEqual(text, pages.page(found, training))
        self.assertEqual((folder / pages.PLOT).read_text(encoding="utf-8"), pages.plot(found))
        self.assertEqual(readme, pages.with_table(readme, pages.short_table(found, training)))
        self.assertLessEqual({*causes.DIFFERENT, *causes.NOT_MEASURED, *causes.UNTIMED}, {*WORKLOADS})


class TestWorksWith(WithFolder):
    @forked("torch")
    def test_against_upstream(self):
        """The values are the same in each run, so they can be compared."""
        options = ("scaler", "--device", "cpu", "--against-upstream", "--json", str(out := self.folder / "found.json"))
        with mock.patch.dict("os.environ", TORCH_COMPILE_DISABLE="1"):
            status, printed, said = run(works_with.main, *options)
        self.assertEqual(status, 0, said)
        found = json.loads(out.read_text())
        self.assertEqual((found["same"], found["ours"]), ({"scaler": True}, found["upstream"]))
        self.assertEqual(len(found["ours"]["scaler"]["values"]), works_with.STEPS)
        self.assertIn("scaler     the same; 0 replays", printed)


if __name__ == "__main__":
    run_tests()
