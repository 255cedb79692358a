"""Many steps of all kinds in random order; results and errors are upstream's.

A step calls functions, keeps or drops results, takes gradients or not, fails between or in backwards, moves parameters,
or runs in another thread, if that has trees of its own; sometimes it reads outputs of an earlier step.
``PYGRAPH_STRESS`` is the number of steps, 1,500 by default. Parameters, which we patch and upstream records again, move
only in marked steps: if torch guesses the steps, one more recording changes the guess.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch
from indirection import FLAG, requires_cuda
from parity import OURS, UPSTREAM, Context, marked, prime, run_side
from test_trees_concurrency import in_thread, with_own_manager
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.trees.functions.dispatch import PER_THREAD

STEPS = int(os.environ.get("PYGRAPH_STRESS", "1500"))
MOST_KEPT = 12
MOST_MOVES = 40  # upstream records again for each, and gives up after 128


class Interruption(Exception):
    pass


class World:
    """Compiled functions, their results, and the choice of the next step."""

    def __init__(self, ctx: Context, seed: int, marks: bool) -> None:
        """``marks``: whether steps are marked; torch guesses them otherwise."""
        self.ctx = ctx
        self.draw = random.Random(seed)
        self.marks = marks
        self.kept: list[torch.Tensor] = []
        self.number = 0
        self.failing = False
        self.moves_left = MOST_MOVES if marks else 0
        torch.manual_seed(0)
        layers = torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.Linear(32, 24)
        self.model = torch.nn.Sequential(*layers).to(ctx.device)
        self.waves = ctx.compile(lambda x: (x.sin(), x.cos() * 2, x.sum(0)))
        self.mixed = ctx.compile(lambda x, y: (x @ y.mT).relu() @ y)
        self.scaled = ctx.compile(lambda x: x * 0.5 + 1)
        self.sized = ctx.compile(lambda x: x.cumsum(0) * x.size(0), dynamic=True)
        self.parts = ctx.compile(self._parts)
        self.trained = ctx.compile(self.model)

    def _parts(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp() + 1
        self._fail()
        return y.sum(0) * x

    @torch._dynamo.disable
    def _fail(self) -> None:
        if self.failing:
            raise Interruption

    def fresh(self, rows: int = 16) -> torch.Tensor:
        self.number += 1
        generator = torch.Generator(self.ctx.device).manual_seed(self.number % 997)
        return torch.randn(rows, 24, device=self.ctx.device, generator=generator)

    def note(self, what: str, *values: torch.Tensor) -> None:
        # A digest of all results, which saves a copy of each in memory.
        self.ctx.fact(
            what, [float(v.detach().double().sum()) for v in values] + [v.flatten()[:1].item() for v in values]
        )

    def step(self) -> None:
        draw = self.draw
        if self.marks:
            torch.compiler.cudagraph_mark_step_begin()
        actions: list[tuple[Callable[[], Any], int]] = [
            (self.call_one, 30),
            (self.call_several, 30),
            (self.call_parts, 12),
            (self.train, 20),
            (self.forget_the_backward, 4),
            (self.fail_in_the_backward, 5),
            (self.move_parameters, 2),
            (self.read_kept, 12),
            (self.drop_all, 4),
            *([(self.in_another_thread, 1)] if self.ctx.graphs and self.marks and PER_THREAD else []),
        ]
        action = draw.choices([a for a, _ in actions], [weight for _, weight in actions])[0]
        trains = action in (self.train, self.forget_the_backward, self.fail_in_the_backward)
        with torch.enable_grad() if trains else torch.no_grad():
            # If torch guesses the steps, results may be overwritten in the middle of one.
            self.ctx.attempt(action)

    def keep(self, *outputs: torch.Tensor) -> None:
        for output in outputs:
            if self.draw.random() < 0.3:
                self.kept.append(output)
        del self.kept[:-MOST_KEPT]

    def call_one(self) -> None:
        calls = [self.waves, lambda x: (self.scaled(x),), lambda x: (self.sized(x[: self.draw.choice([2, 7, 16])]),)]
        outputs = self.ctx.attempt(self.draw.choice(calls), self.fresh())
        if outputs is not None:
            self.note("one", *outputs)
            self.keep(*outputs)

    def call_several(self) -> None:
        x = self.fresh()
        outputs = list(self.waves(x))
        if self.draw.random() < 0.4:
            del outputs[1]
        calls = [lambda: self.mixed(outputs[0], x)]
        if self.draw.random() < 0.5:
            calls.append(lambda: self.scaled(outputs[-1]))
        unseen = list(outputs)
        for call in calls:
            if not self.marks:  # torch may guess that a call begins a step, which may overwrite earlier results
                self.note("several", *unseen)
                unseen.clear()
            outputs.append(call())
            unseen.append(outputs[-1])
        self.note("several", *unseen)
        self.keep(*outputs)

    def call_parts(self) -> None:
        self.failing = self.draw.random() < 0.25
        output = self.ctx.attempt(self.parts, self.fresh())
        self.failing = False
        if output is not None:
            self.note("parts", output)
            self.keep(output)

    def train(self) -> None:
        self.model.zero_grad(set_to_none=True)
        output = self.trained(self.fresh())
        loss = output.square().mean()
        self.note("loss", loss)
        if self.draw.random() < 0.5:
            del output
        loss.backward()
        self.note("gradients", *(p.grad for p in self.model.parameters() if p.grad is not None))
        self.model.zero_grad(set_to_none=True)

    def forget_the_backward(self) -> None:
        self.note("forgotten", self.trained(self.fresh()))

    def fail_in_the_backward(self) -> None:
        """Fails before the compiled backward, or after it."""
        self.model.zero_grad(set_to_none=True)
        loss = self.trained(self.fresh()).square().mean()

        def fail(gradient: torch.Tensor) -> None:
            raise Interruption

        handle = self.draw.choice([loss, *self.model.parameters()]).register_hook(fail)
        self.ctx.raises(loss.backward)
        handle.remove()
        self.model.zero_grad(set_to_none=True)

    def move_parameters(self) -> None:
        if self.moves_left > 0:
            self.moves_left -= 1
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()

    def read_kept(self) -> None:
        """Reads results of an earlier step, which may be overwritten; upstream decides whether that raises."""
        for output in self.kept[-3:]:
            self.ctx.attempt(lambda output=output: output + 1)
        self.ctx.fact("kept", len(self.kept))

    def drop_all(self) -> None:
        self.kept.clear()

    def in_another_thread(self) -> None:
        def work() -> list[float]:
            found = []
            for _ in marked(range(4)):
                with torch.no_grad():
                    found += [float(o.double().sum()) for o in self.waves(self.fresh())]
            return found

        self.ctx.fact("thread", in_thread(with_own_manager(work)))
        # When any thread's manager ends, this ends for all threads, and so does torch's own shutdown of the others.
        torch._C._set_cached_tensors_enabled(True)


def steps(seed: int, count: int, marks: bool) -> Callable[[Context], None]:
    def program(ctx: Context) -> None:
        world = World(ctx, seed, marks)
        for _ in range(count):
            world.step()
        world.kept.clear()

    return program


@requires_cuda
class TestFastPathStress(TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        prime()

    def test_steps_that_are_marked(self):
        self._compare(steps(0, STEPS // 2, marks=True))

    def test_steps_that_are_guessed(self):
        self._compare(steps(1, STEPS // 2, marks=False))

    def _compare(self, program):
        upstream = run_side(program, UPSTREAM)
        ours = run_side(program, OURS, config={FLAG: "auto"})
        self.assertIsNone(upstream.crash, upstream.traceback)
        self.assertIsNone(ours.crash, ours.traceback)
        for number, (found, expected) in enumerate(zip(ours.notes, upstream.notes, strict=False)):
            where = f"note {number}: {expected.label}"
            self.assertEqual(found.label, expected.label, where)
            # Sums of results whose terms nearly cancel out. Other inputs give very different sums.
            self.assertEqual(found.value, expected.value, where, rtol=1e-5, atol=1e-2)
        self.assertEqual(len(ours.notes), len(upstream.notes))
        self.assertGreater(len(ours.notes), STEPS // 4)
        self.assertGreater(sum(note.label.startswith("error") for note in ours.notes), 0)


if __name__ == "__main__":
    run_tests()
