"""Inductor's and AOTAutograd's caches hit with the patches on exactly when they hit with torch alone.

Their keys contain a hash over the code, and so does the evidence that the GPU lane writes.

Graphs of the CPU are compiled for CUDA graphs and treated as graphs of a GPU. Upstream then finds a reason not to graph
them, so everything but the CUDA graphs happens as on a GPU. ``torch._dynamo.reset()`` stands for a new process.
"""

import ast
import contextlib
import importlib.util
import json
import re
import shutil
import sys
import warnings
from unittest import mock

from commands import ROOT, WithFolder, tool

sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
import torch._functorch.config
from tested_code import PRODUCT, code_hash
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
import pygraph_trees
from inductor_patches import config as config_patch
from pygraph_trees.report.summary import clear
from pygraph_trees.settings import FLAGS
from pygraph_trees.version import artifact_files, artifact_hash

OFF = {"triton.pygraph_placement": "off", "triton.pygraph_indirection": "off", "triton.pygraph_selective": "always"}
COUNTED = "(fxgraph|autograd)_cache_(hit|miss|bypass|saved)"
MISSED = {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1, "autograd_cache_saved": 1}
HIT = {"fxgraph_cache_hit": 1, "autograd_cache_hit": 1}
BOTH_MISSED = {**MISSED, "fxgraph_cache_miss": 2}  # forward and backward
BOTH_HIT = {**HIT, "fxgraph_cache_hit": 2}


def counted():
    """The caches' counters that are not zero, since the last call of this function."""
    found = {name: n for kind in ("inductor", "aot_autograd") for name, n in counters[kind].items() if n}
    counters.clear()
    return {name: n for name, n in found.items() if re.fullmatch(COUNTED, name)}


def product(x, w):
    """Forward and backward consist only of matrix products, so that no kernel takes seconds to compile."""
    return x @ w @ w


def written(x, w):
    x.mul_(2)
    return (x @ w).t(), x


class CachesTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(fresh_cache())
        self.enterContext(torch._functorch.config.patch(enable_autograd_cache=True))
        self.enterContext(config.patch({"fx_graph_cache": True, "fx_graph_remote_cache": False}))
        self.enterContext(warnings.catch_warnings(action="ignore"))
        self.addCleanup(inductor_patches.install)
        self.addCleanup(torch._dynamo.reset)

    @contextlib.contextmanager
    def way(self, patched, flags=None):
        """Turns the patches on or off, and treats each compiled graph as one of a GPU."""
        (inductor_patches.install if patched else inductor_patches.uninstall)()
        upstream = CompiledFxGraph.__init__

        def init(graph, *args, **kwargs):
            upstream(graph, *args, **kwargs)
            graph.device_types = type(graph.device_types)(["cuda"])

        with (
            mock.patch.object(CompiledFxGraph, "__init__", init),
            config.patch((flags or {}) if patched else {}),
            fresh_cache(),
        ):
            yield

    def run_as_if_new(self, fn, *, training=False, backward=True, **options):
        """Compiles and calls ``fn`` as a new process would; returns the last result and what the caches counted."""
        torch._dynamo.reset()
        clear()
        counters.clear()
        torch.manual_seed(0)
        x, w = torch.randn(4, 4, requires_grad=training), torch.randn(4, 4)
        out = torch.compile(fn, mode="reduce-overhead", **options)(x, w)
        if training and backward:
            out.sum().backward()
        return out, counted()


class TestHits(CachesTestCase):
    def test_a_second_process_hits_as_with_torch_alone(self):
        programs = [(product, {"training": trains, "dynamic": dyn}) for trains in (False, True) for dyn in (None, True)]
        for flags, fn, options in (
            *((flags, *program) for flags in (None, OFF) for program in programs),
            (None, written, {}),
        ):
            missed, hit = (BOTH_MISSED, BOTH_HIT) if options.get("training") else (MISSED, HIT)
            for patched in (False, True):
                with self.subTest(fn=fn.__name__, options=options, flags=flags, patched=patched):
                    with self.way(patched, flags):
                        found = [self.run_as_if_new(fn, **options)[1] for _ in range(3)]
                    self.assertEqual(found, [missed, hit, hit])

    def test_a_backward_that_is_compiled_after_its_forward_was_cached(self):
        for flags, patched in ((None, False), (None, True), (OFF, False), (OFF, True)):
            with self.subTest(flags=flags, patched=patched), self.way(patched, flags):
                _, found = self.run_as_if_new(product, training=True, backward=False)
                self.assertEqual(found, {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1})
                out, found = self.run_as_if_new(product, training=True, backward=False)
                self.assertEqual(found, {"fxgraph_cache_hit": 1, "autograd_cache_miss": 1})
                out.sum().backward()
                self.assertEqual(counted(), {"fxgraph_cache_miss": 1, "autograd_cache_saved": 1})
                _, found = self.run_as_if_new(product, training=True)
                self.assertEqual(found, BOTH_HIT)

    def test_entries_that_hold_the_graphs_themselves(self):
        if not hasattr(torch._functorch.config, "bundled_autograd_cache"):
            self.skipTest("this torch has no such entries")
        with torch._functorch.config.patch(bundled_autograd_cache=True):
            for training in (False, True):
                found = []
                for patched in (False, True):
                    with self.way(patched):
                        found.append([self.run_as_if_new(product, training=training)[1] for _ in range(2)])
                self.assertEqual(found[0], found[1])
                self.assertEqual(found[1][1].get("autograd_cache_hit"), 1)

    def test_what_comes_from_the_cache_is_reported(self):
        for training, modes in ((False, ["inference"]), (True, ["forward"])):
            reported = []
            with self.way(patched=True):
                for _ in range(2):
                    self.run_as_if_new(product, training=training)
                    reported.append(pygraph_trees.report().graphs)
            self.assertEqual([graph.mode for graph in reported[1]], modes)
            self.assertEqual(*[[(g.model, g.mode, g.dropped, g.partitions) for g in graphs] for graphs in reported])


class TestKeys(CachesTestCase):
    """Which differences separate the cache entries of two processes, and which do not."""

    def test_torch_alone_and_ours_share_nothing(self):
        for patched, expected in ((True, MISSED), (False, MISSED), (True, HIT), (False, HIT)):
            (inductor_patches.install if patched else inductor_patches.uninstall)()
            self.assertEqual(self.run_as_if_new(product)[1], expected)

    def test_other_code_that_shapes_artifacts_finds_nothing(self):
        self.addCleanup(inductor_patches.uninstall)
        self.addCleanup(config_patch._version.cache_clear)
        for digest, expected in (("a" * 64, MISSED), ("b" * 64, MISSED), ("a" * 64, HIT), ("b" * 64, HIT)):
            inductor_patches.uninstall()
            config_patch._version.cache_clear()
            with mock.patch("pygraph_trees.version.artifact_hash", return_value=digest):
                inductor_patches.install()
            self.assertEqual(self.run_as_if_new(product)[1], expected, digest[0])

    def test_only_flags_that_change_artifacts_miss(self):
        with self.way(patched=True):
            self.assertEqual(self.run_as_if_new(product)[1], MISSED)
            for flag in FLAGS:
                other = 1 if flag.is_number else next(value for value in flag.values if value != flag.default)
                with self.subTest(flag=flag.name), config.patch({f"triton.{flag.name}": other}):
                    self.assertEqual(self.run_as_if_new(product)[1], MISSED if flag.changes_artifacts else HIT)


class TestHashes(WithFolder):
    def changes(self, name, text, of):
        """Whether ``of`` returns something else while a file has this text, or is gone if that is None."""
        before, path = of(), self.folder / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink() if text is None else path.write_text(text)
        after = of()
        path.unlink(missing_ok=True) if kept is None else path.write_bytes(kept)
        return after != before

    def test_only_code_that_shapes_artifacts_changes_the_hash_in_the_keys_of_caches(self):
        def of():
            artifact_hash.cache_clear()
            return artifact_hash(self.folder)

        for package in PRODUCT:  # as an installed wheel
            shutil.copytree(ROOT / package, self.folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        self.addCleanup(artifact_hash.cache_clear)
        self.assertEqual(of(), artifact_hash(ROOT))
        for name in ("placement/plan.py", "placement/added.py", "report/compiled.py", "cuda/host_reads.py"):
            self.assertTrue(self.changes(f"pygraph_trees/{name}", "\n", of), name)
        self.assertTrue(self.changes("inductor_patches/table.py", None, of))
        for name in ("trees/managers/manager.py", "report/page.py", "native/replay.cpp", "placement/plan.pyc"):
            self.assertFalse(self.changes(f"pygraph_trees/{name}", "\n", of), name)
        (self.folder / "pygraph_trees" / "settings.py").unlink()
        self.assertRaises(OSError, of)

    def test_that_code_uses_no_other(self):
        of_package = [path for path in artifact_files() if path.is_relative_to(ROOT / "pygraph_trees")]
        found = [(path, node) for path in of_package for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        used = set()
        for path, node in found:
            if isinstance(node, ast.ImportFrom):
                package, module = ".".join(path.relative_to(ROOT).parent.parts), "." * node.level + (node.module or "")
                place = ROOT / importlib.util.resolve_name(module, package).replace(".", "/")
                for alias in node.names if place.is_relative_to(ROOT / "pygraph_trees") else ():
                    files = (place / f"{alias.name}.py", place.with_suffix(".py"), place / "__init__.py")
                    used.add(next(file for file in files if file.is_file()))
        self.assertGreater(len(used), 10)
        self.assertEqual(used - {*of_package}, set())


class TestEvidence(WithFolder):
    def setUp(self):
        super().setUp()
        self.suite = tool("gpu_suite")
        places = {"EVIDENCE": self.folder / "evidence.json", "ROOT": self.folder}
        self.enterContext(mock.patch.multiple(self.suite, **places, code_hash=lambda: code_hash(self.folder)))

    def test_check_tells_whether_the_evidence_is_of_this_code(self):
        """Evidence of another torch than the required one changes no status, and comments are no code."""
        (code := self.folder / "pygraph_trees" / "a.py").parent.mkdir()
        code.write_text(text := 'def f(*, a=1, **k):\n    return f"{a!r:>3} {k}" if a else [*k]\n')
        # Fixed on purpose: a change of this value without a change of the form means that evidence no longer travels.
        self.assertExpectedInline((now := code_hash(self.folder))[:16], """9e1346bb7b543d89""")  # on all Pythons
        self.assertEqual(self.suite.check(), 1)
        files = [self.suite.evidence_of(version) for version in ("2.11.0+cu130", "2.15.0+cu130")]
        evidence = {"passed": 3, "failed": 0, "skipped": 1, "gpu": "G", "torch": "2", "date": "today"}
        for hashes, failed, status in (((now, now), 1, 1), (("then", now), 0, 1), ((now, "then"), 0, 0)):
            for file, found in zip(files, hashes, strict=True):
                file.write_text(json.dumps({**evidence, "code_hash": found, "failed": failed}))
            self.assertEqual(self.suite.check(), status)
        for changed, status in ((f'"""Doc."""\n# a\n{text}', 0), (text.replace("a=1", "a=2"), 1)):
            code.write_text(changed)
            self.assertEqual(self.suite.check(), status)

    def test_each_test_counts_once_and_crashes_are_failures(self):
        good = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
        for name, text, counts, failure in (
            ("test_good", good, (1, 1, 1), "test_good.py::test_b"),
            ("test_bad", "import os\ndef test_a(): os._exit(3)\n", (0, 1, 0), "test_bad.py: .* exit status 3"),
        ):
            path = self.folder / f"{name}.py"
            path.write_text(text)
            self.suite.run_parts([self.suite.Part(path, 0, 1, 0.0)], [{}, {}], (found := {}).__setitem__)
            (outcome,) = found.values()
            self.assertEqual((outcome.passed, outcome.failed, outcome.skipped), counts)
            self.assertRegex(str(outcome.failures), failure)


if __name__ == "__main__":
    run_tests()
