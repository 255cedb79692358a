"""The parts of the GPU tests' harness that need no GPU: normalising, comparing, running programs."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
for folder in (GPU_TESTS, Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import test_address_parity
from isolated import compare_isolated, run_isolated
from parity import EAGER, OURS, UPSTREAM, Context, ParityError, compare_sides
from transcript import (
    ErrorNote,
    Note,
    Transcript,
    differences,
    normalise,
    note_of,
    oracle_differences,
)

# Programs run on the host, compiled by a backend that captures nothing.
ON_THE_HOST = {"device": "cpu", "graphs": False, "backend": "eager"}
compare_on_the_host = functools.partial(compare_sides, **ON_THE_HOST)


def calls(ctx: Context) -> None:
    f = ctx.compile(lambda x: x * 2)
    for _ in range(2):
        ctx.record(f(torch.randn(4, device=ctx.device)))


def transcript_of(*values: Any, side: str = UPSTREAM) -> Transcript:
    return Transcript(side, notes=[Note(f"value {index}", note_of(value), True) for index, value in enumerate(values)])


class TestNormalise(TestCase):
    def test_addresses_and_numbers_of_the_process(self) -> None:
        text = "at 0x7f00AB and 139871234567890 in pool (0, 17) of Process 4711, 1.50 GiB of 12 bytes, step 12345"
        self.assertEqual(
            normalise(text),
            "at <address> and <address> in pool <id> of process <pid>, <bytes> of <bytes>, step 12345",
        )

    def test_frames_of_libraries_go_and_those_of_programs_stay(self) -> None:
        text = (
            'Traceback:\n  File "/usr/lib/torch/x.py", line 3, in run\n    call()\n    ^^^^^^\n'
            '  File "/home/me/test/gpu/test_trees_paths.py", line 7, in f\n    return x * 2\nValueError: no'
        )
        expected = 'Traceback:\n  File "test/gpu/test_trees_paths.py", line 7, in f\n    return x * 2\nValueError: no'
        self.assertEqual(normalise(text), expected)


class TestNotes(TestCase):
    def test_bits_tell_zeros_and_nans_apart(self) -> None:
        nans = (transcript_of(torch.tensor([torch.nan])) for _ in range(2))
        self.assertEqual(differences(*nans), [])
        self.assertNotEqual(differences(transcript_of(torch.tensor([0.0])), transcript_of(torch.tensor([-0.0]))), [])

    def test_what_makes_tensors_differ(self) -> None:
        base = torch.ones(4, 4)
        others = [base.double(), base[:2], base.t()[:, :4].clone().as_strided((4, 4), (1, 4)), base + 2**-23]
        others.append(base.clone().requires_grad_())
        for other in others:
            self.assertNotEqual(differences(transcript_of(base), transcript_of(other)), [], msg=str(other))
        self.assertEqual(differences(transcript_of(base), transcript_of(base.clone())), [])

    def test_errors_are_compared_by_class_message_and_cause(self) -> None:
        error, other = ValueError("at 0x12"), ValueError("at 0x34")
        self.assertEqual(differences(transcript_of(error), transcript_of(other)), [])
        other.__cause__ = KeyError("why")
        self.assertNotEqual(differences(transcript_of(error), transcript_of(other)), [])
        self.assertNotEqual(differences(transcript_of(error), transcript_of(TypeError("at 0x12"))), [])
        self.assertEqual(ErrorNote.of(other).type, "builtins.ValueError")

    def test_every_part_of_a_transcript_counts(self) -> None:
        changes: dict[str, Any] = {
            "notes": [Note("more", 1, False)],
            "trees": [("end", None)],
            "counters": {"inductor": {"cudagraph_skips": 1}},
            "warnings": [("UserWarning", "text")],
            "logs": [("WARNING", "text")],
            "random": {"cpu": "other"},
            "allocated_bytes": 512,
            "crash": ErrorNote.of(ValueError("no")),
        }
        for name, value in changes.items():
            with self.subTest(part=name):
                changed = Transcript(OURS)
                setattr(changed, name, value)
                self.assertNotEqual(differences(Transcript(UPSTREAM), changed), [])
                self.assertNotEqual(differences(changed, Transcript(UPSTREAM)), [])

    def test_oracle_allows_a_tolerance_and_no_more(self) -> None:
        exact, close, far = (transcript_of(torch.full((3,), value)) for value in (1.0, 1.0 + 1e-7, 1.1))
        self.assertEqual(oracle_differences(exact, close), [])
        self.assertEqual(len(oracle_differences(exact, far)), 1)
        self.assertEqual(oracle_differences(exact, far, rtol=0.2, atol=0.0), [])
        self.assertEqual(len(oracle_differences(exact, transcript_of())), 1)


class TestPrograms(TestCase):
    def test_equal_programs(self) -> None:
        result = compare_on_the_host(calls)
        self.assertEqual(len(result.tensors), 2)
        self.assertNotEqual(result.tensors[0], result.tensors[1])
        self.assertEqual([result.upstream.side, result.ours.side], [UPSTREAM, OURS])
        self.assertTrue(result.upstream.counters)

    def assert_reported(self, compare: Callable[..., object], only_in_ours: Mapping[str, Callable[..., Any]]) -> None:
        for name, act in only_in_ours.items():

            def program(ctx: Context, act: Callable[..., Any] = act) -> None:
                calls(ctx)
                if ctx.side == OURS:
                    act(ctx)

            with self.subTest(name), self.assertRaises(ParityError):
                compare(program, **ON_THE_HOST)

    SEEN_BY_A_USER: ClassVar[dict[str, Callable[..., Any]]] = {
        "value": lambda ctx: ctx.record(torch.ones(1)),
        "error": lambda ctx: ctx.raises(int, "a"),
        "random state": lambda ctx: torch.rand(1),
        "crash": lambda ctx: int("a"),
    }

    def test_different_programs_are_reported(self) -> None:
        others = {
            "fact": lambda ctx: ctx.fact("more", 1),
            "warning": lambda ctx: warnings.warn("new", stacklevel=1),
            "compilation": lambda ctx: ctx.compile(lambda x: x + 1)(torch.ones(1)),
        }
        self.assert_reported(compare_sides, {**self.SEEN_BY_A_USER, **others})
        with self.assertRaises(ParityError):
            compare_on_the_host(lambda ctx: ctx.record(2 if ctx.compiled else 1))  # other than eager

    def test_what_a_user_sees_is_compared_with_flags_on(self) -> None:
        compare = test_address_parity.ByAddress().parity
        compare(lambda ctx: (calls(ctx), ctx.fact("recordings", 2 if ctx.side == OURS else 1)), **ON_THE_HOST)
        self.assert_reported(compare, self.SEEN_BY_A_USER)

    def test_a_difference_of_the_first_run_is_asked_of_upstream_again(self) -> None:
        sides: list[str] = []

        def program(ctx: Context) -> None:
            ctx.fact("first of all", not sides)
            sides.append(ctx.side)
            calls(ctx)

        compare_on_the_host(program)
        self.assertEqual(sides, [UPSTREAM, OURS, UPSTREAM, EAGER])

    def test_a_crash_fails_unless_announced(self) -> None:
        def program(ctx: Context) -> None:
            raise ValueError("always")

        with self.assertRaisesRegex(ParityError, "does not run under upstream"):
            compare_on_the_host(program)
        result = compare_on_the_host(program, crash=True, oracle=False)
        self.assertEqual(result.ours.crash.type, "builtins.ValueError")

    def test_in_a_process_of_its_own(self) -> None:
        answer = compare_isolated("test_parity_harness", "calls", **ON_THE_HOST)
        self.assertEqual((answer["errors"], answer["lost"]), ([], None))
        self.assertTrue(any(path.startswith("note 1") for path in answer["facts"]))

    def test_a_process_that_dies_is_reported(self) -> None:
        with self.assertRaisesRegex(ParityError, "no_such_program"):
            run_isolated("test_parity_harness", "no_such_program", UPSTREAM, **ON_THE_HOST)


if __name__ == "__main__":
    run_tests()
