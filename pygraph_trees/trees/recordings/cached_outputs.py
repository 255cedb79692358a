"""The outputs of a recording that are cached: the same tensors are returned again once nobody holds them.

:class:`CachedOutputs` is the part of a recording that makes and returns them. If the program changed one, or
C++ does not tell, new ones are made. Their storages can be resized, as those of other tensors. Autograd may take over a
cached gradient although a hook keeps it, so :meth:`CachedOutputs.own_outputs` returns new tensors for gradients; C++
returns cached ones if only autograd uses them. Other outputs are not known to autograd as cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.native import binding

from ..pools.liveness import OlderOutputs, register

Upstream: type = cudagraph_trees.CUDAGraphNode


class CachedOutputs(Upstream):
    native: Any = None  # its part of a fast replay in C++
    _gives_addresses = False  # whether inputs may be given by address
    cached_addresses: Sequence[int] = ()  # of each cached output when it was made; 0 if it is not cached
    has_new_history = False  # whether autograd gives the outputs a new history at each call
    is_backward = False  # whether the outputs are gradients
    empty_outputs: Mapping[int, Callable[[], torch.Tensor]] = MappingProxyType({})  # make outputs without memory
    older_outputs: Any = ()  # references to outputs that newer ones have replaced

    def own_outputs(self) -> Any:
        """All outputs except those on live inputs."""
        # The program may have changed one; only C++ looks at them.
        if self._gives_addresses and (self.native is None or not self.native.is_untouched()):
            self.remove_node_cached_tensors()
        for position, make in self.empty_outputs.items():
            self.static_output_tensors[position] = make()
        outputs = super().reconstruct_outputs()
        if self._gives_addresses and self.is_backward:
            for position, cached in enumerate(self.cached_tensor_outputs):
                if cached is not None:
                    outputs[position] = cached.detach()
        return outputs

    def create_storage(self, metadata: dict[str, Any]) -> Any:
        storage = super().create_storage(metadata)
        if self._gives_addresses and binding.extension is not None:
            binding.extension.make_resizable(storage)
        return storage

    def _initialize_cached_tensors(self) -> None:
        self.older_outputs = self.older_outputs or OlderOutputs()
        self.older_outputs.add(self.outputs_weakrefs)
        try:
            super()._initialize_cached_tensors()
            if self._gives_addresses and not self.is_backward:
                for output in self.cached_tensor_outputs:  # they are no gradients that autograd may take over
                    if output is not None:
                        torch._C._remove_cached_tensor(output)
            self.cached_addresses = [
                0 if output is None else output.data_ptr() for output in self.cached_tensor_outputs
            ]
            if self.native is not None:
                self.native.note_cached()
            self._registered = register(self)
        except BaseException:  # an interrupt may come anywhere, and a part of them must not stay
            self.remove_node_cached_tensors()
            raise

    def remove_node_cached_tensors(self) -> None:
        held = list(self.cached_tensor_outputs)  # freeing one may run code that asks which outputs are alive
        super().remove_node_cached_tensors()
        held.clear()
