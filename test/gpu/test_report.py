"""The report on a GPU: it tells what happened to the functions."""

import gzip
import importlib.util
import json
import re
import tempfile
import unittest
from pathlib import Path

import parity  # noqa: F401  (sets PYGRAPH_SELECTIVE)
import torch
from packages import is_torchvision_broken
from parity import marked
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.cuda.driver import driver
from pygraph_trees.report.summary import clear

DEVICE = "cuda"
UNPLACED = {"triton.pygraph_placement": "off"}  # CPU work stays on the CPU and splits the graph


def compiled(fn, **options):
    return torch.compile(fn, **(options or {"mode": "reduce-overhead"}))


def step():
    torch.compiler.cudagraph_mark_step_begin()


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class TestCoverage(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        clear()

    def only_function(self):
        (function,) = pygraph_trees.report().functions
        return function

    def test_inference(self):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to(DEVICE)
        f = compiled(model)
        with torch.no_grad():
            for _ in marked(range(6)):
                f(torch.randn(16, 64, device=DEVICE))
        function = self.only_function()
        self.assertEqual(
            (function.model, function.mode, function.partition, function.partitions), ("Sequential", "inference", 1, 1)
        )
        self.assertEqual((function.warmups, function.replays, function.ungraphed_calls), (1, 4, 0))
        (recording,) = function.recordings
        self.assertEqual(recording.reason, "first call")
        self.assertEqual([recording.count(k) for k in ("static", "managed", "live")], [4, 0, 1])
        self.assertEqual(recording.copied_bytes, 0)
        self.assertEqual([i.route for i in recording.inputs if i.kind == "live"], ["patch"])
        self.assertGreater(recording.record_s, 0)
        self.assertGreaterEqual(function.pool_bytes, 2 * 1024 * 1024)  # the allocator's smallest segment
        self.assertRegex(function.compile_id, r"^\d+/\d+$")

    def test_max_autotune_uses_graphs_too(self):
        f = compiled(lambda x: x.sin() * 2, mode="max-autotune")
        for _ in marked(range(4)):
            x = torch.randn(64, device=DEVICE)
            self.assertEqual(f(x), x.sin() * 2)
        function = self.only_function()
        self.assertEqual((function.replays, function.recordings[0].copied_bytes), (2, 0))

    @unittest.skipUnless(driver(), "needs cuda.bindings")
    def test_kernels_are_those_that_run(self):
        def fn(x, y):
            return torch.sort((x * 2).sin() @ y).values, y.cos()

        f = compiled(fn)
        x, y = torch.randn(128, 128, device=DEVICE), torch.randn(128, 128, device=DEVICE)
        for _ in marked(range(4)):
            f(x, y)
        (recording,) = self.only_function().recordings
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            f(x, y)
            torch.cuda.synchronize()
        names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [n for n in names if not n.startswith(("Memcpy", "Memset"))]
        self.assertEqual(recording.kernels, len(kernels), names)  # no input is copied

    def test_split(self):
        def fn(x):
            y = x @ x
            z = y.cpu() + 1
            return z.to(DEVICE) * y

        with fresh_cache(), config.patch(UNPLACED):
            f = compiled(fn)
            for _ in marked(range(4)):
                f(torch.ones(8, 8, device=DEVICE))
        report = pygraph_trees.report()
        self.assertEqual([(f.partition, f.partitions, f.replays) for f in report.functions], [(1, 2, 2), (2, 2, 2)])
        first, second = report.functions
        self.assertEqual(second.recordings[0].count("managed"), 1)
        self.assertEqual(second.recordings[0].reason, f"first call after recording {first.recordings[0].number}")
        (graph,) = report.graphs
        self.assertIsNone(graph.dropped)
        self.assertEqual([p.graphed for p in graph.partitions], [True, False, True])
        self.assertTrue(graph.causes)
        self.assertTrue(all(Path(__file__).name in str(cause.source) for cause in graph.causes), graph.causes)
        self.assertIn("outside of CUDA graphs", str(report))

    def test_ungraphed_by_mutation(self):
        def fn(a, b):
            a.add_(b)
            return a * 2

        f = compiled(fn, options={"triton.cudagraphs": True, "triton.pygraph_indirection": "off"})
        a, b = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
        for _ in marked(range(3)):
            f(a, b)
        function = self.only_function()
        self.assertEqual((function.ungraphed_calls, function.recordings), (3, ()))
        self.assertIn("mutates inputs", function.ungraphed_reason)
        self.assertEqual(a, torch.full((4,), 3.0))


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class TestKernelNames(TestCase):
    @unittest.skipIf(importlib.util.find_spec("transformers") is None or is_torchvision_broken(), "needs transformers")
    def test_bert(self):
        """At least 95% of the kernels in BERT's replays are named in a profiler's trace, with the right module."""
        from transformers import BertConfig, BertForQuestionAnswering

        torch._dynamo.reset()
        clear()
        with torch.device(DEVICE):
            f = compiled(BertForQuestionAnswering(BertConfig(num_hidden_layers=4)).half().eval())
            ids = torch.randint(0, 30000, (2, 384))
        file = Path(self.enterContext(tempfile.TemporaryDirectory()), "trace.json.gz")
        self.enterContext(torch.no_grad())
        for replays in (4, 2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in marked(range(replays)):
                    f(ids.clone(), torch.ones_like(ids))
                torch.cuda.synchronize()
        profile.export_chrome_trace(str(file))
        named, count = pygraph_trees.name_kernels(file)
        events = json.loads(gzip.decompress(file.read_bytes()), strict=False)["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        if not kernels:
            self.skipTest("the profiler shows no kernels")
        (recording,) = pygraph_trees.report().functions[0].recordings
        self.assertEqual(count, 2 * recording.kernels)
        self.assertGreaterEqual(named, 0.95 * count, [e["name"] for e in kernels if "line" not in e["args"]])
        matmul, attention = "gemm|nvjet|cutlass|xmma", "flash|fmha|sdpa"
        wanted = {"attention.self.query": matmul, "attention.self": attention, "output.LayerNorm": "triton_"}
        for module, kind in wanted.items():
            for layer in range(4):
                found = [e for e in kernels if e["args"].get("module") == f"bert.encoder.layer.{layer}.{module}"]
                names = [event["name"] for event in found]
                self.assertTrue(any(re.search(kind, name) for name in names), f"{module}: {names}")
                self.assertRegex(found[0]["args"]["function"], r"^BertForQuestionAnswering \d+/\d+ inference$")


if __name__ == "__main__":
    run_tests()
