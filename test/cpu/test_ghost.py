"""Ghost addresses, on a driver that checks its callers."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_driver import GRANULE, CUresult, FakeApi
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.driver import Driver, DriverError
from pygraph_trees.indirection import ghost as ghost_module
from pygraph_trees.indirection.ghost import LOW_HALF_END, LOW_HALF_START, SMALL_GUARD_NBYTES, Extent, Ghosts

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SOME = (Extent(4096, 0), Extent(5 * MIB, 16), Extent(300, 72), Extent(80 * MIB, 0))  # small and large in turn

nbytes_of_any_size = st.one_of(
    st.integers(0, 8 * MIB),
    st.integers(0, 3 * GIB),
    st.sampled_from([0, 1, MIB - 1, MIB, 2 * MIB - 511, 2 * MIB, 64 * MIB, 64 * MIB + 1, GIB, 3 * GIB // 2, 2 * GIB]),
)
extents_lists = st.lists(st.builds(Extent, nbytes_of_any_size, st.integers(0, 511)), min_size=1, max_size=40)


class Interrupts:
    """A fake whose n-th memory call is interrupted, before it has worked or after."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.at = -1  # calls before the one that is interrupted; below 0: none is

    def arm(self, at: int, after: bool) -> None:
        self.at, self.after = at, after

    def __getattr__(self, name: str):
        value = getattr(self.api, name)
        if not name.startswith("cuMem"):
            return value

        def call(*args):
            # The fake does not forgive it; the driver says that nothing is mapped there.
            if name == "cuMemUnmap" and args[0] not in self.api.mappings:
                return (CUresult.CUDA_ERROR_INVALID_VALUE,)
            self.at -= 1
            if self.at != -1:
                return value(*args)
            self.struck = name
            if self.after:
                value(*args)
            raise KeyboardInterrupt

        return call


class TestGhosts(TestCase):
    def setUp(self):
        super().setUp()
        self.api = FakeApi()
        self.driver = Driver(self.api)

    def ghosts(self, *extents: Extent, device: int = 0) -> Ghosts:
        return Ghosts(self.driver, device, extents)

    def behind(self, address: int) -> tuple[int, bool]:
        """The memory that is mapped at an address, and whether it may be used."""
        for start, mapping in self.api.mappings.items():
            if start <= address < start + mapping.nbytes:
                return mapping.memory, mapping.access
        raise AssertionError(f"nothing is mapped at {address:#x}")

    def is_mapped(self, address: int) -> bool:
        return any(start <= address < start + mapping.nbytes for start, mapping in self.api.mappings.items())

    @settings(deadline=None)
    @given(extents_lists)
    def test_where_ghosts_lie(self, extents):
        api = FakeApi()
        ghosts = Ghosts(Driver(api), 3, extents)
        self.assertEqual(api.reservations, {ghosts.low: ghosts.high - ghosts.low})
        self.assertEqual(len(ghosts.ghosts), len(extents))
        for ghost, extent in zip(ghosts.ghosts, extents, strict=True):
            self.assertEqual((ghost.start % 512, ghost.nbytes), (extent.residue, extent.nbytes))
            self.assertEqual(ghost.end, ghost.start + ghost.nbytes)
            guard = SMALL_GUARD_NBYTES if extent.nbytes < MIB else GRANULE
            self.assertGreaterEqual(ghost.start - ghost.low, guard)
            self.assertGreaterEqual(ghost.high - ghost.end, guard)
            # No page in the middle of the extent can be missed by looking at mappings' edges.
            covering = sorted(
                (start, start + mapping.nbytes)
                for start, mapping in api.mappings.items()
                if start < ghost.end and ghost.start < start + mapping.nbytes
            )
            position = ghost.start
            for start, end in covering:
                self.assertLessEqual(start, position)
                position = end
            self.assertGreaterEqual(position, ghost.end)
            self.assertLessEqual(len(covering), 32)
        in_order = sorted(ghosts.ghosts, key=lambda ghost: ghost.low)
        for left, right in itertools.pairwise(in_order):
            self.assertLessEqual(left.high, right.low)
        self.assertLessEqual(ghosts.low, in_order[0].low)
        self.assertLessEqual(in_order[-1].high, ghosts.high)
        self.assertTrue(all(mapping.access for mapping in api.mappings.values()))
        self.assertEqual([(memory.device, memory.held) for memory in api.memories.values()], [(3, False)])

        for address in {a + by for g in ghosts.ghosts for a in (g.low, g.start, g.end, g.high) for by in (-1, 0, 1)}:
            holding = [i for i, g in enumerate(ghosts.ghosts) if g.low <= address < g.high]
            self.assertEqual(ghosts.find(address), holding[0] if holding else None)
        ghosts.close()
        self.assertEqual(api.leaks(), [])

    @settings(deadline=None)
    @given(extents_lists, st.one_of(st.integers(0, 2047), st.integers(1910, 1930)))
    def test_low_halves(self, extents, frontier):
        assume(all(extent.nbytes + 4 * GRANULE <= LOW_HALF_END - LOW_HALF_START for extent in extents))
        with mock.patch.object(ghost_module, "_frontier", (0x2C00 << 32) + frontier * GRANULE):
            ghosts = Ghosts(Driver(FakeApi()), 0, extents)
        for ghost in ghosts.ghosts:
            self.assertGreaterEqual(ghost.low & 0xFFFF_FFFF, LOW_HALF_START)
            self.assertLess((ghost.high - 1) & 0xFFFF_FFFF, LOW_HALF_END)
            self.assertEqual(ghost.low >> 32, (ghost.high - 1) >> 32)

    @settings(deadline=None)
    @given(st.data())
    def test_two_int32_are_no_address(self, data):
        ghosts = Ghosts(Driver(FakeApi()), 0, SOME)
        high = data.draw(st.sampled_from([ghost.start >> 32 for ghost in ghosts.ghosts]))
        low = data.draw(st.one_of(st.integers(0, 2**31 - 1), st.integers(-(2**28), -1)))
        self.assertIsNone(ghosts.find(high << 32 | low & 0xFFFF_FFFF))

    def test_input_larger_than_the_window_begins_at_its_start(self):
        (ghost,) = self.ghosts(Extent(5 * GIB, 8)).ghosts
        self.assertEqual(ghost.low & 0xFFFF_FFFF, LOW_HALF_START)
        self.assertEqual(ghost.start, ghost.low + GRANULE + 8)

    def test_no_inputs(self):
        ghosts = self.ghosts()
        self.assertEqual((ghosts.ghosts, ghosts.high - ghosts.low), ((), 0))
        self.assertIsNone(ghosts.find(ghosts.low))
        ghosts.release_memory()
        ghosts.close()
        self.assertEqual(self.api.calls, [])

    def test_small_inputs_share_a_page(self):
        self.ghosts(*[Extent(256, 16)] * 12)
        self.assertEqual([mapping.nbytes for mapping in self.api.mappings.values()], [GRANULE])
        self.assertEqual(self.api.calls.count("cuMemSetAccess"), 1)

    def test_one_small_memory_backs_all(self):
        self.ghosts(*[Extent(64 * MIB, 0)] * 4, *[Extent(4096, 0)] * 20)
        self.assertEqual([memory.nbytes for memory in self.api.memories.values()], [GRANULE])
        self.assertEqual(self.api.calls.count("cuMemMap"), 4 * 32 + 2)

    def test_large_inputs_take_few_mappings(self):
        self.ghosts(Extent(625 * MIB, 0), Extent(4096, 0))
        self.assertEqual([memory.nbytes for memory in self.api.memories.values()], [20 * MIB])
        self.assertEqual(self.api.calls.count("cuMemMap"), 32 + 1)

    def test_guards_of_large_inputs_are_not_mapped(self):
        ghosts = self.ghosts(Extent(5 * MIB, 16), Extent(2 * MIB, 0))
        for ghost in ghosts.ghosts:
            self.assertFalse(self.is_mapped(ghost.low))
            self.assertFalse(self.is_mapped(ghost.start - 17))
            self.assertTrue(self.is_mapped(ghost.end - 1))
            self.assertFalse(self.is_mapped(ghost.high - GRANULE))
            self.assertFalse(self.is_mapped(ghost.high - 1))

    def test_guards_of_small_inputs_are_mapped(self):
        for ghost in self.ghosts(*[Extent(1 * MIB - 1, 500)] * 3, Extent(0, 4)).ghosts:
            self.assertTrue(self.is_mapped(ghost.low) and self.is_mapped(ghost.high - 1))

    def test_no_address_is_used_twice(self):
        ranges = []
        for extents in (SOME, SOME[:1], (Extent(3 * GIB, 0),), SOME) * 3:
            ghosts = self.ghosts(*extents)
            ranges.append((ghosts.low, ghosts.high))
            ghosts.close()
        self.assertEqual(self.api.leaks(), [])
        for left, right in itertools.pairwise(ranges):
            self.assertLessEqual(left[1], right[0])

    def test_driver_that_takes_no_hint(self):
        self.api.takes_hints = False
        ghosts = self.ghosts(*SOME)
        self.assertEqual(self.api.reservations, {ghosts.low: ghosts.high - ghosts.low})
        for index, (ghost, extent) in enumerate(zip(ghosts.ghosts, SOME, strict=True)):
            self.assertEqual((ghost.start % 512, ghosts.find(ghost.start)), (extent.residue, index))
            self.assertTrue(self.behind(ghost.start)[1] and self.behind(ghost.end - 1)[1])
        ghosts.close()
        # Or the driver could choose these addresses again.
        self.assertEqual(self.api.leaks(), [f"{ghosts.high - ghosts.low:#x} bytes reserved at {ghosts.low:#x}"])

    def test_driver_that_refuses_the_hint(self):
        self.api.fail("cuMemAddressReserve")
        self.api.takes_hints = False
        ghosts = self.ghosts(*SOME)
        self.assertEqual(self.api.calls.count("cuMemAddressReserve"), 2)
        self.assertEqual(ghosts.find(ghosts.ghosts[3].end), 3)

    def test_materialised_large(self):
        ghosts = self.ghosts(*SOME)
        shared, _ = self.behind(ghosts.ghosts[1].start)
        ghosts.materialise(3)
        own, access = self.behind(ghosts.ghosts[3].start)
        self.assertNotEqual(own, shared)
        self.assertTrue(access)
        self.assertEqual(self.behind(ghosts.ghosts[3].end - 1), (own, True))
        # No part of it is another part's alias.
        mapped = [mapping.nbytes for mapping in self.api.mappings.values() if mapping.memory == own]
        self.assertEqual(mapped, [self.api.memories[own].nbytes])
        self.assertEqual(self.behind(ghosts.ghosts[1].start), (shared, True))
        self.assertFalse(any(memory.held for memory in self.api.memories.values()))

    def test_materialised_page(self):
        ghosts = self.ghosts(*SOME)
        ghosts.materialise(2)
        self.assertEqual(self.behind(ghosts.ghosts[0].start), self.behind(ghosts.ghosts[2].start))
        self.assertNotEqual(self.behind(ghosts.ghosts[0].start), self.behind(ghosts.ghosts[1].start))
        calls = len(self.api.calls)
        ghosts.materialise(2)
        ghosts.materialise(0)
        self.assertEqual(len(self.api.calls), calls)

    def test_release_memory_spares_what_was_materialised(self):
        ghosts = self.ghosts(*SOME)
        ghosts.materialise(1)
        own, _ = self.behind(ghosts.ghosts[1].start)
        ghosts.release_memory()
        self.assertEqual({mapping.memory for mapping in self.api.mappings.values()}, {own})
        self.assertEqual(self.behind(ghosts.ghosts[1].end - 1), (own, True))
        self.assertEqual(self.api.reservations, {ghosts.low: ghosts.high - ghosts.low})
        self.assertEqual([ghosts.find(ghost.start) for ghost in ghosts.ghosts], [0, 1, 2, 3])
        ghosts.materialise(0)
        self.assertEqual(self.behind(ghosts.ghosts[0].start)[1], True)
        ghosts.close()
        self.assertEqual(self.api.leaks(), [])

    def test_close_twice(self):
        ghosts = self.ghosts(*SOME)
        ghosts.materialise(0)
        ghosts.close()
        self.assertEqual(self.api.leaks(), [])
        calls = len(self.api.calls)
        ghosts.close()
        self.assertEqual(len(self.api.calls), calls)


def calls_of_constructor() -> Counter[str]:
    api = FakeApi()
    Ghosts(Driver(api), 0, SOME)
    return Counter(api.calls)


def calls_of(work: Callable[[Ghosts], None]) -> Counter[str]:
    api = FakeApi()
    ghosts = Ghosts(Driver(api), 0, SOME)
    api.calls.clear()
    work(ghosts)
    return Counter(api.calls)


def materialise_all(ghosts: Ghosts) -> None:
    for index in range(len(SOME)):
        ghosts.materialise(index)


class TestFailures(TestCase):
    def each_failure(self, work: Callable[[Ghosts], None]) -> Iterator[tuple[str, FakeApi, Ghosts]]:
        """The state after each call that ``work`` makes has failed once."""
        for call, count in calls_of(work).items():
            for after in range(count):
                api = FakeApi()
                ghosts = Ghosts(Driver(api), 0, SOME)
                api.fail(call, after)
                with self.subTest(call=call, after=after):
                    with self.assertRaisesRegex(DriverError, call):
                        work(ghosts)
                    yield call, api, ghosts

    def test_constructor_leaves_nothing(self):
        calls = calls_of_constructor()
        expected = {"GetAllocationGranularity", "AddressReserve", "Create", "Map", "SetAccess", "Release"}
        self.assertEqual(set(calls), {f"cuMem{name}" for name in expected})
        for call, count in calls.items():
            for after in range(count):
                api = FakeApi()
                api.fail(call, after)
                if call == "cuMemAddressReserve":
                    api.fail(call, after + 1)  # it is asked once more, without a hint
                with self.subTest(call=call, after=after):
                    with self.assertRaisesRegex(DriverError, call):
                        Ghosts(Driver(api), 0, SOME)
                    self.assertEqual(api.leaks(), [])

    def test_constructor_leaves_nothing_where_the_driver_takes_no_hint(self):
        api = FakeApi()
        api.takes_hints = False
        api.fail("cuMemSetAccess", 2)
        with self.assertRaisesRegex(DriverError, "cuMemSetAccess"):
            Ghosts(Driver(api), 0, SOME)
        self.assertEqual(api.leaks(), [])

    def test_constructor_raises_what_failed_first(self):
        api = FakeApi()
        api.fail("cuMemMap", 2)
        api.fail("cuMemUnmap")
        with self.assertRaisesRegex(DriverError, "cuMemMap"):
            Ghosts(Driver(api), 0, SOME)

    def test_materialise_can_be_tried_again(self):
        for _, api, ghosts in self.each_failure(materialise_all):
            materialise_all(ghosts)
            self.assertTrue(all(mapping.access for mapping in api.mappings.values()))
            self.assertEqual(len({mapping.memory for mapping in api.mappings.values()}), len(api.mappings))
            ghosts.close()
            self.assertEqual(api.leaks(), [])

    def test_close_after_a_failure(self):
        for work in (materialise_all, Ghosts.release_memory):
            for _, api, ghosts in self.each_failure(work):
                ghosts.close()
                self.assertEqual(api.leaks(), [])

    def test_release_memory_can_be_tried_again(self):
        for _, api, ghosts in self.each_failure(Ghosts.release_memory):
            ghosts.release_memory()
            self.assertEqual(api.mappings, {})

    def test_close_does_the_rest_and_can_be_tried_again(self):
        self.assertEqual(set(calls_of(Ghosts.close)), {"cuMemUnmap", "cuMemAddressFree"})
        for call, api, ghosts in self.each_failure(Ghosts.close):
            left = {ghosts.find(address) for address in api.mappings}
            self.assertEqual(len(left), 1 if call == "cuMemUnmap" else 0)
            self.assertNotIn(None, left)
            ghosts.close()
            self.assertEqual(api.leaks(), [])


class TestInterrupts(TestCase):
    def check(self, api: FakeApi, interrupts: Interrupts) -> None:
        # Nobody has a handle that a call was about to return, or that was taken off the books to be given back.
        lost = [
            ("cuMemAddressReserve", True),
            ("cuMemCreate", True),
            ("cuMemRelease", False),
            ("cuMemAddressFree", False),
        ]
        self.assertEqual(api.mappings, {})
        self.assertEqual(len(api.leaks()), (interrupts.struck, interrupts.after) in lost, api.leaks())

    def test_constructor(self):
        for at, after in itertools.product(range(calls_of_constructor().total()), (False, True)):
            api = FakeApi()
            interrupts = Interrupts(api)
            interrupts.arm(at, after)
            with self.subTest(at=at, after=after):
                with self.assertRaises(KeyboardInterrupt):
                    Ghosts(Driver(interrupts), 0, SOME)
                self.check(api, interrupts)

    def test_close_after_an_interrupt(self):
        for work in (materialise_all, Ghosts.release_memory, Ghosts.close):
            for at, after in itertools.product(range(calls_of(work).total()), (False, True)):
                api = FakeApi()
                interrupts = Interrupts(api)
                ghosts = Ghosts(Driver(interrupts), 0, SOME)
                interrupts.arm(at, after)
                with self.subTest(work=work, at=at, after=after):
                    with self.assertRaises(KeyboardInterrupt):
                        work(ghosts)
                    ghosts.close()
                    self.check(api, interrupts)


if __name__ == "__main__":
    run_tests()
