"""The table of a recording: a slot of 8 bytes on the GPU for each live input, and the kernel that writes them all.

The captured graph begins with the writer (:meth:`Table.captured`), which is given the addresses of the inputs by value,
as 64-bit integers that nothing is known of, and stores each in its slot. Captured at placeholder addresses these are
relocations like any other: patching them is all that a replay does. Kernels that were captured through their variants
(:mod:`.launches`) load the addresses from the slots.

The table is ordinary memory of the caching allocator, outside of the graph pool, and holds the variants that read it.
It must live until no queued replay reads it: whoever drops it waits for the device first. Writers live as long as the
process. Where one cannot be made, :func:`table_for` says so in the log, and the inputs are patched.

Slots are for inputs that a warmup (:class:`Warmups`) found to be given to a kernel whose variant was built since;
without any there is no table.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.indirection.retired import release_retired
from pygraph_trees.indirection.routes import Slots, why_not_placeholder

from . import variant_launchers
from .launches import available, noting, through

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.indirection.pool import PoolRanges
    from pygraph_trees.indirection.relocations import Scan

    from .variant_launchers import VariantLauncher

WRITER = "pygraph_write_slots"  # with the number of slots behind it, a writer's name
WIDTHS = (8, 32, 128)  # slots that one writes: 1 KiB of parameters at most, and compiled three times at most

_Writer = Callable[..., None]  # of the table's memory from its first slot on, and an address for each slot

_log = logging.getLogger("pygraph_trees.indirection")

_failed: set[tuple[int, int]] = set()  # devices, with the widths of writers that could not be made there

# By function: the indices of inputs that variants were found to take, and what warmups found that built nothing.
_taken: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
_readers: weakref.WeakKeyDictionary[Any, dict[tuple[Any, frozenset[str]], Reader]] = weakref.WeakKeyDictionary()


class Table:
    """The slots for some addresses, in their order. The constructor compiles, loads, allocates and launches."""

    def __init__(self, device: int, addresses: Sequence[int]) -> None:
        widths = widths_for(len(addresses))
        place = torch.device("cuda", device)
        self._launches: list[tuple[_Writer, torch.Tensor, list[int]]] = []
        self._readers: dict[int, dict[VariantLauncher, None]] = {}  # by address
        with torch.cuda.device(device):
            writers = [_writer(device, width) for width in widths]
            memory = torch.empty(sum(widths), dtype=torch.int64, device=place)
            begin = 0
            for writer, width in zip(writers, widths, strict=True):
                given = list(addresses[begin : begin + width])
                self._launches.append((writer, memory[begin:], [*given, *[0] * (width - len(given))]))
                begin += width
            self._slots = {address: memory[i : i + 1] for i, address in enumerate(addresses)}
            self._write()  # so that nothing of the writers is loaded while capturing

    def _write(self) -> None:
        for writer, memory, addresses in self._launches:
            writer(memory, *addresses)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Around all of a capture, on the stream that it begins on: kernels in it read the slots."""
        self._readers.clear()
        self._write()
        with through(self):
            yield

    def slot(self, address: int) -> torch.Tensor | None:
        return self._slots.get(address)

    def is_read_by(self, variant: VariantLauncher, address: int) -> None:
        self._readers.setdefault(address, {})[variant] = None

    def readers(self, address: int) -> list[str]:
        """The names of the kernels that read an address here."""
        return list(dict.fromkeys(variant.kernel for variant in self._readers.get(address, ())))

    def found(self, driver: Driver, scan: Scan, addresses: Sequence[int]) -> Slots:
        """What a scan holds of it; ``addresses``: by placeholder, those that have a slot."""
        writers = set()
        for number, node in enumerate(scan.nodes):
            name = driver.function_name(node.function, node.kernel) if isinstance(node, KernelNode) else None
            if name is not None and name.startswith(WRITER):
                writers.add(number)
        read = frozenset(position for position, address in enumerate(addresses) if address in self._readers)
        return Slots(frozenset(writers), read)

    def close(self) -> None:
        """Lets go of the memory and of the variants."""
        self._launches.clear()
        self._slots.clear()
        self._readers.clear()


def widths_for(count: int) -> list[int]:
    """How many slots each of the writers has that write ``count`` together."""
    whole, rest = divmod(count, WIDTHS[-1])
    return [WIDTHS[-1]] * whole + ([min(width for width in WIDTHS if width >= rest)] if rest else [])


def writer_source(width: int) -> str:
    parameters = [f"address{i}" for i in range(width)]
    stores = [f"    tl.store(table + {i}, {parameter})" for i, parameter in enumerate(parameters)]
    return "\n".join([f"def {WRITER}_{width}(table, {', '.join(parameters)}):", *stores, ""])


def writer_function(width: int) -> Any:
    """What ``triton.jit`` makes of a writer."""
    import triton

    source = writer_source(width)
    path = f"<{WRITER}_{width}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)  # where triton.jit looks
    names: dict[str, Any] = {"__name__": __name__, "tl": triton.language}
    exec(compile(source, path, "exec", dont_inherit=True), names)
    return triton.jit(names[f"{WRITER}_{width}"])


def writer_signature(width: int) -> dict[str, str]:
    return {"table": "*i64", **{f"address{i}": "i64" for i in range(width)}}


def current_target() -> Any:
    """What Triton compiles for on the current device."""
    import triton

    return triton.runtime.driver.active.get_current_target()


def compile_writer(width: int, target: Any) -> Any:
    """What Triton makes of a writer; nothing is loaded."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(writer_function(width), writer_signature(width), {}, {})
    return triton.compile(source, target=target, options={"num_warps": 1})


@functools.cache
def _writer(device: int, width: int) -> _Writer:
    """Compiled for a device, which is the current one, and loaded there."""
    try:
        return compile_writer(width, current_target())[(1, 1, 1)]
    except Exception:
        _failed.add((device, width))
        raise


def load_writer(device: int, width: int) -> None:
    """Ahead of the first table that needs it. Raises what Triton and the driver do; it is not tried again."""
    with torch.cuda.device(device):
        _writer(device, width)


def table_for(device: int, addresses: Sequence[int]) -> Table | None:
    """A table for these addresses; None where there are none, or where none can be made.

    Writers that could not be made are not tried again.
    """
    if not addresses or not available() or any((device, width) in _failed for width in widths_for(len(addresses))):
        return None
    try:
        return Table(device, addresses)
    except Exception as error:  # of Triton, of the driver
        _log.warning("there is no table of addresses: %s: %s", type(error).__name__, error)
        return None


@dataclass(frozen=True, slots=True)
class Reader:
    """A kernel that a warmup of a function launched with addresses of its inputs."""

    autotuner: Any
    names: frozenset[str]  # of the parameters
    inputs: frozenset[tuple[str, int]]  # parameter, and index of the input

    @property
    def kernel(self) -> str:
        return variant_launchers.name_of(self.autotuner)

    def build(self) -> set[int]:
        """Builds its variant: the indices of inputs that it takes from slots.

        That compiles, unless Triton's cache has it, and never raises.
        """
        variant = variant_launchers.build(self.autotuner, self.names)
        return set() if variant is None else {index for name, index in self.inputs if name in variant.slots}


def take(function: Any, indices: Collection[int]) -> None:
    """From now on these inputs of a function have slots."""
    _taken.setdefault(function, set()).update(indices)


def take_no_longer(function: Any) -> None:
    """Its inputs have no slots any more."""
    _taken.pop(function, None)


def taken_by_variants(function: Any) -> Collection[int]:
    """Which inputs of a function a warmup saw given to a kernel whose variant, built since, takes them from slots."""
    return frozenset(_taken.get(function, ()))


def readers_of(function: Any) -> list[Reader]:
    """The kernels that read inputs of a function which could have slots, as noted by warmups that built nothing."""
    return list(_readers.get(function, {}).values())


class Warmups:
    """Which inputs may get a slot, of the functions that one manager warms up."""

    def __init__(self) -> None:
        self._step: Any = None
        self._live: set[int] = set()  # addresses of those of this step

    def begin(
        self,
        function: Any,
        step: Any,
        inputs: Sequence[Any],
        static: Collection[int],
        device: int,
        pool: PoolRanges,
        *,
        is_backward: bool,
        builds: bool,
    ) -> contextlib.AbstractContextManager[None]:
        """Around a warmup of a function: notes which kernels read such inputs, and ``builds`` their variants.

        What a backward is given of its forward's live inputs is static yet, and will be found to be live. Other inputs
        that turn out to move are recorded once more without a warmup; like all that has none, they are patched.
        Upstream warms up under its lock of captures where it has one; what earlier recordings left is given back.
        """
        release_retired(is_locked=True)
        if not available():
            return contextlib.nullcontext()
        if step != self._step:
            self._step, self._live = step, set()
        tensors = {index: value for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        try:
            addresses = {
                index: value.data_ptr()
                for index, value in tensors.items()
                if index not in static or (is_backward and value.data_ptr() in self._live)
                if why_not_placeholder(value, device, value.is_cuda and pool.holds(value.data_ptr())) is None
            }
        except RuntimeError:  # an output that was overwritten; upstream raises where it reads it
            return contextlib.nullcontext()
        self._live.update(addresses.values())
        return _noting(function, addresses, builds=builds) if addresses else contextlib.nullcontext()


@contextlib.contextmanager
def _noting(function: Any, addresses: Mapping[int, int], *, builds: bool) -> Iterator[None]:
    """``addresses``: by index among the function's inputs."""
    with noting(frozenset(addresses.values())) as readings:
        yield
    known = _readers.setdefault(function, {})
    for reading in readings:
        inputs = {(name, i) for name, given in reading.given for i, address in addresses.items() if address == given}
        reader = Reader(reading.autotuner, reading.names, frozenset(inputs))
        if builds:
            take(function, reader.build())
            continue
        key = reader.autotuner, reader.names
        known[key] = reader if key not in known else replace(reader, inputs=reader.inputs | known[key].inputs)
