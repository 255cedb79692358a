"""For the tests of functions that are chosen by measurement."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from indirection import IndirectionTestCase

import pygraph_trees
from pygraph_trees.selection import trial
from pygraph_trees.selection.decision import Decision, Execution
from pygraph_trees.selection.profiles import Profiles

CALLS = 40  # more than a trial takes


@contextlib.contextmanager
def decided(way: Execution) -> Iterator[None]:
    """Trials end this way, whatever they measure."""
    with mock.patch.object(trial, "decide", lambda compared, standing, rules: Decision(way, compared)):
        yield


class SelectionTestCase(IndirectionTestCase):
    """The flag is on, and no test finds what another one decided."""

    def setUp(self) -> None:
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(torch._inductor.config.patch({"triton.pygraph_selective": "auto"}))
        profiles = Profiles(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.enter_context(mock.patch.object(Profiles, "default", staticmethod(lambda: profiles)))

    def functions(self):
        return pygraph_trees.report().functions
