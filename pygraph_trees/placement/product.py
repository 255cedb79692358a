"""The operator by which the GPU rounds a product before anything is added to it, as a CPU does.

A compiler may make one operation of a product and a sum, which rounds once: the last place of the product is in the
sum then, and after a cancellation that may be all of it. ``pygraph_trees::rounded_product`` is lowered to a
multiplication that is not fused. Numbers of single precision are given to it in double precision, where the product is
exact: compilers narrow a product in double precision that is rounded to single precision right away, and fuse that.
"""

from __future__ import annotations

import functools

import torch

_library = torch.library.Library("pygraph_trees", "FRAGMENT")
_library.define("rounded_product(Tensor one, Tensor other) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("rounded_product", torch.mul, "CompositeExplicitAutograd")
torch.library.register_fake("pygraph_trees::rounded_product", torch.mul, lib=_library)

rounded_product = torch.ops.pygraph_trees.rounded_product.default


@functools.cache
def lower_rounded_product() -> None:
    """Tells Inductor how it is compiled, once."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    register_lowering(rounded_product, broadcast=True)(make_pointwise(lambda one, other: ops.mul_rn(one, other)))
