"""Processes that share a folder of caches: with ours as with torch alone, the first one misses, and later ones hit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cached_programs import CALLS, PROGRAMS, TRAINED
from torch.testing._internal.common_utils import TestCase, run_tests

HERE = Path(__file__).resolve().parent
RUNS_WHOLE = True  # its tests share the findings of the same processes
WAYS = ("torch", "ours", "off")
OFF = {"PYGRAPH_PLACEMENT": "off", "PYGRAPH_INDIRECTION": "off", "PYGRAPH_SELECTIVE": "always"}
PROCESSES = 3
MISSED = {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1, "autograd_cache_saved": 1}
HIT = {"fxgraph_cache_hit": 1, "autograd_cache_hit": 1}
BOTH_MISSED, BOTH_HIT = {**MISSED, "fxgraph_cache_miss": 2}, {**HIT, "fxgraph_cache_hit": 2}
LATE = [
    {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1},
    {"fxgraph_cache_hit": 1, "fxgraph_cache_miss": 1, "autograd_cache_miss": 1, "autograd_cache_saved": 1},
    BOTH_HIT,
]


def run_way(way: str) -> list[dict[str, Any]]:
    """The findings of each process of a way."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYGRAPH_")}
    paths = [str(HERE), str(HERE.parents[1]), *(path for path in sys.path if path)]
    found = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {
            **kept,
            **(OFF if way == "off" else {"PYGRAPH_SELECTIVE": "always"} if way == "ours" else {}),
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
        }
        for number in range(PROCESSES):
            out = Path(folder) / f"{number}.json"
            child = subprocess.run(
                [sys.executable, "-c", "import sys, cached_programs; cached_programs.answer(sys.argv[1])",
                 json.dumps([way, number, str(out)])],
                env=environment, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            if child.returncode != 0:
                raise AssertionError(f"{way}, process {number}: status {child.returncode}\n{child.stderr[-4000:]}")
            found.append(json.loads(out.read_text()))
    return found


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device: these tests capture CUDA graphs")
class TestCaches(TestCase):
    found: dict[str, list[dict[str, Any]]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        with ThreadPoolExecutor(len(WAYS)) as pool:
            cls.found = dict(zip(WAYS, pool.map(run_way, WAYS), strict=True))

    def counters(self, way: str, name: str) -> list[dict[str, int]]:
        return [process[name]["counters"] for process in self.found[way]]

    def test_a_second_process_hits(self) -> None:
        for way in WAYS:
            for name in PROGRAMS:
                with self.subTest(way=way, program=name):
                    if name == "late":
                        self.assertEqual(self.counters(way, name), LATE)
                        continue
                    missed, hit = (BOTH_MISSED, BOTH_HIT) if name in TRAINED else (MISSED, HIT)
                    self.assertEqual(self.counters(way, name), [missed, hit, hit])

    def test_what_comes_from_the_caches_is_graphed(self) -> None:
        for way in WAYS:
            for number, process in enumerate(self.found[way]):
                for name in PROGRAMS:
                    if name == "written" and way != "ours":
                        continue  # torch alone does not graph it
                    with self.subTest(way=way, program=name, process=number):
                        self.assertGreaterEqual(process[name]["recordings"], 1)

    def test_what_comes_from_the_caches_is_replayed_and_reported(self) -> None:
        for number, process in enumerate(self.found["ours"]):
            for name in PROGRAMS:
                with self.subTest(program=name, process=number):
                    passes = 2 if name in TRAINED and not (name == "late" and number == 0) else 1
                    self.assertGreaterEqual(process[name]["replays"], passes * (CALLS - 2))
                    if name != "late" or number > 0:
                        last = self.found["ours"][-1][name]["graphs"]
                        self.assertEqual(process[name]["graphs"], last)
                    if name == "staged":
                        self.assertIn("staged", str(process[name]["graphs"]))


if __name__ == "__main__":
    run_tests()
