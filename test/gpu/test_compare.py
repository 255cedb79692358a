"""``compare`` on a GPU, from the command to its output: four ways, equal results, a report. Programs of tools/examples
have the results of upstream's graphs.

The command runs in another process. Its JSON holds a measurement for each way and regime, and ours copies no input that
upstream copies.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from packages import is_torchvision_broken
from processes import end
from torch.testing._internal.common_utils import TestCase, run_tests

PROGRAM = """
import torch

def net(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).to(device)
    return model.eval(), (torch.randn(64, 256, device=device),)

def trained(device):
    model, args = net(device)
    return model.train(), args, {}, lambda outputs: outputs.square().mean()
"""


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class TestCompare(TestCase):
    def compare(self, *options, target="net"):
        """The measurements by way and regime, the files written, and the process."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "program.py").write_text(PROGRAM)
            command = [sys.executable, "-m", "pygraph_trees", "compare", f"{folder}/program.py:{target}", *options]
            done = subprocess.run(
                [*command, "--json", str(folder / "out.json")], cwd=ROOT, capture_output=True, text=True, timeout=400
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            data = json.loads((folder / "out.json").read_text())
        return {(m["way"], m["regime"]): m for m in data["measurements"]}, data, done

    def test_training(self):
        """For a model in training mode, the backward is measured too, and named in the trace."""
        trace = Path(self.enterContext(tempfile.TemporaryDirectory()), "trace.json")
        options = ("--rounds", "1", "--ways", "upstream,ours,ours:graphed", "--trace", str(trace))
        found, data, done = self.compare(*options, target="trained")
        events = json.loads(trace.read_text())["traceEvents"]
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        named = [event for event in events if "function" in event.get("args", {})]
        self.assertLessEqual({processes[event["pid"]].rpartition(":")[0] for event in named}, {"ours", "ours:graphed"})
        self.assertEqual({event["args"]["function"].split()[2] for event in named}, {"forward", "backward"})
        self.assertIn("upstream", {name.partition(":")[0] for name in processes.values()})
        self.assertEqual({m["mode"] for m in found.values()}, {"training"})
        self.assertEqual({f["mode"] for f in data["report"]["functions"]}, {"forward", "backward"})
        self.assertEqual(sorted({way for way, _ in found}), ["ours", "ours:graphed", "upstream"])
        self.assertIn("Outputs against eager: not compared", done.stdout)
        self.assertEqual(found["ours", "fresh"]["copied_bytes"], 0)
        self.assertRegex(done.stdout, r"ours, same inputs: \d+\.\d\dx over reduce-overhead")

    def test_in_python(self):
        """``pygraph_trees.compare`` and then ``explain``, in one process, which then uses the GPU."""
        code = (
            "import torch, pygraph_trees\n"
            "model = torch.nn.Linear(64, 64).eval()\n"
            "print(pygraph_trees.explain(model, torch.ones(8, 64, device='meta')))\n"
            "print(pygraph_trees.compare(model.cuda(), torch.ones(8, 64).cuda(), rounds=1))\n"
            "print(torch.compile(model, mode='reduce-overhead')(torch.ones(8, 64).cuda()).sum().isfinite().item())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Linear for sm_", done.stdout)
        self.assertRegex(done.stdout, r"ours, fresh inputs: .* over torch.compile")
        self.assertTrue(done.stdout.endswith("True\n"), done.stdout[-200:])

    def test_compare(self):
        found, data, done = self.compare("--rounds", "2")
        self.assertEqual(len(found), 8)
        self.assertTrue(all(m["error"] is None and m["latency_ms"] > 0 for m in found.values()), found)
        for regime in ("same", "fresh"):
            ours, upstream = found["ours", regime], found["upstream", regime]
            for field in ("kernels_graphed", "recordings"):
                self.assertEqual(ours[field], upstream[field], field)
            self.assertEqual((upstream["copied_bytes"], ours["copied_bytes"]), (64 * 256 * 4, 0))
            self.assertGreater(ours["kernels_graphed"], 0)
            self.assertEqual(ours["max_diff_upstream"], 0)
            self.assertEqual(found["compile", regime]["kernels_graphed"], 0)
        (function,) = data["report"]["functions"]
        self.assertEqual(function["model"], "Sequential")
        self.assertIn("ours and upstream are bit-equal", done.stdout)
        self.assertIn("100%", done.stderr)


EXAMPLES = ROOT / "tools" / "examples"

TIMEOUT_S = 400  # for all programs in both ways


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class TestExamples(TestCase):
    def run_example(self, *options):
        """Runs works_with.py in another process, which must succeed; returns what it wrote and printed."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            process = subprocess.Popen(
                [sys.executable, str(EXAMPLES / "works_with.py"), "--json", str(out), *options],
                cwd=ROOT,
                # Otherwise a program's last steps may be part of a measurement.
                env={**os.environ, "PYGRAPH_SELECTIVE": "always"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                printed, _ = process.communicate(timeout=TIMEOUT_S)
            finally:
                end(process)
            self.assertEqual(process.returncode, 0, printed)
            return json.loads(out.read_text()), printed

    def test_programs_of_other_libraries(self):
        """Each program gives the same results as with torch's own graphs, and runs in our graphs."""
        needed = {"generate": "transformers", "trainer": "accelerate", "lightning": "lightning"}
        names = ["generate", "trainer", "lightning", "diffusion", "scaler"]
        if is_torchvision_broken():  # these libraries import it
            names = [n for n in names if n not in needed]
        names = [n for n in names if n not in needed or importlib.util.find_spec(needed[n]) is not None]
        found, printed = self.run_example(*names, "--against-upstream")
        self.assertEqual(found["same"], dict.fromkeys(names, True), printed)
        for name in names:
            self.assertGreater(found["ours"][name]["replays"], 5, f"{name}: {printed}")


if __name__ == "__main__":
    run_tests()
