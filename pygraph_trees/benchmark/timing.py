"""Clocks for calls, synchronised and streamed, and the order in which ways alternate; README.md has the protocols.

The garbage collector is off while a clock runs. A call's outputs are dropped before the next call. Exceptions of a call
are raised. :func:`call_until_chosen` makes the calls before the measured ones.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pygraph_trees.indirection.route_rule import REPLAYS
from pygraph_trees.report.log import journal
from pygraph_trees.trees.pools.collector import paused

T = TypeVar("T")

STEADY_CALLS = 4
CALLS = 2 * REPLAYS  # calls with new addresses, within which a route is chosen
_MOST_S = 3.0  # limit of the time, for programs with long calls
_AWAITED_S = 60.0  # time in which a chosen table has to be in use


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measurement. More rounds and longer blocks give steadier figures."""

    rounds: int = 7
    block_s: float = 0.2  # duration of one block of calls
    calls: tuple[int, int] = (10, 200)  # fewest and most calls in a block
    settle_calls: int = 3  # un-timed calls at the start of each block
    warm_calls: tuple[int, int] = (8, 40)  # fewest and most calls until a way counts as steady
    ring: int = 8  # sets of inputs in the "fresh" regime
    fresh_caches: bool = True  # each way compiles for itself; only choices found by benchmark are shared
    inspect: bool = True  # profile, count recordings and memory, after the timing

    def block_calls(self, steady_s: float) -> int:
        """The number of calls in a block, given the time of one."""
        fewest, most = self.calls
        return max(fewest, min(most, round(self.block_s / max(steady_s, 1e-9))))


def synchroniser(device: torch.device) -> Callable[[], None]:
    """Waits for all work on ``device``; does nothing for the CPU."""
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collects garbage now, and not while the block runs."""
    gc.collect()
    with paused():
        yield


def timed_call(call: Callable[[T], object], inputs: T, wait: Callable[[], None]) -> tuple[float, float]:
    """Seconds until one call is done, and until it returns, with the GPU idle before it."""
    clock = time.perf_counter_ns
    wait()
    start = clock()
    call(inputs)
    returned = clock()
    wait()
    return (clock() - start) * 1e-9, (returned - start) * 1e-9


def time_block(
    call: Callable[[T], object], inputs: Iterator[T], calls: int, settle: int, wait: Callable[[], None]
) -> dict[str, float]:
    """Makes ``settle`` un-timed, ``calls`` synchronised and ``calls`` streamed calls; gives a measurement's figures."""

    def stream(given: Iterable[T]) -> None:
        for each in given:
            call(each)

    feed = [next(inputs) for _ in range(settle + 2 * calls)]
    stream(feed[:settle])
    with collector_off():
        latency_s, host_s = zip(*(timed_call(call, each, wait) for each in feed[settle : settle + calls]), strict=True)
        streamed_s, _ = timed_call(stream, feed[settle + calls :], wait)
    return {
        "latency_ms": statistics.median(latency_s) * 1e3,
        "latency_p90_ms": statistics.quantiles(latency_s, n=10, method="inclusive")[-1] * 1e3,
        "throughput_ms": streamed_s / calls * 1e3,
        "host_us": statistics.median(host_s) * 1e6,
    }


def schedule(items: Sequence[T], rounds: int) -> list[T]:
    """Each item once a round; every second round reverses the one before, and each pair starts one item later."""
    order: list[T] = []
    for number in range(rounds):
        start = number // 2 % len(items) if items else 0
        turn = [*items[start:], *items[:start]]
        order += reversed(turn) if number % 2 else turn
    return order


def is_steady(durations: Sequence[float], recordings: Sequence[int]) -> bool:
    """Whether the last calls took about the same time and recorded nothing, given the recordings after each call."""
    if len(durations) <= STEADY_CALLS:
        return False
    usual = statistics.median(durations[-2 * STEADY_CALLS :])
    quiet = len(set(recordings[-STEADY_CALLS - 1 :])) == 1
    return quiet and all(d <= 1.25 * usual for d in durations[-STEADY_CALLS:])


def call_until_chosen(call: Callable[[], Any], first: int, share: float = 1.0) -> None:
    """Calls a program until the routes of its inputs are chosen and in use, within a limit of calls and time.

    ``first`` is the number of its first function in the report, and ``share`` the fraction of calls whose inputs have
    moved since the previous call; with 0 nothing is chosen.
    """
    calls = CALLS / share if share else CALLS
    began = time.monotonic()
    for number in itertools.count(1):
        call()
        spent_s = time.monotonic() - began
        is_long_enough = spent_s >= _MOST_S or (number >= calls and number % REPLAYS == 0)
        if is_long_enough and (spent_s >= _AWAITED_S or not any(f.awaits_table for f in journal.functions[first:])):
            return
