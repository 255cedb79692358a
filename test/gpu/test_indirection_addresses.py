"""Addresses and layouts of inputs: views, alignments, shared memory, outputs that come back as inputs, and parameters
that move.
"""

import contextlib
import math
from unittest import mock

import torch
import torch.nn.functional as F
from indirection import VERIFY, Facts, IndirectionTestCase, Program, assert_same_bits, by_name, compiled, run, tensor
from parity import marked
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.cuda.driver import driver
from pygraph_trees.indirection.addresses import Addresses
from pygraph_trees.indirection.placeholder import Extent, Placeholders, stands_out

HALF = {"dtype": "float16"}
LAYOUTS = [
    Program("misaligned", lambda x: x.sin() + 1, (tensor(100_001, layout="misaligned"),)),
    Program("misaligned half", lambda x: x.softmax(0), (tensor(10_001, layout="misaligned", **HALF),)),
    Program("misaligned bytes", lambda x: x.float() + 1,
            (tensor(10_001, dtype="uint8", values="below 9", layout="misaligned"),)),
    Program("misaligned matmul", torch.mm, (tensor(64, 64, layout="misaligned", **HALF), tensor(64, 64, **HALF))),
    Program("misaligned sort", lambda x: x.sort().values, (tensor(33_333, layout="misaligned"),)),
    Program("misaligned convolution", F.conv2d,
            (tensor(2, 8, 16, 16, layout="misaligned"), tensor(8, 8, 3, 3, layout="misaligned"))),
    Program("one sliced, one not", lambda x, y: x * y, (tensor(100, 65, layout="sliced"), tensor(100, 65))),
    Program("sliced matmul", torch.mm, (tensor(128, 61, layout="sliced"), tensor(61, 32))),
    Program("strided", lambda x: x.cumsum(0), (tensor(4096, layout="strided", dtype="float64"),)),
    Program("transposed", lambda x, y: (x + 1, y @ x), (tensor(64, 33, layout="transposed"), tensor(64, 64))),
    Program("channels last", lambda x: F.avg_pool2d(x, 2).relu(), (tensor(2, 8, 32, 32, layout="channels_last"),)),
    Program("expanded", lambda x: x.expand(64, -1) * 2 + x.sum(), (tensor(1, 512),)),
    Program("expanded outside", lambda x: (x * 2, x.sum(0)), (tensor(64, 512, layout="expanded"),)),
    # Torch does not graph these.
    Program("overlapping", lambda x: (x * 2, x.sum(1)), (tensor(64, 512, layout="overlapping"),), None, graphed=False),
    Program("as_strided", lambda x: torch.as_strided(x, (10,), (1,), 0) * 2, (tensor(100),)),
    Program("as_strided further on", lambda x: torch.as_strided(x, (5, 5), (2, 9), 80).sin(), (tensor(100),)),
    Program("slices inside", lambda x: x[1:] * x[:-1] + x[7], (tensor(100_000),)),
    Program("slices to matmul", lambda x: x[:, 32:64] @ x[:, 1:33].mT, (tensor(96, 96),)),
    Program("one storage", lambda x, y: x * 2 + y, (tensor(1000), tensor(1000, shares="0", shift=1024))),
    Program("one storage, overlapping", lambda x, y: (x.sum(), y * x),
            (tensor(1000), tensor(1000, shares="0", shift=500))),
    Program("one storage, one misaligned", lambda x, y: x @ y, (tensor(999), tensor(999, shares="0", shift=1025))),
    Program("no elements", lambda x, y: torch.cat([x, y]) + 1, (tensor(0, 33), tensor(20, 33))),
    Program("no elements, summed", lambda x, y: x.sum() + y, (tensor(0, dtype="float64"), tensor(55, dtype="float64"))),
    Program("one element", lambda x, y: x * y, (tensor(), tensor(1))),
    Program("not read", lambda x, y: torch.zeros_like(x) + y.sum(), (tensor(1 << 18), tensor(3))),
]  # fmt: skip


@contextlib.contextmanager
def recorded_addresses():
    """Yields a list that gets the addresses of each recording made in this scope."""
    made, original = [], Addresses.__init__

    def keeping(addresses, *args, **kwargs):
        original(addresses, *args, **kwargs)
        made.append(addresses)

    with mock.patch.object(Addresses, "__init__", keeping):
        yield made


def nodes_set(made):
    """How many nodes have been set so far, by whichever path."""
    return sum(addresses.sets.value for addresses in made)


def with_parameters(model, names):
    """``model`` as a function of its input and its parameters."""

    def program(x, *values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    return program


def perceptron():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))


FUNCTIONAL = Program(
    "functional call",
    with_parameters(perceptron().to("meta"), ["0.weight", "0.bias", "2.weight", "2.bias"]),
    (tensor(16, 64), tensor(128, 64), tensor(128), tensor(32, 128), tensor(32)),
)


def made_anew(tensors, values, seen):
    """Spoils and frees the parameters' memory and allocates it again, with ``values``, as FSDP does around each use.

    None is then at an address where one was before. ``seen`` collects the addresses. The caller must keep the result,
    which prevents the old memory from being allocated again.
    """
    held = []
    for t, new in zip(tensors, values, strict=True):
        storage = t.untyped_storage()
        nbytes = storage.nbytes()
        seen.add(storage.data_ptr())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(t):
            t.fill_(math.nan)
            while storage.data_ptr() in seen:
                storage.resize_(0)
                held.append(torch.empty_like(new))
                storage.resize_(nbytes)
            t.copy_(new)
    return held


@instantiate_parametrized_tests
class TestIndirectionAddresses(IndirectionTestCase):
    verify = "on"

    @parametrize("program", LAYOUTS, name_fn=by_name)
    def test_layouts(self, program):
        self.check(program)

    def test_functional_call_with_fresh_parameters(self):
        self.check(FUNCTIONAL)

    def test_alignment_that_changes(self):
        block = torch.randn(1 << 16, device=self.device, dtype=torch.float16)
        for first, later in ((0, 1), (0, 8), (0, 16), (1, 0), (1, 3), (8, 4), (64, 8)):
            with self.subTest(first=first, later=later):
                torch._dynamo.reset()
                ways = compiled(lambda x, w: (x * 2 + 1).view(-1, 64) @ w)
                offsets = [first] * 3 + [later] * 3 + [first, later] * 2
                weight = torch.randn(64, 64, device=self.device, dtype=torch.float16)
                pieces = [block[offset : offset + 4096] for offset in offsets]
                facts = self.assertSameCalls(ways, [(piece, weight) for piece in pieces])
                for reason in facts.why:
                    self.assertRegex(reason, "align")

    @torch._inductor.config.patch({VERIFY: "off"})  # in other memory, it would read other bytes
    def test_attention_gets_aligned_inputs_where_they_are(self):
        """At other addresses, flash attention reads other elements, in eager mode as well."""
        ways, block = compiled(F.scaled_dot_product_attention), torch.randn(1025, device=self.device).half()
        q, k = (torch.randn(8, 1, 16, 8, device=self.device, dtype=torch.float16) for _ in range(2))
        for number, offset in enumerate((1, 1, 1, 0, 0, 1, 0)):
            v = block[offset : offset + 1024].view(8, 1, 16, 8)
            torch.compiler.cudagraph_mark_step_begin()
            found, wanted = ways.graphed(q, k, v), ways.plain(q, k, v)
            if offset == 0:
                assert_same_bits(found, wanted, f"call {number}: ")

    def test_rows_of_64_bytes(self):
        table = torch.randn(100, 16, device=self.device)
        facts = self.assertSameCalls(compiled(lambda x: x.softmax(0)), [(table[call * 7 % 100],) for call in range(20)])
        self.assertLessEqual(facts.recordings, 2, str(facts))
        self.assertEqual((facts.ungraphed_calls, facts.skips), (0, 0))

    def test_nothing_is_set_where_nothing_moved(self):
        graphed = compiled(lambda x, y: (x.sin() @ y).relu()).graphed
        pairs = [[torch.randn(64, 64, device=self.device) for _ in range(2)] for _ in range(2)]
        per_call = []
        with recorded_addresses() as made:
            for call in marked(range(9)):
                before = nodes_set(made)
                graphed(*pairs[call // 3 % 2])
                per_call.append(nodes_set(made) - before)
        self.assertEqual([per_call[c] for c in (2, 4, 5, 7, 8)], [0] * 5, str(per_call))
        self.assertEqual([0 < per_call[c] <= 4 for c in (3, 6)], [True] * 2, str(per_call))

    def test_feedback(self):
        """h = f(h): the output that comes back is in the graph pool, and the replay would overwrite it."""
        ways = compiled(lambda h, x: torch.tanh(h @ x) + h)
        x = torch.randn(64, 64, device=self.device)
        states = [torch.ones(64, 64, device=self.device) for _ in range(2)]
        for call in range(8):
            for side, way in marked(enumerate((ways.plain, ways.graphed))):
                # Results of a warmup or a recording cannot be used in the next step, under upstream either.
                given = states[side].clone() if call < 3 else states[side]
                states[side] = way(given, x)
            assert_same_bits(states[1], states[0], f"call {call}: ")
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.ungraphed_calls, facts.copied_bytes), (1, 0, 0), str(facts))
        (function,) = pygraph_trees.report().functions
        self.assertEqual(function.recordings[0].extra_copies, 5)

    def test_feedback_after_calls_with_inputs_of_the_users_own(self):
        ways = compiled(lambda h: (h * 2).sin() + 1)
        states = [None, None]
        for call in range(12):
            for side, way in marked(enumerate((ways.plain, ways.graphed))):
                own = states[side] is None or call < 4 or call % 3 == 0
                given = torch.full((1 << 16,), call + 0.5, device=self.device) if own else states[side]
                states[side] = way(given)
            assert_same_bits(states[1], states[0], f"call {call}: ")

    def test_parameter_storage_that_is_swapped(self):
        swaps = {
            "data": lambda p, new: setattr(p, "data", new),
            "set": lambda p, new: p.set_(new),
            "storage": lambda p, new: p.set_(new.untyped_storage(), 0, p.shape, p.stride()),
        }
        for name, swap in swaps.items():
            with self.subTest(name):
                torch._dynamo.reset()
                before = Facts.now()
                models = [perceptron().to(self.device) for _ in range(2)]
                ways = [compiled(models[0]).plain, compiled(models[1]).graphed]
                for call in range(10):
                    results = []
                    for model, way in zip(models, ways, strict=True):
                        generator = torch.Generator(self.device).manual_seed(call)
                        with torch.no_grad():
                            for p in model.parameters():
                                new = torch.randn(p.shape, device=self.device, generator=generator)
                                swap(p, new)
                            x = torch.randn(8, 64, device=self.device, generator=generator)
                            torch.compiler.cudagraph_mark_step_begin()
                            results.append(way(x).clone())
                    assert_same_bits(results[1], results[0], f"{name}, call {call}: ")
                facts = Facts.now()
                # The first parameter that moves is noticed; the second recording can be given any address.
                self.assertLessEqual(facts.recordings - before.recordings, 2, str(facts))
                self.assertEqual((facts.copied_bytes, facts.ungraphed_calls), (0, 0), str(facts))

    def unsharded(self, sides, trained):
        """Steps of ``way(x)`` for each (way, parameters), whose memory is new before each forward and backward."""
        held, recordings, seen = [], [], set()
        for call in range(12):
            results = []
            for way, parameters in sides:
                generator = torch.Generator(self.device).manual_seed(call)
                values = [torch.randn(p.shape, device=self.device, generator=generator) for p in parameters]
                x = torch.randn(8, 64, device=self.device, generator=generator)
                held += made_anew(parameters, values, seen)
                torch.compiler.cudagraph_mark_step_begin()
                with torch.set_grad_enabled(trained):
                    output = way(x)
                    result = [output.detach().clone()]
                    if trained:
                        held += made_anew(parameters, values, seen)
                        gradients = torch.autograd.grad(output, parameters, torch.full_like(output, 0.5))
                        result += [g.clone() for g in gradients]
                        del gradients
                    del output
                results.append(result)
            assert_same_bits(results[1], results[0], f"call {call}: ")
            recordings.append(Facts.now().recordings)
        facts = Facts.now()
        # Each input of a function is found to move; a backward's is found again after its forward's next recording.
        self.assertEqual(recordings[5:], [recordings[-1]] * 7, str(facts))
        self.assertEqual((facts.copied_bytes, facts.ungraphed_calls, facts.skips), (0, 0, 0), str(facts))
        return facts

    @parametrize("trained", [False, True])
    def test_input_storage_that_is_freed_and_made_anew(self, trained):
        ways = compiled(lambda x, w, b: ((x @ w).relu() + b) * b.sin())
        sides = []
        for way in (ways.plain, ways.graphed):
            given = [torch.zeros(*shape, device=self.device, requires_grad=trained) for shape in ((64, 32), (32,))]
            sides.append((lambda x, way=way, given=given: way(x, *given), given))
        facts = self.unsharded(sides, trained)
        if not trained:
            self.assertEqual((facts.functions, facts.recordings, facts.replays), (1, 1, 10), str(facts))

    @parametrize("trained", [False, True])
    def test_parameter_storage_that_is_freed_and_made_anew(self, trained):
        models = [perceptron().to(self.device) for _ in range(2)]
        ways = [compiled(models[0]).plain, compiled(models[1]).graphed]
        sides = [(way, list(model.parameters())) for way, model in zip(ways, models, strict=True)]
        facts = self.unsharded(sides, trained)
        if not trained:
            self.assertLessEqual(facts.recordings, 2, str(facts))

    def test_marked_tensor_that_moves(self):
        weights = [torch.randn(64, 64, device=self.device) for _ in range(6)]
        for weight in weights:
            torch._dynamo.mark_static_address(weight, guard=False)
        x = torch.randn(8, 64, device=self.device)
        facts = self.assertSameCalls(compiled(lambda x, w: x @ w), [(x, weights[call // 2]) for call in range(12)])
        self.assertLessEqual(facts.recordings, 2, str(facts))
        self.assertEqual(facts.copied_bytes, 0, str(facts))

    def test_sizes_that_change(self):
        def program(x, w):
            return F.linear(x, w).relu().sum(0)

        ways = compiled(program, dynamic=True)
        sizes = (64, 30522, 32000, 32512, 32767, 24576)
        for n in sizes:
            run(Program(f"{n} rows", program, (tensor(n, 16), tensor(32, 16))), ways, self.device, ("fresh", "same"))
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.copied_bytes), (len(sizes), 0), str(facts))

    def each_call(self, step):
        """Makes 24 steps of ``step(call, kind, x)``, with the same bits for both kinds; returns the facts."""
        for call in range(24):
            x = torch.full((64, 64), call / 24, device=self.device)
            results = []
            for kind in marked(("plain", "graphed")):
                with torch.no_grad():
                    results.append(step(call, kind, x).clone())
            assert_same_bits(results[1], results[0], f"call {call}")
        return Facts.now()

    def churn(self, kept):
        """Takes another of six outputs of an earlier graph at each call; returns the function's facts."""
        ways = [compiled(lambda x: [x.sin() * i for i in range(6)]), compiled(lambda y, z: (y @ z).relu() + y)]
        z = torch.randn(64, 64, device=self.device)

        def step(call, kind, x):
            outputs = getattr(ways[0], kind)(x)
            picked = outputs[call * 5 % 6]
            if not kept:
                del outputs
            return getattr(ways[1], kind)(picked, z)

        return self.each_call(step)

    def test_managed_inputs_that_move(self):
        facts = self.churn(kept=True)
        # Upstream makes a recording for each output that is picked.
        self.assertEqual((facts.functions, facts.recordings, facts.copied_bytes), (2, 3, 0), str(facts))
        self.assertEqual((facts.ungraphed_calls, facts.skips), (0, 0), str(facts))
        self.assertEqual(len(facts.reasons), 1)
        self.assertRegex(facts.reasons[0], "managed input .* moved")

    def test_managed_inputs_that_move_while_others_die(self):
        facts = self.churn(kept=False)
        self.assertEqual((facts.functions, facts.ungraphed_calls, facts.skips), (2, 0, 0), str(facts))

    def test_managed_inputs_that_move_and_then_its_own_output(self):
        ways = [compiled(lambda x: [x.sin() * i for i in range(3)]), compiled(lambda y, z: (y @ z).tanh() + y)]
        z = torch.randn(64, 64, device=self.device)
        own = {}

        def step(call, kind, x):
            outputs = getattr(ways[0], kind)(x)
            # Results of a warmup or a recording may not be used in a later step.
            given = own[kind] if call > 6 and call % 3 == 2 else outputs[call % 3 % 2]
            result = getattr(ways[1], kind)(given, z)
            own[kind] = None if kind == "graphed" and call < 6 else result
            return result

        self.assertEqual(self.each_call(step).ungraphed_calls, 0)

    def test_addresses_stand_out(self):
        """At the driver's addresses, a word of a kernel's parameters that looks like an address is one."""
        placeholders = Placeholders(driver(), self.device.index, [Extent(4096, 0)])
        self.addCleanup(placeholders.close)
        self.assertTrue(stands_out(placeholders.placeholders[0].start), hex(placeholders.placeholders[0].start))

    def test_launches_that_are_still_queued_keep_their_addresses(self):
        graphed = compiled(lambda x: x + 1).graphed
        inputs = [torch.full((1 << 20,), float(i), device=self.device) for i in range(40)]
        for x in marked(inputs[:3]):
            graphed(x)
        results = [torch.empty_like(x) for x in inputs]
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        for x, result in marked(zip(inputs, results, strict=True)):
            result.copy_(graphed(x))
        for i, result in enumerate(results):
            self.assertEqual(result, torch.full_like(result, i + 1.0))


class TestAddressesByTable(TestIndirectionAddresses):
    """Inputs that Triton kernels read are given through slots; nothing else differs."""

    indirection = "table"


if __name__ == "__main__":
    run_tests()
