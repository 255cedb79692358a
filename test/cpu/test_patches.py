"""Patches go on and off: all or nothing, in order, back to the very objects that were there. What they rely on is found
in torch's sources, as ``tools/check_compat`` does, and in its objects; questions are answered as their comments say.
"""

import contextlib
import inspect
import pkgutil
import re
import sys
import types
import warnings
import zipfile
from pathlib import Path
from unittest import mock

import torch
import torch._inductor.config as config
from commands import ROOT, WithFolder, python
from torch._dynamo import utils as dynamo_utils
from torch._inductor import cudagraph_trees, output_code, scheduler
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
from inductor_patches.fingerprints import FINGERPRINTS, Fingerprint, parse, parse_version
from inductor_patches.patch import FeatureOff, LiveProbe, PatchOverwritten, PatchWarning, Rebind
from pygraph_trees import compat
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason
from pygraph_trees.trees.hooks import backward_edges, host_work
from pygraph_trees.trees.managers import manager
from pygraph_trees.trees.recordings import recording


def torch_as_it_is():
    """All that patches replace, by target, and Inductor's configuration."""
    patches = [patch for feature in inductor_patches.FEATURES for patch in inductor_patches.patches(feature)]
    found = {patch.target: pkgutil.resolve_name(patch.target) for patch in patches if isinstance(patch, Rebind)}
    return found | {
        "entries": {name: id(entry) for name, entry in config._config.items()},
        "ignored": list(config._cache_config_ignore_prefix),
        "hash": config.get_hash(),
    }


@contextlib.contextmanager
def warns(case, category, pattern):
    """Like ``assertWarnsRegex``, which touches every imported module, so that lazy modules import others."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    texts = [str(w.message) for w in caught if issubclass(w.category, category)]
    case.assertEqual(len(texts), 1, texts)
    case.assertRegex(texts[0], pattern)


class TestInstall(TestCase):
    def tearDown(self):
        inductor_patches.install()
        super().tearDown()

    def test_uninstall_restores_the_very_objects(self):
        if binding.extension is not None:  # until the first function asks for it, torch's engine is left alone
            backward_edges.mark(type("Node", (), {}))
        inductor_patches.uninstall()
        before = torch_as_it_is()
        inductor_patches.install()
        patched = torch_as_it_is()
        classes = cudagraph_trees.CUDAGraphNode, cudagraph_trees.CUDAGraphTreeManager
        self.assertEqual(classes, (recording.Recording, manager.Manager))
        stays = ["CachingAutotuner.run"]  # until a table is used
        stays += [] if host_work.are_call_marks_wrapped() else ["bytecode_enter", "bytecode_exit"]
        stays += [] if binding.extension and compat.unwraps_in_python() else ["unwrap_dead_wrappers"]
        in_cpp = ["_engine_run_backward", "_TorchDynamoContext.__call__", "_AutogradSavedState.save_from_forward"]
        stays += [] if binding.extension else [*in_cpp, "record_stream", "_share_cuda_", "_lazy_clone"]
        stays += [] if compat.leaves_broken_captures() else ["capture_end"]
        for name in before:
            self.assertEqual(before[name] == patched[name], name.endswith(tuple(stays)), name)
        inductor_patches.uninstall()
        self.assertEqual(torch_as_it_is(), before)
        self.assertEqual([s.state for s in inductor_patches.status()], ["off"] * len(inductor_patches.FEATURES))

    def test_what_upstream_made_counts(self):
        """The rebound name must still match what was made before the patches went on."""
        for rebound in (cudagraph_trees.CUDAGraphNode, cudagraph_trees.StorageWeakRefWrapper):
            made = rebound.UPSTREAM.__new__(rebound.UPSTREAM)
            self.assertIsInstance(made, rebound)
            self.assertIsNot(type(made), rebound)
            self.assertNotIsInstance(object(), rebound)


class TestCalls(TestCase):
    """The marks around the code that gathers a compiled function's inputs."""

    def marks_of(self, calls):
        torch._dynamo.reset()
        seen, found = [], []
        function = torch.compile(lambda x: x + 1, backend=lambda module, _: seen.append(module) or module.forward)
        for profiled in calls:
            with torch.autograd.profiler.profile(enabled=profiled) as profile:
                self.assertEqual(function(torch.ones(2)), torch.full((2,), 2.0))
            events = profile.function_events if profiled else ()
            found.append(sum(event.name == "Pregraph bytecode" for event in events))
        self.assertEqual(len(seen), 1)  # the marks themselves are not compiled
        return found

    def test_they_are_made_for_who_profiles(self):
        calls = [False, True, False, True]
        self.assertEqual(self.marks_of(calls), [0, 1, 0, 1])
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.assertEqual(self.marks_of(calls), [0, 1, 0, 1])

    def test_dead_wrappers_are_unwrapped_and_other_arguments_are_as_they_are(self):
        x, leaked = torch.ones(2, requires_grad=True), []

        def values(unwrap):
            for inner in (lambda y: y * y, torch.func.grad(lambda y: (y * y).sum())):  # with a wrapper that is alive
                leaked.clear()
                torch.func.grad(lambda y, inner=inner: leaked.append(y) or unwrap((y, x))[0].sum() + inner(y).sum())(x)
                given = x, 1, None, x
                yield from (value is one for value, one in zip(unwrap(given), given, strict=True))
                yield [torch._C._functorch.is_gradtrackingtensor(value) for value in unwrap((leaked[0], x))]
            yield unwrap(())

        before = host_work.arguments()
        found = list(values(torch._functorch.utils.unwrap_dead_wrappers))
        if binding.extension is not None and compat.unwraps_in_python():
            plain, wrapped = host_work.arguments()
            self.assertGreater(plain, before[0])
            self.assertGreaterEqual(wrapped[Reason.WRAPPED()], 4)
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.assertEqual(found, list(values(torch._functorch.utils.unwrap_dead_wrappers)))
        self.assertEqual((found[4], found[-1]), ([False, False], ()))

    def test_a_profiler_that_comes_or_goes_in_between(self):
        profiler = torch.autograd.profiler
        for before, after in ((False, True), (True, False)):
            with mock.patch.object(profiler, "_is_profiler_enabled", before):
                mark = dynamo_utils.record_pregraph_bytecode_enter()
            with mock.patch.object(profiler, "_is_profiler_enabled", after):
                dynamo_utils.record_pregraph_bytecode_exit(mark)


class TestMismatch(TestCase):
    """If a patch does not fit torch, its feature stays off and the other patches are applied."""

    def setUp(self):
        super().setUp()
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)  # runs last, after this test's mismatches are forgotten
        self.enterContext(mock.patch.dict(inductor_patches._mismatches, clear=True))
        self.addCleanup(inductor_patches.uninstall)

    def test_changed_target(self):
        before = torch_as_it_is()
        with mock.patch.object(scheduler.Scheduler, "_codegen_partitions", lambda self: None):
            with warns(self, FeatureOff, r"report stays off on torch .*_codegen_partitions: no longer uses"):
                status = inductor_patches.install()
            self.assertEqual([s.state for s in status], ["on", "on", "mismatch", *["on"] * 6])
            unpatched = before[f"{output_code.__name__}.CompiledFxGraph.__init__"]
            self.assertIs(output_code.CompiledFxGraph.__init__, unpatched)
            self.assertIn("_codegen_partitions", status[2].mismatches[0])
            with warnings.catch_warnings(action="error"):  # one warning, not one per install
                inductor_patches.install()

    def test_missing_target(self):
        with mock.patch.object(cudagraph_trees, "cudagraphify_impl"):
            del cudagraph_trees.cudagraphify_impl
            with warns(self, FeatureOff, "trees stays off .*cudagraphify_impl: not there"):
                status = inductor_patches.install()
        self.assertEqual([s.state for s in status], ["on", "mismatch", *["on"] * 7])
        torch._dynamo.reset()
        self.assertEqual(torch.compile(lambda x: x + 1, mode="reduce-overhead")(torch.ones(3)), torch.full((3,), 2.0))

    def test_unknown_version(self):
        before = torch_as_it_is()
        told = "^pygraph_trees supports torch 2.11 to 2.15; torch 2.99.0 is not patched$"
        with mock.patch.object(torch, "__version__", "2.99.0"), warns(self, PatchWarning, told):
            status = inductor_patches.install()
        self.assertEqual([s.state for s in status], ["mismatch"] * len(status))
        self.assertIn("this is 2.99", status[0].mismatches[0])
        self.assertEqual(torch_as_it_is(), before)

    def test_failing_patch_takes_its_feature_back(self):
        before = torch_as_it_is()
        good = inductor_patches.patches("trees")
        bad = Rebind("trees", "torch._inductor.scheduler", "Scheduler", mock.Mock(side_effect=KeyboardInterrupt))
        with mock.patch.object(inductor_patches, "patches", lambda feature: (*good, bad) if feature == "trees" else ()):
            inductor_patches._mismatches.update(dict.fromkeys(inductor_patches.FEATURES, ()))
            self.assertRaises(KeyboardInterrupt, inductor_patches.install)
        inductor_patches.uninstall()
        self.assertEqual(torch_as_it_is(), before)


class TestPatch(TestCase):
    def setUp(self):
        super().setUp()
        self.module = types.ModuleType("a_module_to_patch")
        exec(
            "def f(a, b, *, c=1):\n    return a.attr + helper('text')\nclass K:\n    x = 1\n    def m(self): pass",
            vars(self.module),
        )
        sys.modules[self.module.__name__] = self.module
        self.addCleanup(sys.modules.pop, self.module.__name__)

    def rebind(self, name="f", **expected):
        here = self.module.__name__
        wanted = Fingerprint((2, 1), (2, 3), here, name, **expected)
        self.enterContext(mock.patch.dict(FINGERPRINTS, {f"{here}.{name}": (wanted,)}))
        return Rebind("f", here, name, lambda old: min)

    def test_mismatches(self):
        for minor, name, expectation, expected in (
            (1, "f", {"parameters": ("a", "b"), "uses": ("attr", "helper", "text")}, []),
            (3, "f", {"parameters": ("a", "b", "c")}, []),
            (2, "K.m", {"parameters": ("self",)}, []),
            (2, "K", {"uses": ("x", "m")}, []),
            (2, "f", {"parameters": ("b",)}, ["f: expected parameters ('b',), found ('a', 'b', 'c')"]),
            (2, "f", {"uses": ("gone",)}, ["f: no longer uses gone"]),
            (2, "K.n", {}, ["K.n: not there"]),
            (4, "f", {}, ["f: written for torch 2.1 to 2.3, this is 2.4"]),
        ):
            found = self.rebind(name, **expectation).mismatches(LiveProbe(), (2, minor))
            self.assertEqual(found, [f"{self.module.__name__}.{text}" for text in expected])

    def test_undo_leaves_what_others_put_there(self):
        seen, undo = [], self.rebind().apply()
        self.module.f = max
        with warns(self, PatchOverwritten, "a_module_to_patch.f was replaced"):
            undo()
        self.assertIs(self.module.f, max)
        for error in (PatchOverwritten(target="f"), KeyboardInterrupt()):  # warnings may be errors
            undone = lambda: seen.append(1), mock.Mock(side_effect=error)
            self.assertRaises(type(error), inductor_patches._take_off, [*undone])
        self.assertEqual(seen, [1, 1])

    def test_versions(self):
        self.assertEqual(parse_version("2.13.0+cpu"), (2, 13))
        self.assertEqual(parse_version("2.11.0a0+git123"), (2, 11))


class TestFingerprints(TestCase):
    """The table of what patches rely on."""

    TABLE = """
torch.a f
    2.11       f(x): old
    2.12-2.14  f(x,
                   y): new and
                   more
    torch.c K
  in torch.b
    2.11-2.14  g()
"""

    def test_each_row_is_a_fingerprint(self):
        wanted = (
            Fingerprint((2, 11), (2, 11), "torch.a", "f", ("x",), ("old",)),
            Fingerprint((2, 12), (2, 14), "torch.a", "f", ("x", "y"), ("new", "and", "more")),
            Fingerprint((2, 11), (2, 15), "torch.c", "K"),
            Fingerprint((2, 11), (2, 14), "torch.b", "g", ()),
        )
        self.assertEqual(parse(self.TABLE), {"torch.a.f": wanted})

    def test_every_patch_has_rows_and_every_row_a_patch(self):
        """In each torch version, no definition has two rows."""
        patches = {p.target: p for feature in inductor_patches.FEATURES for p in inductor_patches.patches(feature)}
        self.assertEqual(FINGERPRINTS.keys(), patches.keys())
        for target, patch in patches.items():
            self.assertEqual(patch.versions, "2.11 to 2.15", target)
            for minor in range(11, 16):
                named = list(map(str, patch.fingerprints_for((2, minor))))
                self.assertEqual(len(named), len(set(named)), target)
                self.assertTrue(named, target)

    def test_text_that_is_no_row_is_refused(self):
        lines = "    other f(x): old", "    2.11  f(x", "    2.11-  f", "    2.11  f: a, b"
        for table in (*(f"torch.a f\n{line}" for line in lines), "torch.a\n    2.11  f", "    2.11  f"):
            self.assertRaisesRegex(ValueError, "expected 'VERSIONS", parse, table)


INSTALLED = parse_version(torch.__version__)
COMMENT = re.compile(r"# (since|up to) (\d+\.\d+)$", re.MULTILINE)


def questions():
    """All questions that have one answer per process, yes or no."""
    found = [value for name, value in vars(compat).items() if inspect.isfunction(value) and not name.startswith("_")]
    return [question for question in found if question.__annotations__ == {"return": "bool"}]


class TestVersionQuestions(TestCase):
    def test_the_installed_torch_answers_as_the_comments_say(self):
        self.assertGreater(len(questions()), 5)
        for question in questions():
            word, version = COMMENT.search(inspect.getsource(question)).groups()
            named = parse_version(version)
            answer = {"since": named <= INSTALLED, "up to": named >= INSTALLED}[word]
            self.assertIs(question(), answer, question.__name__)

    def test_answers_are_those_of_torch_without_the_patches(self):
        patched = [question() for question in questions()]
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.assertEqual([question() for question in questions()], patched)


SOURCES = Path(torch.__file__).parent.parent


class TestTool(WithFolder):
    def run_tool(self, *arguments):
        done = python(str(ROOT / "tools" / "check_compat"), *map(str, arguments))
        return done.returncode, done.stdout, done.stderr

    def test_the_installed_torch_fits_and_a_changed_one_does_not(self):
        status, out, err = self.run_tool()
        self.assertEqual((status, "OFF" in out), (0, False), out + err)
        wheel = self.folder / "torch-2.14.1.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in ("torch/version.py", "torch/_inductor/scheduler.py"):
                text = (SOURCES / path).read_text()
                archive.writestr(path, text.replace("def graph_partition(", "def partition_graph("))
        status, out, _ = self.run_tool(wheel)
        self.assertEqual(status, 1)
        self.assertIn("OFF   report: torch._inductor.scheduler.Scheduler.graph_partition\n", out)
        status, _, err = self.run_tool("/nowhere")
        self.assertEqual((status, "/nowhere: expected a torch wheel" in err), (2, True))

    def test_the_table_in_contributing_names_all_patches(self):
        text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        for feature in inductor_patches.FEATURES:
            for patch in inductor_patches.patches(feature):
                self.assertIn(f"| {feature}: `{patch.target}` |", text)


if __name__ == "__main__":
    run_tests()
