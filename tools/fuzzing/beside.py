"""Calls at the same time as a case's own call, on other streams or in other threads, without any order between them.

The inputs and eager's results are ready before. A call on a stream is queued after a delay on that stream, so the GPU
runs it during the case's own call. A thread has a stream of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from .elsewhere import DELAY, own_trees
from .inner import Ready, Target, made_ready, run_target
from .observation import Inside, Observation, observe

_FIRST_SEED = 5000  # other values than those of other calls


class Beside:
    """The calls beside those of one runner.

    Args:
        wanted: a place ("stream" or "thread") and the name of the function for each.
    """

    def __init__(
        self, wanted: Sequence[tuple[str, str]], targets: Mapping[str, Target], device: torch.device, backward: bool
    ) -> None:
        self._device, self._backward = device, backward
        stream = torch.cuda.Stream if device.type == "cuda" else lambda _: None
        self._calls = [(place, targets[name], stream(device)) for place, name in wanted]
        self._ready: list[Ready] = []
        self.seen: list[Inside] = []

    def prepare(self, call: int) -> None:
        self._ready = [
            made_ready(target, _FIRST_SEED + call * len(self._calls) + i, self._device, self._backward)
            for i, (_, target, _) in enumerate(self._calls)
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Starts the prepared calls; at the end of the block, waits for them and observes them."""
        self.seen = []
        if not self._ready:
            yield
            return
        with ThreadPoolExecutor(len(self._calls)) as pool:
            waiting = [self._start(pool, n, ready) for n, ready in enumerate(self._ready)]
            yield
            for (place, _, stream), ready, begun in zip(self._calls, self._ready, waiting, strict=False):
                found = begun.result() if isinstance(begun, Future) else self._observed(stream, ready, begun)
                self.seen.append(Inside(f"a call at the same time on another {place}", found, ready.wanted))
                if stream is not None:
                    torch.cuda.current_stream(self._device).wait_stream(stream)
        self._ready = []

    def _start(self, pool: ThreadPoolExecutor, number: int, ready: Ready) -> Any:
        place, target, stream = self._calls[number]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))

        def call() -> Any:
            with torch.cuda.stream(stream):  # nothing, if it is None
                if stream is not None:
                    torch.cuda._sleep(DELAY)
                return run_target(target, ready.given, self._backward)

        def in_thread() -> Observation:
            with own_trees(self._device):
                return self._observed(stream, ready, call())

        return pool.submit(in_thread) if place == "thread" else call()

    def _observed(self, stream: torch.cuda.Stream | None, ready: Ready, made: Any) -> Observation:
        with torch.cuda.stream(stream):
            return observe(ready.memory.case.returns, *made, ready.memory)
