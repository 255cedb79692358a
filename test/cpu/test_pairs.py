"""Training steps with some calls graphed and others un-graphed: values, memory and recordings are right either way."""

from __future__ import annotations

import collections
import itertools
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils.checkpoint import checkpoint
from training_on_cpu import Training, filled

from pygraph_trees.selection.decision import Execution

GRAPHED, UNGRAPHED = Execution.GRAPHED, Execution.UNGRAPHED
OUTPUTS = ("keep", "upstream")

# Each schedule is one step. F and B are a model's forward and backward of a micro-batch. R is a backward that retains
# the graph. D drops the output of a forward, so that it has no backward, as after an exception. G and H are the forward
# and backward of another model.
SCHEDULES = {
    "1F1B": "F1 F2 B1 F3 B2 F4 B3 F5 B4 B5",
    "1F1B with three in flight": "F1 F2 F3 B1 F4 B2 F5 B3 B4 B5",
    "all forwards first": "F1 F2 F3 B1 B2 B3",
    "in reverse": "F1 F2 F3 B3 B2 B1",
    "accumulation": "F1 B1 F2 B2 F3 B3",
    "two backwards of a forward": "F1 R1 B1 F2 R2 B2",
    "a forward without a backward": "F1 D1 F2 B2",
    "one before a backward": "F1 F2 D2 B1",
    "one of many": "F1 D1 F2 D2 F3 D3 F4 B4",
    "two models": "F1 G1 H1 B1",
    "two models in turn": "F1 B1 G1 H1",
    "two models, 1F1B": "F1 G1 F2 B1 H1 G2 B2 H2",
}
BACKWARDS = {"F": "B", "G": "H"}


class Program:
    """Runs a schedule and counts wrong gradients."""

    def __init__(self, outputs="keep"):
        self.training = Training(outputs)
        self.models = {name: self.training.model() for name in BACKWARDS}
        self.weights = {name: filled(number + 2).requires_grad_() for number, name in enumerate(BACKWARDS)}
        self.wrong = self.numbers = 0

    def step(self, schedule, way, *, each=False):
        """Args:
        way: returns the way of a forward and its backwards.
        each: whether it is also called for each backward.
        """
        in_flight, expected = {}, collections.Counter()
        for what, number in schedule.split():
            name = {"B": "F", "R": "F", "D": "F", "H": "G"}.get(what, what)
            model, weight = self.models[name], self.weights[name]
            if what == "D":
                del in_flight[name, number]
                continue
            if what in BACKWARDS or each:
                model.trial.next_way = way()
            if what in BACKWARDS:
                self.numbers += 1
                in_flight[name, number] = self.numbers, model(filled(self.numbers), weight)
                continue
            x, output = in_flight[name, number] if what == "R" else in_flight.pop((name, number))
            output.backward(filled(1), retain_graph=what == "R")
            del output
            expected[name] += x
            self.wrong += not torch.equal(weight.grad, filled(expected[name]))
        for weight in self.weights.values():
            weight.grad = None

    def run(self, schedule, way, steps=12, **given):
        with self.training.running():
            for _ in range(steps):
                self.step(schedule, way, **given)
        return self.wrong


class TestWays(TestCase):
    """Gradients are right whichever way each call goes."""

    def test_outputs_are_kept(self):
        for (name, schedule), seed in itertools.product(SCHEDULES.items(), range(6)):
            with self.subTest(name, seed=seed):
                draw = random.Random(seed)
                each = seed % 2 == 1 and "R" not in schedule  # torch does not replay over held tensors
                self.assertEqual(Program().run(schedule, lambda: draw.choice(list(Execution)), each=each), 0)  # noqa: B023

    def test_as_upstream_keeps_them(self):
        """A schedule with right gradients when all calls are graphed has right gradients whichever way they go."""
        found = []
        for name, schedule in SCHEDULES.items():
            if Program("upstream").run(schedule, lambda: GRAPHED):
                continue  # torch begins a step while a forward is in flight
            found.append(name)
            for seed in range(6):
                with self.subTest(name, seed=seed):
                    draw = random.Random(seed)
                    each = seed % 2 == 1 and "R" not in schedule
                    wrong = Program("upstream").run(schedule, lambda: draw.choice(list(Execution)), each=each)  # noqa: B023
                    self.assertEqual(wrong, 0)
        self.assertGreater(len(found), 5)

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

    def test_a_forward_that_is_computed_again_in_the_backward(self):
        for ways in itertools.product(Execution, repeat=3):
            with self.subTest(ways=[way.value for way in ways]):
                training = Training()
                with training.running():
                    model, weight = training.model(), filled(2).requires_grad_()
                    for number in range(12):
                        weight.grad = None
                        # Forwards and recomputations share one cycle, so their ways can differ.
                        turn = itertools.cycle(ways)

                        def block(x, model=model, weight=weight, turn=turn):
                            model.trial.next_way = next(turn)
                            return model(x, weight)

                        hidden = checkpoint(block, filled(number), use_reentrant=False)
                        checkpoint(block, hidden, use_reentrant=False).backward(filled(1))
                        self.assertEqual(weight.grad, filled(number * 2 + 1 + 2 * number))

    def test_backwards_in_another_thread(self):
        """Autograd runs backwards in its own threads."""
        for seed, outputs in itertools.product(range(6), OUTPUTS):
            draw, program = random.Random(seed), Training(outputs)
            with program.running(), ThreadPoolExecutor(1) as other:
                model, weight = program.model(), filled(2).requires_grad_()
                for number in range(12):
                    weight.grad = None
                    model.trial.next_way = draw.choice(list(Execution))
                    output = model(filled(number), weight)
                    model.trial.next_way = draw.choice(list(Execution))
                    other.submit(output.backward, filled(1)).result()
                    self.assertEqual(weight.grad, filled(number))


class TestSteps(TestCase):
    """Steps of several models; each model is either always graphed or never."""

    def chain(self, outputs, ways, steps=40):
        """Each model takes the output of the model before it; the last output stays alive until the next step's."""
        training = Training(outputs)
        with training.running():
            models = [training.model() for _ in ways]
            weights = [filled(number + 2).requires_grad_() for number in range(len(ways))]
            for model, way in zip(models, ways, strict=True):
                model.trial.next_way = way
            for number in range(steps):
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
        return training.manager, models

    def test_each_function_is_recorded_once(self):
        """A graphed backward after an un-graphed one begins no step; an un-graphed forward may begin one."""
        for outputs, ways in itertools.product(OUTPUTS, itertools.product(Execution, repeat=3)):
            with self.subTest(outputs=outputs, ways=[way.value for way in ways]):
                manager, _ = self.chain(outputs, ways)
                self.assertEqual(manager.recorded, 2 * ways.count(GRAPHED))

    def test_what_a_backward_still_reads_stays_in_the_pool(self):
        """After the first step, only the last output is still alive when the next step begins."""
        for ways in itertools.product(Execution, repeat=3):
            few, many = ([model.moved for model in self.chain("keep", ways, steps)[1]] for steps in (20, 40))
            with self.subTest(ways=[way.value for way in ways]):
                last_is_graphed = ways[-1] is GRAPHED
                self.assertEqual([after - before for before, after in zip(few, many, strict=True)][:2], [0, 0])
                self.assertEqual(many[-1] > few[-1], last_is_graphed)

    def test_forwards_without_a_backward_let_no_path_grow(self):
        """An evaluation without ``no_grad``, with a function that has no backward between the forwards."""
        for way in Execution:
            with self.subTest(way=way.value):
                training, recorded, warmups = Training(), [], []
                with training.running():
                    model, weight, double = training.model(), filled(2).requires_grad_(), training.inference(torch.add)
                    model.trial.next_way = way
                    for number in range(120):
                        output = model(filled(number), weight)
                        held = double(output.detach(), output.detach())  # until the next output replaces it
                        self.assertEqual(held, filled(4 * number + 2))
                        recorded.append(training.manager.recorded)
                        functions = training.manager.ids_to_funcs.values()
                        warmups.append(sum(function.model.log.warmups for function in functions))
                self.assertEqual((recorded[60], warmups[60]), (recorded[-1], warmups[-1]))
                self.assertGreater(recorded[-1], 0)

    def manager(self):
        """A manager whose last step, a graphed forward and backward, left a path."""
        program = Program()
        program.run("F1 B1", lambda: GRAPHED, steps=3)
        manager = program.training.manager
        self.assertIsNotNone(manager.current_node)
        return program, manager

    def test_a_forward_during_another_call_begins_no_step(self):
        program, manager = self.manager()
        with program.training.running():
            node, other = manager.current_node, ["of another call"]
            manager.current_gen = -7
            self.assertTrue(manager.take_turn(other))
            manager.note_ungraphed([], is_forward=True)
            self.assertEqual((manager.current_node, manager.current_gen, manager.is_taken), (node, -7, True))
            manager.end_turn(other)
            manager.note_ungraphed([], is_forward=True)
            self.assertEqual((manager.current_node, manager.is_taken), (None, False))
            self.assertEqual(manager.current_gen, manager.get_curr_generation())


if __name__ == "__main__":
    run_tests()
