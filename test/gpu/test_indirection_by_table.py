"""Live inputs whose addresses Triton kernels read from a table: a replay sets one node, however many read an input."""

import gc
import weakref
from unittest import mock

import torch
from indirection import (
    ByTable,
    Facts,
    IndirectionTestCase,
    Program,
    assert_same_bits,
    by_name,
    compiled,
    named,
    run,
    tensor,
)
from parity import BOTH_SIDES, marked
from test_indirection_addresses import nodes_set, recorded_addresses
from test_indirection_fallbacks import RANDOM
from test_indirection_kernels import MANY, POINTWISE, REDUCTION
from test_indirection_libraries import EMBEDDING, LARGE
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.indirection.table import launches


def thirty(x):
    """Thirty kernels that read one input, with matmuls of results between them."""
    total = x
    for _ in range(30):
        total = (total @ total).softmax(1) + x
    return total


KERNELS = [p for p in (*POINTWISE, *REDUCTION, *MANY) if p.name not in ("complex", "norms")]  # which libraries compute
LIBRARIES = named(
    [*EMBEDDING, *LARGE], "large table", "int32 indices", "gather", "index select", "two indices", "embedding"
)


@instantiate_parametrized_tests
class TestProgramsByTable(ByTable):
    verify = "on"

    @parametrize("program", KERNELS + LIBRARIES, name_fn=by_name)
    def test_program(self, program):
        self.check(program)


@instantiate_parametrized_tests
class TestRandomNumbersByTable(ByTable):
    @parametrize("program", named(RANDOM, "dropout", "dropout around matmul", "noise"), name_fn=by_name)
    def test_random_numbers(self, program):
        self.check(program)


class TestTable(IndirectionTestCase):
    indirection = "table"
    verify = "on"

    def setUp(self):
        super().setUp()
        # Kernels with the same source stay alive from test to test.
        variants = mock.patch.object(launches, "_built", weakref.WeakKeyDictionary())
        variants.start()
        self.addCleanup(variants.stop)

    def by_table(self, program, routes, **options):
        """Runs the program, asserts the routes of its live inputs, and returns the facts."""
        facts = self.check(program, **options)
        self.assertEqual(sorted(str(route) for route in facts.routes), sorted(routes), str(facts))
        return facts

    def test_one_node_is_set(self):
        ways = compiled(thirty)
        program = Program("thirty", thirty, (tensor(64, 64, values="unit"),))
        with recorded_addresses() as made:
            run(program, ways, self.device)
            before = nodes_set(made)
            run(program, ways, self.device, ("fresh",), calls=5)
        # The first matmul's kernel holds the address itself.
        self.assertIn(nodes_set(made) - before, range(1, 3 * 5 + 1))
        self.assertEqual(Facts.now().routes, ("table",))

    def test_matmul_and_pointwise(self):
        """A library's kernel holds the address of an input that other kernels read in the table."""
        program = Program("both", lambda x, w: (x @ w).relu() + x.sum(1, keepdim=True), (tensor(64, 64),) * 2)
        self.by_table(program, ["table", "patch"])

    def test_templates(self):
        with (
            mock.patch.dict(BOTH_SIDES, deterministic=False),  # which tunes nothing
            torch._inductor.config.patch(max_autotune_gemm=True, max_autotune_gemm_backends="TRITON"),
        ):
            program = Program(
                "template", lambda x, w, b: (x @ w + b).relu(), (tensor(128, 64), tensor(64, 256), tensor(256))
            )
            self.by_table(program, ["table"] * 3)

    def test_flex_attention(self):
        from torch.nn.attention.flex_attention import flex_attention

        shape = tensor(1, 2, 128, 64, dtype="float16")
        facts = self.check(Program("flex", flex_attention, (shape,) * 3))
        self.assertIn("table", facts.routes, str(facts))

    def test_combined_kernels(self):
        with torch._inductor.config.patch(combo_kernels=True):
            program = Program(
                "combo", lambda x, y, z: (x.sin(), y.cos(), z.sum(1)), tuple(tensor(64, n) for n in (3, 64, 99))
            )
            self.by_table(program, ["table"] * 3)

    def test_tuned(self):
        """Autotuning ends with the first launch; each way may choose another kernel, with the same result."""
        options = {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}
        with mock.patch.dict(BOTH_SIDES, deterministic=False), torch._inductor.config.patch(options):
            self.by_table(Program("tuned", lambda x, y: (x + y).amax(1), (tensor(512, 512),) * 2), ["table"] * 2)

    def test_the_launcher_of_triton(self):
        with torch._inductor.config.patch({"use_static_triton_launcher": False}):
            self.by_table(Program("triton's", lambda x, y: (x * y).sum(1), (tensor(512, 65),) * 2), ["table"] * 2)

    def test_parts_of_an_input(self):
        """Parts that start further on, which a library's kernel takes, are not in the table."""

        def program(x):
            part = x[1024:].view(-1, 64)
            return x.sin(), part @ part.t()

        facts = self.check(Program("parts", program, (tensor(1024 + 32 * 64),)))
        self.assertEqual((facts.copied_bytes, facts.routes), (0, ("table",)), str(facts))

    def test_more_inputs_than_one_kernel_writes(self):
        program = Program("300", lambda *xs: [x.sin() for x in xs], (tensor(33),) * 300)
        self.by_table(program, ["table"] * 300)

    def test_the_writer_is_in_the_graph_and_the_report_says_so(self):
        self.check(Program("p", lambda x: x.sin() + 1, (tensor(5000),)))
        (function,) = pygraph_trees.report().functions
        (recording,) = function.recordings
        self.assertEqual([i.route for i in recording.inputs if i.kind == "live"], ["table"])
        self.assertEqual(recording.kernels, 2)

    def test_a_recording_that_goes_while_its_replays_are_queued(self):
        for _ in range(5):
            graphed = compiled(lambda x: x * 2 + 1).graphed
            inputs = [torch.full((1 << 16,), float(i), device=self.device) for i in range(12)]
            results = []
            for x in marked(inputs[:3]):
                graphed(x)
            torch.cuda._sleep(20_000_000)
            for x in marked(inputs):
                results.append(graphed(x).clone())
            del graphed
            torch._dynamo.reset()
            gc.collect()
            others = [torch.full((128,), -1, dtype=torch.int64, device=self.device) for _ in range(20)]
            for i, result in enumerate(results):
                assert_same_bits(result, torch.full_like(result, 2.0 * i + 1), f"call {i}: ")
            del others

    def test_nothing_is_compiled_while_capturing(self):
        import triton

        ways = compiled(lambda x, y: (x * y).softmax(1))
        seen = []
        original = triton.compile

        def compiling(source, *args, **kwargs):
            seen.append((torch.cuda.is_current_stream_capturing(), source.fn.__name__))
            return original(source, *args, **kwargs)

        with mock.patch.object(triton, "compile", compiling):
            run(Program("p", lambda x, y: (x * y).softmax(1), (tensor(64, 65),) * 2), ways, self.device)
        self.assertFalse(any(capturing for capturing, _ in seen), str(seen))


if __name__ == "__main__":
    run_tests()
