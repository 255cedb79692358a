"""Parameters that FSDP2 gathers before a module runs and frees afterwards, each time at any free address.

Dynamo takes them for static inputs, like other parameters. A recording with a fixed address would fit only as long as
the allocator happens to return the same one. These parameters are therefore live from the first recording on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from pygraph_trees.compat import lists_groups_of_parameters
from pygraph_trees.cuda.extent import tensors_with_memory


def gathered_addresses() -> frozenset[int]:
    """The addresses of all parameters that are gathered now; empty if the process does not use FSDP2."""
    return frozenset(tensor.data_ptr() for tensor in _gathered())


def _gathered() -> Iterator[torch.Tensor]:
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for reference in list(states.values()):
        state = reference()
        several = lists_groups_of_parameters(state)
        groups = state._fsdp_param_groups if several else [getattr(state, "_fsdp_param_group", None)]
        for parameter in [one for group in groups if group is not None for one in group.fsdp_params]:
            found = getattr(parameter, "_unsharded_param", None)  # missing before the first gathering
            inner = tensors_with_memory(getattr(found, "_local_tensor", found))  # of a DTensor
            yield from (tensor for tensor in inner if tensor.untyped_storage().nbytes())
