"""Trials on a GPU: the measurements decide, decisions are kept, and memory is given back."""

from __future__ import annotations

import threading
from unittest import mock

import torch
from indirection import Program, by_name, compiled, reset, run, tensor
from parity import marked
from selection import CALLS, SelectionTestCase, decided
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.cuda.progress import CudaDevice
from pygraph_trees.selection import trial
from pygraph_trees.selection.decision import FEWEST_PAIRS, MOST_PAIRS, Execution
from pygraph_trees.selection.profiles import Profiles
from pygraph_trees.trees.managers import storms


@torch.library.custom_op("pygraph_selection_test::at_home", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def at_home(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@at_home.register_fake
def _(x):
    return torch.empty_like(x)


class TestTrials(SelectionTestCase):
    def test_many_small_kernels_are_graphed(self):
        def program(x):
            for _ in range(30):
                x = torch.nn.functional.softmax(x @ x, -1)
            return x

        graphed = torch.compile(program, mode="reduce-overhead")
        x = torch.randn(16, 16, device=self.device)
        for _ in marked(range(CALLS)):
            graphed(x)
            torch.cuda.synchronize()
        (function,) = self.functions()
        self.assertRegex(str(function.decision), "^graphed: .* in one replay, without a measurement$")
        self.assertEqual((len(function.recordings), function.replays, function.trial_calls), (1, CALLS - 2, 0))

    def test_a_small_function_is_measured(self):
        graphed = torch.compile(lambda x: x.sin() + 1, mode="reduce-overhead")
        for _ in marked(range(CALLS)):
            graphed(torch.ones(64, device=self.device))
            torch.cuda.synchronize()
        (function,) = self.functions()
        self.assertRegex(str(function.decision), "^(un-)?graphed: .* us a call against ")
        self.assertIn(function.trial_calls, range(FEWEST_PAIRS + 1, MOST_PAIRS + 2))

    def test_shapes_that_never_come_again_are_not_graphed(self):
        """After the first sizes, calls run un-graphed, and neither recordings nor memory grow."""
        graphed = torch.compile(lambda x: (x.sin() * 2).cumsum(0), mode="reduce-overhead", dynamic=True)
        reserved = []
        for call in marked(range(3 * CALLS)):
            x = torch.full((4096 + 8 * call, 16), call / 8, device=self.device)
            self.assertEqual(graphed(x), (x.sin() * 2).cumsum(0), rtol=1e-4, atol=1e-2)
            reserved.append(torch.cuda.memory_reserved())
        (function,) = self.functions()
        self.assertLessEqual((function.warmups, len(function.recordings)), (storms.FIRST_SIZES, 0))
        self.assertRegex(str(function.ungraphed_reason), "sizes change too often")
        self.assertLess(reserved[-1] - reserved[2 * storms.FIRST_SIZES], 64 << 20)

    def test_recordings_that_are_never_replayed_stop(self):
        """Each set of the first function's outputs that is kept needs another recording of the second one."""
        first, second = (
            torch.compile(fn, mode="reduce-overhead")
            for fn in (lambda x: tuple(x + n for n in range(1, 7)), lambda x: x.sin() * 2)
        )
        with mock.patch.object(trial, "plain_way", lambda facts: Execution.GRAPHED):
            for pattern in marked(range(2**6)):
                x = torch.full((100,), float(pattern), device=self.device)
                outputs = list(first(x))
                kept = {n: outputs[n] for n in range(6) if pattern >> n & 1}
                del outputs
                self.assertEqual(second(x), x.sin() * 2)
                self.assertEqual([kept[n] for n in kept], [x + n + 1 for n in kept])
                del kept
        recordings = [len(function.recordings) for function in self.functions()]
        self.assertLessEqual(recordings[1], storms.MOST_RECORDINGS)
        self.assertRegex(str(self.functions()[1].ungraphed_reason), "it was recorded .* times for .* replays")

    def test_a_block_that_is_called_often_in_a_training_step_is_graphed(self):
        """The block has a recording at each position, which is not a storm."""
        layer = torch.nn.Linear(32, 32, device=self.device)
        block, depth = torch.compile(layer, mode="reduce-overhead"), storms.MOST_RECORDINGS + 4
        with mock.patch.object(trial, "plain_way", lambda facts: Execution.GRAPHED):
            for call in range(6):
                x = torch.full((8, 32), 0.1 * call, device=self.device, requires_grad=True)
                results = []
                for step in marked((layer, block)):
                    h = x
                    for _ in range(depth):
                        h = step(h)
                    results.append(torch.autograd.grad(h.square().sum(), x)[0].clone())
                    del h
                self.assertEqual(results[1], results[0], rtol=1e-3, atol=1e-5)
        for function in self.functions():
            self.assertGreaterEqual(len(function.recordings), depth, str(pygraph_trees.report()))
            self.assertIsNone(function.ungraphed_reason)

    def test_the_pool_has_a_limit(self):
        """If the pool exceeds it, all recordings are dropped, and made again as they are used."""
        limit = 64 << 20
        with torch._inductor.config.patch({"triton.pygraph_selective": "always", "triton.pygraph_pool_bytes": limit}):
            steps = [torch.compile(fn, mode="reduce-overhead") for fn in (lambda x: x @ x + 1, lambda x: (x @ x).sin())]
            x = torch.randn(3072, 3072, device=self.device)
            for _ in range(CALLS // 4):
                for step in marked(steps):
                    step(x)
        reasons = [r.reason for function in self.functions() for r in function.recordings]
        self.assertTrue(any("pygraph_pool_bytes" in reason for reason in reasons), reasons)
        for step, wanted in marked(zip(steps, (x @ x + 1, (x @ x).sin()), strict=True)):
            self.assertEqual(step(x), wanted, rtol=1e-2, atol=1e-1)

    def test_behind_a_trial_replays_are_steady(self):
        """After a trial, replays take the same path as those of functions without a trial."""
        from pygraph_trees.native import binding

        graphed = torch.compile(lambda x: x.sin() + 1, mode="reduce-overhead")
        x = torch.randn(64, device=self.device)
        with decided(Execution.GRAPHED):
            for _ in range(CALLS):
                graphed(x)
        if binding.extension is None:
            self.skipTest("the part in C++ was not built")
        before = binding.extension.counts()
        for _ in range(10):
            graphed(x)
        after = binding.extension.counts()
        self.assertEqual((after[0] - before[0], after[1] - before[1]), (10, 10))

    def test_the_pool_is_given_back(self):
        """The pool is given back as soon as the last replay's outputs are released."""

        def in_pools():
            segments = torch.cuda.memory_snapshot()
            return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))

        for is_held in (False, True):
            reset()
            Profiles.default().clear()
            torch.cuda.empty_cache()
            before = in_pools()
            graphed = torch.compile(lambda x: (x.sin() @ x, x.cos()), mode="reduce-overhead")
            x = torch.randn(2048, 2048, device=self.device)
            outputs, most = (), 0
            with decided(Execution.UNGRAPHED):
                for number in marked(range(CALLS)):
                    if not is_held:
                        outputs = ()
                    outputs = graphed(x)
                    most = max(most, in_pools())
                    if number % 7 == 0:
                        self.assertEqual(outputs[1], x.cos())
            self.assertGreater(most - before, 30 << 20)
            (function,) = self.functions()
            self.assertRegex(str(function.decision), "^un-graphed: ")
            self.assertLessEqual(in_pools() - before, 2 << 20)
            self.assertEqual(outputs[0], x.sin() @ x, rtol=1e-2, atol=1e-2)

    def test_a_backward_that_cannot_be_graphed(self):
        """A backward that cannot be graphed asks for the manager that its forward has made."""

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return at_home(gradient)

        graphed = torch.compile(lambda x: Double.apply(x.sin()), mode="reduce-overhead")
        for _ in marked(range(CALLS)):
            x = torch.ones(64, device=self.device, requires_grad=True)
            graphed(x).sum().backward()
            self.assertEqual(x.grad, 2 * torch.ones_like(x).cos())

    def test_clocks_break_no_capture_of_another_thread(self):
        clocks = CudaDevice(torch.cuda.current_device())
        marks = [clocks.mark(), clocks.mark()]
        x, graph, made, errors = torch.ones(8, device=self.device), torch.cuda.CUDAGraph(), [], []
        captures, was_asked = threading.Event(), threading.Event()

        def capture():
            try:
                with torch.cuda.graph(graph, capture_error_mode="global"):
                    made.append(x + 1)
                    captures.set()
                    was_asked.wait(60)
            except RuntimeError as error:
                errors.append(str(error))
            finally:
                captures.set()

        torch.cuda.synchronize()
        thread = threading.Thread(target=capture)
        thread.start()
        captures.wait(60)
        try:
            self.assertTrue(clocks.is_idle())
            self.assertIsNotNone(clocks.us_between(*marks))
        finally:
            was_asked.set()
            thread.join()
        self.assertEqual(errors, [])
        graph.replay()
        self.assertEqual(made[0], x + 1)


def _in_parts(x, y):
    z = (x * 2 + y).cpu().sum()  # on the CPU between two graphs
    return x.sin() * z.to(x.device, non_blocking=False), z


PROGRAMS = (
    Program("pointwise", lambda x, y: (x.sin() + y, x * y), (tensor(64, 64), tensor(64, 64))),
    Program("written to", lambda c, x: c.add_(x).sum(), (tensor(64, 64), tensor(64, 64))),
    Program("cache", lambda c, i, x: c.index_copy_(0, i, x).sum(), (
        tensor(32, 8), tensor(4, dtype="int64", values="order"), tensor(4, 8),
    )),
    Program("returned", lambda x: (x[1:].t(), x, x @ x), (tensor(8, 8),)),
    Program("misaligned", lambda x: x.cos() * 3, (tensor(33, 33, layout="misaligned"),)),
    Program("backward", lambda x, y: (x * y).tanh().sum(), (tensor(64, 64), tensor(64, 64)), backward=True),
    Program("in parts", _in_parts, (tensor(64, 64), tensor(64, 64))),
)  # fmt: skip


@instantiate_parametrized_tests
class TestBothWays(SelectionTestCase):
    """Graphed or not, in trials and after them, a function gives the bits of un-graphed Inductor. Which way is better
    depends on the machine, so these tests set the decision.
    """

    @parametrize("way", list(Execution), name_fn=lambda way: way.name.lower())
    @parametrize("program", PROGRAMS, name_fn=by_name)
    def test_bits(self, program, way):
        with decided(way):
            run(program, compiled(program.fn), self.device, ("kept", "fresh"), calls=CALLS)
        functions = self.functions()
        self.assertGreater(len(functions), 0)
        for function in functions:
            self.assertRegex(str(function.decision), f"^{way.value}: ")
            self.assertEqual(function.ungraphed_calls > 0, way is Execution.UNGRAPHED)

    @parametrize("way", list(Execution), name_fn=lambda way: way.name.lower())
    def test_training(self, way):
        """Parameters, statistics and momentum are equal after many steps, and no forward waits for its backward."""
        results = []
        for side in ("plain", "graphed"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            layers = [torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 4)]
            model = torch.nn.Sequential(*layers).to(self.device)
            step = getattr(compiled(model), side)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with decided(way):
                for number in range(CALLS):
                    torch.manual_seed(number)
                    loss = step(torch.randn(8, 16, device=self.device)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            results.append([loss.detach().clone(), *(p.detach().clone() for p in model.state_dict().values())])
        self.assertEqual(results[1], results[0], rtol=0, atol=0)
        manager = torch._inductor.cudagraph_trees.get_manager(0, create_if_none_exists=False)
        self.assertFalse(manager.running_forwards_with_pending_backwards)
        self.assertEqual({str(f.decision).partition(":")[0] for f in self.functions()}, {way.value})


if __name__ == "__main__":
    run_tests()
