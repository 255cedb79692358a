"""Programs that run on several ranks, and compare each step with eager: ``torchrun ranks.py NAME``.

A program is called on each rank and raises if a value differs. ``--device cpu`` runs it with gloo and without graphs.
Rank 0 prints the facts of the report as JSON: recordings made by the end of each step, their reasons, replays,
un-graphed calls and copied bytes.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("PYGRAPH_SELECTIVE", "always")

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

import pygraph_trees

STEPS = 12
WIDTH = 512  # a layer takes 1 MB, so that data parallelism has several buckets
Program = Callable[[torch.device], None]
PROGRAMS: dict[str, Program] = {}
_recordings: list[int] = []  # in all, after each step


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


class Block(nn.Module):
    """A module that is not torch's: Dynamo compiles no functions of torch after a graph break in a parallel wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Layers(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def layers(device: torch.device, depth: int = 3) -> Layers:
    torch.manual_seed(0)
    return Layers(depth).to(device)


def graphed(fn: Callable[..., object]) -> Callable[..., torch.Tensor]:
    return torch.compile(fn, mode="reduce-overhead")


def batches(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(16, WIDTH, generator=generator).to(device) for _ in range(STEPS)]


def close(found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4, msg=lambda text: f"{where}: {text}")


def after_step() -> None:
    _recordings.append(pygraph_trees.report().recordings)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the values of all shards."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(ours: nn.Module, eager: nn.Module, device: torch.device, call: Callable[..., torch.Tensor]) -> None:
    """Trains both with the same batches; losses and parameters must stay equal."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, eager)]
    for step, batch in enumerate(batches(device)):
        losses = []
        for forward, optimizer in zip((call, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss = forward(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        close(losses[0], losses[1], f"step {step}, loss")
        for (name, one), other in zip(ours.named_parameters(), eager.parameters(), strict=True):
            close(whole(one.detach()), whole(other.detach()), f"step {step}, {name}")
        after_step()


@program
def data_parallel(device: torch.device) -> None:
    from torch.nn.parallel import DistributedDataParallel

    made = [DistributedDataParallel(layers(device, depth=8), bucket_cap_mb=2) for _ in range(2)]
    train(made[0], made[1], device, graphed(made[0]))


@program
def fully_sharded(device: torch.device) -> None:
    """FSDP2: each block is compiled alone, and its parameters are gathered at other addresses."""
    from torch.distributed.fsdp import fully_shard

    made = [layers(device) for _ in range(2)]
    for block in made[0].blocks:
        block.compile(mode="reduce-overhead")
    for model in made:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    train(made[0], made[1], device, made[0])


@program
def tensor_parallel(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    single = layers(device, depth=2)
    plan = {"blocks.0.linear": ColwiseParallel(), "blocks.1.linear": RowwiseParallel()}
    parallel = parallelize_module(copy.deepcopy(single), mesh, plan)
    call = graphed(parallel)
    torch.manual_seed(3)  # the same batches on all ranks
    with torch.no_grad():
        for step in range(STEPS):
            batch = torch.randn(16, WIDTH, device=device)
            close(call(batch), single(batch), f"step {step}")
            after_step()


@program
def collective_inside(device: torch.device) -> None:
    from torch.distributed import _functional_collectives as functional

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        summed = functional.all_reduce(x @ weight, "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(summed.tanh(), 0, dist.group.WORLD)
        return gathered * 2 + 1

    call, weight = graphed(fn), torch.eye(WIDTH, device=device) * 0.5
    with torch.no_grad():
        for step, batch in enumerate(batches(device)):
            close(call(batch, weight), fn(batch, weight), f"step {step}")
            after_step()


@program
def collective_of_an_input(device: torch.device) -> None:
    """It is copied, since the collective holds its address; other inputs, and what they are computed to, are not."""
    from torch.distributed import _functional_collectives as functional

    def fn(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        whole = functional.all_gather_tensor(shard, 0, dist.group.WORLD)
        return x[: len(whole)] * whole + functional.all_reduce(x[0] * 2, "sum", dist.group.WORLD)

    call = graphed(fn)
    with torch.no_grad():
        for step, batch in enumerate(batches(device)):
            shard = torch.full((2, WIDTH), 1.0 + step + dist.get_rank(), device=device)
            close(call(batch, shard), fn(batch, shard), f"step {step}")
            after_step()


@program
def collective_between(device: torch.device) -> None:
    """A collective reads a graph's output on another stream, while the current stream goes on."""
    call = graphed(lambda x: (x * 2).sin())
    with torch.no_grad():
        for step, batch in enumerate(batches(device)):
            wanted = (batch * 2).sin()
            dist.all_reduce(wanted)
            found = call(batch)
            work = dist.all_reduce(found, async_op=True)
            torch.ones(1 << 20, device=device).cumsum(0)
            work.wait()
            close(found, wanted, f"step {step}")
            after_step()


@program
def a_rank_raises(device: torch.device) -> None:
    """Rank 1 raises in the middle of a step; the other ranks must end too."""
    _until_rank_1_leaves(device, ZeroDivisionError("rank 1 leaves"))


@program
def a_rank_dies(device: torch.device) -> None:
    """Rank 1 ends in the middle of a step, without any cleanup; the other ranks must end too."""
    _until_rank_1_leaves(device, None)


def _until_rank_1_leaves(device: torch.device, error: Exception | None) -> None:
    call = graphed(lambda x: (x * 2).sin())
    for step, batch in enumerate(batches(device)):
        if step == 4 and dist.get_rank() == 1:
            if error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise error
        found = call(batch)
        dist.all_reduce(found)
        if device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=40))
    begin = time.perf_counter()
    PROGRAMS[options.name](device)
    report = pygraph_trees.report()
    if rank == 0:
        newest = [function.recordings[-1] for function in report.functions if function.recordings]
        facts = {
            "functions": len(report.functions),
            "recordings": _recordings,
            "reasons": [recording.reason for function in report.functions for recording in function.recordings],
            "replays": report.replays,
            "ungraphed": sum(function.ungraphed_calls for function in report.functions),
            "why": sorted({function.why_ungraphed for function in report.functions if function.ungraphed_calls}),
            "copied": sum(recording.copied_bytes for recording in newest),
            "why copied": sorted({str(i.why_copied) for r in newest for i in r.inputs if i.copied_bytes}),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        print(f"FACTS {json.dumps(facts)}", flush=True)
    torch._dynamo.reset()  # NCCL waits until no graph has captured a collective
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
