"""Operators by which the GPU rounds where a CPU does; a compiler rounds later, or not at all.

``pygraph_trees::rounded_product``: a compiler may make one operation of a product and a sum, which rounds once: the
last place of the product is in the sum then, and after a cancellation that may be all of it. This one is lowered to a
multiplication that is not fused. Numbers of single precision are given to it in double precision, where the product is
exact: compilers narrow a product in double precision that is rounded to single precision right away, and fuse that.

``pygraph_trees::rounded_quotient``: for a GPU Inductor multiplies by the reciprocal of a number instead, which rounds
twice, and so to the other side of a quotient that is half-way between two numbers. This one divides.

``pygraph_trees::rounded_to``: within a kernel Inductor keeps numbers of half precision as single ones, so that what is
converted to half precision is rounded where it is stored alone. This one rounds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_library = torch.library.Library("pygraph_trees", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _rounded_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


for _name, _schema, _fn in (
    ("rounded_product", "(Tensor one, Tensor other) -> Tensor", torch.mul),
    ("rounded_quotient", "(Tensor one, Tensor other) -> Tensor", torch.div),
    ("rounded_to", "(Tensor x, ScalarType dtype) -> Tensor", _rounded_to),
):
    _library.define(_name + _schema, tags=_TAGS)
    _library.impl(_name, _fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pygraph_trees::{_name}", _fn, lib=_library)

rounded_product = torch.ops.pygraph_trees.rounded_product.default
rounded_quotient = torch.ops.pygraph_trees.rounded_quotient.default
rounded_to = torch.ops.pygraph_trees.rounded_to.default


@functools.cache
def lower_rounding() -> None:
    """Tells Inductor how they are compiled, once."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    register_lowering(rounded_product, broadcast=True)(make_pointwise(lambda one, other: ops.mul_rn(one, other)))

    register_lowering(rounded_quotient, broadcast=True)(make_pointwise(lambda one, other: ops.truediv(one, other)))

    def lower_rounded_to(x: Any, dtype: torch.dtype) -> Any:
        def narrow_and_widen(value: Any) -> Any:
            return ops.to_dtype(ops.to_dtype(value, dtype, use_compute_types=False), dtype)

        return make_pointwise(narrow_and_widen, override_return_dtype=dtype)(x)

    register_lowering(rounded_to, type_promotion_kind=None)(lower_rounded_to)
