"""Own memory of outputs: a replay writes it again only if nothing else uses it, whatever kind of object holds it."""

import gc
import random
import unittest
import weakref

import torch
from fake_trees import MODE, Live, Plain, Trees
from test_gradients import CompiledFunction
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.outputs.allocations import Storage, View
from pygraph_trees.outputs.own_memory import OwnMemory
from pygraph_trees.report.naming import BACKWARD, FORWARD

CPU, SIZE = torch.device("cpu"), 6  # elements of a block


def storage(number, *views, allocation=0):
    """A storage that generated code allocates; outputs are these views of it, or one output is all of it."""
    found = tuple(View(number + n, *view, torch.float32) for n, view in enumerate(views or (((SIZE,), (1,), 0),)))
    return Storage(found, allocation, 4 * SIZE, (SIZE,), (1,), torch.float32)


def own_memory(*storages, takes=1, is_backward=False, holds=True):
    counters = binding.new_counter(), binding.new_counter()
    log = Plain(mode=BACKWARD if is_backward else FORWARD, moved=holds)
    log.blocks_allocated, log.blocks_given_away = counters
    made = OwnMemory([s.block for s in storages], storages, CPU, log, takes)
    made.allocated, made.given_away = counters
    made.counts = lambda: tuple(counter.value for counter in counters)
    return made


TOO_LARGE = Storage((View(1, (1,), (1,), 0, torch.uint8),), 1, 1 << 62, (1,), (1,), torch.uint8)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(SIZE)


def _saved(output):
    leaf = torch.ones(SIZE, requires_grad=True)
    loss = (leaf * output.requires_grad_()).sum()
    return lambda: torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def _swapped(output):
    held = torch.zeros(SIZE)
    torch.utils.swap_tensors(output, held)
    return _holding(held)


def _holding(held, read=lambda held: held):
    return lambda: read(held)


# By name: a function that makes something that keeps an output alive, and returns a function that reads the output.
HOLDERS = {
    "tensor": _holding,
    "view": lambda output: _holding(output[:]),
    "storage": lambda output: _holding(output.untyped_storage(), lambda held: torch.empty(0).set_(held)),
    "detached": lambda output: _holding(output.detach()),
    "numpy": lambda output: _holding(output.numpy(), torch.from_numpy),
    "dlpack": lambda output: _holding(torch.from_dlpack(output)),
    "saved for a backward": _saved,
    "node of autograd": lambda output: _holding(_Keep.apply(output.requires_grad_()).grad_fn, lambda node: node.kept),
    "lazily cloned": lambda output: _holding(torch._lazy_clone(output)),
    "swapped": _swapped,
    "alias in a list": lambda output: _holding([output.view(2, 3).view(SIZE)], lambda held: held[0]),
}


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestBlocks(TestCase):
    def write(self, own, value):
        """Fills all blocks, as a replay does, and returns the outputs."""
        for base in own.native.take():
            base.fill_(value)
        outputs = [own.output(own.takes + number, None) for number in range(len(own))]
        own.native.finish()
        return outputs

    def test_a_weak_reference_finds_no_tensor_that_was_overwritten(self):
        own = own_memory(storage(0))
        output = self.write(own, 1.0)[0]
        tensor, memory = weakref.ref(output), weakref.ref(output.untyped_storage())
        del output
        self.assertIsNone(tensor())
        self.write(own, 2.0)
        if (found := memory()) is not None:
            self.assertEqual(torch.empty(0).set_(found), torch.full((SIZE,), 1.0))

    def test_memory_that_the_program_resizes_or_uses_on_another_stream_is_given_away(self):
        for use, given_away in (
            (lambda output: output.untyped_storage().resize_(4096), 1),
            (binding.extension.note_stream, 1),
            (lambda output: binding.extension.note_stream(torch.ones(1)), 0),
        ):
            own = own_memory(storage(0))
            use(self.write(own, 1.0)[0])
            self.write(own, 2.0)
            self.assertEqual(own.given_away.value, given_away)

    def test_memory_is_kept_or_not_as_the_program_uses_it(self):
        own = own_memory(storage(0), holds=False)
        for step in range(4):  # as un-graphed: nothing is kept
            self.assertEqual(own.native.held_bytes, 0)
            self.assertIsNone(own.native.item(0))
            self.write(own, step)
        self.write(own, 4.0)  # dead at four calls in a row
        self.assertEqual(own.native.held_bytes, 4 * SIZE)
        before = own.allocated.value
        self.write(own, 5.0)
        self.assertEqual(own.allocated.value, before)
        kept = [self.write(own, step) for step in range(3)]
        self.assertEqual(own.native.held_bytes, 0)
        self.assertEqual([outputs[0][0].item() for outputs in kept], [0, 1, 2])
        own.native.hold(False)
        for step in range(9):
            self.write(own, step)
        self.assertEqual(own.native.held_bytes, 0)

    def test_outputs_that_share_a_block(self):
        own = own_memory(storage(0, ((2,), (1,), 0), ((2, 2), (1, 2), 2)))
        for base in own.native.take():
            base.copy_(torch.arange(6.0))
        first = own.output(1, ((2,), (1,), 0, torch.float32))
        second = own.output(1, (torch.Size((2, 2)), (1, 2), 2, torch.float32))
        bits = own.output(1, ((6,), (1,), 0, torch.int32))
        own.native.finish()
        self.assertEqual((first, second), (torch.tensor([0.0, 1.0]), torch.tensor([[2.0, 4.0], [3.0, 5.0]])))
        self.assertEqual(bits, torch.arange(6.0).view(torch.int32))
        self.assertEqual(first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr())
        first.add_(1)
        self.assertEqual((first._version, second._version), (1, 0))  # as un-graphed code makes them

    def test_a_version_that_a_tensor_on_other_memory_shares_is_left_to_it(self):
        made = torch.zeros(SIZE)
        made.untyped_storage()  # has a Python object now, as a recording's
        trees = Trees({}, [made])
        del made
        (output,) = (entry := trees.entry())([])
        other = output.detach()
        other.data = torch.ones(3)  # for example a parameter that was converted
        del output
        other.add_(1)
        (output,) = entry([])
        self.assertEqual((other._version, output._version), (1, 0))
        other.add_(1)
        self.assertEqual((other._version, output._version), (2, 0))

    def test_tensors_are_of_the_mode_of_their_call(self):
        own = own_memory(storage(0))
        for is_inference in (True, False, True):
            with torch.inference_mode(is_inference):
                self.assertEqual(self.write(own, 1.0)[0].is_inference(), is_inference)
        self.assertEqual(own.allocated.value, 1)

    def test_calls_that_are_not_launched_do_not_hide_outputs_that_stay_alive(self):
        own, kept = own_memory(storage(0)), []
        for step in range(6):
            own.native.take()
            kept.append(self.write(own, step))
        self.assertEqual(own.native.held_bytes, 0)

    def test_a_finalizer_may_release_memory_that_is_being_taken(self):
        own = own_memory(*(storage(number, allocation=number) for number in range(400)))
        self.write(own, 1.0)

        class Cycle:
            def __init__(self):
                self.own = self

            def __del__(self, release=own.native.release):
                release()

        held, before = self.write(own, 2.0), gc.get_threshold()
        self.addCleanup(gc.set_threshold, *before)
        gc.collect()
        Cycle()
        gc.set_threshold(150, 100, 100)
        self.assertEqual(len(own.native.take()), 400)
        self.assertEqual(held[399], torch.full((SIZE,), 2.0))

    def test_a_registry_that_torch_turned_off_is_no_error(self):
        self.addCleanup(torch._C._set_cached_tensors_enabled, True)
        own = own_memory(storage(0), storage(1, allocation=1), is_backward=True)
        self.write(own, 1.0)
        torch._C._set_cached_tensors_enabled(False)
        kept = self.write(own, 2.0), self.write(own, 3.0)
        self.assertEqual([outputs[1][0].item() for outputs in kept], [2, 3])
        del own

    def test_without_memory_nothing_is_lost(self):
        own = own_memory(storage(0), TOO_LARGE)
        for _ in range(2):
            self.assertRaises(torch.OutOfMemoryError, own.native.take)
        self.assertEqual(own.allocated.value, 1)
        own.native.release()
        self.assertIsNone(own.native.item(0))


class Program:
    """A function of one live input, replayed in C++. Its graph fills own memory with the input's value."""

    def __init__(self, *storages, mode=MODE.INFERENCE, views=None):
        self.own = own_memory(*storages, is_backward=mode is MODE.BACKWARD)
        self.x = torch.zeros(1)
        count = len(self.own)
        views = views or {n: (1 + n, None) for n in range(count)}
        self.live = Live([0, *range(1, 1 + count)], None, outputs=views)
        self.live.items = [Plain(index=n, placeholder_tensor=self.x) for n in range(1 + count)]
        substitutes = [torch.empty(0)] * len(views)
        self.trees = Trees({}, [None] * len(views), live=self.live, own=self.own, others=substitutes, mode=mode)
        self.trees.graph.at_launch = self._fill
        self.trees.replayer.own = self.own.native
        self.entry = self.trees.entry()

    def _fill(self):
        for number in range(len(self.own)):
            self.own.native.item(number).fill_(self.x.item())

    def __call__(self, value):
        self.x.fill_(value)
        outputs = self.entry([self.x])
        assert outputs is not None
        return outputs


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestFastPath(TestCase):
    def test_random_holders(self):
        """Outputs that anything holds keep their values, for a while each."""
        program, before = Program(*(storage(n, allocation=n) for n in range(4))), binding.extension.counts()
        drawn, held = random.Random(3), []
        for step in range(300):
            for output in program(float(step)):
                if drawn.random() < 0.3:
                    name = drawn.choice(list(HOLDERS))
                    held.append((step + drawn.randrange(6), float(step), HOLDERS[name](output), name))
            del output
            for _, value, read, name in held:
                self.assertEqual(read().detach().clone(), torch.full((SIZE,), value), f"{name} at step {step}")
            held = [kept for kept in held if kept[0] > step]
        asked, fast, in_python = (after - one for after, one in zip(binding.extension.counts(), before, strict=True))
        self.assertEqual((asked, fast, in_python), (300, 300, 0))
        self.assertGreater(program.own.given_away.value, 50)
        self.assertLess(program.own.allocated.value, 1000)

    def test_a_steady_loop_allocates_nothing_and_asks_nobody(self):
        program = Program(storage(0), storage(1, allocation=1))
        for step in range(8):
            outputs = program(step)
            self.assertEqual(outputs, [torch.full((SIZE,), float(step))] * 2)
            del outputs
        self.assertEqual(program.own.counts(), (2, 0))
        self.assertEqual(len(program.live.prepared), 1)

    def test_views_are_made_in_cpp(self):
        views = {0: (1, ((2,), (1,), 4, torch.float32)), 1: (1, None)}
        views |= {2: (0, ((1, 1), (1, 1), 0, torch.float32)), 3: (0, None)}
        program = Program(storage(0), views=views)
        before = binding.extension.counts()[2]
        for step in range(3):
            part, whole, view, x = program(float(step))
            self.assertEqual((part, whole), (torch.full((2,), float(step)), torch.full((SIZE,), float(step))))
            self.assertEqual(part.storage_offset(), 4)
            self.assertEqual((view, view.data_ptr()), (torch.full((1, 1), float(step)), program.x.data_ptr()))
            self.assertIs(x, program.x)
        self.assertEqual(binding.extension.counts()[2], before)

    def test_a_recording_with_other_own_memory_or_none_is_passed_over(self):
        """The call then goes on in Python, with its inputs."""
        for program, other, why in (
            (Program(storage(0)), own_memory(storage(0)).native, 0),
            (Program(TOO_LARGE), None, 6),
        ):
            program.trees.replayer.own = other or program.own.native
            program.trees.function.slow = slow = tuple(binding.new_counter() for _ in range(8))
            inputs = [program.x]
            self.assertIsNone(program.entry(inputs))
            self.assertEqual(inputs, [program.x])
            self.assertEqual([counter.value for counter in slow], [int(n == why) for n in range(8)])

    def test_python_that_runs_meanwhile_may_take_memory(self):
        """A finalizer that runs while Python is asked holds a block: the recording does not write to it."""
        program, taken = Program(storage(0)), []
        program(1.0)
        program.live.settle(None)
        program.live.answer = lambda: taken.append(program.own.native.item(0).detach()) if not taken else None
        self.assertIsNone(program.entry([program.x]))
        self.assertEqual(taken[0], torch.full((SIZE,), 1.0))


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestGradients(TestCase):
    def setUp(self):
        super().setUp()
        self.parameters = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
        found = [storage(n, ((2, 3), (3, 1), 0), allocation=n) for n in range(3)]
        views = {n: (1 + n, ((2, 3), (3, 1), 0, torch.float32)) for n in range(3)}
        self.program = Program(*found, mode=MODE.BACKWARD, views=views)

    def backward(self, value):
        CompiledFunction.apply(lambda _: self.program(value), len, *self.parameters).backward()

    def drop(self):
        for parameter in self.parameters:
            parameter.grad = None

    def values(self):
        return [parameter.grad[0, 0].item() for parameter in self.parameters]

    def test_gradients_are_the_memory_itself_used_again_once_dropped_and_kept_apart_if_zeroed_in_place(self):
        for is_dropped, counts in ((True, (3, 0)), (False, (6, 3))):  # given away once, as the first gradients stayed
            self.setUp()
            addresses = set()
            for step in range(6):
                self.backward(float(step))
                self.assertEqual(self.values(), [float(step)] * 3)
                addresses.add(tuple(parameter.grad.data_ptr() for parameter in self.parameters))
                for parameter in self.parameters:
                    parameter.grad = None if is_dropped else parameter.grad.zero_()
            self.assertEqual((len(addresses), self.program.own.counts()), (1, counts))

    def test_gradients_that_are_kept_or_accumulated(self):
        kept = []
        for step in range(4):
            self.backward(float(step))
            kept += [parameter.grad for parameter in self.parameters]
            self.drop()
        self.assertEqual([gradient[1, 2].item() for gradient in kept], [step // 3 for step in range(12)])
        for cycle in range(3):
            for micro in range(4):
                self.backward(float(micro + cycle))
            self.assertEqual(self.values(), [6.0 + 4 * cycle] * 3)
            self.drop()

    def test_a_hook_sees_tensors_of_its_own(self):
        seen = []
        self.parameters[1].register_hook(lambda gradient: seen.append(gradient))
        for step in range(3):
            self.backward(float(step))
            self.parameters[1].grad.add_(10)
            self.drop()
        self.assertEqual([gradient[0, 0].item() for gradient in seen], [0.0, 1.0, 2.0])


if __name__ == "__main__":
    run_tests()
