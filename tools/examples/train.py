"""Trains a small GPT on bytes: forward, backward and the optimizer's step are compiled, and become CUDA graphs.

usage: python tools/examples/train.py [--out WEIGHTS] [--steps N] [--upstream | --against-upstream]

A step makes its rows of text anew, so that their addresses change, and sets the learning rate in place, in a tensor
that the compiled optimizer reads. ``--upstream`` runs the same program with torch's own CUDA graphs.
``--against-upstream`` runs it both ways, each in a process of its own, prints what they made of it and exits with 1
where a loss differs by more than ``--tolerance``. Sums that the GPU takes in any order differ from run to run, so
losses of the same program drift apart with the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the package is not installed

if "--upstream" in sys.argv:
    os.environ["PYGRAPH_DISABLE"] = "1"  # the import below leaves torch alone then

import torch
from text import GPT, SIZES, VOCABULARY, Size, read_text, save
from torch.nn.functional import cross_entropy

import pygraph_trees  # all that it takes
from pygraph_trees.comparison import graphs

WARM_UP = 5  # steps until all is compiled and recorded
SIDES = {"upstream": ("--upstream",), "ours": ()}


class Training:
    """A model, its text and its optimizer; :meth:`step` takes one step of ``steps`` in all."""

    def __init__(self, size: Size, device: torch.device, steps: int) -> None:
        torch.manual_seed(0)
        self.steps, self.done, self.device = steps, 0, device
        self.model = GPT(size).to(device)
        self.text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).to(device)
        self.random = torch.Generator(device).manual_seed(0)
        self.rate = torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, capturable=on_gpu)
        self.compiled_loss = torch.compile(self.loss, mode="reduce-overhead")
        self.compiled_update = torch.compile(self.optimizer.step, mode="reduce-overhead")

    def rows(self) -> torch.Tensor:
        """Pieces of the text, int64 of shape (batch, context + 1)."""
        size = self.model.size
        last = self.text.numel() - size.context
        begins = torch.randint(last, (size.batch, 1), device=self.device, generator=self.random)
        return self.text[begins + torch.arange(size.context + 1, device=self.device)].long()

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.model(rows[:, :-1])
        return cross_entropy(logits.reshape(-1, VOCABULARY), rows[:, 1:].reshape(-1))

    def step(self) -> torch.Tensor:
        """The loss before the step; the next step overwrites it."""
        # Forward, backward and update are one step: the update reads gradients where the backward's graph left them.
        torch.compiler.cudagraph_mark_step_begin()
        self.rate.fill_(learning_rate(self.done, self.steps))
        loss = self.compiled_loss(self.rows())
        loss.backward()
        self.compiled_update()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()


def learning_rate(step: int, steps: int, highest: float = 1e-3) -> float:
    """Up in a line for the first tenth of the steps, then down along a cosine to a tenth of the highest."""
    warm = max(1, steps // 10)
    if step < warm:
        return highest * (step + 1) / warm
    part = min(1.0, (step - warm) / max(1, steps - warm))
    return highest * (0.55 + 0.45 * math.cos(math.pi * part))


def train(size: Size, device: torch.device, steps: int) -> tuple[Training, dict[str, Any]]:
    """Trains from the beginning and prints how it goes; the training, and ``losses`` and ``steps_per_s``."""
    training = Training(size, device, steps)
    losses = torch.zeros(steps, device=device)
    for step in range(steps):
        if step == WARM_UP:
            begin = clock(device)
        losses[step] = training.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[step]:.4f}", flush=True)
    timed = steps - WARM_UP
    steps_per_s = timed / (clock(device) - begin) if timed > 0 else None
    print("too few steps to time" if steps_per_s is None else f"{steps_per_s:.1f} steps/s")
    return training, {"losses": losses.tolist(), "steps_per_s": steps_per_s}


def clock(device: torch.device) -> float:
    """Seconds, with the GPU idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def observe(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Takes one step more and says which CUDA graphs there are and what it did with them.

    ``recordings`` are all of the process, ``skips`` the graphs that were compiled and not recorded, ``replays`` and
    ``copied_bytes`` those of this step, and ``extra_copies`` inputs that had to be copied at single calls of ours.
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
    """What a script writes with ``--json``, with upstream's graphs and with ours, each in a process of its own."""
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
    """A table of what the sides observed, and how many times as fast ours is."""
    print(f"---\n{'':10}{rate:>14}{'recordings':>12}{'skipped':>9}{'replays':>9}{'copied bytes':>14}   (of one step)")
    for side, figures in found.items():
        speed = "-" if figures[rate] is None else f"{figures[rate]:.1f}"
        counts = f"{figures['recordings']:>12}{figures['skips']:>9}{figures['replays']:>9}{figures['copied_bytes']:>14}"
        print(f"{side:10}{speed:>14}{counts}")
    theirs, ours = (figures[rate] for figures in found.values())
    if theirs and ours and found["ours"]["replays"]:
        print(f"ours is {ours / theirs:.2f} times as fast")


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that both examples have."""
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
    """The options, with a size for the device; ends the program where there is no such device."""
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; with --device cpu it runs without CUDA graphs")
    options.size = options.size or ("base" if options.device == "cuda" else "tiny")
    torch.set_float32_matmul_precision("high")
    return options


def at_least(least: int) -> Callable[[str], int]:
    """What reads an option that is a whole number."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}; got {text!r}")
        return int(text)

    return read


def new_file(text: str) -> Path:
    """Reads an option that is a file to write, before there is anything to lose."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists; got {text!r}")
    return path


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def compare(options: argparse.Namespace) -> int:
    """Both ways; 1 where their losses differ."""
    told = ["--steps", str(options.steps), "--size", options.size, "--device", options.device]
    found = run_both_ways(__file__, told)
    print_sides(found, "steps_per_s")
    losses = [figures["losses"] for figures in found.values()]
    apart = [abs(theirs - ours) for theirs, ours in zip(*losses, strict=True)]
    same = all(each <= options.tolerance for each in apart)  # a NaN is not
    print(f"losses {'agree' if same else 'DIFFER'}: at most {max(apart):.1e} apart, last {losses[1][-1]:.4f}")
    write_json(options.json, {**found, "same": same, "apart": max(apart)})
    return 0 if same else 1


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("Trains a small GPT on bytes under CUDA graphs.")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="where to write the weights, for generate.py")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="how far losses of the two ways may lie apart (default 0.01)"
    )
    options = parse(parser, argv)
    if options.against_upstream:
        if options.out is not None:
            parser.error("--out is for one way; --against-upstream trains in two")
        return compare(options)
    device = torch.device(options.device)
    training, figures = train(SIZES[options.size], device, options.steps)
    if options.out is not None:
        save(training.model, options.out)
    write_json(options.json, {**figures, **observe(training.step, device)})
    if device.type == "cuda" and not options.upstream:
        print(pygraph_trees.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
