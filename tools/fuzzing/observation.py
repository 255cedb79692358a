"""The effects of a call: its outputs and gradients, the memory of its inputs, and aliases between the two.

An :class:`Observation` holds clones, so it survives the next call and shows the values at the time of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pygraph_trees.benchmark.verify import snapshot

if TYPE_CHECKING:
    import torch

    from .memory import Memory


@dataclass(frozen=True, slots=True)
class Observation:
    """The effects of one call; everything is cloned."""

    outputs: Any  # named tensors: outputs, gradients, and outputs of earlier calls of the step
    blocks: Any  # named tensors: the blocks of the inputs
    aliases: tuple[str | None, ...]  # by output: the input whose block holds it, and the offset
    returns: tuple[str, ...]  # names of the outputs in the program
    inside: Sequence[Inside] = ()  # calls made from inside this one
    devices: tuple[str, ...] = ()  # by named tensor, once all are on the CPU

    def on_cpu(self) -> Observation:
        """A copy on the CPU, where comparing small tensors does not wait for other processes on the GPU."""
        outputs, blocks = ([(name, tensor.cpu()) for name, tensor in named] for named in (self.outputs, self.blocks))
        inside = [replace(one, found=one.found.on_cpu(), wanted=one.wanted.on_cpu()) for one in self.inside]
        devices = tuple(str(tensor.device) for _, tensor in (*self.outputs, *self.blocks))
        return replace(self, outputs=outputs, blocks=blocks, inside=inside, devices=devices)


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
    """Observes the effects of a call; ``earlier`` holds tensors that earlier calls returned."""
    return Observation(
        outputs=snapshot({"output": outputs, "gradient": gradients, "earlier": earlier}),
        blocks=snapshot({"memory": dict(memory.blocks)}),
        aliases=tuple(map(memory.place_of, outputs)),
        returns=returns,
        inside=inside,
    )
