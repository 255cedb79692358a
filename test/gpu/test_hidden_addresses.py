"""Kernels that Inductor does not see, next to kernels that can be read."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hidden_operators import (
    added_,
    added_halves_,
    added_up,
    doubled,
    halves,
    picked,
    picked_halves,
    tabled,
    tabled_halves,
    xored,
)
from indirection import FLAG, Facts, IndirectionTestCase, Program, by_name, compiled, run, tensor
from isolated import run_isolated
from parity import OURS, marked
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.indirection import inputs as live_inputs
from pygraph_trees.indirection.hidden_addresses import Rehearsal

RUNS_WHOLE = True  # its tests share the findings of the same processes
HIDDEN = "may hide its address"
X = tensor(64, 33)
INDEX = tensor(500, dtype="int64", values="below 100")


def in_place(target, x):
    added_(target, x)
    return target * 2


def in_place_halves(target, x):
    added_halves_(target, x)
    return target * 2


def after_a_break(x, y):
    """The second function gets an output of the first, and may reuse its memory."""
    h = x * 2 + 1
    torch._dynamo.graph_break()
    z = h.sin()
    del h
    return doubled(y) + z


def after_a_break_halves(x, y):
    h = x * 2 + 1
    torch._dynamo.graph_break()
    z = h.sin()
    del h
    return halves(y) + z + y


def view_after_a_break(x, y):
    """The second function gets a part of an output of the first, and may reuse its memory."""
    h = (x @ x.mT)[1:]  # a view, since a library makes the product
    torch._dynamo.graph_break()
    z = h.sin()
    del h
    return doubled(y)[1:], z.cos()


# Kernels that take pointers.
PLAIN = [
    Program("pointer", lambda x: doubled(x), (X,)),
    Program("pointer and others", lambda x, y: (doubled(x), x.sin() + y, x @ y.mT), (X, X)),
    Program("large", lambda x: doubled(x).sum(), (tensor(1 << 20),)),
    Program("written in place", in_place, (X, X)),
    Program("integers", lambda v, i: picked(v, i) + 1, (tensor(100), INDEX)),
    Program("integers that others read", lambda v, i: (picked(v, i), v[i], i + 1), (tensor(100), INDEX)),
    Program("table of the graph's own", lambda x: tabled(x) + x, (X,)),
    Program("random numbers", lambda x: F.dropout(doubled(x), 0.5), (tensor(1 << 16),), seeded=True),
    Program("output of an earlier function", after_a_break, (X, X)),
    Program("part of an output of an earlier function", view_after_a_break, (X, X)),
    Program("returned as it is", lambda x: (doubled(x), x), (X,)),
]

# Kernels that take addresses in other forms.
OTHERS = [
    Program("halves", lambda x: halves(x), (X,), "may hide its address|no node holds its address"),
    Program("halves and a generated kernel", lambda x: (halves(x), x.sin()), (X,), HIDDEN),
    Program("halves and a library", lambda x, y: (halves(x), x @ y.mT), (X, X), HIDDEN),
    Program("halves and a pointer", lambda x: halves(x) + doubled(x), (X,), HIDDEN),
    Program("xored and a generated kernel", lambda x, y: (xored(x) + y, x.sin()), (X, X), HIDDEN),
    Program("table of halves", lambda x: tabled_halves(x) + x, (X,), HIDDEN),
    Program("written in place", in_place_halves, (X, X), HIDDEN),
    Program("integers", lambda v, i: (picked_halves(v, i), i + 1), (tensor(100), INDEX), HIDDEN),
    Program("random numbers", lambda x: F.dropout(halves(x) + x, 0.5), (tensor(1 << 16),), HIDDEN, seeded=True),
    Program("output of an earlier function", after_a_break_halves, (X, X), HIDDEN),
    Program("many inputs", lambda *xs: (halves(xs[3]), *(x.sin() for x in xs)), (X,) * 12, HIDDEN),
]


def runs(program):
    """Runs the program in another process, un-graphed and graphed; raises if the results differ."""

    def child(ctx):
        run(program, compiled(program.fn), torch.device("cuda", 0))
        facts = Facts.now()
        ctx.fact("copied", facts.copied_bytes > 0)
        ctx.fact("replayed", facts.replays > 0 and not facts.ungraphed_calls)
        for number, why in enumerate(facts.why):
            ctx.fact(f"why {number}", why)

    return child


for _number, _program in enumerate(OTHERS):
    globals()[f"other_{_number}"] = runs(_program)


@functools.cache
def children(indirection: str) -> list[Future[dict[str, Any]]]:
    """The findings of each other program; a few processes run at a time."""
    with ThreadPoolExecutor(4) as pool:
        names = [f"other_{number}" for number in range(len(OTHERS))]
        run_one = functools.partial(run_isolated, "test_hidden_addresses", side=OURS, config={FLAG: indirection})
        return [pool.submit(run_one, name) for name in names]


@instantiate_parametrized_tests
class TestHiddenAddresses(IndirectionTestCase):
    @parametrize("program", PLAIN, name_fn=by_name)
    def test_pointers(self, program):
        self.check(program)

    @parametrize("number", range(len(OTHERS)), name_fn=lambda number: by_name(OTHERS[number]))
    def test_other_forms(self, number):
        child = children(self.indirection)[number].result()
        self.assertEqual((child["lost"], child["errors"]), (None, []), str(child))
        notes = {path: value for path, value in child["facts"].items() if path.startswith("note ")}
        copied, replayed, reasons = (
            [value for path, value in notes.items() if f"({label}" in path] for label in ("copied", "replayed", "why")
        )
        self.assertEqual((copied, replayed), ([True], [True]), str(notes))
        self.assertTrue(reasons, str(notes))
        for why in reasons:
            self.assertRegex(why, str(OTHERS[number].copied))

    def test_only_the_input_that_is_hidden_is_copied(self):
        facts = self.check(Program("one of three", lambda x, y, z: (halves(y) + y, x * z), (X, X, X), HIDDEN))
        self.assertEqual(facts.copied_bytes, 64 * 33 * 4, str(facts))
        self.assertEqual(sorted(map(str, facts.routes)), ["copy", "patch", "patch"])

    def nearly(self, fn, *shapes):
        """Calls a function both ways with new inputs; results are equal except for roundings."""
        ways = compiled(fn)
        for call in marked(range(6)):
            given = [torch.rand(shape, device=self.device) for shape in shapes]
            self.assertEqual(ways.graphed(*given), ways.plain(*given), rtol=1e-4, atol=1e-4, msg=f"call {call}")
        facts = Facts.now()
        self.assertGreater(facts.replays, 0, str(facts))
        return facts

    @parametrize("count", [1 << 16, 100_003])
    def test_sums_that_depend_on_the_order(self, count):
        """Equal launches may differ, but only by roundings."""
        facts = self.nearly(lambda x, y: (added_up(x), added_up(x * y).sqrt()), (count,), (count,))
        self.assertEqual((facts.copied_bytes, facts.why), (0, ()), str(facts))

    def test_sums_that_depend_on_the_order_in_a_backward(self):
        class Summed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view(3, -1).sum(1)

            @staticmethod
            def backward(ctx, grad):
                return added_up(grad.repeat(1 << 15)).sum() * grad.repeat_interleave(1 << 10)

        ways = compiled(lambda x, w: Summed.apply(x * w))
        for call in marked(range(6)):
            given = [torch.rand(3 << 10, device=self.device, requires_grad=True) for _ in range(2)]
            tangent = torch.rand(3, device=self.device)
            one, other = (torch.autograd.grad(way(*given), given, tangent) for way in (ways.graphed, ways.plain))
            self.assertEqual(one, other, rtol=1e-4, atol=1e-4, msg=f"call {call}")
        facts = Facts.now()
        self.assertEqual((facts.copied_bytes, facts.why), (0, ()), str(facts))

    @parametrize("hooked", [2, 8])
    def test_a_backward_that_overwrites_a_saved_tensor(self, hooked):
        """Inductor puts the gradient of ``scale`` where the product was, which each test launch then changes."""

        def program(x, w, scale, image, kernel):
            return (x @ w) * scale, F.conv2d(image, kernel, padding=1)

        ways, shapes = compiled(program), ((32, 64), (64, 32), (32, 32), (2, 64, 8, 8), (64, 64, 3, 3))
        for call in range(8):
            given = [torch.rand(shape, device=self.device, requires_grad=True) for shape in shapes]
            found = []
            for way in marked((ways.graphed, ways.plain)):
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t: t, torch.clone if call < hooked else lambda t: t
                ):
                    outputs = way(*given)
                found.append(torch.autograd.grad([o.sum() for o in outputs], given))
            self.assertEqual(*found, rtol=1e-3, atol=1e-3, msg=f"call {call}")
        self.assertGreater(Facts.now().replays, 0)

    @parametrize("rows", [64, 1000])
    @parametrize("name", ["halves", "xored"])
    def test_a_hidden_input_next_to_sums_that_depend_on_the_order(self, name, rows):
        shape, hidden = (rows, 33), {"halves": halves, "xored": xored}[name]
        facts = self.nearly(lambda x, y: (hidden(x) + x, added_up(y)), shape, (1 << 16,))
        self.assertEqual(facts.copied_bytes, rows * 33 * 4, str(facts))
        for why in facts.why:
            self.assertRegex(why, HIDDEN)

    def test_integers_next_to_sums_that_depend_on_the_order(self):
        """They may be copied, since a wrong integer may not show."""
        ways = compiled(lambda v, i, x: (picked_halves(v, i), i + 1, added_up(x)))
        for call in marked(range(6)):
            index = torch.randint(100, (500,), device=self.device)
            given = torch.rand(100, device=self.device), index, torch.rand(1 << 16, device=self.device)
            self.assertEqual(ways.graphed(*given), ways.plain(*given), rtol=1e-4, atol=0, msg=f"call {call}")
        facts = Facts.now()
        self.assertEqual(facts.copied_bytes, 500 * 8, str(facts))

    def test_the_generator_is_where_it_would_be(self):
        ways = compiled(lambda x: F.dropout(doubled(x), 0.5))
        offsets = []
        for way in (ways.plain, ways.graphed):
            torch.manual_seed(3)
            for _ in marked(range(5)):
                way(torch.rand(1 << 16, device=self.device))
            offsets.append(torch.cuda.default_generators[0].get_offset())
        self.assertEqual(offsets[0], offsets[1])

    def test_known_kernels_are_not_launched_before_the_first_call(self):
        with mock.patch.object(live_inputs, "Rehearsal", side_effect=AssertionError("rehearsed")):
            self.check(Program("known", lambda x, y: ((x.sin() @ y.mT).softmax(1), x.sort(1).values), (X, X)))
        rehearsed = []

        class Counting(Rehearsal):
            def failing(self, positions, unknown):
                rehearsed.append(tuple(unknown))
                return super().failing(positions, unknown)

        with mock.patch.object(live_inputs, "Rehearsal", Counting):
            self.check(Program("unknown", lambda x: doubled(x) + x, (X,)))
        self.assertEqual(rehearsed, [("hidden_plain_kernel",)])

    def test_a_buffer_that_begins_inside_of_its_storage_is_written_once_a_call(self):
        device = self.device

        class Counting(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros(2, 64, device=device)[1])

            def forward(self, x):
                self.calls.add_(1)
                return doubled(x) + self.calls

        module = Counting()
        graphed = compiled(module).graphed
        for call in marked(range(1, 6)):
            x = torch.rand(64, device=self.device)
            self.assertEqual(graphed(x), 2 * x + call)
            self.assertEqual(module.calls, torch.full_like(x, call))
        self.assertGreater(Facts.now().replays, 0)

    def test_too_little_memory_for_the_check(self):
        with mock.patch.object(Rehearsal, "_launch_as_recorded", side_effect=torch.OutOfMemoryError("of the test")):
            self.check(Program("unknown", lambda x: doubled(x) + x, (X,), "no memory to check hidden_plain_kernel"))


if __name__ == "__main__":
    run_tests()
