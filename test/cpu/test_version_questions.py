"""Each question about a version of torch is answered as the comment on it says, whether patches are on or off."""

from __future__ import annotations

import inspect
import re

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
from inductor_patches.fingerprints import parse_version
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


if __name__ == "__main__":
    run_tests()
