"""A server of 8 threads, or a training loop, for minutes or hours: memory, recordings and the slowest calls.

usage: python tools/bench/soak.py {server,training} [--minutes N] [--warm SECONDS] [--out FILE]

Once warm, the process may use at most 1% more memory of the host and of the GPU, and must record nothing; otherwise the
exit status is 1. With ``--out``, the run is added to the file's results. README.md describes the programs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

import pygraph_trees
from bench.figures import write_figures

THREADS, PAUSE_S = 8, 0.02  # of the server: each thread waits for so long on average before a request
WIDTH, SIZES = 256, (1, 2, 4, 8, 16, 32)  # of the model, and numbers of sequences in a request
SAMPLE_S, MOST_GROWTH = 5.0, 0.01
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
finish = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None

Times = list[float]
Loop = Callable[[threading.Event, Times], None]  # appends the seconds of each call until the event is set


def used_bytes() -> dict[str, int]:
    """Resident memory of this process, and what torch and, in all, the GPU's driver have given out."""
    host = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free, total = (0, 0) if DEVICE == "cpu" else torch.cuda.mem_get_info()
    return {"host": host, "torch": torch.cuda.memory_allocated(), "GPU": total - free}


def recordings() -> int:
    return sum(len(function.recordings) for function in pygraph_trees.report().functions)


def model() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 512, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(DEVICE)


def server() -> list[Loop]:
    """Threads that send requests of several sizes to one model, and keep the latest answers for a while."""
    compiled = torch.compile(model().eval(), mode="reduce-overhead", dynamic=False)

    def answer(size: int) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = compiled(torch.randn(size, 64, WIDTH, device=DEVICE))
        finish()
        return found

    def serve(number: int, over: threading.Event, times: Times) -> None:
        drawn, kept = random.Random(number), []
        while not over.wait(drawn.expovariate(1 / PAUSE_S)):
            begin = time.perf_counter()
            kept.append(answer(drawn.choice(SIZES)))
            times.append(time.perf_counter() - begin)
            del kept[: -drawn.randrange(1, 5)]

    for size in SIZES * 3:  # compiled by one thread
        answer(size)
    return [functools.partial(serve, number) for number in range(THREADS)]


def training() -> list[Loop]:
    """Steps of a small transformer with AdamW on new batches; the losses of some steps are kept."""
    net = model()
    compiled: Any = torch.compile(net, mode="reduce-overhead", dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def run(over: threading.Event, times: Times) -> None:
        kept: list[torch.Tensor] = []
        while not over.is_set():
            x = torch.randn(16, 64, WIDTH, device=DEVICE)
            begin = time.perf_counter()
            loss = compiled(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            finish()
            times.append(time.perf_counter() - begin)
            kept = [*kept[-20:], loss.detach()]

    return [run]


def soak(loops: list[Loop], seconds: float, warm_s: float) -> dict[str, Any]:
    """Runs the loops, each in a thread, and returns what they and the samples showed after ``warm_s``."""
    over, times = threading.Event(), [[] for _ in loops]  # type: tuple[threading.Event, list[Times]]
    with ThreadPoolExecutor(len(loops)) as threads, contextlib.ExitStack() as stack:
        stack.callback(over.set)
        running = [threads.submit(loop, over, own) for loop, own in zip(loops, times, strict=True)]
        over.wait(warm_s)
        first, before, begun = used_bytes(), recordings(), time.monotonic()
        for own in times:
            own.clear()
        most = first
        while time.monotonic() - begun < seconds and not any(one.done() for one in running):
            over.wait(min(SAMPLE_S, seconds))
            most = {name: max(most[name], value) for name, value in used_bytes().items()}
    for one in running:
        one.result()  # raises what ended a loop
    found = sorted(each for own in times for each in own)
    return {
        "seconds": round(time.monotonic() - begun),
        "calls": len(found),
        "recordings": recordings() - before,
        "growth": {name: round(most[name] / first[name] - 1, 4) for name in first if first[name]},
        "median_us": round(statistics.median(found) * 1e6),
        "p99.9_us": round(found[int(len(found) * 0.999)] * 1e6),
        "longest_us": round(found[-1] * 1e6),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("program", choices=("server", "training"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=60.0, metavar="SECONDS", help="before anything counts")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    loops = server() if options.program == "server" else training()
    found = {"program": options.program, **soak(loops, options.minutes * 60, options.warm)}
    print(json.dumps(found))
    if options.out is not None:
        earlier = json.loads(options.out.read_text())["results"] if options.out.exists() else []
        write_figures(options.out, [*earlier, found])
    return int(found["recordings"] > 0 or max(found["growth"].values()) > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
