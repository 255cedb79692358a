"""Patches of ``torch._inductor.compile_fx``: ``cudagraphify``, through which every whole graph and every partition
passes, and what is done with Dynamo's graph before it is traced.

Both run while compiling, where values given by ``mode=`` and ``options=`` hold, so the settings of a function are
taken here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Expectation, Fingerprint, Patch, Rebind

_MODULE = "torch._inductor.compile_fx"


def _cudagraphify(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.trees.function import FunctionModel, entered

    @functools.wraps(upstream)
    def cudagraphify(model: Any, *args: Any, **kwargs: Any) -> Any:
        function = FunctionModel.of(model, is_backward=kwargs["is_backward"], is_inference=kwargs["is_inference"])
        return entered(function, upstream(function, *args, **kwargs))

    return cudagraphify


def _compile_fx_main(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.placement import prepare_for_graphs

    @functools.wraps(upstream)
    def compile_fx_main(model_: Any, *args: Any, **kwargs: Any) -> Any:
        prepare_for_graphs(model_)
        return upstream(model_, *args, **kwargs)

    return compile_fx_main


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="placement",
        module=_MODULE,
        name="_compile_fx_main",
        replace=_compile_fx_main,
        fingerprints=(
            Fingerprint(
                (2, 11),
                (2, 15),
                (
                    Expectation(_MODULE, "_compile_fx_main", ("model_", "example_inputs_"), ("aot_autograd",)),
                    Expectation(_MODULE, "_maybe_wrap_and_compile_fx_main", None, ("_compile_fx_main",)),
                ),
            ),
        ),
        removable="torch traces a look-up by a number of the CPU without asking for the number",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="cudagraphify",
        replace=_cudagraphify,
        fingerprints=(
            Fingerprint(
                (2, 11),
                (2, 15),
                (
                    Expectation(
                        _MODULE, "cudagraphify", ("model", "static_input_idxs"), ("cudagraphify_impl", "is_backward")
                    ),
                    Expectation(
                        "torch._inductor.output_code", "cudagraph_partition_post_compile", None, ("cudagraphify",)
                    ),
                    Expectation("torch._inductor.output_code", "cudagraph_post_compile", None, ("cudagraphify",)),
                ),
            ),
        ),
        removable="never: this is the drop-in",
    ),
)
