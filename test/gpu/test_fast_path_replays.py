"""The fast path: which calls take it, that their results are right, and that other calls take the slow path."""

import contextlib
import unittest
from unittest import mock

import torch
from indirection import KEPT, REGIMES, Facts, IndirectionTestCase, Program, assert_same_bits, by_name, compiled, reset
from indirection import tensor as given
from parity import marked
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.managers import candidates
from pygraph_trees.trees.managers.manager import Manager

X, Y = given(64, 33), given(64, 33)
CALLS = 4  # in each regime

# Programs that compute the same function of moving inputs at each call.
PROGRAMS = [
    Program("pointwise", lambda x, y: x * y + 1, (X, Y)),
    Program("several outputs", lambda x, y: (x.sin(), x @ y.mT, y.sum(0)), (X, Y)),
    Program("misaligned", lambda x, y: x.sin() @ y.mT, (given(64, 33, layout="misaligned"), Y)),
    Program("64 inputs", lambda *xs: [x * 2 for x in xs], tuple(given(17) for _ in range(64))),
    Program("an input comes back", lambda x, y: (x, y.T, x + y), (X, Y)),
    Program("no inputs but one", lambda x: x.cumsum(0), (X,)),
    Program("written to", lambda x, y: x.add_(y).sum(0), (X, Y)),
    Program("random", lambda x, y: torch.rand_like(x) + y, (X, Y), seeded=True),
]


@contextlib.contextmanager
def counted():
    """The number of calls that tried the fast path, and of those that took it."""
    counts, native = {"asked": 0, "fast": 0}, binding.extension
    before = native.counts()
    yield counts
    for name, since, now in zip(counts, before, native.counts(), strict=False):
        counts[name] = now - since


@instantiate_parametrized_tests
@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestFastPath(IndirectionTestCase):
    @parametrize("program", PROGRAMS, name_fn=by_name)
    def test_every_call_behind_the_first_replay(self, program):
        regimes = KEPT if program.name == "written to" else REGIMES
        with counted() as counts:
            facts = self.check(program, regimes, CALLS)
        # A function that mutates asks once at each new place in the tree, after each other function, whether it may.
        self.assertGreaterEqual(counts["fast"], facts.replays - 1 - (program.name == "written to"))
        self.assertEqual(counts["fast"], counts["asked"] - (program.name == "written to"))

    def test_sizes_that_are_inputs(self):
        """Each size has its own recording, which is replayed whatever size came before."""
        ways = compiled(lambda x, n: x.sum(0) * n + x.shape[0], dynamic=True)
        with counted() as counts:
            calls = ([torch.randn(8 + call % 2, 33, device=self.device), call % 3] for call in range(48))
            recordings = self.assertSameCalls(ways, calls).recordings
        self.assertGreater(recordings, 2)
        # For each: the warmup, the recording, a replay on the slow path, and finding it after the recording before it.
        self.assertGreaterEqual(counts["fast"], 48 - 4 * recordings - 2)
        self.assertEqual(counts["fast"], counts["asked"])

    def test_a_function_that_is_called_three_times_a_step(self):
        """Each call has a recording after the previous call's; the places of all three are remembered."""
        ways = compiled(lambda x, y: (x @ y).tanh())
        settle, calls = 6, 4
        with mock.patch.object(candidates, "_find", side_effect=candidates._find) as found:
            for call in range(settle + calls):
                x, *others = (torch.randn(64, 64, device=self.device) for _ in range(4))
                if call == settle:
                    self.assertGreaterEqual(found.call_count, 3)
                    found.reset_mock()
                results = []
                for way in marked((ways.plain, ways.graphed)):
                    made = [way(x, others[0])]
                    for other in others[1:]:
                        made.append(way(made[-1], other))
                    results.append(made)
                assert_same_bits(results[1], results[0], f"call {call}: ")
                del made, results
            self.assertEqual(found.call_count, 0)
        self.assertEqual(Facts.now().recordings, 3)

    def test_a_step_that_branches(self):
        """The fast path finds the recording of whichever function follows the first one."""
        first = compiled(lambda x: x.sin() + 1)
        others = [compiled(lambda y: y.cos().sum(0)), compiled(lambda y: y @ y.mT)]
        with counted() as counts:
            for call in range(16):
                x = torch.randn(64, 64, device=self.device)
                other = others[(call // 2 + call // 5) % 2]
                wanted = [first.plain(x)]
                wanted.append(other.plain(wanted[0]))
                torch.compiler.cudagraph_mark_step_begin()
                middle = first.graphed(x)
                assert_same_bits([middle, other.graphed(middle)], wanted, f"call {call}: ")
        self.assertGreaterEqual(counts["fast"], 16)
        self.assertEqual(Facts.now().recordings, 3)

    def test_the_right_one_of_many_recordings(self):
        """The second function is recorded once for each set of the first one's outputs that are kept."""
        first, second = compiled(lambda x: tuple(x + n for n in range(1, 6))), compiled(lambda x: x * 2)
        patterns = 2**5

        def run():
            for pattern in marked(range(patterns)):
                x = torch.full((100,), float(pattern), device=self.device)
                outputs = list(first.graphed(x))
                kept = {n: outputs[n] for n in range(5) if pattern >> n & 1}
                del outputs
                y = second.graphed(x)
                self.assertEqual([kept[n] for n in kept], [x + n + 1 for n in kept])
                self.assertEqual(y, x * 2)
                del y, kept

        run()
        run()
        before = Facts.now().recordings
        with counted() as counts:
            run()
        self.assertEqual(Facts.now().recordings, before)
        self.assertGreaterEqual(before, patterns)
        self.assertEqual(counts["fast"], 2 * patterns)

    def are_cached(self, outputs):
        """For each output, whether the recording keeps the tensor for all of its replays."""
        kept = cudagraph_trees.get_manager(0).current_node.cached_tensor_outputs
        return all(any(output is tensor for tensor in kept) for output in outputs)

    def test_views_among_the_outputs(self):
        """Each replay makes new views, since a user may change a view in ways that must not reach the next replay."""
        w = torch.randn(6, 8, device=self.device)

        def alone(x):
            return (x @ w).view(2, -1), (x @ w[:, :4]).t(), x.sin()

        def beside(x):
            y = x @ w
            return y.view(2, -1), y, y.t()

        for fn in (alone, beside):
            ways, same, finished = compiled(fn), [], set()
            execute = Manager.execute_node

            def watched(self, node, inputs, execute=execute, finished=finished):
                finished.add(node.wrapped_function.model.as_returned is not None)
                return execute(self, node, inputs)

            with mock.patch.object(Manager, "execute_node", watched):
                for call in marked(range(7)):
                    x = torch.randn(4, 6, device=self.device)
                    outputs = ways.graphed(x)
                    assert_same_bits(outputs, ways.plain(x), f"call {call}: ")
                    self.assertEqual([o.stride() for o in outputs], [o.stride() for o in ways.plain(x)])
                    same.append(call > 1 and self.are_cached(outputs))
                    outputs[0].unsqueeze_(0).requires_grad_()
                    del outputs
            self.assertEqual(finished, {False})
            self.assertEqual(same[-2:], [False] * 2)

    def test_a_view_that_retains_its_gradient(self):
        """A view may retain its gradient in a training step, in which saved tensors are not made again."""
        model = torch.nn.Linear(6, 8, device=self.device)
        ways = compiled(lambda x: model(x).view(2, 2, 8))  # a view of a library's result in another shape
        for call in range(6):
            x, gradients = torch.randn(4, 6, device=self.device), []
            for way in marked((ways.plain, ways.graphed)):
                model.zero_grad()
                y = way(x)
                y.retain_grad()
                (y * (call + 1)).sum().backward()
                gradients.append([y.grad.clone(), model.weight.grad.clone()])
                del y
            self.assertEqual(gradients[0][0], torch.full((2, 2, 8), float(call + 1), device=self.device))
            assert_same_bits(gradients[1], gradients[0], f"call {call}: ")

    def check_gradients(self, model, calls, steps):
        """Runs ``steps`` with each way, inputs and the model; gradients are equal to the un-graphed ones."""
        torch.manual_seed(0)
        model = model.to(self.device)
        ways = compiled(model)
        for call in range(calls):
            xs = [torch.randn(2, 4, 6, device=self.device) for _ in range(2)]
            found = []
            for way in marked((ways.plain, ways.graphed)):
                model.zero_grad()
                found.append([gradient.clone() for gradient in steps(call, way, xs, model)])
            assert_same_bits(found[1], found[0], f"call {call}: ")

    @parametrize("others", [0, 1])
    def test_forwards_before_their_backwards(self, others):
        """Tensors that the first forward saves, views of kernels' results, outlive its output."""
        other = compiled(lambda x: (x.sin() + 1).flatten(1)).graphed

        def steps(call, way, xs, model):
            losses = []
            for x in xs[: 1 + (call > 3)]:
                losses.append(way(x).sum())
                for _ in range(others):
                    other(x)
            for loss in losses:
                loss.backward()
            return [p.grad for p in model.parameters()]

        self.check_gradients(
            torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)), 8, steps
        )

    def test_gradients_that_are_asked_for_a_gradient(self):
        """A gradient may be made to require gradients, detached or reshaped in place, which affects no other call."""

        def steps(call, way, xs, model):
            biases = [p for p in model.parameters() if p.dim() == 1]  # others' gradients are no views
            gradients = torch.autograd.grad(way(xs[0]).sum(), biases)
            for gradient in gradients:
                self.assertFalse(gradient.requires_grad)
                self.assertIsNone(gradient.grad)
                gradient.requires_grad_()
            sum((g * g).sum() for g in gradients).backward()
            found = [g.grad.clone() for g in gradients]
            for gradient in gradients:
                gradient.detach_().unsqueeze_(0)
            return found

        self.check_gradients(
            torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)), 7, steps
        )

    def test_gradients_that_hooks_keep(self):
        """A gradient that a hook keeps does not share memory with the parameter's, which is changed in place."""

        def steps(call, way, xs, model):
            kept = {}
            biases = [(name, p) for name, p in model.named_parameters() if p.dim() == 1]  # others' are no views
            with contextlib.ExitStack() as hooks:
                for name, parameter in biases if call != 5 else ():  # call 5 has no hooks
                    hook = parameter.register_hook(lambda gradient, name=name: kept.__setitem__(name, gradient))
                    hooks.callback(hook.remove)
                way(xs[0]).sum().backward()
            found = {name: gradient.clone() for name, gradient in kept.items()}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for name, gradient in found.items():
                assert_same_bits(kept[name], gradient, f"call {call}, {name}: ")
            return [*(found[name] for name in sorted(found)), *(p.grad for p in model.parameters())]

        with counted() as counts:
            self.check_gradients(
                torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)), 9, steps
            )
        self.assertGreaterEqual(counts["fast"], 2 * 5)

    def test_without_the_part_in_cpp(self):
        """Upstream's code replays: the results are the same, and no more is copied."""
        with counted() as counts, mock.patch.object(binding, "extension", None):
            for program in PROGRAMS:
                reset()
                self.check(program, KEPT if program.name == "written to" else REGIMES, CALLS)
        self.assertEqual(counts["fast"], 0)


if __name__ == "__main__":
    run_tests()
