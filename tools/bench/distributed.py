"""Measures programs on several ranks: without graphs, with upstream's, and with ours, in turns.

usage: torchrun --nproc-per-node N tools/bench/distributed.py [decode | bert | fsdp2 ...] [--batch B] [--out FILE]

*decode* is a Llama block under tensor parallelism, *bert* a training step under DistributedDataParallel, *fsdp2* one of
an encoder under FSDP2. A figure is the wall time of a block of steps, of the slowest rank, by its number of steps; the
median over rounds. First values are compared with eager's, and with torch.compile's bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from bench.figures import has_gpu, one_of, write_figures
from pygraph_trees.benchmark import Program
from pygraph_trees.benchmark.measure import schedule
from pygraph_trees.benchmark.ways import make_ways

WAYS = ("compile", "upstream", "ours")
_WARM = 12  # steps of each way before the rounds
_HIDDEN, _HEADS, _INNER, _CACHE = 4096, 32, 11008, 2048  # of a Llama with 7 billion parameters


class Block(nn.Module):
    """One rank's share of a Llama block, which decodes one token at a time."""

    def __init__(self, batch: int, device: torch.device) -> None:
        super().__init__()
        ranks, make = dist.get_world_size(), {"device": device, "dtype": torch.bfloat16, "bias": False}
        self.heads = _HEADS // ranks
        own, inner = _HIDDEN // ranks, _INNER // ranks
        self.norms = nn.ModuleList(nn.RMSNorm(_HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.query_key_value, self.out = nn.Linear(_HIDDEN, 3 * own, **make), nn.Linear(own, _HIDDEN, **make)
        self.gate_up, self.down = nn.Linear(_HIDDEN, 2 * inner, **make), nn.Linear(inner, _HIDDEN, **make)
        shape = batch, self.heads, _CACHE, _HIDDEN // _HEADS
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.view(len(x), self.heads, 1, -1) for part in self.query_key_value(self.norms[0](x)).chunk(3, dim=-1)
        )
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        visible = (torch.arange(_CACHE, device=x.device) <= position).view(1, 1, 1, _CACHE)
        seen = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=visible)
        x = x + functional.all_reduce(self.out(seen.reshape(len(x), -1)), "sum", dist.group.WORLD)
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + functional.all_reduce(self.down(F.silu(gate) * up), "sum", dist.group.WORLD)


def decode(batch: int, device: torch.device) -> Program:
    torch.manual_seed(dist.get_rank())
    block = Block(batch, device).eval()
    x = torch.ones(batch, _HIDDEN, device=device, dtype=torch.bfloat16) / 64
    return Program(block, (x, torch.tensor([7], device=device)), {})


def bert(batch: int, device: torch.device) -> Program:
    from torch.nn.parallel import DistributedDataParallel
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = DistributedDataParallel(BertForMaskedLM(config).to(device))
    tokens = torch.randint(config.vocab_size, (batch, 128), device=device)
    return _training(lambda tokens: model(input_ids=tokens, labels=tokens).loss, model, tokens)


def fsdp2(batch: int, device: torch.device) -> Program:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True, device=device)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    for module in (*model.layers, model):
        fully_shard(module)
    x = torch.rand(batch, 128, 768, device=device)
    return _training(lambda x: model(x).square().mean(), model, x)


def _training(loss: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, x: torch.Tensor) -> Program:
    return Program(loss, (x,), {}, training=True, parameters=list(model.parameters()))


PROGRAMS: dict[str, Callable[[int, torch.device], Program]] = {"decode": decode, "bert": bert, "fsdp2": fsdp2}


def measure(name: str, batch: int, device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    """By way: milliseconds per step, the largest difference from eager, and whether it has torch.compile's bits."""
    program = PROGRAMS[name](batch, device)
    ways = make_ways(program, ["eager", *WAYS])
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    apart: dict[str, float] = {}
    values: dict[str, torch.Tensor] = {}
    for way in ways:
        with way.active(), torch.set_grad_enabled(program.training):
            for _ in range(_WARM):
                found = _value(program.step(way.callable, program.args, {}))
        values[way.name] = found
        apart[way.name] = float((found - values["eager"]).abs().max())
    for way in schedule(ways, rounds):
        with way.active(), torch.set_grad_enabled(program.training):
            program.step(way.callable, program.args, {})
            samples[way.name].append(_block(lambda: program.step(way.callable, program.args, {}), device, steps))  # noqa: B023
    for way in ways:
        if way.trees is not None:
            way.trees.clear()
    torch._dynamo.reset()  # Dynamo limits the compilations of a function; NCCL waits until no graph has a collective
    gc.collect()
    ms = {way: median(found) for way, found in samples.items()}
    if dist.get_rank() == 0:
        print(name, batch, ", ".join(f"{way} {value:.3f} ms" for way, value in ms.items()), flush=True)
    return {
        "program": name,
        "batch": batch,
        "ms": ms,
        "rounds_ms": samples,
        "apart": apart,
        "as_compile": [way for way, value in values.items() if torch.equal(value, values["compile"])],
    }


def _value(outputs: Any) -> torch.Tensor:
    """A copy of the first output."""
    return next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)).detach().float().clone()


def _block(step: Callable[[], object], device: torch.device, steps: int) -> float:
    dist.barrier()
    torch.cuda.synchronize(device)
    begin = perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    took = torch.tensor((perf_counter() - begin) / steps * 1e3, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "names", nargs="*", type=one_of(PROGRAMS), metavar="NAME", help=f"some of {', '.join(PROGRAMS)}; default: all"
    )
    parser.add_argument("--batch", type=int, action="append", help="of each program; may be repeated (default 1 and 8)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50, help="steps in a block (default 50)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where rank 0 writes JSON")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("torchrun starts this: torchrun --nproc-per-node 2 tools/bench/distributed.py")
    if not has_gpu():
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    found = [
        measure(name, batch, device, options.rounds, options.steps)
        for name in options.names or PROGRAMS
        for batch in options.batch or (1, 8)
    ]
    if dist.get_rank() == 0:
        how = {"ranks": dist.get_world_size(), "rounds": options.rounds, "steps": options.steps}
        write_figures(options.out, found, **how)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
