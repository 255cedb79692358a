"""The table of a recording: 8-byte slots on the GPU for inputs, and the kernel that writes them.

The captured graph begins with this writer (:meth:`Table.captured`), which holds the addresses by value; a replay only
patches it. Inputs get slots if a warmup (:mod:`..warmups`) saw them given to a kernel that has a variant by now. A
table must live until no queued replay reads it.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.cuda.value_kernel import NAME, WIDTHS, ValueKernel, value_kernel

from . import launches
from .launches import VariantLauncher, available, through

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.indirection.relocations import Scan

_log = logging.getLogger("pygraph_trees.indirection")

# By function: the indices of inputs that have slots, and the kernels that warmups noted without building variants.
TAKEN: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
READERS: weakref.WeakKeyDictionary[Any, dict[tuple[Any, frozenset[str]], Reader]] = weakref.WeakKeyDictionary()


class Table:
    """Slots for some addresses, in their order."""

    def __init__(self, writer: ValueKernel, device: int, addresses: Sequence[int]) -> None:
        self._writer, self._device = writer, device
        self._readers: dict[int, dict[VariantLauncher, None]] = {}  # by address
        memory = torch.empty(len(addresses), dtype=torch.int64, device=torch.device("cuda", device))
        self._slots = {address: memory[i : i + 1] for i, address in enumerate(addresses)}

    def captured(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a whole capture, on the stream on which it begins; kernels in the capture read the slots."""
        self._readers.clear()
        stream, width = torch.cuda.current_stream(self._device).cuda_stream, self._writer.width
        start, values = next(iter(self._slots.values())).data_ptr(), struct.pack(f"{len(self._slots)}Q", *self._slots)
        for begin in range(0, len(values), width):
            self._writer.launch(stream, start + begin, values[begin : begin + width])
        return through(self._slots, self._is_read_by)

    def _is_read_by(self, variant: VariantLauncher, address: int) -> None:
        self._readers.setdefault(address, {})[variant] = None

    def readers(self, address: int) -> list[str]:
        """The names of the kernels that read an address in this table."""
        return list(dict.fromkeys(variant.kernel for variant in self._readers.get(address, ())))

    def found(self, driver: Driver, scan: Scan, addresses: Sequence[int]) -> tuple[set[int], set[int]]:
        """The nodes that write the table, and the placeholders, at these addresses, that a kernel reads in it."""
        kernels = [(number, node) for number, node in enumerate(scan.nodes) if isinstance(node, KernelNode)]
        names = ((number, driver.function_name(node.function, node.kernel) or "") for number, node in kernels)
        writers = {number for number, name in names if name.startswith(NAME)}
        return writers, {number for number, address in enumerate(addresses) if address in self._readers}

    def close(self) -> None:
        """Releases the memory and the variants."""
        self._slots.clear()
        self._readers.clear()


def table_for(driver: Driver, device: int, addresses: Sequence[int]) -> Table | None:
    """A table for these addresses; None if there are no addresses, or if no table can be made."""
    if not addresses or not available():
        return None
    try:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            writer = value_kernel(driver, device, stream, min(8 * len(addresses), WIDTHS[-1]))
        return None if writer is None else Table(writer, device, addresses)
    except Exception as error:  # from torch
        _log.warning("there is no table of addresses: %s: %s", type(error).__name__, error)
        return None


@dataclass(frozen=True, slots=True)
class Reader:
    """A kernel that a function's warmup launched with addresses of the function's inputs."""

    autotuner: Any
    names: frozenset[str]  # of the parameters
    inputs: frozenset[tuple[str, int]]  # parameter, and index of the input

    @property
    def kernel(self) -> str:
        return launches.name_of(self.autotuner)

    def build(self) -> set[int]:
        """Builds the variant, and returns the indices of the inputs that it takes from slots."""
        variant = launches.build(self.autotuner, self.names)
        return set() if variant is None else {index for name, index in self.inputs if name in variant.slots}


def taken_by_variants(function: Any) -> frozenset[int]:
    """The indices of a function's inputs that have slots: variants take them from there."""
    return TAKEN.get(function, frozenset())


def readers_of(function: Any) -> list[Reader]:
    """The kernels that could read a function's inputs from slots, as noted by warmups that built no variants."""
    return list(READERS.get(function, {}).values())
