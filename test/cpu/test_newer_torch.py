"""What programs of torch 2.12 and later ask for works as with torch alone, or the graph is left to torch or to them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import unittest
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from commands import WithFolder, forked, python
from recordings_on_cpu import SIZE, Function, OnCpuTestCase
from test_caches import product
from torch._dynamo.utils import counters
from torch._higher_order_ops.invoke_subgraph import get_invoke_subgraph_compile_options
from torch._inductor import config, cudagraph_trees, cudagraph_utils, output_code
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool, fresh_cache
from torch.cuda import graphs
from torch.testing._internal.common_utils import TestCase, run_tests

import inductor_patches
import pygraph_trees
from pygraph_trees.fake_gpu import lower
from pygraph_trees.reasons import Reason
from pygraph_trees.report.compiled import partitions_of
from pygraph_trees.report.summary import clear
from pygraph_trees.selection import functions
from pygraph_trees.settings import Settings
from pygraph_trees.trees.hooks import backward_edges
from pygraph_trees.trees.hooks.entry_points import putting_to_use

_Graph: Any = torch.cuda.CUDAGraph
_UPSTREAM = _Graph.__mro__[1]  # in C++, or a dummy if torch was built without CUDA


class _Hooked(Function):
    """A function whose graph is torch's, with its hooks; ``events`` has the launches among what hooks append."""

    def __init__(self) -> None:
        self.events: list[str] = []
        super().__init__()

    def _fill(self) -> None:
        self.events.append("launch")
        super()._fill()

    def _record(self, *args: Any) -> Any:
        made = super()._record(*args)
        made.graph = _Graph.__new__(_Graph)  # the constructor needs a GPU
        made.graph.launch = self._fill
        made.native = made._native(in_python=False)
        return made

    def noting(self, event: str) -> Callable[[Any], None]:
        return lambda graph: self.events.append(event)


@unittest.skipUnless(hasattr(graphs, "register_graph_replay_start_hook"), "torch has no hooks on replays")
class TestHooksOnReplays(OnCpuTestCase):
    def setUp(self) -> None:
        super().setUp()
        replaced = {"replay": lambda graph: graph.launch(), "_has_graph_exec": True}
        if _UPSTREAM.__module__ == "torch._utils":
            replaced["__new__"] = lambda cls, *_: object.__new__(cls)
        self.enterContext(mock.patch.multiple(_UPSTREAM, create=True, **replaced))
        self.function = _Hooked()
        self.graph: Any = self.function.recording.graph

    def check(self, events: str, *, fast: bool, value: float = 3.0) -> None:
        self.function.events.clear()
        (output,) = self.function.call(value, fast=fast)
        self.assertEqual((output.tolist(), " ".join(self.function.events)), ([value] * SIZE, events))

    def test_a_replay_calls_the_hooks_around_its_launch(self) -> None:
        """Hooks of all graphs come before those of one graph; a replay stays fast, and none is called once removed."""
        noting, graph = self.function.noting, self.graph
        handles = [
            graph.register_replay_start_hook(noting("own start")),
            graph.register_replay_end_hook(noting("own end")),
            graphs.register_graph_replay_start_hook(noting("start")),
            graphs.register_graph_replay_end_hook(noting("end")),
        ]
        for fast in (True, False):
            self.check("start own start launch end own end", fast=fast)
        for handle in handles:
            handle.remove()
        for fast in (True, False):
            self.check("launch", fast=fast)

    def test_errors_of_hooks(self) -> None:
        """Torch ignores an error of a hook on all graphs. One of a hook on a graph reaches the program, once."""
        raising = {"raise": lambda _: self.fail("hook"), "in C": lambda _: int("hook")}
        for (name, hook), fast, at in itertools.product(raising.items(), (True, False), ("start", "end")):
            with self.subTest(name=name, fast=fast, at=at):
                handle = getattr(graphs, f"register_graph_replay_{at}_hook")(hook)
                self.check("launch", fast=fast)
                handle.remove()
                handle = getattr(self.graph, f"register_replay_{at}_hook")(hook)
                self.function.events.clear()
                self.assertRaisesRegex((AssertionError, ValueError), "hook", self.function.call, 4.0, fast=fast)
                self.assertEqual(self.function.events, ["launch"] * (at == "end"))
                handle.remove()
                self.check("launch", fast=fast)
        self.assertIsNone(self.function.recording.wrapped_function.model.why_ungraphed)

    def test_a_hook_that_calls_the_function(self) -> None:
        """Such a call runs un-graphed: the graph has its addresses, but is not launched yet."""
        for fast in (True, False):
            found: list[Any] = []

            def call(graph: Any, found: list[Any] = found) -> None:
                with mock.patch.object(self.function.manager, "_run_beside", return_value=["beside"]):
                    found.append(self.function.manager.run([], self.function.id))

            handle = self.graph.register_replay_start_hook(call)
            self.check("launch", fast=fast, value=5.0)
            self.assertEqual(found, [["beside"]])
            handle.remove()

    def test_a_launch_that_fails_is_no_error_of_a_hook(self) -> None:
        """The call then runs un-graphed, since nothing was launched."""
        handle = graphs.register_graph_replay_start_hook(self.function.noting("start"))
        self.addCleanup(handle.remove)
        with (
            mock.patch.object(_UPSTREAM, "replay", functools.partial(int, "no launch")),  # as in C++, without a frame
            self.assertRaisesRegex(AssertionError, "called un-graphed"),
        ):
            self.function.call(3.0, fast=False)


class _CompilingTestCase(TestCase):
    """Each compiled graph is treated as one of a GPU, and is not graphed unless a policy does that."""

    def setUp(self) -> None:
        super().setUp()
        self.seen: list[tuple[bool, str]] = []  # of each graph: whether it is compiled for CUDA graphs; placement
        self.addCleanup(torch._dynamo.reset)
        upstream = CompiledFxGraph.__init__

        def init(graph: Any, *args: Any, **kwargs: Any) -> None:
            upstream(graph, *args, **kwargs)
            graph.device_types, graph.device_idxs = (type(graph.device_types)([item]) for item in ("cuda", 0))
            self.seen.append((config.triton.cudagraphs, Settings.current().placement))

        self.enterContext(mock.patch.object(CompiledFxGraph, "__init__", init))
        self.enterContext(mock.patch.object(cudagraph_utils, "check_multiple_devices_or_any_cpu_nodes", lambda _: None))
        self.enterContext(mock.patch.object(cudagraph_trees, "get_manager"))

    def compile(self, fn: Any = product, *, training: bool = True, cached: bool = False, **options: Any) -> None:
        """Compiles, calls and differentiates ``fn`` with graphs, unless ``options`` says otherwise."""
        torch._dynamo.reset()
        clear()
        counters.clear()
        self.seen.clear()
        x, w = torch.rand(3, 3), torch.rand(3, 3, requires_grad=training)
        options = {f"triton.{name}": value for name, value in ({"cudagraphs": True} | options).items() if value}
        with contextlib.nullcontext() if cached else config.patch(force_disable_caches=True):
            out = torch.compile(fn, options=options)(x, w)
            self.assertEqual(out, product(x, w))
            if training:
                self.assertEqual(*(torch.autograd.grad(o.sum(), w) for o in (out, product(x, w))))

    def reported(self) -> list[str | None]:
        return [graph.dropped for graph in pygraph_trees.report().graphs]


@unittest.skipUnless(hasattr(torch._dynamo, "override_cudagraphs"), "torch has no override_cudagraphs")
class TestOverrides(_CompilingTestCase):
    def test_graphs_that_are_turned_off_are_compiled_without_placement(self) -> None:
        """Whatever the configuration says. Without CUDA graphs, torch compiles as the configuration says."""
        full, off = (True, "full"), (True, "off")
        with mock.patch.object(output_code, "cudagraph_partition_post_compile"):  # as if they had partitions
            for asked, fwd, bwd, seen, reported in (
                (True, False, None, [off, off], [True, True]),
                (True, None, False, [full, off], [False, True]),
                (False, True, None, [full, full], [False, False]),
                (False, True, False, [full, (False, "off")], [False, True]),
                (False, False, None, [(False, "off")] * 2, []),
            ):
                with self.subTest(asked=asked, fwd=fwd, bwd=bwd), mock.patch.object(backward_edges, "mark") as mark:
                    self.compile(torch._dynamo.override_cudagraphs(fwd, bwd)(product), cudagraphs=asked)
                    self.assertEqual(self.seen, seen)
                    self.assertEqual([why == Reason.OVERRIDDEN() for why in self.reported()], reported)
                    is_short = backward_edges.binding.extension is not None and (asked if fwd is None else fwd)
                    self.assertEqual(mark.called, is_short)

    def test_never_wins(self) -> None:
        """A program that turns CUDA graphs on is compiled as torch compiles it without, and shares its artifacts."""
        with torch._functorch.config.patch(enable_autograd_cache=True):
            for fwd, cudagraphs in ((True, True), (True, False), (None, True)):
                for training in (False, True):
                    with fresh_cache():
                        override, how = torch._dynamo.override_cudagraphs, {"training": training, "cached": True}
                        options = {"cudagraphs": cudagraphs, "pygraph_selective": "never"}
                        self.compile(override(fwd, fwd)(product), **how, **options)
                        self.assertEqual(self.seen, [(False, "off")] * (1 + training))
                        self.assertEqual(self.reported(), [Reason.NEVER()] * (1 + training))
                        self.assertFalse(functions.are_graphs_left_out())
                        self.compile(override()(product), cudagraphs=False, **how)
                        self.assertEqual((self.seen, counters["aot_autograd"]["autograd_cache_hit"]), ([], 1))

    def test_a_backward_that_is_turned_off_ends_the_wait_for_it(self) -> None:
        """Otherwise no step would begin after a graphed forward. It also holds for a backward from torch's cache."""
        for from_cache in (False, True):
            artifact = SimpleNamespace(current_callable=len, device_types=(), disabled_cudagraphs_reason=None)
            index = SimpleNamespace(value=0)
            given = {"cudagraphs": BoxedBool(from_cache), "is_backward": True, "boxed_forward_device_index": index}
            with functions._noting(override=SimpleNamespace(fwd=True, bwd=False)):
                putting_to_use(mock.Mock())(artifact, (), None, given)
            with mock.patch.object(cudagraph_trees, "get_manager") as manager:
                self.assertEqual((artifact.current_callable([1, 2]), bool(given["cudagraphs"])), (2, False))
            manager.return_value.set_to_running_backward.assert_called_once_with()


@unittest.skipUnless(hasattr(config, "cudagraph_policy"), "torch has no policies")
class TestPolicies(_CompilingTestCase):
    def compile_with(self, policy: type, **options: Any) -> None:
        with config.patch(cudagraph_policy=policy()):
            self.compile(**options)

    def test_what_a_policy_of_the_program_wraps_is_left_to_it(self) -> None:
        """Nothing is placed, and each call goes through what the policy made. Under "never", no policy is asked."""
        calls: list[Any] = []

        def wrap(policy: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            return lambda inputs: calls.append(model) or model(inputs)

        refuse = {"should_wrap": lambda policy, graph: False}
        around = {"wrap_output": lambda policy, code: calls.append(code) or code}
        for methods, placement, reasons, called in (
            ({"cudagraphify": wrap}, "off", [Reason.POLICY_WRAPS()] * 2, 2),
            # A backward is reported only if its forward has left CUDA graphs on.
            (refuse | around, "off", [Reason.POLICY_REFUSES()], 2),
            (refuse, "full", [Reason.POLICY_REFUSES()], 0),
        ):
            policy = type("Policy", (cudagraph_utils.CUDAGraphPolicy,), methods)
            calls.clear()
            self.compile_with(policy)
            self.assertEqual((self.seen, self.reported()), ([(True, placement)] * 2, reasons))
            self.assertEqual(len(calls), called)
            self.compile_with(policy, pygraph_selective="never", training=False)
            self.assertEqual((self.seen, self.reported()), ([(False, "off")], [Reason.NEVER()]))


def _partitioned(x: Any, w: Any) -> Any:
    a, b = torch.topk(x @ w, 8)[0] @ w, torch.topk(x.sin() @ w, 8)[0] @ w
    return torch.topk(a, 8)[0] @ w, b.relu() @ w


def _in_regions(**how: Any) -> Callable[[Any, Any], Any]:
    region = torch.compiler.nested_compile_region(lambda x, w: torch.topk((x @ w).relu(), 8)[0] @ w, **how)
    return lambda x, w: region(torch.topk(region(x, w), 8)[0], w)


@unittest.skipUnless(hasattr(config.triton, "cudagraph_min_partition_size"), "torch has no such settings")
class TestPartitions(TestCase):
    """A sort is kept outside of CUDA graphs."""

    def lowered(self, fn: Any) -> Any:
        with config.patch(custom_should_partition_ops=["aten::topk"]):
            (graph,) = lower(fn, [torch.empty(8, 8, device="meta") for _ in range(2)])
        return graph.graph

    def test_settings_and_regions_give_as_many_partitions_as_with_torch_alone(self) -> None:
        plain, regions = [True, False, True, False, True], [_in_regions()]
        options = get_invoke_subgraph_compile_options({"max_autotune": False})
        with contextlib.suppress(RuntimeError):  # up to 2.13, options are only for torch's tests
            regions.append(_in_regions(options=options))
        for fn, name, value, expected in (
            (_partitioned, "cudagraph_min_partition_size", 0, plain),
            (_partitioned, "cudagraph_min_partition_size", 3, [True, False, True, False, False]),
            (_partitioned, "cudagraph_partition_memory_budget", 0.01, [*plain, False, True]),
            *((region, "cudagraph_min_partition_size", 0, [True, False, True]) for region in regions),
        ):
            with self.subTest(name=name, value=value), config.patch({f"triton.{name}": value}):
                graph = self.lowered(fn)
                found = partitions_of(graph.scheduler)
                self.assertEqual([partition.graphed for partition in found], expected)
                self.assertTrue(all(partition.causes for partition in found if not partition.graphed))
                inductor_patches.uninstall()
                self.addCleanup(inductor_patches.install)
                self.assertEqual(len(self.lowered(fn).partition_maps), len(graph.partition_maps))
                inductor_patches.install()


_BEGIN = """
import json, sys
from pathlib import Path
import torch
import pygraph_trees
from torch._inductor import config

torch._dynamo.config.enable_aot_compile = True
folder, x = Path(sys.argv[1]), torch.arange(9.0).view(3, 3)

def product(x):
    return x @ x @ x
"""
_SAVING = """
import torch._inductor.compile_fx
from torch._inductor.output_code import CompiledFxGraph
upstream = CompiledFxGraph.__init__

def init(graph, *args, **kwargs):
    upstream(graph, *args, **kwargs)
    graph.device_types = type(graph.device_types)(["cuda"])

CompiledFxGraph.__init__ = init
made = torch.compile(product, fullgraph=True, mode="reduce-overhead")
made.aot_compile(((x,), {})).save_compiled_function(folder / "program")
torch._dynamo.reset()
made(x)
(folder / "caches").write_bytes(torch.compiler.save_cache_artifacts()[0])
"""
_LOADING = """
config.triton.cudagraphs, config.triton.pygraph_selective = True, sys.argv[2]
with open(folder / "program", "rb") as file:
    loaded = torch.compiler.load_compiled_function(file)
assert torch.equal(loaded(x), product(x))
torch.compiler.load_cache_artifacts((folder / "caches").read_bytes())
assert torch.equal(torch.compile(product, fullgraph=True, mode="reduce-overhead")(x), product(x))
from torch._dynamo.utils import counters
print(json.dumps([counters["aot_autograd"]["autograd_cache_hit"], [g.dropped for g in pygraph_trees.report().graphs]]))
"""


@unittest.skipUnless(hasattr(torch.compiler, "load_compiled_function"), "torch cannot save compiled functions")
class TestSavedPrograms(WithFolder):
    @forked("torch")
    def test_flags_are_those_of_the_process_that_loads(self) -> None:
        """Although it has not imported the compiler when it loads a program."""

        def run(code: str, *arguments: str) -> Any:
            # Otherwise, Inductor compiles test programs for each new cache to check vector instructions.
            fixed = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
            folder, caches = str(self.folder), str(Path(self.folder, *arguments, "inductor"))
            done = python("-c", _BEGIN + code, folder, *arguments, TORCHINDUCTOR_CACHE_DIR=caches, **fixed)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout.splitlines()[-1]) if arguments else None

        run(_SAVING)
        # Under "never", the second program is compiled without CUDA graphs, so the caches have nothing for it.
        hits, reasons = run(_LOADING, "always")
        self.assertEqual((hits, len(reasons)), (1, 2))
        self.assertNotIn(Reason.NEVER(), reasons)
        self.assertEqual(run(_LOADING, "never"), [0, [Reason.NEVER()]])


if __name__ == "__main__":
    run_tests()
