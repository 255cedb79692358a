"""Questions about torch are answered as the comments on them say; what patches rely on is found in its sources, as
``tools/check_compat`` does, and in its objects."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from source_probe import SourceProbe
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
from inductor_patches.fingerprints import parse_version
from inductor_patches.patch import LiveProbe
from pygraph_trees import compat

INSTALLED = parse_version(torch.__version__)
COMMENT = re.compile(r"# (Since|After|Up to) (\d+\.\d+)\.$", re.MULTILINE)


def questions():
    """All questions that have one answer per process."""
    found = [value for name, value in vars(compat).items() if inspect.isfunction(value) and not name.startswith("_")]
    return [question for question in found if not inspect.signature(question).parameters]


def answer_by_comment(question):
    word, version = COMMENT.search(inspect.getsource(question)).groups()
    named = parse_version(version)
    return {"Since": named <= INSTALLED, "After": named < INSTALLED, "Up to": named >= INSTALLED}[word]


class TestVersionQuestions(TestCase):
    def test_the_installed_torch_answers_as_the_comments_say(self):
        self.assertGreater(len(questions()), 5)
        for question in questions():
            self.assertIs(question(), answer_by_comment(question), question.__name__)

    def test_answers_are_those_of_torch_without_the_patches(self):
        patched = [question() for question in questions()]
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.assertEqual([question() for question in questions()], patched)


SOURCES = Path(torch.__file__).parent.parent


class TestSourceProbe(TestCase):
    def test_agrees_with_live_objects(self):
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        live, source = LiveProbe(), SourceProbe(SOURCES)
        version = parse_version(torch.__version__)
        patches = [patch for feature in inductor_patches.FEATURES for patch in inductor_patches.patches(feature)]
        fingerprints = {fingerprint for patch in patches for fingerprint in patch.fingerprints_for(version)}
        self.assertGreater(len(fingerprints), 20)
        for wanted in fingerprints:
            one, other = (probe.find(wanted.module, wanted.name) for probe in (live, source))
            self.assertEqual(one.parameters, other.parameters, str(wanted))
            self.assertLessEqual(set(wanted.uses), one.uses & other.uses, str(wanted))


class TestTool(TestCase):
    def run_tool(self, *arguments):
        command = [sys.executable, ROOT / "tools" / "check_compat", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout, done.stderr

    def test_the_installed_torch_fits_and_a_changed_one_does_not(self):
        status, out, err = self.run_tool()
        self.assertEqual((status, "OFF" in out), (0, False), out + err)
        with tempfile.TemporaryDirectory() as folder:
            wheel = Path(folder, "torch-2.14.1.whl")
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
