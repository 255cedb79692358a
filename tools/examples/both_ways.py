"""Shared by both examples: options, figures, and runs with upstream's graphs and with ours.

To run with torch's own CUDA graphs, a script sets ``PYGRAPH_DISABLE`` before it imports this module.
:func:`run_both_ways` runs it once each way, in processes of their own; a run that fails ends the program with status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from text import SIZES

import pygraph_trees
from pygraph_trees.benchmark import graphs

SIDES = {"upstream": ("--upstream",), "ours": ()}


def clock(device: torch.device) -> float:
    """Seconds, with the GPU idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def observe(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Takes one more step and returns the CUDA graphs that exist and what the step did with them.

    ``recordings`` counts those of the process, ``skips`` graphs that were compiled but not recorded, ``replays`` and
    ``copied_bytes`` those of this step, and ``extra_copies`` inputs that our graphs had to copy at single calls.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False) if device.type == "cuda" else None
    managers = [] if manager is None else [manager]
    with graphs.watch_replays(managers) as seen:
        step()
    ours = [recording for function in pygraph_trees.report().functions for recording in function.recordings]
    return {
        "recordings": len(graphs.recordings(managers)),
        "skips": counters["inductor"]["cudagraph_skips"],
        "replays": sum(seen.values()),
        "copied_bytes": sum(count * graphs.copied_nbytes(recording) for recording, count in seen.items()),
        "extra_copies": sum(recording.extra_copies for recording in ours),
    }


def run_both_ways(script: str, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """The script's output with ``--json``, with upstream's graphs and with ours, each from a process of its own."""
    found = {}
    environment = {name: value for name, value in os.environ.items() if name != "PYGRAPH_DISABLE"}
    with tempfile.TemporaryDirectory() as folder:
        for side, options in SIDES.items():
            print(f"--- {side}", flush=True)
            out = Path(folder) / f"{side}.json"
            status = subprocess.run(
                [sys.executable, script, *arguments, *options, "--json", str(out)], env=environment
            ).returncode
            if status:
                print(f"{side}: the process ended with {status}", file=sys.stderr)
                sys.exit(2)
            found[side] = json.loads(out.read_text(encoding="utf-8"))
    return found


def print_sides(found: dict[str, dict[str, Any]], rate: str) -> None:
    """Prints what both sides observed, and the speedup of ours."""
    print(f"---\n{'':10}{rate:>14}{'recordings':>12}{'skipped':>9}{'replays':>9}{'copied bytes':>14}   (of one step)")
    for side, figures in found.items():
        speed = "-" if figures[rate] is None else f"{figures[rate]:.1f}"
        counts = f"{figures['recordings']:>12}{figures['skips']:>9}{figures['replays']:>9}{figures['copied_bytes']:>14}"
        print(f"{side:10}{speed:>14}{counts}")
    theirs, ours = (figures[rate] for figures in found.values())
    if theirs and ours and found["ours"]["replays"]:
        print(f"ours is {ours / theirs:.2f} times as fast")


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options of both examples."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--steps", type=at_least(1), default=300, help="training steps (default 300)")
    parser.add_argument("--size", choices=sorted(SIZES), help="of a model that is trained (default base; tiny on cpu)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="on cpu there are no graphs")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="where to write the figures")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--upstream", action="store_true", help="torch's own CUDA graphs, without pygraph_trees")
    ways.add_argument(
        "--against-upstream", action="store_true", help="both, and whether they agree (else exits with 1)"
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options, with a size for the device; ends the program if the device does not exist."""
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; with --device cpu it runs without CUDA graphs")
    options.size = options.size or ("base" if options.device == "cuda" else "tiny")
    torch.set_float32_matmul_precision("high")
    return options


def at_least(least: int) -> Callable[[str], int]:
    """A reader for an option that is a whole number."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}; got {text!r}")
        return int(text)

    return read


def new_file(text: str) -> Path:
    """Reads an option that names a file to write, and checks it before any work is done."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists; got {text!r}")
    return path


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
