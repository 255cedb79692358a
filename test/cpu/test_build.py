"""The parts in C++: where and when they are built, what a user is told, and a wheel that has them."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from commands import ROOT, WithFolder, python, tool
from filelock import FileLock
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_patches.fingerprints import FINGERPRINTS
from pygraph_trees.native import binding, build, location

NO = "no (replays are slower, outputs are not kept), because "


class TestLocation(WithFolder):
    def test_each_torch_and_each_state_of_the_sources_has_a_folder_among_torchs_extensions(self):
        for environment, parent in (
            ({"TORCH_EXTENSIONS_DIR": "/x"}, Path("/x")),
            ({"XDG_CACHE_HOME": "/y"}, Path("/y/torch_extensions")),
            ({}, Path.home() / ".cache" / "torch_extensions"),
        ):
            with mock.patch.dict(os.environ, environment):
                for name in {"TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"} - environment.keys():
                    os.environ.pop(name, None)
                found = [location.build_folder(version) for version in ("2.13.0+cpu", "2.13.0+cu130")]
                with mock.patch.object(location, "files_hash", lambda: "f" * 64):
                    found.append(location.build_folder("2.13.0+cpu"))
            self.assertEqual({folder.parent for folder in found}, {parent / "pygraph_trees"})
            self.assertEqual(len(set(found)), 3)

    def test_a_wheels_modules_fit_a_minor_version_whose_objects_have_the_same_layout(self):
        """The version of CUDA and the patch version do not matter; headers, strings and sources do."""

        def folder(version="2.13.0+cpu", strings=b"__cxx11", **headers):
            with tempfile.TemporaryDirectory() as name:
                for place in ("lib", *(f"include/{folder}" for folder in location._LAYOUTS)):
                    (Path(name) / place).mkdir(parents=True, exist_ok=True)
                (Path(name) / "version.py").write_text(f"__version__ = '{version}'")
                (Path(name) / "lib/libc10.so").write_bytes(b"a" + strings + b"a")
                for place, text in headers.items():
                    (Path(name) / "include" / place.replace("__", "/") / "a.h").write_text(text)
                return location.prebuilt_folder(Path(name))

        found = [folder(), folder("2.13.1+cu130"), folder("2.14.0"), folder(strings=b"_ZNSs")]
        headers = {"c10__core": "1"}, {"c10__core": "2"}, {"torch__csrc__autograd": "1"}, {"c10__util": "1"}
        found += [folder(**texts) for texts in headers]
        with mock.patch.object(location.files_hash, "__defaults__", (Path(__file__).parent,)):  # other sources
            found.append(folder())
        self.assertEqual((len(set(found)), found[0]), (len(found) - 1, found[1]))
        self.assertEqual({path.parent for path in found}, {location.SOURCES / "prebuilt"})

    def test_the_hash_covers_names_and_contents_of_sources_alone(self):
        folder, found = self.folder, []
        for file, content in (("a.cpp", "1"), ("a.cpp", "2"), ("b.h", ""), ("c.cpp", ""), ("note.md", "")):
            (folder / file).write_text(content)
            found.append(location.files_hash(folder))
        (folder / "b.h").rename(folder / "d.h")
        found.append(location.files_hash(folder))
        self.assertEqual((len(set(found)), found[3]), (5, found[4]))


class TestPackaging(WithFolder):
    @unittest.skipIf(int(version("setuptools").split(".")[0]) < 77, "this setuptools reads no license expression")
    def test_distributions_have_all_that_a_build_needs(self):
        sources = {path.name for path in location.SOURCES.iterdir() if path.suffix in (".cpp", ".h")}
        wanted = {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
        wanted |= {"pygraph_trees/report/page.css", "pygraph_trees/py.typed"}
        wanted |= {f"pygraph_trees/native/{name}" for name in sources}
        folder = str(self.folder)
        for arguments in (("egg_info", "-e", folder, "sdist", "-d", folder), ("build", "--build-base", folder)):
            command = [sys.executable, "setup.py", "-q", *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stderr)
        (path,) = self.folder.glob("*.tar.gz")
        with tarfile.open(path) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        self.assertLess(sources, {path.name for path in self.folder.glob("lib/pygraph_trees/native/*")})
        self.assertEqual(wanted - names, set())

    def test_a_torch_that_is_not_known_is_not_installed_and_what_messages_tell_to_install_is_an_extra(self):
        """No message suggests installing this package, because it is in no index."""
        newest = max(fingerprint.until for rows in FINGERPRINTS.values() for fingerprint in rows)
        self.assertIn(f'"torch>=2.11,<{newest[0]}.{newest[1] + 1}"', metadata := (ROOT / "pyproject.toml").read_text())
        for path in (ROOT / "pygraph_trees").rglob("*.py"):
            for package in re.findall(r"pip install ([\w.-]+)", path.read_text(encoding="utf-8")):
                self.assertIn(f'"{package}', metadata, path)
                self.assertNotEqual(package, "pygraph-trees")


class TestBuild(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory())) / "missing" / "key"
        for module, name, value in (
            (build, "FOLDER", self.folder),
            *((build, n, self.folder.with_suffix(f".{n.strip('_').lower()}")) for n in ("LOG", "_LOCK", "_FAILED")),
            (build, "_process", None),
            *((build, n, False) for n in ("_is_prevented", "_is_announced")),
            *((binding, n, None) for n in ("extension", "why_without")),
        ):
            self.enterContext(mock.patch.object(module, name, value))
        self.compile = self.enterContext(mock.patch.object(build, "compile_module", side_effect=self.compiled))
        self.popen = self.enterContext(mock.patch.object(build.subprocess, "Popen"))
        self.popen.return_value.poll.return_value = None  # it runs
        self.enterContext(mock.patch.object(build.os, "setpriority"))

    def compiled(self, folder, torch):
        (folder / "out").mkdir()
        (folder / "out" / "module.so").touch()

    def test_it_is_built_once(self):
        for _ in range(2):
            self.assertEqual([path.name for path in build.build().iterdir()], ["module.so"])
        self.compile.assert_called_once()
        self.assertEqual(sorted(path.name for path in self.folder.parent.iterdir()), ["key", "key.lock"])

    def test_a_failed_build_is_not_started_again_by_itself_and_an_interrupted_one_is(self):
        self.compile.side_effect = build.BuildFailed(why="the compiler failed")
        self.assertRaises(build.BuildFailed, build.build)
        self.assertFalse(self.folder.exists())
        self.assertIn("its build failed: run python", build.status())  # the caller saw the output, there is no log
        build.start()
        self.popen.assert_not_called()
        self.compile.side_effect = self.compiled
        build.build()
        self.assertFalse(build.has_failed())
        (self.folder / "module.so").unlink()
        self.folder.rmdir()
        self.compile.side_effect = KeyboardInterrupt
        self.assertRaises(KeyboardInterrupt, build.build)
        self.assertFalse(build.has_failed())
        build.start()
        self.popen.assert_called_once()

    def test_two_processes_do_not_build_at_once(self):
        self.folder.parent.mkdir()
        with FileLock(build._LOCK):
            self.assertIn("it is being built", build.status())
            self.assertRaisesRegex(build.BuildFailed, "another process is building", build.build)
            build.start()
        self.popen.assert_not_called()
        self.compile.assert_not_called()

    def test_what_prevents_a_build(self):
        with mock.patch.object(build, "torch_folder", return_value=None):
            self.assertRaisesRegex(build.BuildFailed, "there is no torch: pip install torch", build.build)
        self.compile.assert_not_called()
        self.folder.parent.write_text("a file is in the way")
        self.assertRaisesRegex(build.BuildFailed, "TORCH_EXTENSIONS_DIR", build.build)
        build.start()
        self.popen.assert_not_called()
        self.assertIn("it is not built", build.status())

    def test_the_first_use_starts_a_build_and_tells_once(self):
        with self.assertLogs("pygraph_trees.native", "INFO") as logs:
            build.announce()
            build.announce()
        self.popen.assert_called_once()
        told = f"{NO}it is being built; the next process uses it"
        self.assertEqual(logs.output, [f"WARNING:pygraph_trees.native:native: {told}"])
        self.popen.return_value.poll.return_value = 1  # it ended before it could note its failure
        build._is_announced = False
        build.prevent()
        with self.assertLogs("pygraph_trees.native", "WARNING") as logs:
            build.announce()
        self.popen.assert_called_once()
        self.assertIn("PYGRAPH_BUILD is off", logs.output[0])


class TestProcess(WithFolder):
    def test_a_compiler_that_fails_is_told_of_in_the_log(self):
        """A program that needs the parts continues, and a detached process leaves the compiler's output."""
        program = "from pygraph_trees.native import build; build.start(); print(build.LOG)"
        variables = {"TORCH_EXTENSIONS_DIR": str(self.folder), "CC": "false", "CXX": "false"}
        log = Path(python("-c", program, **variables).stdout.strip())
        failed, deadline = log.with_suffix(".failed"), time.monotonic() + 100
        while "error: " not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        why = r"error: the parts in C\+\+ were not built.*"
        why += r"; they need a C\+\+ compiler and Python's headers \(--traceback shows where\)\n"
        self.assertRegex(log.read_text(), why)
        self.assertTrue(failed.exists())
        told = python("-m", "pygraph_trees", "--version", **variables).stdout
        self.assertIn(f"native: {NO}its build failed: see", " ".join(told.split()))


MODULES = """
from pygraph_trees.native import binding
print(binding.extension.__file__)"""


@unittest.skipIf(binding.extension is None, "not built for this torch")
@unittest.skipIf(int(version("setuptools").split(".")[0]) < 77, "this setuptools reads no license expression")
class TestWheel(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory())).resolve()
        cls.built = Path(binding.extension.__file__).parent
        wheels, out = tool("wheels"), io.StringIO()
        copied = lambda folder, torch: shutil.copytree(cls.built, folder / "out")  # noqa: E731
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ))
            stack.enter_context(contextlib.redirect_stdout(out))
            if not os.environ.get("TEST_WHEELS"):
                stack.enter_context(mock.patch.object(wheels.build, "compile_module", copied))
            status = wheels.main(["--out", str(cls.folder), str(location.torch_folder())])
        assert status == 0, out.getvalue()
        (cls.wheel,) = cls.folder.glob("*.whl")
        cls.environment = cls.folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", cls.environment], check=True)
        (cls.packages,) = cls.environment.glob("lib/python*/site-packages")
        # Torch is there as a line in a file, which does not make an installed checkout importable.
        (cls.packages / "torch.pth").write_text(str(location.torch_folder().parent))
        command = [sys.executable, "-m", "pip", "-q", "--python", cls.environment, "install", "--no-deps", "--no-index"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may have an egg-info
        subprocess.run([*command, cls.wheel], check=True, env=env)

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
        damaged = f"{off}; the wheel's cannot be loaded: {self.prebuilt} is damaged: install the wheel again"
        self.assertNative(re.escape(damaged))
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
