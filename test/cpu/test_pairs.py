"""Training steps with some calls graphed and others un-graphed: values, memory and recordings are right either way."""

from __future__ import annotations

import itertools
import random
import unittest

import torch
from torch.testing._internal.common_utils import TestCase, run_tests
from training_on_cpu import Training, filled

from pygraph_trees.native import binding
from pygraph_trees.selection.decision import Execution


class TestWays(TestCase):
    """Gradients are right whichever way each call goes."""

    @unittest.skipIf(binding.extension is None, "outputs are kept in C++")
    def test_random_programs(self):
        for seed in range(40):
            with self.subTest(seed=seed):
                self.random_program(random.Random(seed))

    def random_program(self, draw):
        """Outputs and gradients are held for a while. A trial may end at any time; new models replace decided ones."""
        training, in_flight, held = Training(), [], []
        with training.running():
            models = [training.model() for _ in range(2)]
            weights = [filled(draw.randrange(1, 9)).requires_grad_() for _ in models]
            for _ in range(120):
                what, index = draw.random(), draw.randrange(2)
                if what < 0.45 and len(in_flight) < 4:
                    models[index].trial.next_way = draw.choice(list(Execution))
                    x, value = draw.randrange(1, 100), weights[index].detach()[0].item()
                    given = filled(x).requires_grad_()
                    output = models[index](given, weights[index])
                    in_flight.append((index, x, value, given, output))
                    held.append((output.detach(), x * value + 1))
                elif what < 0.9 and in_flight:
                    index, x, value, given, output = in_flight.pop(draw.randrange(len(in_flight)))
                    models[index].trial.next_way = draw.choice(list(Execution))
                    found = torch.autograd.grad(output, (given, weights[index]), filled(3))
                    del output
                    held += zip(found, (3 * value, 3 * x), strict=True)
                elif what < 0.95 and in_flight:
                    in_flight.pop(draw.randrange(len(in_flight)))
                elif models[index].trial.is_over:
                    models[index] = training.model()
                else:
                    models[index].trial._end(draw.choice(list(Execution)), None)
                while len(held) > 4:
                    held.pop(draw.randrange(len(held)))
                for found, value in held:
                    self.assertEqual(found, filled(value), rtol=0, atol=0)


class TestSteps(TestCase):
    """Steps of several models; each model is either always graphed or never."""

    def chain(self, outputs, ways):
        """The number of recordings after 40 steps.

        Each model takes the output of the model before it; the last output stays alive until the next step's.
        """
        training = Training(outputs)
        with training.running():
            models = [training.model() for _ in ways]
            weights = [filled(number + 2).requires_grad_() for number in range(len(ways))]
            for model, way in zip(models, ways, strict=True):
                model.trial.next_way = way
            for number in range(40):
                x, given = filled(number), []
                for model, weight in zip(models, weights, strict=True):
                    weight.grad = None
                    given.append(x.detach().clone())
                    x = model(x, weight)
                output = x
                output.backward(filled(1))
                factor = 1
                for value, weight in reversed(list(zip(given, weights, strict=True))):
                    self.assertEqual(weight.grad, value * factor, rtol=0, atol=0)
                    factor *= weight.detach()[0].item()
        return training.manager.recorded

    def test_each_function_is_recorded_once(self):
        """A graphed backward after an un-graphed one begins no step; an un-graphed forward may begin one."""
        for outputs, ways in itertools.product(("keep", "upstream"), itertools.product(Execution, repeat=3)):
            with self.subTest(outputs=outputs, ways=[way.value for way in ways]):
                self.assertEqual(self.chain(outputs, ways), 2 * ways.count(Execution.GRAPHED))

    def test_a_forward_during_another_call_begins_no_step(self):
        training, other = Training(), ["of another call"]
        manager = training.manager
        with training.running():
            model, weight = training.model(), filled(2).requires_grad_()
            for _ in range(3):
                model(filled(1), weight).backward(filled(1))
            node, manager.current_gen = manager.current_node, -7
            self.assertIsNotNone(node)
            self.assertTrue(manager.take_turn(other))
            manager.note_ungraphed([], is_forward=True)
            self.assertEqual((manager.current_node, manager.current_gen, manager.is_taken), (node, -7, True))
            manager.end_turn(other)
            manager.note_ungraphed([], is_forward=True)
            self.assertEqual((manager.current_node, manager.is_taken), (None, False))
            self.assertEqual(manager.current_gen, manager.get_curr_generation())


if __name__ == "__main__":
    run_tests()
