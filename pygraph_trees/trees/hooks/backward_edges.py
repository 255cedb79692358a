"""Lets compiled functions accumulate their gradients themselves, without torch's engine.

:func:`marking` marks functions compiled unless ``pygraph_entry`` is "off". :func:`taking` takes torch's function that
runs the engine, and returns one in C++, which lets marked functions accumulate (``native/backward_edges.cpp``). It
replaces torch's once a function is marked, since it takes longer, and checks the engine first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch.autograd.function import FunctionMeta

from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.selection.functions import are_graphs_asked_for, are_graphs_left_out
from pygraph_trees.settings import Settings

# In the order in which C++ counts; two with texts follow.
_COUNTED = (
    *(Reason.GRAPH_KEPT, Reason.SOME_INPUTS, Reason.COMPILED_AUTOGRAD, Reason.WATCHED, Reason.OTHER_BACKWARD),
    *(Reason.NODE_HOOKED, Reason.PARAMETER_HOOKED, Reason.PARAMETER_SHARED, Reason.PARAMETER_ELSEWHERE),
    Reason.PARAMETER_SUBCLASS,
)
_difference: str | None = None  # what the check of torch's engine found
_is_any_marked = False
_waiting: list[Callable[[], None]] = []  # put :func:`taking` in the places of torch's function


def offer(put_on: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Replaces torch's function with ``put_on`` once a function is marked; returns what undoes this."""
    undo: list[Callable[[], None]] = []

    def apply() -> None:
        undo.append(put_on())

    def withdraw() -> None:
        if apply in _waiting:
            _waiting.remove(apply)
        for take_off in undo:
            take_off()

    _waiting.append(apply)
    if _is_any_marked:
        _apply()
    return withdraw


def _apply() -> None:
    while _waiting:
        _waiting.pop()()


def marking(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that is compiled for CUDA graphs, or would be if ``pygraph_selective`` did not say "never"."""

    @functools.wraps(upstream)
    def post_compile(self: Any, compiled_fn: Any, *args: Any, **kwargs: Any) -> Any:
        function: Any = getattr(compiled_fn, "__self__", None)  # of a function's `apply`, if it has a backward
        may_be = isinstance(function, FunctionMeta) and binding.extension is not None
        if may_be and Settings.current().entry != "off" and (are_graphs_asked_for() or are_graphs_left_out()):
            mark(function._backward_cls)
        return upstream(self, compiled_fn, *args, **kwargs)

    return post_compile


def mark(backward: type) -> None:
    """Lets the edges of a class of nodes be taken out, and sees to it that backwards look for them."""
    global _is_any_marked
    backward.pygraph_entry_is_short = True  # type: ignore[attr-defined]  # C++ looks for it
    _is_any_marked = True
    _apply()


@functools.cache  # torch has the function under two names, and may copy one to the other
def taking(upstream: Callable[..., Any]) -> Callable[..., Any]:
    return _made(upstream, functools.partial(_is_as_expected, upstream))


def _made(upstream: Callable[..., Any], check: Callable[[], bool] | None) -> Any:
    return binding.extension.taking(upstream, vars(compiled_autograd), torch.autograd.graph.log, check)


def counts() -> tuple[int, dict[Why, int]]:
    """How many backwards of compiled functions accumulated gradients themselves; how many did not, by reason."""
    if binding.extension is None:
        return 0, {}
    taken, *others = binding.extension.counted_backwards()
    whys = *(why() for why in _COUNTED), Reason.FEW_GRADIENTS(most=binding.extension.LEAST_EDGES)
    whys = *whys, Reason.ENGINE_DIFFERS(error=_difference)
    return taken, {why: count for why, count in zip(whys, others, strict=True) if count}


def _is_as_expected(upstream: Callable[..., Any]) -> bool:
    """Checks the engine in a thread of its own, where no mode of the program is on."""
    global _difference
    try:
        with ThreadPoolExecutor(1) as pool:
            _difference = pool.submit(_checked, upstream).result()
    except RuntimeError as error:  # the interpreter ends, and no thread can be started
        _difference = str(error)
    return _difference is None


def _checked(upstream: Callable[..., Any]) -> str | None:
    """Compares backwards of a function like AOTAutograd's with and without its edges; how they differ, or None."""
    seen: list[int] = []
    count = binding.extension.LEAST_EDGES + 1  # the first edge stays
    gradients: list[torch.Tensor] = []

    class CompiledFunction(torch.autograd.Function):
        _aot_id = 0
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
            return parameters[0].new_zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, ...]:
            seen.append(sum(node is not None for node, _ in ctx.next_functions))
            return tuple(gradients.pop() for _ in range(len(gradients)))

    def accumulated(run: Callable[..., Any], has_gradients: bool) -> tuple[Any, ...]:
        """All that can be seen after a backward: values, whether gradients were taken over, and the node."""
        parameters = [torch.zeros(3, dtype=torch.float32, device="cpu", requires_grad=True) for _ in range(count)]
        gradients[:] = [torch.full_like(p, i + 0.1, requires_grad=False) for i, p in enumerate(parameters)]
        addresses = [gradient.data_ptr() for gradient in reversed(gradients)]
        for parameter in parameters if has_gradients else ():
            parameter.grad = torch.full_like(parameter, 0.7, requires_grad=False)
        root = CompiledFunction.apply(*parameters)
        run((root,), (torch.ones_like(root),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        found = [parameter.grad for parameter in parameters]
        are_own = [gradient is not None and gradient.data_ptr() in addresses for gradient in found]
        left = sum(node is not None for node, _ in root.grad_fn.next_functions)
        return [None if g is None else g.tolist() for g in found], are_own, left, dir(root.grad_fn)

    try:
        mark(CompiledFunction._backward_cls)
        taken = _made(upstream, None)
        for has_gradients in (False, True):
            if accumulated(upstream, has_gradients) != accumulated(taken, has_gradients):
                return "gradients differ"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wanted = [count, 1] * 2
    return None if seen == wanted else f"{seen} edges were seen instead of {wanted}"
