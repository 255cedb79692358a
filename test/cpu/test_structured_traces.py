"""Artifacts in torch's structured trace, logs of ``TORCH_LOGS``, and the report's lines and advice for graph breaks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from commands import WithFolder, python
from torch._inductor import compile_fx  # noqa: F401  the patches go on with it
from torch._logging._internal import trace_log
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.report import breaks, summary
from pygraph_trees.report.compiled import _log_of
from pygraph_trees.report.log import FunctionLog, GraphLog, Journal, RecordingLog, journal
from pygraph_trees.report.records import Partition

SETTINGS = {"placement": "full", "indirection": "auto"}


@contextlib.contextmanager
def artifacts() -> Iterator[list[SimpleNamespace]]:
    """This package's artifacts in torch's structured trace that are written inside the context."""
    found: list[SimpleNamespace] = []

    def emit(record: Any) -> None:
        what = record.metadata.get("artifact", {})
        if what.get("name", "").startswith("pygraph_"):
            assert what["encoding"] == "json", what
            content = json.loads(record.payload)
            found.append(SimpleNamespace(name=what["name"], metadata=record.metadata, content=content))

    with listening(emit):
        yield found


@contextlib.contextmanager
def listening(emit: Any) -> Iterator[None]:
    """Passes all records to ``emit`` only: torch's handler removes itself at the first record, which others miss."""
    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    with mock.patch.object(trace_log, "handlers", [handler]):
        yield


def write(log):
    log.recorded(RecordingLog(number=0))
    log.not_graphed("no node reads it")
    log.route_was_found("by table: 3 us")
    log.decided("graphed: 1 us", graphed=True)


class TestStructuredTraces(WithFolder):
    def setUp(self):
        super().setUp()
        self.log = FunctionLog("Net", "3/1", "inference", 1, dict(SETTINGS))

    def test_graphs_and_recordings(self):
        self.log.recorded(RecordingLog(number=0))  # no handler listens
        with artifacts() as found:
            journal.add_graph(GraphLog("Net", "3/1", "inference", (Partition(True, {"triton": 1}),)))
            self.log.recorded(RecordingLog(number=1, reason="again"))
        graph, function = found
        self.assertEqual((graph.name, function.name), ("pygraph_graph", "pygraph_function"))
        self.assertEqual((function.metadata["frame_id"], function.metadata["frame_compile_id"]), (3, 1))
        self.assertEqual(graph.content["model"], "Net")
        self.assertEqual([r["reason"] for r in function.content["recordings"]], ["", "again"])

    def test_decisions(self):
        """A decision is written if it is new; it does not replace other reasons."""
        slower = "it is faster un-graphed"
        nothing, first, second = (None, True), ("graphed: 1 us", True), ("graphed: 2 us", True)
        ungraphed, again = ("un-graphed: 3 us", False), ("graphed: 4 us", True)
        with artifacts() as found:
            for text, graphed in (nothing, first, first, second, ungraphed, ungraphed, again):
                self.log.decided(text, graphed=graphed)
                self.assertEqual((self.log.decision, self.log.ungraphed_reason), (text, None if graphed else slower))
        self.assertEqual(
            [(function.content["decision"], function.content["ungraphed_reason"]) for function in found],
            [(text, None if graphed else slower) for text, graphed in (first, second, ungraphed, again)],
        )
        self.log.not_graphed("no node reads it")
        self.log.decided(first[0], graphed=True)
        self.assertEqual(self.log.ungraphed_reason, "no node reads it")
        self.log.decided(ungraphed[0], graphed=False)
        self.log.not_graphed("capture failed")
        self.log.decided(first[0], graphed=True)
        self.assertEqual(self.log.ungraphed_reason, "capture failed")

    def test_nothing_is_made_where_nobody_listens(self):
        unmade = mock.patch.object(FunctionLog, "record", lambda log: self.fail("was made"))
        with mock.patch.object(trace_log, "handlers", []), unmade:
            write(self.log)

    def test_programs_go_on_without_it(self):
        def full(record):
            raise OSError("no space left on device")

        for log, emit, said in (
            (self.log, full, "OSError: no space left"),
            (FunctionLog("f", "no id of torch's", "inference", 1, {}), lambda record: None, "ValueError"),
            (FunctionLog("f", None, "inference", 1, {"x": object()}), lambda record: None, "TypeError"),
        ):
            with listening(emit), self.assertLogs("pygraph_trees.report", "WARNING") as logs:
                write(log)
            self.assertEqual((len(log.recordings), log.route, log.decision), (1, "by table: 3 us", "graphed: 1 us"))
            self.assertEqual(len(logs.output), 4)
            for line in logs.output:
                self.assertIn(f"pygraph_function is not in torch's structured trace: {said}", line)

    def test_in_torchs_file(self):
        code = (
            "import pygraph_trees\nfrom pygraph_trees.report.log import FunctionLog\n"
            "log = FunctionLog('Net', '3/1', 'inference', 1, {})\n"
            "log.not_graphed('no node reads it'); log.not_graphed('no node reads it')"
        )
        done = python("-c", code, TORCH_TRACE=str(self.folder))
        self.assertEqual(done.returncode, 0, done.stderr)
        (written,) = self.folder.iterdir()
        lines = written.read_text().splitlines()
        first = [number for number, line in enumerate(lines) if '"pygraph_function"' in line]
        self.assertEqual(len(first), 1)
        payload = [line[1:] for line in itertools.takewhile(lambda line: line.startswith("\t"), lines[first[0] + 1 :])]
        self.assertEqual(json.loads("\n".join(payload))["ungraphed_reason"], "no node reads it")


SAY = "import logging; log = logging.getLogger('pygraph_trees.report'); log.info('an info'); log.debug('a debug')"


class TestTorchLogs(TestCase):
    def test_a_name_works_if_its_owner_is_imported_first(self):
        """The short name also works next to other names, and the variable stays unchanged. Logs are off by default."""
        for first, then, logs, info, debug in (
            ("pygraph_trees", "torch", "pygraph", True, False),
            ("pygraph_trees", "torch", "+pygraph, graph_breaks", True, True),
            ("torch", "pygraph_trees", "+pygraph_trees", True, True),
            ("pygraph_trees", "torch", "recompiles", False, False),
        ):
            done = python("-c", f"import {first}, {then}, os; print(os.environ['TORCH_LOGS'])\n{SAY}", TORCH_LOGS=logs)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, logs), done.stderr)
            self.assertEqual(("an info" in done.stderr, "a debug" in done.stderr), (info, debug), done.stderr)

    def test_entry_point_installs_nothing(self):
        code = (
            "import sys, torch\nfrom inductor_patches import register\n"
            "register(); register(); print('pygraph_trees' in sys.modules)"
        )
        done = python("-c", code, TORCH_LOGS="recompiles")
        self.assertEqual(done.stdout.strip(), "False", done.stderr)


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
    return functools.wraps(forward)(lambda self, x: forward(self, x))


class Decorated(torch.nn.Module):
    @decorated
    def forward(self, x):
        return x + 1


class Broken(torch.nn.Module):
    def forward(self, x):
        x = x.sin()
        print("seen")
        return x.cos()


# Where the graphs of `Broken` begin.
PLACES = [f"{__file__}:{inspect.getsourcelines(Broken.forward)[1] + line} in forward" for line in (0, 2)]


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
                told = " ".join(str(pygraph_trees.report()).split())
                self.assertIn(f"graph break, 1x: {found.reason}", told)
                self.assertIn(f"{place}; advice: {advice}", told)

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

        for fn in (Broken(), torch.nn.Linear(4, 4), Decorated()):
            self.of(fn, lambda gm, _: logs.append(_log_of(artifact, {"is_backward": False})) or gm)
        self.assertEqual([log.record().source for log in logs[:2]], PLACES)
        self.assertRegex(logs[2].source, r"torch/nn/modules/linear\.py:\d+ in forward$")
        self.assertEqual(logs[3].source, f"{__file__}:{inspect.getsourcelines(Decorated.forward)[1]} in forward")
        journal.add_graph(logs[0])
        with mock.patch("pygraph_trees.report.compiled.compile_id", return_value=logs[0].compile_id):
            self.assertEqual(_log_of(artifact, {"is_backward": True}).source, PLACES[0])
        self.assertIn(f"compiled from {PLACES[0]}", " ".join(str(pygraph_trees.report()).split()))

    def test_an_explanation_has_all_lines(self):
        found = pygraph_trees.explain(Broken(), torch.ones(4, 4, device="meta"))
        data = json.loads(found.to_json())
        self.assertEqual([graph["source"] for graph in data["graphs"]], PLACES)
        self.assertEqual([b["source"] for b in data["breaks"]], [f'{PLACES[1]}: print("seen")'])
        self.assertIn(PRINT, found.to_html())
        self.assertEqual(pygraph_trees.report().breaks, ())  # of the process


if __name__ == "__main__":
    run_tests()
