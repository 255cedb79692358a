"""Which addresses are in a graph pool, compared with a walk through its segments; which streams use outputs there."""

from __future__ import annotations

import unittest
from unittest import mock

import torch
from bare_manager import bare_manager
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection.pool import PoolRanges
from pygraph_trees.native import binding
from pygraph_trees.trees.pools import pools as owned

MIB = 1 << 20
_CUDA = int(torch._C._autograd.DeviceType.CUDA)

gaps_and_sizes = st.tuples(st.integers(0, 3), st.integers(1, 3))  # gap 0: segments that touch
pools = st.lists(gaps_and_sizes, max_size=12).flatmap(
    lambda pairs: st.permutations(
        [
            {"address": (sum(g + n for g, n in pairs[:i]) + pairs[i][0]) * 2 * MIB, "total_size": pairs[i][1] * 2 * MIB}
            for i in range(len(pairs))
        ]
    )
)


class Allocator:
    """The segments of a pool, and how many times they were asked for."""

    def __init__(self, segments=()) -> None:
        self.segments = list(segments)
        self.snapshots = 0

    def snapshot(self):
        self.snapshots += 1
        return iter(self.segments)


def holds(segments, address: int) -> bool:
    return any(s["address"] <= address < s["address"] + s["total_size"] for s in segments)


class TestPoolRanges(TestCase):
    @settings(max_examples=200, deadline=None)
    @given(pools, st.lists(st.integers(0, 80 * MIB), max_size=20))
    def test_holds_what_lies_in_a_segment(self, segments, addresses):
        edges = [edge for s in segments for edge in (s["address"], s["address"] + s["total_size"])]
        ranges = PoolRanges(Allocator(segments).snapshot)
        for address in (*addresses, *edges, *(edge - 1 for edge in edges), *(edge + 1 for edge in edges)):
            self.assertEqual(ranges.holds(address), holds(segments, address), hex(address))

    @settings(max_examples=100, deadline=None)
    @example([([], False, [0, 1, 1 << 47])])  # an empty pool is asked once
    @given(st.lists(st.tuples(pools, st.booleans(), st.lists(st.integers(0, 80 * MIB), max_size=4)), max_size=6))
    def test_known_ranges_hold_until_they_are_forgotten(self, steps):
        allocator = Allocator()
        ranges, known, snapshots = PoolRanges(allocator.snapshot), None, 0
        for segments, forgotten, addresses in steps:
            allocator.segments = segments
            if forgotten:
                ranges.forget()
                known = None
            for address in addresses:
                if known is None:
                    known, snapshots = segments, snapshots + 1
                self.assertEqual(ranges.holds(address), holds(known, address))
            self.assertEqual(allocator.snapshots, snapshots)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestStreams(TestCase):
    def test_streams_that_use_an_output_are_known_until_its_step_ends(self):
        manager, pool = bare_manager(), (0, 77)
        manager.current_gen = 3
        output, other = torch.ones(4), torch.ones(4)
        one, two = (torch.Stream(device_type=_CUDA, device_index=0, stream_id=number) for number in (33, 35))
        self.enterContext(mock.patch.dict(owned.OWNED, {pool: lambda: manager}, clear=True))
        self.enterContext(mock.patch.object(owned, "holds", lambda _, storage: storage.data_ptr() != other.data_ptr()))
        for tensor, stream in ((output, one), (output[1:], one), (output, two), (other, one)):
            owned.note_stream(tensor, stream)
        self.assertEqual(owned.streams_that_use(pool, output.untyped_storage()), [one, two])
        self.assertEqual(owned.streams_that_use(pool, other.untyped_storage()), [])
        self.assertEqual(owned.streams_that_use((0, 78), output.untyped_storage()), [])
        manager.current_gen = 4
        self.assertEqual(owned.streams_that_use(pool, output.untyped_storage()), [])
        owned.note_stream(output, two)
        self.assertEqual(owned.streams_that_use(pool, output.untyped_storage()), [two])
        self.assertRaises(TypeError, manager.streams_in_use, output)
        self.assertRaises(TypeError, manager.note_use, "no tensor", 0, 33)


if __name__ == "__main__":
    run_tests()
