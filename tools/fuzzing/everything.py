"""Turns on what is off by default: kernels side by side, with random delays, and calls that skip Dynamo's guards.

Each such call checks them. Delays are spin kernels before a random half of the operations: they show missing edges.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch

from pygraph_trees.edges.streams import Streams
from pygraph_trees.trees.hooks import direct_calls

ENVIRONMENT: Mapping[str, str] = {"PYGRAPH_ENTRY": "check", "PYGRAPH_BRANCHES": "always"}
_LONGEST_CYCLES = 100_000  # about 50 us


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


def turn_on(seed: int) -> None:
    """In this process, which was started with :data:`ENVIRONMENT`."""
    direct_calls.CHECK_EVERY = 1
    direct_calls._leave = lambda _: None  # the reference runs without patches, before each call
    delayed(seed).start()
