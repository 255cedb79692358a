"""The fake GPU: what torch sees inside the context, what is left afterwards, and what lowering for it gives."""

from __future__ import annotations

import functools
import importlib
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import codecache, cpp_builder
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.fake_gpu import LoweredGraph, ValueNeededError, absent_gpu, lower
from pygraph_trees.fake_gpu.presence import ARCHITECTURES, OtherArchitectureError, UnknownArchitectureError
from pygraph_trees.fake_gpu.tracing import NothingToLowerError
from pygraph_trees.report.compiled import partitions_of

# Every module and class that has an attribute replaced while the fake GPU is present, or while lowering.
CUDA_INTERFACE = "torch._dynamo.device_interface:CudaInterface"
TOUCHED = (
    *("torch._C", "torch.accelerator", "torch.version", "triton.runtime.driver:driver"),
    *("torch.fx.experimental.proxy_tensor", "torch._subclasses.fake_impls"),
    *("torch.cuda", "torch.cuda.graphs", "torch.cuda.memory", "torch.cuda.random"),
    *("torch._dynamo.convert_frame", "torch._dynamo.device_interface", "torch._dynamo.pgo"),
    *(CUDA_INTERFACE, CUDA_INTERFACE + ".Worker"),
    *("torch._inductor.cpp_builder", "torch._inductor.cpu_vec_isa", "torch._inductor.fx_passes.joint_graph"),
    *("torch._inductor.graph:GraphLowering", "torch._inductor.scheduler:Scheduler"),
    *("torch._inductor.output_code", "torch._inductor.output_code:CompiledFxGraph"),
    *("torch._subclasses.fake_tensor", "torch._subclasses.fake_tensor:FakeTensorMode"),
)


def state() -> dict[tuple[str, str], int]:
    """The identity of every attribute in question, and of the operator kernels that Python overrides."""
    attention = torch.ops.aten.scaled_dot_product_attention.default.py_kernels
    found = {("attention", str(key)): id(kernel) for key, kernel in attention.items()}
    found["torch", "accelerator"] = hash(torch.accelerator.current_accelerator())
    found["torch", "only_lift_cpu_tensors"] = torch._C._only_lift_cpu_tensors()
    for name in TOUCHED:
        module, _, path = name.partition(":")
        # Triton's package attribute "driver" hides the module of that name from an ordinary import.
        owner = functools.reduce(getattr, filter(None, path.split(".")), importlib.import_module(module))
        found |= {(name, key): id(value) for key, value in list(vars(owner).items())}
    for statistic in ("cache_hits", "cache_misses"):
        del found["torch._subclasses.fake_tensor:FakeTensorMode", statistic]
    return found


def on_gpu(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def graphed(graph: LoweredGraph) -> list[bool]:
    """For each partition, in order, whether it becomes a CUDA graph."""
    return [partition.graphed for partition in partitions_of(graph.graph.scheduler)]


class TestPresence(TestCase):
    def setUp(self) -> None:
        super().setUp()
        lower(torch.sin, (on_gpu(4),))  # so that everything imported or initialised once already is
        self.before = state()
        self.addCleanup(self.assertLeftAsItWas)

    def assertLeftAsItWas(self) -> None:
        after = state()
        changed = {key for key in self.before.keys() | after.keys() if self.before.get(key) != after.get(key)}
        self.assertEqual(changed, set())

    def test_left_as_it_was_after_exceptions_and_training(self) -> None:
        with self.assertRaisesRegex(ZeroDivisionError, "inside"), absent_gpu():
            raise ZeroDivisionError("inside")
        self.assertLeftAsItWas()
        self.assertRaises(ZeroDivisionError, lower, lambda x: 1 // 0, (on_gpu(4),))
        self.assertLeftAsItWas()
        model = nn.Linear(4, 4)
        places = dict(model.named_parameters())
        lower(model, (on_gpu(2, 4),), training=True)
        self.assertLeftAsItWas()
        model.register_forward_pre_hook(lambda *_: 1 // 0)
        self.assertRaises(ZeroDivisionError, lower, model, (on_gpu(2, 4),))
        for name, parameter in model.named_parameters():
            self.assertIs(parameter, places[name])

    def test_the_architecture(self) -> None:
        with absent_gpu("sm_80"):
            inside = state()
            with absent_gpu("sm_80"):
                self.assertEqual(state(), inside)
            self.assertEqual(state(), inside)
            with self.assertRaisesRegex(OtherArchitectureError, r"absent_gpu\('sm_90'\) inside absent_gpu\('sm_80'\)"):
                lower(torch.sin, (on_gpu(4),), {}, "sm_90")
            self.assertEqual(state(), inside)
        self.assertLeftAsItWas()
        for wrong in ("sm_42", "", None, ["sm_90"]):
            with self.assertRaisesRegex(UnknownArchitectureError, "must be one of 'sm_80', 'sm_86', 'sm_89', 'sm_90'"):
                lower(torch.sin, (on_gpu(4),), {}, wrong)

    def test_an_architecture_has_names_of_gpus(self) -> None:
        boards = (("h100", "sm_90"), ("A100", "sm_80"), ("b200", "sm_100"), ("l4", "sm_89"), ("rtx5090", "sm_120"))
        for name, arch in (*boards, *zip(ARCHITECTURES, ARCHITECTURES, strict=True)):
            with absent_gpu(name):
                self.assertEqual(torch.cuda.get_arch_list(), [arch])
        self.assertIn("sin for sm_80, torch", str(pygraph_trees.explain(torch.sin, on_gpu(4), arch="a100")))

    def test_fake_tensors_on_the_gpu(self) -> None:
        with absent_gpu(), FakeTensorMode():
            x = torch.empty(2, 3, device="cuda")
            for tensor in (
                x.t().contiguous(),
                torch.ones(3).to("cuda"),
                torch.ones(3).cuda(),
                torch.rand_like(x),
                torch.tensor([1.0, 2.0], device="cuda"),
            ):
                self.assertIsInstance(tensor, FakeTensor)
                self.assertEqual(tensor.device, torch.device("cuda", 0))
            self.assertEqual(x.cpu().device, torch.device("cpu"))

    def test_channels_last_convolution(self) -> None:
        with absent_gpu(), FakeTensorMode():
            weight, x = torch.empty(16, 8, 3, 3, device="cuda"), torch.empty(2, 8, 16, 16, device="cuda")
            last = x.to(memory_format=torch.channels_last)
            self.assertEqual(torch.conv2d(x, weight).stride(), (3136, 196, 14, 1))
            self.assertEqual(torch.conv2d(last, weight).stride(), (3136, 1, 224, 16))
            self.assertEqual(torch.conv2d(last.double(), weight.double()).stride(), (3136, 196, 14, 1))
            self.assertEqual(torch.conv2d(last.cpu(), weight.cpu()).device, torch.device("cpu"))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.steps = torch.arange(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale + self.steps.to(x.device)


@torch._inductor.config.patch({"triton.pygraph_placement": "off"})  # the partitions are upstream's
class TestLower(TestCase):
    @mock.patch.object(codecache.PyCodeCache, "write", side_effect=AssertionError("written"))
    @mock.patch.object(cpp_builder, "get_cpp_compiler", side_effect=AssertionError("C++ compiler"))
    @mock.patch("triton.compile", side_effect=AssertionError("Triton"))
    def test_nothing_is_compiled_written_or_run(self, *_: Any) -> None:
        (graph,) = lower(lambda x, i: x * (i * 2 + 1).to("cuda"), (on_gpu(4, 8), torch.ones(8)))
        found = graphed(graph), len(graph.graph.partition_maps), graph.disabled_reason
        self.assertEqual(found, ([False, True], 1, None))

    def test_devices_names_and_static_inputs_of_a_module(self) -> None:
        with torch.device("meta"):
            on_meta = Attributes()
        for model in (Attributes(), on_meta):
            (graph,) = lower(model, (on_gpu(4, 8),))
            self.assertEqual(graph.name, "Attributes [0/0]")
            self.assertEqual(graph.input_names, ("fc.weight", "fc.bias", "x", "scale", "steps"))
            devices = [buffer.get_device() for buffer in graph.graph.graph_inputs.values()]
            self.assertEqual(devices, [torch.device("cuda", 0)] * 4 + [torch.device("cpu")])
            self.assertEqual(tuple(graph.static_input_idxs), (0, 1, 3, 4))
            self.assertEqual(graphed(graph), [False, True])
            with V.set_graph_handler(graph.graph):
                self.assertGreater(len(graph.graph.scheduler.nodes), 1)

    def test_tied_parameters_stay_tied(self) -> None:
        model = nn.Sequential(nn.Embedding(32, 8, device="meta"), nn.Linear(8, 32, bias=False, device="meta"))
        model[1].weight = model[0].weight
        (graph,) = lower(model, (on_gpu(4, dtype=torch.int64),))
        self.assertEqual(graph.input_names[:-1], ("0.weight",))  # and the given tensor

    def test_modules_that_a_callable_mentions(self) -> None:
        with torch.device("meta"):
            model = Attributes()

        class Holding:
            def __init__(self) -> None:
                self.model = model

            def step(self, x: torch.Tensor) -> torch.Tensor:
                return self.model(x)

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return self.step(x)

        for fn in (
            functools.partial(lambda model, x: model(x), model),
            model.forward,
            torch.compile(lambda x: model(x)),
            Holding(),
            torch.no_grad()(lambda x: model(x)),
        ):
            (graph,) = lower(fn, (on_gpu(4, 8),))
            self.assertEqual(graphed(graph), [False, True])
            self.assertEqual((len(graph.input_names), len(graph.static_input_idxs)), (5, 4))
            self.assertTrue(model.fc.weight.is_meta)
        (graph,) = lower(model.forward, (), {"x": on_gpu(4, 8)})
        self.assertLessEqual({"fc.weight", "fc.bias", "scale", "x"}, set(graph.input_names))

    def test_state_that_the_program_changes(self) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls, self.last, self.total = 0, None, nn.Buffer(torch.zeros(8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                self.last = x * 2
                self.total = self.total + x
                return self.total.relu()

        model = Counts()
        total = model.total
        (graph,) = lower(model, (on_gpu(8),))
        self.assertEqual(graphed(graph), [True])
        self.assertEqual((model.calls, model.last, total), (0, None, torch.zeros(8)))
        self.assertIs(model.total, total)

    def test_data_dependence_outside_of_graphs(self) -> None:
        def depends(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return y + 1 if y.sum() > 0 else y - 1

        with self.assertRaisesRegex(ValueNeededError, r"depends reads the value of a tensor \(aten._local_scalar") as e:
            lower(depends, (on_gpu(4),))
        (graph,) = e.exception.graphs
        self.assertEqual(graphed(graph), [True])
        with self.assertRaisesRegex(NothingToLowerError, "<lambda> ran without any operation"):
            lower(lambda x: 1, (on_gpu(4),))

    def test_numbers_are_known_outside_of_graphs_unless_they_are_drawn(self) -> None:
        def program(x: torch.Tensor, is_drawn: bool) -> torch.Tensor:
            length = torch.randint(3, ()) if is_drawn else torch.tensor(min(x.size(0), 3)) * 2 - 1
            y = x * 2
            torch._dynamo.graph_break()
            return y[: int(length)] + 1

        with torch._inductor.config.patch({"triton.pygraph_placement": "full"}):  # upstream returns it on the GPU
            graphs = lower(program, (on_gpu(9), False))
            self.assertEqual(len(graphs), 2)
            (output,) = graphs[1].gm.graph.output_node().args[0]
            self.assertEqual(tuple(output.meta["val"].shape), (5,))
            self.assertRaises(ValueNeededError, lower, program, (on_gpu(9), True))

    def test_training(self) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        forward, backward = lower(model, (on_gpu(32, 8),), training=True)
        for graph, mode in ((forward, (False, False)), (backward, (False, True))):
            self.assertEqual((graph.is_inference, graph.is_backward), mode)
            self.assertEqual(graphed(graph), [True])
        self.assertEqual(forward.name + " backward", backward.name)
        self.assertEqual(forward.input_names[:2], ("0.weight", "0.bias"))
        self.assertIn("4.weight", backward.input_names)
        self.assertEqual(backward.input_names[-1], "tangents_1")
        self.assertNotIn(backward.input_names.index("tangents_1"), backward.static_input_idxs)
        self.assertTrue(all(p.grad is None for p in model.parameters()))


class TestAttention(TestCase):
    def ops(self, shape: tuple[int, ...], dtype: torch.dtype, **kwargs: Any) -> list[Any]:
        inputs = [on_gpu(*shape, dtype=dtype) for _ in range(3)]
        (graph,) = lower(lambda *args, **kwargs: F.scaled_dot_product_attention(*args, **kwargs), inputs, kwargs)
        self.assertEqual(graphed(graph), [True])
        return [node for node in graph.gm.graph.nodes if node.op == "call_function" and "attention" in str(node.target)]

    def test_kernels(self) -> None:
        half, mask = torch.float16, on_gpu(1, 1, 64, 64, dtype=torch.bool)
        flash = ["aten._scaled_dot_product_flash_attention.default"]
        for shape, dtype, kwargs, expected in (
            ((2, 4, 64, 32), half, {}, flash),
            ((2, 4, 64, 36), torch.bfloat16, {"is_causal": True}, flash),  # padded
            ((2, 4, 64, 32), half, {"attn_mask": mask}, ["aten._scaled_dot_product_efficient_attention.default"]),
            ((2, 4, 64, 30), torch.float32, {}, []),
            ((2, 4, 64, 32), torch.float64, {}, []),
            ((4, 64, 32), half, {}, []),
        ):
            self.assertEqual([str(node.target) for node in self.ops(shape, dtype, **kwargs)], expected)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the program's choice
            self.assertEqual(self.ops((2, 4, 64, 32), half), [])

    def test_unaligned_mask_is_padded(self) -> None:
        (node,) = self.ops((2, 4, 50, 32), torch.float32, attn_mask=on_gpu(2, 1, 50, 50))
        self.assertEqual(node.args[3].meta["val"].shape, (2, 4, 50, 50))
        self.assertEqual(node.args[3].meta["val"].stride(2), 56)


class TestRealCompilation(TestCase):
    """Compiling for the real device, before and after lowering in the same process."""

    def test_new_sizes_do_not_make_later_compilations_dynamic(self) -> None:
        torch._dynamo.reset()
        double = lambda x: x * 2  # noqa: E731
        lower(double, (on_gpu(5, 8),))
        lower(double, (on_gpu(6, 8),))
        sizes = []

        def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            sizes.extend(t.shape[0] for t in example_inputs if isinstance(t, torch.Tensor))
            return gm.forward

        torch.compile(double, backend=backend)(torch.ones(7, 8))
        self.assertEqual(sizes, [7])
        self.assertIs(type(sizes[0]), int)


if __name__ == "__main__":
    run_tests()
