"""Which inputs generated code overwrites, as its source tells."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_inductor_cache
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.trees.functions.generated_code import overwritten_inputs

WEIGHT = torch.rand(8, 8)


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x @ WEIGHT) * scale


class TestOverwrittenInputs(TestCase):
    def test_a_donated_buffer_is_overwritten(self):
        found: dict[bool, Any] = {}
        overwritten: dict[bool, frozenset[int]] = {}
        upstream = CompiledFxGraph.post_compile

        def post_compile(artifact: Any, inputs: Any, constants: Any, kwargs: Any) -> None:
            code, backward = artifact.current_callable, bool(kwargs["is_backward"])
            found[backward], overwritten[backward] = code, overwritten_inputs(code, 3, is_backward=backward)
            upstream(artifact, inputs, constants, kwargs)

        with fresh_inductor_cache(), mock.patch.object(CompiledFxGraph, "post_compile", post_compile):
            torch.compile(scaled)(torch.rand(4, 8), torch.rand(4, 8, requires_grad=True)).sum().backward()
        self.assertEqual(overwritten, {False: set(), True: {0}})  # of the product and the tangent
        # Its file is gone, the next ones do not unpack inputs: Inductor may have generated C++.
        for code in (found[True], torch.nn.Identity(), functools.partial(scaled), scaled):
            self.assertEqual(overwritten_inputs(code, 2, is_backward=True), {0, 1})
            self.assertEqual(overwritten_inputs(code, 2, is_backward=False), set())


if __name__ == "__main__":
    run_tests()
