"""The parts of the GPU tests' harness that need no GPU: normalising, comparing, reading trees, running programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import sys
import unittest
import unittest.mock
import warnings
from collections import defaultdict
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
for folder in (GPU_TESTS, Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import test_address_parity
import tree_facts as facts_of_trees
from isolated import compare_isolated, run_isolated
from parity import EAGER, OURS, UPSTREAM, Context, ParityError, compare_sides, run_side
from transcript import (
    ErrorNote,
    LogLines,
    Note,
    Transcript,
    bits,
    comparable_counters,
    differences,
    normalise,
    note_of,
    oracle_differences,
)

# Programs run on the host, compiled by a backend that captures nothing.
ON_THE_HOST = {"device": "cpu", "graphs": False, "backend": "eager"}
run_on_the_host = functools.partial(run_side, **ON_THE_HOST)
compare_on_the_host = functools.partial(compare_sides, **ON_THE_HOST)


def calls(ctx: Context) -> None:
    f = ctx.compile(lambda x: x * 2)
    for _ in range(2):
        ctx.record(f(torch.randn(4, device=ctx.device)))


def transcript_of(*values: Any, side: str = UPSTREAM) -> Transcript:
    return Transcript(side, notes=[Note(f"value {index}", note_of(value), True) for index, value in enumerate(values)])


class Mode(Enum):
    FORWARD = 1
    INFERENCE = 2


NEW = object()  # marks an output with its own storage


@dataclasses.dataclass(frozen=True)
class Number:
    """Stands for the ids of functions and of recordings."""

    id: int


class Node:
    """A recording with one copied input and one output for each given metadata."""

    def __init__(self, function: int, graph: int, outputs: list[Any], aliases: list[Any]) -> None:
        self.id = Number(graph)
        self.wrapped_function = SimpleNamespace(
            id=Number(function), mutated_input_idxs={2, 1}, constants=(torch.ones(1),)
        )
        self.static_input_idxs = [2, 1]
        self.non_managed_static_input_idxs = [2]
        self.cudagraph_managed_idxs = [1]
        self.non_static_input_idx = [0]
        self.live_cudagraph_managed_path_refs = [None, (0, 0), None]
        self.preserved_aliased_inputs = [False, True, False]
        self.expanded_dims = [[1], [], []]
        self.outputs_metadata = outputs
        self.output_storage_alias = aliases
        self.static_output_tensors = [None] * len(outputs)
        self.unaliased_in_all_paths = [alias is NEW for alias in aliases]
        self.cached_tensor_outputs = [torch.ones(1) if alias is NEW else None for alias in aliases]
        self.recorded_liveness_before_graph = [[True]]
        self.recorded_liveness_after_graph = [[False]]
        self.expected_dead_indices_before_graph = [(0, 0)]
        self.expected_dead_indices_after_graph: list[Any] = []
        self.live_indices_after_graph = [(0, 0)]
        self.stack_traces = [None]
        self.children: dict[Any, list[Any]] = defaultdict(list)

    def path_live_weakrefs(self) -> list[Any]:
        return [object()]


def metadata(address: int, *size: int) -> dict[str, Any]:
    stride = tuple(torch.empty(size, device="meta").stride())
    return {
        "data_ptr": address,
        "size": size,
        "stride": stride,
        "storage_offset": 0,
        "dtype": torch.float32,
        "nbytes": 4,
    }


class Manager:
    """A root with two children of one function, the second with outputs of every kind."""

    def __init__(self) -> None:
        functions = [Number(index) for index in range(2)]
        prior, same = SimpleNamespace(index=(0, 0)), SimpleNamespace(index=0)
        root = Node(0, 0, [metadata(4096, 4, 8)], [NEW])
        first = Node(1, 1, [metadata(8192, 4)], [NEW])
        second = Node(
            1, 2, [metadata(4096, 4), metadata(8192, 4), metadata(8192, 2), None, 7], [prior, NEW, same, NEW, NEW]
        )
        second.static_output_tensors[2] = torch.ones(1)
        root.children[functions[1]] = [first, second]
        self.roots: Any = {functions[0]: [root]}
        self.current_node = second
        self.cuda_graphs_thread_pool = (0, 1)
        self.ids_to_funcs = dict.fromkeys(functions)
        self.id_to_mode = {functions[1]: Mode.FORWARD, functions[0]: Mode.INFERENCE}
        self.warmed_up_functions = functions[::-1]
        self.warned_functions: list[Any] = []
        self.warned_mutation = functions[:1]
        self.non_cudagraph_managed_mutation_hint = {None: {functions[0]: True}, root.id: {functions[1]: False}}
        self.num_rerecord = {None: {functions[0]: 2}}
        self.debug_fail_counter = 3
        self.debug_checkpointing_counter = 1
        self.graph_counter = itertools.count(3)
        self.warmup_node_counter = itertools.count(-3, -1)
        self.path_state = SimpleNamespace(name="EXECUTION")
        self.mode = Mode.INFERENCE
        self.running_forwards_with_pending_backwards = False
        self.current_gen = 5

    def get_curr_generation(self) -> int:
        return 7


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

    def test_counters_that_depend_on_earlier_compilations(self) -> None:
        counters = {
            "inductor": {"cudagraph_skips": 1, "fxgraph_cache_hit": 2},
            "graph_break": {"at 0x1": 1, "at 0x2": 2},
        }
        self.assertEqual(
            comparable_counters(counters), {"inductor": {"cudagraph_skips": 1}, "graph_break": {"at <address>": 3}}
        )


class TestNotes(TestCase):
    def test_bits_follow_the_logical_order(self) -> None:
        x = torch.arange(6, dtype=torch.int16).reshape(2, 3)
        self.assertEqual(bits(x.t()), bits(x.t().contiguous()))
        self.assertNotEqual(bits(x), bits(x.t()))
        self.assertEqual(bits(torch.empty(0, 3)), b"")

    def test_a_note_is_a_copy(self) -> None:
        x = torch.ones(3)
        note = note_of(x)
        x.zero_()
        self.assertEqual(note.value, torch.ones(3))

    def test_bits_tell_zeros_and_nans_apart(self) -> None:
        self.assertEqual(
            differences(transcript_of(torch.tensor([torch.nan])), transcript_of(torch.tensor([torch.nan]))), []
        )
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

    def test_facts_that_may_differ(self) -> None:
        left, right = Transcript(UPSTREAM, allocated_bytes=512), Transcript(OURS, allocated_bytes=0)
        self.assertEqual(differences(left, right, ["allocated bytes"]), [])
        self.assertNotEqual(differences(left, right, ["random"]), [])
        right.warnings = [("UserWarning", "text")]
        self.assertNotEqual(differences(left, right, ["allocated bytes"]), [])

    def test_oracle_allows_a_tolerance_and_no_more(self) -> None:
        exact, close, far = (transcript_of(torch.full((3,), value)) for value in (1.0, 1.0 + 1e-7, 1.1))
        self.assertEqual(oracle_differences(exact, close), [])
        self.assertEqual(len(oracle_differences(exact, far)), 1)
        self.assertEqual(oracle_differences(exact, far, rtol=0.2, atol=0.0), [])
        self.assertEqual(len(oracle_differences(exact, transcript_of())), 1)

    def test_oracle_ignores_facts_of_compiled_runs(self) -> None:
        compiled = transcript_of(torch.ones(2))
        compiled.notes.insert(0, Note("fact", 7, False))
        self.assertEqual(oracle_differences(transcript_of(torch.ones(2)), compiled), [])

    def test_log_lines_are_kept_once(self) -> None:
        with LogLines() as log:
            logging.getLogger("torch._inductor.cudagraph_trees").warning("at %s", "0x12")
            logging.getLogger("pygraph_trees.anything").error("ours")
            logging.getLogger("torch._inductor.scheduler").warning("not of graphs")
            logging.getLogger("torch._inductor.cudagraph_trees").info("too quiet")
        self.assertEqual(log.lines, [("WARNING", "at <address>"), ("ERROR", "ours")])

    def test_json_has_a_plain_leaf_for_each_fact(self) -> None:
        facts = transcript_of(torch.ones(2), {"a": [1, None]}).as_json()
        self.assertTrue(all(isinstance(leaf, (int, float, str, bool)) for leaf in facts.values()))
        self.assertNotEqual(facts, transcript_of(torch.zeros(2), {"a": [1, None]}).as_json())


class TestTreeFacts(TestCase):
    def facts(self, manager: Manager) -> facts_of_trees.TreeFacts:
        with unittest.mock.patch.object(facts_of_trees, "pool_blocks", lambda pool: (2**21, 512, 1)):
            return facts_of_trees.tree_facts(manager, SimpleNamespace(live_cudagraphify_fns=2))

    def test_structure(self) -> None:
        facts = self.facts(Manager())
        self.assertEqual(facts.shape, ((0, ((1, ()), (1, ()))),))
        self.assertEqual((facts.recordings, facts.depth, len(facts.roots)), (3, 2, 1))
        self.assertEqual(facts.modes, ("INFERENCE", "FORWARD"))
        self.assertEqual(facts.warmed_up, (0, 1))
        self.assertEqual(facts.rerecorded, ((None, 0, 2),))
        self.assertEqual(facts.generation_lag, 2)
        self.assertEqual(facts_of_trees.counted(facts.graph_counter), 3)
        self.assertEqual(facts_of_trees.counted(facts.warmup_counter), -3)
        self.assertEqual(facts.current, "recording 2")

    def test_inputs_and_outputs(self) -> None:
        root, first, second = self.facts(Manager()).nodes
        self.assertEqual((root.static_inputs, root.persistent_inputs, root.managed_inputs), ((1, 2), (2,), (1,)))
        self.assertEqual(root.expanded_dims, ((1,), (), ()))
        self.assertEqual(root.outputs[0].stride, (8, 1))
        self.assertEqual([output.kind for output in second.outputs], ["prior (0, 0)", "new", "static", "none", "int 7"])
        # An address is shown as the number of its first appearance.
        self.assertEqual(
            [output.block for output in second.outputs[:3]], [root.outputs[0].block, first.outputs[0].block, -1]
        )

    def test_one_difference_is_one_line(self) -> None:
        changed = Manager()
        changed.debug_fail_counter = 4
        left, right = (
            Transcript(side, trees=[("end", self.facts(m))]) for side, m in ((UPSTREAM, Manager()), (OURS, changed))
        )
        self.assertEqual(differences(left, right), ["recordings 0 (end).fail_count: 3 in upstream, 4 in ours"])

    def test_a_shut_down_manager_has_no_recordings(self) -> None:
        manager = Manager()
        manager.roots = None
        self.assertEqual(self.facts(manager).recordings, 0)

    def test_table_of_mutations_under_its_later_name(self) -> None:
        manager = Manager()
        hints = self.facts(manager).mutation_hints
        manager.skip_cudagraph = manager.non_cudagraph_managed_mutation_hint
        del manager.non_cudagraph_managed_mutation_hint
        self.assertEqual(self.facts(manager).mutation_hints, hints)
        self.assertEqual(hints, ((None, 0, True),))

    def test_classes(self) -> None:
        manager = Manager()
        self.assertEqual(facts_of_trees.class_problems(manager, ours=False), [])
        self.assertEqual(len(facts_of_trees.class_problems(manager, ours=True)), 4)
        self.assertEqual(facts_of_trees.class_problems(None, ours=True), [])
        ours = type("Manager", (), {"__module__": "pygraph_trees.trees.manager"})
        child = type("Thinner", (ours,), {})()
        child.roots = {}
        self.assertEqual(facts_of_trees.class_problems(child, ours=True), [])
        self.assertEqual(len(facts_of_trees.class_problems(child, ours=False)), 1)


class TestPrograms(TestCase):
    def test_equal_programs(self) -> None:
        result = compare_on_the_host(calls)
        self.assertEqual(len(result.tensors), 2)
        self.assertNotEqual(result.tensors[0], result.tensors[1])
        self.assertEqual([result.upstream.side, result.ours.side], [UPSTREAM, OURS])

    def test_sides_start_from_one_seed(self) -> None:
        first, second = (run_on_the_host(calls, side) for side in (UPSTREAM, UPSTREAM))
        self.assertEqual(differences(first, second), [])
        self.assertTrue(first.counters)

    def test_different_programs_are_reported(self) -> None:
        def other_value(ctx: Context) -> None:
            calls(ctx)
            ctx.fact("value", 2 if ctx.side == OURS else 1)

        def other_warning(ctx: Context) -> None:
            calls(ctx)
            if ctx.side == OURS:
                warnings.warn("new", stacklevel=1)

        def other_random_state(ctx: Context) -> None:
            calls(ctx)
            if ctx.side == OURS:
                torch.rand(1)

        def other_compilation(ctx: Context) -> None:
            calls(ctx)
            if ctx.side == OURS:
                ctx.compile(lambda x: x + 1)(torch.ones(1))

        def other_end(ctx: Context) -> None:
            calls(ctx)
            if ctx.side == OURS:
                raise ValueError("new")

        def other_than_eager(ctx: Context) -> None:
            calls(ctx)
            ctx.record(2 if ctx.compiled else 1)

        for program in (other_value, other_warning, other_random_state, other_compilation, other_end, other_than_eager):
            with self.subTest(program=program.__name__), self.assertRaises(ParityError):
                compare_on_the_host(program)

    def test_what_a_user_sees_is_compared_with_flags_on(self) -> None:
        seen: list[Any] = []

        def facts_of_recordings(ctx: Context) -> None:
            calls(ctx)
            ctx.fact("recordings", 2 if ctx.side == OURS else 1)
            if ctx.side == OURS:
                warnings.warn("new", stacklevel=1)
            seen.append(ctx.side)

        def other_value(ctx: Context) -> None:
            ctx.record(torch.tensor(2.0 if ctx.side == OURS else 1.0))

        def other_error(ctx: Context) -> None:
            ctx.raises(int, "a" if ctx.side == OURS else "b")

        def no_error(ctx: Context) -> None:
            ctx.raises(int, "1" if ctx.side == OURS else "b")

        def other_random_state(ctx: Context) -> None:
            torch.rand(1 if ctx.side == OURS else 2)

        def other_end(ctx: Context) -> None:
            if ctx.side == OURS:
                raise ValueError("new")

        compare = test_address_parity.ByAddress().parity
        result = compare(facts_of_recordings, **ON_THE_HOST)
        self.assertEqual((seen, result.ours.side, result.noted("recordings")), ([UPSTREAM, OURS], UPSTREAM, 1))
        for program in (other_value, other_error, no_error, other_random_state, other_end):
            with self.subTest(program=program.__name__), self.assertRaises(ParityError):
                compare(program, **ON_THE_HOST)

    def test_a_difference_of_the_first_run_is_asked_of_upstream_again(self) -> None:
        sides: list[str] = []

        def program(ctx: Context) -> None:
            ctx.fact("first of all", not sides)
            sides.append(ctx.side)
            calls(ctx)

        compare_on_the_host(program)
        self.assertEqual(sides, [UPSTREAM, OURS, UPSTREAM, EAGER])

    def test_errors_release_what_their_frames_hold(self) -> None:
        held: list[Any] = []

        def program(ctx: Context) -> None:
            import weakref

            def fail() -> None:
                x = torch.ones(4)
                held.append(weakref.ref(x))
                raise ValueError("no")

            ctx.raises(fail)
            ctx.fact("alive", held[-1]() is not None)
            ctx.raises(lambda: None)
            ctx.fact("attempt", ctx.attempt(lambda: 7))

        result = compare_on_the_host(program, oracle=False)
        self.assertEqual((result.noted("alive"), result.noted("attempt")), (False, 7))
        self.assertEqual([error.message for error in result.errors], ["no"])

    def test_a_crash_fails_unless_announced(self) -> None:
        def program(ctx: Context) -> None:
            raise ValueError("always")

        with self.assertRaisesRegex(ParityError, "does not run under upstream"):
            compare_on_the_host(program)
        result = compare_on_the_host(program, crash=True, oracle=False)
        self.assertEqual(result.ours.crash.type, "builtins.ValueError")

    def test_settings_hold_during_the_program_only(self) -> None:
        import torch._inductor.config as config

        seen = []
        default = config.max_autotune
        run_on_the_host(lambda ctx: seen.append(config.max_autotune), UPSTREAM, config={"max_autotune": not default})
        self.assertEqual((seen, config.max_autotune), ([not default], default))

    def test_in_a_process_of_its_own(self) -> None:
        answer = compare_isolated("test_parity_harness", "calls", **ON_THE_HOST)
        self.assertEqual((answer["errors"], answer["lost"]), ([], None))
        self.assertTrue(any(path.startswith("note 1") for path in answer["facts"]))

    def test_a_process_that_dies_is_reported(self) -> None:
        with self.assertRaisesRegex(ParityError, "no_such_program"):
            run_isolated("test_parity_harness", "no_such_program", UPSTREAM, **ON_THE_HOST)


class TestCollection(TestCase):
    def test_gpu_tests_can_be_collected_anywhere(self) -> None:
        import importlib

        loader = unittest.TestLoader()
        suites = [
            loader.loadTestsFromModule(importlib.import_module(path.stem)) for path in GPU_TESTS.glob("test_trees_*.py")
        ]
        self.assertGreaterEqual(sum(suite.countTestCases() for suite in suites), 60)
        if not torch.cuda.is_available():
            result = unittest.TestResult()
            unittest.TestSuite(suites).run(result)
            self.assertEqual((result.errors, result.failures), ([], []))
            self.assertTrue(all("needs a CUDA device" in reason for _, reason in result.skipped))


if __name__ == "__main__":
    run_tests()
