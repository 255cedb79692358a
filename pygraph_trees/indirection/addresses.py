"""The addresses that an instantiated graph holds for its live inputs, and those that each replay makes it hold.

:meth:`Addresses.prepare` gives the graph the addresses of a call before anything of the call is consumed, or returns
the reason if it cannot. It patches for the slow path, and reports the addresses that fit to the fast path
(:attr:`Addresses.native`), which remembers them while the graph pool stays the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.extent import extent
from pygraph_trees.reasons import Reason, Why

from .live_input import Item, copy_at
from .patching import Patches, PatchFailed
from .route_rule import LEAST_CHANGES, REPLAYS, KernelNames, RouteChooser
from .routes import fits, is_better

if TYPE_CHECKING:
    from .pool import PoolRanges
    from .staged_inputs import StagedInputs


class Addresses:
    """The addresses of one instantiated graph.

    Args:
        patches: the graph's relocations of ``items``, then those of the staging buffer.
        items: the inputs that are given by address.
        aligned: for each of them, the alignment in bytes of the pointers that kernels hold.
        first: the number of the first staging buffer in the relocations.
        numbers: the number of each item in the relocations.
        copied: the inputs that are copied at each call.
        is_of_backward: whether inputs may be tangents: nothing guards that these are not negated.
        own: the indices of own memory of outputs, which torch's allocator returns, so that it fits if it is aligned.
    """

    def __init__(
        self,
        patches: Patches,
        items: Sequence[Item],
        aligned: Sequence[int],
        pool: PoolRanges,
        staged: StagedInputs | None,
        *,
        first: int,
        numbers: Sequence[int],
        copied: Sequence[Item],
        is_of_backward: bool,
        own: Collection[int] = (),
    ) -> None:
        self._patches, self._items, self._aligned, self._pool = patches, tuple(items), tuple(aligned), pool
        self.sets = patches.sets  # counts the nodes that were set
        self._staged, self._first, self._numbers = staged, first, dict(zip(numbers, items, strict=True))
        self._copied_back = tuple(item for item in copied if item.mutated)
        self._unaligned = tuple(item for item in copied if is_better(0, item.recorded))  # 0 is aligned
        # An address does not tell if an input is conjugated or negated.
        given = {i.index: i.placeholder_tensor for i in items if i.index not in own}  # own memory is neither
        self._complex = tuple(index for index, tensor in given.items() if tensor.is_complex())
        signed = (index for index, tensor in given.items() if tensor.is_floating_point() or tensor.is_complex())
        self._tangents = tuple(signed) if is_of_backward else ()
        has_managed = any(item.managed for item in items)
        self._seen: list[int] = []  # of the inputs of the latest call
        self._pool_seen = pool.counter.value
        self._given = patches.addresses[: len(items)]  # the addresses that the graph gets next
        self._again = has_managed  # whether the latest call's addresses must be found again at the next call
        self._is_preparing = False
        self.chooser: RouteChooser | None = None  # until the route is chosen and used
        # A weak reference: the method holds the live inputs, which hold this object.
        self._kernels_holding: Callable[[], KernelNames | None] = lambda: None
        self.temporary: dict[int, torch.Tensor] = {}  # by index: copies for the call that was prepared
        self.refused: dict[int, Why] = {}  # by index: inputs whose address the driver refused at a replay
        self.extra_copies = self.extra_copied_bytes = 0  # so far, of inputs that did not fit a patch
        values = [] if staged is None else staged.values
        # Whether addresses that fitted once fit again, and a graph that holds them needs nothing more, except values
        # that its nodes hold.
        has_buffers = staged is not None and staged.has_buffers
        asks = self._copied_back or self._unaligned or self._complex or has_managed
        settles = not (asks or patches.always or has_buffers)
        has_native = settles and (items or values)
        own_positions = [position for position, item in enumerate(items) if item.index in own and not item.lead]
        self.native: Any = patches.native(pool.counter, len(self._items), values, own_positions) if has_native else None

    def point(self, inputs: Any) -> None:
        """Gives the graph the addresses of the first call's inputs."""
        seen = [inputs[item.index].data_ptr() for item in self._items]
        self._given = [address - item.lead for address, item in zip(seen, self._items, strict=True)]
        self._hold(seen, inputs)

    def begin_choosing(self, chooser: RouteChooser, kernels_holding: KernelNames) -> None:
        """Lets C++ count replays with new addresses until the route is chosen, unless no table can pay."""
        if self.native is not None and chooser.may_choose([item.index for item in self._items], kernels_holding):
            self.chooser, self._kernels_holding = chooser, weakref.WeakMethod(kernels_holding)
            self.native.countdown = REPLAYS

    def _go_on_choosing(self, chooser: RouteChooser) -> None:
        counts, names = self.native, self._kernels_holding()
        changed = [item.index for item, n in zip(self._items, counts.changes, strict=True) if n >= LEAST_CHANGES]
        if names is not None and chooser.go_on(changed, names):
            counts.countdown = REPLAYS
        else:
            self.chooser, self._kernels_holding, counts.countdown = None, lambda: None, 0

    def reaches(self, address: int) -> bool:
        """Whether an address is in the memory that was an input at the latest call, copies not counted."""
        seen = self._seen if self.native is None else self.native.seen or self._seen
        pairs = zip(self._items, seen, strict=False)  # there are no addresses if that call failed
        return any(0 <= address - (start - item.lead) < item.nbytes for item, start in pairs)

    def prepare(
        self,
        inputs: Sequence[Any],
        seen: list[int] | None = None,
        stays: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> Why | None:
        """Makes the graph hold the addresses of ``inputs``, or returns why this recording cannot take them.

        Args:
            seen: the addresses of the inputs that are given by address, in their order, if they are known.
            stays: whether the graph preserves a tensor that is in the graph pool.
        """
        if seen is None:
            seen = [inputs[item.index].data_ptr() for item in self._items]
        puts = self._staged is not None and bool(self._staged.put_indices)
        if any(inputs[index].is_neg() for index in self._tangents):
            return Reason.IS_VIEW()
        same_pool = self._pool.counter.value == self._pool_seen
        if not puts and same_pool and self.native is not None and self.native.is_settled(seen):
            return None
        if self._patches.broken:
            if self._patches.is_stuck:
                self.refused = {item.index: Reason.ADDRESSES_REFUSED() for item in self._items}
            return Reason.BROKEN()
        if self._is_preparing:
            return Reason.PREPARING()
        try:
            self._is_preparing = True  # keeps out a finalizer's calls
            if self.native is not None:
                self.native.unsettle()
            if any(self._pool.holds(inputs[item.index].data_ptr()) for item in self._copied_back):
                return Reason.MUTATED_IN_POOL()
            if any(is_better(inputs[item.index].data_ptr(), item.recorded) for item in self._unaligned):
                return Reason.BETTER_ALIGNED()
            # A tangent may be conjugated at one call, and not at the next.
            if any(inputs[index].is_conj() for index in self._complex):
                return Reason.IS_VIEW()
            if seen != self._seen or self._again or not same_pool:
                self._seen = []  # until the graph holds these addresses: an interrupt may come anywhere
                if (why := self._find_all(seen, inputs, stays)) is not None:
                    return why
            self._hold(seen, inputs)
        except PatchFailed as error:
            self.temporary, self._again = {}, False
            why = Reason.ADDRESS_REFUSED(error=str(error))
            self.refused |= dict.fromkeys(self._indices_at(error.fields["index"]), why)
            return Reason.PATCH_FAILED(**error.fields)
        finally:
            self._is_preparing = False
        return None

    def prepare_fast(self, inputs: Sequence[Any], seen: list[int]) -> bool | None:
        """As :meth:`prepare`, but returns None if the inputs cannot be taken, else whether some are copied."""
        return None if self.prepare(inputs, seen) is not None else bool(self.temporary)

    def drop(self) -> None:
        """Releases the copies of a call that is over or is not launched."""
        self.temporary = {}

    def _indices_at(self, number: int) -> list[int]:
        """The inputs whose address has a number in the relocations; several if they are staged in the same memory."""
        if number < self._first or self._staged is None:
            return [self._numbers[number].index]
        return self._staged.indices_at(number - self._first)

    def _hold(self, seen: list[int], inputs: Any) -> None:
        """Makes the graph hold the addresses found for these inputs, and those of the staging buffer."""
        patches, addresses, forced = self._patches, self._given, list[int]()
        if self._staged is not None and self._staged.put_indices:
            buffers, in_place = self._staged.put(inputs)
            forced = [len(addresses) + number for number in in_place]
            addresses = [*addresses, *buffers]
        is_due = self.native is not None and self.native.countdown == 1
        patches.apply(addresses, forced)
        self._seen = seen
        if self.native is not None and not self._again:
            self.native.settle(seen)
        if is_due and self.chooser is not None:
            self._go_on_choosing(self.chooser)

    def _find_all(self, seen: list[int], inputs: Sequence[Any], stays: Callable[[torch.Tensor], bool]) -> Why | None:
        if self._pool.counter.value != self._pool_seen:
            self._pool_seen = self._pool.counter.value
            if self.native is not None:
                self.native.forget()
        given: list[int] = []
        temporary: dict[int, torch.Tensor] = {}
        for position, address in enumerate(seen):
            if isinstance(found := self._find(position, address, inputs, temporary, stays), Why):
                return found
            given.append(found)
        self._given = given
        # Whether an input in the pool stays must be asked at each call.
        self.temporary, self._again = temporary, bool(temporary) or any(item.managed for item in self._items)
        return None

    def _find(
        self,
        position: int,
        address: int,
        inputs: Sequence[Any],
        temporary: dict[int, torch.Tensor],
        stays: Callable[[torch.Tensor], bool],
    ) -> int | Why:
        """The address that the graph gets for an input, its own or a copy's, or the reason why there is none."""
        item = self._items[position]
        in_pool = self._pool.holds(address)
        if in_pool and item.mutated:
            return Reason.MUTATED_IN_POOL()
        # A zero tensor has no memory; its data_ptr is only its offset.
        has_memory = address != 0 and not inputs[item.index]._is_zerotensor()
        fit = has_memory and fits(address, item.recorded, self._aligned[position])
        if in_pool and fit and item.managed and stays(inputs[item.index]):
            return address - item.lead
        if in_pool or not fit:
            if has_memory and is_better(address, item.recorded):
                return Reason.BETTER_ALIGNED()
            copy = copy_at(inputs[item.index], item.recorded % 512)
            temporary[item.index] = copy
            self.extra_copies += 1
            self.extra_copied_bytes += extent(copy) * copy.element_size()
            return copy.data_ptr() - item.lead
        if self.native is not None:
            self.native.accept(position, address, address - item.lead)
        return address - item.lead
