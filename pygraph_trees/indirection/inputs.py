"""The live inputs of one recording, which replays get by address or by copy.

:func:`choose` makes a placeholder tensor for each live input that can have one. After capture,
:meth:`LiveInputs.set_up` reads the graph, chooses routes, instantiates the graph and gives it the addresses of its
call. :meth:`LiveInputs.prepare` gives it a replay's addresses before anything of the call is consumed; it returns the
reason if the recording cannot take them. README.md tells which inputs are copied, and when.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from pygraph_trees.cuda.extent import extent, flat
from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.errors import DriverError, PygraphError

from .hidden_addresses import Rehearsal, Surroundings, listed, why_not_launched
from .patching import CapturedCopies, Patches, PatchFailed
from .placeholder import Extent, Placeholders
from .placeholder_tensors import Span, copy_at, placeholder_tensor, seen_as, span_of
from .relocations import Relocation, Scan, scan
from .retired import LastLaunches, give_back, release_retired, retire
from .routes import NO_SLOTS, Decision, Route, Slots, alignments, decide, fits, why_not_placeholder
from .sampler import EVERY, Sampler
from .staging import Staging
from .table.pointer_table import table_for

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.cuda.graph_nodes import GraphNode, NodeKind

    from .pool import PoolRanges

_T = TypeVar("_T")

_MOST_FITTING = 256  # addresses remembered for one input: more than an allocator uses in turn
_MOST_KNOWN = 64  # sets of addresses remembered for all inputs: more than a program's buffers in turn

_MOST_STAGED_NBYTES = 16 << 20  # torch copies larger CPU inputs

# Each replay of the program's graph would read a staging buffer that belongs to later calls by then, and a wait for a
# buffer ends the capture. Such a call runs without our graphs.
CAPTURED = "the program captures the call in a graph of its own, and an input is on the CPU"

_MUTATED_IN_POOL = "a mutated input lies in the graph pool"


class NotStaged(PygraphError, RuntimeError):
    template = "input {index} lies on the CPU, and no node of the graph reads it from there"


@dataclass(slots=True)  # a frozen one takes four times as long to make
class Item:
    """A live input with its placeholder tensor."""

    index: int  # among the function's inputs
    lead: int  # bytes from the start of the placeholder to the first element
    nbytes: int  # of the placeholder
    placeholder_tensor: torch.Tensor
    recorded: int  # address of the placeholder tensor's first element
    mutated: bool
    managed: bool  # an output of an earlier recording whose address was found to change


def _nothing_stays(tensor: torch.Tensor) -> bool:
    return False


def _is_signed(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def choose(
    driver: Driver,
    device: int,
    inputs: list[Any],
    candidates: Sequence[int],
    mutated: Collection[int],
    pool: PoolRanges,
    refused: Mapping[int, str],
    managed: Collection[int] = (),
    *,
    stage: bool = False,
    tabled: Collection[int] = (),
) -> tuple[LiveInputs | None, dict[int, str]]:
    """The inputs that can be recorded at placeholder addresses; for each other candidate, why it is copied.

    ``inputs`` does not change. If a driver call fails, all that was allocated is freed.

    Args:
        stage: whether copies in the graph read inputs on the CPU, so that these may be staged.
        managed: inputs that may be in the graph pool, because they are alive while the function is recorded.
        tabled: inputs that get a slot in a table if they are at placeholder addresses.

    Upstream records, and so calls this, under its capture lock if it has one.
    """
    release_retired(is_locked=True)
    reasons: dict[int, str] = {}
    chosen: dict[int, torch.Tensor] = {}
    held: dict[int, tuple[torch.Tensor, str]] = {}  # mutated inputs without a placeholder
    staged: dict[int, torch.Tensor] = {}
    for index in candidates:
        value = inputs[index]
        if not isinstance(value, torch.Tensor):
            continue
        if stage and index not in refused and may_be_staged(value):
            staged[index] = value
            continue
        in_pool = index not in managed and value.is_cuda and pool.holds(value.data_ptr())
        why = refused.get(index) if stage and value.device.type == "cpu" else None
        why = why or why_not_placeholder(value, device, in_pool)
        if why is not None:
            reasons[index] = why
        elif index not in refused:
            chosen[index] = value
        elif index in mutated:
            held[index] = value, refused[index]
        else:
            reasons[index] = refused[index]
    try:
        some = chosen or held or staged

        def made() -> LiveInputs:
            return LiveInputs(driver, device, chosen, mutated, pool, held, managed, staged, tabled)

        live = _with_memory(made) if some else None
    except DriverError as error:
        why = f"no addresses could be reserved: {error}"
        reasons |= {index: why for index in chosen if index not in mutated}
        held |= {index: (value, why) for index, value in chosen.items() if index in mutated}
        live = LiveInputs(driver, device, {}, mutated, pool, held, (), staged) if held or staged else None
    return live, reasons


def _with_memory(make: Callable[[], _T]) -> _T:
    """Calls ``make``; if the driver has no memory, frees what the allocator holds in reserve and calls it again."""
    try:
        return make()
    except DriverError as error:
        if error.fields["code"] != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
    torch.cuda.empty_cache()
    return make()


class LiveInputs:
    """The inputs of one recording: at placeholder addresses, mutated ones in ordinary memory, and staged ones.

    The constructor calls the driver only if an input is at placeholder addresses. It may raise :class:`DriverError`.
    """

    # Slots for the attributes that each call reads.
    __slots__ = (
        *("__dict__", "__weakref__", "_addresses", "_fitting", "_patcher", "_pool", "_pool_seen", "_seen", "_settled"),
        "temporary",
    )

    def __init__(
        self,
        driver: Driver,
        device: int,
        tensors: Mapping[int, torch.Tensor],
        mutated: Collection[int],
        pool: PoolRanges,
        held: Mapping[int, tuple[torch.Tensor, str]],
        managed: Collection[int] = (),
        staged: Mapping[int, torch.Tensor] | None = None,
        tabled: Collection[int] = (),
    ) -> None:
        self._driver = driver
        self._device = device
        self._pool = pool
        spans = [span_of(t) for t in tensors.values()]
        self._placeholders = Placeholders(
            driver,
            device,
            [Extent(s.nbytes, (t.data_ptr() - s.lead) % 512) for s, t in zip(spans, tensors.values(), strict=True)],
            # Upstream copies the inputs that are not mutated.
            budget=sum(t.numel() * t.element_size() for index, t in tensors.items() if index not in mutated),
        )
        try:
            place = torch.device("cuda", device)
            on_placeholders = [
                _item(index, tensor, span, placeholder.start, place, index in mutated, index in managed)
                for (index, tensor), span, placeholder in zip(
                    tensors.items(), spans, self._placeholders.placeholders, strict=True
                )
            ]
            in_memory = [_held_item(index, tensor) for index, (tensor, _) in held.items()]
            self._staged = dict(staged or {})
            self._staging = Staging(list(self._staged.values()), device) if staged else None
            self._table = table_for(device, [item.recorded for item in on_placeholders if item.index in tabled])
        except BaseException:
            give_back(self._placeholders.close)
            raise
        memories = () if self._staging is None else self._staging.placeholder_tensors
        on_cpu = [_staged_item(index, memory) for index, memory in zip(self._staged, memories, strict=True)]
        self.items = (
            *on_placeholders,
            *in_memory,
            *on_cpu,
        )  # an input with a placeholder has the same position as the placeholder
        self.storages = {
            item.placeholder_tensor.untyped_storage().data_ptr(): item for item in self.items
        }  # by address of the placeholder tensor's storage
        # The first and the last address of all placeholder tensors.
        self._stand_at = (
            min(self.storages, default=0),
            max((item.recorded - item.lead + item.nbytes for item in self.items), default=0),
        )
        self._held = [Decision(Route.COPY, why) for _, why in held.values()]
        self.decisions: dict[int, Decision] = {}  # by index, once set up
        # The tensors of this call, by index.
        self._given: dict[int, torch.Tensor] | Sequence[Any] = {
            **tensors,
            **{index: tensor for index, (tensor, _) in held.items()},
            **(staged or {}),
        }
        self.kinds: Counter[NodeKind] = Counter()  # the graph's nodes; empty if it could not be read
        self._nodes: Sequence[GraphNode] = ()
        self._relocations: Sequence[Relocation] = ()
        self._patches: Patches | None = None
        self._patcher: Any = None  # in C++, for calls at addresses that fitted before
        self._patched: tuple[Item, ...] = ()
        self._aligned: tuple[int, ...] = ()  # for each patched input: alignment in bytes of pointers that kernels hold
        self._copied: dict[int, Item] = {}  # by index
        self._copied_back: tuple[Item, ...] = ()
        self._reads: dict[int, HostRead] = {}  # how staged inputs are read, by number
        self._complex: tuple[int, ...] = ()  # indices of complex inputs: an address does not tell if one is conjugated
        self.sampler: Sampler | None = None  # until the route is chosen; assigned before ``set_up``
        self.is_of_backward = False  # whether inputs may be tangents: nothing guards that these are not negated
        self._tangents: tuple[int, ...] = ()
        self._put: tuple[int, ...] = ()  # indices of the staged inputs that the instantiated graph copies
        self._seen: list[int] = []
        self._settled: list[int] | None = None  # addresses at which a call needs no further check
        # By position: addresses that fit, and what the graph is given for them. Valid for one state of the pool.
        self._fitting: tuple[dict[int, int], ...] = ()
        self._known: dict[tuple[int, ...], list[int]] = {}  # by the addresses of all inputs: what the graph is given
        self._pool_seen = pool.changes
        self._addresses: list[int] = []  # what the graph is given next
        self._launches = LastLaunches()  # of a graph that reads copies
        self.temporary: dict[int, torch.Tensor] = {}  # by index: copies for the call that was prepared
        self._again = False  # whether the latest call's addresses must be found again at the next call
        self._is_simple = self._settles = False
        self._is_preparing = False
        self.outputs: dict[int, tuple[int, tuple[Any, ...] | None]] = {}  # by output: its input, and the view of it
        self.refused: dict[int, str] = {}  # by index: inputs whose address the driver refused at a replay
        self.extra_copies = self.extra_copied_bytes = 0  # so far, of inputs that did not fit a patch

    # -- recording

    @property
    def has_placeholders(self) -> bool:
        return bool(self._placeholders.placeholders)

    @property
    def has_table(self) -> bool:
        return self._table is not None

    @property
    def has_staged(self) -> bool:
        return bool(self._staged)

    @property
    def in_place(self) -> list[int]:
        """The indices of the inputs that are not staged."""
        return [item.index for item in self.items if item.index not in self._staged]

    def captured(self) -> contextlib.AbstractContextManager[None]:
        """Goes around a whole capture, on the stream on which the capture begins."""
        return contextlib.nullcontext() if self._table is None else self._table.captured()

    def item_under(self, tensor: torch.Tensor) -> Item | None:
        """The input whose placeholder tensor shares a storage with ``tensor``."""
        first, last = self._stand_at
        if first <= tensor.data_ptr() <= last or not tensor.numel():  # a tensor without elements has address 0
            return self.storages.get(tensor.untyped_storage().data_ptr())
        return None

    def given(self, index: int) -> torch.Tensor:
        """This call's tensor for an input's index."""
        return self._given[index]

    def reaches(self, address: int) -> bool:
        """Whether an address is in the memory that was an input at the latest call, copies not counted."""
        for item, seen in zip(self._patched, self._seen, strict=False):  # `_seen` is empty if that call failed
            if 0 <= address - (seen - item.lead) < item.nbytes:
                return True
        return False

    def set_up(
        self,
        graph: Any,
        reads: Iterable[tuple[int, HostRead]] = (),
        copied: Iterable[int] = (),
        surroundings: Callable[[], Surroundings] = Surroundings,
    ) -> None:
        """Reads a captured graph, chooses routes, instantiates it and gives it the addresses of its own call.

        Args:
            reads: addresses in staging buffers, and when the program reads the inputs there.
            copied: the addresses at which the copies captured for these inputs begin.
            surroundings: the other values that a launch reads and writes. It is called if a kernel may hide
                addresses; then the graph is launched, and all that it changes is restored.
        """
        self._reads = self._by_number(reads)
        returned = {index for index, _ in self.outputs.values()}
        try:
            found, decisions = self._read(graph, returned)
            self._check_staged(found, returned, copied)
        except DriverError as error:
            found, decisions = _NOTHING, self._all_copied(f"the graph could not be read: {error}")
        self.kinds = found.kinds
        self._copies = CapturedCopies(found.nodes, found.relocations)
        try:
            if found.unknown and any(decision.by_address for decision in decisions):
                failing = self._rehearse(graph, found, decisions, surroundings())
                found, decisions = self._read(graph, returned)  # nodes can be used for one instantiation
                decisions = [
                    Decision(Route.COPY, failing[position]) if position in failing else decision
                    for position, decision in enumerate(decisions)
                ]
            self._arrange(graph, found, decisions)
        except (DriverError, PatchFailed) as error:
            # Nothing was launched, or everything is restored. Another instantiation holds the placeholder addresses.
            decisions = self._all_copied(f"the graph could not be given its address: {error}")
            self._instantiate(graph, _NOTHING, decisions, self._point_back)
        launches = self._launches if self._copied else None
        if self._table is not None:
            weakref.finalize(graph, retire, self._driver, self._device, self._table, launches).atexit = False
        if self._copied:
            weakref.finalize(graph, retire, self._driver, self._device, self._placeholders, launches).atexit = False
            at_placeholders = [position for position, decision in enumerate(decisions) if not decision.by_address]
            give_back(lambda: self._placeholders.release_memory(at_placeholders))
        else:
            give_back(self._placeholders.close)
        self._begin_sampling()
        self.copy_in()

    def _read(self, graph: Any, returned: Collection[int]) -> tuple[Scan, list[Decision]]:
        """Scans the captured graph, and decides the routes."""
        passed = {position for position, item in enumerate(self.items) if item.index in returned}
        found = scan(self._driver, int(graph.raw_cuda_graph()), self._placeholders, self._sources)
        return found, decide(found, len(self._placeholders.placeholders), passed, self._slots(found))

    @property
    def _sources(self) -> list[tuple[int, int]]:
        """Address and size in bytes of the memory that each staged copy reads."""
        return [] if self._staging is None else list(self._staging.recorded)

    def _arrange(self, graph: Any, found: Scan, decisions: Sequence[Decision]) -> None:
        """Instantiates the graph with the addresses of the inputs that are given by address."""
        patched = [p for p, d in enumerate(decisions) if d.by_address]
        given = {p: self._given[self.items[p].index].data_ptr() - self.items[p].lead for p in patched}
        self._copies = copies = CapturedCopies(found.nodes, found.relocations)
        self._instantiate(graph, found, decisions, lambda: copies.point(given))
        seen = [self._given[item.index].data_ptr() for item in self._patched]
        self._addresses = [address - item.lead for address, item in zip(seen, self._patched, strict=True)]
        self._hold(seen, self._given)

    def _point_back(self) -> None:
        """Restores the recorded addresses in the captured graph's copies."""
        recorded = {p: placeholder.start for p, placeholder in enumerate(self._placeholders.placeholders)}
        recorded |= {len(recorded) + number: address for number, (address, _) in enumerate(self._sources)}
        self._copies.point_back(recorded)

    def _rehearse(
        self, graph: Any, found: Scan, decisions: Sequence[Decision], surroundings: Surroundings
    ) -> dict[int, str]:
        """By position, why an input cannot be given by address although a scan found its address."""
        wanted = [position for position, decision in enumerate(decisions) if decision.by_address]
        kernels, why_not = listed(found.unknown), why_not_launched()
        if why_not is not None:
            return dict.fromkeys(wanted, f"{kernels}, {why_not}, may hide its address")
        for position in range(len(decisions)):
            self._materialise(position)
        scans = [found]

        def launch(positions: Collection[int]) -> None:
            now = scans.pop() if scans else self._read(graph, ())[0]
            routes = [d if p in positions else _AT_PLACEHOLDER for p, d in enumerate(decisions)]
            try:
                self._arrange(graph, now, routes)
                graph.replay()
            finally:
                self._point_back()

        items = self.items[: len(self.items) - len(self._staged)]
        try:
            rehearsal = Rehearsal(items, len(decisions), self.given, surroundings, launch)
        except torch.OutOfMemoryError:
            return dict.fromkeys(wanted, f"there is no memory to check {kernels}, which may hide its address")
        try:
            return rehearsal.failing(wanted, found.unknown)
        finally:
            rehearsal.put_back()
            torch.cuda.current_stream(self._device).synchronize()

    def _slots(self, found: Scan) -> Slots:
        if self._table is None:
            return NO_SLOTS
        return self._table.found(
            self._driver, found, [item.recorded for item in self.items[: len(self._placeholders.placeholders)]]
        )

    def _check_staged(self, found: Scan, returned: Collection[int], copied: Iterable[int]) -> None:
        """Raises :class:`NotStaged` if the graph does not read a staged input, or if a captured copy was not found.

        An input that the graph does not read may have been read during the recording, and its value be fixed in the
        graph. One that is returned without being read is needed by a later partition. Every copy must be found to be
        given other addresses; several may read the same memory.
        """
        if self._staging is None:
            return
        first, recorded = len(self._placeholders.placeholders), self._staging.recorded
        held = Counter(
            recorded[relocation.input - first][0] + relocation.addend
            for relocation in found.relocations
            if relocation.input >= first
        )
        for address in Counter(copied) - held:
            on_it = (item.index for item in self.items if 0 <= address - item.recorded < item.nbytes)
            raise NotStaged(index=next(on_it, next(iter(self._staged))))
        read = self._staged_in(found)
        for number, index in enumerate(self._staged):
            if number not in read and index not in returned:
                raise NotStaged(index=index)

    def _staged_in(self, found: Scan) -> list[int]:
        """The numbers of the staged inputs that a graph reads.

        These were staged during its capture, and one of its nodes copies their memory.
        """
        if self._staging is None:
            return []
        copied = {relocation.input - len(self._placeholders.placeholders) for relocation in found.relocations}
        return [n for n in range(len(self._staged)) if n in self._reads and self._staging.source_of(n) in copied]

    @property
    def together(self) -> torch.Tensor | None:
        """The memory of the staged inputs that a single copy in the graph may take to the GPU."""
        return None if self._staging is None else self._staging.together

    def _all_copied(self, why: str) -> list[Decision]:
        return [Decision(Route.COPY, why) for _ in self._placeholders.placeholders]

    def _instantiate(
        self, graph: Any, found: Scan, decisions: Sequence[Decision], point_copies: Callable[[], None]
    ) -> None:
        routes = [*decisions, *self._held, *(Decision(Route.STAGE, None) for _ in self._staged)]
        self.decisions = {item.index: decision for item, decision in zip(self.items, routes, strict=True)}
        patched = [p for p, d in enumerate(decisions) if d.by_address]
        self._nodes, self._relocations = found.nodes, found.relocations
        self._patched = tuple(self.items[p] for p in patched)
        self._aligned = tuple(
            alignments(found, {p: self._placeholders.placeholders[p].start for p in patched}).values()
        )
        self._copied = {i.index: i for i, d in zip(self.items, routes, strict=True) if d.route is Route.COPY}
        self._copied_back = tuple(i for i in self._copied.values() if i.mutated)
        for position, decision in enumerate(decisions):
            if decision.route is Route.COPY:
                self._materialise(position)
        point_copies()
        graph.instantiate()
        buffers = self._buffers_of(found)
        self._patches = Patches(
            self._driver,
            found.nodes,
            found.relocations,
            [*patched, *buffers],
            int(graph.raw_cuda_graph_exec()),
            self._context() if patched or buffers else None,
            [self._placeholders.placeholders[p].start for p in patched] + list(buffers.values()),
        )
        self._complex = tuple(item.index for item in self._patched if item.placeholder_tensor.is_complex())
        if self.is_of_backward:
            self._tangents = tuple(item.index for item in self._patched if _is_signed(item.placeholder_tensor))
        self._seen, self._settled = [], None
        self._again = any(item.managed for item in self._patched)
        # Whether addresses that fitted once fit again.
        self._is_simple = not (self._copied_back or self._complex or self._again)
        # Whether a graph that holds such addresses needs nothing more.
        self._settles = self._is_simple and not (self._patches.sets_always or self._staged)
        self._fitting = tuple({} for _ in patched)
        self._addresses = self._patches.addresses[: len(patched)]
        self._patcher = self._patches.patcher() if self._settles else None

    def _begin_sampling(self) -> None:
        if self.sampler is None:
            return
        if not self.sampler.can_choose([item.index for item in self._patched], self.kernels_holding):
            self.sampler = None
        elif self._patcher is not None and self._patches is not None:
            self._patcher = self._patches.patcher(EVERY)

    def _end_sampling(self) -> None:
        """From now on, C++ leaves no replay to Python for a sample."""
        self.sampler = None
        if self._patcher is not None and self._patches is not None:
            self._patcher = self._patches.patcher()

    def _buffers_of(self, found: Scan) -> dict[int, int]:
        """The recorded addresses in the staging buffer that replays replace, by number in the graph's relocations.

        No node reads the memory of an input that is only returned. A graph that could not be read has no such address.
        """
        if self._staging is None:
            return {}
        is_fixed = found is _NOTHING
        numbers = list(range(len(self._staged))) if is_fixed else self._staged_in(found)
        copied = {self._staging.source_of(number) for number in numbers}
        sources = [] if is_fixed else sorted(copied)
        indices = list(self._staged)
        self._put = tuple(indices[number] for number in numbers)
        self._staging.take(numbers, self._reads, sources)
        self._staging.is_fixed = is_fixed
        recorded = self._staging.recorded
        return {len(self._placeholders.placeholders) + source: recorded[source][0] for source in sources}

    def _by_number(self, reads: Iterable[tuple[int, HostRead]]) -> dict[int, HostRead]:
        """When staged inputs are read, by number; in order if parts of an input are read at different times."""
        buffers = [(item.recorded, item.nbytes) for item in self.items if item.index in self._staged]
        found: dict[int, HostRead] = {}
        for address, read in reads:
            for number, (start, nbytes) in enumerate(buffers):
                if start <= address < start + nbytes:
                    found[number] = read if found.get(number, read) is read else HostRead.IN_ORDER
        return found

    def _materialise(self, position: int) -> None:
        _with_memory(lambda: self._placeholders.materialise(position))

    def kernels_holding(self, indices: Collection[int]) -> list[str | None]:
        """The kernel of each node that holds an address of these inputs; None for a node of another kind."""
        positions = {position for position, item in enumerate(self.items) if item.index in indices}
        nodes = {
            relocation.node: self._nodes[relocation.node]
            for relocation in self._relocations
            if relocation.input in positions
        }
        names = self._driver.function_name
        return [names(n.function, n.kernel) if isinstance(n, KernelNode) else None for n in nodes.values()]

    def kernels_of(self, index: int) -> list[str]:
        """Names of the kernels that hold an input's address or read it in the table, each once."""
        item = next(item for item in self.items if item.index == index)
        readers = [] if self._table is None else self._table.readers(item.recorded)
        return list(dict.fromkeys([*filter(None, self.kernels_holding([index])), *readers]))

    def _context(self) -> Any:
        with torch.cuda.device(self._device):
            return self._driver.context()

    def release(self) -> None:
        """Gives back the placeholders of an unfinished recording; later, if a copy may already be queued."""
        self._given = ()
        if self._table is not None:
            retire(self._driver, self._device, self._table)
        if self._copied:
            retire(self._driver, self._device, self._placeholders, self._launches)
        else:
            give_back(self._placeholders.close)

    # -- replaying

    def prepare(
        self,
        inputs: Sequence[Any],
        seen: list[int] | None = None,
        stays: Callable[[torch.Tensor], bool] = _nothing_stays,
    ) -> str | None:
        """Makes the graph hold the addresses of ``inputs``, or returns why this recording cannot take them.

        Args:
            seen: the addresses of the patched inputs, in the order of :attr:`patched`, if they are known.
            stays: whether the graph preserves a tensor that is in the graph pool.
        """
        if seen is None:
            seen = [inputs[item.index].data_ptr() for item in self._patched]
        if self._put and torch.cuda.is_current_stream_capturing():
            return CAPTURED
        for index in self._tangents:
            if inputs[index].is_neg():
                return "an input is a negated view"
        same_pool = self._pool.changes == self._pool_seen
        if same_pool and seen == self._settled:
            return None
        is_sampled = self.sampler is not None and self.sampler.is_due()
        if self._patcher is not None and not is_sampled and self._patcher(self, seen):
            return None
        assert self._patches is not None
        if self._patches.broken:
            if self._patches.is_stuck:
                self.refused = {item.index: "the driver refused an address of these inputs" for item in self._patched}
            return "a driver call failed"
        if self._is_preparing:
            return "it is being made ready for another call"
        self._is_preparing, self._settled = True, None
        try:
            return self._prepare(inputs, seen, stays, same_pool=same_pool)
        finally:
            self._is_preparing = False

    def _prepare(
        self, inputs: Sequence[Any], seen: list[int], stays: Callable[[torch.Tensor], bool], *, same_pool: bool
    ) -> str | None:
        """Prepares a graph that may hold other addresses. ``_is_preparing`` keeps out other calls, as of finalizers."""
        known = self._known.get(tuple(seen)) if same_pool and self._is_simple else None
        if known is not None:
            self._seen = []  # until the graph holds these addresses: an interrupt may come anywhere
            self._addresses, self.temporary, self._again = known, {}, False
        else:
            why = self._why_not(inputs)
            if why is None and (seen != self._seen or self._again or not same_pool):
                self._seen = []
                why = self._find_addresses(seen, inputs, stays)
            if why is not None:
                return why
        try:
            self._hold(seen, inputs)
        except PatchFailed as error:
            self.temporary, self._again = {}, False
            refused = dict.fromkeys(self._indices_at(error.fields["index"]), f"the driver refused its address: {error}")
            self.refused.update(refused)
            return str(error)
        return None

    def _indices_at(self, number: int) -> list[int]:
        """The inputs whose address has a number in the relocations; several if they are staged in the same memory."""
        source = number - len(self._placeholders.placeholders)
        if source < 0 or self._staging is None:
            return [self.items[number].index]
        indices = list(self._staged)
        return [indices[n] for n in self._staging.sources[source].numbers if indices[n] in self._put]

    def _why_not(self, inputs: Sequence[Any]) -> str | None:
        """Why these inputs cannot be taken: one that is copied back is in the pool, or one is a conjugate view."""
        for item in self._copied_back:
            if self._pool.holds(inputs[item.index].data_ptr()):
                return _MUTATED_IN_POOL
        for index in self._complex:
            if inputs[index].is_conj():  # a tangent may be conjugated at one call and not at the next
                return "an input is a conjugate view"
        return None

    def _hold(self, seen: list[int], inputs: Any) -> None:
        """Makes the graph hold the addresses found for these inputs, and those of the staging buffer."""
        patches, sampler = self._patches, self.sampler
        assert patches is not None
        addresses, forced = self._addresses, list[int]()
        if self._put:
            assert self._staging is not None
            buffers = self._staging.put([inputs[index] for index in self._put])
            if not self._staging.is_fixed:
                forced = [len(addresses) + number for number in self._staging.in_place]
                addresses = [*addresses, *buffers]
        moved: list[int] | None = None
        if sampler is not None and sampler.is_due():
            changes = zip(self._patched, addresses, patches.addresses, strict=False)
            moved = [item.index for item, address, before in changes if address != before]
        count = patches.apply(addresses, forced)
        self._seen = seen
        if self._settles and not self._again:
            self._settled = seen
        if sampler is None or moved is None:
            return
        if not sampler.sample(moved, count, patches.set_calls, self.kernels_holding):
            self._end_sampling()

    def _find_addresses(
        self, seen: list[int], inputs: Sequence[Any], stays: Callable[[torch.Tensor], bool]
    ) -> str | None:
        if self._pool.changes != self._pool_seen:
            for fitting in self._fitting:
                fitting.clear()
            self._known.clear()
            self._pool_seen = self._pool.changes
        known = self._known.get(tuple(seen))
        if known is not None:
            self._addresses, self.temporary, self._again = known, {}, False
            return None
        addresses = [fitting.get(address) for fitting, address in zip(self._fitting, seen, strict=True)]
        temporary: dict[int, torch.Tensor] = {}
        if None in addresses:
            for position, address in enumerate(addresses):
                if address is None:
                    found = self._find_address(position, seen[position], inputs, temporary, stays)
                    if isinstance(found, str):
                        return found
                    addresses[position] = found
        self._addresses = cast("list[int]", addresses)
        # Whether an input in the pool stays must be asked at each call.
        self.temporary, self._again = temporary, bool(temporary) or any(item.managed for item in self._patched)
        if not self._again:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[tuple(seen)] = self._addresses
        return None

    def _find_address(
        self,
        position: int,
        address: int,
        inputs: Sequence[Any],
        temporary: dict[int, torch.Tensor],
        stays: Callable[[torch.Tensor], bool],
    ) -> int | str:
        """The address that the graph is given for an input: its own or a copy's. A string is the reason for none."""
        item = self._patched[position]
        in_pool = self._pool.holds(address)
        if in_pool and item.mutated:
            return _MUTATED_IN_POOL
        fit = address != 0 and fits(address, item.recorded, self._aligned[position])  # a tensor of zeros may be at 0
        if in_pool and fit and item.managed and stays(inputs[item.index]):
            return address - item.lead
        if in_pool or not fit:
            copy = copy_at(inputs[item.index], item.recorded % 512)
            temporary[item.index] = copy
            self.extra_copies += 1
            self.extra_copied_bytes += extent(copy) * copy.element_size()
            return copy.data_ptr() - item.lead
        fitting = self._fitting[position]
        if len(fitting) == _MOST_FITTING:
            fitting.clear()
        fitting[address] = address - item.lead
        return address - item.lead

    @property
    def patched(self) -> tuple[Item, ...]:
        """The inputs given by address."""
        return self._patched

    @property
    def copies_some(self) -> bool:
        """Whether an input is copied at each call."""
        return bool(self._copied or self._staged)

    @property
    def is_copied(self) -> bool:
        """Whether an input of this call is copied."""
        return bool(self._copied or self.temporary)

    def take_returned(self, inputs: list[Any]) -> None:
        """Holds the inputs that are returned until :meth:`finish`, for a call that copies none."""
        self._given = {index: inputs[index] for index, _ in self.outputs.values()}

    def take(self, inputs: list[Any], *, only_ours: bool = False) -> None:
        """Holds the inputs of a call until :meth:`finish`.

        With ``only_ours``, it removes its inputs from the list, and releases those copied for this call only at once.
        """
        if not only_ours:
            self._given = inputs.copy()
            return
        returned = {index for index, _ in self.outputs.values()}
        given = {}
        for item in self.items:
            if item.mutated or item.index in returned or item.index not in self.temporary:
                given[item.index] = inputs[item.index]
            inputs[item.index] = None
        self._given = given

    def copy_in(self) -> None:
        """Copies, before the launch, the inputs that are copied at each call."""
        if self._copied:
            self._launches.begin()
        for item in self._copied.values():
            flat(item.placeholder_tensor).copy_(flat(self._given[item.index]))

    def finish(self) -> None:
        """After the launch, copies mutated copies back and releases the inputs."""
        if self._put:
            assert self._staging is not None
            self._staging.launched(torch.cuda.current_stream(self._device))  # the graph was launched on this stream
        for item in self._copied_back:
            self._given[item.index].copy_(item.placeholder_tensor)
        for index, copy in self.temporary.items() if self.temporary else ():
            if any(i.mutated for i in self._patched if i.index == index):
                self._given[index].copy_(copy)
        if self._copied:
            self._launches.end(self._device)
        self.temporary = {}
        self._given = ()

    def drop(self) -> None:
        """Releases the inputs of a call that is not launched."""
        self.temporary = {}
        self._given = ()

    def output(self, index: int, view: tuple[Any, ...] | None) -> torch.Tensor:
        """This call's input itself if ``view`` is None, else the view of it that the function returns."""
        base = self._given[index]
        copied = self._copied.get(index)
        if (copied is not None or index in self.temporary) and self._pool.holds(base.data_ptr()):
            # The graph may overwrite the input's own memory, and the next call overwrites the placeholder tensor's.
            if copied is not None and index not in self.temporary:
                self.temporary[index] = copy_at(copied.placeholder_tensor, copied.recorded % 512)
            base = self.temporary[index]
        if view is None:
            return base
        size, stride, offset, dtype = view
        return seen_as(base, size, stride, offset, dtype)


_NOTHING = Scan(nodes=(), relocations=(), refused={}, opaque=None, kinds=Counter())
_AT_PLACEHOLDER = Decision(Route.COPY, "it is compared with")


def _item(
    index: int, tensor: torch.Tensor, span: Span, start: int, device: torch.device, mutated: bool, managed: bool
) -> Item:
    stood_for = placeholder_tensor(start, span, tensor, device)
    return Item(index, span.lead, span.nbytes, stood_for, start + span.lead, mutated, managed)


def may_be_staged(tensor: torch.Tensor) -> bool:
    """Whether an input is on the CPU and a copy of it to the GPU is one row of bytes."""
    return tensor.is_cpu and tensor.layout is torch.strided and 0 < tensor.nbytes <= _MOST_STAGED_NBYTES


def _staged_item(index: int, memory: torch.Tensor) -> Item:
    return Item(index, 0, memory.nbytes, memory, memory.data_ptr(), mutated=False, managed=False)


def _held_item(index: int, tensor: torch.Tensor) -> Item:
    copy = copy_at(tensor, tensor.data_ptr() % 512)
    nbytes = extent(copy) * copy.element_size()  # gaps between rows included: views of the input may be there
    return Item(index, 0, nbytes, copy, copy.data_ptr(), mutated=True, managed=False)
