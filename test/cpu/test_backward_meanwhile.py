"""What happens while compiled functions' edges are taken out: hooks, errors, interrupts, threads, other backwards."""

import contextlib
import gc
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import accumulating
import torch
from accumulating import HOOKS, TRAINS, WORDS, BackwardTest, Doing, Net, after_first, as_engine, names, node_of, step
from torch._inductor import config
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.reasons import Reason


class TestDuring(BackwardTest):
    """What happens while edges are taken out."""

    def test_a_hook_put_on_a_parameter_runs(self):
        for name, put in HOOKS.items():

            def program(model, call, put=put):
                seen, handles = [], []
                for _ in range(2):  # the second time, the gradient exists
                    after_first(model, call, lambda _: handles.append(put(model.layers[4].weight, seen)))
                    handles.clear()
                    model.layers[4].weight._backward_hooks = None
                return seen

            def all_at_once(model, call):
                seen, handles = [], []
                put_all = lambda _: handles.extend(put(model.layers[4].bias, seen) for put in HOOKS.values())  # noqa: E731
                after_first(model, call, put_all)
                return seen

            with self.subTest(hook=name):
                counts = {"taken": 2} if name != "after" else {"taken": 1, "why": {Reason.PARAMETER_HOOKED: 1}}
                self.assertGreater(len(self.compare(program, **counts)), 1)
        self.assertEqual(len(self.compare(all_at_once, taken=1)), len(HOOKS))

    def test_a_hook_put_on_the_node_raises(self):
        def program(model, call):
            after_first(model, call, lambda loss: node_of(loss).register_hook(lambda *_: None))

        found, *counts = self.run_with("short", program, Net)
        self.assertEqual(counts, [1, {}])
        self.assertIn("a hook was put on a compiled function's node during its backward", found[2])

    def test_one_edge_is_seen(self):
        """The one difference that a program can see: the others are not among the node's next functions."""
        seen = []

        def program(model, call):
            seen.clear()
            loss = after_first(model, call, lambda loss: seen.append(names(node_of(loss))))
            return names(node_of(loss)), sorted(vars(node_of(loss)))

        self.compare(program, taken=1)
        self.assertEqual([name for name in seen[0] if name is not None], ["AccumulateGrad"])

    def test_an_exception_restores_everything(self):
        """Raised before the compiled code, and while it accumulates, before and after the accumulation."""

        def program(model, call, error):
            def fail(*_):
                raise error

            weight, found = model.layers[4].weight, []
            for put in (fail, weight.register_hook, weight.register_post_accumulate_grad_hook):
                loss = Doing.apply(call(WORDS), lambda put=put: put(fail)).sum()
                try:
                    loss.backward()
                except BaseException as raised:
                    found.append(repr(raised.with_traceback(None)))
                found.append((names(node_of(loss)), sorted(vars(node_of(loss)))))
                weight._backward_hooks = weight._post_accumulate_grad_hooks = None
                del loss
                gc.collect()
            model.zero_grad()  # the engine may have accumulated others before it failed
            return found

        for error in (ValueError("x"), KeyboardInterrupt(), torch.OutOfMemoryError("x"), SystemExit()):
            with self.subTest(error=type(error)):
                found = self.compare(lambda *given: program(*given, error), taken=3)  # noqa: B023
                self.assertEqual([found[0], found[2], found[4]], [repr(error)] * 3)
                self.assertEqual(found[3][0].count("AccumulateGrad"), TRAINS)

    @config.patch({"triton.pygraph_entry": "short"})
    def test_interrupts_at_any_time_restore_everything(self):
        torch._dynamo.reset()
        model = Net()
        call = accumulating.compiled(model)
        step(model, call)
        interrupted = 0
        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, signal.default_int_handler))
        for i in range(200):
            loss = call(WORDS).sum()
            model.zero_grad()
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + (i % 50) * 8e-6)
                loss.backward()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            self.assertEqual(names(node_of(loss)).count("AccumulateGrad"), TRAINS)
            self.assertEqual([name for name in vars(node_of(loss)) if name.startswith("apply")], [])
        self.assertGreater(interrupted, 0)
        del loss
        before = accumulating.counted()[0]
        step(model, call)
        self.assertEqual(accumulating.counted()[0] - before, 1)

    def test_backwards_of_the_same_graph_inside(self):
        """In a hook. In another thread, the engine would read edges while they are put back, so it raises."""

        def program(model, call):
            found = []

            def inside(loss):
                found.extend(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
                loss.backward(retain_graph=True, inputs=[model.layers[0].bias])

            first = []  # the hook runs in the inner backwards, too
            after_first(model, call, lambda loss: first or first.append(1) or inside(loss))
            return found

        def elsewhere(model, call):
            def grad(loss):
                with self.assertRaisesRegex(RuntimeError, "that another thread accumulates at the same time"):
                    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                raised.append(1)

            with ThreadPoolExecutor(1) as other:
                after_first(model, call, lambda loss: other.submit(grad, loss).result())

        self.compare(program, taken=1, why={Reason.SOME_INPUTS: 2})
        raised = []
        found, *counts = self.run_with("short", elsewhere, Net)
        self.assertEqual((counts, raised, found[2]), ([1, {}], [1], None))

    def test_backwards_in_other_threads(self):
        """They begin while edges are out, and end later; they need none of these edges."""

        def leaf(model, call):
            return torch.ones(2, requires_grad=True), lambda w: (w * 1).sum().backward()

        def edge(model, call):
            w = torch.ones(2, requires_grad=True)
            return w, lambda w: torch.autograd.backward([torch.autograd.graph.get_gradient_edge(w)], [torch.ones(2)])

        def other_head(model, call):
            out = call(WORDS)
            outs.append(out)
            return (out * 2).pow(2), lambda head: torch.autograd.grad(head.sum(), out)

        def mistake(model, call):
            def backwards(w):
                with contextlib.suppress(RuntimeError):
                    torch.ones(1).backward()
                w.sum().backward()

            return torch.ones(2, requires_grad=True), backwards

        for make in (leaf, edge, other_head, mistake):
            outs, started, finish = [], threading.Event(), threading.Event()

            def program(model, call, make=make, outs=outs, started=started, finish=finish):
                started.clear(), finish.clear(), outs.clear()
                begun, backward = make(model, call)
                thread = threading.Thread(target=backward, args=(begun,))
                begun.register_hook(lambda _: (started.set(), finish.wait(20), None)[2])
                out = outs[0] if outs else call(WORDS)
                loss = Doing.apply(out, lambda: (thread.start(), started.wait(20))).sum()
                loss.backward()
                finish.set(), thread.join()
                return names(node_of(loss)).count("AccumulateGrad")

            with self.subTest(make.__name__):
                why = {Reason.SOME_INPUTS: 1} if make is other_head else {}
                self.assertEqual(self.compare(program, taken=1, why=why), TRAINS)

    @as_engine(taken=1, why={Reason.GRAPH_KEPT: 1})
    def test_a_node_that_is_reached_from_another_root_inside(model, call):
        out = call(WORDS)
        other = (out * 3).sum()
        loss = Doing.apply(out * 2, lambda: other.backward(retain_graph=True)).sum()
        loss.backward()

    @as_engine(taken=1, why={Reason.OTHER_BACKWARD: 1})
    def test_a_function_that_is_called_inside(model, call):
        """Only the outer backward takes edges; the inner one has another graph of the same parameters."""
        after_first(model, call, lambda _: call(WORDS).pow(2).sum().backward())

    def test_the_shadow_outlives_its_backward(self):
        kept = []

        def keep(loss):
            kept.extend(value for name, value in vars(node_of(loss)).items() if name.startswith("apply"))

        def program(model, call):
            loss = after_first(model, call, keep)
            (shadow,) = kept
            self.assertRaisesRegex(RuntimeError, "second time", shadow, [torch.ones(4, 8)])
            return loss.grad_fn is not None

        found, *_ = self.run_with("short", program, Net)
        self.assertIs(found[2], True)

    def test_threads(self):
        """Each with graphs of its own, on shared parameters: sums of ones, so that their order does not matter."""

        def program(model, call):
            for p in model.parameters():
                p.data.fill_(0.5)
            step(model, call)
            model.zero_grad()
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(lambda _: [step(model, call) for _ in range(20)], range(4)))

        engine, ours = (self.run_with(entry, program, Net) for entry in ("off", "short"))
        self.assertEqual(ours[0], engine[0])
        self.assertEqual(ours[1] + sum(ours[2].values()), 81)
        self.assertGreater(ours[1], 0)

    def test_nothing_is_kept_alive(self):
        torch._dynamo.reset()
        model = Net()
        loss = accumulating.compiled(model)(WORDS).sum()
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        loss.backward()
        node = weakref.ref(node_of(loss))
        gradient = weakref.ref(model.layers[0].weight.grad)
        del loss
        model.zero_grad()
        self.assertEqual((node(), gradient()), (None, None))


if __name__ == "__main__":
    run_tests()
