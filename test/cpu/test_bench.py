"""The benchmark: its workloads, the process that each gets, and its command line. Runs without a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import statistics
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import captured
import torch
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils import _pytree as pytree

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tools"), str(Path(__file__).resolve().parent)]

from bench import (
    choices,
    command_line,
    figures,
    graph_host,
    host_time,
    many,
    quiet,
    record_time,
    routes,
)
from bench.isolated import Job, Worker
from bench.loading import load_workloads

from pygraph_trees.benchmark import Effort, Measurement, Program, Results, compare, text_table
from pygraph_trees.benchmark.differences import snapshot
from pygraph_trees.benchmark.ways import patches_on
from pygraph_trees.cli.explain import explain

WORKLOADS = load_workloads()
FAST = Effort(rounds=1, block_s=0.0, calls=(2, 2), settle_calls=1, warm_calls=(5, 6), ring=2, fresh_caches=False)

# Overrides under which a workload runs on a CPU in a second.
SMALL: dict[str, dict[str, Any]] = {
    "ALNET": {},
    "BERT": {"batch": 2, "sequence": 32, "layers": 1, "hidden": 64},
    "BERT-I": {"sequence": 32, "layers": 1, "hidden": 64},
    "DR-I": {"batch": 4, "items": 50},
    "DR-T": {"batch": 4, "items": 50},
    "DLRM": {"batch": 8, "rows": 100},
    "EOS": {"shape": (8, 8, 8)},
    "TKE": {"shape": (16, 16, 8)},
    "MMC": {"size": 32, "layers": 1, "width": 96},
    "ST": {"time": 16, "count": 6, "layers": 1, "width": 64},
    "BSCG": {"batch": 2, "sequence": 16, "layers": 1, "hidden": 64, "vocabulary": 100},
    "DALLE2": {"size": 8, "width": 64, "levels": 2, "text_width": 64, "text_layers": 1, "layers": 1},
    "DBV2": {"sequence": 32, "layers": 1, "hidden": 64},
    "DCGAN": {"batch": 4, "width": 8},
    "DGPT2": {"batch": 2, "sequence": 32, "layers": 1, "hidden": 64},
    "DMLM": {"batch": 2, "sequence": 32, "layers": 1, "hidden": 64},
    "DNET": {"batch": 1, "size": 32},
    "LCNET": {"batch": 1, "size": 32},
    "MBERT": {"batch": 2, "sequence": 32, "layers": 1},
    "MTCG-I": {"batch": 2, "sequence": 16, "layers": 1, "hidden": 64, "vocabulary": 100},
    "MTCG-T": {"batch": 2, "sequence": 16, "layers": 1, "hidden": 64, "vocabulary": 100},
    "STCLM": {"batch": 2, "sequence": 16, "layers": 1, "hidden": 64, "vocabulary": 100},
    "TEFD": {"batch": 2, "size": 128, "width": 16, "cells": 1, "depth": 1, "backbone": "mobilenetv3_small_050"},
    "VM": {"size": 64},
    "XLNET-I": {"sequence": 32, "layers": 1, "hidden": 64},
    "XLNET-T": {"batch": 2, "sequence": 32, "layers": 1, "hidden": 64},
}
# The packages that workloads need besides torch.
PACKAGES = {
    "transformers": {
        *("BERT", "BERT-I", "BSCG", "DBV2", "DGPT2", "DMLM", "MBERT", "MTCG-I", "MTCG-T", "STCLM", "XLNET-I", "XLNET-T")
    },
    "timm": {"LCNET", "TEFD"},
    "torchvision": {"DNET", "VM"},
}
INPUTS = {"ALNET": 1, "BERT": 2, "BERT-I": 3, "DR-I": 1, "DR-T": 1, "DLRM": 28, "EOS": 3, "MMC": 2, "ST": 3, "TKE": 21}
INPUTS |= {"BSCG": 2, "DALLE2": 3, "DBV2": 3, "DCGAN": 2, "DGPT2": 2, "DMLM": 2, "DNET": 1, "LCNET": 1, "MBERT": 3}
INPUTS |= {"MTCG-I": 2, "MTCG-T": 2, "STCLM": 2, "TEFD": 3, "VM": 1, "XLNET-I": 1, "XLNET-T": 2}
EXPLAINED = ("DLRM", "MMC")  # a training step; an input from the CPU
FROM_THE_CPU = ("DALLE2", "MMC", "ST")  # one input of each
PARAMETERS = {
    "ALNET": 61_100_840,
    "BERT": 109_514_298,
    "BSCG": 87_508_992,
    "DALLE2": 291_121_803,
    "DBV2": 884_596_226,
    "DCGAN": 2_765_568,
    "DGPT2": 81_912_576,
    "DMLM": 139_244_121,
    "DNET": 7_978_856,
    "DR-I": 2 * (197951 * 512 + 512 * 512 + 512 * 1024) + 512 * 4 + 1024 + 197951,
    "LCNET": 1_880_856,
    "MBERT": 24_582_914,
    "MTCG-T": 300_176_768,
    "STCLM": 12_032_512,
    "TEFD": 6_587_354,
    "VM": 44_454_513,
    "XLNET-I": 116_750_336,
}


@functools.cache
def _imports(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError):  # the latter two come from a torchvision of another torch version
        return False
    return True


def _require(name: str) -> None:
    """Skips a test, or a part of one, if a package that the workload needs is not installed."""
    for package, names in PACKAGES.items():
        if name in names and not _imports(package):
            raise unittest.SkipTest(f"{package} is not installed")


class TestWorkloads(TestCase):
    def test_all_build_on_meta_in_full_size(self):
        """Names, inputs and numbers of parameters are those of the registry and of the models' papers."""
        self.assertEqual(set(WORKLOADS), set(SMALL))
        for name, workload in WORKLOADS.items():
            with self.subTest(name):
                self.assertTrue(workload.doc and "\n" not in workload.doc)
                _require(name)
                program = workload.build(torch.device("meta"))
                self.assertEqual((program.name, program.mode, program.batch), (name, workload.mode, workload.batch))
                inputs = pytree.tree_leaves((program.args, dict(program.kwargs)))
                self.assertEqual(len(inputs), INPUTS[name])
                self.assertEqual(sum(t.device.type == "cpu" for t in inputs), name in FROM_THE_CPU)
                if isinstance(program.fn, torch.nn.Module):
                    parameters = list(program.fn.parameters())
                    self.assertEqual({t.device.type for t in (*parameters, *program.fn.buffers())}, {"meta"})
                    count = sum(p.numel() for p in parameters)
                    self.assertEqual(count, PARAMETERS.get(name, count))

    def test_small_ones_run(self):
        for name, sizes in SMALL.items():
            with self.subTest(name):
                _require(name)
                program = WORKLOADS[name].build("cpu", **sizes)
                found = snapshot(program.step(program.fn, program.args, program.kwargs))
                self.assertTrue(found and all(t.isfinite().all() for _, t in found), name)

    def test_some_are_explained(self):
        """One graph in inference, and a second one for the backward in training."""
        for name in EXPLAINED:
            with self.subTest(name):
                torch._dynamo.reset()
                workload = WORKLOADS[name]
                text = str(explain(workload.build(torch.device("meta"), **SMALL[name])))
                count = 1 if workload.mode == "inference" else 2
                self.assertRegex(text, rf"{name} for sm_90, torch \S+: {count} graphs?\n")
                self.assertIn("What pygraph_trees does:", text)

    def test_the_seed_decides(self):
        one, two = (WORKLOADS["DLRM"].build("cpu", batch=4, rows=50) for _ in range(2))
        self.assertEqual(one.args, two.args)
        self.assertEqual(list(one.fn.parameters()), list(two.fn.parameters()))


_BROKEN = """
    import os, time
    from types import SimpleNamespace

    import torch

    import pygraph_trees.benchmark.measure as measure
    from pygraph_trees.benchmark import Program

    def build(device):
        # Without C++ to compile, which takes a while.
        measure.wake_compiler = lambda device: None
        return Program(lambda x: x @ x, (torch.ones(2, 2),), name="GOOD")

    def raises(device):
        raise RuntimeError("out of luck")

    def dies(device):
        # Dies after the first stage, when its ways have been warmed up.
        measure.time_block = lambda *args: os._exit(7)
        return Program(lambda x: x + 1, (torch.ones(2),), name="DIES")

    def hangs(device):
        time.sleep(600)

    WORKLOADS = {
        name: SimpleNamespace(name=name, mode="inference", batch=1, build=build)
        for name, build in (("GOOD", build), ("RAISES", raises), ("DIES", dies), ("HANGS", hangs))
    }
"""


class FakeWorker:
    """Stands for the process that is started for a job; notes what happens to which job."""

    happened: ClassVar[list[str]] = []

    def __init__(self, job: Job, timeout_s: float, run: Callable[..., list[Measurement]]) -> None:
        self.name, self._job, self._timeout_s, self._run = job.name, job, timeout_s, run
        self.happened.append(f"start {job.name}")

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, progress: Any = None) -> None:
        self.happened.append(f"prepare {self.name}")

    def wait_until_prepared(self) -> None:
        self.happened.append(f"await {self.name}")

    def wait_until_imported(self) -> None:
        self.happened.append(f"imported {self.name}")

    def measure(self, progress: Any = None) -> list[Measurement]:
        self.happened.append(f"measure {self.name}")
        return self._run(self._job, self._timeout_s)


BLANK = Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "hash", 4)


def _record(job: Job, way: str = "ours") -> Measurement:
    return Measurement(job.name, job.mode, job.batch, way, "same", latency_ms=1.0, compile_s=2.0, record_s=3.0)


@contextlib.contextmanager
def without_processes(run: Callable[..., list[Measurement]]) -> Iterator[Path]:
    """A machine with a GPU, on which ``run`` gives each job's records; yields a folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("pygraph_trees.benchmark.results.here", return_value=BLANK),
        mock.patch("bench.isolated.Worker", lambda *job: FakeWorker(*job, run)),
    ):
        yield Path(folder)


class TestIsolation(TestCase):
    def test_a_process_that_fails_affects_no_other(self):
        """Some are prepared together and measured one by one; one raises, one dies while it is timed, one hangs."""
        errors = {
            "GOOD": None,
            "RAISES": r"exit status 1\n(.*\n)*RuntimeError: out of luck",
            "DIES": "exit status 7",
            "HANGS": "no end after 1 s",
        }
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            Path(folder, "__init__.py").write_text(textwrap.dedent(_BROKEN))
            told: list[str] = []
            workers = {}
            for name in errors:
                job = Job(name, "inference", 1, ("eager",), FAST, Path(folder), device="cpu")
                workers[name] = stack.enter_context(Worker(job, 1.0 if name == "HANGS" else 120.0))
            for worker in workers.values():
                worker.wait_until_imported()
            for worker in workers.values():
                worker.prepare(lambda done, total, text: told.append(text))
            for worker in workers.values():
                worker.wait_until_prepared()
            self.assertFalse([text for text in told if text.startswith("timing")])
            late = time.monotonic() + 1000
            with mock.patch.object(time, "monotonic", lambda: late):  # waiting for the others counts for none
                workers["GOOD"].wait_until_prepared()
            found = {name: worker.measure() for name, worker in workers.items()}
        for name, error in errors.items():
            wanted = [(name, "eager", regime) for regime in ("same", "fresh")]
            self.assertEqual([(r.workload, r.way, r.regime) for r in found[name]], wanted)
            for record in found[name]:
                if error is None:
                    self.assertEqual((record.error, record.max_diff), (None, 0.0))
                    self.assertGreater(record.latency_ms, 0)
                else:
                    self.assertRegex(record.error, error)
                    self.assertIsNone(record.latency_ms)


class TestQuiet(TestCase):
    def test_waits_for_others_but_not_for_ever(self):
        busy = [9.0 * number for number in range(100)]  # seconds of processors, at each look
        for used, is_quiet, looks in (
            ([7.0, 7.1], True, 2),
            ([7.0, 16.0, 16.0, 25.0, 25.0, 25.0], True, 6),
            (busy, False, 4),
            ([None], True, 1),  # if Linux does not tell, nothing is waited for
        ):
            with mock.patch.object(quiet, "cpu_s", side_effect=used) as look:
                self.assertEqual((quiet.wait_until_quiet(most_s=0.5 if used is busy else 9.0), look.call_count),
                                 (is_quiet, looks))  # fmt: skip


class TestCommandLine(TestCase):
    def setUp(self):
        super().setUp()
        for patch in (
            mock.patch.object(quiet, "wait_until_quiet", lambda: FakeWorker.happened.append("quiet")),
            mock.patch("bench.product.product_hash", return_value="hash"),  # takes a second
        ):
            self.addCleanup(patch.stop)
            patch.start()

    @staticmethod
    def _main(*arguments: str) -> tuple[int, str, str]:
        return captured.run(command_line.main, *arguments)

    def test_usage(self):
        status, out, _ = self._main("--list")
        self.assertEqual((status, [line.split()[0] for line in out.splitlines()]), (0, list(WORKLOADS)))
        self.assertIn("BERT     training        16  BERT base, masked", out)
        self.assertLessEqual(max(map(len, out.splitlines())), 120)
        with mock.patch("torch.cuda.is_available", return_value=False):
            status, out, err = self._main("EOS")
        self.assertEqual((status, out, len(err.splitlines())), (2, "", 1))
        self.assertIn("need a GPU", err)
        for arguments, problem in (
            (["DLRRM"], "did you mean DLRM?"),
            (["EOS", "--ways", "eager,jit"], "there is no way 'jit', only eager, compile, upstream, ours"),
            (["EOS", "--jobs", "0"], "expected at least 1, got 0"),
        ):
            status, _, err = self._main(*arguments)
            self.assertEqual(status, 2)
            self.assertIn(problem, err)

    def test_measures_writes_and_resumes(self):
        """A run that is resumed keeps what was measured of the same code in the same ways and did not fail."""
        ran: list[str] = []

        def run(job: Job, timeout_s: float) -> list[Measurement]:
            ran.append(job.name)
            self.assertEqual((job.effort.rounds, timeout_s), (4, 9.0))
            records = [_record(job, way=way) for way in job.ways]
            return [record.failed("RuntimeError: no") if job.name == "TKE" else record for record in records]

        with without_processes(run) as folder:
            out = folder / "x.json"
            common = ("--rounds", "4", "--timeout", "9", "--out", str(out))
            two = (*common, "--ways", "eager,ours")
            status, shown, _ = self._main("EOS", "TKE", *two)
            self.assertEqual((status, ran), (1, ["EOS", "TKE"]))
            self.assertIn("failed: RuntimeError: no", shown)
            self.assertEqual([r.workload for r in Results.read(out).records], ["EOS", "EOS", "TKE", "TKE"])
            self.assertIn("# NVIDIA H200, torch 2.11.0", out.with_suffix(".md").read_text())

            shown = self._main("EOS", "TKE", "DLRM", *two, "--resume")[1]
            self.assertEqual(ran, ["EOS", "TKE", "TKE", "DLRM"])
            self.assertIn("EOS: measured before", shown)
            self.assertEqual({r.workload for r in Results.read(out).records}, {"EOS", "TKE", "DLRM"})

            with mock.patch("pygraph_trees.benchmark.results.here", return_value=replace(BLANK, code_hash="other")):
                status, shown, _ = self._main("EOS", *two, "--resume")
                self.assertIn("differs in code_hash; starting from scratch", shown)
                self.assertEqual((status, [r.workload for r in Results.read(out).records]), (0, ["EOS", "EOS"]))

            ran.clear()
            self._main("EOS", *two[:-2], "--resume")
            self.assertEqual(ran, ["EOS"])  # it was measured in only two ways before

    def test_a_workload_is_timed_while_no_other_works(self):
        """All that has started has imported or is prepared, and the machine is quiet."""
        names = ("EOS", "TKE", "DLRM", "BERT", "ST")
        for count in ("1", "2"):
            with self.subTest(jobs=count), without_processes(lambda job, _: [_record(job)]) as folder:
                FakeWorker.happened.clear()
                out = folder / "x.json"
                status, _, _ = self._main(*names, "--jobs", count, "--ways", "ours", "--out", str(out))
                happened = list(FakeWorker.happened)
                self.assertEqual(
                    (status, [h for h in happened if "measure" in h]), (0, [f"measure {name}" for name in names])
                )
                for number, event in enumerate(happened):
                    so_far: dict[str, set[str]] = {}
                    for what, _, name in (h.partition(" ") for h in happened[:number]):
                        so_far.setdefault(what, set()).add(name)
                    if event.startswith("measure"):
                        self.assertEqual(so_far["prepare"], so_far["await"])
                        self.assertEqual(so_far["start"], so_far["await"] | so_far.get("imported", set()))
                        self.assertEqual(happened[number - 1], "quiet")
                # With two jobs, workloads compile beside each other.
                self.assertEqual({r.compile_s for r in Results.read(out).records}, {2.0 if count == "1" else None})

    def test_workloads_share_several_gpus(self):
        """As many workloads are timed at a time as there are GPUs, each on its own GPU."""
        together, names = threading.Barrier(2, timeout=60), ("EOS", "TKE", "DLRM", "BERT")
        jobs: dict[str, Job] = {}

        def run(job: Job, _: float) -> list[Measurement]:
            jobs[job.name] = job
            together.wait()
            return [_record(job)]

        with without_processes(run) as folder:
            out = folder / "x.json"
            status, _, errors = self._main(*names, "--gpus", "2", "--ways", "ours", "--out", str(out))
            self.assertEqual((status, errors), (0, ""))
            self.assertEqual([(r.workload, r.compile_s) for r in Results.read(out).records], [(n, None) for n in names])
        own = [jobs[name].environment()["CUDA_VISIBLE_DEVICES"] for name in names]
        self.assertEqual(own, ["0", "1", "0", "1"])

    def test_times_to_compile_are_left_out_if_something_shortened_or_shared_them(self):
        """A cache that is kept does; with ``--start-times``, which times no calls, each job may have a GPU."""
        jobs: list[Job] = []

        def run(job: Job, _: float) -> list[Measurement]:
            jobs.append(job)
            return [_record(job)]

        with without_processes(run) as folder:
            out = folder / "x.json"
            for more, seconds in (
                ((), 2.0),
                (("--caches", str(folder)), None),
                (("--start-times",), 2.0),
                (("--start-times", "--gpus", "2"), 2.0),
                (("--start-times", "--gpus", "2", "--jobs", "4"), None),
            ):
                self.assertEqual(self._main("EOS", "--out", str(out), *more)[0], 0)
                self.assertEqual([(r.compile_s) for r in Results.read(out).records], [seconds], more)
        self.assertEqual([job.effort.fresh_caches for job in jobs[:2]], [True, False])
        self.assertTrue(jobs[1].environment()["TORCHINDUCTOR_CACHE_DIR"].startswith(str(folder.resolve())))
        self.assertEqual({(j.ways, j.effort.rounds) for j in jobs[2:]}, {(("upstream", "ours"), 0)})

    def test_a_comparison_without_rounds(self):
        program = Program(lambda x: x * 2, (torch.ones(4),), name="SMALL")
        found = compare(program, ("compile", "ours"), replace(FAST, rounds=0, inspect=False))
        self.assertTrue(all(m.compile_s is not None and m.latency_ms is None and m.error is None for m in found))
        self.assertIn(program.name, text_table(found))

    def test_some_workloads_leave_the_others(self):
        """The file of all results keeps its other workloads, unless they are of other code, effort or GPU."""
        with (
            without_processes(lambda job, _: [_record(job)]) as folder,
            mock.patch.object(command_line, "RESULTS_FOLDER", folder),
            mock.patch("bench.summary.main"),
        ):
            out = folder / "h200-torch2.11.json"
            other = Measurement("TKE", "inference", 1, "ours", "same", latency_ms=1.0)
            others = replace(BLANK, date="before", records=(other,))
            others.write(out)
            self._main("EOS")
            self.assertEqual([r.workload for r in Results.read(out).records], ["TKE", "EOS"])
            for differs in ({"code_hash": "another"}, {"rounds": 3}, {"gpu": "NVIDIA H100"}):
                replace(others, **differs).write(out)
                status, shown, _ = self._main("EOS")
                self.assertEqual(status, 2)
                self.assertRegex(shown, f"differs in {next(iter(differs))}: name another with --out")
                self.assertEqual([r.workload for r in Results.read(out).records], ["TKE"])

    def test_one_command_makes_page_and_plots(self):
        """It makes them of results in the results folder, if plots can be made."""
        for has_plots in (True, False):
            with (
                self.subTest(has_plots=has_plots),
                without_processes(lambda job, _: [_record(job)]) as folder,
                mock.patch.object(command_line, "RESULTS_FOLDER", folder),
                mock.patch("importlib.util.find_spec", lambda name, has_plots=has_plots: has_plots or None),
                mock.patch("bench.summary.main") as summary,
            ):
                self.assertEqual(self._main("EOS", "--out", str(folder / "elsewhere" / "x.json"))[0], 0)
                summary.assert_not_called()
                status, shown, _ = self._main("EOS")
                self.assertEqual((status, summary.call_count, "matplotlib" in shown), (0, has_plots, not has_plots))


class TestChoices(TestCase):
    def test_the_way_that_is_gone_is_told_from_noise(self):
        times = {"compile": 4.0, "ours:graphed": 2.0, "ours": 2.2}
        graphed, plain = (choices.ratios_of(times, is_graphed=is_graphed) for is_graphed in (True, False))
        self.assertEqual(graphed, {"ratio": 1.1, "choice_ratio": 1.0})
        self.assertEqual(plain, {"ratio": 1.1, "choice_ratio": 2.0})
        faster = {"ratio": 0.9, "choice_ratio": 1.02}
        self.assertEqual(
            choices.summary_of([graphed, plain, faster]),
            "2 of 3 functions go a way within 3% of the better forced one; 1 are within 3% of its time, "
            "1 faster by more than that",
        )


class TestFigures(TestCase):
    def test_no_gpu(self):
        for module in (graph_host, host_time, many, record_time, routes):
            out = io.StringIO()
            with (
                self.subTest(module.__name__),
                mock.patch("torch.cuda.is_available", return_value=False),
                mock.patch.object(sys, "argv", ["a script"]),
                contextlib.redirect_stdout(out),
            ):
                self.assertEqual(module.main(), 2)
                self.assertIn("need a GPU", out.getvalue())

    def test_what_is_written(self):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch("torch.cuda.get_device_name", return_value="a GPU"),
        ):
            path = Path(folder) / "found.json"
            figures.write_figures(path, [{"us": 1.5}], rounds=3)
            figures.write_figures(None, [{"us": 1.5}], rounds=3)
            self.assertEqual([p.name for p in Path(folder).iterdir()], ["found.json"])
            found = json.loads(path.read_text())
        self.assertEqual((found["gpu"], found["torch"], found["rounds"]), ("a GPU", torch.__version__, 3))
        self.assertEqual((found["results"], len(found["code_hash"])), ([{"us": 1.5}], 64))


class TestTimes(TestCase):
    """Scripts that time upstream and ours in turn; here on the CPU, where both are the same code."""

    PROGRAM = Program(lambda x: x @ x, (torch.ones(2, 2),), name="SMALL")

    def test_host_time_compares_pairs(self):
        with mock.patch.object(host_time, "program_of", lambda name: self.PROGRAM):
            found = host_time.measure("SMALL", 3, 2)
        for figure in ("host", "latency", "call"):
            self.assertEqual(list(found[f"{figure}_us"]), ["upstream 1", "ours 2", "ours 3", "upstream 4"])
            self.assertTrue(all(us > 0 for us in found[f"{figure}_us"].values()))
            self.assertEqual((found["workload"], len(found["ratios"][figure])), ("SMALL", 3))
            self.assertEqual(found["ratio"][figure], statistics.median(found["ratios"][figure]))

    def test_host_time_is_a_ratio_of_ours_to_upstream(self):
        # A call takes 100 us with upstream and 103 us with ours, whose patches are on.
        def block(*_: Any) -> SimpleNamespace:
            seconds = 103e-6 if patches_on() else 100e-6
            return SimpleNamespace(host_s=[seconds], latency_s=[1.0], throughput_s=2 * seconds)

        with (
            mock.patch.object(host_time, "program_of", lambda name: self.PROGRAM),
            mock.patch.object(host_time, "time_block", block),
        ):
            found = host_time.measure("SMALL", 4, 2)
        self.assertEqual(found["ratios"], {"host": [1.03] * 4, "latency": [1.0] * 4, "call": [1.03] * 4})

    def test_time_to_record_is_what_calls_take_beyond_the_latest(self):
        self.assertEqual(record_time.excess_ms([9e-3, 3e-3, *[1e-3] * 14]), 10.0)
        self.assertEqual(record_time.excess_ms([2e-3] * 16), 0.0)

    def test_time_to_record_compiles_again_each_time(self):
        """The first of the rounds, which takes turns as the others do, is left out of the figures."""
        torch._dynamo.utils.counters.clear()
        with mock.patch.object(record_time, "resolve", lambda name, device: self.PROGRAM):
            found = record_time.measure("SMALL", 1)
        self.assertEqual(torch._dynamo.utils.counters["stats"]["unique_graphs"], 4)
        for way, samples in found["samples"].items():
            self.assertEqual((len(samples), found["record_ms"][way]), (2, samples[1]))


class TestRoutes(TestCase):
    def test_addresses_by_rate(self):
        sets = [(object(),) for _ in range(3)]
        for rate, wanted in ((0.0, "000000"), (0.5, "001122"), (1.0, "012012")):
            found = [sets.index(given) for given, _ in zip(routes.feed(sets, rate), range(6), strict=False)]
            self.assertEqual("".join(map(str, found)), wanted)

    def test_a_program_is_measured_by_each_route(self):
        device, effort = torch.device("cpu"), Effort(rounds=2, block_s=0.001)
        with mock.patch.object(routes.Consumers, "forward", lambda self, x, y: x @ y):  # no C++ to compile
            found = routes.measure(2, 3, False, ("patch", "auto"), effort, device)
        self.assertEqual(found["program"], "2 x 3")
        cells = {f"{route} {rate}" for route in ("patch", "auto") for rate in routes.RATES}
        self.assertEqual(found["samples"].keys(), cells)
        self.assertTrue(all(len(all_) == 2 for cell in found["samples"].values() for all_ in cell.values()))
        self.assertEqual(found["chosen"], dict.fromkeys(map(str, routes.RATES)))  # no graphs here
        self.assertEqual(len(routes.table([found], ("patch", "auto")).splitlines()), 1 + len(routes.RATES))


if __name__ == "__main__":
    run_tests()
