"""Graphs that the program captures itself, with calls of compiled functions in them; eager is the oracle."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from indirection import Facts, KeptTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from user_operators import library

CALLS = 6


def generated(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + x.mean(0)


def products(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ x.mT
    return y.relu(), y.sum(1)


FUNCTIONS: dict[str, Any] = {"library": library, "generated": generated, "products": products}


@instantiate_parametrized_tests
class TestUserCaptures(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        torch.manual_seed(0)
        self.stream = torch.cuda.Stream()

    def some(self, *shape: int) -> torch.Tensor:
        return torch.randn(*(shape or (64, 64)), device=self.device)

    def close(self, found: Any, wanted: Any, call: object) -> None:
        self.assertEqual(found, wanted, atol=1e-3, rtol=1e-3, msg=lambda text: f"{call}: {text}")

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(self.device)

    def gradients(self, model: torch.nn.Module) -> list[torch.Tensor]:
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    @parametrize("name", list(FUNCTIONS))
    @parametrize("where", ["a new stream", "the stream of the calls"])
    def test_a_call_becomes_part_of_the_programs_graph(self, name: str, where: str) -> None:
        fn, graphed = FUNCTIONS[name], self.graphed(FUNCTIONS[name], dynamic=False)
        x, graph, held = self.some(), torch.cuda.CUDAGraph(), []
        with torch.no_grad(), torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream())
            for _ in range(CALLS):
                graphed(self.some())
            before = Facts.now()
            with torch.cuda.graph(graph, stream=self.stream if where == "the stream of the calls" else None):
                captured = graphed(x)
            for call in range(CALLS):
                given = self.some()
                held.append((given, graphed(given)))
                x.copy_(self.some())
                graph.replay()
                graphed(self.some())
                torch.cuda.synchronize()
                self.close(captured, fn(x), call)
                for given, output in held[-2:]:
                    self.close(output, fn(given), call)
        after = Facts.now()
        self.assertEqual((after.warmups, after.functions), (before.warmups, before.functions))
        self.assertLessEqual(after.recordings, before.recordings + 4)  # outputs that are held get memory of their own
        self.assertEqual(after.ungraphed_calls, before.ungraphed_calls + 1)

    @parametrize("calls", [1, 2])
    def test_steps_that_the_program_captures_are_not_counted(self, calls: int) -> None:
        """Captures may come before a function is recorded, and while its trial measures."""
        model, graphs = self.model(), []
        graphed = self.graphed(model, dynamic=False)
        with torch._inductor.config.patch({"triton.pygraph_selective": "auto"}), torch.no_grad():
            for call in range(24):
                x = self.some(16, 64)
                self.close(graphed(x), model(x), call)
                if call % 4 == calls:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        torch.compiler.cudagraph_mark_step_begin()
                        captured = [graphed(x) for _ in range(calls)]
                    graphs.append((graph, x, captured))
            for graph, x, captured in graphs:
                x.copy_(self.some(16, 64))
                graph.replay()
                self.close(captured, [model(x)] * calls, "captured")

    @parametrize("captures", ["forward and backward", "forward"])
    def test_training_steps(self, captures: str) -> None:
        model, x, graph = self.model(), self.some(16, 64), torch.cuda.CUDAGraph()
        graphed, found = self.graphed(model, dynamic=False), []
        for _ in range(CALLS):
            graphed(self.some(16, 64)).square().mean().backward()
            self.gradients(model)
            with torch.no_grad():
                graphed(self.some(16, 64))
        with torch.cuda.graph(graph):
            if captures == "forward":
                with torch.no_grad():
                    loss = graphed(x).square().mean()
            else:
                loss = graphed(x).square().mean()
                loss.backward()
                found = self.gradients(model)
        for step in range(CALLS):
            y = self.some(16, 64)
            graphed(y).square().mean().backward()
            ours = self.gradients(model)
            model(y).square().mean().backward()
            self.close(ours, self.gradients(model), step)
            x.copy_(self.some(16, 64))
            graph.replay()
            wanted = model(x).square().mean()
            wanted.backward()
            wanted_gradients = self.gradients(model)
            self.close(loss, wanted.detach() if captures == "forward" else wanted, step)
            self.close(found, wanted_gradients if found else [], step)

    @parametrize("what", ["output", "view", "storage"])
    @parametrize("name", ["library", "generated"])
    def test_the_programs_graph_reads_an_output(self, name: str, what: str) -> None:
        """It holds the output's address, which later steps do not write."""
        fn, graphed = FUNCTIONS[name], self.graphed(FUNCTIONS[name], dynamic=False)
        with torch.no_grad():
            for call in range(CALLS):
                x = self.some()
                wanted, output, graph = fn(x), graphed(x), torch.cuda.CUDAGraph()
                held: Any = {"output": output, "view": output[1:], "storage": output.untyped_storage()}[what]
                with torch.cuda.graph(graph):
                    read = output * 2
                del output
                for _ in range(3):
                    graphed(self.some())
                graph.replay()
                self.close(read, wanted * 2, call)
                del held, graph

    def test_the_programs_graph_reads_gradients(self) -> None:
        """For example a captured step of an optimizer."""
        model = self.model()
        graphed, reference = self.graphed(model, dynamic=False), self.model()
        for step in range(CALLS):
            x, graph = self.some(16, 64), torch.cuda.CUDAGraph()
            reference.load_state_dict(model.state_dict())
            graphed(x).sum().backward()
            reference(x).sum().backward()
            with torch.cuda.graph(graph):
                scaled = [parameter.grad * 3 for parameter in model.parameters() if parameter.grad is not None]
            held = self.gradients(model)
            for _ in range(2):
                graphed(self.some(16, 64)).sum().backward()
                self.gradients(model)
            graph.replay()
            self.close(scaled, [gradient * 3 for gradient in self.gradients(reference)], step)
            del held

    @parametrize("name", ["library", "products"])
    def test_a_function_dies_in_a_capture(self, name: str) -> None:
        fn, x, graph = FUNCTIONS[name], self.some(), torch.cuda.CUDAGraph()
        alone: Any = types.FunctionType(fn.__code__.replace(co_name="alone"), globals())  # its code dies with it
        with torch.no_grad():
            graphed: Any = self.graphed(alone, dynamic=False)
            for _ in range(CALLS):
                graphed(x)
            given = self.some()
            kept = graphed(given)
            with torch.cuda.graph(graph):
                captured = graphed(x)
                del graphed, alone
                gc.collect()
            graphed = self.graphed(fn, dynamic=False)
            for call in range(CALLS):
                y = self.some()
                self.close(graphed(y), fn(y), call)
                x.copy_(self.some())
                graph.replay()
                self.close(captured, fn(x), call)
            self.close(kept, fn(given), "kept")

    @parametrize("is_pool_given", [False, True])
    def test_a_capture_that_fails_ends_for_the_allocator(self, is_pool_given: bool) -> None:
        """Otherwise memory that another stream has used stays in use, and recordings use it all the same."""
        pool = torch.cuda.graph_pool_handle() if is_pool_given else None
        with self.assertRaises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            torch.zeros(9, device=self.device).sum().item()
        torch.cuda.set_stream(torch.cuda.default_stream())
        used = []
        for _ in range(3):
            torch.zeros(9, device=self.device).record_stream(self.stream)
            torch.cuda.synchronize()
            torch.zeros(9, device=self.device)
            used.append(torch.cuda.memory_stats()["active.all.current"])
        with torch.cuda.graph(torch.cuda.CUDAGraph()):  # torch's generator believes that the capture goes on
            torch.zeros(9, device=self.device)
        self.assertEqual(used, used[:1] * 3)


if __name__ == "__main__":
    run_tests()
