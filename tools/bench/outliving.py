"""Programs whose outputs outlive their step: ours as they are, upstream with the clones and marks that it needs.

usage: python tools/bench/outliving.py [NAMES ...] [--rounds N] [--calls N] [--out FILE]

Upstream's graphs overwrite outputs, so these programs raise as they are. With upstream, outputs are cloned and steps
marked; a model that caches tensors fills its cache un-graphed first. ``torch.compile`` without graphs runs them as they
are, as ours does. All alternate in rounds of steps that nothing waits for. Figures are medians over rounds, in ms a
step; *apart* is the largest difference from eager's values. The file has each round's time, and the recordings and
un-graphed calls of ours in it.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch
from torch import nn
from torch._inductor.cudagraph_trees import MarkStepBox

import pygraph_trees
from bench.figures import has_gpu, options_of, write_figures
from pygraph_trees.benchmark.program import Program
from pygraph_trees.benchmark.settling import call_until_chosen, functions_so_far
from pygraph_trees.benchmark.timing import collector_off, schedule
from pygraph_trees.benchmark.ways import Way, make_ways

_WAYS = ("eager", "compile", "upstream", "ours")
_WARM = 12  # steps before the rounds
_SETTLE = 3  # un-timed steps at the start of each block
_DEVICE = torch.device("cuda")

# One step with what torch.compile returned; the second argument is whether to do what upstream needs.
Step = Callable[[Any, bool], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """The function to compile, and a step of the program, which returns values to compare."""

    fn: Callable[..., Any]
    step: Step


def levit() -> Case:
    """A model from timm that caches a tensor in its first call."""
    import timm

    model = timm.create_model("levit_256", pretrained=False).to(_DEVICE).eval()
    x = torch.randn(8, 3, 224, 224, device=_DEVICE)
    is_filled = False

    @torch.no_grad()
    def step(compiled: Any, careful: bool) -> torch.Tensor:
        nonlocal is_filled
        if careful and not is_filled:
            model(x)
            is_filled = True
        outputs: torch.Tensor = compiled(x)
        return outputs

    return Case(model, step)


def optimizer() -> Case:
    """A compiled training step with AdamW; the gradients of the last three steps are kept."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(_DEVICE)
    rate = torch.full((), 1e-9, device=_DEVICE)  # 0 makes AdamW divide by 0
    adamw = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, capturable=True)
    batch = torch.randn(4, 64, 512, device=_DEVICE)
    kept: list[Any] = []

    def train(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        adamw.step()
        return loss

    def step(compiled: Any, careful: bool) -> torch.Tensor:
        if careful:
            torch.compiler.cudagraph_mark_step_begin()
        loss: torch.Tensor = compiled(batch).detach()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        kept.append([gradient.clone() for gradient in gradients] if careful else gradients)
        del kept[:-3]
        adamw.zero_grad()
        return loss.clone() if careful else loss

    return Case(train, step)


def state() -> Case:
    """A state that is passed on through 32 calls and kept after each."""
    cell = nn.GRUCell(256, 256).to(_DEVICE)
    inputs = torch.randn(32, 64, 256, device=_DEVICE).unbind()

    @torch.no_grad()
    def step(compiled: Any, careful: bool) -> torch.Tensor:
        hidden = torch.zeros(64, 256, device=_DEVICE)
        states = []
        for x in inputs:
            if careful:
                torch.compiler.cudagraph_mark_step_begin()
                hidden = compiled(x, hidden).clone()
            else:
                hidden = compiled(x, hidden)
            states.append(hidden)
        return torch.stack(states)

    return Case(cell, step)


def decoder() -> Case:
    """A decoder block that returns its caches, which are inputs of the next of 32 calls."""
    width, heads, length = 1024, 16, 512
    project, out = nn.Linear(width, 3 * width).to(_DEVICE), nn.Linear(width, width).to(_DEVICE)
    first = torch.randn(4, 1, width, device=_DEVICE)
    empty = [torch.zeros(4, heads, length, width // heads, device=_DEVICE) for _ in range(2)]
    positions = torch.arange(32, device=_DEVICE).unbind()

    def block(
        x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (part.view(4, heads, 1, -1) for part in project(x).chunk(3, dim=-1))
        index = position.view(1)
        keys, values = keys.index_copy(2, index, key), values.index_copy(2, index, value)
        weights = (query @ keys.mT / 8).masked_fill(torch.arange(length, device=x.device) > position, float("-inf"))
        return x + out((weights.softmax(-1) @ values).reshape(4, 1, width)).tanh(), keys, values

    @torch.no_grad()
    def step(compiled: Any, careful: bool) -> torch.Tensor:
        x, (keys, values), outputs = first, empty, []
        for position in positions:
            if careful:
                torch.compiler.cudagraph_mark_step_begin()
                x, keys, values = (tensor.clone() for tensor in compiled(x, keys, values, position))
            else:
                x, keys, values = compiled(x, keys, values, position)
            outputs.append(x)
        return torch.stack(outputs)

    return Case(block, step)


CASES: dict[str, Callable[[], Case]] = {case.__name__: case for case in (levit, optimizer, state, decoder)}


def measure(name: str, rounds: int, calls: int) -> dict[str, Any]:
    """Milliseconds per step and the difference from eager's values, by way."""
    made: list[tuple[Way, Step]] = []
    for way in _WAYS:  # each has a model of its own: upstream's must not find what another way cached
        torch.manual_seed(0)
        case = CASES[name]()
        made += [(one, case.step) for one in make_ways(Program(case.fn), [way])]
    steps: dict[str, Callable[[], torch.Tensor]] = {
        way.name: functools.partial(step, way.callable, way.name == "upstream") for way, step in made
    }
    ways = [way for way, _ in made]
    apart: dict[str, float] = {}
    wanted = torch.empty(())
    marks: dict[str, int] = {}
    for way in ways:
        first, step = functions_so_far(), steps[way.name]
        with way.active(), _own_marks(marks, way.name):
            for _ in range(_WARM):
                found = step().double().clone()
            call_until_chosen(step, first)
        if way.name == "eager":
            wanted = found
        apart[way.name] = float((found - wanted).abs().max())
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    besides: dict[str, list[int]] = {"recordings": [], "ungraphed": []}  # of ours, by round
    for _, way in schedule(ways, rounds):
        before = pygraph_trees.report()
        with way.active(), _own_marks(marks, way.name):
            samples[way.name].append(_block(steps[way.name], calls))
        if way.name == "ours":
            after = pygraph_trees.report()
            besides["recordings"].append(after.recordings - before.recordings)
            besides["ungraphed"].append(_ungraphed(after) - _ungraphed(before))
    ms = {way: statistics.median(found) for way, found in samples.items()}
    return {"program": name, "ms": ms, "apart": apart, "rounds_ms": samples, "besides": besides}


def _ungraphed(report: pygraph_trees.Report) -> int:
    return sum(function.ungraphed_calls for function in report.functions)


@contextlib.contextmanager
def _own_marks(marks: dict[str, int], way: str) -> Iterator[None]:
    """Gives a way its own count of marks: once a step is marked, steps begin only at marks."""
    MarkStepBox.mark_step_counter = marks.get(way, 0)
    try:
        yield
    finally:
        marks[way], MarkStepBox.mark_step_counter = MarkStepBox.mark_step_counter, 0


def _block(step: Callable[[], torch.Tensor], calls: int) -> float:
    """Milliseconds per step; outputs of the step before are alive."""
    outputs: Any = None
    for _ in range(_SETTLE):
        outputs = step()
    with collector_off():
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            outputs = step()
        torch.cuda.synchronize()
        took = time.perf_counter_ns() - start
    del outputs
    return took / calls / 1e6


def line(found: dict[str, Any]) -> str:
    """One line of the table."""
    ms = found["ms"]
    times = ", ".join(f"{way} {ms[way]:.3f}" for way in _WAYS)
    return (
        f"{found['program']:12} {times} ms; {ms['upstream'] / ms['ours']:.2f}x over upstream, "
        f"{ms['compile'] / ms['ours']:.2f}x over torch.compile; apart {found['apart']['ours']:.1e}"
    )


def main() -> int:
    options = options_of(__doc__, list(CASES), rounds=7, calls=20)
    if unknown := [name for name in options.names if name not in CASES]:
        print(f"there is no program {unknown[0]!r}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    if not has_gpu():
        return 2
    results = []
    for name in options.names:
        results.append(measure(name, options.rounds, options.calls))
        print(line(results[-1]), flush=True)
        write_figures(options.out, results, rounds=options.rounds, calls=options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
