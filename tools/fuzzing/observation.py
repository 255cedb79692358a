"""What a call left behind: its outputs and gradients, the memory of its inputs, and which output lies in which input.

An :class:`Observation` holds clones, so that it survives the next call and says what was there at its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraph_trees.benchmark.differences import snapshot

if TYPE_CHECKING:
    import torch

    from .memory import Memory


@dataclass(frozen=True, slots=True)
class Observation:
    """What one call left behind; everything cloned."""

    outputs: Any  # named tensors: outputs, gradients, and what earlier calls of the step returned
    blocks: Any  # named tensors: the blocks of the inputs
    aliases: tuple[str | None, ...]  # by output: the input in whose block it lies, and where
    returns: tuple[str, ...]  # names of the outputs in the program
    inside: Sequence[Inside] = ()  # calls that were made from inside this one


@dataclass(frozen=True, slots=True)
class Inside:
    """A call that was made from inside, and what eager gave for its inputs."""

    where: str
    found: Observation
    wanted: Observation


def observe(
    returns: tuple[str, ...],
    outputs: tuple[torch.Tensor, ...],
    gradients: Any,
    memory: Memory,
    *,
    earlier: Any = (),
    inside: Sequence[Inside] = (),
) -> Observation:
    """Reads what a call left behind; ``earlier`` holds tensors that calls before it returned."""
    return Observation(
        outputs=snapshot({"output": outputs, "gradient": gradients, "earlier": earlier}),
        blocks=snapshot({"memory": dict(memory.blocks)}),
        aliases=tuple(map(memory.place_of, outputs)),
        returns=returns,
        inside=inside,
    )
