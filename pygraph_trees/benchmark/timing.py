"""Clocks: how long calls take, by three protocols, and the order in which ways take turns.

- *synchronised*: wait for the GPU before and after each call. The time until the call returned is the host time of a
  call whose GPU is idle, the time until the GPU is done is its latency.
- *streamed*: call after call without waiting, one wait at the end. The time over the number of calls is the
  throughput.
- *interleaved*: ways and regimes take turns in rounds, in an order that changes from round to round, so that drifts of
  clocks and temperature fall on all of them alike.

The garbage collector is off while a clock runs. What a call returns is dropped before the next one.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. More rounds and longer blocks give steadier figures."""

    rounds: int = 7
    block_s: float = 0.2  # how long one block of calls should take
    calls: tuple[int, int] = (10, 200)  # fewest and most calls in a block
    settle_calls: int = 3  # un-timed calls at the start of each block
    warm_calls: tuple[int, int] = (8, 40)  # fewest and most calls until a way counts as steady
    ring: int = 8  # sets of inputs in the "fresh" regime
    fresh_caches: bool = True  # each way compiles for itself; only choices found by benchmark are shared
    inspect: bool = True  # profile, count recordings and memory, after the timing

    def block_calls(self, steady_s: float) -> int:
        """How many calls make a block, given how long one takes."""
        fewest, most = self.calls
        return max(fewest, min(most, round(self.block_s / max(steady_s, 1e-9))))


QUICK = Plan(rounds=3, block_s=0.1)
FULL = Plan(rounds=15, block_s=0.3)


@dataclass(frozen=True, slots=True)
class Block:
    """The calls of one block: seconds each, and seconds a call without waiting."""

    latency_s: tuple[float, ...]
    host_s: tuple[float, ...]
    throughput_s: float


def synchroniser(device: torch.device) -> Callable[[], None]:
    """Waits for all work on ``device``; does nothing for the CPU."""
    if device.type != "cuda":
        return _nothing
    return lambda: torch.cuda.synchronize(device)


def _nothing() -> None:
    pass


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collects garbage now, and not while the block runs."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def timed_call(call: Callable[[S], object], inputs: S, wait: Callable[[], None]) -> tuple[float, float]:
    """Seconds until one call is done, and until it returned, with the GPU idle before it."""
    clock = time.perf_counter_ns
    wait()
    start = clock()
    call(inputs)
    returned = clock()
    wait()
    return (clock() - start) * 1e-9, (returned - start) * 1e-9


def time_block(
    call: Callable[[S], object], inputs: Iterator[S], calls: int, settle: int, wait: Callable[[], None]
) -> Block:
    """``settle`` un-timed calls, ``calls`` synchronised ones, ``calls`` streamed ones."""
    feed = [next(inputs) for _ in range(settle + 2 * calls)]
    for each in feed[:settle]:
        call(each)
    with collector_off():
        timed = [timed_call(call, each, wait) for each in feed[settle : settle + calls]]
        streamed = feed[settle + calls :]
        wait()
        start = time.perf_counter_ns()
        for each in streamed:
            call(each)
        wait()
        throughput_s = (time.perf_counter_ns() - start) * 1e-9 / calls
    return Block(tuple(latency for latency, _ in timed), tuple(host for _, host in timed), throughput_s)


def schedule(items: Sequence[T], rounds: int) -> list[tuple[int, T]]:
    """Each item once a round; a round starts elsewhere than the one before, and every second one runs backwards."""
    order: list[tuple[int, T]] = []
    for number in range(rounds):
        turn = list(reversed(items)) if number % 2 else list(items)
        start = number % len(items) if items else 0
        order += [(number, item) for item in (*turn[start:], *turn[:start])]
    return order


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, between neighbours by proportion; raises on no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def is_steady(durations: Sequence[float], recordings: Sequence[int], window: int = 4) -> bool:
    """Whether the last ``window`` calls took about the same time and recorded nothing.

    ``recordings[i]`` is how many recordings there were after call ``i``.
    """
    if len(durations) <= window:
        return False
    usual = median(durations[-2 * window :])
    quiet = len(set(recordings[-window - 1 :])) == 1
    return quiet and all(d <= 1.25 * usual for d in durations[-window:])
