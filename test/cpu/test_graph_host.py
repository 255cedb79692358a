"""tools/bench/graph_host.py: how the two clocks time a call, and the table made from it."""

from __future__ import annotations

import sys
from pathlib import Path
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
        self.assertEqual(len(graph_host.table(found).splitlines()), 1 + len(found))

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

    def test_time_before_and_after_each_launch(self):
        graphs, launches = [1000, 9000, 20_000, 26_000], [3000, 8000, 21_000, 22_000]
        self.assertEqual(graph_host.parts_us(graphs, launches, 0.5), (1.75, 0.75, 0.75, 3.75))
        self.assertEqual(graph_host.parts_us(graphs, launches[:2], 0.5), ())
        self.assertEqual(graph_host.parts_us(graphs, [3000, 3500, 4000, 8000], 0.5), ())  # both in one
        self.assertEqual(graph_host.parts_us([], [], 0.5), ())


if __name__ == "__main__":
    run_tests()
