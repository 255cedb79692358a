"""Flags: set by config, patch, options and environment, checked, and in the cache keys where they change artifacts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config
from torch._inductor.utils import BoxedBool, fresh_cache
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
import pygraph_trees
from inductor_patches import output_code
from pygraph_trees.coverage import compiled
from pygraph_trees.coverage.report import clear
from pygraph_trees.selection import are_graphs_left_out, compiling_without_graphs
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
        with config.patch({"triton.pygraph_selective": "auto"}):  # acts at run time: same artifacts
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


class TestNever(TestCase):
    """Under "never" a program is compiled as torch compiles it without CUDA graphs."""

    OPTIONS = ({"triton.cudagraphs": True, "triton.pygraph_selective": "never"}, None)

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        clear()

    def settings_seen(self, fn, inputs, **how):
        """Whether CUDA graphs were on, and the flags, where the graphs of a program were compiled."""
        seen = []

        def look(artifact, graph, gm):
            seen.append((config.triton.cudagraphs, Settings.current().placement, are_graphs_left_out()))

        with mock.patch.object(compiled, "attach", look), config.patch({"force_disable_caches": True}):
            found = torch.compile(fn, **how)(*inputs)
            if found.requires_grad:
                found.sum().backward()
        self.assertFalse(are_graphs_left_out())
        return seen

    def test_cuda_graphs_are_off_where_it_is_compiled(self):
        """Forwards and backwards, which are compiled later, however graphs are asked for."""
        x, w = torch.ones(3), torch.ones(3, requires_grad=True)
        never = config.patch({"triton.pygraph_selective": "never"})
        for fn, inputs, graphs in ((lambda x: x * 3, [x], 1), (lambda x, w: (x * w).sin(), [x, w], 2)):
            for name, context, how in (
                ("options", nullcontext(), {"options": self.OPTIONS[0]}),
                ("mode", never, {"mode": "reduce-overhead"}),
                ("configuration", config.patch(self.OPTIONS[0]), {}),
            ):
                with self.subTest(name, graphs=graphs), context:
                    torch._dynamo.reset()
                    self.assertEqual(self.settings_seen(fn, inputs, **how), [(False, "off", True)] * graphs)

    def test_else_nothing_changes(self):
        for options, expected in (
            ({"triton.cudagraphs": True}, (True, "full", False)),
            ({"triton.cudagraphs": True, "triton.pygraph_selective": "auto"}, (True, "full", False)),
            ({"triton.pygraph_selective": "never"}, (False, "off", False)),
            ({"triton.cudagraphs": False}, (False, "full", False)),
        ):
            with self.subTest(options):
                torch._dynamo.reset()
                self.assertEqual(self.settings_seen(lambda x: x * 3, [torch.ones(3)], options=options), [expected])
        with config.patch({"triton.cudagraphs": True, "triton.pygraph_placement": "exact"}):
            torch._dynamo.reset()
            self.assertEqual(self.settings_seen(lambda x: x * 3, [torch.ones(3)]), [(True, "exact", False)])

    def test_artifacts_are_those_of_torch_without_graphs(self):
        """And never those that were made for graphs, of either cache."""
        counters = torch._dynamo.utils.counters
        ways = {
            "never": {"options": self.OPTIONS[0]},
            "plain": {},
            "graphs": {"options": {"triton.cudagraphs": True}},
            "auto": {"options": {"triton.cudagraphs": True, "triton.pygraph_selective": "auto"}},
        }
        for autograd_cache, pairs in (
            (False, (("plain", "never", True), ("never", "graphs", False))),
            (True, (("never", "plain", True), ("graphs", "never", False), ("graphs", "auto", True))),
        ):
            for first, second, is_hit in pairs:
                caches = {"fx_graph_cache": True, "force_disable_caches": False, "deterministic": False}
                aot = torch._functorch.config.patch({"enable_autograd_cache": autograd_cache})
                with self.subTest(first, then=second, aot=autograd_cache), fresh_cache(), config.patch(caches), aot:
                    for way in (first, second):
                        torch._dynamo.reset()
                        counters.clear()
                        self.assertEqual(
                            torch.compile(lambda x: x * 3 + 1, **ways[way])(torch.ones(3)), torch.full((3,), 4.0)
                        )
                    hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
                    self.assertEqual(hits[0] if autograd_cache else hits[1], int(is_hit))

    def test_the_report_says_so(self):
        """A graph that would have been graphed is in it, with the reason."""
        artifact = SimpleNamespace(
            current_callable=len, device_types={"cuda"}, disabled_cudagraphs_reason=None, cudagraph_info=None
        )
        given = []
        kwargs = {"cudagraphs": BoxedBool(False), "is_backward": False, "is_inference": True}
        post_compile = output_code._post_compile(lambda *args: given.append(bool(args[3]["cudagraphs"])))
        with config.patch({"triton.pygraph_selective": "never"}):
            post_compile(artifact, (), None, kwargs)
            self.assertEqual(pygraph_trees.report().graphs, ())  # it asks for no graphs
            with compiling_without_graphs():
                post_compile(artifact, (), None, kwargs)
        self.assertEqual(given, [False, False])
        self.assertEqual([graph.dropped for graph in pygraph_trees.report().graphs], ["pygraph_selective is 'never'"])


if __name__ == "__main__":
    run_tests()
