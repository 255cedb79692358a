"""Questions about many tensors, and lists of them: what C++ and Python say is the same."""

from __future__ import annotations

import gc
import random
import struct
import sys
import threading
import unittest
import weakref
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import build, tensors
from pygraph_trees.trees import function as trees_function
from pygraph_trees.trees import manager as trees_manager
from pygraph_trees.trees import native_names

_UPSTREAM = "_tensors_data_ptrs_at_indices_equal"


def in_python(compared, addresses, indices):
    """torch's function, which its builds without CUDA lack; it takes lists alone."""
    if not isinstance(compared, list):
        raise TypeError("incompatible function arguments")
    for index in indices:
        if not isinstance(compared[index], torch.Tensor):
            raise RuntimeError("Unable to cast Python instance")
        if compared[index].data_ptr() != addresses[index]:
            return False
    return True


class Reference:
    """A weak reference of torch's to an output's storage; it counts how often it is asked."""

    def __init__(self, dead: bool) -> None:
        self.dead = dead
        self.asked = 0

    def __call__(self) -> int | None:
        self.asked += 1
        return None if self.dead else 7


class Outputs:
    """Cached outputs of one recording, of the kinds that are drawn."""

    def __init__(self, drawn):
        self.holders = []
        self.places = []
        cached, cleared, references = [], [], []
        for index, (kind, dead) in enumerate(drawn):
            cached.append(None if kind == "not cached" else torch.zeros(2))
            if kind != "not cached":
                cached[-1].untyped_storage()  # as torch's own reference to the storage does
            if kind == "held":
                self.holders.append(cached[-1])
            elif kind == "held in C++":
                self.holders.append(cached[-1].detach())
            # What torch says does not count for an output that is cached and that nobody holds: it is dead.
            references.append(Reference(kind == "cached" or (dead and not kind.startswith("held"))))
            self.places.append((cleared if kind == "list cleared" else cached, references, index))
        self.are_dead = all(reference.dead for reference in references)
        self.are_held_by_python = any(kind == "held" for kind, _ in drawn)


EXAMPLES = settings(max_examples=200, deadline=None)
COUNT = 10  # tensors
INDEX = st.integers(0, COUNT - 1)
INDICES = st.lists(INDEX, max_size=12)
KINDS = st.sampled_from(["held", "held in C++", "cached", "not cached", "list cleared"])
OUTPUTS = st.lists(st.tuples(KINDS, st.booleans()), max_size=5)
# The tensors that should lie somewhere, whether the last of them has moved, and outputs that should be dead.
CHOICES = st.lists(st.tuples(INDICES, st.booleans(), st.none() | OUTPUTS), max_size=6)
ORDERS = st.integers(0, 30).flatmap(lambda count: st.permutations(range(count)))
SELECTIONS = st.integers(1, 12).flatmap(
    lambda count: st.tuples(st.lists(st.integers(0, count - 1), max_size=20), st.just(count))
)


def some_tensors():
    kinds = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2)), torch.zeros(0), torch.zeros(8)[3:]]
    return [kinds[i % 4] if i % 3 else torch.zeros(5) for i in range(COUNT)]


def addresses(of, indices):
    return [of[index].data_ptr() for index in indices]


def references_to(items):
    return [sys.getrefcount(item) for item in items]


MOST = (1 << 64) - 1


def packed(*indices):
    return struct.pack(f"{len(indices)}Q", *indices)


def unpacked(indices):
    return struct.unpack(f"{len(indices) // 8}Q", indices)


class TestPython(TestCase):
    """Without C++. A property is a function inside of its test, for hypothesis wants no two classes to share one."""

    native = None

    def setUp(self):
        super().setUp()
        upstream = getattr(torch._C, _UPSTREAM, in_python)
        for target, name, value in ((tensors, "extension", self.native), (torch._C, _UPSTREAM, upstream)):
            patch = mock.patch.object(target, name, value, create=True)
            patch.start()
            self.addCleanup(patch.stop)

    def test_where_they_lie(self):
        @EXAMPLES
        @given(INDICES, INDICES, INDEX)
        def check(fixed, asked, moved):
            given_ = some_tensors()
            where = addresses(given_, fixed)
            question = tensors.Whereabouts(fixed, where, asked)
            self.assertEqual(question.ask(given_), addresses(given_, asked))
            given_[moved] = torch.zeros(7)
            self.assertEqual(question.ask(given_), None if moved in fixed else addresses(given_, asked))
            places = list(zip(fixed, where, strict=True))
            self.assertEqual(list(struct.iter_unpack("QQ", question.places)), places)

        check()

    def check_tuples(self):
        given_ = tuple(some_tensors())
        for fixed in ([], [2, 0]):
            question = tensors.Whereabouts(fixed, addresses(given_, fixed), [1, 3])
            self.assertEqual(question.ask(given_), addresses(given_, [1, 3]))
            self.assertEqual(question.ask((torch.zeros(1), *given_[1:])) is None, 0 in fixed)

    def test_where_those_of_a_tuple_lie(self):
        self.check_tuples()

    def test_empty_tensors(self):
        empty, other = torch.zeros(0), torch.zeros(0)
        question = tensors.Whereabouts([0], [0], [1])
        self.assertEqual(question.ask([empty, other]), [0])
        self.assertEqual(question.ask([other, empty]), [0])
        self.assertIsNone(question.ask([torch.zeros(1), empty]))

    def test_a_part_of_a_storage_lies_elsewhere(self):
        whole = torch.zeros(8)
        question = tensors.Whereabouts([0], [whole.data_ptr()], [1])
        self.assertEqual(question.ask([whole.view(2, 4), whole[2:]]), [whole.data_ptr() + 8])
        self.assertIsNone(question.ask([whole[2:], whole]))

    def test_no_tensors(self):
        for asked in ([], [0]):
            self.assertEqual(tensors.Whereabouts([], [], asked).places, b"")
        self.assertEqual(tensors.Whereabouts([], []).ask([]), [])
        self.assertEqual(tensors.Whereabouts([], []).ask([3, None]), [])
        self.assertTrue(tensors.Deaths([]).ask())
        self.assertEqual(tensors.Deaths([]).groups, ())

    def test_one_address_for_each_index(self):
        for fixed, where in (([1, 2], [3]), ([1], [3, 4]), ([], [3])):
            with self.assertRaises(ValueError):
                tensors.Whereabouts(fixed, where)

    def test_what_is_no_tensor(self):
        for question in (tensors.Whereabouts([], [], [0]), tensors.Whereabouts([0], [7])):
            for value in (3, None, "a tensor", object()):
                with self.assertRaises((TypeError, AttributeError, RuntimeError)):
                    question.ask([value])

    def test_what_is_not_there(self):
        x = torch.zeros(1)
        for question in (
            tensors.Whereabouts([], [], [1]),
            tensors.Whereabouts([1], [x.data_ptr()]),
            tensors.Whereabouts([0, 1], [x.data_ptr()] * 2),
            tensors.Whereabouts([0], [x.data_ptr()], [0, 1 << 40]),
        ):
            with self.assertRaises(IndexError):
                question.ask([x])

    def test_nothing_more_is_asked_where_one_has_moved(self):
        question = tensors.Whereabouts([0, 5], [7, 7], [1, 2])
        self.assertIsNone(question.ask([torch.zeros(1), 3]))

    def test_what_has_no_address(self):
        """Raises what torch says of it, such as that an output was overwritten."""
        sparse = torch.eye(3).to_sparse()
        with self.assertRaises(RuntimeError) as theirs:
            sparse.data_ptr()
        for question in (tensors.Whereabouts([], [], [0]), tensors.Whereabouts([0], [7])):
            with self.assertRaises(RuntimeError) as ours:
                question.ask([sparse])
            self.assertEqual(str(ours.exception), str(theirs.exception))

    def test_the_dead(self):
        @EXAMPLES
        @given(OUTPUTS)
        def check(drawn):
            outputs = Outputs(drawn)
            question = tensors.Deaths(outputs.places)
            self.assertIs(question.ask(), outputs.are_dead)
            listed = [(cached, index) for cached, indices in question.groups for index in unpacked(indices)]
            for (cached, index), (list_, _, number) in zip(listed, outputs.places, strict=True):
                self.assertIs(cached, list_)
                self.assertEqual(index, number)

        check()

    def test_who_dies_later(self):
        """One question, asked again."""
        outputs = Outputs([("cached", True), ("held", False), ("not cached", False)])
        question = tensors.Deaths(outputs.places)
        self.assertFalse(question.ask())
        for _, references, index in outputs.places:
            references[index].dead = True
        self.assertTrue(question.ask())
        references[2].dead = False
        self.assertFalse(question.ask())

    def is_ruled_out(self, outputs):
        """Without C++ only addresses rule out."""
        return False

    def test_which_fits_first(self):
        @EXAMPLES
        @given(CHOICES, st.integers(0, 8))
        def check(drawn, begin):
            given_ = some_tensors()
            choices, moved, outputs = [], [], []
            for fixed, last_moved, kinds in drawn:
                where = addresses(given_, fixed)
                moved.append(last_moved and bool(fixed))
                if moved[-1]:
                    where[-1] += 1
                outputs.append(None if kinds is None else Outputs(kinds))
                deaths = None if kinds is None else tensors.Deaths(outputs[-1].places)
                choices.append((tensors.Whereabouts(fixed, where, fixed[:2]), deaths))
            numbers, end = range(begin, len(choices)), len(choices)
            find = tensors.first_fit(choices)

            expected = (n for n in numbers if not moved[n] and not self.is_ruled_out(outputs[n]))
            found = find(begin, given_)
            if begin <= end:
                self.assertEqual(found, next(expected, end))
            else:
                self.assertGreaterEqual(found, end)  # no choice's number

            # The first that says yes to all is found, one after the other.
            expected = (n for n in numbers if not moved[n] and (outputs[n] is None or outputs[n].are_dead))
            while found < end and choices[found][1] is not None and not choices[found][1].ask():
                found = find(found + 1, given_)
            self.assertEqual(min(found, end), next(expected, end))

        check()

    def test_a_sieve_leads_to_the_same(self):
        """Those that it names before may not fit; none that fits is passed over."""

        @EXAMPLES
        @given(CHOICES, st.integers(0, 8), st.sampled_from([1, 30]))
        def check(drawn, begin, times):
            given_ = some_tensors()
            choices, outputs = [], []
            for fixed, last_moved, kinds in drawn * times:
                where = addresses(given_, fixed)
                if last_moved and fixed:
                    where[-1] += 1
                outputs.append(None if kinds is None else Outputs(kinds))
                deaths = None if kinds is None else tensors.Deaths(outputs[-1].places)
                choices.append((tensors.Whereabouts(fixed, where), deaths))

            def fits(number):
                where, deaths = choices[number]
                return where.ask(given_) is not None and (deaths is None or deaths.ask())

            found = []
            for find in (tensors.first_fit(choices), tensors.candidate_filter(choices)):
                position = find(begin, given_)
                while position < len(choices) and not fits(position):
                    position = find(position + 1, given_)
                found.append(min(position, len(choices)))
            self.assertEqual(found[1], next(filter(fits, range(begin, len(choices))), len(choices)))
            self.assertEqual(found[0], found[1])

        check()

    def test_what_a_sieve_lets_through(self):
        """By what is alive and by where an input lies, of more than a word of choices; asked again each time."""
        given_, cached = some_tensors()[:4], [torch.zeros(1) for _ in range(7)]
        shared = [given_[0].data_ptr()]
        references = [Reference(False)] * 7
        choices = [
            (
                tensors.Whereabouts([0, 1], shared + [given_[1].data_ptr() + (number >= 64)]),
                tensors.Deaths([(cached, references, n) for n in range(7) if not number >> n & 1]),
            )
            for number in range(128)
        ]
        find = tensors.candidate_filter(choices)
        for kept in (0, 1, 2, 63, 37):
            held = [cached[n] for n in range(7) if kept >> n & 1]
            self.assertEqual(find(0, given_), kept)
            held.append(cached[6])
            self.assertGreaterEqual(find(0, given_), 127)  # the last one that is left is not asked
            del held
        self.assertEqual([find(n, given_) for n in (63, 64, 127, 128, 200)], [63, 128, 127, 128, 128])
        moved = torch.zeros(9)[1:]
        self.assertEqual([find(n, [given_[0], moved]) for n in (0, 126, 127)], [128, 128, 127])
        held = cached[6].detach()  # of which Python has no reference
        self.assertEqual(find(5, given_), 5)
        held = list(cached)
        cached.clear()
        self.assertEqual(find(5, given_), 5)  # it can no longer be told
        del held
        self.assertEqual({reference.asked for reference in references}, {0})
        self.assertEqual([tensors.candidate_filter([])(n, []) for n in (0, 3)], [0, 0])
        with self.assertRaises((TypeError, IndexError)):
            find(0, given_[:1])

    def test_which_fits_first_of_none(self):
        self.assertEqual(tensors.first_fit([])(0, []), 0)
        self.assertEqual(tensors.first_fit([])(0, [torch.zeros(1)]), 0)
        self.assertEqual(tensors.first_fit([(tensors.Whereabouts([], []), None)])(0, []), 0)

    def test_which_fits_first_is_asked_anew(self):
        x, y = torch.zeros(1), torch.zeros(1)
        find = tensors.first_fit([(tensors.Whereabouts([0], [t.data_ptr()]), None) for t in (x, y, x)])
        self.assertEqual([find(0, [t]) for t in (x, y, torch.zeros(1))], [0, 1, 3])
        self.assertEqual([find(n, [x]) for n in range(4)], [0, 2, 2, 3])

    def test_first_fit_of_what_cannot_be_asked(self):
        x = torch.zeros(1)
        find = tensors.first_fit([(tensors.Whereabouts([0], [7]), None), (tensors.Whereabouts([1], [7]), None)])
        with self.assertRaises(IndexError):
            find(0, [x])
        with self.assertRaises((TypeError, AttributeError, RuntimeError)):
            find(0, [3, x])
        self.assertEqual(find(0, [x, x]), 2)

    def test_released(self):
        @EXAMPLES
        @given(st.lists(st.integers(0, 9), max_size=20))
        def check(indices):
            things = [torch.zeros(1) for _ in range(10)]
            items = list(things)
            before = references_to(things)
            tensors.released(indices)(items)
            self.assertEqual(references_to(things), [n - (i in indices) for i, n in enumerate(before)])
            for number, (item, thing) in enumerate(zip(items, things, strict=True)):
                self.assertIs(item, None if number in indices else thing)

        check()

    def check_chosen(self, indices, count):
        items = [object() for _ in range(count)]
        same, kept = items, tuple(items)
        before = references_to(kept)
        choose = tensors.chosen(indices, count)
        if list(indices) == list(range(count)):
            self.assertIsNone(choose)
            return
        self.assertIsNone(choose(items))
        self.assertIs(items, same)
        self.assertEqual(len(items), len(indices))
        self.assertTrue(all(item is kept[index] for item, index in zip(items, indices, strict=True)))
        # The list holds an item as often as it is chosen, and held each once.
        after = [references - 1 + indices.count(number) for number, references in enumerate(before)]
        self.assertEqual(references_to(kept), after)

    def test_another_order(self):
        @EXAMPLES
        @given(ORDERS)
        def check(order):
            self.check_chosen(order, len(order))

        check()
        for count in (500, 512, 513, 2000):  # C++ takes other memory for the long ones
            order = list(range(count))
            random.Random(0).shuffle(order)
            self.check_chosen(order, count)

    def test_some_of_a_list(self):
        @EXAMPLES
        @given(SELECTIONS)
        def check(selection):
            self.check_chosen(*selection)

        check()
        for indices, count in (([], 3), ([0, 1], 3), ([1, 1], 2), ([0, 0, 1], 2), ([2], 3), ([0, 1, 0], 2)):
            self.check_chosen(indices, count)

    def test_the_order_as_it_is(self):
        for count in range(4):
            self.assertIsNone(tensors.chosen(range(count), count))
            self.assertIsNone(tensors.chosen(tuple(range(count)), count))

    def test_orders_follow_each_other(self):
        choose, items = tensors.chosen([2, 0, 1], 3), ["a", "b", "b"]
        found = []
        for _ in range(3):
            choose(items)
            found.append("".join(items))
        self.assertEqual(found, ["bab", "bba", "abb"])

    def test_outputs(self):
        others = [NotImplemented, NotImplemented, 3, None]
        cached = [torch.zeros(1), torch.zeros(2), None, None]
        question = tensors.once_more(cached, others)
        found = question()
        if self.native is None:
            self.assertIsNone(found)
            return
        self.assertTrue(all(one is other for one, other in zip(found, [*cached[:2], 3, None], strict=True)))
        found.clear()
        self.assertEqual(len(cached), 4)
        cached[0].requires_grad_().register_hook(lambda gradient: None)
        self.assertIsNone(question())
        cached[0] = None
        self.assertIsNone(question())  # it is made again each time
        cached.clear()
        self.assertIsNone(question())


@unittest.skipIf(tensors.extension is None, "not built for this torch")
class TestNative(TestPython):
    native = tensors.extension

    def is_ruled_out(self, outputs):
        return outputs is not None and outputs.are_held_by_python

    def test_where_those_of_a_tuple_lie(self):
        self.check_tuples()

    def test_who_is_asked(self):
        """Nobody, of a tensor that only the list holds; torch, of all others."""
        cached = [torch.zeros(2) for _ in range(5)]
        for tensor in cached:
            tensor.untyped_storage()
        del tensor
        references = [Reference(dead=True) for _ in cached]
        ask = tensors.Deaths([(cached, references, i) for i in range(5)]).ask

        def asked():
            for reference in references:
                reference.asked = 0
            self.assertTrue(ask())
            return [i for i, reference in enumerate(references) if reference.asked]

        self.assertEqual(asked(), [])
        held = cached[1]
        self.assertEqual(asked(), [1])
        held = held.view(2)  # another tensor on the same storage
        self.assertEqual(asked(), [1])
        held = cached[2].detach()
        self.assertEqual(asked(), [2])
        held = torch.ones(2, requires_grad=True) * cached[0]  # kept for its backward
        self.assertEqual(asked(), [0])
        del held
        self.assertEqual(asked(), [])
        cached[3] = (torch.zeros(2, requires_grad=True) * 2).clone()
        cached[3].untyped_storage()
        self.assertEqual(asked(), [3])  # it has a graph of autograd
        cached[4] = None
        self.assertEqual(asked(), [3, 4])

    def test_who_is_ruled_out(self):
        """As long as Python holds its output, and without a question to torch."""
        outputs = [Outputs([("cached", False), (kind, False)]) for kind in ("held", "held in C++", "cached")]
        deaths = [tensors.Deaths(o.places) for o in outputs]
        find = tensors.first_fit([(tensors.Whereabouts([], []), d) for d in deaths])
        self.assertEqual([find(n, []) for n in range(4)], [1, 1, 2, 3])
        outputs[0].holders.clear()
        self.assertEqual(find(0, []), 0)
        references = [references[index] for o in outputs for _, references, index in o.places]
        self.assertEqual({reference.asked for reference in references}, {0})
        held = outputs[2].places[0][0][0]
        self.assertEqual(find(2, []), 3)
        outputs[2].places[0][0].clear()
        self.assertEqual(find(2, []), 2)  # it can no longer be told
        del held

    def check_raises(self, function, *cases):
        for error, *arguments in cases:
            with self.subTest(function=function, arguments=arguments), self.assertRaises(error):
                getattr(self.native, function)(*arguments)

    def test_bad_arguments_of_addresses(self):
        x = [torch.zeros(1)]
        outside, far = struct.pack("Q", 1), b"\xff" * 8
        self.check_raises(
            "addresses",
            (TypeError,),
            (TypeError, b"", b""),
            (TypeError, b"", b"", x, x),
            (TypeError, b"123", b"", x),
            (TypeError, bytes(8), b"", x),  # half of a place
            (TypeError, bytearray(16), b"", x),
            (TypeError, "", b"", x),
            (TypeError, None, b"", x),
            (TypeError, b"", b"123", x),
            (TypeError, b"", [0], x),
            (TypeError, b"", b"", {1}),
            (TypeError, b"", b"", 3),
            (TypeError, b"", b"", iter(x)),
            (TypeError, b"", bytes(8), [3]),
            (TypeError, bytes(16), b"", [None]),
            (TypeError, b"", bytes(8), [torch.Tensor]),
            (IndexError, outside + bytes(8), b"", x),
            (IndexError, far + bytes(8), b"", x),
            (IndexError, b"", outside, x),
            (IndexError, b"", bytes(8) + far, x),
            (IndexError, b"", bytes(8), []),
            (RuntimeError, b"", bytes(8), [torch.eye(3).to_sparse()]),
        )
        with self.assertRaises(TypeError):
            self.native.addresses(b"", b"", tensors=x)

    def test_bad_arguments_of_first_fit(self):
        x = [torch.zeros(1)]
        self.check_raises(
            "first_fit",
            (TypeError, [], 0),
            (TypeError, [], 0, x, x),
            (TypeError, 3, 0, x),
            (TypeError, {}, 0, x),
            (TypeError, [], "0", x),
            (TypeError, [], None, x),
            (OverflowError, [], 1 << 80, x),
            (TypeError, [], 0, 3),
            (TypeError, [], 0, iter(x)),
            (TypeError, [3], 0, x),
            (TypeError, [[b"", ()]], 0, x),
            (TypeError, [(b"",)], 0, x),
            (TypeError, [(b"", (), ())], 0, x),
            (TypeError, [(bytes(8), ())], 0, x),
            (TypeError, [([], ())], 0, x),
            (TypeError, [(b"", None)], 0, x),
            (TypeError, [(b"", (3,))], 0, x),
            (TypeError, [(b"", (((), b""),))], 0, x),
            (TypeError, [(b"", ((x, 0),))], 0, x),
            (TypeError, [(b"", ((x, b"1234"),))], 0, x),
            (TypeError, [(bytes(16), ())], 0, [3]),
            (IndexError, [(bytes(16), ())], 0, []),
            (IndexError, [(b"\xff" * 16, ())], 0, x),
            (RuntimeError, [(bytes(16), ())], 0, [torch.eye(3).to_sparse()]),
        )
        self.assertEqual(self.native.first_fit([3, (b"", ())], 1, x), 1)  # what comes before is not looked at
        self.assertEqual(self.native.first_fit([(b"", ((x, packed(7, MOST)),))], 0, x), 0)

    def test_bad_arguments_of_a_candidate_filter(self):
        x, row = [torch.zeros(1)], bytes(8)
        good = {"count": 2, "held": [(x, 0, row)], "places": [(0, row, {7: row})]}
        bad = {"count": ("2", None), "held": (3, [3], [(x, 0)], [((), 0, row)], [(x, 0, b"")], [(x, "0", row)])}
        bad["places"] = (3, [3], [(0, row)], [(0, row, [])], [(0, b"1", {})], [(0, row, {"7": row})])
        bad["places"] += ([(0, row, {7: b""})], [(0, row, {-1: row})], [("0", row, {})])
        for name, values in bad.items():
            for value in values:
                with self.subTest(name=name, value=value), self.assertRaises((TypeError, ValueError, OverflowError)):
                    self.native.CandidateFilter(**(good | {name: value}))
        candidate_filter = self.native.CandidateFilter(2, [], [(1, b"\3" + bytes(7), {})])
        for arguments in ((), (0,), (0, ()), ("0", x), (0, x, x), (0, x), (0, [3, 3])):
            self.assertRaises(TypeError, candidate_filter, *arguments)
        self.assertRaises(TypeError, candidate_filter, 0, x, more=3)
        self.assertRaises(RuntimeError, candidate_filter, 0, [3, torch.eye(3).to_sparse()])

    def test_references_of_a_candidate_filter(self):
        x, lists = [torch.zeros(1)], [[torch.zeros(1)] for _ in range(3)]
        where = tensors.Whereabouts([0], [7])
        for is_cycle in (False, True):
            before = references_to([*x, *lists])
            find = tensors.candidate_filter([(where, tensors.Deaths([(cached, [None], 0)])) for cached in lists])
            self.assertEqual([find(0, x) for _ in range(9)], [0] * 9)
            if is_cycle:
                lists[0].append(find)
                gone = weakref.ref(lists[0][0])
                del lists[0], before[1]
            del find
            gc.collect()  # a question to outputs is one, too
            self.assertEqual(references_to([*x, *lists]), before)
        self.assertIsNone(gone())

    def test_bad_arguments_of_count_dead(self):
        x = [torch.zeros(1)]
        self.check_raises(
            "count_dead",
            (TypeError, []),
            (TypeError, [], 0, 0),
            (TypeError, 3, 0),
            (TypeError, [], "0"),
            (OverflowError, [], 1 << 80),
            (TypeError, [3], 0),
            (TypeError, [[x, b""]], 0),
            (TypeError, [(x, b"", b"")], 0),
            (TypeError, [((), b"")], 0),
            (TypeError, [(x, 0)], 0),
            (TypeError, [(x, b"1234")], 0),
            (TypeError, [([object()], packed(0))], 0),
        )
        for indices in ((7,), (MOST,), (7, MOST)):
            self.assertEqual(self.native.count_dead([(x, packed(*indices))], 0), 0)
        self.assertEqual(self.native.count_dead([(x, packed(7))], 9), 9)
        self.assertEqual(self.native.count_dead([], 0), 0)

    def test_bad_arguments_of_release(self):
        items = ["a", "b", "c"]
        self.check_raises(
            "release",
            (TypeError, packed(0)),
            (TypeError, packed(0), items, items),
            (TypeError, packed(0)[:-1], items),
            (TypeError, [0], items),
            (TypeError, packed(0), tuple(items)),
            (TypeError, packed(0), None),
            (IndexError, packed(3), items),
            (IndexError, packed(MOST), items),
        )
        self.assertEqual(items, ["a", "b", "c"])

    def test_bad_arguments_of_permute(self):
        items = [object() for _ in range(3)]
        kept, before = tuple(items), references_to(items)

        self.check_raises(
            "permute",
            (TypeError, packed(0, 1, 2)),
            (TypeError, packed(0, 1, 2), items, items),
            (TypeError, packed(0, 1, 2)[:-1], items),
            (TypeError, [2, 1, 0], items),
            (TypeError, bytearray(24), items),
            (ValueError, packed(1, 0), items),
            (ValueError, packed(0, 1, 2, 3), items),
            (ValueError, b"", items),
            (ValueError, packed(2, 1, 0), kept),
            (ValueError, packed(2, 1, 0), None),
            (ValueError, packed(2, 1, 1), items),
            (ValueError, packed(0, 0, 0), items),
            (ValueError, packed(2, 1, 3), items),
            (ValueError, packed(2, 1, (1 << 64) - 1), items),
        )
        for count in (512, 513):
            many = list(range(count))
            self.check_raises(
                "permute",
                (ValueError, packed(*range(count - 1), 0), many),
                (ValueError, packed(*range(count - 1), count), many),
                (ValueError, packed(*range(count + 1)), many),
            )
            self.assertEqual(many, list(range(count)))
        self.assertEqual(len(items), 3)
        self.assertTrue(all(item is other for item, other in zip(items, kept, strict=True)))
        self.assertEqual(references_to(items), before)
        empty = []
        self.assertIsNone(self.native.permute(b"", empty))
        self.assertEqual(empty, [])

    def test_bad_arguments_of_outputs(self):
        x = torch.zeros(1)
        before = sys.getrefcount(x)
        self.check_raises(
            "outputs",
            (TypeError, []),
            (TypeError, [], [], []),
            (TypeError, 3, []),
            (TypeError, [None], 3),
            (TypeError, [3], [4]),
            (TypeError, [x, 3], [None, None]),
        )
        for cached, others in (([x], []), ([x], [None, None]), ([x, None], [None, NotImplemented])):
            self.assertIsNone(self.native.outputs(cached, others))
        cached = others = None
        self.assertEqual(sys.getrefcount(x), before)

    def test_an_order_for_a_list_of_another_length(self):
        choose = tensors.chosen([1, 0], 2)
        for items in ([1], [1, 2, 3]):
            kept = list(items)
            with self.assertRaises(ValueError):
                choose(items)
            self.assertEqual(items, kept)

    def test_every_name_that_it_looks_for_is_there(self):
        """In the classes here, and in those of the torch that is installed."""
        self.assertGreater(len(self.native.NAMES), 25)
        with self.assertNoLogs("pygraph_trees.native"):
            native_names.check(**self.classes())
        self.assertIs(tensors.extension, self.native)

    def test_a_name_that_is_missing_turns_it_off_and_the_status_says_which(self):
        for owner, name in (("manager", "turn"), ("graph", "replay"), ("debug", "RECORD")):
            with (
                mock.patch.object(self.native, "NAMES", [*self.native.NAMES, f"{owner}.{name}_by_another_name"]),
                mock.patch.object(tensors, "extension", self.native),
                mock.patch.object(tensors, "why_without", None),
            ):
                native_names.check(**self.classes())
                self.assertIsNone(tensors.extension)
                self.assertIn(f"{owner}.{name}_by_another_name", build.status())

    def classes(self):
        return {
            "manager": trees_manager.Manager,
            "candidates": trees_manager.Candidates,
            "recording": trees_manager.Recording,
            "function": trees_function.FunctionModel,
        }


class TestThreads(TestCase):
    def check(self):
        """Each that ever was has a number of its own."""
        found = [tensors.thread_id(), tensors.thread_id()]
        self.assertEqual(found[0], found[1])
        for _ in range(20):
            thread = threading.Thread(target=lambda: found.append(tensors.thread_id()))
            thread.start()
            thread.join()
        self.assertEqual(len(set(found)), 21)

    def test_in_cpp(self):
        self.check()

    def test_in_python(self):
        with mock.patch.object(tensors, "extension", None):
            self.check()

    def test_a_function_is_steady_in_one(self):
        manager = mock.Mock(spec=["replay_fast"])
        manager.replay_fast.return_value = [1]
        for per_thread in (True, False):
            with mock.patch.object(trees_function, "PER_THREAD", per_thread):
                model = trees_function.FunctionModel.of(len, is_backward=False, is_inference=True)
                model.add(of_integers=False)
                model.has_fast_path_in(manager, 7)
            found = [model.fast_call([])]
            thread = threading.Thread(target=lambda model=model, found=found: found.append(model.fast_call([])))
            thread.start()
            thread.join()
            self.assertEqual(found, [[1], None if per_thread else [1]])


if __name__ == "__main__":
    run_tests()
