"""Placeholder addresses, on a driver that checks its callers."""

from __future__ import annotations

import itertools
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from fake_driver import GRANULE, CUresult, FakeApi
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection import placeholder as rules
from pygraph_trees.indirection.placeholder import LOW_HALF_END, LOW_HALF_START, Arena, Extent, Placeholders

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
WINDOW = 4 * GIB  # extra size of an arena, so that it can begin at a multiple of it
SOME = (Extent(4096, 0), Extent(5 * MIB, 16), Extent(300, 72), Extent(80 * MIB, 0))  # small and large in turn

nbytes_of_any_size = st.one_of(
    st.integers(0, 8 * MIB),
    st.integers(0, 3 * GIB),
    st.sampled_from([0, 1, MIB - 1, MIB, 2 * MIB - 511, 2 * MIB, 64 * MIB, 64 * MIB + 1, GIB, 3 * GIB // 2, 2 * GIB]),
)
extents_lists = st.lists(st.builds(Extent, nbytes_of_any_size, st.integers(0, 511)), min_size=1, max_size=40)
budgets = st.sampled_from([0, 5 * MIB, 20 * MIB, TIB])
failures = st.sampled_from([None, "cuMemCreate", "cuMemMap", "cuMemSetAccess"])


class PlaceholdersTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.restart()

    def restart(self, **memory: int | None) -> None:
        """``memory``: attributes of the driver's memory."""
        self.api = FakeApi()
        vars(self.api).update(memory)
        self.driver = Driver(self.api)

    def placeholders(self, *extents: Extent, **budget: int) -> Placeholders:
        return Placeholders(self.driver, 0, extents, **budget)

    def assertReserved(self, *nbytes: int) -> None:
        self.assertEqual(list(self.api.reservations.values()), [each + WINDOW for each in nbytes])


class TestPlaceholders(PlaceholdersTestCase):
    def mapped_at(self, address: int) -> tuple[int, bool]:
        """The memory that is mapped at an address, and whether it may be used."""
        (start,) = self.api._overlapping(address, 1)
        return self.api.mappings[start].memory, self.api.mappings[start].access

    @settings(deadline=None)
    @given(extents_lists, budgets)
    def test_placeholders_are_disjoint_guarded_and_mapped(self, extents, budget):
        self.restart()
        api, placeholders = self.api, Placeholders(self.driver, 3, extents, budget)
        self.assertReserved(TIB)
        self.assertTrue(api.is_reserved(placeholders.low, placeholders.high - placeholders.low))
        for placeholder, extent in zip(placeholders.placeholders, extents, strict=True):
            quarter = rules.LOW_QUARTERS[extent.nbytes > rules.TINY_NBYTES]
            found = placeholder.start % (64 << 10) - quarter, placeholder.nbytes
            self.assertEqual((*found, quarter % 512), (extent.residue, extent.nbytes, 0))
            guard = rules.SMALL_GUARD_NBYTES if extent.nbytes < MIB else GRANULE
            self.assertGreaterEqual(placeholder.start - placeholder.low, guard)
            self.assertGreaterEqual(placeholder.high - placeholder.end, guard)
            # Looking at the mappings' edges misses no page in the middle of the extent.
            covering = sorted(api._overlapping(placeholder.start, max(placeholder.nbytes, 1)))
            ends = [start + api.mappings[start].nbytes for start in covering]
            self.assertEqual(covering[1:], ends[:-1])
            self.assertTrue(covering[0] <= placeholder.start <= placeholder.end <= ends[-1])
            self.assertLessEqual(len(covering), 32)
        in_order = sorted(placeholders.placeholders, key=lambda placeholder: placeholder.low)
        for left, right in itertools.pairwise(in_order):
            self.assertLessEqual(left.high, right.low)
        self.assertEqual((placeholders.low, placeholders.high), (in_order[0].low, in_order[-1].high))
        self.assertTrue(all(mapping.access for mapping in api.mappings.values()))
        self.assertEqual([(memory.device, memory.held) for memory in api.memories.values()], [(3, False)])

        for address in {
            a + by for g in placeholders.placeholders for a in (g.low, g.start, g.end, g.high) for by in (-1, 0, 1)
        }:
            holding = [i for i, g in enumerate(placeholders.placeholders) if g.low <= address < g.high]
            self.assertEqual(placeholders.find(address), holding[0] if holding else None)
        placeholders.close()
        self.assertEqual(api.leaks(), [])

    @settings(deadline=None)
    @given(st.lists(extents_lists, min_size=1, max_size=3), st.integers(0, 2047), budgets)
    def test_low_halves_of_addresses_are_no_small_numbers(self, recordings, unaligned, budget):
        """They are neither positive int32 nor small negative ones, nor usual float32."""
        self.assertTrue(2**31 <= LOW_HALF_START < LOW_HALF_END <= 2**32 - 2**28)
        self.assertGreater(struct.unpack("f", struct.pack("I", LOW_HALF_END))[0], -1e-9)
        self.restart(_next_range=FakeApi()._next_range + unaligned * GRANULE)
        for extents in recordings:
            for placeholder in self.placeholders(*extents, budget=budget).placeholders:
                self.assertGreaterEqual(placeholder.low & 0xFFFF_FFFF, LOW_HALF_START)
                if placeholder.high - placeholder.low <= LOW_HALF_END - LOW_HALF_START - GRANULE:
                    self.assertLess((placeholder.high - 1) & 0xFFFF_FFFF, LOW_HALF_END)
                    self.assertEqual(placeholder.low >> 32, (placeholder.high - 1) >> 32)
                else:
                    self.assertEqual(placeholder.low & 0xFFFF_FFFF, LOW_HALF_START)

    def test_no_inputs_make_no_call(self):
        placeholders = self.placeholders()
        self.assertEqual((placeholders.placeholders, placeholders.high - placeholders.low), ((), 0))
        self.assertIsNone(placeholders.find(placeholders.low))
        placeholders.release_memory()
        placeholders.close()
        self.assertEqual(self.api.calls, [])

    def test_memory_and_mappings_are_few(self):
        """Small inputs share a page; the budget is spent on larger pieces, which save mappings, up to a limit."""
        many = [Extent(8 * MIB, 16)] * 20 + [Extent(4096, 0)]
        for extents, budget, nbytes, mappings in (
            ([Extent(256, 16)] * 12, 0, GRANULE, 1),
            ([Extent(63 * MIB, 0)] * 4 + [Extent(4096, 0)] * 20, 0, GRANULE, 4 * 32 + 2),
            ([Extent(625 * MIB, 0), Extent(4096, 0)], 0, 20 * MIB, 1 + 32),
            (many, 0, 2 * MIB, 20 * 5 + 1),
            (many, 5 * MIB, 6 * MIB, 20 * 2 + 1),
            (many, 30 * MIB, 30 * MIB, 20 / 2),  # the page has room beside two of them
            (many, 320 * MIB, rules.MAX_PIECE_NBYTES, 2),  # eighteen of them at most
            ([Extent(400 * MIB, 0)], TIB, rules.MAX_PIECE_NBYTES, 2),
        ):
            with self.subTest(budget=budget, nbytes=nbytes):
                self.restart()
                self.placeholders(*extents, budget=budget)
                self.assertEqual([memory.nbytes for memory in self.api.memories.values()], [nbytes])
                self.assertEqual(self.api.calls.count("cuMemMap"), mappings)

    def test_guards_are_mapped_only_for_small_inputs(self):
        is_mapped = self.api.is_mapped
        for placeholder in self.placeholders(Extent(5 * MIB, 16), Extent(2 * MIB, 0)).placeholders:
            guards = placeholder.low, placeholder.low + GRANULE - 1, placeholder.high - GRANULE, placeholder.high - 1
            self.assertFalse(any(map(is_mapped, guards)))
            self.assertTrue(is_mapped(placeholder.end - 1))
        for placeholder in self.placeholders(*[Extent(1 * MIB - 1, 500)] * 3, Extent(0, 4)).placeholders:
            self.assertTrue(is_mapped(placeholder.low) and is_mapped(placeholder.high - 1))

    def test_a_materialised_input_has_memory_without_aliases(self):
        placeholders = self.placeholders(*SOME)
        small, large, same_page, materialised = placeholders.placeholders
        shared, _ = self.mapped_at(large.start)
        placeholders.materialise(3)
        own, _ = self.mapped_at(materialised.start)
        self.assertNotEqual(own, shared)
        self.assertEqual([self.mapped_at(a) for a in (materialised.start, materialised.end - 1)], [(own, True)] * 2)
        # No part of it aliases another part.
        mapped = [mapping.nbytes for mapping in self.api.mappings.values() if mapping.memory == own]
        self.assertEqual(mapped, [self.api.memories[own].nbytes])
        self.assertEqual(self.mapped_at(large.start), (shared, True))
        self.assertFalse(any(memory.held for memory in self.api.memories.values()))
        placeholders.materialise(2)  # and all small ones of its page
        self.assertEqual(self.mapped_at(small.start), self.mapped_at(same_page.start))
        self.assertNotEqual(self.mapped_at(small.start), self.mapped_at(large.start))
        self.api.calls.clear()
        placeholders.materialise(2)
        placeholders.materialise(0)
        self.assertEqual(self.api.calls, [])

    def test_release_memory_spares_what_was_materialised_and_is_kept(self):
        """Everything on the same page is spared too, and addresses are found as before."""
        placeholders = self.placeholders(*SOME)
        starts = [placeholder.start for placeholder in placeholders.placeholders]
        placeholders.materialise(1)
        own, _ = self.mapped_at(starts[1])
        placeholders.release_memory()
        self.assertEqual({mapping.memory for mapping in self.api.mappings.values()}, {own})
        self.assertEqual(self.mapped_at(placeholders.placeholders[1].end - 1), (own, True))
        self.assertEqual([placeholders.find(start) for start in starts], [0, 1, 2, 3])
        materialise_all(placeholders)
        for kept in ((1, 3), (1,), ()):
            memories = {self.mapped_at(starts[index])[0] for index in kept}
            placeholders.release_memory(kept)
            self.assertEqual({mapping.memory for mapping in self.api.mappings.values()}, memories)
        placeholders.materialise(0)
        self.assertTrue(self.mapped_at(starts[0])[1])
        placeholders.close()
        self.assertEqual(self.api.leaks(), [])
        self.api.calls.clear()
        placeholders.close()
        self.assertEqual(self.api.calls, [])

    def test_no_address_of_a_mapping_stays_on_the_stack(self):
        """After the call that overwrites the stack, nothing is mapped until the graph is captured."""
        calls = self.api.calls
        self.driver.overwrite_stack = lambda: calls.append("overwrite")
        self.placeholders(*[Extent(3 << 20, 0)] * 3, *[Extent(100, 0)] * 40)
        self.assertGreater(calls.count("cuMemMap"), 1)
        self.assertEqual(calls.count("overwrite"), 1)
        self.assertEqual([call for call in calls if call != "cuMemRelease"][-1], "overwrite")


class TestArena(PlaceholdersTestCase):
    def place(self, *extents: Extent) -> tuple[int, int]:
        """The range of a recording that is already over."""
        placeholders = self.placeholders(*extents)
        placeholders.close()
        self.assertEqual(self.api.leaks(), [])
        self.assertTrue(self.api.is_reserved(placeholders.low, placeholders.high - placeholders.low))
        return placeholders.low, placeholders.high

    def arena(self) -> tuple[int, int]:
        """Start and end of the usable part of the latest reservation."""
        start, nbytes = list(self.api.reservations.items())[-1]
        start = -(-start // WINDOW) * WINDOW
        return start, start + nbytes - WINDOW

    def assertDisjoint(self, ranges: list[tuple[int, int]]) -> None:
        for (_, end), (start, _) in itertools.pairwise(sorted(ranges)):
            self.assertLessEqual(end, start)

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.one_of(extents_lists, st.just([Extent(300 * GIB, 0)])), failures), max_size=6))
    def test_no_address_is_used_twice(self, recordings):
        """This includes addresses that a failed constructor mapped."""
        self.restart()
        ranges, self.driver.map_memory = [], mock.Mock(side_effect=self.driver.map_memory)
        for extents, failure in recordings:
            if failure is not None:
                self.api.fail(failure)
                self.assertRaisesRegex(DriverError, failure, self.placeholders, *extents)
            ranges.append(self.place(*extents))
        mapped = [(address, address + nbytes) for (address, nbytes, _), _ in self.driver.map_memory.call_args_list]
        self.assertEqual((ranges, mapped), (sorted(ranges), sorted(mapped)))
        self.assertDisjoint(ranges)
        self.assertDisjoint(mapped)

    def test_high_halves_are_greater_than_shifts(self):
        """If the driver begins at low addresses, this holds as far as the reservation is large enough."""
        for most, nbytes, expected in (
            (None, 100, rules.LEAST_HIGH_HALF),
            (70 * GIB, 100, 4),
            (None, TIB - (rules.LEAST_HIGH_HALF - 5) * WINDOW, 4),  # too large to fit after it
        ):
            self.restart(_next_range=0x3_0200_0000, most_reserved=most)
            low, high = self.place(Extent(nbytes, 0))
            self.assertEqual(low, expected * WINDOW + LOW_HALF_START)
            self.assertEqual(rules.stands_out(low), expected == rules.LEAST_HIGH_HALF)
            self.assertLessEqual(high, self.arena()[1])

    def test_it_is_used_up_to_its_end_and_not_exceeded_by_a_byte(self):
        pieces = 32 * GRANULE  # a large input's size is a multiple of this
        for is_exceeded in (False, True):
            self.restart(_next_range=0x2000_0000_0000, most_reserved=140 * GIB if is_exceeded else 70 * GIB)
            _, end = self.place(Extent(4096, 0))
            rest = self.arena()[1] - end // WINDOW * WINDOW - WINDOW - LOW_HALF_START - 2 * GRANULE
            _, high = self.place(Extent(rest + 1 if is_exceeded else rest // pieces * pieces - 64 * 1024, 0))
            self.assertReserved(*[64 * GIB] * (1 + is_exceeded))
            if not is_exceeded:
                self.assertIn(self.arena()[1] - high, range(pieces))
                self.assertRaisesRegex(DriverError, "cuMemAddressReserve", self.place, Extent(2 * pieces, 0))

    def test_less_is_reserved_if_the_driver_does_not_give_as_much(self):
        needed = LOW_HALF_START + GRANULE  # a page of small placeholders
        for most, refusals, expected in (
            (TIB + WINDOW, 0, TIB),
            (TIB + WINDOW - 1, 0, 64 * GIB),
            (64 * GIB + WINDOW, 0, 64 * GIB),
            (64 * GIB + WINDOW - 1, 0, needed),
            (needed + WINDOW, 0, needed),
            (None, 1, 64 * GIB),
            (None, 2, needed),
        ):
            self.restart(most_reserved=most)
            for _ in range(refusals):
                self.api.fail("cuMemAddressReserve")
            self.placeholders(SOME[0])
            self.assertReserved(expected)

    def test_a_driver_that_gives_nothing_is_asked_again_by_the_next_recording(self):
        self.api.most_reserved = LOW_HALF_START + GRANULE + WINDOW - 1
        for _ in range(2):
            with self.assertRaisesRegex(DriverError, "cuMemAddressReserve returned CUDA_ERROR_OUT_OF_MEMORY"):
                self.place(SOME[0])
        self.assertEqual((self.api.reservations, self.api.calls.count("cuMemAddressReserve")), ({}, 6))
        self.api.most_reserved = None
        self.place(SOME[0])
        self.assertReserved(TIB)

    def test_a_recording_may_need_more_than_is_usually_reserved(self):
        for nbytes in (2 * TIB, TIB - LOW_HALF_START):
            low, high = self.place(Extent(nbytes, 7))
            start, end = self.arena()
            self.assertEqual(low, start + LOW_HALF_START)
            self.assertTrue(end - nbytes // 32 - GRANULE < high <= end)  # the last mapping may be longer
        self.assertEqual(self.api.calls.count("cuMemAddressReserve"), 2)

    def test_threads_get_disjoint_ranges(self):
        barrier = threading.Barrier(8)

        def record(_) -> list[tuple[int, int]]:
            barrier.wait()
            plans = [Arena.place(self.driver, SOME, GRANULE) for _ in range(40)]
            return [(min(placeholder.low for placeholder in plan.placeholders), plan.high) for plan in plans]

        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as threads:
            ranges = [placed for found in threads.map(record, range(8)) for placed in found]
        self.assertEqual((len(ranges), len(self.api.reservations)), (8 * 40, 1))
        self.assertDisjoint(ranges)


def calls_of(work: Callable[[Placeholders], None] | None = None) -> Counter[str]:
    """The driver's calls in ``work``, or in the constructor."""
    api = FakeApi()
    placeholders = Placeholders(Driver(api), 0, SOME)
    if work is not None:
        api.calls.clear()
        work(placeholders)
    return Counter(api.calls)


def materialise_all(placeholders: Placeholders) -> None:
    for index in range(len(SOME)):
        placeholders.materialise(index)


class TestFailures(PlaceholdersTestCase):
    def test_the_first_failure_of_a_constructor_is_raised_though_undoing_fails_too(self):
        self.api.fail("cuMemMap", 2)
        self.api.fail("cuMemUnmap")
        self.assertRaisesRegex(DriverError, "cuMemMap", self.placeholders, *SOME)

    def each_failure(self, work: Callable[[Placeholders], None]) -> Iterator[Placeholders]:
        """Yields the state after each call that ``work`` makes has failed once."""
        for call, count in calls_of(work).items():
            for after in range(count):
                self.restart()
                placeholders = self.placeholders(*SOME)
                self.api.fail(call, after)
                with self.subTest(work=work, call=call, after=after):
                    self.assertRaisesRegex(DriverError, call, work, placeholders)
                    yield placeholders

    def test_failed_calls_can_be_tried_again_or_closed(self):
        for placeholders in self.each_failure(materialise_all):
            materialise_all(placeholders)
            self.assertTrue(all(mapping.access for mapping in self.api.mappings.values()))
            self.assertEqual(len({mapping.memory for mapping in self.api.mappings.values()}), len(self.api.mappings))
            placeholders.close()
            self.assertEqual(self.api.leaks(), [])
        for placeholders in self.each_failure(Placeholders.release_memory):
            placeholders.release_memory()
            self.assertEqual(self.api.mappings, {})
        for work in (materialise_all, Placeholders.release_memory, Placeholders.close):
            for placeholders in self.each_failure(work):
                if work is Placeholders.close:  # it did the rest
                    (left,) = {placeholders.find(address) for address in self.api.mappings}
                    self.assertIsNotNone(left)
                placeholders.close()
                self.assertEqual(self.api.leaks(), [])


class Interrupts:
    """A fake whose n-th memory call is interrupted, before or after it does its work."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.at = -1  # calls before the interrupted one; below 0: none is interrupted

    def __getattr__(self, name: str):
        value = getattr(self.api, name)
        if not name.startswith("cuMem"):
            return value

        def call(*args):
            # The fake does not allow this; the driver returns an error if nothing is mapped.
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


class TestInterrupts(PlaceholdersTestCase):
    def test_an_interrupt_leaves_nothing(self):
        """Neither the constructor, nor ``close`` after another method."""
        for work in (None, materialise_all, Placeholders.release_memory, Placeholders.close):
            for at, after in itertools.product(range(calls_of(work).total()), (False, True)):
                with self.subTest(work=work, at=at, after=after):
                    self.restart()
                    interrupts = Interrupts(self.api)
                    self.driver = Driver(interrupts)
                    placeholders = None if work is None else self.placeholders(*SOME)
                    interrupts.at, interrupts.after = at, after
                    with self.assertRaises(KeyboardInterrupt):
                        self.placeholders(*SOME) if work is None else work(placeholders)
                    if placeholders is not None:
                        placeholders.close()
                    # A handle is lost if a call was about to return it, or if it was off the books to be given back.
                    lost = [("cuMemCreate", True), ("cuMemRelease", False)]
                    self.assertEqual(self.api.mappings, {})
                    self.assertEqual(len(self.api.leaks()), (interrupts.struck, after) in lost, self.api.leaks())
                    # A range that was being reserved is lost; the next recording has its own.
                    again = self.placeholders(*SOME)
                    self.assertReserved(*[TIB] * (1 + ((interrupts.struck, after) == ("cuMemAddressReserve", True))))
                    self.assertTrue(self.api.is_reserved(again.low, again.high - again.low))


if __name__ == "__main__":
    run_tests()
