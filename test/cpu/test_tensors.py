"""Questions about many tensors: the answers of C++ and of Python are the same."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees import tensors


def in_python(compared, addresses, indices):
    """torch's function, which its builds without CUDA lack."""
    return all(compared[index].data_ptr() == addresses[index] for index in indices)


class Reference:
    """A weak reference of torch's to an output's storage; it counts how often it is asked."""

    def __init__(self, dead: bool) -> None:
        self.dead = dead
        self.asked = 0

    def __call__(self) -> int | None:
        self.asked += 1
        return None if self.dead else 7


INDICES = st.lists(st.integers(0, 9), max_size=12)
KINDS = st.sampled_from(["held", "cached", "not cached", "list cleared"])
OUTPUTS = st.lists(st.tuples(KINDS, st.booleans()))


class TensorsTestCase(TestCase):
    native = None

    def setUp(self):
        super().setUp()
        for target, name, value in (
            (tensors, "native", self.native),
            (torch._C, "_tensors_data_ptrs_at_indices_equal", in_python),
        ):
            patch = mock.patch.object(target, name, value, create=True)
            patch.start()
            self.addCleanup(patch.stop)

    def check_addresses(self, indices, moved):
        given_ = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2)), torch.zeros(0), torch.zeros(8)[3:]]
        given_ = [given_[i % 4] if i % 3 else torch.zeros(5) for i in range(10)]
        found = [given_[i].data_ptr() for i in indices]
        self.assertEqual(tensors.addresses_of(indices)(given_), found)
        self.assertEqual(tensors.addresses_of(indices)(tuple(given_)), found)
        same = tensors.same_addresses(indices, found)
        self.assertIs(same(given_), True)
        others = list(given_)
        others[moved] = torch.zeros(7)
        self.assertIs(same(others), moved not in indices)

    def test_no_tensors(self):
        self.assertEqual(tensors.addresses_of([])([]), [])
        self.assertTrue(tensors.same_addresses([], [])([]))
        self.assertTrue(tensors.are_dead([])())

    def test_one_address_for_each_index(self):
        with self.assertRaises(ValueError):
            tensors.same_addresses([1, 2], [3])

    def test_what_is_no_tensor(self):
        for question in (tensors.addresses_of([0]), tensors.same_addresses([0], [7])):
            with self.assertRaises((TypeError, AttributeError)):
                question([3])
        with self.assertRaises(IndexError):
            tensors.addresses_of([5])([torch.zeros(1)])

    def check_the_dead(self, outputs):
        """What torch says counts, but for outputs that are cached and that nobody holds: those are dead."""
        held, cached, cleared = [], [], []
        references, places = [], []
        for index, (kind, dead) in enumerate(outputs):
            cached.append(None if kind == "not cached" else torch.zeros(2))
            if kind == "held":
                held.append(cached[-1])
            elif kind == "cached":
                cached[-1].untyped_storage()  # as torch's own reference to the storage does
                dead = True
            references.append(Reference(dead))
            places.append((cleared if kind == "list cleared" else cached, references, index))
        expected = all(reference.dead for reference in references)
        self.assertIs(tensors.are_dead(places)(), expected)

    def test_what_has_no_address(self):
        """Raises what torch says of it, such as that an output was overwritten."""
        sparse = torch.eye(3).to_sparse()
        with self.assertRaises(RuntimeError) as theirs:
            sparse.data_ptr()
        for question in (tensors.addresses_of([0]), tensors.same_addresses([0], [7])):
            with self.assertRaises(RuntimeError) as ours:
                question([sparse])
            self.assertEqual(str(ours.exception), str(theirs.exception))

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
        self.assertIsNone(question())  # it is made anew each time
        cached.clear()
        self.assertIsNone(question())


class TestPython(TensorsTestCase):
    @given(INDICES, st.integers(0, 9))
    def test_addresses(self, indices, moved):
        self.check_addresses(indices, moved)

    @given(OUTPUTS)
    def test_the_dead(self, outputs):
        self.check_the_dead(outputs)


@unittest.skipIf(tensors.load_native() is None, "not built for this torch")
class TestNative(TensorsTestCase):
    native = tensors.load_native()

    @given(INDICES, st.integers(0, 9))
    def test_addresses(self, indices, moved):
        self.check_addresses(indices, moved)

    @given(OUTPUTS)
    def test_the_dead(self, outputs):
        self.check_the_dead(outputs)

    def test_who_is_asked(self):
        """Nobody, of a tensor that only the list holds; torch, of all others."""
        cached = [torch.zeros(2) for _ in range(5)]
        for tensor in cached:
            tensor.untyped_storage()
        del tensor
        references = [Reference(dead=True) for _ in cached]
        ask = tensors.are_dead([(cached, references, i) for i in range(5)])

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
        del held
        self.assertEqual(asked(), [])
        cached[3] = (torch.zeros(2, requires_grad=True) * 2).clone()
        cached[3].untyped_storage()
        self.assertEqual(asked(), [3])  # it has a graph of autograd
        cached[4] = None
        self.assertEqual(asked(), [3, 4])

    def test_bad_arguments(self):
        x = [torch.zeros(1)]
        for call, error in (
            (lambda: self.native.same_addresses(b"123", x), TypeError),
            (lambda: self.native.same_addresses(b"", {1}), TypeError),
            (lambda: self.native.addresses(bytes(8)), TypeError),
            (lambda: self.native.addresses((5).to_bytes(8, "little"), x), IndexError),
            (lambda: self.native.addresses(b"\xff" * 8, x), IndexError),
            (lambda: self.native.count_dead([3], 0), TypeError),
            (lambda: self.native.count_dead([], 1 << 80), OverflowError),
            (lambda: self.native.count_dead([([object()], 0)], 0), TypeError),
            (lambda: self.native.outputs([3], [4]), TypeError),
            (lambda: self.native.outputs([None], 3), TypeError),
            (lambda: self.native.addresses(bytes(8), [torch.zeros(1, device="meta").to_sparse()]), RuntimeError),
        ):
            with self.assertRaises(error):
                call()
        self.assertEqual(self.native.count_dead([(x, 7), (x, -1)], 0), 0)
        self.assertEqual(self.native.count_dead([(x, 7)], 9), 9)

    def test_it_is_only_used_with_the_torch_that_it_was_built_for(self):
        with mock.patch.object(torch, "__version__", "2.11.0+other"):
            self.assertIsNone(tensors.load_native())


if __name__ == "__main__":
    run_tests()
