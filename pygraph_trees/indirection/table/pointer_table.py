"""The table of a recording: 8-byte slots on the GPU for inputs, and the kernels that write them.

The captured graph begins with the writers (:meth:`Table.captured`), whose parameters are the addresses; a replay only
patches these. Inputs get slots if a warmup (:mod:`..warmups`) saw them given to a kernel that has a variant by now. A
table must live until no queued replay reads it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.graph_nodes import KernelNode

from . import launches
from .launches import VariantLauncher, available, through

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.indirection.relocations import Scan

WRITER = "pygraph_write_slots"  # a writer's name begins so; the number of its slots follows
WIDTHS = (8, 32, 128)  # slots of a writer: at most 1 KiB of parameters, and at most three compilations

_log = logging.getLogger("pygraph_trees.indirection")

# By function: the indices of inputs that have slots, and the kernels that warmups noted without building variants.
TAKEN: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
READERS: weakref.WeakKeyDictionary[Any, dict[tuple[Any, frozenset[str]], Reader]] = weakref.WeakKeyDictionary()


class Table:
    """Slots for some addresses, in their order. The constructor compiles, loads, allocates and launches."""

    def __init__(self, device: int, addresses: Sequence[int]) -> None:
        widths = widths_for(len(addresses))
        padded = [*addresses, *[0] * (sum(widths) - len(addresses))]
        self._launches: list[tuple[Any, torch.Tensor, list[int]]] = []
        self._readers: dict[int, dict[VariantLauncher, None]] = {}  # by address
        with torch.cuda.device(device):
            memory = torch.empty(len(padded), dtype=torch.int64, device=torch.device("cuda", device))
            for end, width in zip(itertools.accumulate(widths), widths, strict=True):
                begin = end - width
                self._launches.append((loaded_writer(device, width), memory[begin:], padded[begin:end]))
            self._slots = {address: memory[i : i + 1] for i, address in enumerate(addresses)}
            self._write()  # loads the writers, which a capture must not do

    def _write(self) -> None:
        for writer, memory, addresses in self._launches:
            writer(memory, *addresses)

    def captured(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a whole capture, on the stream on which it begins; kernels in the capture read the slots."""
        self._readers.clear()
        self._write()
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
        writers = {number for number, name in names if name.startswith(WRITER)}
        return writers, {number for number, address in enumerate(addresses) if address in self._readers}

    def close(self) -> None:
        """Releases the memory and the variants."""
        for held in (self._launches, self._slots, self._readers):
            held.clear()


def widths_for(count: int) -> list[int]:
    """The number of slots of each writer, for writers that together write ``count`` slots."""
    whole, rest = divmod(count, WIDTHS[-1])
    return [WIDTHS[-1]] * whole + ([min(width for width in WIDTHS if width >= rest)] if rest else [])


def writer_function(width: int) -> Any:
    """The writer as ``triton.jit`` returns it."""
    import triton

    parameters = [f"address{i}" for i in range(width)]
    stores = [f"    tl.store(table + {i}, {parameter})" for i, parameter in enumerate(parameters)]
    source = "\n".join([f"def {WRITER}_{width}(table, {', '.join(parameters)}):", *stores, ""])
    path = f"<{WRITER}_{width}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)  # triton.jit reads it there
    names: dict[str, Any] = {"__name__": __name__, "tl": triton.language}
    exec(compile(source, path, "exec", dont_inherit=True), names)
    return triton.jit(names[f"{WRITER}_{width}"])


def current_target() -> Any:
    """Triton's target for the current device."""
    import triton

    return triton.runtime.driver.active.get_current_target()


def compile_writer(width: int, target: Any) -> Any:
    """Compiles a writer; loads nothing."""
    import triton
    from triton.compiler import ASTSource

    signature = {"table": "*i64", **{f"address{i}": "i64" for i in range(width)}}
    source = ASTSource(writer_function(width), signature, {}, {})
    return triton.compile(source, target=target, options={"num_warps": 1})


@functools.cache
def loaded_writer(device: int, width: int) -> Any:
    """The writer, loaded on a device: a function of the memory from its first slot on, and an address for each slot.

    None if that failed, which the log says once.
    """
    try:
        with torch.cuda.device(device):
            return compile_writer(width, current_target())[(1, 1, 1)]
    except Exception as error:  # from Triton or the driver
        _log.warning("no kernel can write a table of addresses: %s: %s", type(error).__name__, error)
        return None


def table_for(device: int, addresses: Sequence[int]) -> Table | None:
    """A table for these addresses; None if there are no addresses, or if no table can be made."""
    if not addresses or not available():
        return None
    try:
        are_made = all(loaded_writer(device, width) is not None for width in widths_for(len(addresses)))
        return Table(device, addresses) if are_made else None
    except Exception as error:  # from torch or the driver
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
