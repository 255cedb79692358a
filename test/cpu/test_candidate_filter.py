"""The filter in C++ that rules out recordings, and the check whether outputs are dead."""

from __future__ import annotations

import gc
import struct
import sys
import unittest
import weakref

import torch
from fake_trees import fail
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.managers.candidates import candidate_filter
from pygraph_trees.trees.pools.liveness import Deaths

EXAMPLES = settings(max_examples=200, deadline=None)
COUNT = 10  # tensors
KINDS = st.sampled_from(["held", "held in C++", "cached", "not cached", "list cleared"])
OUTPUTS = st.lists(st.tuples(KINDS, st.booleans()), max_size=5)
# For each recording: its static inputs, whether the last one has moved, and outputs that must be dead.
CHOICES = st.lists(
    st.tuples(st.lists(st.integers(0, COUNT - 1), max_size=12, unique=True), st.booleans(), st.none() | OUTPUTS),
    max_size=6,
)


class Reference:
    """Stands for torch's weak reference to an output, and counts its calls."""

    def __init__(self, dead):
        self.dead, self.asked = dead, 0

    def __call__(self):
        self.asked += 1
        return None if self.dead else 7


class Outputs:
    """Cached outputs of one recording, of the given kinds."""

    def __init__(self, drawn):
        self.holders = []
        self.places = []
        cached, cleared, references = [], [], []
        for index, (kind, dead) in enumerate(drawn):
            cached.append(None if kind == "not cached" else torch.zeros(2))
            if kind == "held":
                self.holders.append(cached[-1])
            elif kind == "held in C++":
                self.holders.append(cached[-1].detach())
            references.append(Reference(kind == "cached" or (dead and not kind.startswith("held"))))
            self.places.append((cleared if kind == "list cleared" else cached, references, index, 8 * index))
        self.are_dead = all(reference.dead for reference in references)


def some_tensors():
    kinds = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2)), torch.zeros(0), torch.zeros(8)[3:]]
    return [kinds[i % 4] if i % 3 else torch.zeros(5) for i in range(COUNT)]


def references_to(items):
    return [sys.getrefcount(item) for item in items]


class TestDeaths(TestCase):
    def test_all_outputs_must_be_dead(self):
        """Torch's references decide. C++ gets the outputs in runs of the same recording."""

        @EXAMPLES
        @given(OUTPUTS)
        def check(drawn):
            outputs = Outputs(drawn)
            deaths = Deaths(outputs.places, lambda: False)
            self.assertIs(deaths.ask(), outputs.are_dead)
            listed = [(list_, *place) for list_, packed in deaths.groups for place in struct.iter_unpack("QQ", packed)]
            for (cached, *place), (list_, _, *expected) in zip(listed, outputs.places, strict=True):
                self.assertIs(cached, list_)
                self.assertEqual(place, expected)

        check()

    def test_unneeded_references_are_released(self):
        references, released = [Reference(True), Reference(False)], []

        def release():
            released.append(1)
            references[1].dead = len(released) == 2
            return len(released) > 1

        deaths = Deaths([([None] * 2, references, n, 0) for n in range(2)], release)
        self.assertEqual((deaths.ask(), len(released)), (False, 1))  # nothing was released
        self.assertEqual((deaths.ask(), deaths.ask(), len(released)), (True, True, 2))


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestCandidateFilter(TestCase):
    def test_no_recording_that_fits_is_passed_over(self):
        """The recording that the filter names need not fit: the filter stops once at most one is left."""

        @EXAMPLES
        @given(CHOICES, st.integers(0, 8), st.sampled_from([1, 30]))
        def check(drawn, begin, times):
            given_ = some_tensors()
            choices, outputs = [], []
            for fixed, last_moved, kinds in drawn * times:
                where = [given_[index].data_ptr() for index in fixed]
                if last_moved and fixed:
                    where[-1] += 1
                outputs.append(None if kinds is None else Outputs(kinds))
                deaths = None if kinds is None else Deaths(outputs[-1].places, fail)
                choices.append((list(zip(fixed, where, strict=True)), deaths))

            def fits(number):
                fixed, deaths = choices[number]
                are_there = all(given_[index].data_ptr() == address for index, address in fixed)
                return are_there and (deaths is None or outputs[number].are_dead)

            find = candidate_filter(choices)
            position = find(begin, given_)
            while position < len(choices) and not fits(position):
                position = find(position + 1, given_)
            expected = next(filter(fits, range(begin, len(choices))), len(choices))
            self.assertEqual(min(position, len(choices)), expected)

        check()

    def test_outputs_and_addresses_rule_recordings_out(self):
        """There are more recordings than bits in a word. Each call looks again; torch's references are not called."""
        given_, cached = some_tensors()[:4], [torch.zeros(1) for _ in range(7)]
        references = [Reference(False)] * 7
        choices = [
            (
                [(0, given_[0].data_ptr()), (1, given_[1].data_ptr() + (number >= 64))],
                Deaths([(cached, references, n, 0) for n in range(7) if not number >> n & 1], fail),
            )
            for number in range(128)
        ]
        find = candidate_filter(choices)
        for kept in (0, 1, 2, 63, 37):
            held = [cached[n] for n in range(7) if kept >> n & 1]
            self.assertEqual(find(0, given_), kept)
            held.append(cached[6])
            self.assertGreaterEqual(find(0, given_), 127)  # the filter does not check the last recording that is left
            del held
        self.assertEqual([find(n, given_) for n in (63, 64, 127, 128, 200)], [63, 128, 127, 128, 128])
        moved = torch.zeros(9)[1:]
        self.assertEqual([find(n, [given_[0], moved]) for n in (0, 126, 127)], [128, 128, 127])
        held = cached[6].detach()  # a reference in C++ alone
        self.assertEqual(find(5, given_), 5)
        held = list(cached)
        cached.clear()
        self.assertEqual(find(5, given_), 5)  # outputs that are gone rule out nothing
        del held
        self.assertEqual({reference.asked for reference in references}, {0})
        self.assertEqual([candidate_filter([])(n, []) for n in (0, 3)], [0, 0])
        with self.assertRaises((TypeError, IndexError)):
            find(0, given_[:1])

    def test_references(self):
        x, lists = [torch.zeros(1)], [[torch.zeros(1)] for _ in range(3)]
        for is_cycle in (False, True):
            before = references_to([*x, *lists])
            find = candidate_filter([([(0, 7)], Deaths([(cached, [None], 0, 0)], fail)) for cached in lists])
            self.assertEqual([find(0, x) for _ in range(9)], [0] * 9)
            if is_cycle:
                lists[0].append(find)
                gone = weakref.ref(lists[0][0])
                del lists[0], before[1]
            del find
            gc.collect()
            self.assertEqual(references_to([*x, *lists]), before)
        self.assertIsNone(gone())


if __name__ == "__main__":
    run_tests()
