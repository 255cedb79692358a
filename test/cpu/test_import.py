"""`import pygraph_trees` is quick and needs no torch; the patches go on when torch's compiler is imported."""

import getpass
import importlib
import importlib.util
import os
import statistics
import sys
import threading
import time
import unittest
from unittest import mock

from commands import ROOT, WithFolder, forked, python
from torch._inductor.runtime import cache_dir_utils
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from inductor_patches import FEATURES
from inductor_patches.import_hook import ImportHook
from pygraph_trees.selection.profiles import _inductors_folder

STATES = "import inductor_patches as p; print(*(s.state for s in p.status()))"


def all_are(state):
    return " ".join([state] * len(FEATURES))


def run_python(*lines, **environment):
    """A new process; in the lane, a fork of one that has only imported torch if that is what the program does first."""
    with forked("torch" if lines[0].startswith("import torch") else None):
        return python("-W", "error::inductor_patches.patch.PatchWarning", "-c", "\n".join(lines), **environment)


@instantiate_parametrized_tests
class TestImport(TestCase):
    def check(self, *lines, states=None, end="", **environment):
        done = run_python(*lines, STATES, end, **environment)
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1:]), (0, [states or all_are("on")]), done.stderr)
        return done.stdout.splitlines()[:-1]

    @parametrize(
        "first,absent,state",
        [
            ("inductor_patches.table", "torch", "off"),
            ("pygraph_trees", "torch", "waiting"),
            ("torch, pygraph_trees", "torch._inductor", "waiting"),
            ("pygraph_trees, torch", "torch._inductor", "waiting"),
        ],
    )
    def test_it_imports_neither_torch_nor_its_compiler(self, first, absent, state):
        shown = self.check(f"import {first}, sys", f"print({absent!r} in sys.modules)", states=all_are(state))
        self.assertEqual(shown, ["False"])

    def test_the_report_waits_too(self):
        done = run_python("import pygraph_trees, sys", "print(pygraph_trees.report(), 'torch._dynamo' in sys.modules)")
        self.assertRegex(done.stdout, "(?s)patches waiting for torch's compiler: flags, trees.*False\n$", done.stderr)

    def test_flags_are_there_with_torchs_config(self):
        found = self.check(
            "import torch, pygraph_trees",
            "print(torch._inductor.config.triton.pygraph_selective)",
            "try: torch._inductor.config.triton.pygraph_selective = 'sometimes'",
            "except Exception as error: print(type(error).__name__)",
            states=all_are("waiting").replace("waiting", "on", 1),
        )
        self.assertEqual(found, ["auto", "InvalidFlag"])

    @parametrize(
        "first",
        [
            "torch._inductor.cudagraph_trees",
            "pygraph_trees, torch._inductor.cudagraph_trees",
            "pygraph_trees.indirection.retired",
        ],
    )
    def test_any_module_may_be_first(self, first):
        """Whatever is imported first, before or after the package, all patches are on when a program is compiled."""
        self.check(f"import {first}", "import pygraph_trees, torch._inductor.compile_fx")

    def test_compiling_is_enough(self):
        """Afterwards the compiler's loader and spec are torch's own again, so that its source can be read."""
        shown = self.check(
            "import torch, pygraph_trees",
            # A product needs no kernel, which would take seconds to compile.
            "print(torch.compile(lambda x: x @ x, mode='reduce-overhead')(torch.ones(2, 2)).tolist())",
            "import torch._inductor.compile_fx as c, inspect",
            "print(type(c.__loader__).__name__, type(c.__spec__.loader).__name__, len(inspect.getsource(c)) > 1000)",
        )
        self.assertEqual(shown, ["[[2.0, 2.0], [2.0, 2.0]]", "SourceFileLoader SourceFileLoader True"])

    def test_threads_that_import_at_once(self):
        self.check(
            "import torch, pygraph_trees, threading, importlib",
            "import torch._dynamo, torch._inductor.output_code  # torch's modules import each other",
            "names = ['cudagraph_trees', 'compile_fx'] * 3",
            "work = [lambda n=n: importlib.import_module('torch._inductor.' + n) for n in names] + [",
            "    lambda: __import__('inductor_patches').install()]",
            "threads = [threading.Thread(target=one) for one in work]",
            "[t.start() for t in threads]; [t.join() for t in threads]",
            # Torch alone sometimes aborts when such a process ends: "terminate called without an active exception".
            end="import os; print(end='', flush=True); os._exit(0)",
        )

    def test_none_wait_if_they_are_disabled(self):
        shown = self.check(
            "import pygraph_trees, torch._inductor.compile_fx, torch._inductor.cudagraph_trees as t",
            "__import__('inductor_patches').install()",
            "print(t.CUDAGraphNode.__module__)",
            "import torch; torch.compile(options={'triton.pygraph_placement': 'exact'})",  # without an effect
            keys := "import torch._inductor.config as c; print(sorted(c.save_config_portable()))",
            states=all_are("disabled"),
            PYGRAPH_DISABLE="1",
        )
        self.assertEqual(shown, ["torch._inductor.cudagraph_trees", run_python(keys).stdout.strip()])

    def test_uninstall_ends_the_wait(self):
        lines = ("import pygraph_trees", "pygraph_trees.uninstall()")
        shown = self.check(*lines, "import torch._inductor.compile_fx", STATES, "p.install()")
        self.assertEqual(shown, [all_are("off")])


@instantiate_parametrized_tests
class TestTimes(WithFolder):
    """The limits leave a wide margin: an import takes 5 ms, and a command 0.2 s."""

    def test_an_import_after_torch(self):
        timed = "begin = time.perf_counter(); import pygraph_trees; print(time.perf_counter() - begin)"
        took = [float(run_python("import torch, time", timed).stdout) for _ in range(3)]
        self.assertLess(statistics.median(took), 0.3)

    @parametrize("command", ["--help", "--version", "profiles"])
    def test_commands_that_need_no_torch(self, command):
        took = []
        for _ in range(3):
            begin = time.perf_counter()
            done = python("-X", "importtime", "-m", "pygraph_trees", command, TORCHINDUCTOR_CACHE_DIR=str(self.folder))
            took.append(time.perf_counter() - begin)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("torch", {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()})
        self.assertLess(statistics.median(took), 2.0)


class TestInductorsFolder(TestCase):
    def test_it_is_inductors(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
            for user in (getpass.getuser(), r"a\b:c"):
                with mock.patch("getpass.getuser", lambda user=user: user):
                    self.assertEqual(_inductors_folder(), cache_dir_utils.default_cache_dir())
            with mock.patch("getpass.getuser", side_effect=KeyError):
                self.assertRegex(_inductors_folder(), r"torchinductor_uid_\d+$")  # as torch does, since 2.12
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR="somewhere"):
            self.assertEqual(_inductors_folder(), os.path.abspath("somewhere"))


class TestImportHook(WithFolder):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(sys, "path", [str(self.folder), *sys.path]))
        self.enterContext(mock.patch.dict(sys.modules))
        self.hook = ImportHook()
        self.addCleanup(self.hook.stop)
        self.ran = []

    def module(self, name, text=""):
        (self.folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    def test_each_module_once_and_after_its_own_code(self):
        self.module("watched_one", "import sys; value = 1")
        self.module("other")
        self.hook.watch({"watched_one": lambda: self.ran.append(sys.modules["watched_one"].value)})
        importlib.import_module("other")
        self.assertEqual(self.ran, [])
        importlib.import_module("watched_one")
        importlib.reload(importlib.import_module("watched_one"))
        self.assertEqual(self.ran, [1])
        self.assertNotIn(self.hook, sys.meta_path)

    def test_a_module_that_raises_is_watched_on(self):
        self.module("faulty", "raise ValueError")
        self.hook.watch({"faulty": lambda: self.ran.append(sys.modules["faulty"].value)})
        self.assertRaises(ValueError, importlib.import_module, "faulty")
        self.assertEqual(self.ran, [])
        self.module("faulty", "value = 1  # mended")
        importlib.import_module("faulty")
        self.assertEqual(self.ran, [1])

    def test_an_action_that_raises_fails_the_import(self):
        self.module("watched_two")
        self.hook.watch({"watched_two": mock.Mock(side_effect=[KeyboardInterrupt, RuntimeError("no")])})
        for error in (KeyboardInterrupt, RuntimeError):  # after an interrupt, the next import tries again
            self.assertRaises(error, importlib.import_module, "watched_two")
            self.assertNotIn("watched_two", sys.modules)
        importlib.import_module("watched_two")

    def test_a_module_that_another_thread_is_importing_is_waited_for(self):
        self.module("slow", "import time; time.sleep(0.5); value = 1")
        thread = threading.Thread(target=importlib.import_module, args=("slow",))
        thread.start()
        while "slow" not in sys.modules:
            time.sleep(0.01)
        self.hook.watch({"slow": lambda: self.ran.append(sys.modules["slow"].value)})
        thread.join()
        self.assertEqual(self.ran, [1])


@unittest.skipUnless(importlib.util.find_spec("mypy"), "needs mypy")
class TestTyping(WithFolder):
    def test_type_checkers_know_the_names_of_the_package(self):
        file = self.folder / "program.py"
        file.write_text("import pygraph_trees\npygraph_trees.reprt()\nfound: pygraph_trees.Report = 3\n")
        options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(self.folder / "cache"))
        files = map(str, (file, ROOT / "pygraph_trees/__init__.py", ROOT / "pygraph_trees/report/summary.py"))
        done = python("-m", "mypy", *options, "--follow-imports=skip", *files, MYPYPATH=str(ROOT), PYTHONPATH="")
        errors = [line.partition("program.py:")[2] for line in done.stdout.splitlines()]
        self.assertRegex(errors[0], r"^2: error: Module has no attribute \"reprt\"")
        self.assertRegex(errors[1], r"^3: error: Incompatible types in assignment .*Report")
        self.assertEqual(len(errors), 3, done.stdout)  # and how many there are


if __name__ == "__main__":
    run_tests()
