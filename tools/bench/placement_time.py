"""The cost of placement for a program without CPU tensors: lowering time, and whether the generated code is the same.

usage: python tools/bench/placement_time.py [NAMES ...] [--rounds N]

Needs no GPU: programs are lowered for a fake sm_90, with ``pygraph_placement`` "off" and "full" in turn, each time from
scratch. Times are processor time, which other processes disturb less. The first round is left out.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

import pygraph_trees  # noqa: F401  # has the flag
from pygraph_trees.cli.target import resolve
from pygraph_trees.fake_gpu import lower

_FLAG = "triton.pygraph_placement"
_HOW = ("off", "full")


def measure(name: str, rounds: int) -> tuple[dict[str, list[float]], bool]:
    """Seconds by value of the flag and round, and whether both gave the same code."""
    program = resolve(name, torch.device("meta"))
    seconds: dict[str, list[float]] = {how: [] for how in _HOW}
    codes: dict[str, list[list[str]]] = {}
    for number in range(rounds + 1):
        for how in _HOW[:: -1 if number % 2 else 1]:
            torch._dynamo.reset()
            gc.collect()
            with torch._inductor.config.patch({_FLAG: how, "force_disable_caches": True}), program.context():
                start = time.process_time()
                graphs = lower(program.fn, program.args, program.kwargs, training=program.training)
                seconds[how].append(time.process_time() - start)
            codes[how] = [_code(graph.source_code) for graph in graphs]
    return {how: values[1:] for how, values in seconds.items()}, codes["off"] == codes["full"]


def _code(source: str) -> list[str]:
    """The code without comments, which contain numbers and paths."""
    return [line for line in source.splitlines() if not line.lstrip().startswith("#")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["DLRM", "BERT"], metavar="NAMES", help="default: DLRM BERT")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.rounds} rounds")
    for name in options.names:
        seconds, same = measure(name, options.rounds)
        ratio = median([full / off for off, full in zip(*(seconds[how] for how in _HOW), strict=True)])
        figures = ", ".join(f"{how} {median(values):.3f} s" for how, values in seconds.items())
        spread = ", ".join(f"{full / off:.3f}" for off, full in zip(*(seconds[how] for how in _HOW), strict=True))
        print(f"{name}: {'the same' if same else 'other'} code; {figures}; ratio {ratio:.3f} ({spread})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
