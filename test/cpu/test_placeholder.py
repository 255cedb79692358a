"""Placeholder addresses, on a driver that checks its callers."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

from fake_driver import GRANULE, CUresult, FakeApi
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection.placeholder import (
    LEAST_HIGH_HALF,
    LOW_HALF_END,
    LOW_HALF_START,
    MAX_PIECE_NBYTES,
    SMALL_GUARD_NBYTES,
    Arena,
    Extent,
    Placeholders,
    stands_out,
)

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


class Interrupts:
    """A fake whose n-th memory call is interrupted, before or after it does its work."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.at = -1  # calls before the interrupted one; below 0: none is interrupted

    def arm(self, at: int, after: bool) -> None:
        self.at, self.after = at, after

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


class TestPlaceholders(TestCase):
    def setUp(self):
        super().setUp()
        self.api = FakeApi()
        self.driver = Driver(self.api)

    def placeholders(self, *extents: Extent, device: int = 0) -> Placeholders:
        return Placeholders(self.driver, device, extents)

    def mapped_at(self, address: int) -> tuple[int, bool]:
        """The memory that is mapped at an address, and whether it may be used."""
        for start, mapping in self.api.mappings.items():
            if start <= address < start + mapping.nbytes:
                return mapping.memory, mapping.access
        raise AssertionError(f"nothing is mapped at {address:#x}")

    def is_mapped(self, address: int) -> bool:
        return any(start <= address < start + mapping.nbytes for start, mapping in self.api.mappings.items())

    @settings(deadline=None)
    @given(extents_lists, budgets)
    def test_placeholders_are_disjoint_guarded_and_mapped(self, extents, budget):
        api = FakeApi()
        placeholders = Placeholders(Driver(api), 3, extents, budget)
        self.assertEqual(list(api.reservations.values()), [TIB + WINDOW])
        self.assertTrue(api.is_reserved(placeholders.low, placeholders.high - placeholders.low))
        self.assertEqual(len(placeholders.placeholders), len(extents))
        for placeholder, extent in zip(placeholders.placeholders, extents, strict=True):
            self.assertEqual((placeholder.start % 512, placeholder.nbytes), (extent.residue, extent.nbytes))
            self.assertEqual(placeholder.end, placeholder.start + placeholder.nbytes)
            guard = SMALL_GUARD_NBYTES if extent.nbytes < MIB else GRANULE
            self.assertGreaterEqual(placeholder.start - placeholder.low, guard)
            self.assertGreaterEqual(placeholder.high - placeholder.end, guard)
            # Looking at the mappings' edges misses no page in the middle of the extent.
            covering = sorted(
                (start, start + mapping.nbytes)
                for start, mapping in api.mappings.items()
                if start < placeholder.end and placeholder.start < start + mapping.nbytes
            )
            position = placeholder.start
            for start, end in covering:
                self.assertLessEqual(start, position)
                position = end
            self.assertGreaterEqual(position, placeholder.end)
            self.assertLessEqual(len(covering), 32)
        in_order = sorted(placeholders.placeholders, key=lambda placeholder: placeholder.low)
        for left, right in itertools.pairwise(in_order):
            self.assertLessEqual(left.high, right.low)
        self.assertEqual((placeholders.low, placeholders.high), (in_order[0].low, in_order[-1].high))
        self.assertTrue(all(mapping.access for mapping in api.mappings.values()))
        self.assertEqual(len(api.memories), 1)
        self.assertEqual({(memory.device, memory.held) for memory in api.memories.values()}, {(3, False)})

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
        api = FakeApi()
        api._next_range += unaligned * GRANULE
        driver = Driver(api)
        for extents in recordings:
            for placeholder in Placeholders(driver, 0, extents, budget).placeholders:
                self.assertGreaterEqual(placeholder.low & 0xFFFF_FFFF, LOW_HALF_START)
                if placeholder.high - placeholder.low <= LOW_HALF_END - LOW_HALF_START - GRANULE:
                    self.assertLess((placeholder.high - 1) & 0xFFFF_FFFF, LOW_HALF_END)
                    self.assertEqual(placeholder.low >> 32, (placeholder.high - 1) >> 32)
                else:
                    self.assertEqual(placeholder.low & 0xFFFF_FFFF, LOW_HALF_START)

    @settings(deadline=None)
    @given(st.data())
    def test_two_int32_are_no_address(self, data):
        placeholders = Placeholders(Driver(FakeApi()), 0, SOME)
        high = data.draw(st.sampled_from([placeholder.start >> 32 for placeholder in placeholders.placeholders]))
        low = data.draw(st.one_of(st.integers(0, 2**31 - 1), st.integers(-(2**28), -1)))
        self.assertIsNone(placeholders.find(high << 32 | low & 0xFFFF_FFFF))

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
            ([Extent(256, 16)] * 12, None, GRANULE, 1),
            ([Extent(64 * MIB - 512, 0)] * 4 + [Extent(4096, 0)] * 20, None, GRANULE, 4 * 32 + 2),
            ([Extent(625 * MIB, 0), Extent(4096, 0)], None, 20 * MIB, 1 + 32),
            (many, 0, 2 * MIB, 20 * 5 + 1),
            (many, 5 * MIB, 6 * MIB, 20 * 2 + 1),
            (many, 30 * MIB, 30 * MIB, 20 / 2),  # the page has room beside two of them
            (many, 320 * MIB, MAX_PIECE_NBYTES, 2),  # eighteen of them at most
            ([Extent(400 * MIB, 0)], TIB, MAX_PIECE_NBYTES, 2),
        ):
            with self.subTest(budget=budget, nbytes=nbytes):
                api = FakeApi()
                placeholders = Placeholders(Driver(api), 0, extents, *(() if budget is None else (budget,)))
                self.assertEqual([memory.nbytes for memory in api.memories.values()], [nbytes])
                self.assertEqual(api.calls.count("cuMemMap"), mappings)
                placeholders.close()
                self.assertEqual(api.leaks(), [])

    def test_guards_are_mapped_only_for_small_inputs(self):
        for placeholder in self.placeholders(Extent(5 * MIB, 16), Extent(2 * MIB, 0)).placeholders:
            guards = placeholder.low, placeholder.start - 17, placeholder.high - GRANULE, placeholder.high - 1
            self.assertFalse(any(map(self.is_mapped, guards)))
            self.assertTrue(self.is_mapped(placeholder.end - 1))
        for placeholder in self.placeholders(*[Extent(1 * MIB - 1, 500)] * 3, Extent(0, 4)).placeholders:
            self.assertTrue(self.is_mapped(placeholder.low) and self.is_mapped(placeholder.high - 1))

    def test_a_materialised_input_has_memory_without_aliases(self):
        placeholders = self.placeholders(*SOME)
        small, large, same_page, materialised = placeholders.placeholders
        shared, _ = self.mapped_at(large.start)
        placeholders.materialise(3)
        own, access = self.mapped_at(materialised.start)
        self.assertNotEqual(own, shared)
        self.assertTrue(access)
        self.assertEqual(self.mapped_at(materialised.end - 1), (own, True))
        # No part of it aliases another part.
        mapped = [mapping.nbytes for mapping in self.api.mappings.values() if mapping.memory == own]
        self.assertEqual(mapped, [self.api.memories[own].nbytes])
        self.assertEqual(self.mapped_at(large.start), (shared, True))
        self.assertFalse(any(memory.held for memory in self.api.memories.values()))
        placeholders.materialise(2)  # and all small ones of its page
        self.assertEqual(self.mapped_at(small.start), self.mapped_at(same_page.start))
        self.assertNotEqual(self.mapped_at(small.start), self.mapped_at(large.start))
        calls = len(self.api.calls)
        placeholders.materialise(2)
        placeholders.materialise(0)
        self.assertEqual(len(self.api.calls), calls)

    def test_release_memory_spares_what_was_materialised_and_is_kept(self):
        """Everything on the same page is spared too, and addresses are found as before."""
        placeholders = self.placeholders(*SOME)
        placeholders.materialise(1)
        own, _ = self.mapped_at(placeholders.placeholders[1].start)
        placeholders.release_memory()
        self.assertEqual({mapping.memory for mapping in self.api.mappings.values()}, {own})
        self.assertEqual(self.mapped_at(placeholders.placeholders[1].end - 1), (own, True))
        found = [placeholders.find(placeholder.start) for placeholder in placeholders.placeholders]
        self.assertEqual(found, [0, 1, 2, 3])
        materialise_all(placeholders)
        for kept in ((1, 3), (1,), ()):
            memories = {self.mapped_at(placeholders.placeholders[index].start)[0] for index in kept}
            placeholders.release_memory(kept)
            self.assertEqual({mapping.memory for mapping in self.api.mappings.values()}, memories)
        self.assertEqual(self.api.leaks(), [])
        placeholders.materialise(0)
        self.assertTrue(self.mapped_at(placeholders.placeholders[0].start)[1])
        placeholders.close()
        self.assertEqual(self.api.leaks(), [])
        calls = len(self.api.calls)
        placeholders.close()
        self.assertEqual(len(self.api.calls), calls)

    def test_no_address_of_a_mapping_stays_on_the_stack(self):
        """After the call that overwrites the stack, nothing is mapped until the graph is captured."""
        calls = self.api.calls
        overwrite = mock.Mock(side_effect=lambda: calls.append("overwrite"))
        driver = Driver(self.api)
        driver.overwrite_stack = overwrite
        placeholders = Placeholders(driver, 0, [Extent(3 << 20, 0)] * 3 + [Extent(100, 0)] * 40)
        self.assertGreater(calls.count("cuMemMap"), 1)
        self.assertEqual([call for call in calls if call != "cuMemRelease"][-1], "overwrite")
        overwrite.assert_called_once_with()
        placeholders.close()


class TestArena(TestCase):
    def setUp(self):
        super().setUp()
        self.api = FakeApi()
        self.driver = Driver(self.api)

    def restart(self, start: int, most: int | None = None) -> None:
        """A driver that reserves from an address on, and as many bytes at most."""
        self.api = FakeApi()
        self.api._next_range, self.api.most_reserved = start, most
        self.driver = Driver(self.api)

    def place(self, *extents: Extent) -> tuple[int, int]:
        """The range of a recording that is already over."""
        placeholders = Placeholders(self.driver, 0, extents)
        placeholders.close()
        self.assertEqual(self.api.leaks(), [])
        self.assertTrue(self.api.is_reserved(placeholders.low, placeholders.high - placeholders.low))
        return placeholders.low, placeholders.high

    def arena(self, index: int = -1) -> tuple[int, int]:
        """Start and end of the usable part of a reservation."""
        start, nbytes = list(self.api.reservations.items())[index]
        start = -(-start // WINDOW) * WINDOW
        return start, start + nbytes - WINDOW

    def assertDisjoint(self, ranges: list[tuple[int, int]]) -> None:
        for (_, end), (start, _) in itertools.pairwise(sorted(ranges)):
            self.assertLessEqual(end, start)

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.one_of(extents_lists, st.just([Extent(300 * GIB, 0)])), failures), max_size=6))
    def test_no_address_is_used_twice(self, recordings):
        """This includes addresses that a failed constructor mapped."""
        api, ranges, mapped = FakeApi(), [], []
        driver = Driver(api)
        map_memory = driver.map_memory

        def watch(address: int, nbytes: int, memory: int) -> None:
            map_memory(address, nbytes, memory)
            mapped.append((address, address + nbytes))

        driver.map_memory = watch
        for extents, failure in recordings:
            if failure is not None:
                api.fail(failure)
                with self.assertRaisesRegex(DriverError, failure):
                    Placeholders(driver, 0, extents)
            placeholders = Placeholders(driver, 0, extents)
            ranges.append((placeholders.low, placeholders.high))
            placeholders.close()
        self.assertEqual((ranges, mapped), (sorted(ranges), sorted(mapped)))
        self.assertDisjoint(ranges)
        self.assertDisjoint(mapped)

    def test_high_halves_are_greater_than_shifts(self):
        """If the driver begins at low addresses, this holds as far as the reservation is large enough."""
        for most, low in ((None, LEAST_HIGH_HALF), (70 * GIB, 4)):
            self.restart(0x3_0200_0000, most)
            placeholders = Placeholders(self.driver, 0, [Extent(100, 0)])
            self.assertEqual(placeholders.low, low * WINDOW + LOW_HALF_START)
            self.assertEqual(stands_out(placeholders.low), low == LEAST_HIGH_HALF)
            self.assertLessEqual(placeholders.high, self.arena()[1])
        self.restart(0x3_0200_0000)
        low, high = self.place(Extent(TIB - (LEAST_HIGH_HALF - 5) * WINDOW, 0))  # too large to fit after it
        self.assertEqual(low // WINDOW, 4)
        self.assertLessEqual(high, self.arena()[1])

    def check_reserved_by(self, ranges: list[tuple[int, int]], indices: tuple[int, ...]) -> None:
        """Each range lies in the reservation of this index."""
        self.assertEqual(list(self.api.reservations.values()), [TIB + WINDOW] * (max(indices) + 1))
        self.assertDisjoint(ranges)
        for (low, high), index in zip(ranges, indices, strict=True):
            start, end = self.arena(index)
            self.assertTrue(start <= low < high <= end)

    def test_another_reservation_is_made_if_one_runs_out(self):
        self.check_reserved_by([self.place(Extent(400 * GIB, 0)) for _ in range(5)], (0, 0, 1, 1, 2))

    def test_it_is_used_up_to_its_end_and_not_exceeded_by_a_byte(self):
        pieces = 32 * GRANULE  # a large input's size is a multiple of this
        for is_exceeded in (False, True):
            self.restart(0x2000_0000_0000, 140 * GIB if is_exceeded else 70 * GIB)
            _, end = self.place(Extent(4096, 0))
            rest = self.arena()[1] - end // WINDOW * WINDOW - WINDOW - LOW_HALF_START - 2 * GRANULE
            _, high = self.place(Extent(rest + 1 if is_exceeded else rest // pieces * pieces - 512, 0))
            self.assertEqual(list(self.api.reservations.values()), [64 * GIB + WINDOW] * (1 + is_exceeded))
            if not is_exceeded:
                self.assertIn(self.arena()[1] - high, range(pieces))
                with self.assertRaisesRegex(DriverError, "cuMemAddressReserve"):
                    self.place(Extent(2 * pieces, 0))

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
            api = FakeApi()
            api.most_reserved = most
            for _ in range(refusals):
                api.fail("cuMemAddressReserve")
            Placeholders(Driver(api), 0, SOME[:1])
            self.assertEqual(list(api.reservations.values()), [expected + WINDOW])

    def test_a_driver_that_gives_nothing_is_asked_again_by_the_next_recording(self):
        self.api.most_reserved = LOW_HALF_START + GRANULE + WINDOW - 1
        for _ in range(2):
            with self.assertRaisesRegex(DriverError, "cuMemAddressReserve returned CUDA_ERROR_OUT_OF_MEMORY"):
                self.place(SOME[0])
        self.assertEqual((self.api.reservations, self.api.calls.count("cuMemAddressReserve")), ({}, 6))
        self.api.most_reserved = None
        self.place(SOME[0])
        self.assertEqual(list(self.api.reservations.values()), [TIB + WINDOW])

    def test_a_recording_may_need_more_than_is_usually_reserved(self):
        for nbytes in (2 * TIB, TIB - LOW_HALF_START):
            low, high = self.place(Extent(nbytes, 7))
            start, end = self.arena()
            self.assertEqual(low, start + LOW_HALF_START)
            self.assertTrue(end - nbytes // 32 - GRANULE < high <= end)  # the last mapping may be longer
        self.assertEqual(self.api.calls.count("cuMemAddressReserve"), 2)

    def test_threads_get_disjoint_ranges(self):
        ranges: list[tuple[int, int]] = []
        barrier = threading.Barrier(8)

        def record() -> None:
            barrier.wait()
            for _ in range(40):
                plan = Arena.place(self.driver, SOME, GRANULE)
                ranges.append((min(placeholder.low for placeholder in plan.placeholders), plan.high))

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=record) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
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


class TestFailures(TestCase):
    def each_failure(self, work: Callable[[Placeholders], None]) -> Iterator[tuple[str, FakeApi, Placeholders]]:
        """Yields the state after each call that ``work`` makes has failed once."""
        for call, count in calls_of(work).items():
            for after in range(count):
                api = FakeApi()
                placeholders = Placeholders(Driver(api), 0, SOME)
                api.fail(call, after)
                with self.subTest(call=call, after=after):
                    with self.assertRaisesRegex(DriverError, call):
                        work(placeholders)
                    yield call, api, placeholders

    def test_a_failing_constructor_leaves_nothing(self):
        for call, count in calls_of().items():
            for after in range(count):
                api = FakeApi()
                for _ in range(3 if call == "cuMemAddressReserve" else 1):  # each attempt asks for less
                    api.fail(call, after)
                driver = Driver(api)
                with self.subTest(call=call, after=after):
                    with self.assertRaisesRegex(DriverError, call):
                        Placeholders(driver, 0, SOME)
                    self.assertEqual(api.leaks(), [])
                    Placeholders(driver, 0, SOME)
                    self.assertEqual(list(api.reservations.values()), [TIB + WINDOW])

        # The first failure is raised, though undoing fails too.
        api = FakeApi()
        api.fail("cuMemMap", 2)
        api.fail("cuMemUnmap")
        with self.assertRaisesRegex(DriverError, "cuMemMap"):
            Placeholders(Driver(api), 0, SOME)

    def test_failed_calls_can_be_tried_again_or_closed(self):
        for _, api, placeholders in self.each_failure(materialise_all):
            materialise_all(placeholders)
            self.assertTrue(all(mapping.access for mapping in api.mappings.values()))
            self.assertEqual(len({mapping.memory for mapping in api.mappings.values()}), len(api.mappings))
            placeholders.close()
            self.assertEqual(api.leaks(), [])
        for _, api, placeholders in self.each_failure(Placeholders.release_memory):
            placeholders.release_memory()
            self.assertEqual(api.mappings, {})
        for work in (materialise_all, Placeholders.release_memory):
            for _, api, placeholders in self.each_failure(work):
                placeholders.close()
                self.assertEqual(api.leaks(), [])

    def test_close_does_the_rest_and_can_be_tried_again(self):
        for _, api, placeholders in self.each_failure(Placeholders.close):
            left = {placeholders.find(address) for address in api.mappings}
            self.assertEqual(len(left), 1)
            self.assertNotIn(None, left)
            placeholders.close()
            self.assertEqual(api.leaks(), [])


class TestInterrupts(TestCase):
    def check(self, api: FakeApi, interrupts: Interrupts) -> None:
        # A handle is lost if a call was about to return it, or if it was taken off the books to be given back.
        lost = [("cuMemCreate", True), ("cuMemRelease", False)]
        self.assertEqual(api.mappings, {})
        self.assertEqual(len(api.leaks()), (interrupts.struck, interrupts.after) in lost, api.leaks())

    def test_an_interrupted_constructor_leaves_nothing(self):
        for at, after in itertools.product(range(calls_of().total()), (False, True)):
            api = FakeApi()
            interrupts = Interrupts(api)
            interrupts.arm(at, after)
            with self.subTest(at=at, after=after):
                driver = Driver(interrupts)
                with self.assertRaises(KeyboardInterrupt):
                    Placeholders(driver, 0, SOME)
                self.check(api, interrupts)
                # A range that was being reserved is lost; the next recording has its own.
                placeholders = Placeholders(driver, 0, SOME)
                lost = (interrupts.struck, after) == ("cuMemAddressReserve", True)
                self.assertEqual(list(api.reservations.values()), [TIB + WINDOW] * (1 + lost))
                self.assertTrue(api.is_reserved(placeholders.low, placeholders.high - placeholders.low))

    def test_a_close_after_an_interrupt_leaves_nothing(self):
        for work in (materialise_all, Placeholders.release_memory, Placeholders.close):
            for at, after in itertools.product(range(calls_of(work).total()), (False, True)):
                api = FakeApi()
                interrupts = Interrupts(api)
                placeholders = Placeholders(Driver(interrupts), 0, SOME)
                interrupts.arm(at, after)
                with self.subTest(work=work, at=at, after=after):
                    with self.assertRaises(KeyboardInterrupt):
                        work(placeholders)
                    placeholders.close()
                    self.check(api, interrupts)


if __name__ == "__main__":
    run_tests()
