"""Artifacts in torch's structured trace: when a graph or a function writes one, and its content. In ``TORCH_LOGS``,
"pygraph" works if the package is imported first, and the package's own name in any order."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from unittest import mock

from new_process import python
from torch._logging._internal import trace_log
from torch.testing._internal.common_utils import TestCase, run_tests
from traced import artifacts, listening

import pygraph_trees  # noqa: F401
from pygraph_trees.report.log import FunctionLog, GraphLog, RecordingLog, journal
from pygraph_trees.report.records import Partition

SETTINGS = {"placement": "full", "indirection": "auto"}


def write(log):
    log.recorded(RecordingLog(number=0))
    log.not_graphed("no node reads it")
    log.route_was_found("by table: 3 us")
    log.decided("graphed: 1 us", graphed=True)


class TestStructuredTraces(TestCase):
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
        with tempfile.TemporaryDirectory() as folder:
            done = python("-c", code, TORCH_TRACE=folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            (written,) = Path(folder).iterdir()
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
            ("pygraph_trees", "torch", "+pygraph", True, True),
            ("pygraph_trees", "torch", "pygraph", True, False),
            ("pygraph_trees", "torch", "+pygraph, graph_breaks", True, True),
            ("torch", "pygraph_trees", "+pygraph_trees", True, True),
            ("pygraph_trees", "torch", "recompiles", False, False),
        ):
            code = f"import {first}, {then}, os; print(os.environ['TORCH_LOGS'])\n{SAY}"
            done = python("-c", code, TORCH_LOGS=logs)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, logs), done.stderr)
            self.assertEqual(("an info" in done.stderr, "a debug" in done.stderr), (info, debug), done.stderr)

    def test_entry_point_installs_nothing(self):
        code = (
            "import sys, torch\nfrom inductor_patches import register\n"
            "register(); register(); print('pygraph_trees' in sys.modules)"
        )
        done = python("-c", code, TORCH_LOGS="recompiles")
        self.assertEqual(done.stdout.strip(), "False", done.stderr)


if __name__ == "__main__":
    run_tests()
