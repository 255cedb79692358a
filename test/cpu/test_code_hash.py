"""The hash over the code, and the evidence that it vouches for."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.code_hash import PRODUCT, artifact_files, artifact_hash, code_hash, covered_files


def suite():
    loader = SourceFileLoader("gpu_suite", str(ROOT / "tools" / "gpu_suite"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_suite", loader))
    sys.modules["gpu_suite"] = module
    loader.exec_module(module)
    return module


class TestCodeHash(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for part in ("pygraph_trees", "inductor_patches", "test/gpu", "test/cpu"):
            (self.root / part).mkdir(parents=True)
        self.file = self.root / "pygraph_trees" / "a.py"
        self.write('"""Doc."""\ndef f(x: int) -> int:\n    "doc"\n    return x + 1\n')

    def write(self, text):
        self.file.write_text(text)

    def test_only_a_change_of_the_code_changes_it(self):
        before = code_hash(self.root)
        self.assertRegex(before, "^[0-9a-f]{64}$")
        self.write('"""Other."""\n\n# a comment\ndef f(\n    x: int,\n) -> int:\n    return (x + 1)\n')
        self.assertEqual(code_hash(self.root), before)
        for changed in ("def f(x: int) -> int:\n    return x + 2\n", "def f(x) -> int:\n    return x + 1\n", ""):
            self.write(changed)
            self.assertNotEqual(code_hash(self.root), before)

    def test_the_hash_covers_the_product_and_the_gpu_lane(self):
        before, of_the_product = code_hash(self.root), code_hash(self.root, PRODUCT)
        (self.root / "test" / "cpu" / "b.py").write_text("x = 1")
        self.assertEqual(code_hash(self.root), before)
        (self.root / "test" / "gpu" / "b.py").write_text("x = 1")
        self.assertNotEqual(code_hash(self.root), before)
        self.assertEqual(code_hash(self.root, PRODUCT), of_the_product)  # of figures, which no test changes
        self.file.rename(self.file.with_name("c.py"))
        self.assertNotEqual(code_hash(self.root), before)

    def test_the_hash_covers_c(self):
        hashes = {code_hash(self.root)}
        for name in ("a.c", "b.cpp", "c.h"):
            (self.root / "pygraph_trees" / name).write_text("int x;")
            hashes.add(code_hash(self.root))
        self.assertEqual(len(hashes), 4)
        covered = {p.relative_to(ROOT).as_posix() for p in covered_files()}
        self.assertLessEqual({"pygraph_trees/trees/manager.py", "inductor_patches/patch.py"}, covered)

    def test_the_hash_is_the_same_on_all_pythons(self):
        # Fixed on purpose: a change of this value without a change of the form means that evidence no longer travels.
        self.write('def f(*, a=1, **k):\n    return f"{a!r:>3} {k}" if a else [*k]\n')
        self.assertExpectedInline(code_hash(self.root)[:16], """9e1346bb7b543d89""")


class TestArtifactHash(TestCase):
    """The hash of the code in the caches' keys: it covers all code that shapes artifacts, and no more."""

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)  # as an installed wheel: the packages, without the checkout
        for package in ("pygraph_trees", "inductor_patches"):
            shutil.copytree(ROOT / package, self.root / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        self.addCleanup(artifact_hash.cache_clear)

    def hash(self):
        artifact_hash.cache_clear()
        return artifact_hash(self.root)

    def test_an_installed_package_has_its_checkouts(self):
        self.assertRegex(self.hash(), "^[0-9a-f]{64}$")
        self.assertEqual(self.hash(), artifact_hash(ROOT))
        (self.root / "pygraph_trees" / "placement" / "__pycache__").mkdir()
        (self.root / "pygraph_trees" / "placement" / "__pycache__" / "plan.pyc").write_bytes(b"x")
        self.assertEqual(self.hash(), artifact_hash(ROOT))

    def test_only_code_that_shapes_artifacts_changes_it(self):
        before = self.hash()
        for name in ("placement/plan.py", "placement/rounding.py", "report/compiled.py", "cuda/host_reads.py"):
            path = self.root / "pygraph_trees" / name
            content = path.read_bytes()
            path.write_bytes(content + b"\n")
            self.assertNotEqual(self.hash(), before, name)
            path.write_bytes(content)
        for name in ("inductor_patches/scheduler.py", "inductor_patches/post_grad.py"):
            path = self.root / name
            content = path.read_bytes()
            path.unlink()
            self.assertNotEqual(self.hash(), before, name)
            path.write_bytes(content)
        added = self.root / "pygraph_trees" / "placement" / "added.py"
        added.write_text("")
        self.assertNotEqual(self.hash(), before)
        added.unlink()
        for name in ("trees/manager.py", "report/page.py", "indirection/inputs.py", "native/replay.cpp"):
            with (self.root / "pygraph_trees" / name).open("a") as file:
                file.write("\n")  # code that runs with a program, or reports on it
        self.assertEqual(self.hash(), before)

    def test_code_that_cannot_be_read_has_no_hash(self):
        (self.root / "pygraph_trees" / "settings.py").unlink()
        with self.assertRaises(OSError):
            self.hash()

    def test_placement_and_descriptions_use_nothing_else(self):
        covered = {path.relative_to(ROOT).with_suffix("").as_posix() for path in artifact_files()}
        rest = [name for name in sorted(covered) if name.startswith("pygraph_trees/")]
        self.assertGreater(len(rest), 10)
        for name in rest:
            for used in _imports(name):
                self.assertIn(used, covered, f"{name} uses it")

    def test_the_hash_takes_milliseconds(self):
        self.hash()
        begin = time.process_time()
        for _ in range(20):
            self.hash()
        self.assertLess((time.process_time() - begin) / 20, 0.02)


def _imports(name):
    """The modules of this project that a module imports, anywhere in it, as paths without a suffix."""
    path = ROOT / f"{name}.py"
    package = name if path.name == "__init__.py" else name.rpartition("/")[0]
    package = package.removesuffix("/__init__")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split("/")[: len(package.split("/")) + 1 - node.level]) if node.level else ""
            modules = [(".".join(filter(None, (above, node.module))), [alias.name for alias in node.names])]
        else:
            continue
        for module, names in modules:
            if module.partition(".")[0] != "pygraph_trees":
                continue
            place = module.replace(".", "/")
            parts = [f"{place}/{n}" for n in names if (ROOT / place / f"{n}.py").is_file()]
            whole = place if (ROOT / f"{place}.py").is_file() else f"{place}/__init__"
            yield from parts or [whole]


class TestEvidence(TestCase):
    def setUp(self):
        super().setUp()
        self.module = suite()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.module.LEAST_PART_S, self.module.MOST_PART_S, self.module.MOST_PARTS = 60, 200, 4
        self.printed = self.enterContext(mock.patch("builtins.print"))
        self.enterContext(mock.patch.object(self.module, "EVIDENCE", self.folder / "evidence.json"))

    def test_the_longest_file_runs_first_and_in_parts(self):
        """A file that is new counts as long; the more processes run at a time, the shorter are the parts."""
        files = self.files("a.py", "b.py", "new.py")
        self.module.EVIDENCE.write_text(json.dumps({"seconds": {"a.py": 3, "b.py": 400}}))
        for jobs, count in ((1, 2), (4, 4)):
            ordered = [part.path.name for part in self.module.longest_first(files, jobs)]
            self.assertEqual(ordered, [*["new.py"] * self.module.MOST_PARTS, *["b.py"] * count, "a.py"])

    def files(self, *names):
        for name in names:
            (self.folder / name).touch()
        return [self.folder / name for name in names]

    def test_parts_of_a_file_run_each_test_once(self):
        shutil.copy(ROOT / "test" / "gpu" / "conftest.py", self.folder)
        file = self.folder / "test_x.py"
        file.write_text("".join(f"def test_{n}(): assert {n} != 4\n" for n in range(7)))
        outcome = self.outcome(*self.module.parts_of(file, 250, 90))
        self.assertEqual((outcome.passed, outcome.failed), (6, 1))
        self.assertRegex(outcome.failures[0], "test_x.py::test_4$")

    def test_files_with_tests_of_two_gpus_see_all(self):
        """Tests that a file inherits count. Others see one GPU, and take turns."""
        self.assertEqual([slot["CUDA_VISIBLE_DEVICES"] for slot in self.module.slots(3, 2)], ["0", "1", "0"])
        files = self.files("test_one.py", "test_two.py", "test_heir.py")
        for file, text in zip(files, ("", "requires_two_gpus", "import test_two"), strict=True):
            file.write_text(text)
        with mock.patch.object(self.module, "ROOT", self.folder):
            jobs = [self.module.Part(file, 0, 1, 50.0).job() for file in files]
        self.assertEqual(["CUDA_VISIBLE_DEVICES" in job.environment for job in jobs], [False, True, True])

    def outcome(self, *parts):
        """The outcome of a file, two of whose parts run at a time."""
        found = {}
        with mock.patch.object(self.module, "ROOT", self.folder):
            self.module.run_parts(parts, [{}, {}], found.__setitem__)
        (outcome,) = found.values()
        return outcome

    def test_check_tells_whether_the_evidence_is_of_this_code(self):
        """Evidence of another torch than the required one is told, and changes no status."""
        self.assertEqual(self.module.code_hash(), code_hash())
        self.assertEqual(self.module.check(), 1)
        self.assertIn("is missing", self.printed.call_args.args[0])
        files = [self.module.evidence_of(version) for version in ("2.11.0+cu130", "2.15.0+cu130")]
        self.assertEqual([file.name for file in files], ["evidence.json", "evidence-torch2.15.json"])
        evidence = {"passed": 3, "failed": 0, "skipped": 1, "gpu": "G", "torch": "2", "date": "today"}
        told = {
            "now": "the evidence is of this code: 3 passed",
            "then": "the evidence is of other code (then, not now): 3 passed",
        }
        with mock.patch.object(self.module, "code_hash", lambda: "now"):
            for hashes, failed, status in ((("now", "then"), 0, 0), (("then", "now"), 0, 1), (("now", "now"), 1, 1)):
                for file, found in zip(files, hashes, strict=True):
                    file.write_text(json.dumps({**evidence, "code_hash": found, "failed": failed}))
                self.printed.reset_mock()
                self.assertEqual(self.module.check(), status)
                for call, found in zip(self.printed.call_args_list, hashes, strict=True):
                    self.assertTrue(call.args[0].startswith(told[found]), call)

    def test_outcomes_are_counted_and_crashes_are_failures(self):
        good = (
            "import unittest\nclass T(unittest.TestCase):\n def test_a(self): pass\n"
            " def test_b(self): self.fail('no')\n @unittest.skip('x')\n def test_c(self): pass\n"
        )
        for name, text, counts, failure in (
            ("test_good", good, (1, 1, 1), "test_good.py::T::test_b"),
            ("test_bad", "import os\ndef test_a(): os._exit(3)\n", (0, 1, 0), "test_bad.py: .* exit status 3"),
            (
                "test_cut",
                "import pytest\ndef test_a(): pytest.exit('no', 3)\n",
                (0, 1, 0),
                "test_cut.py: .* exit status 3",
            ),
            ("test_empty", "", (0, 0, 0), None),
        ):
            path = self.folder / f"{name}.py"
            path.write_text(text)
            outcome = self.outcome(self.module.Part(path, 0, 1, 0.0))
            self.assertEqual(len(outcome.failures), failure is not None)
            self.assertRegex(str(outcome.failures), failure or r"^\[\]$")
            self.assertEqual((outcome.passed, outcome.failed, outcome.skipped), counts)

    def test_a_run_that_was_cut_is_resumed(self):
        module = suite()
        of, hashes = {"gpu": "a"}, {"good": "1", "mended": "1", "bad": "1"}
        with tempfile.TemporaryDirectory() as folder, mock.patch("builtins.print") as printed:
            path = Path(folder) / "outcomes.json"
            cut = module.Progress(path, of, hashes)
            cut.resume()
            cut.add("good", module.Outcome(passed=3, skipped=1, seconds={"good": 5}))
            cut.add("mended", module.Outcome(passed=1, seconds={"mended": 5}))
            cut.add("bad", module.Outcome(passed=1, failed=1, failures=["bad.x"], seconds={"bad": 7}))
            again = module.Progress(path, of, {**hashes, "mended": "2"})
            again.resume()
            self.assertEqual(list(again.outcomes), ["good"])
            for name, passed in (("bad", 2), ("mended", 1)):
                again.add(name, module.Outcome(passed=passed, seconds={name: 6}))
            total = again.total()
            self.assertEqual((total.passed, total.failed, total.skipped, total.failures), (6, 0, 1, []))
            self.assertEqual(total.seconds, {"good": 5, "bad": 6, "mended": 6})
            for other in ((of, dict.fromkeys(hashes, "3")), ({"gpu": "b"}, hashes)):
                elsewhere = module.Progress(path, *other)
                elsewhere.resume()
                self.assertEqual(elsewhere.outcomes, {})
            self.assertEqual([p.name for p in Path(folder).iterdir()], ["outcomes.json"])
        said = [call.args[0] for call in printed.call_args_list]
        self.assertEqual(
            said[1:3], ["1 files passed before, and 1 of other code", "0 files passed before, and 3 of other code"]
        )
        self.assertIn("is missing", said[0])
        self.assertIn("differs in gpu", said[3])

    def test_an_outcome_depends_on_what_its_file_imports(self):
        module = suite()
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            product, lane = root / "pygraph_trees", root / "test" / "gpu"
            for path in (product, lane):
                path.mkdir(parents=True)
            (product / "native").mkdir()
            (product / "code_hash.py").write_text((ROOT / "pygraph_trees" / "code_hash.py").read_text())
            files = {"test_a": "import test_b\n", "test_b": "from test_c import x\n", "test_c": "x = 1\n", "helper": ""}
            for name, text in files.items():
                (lane / f"{name}.py").write_text(text)
            with mock.patch.object(module, "ROOT", root), mock.patch.object(module, "LANE", lane):
                before = module.hashes_of_files()
                self.assertEqual(len(set(before.values())), 3)

                def differ(path: Path, text: str) -> str:
                    kept = path.read_text() if path.exists() else None
                    path.write_text(text)
                    after = module.hashes_of_files()
                    path.unlink() if kept is None else path.write_text(kept)
                    return " ".join(name.removesuffix(".py") for name in before if after[name] != before[name])

                self.assertEqual(differ(lane / "test_c.py", "x = 2\n"), "test_a test_b test_c")
                self.assertEqual(differ(lane / "test_c.py", "x = 1  # one\n"), "")
                self.assertEqual(differ(lane / "test_b.py", "import test_c\n"), "test_a test_b")
                for other in (lane / "helper.py", product / "native/graph_nodes.c"):
                    self.assertEqual(differ(other, "int;"), "test_a test_b test_c")
                self.assertEqual(module.hashes_of_files(), before)

    def test_without_the_native_parts_none_can_be_built(self):
        code = "from pygraph_trees.native import build; build.announce(); print(build.status()); build.build()"
        with mock.patch.dict(os.environ):
            suite().prevent_native()
            del os.environ["PYGRAPH_BUILD"]  # as a test may do for a process that it starts
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
        self.assertEqual(done.returncode, 1)
        self.assertTrue(done.stdout.startswith("no ("), done.stdout)
        self.assertIn("BuildFailed", done.stderr)

    def test_the_files_of_a_run_without_the_native_parts_exist(self):
        self.assertEqual([name for name in suite().WITHOUT_NATIVE if not (suite().LANE / name).exists()], [])

    def test_check_runs_without_torch(self):
        done = subprocess.run(
            [sys.executable, "-S", ROOT / "tools" / "gpu_suite", "--check"], capture_output=True, text=True
        )
        self.assertIn(done.returncode, (0, 1), done.stderr)
        self.assertRegex(done.stdout, "evidence")


if __name__ == "__main__":
    run_tests()
