"""The report shows the line of each graph break and compiled function, and advice for each break."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
from collections import Counter
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor import compile_fx  # noqa: F401  the patches go on with it
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.report import breaks, summary
from pygraph_trees.report.compiled import _log_of
from pygraph_trees.report.log import Journal

PRINT = "print after the compiled function, or add print to torch._dynamo.config.reorderable_logging_functions"
KEEP = "keep the value in a tensor, or read it after the compiled function"


def branching(x):
    y = x * 2
    if y.sum() > 0:
        y = y + 1
    return y


def looping(x):
    for _ in range(3):
        x = x * 2
        print("seen")
    return x


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        return forward(self, x)

    return wrapper


class Decorated(torch.nn.Module):
    @decorated
    def forward(self, x):
        return x + 1


class Broken(torch.nn.Module):
    def forward(self, x):
        x = x.sin()
        print("seen")
        return x.cos()


class TestBreaks(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        summary.clear()
        self.addCleanup(summary.clear)
        self.enterContext(contextlib.redirect_stdout(io.StringIO()))

    def of(self, function, backend="eager"):
        compiled = torch.compile(function, backend=backend)
        for _ in range(3):
            compiled(torch.ones(4, 4))
        return pygraph_trees.report().breaks

    def test_a_break_has_its_line_and_advice(self):
        def reading(x):
            return x + (x * 2).sum().item()

        for function, line, advice in (
            (branching, 2, "compute both branches and choose with torch.where, or use torch.cond"),
            (reading, 1, KEEP),
            (looping, 3, f"{PRINT}; since it is in a loop, none of its function is compiled"),
        ):
            with self.subTest(function=function.__name__):
                summary.clear()
                (found,) = self.of(function)
                code, first = inspect.getsourcelines(function)
                place = f"{__file__}:{first + line} in {function.__name__}: {code[line].strip()}"
                self.assertEqual((found.source, found.count, found.advice), (place, 1, advice))
                self.assertIn(f"{place}; advice: {advice}", " ".join(str(pygraph_trees.report()).split()))

    def test_breaks_of_a_kind_are_told_apart_by_their_lines(self):
        def twice(x):
            print("a")
            x = x * 2
            print("b")
            return x + 1

        found = {b.source.partition(" in ")[2]: b.count for b in self.of(twice)}
        self.assertEqual(found, {'twice: print("a")': 1, 'twice: print("b")': 1})

    def noted(self, stack):
        """The record of a break of a new kind with this stack."""
        text = "A new kind\n  Explanation: So.\n  Hint: Do this."
        error = SimpleNamespace(msg=text, gb_type="A new kind", logged=False, real_stack=stack)
        code = {"co_filename": "model.py", "co_firstlineno": 3, "co_name": "torch_dynamo_resume_in_f_at_7"}
        with mock.patch.object(breaks, "noted", Counter()):
            noting = breaks.noting(lambda *_, **given: given["reason"])
            self.assertEqual(noting(None, code, reason="it", exc=error), "it")
            error.logged = True  # in the frames around it
            noting(None, code, reason="it", exc=error)
            (found,) = breaks.records()
        self.assertEqual((found.reason, found.advice, found.count), ("A new kind: So.", "Do this.", 1))
        return found.source

    def test_the_line_is_the_programs_and_not_torchs(self):
        frames = [FrameSummary("model.py", 7, "f", line="g(x)"), FrameSummary(torch.nn.__file__, 9, "g", line="h(x)")]
        self.assertEqual(self.noted(frames), "model.py:7 in f: g(x)")
        self.assertEqual(self.noted(frames[1:]), f"{torch.nn.__file__}:9 in g: h(x)")
        beside = FrameSummary(f"{Path(torch.__file__).parent}vision/model.py", 3, "f", line="g(x)")
        self.assertIn("vision/model.py:3", self.noted([*frames, beside]))
        self.assertEqual(self.noted([]), "model.py:3 in f")

    def test_a_break_that_cannot_be_noted_fails_no_compilation(self):
        with self.assertLogs("pygraph_trees.report", "WARNING") as logged:
            breaks.noting(lambda *_, **given: None)(None, {}, reason="it", exc=object())
        self.assertEqual((len(logged.output), breaks.records()), (1, ()))

    def test_a_compiled_function_has_its_line_and_its_backward_too(self):
        logs, artifact = [], SimpleNamespace(fx_kwargs={"is_inference": False})
        self.enterContext(mock.patch("pygraph_trees.report.summary.journal", journal := Journal()))
        self.enterContext(mock.patch("pygraph_trees.report.compiled.journal", journal))

        def backend(gm, inputs):
            logs.append(_log_of(artifact, {"is_backward": False}))
            return gm

        for fn in (Broken(), torch.nn.Linear(4, 4), Decorated()):
            self.of(fn, backend)
        first = inspect.getsourcelines(Broken.forward)[1]
        places = [f"{__file__}:{first + line} in forward" for line in (0, 2)]
        self.assertEqual([log.record().source for log in logs[:2]], places)
        self.assertRegex(logs[2].source, r"torch/nn/modules/linear\.py:\d+ in forward$")
        self.assertEqual(logs[3].source, f"{__file__}:{inspect.getsourcelines(Decorated.forward)[1]} in forward")
        journal.add_graph(logs[0])
        with mock.patch("pygraph_trees.report.compiled.compile_id", return_value=logs[0].compile_id):
            self.assertEqual(_log_of(artifact, {"is_backward": True}).source, places[0])
        self.assertIn(f"compiled from {places[0]}", " ".join(str(pygraph_trees.report()).split()))

    def test_an_explanation_has_all_lines(self):
        found = pygraph_trees.explain(Broken(), torch.ones(4, 4, device="meta"))
        data, first = json.loads(found.to_json()), inspect.getsourcelines(Broken.forward)[1]
        places = [f"{__file__}:{first + line} in forward" for line in (0, 2)]
        self.assertEqual([graph["source"] for graph in data["graphs"]], places)
        self.assertEqual([b["source"] for b in data["breaks"]], [f'{places[1]}: print("seen")'])
        self.assertIn(PRINT, found.to_html())
        self.assertEqual(pygraph_trees.report().breaks, ())  # of the process


if __name__ == "__main__":
    run_tests()
