"""The operator ``pygraph_trees::stored`` gives a value the bits that memory of its type would hold.

Without it, Inductor merges integers that a kernel counts into one 32-bit expression, and keeps half precision in single
precision. Elsewhere the operator is a copy. :func:`lower_stored` must run before Inductor lowers it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_library = torch.library.Library("pygraph_trees", "FRAGMENT")
_library.define("stored(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("stored", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("pygraph_trees::stored", torch.clone, lib=_library)

stored = torch.ops.pygraph_trees.stored.default


@functools.cache
def lower_stored() -> None:
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    def lowered(x: Any) -> Any:
        dtype = x.get_dtype()
        if dtype == torch.bool:
            # A vectorized kernel of the CPU, which computes such a value if it is copied there, has masks without bits.
            return make_pointwise(lambda value: ops.logical_not(ops.logical_not(value)))(x)
        return make_pointwise(lambda value: ops.to_dtype_bitcast(value, dtype, dtype))(x)

    register_lowering(stored, type_promotion_kind=None)(lowered)
