"""Base of the tests of functions whose graphs are chosen by measurement.

The flag is on, and decisions are stored in a temporary folder. :func:`decided` sets the outcome of trials, since
measurements depend on the machine.
"""

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

CALLS = 40  # more calls than a trial takes


@contextlib.contextmanager
def decided(way: Execution) -> Iterator[None]:
    """Makes trials end with this decision, whatever they measure."""
    with mock.patch.object(trial, "decide", lambda compared, standing, rules: Decision(way, compared)):
        yield


class SelectionTestCase(IndirectionTestCase):
    """Turns the flag on; no test finds the decisions of another one."""

    def setUp(self) -> None:
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(torch._inductor.config.patch({"triton.pygraph_selective": "auto"}))
        profiles = Profiles(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.enter_context(mock.patch.object(Profiles, "default", staticmethod(lambda: profiles)))

    def functions(self):
        return pygraph_trees.report().functions
