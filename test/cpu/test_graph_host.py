"""tools/bench/graph_host.py: how the two clocks time a call, and the table made from it."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from bench import graph_host
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.benchmark.program import Program


def wrappers(function):
    """Returns how many wrappers are around the function."""
    return 1 + wrappers(function.__wrapped__) if hasattr(function, "__wrapped__") else 0


class TestGraphHost(TestCase):
    def test_parts_make_up_the_whole(self):
        program = Program(lambda x: x * 2 + 1, (torch.ones(4),), name="SMALL")
        before = wrappers(graph_host.CompiledFxGraph.__call__)
        with mock.patch.object(graph_host, "call_until_chosen", side_effect=lambda call, first: call()) as settled:
            found = graph_host.measure("SMALL", program, 2, 3)
        settled.assert_called_once()  # only our way has routes
        self.assertEqual(wrappers(graph_host.CompiledFxGraph.__call__), before)  # no clock is left
        self.assertEqual(
            [(r["way"], r["regime"]) for r in found],
            [("upstream", "same"), ("upstream", "fresh"), ("ours", "same"), ("ours", "fresh")],
        )
        for record in found:
            self.assertEqual(record["launch"], 0.0)  # no GPU, so nothing is launched
            self.assertTrue(0 < record["trees"] < record["host"] <= record["latency"], record)
            self.assertAlmostEqual(record["outside"], record["host"] - record["trees"])
            self.assertEqual((record["gpu"], record["rest"], record["parts"]), (None, None, ()))
            rounds = record["samples"]
            self.assertEqual({name: len(each) for name, each in rounds.items()}, dict.fromkeys(rounds, 2))
            self.assertAlmostEqual(sum(rounds["host"]) / 2, record["host"], delta=0.01)

    def test_time_of_graphs_on_the_gpu_is_from_first_to_last_kernel(self):
        def event(cat, name, ts, dur, correlation=None):
            return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}

        trace = {
            "traceEvents": [
                {"ph": "M", "name": "process_name"},
                event("cuda_runtime", "cudaGraphLaunch", 0, 5, 1),
                event("kernel", "first", 10, 4, 1),
                event("gpu_memcpy", "second", 15, 2, 1),
                event("kernel", "beside the first", 9, 2, 1),
                event("kernel", "outside of graphs", 30, 50, 2),
                event("cuda_driver", "cuGraphLaunch", 90, 5, 3),
                event("kernel", "another graph", 100, 7, 3),
                event("cuda_runtime", "cudaGraphLaunch", 120, 5, 4),  # of an empty graph
            ]
        }
        self.assertEqual(graph_host.spans_us(trace), (17 - 9) + 7)
        self.assertEqual(graph_host.spans_us({"traceEvents": []}), 0.0)

    def test_a_clock_is_put_on_and_taken_off(self):
        times: list[int] = []
        watched = SimpleNamespace(add=lambda a, b: time.sleep(0.002) or a + b)
        add = watched.add
        with graph_host.clock(watched, "add", times):
            self.assertEqual((watched.add(1, 2), watched.add(3, 4)), (3, 7))
        self.assertIs(watched.add, add)
        self.assertEqual(len(times), 4)
        self.assertGreaterEqual(graph_host.between_us(times), 4000)
        self.assertEqual(graph_host.between_us([1000, 3000, 5000, 6000]), 3.0)
        self.assertTrue(0 <= graph_host.clock_us() < 1000)

    def test_medians_are_taken_field_by_field(self):
        times = [graph_host.Times(n * 10.0, n * 2.0, n * 1.0, n * 20.0) for n in (1, 5, 2)]
        self.assertEqual(graph_host.middle(times), graph_host.Times(20.0, 4.0, 2.0, 40.0))
        self.assertEqual(times[0].outside, 7.0)
        parts = [(1.0, 2.0), (5.0, 4.0), (3.0, 9.0)]
        timed = [graph_host.Times(1.0, 1.0, 1.0, 1.0, each) for each in parts]
        self.assertEqual(graph_host.middle(timed).parts, (3.0, 4.0))
        self.assertEqual(graph_host.middle([*timed, times[0]]).parts, ())  # another number of graphs

    def test_time_before_and_after_each_launch(self):
        graphs, launches = [1000, 9000, 20_000, 26_000], [3000, 8000, 21_000, 22_000]
        self.assertEqual(graph_host.parts_us(graphs, launches, 0.5), (1.75, 0.75, 0.75, 3.75))
        self.assertEqual(graph_host.parts_us(graphs, launches[:2], 0.5), ())
        self.assertEqual(graph_host.parts_us(graphs, [3000, 3500, 4000, 8000], 0.5), ())  # both in one
        self.assertEqual(graph_host.parts_us([], [], 0.5), ())

    def test_a_run_that_is_cut_leaves_what_it_measured(self):
        record = {"workload": "MLP", "way": "upstream", "regime": "same", "gpu": None, "rest": None, "parts": ()}
        record |= dict.fromkeys(("host", "trees", "launch", "outside", "latency"), 1.0)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            with (
                mock.patch.object(sys, "argv", ["graph_host.py", "MLP", "BERT-I", "--out", str(out)]),
                mock.patch.object(graph_host, "has_gpu", lambda: True),
                mock.patch.object(graph_host, "program_of", lambda name: name),
                mock.patch.object(graph_host, "measure", mock.Mock(side_effect=[[record], KeyboardInterrupt])),
                mock.patch.object(torch.cuda, "get_device_name", lambda: "a GPU"),
                mock.patch("builtins.print"),
            ):
                self.assertRaises(KeyboardInterrupt, graph_host.main)
            self.assertEqual([r["workload"] for r in json.loads(out.read_text())["results"]], ["MLP"])

    def test_the_table_shows_both_ways(self):
        common = {"workload": "MLP", "regime": "same", "launch": 5.0, "gpu": None, "rest": None, "parts": ()}
        records = [
            {**common, "way": "upstream", "host": 80.0, "trees": 40.0, "outside": 35.0, "latency": 100.0},
            {
                **common,
                "way": "ours",
                "host": 48.0,
                "trees": 8.0,
                "outside": 35.0,
                "latency": 60.0,
                "gpu": 12.5,
                "rest": 12.5,
                "parts": (3.0, 1.25, 2.5, 1.25),
            },
        ]
        self.assertEqual(
            graph_host.table(records).splitlines(),
            [
                "workload   way       inputs     host    trees   launch  outside   latency      gpu   rest",
                "MLP        upstream  same       80.0     40.0      5.0     35.0     100.0        -      -  1.00",
                "MLP        ours      same       48.0      8.0      5.0     35.0      60.0     12.5   12.5  0.60",
                "MLP ours same, before and after each launch: 3.0 + 1.2, 2.5 + 1.2",
            ],
        )


if __name__ == "__main__":
    run_tests()
