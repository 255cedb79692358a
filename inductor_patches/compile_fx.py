"""Patch of ``torch._inductor.compile_fx``: ``cudagraphify``, through which every whole graph and every partition
passes.

It runs while compiling, where values given by ``mode=`` and ``options=`` hold, so the settings of a function are
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


PATCHES: tuple[Patch, ...] = (
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
