"""Operators that make the GPU round as the CPU does; compilers round later or not at all.

``pygraph_trees::rounded_product`` is a multiplication that no compiler fuses with an addition. Its inputs are
single-precision numbers in double precision, whose product is exact. ``rounded_quotient`` divides instead of
multiplying by a reciprocal. ``rounded_to`` rounds to half precision inside a kernel. On the CPU they are the plain
operators. :func:`lower_rounding` must run before Inductor lowers them. README.md gives the reasons.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_library = torch.library.Library("pygraph_trees", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


for _name, _schema, _fn in (
    ("rounded_product", "(Tensor one, Tensor other) -> Tensor", torch.mul),
    ("rounded_quotient", "(Tensor one, Tensor other) -> Tensor", torch.div),
    ("rounded_to", "(Tensor x, ScalarType dtype) -> Tensor", torch.Tensor.to),
):
    _library.define(_name + _schema, tags=_TAGS)
    _library.impl(_name, _fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pygraph_trees::{_name}", _fn, lib=_library)

rounded_product = torch.ops.pygraph_trees.rounded_product.default
rounded_quotient = torch.ops.pygraph_trees.rounded_quotient.default
rounded_to = torch.ops.pygraph_trees.rounded_to.default


@functools.cache
def lower_rounding() -> None:
    """Registers the lowerings with Inductor, once."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    register_lowering(rounded_product, broadcast=True)(make_pointwise(lambda one, other: ops.mul_rn(one, other)))

    register_lowering(rounded_quotient, broadcast=True)(make_pointwise(lambda one, other: ops.truediv(one, other)))

    def lower_rounded_to(x: Any, dtype: torch.dtype) -> Any:
        def narrow_and_widen(value: Any) -> Any:
            return ops.to_dtype(ops.to_dtype(value, dtype, use_compute_types=False), dtype)

        return make_pointwise(narrow_and_widen, override_return_dtype=dtype)(x)

    register_lowering(rounded_to, type_promotion_kind=None)(lower_rounded_to)
