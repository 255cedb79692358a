"""Updates that the program captures in CUDA graphs of its own, as LeanRL does: a way of ``training_loops.py``.

A graph contains an update's forward, which is compiled without CUDA graphs, its backward and its optimizer's step. Each
call copies its batch into the memory that the graph reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench.trained_models import Update


class Done:
    """Replaces a loss or an optimizer: the graph has done its work."""

    def __add__(self, _: object) -> Done:
        return self

    def nothing(self) -> None: ...

    backward = step = zero_grad = nothing


class CapturedUpdate:
    """A function whose call does the whole update; on a CPU, without compilation and without a graph."""

    def __init__(self, fn: Any) -> None:
        self._fn = fn
        self._replay: Callable[[], None] | None = None

    def of(self, update: Update) -> Update:
        """The update, for a loop whose calls of this function do all of it."""
        self._update = update
        return dataclasses.replace(update, optimizer=Done(), after=Done().nothing)  # type: ignore[arg-type]

    def __call__(self, *batch: torch.Tensor) -> Any:
        if self._replay is None:
            self._batch = [tensor.clone() for tensor in batch]
            self._replay = self._captured() if batch[0].is_cuda else self._work
        torch._foreach_copy_(self._batch, batch)
        self._replay()
        return (Done(),) * self._count if self._count > 1 else Done()

    def _captured(self) -> Callable[[], None]:
        self._fn, graph, side = torch.compile(self._fn), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # autograd notes the stream of each parameter's first use
            for _ in range(3):
                self._work()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            self._work()
        return graph.replay

    def _work(self) -> None:
        self._update.optimizer.zero_grad(set_to_none=False)
        losses = self._fn(*self._batch)
        losses = losses if isinstance(losses, tuple) else (losses,)
        self._count = len(losses)
        torch.stack(losses).sum().backward()
        self._update.optimizer.step()
        self._update.after()
