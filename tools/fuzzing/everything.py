"""Turns on what is off by default: kernels side by side, with random delays, and calls that skip Dynamo's guards.

Each such call checks them. Two things show missing edges: spin kernels before a random half of the operations, and
intermediate results that are overwritten when a graph ends. Otherwise, correct ones of an earlier replay could be read.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph_trees.edges import branches
from pygraph_trees.edges.branches import noting
from pygraph_trees.edges.operations import Operations
from pygraph_trees.edges.streams import Streams
from pygraph_trees.indirection.live_input import bytes_at
from pygraph_trees.trees.hooks import direct_calls
from pygraph_trees.trees.recordings import captured_graph

CHAIN = "ours:chain"  # a way: the kernels of "ours" in the captured order

ENVIRONMENT: Mapping[str, str] = {"PYGRAPH_ENTRY": "check", "PYGRAPH_BRANCHES": "always"}
_LONGEST_CYCLES = 100_000  # about 50 us
_NAN = 0xFF  # bytes; repeated, they are not a number in all formats, and -1 as an integer


def delayed(seed: int) -> Any:
    """A patch: operations on lanes get their delays."""
    chance, run = random.Random(seed), Streams.run

    def delayed_run(streams: Streams, lane: int, call: Callable[[int], Any]) -> Any:
        def after_delay(stream: int) -> Any:
            if chance.random() < 0.5:
                torch.cuda._sleep(chance.randrange(1, _LONGEST_CYCLES))
            return call(stream)

        return run(streams, lane, after_delay)

    return mock.patch.object(Streams, "run", delayed_run)


def poisoned() -> Any:
    """A patch: the last operations of each graph on lanes overwrite its intermediate results."""
    return mock.patch.object(captured_graph, "noting", _poisoning)


@contextlib.contextmanager
def _poisoning(*args: Any, **kwargs: Any) -> Iterator[Any]:
    with noting(*args, **kwargs) as branching:
        yield branching
        for operations in [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Operations)]:
            device = torch.device("cuda", torch.cuda.current_device())
            for start, end in freed(operations):
                bytes_at(start, end - start, device).fill_(_NAN)


def freed(operations: Operations) -> list[tuple[int, int]]:
    """The ranges of addresses in graph pools that the operations have written and that are free again."""
    segments = [segment for segment in torch.cuda.memory_snapshot() if any(segment["segment_pool_id"])]
    free = [block for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    written = {(access.start, access.end) for found in operations.found for access in found.declared if access.write}
    overlaps = {
        (max(start, block["address"]), min(end, block["address"] + block["size"]))
        for block in free
        for start, end in written
    }
    return sorted((start, end) for start, end in overlaps if start < end)


def in_order() -> Any:
    """A patch: graphs that are captured inside keep their captured order, on however many lanes."""
    return mock.patch.object(branches, "SIDE_BY_SIDE", False)


def turn_on(seed: int) -> None:
    """In this process, which was started with :data:`ENVIRONMENT`."""
    direct_calls.CHECK_EVERY = 1
    direct_calls._leave = lambda _: None  # the reference runs without patches, before each call
    delayed(seed).start()
    poisoned().start()
