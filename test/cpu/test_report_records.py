"""The report: logs become records, records become text and JSON."""

import json
import logging
import unittest
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace

import torch
from test_structured_traces import Broken
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.outputs.allocations import Block
from pygraph_trees.report import records, summary
from pygraph_trees.report.log import Count, FunctionLog, GraphLog, Journal, RecordingLog, partition_from_json
from pygraph_trees.report.naming import program_name
from pygraph_trees.report.summary import Report
from pygraph_trees.report.text import render
from pygraph_trees.trees.recordings.records import describe_outputs

CAUSE = records.Cause("DeviceCopy ops", "prims.device_put.default", "model.py:31 in forward: y = table.to(x.device)")
READS = records.PartitionInput("x", True, "cuda:0", "float32", 256, {"triton": 1})
SPLIT = (
    records.Partition(graphed=True, kernels={"triton": 3, "extern": 2}),
    records.Partition(graphed=False, kernels={"copy": 1, "cpu": 4}, causes=(CAUSE,)),
    records.Partition(graphed=True, kernels={"triton": 1}, inputs=(READS,), outputs=("buf7",)),
)
ENVIRONMENT = records.Environment("0.1.0", "2.13.0", "3.7.0", "NVIDIA H200", (records.FeatureState("flags", "on"),))


def function(**fields):
    settings = {"placement": "off", "indirection": "off", "selective": "always"}
    known = {"model": "Net", "compile_id": "0/0", "mode": "inference", "partition": 1, "settings": settings}
    return FunctionLog(**known | fields)


INPUTS = (
    (0, "arg0_1", "static", "cuda:0", 4096, 0, False),
    (1, "arg1_1", "live", "cuda:0", 2048, 2048, False),
    (2, "s0", "value", None, 0, 0, False),
)


def recording(number, reason="first call", replays=0, inputs=INPUTS, **fields):
    given = {"kernels": 12, "other_nodes": 1, "record_s": 0.25, "counter": Count(replays), **fields}
    return RecordingLog(number, reason=reason, inputs=tuple(records.InputRecord(*of) for of in inputs), **given)


def lines(word, *functions):
    """The report's lines that contain a word."""
    text = render(records.Snapshot(ENVIRONMENT, (), tuple(log.record() for log in functions)), 200)
    return [line for line in text.splitlines() if word in line]


class TestLogs(TestCase):
    def test_each_thread_knows_the_graph_that_it_compiles_and_a_backward_finds_the_one_of_its_forward(self):
        journal = Journal()
        graph, inner = GraphLog("Net", "0/0", "inference", SPLIT), GraphLog("B", "2/0", "forward", ())
        with journal.compiling(graph), ThreadPoolExecutor(1) as other:
            self.assertIsNone(other.submit(lambda: journal.graph).result())
            with self.assertRaises(KeyError), journal.compiling(inner):
                self.assertIs(journal.graph, inner)
                raise KeyError
            self.assertIs(journal.graph, graph)
        self.assertIsNone(journal.graph)
        journal.add_graph(inner)
        self.assertEqual([journal.graph_of(number) for number in ("2/0", "3/0", None)], [inner, None, None])

    def test_facts_are_logged(self):
        with self.assertLogs("pygraph_trees.report", logging.DEBUG) as logs:
            Journal().add_graph(GraphLog("Net", "0/0", "inference", SPLIT))
            log = function()
            log.recorded(recording(3))
            for _ in range(2):
                log.not_graphed("mutates inputs")
        text = "\n".join(logs.output)
        cause = "outside: DeviceCopy ops, prims.device_put.default, model.py:31"
        for wanted in (cause, "recording 3: first call;", "not graphed: mutates inputs"):
            self.assertEqual(text.count(wanted), 1, wanted)

    def test_partitions_travel_as_json(self):
        for partition in SPLIT:
            self.assertEqual(partition_from_json(json.loads(json.dumps(asdict(partition)))), partition)


class TestOutputs(TestCase):
    """The report's lines on outputs that are alive when the next step begins."""

    def test_outputs_that_moved(self):
        log, where = function(), "Net 0/0, inference: output"
        self.assertEqual(lines("outliv", log), [])
        moved = "outlived its step: moved out of the graph pool"
        for number in (2, 2, 0):
            log.output_moved(number, 4096)
        outputs = records.OutputRecord(0, "pool", 4096), records.OutputRecord(2, "own", 4096)
        log.recorded(RecordingLog(0, outputs=outputs))
        often = f"{where} 2 {moved} 2 times, 8.2 kB, in memory of its own since"
        seldom = f"{where} 0 {moved} 1 time, 4.1 kB"
        self.assertEqual(lines("outliv", log), [often, seldom])
        log.output_moved(7, 4096)  # of a warm-up
        log.recordings[-1].outputs += (records.OutputRecord(7, "own", 4096),)
        self.assertEqual(lines("outliv", log), [often, seldom])
        for number in (5, 6):
            log.output_moved(number, 1024)
        others = "Net 0/0, inference: 1 other output outlived steps: moved, 1.0 kB"
        self.assertEqual(lines("outliv", log)[-2:], [f"{where} 5 {moved} 1 time, 1.0 kB", others])
        (line,) = lines("outliv", function(why_not_kept="torch is old"))
        self.assertTrue(line.endswith("outputs that outlive their step are overwritten, because torch is old"), line)

    def test_recordings_that_are_alike_share_what_is_known_of_inputs_and_outputs(self):
        """Each thread makes its own recordings, which stay in the log when it ends."""
        log = function()
        for number, nbytes in enumerate((8, 16, 8)):
            inputs = (records.InputRecord(0, "x", "live", "cuda:0", nbytes, 0, False),)
            log.recorded(RecordingLog(number, inputs=inputs, outputs=(records.OutputRecord(0, "pool", nbytes),)))
        first, other, last = log.recordings
        self.assertEqual([one.inputs[0].nbytes for one in log.recordings], [8, 16, 8])
        self.assertIs(last.inputs, first.inputs)
        self.assertIs(last.outputs, first.outputs)
        self.assertEqual(other.outputs[0].nbytes, 16)

    def test_where_outputs_are(self):
        unaliased = object()
        node = SimpleNamespace(
            outputs_metadata=[None, {"nbytes": 8}, {"nbytes": 16}, 7, None],
            output_storage_alias=[unaliased, None, unaliased, unaliased, unaliased],
        )
        items = [SimpleNamespace(index=index, placeholder_tensor=torch.ones(index)) for index in (3, 4)]
        live = SimpleNamespace(items=items, outputs={0: (4, None), 4: (3, None)})
        live.kernels_holding = lambda indices: ["triton", "gemm"] if indices == [4] else []
        own = SimpleNamespace(takes=4, outputs={0: Block((0,), 2)})
        found = list(describe_outputs(node, live, own))
        wanted = [(0, "own", 16, 2), (1, "input", 8), (2, "pool", 16), (4, "input", 12)]
        self.assertEqual(found, [records.OutputRecord(*of) for of in wanted])
        own.outputs = {0: Block((0,), None)}  # a library's
        self.assertEqual(next(describe_outputs(node, live, own)), records.OutputRecord(0, "own", 16, 2, 16))
        self.assertEqual(list(describe_outputs(node, None, None)), found[1:3])


class TestCopies(TestCase):
    """The report's lines on live inputs that are copied."""

    def lines(self, *live, **fields):
        inputs = [
            (number, f"arg{number}_1", "live", "cuda:0", size, size if route == "copy" else 0, False, route, why)
            for number, (size, route, why) in enumerate(live)
        ]
        log = function()
        inputs.append((len(live), "weight", "static", "cuda:0", 9000, 0, False))
        log.recorded(recording(0, inputs=inputs, **fields))
        return lines(": copied", log)

    def test_copied_inputs_are_summed_by_reason(self):
        pool, host = "it is in the graph pool", "a host node holds its address"
        live = (300_000, "copy", pool), (500_000, "patch", None), (4096, "copy", host), (7000, "copy", pool)
        copied = [f"copied: 2 of 4 live inputs, 307 kB, because {pool}"]
        copied.append(f"copied: 1 of 4 live inputs, 4.1 kB, because {host}")
        self.assertEqual(self.lines(*live), [f"Net 0/0, inference: {line}" for line in copied])
        self.assertEqual(self.lines((4096, "patch", None), (16, "table", None)), [])
        (line,) = self.lines((4096, "patch", None), extra_copies=3, extra_copied_bytes=12_288)
        self.assertRegex(line, "copied for one call: 3 live inputs, 12.3 kB, because they were less aligned than")


class TestNaming(TestCase):
    """Names are those from the source code: of the module's class, or of the function."""

    def test_a_graph_has_the_name_of_its_module_or_function(self):
        def double(x):
            return x * 2

        linear = torch.nn.Sequential(torch.nn.Linear(2, 2))
        for fn, names in ((linear, "Sequential"), (double, "double"), (Broken(), r"Broken forward:\d+")):
            seen = []
            torch._dynamo.reset()
            torch.compile(fn, backend=lambda gm, _: seen.append(program_name()) or gm)(torch.ones(2))  # noqa: B023
            self.assertRegex(" ".join(seen), f"^{names}$")
        self.assertIsNone(program_name())


class TestReport(TestCase):
    def records(self):
        plain = function()
        plain.recorded(recording(0, replays=1200, pool_bytes=2_097_152))
        moved = function(model="ANetWithALongNameThatNoTerminalHasRoomFor", mode="forward", runs=9, warmups=1)
        moved.recorded(recording(1))
        for number in (2, 3):
            moved.recorded(recording(number, "static input arg0_1 moved", replays=10 * number, pool_bytes=50))
        moved.not_graphed("mutates inputs that are neither static nor managed")
        graphs = (
            GraphLog("Net", "0/0", "inference", SPLIT).record(),
            GraphLog("Dropped", "1/0", "backward", SPLIT, dropped="skipping cudagraphs due to\n  cpu device").record(),
        )
        return graphs, (plain.record(), moved.record())

    def test_the_report_as_text(self):
        graphs, functions = self.records()
        environment = replace(ENVIRONMENT, backwards=records.HostWork(2000, {"a reason": 2, "a hook": 1000}))
        self.assertExpectedInline(
            render(records.Snapshot(environment, graphs, functions), 100),
            """\
pygraph_trees 0.1.0, torch 2.13.0, triton 3.7.0, NVIDIA H200
patches on: flags; native: yes
gradients accumulated at once in 2,000 backwards; 1,000 by torch: a hook; 2 by torch: a reason

function                   mode  part  kernels  stat  mgd  live  copied  rec  replays  rec s    pool
Net 0/0                     inf   1/1       12     1    0     1  2.0 kB    1     1200   0.25  2.1 MB
ANetWithALongNameThatNoTerminalHasRoomFor 0/0
                            fwd   1/1       12     1    0     1  2.0 kB    3       50   0.75   100 B

ANetWithALongNameThatNoTerminalHasRoomFor 0/0, forward: recorded again 2 times: static input arg0_1
    moved
ANetWithALongNameThatNoTerminalHasRoomFor 0/0, forward: 5 calls un-graphed: mutates inputs that are
    neither static nor managed

Net 0/0, inference: 1 GPU kernel outside of CUDA graphs
  DeviceCopy ops: prims.device_put.default at model.py:31 in forward: y = table.to(x.device)
Dropped 1/0, backward: not graphed, 7 GPU kernels: skipping cudagraphs due to cpu device""",
        )
        self.assertIn("Nothing was compiled", render(records.Snapshot(ENVIRONMENT, (), ()), 80))
        narrow = Report(ENVIRONMENT, graphs, functions).to_text(80).splitlines()
        self.assertLessEqual(max(map(len, narrow)), 80)
        self.assertIn("ANetWithALongNameThatNoTerminalHasRoomFor 0/0", narrow)
        self.assertEqual([graph.kernels_outside for graph in graphs], [1, 7])

    def test_features_that_are_off_are_listed_by_state_and_reason(self):
        states = (("flags", "on"), ("trees", "mismatch", "no f"), ("calls", "mismatch", "no f"), ("table", "off"))
        environment = replace(ENVIRONMENT, features=tuple(records.FeatureState(*found) for found in states))
        _, on, *others = render(records.Snapshot(environment, (), ()), 80).splitlines()[:4]
        self.assertIn("patches on: flags;", on)
        self.assertEqual(others, ["patches mismatch: trees, calls, no f", "patches off: table"])

    def test_what_changed_since_another_report(self):
        before = Report(ENVIRONMENT, (), self.records()[1])
        self.assertEqual(before.diff(before), "")
        busier, new = function(), function(model="New")
        busier.recorded(recording(0, replays=1300, pool_bytes=2_097_152))
        self.assertExpectedInline(
            Report(ENVIRONMENT, (), (busier.record(), new.record())).diff(before),
            """\
Net 0/0 inference: replays 1200 → 1300
New 0/0 inference: new, 0 recordings, 0 replays
ANetWithALongNameThatNoTerminalHasRoomFor 0/0 forward: gone""",
        )

    def test_an_error_of_the_compiler_is_told_with_its_line(self):
        table = torch.arange(8.0)
        summary.clear()
        torch._dynamo.reset()
        aot = aot_autograd(fw_compiler=lambda gm, _: gm.forward)
        torch.compile(lambda x, t: x * table[t], backend=aot)(torch.ones(4), torch.tensor(3))
        found = pygraph_trees.report().breaks
        if not found and torch.__version__ >= (2, 15):
            raise unittest.SkipTest("this torch asks for no number there")
        self.assertIn("x * table[t]", found[0].source)
        self.assertIn("Backend compiler exception: ", found[0].reason)


if __name__ == "__main__":
    run_tests()
