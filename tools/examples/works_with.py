"""Programs of other libraries under CUDA graphs: each runs with torch's own graphs and with ours, and must agree.

usage: python tools/examples/works_with.py [NAMES ...] [--against-upstream]

*generate*: transformers' ``generate`` with a static cache, which compiles with ``mode="reduce-overhead"`` by itself.
*trainer*: transformers' ``Trainer``. *lightning*: a ``LightningModule``. *diffusion*: a sampling loop. *scaler*: mixed
precision with ``GradScaler``. Weights and data are random. The only change in each program is the import.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # if the package is not installed

if "--upstream" in sys.argv:
    os.environ["PYGRAPH_DISABLE"] = "1"  # makes the import below leave torch alone

import torch

import pygraph_trees  # no other change is needed

SEED = 20
STEPS = 12
SIDES = {"upstream": ["--upstream"], "ours": []}
TOLERANCE = 1e-3  # of losses and samples, relative to the largest; tokens must be equal

Values = list[float] | list[int]


def generate(device: str) -> Values:
    """Tokens of a Llama of two layers, by transformers' ``generate`` with a static cache."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_llama()).eval().to(device)
    ids = torch.arange(10, 42, device=device).view(2, 16)
    with torch.no_grad():
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=3 * STEPS,
            min_new_tokens=3 * STEPS,
            do_sample=False,
            cache_implementation="static",
        )
    return [int(token) for token in tokens.flatten()]


def trainer(device: str) -> Values:
    """Losses of a Llama of two layers in transformers' ``Trainer``."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    rows = torch.randint(128, (4 * STEPS, 32))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            torch_compile=True,
            torch_compile_mode="reduce-overhead",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
            seed=SEED,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        run = Trainer(model=LlamaForCausalLM(_llama()), args=arguments, train_dataset=data)
        run.train()
    return [float(entry["loss"]) for entry in run.state.log_history if "loss" in entry]


def lightning(device: str) -> Values:
    """Losses of a perceptron in Lightning's ``Trainer``."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _perceptron()
            self.compiled = torch.compile(self.net, mode="reduce-overhead")
            self.losses: list[float] = []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = (self.compiled(batch) - batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    module = Module()
    run = L.Trainer(
        max_steps=STEPS,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run.fit(module, torch.utils.data.DataLoader(torch.randn(16 * STEPS, 64), batch_size=16))
    return module.losses


def diffusion(device: str) -> Values:
    """A sample of a diffusion model: each step denoises the result of the step before."""

    class Denoiser(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.inner, self.out = (
                torch.nn.Conv2d(*channels, 3, padding=1) for channels in ((3, 32), (32, 32), (32, 3))
            )
            self.time = torch.nn.Linear(1, 32)

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            hidden = torch.nn.functional.silu(self.into(x)) + self.time(time)[:, :, None, None]
            return self.out(torch.nn.functional.silu(self.inner(hidden)))

    denoise = torch.compile(Denoiser().eval().to(device), mode="reduce-overhead")
    sample = torch.randn(2, 3, 16, 16, device=device)
    with torch.no_grad():
        for step in range(STEPS):
            noise = denoise(sample, torch.full((2, 1), 1 - step / STEPS, device=device))
            sample = sample - noise / STEPS
    return [float(value) for value in sample.flatten()[:64]]


def scaler(device: str) -> Values:
    """Losses of a perceptron in mixed precision, with ``GradScaler`` and ``autocast``."""
    net = _perceptron().to(device)
    compiled = torch.compile(net, mode="reduce-overhead")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scale = torch.amp.GradScaler(device)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    losses = []
    for batch in torch.randn(STEPS, 16, 64, device=device):
        with torch.autocast(device, dtype=dtype):
            loss = (compiled(batch) - batch).square().mean()
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PROGRAMS: dict[str, Callable[[str], Values]] = {
    program.__name__: program for program in (generate, trainer, lightning, diffusion, scaler)
}


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _perceptron() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))


def run(name: str, device: str) -> dict[str, Any]:
    """A program's values, and the replays and recordings of our graphs."""
    torch.manual_seed(SEED)
    torch._dynamo.reset()
    before = pygraph_trees.report().replays
    values = PROGRAMS[name](device)
    report = pygraph_trees.report()
    return {
        "values": values,
        "replays": report.replays - before,
        "copied_bytes": sum(f.recordings[-1].copied_bytes for f in report.functions if f.recordings),
    }


def agree(ours: Values, upstreams: Values) -> bool:
    """Whether tokens are equal, or numbers within the tolerance."""
    one, other = torch.tensor(ours), torch.tensor(upstreams)
    if one.shape != other.shape or not ours:
        return False
    allowed = TOLERANCE * max(1.0, other.abs().max().item()) if other.is_floating_point() else 0.0
    return torch.allclose(one, other, rtol=0, atol=allowed)


def run_both_ways(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """What this script writes with upstream's graphs and with ours, each in a process of its own.

    Raises:
        SystemExit: a process failed.
    """
    found = {}
    environment = {name: value for name, value in os.environ.items() if name != "PYGRAPH_DISABLE"}
    with tempfile.TemporaryDirectory() as folder:
        for side, way in SIDES.items():
            print(f"--- {side}", flush=True)
            out = Path(folder) / f"{side}.json"
            command = [sys.executable, __file__, *arguments, *way, "--json", str(out)]
            status = subprocess.run(command, env=environment).returncode
            if status:
                print(f"{side}: the process ended with {status}", file=sys.stderr)
                sys.exit(2)
            found[side] = json.loads(out.read_text(encoding="utf-8"))
    return found


def compare(names: list[str], options: argparse.Namespace) -> int:
    """Runs programs both ways; returns 1 if one differs."""
    found = run_both_ways([*names, "--device", options.device])
    same = {name: agree(found["ours"][name]["values"], found["upstream"][name]["values"]) for name in names}
    for name in names:
        ours = found["ours"][name]
        state = "the same" if same[name] else "DIFFERENT"
        print(f"{name:10} {state}; {ours['replays']} replays, {ours['copied_bytes']} bytes copied at each")
    options.json.write_text(json.dumps({**found, "same": same}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(same.values()) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAMES", help=f"some of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="on cpu there are no graphs")
    parser.add_argument("--json", type=Path, metavar="FILE", default=os.devnull, help="where to write the values")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--upstream", action="store_true", help="torch's own CUDA graphs, without pygraph_trees")
    ways.add_argument("--against-upstream", action="store_true", help="both, and whether they agree")
    options = parser.parse_args(argv)
    names = options.names or list(PROGRAMS)
    if unknown := sorted(set(names) - set(PROGRAMS)):
        parser.error(f"there is no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; with --device cpu it runs without CUDA graphs")
    if options.against_upstream:
        return compare(names, options)
    figures = {}
    for name in names:
        figures[name] = run(name, options.device)
        shown = ", ".join(f"{value:.5g}" for value in figures[name]["values"][:6])
        print(f"{name}: {shown}, ...", flush=True)
    options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
