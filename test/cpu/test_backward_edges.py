"""Backwards whose compiled functions accumulate gradients themselves: in which loops, and on which conditions."""

import logging
from unittest import mock

import accumulating
import torch
import torch.nn.functional as F
from accumulating import HOOKS, LABELS, TRAINS, WORDS, BackwardTest, Net, after_first, as_engine, counted, step
from commands import WithFolder, forked, python
from torch import nn
from torch._inductor import config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_patches
import pygraph_trees
from pygraph_trees.reasons import Reason
from pygraph_trees.trees.hooks import backward_edges


class Body(Net):
    """Without a layer that needs no gradient of its input."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class TestLoops(BackwardTest):
    """Loops as people write them."""

    def test_gradients_are_accumulated(self):
        def several(model, call):
            for _ in range(3):
                step(model, call)

        self.compare(step, taken=1)
        before = pygraph_trees.report().environment.backwards.at_once
        self.compare(several, taken=3)
        self.assertEqual(pygraph_trees.report().environment.backwards.at_once - before, 3)

    @as_engine(taken=3, result=1024.0)
    def test_a_loss_outside_of_the_graph_that_is_scaled(model, call):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(call(WORDS), LABELS)).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    @as_engine(taken=6)
    def test_accumulation_over_several_backwards(model, call):
        for i in range(6):
            (F.cross_entropy(call(WORDS), LABELS) / 2).backward()
            if i % 2:
                for p in model.parameters():
                    p.data.sub_(p.grad)
                model.zero_grad(set_to_none=i == 3)

    test_several_compiled_functions = as_engine(1, accumulating.Broken, why={Reason.FEW_GRADIENTS: 1})(step)

    @as_engine(1, accumulating.Broken, why={Reason.FEW_GRADIENTS: 1})
    def test_several_compiled_functions_whose_first_parameters_are_frozen(model, call):
        model.layers[0].requires_grad_(False)
        step(model, call)

    test_shared_parameters_inside_a_function = as_engine(1, accumulating.Tied)(step)

    @as_engine(taken=1)
    def test_a_checkpoint(model, call):
        torch.utils.checkpoint.checkpoint(call, WORDS, use_reentrant=False).sum().backward()

    @as_engine(why={Reason.OTHER_BACKWARD: 1}, result=torch.is_tensor)
    def test_a_reentrant_checkpoint(model, call):
        w = torch.ones((), requires_grad=True)
        run = torch.utils.checkpoint.checkpoint
        run(lambda x, w: call(x) * w, WORDS, w, use_reentrant=True).sum().backward()
        return w.grad

    @as_engine(taken=2)
    def test_gradients_that_the_program_changed(model, call):
        step(model, call)
        model.layers[0].weight.grad.add_(1)
        model.layers[1].bias.grad = None
        model.layers[2].weight.grad = torch.zeros(8, 8).t()
        model.layers[3].weight.grad = torch.ones(8, 8).to_sparse()
        step(model, call)

    @as_engine(taken=2)
    def test_parameters_with_gaps_and_columns(model, call):
        model.layers[0].weight = nn.Parameter(torch.randn(8, 8).t())
        model.layers[1].weight = nn.Parameter(torch.randn(8, 16)[:, ::2])
        for _ in range(2):
            step(model, call)

    @as_engine(taken=1, result=True)
    def test_a_sparse_gradient(model, call):
        model.words.sparse = True
        step(model, call)
        return model.words.weight.grad.is_sparse

    @as_engine(taken=1)
    def test_a_parameter_that_is_frozen_before_the_backward(model, call):
        loss = call(WORDS).sum()
        model.layers[0].weight.requires_grad_(False)
        loss.backward()

    @as_engine(taken=1)
    def test_two_roots(model, call):
        out = call(WORDS)
        torch.autograd.backward([out.sum(), out.mean()])

    @as_engine(taken=2, result=lambda error: "backward through the graph a second time" in error)
    def test_a_second_backward_raises_as_usual(model, call):
        loss = call(WORDS).sum()
        loss.backward()
        loss.backward()

    @as_engine(taken=1, result=lambda seen: "aten.detach.default" in seen)
    def test_modes_around_the_backward(model, call):
        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        loss, seen = call(WORDS).sum(), []
        with Seen(), torch.enable_grad():
            loss.backward()
        return sorted(seen)

    @as_engine(taken=1, result=TRAINS)
    def test_a_profiler_sees_each_accumulation(model, call):
        loss = call(WORDS).sum()
        with torch.autograd.profiler.profile() as profile:
            loss.backward()
        return sum(event.name == "torch::autograd::AccumulateGrad" for event in profile.function_events)

    def test_inductor(self):
        """Also what `options` say while a function is compiled. Products need no kernel, which would be compiled."""
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(9)))
        with config.patch({"triton.cudagraphs": False}):
            for options, taken in (
                ({"triton.cudagraphs": True, "triton.pygraph_entry": "off"}, 0),
                ({"triton.cudagraphs": True}, 1),
                ({"triton.cudagraphs": True, "triton.pygraph_selective": "never"}, 1),
                ({"triton.cudagraphs": False}, 0),
            ):
                torch._dynamo.reset()
                before = counted()[0]
                torch.compile(model, options=options)(torch.ones(4, 8)).sum().backward()
                self.assertEqual(counted()[0] - before, taken, options)


class TestConditions(BackwardTest, WithFolder):
    """If one condition does not hold, torch's engine accumulates as usual, and the reason is counted."""

    @as_engine(why={Reason.GRAPH_KEPT: 2})
    def test_a_graph_that_is_kept(model, call):
        loss = call(WORDS).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)

    @as_engine(why={Reason.GRAPH_KEPT: 1}, result=[True] * TRAINS)
    def test_a_graph_of_the_backward_is_made(model, call):
        call(WORDS).sum().backward(create_graph=True)
        return [p.grad.requires_grad for p in model.parameters()]

    @as_engine(why={Reason.SOME_INPUTS: 2}, result=lambda found: len(found) == TRAINS)
    def test_gradients_of_some_inputs_or_that_are_returned(model, call):
        call(WORDS).sum().backward(inputs=list(model.layers[0].parameters()))
        return torch.autograd.grad(call(WORDS).sum(), list(model.parameters()))

    @as_engine(why={Reason.COMPILED_AUTOGRAD: 2})
    def test_compiled_autograd_and_a_backward_inside_it(model, call):
        compiled = torch._dynamo.compiled_autograd
        inside = mock.patch.object(compiled, "in_compiled_autograd_region", True)
        for context in (compiled._enable(torch.compile(backend="eager")), inside):
            loss = call(WORDS).sum()
            with context:
                loss.backward()

    @as_engine(why={Reason.WATCHED: 1}, result=lambda error: "returned nan values" in error)
    def test_anomaly_mode(model, call):
        with torch.autograd.detect_anomaly(check_nan=True):
            (call(WORDS).sum() * float("nan")).backward()

    def test_the_debug_log_of_autograd(self):
        log = torch.autograd.graph.log

        def program(model, call):
            with self.assertLogs(log, logging.DEBUG) as logged:
                step(model, call)
            return sum("AccumulateGrad" in line for line in logged.output)

        self.assertEqual(self.compare(program, why={Reason.WATCHED: 1}), TRAINS)

    @as_engine(why={Reason.OTHER_BACKWARD: 1})
    def test_a_backward_inside_another(model, call):
        call(WORDS)  # compiles it
        y = torch.ones(2, requires_grad=True) * 2
        y.register_hook(torch.enable_grad()(lambda _: step(model, call)))
        y.sum().backward()

    @as_engine(why={Reason.NODE_HOOKED: 1}, result=1)
    def test_a_hook_on_the_node_sees_its_gradients(model, call):
        loss, seen = call(WORDS).sum(), []
        accumulating.node_of(loss).register_hook(lambda given, _: seen.append([g is None for g in given]))
        loss.backward()
        return sum(map(any, seen))

    @as_engine(why={Reason.NODE_HOOKED: 1})
    def test_a_hook_before_the_node(model, call):
        loss = call(WORDS).sum()
        accumulating.node_of(loss).register_prehook(lambda given: tuple(None if g is None else g * 2 for g in given))
        loss.backward()

    @as_engine(taken=1, make=Body, result=1)
    def test_a_hook_that_runs_after_the_node(model, call):
        seen, x = [], torch.ones(4, 8, requires_grad=True).exp()
        x.register_hook(lambda _: seen.append(1))
        call(x).sum().backward()
        return len(seen)

    @as_engine(why={Reason.NODE_HOOKED: 1}, result=[TRAINS])
    def test_a_hook_that_puts_on_others(model, call):
        put, seen = torch.autograd.graph.register_multi_grad_hook, []
        out, parameters = call(WORDS), tuple(model.parameters())
        count = lambda given: seen.append(sum(g is not None for g in given))  # noqa: E731
        out.register_hook(lambda _: put(parameters, count) and None)
        out.sum().backward()
        return seen

    def test_hooks_on_parameters(self):
        """Of each kind. No other edge is taken, though those of the other parameters would be enough."""
        for name, put in HOOKS.items():

            def program(model, call, put=put):
                seen = []
                handles = [put(p, seen) for p in (model.layers[1].weight, model.layers[3].bias)]
                step(model, call)
                del handles
                return seen

            with self.subTest(hook=name):
                self.assertGreater(len(self.compare(program, why={Reason.PARAMETER_HOOKED: 1})), 0)

    @as_engine(why={Reason.PARAMETER_HOOKED: 1}, result=lambda seen: len(seen) == 1)
    def test_a_hook_on_several_parameters(model, call):
        seen = []
        put = torch.autograd.graph.register_multi_grad_hook
        put(tuple(model.parameters()), lambda given: seen.append([g is None for g in given]))
        step(model, call)
        return seen

    @as_engine(why={Reason.PARAMETER_HOOKED: 2})
    def test_optimizers_in_hooks(model, call):
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step() or optimizers[p].zero_grad())
        for _ in range(2):
            step(model, call)

    @as_engine(why={Reason.PARAMETER_HOOKED: 1}, result=[False])
    def test_a_callback_that_a_hook_queues(model, call):
        seen, queue = [], torch.autograd.Variable._execution_engine.queue_callback
        look = lambda: seen.append(model.layers[4].weight.grad is None)  # noqa: E731
        model.layers[0].weight.register_hook(lambda _: queue(look))
        step(model, call)
        return seen

    def test_ddp(self):
        def program(model, call):
            wrapped = accumulating.compiled(nn.parallel.DistributedDataParallel(model))
            for _ in range(2):
                wrapped(WORDS).sum().backward()

        torch.distributed.init_process_group("gloo", init_method=f"file://{self.folder}/x", rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)
        self.compare(program, why={Reason.PARAMETER_HOOKED: 2})

    def test_fsdp2(self):
        """Compiled blocks have whole parameters, which are plain tensors."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo", init_method=f"file://{self.folder}/x", rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)
        mesh = init_device_mesh("cpu", (1,))
        found = {}
        for entry in ("off", "short"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = fully_shard(Net(), mesh=mesh)
            before = counted()
            with config.patch({"triton.pygraph_entry": entry}):
                model.compile(backend="aot_eager")
                for _ in range(3):
                    model(WORDS).sum().backward()
            found[entry] = [p.grad.full_tensor() for p in model.parameters()]
            self.assertEqual(counted() == before, entry == "off")
        self.assertEqual(found["short"], found["off"], rtol=0, atol=0)

    @as_engine(why={Reason.PARAMETER_SHARED: 2})
    def test_two_nodes_of_a_graph_that_share_parameters(model, call):
        (call(WORDS).sum() + call(WORDS + 0).mean()).backward()

    @as_engine(taken=3, result=lambda losses: len(losses) == 3)
    def test_graphs_of_the_same_parameters_whose_backwards_come_later(model, call):
        losses = [F.cross_entropy(call(WORDS), LABELS) for _ in range(3)]
        for loss in losses:
            loss.backward()
        return losses

    @as_engine(taken=1, why={Reason.OTHER_BACKWARD: 1})
    def test_a_graph_of_the_same_parameters_whose_backward_comes_inside(model, call):
        other = call(WORDS + 0).mean()
        after_first(model, call, lambda _: other.backward())

    @as_engine(taken=1, result=TRAINS)
    def test_edges_that_the_program_holds(model, call):
        edges = [torch.autograd.graph.get_gradient_edge(p) for p in model.parameters()]
        step(model, call)
        return len(edges)

    @as_engine(why={Reason.PARAMETER_SHARED: 1}, result=torch.is_tensor)
    def test_a_graph_that_is_too_large_to_tell(model, call):
        other, loss, term = call(WORDS), call(WORDS + 0).sum(), torch.ones((), requires_grad=True)
        for _ in range(1100):
            term = term * 1.0
        (loss + term).backward()
        return other.detach()

    @as_engine(why={Reason.PARAMETER_SHARED: 2})
    def test_a_parameter_or_its_edge_is_a_root(model, call):
        """The engine adds its gradient to the function's."""
        bias = model.layers[4].bias
        for root in (bias, torch.autograd.graph.get_gradient_edge(bias)):
            torch.autograd.backward([call(WORDS).sum(), root], [None, torch.full_like(bias, 0.1)])

    @as_engine(taken=1)
    def test_edges_that_eager_code_shares_stay(model, call):
        loss = call(WORDS).sum() + sum(p.pow(2).sum() for p in model.layers[0].parameters())
        loss.backward()

    @as_engine(why={Reason.PARAMETER_ELSEWHERE: 1}, result=[torch.device("meta")] * 10)
    def test_parameters_elsewhere(model, call):
        """Other devices than the node's; there is no stream on a CPU."""
        parameters = [nn.Parameter(torch.ones(2, device="meta")) for _ in range(10)]
        accumulating.like_aot([torch.ones_like(p) for p in parameters]).apply(*parameters).backward()
        return [p.grad.device for p in parameters]

    @as_engine(why={Reason.PARAMETER_SUBCLASS: 1}, result=lambda found: len(found) == TRAINS)
    def test_subclasses(model, call):
        for p in list(model.parameters()):
            torch.utils.swap_tensors(p, nn.Parameter(TwoTensor(p.detach(), p.detach() + 1)))
        call(TwoTensor(WORDS, WORDS)).sum().backward()
        found = [(p.grad.a, p.grad.b) for p in model.parameters()]
        model.zero_grad()
        return found

    def test_few_gradients(self):
        def frozen(model, call):
            for p in list(model.parameters())[:count]:
                p.requires_grad_(False)
            step(model, call)

        self.compare(step, accumulating.Small, why={Reason.FEW_GRADIENTS: 1})
        count = TRAINS - 8
        self.compare(frozen, why={Reason.FEW_GRADIENTS: 1})
        count = TRAINS - 9
        self.compare(frozen, taken=1)

    def test_an_engine_that_does_otherwise(self):
        inductor_patches.uninstall()
        upstream = torch.autograd._engine_run_backward
        inductor_patches.install()

        def lossy(roots, *args, **kwargs):  # an engine that looks at edges itself
            if "CompiledFunction" in type(roots[0].grad_fn).__name__:
                sum(node is not None for node, _ in roots[0].grad_fn.next_functions) < 9 and roots[0].grad_fn.absent
            return upstream(roots, *args, **kwargs)

        other = backward_edges.taking(lossy)
        self.addCleanup(setattr, backward_edges, "_difference", None)
        with mock.patch.object(torch.autograd, "_engine_run_backward", other):
            self.compare(step, why={Reason.ENGINE_DIFFERS: 1})
            (why,) = (why for why in backward_edges.counts()[1] if why.reason is Reason.ENGINE_DIFFERS)
        self.assertIn("has no attribute 'absent'", why)


class TestInstall(BackwardTest):
    def setUp(self):
        super().setUp()
        backward_edges.mark(type("Node", (), {}))  # until the first one is, the names are torch's

    def test_uninstall_restores_both_names(self):
        ours = torch.autograd._engine_run_backward
        self.assertIs(torch.autograd.graph._engine_run_backward, ours)
        self.addCleanup(inductor_patches.install)
        inductor_patches.uninstall()
        upstream = torch.autograd._engine_run_backward
        self.assertIs(torch.autograd.graph._engine_run_backward, upstream)
        self.assertEqual(type(upstream).__name__, "function")
        model = Net()
        call = accumulating.compiled(model)
        before = counted()
        step(model, call)
        inductor_patches.install()
        self.assertIs(torch.autograd._engine_run_backward, ours)
        step(model, call)  # compiled without the patches
        self.assertEqual(counted(), before)

    def test_an_uninstallation_in_a_backward(self):
        self.addCleanup(inductor_patches.install)

        torch._dynamo.reset()
        model = Net()
        call = accumulating.compiled(model)
        with config.patch({"triton.pygraph_entry": "short"}):
            call(WORDS)
        before = counted()[0]
        loss = after_first(model, call, lambda _: inductor_patches.uninstall())
        found = counted()[0] - before, accumulating.names(accumulating.node_of(loss)).count("AccumulateGrad")
        self.assertEqual(found, (1, TRAINS))
        self.assertNotIn(None, [p.grad for p in model.parameters()])

    def test_what_others_put_around_it_comes_off(self):
        """`make_fx` binds both names to a function of its own for a time."""
        around = getattr(torch.compiler, "_patch_engine_backward", None)
        if around is None:
            self.skipTest("this torch does not")
        ours = torch.autograd._engine_run_backward
        with around():
            self.assertIsNot(torch.autograd._engine_run_backward, ours)
        self.assertIs(torch.autograd._engine_run_backward, ours)

    def test_off_is_torchs_own_code(self):
        code = """if True:
            import pygraph_trees, torch, unittest.mock
            from torch._inductor import config
            from pygraph_trees.trees.hooks import backward_edges
            found = []
            for entry in ("off", "short"):
                torch._dynamo.reset()
                model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(9)))
                with config.patch({"triton.cudagraphs": True, "triton.pygraph_entry": entry}):
                    call = torch.compile(model, backend="aot_eager")
                    call(torch.ones(2)).sum().backward()
                found.append((*backward_edges.counts(), type(torch.autograd._engine_run_backward).__name__))
            print(found)"""
        with forked("compiler"):
            done = python("-c", code, PYGRAPH_ENTRY="short")
        wanted = [(0, {}, "function"), (1, {}, "builtin_function_or_method")]
        self.assertEqual(done.stdout, f"{wanted}\n", done.stderr)


if __name__ == "__main__":
    run_tests()
