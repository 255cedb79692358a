"""Patches of ``torch._inductor.output_code``: what a compiled graph is known by, and whether it is graphed.

``CompiledFxGraph.__init__`` runs where a graph is compiled, and its attributes travel through the FX and AOTAutograd
caches; ``post_compile`` runs where it is put to use, compiled or loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Expectation, Fingerprint, Patch, Rebind

_MODULE = "torch._inductor.output_code"


def _init(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.coverage import compiled

    @functools.wraps(upstream)
    def __init__(self: Any, current_callable: Any, graph: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, current_callable, graph, gm, *args, **kwargs)
        compiled.attach(self, graph, gm)

    return __init__


def _post_compile(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.utils import BoxedBool

    from pygraph_trees.coverage import compiled
    from pygraph_trees.selection import why_not_graphed
    from pygraph_trees.settings import Settings

    @functools.wraps(upstream)
    def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        wanted = bool(graph_kwargs["cudagraphs"])
        reason = why_not_graphed(Settings.current()) if wanted else None
        if reason is not None:
            BoxedBool.disable(graph_kwargs["cudagraphs"])
        with compiled.put_to_use(self, graph_kwargs, wanted=wanted, dropped=reason):
            upstream(self, example_inputs, constants, graph_kwargs)

    return post_compile


_INIT = ("self", "current_callable", "graph", "gm", "output_strides", "disabled_cudagraphs_reason")

PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="coverage",
        module=_MODULE,
        name="CompiledFxGraph.__init__",
        replace=_init,
        fingerprints=(
            Fingerprint(
                (2, 11),
                (2, 15),
                (
                    Expectation(
                        _MODULE,
                        "CompiledFxGraph.__init__",
                        _INIT,
                        ("cudagraph_info", "partition_maps", "device_types", "disabled_cudagraphs_reason"),
                    ),
                ),
            ),
        ),
        removable="torch reports why it splits a graph as data",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CompiledFxGraph.post_compile",
        replace=_post_compile,
        fingerprints=(
            Fingerprint(
                (2, 11),
                (2, 15),
                (
                    Expectation(
                        _MODULE,
                        "CompiledFxGraph.post_compile",
                        ("self", "example_inputs", "constants", "graph_kwargs"),
                        ("cudagraphs", "cudagraph_partition_post_compile", "cudagraph_post_compile"),
                    ),
                    Expectation("torch._inductor.utils", "BoxedBool.disable"),
                ),
            ),
        ),
        removable="never: this is the drop-in",
    ),
)
