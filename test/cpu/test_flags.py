"""Flags: set by config, patch, options and environment, checked, and in the cache keys where they change artifacts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
import pygraph_trees
from pygraph_trees.coverage import compiled
from pygraph_trees.settings import FLAGS, Flag, InvalidFlag, Settings, flags_table


def run_python(code, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


class TestFlags(TestCase):
    def test_defaults(self):
        self.assertEqual(Settings.current(), Settings(placement="full", indirection="auto", selective="always"))

    def test_patch_and_set(self):
        with config.patch({"triton.pygraph_selective": "never"}):
            self.assertEqual(Settings.current().selective, "never")
        self.assertEqual(Settings.current().selective, "always")
        config.triton.pygraph_selective = "never"
        try:
            self.assertEqual(Settings.current().selective, "never")
        finally:
            config.triton.pygraph_selective = "always"

    def test_wrong_value(self):
        message = "^pygraph_selective must be one of 'auto', 'always', 'never'; got 'nevr'. Did you mean 'never'\\?$"
        with self.assertRaisesRegex(InvalidFlag, message):
            config.triton.pygraph_selective = "nevr"
        with self.assertRaisesRegex(InvalidFlag, message), config.patch({"triton.pygraph_selective": "nevr"}):
            pass
        with self.assertRaisesRegex(InvalidFlag, "got True"):
            config.triton.pygraph_selective = True
        self.assertEqual(config.triton.pygraph_selective, "always")

    def test_wrong_option_loses_nothing(self):
        before = config.get_config_copy()
        for options in ({"triton.pygraph_selective": "nevr"}, {"triton.pygraph-selective": "nevr"}):
            with self.assertRaisesRegex(InvalidFlag, "Did you mean 'never'"):
                torch.compile(lambda x: x, options={"triton.cudagraphs": True, **options})
        self.assertEqual(config.get_config_copy(), before)

    def test_options_hold_while_compiling(self):
        seen = []

        def look(artifact, graph, gm):
            seen.append(Settings.current().selective)

        torch._dynamo.reset()
        with mock.patch.object(compiled, "attach", look), config.patch({"force_disable_caches": True}):
            f = torch.compile(lambda x: x * 3, options={"triton.pygraph_selective": "never"})
            self.assertEqual(f(torch.ones(3)), torch.full((3,), 3.0))
        self.assertEqual(seen, ["never"])
        self.assertEqual(Settings.current().selective, "always")

    def test_environment(self):
        code = "import pygraph_trees; from pygraph_trees.settings import Settings; print(Settings.current())"
        done = run_python(code, PYGRAPH_SELECTIVE="never")
        self.assertIn("selective='never'", done.stdout, done.stderr)
        done = run_python(code, PYGRAPH_SELECTIVE="nevr")
        self.assertIn(
            "environment variable PYGRAPH_SELECTIVE must be one of 'auto', 'always', 'never'; got 'nevr'", done.stderr
        )
        self.assertEqual(done.stdout, "")

    def test_without_patches(self):
        inductor_patches.uninstall()
        try:
            self.assertFalse(hasattr(config.triton, "pygraph_selective"))
            self.assertEqual(Settings.current(), Settings(placement="full", indirection="auto", selective="always"))
        finally:
            inductor_patches.install()

    def test_cache_keys(self):
        def key():
            return config.save_config_portable(ignore_private_configs=False)

        inductor_patches.uninstall()
        upstream = key()
        inductor_patches.install()
        added = {name for name in key() if name not in upstream}
        changing = {f"triton.{f.name}" for f in FLAGS if f.changes_artifacts}
        self.assertEqual(added, {"triton.pygraph_version"} | changing)
        self.assertEqual(key()["triton.pygraph_version"], pygraph_trees.__version__)
        plain = key()
        with config.patch({"triton.pygraph_selective": "never"}):  # acts at run time: same artifacts
            self.assertEqual(key(), plain)

    def test_threads(self):
        # Since 2.12 an override is a context variable, which a new thread does not see: nothing may depend on one.
        found = []
        thread = threading.Thread(target=lambda: found.append(Settings.current()))
        thread.start()
        thread.join()
        self.assertEqual(found, [Settings.current()])

    @given(st.one_of(st.text(), st.integers(), st.none(), st.booleans(), st.lists(st.text())))
    def test_check_accepts_its_values_only(self, value):
        flag = Flag("pygraph_some", ("auto", "off"), "auto", changes_artifacts=False, help="")
        if value in ("auto", "off"):
            flag.check(value)
        else:
            with self.assertRaises(InvalidFlag) as caught:
                flag.check(value)
            self.assertIn(repr(value), str(caught.exception))

    def test_table_stands_in_the_readme(self):
        self.assertIn(flags_table(), (ROOT / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_tests()
