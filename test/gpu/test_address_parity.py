"""The programs of ``test_trees_*`` with inputs by address: they see the same as under upstream.

There every feature flag is off. Here ours runs with its defaults, but placement must not change a bit, so that replays
take the fast path. Recordings, memory, counters and warnings then differ. The program's notes must not: values bit for
bit, errors, and the state of random generators.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import parity
import test_trees_concurrency
import test_trees_inputs
import test_trees_mutation
import test_trees_random
import test_trees_training
import torch
from parity import OURS, UPSTREAM, Parity, ParityError, run_side
from torch.testing._internal.common_utils import run_tests
from transcript import ErrorNote, Note, Transcript, differences

if TYPE_CHECKING:
    from collections.abc import Callable

    from parity import Context

FLAGS = {"triton.pygraph_placement": "exact", "triton.pygraph_outputs": "upstream"}


class ByAddress(parity.ParityTestCase):
    """A test case whose programs run under upstream and under ours with :data:`FLAGS`."""

    def parity(
        self, program: Callable[[Any], None], *, crash: bool = False, run: Any = run_side, **options: Any
    ) -> Any:
        options = {k: v for k, v in options.items() if k not in ("oracle", "besides", "tolerance")}
        upstream, ours = run(program, UPSTREAM, **options), with_flags(run)(program, OURS, **options)
        if not crash and (upstream.crash or ours.crash):
            raise ParityError(f"the program raised:\n{upstream.traceback}{ours.traceback}")
        found = differences(_seen(upstream), _seen(ours))
        if found:
            raise ParityError("\n".join(found[:25]))
        return Parity(upstream, upstream)  # other assertions of a test are about upstream's recordings


def with_flags(run: Any) -> Any:
    @functools.wraps(run)
    def run_with_flags(*args: Any, **options: Any) -> Any:
        with mock.patch.object(parity, "FLAGS_OFF", FLAGS):
            return run(*args, **options)

    return run_with_flags


def _seen(transcript: Transcript) -> Transcript:
    """The facts that a program's user sees."""
    notes = [note for note in transcript.notes if note.oracle or _is_of_error(note)]
    return Transcript(
        transcript.side,
        notes=[replace(note, label=note.label.split()[0]) for note in notes],
        random=transcript.random,
        crash=transcript.crash,
    )


def _is_of_error(note: Note) -> bool:
    return isinstance(note.value, ErrorNote) or note.label.startswith("no error ")


class TestTrainingByAddress(ByAddress, test_trees_training.TestTreeTraining):
    pass


class TestMutationByAddress(ByAddress, test_trees_mutation.TestTreeMutation):
    def test_mutation_is_an_error_by_setting(self) -> None:
        """We skip no graph, so nothing raises: the input is mutated in place."""

        def program(ctx: Context) -> None:
            @ctx.compile
            def f(x: torch.Tensor) -> torch.Tensor:
                x.add_(1)
                return x * 2

            for _ in range(4):
                x = torch.randn(4, 8, device=ctx.device)
                before = x.clone()
                ctx.record(f(x) - 2 * (before + 1), x - (before + 1))

        found = with_flags(run_side)(program, OURS, config={"triton.cudagraph_or_error": True})
        self.assertIsNone(found.crash, found.traceback)
        self.assertEqual(found.trees[-1][1].recordings, 1)
        for note in found.notes:
            self.assertEqual(note.value.value.abs().max(), 0)


class TestInputsByAddress(ByAddress, test_trees_inputs.TestTreeInputs):
    pass


class TestRandomByAddress(ByAddress, test_trees_random.TestTreeRandom):
    pass


class TestConcurrencyByAddress(ByAddress, test_trees_concurrency.TestTreeConcurrency):
    pass


if __name__ == "__main__":
    run_tests()
