"""Generates text with a cache that is an input of the compiled step, which writes to it in place.

usage: python tools/examples/generate.py [--weights FILE] [--prompt TEXT ...] [--upstream | --against-upstream]

Each conversation has its own tensors, so addresses change, and one recorded graph serves all. Without ``--weights`` a
model is trained first. ``--upstream`` uses torch's CUDA graphs, which skip a step that writes to its inputs.
``--against-upstream`` runs both ways and exits with 1 if a text differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # if the package is not installed

if "--upstream" in sys.argv:
    os.environ["PYGRAPH_DISABLE"] = "1"  # makes the import below leave torch alone

import torch
from both_ways import at_least, clock, make_parser, observe, parse, print_sides, run_both_ways, write_json
from text import GPT, SIZES, Cache, load, save
from train import train

import pygraph_trees  # no other change is needed

PROMPTS = ("A CUDA graph", "The report ", "A function definition ", "If an exception ")
WARM_UP = 5  # bytes until the step is compiled and recorded

Step = Callable[[torch.Tensor, torch.Tensor, Cache], None]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A text that grows; all its tensors are written in place."""

    text: torch.Tensor  # int64 of shape (1, context)
    position: torch.Tensor  # int64 of shape (1,): of the latest byte
    cache: Cache

    def read(self, count: int) -> str:
        return bytes(self.text[0, :count].tolist()).decode(errors="replace")


def begin(model: GPT, prompt: bytes) -> Conversation:
    """Reads the prompt and writes the first byte after it. Not compiled, because each prompt has its own length."""
    device, count = model.head.weight.device, len(prompt)
    text = torch.zeros(1, model.size.context, dtype=torch.int64, device=device)
    text[0, :count] = torch.tensor(list(prompt))
    cache = model.empty_cache()
    logits = model(text[:, :count], torch.arange(count, device=device), cache)
    text[0, count] = logits[0, -1].argmax()
    return Conversation(text, torch.tensor([count], device=device), cache)


def compiled_step(model: GPT) -> Step:
    """A compiled function that writes the next byte and advances the position."""

    def step(text: torch.Tensor, position: torch.Tensor, cache: Cache) -> None:
        logits = model(text.index_select(1, position), position, cache)
        position.add_(1)
        text.index_copy_(1, position, logits.argmax(-1))

    return torch.compile(step, mode="reduce-overhead")


def advance(step: Step, conversation: Conversation, count: int) -> None:
    """Writes ``count`` more bytes. Nothing is read back, so the host does not wait for the GPU."""
    for _ in range(count):
        step(conversation.text, conversation.position, conversation.cache)


@torch.no_grad()
def generate(model: GPT, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Continues each prompt by ``tokens`` bytes and prints it; returns ``texts``, ``tokens_per_s`` and observations."""
    device, step = model.head.weight.device, compiled_step(model)
    conversations = [begin(model, prompts[0].encode())]
    advance(step, conversations[0], min(WARM_UP, tokens - 1))
    texts, seconds = [], 0.0
    for prompt in prompts:
        conversations.append(begin(model, prompt.encode()))  # keeps all of them, so no two have the same addresses
        started = clock(device)
        advance(step, conversations[-1], tokens - 1)
        seconds += clock(device) - started
        texts.append(conversations[-1].read(len(prompt.encode()) + tokens))
        print(f"> {texts[-1]}\n", flush=True)
    tokens_per_s = len(prompts) * (tokens - 1) / seconds
    print(f"{tokens_per_s:.1f} tokens/s")
    last = begin(model, prompts[0].encode())
    observed = observe(lambda: advance(step, last, 1), device)
    return {"texts": texts, "tokens_per_s": tokens_per_s, **observed}


def compare(options: argparse.Namespace, model: GPT) -> int:
    """Runs both ways; returns 1 if their texts differ. The likeliest byte is taken each time, so none should."""
    told = ["--tokens", str(options.tokens), "--device", options.device]
    for prompt in options.prompt:
        told.append(f"--prompt={prompt}")
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        save(model, weights)
        found = run_both_ways(__file__, [*told, "--weights", str(weights)])
    print_sides(found, "tokens_per_s")
    theirs, ours = (figures["texts"] for figures in found.values())
    same = theirs == ours
    print(f"{len(ours)} texts, {'all the same' if same else 'which DIFFER'}")
    write_json(options.json, {**found, "same": same})
    return 0 if same else 1


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("Generates text under CUDA graphs, with a cache for each conversation.")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="of train.py --out; trains first without")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="of one conversation; may be given again")
    parser.add_argument("--tokens", type=at_least(2), help="bytes to generate (default: half of the model's context)")
    options = parse(parser, argv)
    options.prompt = options.prompt or list(PROMPTS)
    if not all(options.prompt):
        parser.error("a prompt needs at least one byte to begin with")
    device = torch.device(options.device)
    if options.weights is not None:
        try:
            model = load(options.weights, device)
        except ValueError as error:
            parser.error(str(error))
        context = model.size.context
    else:
        context = SIZES[options.size].context
    options.tokens = options.tokens or context // 2
    needed = max(len(prompt.encode()) for prompt in options.prompt) + options.tokens
    if needed > context:
        parser.error(f"prompt and --tokens take {needed} bytes together, and the model's context is {context}")
    if options.weights is None:
        training, _ = train(SIZES[options.size], device, options.steps)
        model = training.model
    if options.against_upstream:
        return compare(options, model)
    write_json(options.json, generate(model, options.prompt, options.tokens))
    if device.type == "cuda" and not options.upstream:
        print(pygraph_trees.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
