"""The hashes over the code, and the evidence that the GPU lane writes and vouches with."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from tested_code import PRODUCT, code_hash
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.code_hash import artifact_files, artifact_hash


def suite():
    loader = SourceFileLoader("gpu_suite", str(ROOT / "tools" / "gpu_suite"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_suite", loader))
    sys.modules["gpu_suite"] = module
    loader.exec_module(module)
    return module


class WithFolder(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def changes(self, name, text, of):
        """Whether ``of`` returns something else while a file has this text, or is gone if that is None."""
        before, path = of(), self.folder / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink() if text is None else path.write_text(text)
        after = of()
        path.unlink(missing_ok=True) if kept is None else path.write_bytes(kept)
        return after != before


class TestHashes(WithFolder):
    def test_only_changes_of_code_change_it(self):
        for part in ("pygraph_trees", "inductor_patches", "test/gpu", "test/cpu"):
            (self.folder / part).mkdir(parents=True)
        # Fixed on purpose: a change of this value without a change of the form means that evidence no longer travels.
        text = 'def f(*, a=1, **k):\n    return f"{a!r:>3} {k}" if a else [*k]\n'
        (self.folder / "pygraph_trees/a.py").write_text(text)
        self.assertExpectedInline(code_hash(self.folder)[:16], """9e1346bb7b543d89""")  # on all Pythons
        (self.folder / "pygraph_trees/a.py").write_text('"""Doc."""\ndef f(x: int):\n    "doc"\n    return x + 1\n')
        for name, text, changes, product_changes in (
            ("pygraph_trees/a.py", '"""Other."""\n\n# a\ndef f(\n x: int,\n):\n return (x + 1)\n', False, False),
            ("pygraph_trees/a.py", "def f(x: int):\n    return x + 2\n", True, True),
            ("pygraph_trees/a.py", "def f(x):\n    return x + 1\n", True, True),
            ("pygraph_trees/a.py", None, True, True),
            ("inductor_patches/b.py", "", True, True),
            *((f"pygraph_trees/a.{suffix}", "int x;", True, True) for suffix in ("cpp", "h")),
            ("test/gpu/b.py", "x = 1", True, False),
            ("test/cpu/b.py", "x = 1", False, False),
        ):
            with self.subTest(name, text=text):
                self.assertEqual(self.changes(name, text, lambda: code_hash(self.folder)), changes)
                self.assertEqual(self.changes(name, text, lambda: code_hash(self.folder, PRODUCT)), product_changes)

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
        with self.assertRaises(OSError):
            of()

    def test_that_code_uses_no_other(self):
        of_package = [path for path in artifact_files() if path.is_relative_to(ROOT / "pygraph_trees")]
        used = {module for path in of_package for module in _imports(path)}
        self.assertGreater(len(used), 10)
        self.assertEqual(used - {*of_package}, set())


def _imports(path):
    """The files of the package from which a module imports, anywhere in it."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    for node in nodes:
        place = ROOT / importlib.util.resolve_name("." * node.level + (node.module or ""), package).replace(".", "/")
        for alias in node.names if place.is_relative_to(ROOT / "pygraph_trees") else ():
            files = (place / f"{alias.name}.py", place.with_suffix(".py"), place / "__init__.py")
            yield next(file for file in files if file.is_file())


class TestEvidence(WithFolder):
    def setUp(self):
        super().setUp()
        self.suite = suite()
        self.enterContext(mock.patch.multiple(self.suite, EVIDENCE=self.folder / "evidence.json", ROOT=self.folder))

    def outcome(self, *parts):
        found = {}
        self.suite.run_parts(parts, [{}, {}], found.__setitem__)
        (outcome,) = found.values()
        return outcome

    def test_check_tells_whether_the_evidence_is_of_this_code(self):
        """Evidence of another torch than the required one changes no status."""
        self.assertEqual(self.suite.check(), 1)
        files = [self.suite.evidence_of(version) for version in ("2.11.0+cu130", "2.15.0+cu130")]
        evidence = {"passed": 3, "failed": 0, "skipped": 1, "gpu": "G", "torch": "2", "date": "today"}
        with mock.patch.object(self.suite, "code_hash", lambda: "now"):
            for hashes, failed, status in ((("now", "then"), 0, 0), (("then", "now"), 0, 1), (("now", "now"), 1, 1)):
                for file, found in zip(files, hashes, strict=True):
                    file.write_text(json.dumps({**evidence, "code_hash": found, "failed": failed}))
                self.assertEqual(self.suite.check(), status)

    def test_each_test_counts_once_and_crashes_are_failures(self):
        good = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
        for name, text, counts, failure in (
            ("test_good", good, (1, 1, 1), "test_good.py::test_b"),
            ("test_bad", "import os\ndef test_a(): os._exit(3)\n", (0, 1, 0), "test_bad.py: .* exit status 3"),
        ):
            path = self.folder / f"{name}.py"
            path.write_text(text)
            outcome = self.outcome(self.suite.Part(path, 0, 1, 0.0))
            self.assertEqual((outcome.passed, outcome.failed, outcome.skipped), counts)
            self.assertRegex(str(outcome.failures), failure)


if __name__ == "__main__":
    run_tests()
