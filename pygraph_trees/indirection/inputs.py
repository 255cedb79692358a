"""The live inputs of one recording, own memory of outputs included, which replays get by address or by copy.

:class:`LiveInputs` makes a placeholder tensor for each live input that can have one. After capture,
:meth:`LiveInputs.set_up` reads the graph, chooses routes, instantiates the graph and gives it the addresses of its
call. From then on, :class:`.addresses.Addresses` gives it the addresses of each replay. README.md tells which inputs
are copied, and when.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.graph_nodes import KernelNode, NodeKind
from pygraph_trees.errors import DriverError
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.settings import may_wait_for_others

from .addresses import Addresses
from .hidden_addresses import Rehearsal, Surroundings, listed
from .live_input import CopiedInputs, Item, Operand, copied_in_memory, copy_at, may_be_seen, seen_as, span_of, write
from .patching import CapturedCopies, Patches, PatchFailed
from .placeholder import Extent, Placeholders, with_memory
from .relocations import Scan, scan
from .retired import give_back, retire
from .routes import VECTOR, Decision, Route, alignments, decide
from .staged_inputs import StagedInputs
from .table.pointer_table import table_for

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.cuda.host_reads import HostRead

    from .collectives import Collectives
    from .pool import PoolRanges
    from .route_rule import RouteChooser


def instantiate(graph: Any) -> None:
    """Instantiates a captured graph, also again.

    If that fails after it has succeeded, the graph is kept for good: torch would destroy an executable graph twice.
    """
    try:
        graph.instantiate()
    except Exception:
        with contextlib.suppress(RuntimeError):  # which says that there never was one
            graph.raw_cuda_graph_exec()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        raise


class LiveInputs:
    """The inputs of one recording: at placeholder addresses, mutated ones in ordinary memory, and staged ones."""

    addresses: Addresses  # of the instantiated graph, after ``set_up``

    def __init__(
        self,
        driver: Driver,
        device: int,
        at_placeholders: Sequence[Operand],
        in_memory: Mapping[int, tuple[torch.Tensor, Why]],
        staged: Mapping[int, torch.Tensor],
        pool: PoolRanges,
    ) -> None:
        """``in_memory``: mutated inputs in ordinary memory, by index, and why they are copied."""
        self._driver, self._device, self._pool = driver, device, pool
        pairs = [(operand, span_of(operand.tensor)) for operand in at_placeholders]
        extents = [Extent(span.nbytes, (o.tensor.data_ptr() - span.lead) % 512) for o, span in pairs]
        # Upstream copies the inputs that are not mutated.
        budget = sum(o.tensor.nbytes for o in at_placeholders if not o.mutated)
        self._placeholders = Placeholders(driver, device, extents, budget)
        try:
            place = torch.device("cuda", device)
            # Tensors made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                starts = [placeholder.start for placeholder in self._placeholders.placeholders]
                items = [o.at_placeholder(span, at, place) for (o, span), at in zip(pairs, starts, strict=True)]
                held_items = [copied_in_memory(index, tensor) for index, (tensor, _) in in_memory.items()]
            self._staged = StagedInputs(driver, staged, device) if staged else None
            tabled = [item.recorded for item, operand in zip(items, at_placeholders, strict=True) if operand.tabled]
            self._table = table_for(driver, device, tabled)
        except BaseException:
            give_back(self._placeholders.close)
            raise
        self.has_placeholders, self.has_table, self.has_staged = bool(items), bool(self._table), bool(self._staged)
        # An input with a placeholder has the same position as the placeholder.
        self.items = (*items, *held_items, *(() if self._staged is None else self._staged.items))
        # By address of the placeholder tensor's storage.
        self.storages = {item.placeholder_tensor.untyped_storage().data_ptr(): item for item in self.items}
        # Address and size in bytes of the memory that each staged copy reads.
        self._sources = [] if self._staged is None else self._staged.staging.recorded
        self._overwritten = {item.index for item in self.items if item.overwritten}
        self._own = {position: o.own for position, o in enumerate(at_placeholders) if o.own is not None}
        self._held = [Decision(Route.COPY, why) for _, why in in_memory.values()]
        self.decisions: dict[int, Decision] = {}  # by index, once set up
        # The tensors of this call, by index.
        self._given: dict[int, torch.Tensor] | Sequence[Any] = {
            **{operand.index: operand.tensor for operand in at_placeholders},
            **{index: tensor for index, (tensor, _) in in_memory.items()},
            **staged,
        }
        self.kinds: Counter[NodeKind] = Counter()  # the graph's nodes; empty if it could not be read
        self._found = _NOTHING
        self.patched: tuple[Item, ...] = ()  # the inputs given by address
        self._copied = CopiedInputs()
        self.chooser: RouteChooser | None = None  # passed on by ``set_up``
        self.is_of_backward = False  # whether inputs may be tangents; assigned before ``set_up``
        self.collectives: Collectives | None = None  # of the capture, if any; assigned before ``set_up``
        self.outputs: dict[int, tuple[int, tuple[Any, ...] | None]] = {}  # by output: its input, and the view of it

    @property
    def in_place(self) -> list[int]:
        """The indices of the inputs that are not staged."""
        return [i.index for i in self.items if self._staged is None or i.index not in self._staged.indices]

    def captured(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a whole capture, on the stream on which the capture begins."""
        return contextlib.nullcontext() if self._table is None else self._table.captured()

    def given(self, index: int) -> torch.Tensor:
        return self._given[index]

    def set_up(
        self,
        graph: Any,
        reads: Iterable[tuple[int, HostRead]] = (),
        copied: Iterable[int] = (),
        surroundings: Callable[[], Surroundings] = Surroundings,
        finished: Callable[[Any], Any] = lambda graph: graph,
    ) -> None:
        """Reads a captured graph, chooses routes, instantiates it and gives it the addresses of its own call.

        Args:
            reads: addresses in staging buffers, and when the program reads the inputs there.
            copied: the addresses at which the copies captured for these inputs begin.
            surroundings: the other values that a launch reads and writes. It is called if a kernel may hide
                addresses; then the graph is launched, and all that it changes is restored.
            finished: is given the graph, and returns it, after such launches and before it gets its addresses.
        """
        returned = {index for index, _ in self.outputs.values()}
        if self._staged is not None:
            self._staged.note_reads(reads)
        try:
            found, decisions = self._read(graph, returned)
            if self._staged is not None:
                self._staged.check(found, len(self._placeholders.placeholders), returned, copied)
        except DriverError as error:
            found, decisions = _NOTHING, self._all_copied(Reason.UNREAD(error=str(error)))
        self.kinds = found.kinds
        self._copies = CapturedCopies(found.nodes, found.relocations)
        try:
            if found.unknown and any(d.by_address and not self._own.get(p) for p, d in enumerate(decisions)):
                failing = self._rehearse(graph, found, decisions, surroundings())
                found, decisions = self._read(graph, returned)  # nodes can be used for one instantiation
                for position, why in failing.items():
                    decisions[position] = Decision(Route.COPY, why)
            self._arrange(finished(graph), found, decisions)
        except (DriverError, PatchFailed) as error:
            # Nothing was launched, or everything is restored. Another instantiation holds the placeholder addresses.
            decisions = self._all_copied(Reason.NOT_GIVEN(error=str(error)))
            self._instantiate(graph, _NOTHING, decisions, self._point_back)
        launches = self._copied.launches if self._copied else None
        if self._table is not None:
            weakref.finalize(graph, retire, self._driver, self._device, self._table, launches).atexit = False
        if self._copied:
            self._placeholders.kept = [item.placeholder_tensor for item in self._copied.values()]
            weakref.finalize(graph, retire, self._driver, self._device, self._placeholders, launches).atexit = False
            at_placeholders = [position for position, decision in enumerate(decisions) if not decision.by_address]
            give_back(lambda: self._placeholders.release_memory(at_placeholders))
        else:
            give_back(self._placeholders.close)
        if self.chooser is not None:
            self.addresses.begin_choosing(self.chooser, self.kernels_holding)
            self.chooser = None
        self.copy_in()

    def _read(self, graph: Any, returned: Collection[int]) -> tuple[Scan, list[Decision]]:
        """Scans the captured graph, and decides the routes."""
        passed = {position for position, item in enumerate(self.items) if item.index in returned}
        nodes = {} if self._staged is None else self._staged.nodes
        known, shared = ((), ()) if self.collectives is None else (self.collectives.nodes, self.collectives.storages)
        at_placeholders = self.items[: len(self._placeholders.placeholders)]
        recorded = [item.recorded for item in at_placeholders]
        scanned = int(graph.raw_cuda_graph()), self._placeholders, self._sources, nodes, known, recorded
        found = scan(self._driver, *scanned)
        for position, item in enumerate(at_placeholders if shared else ()):
            if item.placeholder_tensor.untyped_storage().data_ptr() in shared:
                found.refused[position] = Reason.READ_BY_COLLECTIVE()
        table = self._table
        writers, read = (set(), set()) if table is None else table.found(self._driver, found, recorded)
        copied_to = [position for position, is_copied in self._own.items() if is_copied]
        return found, decide(found, len(recorded), passed, writers, read, copied_to)

    def _arrange(self, graph: Any, found: Scan, decisions: Sequence[Decision]) -> None:
        """Instantiates the graph with the addresses of the inputs that are given by address."""
        patched = [p for p, d in enumerate(decisions) if d.by_address]
        given = {p: self._given[self.items[p].index].data_ptr() - self.items[p].lead for p in patched}
        self._copies = copies = CapturedCopies(found.nodes, found.relocations)
        self._instantiate(graph, found, decisions, lambda: copies.point(given))
        self.addresses.point(self._given)

    def instantiate_again(self, graph: Any) -> None:
        """Instantiates the graph, whose edges have changed, just after a launch; the next call sets all addresses."""
        # The memory that copies were instantiated with first may be gone.
        self._copies.point(dict(zip(self._by_address, self._patches.addresses, strict=False)))
        self._patches.unbind()
        instantiate(graph)
        self._patches.rebind(int(graph.raw_cuda_graph_exec()))

    def _point_back(self) -> None:
        """Restores the recorded addresses in the captured graph's copies."""
        recorded = {p: placeholder.start for p, placeholder in enumerate(self._placeholders.placeholders)}
        recorded |= {len(recorded) + number: address for number, (address, _) in enumerate(self._sources)}
        self._copies.point_back(recorded)

    def _rehearse(
        self, graph: Any, found: Scan, decisions: Sequence[Decision], surroundings: Surroundings
    ) -> dict[int, Why]:
        """By position, why an input cannot be given by address although a scan found its address."""
        wanted = [p for p, decision in enumerate(decisions) if decision.by_address and not self._own.get(p)]
        if may_wait_for_others():
            return dict.fromkeys(wanted, Reason.HIDDEN_BY_OTHERS(kernels=listed(found.unknown)))
        self._materialise(range(len(decisions)))
        scans = [found]

        def launch(positions: Collection[int]) -> None:
            now = scans.pop() if scans else self._read(graph, ())[0]
            routes = [d if p in positions else _AT_PLACEHOLDER for p, d in enumerate(decisions)]
            try:
                self._arrange(graph, now, routes)
                graph.replay()
            finally:
                self._point_back()

        items = [item for item in self.items if item.index in set(self.in_place)]
        try:
            rehearsal = Rehearsal(items, len(decisions), self.given, surroundings, launch, self._own)
        except torch.OutOfMemoryError:
            return dict.fromkeys(wanted, Reason.HIDDEN_UNCHECKED(kernels=listed(found.unknown)))
        try:
            return rehearsal.failing(wanted, found.unknown)
        finally:
            rehearsal.put_back()
            torch.cuda.current_stream(self._device).synchronize()

    @property
    def staged_copies(self) -> tuple[torch.Tensor | None, Callable[[torch.Tensor, torch.Tensor], None] | None]:
        """The staged inputs' memory that one copy may take to the GPU, and what captures a copy in place of torch."""
        return (None, None) if self._staged is None else (self._staged.staging.together, self._staged.capture)

    def _all_copied(self, why: Why) -> list[Decision]:
        return [Decision(Route.COPY, why) for _ in self._placeholders.placeholders]

    def _instantiate(
        self, graph: Any, found: Scan, decisions: Sequence[Decision], point_copies: Callable[[], None]
    ) -> None:
        on_cpu = () if self._staged is None else self._staged.items
        routes = [*decisions, *self._held, *(Decision(Route.STAGE) for _ in on_cpu)]
        self.decisions = {item.index: decision for item, decision in zip(self.items, routes, strict=True)}
        self._by_address = patched = [p for p, d in enumerate(decisions) if d.by_address]
        starts = {p: self._placeholders.placeholders[p].start for p in patched}
        self._found = found
        self.patched = tuple(self.items[p] for p in patched)
        self._copied = CopiedInputs(i for i, d in zip(self.items, routes, strict=True) if d.route is Route.COPY)
        self._materialise(position for position, decision in enumerate(decisions) if decision.route is Route.COPY)
        point_copies()
        instantiate(graph)
        first = len(self._placeholders.placeholders)
        buffers = {} if self._staged is None else self._staged.take(None if found is _NOTHING else found, first)
        with torch.cuda.device(self._device):
            context = self._driver.context() if patched or buffers else None
        inputs, recorded = [*patched, *buffers], [*starts.values(), *buffers.values()]
        exec_ = int(graph.raw_cuda_graph_exec())
        self._patches = Patches(self._driver, found.nodes, found.relocations, inputs, exec_, context, recorded)
        self.addresses = Addresses(
            *(self._patches, self.patched, list(alignments(found, starts).values()), self._pool, self._staged),
            first=first,
            numbers=patched,
            copied=tuple(self._copied.values()),
            is_of_backward=self.is_of_backward,
            own={self.items[position].index for position in self._own},
        )

    def _materialise(self, positions: Iterable[int]) -> None:
        for position in positions:
            with_memory(functools.partial(self._placeholders.materialise, position))

    def kernels_holding(self, indices: Collection[int]) -> list[str | None]:
        """The kernel of each node that holds an address of these inputs; None for a node of another kind."""
        positions = {position for position, item in enumerate(self.items) if item.index in indices}
        numbers = dict.fromkeys(r.node for r in self._found.relocations if r.input in positions)
        nodes, names = (self._found.nodes[number] for number in numbers), self._driver.function_name
        return [names(n.function, n.kernel) if isinstance(n, KernelNode) else None for n in nodes]

    def kernels_of(self, index: int) -> list[str]:
        """Names of the kernels that hold an input's address or read it in the table, each once."""
        item = next(item for item in self.items if item.index == index)
        readers = [] if self._table is None else self._table.readers(item.recorded)
        return list(dict.fromkeys([*filter(None, self.kernels_holding([index])), *readers]))

    def release(self) -> None:
        """Gives back the placeholders of an unfinished recording; later, if a copy may already be queued."""
        self._given = ()
        if self._table is not None:
            retire(self._driver, self._device, self._table)
        if self._copied:
            retire(self._driver, self._device, self._placeholders, self._copied.launches)
        else:
            give_back(self._placeholders.close)

    @property
    def copies_some(self) -> bool:
        """Whether an input is copied at each call."""
        return bool(self._copied or (self._staged is not None and self._staged.has_buffers))

    @property
    def is_copied(self) -> bool:
        """Whether an input of this call is copied."""
        return bool(self._copied or self.addresses.temporary)

    def take(self, inputs: list[Any], *, only_ours: bool = False) -> None:
        """Holds a call's inputs until :meth:`finish`; or removes ours from the list, and releases those only copied."""
        if not only_ours:
            self._given = inputs.copy()
            return
        dropped = {item.index for item in self.items if not item.mutated and item.index in self.addresses.temporary}
        dropped -= {index for index, _ in self.outputs.values()}
        self._given = {item.index: inputs[item.index] for item in self.items if item.index not in dropped}
        for item in self.items:
            inputs[item.index] = None

    def copy_in(self) -> None:
        self._copied.copy_in(self._given)

    def finish(self) -> None:
        """After the launch, copies mutated copies back and releases the inputs."""
        temporary = self.addresses.temporary
        if self._staged is not None:
            self._staged.launched()  # the graph was launched on the current stream
        for item in self.patched if temporary else ():
            if item.mutated and item.index in temporary:
                write(self._given[item.index], temporary[item.index])
        self._copied.copy_back(self._given, self._device)
        self.drop()

    def drop(self) -> None:
        self.addresses.drop()
        self._given = ()

    def output(self, index: int, view: tuple[Any, ...] | None) -> torch.Tensor:
        """This call's input itself if ``view`` is None, else the view of it that the function returns."""
        base, temporary = self._given[index], self.addresses.temporary
        copied = self._copied.get(index)
        is_odd = base.data_ptr() % VECTOR or not may_be_seen(base, view)  # a backward may take the copy to be aligned
        if (copied is not None or index in temporary) and (
            is_odd or self._pool.holds(base.data_ptr()) or index in self._overwritten
        ):
            # The output is in the copy, or the graph may overwrite the input. The next call overwrites the placeholder.
            if copied is not None and index not in temporary:
                temporary[index] = copy_at(copied.placeholder_tensor, copied.recorded % 512)
            base = temporary[index]
        return base if view is None else seen_as(base, *view)


_NOTHING = Scan(nodes=(), relocations=(), refused={}, opaque=None, kinds=Counter())
_AT_PLACEHOLDER = Decision(Route.COPY)
