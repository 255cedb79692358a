"""The benchmark: its workloads, the process that each gets, and its command line. Runs without a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
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

import torch
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench import (
    choices,
    command_line,
    figures,
    graph_host,
    host_time,
    kept_outputs,
    many,
    product,
    quiet,
    record_time,
    routes,
)
from bench.isolated import Job, Worker
from bench.loading import load_workloads

from pygraph_trees.benchmark import Effort, Measurement, Program, Results, compare, text_table
from pygraph_trees.benchmark.differences import snapshot
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
BREAK = ("DMLM", "VM")  # the number of their graphs depends on the installed packages
# Some of each kind: with and without a backward, inputs from the CPU, packages, breaks into several graphs.
EXPLAINED = ("ALNET", "BERT", "DLRM", "MMC", "DMLM", "LCNET", "VM")
FROM_THE_CPU = ("DALLE2", "MMC", "ST")  # one input of each


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


def _parameters(name: str) -> int:
    return sum(p.numel() for p in WORKLOADS[name].build("meta").fn.parameters())


class TestWorkloads(TestCase):
    def test_registry(self):
        self.assertEqual(set(WORKLOADS), set(SMALL))
        for name, workload in WORKLOADS.items():
            self.assertEqual(workload.name, name)
            self.assertIn(workload.mode, ("inference", "training"))
            self.assertTrue(workload.doc and "\n" not in workload.doc)

    def test_all_build_on_meta_in_full_size(self):
        for name, workload in WORKLOADS.items():
            with self.subTest(name):
                _require(name)
                program = workload.build(torch.device("meta"))
                self.assertEqual((program.name, program.mode, program.batch), (name, workload.mode, workload.batch))
                inputs = [t for t in pytree.tree_leaves((program.args, dict(program.kwargs)))]
                self.assertEqual(len(inputs), INPUTS[name], name)
                state = (
                    [*program.fn.parameters(), *program.fn.buffers()] if isinstance(program.fn, torch.nn.Module) else []
                )
                self.assertEqual({t.device.type for t in state}, {"meta"} if state else set(), name)
                self.assertEqual(sum(t.device.type == "cpu" for t in inputs), name in FROM_THE_CPU, name)

    def test_sizes(self):
        expected = {
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
        for name, count in expected.items():
            with self.subTest(name):
                _require(name)
                self.assertEqual(_parameters(name), count)
        self.assertGreater(_parameters("DLRM"), 26 * 64_000_000)
        self.assertEqual([t.numel() for t in WORKLOADS["EOS"].build("meta").args], [1048576] * 3)
        self.assertEqual({t.dtype for t in WORKLOADS["EOS"].build("meta").args}, {torch.float64})

    def test_small_ones_run(self):
        """Workloads that the next test does not trace are traced here, and give the same results as in eager mode."""
        for name, sizes in SMALL.items():
            with self.subTest(name):
                _require(name)
                program = WORKLOADS[name].build("cpu", **sizes)
                expected = snapshot(program.step(program.fn, program.args, program.kwargs))
                self.assertTrue(all(t.isfinite().all() for _, t in expected), name)
                if name in EXPLAINED:
                    continue
                traced = torch.compile(program.fn, backend="eager", fullgraph=name != "VM")  # VM reads its data
                found = snapshot(program.step(traced, program.args, program.kwargs))
                self.assertEqual([where for where, _ in found], [where for where, _ in expected], name)
                for (where, one), (_, other) in zip(found, expected, strict=True):
                    # Gradients in bfloat16 may be added up in another order.
                    most = other.abs().max().item() / 128 if program.training else 0.0
                    self.assertEqual(one, other, f"{name}, {where}", rtol=0, atol=most)

    def test_small_ones_are_explained(self):
        for name in EXPLAINED:
            with self.subTest(name):
                _require(name)
                torch._dynamo.reset()
                workload = WORKLOADS[name]
                text = str(explain(workload.build(torch.device("meta"), **SMALL[name])))
                head = re.match(r"(\S+) for sm_90, torch \S+: (\d+) graphs?\n", text)
                assert head is not None, text
                self.assertEqual(head[1], name)
                count = int(head[2])
                if name in BREAK:
                    self.assertGreater(count, 1)
                else:
                    self.assertEqual(count, 1 if workload.mode == "inference" else 2, name)
                self.assertIn("What pygraph_trees does:", text)

    def test_the_seed_decides(self):
        one, two = (WORKLOADS["DLRM"].build("cpu", batch=4, rows=50) for _ in range(2))
        self.assertEqual(one.args, two.args)
        self.assertEqual(list(one.fn.parameters()), list(two.fn.parameters()))


class TestOcean(TestCase):
    @staticmethod
    def _numbers(*values: float) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor([v], dtype=torch.float64) for v in values)

    def test_density(self):
        from pygraph_bench_workloads.ocean_eos import specific_volume

        # Check value of the TEOS-10 toolbox (its 75-term expression gives 1021.840174), and fresh water at 4 degrees.
        for salinity, temperature, pressure, density in ((34.7118, 28.8099, 10.0, 1021.8402), (0.0, 4.0, 0.0, 999.974)):
            volume = specific_volume(*self._numbers(salinity, temperature, pressure))
            self.assertEqual(1 / volume.item(), density, atol=2e-3, rtol=0)

    def test_enthalpy_is_the_integral_of_volume(self):
        from pygraph_bench_workloads.ocean_eos import enthalpy, specific_volume

        s, t, p = self._numbers(35.0, 10.0, 2000.0)
        steps = torch.linspace(0, 2000, 4001, dtype=torch.float64)
        integral = torch.trapezoid(specific_volume(s.expand_as(steps), t.expand_as(steps), steps), steps) * 1e4
        self.assertEqual(enthalpy(s, t, p).item(), integral.item(), atol=1e-4, rtol=0)

    def test_derivative(self):
        from pygraph_bench_workloads.ocean_eos import enthalpy, enthalpy_by_temperature

        program = WORKLOADS["EOS"].build("cpu", shape=(4, 4, 4))
        s, t, p = program.args
        h = 1e-3
        quotient = (enthalpy(s, t + h, p) - enthalpy(s, t - h, p)) / (2 * h)
        self.assertEqual(enthalpy_by_temperature(s, t, p), quotient, atol=1e-6, rtol=1e-6)

    def test_columns_are_solved(self):
        from pygraph_bench_workloads.ocean_tke import solve_columns, vertical_system

        args = WORKLOADS["TKE"].build("cpu", shape=(4, 4, 6)).args
        dzt, dzw, bottom, kappa, length, forcing, surface, tke = (args[i] for i in (10, 11, 14, 15, 16, 17, 18, 19))
        lower, diagonal, upper, right, wet = vertical_system(
            dzt, dzw, bottom, kappa, length, forcing, surface, tke
        )  # fmt: skip
        matrix = (
            torch.diag_embed(diagonal) + torch.diag_embed(upper[..., :-1], 1) + torch.diag_embed(lower[..., 1:], -1)
        )
        expected = torch.linalg.solve(matrix, right.unsqueeze(-1)).squeeze(-1)
        self.assertEqual(solve_columns(lower, diagonal, upper, right), expected)
        self.assertEqual(wet.sum(2), torch.where(bottom > 0, 6 - bottom + 1, 0))
        self.assertEqual(lower[..., 0], torch.zeros_like(lower[..., 0]))

    def test_advection_moves_a_step_downwind_and_keeps_the_sum(self):
        from pygraph_bench_workloads.ocean_tke import superbee_flux

        field = torch.zeros(12, 4, 4, dtype=torch.float64)
        field[:6] = 1.0
        ones, spacing = torch.ones_like(field), torch.ones(12, 1, 1, dtype=torch.float64)
        flux = superbee_flux(0.5 * ones, field, ones, spacing, 0)
        moved = field - torch.diff(flux, dim=0, prepend=torch.zeros_like(flux[:1]))
        self.assertEqual(flux[5], 0.5 * ones[5])
        self.assertEqual(flux[6:], torch.zeros_like(flux[6:]))
        self.assertEqual(moved.sum(), field.sum())
        self.assertEqual(superbee_flux(0.5 * ones, field, 0 * ones, spacing, 0), 0 * ones)

    def test_land_keeps_its_energy_and_the_surface_is_not_negative(self):
        args = list(WORKLOADS["TKE"].build("cpu", shape=(8, 8, 6)).args)
        args[14] = torch.zeros_like(args[14])
        args[14][:, 4:] = 1
        for i in (0, 1, 2, 3, 4, 5, 20):
            args[i] = torch.zeros_like(args[i])
        args[18] = args[18] - 1.0  # drains the surface
        tke, tendency, correction = WORKLOADS["TKE"].build("cpu", shape=(8, 8, 6)).fn(*args)
        self.assertEqual(tke[:, :4], args[19][:, :4])
        self.assertEqual(tke[:, 4:, -1], torch.zeros_like(tke[:, 4:, -1]))
        self.assertTrue((correction[:, 4:] > 0).all())
        self.assertEqual(tendency, torch.zeros_like(tendency))


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

    def end(self) -> None:
        self.happened.append(f"end {self.name}")


@contextlib.contextmanager
def without_processes(blank: Results, run: Callable[..., list[Measurement]]) -> Iterator[Path]:
    """A machine with a GPU, on which ``run`` gives each job's records; yields a folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("pygraph_trees.benchmark.results.here", return_value=blank),
        mock.patch("bench.isolated.Worker", lambda *job: FakeWorker(*job, run)),
    ):
        yield Path(folder)


class TestIsolation(TestCase):
    def _run(self, name: str, timeout_s: float = 120.0) -> list[Measurement]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "__init__.py").write_text(textwrap.dedent(_BROKEN))
            with Worker(Job(name, "inference", 1, ("eager",), FAST, Path(folder), device="cpu"), timeout_s) as worker:
                worker.prepare()
                worker.wait_until_prepared()
                records = worker.measure()
        self.assertEqual(
            [(r.workload, r.way, r.regime) for r in records], [(name, "eager", "same"), (name, "eager", "fresh")]
        )
        return records

    def test_dies_in_the_middle(self):
        for record in self._run("DIES"):
            self.assertIn("exit status 7", record.error)
            self.assertIsNone(record.compile_s)

    def test_some_are_prepared_together_and_timed_one_by_one(self):
        """One that raises does not affect the others, and waiting for the others does not count as its time."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            Path(folder, "__init__.py").write_text(textwrap.dedent(_BROKEN))
            ways = {"GOOD": ("eager",), "RAISES": ("eager", "ours")}
            jobs = [Job(name, "inference", 1, ways[name], FAST, Path(folder), device="cpu") for name in ways]
            workers = [stack.enter_context(Worker(job, 120.0)) for job in jobs]
            told: list[list[str]] = [[], []]
            for worker, steps in zip(workers, told, strict=True):
                worker.wait_until_imported()
                worker.prepare(lambda done, total, text, steps=steps: steps.append(text))
            for worker in workers:
                worker.wait_until_prepared()
            self.assertEqual([worker._process.poll() for worker in workers], [None, 1])
            self.assertFalse([text for steps in told for text in steps if text.startswith("timing")])
            late = time.monotonic() + 1000
            with mock.patch.object(time, "monotonic", lambda: late):
                workers[0].wait_until_prepared()
            good, raised = (worker.measure() for worker in workers)
        self.assertEqual([(r.workload, r.way, r.regime, r.error) for r in good],
                         [("GOOD", "eager", regime, None) for regime in ("same", "fresh")])  # fmt: skip
        self.assertTrue(all(r.latency_ms > 0 and r.max_diff == 0.0 for r in good))
        self.assertEqual((told[0][0], told[0][-1]), ("building GOOD", "done"))
        self.assertEqual(len(raised), 4)
        for record in raised:
            self.assertIn("exit status 1", record.error)
            self.assertIn("RuntimeError: out of luck", record.error)
            self.assertIsNone(record.latency_ms)

    def test_caches_that_are_kept(self):
        """If a folder is named, a process finds the workload that an earlier process compiled."""
        effort = replace(FAST, fresh_caches=False)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "__init__.py").write_text(textwrap.dedent(_BROKEN))
            caches = Path(folder, "caches")
            job = Job("GOOD", "inference", 1, ("compile",), effort, Path(folder), device="cpu", caches=caches)
            found = []
            for _ in range(2):
                with Worker(job, 120.0) as worker:
                    worker.wait_until_imported()
                    worker.prepare()
                    worker.wait_until_prepared()
                    self.assertEqual([r.error for r in worker.measure()], [None, None])
                found.append({path for path in caches.glob("fxgraph/**/*") if path.is_file()})
        self.assertTrue(found[0])
        self.assertEqual(found[0], found[1])

    def test_nobody_waits_for_it(self):
        """A process that was started ahead ends with the block that started it, and leaves nothing."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "__init__.py").write_text(textwrap.dedent(_BROKEN))
            with Worker(Job("GOOD", "inference", 1, ("eager",), FAST, Path(folder), device="cpu"), 9.0) as worker:
                self.assertIsNone(worker._process.poll())
            self.assertIsNotNone(worker._process.poll())
            self.assertFalse(worker._out.parent.exists())

    def test_hangs(self):
        start = time.monotonic()
        for record in self._run("HANGS", timeout_s=1.0):
            self.assertEqual(record.error, "no end after 1 s")
        self.assertLess(time.monotonic() - start, 30)


class TestQuiet(TestCase):
    def wait(self, used, most_s=5.0):
        """Whether the machine was quiet, and when this was known; ``used``: the processor time at each look."""
        clock = {"now": 100.0}
        used = iter(used)

        def sleep(seconds):
            clock["now"] += seconds

        found = quiet.wait_until_quiet(most_s, lambda: next(used), lambda: clock["now"], sleep)
        return found, clock["now"] - 100.0

    def test_waits_for_others(self):
        look = quiet._LOOK_S
        self.assertEqual(self.wait([7.0, 7.0 + 0.5 * look]), (True, look))
        found, took = self.wait([7.0, 7.0 + 9 * look, 9.0, 9.0 + 9 * look, 12.0, 12.0])
        self.assertEqual((found, round(took / look)), (True, 3))

    def test_does_not_wait_for_ever(self):
        busy = (9.0 * number for number in range(100))
        found, took = self.wait(busy, most_s=2.0)
        self.assertEqual((found, 2.0 <= took < 3.0), (False, True))

    def test_where_it_is_not_known(self):
        self.assertEqual(self.wait([None]), (True, 0.0))
        with mock.patch.object(quiet, "_STAT", Path("/nowhere/stat")):
            self.assertIsNone(quiet.cpu_s())

    @unittest.skipUnless(Path("/proc/stat").exists(), "Linux tells")
    def test_processor_time_of_the_machine(self):
        before, own = quiet.cpu_s(), time.process_time()
        while time.process_time() - own < 0.5:
            pass
        self.assertGreaterEqual(quiet.cpu_s() - before, 0.4)


class TestCommandLine(TestCase):
    def setUp(self):
        super().setUp()
        for patch in (
            mock.patch.object(quiet, "wait_until_quiet", lambda: FakeWorker.happened.append("quiet")),
            mock.patch("bench.product.product_hash", return_value="hash"),  # takes a second
        ):
            self.addCleanup(patch.stop)
            patch.start()

    def _main(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = command_line.main(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
        return status, out.getvalue(), err.getvalue()

    def test_list(self):
        status, out, _ = self._main("--list")
        self.assertEqual(status, 0)
        self.assertEqual([line.split()[0] for line in out.splitlines()], list(WORKLOADS))
        self.assertIn("BERT     training        16  BERT base, masked", out)
        self.assertLessEqual(max(map(len, out.splitlines())), 120)

    def test_no_gpu(self):
        with mock.patch("torch.cuda.is_available", return_value=False):
            status, out, err = self._main("EOS")
        self.assertEqual((status, out, len(err.splitlines())), (2, "", 1))
        self.assertIn("need a GPU", err)

    def test_wrong_names(self):
        self.assertIn("did you mean DLRM?", self._main("DLRRM")[2])
        status, _, err = self._main("EOS", "--ways", "eager,jit")
        self.assertEqual(status, 2)
        self.assertIn("there is no way 'jit', only eager, compile, upstream, ours", err)

    def test_measures_writes_and_resumes(self):
        ran: list[str] = []

        def run(job: Job, timeout_s: float) -> list[Measurement]:
            ran.append(job.name)
            self.assertEqual((job.effort.rounds, timeout_s, job.ways), (4, 9.0, ways))
            records = [Measurement(job.name, job.mode, job.batch, way, "same", latency_ms=1.0) for way in job.ways]
            return [record.failed("RuntimeError: no") if job.name == "TKE" else record for record in records]

        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            out = Path(folder) / "x.json"
            blank = replace(Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "hash", 4))
            stack.enter_context(mock.patch("torch.cuda.is_available", return_value=True))
            here = stack.enter_context(mock.patch("pygraph_trees.benchmark.results.here", return_value=blank))
            stack.enter_context(mock.patch("bench.isolated.Worker", lambda *job: FakeWorker(*job, run)))
            common = ("--rounds", "4", "--timeout", "9", "--ways", "eager,ours", "--out", str(out))

            ways = ("eager", "ours")
            status, shown, _ = self._main("EOS", "TKE", *common)
            self.assertEqual((status, ran), (1, ["EOS", "TKE"]))
            self.assertIn("failed: RuntimeError: no", shown)
            self.assertEqual([r.workload for r in Results.read(out).records], ["EOS", "EOS", "TKE", "TKE"])
            self.assertIn("# NVIDIA H200, torch 2.11.0", out.with_suffix(".md").read_text())

            status, shown, _ = self._main("EOS", "TKE", "DLRM", *common, "--resume")
            self.assertEqual(ran, ["EOS", "TKE", "TKE", "DLRM"])
            self.assertIn("EOS: measured before", shown)
            self.assertEqual({r.workload for r in Results.read(out).records}, {"EOS", "TKE", "DLRM"})

            here.return_value = replace(blank, code_hash="other")
            status, shown, _ = self._main("EOS", *common, "--resume")
            self.assertIn("differs in code_hash; starting from scratch", shown)
            self.assertEqual((status, [r.workload for r in Results.read(out).records]), (0, ["EOS", "EOS"]))

            ran.clear()
            four = ("--rounds", "4", "--timeout", "9", "--resume", "--out", str(out))
            ways = ("eager", "compile", "upstream", "ours")
            self._main("EOS", *four)
            self.assertEqual(ran, ["EOS"])  # it was measured in only two ways before

    def test_an_interrupt_ends_what_is_being_timed(self):
        """It does so before the thread pool is left, which waits for all jobs."""
        ended = threading.Event()

        def run(job: Job, _: float) -> list[Measurement]:
            if job.name == "EOS":
                raise KeyboardInterrupt
            self.assertTrue(ended.wait(30))
            return []

        def end(worker: FakeWorker) -> None:
            worker.happened.append(f"end {worker.name}")
            ended.set()

        blank = replace(Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "hash", 4))
        FakeWorker.happened.clear()
        with (
            without_processes(blank, run) as folder,
            mock.patch("bench.quiet.wait_until_quiet"),
            mock.patch.object(FakeWorker, "end", end),
            self.assertRaises(KeyboardInterrupt),
        ):
            self._main("EOS", "TKE", "--gpus", "2", "--jobs", "2", "--rounds", "4", "--out", str(folder / "x.json"))
        self.assertEqual(FakeWorker.happened[-2:], ["end EOS", "end TKE"])

    def test_batches(self):
        """The next workloads import while others are prepared; each is timed alone, on a quiet machine."""

        def run(job: Job, _: float) -> list[Measurement]:
            record = Measurement(job.name, job.mode, job.batch, "ours", "same", latency_ms=1.0)
            return [replace(record, compile_s=2.0, record_s=3.0)]

        a, b, c, d, e = ("EOS", "TKE", "DLRM", "BERT", "ST")
        one = [f"start {a}"]
        for name, following in ((a, b), (b, c), (c, None)):
            more = ([f"start {following}"], [f"imported {following}"]) if following else ([], [])
            one += [*more[0], f"prepare {name}", f"await {name}", *more[1], "quiet", f"measure {name}"]
        starts, prepares, waits, imported = (
            {name: f"{what} {name}" for name in (a, b, c, d, e)} for what in ("start", "prepare", "await", "imported")
        )
        measures = {name: ("quiet", f"measure {name}") for name in (a, b, c, d, e)}
        two = [
            *(starts[n] for n in (a, b, c, d)),
            *(prepares[n] for n in (a, b)),
            *(waits[n] for n in (a, b)),
            *(imported[n] for n in (c, d)),
            *(*measures[a], *measures[b]),
            *(starts[e], prepares[c], prepares[d], waits[c], waits[d], imported[e], *measures[c], *measures[d]),
            *(prepares[e], waits[e], *measures[e]),
        ]
        blank = Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "hash", 4)
        for count, names, wanted, figures_ in (
            ("1", (a, b, c), one, (2.0, 3.0)),
            ("2", (a, b, c, d, e), two, (None,) * 2),
        ):
            with self.subTest(jobs=count), without_processes(blank, run) as folder:
                FakeWorker.happened.clear()
                out = folder / "x.json"
                status, shown, _ = self._main(*names, "--jobs", count, "--ways", "ours", "--out", str(out))
                self.assertEqual((status, FakeWorker.happened), (0, wanted))
                self.assertIn(f"[{len(names)}/{len(names)}] {names[-1]}", shown)
                found = [(r.workload, r.compile_s, r.record_s) for r in Results.read(out).records]
                self.assertEqual(sorted(found), sorted((name, *figures_) for name in names))
        self.assertIn("expected at least 1, got 0", self._main(a, "--jobs", "0")[2])

    def test_workloads_share_several_gpus(self):
        """As many workloads are timed at a time as there are GPUs, each on its own GPU."""
        together, names = threading.Barrier(2, timeout=60), ("EOS", "TKE", "DLRM", "BERT")
        jobs: dict[str, Job] = {}

        def run(job: Job, _: float) -> list[Measurement]:
            jobs[job.name] = job
            together.wait()
            return [Measurement(job.name, job.mode, job.batch, "ours", "same", latency_ms=1.0, compile_s=2.0)]

        blank = Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "hash", 4)
        with without_processes(blank, run) as folder:
            out = folder / "x.json"
            status, _, errors = self._main(*names, "--gpus", "2", "--ways", "ours", "--out", str(out))
            self.assertEqual((status, errors), (0, ""))
            found = [(r.workload, r.compile_s) for r in Results.read(out).records]
        self.assertEqual(found, [(name, None) for name in names])
        own = [jobs[name].environment()["CUDA_VISIBLE_DEVICES"] for name in names]
        self.assertEqual(own, ["0", "1", "0", "1"])
        with mock.patch.dict(os.environ):
            os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
            threads = int(jobs["EOS"].environment()["TORCHINDUCTOR_COMPILE_THREADS"])
            self.assertEqual(threads, max(2, (os.cpu_count() or 1) // 2))
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "7"  # the user's
            self.assertEqual(jobs["EOS"].environment()["TORCHINDUCTOR_COMPILE_THREADS"], "7")

    def test_kept_caches_leave_no_times_to_compile(self):
        jobs: list[Job] = []

        def run(job: Job, _: float) -> list[Measurement]:
            jobs.append(job)
            record = Measurement(job.name, job.mode, job.batch, "ours", "same", latency_ms=1.0)
            return [replace(record, compile_s=2.0, record_s=3.0)]

        blank = Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "0123456789abcdef", 4)
        with without_processes(blank, run) as folder:
            out = folder / "x.json"
            for more, figures_ in (((), (2.0, 3.0)), (("--caches", str(folder)), (None, None))):
                self.assertEqual(self._main("EOS", "--ways", "ours", "--out", str(out), *more)[0], 0)
                self.assertEqual([(r.compile_s, r.record_s) for r in Results.read(out).records], [figures_])
        own, kept = jobs
        self.assertEqual((own.effort.fresh_caches, own.environment()), (True, None))
        self.assertFalse(kept.effort.fresh_caches)
        self.assertEqual(kept.environment()["TORCHINDUCTOR_CACHE_DIR"], f"{folder.resolve()}/0123456789ab")

    def test_start_times_alone(self):
        """No calls are timed. Start times count if each job has its own cores: no more jobs at a time than GPUs."""
        jobs: list[Job] = []

        def run(job: Job, _: float) -> list[Measurement]:
            jobs.append(job)
            return [Measurement(job.name, job.mode, job.batch, "ours", "same", compile_s=2.0, record_s=3.0)]

        blank = Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "0123456789abcdef", 0)
        with without_processes(blank, run) as folder:
            out = folder / "x.json"
            for more, times in (((), 2.0), (("--gpus", "2"), 2.0), (("--gpus", "2", "--jobs", "4"), None)):
                self.assertEqual(self._main("EOS", "TKE", "--start-times", "--out", str(out), *more)[0], 0)
                self.assertEqual([r.compile_s for r in Results.read(out).records], [times] * 2)
        self.assertEqual(
            {(j.ways, j.effort.rounds, j.effort.inspect) for j in jobs}, {(("upstream", "ours"), 0, False)}
        )

    def test_a_comparison_without_rounds(self):
        program = Program(lambda x: x * 2, (torch.ones(4),), name="SMALL")
        found = compare(program, ("compile", "ours"), replace(FAST, rounds=0, inspect=False))
        self.assertTrue(all(m.compile_s is not None and m.latency_ms is None and m.error is None for m in found))
        self.assertIn(program.name, text_table(found))

    def test_some_workloads_leave_the_others(self):
        blank = Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "hash", 7)
        record = Measurement("EOS", "inference", 1, "ours", "same", latency_ms=1.0)
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(command_line, "RESULTS_FOLDER", Path(folder)),
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch("pygraph_trees.benchmark.results.here", return_value=blank),
            mock.patch("bench.isolated.Worker", lambda *job: FakeWorker(*job, lambda *_: [record])),
            mock.patch("bench.summary.main"),
        ):
            out = Path(folder) / "h200-torch2.11.json"
            others = replace(blank, date="before", records=(replace(record, workload="TKE"),))
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
        record = Measurement("EOS", "inference", 1, "ours", "same", latency_ms=1.0)
        blank = Results("NVIDIA H200", "1", "2.11.0", "3", "3.12", "today", "hash", 4)
        for elsewhere, has_plots in ((False, True), (False, False), (True, True)):
            with (
                self.subTest(elsewhere=elsewhere, has_plots=has_plots),
                tempfile.TemporaryDirectory() as folder,
                mock.patch.object(command_line, "RESULTS_FOLDER", Path(folder)),
                mock.patch("torch.cuda.is_available", return_value=True),
                mock.patch("pygraph_trees.benchmark.results.here", return_value=blank),
                mock.patch("bench.isolated.Worker", lambda *job: FakeWorker(*job, lambda *_: [record])),
                mock.patch("importlib.util.find_spec", lambda name: has_plots or None),  # noqa: B023
                mock.patch("bench.summary.main") as summary,
            ):
                out = Path(folder) / "elsewhere" / "x.json"
                out.parent.mkdir()
                status, shown, _ = self._main("EOS", *(("--out", str(out)) if elsewhere else ()))
                self.assertEqual((status, summary.call_count), (0, has_plots and not elsewhere))
                self.assertEqual("matplotlib" in shown, not has_plots)
                written = out if elsewhere else Path(folder) / "h200-torch2.11.json"
                self.assertEqual([r.workload for r in Results.read(written).records], ["EOS"])


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

    def test_drawn_programs(self):
        """A training step of a drawn function gives its weight a gradient."""
        drawn = choices.Drawn(kernels=3, inputs=2, megabytes=0.0, host_us=0, waits=False)
        trained = drawn.program(torch.device("cpu"), training=True)
        loss, (gradient, *_) = trained.step(trained.fn, trained.args, trained.kwargs)
        self.assertEqual((loss.dim(), gradient.shape), (0, (256, 16)))
        inferred = drawn.program(torch.device("cpu"))
        self.assertFalse(inferred.step(inferred.fn, inferred.args, inferred.kwargs)[0].requires_grad)


class TestProductHash(TestCase):
    def test_tests_do_not_count(self):
        """The hash covers both packages; the hash of the evidence also covers the GPU tests."""
        from pygraph_trees.code_hash import covered_files

        seen: list[Any] = []
        with mock.patch("pygraph_trees.code_hash.covered_files", lambda root, folders: seen.append(folders) or []):
            product.product_hash.__wrapped__()
        (folders,) = seen
        tests = {path for path in covered_files() if path.is_relative_to(Path(__file__).resolve().parents[1])}
        self.assertGreater(len(tests), 0)
        self.assertEqual(set(covered_files()) - set(covered_files(folders=folders)), tests)


class TestFigures(TestCase):
    def test_no_gpu(self):
        for module in (graph_host, host_time, kept_outputs, many, record_time, routes):
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


class TestHostTime(TestCase):
    def _measure(self, rounds: int) -> dict[str, Any]:
        program = Program(lambda x: x @ x, (torch.ones(2, 2),), name="SMALL")
        with mock.patch.object(host_time, "program_of", lambda name: program):
            return host_time.measure("SMALL", rounds, 2)

    def test_both_are_measured_twice_in_turn(self):
        found = self._measure(3)
        for figure in ("host", "latency", "call"):
            self.assertEqual(list(found[f"{figure}_us"]), ["upstream 1", "ours 2", "ours 3", "upstream 4"])
            self.assertTrue(all(us > 0 for us in found[f"{figure}_us"].values()))
            self.assertEqual((found["workload"], len(found["ratios"][figure])), ("SMALL", 3))
            self.assertIn(found["ratio"][figure], found["ratios"][figure])

    def test_the_ratio_is_of_what_each_took(self):
        # In every round and position, a call takes 100 us with upstream and 103 us with ours.
        taken = {"upstream": 100e-6, "ours": 103e-6}
        active: list[str] = []
        make = host_time.make_ways

        def made(program: Program, kinds: list[str]) -> list[Any]:
            (way,) = make(program, kinds)
            before = way.active

            @contextlib.contextmanager
            def noted() -> Any:
                with before():
                    active.append(kinds[0])
                    yield

            return [SimpleNamespace(callable=way.callable, active=noted)]

        def block(*_: Any) -> SimpleNamespace:
            return SimpleNamespace(host_s=[taken[active[-1]]], latency_s=[1.0], throughput_s=2 * taken[active[-1]])

        with mock.patch.object(host_time, "make_ways", made), mock.patch.object(host_time, "time_block", block):
            found = self._measure(4)
        self.assertEqual(found["ratios"], {"host": [1.03] * 4, "latency": [1.0] * 4, "call": [1.03] * 4})
        self.assertEqual(active[:4], ["upstream", "ours", "ours", "upstream"])

    def test_each_takes_every_turn(self):
        orders = [host_time._permuted(4, number) for number in range(8)]
        self.assertEqual(len({tuple(order) for order in orders}), 8)
        for turn in range(4):
            self.assertEqual(sorted(order[turn] for order in orders), [0, 0, 1, 1, 2, 2, 3, 3])


class TestKeptOutputs(TestCase):
    def test_both_settings_take_turns_and_are_compared(self):
        made: list[str] = []
        taken = {"ours:overwrite": (10.0, 20.0, 100), "ours:keep": (12.0, 21.0, 164)}

        def block(program: Program, way: Any, feed: Any, calls: int) -> tuple[float, float, int]:
            kept_outputs._call(program, way, feed)
            made.append(way.name)
            return taken[way.name]

        program = Program(lambda x: x @ x, (torch.ones(4, 4),), name="SMALL")
        with (
            mock.patch.object(kept_outputs, "_block", block),
            mock.patch.object(kept_outputs, "call_until_chosen", lambda call, first: call()),
        ):
            found = kept_outputs.measure("SMALL", program, 4, 2)
        self.assertEqual([made.count(kind) for kind in taken], [8, 8])
        self.assertNotEqual(made[:4], made[4:8])
        self.assertEqual(found["keep"], {"host_us": 12.0, "gpu_us": 21.0, "peak_bytes": 164})
        self.assertEqual((found["overwrite"]["host_us"], found["output_bytes"]), (10.0, 64))
        self.assertEqual(
            " ".join(kept_outputs.line(found).split()),
            "SMALL host 10.0 -> 12.0 us, GPU 20.0 -> 21.0 us (1.050), peak +64 B for 64 B of outputs",
        )


class TestRecordTime(TestCase):
    def test_what_recording_takes(self):
        self.assertEqual(record_time.excess_ms([9e-3, 3e-3, *[1e-3] * 14]), 10.0)
        self.assertEqual(record_time.excess_ms([2e-3] * 16), 0.0)

    def test_both_take_turns_and_the_first_round_is_left_out(self):
        program = Program(lambda x: x @ x, (torch.ones(2, 2),), name="SMALL")
        made: list[str] = []
        taken = {"upstream": iter([50.0, 4.0, 2.0, 4.0]), "ours": iter([90.0, 5.0, 4.0, 6.0])}

        def record(program: Program, kind: str, *_: Any) -> tuple[float, int]:
            made.append(kind)
            return next(taken[kind]), len(made)

        with (
            mock.patch.object(record_time, "resolve", lambda name, device: program),
            mock.patch.object(record_time, "_record", record),
        ):
            found = record_time.measure("SMALL", 3)
        self.assertEqual(made, ["upstream", "ours", "ours", "upstream"] * 2)
        self.assertEqual(found["record_ms"], {"upstream": 4.0, "ours": 5.0})
        self.assertEqual(found["ratio"], 1.5)
        self.assertEqual(found["samples"]["ours"], [90.0, 5.0, 4.0, 6.0])
        self.assertEqual(found["pool_bytes"], {"upstream": 5, "ours": 6})

    def test_a_program_is_compiled_anew_each_time(self):
        program = Program(lambda x: x @ x, (torch.ones(2, 2),), name="SMALL")
        torch._dynamo.utils.counters.clear()
        with mock.patch.object(record_time, "resolve", lambda name, device: program):
            found = record_time.measure("SMALL", 1)
        self.assertEqual([len(ms) for ms in found["samples"].values()], [2, 2])
        self.assertEqual(torch._dynamo.utils.counters["stats"]["unique_graphs"], 4)


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
        table = routes.table([found], ("patch", "auto"))
        self.assertEqual([line[:8] for line in table.splitlines()[1:]], ["2 x 3   "] * 3)
        found["chosen"]["1.0"] = "by address: for a reason"
        (line,) = [line for line in routes.table([found], ("patch", "auto")).splitlines() if "reason" in line]
        self.assertEqual(line.strip(), "by address: for a reason")
        model = routes.Consumers(3, loaded=False)
        x, y = torch.rand(16, 16), torch.rand(16, 16)
        total = x
        for _ in range(3):
            total = total.sin() + x + y
        self.assertEqual(model(x, y), total)


if __name__ == "__main__":
    run_tests()
