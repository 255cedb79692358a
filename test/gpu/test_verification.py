"""``pygraph_verify`` and ``pygraph_trees.verify``: correct programs pass, planted faults are found and named, and the
caller's tensors do not change.

A planted fault uses a mapped address, so that no kernel crashes: a *stale* one, of the tensor that was recorded, or
that of another input of the same size.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from unittest import mock

import torch
import torch.nn.functional as F
from indirection import (
    FLAG,
    KEPT,
    REGIMES,
    Facts,
    IndirectionTestCase,
    Program,
    assert_same_bits,
    by_name,
    compiled,
    tensor,
)
from indirection import run as run_both
from test_indirection_fallbacks import chunk_cat, host_call
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.benchmark.verify import DiffersUngraphed
from pygraph_trees.indirection import inputs as inputs_module
from pygraph_trees.indirection.patching import Patches
from pygraph_trees.trees.managers.verification import Verification, VerificationFailed
from pygraph_trees.trees.recordings.recording import Recording

_numbers = itertools.count()


@torch.library.custom_op("pygraph_verification_test::numbered", mutates_args=())
def numbered(x: torch.Tensor) -> torch.Tensor:
    """Gives different results at each call, without random numbers."""
    return x + next(_numbers)


@numbered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def through_the_host(x, y):
    first = (x * 2).sin()
    second = (first @ y.mT).relu()
    return ((second.sum(0) * 2).cpu() + 1).to(x.device) * second, first.cos()


MATRIX = tensor(65, 33)
RIGHT = [
    Program("eight bits", lambda x: x.float() + 1, (tensor(1024, dtype="float8_e4m3fn"),)),
    Program("beside the view", lambda x: torch.as_strided(x, (5, 5), (2, 9), 80).sin(), (tensor(100),)),
    Program("one storage", lambda x, y: x * 2 + y, (tensor(1000), tensor(1000, shares="0", shift=500))),
    Program("address array", lambda x, y: chunk_cat([x, y]) * 2, (MATRIX, MATRIX), None),
    Program("host node", lambda x: host_call(x) + 1, (tensor(1 << 16),), None),
    Program("parts", through_the_host, (MATRIX, MATRIX)),
    Program("trained", lambda x, w, b: F.linear(x, w, b).relu(), (MATRIX, tensor(16, 33), tensor(16)), backward=True),
]  # fmt: skip

WRITTEN = [
    Program("added", lambda c, x: (c.add_(x), c * 2)[1], (MATRIX, MATRIX)),
    Program("misaligned", lambda c, x: c.add_(x), (tensor(4097, layout="misaligned"), tensor(4097))),
    Program("one storage", lambda a, b: (a.add_(1), b.mul_(2), a.sum())[2],
            (tensor(1000), tensor(1000, shares="0", shift=1024))),
    Program("behind a host node", lambda c, x: (c.add_(host_call(x)), c.sum())[1], (MATRIX, MATRIX), None),
]  # fmt: skip


@contextlib.contextmanager
def stale(position):
    """Keeps the address of the first launch for an input, given by its position among the patched ones."""
    original = Patches.apply

    def apply(patches, addresses, *forced):
        addresses = list(addresses)
        if not hasattr(patches, "planted"):
            patches.planted = addresses[position]
        addresses[position] = patches.planted
        return original(patches, addresses, *forced)

    with mock.patch.object(Patches, "apply", apply):
        yield


@contextlib.contextmanager
def mistaken(placeholder, other):
    """Gives nodes that read one input the address of another."""
    original = inputs_module.scan

    def scan(*captured):
        found = original(*captured)
        relocations = tuple(s._replace(input=other) if s.input == placeholder else s for s in found.relocations)
        return dataclasses.replace(found, relocations=relocations)

    with mock.patch.object(inputs_module, "scan", scan):
        yield


class VerificationTestCase(IndirectionTestCase):
    """Turns the flag on. ``replays`` counts verification's launches; ``checks`` tells if outputs stayed unchanged."""

    def setUp(self):
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(torch._inductor.config.patch("triton.pygraph_verify", "on"))
        self.replays = 0
        self.checks = []
        replay, check = Recording.replay_for_verification, Verification.check

        def counted(recording):
            self.replays += 1
            replay(recording)

        def watched(verification, recording, outputs, name):
            before = [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in outputs]
            try:
                check(verification, recording, outputs, name)
            finally:
                try:
                    after = [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs]
                    assert_same_bits(after, before, "outputs ")
                    self.checks.append(None)
                except AssertionError as error:
                    self.checks.append(str(error))

        stack.enter_context(mock.patch.object(Recording, "replay_for_verification", counted))
        stack.enter_context(mock.patch.object(Verification, "check", watched))

    def assertUntouched(self):
        self.assertGreater(len(self.checks), 0)
        self.assertEqual([problem for problem in self.checks if problem is not None], [])

    def step(self, function, *arguments):
        torch.compiler.cudagraph_mark_step_begin()
        return function(*arguments)


class TestRightPrograms(VerificationTestCase):
    @parametrize("program", RIGHT, name_fn=by_name)
    def test_passes(self, program):
        facts = self.check(program, REGIMES[:3])
        self.assertUntouched()
        # One replay with everything moved, and no search for the fault.
        self.assertIn(self.replays, range(1, facts.recordings + 1))

    @parametrize("program", WRITTEN, name_fn=by_name)
    def test_passes_where_inputs_are_written_to(self, program):
        facts = self.check(program, KEPT[:3])
        self.assertUntouched()
        self.assertEqual(self.replays, facts.recordings)

    def test_an_input_that_lies_in_a_parameter(self):
        model = torch.nn.Linear(64, 64, device=self.device)
        ways = compiled(model)
        with torch.no_grad():
            for call in range(5):
                rows = model.weight.detach()[call : call + 8]
                assert_same_bits(self.step(ways.graphed, rows), self.step(ways.plain, rows), f"call {call}: ")
        self.assertUntouched()
        self.assertGreater(self.replays, 0)

    def test_autograd_does_not_see_it(self):
        graphed = compiled(lambda x, w: (x * w).sin()).graphed
        for _ in range(4):
            leaves = [torch.ones(64, device=self.device, requires_grad=True) for _ in range(2)]
            x = leaves[0] * 2
            squared = x * x  # saved before verification writes to x and back
            version = x._version
            result = self.step(graphed, x, leaves[1])
            self.assertEqual((x._version, leaves[1]._version), (version, 0))
            (squared.sum() + result.sum()).backward()
        self.assertUntouched()
        self.assertGreater(self.replays, 0)

    def test_tensors_of_inference_mode(self):
        graphed = compiled(lambda x: x.sin() + 1).graphed
        for call in range(4):
            with torch.inference_mode():
                x = torch.full((64,), float(call), device=self.device)
                self.assertEqual(self.step(graphed, x), x.sin() + 1)
        self.assertUntouched()
        self.assertEqual(self.replays, 1)

    def test_random_numbers_are_those_that_come_without_it(self):
        drawn = []
        for flag in ("off", "on"):
            torch._dynamo.reset()
            with torch._inductor.config.patch("triton.pygraph_verify", flag):
                graphed = compiled(lambda x: F.dropout(x, 0.5)).graphed
                torch.manual_seed(0)
                x = torch.ones(1000, device=self.device)
                results = [self.step(graphed, x).clone() for _ in range(5)]
                drawn.append([*results, torch.rand(3, device=self.device), torch.rand(3)])
        assert_same_bits(drawn[1], drawn[0], "")
        self.assertEqual((len(self.checks), self.replays), (1, 0))

    def test_a_function_is_verified_whatever_is_selected(self):
        for value in ("always", "auto", "never"):
            with torch._inductor.config.patch("triton.pygraph_selective", value):
                pygraph_trees.verify(lambda x: x.sin() + 1, torch.ones(64, device=self.device))

    def test_what_is_not_verified_is_told(self):
        for fn, why in ((lambda x: F.dropout(x, 0.5), "draws random numbers"), (numbered, "the same twice")):
            with self.subTest(why), self.assertLogs("pygraph_trees.verification", "INFO") as logs:
                torch._dynamo.reset()
                graphed = compiled(lambda x, fn=fn: fn(x) * 2).graphed
                for _ in range(3):
                    self.step(graphed, torch.ones(64, device=self.device))
            self.assertRegex("\n".join(logs.output), why)
        self.assertUntouched()

    def test_not_asked_for(self):
        program = Program("off", lambda x: x + 1, (MATRIX,))
        with torch._inductor.config.patch("triton.pygraph_verify", "off"):
            self.check(program, REGIMES[:2])
        torch._dynamo.reset()
        with torch._inductor.config.patch(FLAG, "off"):
            run_both(program, compiled(program.fn), self.device, REGIMES[:2])
        self.assertEqual(self.replays, 0)

    def test_the_next_replays_hold_none_of_its_addresses(self):
        graphed = compiled(lambda x, y: x * 2 + y).graphed
        torch.cuda.synchronize()
        pairs = [[torch.full((1 << 16,), float(c + i), device=self.device) for i in range(2)] for c in range(8)]
        for x, y in [*pairs, pairs[1], pairs[1]]:
            self.assertEqual(self.step(graphed, x, y), x * 2 + y)
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.copied_bytes, self.replays), (1, 0, 1), str(facts))


class TestFaults(VerificationTestCase):
    def failure(self, function, *arguments):
        """The error that recording a function raises; the first call warms up."""
        self.step(function, *(a.clone() for a in arguments))
        with self.assertRaises(VerificationFailed) as raised:
            self.step(function, *arguments)
        self.assertUntouched()
        return raised.exception

    def names(self):
        (function,) = pygraph_trees.report().functions
        return [i.name for i in function.recordings[0].inputs if i.kind == "live"]

    @parametrize("position", range(3))
    def test_a_stale_address(self, position):
        def program(x, y, z):
            return x * 2 + y, z.sin()

        graphed = compiled(program).graphed
        arguments = [torch.randn(64, 64, device=self.device) for _ in range(3)]
        before = [a.clone() for a in arguments]
        with stale(position):
            error = self.failure(graphed, *arguments)
        assert_same_bits(arguments, before, "inputs ")
        at_fault = str(error).partition("At fault: ")[2]
        self.assertEqual([name in at_fault for name in self.names()], [p == position for p in range(3)], str(error))
        self.assertIn(f"output {0 if position < 2 else 1}", str(error))
        self.assertIn("4096 of 4096 elements differ", str(error))
        self.assertIn("triton", at_fault)
        (function,) = pygraph_trees.report().functions
        name = f"{function.model} {function.compile_id} {function.mode} {function.partition}"
        self.assertEqual(str(error).partition(": ")[0], name)
        code = program.__code__
        line = f"{code.co_filename}:{code.co_firstlineno + 1} in program: return x * 2 + y, z.sin()"
        self.assertEqual(at_fault.count(f"read at {line} by "), 1, str(error))
        # The fault is gone, and so are its effects.
        for _ in range(3):
            x, y, z = (torch.randn(64, 64, device=self.device) for _ in range(3))
            self.assertEqual(list(self.step(graphed, x, y, z)), [x * 2 + y, z.sin()])
        assert_same_bits(arguments, before, "inputs ")

    def test_the_address_of_another_input(self):
        graphed = compiled(lambda x, y: x * 2 + y).graphed
        arguments = [torch.randn(64, 64, device=self.device) for _ in range(2)]
        before = [a.clone() for a in arguments]
        with mistaken(0, 1):
            error = self.failure(graphed, *arguments)
        assert_same_bits(arguments, before, "inputs ")
        self.assertIn("output 0", str(error))
        self.assertIn(self.names()[0], str(error).partition("At fault: ")[2])

    def test_a_write_to_a_stale_address(self):
        def program(c, x):
            c.add_(x)

        graphed = compiled(program).graphed
        c, x = torch.zeros(64, device=self.device), torch.ones(64, device=self.device)
        with stale(0):
            error = self.failure(graphed, c, x)
        self.assertIn("content of input", str(error))
        self.assertEqual((c, x), (torch.ones_like(c), torch.ones_like(x)))  # written to once, by the first launch

    def test_the_forward_of_a_training_step(self):
        graphed = compiled(lambda x, w: (x @ w).sin()).graphed
        x, w = (torch.randn(64, 64, device=self.device, requires_grad=True) for _ in range(2))
        before = [x.detach().clone(), w.detach().clone()]
        with stale(0), self.assertRaises(VerificationFailed):
            for _ in range(3):
                self.step(graphed, x, w).sum().backward()
        assert_same_bits([x.detach(), w.detach()], before, "inputs ")
        self.assertUntouched()


class TestVerify(IndirectionTestCase):
    def test_right_functions(self):
        x, w = torch.randn(16, 64, device=self.device), torch.randn(32, 64, device=self.device)
        pygraph_trees.verify(F.linear, x, w)
        pygraph_trees.verify(lambda x, *, scale: {"all": x[1:] * scale, "one": x}, x, scale=w[0], calls=3)
        pygraph_trees.verify(lambda c, x: (c.add_(x), c.sum())[1], x, x.clone())
        pygraph_trees.verify(lambda x: F.dropout(x, 0.5) * 2, w)
        pygraph_trees.verify(lambda x: x.sin() + 1, torch.randn(1001, device=self.device)[1:])

    def test_a_module_and_nothing_of_the_callers_changes(self):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(self.device)
        state = copy.deepcopy(model.state_dict())
        x = torch.randn(16, 64, device=self.device)
        kept = x.clone()
        random = torch.get_rng_state(), torch.cuda.get_rng_state()
        pygraph_trees.verify(model, x)
        assert_same_bits([x, model.state_dict()], [kept, state], "")
        assert_same_bits([torch.get_rng_state(), torch.cuda.get_rng_state()], list(random), "")

    def test_a_stale_address(self):
        x, y = (torch.randn(64, 64, device=self.device) for _ in range(2))
        kept = [x.clone(), y.clone()]
        random = torch.cuda.get_rng_state()
        with stale(1), self.assertRaisesRegex(DiffersUngraphed, r"call 2: with CUDA graphs \['output'\]"):
            pygraph_trees.verify(lambda x, y: x * 2 + y, x, y)
        assert_same_bits([x, y, torch.cuda.get_rng_state()], [*kept, random], "")
        pygraph_trees.verify(lambda x, y: x * 2 + y, x, y)


for _case in (TestRightPrograms, TestFaults):
    instantiate_parametrized_tests(_case)

if __name__ == "__main__":
    run_tests()
