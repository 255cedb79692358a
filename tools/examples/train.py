"""Trains a small GPT on bytes: forward, backward and the optimizer's step are compiled, and become CUDA graphs.

usage: python tools/examples/train.py [--out WEIGHTS] [--steps N] [--upstream | --against-upstream]

A step allocates its rows of text, so their addresses change, and sets the learning rate in a tensor that the compiled
optimizer reads. ``--upstream`` uses torch's CUDA graphs, which need a mark at the start of each step.
``--against-upstream`` runs both ways and exits with 1 if losses differ by over ``--tolerance``: the GPU adds in any
order, so they drift. Run ``python -m pygraph_trees build`` first: gradients outlive their step.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # if the package is not installed

UPSTREAM = "--upstream" in sys.argv
if UPSTREAM:
    os.environ["PYGRAPH_DISABLE"] = "1"  # makes the import below leave torch alone

import torch
from both_ways import clock, make_parser, new_file, observe, parse, print_sides, run_both_ways, write_json
from text import GPT, SIZES, VOCABULARY, Size, read_text, save
from torch.nn.functional import cross_entropy

import pygraph_trees  # no other change is needed

WARM_UP = 8  # steps until all is compiled and recorded


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
        """The loss before the step."""
        if UPSTREAM:  # torch's graphs would overwrite the gradients that the compiled update reads
            torch.compiler.cudagraph_mark_step_begin()
        self.rate.fill_(learning_rate(self.done, self.steps))
        loss = self.compiled_loss(self.rows())
        loss.backward()
        self.compiled_update()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()


def learning_rate(step: int, steps: int, highest: float = 1e-3) -> float:
    """Rises linearly for the first tenth of the steps, then falls along a cosine to a tenth of the highest."""
    warm = max(1, steps // 10)
    if step < warm:
        return highest * (step + 1) / warm
    part = min(1.0, (step - warm) / max(1, steps - warm))
    return highest * (0.55 + 0.45 * math.cos(math.pi * part))


def train(size: Size, device: torch.device, steps: int) -> tuple[Training, dict[str, Any]]:
    """Trains from the beginning and prints progress; returns the training, and ``losses`` and ``steps_per_s``."""
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


def compare(options: argparse.Namespace) -> int:
    """Runs both ways; returns 1 if their losses differ."""
    told = ["--steps", str(options.steps), "--size", options.size, "--device", options.device]
    found = run_both_ways(__file__, told)
    print_sides(found, "steps_per_s")
    losses = [figures["losses"] for figures in found.values()]
    apart = [abs(theirs - ours) for theirs, ours in zip(*losses, strict=True)]
    same = all(each <= options.tolerance for each in apart)  # false for a NaN
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
