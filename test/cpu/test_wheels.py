"""A wheel with the parts in C++: it is used without a compiler, and passed over if it cannot be loaded.

Its modules are those that were built before; with ``TEST_WHEELS=1`` they are compiled, in another half a minute.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]

from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding, build, location

NO = "no (replays are slower, outputs are not kept), because "
MODULES = """
from pygraph_trees.native import binding, _graph_nodes
print(binding.extension.__file__, _graph_nodes.__file__)"""


def tool():
    loader = SourceFileLoader("wheels", str(ROOT / "tools" / "wheels"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("wheels", loader))
    loader.exec_module(module)
    return module


@unittest.skipIf(binding.extension is None, "not built for this torch")
@unittest.skipIf(int(version("setuptools").split(".")[0]) < 77, "this setuptools reads no license expression")
class TestWheel(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory())).resolve()
        cls.built = Path(binding.extension.__file__).parent
        cls.wheel, cls.told = cls.make_wheel()
        cls.environment = cls.folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", cls.environment], check=True)
        (cls.packages,) = cls.environment.glob("lib/python*/site-packages")
        # Torch is there as a line in a file, which does not make an installed checkout importable.
        (cls.packages / "torch.pth").write_text(str(location.torch_folder().parent))
        command = [sys.executable, "-m", "pip", "-q", "--python", cls.environment, "install", "--no-deps", "--no-index"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may have an egg-info
        subprocess.run([*command, cls.wheel], check=True, env=env)

    @classmethod
    def make_wheel(cls):
        wheels, out = tool(), io.StringIO()

        def copied(folder, torch):
            shutil.copytree(cls.built, folder / "out")

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ))
            stack.enter_context(contextlib.redirect_stdout(out))
            if not os.environ.get("TEST_WHEELS"):
                stack.enter_context(mock.patch.object(wheels.build, "compile_modules", copied))
            status = wheels.main(["--out", str(cls.folder), str(location.torch_folder())])
        assert status == 0, out.getvalue()
        (wheel,) = cls.folder.glob("*.whl")
        return wheel, out.getvalue()

    def setUp(self):
        super().setUp()
        self.cache = Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()

    def run_installed(self, *arguments):
        """Runs a command of the environment, with no compiler on the path; returns its status and output."""
        kept = os.environ.keys() - {"PYTHONPATH", "CC", "CXX", "XDG_CACHE_HOME"}
        env = {name: os.environ[name] for name in kept} | {"TORCH_EXTENSIONS_DIR": str(self.cache)}
        env |= {"PATH": str(self.environment / "bin"), "PYGRAPH_BUILD": "0"}
        command = [self.environment / "bin" / arguments[0], *arguments[1:]]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    def fill_cache(self):
        folder = self.cache / "pygraph_trees" / build.FOLDER.name
        shutil.copytree(self.built, folder)
        return folder

    def assertModulesIn(self, folder):
        status, out = self.run_installed("python", "-c", MODULES)
        self.assertEqual((status, {Path(path).parent for path in out.split()}), (0, {folder}), out)

    def assertNative(self, expected):
        status, out = self.run_installed("pygraph-trees", "--version")
        self.assertEqual(status, 0, out)
        self.assertRegex(out, f"native: {expected}\n$")

    @property
    def prebuilt(self):
        (folder,) = (self.packages / "pygraph_trees" / "native" / "prebuilt").iterdir()
        return folder

    def test_it_is_for_this_python_and_names_the_versions_of_torch(self):
        tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        self.assertRegex(self.wheel.name, rf"-{tag}-{tag}\w*-\w+\.whl$")
        minor = ".".join(location.torch_version().split(".")[:2])
        self.assertRegex(self.told, rf"MB, for torch {minor}\n")
        self.assertRegex(self.told, r"without 2\.1\d.*built at first use")

    def test_it_is_used_without_a_compiler_and_before_the_cache(self):
        self.assertNative("yes")
        self.assertEqual(self.run_installed("pygraph-trees", "build"), (0, f"built in {self.prebuilt}\n"))
        self.assertModulesIn(self.prebuilt)
        self.assertEqual(list(self.cache.iterdir()), [])
        self.fill_cache()  # the wheel's come first
        self.assertModulesIn(self.prebuilt)

    def test_modules_that_cannot_be_loaded_are_passed_over_and_named(self):
        (module,) = self.prebuilt.glob("_fast_path*")
        good = module.read_bytes()
        self.addCleanup(module.write_bytes, good)
        off = f"{NO}PYGRAPH_BUILD is off, and it is not built: run python -m pygraph_trees build"
        missing = re.escape(f"; the wheel's cannot be loaded: {module}: undefined symbol: _ZN3c11") + r"\w+"
        module.write_bytes(good[:1000])  # the rest of what the header promises is missing
        self.assertNative(
            re.escape(f"{off}; the wheel's cannot be loaded: {self.prebuilt} is damaged: install the wheel again")
        )
        module.write_bytes(good.replace(b"_ZN3c10", b"_ZN3c11"))  # as if torch had other symbols
        location.seal(self.prebuilt).touch()
        self.assertNative(re.escape(off) + missing)
        status, out = self.run_installed("pygraph-trees", "build")
        self.assertEqual((status, "they need a C++ compiler" in out), (2, True), out)
        shutil.rmtree(self.cache / "pygraph_trees")
        folder = self.fill_cache()
        self.assertNative(f"yes{missing}")
        self.assertModulesIn(folder)


if __name__ == "__main__":
    run_tests()
