"""Small inputs on the CPU, which kernel nodes of a recording's graph hold by value.

:func:`staging_for` decides whether a recording's inputs on the CPU are given by value or from pinned buffers. By value,
they are written to one block of ordinary memory, from which the driver copies them when the nodes are set. Nothing
waits, and the block may be written to again at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.value_kernel import ValueKernel, value_kernel

from .staging import Layout, Staging, laid_out

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.cuda.host_reads import HostRead


class StagedValues(Staging):
    """The block of one recording."""

    def __init__(self, kernel: ValueKernel, inputs: Sequence[torch.Tensor], layout: Layout, device: int) -> None:
        self._kernel = kernel
        self.nodes: dict[int, int] = {}  # that were captured, and the address from which each copies its bytes
        super().__init__(inputs, device, layout)

    def _block(self, nbytes: int) -> torch.Tensor:
        # The driver copies as many bytes as the kernel takes, also from the middle of the block.
        with torch.inference_mode(False):
            return torch.zeros(nbytes + self._kernel.width, dtype=torch.uint8, device="cpu")

    def capture(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Captures a kernel that writes the bytes of ``host``, a part of the block, to new memory of the GPU.

        Until the node is set it holds zeros, in which a scan finds no address.
        """
        at, nbytes = host.data_ptr() - self._recorded.data_ptr(), host.numel() * host.element_size()
        if at < 0 or at + nbytes > self._nbytes:
            target.copy_(host, non_blocking=True)  # memory of another tensor: the graph will be refused
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._kernel.launch(stream, target.data_ptr(), nbytes)
        nodes = self._kernel.driver.captured_last(stream)
        if len(nodes) == 1:  # otherwise the graph will be refused
            self.nodes[nodes[0]] = host.data_ptr()

    def take(self, numbers: Sequence[int], reads: Mapping[int, HostRead], sources: Sequence[int]) -> None:
        super().take(numbers, reads, sources)
        # A pinned input is waited for, since the GPU may still have to write to it: nodes are set during the call.
        self._asked = [(position, read, None) for position, read, _ in self._asked]

    def put(self, values: Sequence[torch.Tensor]) -> list[int]:
        addresses = super().put(values)
        self.in_place = list(range(len(addresses)))  # the nodes hold earlier bytes
        return addresses

    @property
    def places(self) -> list[tuple[torch.Tensor, bool]]:
        """By input that is put: where it is written, and whether it must be waited for if it is pinned."""
        asked = {position for position, _, _ in self._asked}
        return [(memory, position in asked) for position, memory in enumerate(self._next.memories)]

    def launched(self, stream: Any) -> None:
        """Does nothing: no launch reads the block."""


def staging_for(driver: Driver, device: int, inputs: Sequence[torch.Tensor]) -> Staging:
    """The buffers of a recording with these inputs, which are on the CPU.

    The GPU may still have to write to a pinned input, and the program need not wait for that. A pinned input is
    therefore read in its own place, which only a copy node can do.
    """
    if not any(tensor.is_pinned() for tensor in inputs):
        layout = laid_out(inputs, range(len(inputs)))
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            kernel = value_kernel(driver, device, stream, layout.nbytes)
        if kernel is not None:
            return StagedValues(kernel, inputs, layout, device)
    return Staging(inputs, device)
