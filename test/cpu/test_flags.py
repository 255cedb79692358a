"""Flags: set by config, patch, options and environment; checked; in the cache keys if they change artifacts."""

import ast
import os
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch
from commands import ROOT, forked, python
from torch._inductor import config, cudagraph_trees
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.utils import BoxedBool, fresh_cache
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
import pygraph_trees
from inductor_patches import config as config_patch
from inductor_patches import environment
from pygraph_trees.report import compiled
from pygraph_trees.report.summary import clear
from pygraph_trees.selection.functions import _noting, are_graphs_left_out, why_not_graphed
from pygraph_trees.settings import FLAGS, InvalidFlag, Settings, UnknownFlag
from pygraph_trees.trees.hooks.entry_points import putting_to_use


def product(x):
    """Needs no kernel, which would take seconds to compile."""
    return x @ x


def flags_table():
    """The table of flags in the README."""
    rows = ["| flag | values | default | |", "| --- | --- | --- | --- |"]
    for flag in FLAGS:
        values = ", ".join(f"`{v}`" for v in flag.values) or "a number"
        rows.append(f"| `{flag.name}` | {values} | `{flag.default}` | {flag.help} |")
    return "\n".join(rows)


class FlagsTestCase(TestCase):
    def seen_while_compiling(self, fn=product, inputs=(), **how):
        """The settings, and whether CUDA graphs are on or left out, when each graph of a program is compiled."""
        seen, inputs = [], inputs or [torch.ones(3, 3)]
        torch._dynamo.reset()
        note = lambda *_: seen.append((Settings.current(), config.triton.cudagraphs, are_graphs_left_out()))  # noqa: E731
        with mock.patch.object(compiled, "attach", note), config.patch({"force_disable_caches": True}):
            found = torch.compile(fn, **how)(*inputs)
            if found.requires_grad:
                found.sum().backward()
        self.assertEqual((found, are_graphs_left_out()), (fn(*inputs), False))
        return seen


class TestFlags(FlagsTestCase):
    DEFAULTS = Settings(placement="full", indirection="auto", selective="auto")

    def test_defaults(self):
        """Also without the patches."""
        self.assertEqual(Settings.current(), self.DEFAULTS)
        self.addCleanup(inductor_patches.install)
        inductor_patches.uninstall()
        self.assertFalse(hasattr(config.triton, "pygraph_selective"))
        self.assertEqual(Settings.current(), self.DEFAULTS)

    def test_wrong_value(self):
        before = config.get_config_copy()
        message = "^pygraph_selective must be one of 'auto', 'always', 'never'; got 'nevr'. Did you mean 'never'\\?$"
        with self.assertRaisesRegex(InvalidFlag, message):
            config.triton.pygraph_selective = "nevr"
        with self.assertRaisesRegex(InvalidFlag, message), config.patch({"triton.pygraph_selective": "nevr"}):
            pass
        with self.assertRaisesRegex(InvalidFlag, "got True"):
            config.triton.pygraph_selective = True
        for name in ("triton.pygraph_selective", "triton.pygraph-selective"):
            with self.assertRaisesRegex(InvalidFlag, message):
                torch.compile(lambda x: x, options={"triton.cudagraphs": True, name: "nevr"})
        self.assertEqual(config.get_config_copy(), before)  # no value is lost

    def test_a_number_of_bytes(self):
        for value in (0, 1, 1 << 40):
            with config.patch({"triton.pygraph_pool_bytes": value}):
                self.assertEqual(Settings.current().pool_bytes, value)
        for wrong in (-1, True, "1", 1.0, None):
            with self.assertRaisesRegex(InvalidFlag, "pygraph_pool_bytes must be one of 0, 1, 2 and so on; got"):
                config.triton.pygraph_pool_bytes = wrong
        endless = "1" * 5000  # Python reads 4,300 digits
        for word, value in ((" 4096 ", 4096), ("", None), ("4k", None), ("-1", None), (endless, None)):
            with mock.patch.dict(os.environ, PYGRAPH_POOL_BYTES=word), warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                self.assertEqual(environment.value_of("PYGRAPH_POOL_BYTES", (), 0), value)
            self.assertEqual(len(found), value is None and word != "", word)
            self.assertTrue(all("must be one of 0, 1, 2 and so on. The default 0" in str(w.message) for w in found))

    def test_a_switch_takes_bools(self):
        """They may be set as a value, by a patch or as an option. Reading the switch always gives "on" or "off"."""
        self.addCleanup(setattr, config.triton, "pygraph_verify", "off")
        for written, value in ((True, "on"), ("on", "on"), (False, "off"), ("off", "off")):
            with config.patch({"triton.pygraph_verify": written}):
                self.assertEqual((config.triton.pygraph_verify, Settings.current().verify), (value, value))
            self.assertEqual(Settings.current().verify, "off")
            config.triton.pygraph_verify = written
            self.assertEqual((config.triton.pygraph_verify, Settings.current().verify), (value, value))
            config.triton.pygraph_verify = "off"
            ((seen, *_),) = self.seen_while_compiling(options={"triton.pygraph_verify": written})
            self.assertEqual(seen.verify, value)
        for wrong in (1, 0, "true", "1", None, "onn"):
            with self.assertRaisesRegex(InvalidFlag, "must be one of 'off', 'on', False, True; got"):
                config.triton.pygraph_verify = wrong
            self.assertRaises(InvalidFlag, torch.compile, lambda x: x, options={"triton.pygraph_verify": wrong})
        self.assertEqual(Settings.current().verify, "off")

    def test_an_option_that_is_no_flag(self):
        flags = "the flags are triton.pygraph_placement, .* Did you mean 'triton.pygraph_sel"
        version = config.triton.pygraph_version
        for name in ("triton.pygraph_selectve", "triton.pygraph-selectve", "pygraph_selective"):
            with self.assertRaisesRegex(UnknownFlag, f"^{name} is no option; {flags}"):
                torch.compile(lambda x: x, options={name: "never"})
        torch.compile(lambda x: x, options={"triton.pygraph_version": version})  # ours, no flag
        with config.patch({"triton.pygraph_version": "of a saved configuration"}):
            self.assertEqual(config.triton.pygraph_version, version)
        with self.assertRaisesRegex(RuntimeError, "Unexpected optimization option"):
            torch.compile(lambda x: x, options={"max_autotun": True})

    def test_code_that_cannot_be_read_shares_nothing_with_another_process(self):
        keys = [config.triton.pygraph_version]
        for cleanup in (inductor_patches.install, inductor_patches.uninstall, config_patch._version.cache_clear):
            self.addCleanup(cleanup)
        for _ in range(2):
            config_patch._version.cache_clear()
            inductor_patches.uninstall()
            with mock.patch("pygraph_trees.version.artifact_hash", side_effect=OSError):
                inductor_patches.install()
            keys.append(config.triton.pygraph_version)
        self.assertEqual(len(set(keys)), 3)

    def test_threads_that_asked_before_see_flags_come_and_go(self):
        """Since 2.12 each thread keeps the configuration's dictionary and hash."""

        def state():
            found = config.save_config_portable(ignore_private_configs=False, readonly_values=True)
            return any("pygraph" in name for name in found), config.get_hash()

        states = []
        self.addCleanup(inductor_patches.install)
        with ThreadPoolExecutor(1) as pool:
            for change in (lambda: None, inductor_patches.uninstall, inductor_patches.install):
                change()
                states.append(pool.submit(state).result())
                self.assertEqual(states[-1][0], state()[0])
        self.assertEqual([has_flags for has_flags, _ in states], [True, False, True])
        self.assertNotEqual(states[1][1], states[0][1])
        self.assertEqual(states[2][1], states[0][1])

    @forked("torch")
    def test_a_process_that_is_sent_the_configuration_knows_the_flags(self):
        """Torch's compile workers patch the configuration that the program's process sends."""
        with config.patch({"triton.pygraph_placement": "exact"}):
            sent = pickle.dumps(config.save_config_portable())
        code = f"import pickle; from torch._inductor import config; config.patch(pickle.loads({sent!r})).__enter__(); "
        done = python("-c", code + "print(config.triton.pygraph_placement)")
        self.assertEqual((done.returncode, done.stdout), (0, "exact\n"), done.stderr)

    def test_the_readme_has_the_table_and_shows_options_that_graph(self):
        """Options replace a mode, so each example with flags asks for CUDA graphs itself, and gets them."""
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        self.assertIn(flags_table(), readme)
        examples = re.findall(r"torch\.compile\([^`]*?options=({[^}]*})", readme)
        self.assertGreaterEqual(len(examples), 1)
        for example in examples:
            options = ast.literal_eval(example)
            ((found, has_graphs, _),) = self.seen_while_compiling(options=options)
            self.assertTrue(has_graphs, example)
            flags = {key.removeprefix("triton.pygraph_"): value for key, value in options.items() if "pygraph" in key}
            self.assertGreaterEqual(len(flags), 1)
            self.assertEqual({name: getattr(found, name) for name in flags}, flags)


def install_again():
    """Checks the environment and installs, as ``import pygraph_trees`` does."""
    inductor_patches.uninstall()
    environment.check((flag.environment, flag.values, flag.default) for flag in FLAGS)
    inductor_patches.install()
    return Settings.current()


class TestEnvironment(TestCase):
    """Environment variables: what they set, how bad values are reported, and that no value stops an import."""

    def setUp(self):
        super().setUp()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYGRAPH_")}
        self.addCleanup(install_again)
        self.enterContext(mock.patch.dict(os.environ, clean, clear=True))
        self.enterContext(mock.patch.object(environment, "_told", set()))

    def found(self, function, **variables):
        """Returns the function's result in a process that is started with these variables, and the warnings."""
        with mock.patch.dict(os.environ, variables), warnings.catch_warnings(record=True, action="always") as caught:
            value = function()
        self.assertTrue(all(issubclass(w.category, environment.PatchWarning) for w in caught))
        return value, [str(w.message) for w in caught]

    def test_a_switch_is_read_as_people_write_it(self):
        for word, on in {"1": 1, "true": 1, "yes": 1, "on": 1, "0": 0, "false": 0, "no": 0, "off": 0, "": 0}.items():
            for written in {word, word.upper(), word.title(), f" {word} "}:
                with self.subTest(written=written):
                    self.assertEqual(self.found(environment.disabled, PYGRAPH_DISABLE=written), (bool(on), []))
                    settings, told = self.found(install_again, PYGRAPH_VERIFY=written)
                    self.assertEqual((settings.verify, told), ("on" if on else "off", []))
        self.assertEqual(self.found(environment.disabled), (False, []))

    def test_other_flags_are_read_in_any_case(self):
        words = {"SELECTIVE": "Always", "PLACEMENT": "EXACT", "INDIRECTION": "", "ENTRY": " Off"}
        found = self.found(install_again, **{f"PYGRAPH_{name}": word for name, word in words.items()})
        self.assertEqual(found, (Settings(placement="exact", indirection="auto", selective="always", entry="off"), []))

    def test_a_wrong_value_is_ignored_with_a_warning(self):
        """The warning comes once."""
        words = "'1', 'true', 'yes', 'on', '0', 'false', 'no', 'off'"
        kept = "The default '{}' stays in force."
        for name, value, problem in (
            ("SELECTIVE", "nevr", f"'auto', 'always', 'never'. Did you mean 'never'? {kept.format('auto')}"),
            ("INDIRECTION", "1", f"'auto', 'patch', 'table', 'off'. {kept.format('auto')}"),
            ("VERIFY", "ture", f"{words}. Did you mean 'true'? {kept.format('off')}"),
        ):
            told = [f"pygraph_trees: PYGRAPH_{name}='{value}' is ignored: it must be one of {problem}"]
            self.assertEqual(self.found(install_again, **{f"PYGRAPH_{name}": value}), (TestFlags.DEFAULTS, told))
        told = [f"pygraph_trees: PYGRAPH_DISABLE='enabled?' is ignored: it must be one of {words}. The patches go on."]
        self.assertEqual(self.found(environment.disabled, PYGRAPH_DISABLE="enabled?"), (False, told))
        told = ["pygraph_trees: PYGRAPH_VERFY is ignored: no such variable is known. Did you mean PYGRAPH_VERIFY?"]
        self.assertEqual(self.found(install_again, PYGRAPH_VERFY="1"), (TestFlags.DEFAULTS, told))
        wrong = {"PYGRAPH_VERFFY": "1", "PYGRAPH_VERIFY": "x", "PYGRAPH_DISABLE": "x"}
        _, told = self.found(lambda: (install_again(), install_again(), inductor_patches.status()), **wrong)
        self.assertEqual(len(told), 3, told)

    def test_each_variable_that_the_project_reads_is_known(self):
        reads = re.compile(r"environ(?:\.get\(|\[|\.pop\()\s*[\"'](PYGRAPH_[A-Z_]+)[\"']")
        folders = ("inductor_patches", "pygraph_trees", "tools", "test/gpu")
        files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in ("", ".py")]
        texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files if path.is_file()]
        read = {name for text in texts for name in reads.findall(text)}
        self.assertGreaterEqual(len(read), 3)
        _, told = self.found(install_again, **dict.fromkeys(read - {"PYGRAPH_DISABLE"}, "1"))
        self.assertEqual(told, [])

    @forked("compiler")
    def test_no_value_stops_an_import(self):
        code = """if True:
            import torch._inductor.compile_fx, pygraph_trees, inductor_patches as p
            from pygraph_trees.settings import Settings
            print(Settings.current(), {s.state for s in p.status()})"""
        for values, wanted, ignored in (
            ("never 1 false", r"selective='never', verify='on'.* \{'on'\}", 1),
            ("nevr 2 x", r"selective='auto', verify='off'.* \{'on'\}", 4),
            ("never 1 TRUE", r"\{'disabled'\}", 0),
        ):
            names = "PYGRAPH_SELECTIVE", "PYGRAPH_VERIFY", "PYGRAPH_DISABLE"
            done = python("-c", code, **dict(zip(names, values.split(), strict=True)), PYGRAPH_VERFY="1")
            self.assertRegex(done.stdout, wanted)
            self.assertEqual(done.stderr.count("Ignored: pygraph_trees:"), ignored, done.stderr)


NEVER = {"triton.cudagraphs": True, "triton.pygraph_selective": "never"}


class TestNever(FlagsTestCase):
    """Under "never" a program is compiled as torch compiles it without CUDA graphs."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        clear()

    def placements(self, *program, **how):
        """The placement, and whether CUDA graphs were on or left out, when each graph of a program was compiled."""
        return [(settings.placement, *graphs) for settings, *graphs in self.seen_while_compiling(*program, **how)]

    def test_cuda_graphs_are_off_where_it_is_compiled(self):
        """Forwards and backwards, which are compiled later, however graphs are asked for."""
        x, w = torch.ones(3, 3), torch.ones(3, 3, requires_grad=True)
        mode = {"triton.pygraph_selective": "never"}, {"mode": "reduce-overhead"}
        for fn, inputs, graphs in ((product, [x], 1), (lambda x, w: x @ w @ w, [x, w], 2)):
            for patch, how in (({}, {"options": NEVER}), mode, (NEVER, {})):
                with self.subTest(patch, graphs=graphs), config.patch(patch):
                    self.assertEqual(self.placements(fn, inputs, **how), [("off", False, True)] * graphs)

    def test_an_allocator_without_graph_pools(self):
        """Torch's trees would raise with ``backend:cudaMallocAsync``."""
        with mock.patch.object(torch._C, "_cuda_getAllocatorBackend", lambda: "cudaMallocAsync", create=True):
            self.assertEqual(self.placements(mode="reduce-overhead"), [("off", False, True)])
            why = "the allocator backend cudaMallocAsync has no graph pools"
            self.assertEqual(why_not_graphed(Settings.current()), why)
        self.assertIsNone(why_not_graphed(Settings.current()))

    def test_else_nothing_changes(self):
        graphs = {"triton.cudagraphs": True}
        for options, expected in (
            (graphs, ("full", True, False)),
            ({**graphs, "triton.pygraph_selective": "auto"}, ("full", True, False)),
            ({**graphs, "triton.pygraph_placement": "exact"}, ("exact", True, False)),
            ({"triton.pygraph_selective": "never"}, ("off", False, False)),
            ({"triton.cudagraphs": False}, ("full", False, False)),
        ):
            with self.subTest(options):
                self.assertEqual(self.placements(options=options), [expected])

    def test_artifacts_are_those_of_torch_without_graphs(self):
        """Neither cache returns an artifact that was made for CUDA graphs."""
        counters = torch._dynamo.utils.counters
        plain, never, graphs = {}, NEVER, {"triton.cudagraphs": True}
        caches = {"fx_graph_cache": True, "force_disable_caches": False, "deterministic": False}
        for has_autograd_cache, *ways, is_hit in (
            (False, plain, never, True),
            (False, never, graphs, False),
            (True, never, plain, True),
            (True, graphs, never, False),
            (True, graphs, {**graphs, "triton.pygraph_selective": "auto"}, True),
        ):
            aot = torch._functorch.config.patch({"enable_autograd_cache": has_autograd_cache})
            with self.subTest(ways, aot=has_autograd_cache), fresh_cache(), config.patch(caches), aot:
                for options in ways:
                    torch._dynamo.reset()
                    counters.clear()
                    self.assertEqual(torch.compile(product, options=options)(torch.ones(3, 3)), torch.full((3, 3), 3.0))
                hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
                self.assertEqual(hits[0] if has_autograd_cache else hits[1], int(is_hit))

    def test_the_report_says_so(self):
        """It lists a graph that would have run as a CUDA graph, with the reason why it does not."""
        artifact = SimpleNamespace(
            disabled_cudagraphs_reason=None, cudagraph_info=None, fx_kwargs={"is_inference": True}
        )
        artifact.current_callable, artifact.device_types = len, {"cuda"}
        given = []
        kwargs = {"cudagraphs": BoxedBool(False), "is_backward": False, "is_inference": True}
        post_compile = putting_to_use(lambda *args: given.append(bool(args[3]["cudagraphs"])))
        with config.patch({"triton.pygraph_selective": "never"}):
            post_compile(artifact, (), None, kwargs)
            self.assertEqual(pygraph_trees.report().graphs, ())  # this program asks for no CUDA graphs
            with _noting(without_graphs=True):
                post_compile(artifact, (), None, kwargs)
        artifact.pygraph_coverage = {"rebinds_storage": True}
        for indirection in ("auto", "off"):
            kwargs["cudagraphs"] = BoxedBool(True)
            with config.patch({"triton.pygraph_indirection": indirection}):
                post_compile(artifact, (), None, kwargs)
        self.assertEqual(given, [False, False, False, True])
        del artifact.pygraph_coverage  # it is not described
        for source, wanted in (("aten.add.Tensor(arg0_1)", True), ("aten.set_.source_Tensor(arg0_1, buf0)", False)):
            kwargs["cudagraphs"], artifact.source_code = BoxedBool(True), source
            post_compile(artifact, (), None, kwargs)
            self.assertEqual(given[-1], wanted)
        kwargs |= {"is_backward": True, "boxed_forward_device_index": BoxedDeviceIndex(0)}
        kwargs["cudagraphs"] = BoxedBool(True)
        post_compile(artifact, (), None, kwargs)
        with mock.patch.object(cudagraph_trees, "get_manager") as manager:
            self.assertEqual(artifact.current_callable([1, 2]), 2)  # the forward may have been graphed
        manager.return_value.set_to_running_backward.assert_called_once_with()
        whys = [graph.dropped for graph in pygraph_trees.report().graphs[:2]]
        rebinds = "it replaces the memory of an input, which a replay would not repeat"
        self.assertEqual(whys, ["pygraph_selective is 'never'", rebinds])


if __name__ == "__main__":
    run_tests()
