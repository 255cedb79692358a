"""Reading sources: the probe of files agrees with the probe of live objects, and the tool's table is up to date."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
from inductor_patches.fingerprints import parse_version
from inductor_patches.patch import Definition, LiveProbe
from inductor_patches.source_probe import NoTorchSources, SourceProbe

INSTALLED = Path(torch.__file__).parent.parent

SOURCE = """
import os
class Config:
    level: int = 1
    names = ["a"]
    if os.name:
        def read(self, key, /, default=None, *, strict): return helper(key).attribute or "text"
    else:
        def read(self): pass
try:
    from fast import speed
except ImportError:
    def speed(x):
        from slow import walk
        return [walk(y) for y in x]
"""


def tool():
    loader = SourceFileLoader("check_compat", str(ROOT / "tools" / "check_compat"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_compat", loader))
    loader.exec_module(module)
    return module


class TestSourceProbe(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "torch" / "sub").mkdir(parents=True)
        (self.folder / "torch" / "version.py").write_text("__version__ = '2.14.1+cu130'\n")
        (self.folder / "torch" / "sub" / "__init__.py").write_text(SOURCE)

    def enterContext(self, manager):  # unittest has it from Python 3.11 on
        value = manager.__enter__()
        self.addCleanup(manager.__exit__, None, None, None)
        return value

    def check(self, probe):
        self.assertEqual(probe.version, "2.14.1+cu130")
        self.assertEqual(probe.find("torch.sub", "Config").uses, frozenset({"level", "names"}))
        # If a condition selects one of two definitions, the first branch counts.
        read = probe.find("torch.sub", "Config.read")
        self.assertEqual(read.parameters, ("self", "key", "default", "strict"))
        self.assertLessEqual({"helper", "attribute", "text"}, read.uses)
        speed = probe.find("torch.sub", "speed")
        self.assertEqual(speed.parameters, ("x",))
        self.assertIn("walk", speed.uses)
        for missing in ("Config.write", "gone", "speed.x"):
            self.assertIsNone(probe.find("torch.sub", missing))
        self.assertIsNone(probe.find("torch.other", "x"))

    def test_tree(self):
        self.check(SourceProbe(self.folder))

    def test_wheel(self):
        wheel = self.folder / "torch-2.14.1.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in (self.folder / "torch").rglob("*.py"):
                archive.write(path, path.relative_to(self.folder))
        self.check(SourceProbe(wheel))

    def test_no_torch(self):
        for path in (self.folder / "torch", self.folder / "nowhere", Path(__file__)):
            with self.assertRaisesRegex(NoTorchSources, "expected a torch wheel or a folder"):
                SourceProbe(path)

    def test_agrees_with_live_objects(self):
        inductor_patches.uninstall()
        try:
            live, source = LiveProbe(), SourceProbe(INSTALLED)
            version = parse_version(torch.__version__)
            expectations = {
                e
                for feature in inductor_patches.FEATURES
                for patch in inductor_patches.patches(feature)
                for f in patch.fingerprints
                if f.since <= version <= f.until
                for e in f.expectations
            }
            self.assertGreater(len(expectations), 20)
            for wanted in expectations:
                one, other = live.find(wanted.module, wanted.name), source.find(wanted.module, wanted.name)
                self.assertIsInstance(one, Definition, str(wanted))
                self.assertIsInstance(other, Definition, str(wanted))
                self.assertEqual(one.parameters, other.parameters, str(wanted))
                self.assertLessEqual(set(wanted.uses), one.uses & other.uses, str(wanted))
        finally:
            inductor_patches.install()


class TestTool(TestCase):
    def test_installed_torch_fits(self):
        done = subprocess.run([sys.executable, ROOT / "tools" / "check_compat"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(f"torch {torch.__version__}", done.stdout)
        self.assertNotIn("OFF", done.stdout)

    def test_a_changed_torch_is_told(self):
        with tempfile.TemporaryDirectory() as name:
            changed = Path(name)
            for path in ("version.py", "_inductor/scheduler.py"):
                target = changed / "torch" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                text = (INSTALLED / "torch" / path).read_text()
                target.write_text(text.replace("def graph_partition(", "def partition_graph("))
            version, targets = tool().check(changed)
        self.assertEqual(version, torch.__version__)
        lines = targets["report: torch._inductor.scheduler.Scheduler.graph_partition"]
        self.assertIn("torch._inductor.scheduler.Scheduler.graph_partition: not there", lines)

    def test_bad_path(self):
        done = subprocess.run(
            [sys.executable, ROOT / "tools" / "check_compat", "/nowhere"], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 2)
        self.assertIn("/nowhere: expected a torch wheel", done.stderr)

    def test_table_in_contributing_names_all_patches(self):
        text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        for feature in inductor_patches.FEATURES:
            for patch in inductor_patches.patches(feature):
                self.assertIn(f"| {feature}: `{patch.target}` |", text)


if __name__ == "__main__":
    run_tests()
