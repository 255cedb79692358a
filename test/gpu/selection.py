"""Base of the tests of functions whose graphs are chosen by measurement.

The flag is on, and decisions are stored in a temporary folder. :func:`decided` sets the outcome of trials, since
measurements depend on the machine.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from indirection import IndirectionTestCase

import pygraph_trees
from pygraph_trees.selection import trial
from pygraph_trees.selection.decision import Comparison, Execution, Facts, Gain
from pygraph_trees.selection.profiles import Profiles

CALLS = 80  # more calls than the trials of a few functions take
_GAIN = Gain(ungraphed_us=20.0, graphed_us=10.0, gain_us=-10.0, margin_us=1.0, noise_us=0.1)


@contextlib.contextmanager
def deciding(choose: Callable[[], Execution]) -> Iterator[None]:
    """Makes each function's trial measure calls, and end with the next way that ``choose`` returns."""

    with (
        mock.patch.object(trial, "plain_way", lambda facts: None),
        mock.patch.object(trial, "compare", lambda parts: Comparison(_GAIN, _GAIN, [Facts(1)])),
        mock.patch.object(trial, "decide", lambda compared: choose()),
    ):
        yield


def decided(way: Execution) -> contextlib.AbstractContextManager[None]:
    """Makes trials end with this decision, whatever they measure."""
    return deciding(lambda: way)


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
