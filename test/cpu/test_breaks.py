"""Graph breaks and compiled functions are told with the line of the program, and each break with advice."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import sys
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pygraph_trees

# isort: split
from torch._inductor import compile_fx  # noqa: F401  the patches go on
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.report import breaks, summary
from pygraph_trees.report.compiled import _log_of
from pygraph_trees.report.log import Journal, journal
from pygraph_trees.report.naming import frame_line


def branching(x):
    y = x * 2
    if y.sum() > 0:  # here
        y = y + 1
    return y


def reading(x):
    y = x * 2
    return y + y.sum().item()  # here


def printing(x):
    y = x * 2
    print("seen")  # here
    return y + 1


def counting(x):
    y = x * 2
    return torch.nonzero(y) + 1  # here


def asking(x):
    y = x * 2
    os.getpid()  # here
    return y + 1


def inner(x):
    return printing(x) - 1


def looping(x):
    for _ in range(3):
        x = x * 2
        print("seen")  # here
    return x


class Broken(torch.nn.Module):
    def forward(self, x):
        x = x.sin()
        print("seen")
        return x.cos()


PRINT = "print after the compiled function, or add print to torch._dynamo.config.reorderable_logging_functions"
KEEP = "keep the value in a tensor, or read it after the compiled function"


def line_of(function):
    """The line of a function with the comment, as the report shows it."""
    lines, first = inspect.getsourcelines(function)
    (at,) = (i for i, line in enumerate(lines) if line.endswith("# here\n"))
    return f"{__file__}:{first + at} in {function.__name__}: {lines[at].strip()}".removesuffix("  # here")


class TestBreaks(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        summary.clear()
        self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        self.enterContext(mock.patch.object(logging.getLogger("torch._dynamo"), "disabled", True))

    def of(self, function, backend="eager"):
        compiled = torch.compile(function, backend=backend)
        for _ in range(3):
            compiled(torch.ones(4, 4))
        return pygraph_trees.report().breaks

    def test_a_break_has_its_line_and_advice(self):
        for function, advice in (
            (branching, "compute both branches and choose with torch.where, or use torch.cond"),
            (reading, KEEP),
            (printing, PRINT),
            (counting, "use an operator whose output size does not depend on data, such as torch.where"),
            (asking, "call it before or after the compiled function, or make it a custom operator"),
            (looping, f"{PRINT}; since it is in a loop, none of its function is compiled"),
        ):
            with self.subTest(function=function.__name__):
                summary.clear()
                (found,) = self.of(function)
                line = found.source.partition("  # here")[0]
                self.assertEqual((line, found.count, found.advice), (line_of(function), 1, advice))
                text = " ".join(str(pygraph_trees.report()).split())
                self.assertIn(f"{' '.join(found.source.split())}; advice: {advice}", text)

    def test_torchs_hint_is_shown_for_other_kinds(self):
        with breaks.apart():
            noted = SimpleNamespace(msg="A new kind\n  Explanation: So.\n  Hint: Do this.", gb_type="A new kind")
            noted.logged, noted.real_stack = False, []
            code = {"co_filename": "model.py", "co_firstlineno": 3, "co_name": "torch_dynamo_resume_in_f_at_7"}
            returned = breaks.noting(lambda *_, **given: given["reason"])(None, code, reason="it", exc=noted)
            (found,) = breaks.records()
        self.assertEqual((returned, found.reason, found.advice), ("it", "A new kind: So.", "Do this."))
        self.assertEqual((found.source, breaks.records()), ("model.py:3 in f", ()))

    def test_a_break_that_cannot_be_noted_fails_no_compilation(self):
        with self.assertLogs("pygraph_trees.report", "WARNING") as logged:
            breaks.noting(lambda *_, **given: None)(None, {}, reason="it", exc=object())
        self.assertEqual((len(logged.output), breaks.records()), (1, ()))

    def test_breaks_of_a_kind_are_told_apart_by_their_lines(self):
        def twice(x):
            print("a")
            x = x * 2
            print("b")
            return x + 1

        first = inspect.getsourcelines(twice)[1]
        found = [(b.count, b.source.split(":")[1].split()[0]) for b in self.of(twice)]
        self.assertEqual(found, [(1, str(first + 1)), (1, str(first + 3))])

    def test_the_line_is_the_programs_and_not_torchs(self):
        for found in self.of(inner):
            self.assertIn(" in printing: ", found.source)
        frames = [FrameSummary("model.py", 7, "f", line="g(x)"), FrameSummary(torch.nn.__file__, 9, "g", line="h(x)")]
        self.assertEqual(frame_line(frames, ("other.py", 1, "f")), "model.py:7 in f: g(x)")
        self.assertTrue(frame_line(frames[1:], ("other.py", 1, "f")).startswith(torch.nn.__file__))

    def test_a_compiled_function_has_its_line_and_its_backward_too(self):
        logs = []

        def backend(gm, inputs):
            artifact = SimpleNamespace(fx_kwargs={"is_inference": False})
            logs.append(_log_of(artifact, {"is_backward": False}))
            return gm

        self.of(Broken(), backend)
        self.of(torch.nn.Linear(4, 4), backend)
        first = inspect.getsourcelines(Broken.forward)[1]
        own = [(log.model.split(":")[0], log.record().source) for log in logs[:2]]
        places = [f"{__file__}:{first} in forward", f"{__file__}:{first + 2} in forward"]
        self.assertEqual([place for _, place in own], places)
        self.assertRegex(logs[2].source, r"linear\.py:\d+ in forward$")
        self.assertEqual(logs[2].model, "Linear")
        used = mock.patch("pygraph_trees.report.compiled.journal", Journal())
        identity = mock.patch("pygraph_trees.report.compiled.compile_id", return_value=logs[0].compile_id)
        with used as forwards, identity:
            forwards.add_graph(logs[0])
            backward = _log_of(SimpleNamespace(fx_kwargs={"is_inference": False}), {"is_backward": True})
        self.assertEqual((backward.mode, backward.source), ("backward", places[0]))
        self.addCleanup(summary.clear)
        journal.add_graph(backward)
        self.assertIn(f"compiled from {places[0]}", " ".join(str(pygraph_trees.report()).split()))

    def test_an_explanation_has_all_lines(self):
        found = pygraph_trees.explain(Broken(), torch.ones(4, 4, device="meta"))
        data = json.loads(found.to_json())
        first = inspect.getsourcelines(Broken.forward)[1]
        place = f"{__file__}:{first + 2} in forward"
        self.assertEqual([graph["source"] for graph in data["graphs"]], [f"{__file__}:{first} in forward", place])
        self.assertEqual([b["source"] for b in data["breaks"]], [f'{place}: print("seen")'])
        self.assertIn(PRINT, found.to_html())
        self.assertEqual(pygraph_trees.report().breaks, ())  # of the process


if __name__ == "__main__":
    run_tests()
