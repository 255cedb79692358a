"""The parts of the GPU tests' harness that need no GPU: every difference between both sides is found."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "gpu"), str(Path(__file__).resolve().parent)]

from isolated import compare_isolated, run_isolated
from parity import EAGER, OURS, UPSTREAM, ParityError, compare_by_address, compare_sides, run_side
from transcript import ErrorNote, Note, Transcript, differences, normalise, note_of, oracle_differences

# Programs run on the host, compiled by a backend that captures nothing.
ON_THE_HOST = {"device": "cpu", "graphs": False, "backend": "eager"}


def calls(ctx):
    f = ctx.compile(lambda x: x * 2)
    for _ in range(2):
        ctx.record(f(torch.randn(4, device=ctx.device)))


def by_address(program, **options):
    compare_by_address(program, run_side(program, UPSTREAM, **options), **options)


def transcript_of(*values):
    return Transcript(UPSTREAM, notes=[Note(f"value {i}", note_of(value), True) for i, value in enumerate(values)])


class TestTranscripts(TestCase):
    def test_what_differs_from_process_to_process_is_left_out(self):
        for text, wanted in (
            ("at 0x7f00AB and 139871234567890 in pool (0, 17)", "at <address> and <address> in pool <id>"),
            ("process 4711, 1.50 GiB, 12 bytes, step 12345", "process <pid>, <bytes>, <bytes>, step 12345"),
            ('E:\n  File "/usr/torch/x.py", line 3, in f\n    call()\n    ^^^^^^\nE: no', "E:\nE: no"),
            ('  File "/me/test/gpu/a.py", line 7, in f\n    x * 2', '  File "test/gpu/a.py", line 7, in f\n    x * 2'),
        ):
            self.assertEqual(normalise(text), wanted)

    def test_what_makes_values_differ(self):
        base, error = torch.ones(4, 4), ValueError("at 0x34")
        error.__cause__ = KeyError("why")
        for one, other, are_equal in (
            (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
            (torch.tensor([0.0]), torch.tensor([-0.0]), False),
            (base, base.double(), False),
            (base, base.t().clone().as_strided((4, 4), (1, 4)), False),
            (base, base + 2**-23, False),
            (base, base.clone().requires_grad_(), False),
            (ValueError("at 0x12"), ValueError("at 0x34"), True),
            (ValueError("at 0x12"), TypeError("at 0x12"), False),
            (ValueError("at 0x12"), error, False),
        ):
            self.assertEqual(differences(transcript_of(one), transcript_of(other)) == [], are_equal, f"{one} {other}")

    def test_every_part_of_a_transcript_counts(self):
        changes = {"notes": [Note("more", 1, False)], "trees": {"end": None}, "counters": {"inductor": {"x": 1}}}
        changes |= {"warnings": [("UserWarning", "text")], "logs": [("WARNING", "text")], "random": {"cpu": "other"}}
        changes |= {"allocated_bytes": 512, "crash": ErrorNote.of(ValueError("no"))}
        for name, value in changes.items():
            changed = Transcript(OURS)
            setattr(changed, name, value)
            self.assertNotEqual(differences(Transcript(UPSTREAM), changed), [], name)

    def test_the_oracle_allows_a_tolerance_and_no_more(self):
        exact, close, far = (transcript_of(torch.full((3,), value)) for value in (1.0, 1.0 + 1e-7, 1.1))
        found = [len(oracle_differences(exact, other)) for other in (close, far, transcript_of())]
        self.assertEqual(found, [0, 1, 1])


class TestPrograms(TestCase):
    def test_differences_of_ours_are_reported(self):
        """What a user sees also where inputs are given by address, which records more often."""
        by_address(lambda ctx: (calls(ctx), ctx.fact("recordings", 2 if ctx.side == OURS else 1)), **ON_THE_HOST)
        for name, compares, act in (
            ("value", (compare_sides, by_address), lambda ctx: ctx.record(torch.ones(1))),
            ("error", (compare_sides, by_address), lambda ctx: ctx.raises(int, "a")),
            ("random state", (compare_sides, by_address), lambda ctx: torch.rand(1)),
            ("crash", (compare_sides, by_address), lambda ctx: int("a")),
            ("fact", (compare_sides,), lambda ctx: ctx.fact("more", 1)),
            ("warning", (compare_sides,), lambda ctx: warnings.warn("new", stacklevel=1)),
            ("log", (compare_sides,), lambda ctx: logging.getLogger("torch._inductor.cudagraph_trees").warning("new")),
            ("compilation", (compare_sides,), lambda ctx: ctx.compile(lambda x: x + 1)(torch.ones(1))),
        ):
            for compare in compares:
                with self.subTest(name, compare=compare), self.assertRaises(ParityError):
                    compare(lambda ctx, act=act: (calls(ctx), ctx.side == OURS and act(ctx)), **ON_THE_HOST)
        with self.assertRaises(ParityError):  # both sides differ from eager
            compare_sides(lambda ctx: ctx.record(2 if ctx.compiled else 1), **ON_THE_HOST)

    def test_equal_programs_and_a_first_run_that_differs(self):
        """Upstream is asked again."""
        sides = []

        def program(ctx):
            ctx.fact("first of all", not sides)
            sides.append(ctx.side)
            calls(ctx)

        result = compare_sides(program, **ON_THE_HOST)
        self.assertEqual(sides, [UPSTREAM, OURS, UPSTREAM, EAGER])
        self.assertFalse(torch.equal(*result.tensors))

    def test_a_crash_of_both_sides_fails(self):
        with self.assertRaises(ParityError):
            compare_sides(lambda ctx: int("a"), **ON_THE_HOST)

    def test_in_a_process_of_its_own(self):
        answer = compare_isolated("test_parity_harness", "calls", **ON_THE_HOST)
        self.assertEqual((answer["errors"], answer["lost"]), ([], None))
        self.assertTrue(any(path.startswith("note 1") for path in answer["facts"]))
        with self.assertRaisesRegex(ParityError, "no_such_program"):
            run_isolated("test_parity_harness", "no_such_program", UPSTREAM, **ON_THE_HOST)


if __name__ == "__main__":
    run_tests()
