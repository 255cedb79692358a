"""Runs Inductor's pipeline on Dynamo's graphs up to the generated source, and keeps the results.

Inside :meth:`Lowerings.recording` each graph becomes a :class:`LoweredGraph`. Nothing is written, compiled, benchmarked
or cached, and padding of matrix products is off. Dynamo gets a callable that returns fake outputs, so the program
continues after a graph break.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.utils._pytree as pytree
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._inductor import compile_fx, cpp_builder, cpu_vec_isa, output_code
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool, set_tracing_context_output_strides
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from pygraph_trees.errors import PygraphError
from pygraph_trees.report.naming import program_line, program_name

from .replacing import replaced

_MOST_NUMBERS = 1 << 16  # largest number of elements that a number may depend on
_OFF = (  # freezing computes with the values of parameters
    *("fx_graph_cache", "fx_graph_remote_cache", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise"),
    *("coordinate_descent_tuning", "benchmark_kernel", "benchmark_fusion", "shape_padding", "freezing", "cpp_wrapper"),
)
_log = logging.getLogger("pygraph_trees.fake_gpu")


class UnknownSizeError(PygraphError):
    template = "The size of output {index} of graph {graph!r} depends on data ({size}), which a fake GPU does not have."


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """One graph that Inductor would compile, as it is after code generation."""

    graph: GraphLowering  # with scheduler and partition_maps
    gm: torch.fx.GraphModule  # after post-grad passes
    name: str  # program or traced function, [compile id], and "backward" if it is one
    is_inference: bool
    is_backward: bool
    static_input_idxs: tuple[int, ...]  # the inputs that upstream takes as static
    input_names: tuple[str, ...]  # of the graph's inputs in order: parameter, argument or activation
    disabled_reason: str | None  # why upstream would graph none of it
    source_code: str
    source: str | None  # where its function begins, or continues after a graph break: "model.py:31 in forward"


def _sizes_from(placeholders: Sequence[torch.fx.Node], args: Sequence[Any]) -> dict[Any, int]:
    """The symbols of a dynamic graph and their values in this call."""
    known: dict[Any, int] = {}
    for node, arg in zip(placeholders, args, strict=True):
        symbolic, actual = [node.meta.get("val")], [arg]
        if isinstance(symbolic[0], torch.Tensor):
            symbolic, actual = ([*tensor.shape, *tensor.stride()] for tensor in (symbolic[0], arg))
        for symbol, size in zip(symbolic, actual, strict=True):
            if isinstance(symbol, torch.SymInt) and symbol.node.expr.is_symbol:
                known[symbol.node.expr] = int(size)
    return known


def _number_of(output: torch.fx.Node) -> torch.Tensor | None:
    """A number that a graph makes on the CPU from numbers in the program, as a fake tensor with its value."""
    mode, value = torch._guards.active_fake_mode(), output.meta["val"]
    if mode is None or not value.is_cpu or value.numel() != 1 or isinstance(value.numel(), torch.SymInt):
        return None
    module = output.graph.owning_module

    @functools.cache
    def evaluated(node: torch.fx.Node) -> Any:
        if node.op == "get_attr":
            found = getattr(module, str(node.target))
        elif node.op != "call_function" or not _gives_the_same(node):
            raise LookupError
        else:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), evaluated)
            found = node.target(*args, **kwargs)
        if isinstance(found, FakeTensor):
            raise LookupError
        return found

    try:
        with unset_fake_temporarily():
            number = evaluated(output)
    except Exception as error:
        _log.debug("a number cannot be told: %s", error)
        return None
    return mode.fake_tensor_converter.from_real_tensor(mode, number, make_constant=True)


def _gives_the_same(node: torch.fx.Node) -> bool:
    target, value = node.target, node.meta.get("val")
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not str(target).startswith(("aten.empty", "aten.new_empty"))
        and isinstance(value, torch.Tensor)
        and value.is_cpu
        and isinstance(value.numel(), int)
        and value.numel() <= _MOST_NUMBERS
    )


class _Unexecuted:
    """Replaces the module that Inductor would load: its ``call`` returns fake outputs."""

    def __init__(self, graph: GraphLowering, source_code: str) -> None:
        self.graph = graph
        self.source_code = source_code
        self.runner = self
        self.partitions: list[Any] = []
        self.name = ""
        gm = graph.module
        self._placeholders = gm.graph.find_nodes(op="placeholder")
        self._outputs = pytree.arg_tree_leaves(*gm.graph.output_node().args)

    def recursively_apply_fns(self, _fns: Any) -> None:
        return None

    def call(self, args: list[Any]) -> list[Any]:
        known = _sizes_from(self._placeholders, args)
        by_node = dict(zip(self._placeholders, args, strict=True))
        args.clear()

        def concrete(value: Any, index: int) -> Any:
            if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return value
            number = value.node.expr.subs(known)
            if number.free_symbols:
                raise UnknownSizeError(index=index, graph=self.name, size=number)
            return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)](number)

        def fresh(node: Any, index: int) -> Any:
            if node in by_node:
                return by_node[node]
            value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
            if not isinstance(value, torch.Tensor):
                return concrete(value, index)
            number = _number_of(node) if isinstance(node, torch.fx.Node) else None
            if number is not None:
                return number
            size, stride = ([concrete(n, index) for n in numbers] for numbers in (value.shape, value.stride()))
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)

        return [fresh(node, i) for i, node in enumerate(self._outputs)]


def _generate(graph: GraphLowering) -> _Unexecuted:
    """``GraphLowering._compile_to_module`` without writing and loading the source."""
    wrapper, _ = graph.codegen()
    graph.cache_key = graph.cache_path = ""
    graph.cache_linemap = []
    return _Unexecuted(graph, wrapper.value)


_SOURCE_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")


def readable_name(source: str) -> str:
    """``L['self']._modules['fc']._parameters['weight']`` → ``fc.weight``; ``L['kwargs']['x']`` → ``x``."""
    name = re.sub(r"^[LG]\['([^']+)'\]", r"\1", _SOURCE_STEP.sub(r".\1", source))
    return re.sub(r"^kwargs\['([^']+)'\]", r"\1", name.removeprefix("self."))


class Lowerings:
    """Collects the graphs of one program; pass its :meth:`backend` to ``torch.compile``."""

    def __init__(self, program: str, parameters: Iterable[str]) -> None:
        self.graphs: list[LoweredGraph] = []
        self._program = program
        self._parameters = frozenset(parameters)
        self._program_code: Any = None  # of the first frame that Dynamo traces
        self._traced_name = ""
        self._traced_line: str | None = None
        self._sources: list[str] = []  # of the inputs of the graph that Dynamo traced last
        self._forward_names: dict[str, str] = {}  # placeholder of its forward → readable name

    def backend(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self._sources = []
        for node in gm.graph.find_nodes(op="placeholder"):
            arg = node.meta.get("grapharg")
            name = node.name if arg is None else readable_name(arg.source.name)
            _, _, inner = name.partition(".")  # the first part names a local variable that holds the module
            self._sources.append(inner if inner in self._parameters else name)
        code = InstructionTranslator.current_tx().f_code
        self._program_code = self._program_code or code
        name = self._program if code is self._program_code else program_name()
        self._traced_name = f"{name} [{torch._guards.CompileContext.current_compile_id()}]"
        self._traced_line = program_line()
        # As the mode does: Dynamo traces without its options.
        options = torch._inductor.list_mode_options("reduce-overhead")
        return compile_fx.compile_fx(gm, example_inputs, config_patches=options)

    def _input_names(self, gm: torch.fx.GraphModule, *, is_backward: bool) -> tuple[str, ...]:
        names: dict[str, str] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            origin = node.meta.get("desc")
            names[node.name] = self._forward_names.get(node.name, node.name) if is_backward else node.name
            if not is_backward and isinstance(origin, PlainAOTInput) and origin.idx < len(self._sources):
                names[node.name] = self._sources[origin.idx]
        if not is_backward:
            self._forward_names = names
        return tuple(names.values())

    def _keep(self, compiled: CompiledFxGraph, inputs: Sequence[Any], _constants: Any, kwargs: Any) -> None:
        """``CompiledFxGraph.post_compile`` without recording CUDA graphs or realigning inputs."""
        set_tracing_context_output_strides(inputs, compiled)
        reason = compiled.disabled_cudagraphs_reason
        if reason is None and compiled.cudagraph_info is not None:
            reason = ", ".join(compiled.cudagraph_info.cudagraph_fail_reasons) or None
        if reason is None and inductor_config.graph_partition and not compiled.partition_maps:
            reason = "no part of it can run in a CUDA graph"
        if reason is None and not kwargs["cudagraphs"]:
            reason = "CUDA graphs were disabled for its forward"
        if reason is not None:
            BoxedBool.disable(kwargs["cudagraphs"])  # shared by a forward and its backward
        unexecuted: _Unexecuted = compiled.current_callable.__self__
        unexecuted.name = self._traced_name + (" backward" if kwargs["is_backward"] else "")
        self.graphs.append(
            LoweredGraph(
                graph=unexecuted.graph,
                gm=unexecuted.graph.module,
                name=unexecuted.name,
                is_inference=bool(kwargs["is_inference"]),
                is_backward=bool(kwargs["is_backward"]),
                static_input_idxs=tuple(kwargs["static_input_idxs"] or ()),
                input_names=self._input_names(unexecuted.graph.module, is_backward=kwargs["is_backward"]),
                disabled_reason=reason,
                source_code=unexecuted.source_code,
                source=self._traced_line,
            )
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, Inductor compiles as under ``mode="reduce-overhead"``, up to the source, into :attr:`graphs`."""
        with (
            inductor_config.patch({"compile_threads": 1, **dict.fromkeys(_OFF, False)}),
            functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
            replaced(
                [
                    (GraphLowering, "_compile_to_module", _generate),
                    (CompiledFxGraph, "post_compile", lambda *given: self._keep(*given)),
                    (output_code, "log_cudagraph_skip_and_bump_counter", lambda _: None),  # it warns
                    # CPU kernels are not compiled either, so a compiler need not exist.
                    (cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa),
                    (cpp_builder, "is_gcc", lambda: True),
                ]
            ),
        ):
            yield
