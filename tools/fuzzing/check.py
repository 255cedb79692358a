"""Runs a case in several ways and compares each call: outputs, gradients, aliasing, and all memory of the inputs.

Eager is the oracle. A compiled way must agree with it within a tolerance that depends on the narrowest dtype. Where the
way under test disagrees, another one of torch's own, the control, is asked: what it does differently from eager as well
is torch's doing, and counts as :attr:`Verdict.torch_differs`, not as a failure.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph_trees.comparison import Program
from pygraph_trees.comparison.differences import difference, snapshot
from pygraph_trees.comparison.ways import make_ways

from .case import Case
from .memory import Memory

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class InvalidCase(Exception):
    """Eager cannot run the case: it says nothing about a compiler."""


class Mismatch(AssertionError):
    """A compiled way gave something else than eager."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found where it found nothing wrong."""

    calls: int  # that were compared and agreed
    torch_differs: str | None = None  # how the control differs from eager, where it does


@dataclass(frozen=True, slots=True)
class Observation:
    """What one call left behind; everything cloned."""

    outputs: Any  # named tensors: outputs, gradients
    blocks: Any  # named tensors: the blocks of the inputs
    aliases: tuple[str | None, ...]  # by output: the input in whose block it lies, and where


class Runner:
    """One way of running a case, with memory of its own."""

    def __init__(self, case: Case, kind: str, device: torch.device) -> None:
        self.kind = kind
        self._case = case
        self._memory = Memory(case, device)
        self._call = 0
        self._module: torch.nn.Module | None = None
        fn: Callable[..., Any] = case.function()
        if case.parameters:
            self._module = module_of(fn, case, self._memory.prepare(0))
            fn = self._module
        self._fed: dict[str, torch.Tensor] = {}
        self._callable, self._active, self._close, self.recorded = _way(fn, kind)

    def step(self) -> Observation:
        """The next call."""
        given = self._inputs()
        with self._active():
            torch.compiler.cudagraph_mark_step_begin()
            outputs = self._callable(*(given[i.name] for i in self._case.arguments))
            gradients = self._gradients(outputs, given) if self._case.backward else ()
            if not isinstance(outputs, tuple):
                outputs = (outputs,)
            seen = Observation(
                outputs=snapshot({"output": outputs, "gradient": gradients}),
                blocks=snapshot({"memory": dict(self._memory.blocks)}),
                aliases=tuple(map(self._memory.place_of, outputs)),
            )
            self._fed = {name: outputs[position] for position, name in self._case.feedback}
        self._call += 1
        return seen

    def detach_outputs(self) -> None:
        """Hands copies of the outputs on to the next call, not themselves."""
        self._fed = {name: output.clone() for name, output in self._fed.items()}

    def close(self) -> None:
        """Frees what the way holds on the device."""
        self._fed.clear()
        self._close()

    def _inputs(self) -> dict[str, torch.Tensor]:
        given = dict(self._memory.prepare(self._call))
        if self._module is not None:
            held = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
            for name, tensor in held.items():
                if tensor.data_ptr() != given[name].data_ptr():
                    tensor.data = given[name].detach()
                given[name] = tensor
        return given | self._fed

    def _gradients(self, outputs: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        leaves = [given[i.name] for i in self._case.inputs if given[i.name].requires_grad]
        loss = sum(_weighted(o) for o in pytree.tree_leaves(outputs) if o.requires_grad)
        if not leaves or not isinstance(loss, torch.Tensor):
            return ()
        return torch.autograd.grad(loss, leaves, allow_unused=True)


def check(
    case: Case, device: torch.device, *, under_test: str, control: str | None = None, exactly: str | None = None
) -> Verdict:
    """Runs ``case`` under eager and ``under_test`` and compares after each call.

    Args:
        under_test: one of ``comparison``'s ways, or a Dynamo backend, by name or as ``module:function``.
        control: the way that is asked where they disagree; None to believe a disagreement at once.
        exactly: the way that what is under test must equal bit for bit, besides.

    Raises:
        InvalidCase: eager cannot run the case.
        Mismatch: what is under test differs from eager, or raises, and the control does not.
    """
    try:
        agreed = _compare(case, device, under_test, "eager", _tolerance(case))
    except Mismatch:
        if control is None:
            raise
        try:
            _compare(case, device, control, "eager", _tolerance(case))
        except Mismatch as same:
            return Verdict(0, torch_differs=str(same))
        raise
    if exactly is not None:
        _compare(case, device, under_test, exactly, tolerance=0.0)
    return Verdict(agreed)


def _compare(case: Case, device: torch.device, subject: str, reference: str, tolerance: float) -> int:
    """Raises :class:`Mismatch` at the first call where the two differ; else the number of calls."""
    agreed = 0
    with contextlib.ExitStack() as stack:
        stack.callback(gc.collect)
        stack.callback(torch._dynamo.reset)
        runners = [Runner(case, kind, device) for kind in (reference, subject)]
        for runner in runners:
            stack.callback(runner.close)
        for call in range(case.calls):
            wanted, found = (_observe(runner, call) for runner in runners)
            _agree(found, wanted, tolerance, f"call {call}: {subject} against {reference}")
            agreed += 1
            # What a warmup or a recording returned must not be used in a later step, and torch raises where it is.
            if any(runner.recorded() for runner in runners):
                for runner in runners:
                    runner.detach_outputs()
    return agreed


def _observe(runner: Runner, call: int) -> Observation:
    try:
        seen = runner.step()
        if runner.kind == "eager" and torch.cuda.is_available():
            torch.cuda.synchronize()  # a fault is eager's own, not of what runs next
        return seen
    except Exception as error:
        if runner.kind == "eager":
            raise InvalidCase(f"call {call}: {error}") from error
        raise Mismatch(f"call {call}: {runner.kind} raised {type(error).__name__}: {error}") from error


def _agree(found: Observation, wanted: Observation, tolerance: float, where: str) -> None:
    if found.aliases != wanted.aliases:
        raise Mismatch(f"{where}: outputs lie in {found.aliases}, expected {wanted.aliases}")
    for what in ("outputs", "blocks"):
        names = [name for name, _ in getattr(wanted, what)]
        if names != [name for name, _ in getattr(found, what)]:
            raise Mismatch(f"{where}: {what} are {[n for n, _ in getattr(found, what)]}, expected {names}")
        for one, other in zip(getattr(found, what), getattr(wanted, what), strict=True):
            apart = difference([one], [other])
            if apart.problem is not None:
                raise Mismatch(f"{where}: {apart.problem}")
            # Gradients sum up; the programs keep everything else within a few units.
            allowed = tolerance * (_scale(other[1]) if what == "outputs" else 1.0)
            if apart.largest is not None and apart.largest > allowed:
                raise Mismatch(f"{where}: {one[0]} differs by {apart.largest:.3g}, allowed {allowed:.3g}")


def _scale(tensor: torch.Tensor) -> float:
    """The largest magnitude in a tensor, at least 1."""
    finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else tensor.new_zeros(0)
    return max(1.0, finite.abs().max().item()) if finite.numel() else 1.0


def _tolerance(case: Case) -> float:
    dtypes = {i.torch_dtype for i in case.inputs}
    dtypes |= {dtype for dtype in TOLERANCE if str(dtype) in "\n".join(case.body)}
    return max((TOLERANCE[d] for d in dtypes if d in TOLERANCE), default=0.0)


def _weighted(output: torch.Tensor) -> torch.Tensor:
    """A sum whose gradient differs from element to element."""
    wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    weights = torch.linspace(-1, 1, max(1, output.numel()), device=output.device, dtype=wide.dtype)
    return (wide.reshape(-1) * weights[: output.numel()]).sum()


def module_of(fn: Callable[..., Any], case: Case, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module that holds the parameters of a case, with its program as ``forward``."""

    class Fuzzed(torch.nn.Module):
        forward = fn

    module = Fuzzed()
    for item in case.parameters:
        tensor = tensors[item.name].detach()
        if case.backward and tensor.is_floating_point():
            module.register_parameter(item.name, torch.nn.Parameter(tensor))
        else:
            module.register_buffer(item.name, tensor)
    return module


def _way(
    fn: Callable[..., Any], kind: str
) -> tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]], Callable[[], None], Callable[[], bool]]:
    """The callable of a way, the context for calls, what frees it, and whether the last call was no replay."""
    if kind in ("eager", "compile", "upstream", "ours"):
        (way,) = make_ways(Program(fn), [kind])
        trees = way.trees
        if trees is None:
            return way.callable, way.active, lambda: None, lambda: False
        return way.callable, way.active, trees.clear, lambda: not all(map(_replays, way.managers))
    backend: Any = kind
    if ":" in kind:
        module, name = kind.split(":")
        backend = getattr(importlib.import_module(module), name)
    return torch.compile(fn, backend=backend), contextlib.nullcontext, lambda: None, lambda: False


def _replays(manager: Any) -> bool:
    state: str = manager.path_state.name
    return state == "EXECUTION"
