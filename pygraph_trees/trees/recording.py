"""Upstream's recording of a CUDA graph, with a log.

:class:`Recording` subclasses the installed ``CUDAGraphNode`` and stands in its place. It does what upstream does, on
the same calls in the same order, and notes while it records what the graph holds: inputs by kind, bytes that each
replay copies, kernel nodes. A replay counts itself and does nothing else more.

Where later parts come in: ``_allocate_and_copy_recording_inputs`` (what a function is recorded on), ``_record`` (what
runs under capture, and the captured graph before it is instantiated), ``_copy_inputs_and_remove_from_src`` (how a
replay gets its inputs), ``run`` (the replay path).

Upstream asks ``isinstance(node, CUDAGraphNode)`` by the module's name, which is :class:`Recording` while the patches
are on. Nodes that were recorded before they went on are upstream's own; they go on being nodes, so :class:`Recording`
counts them as its instances. To tell the two apart, ask for the type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.output_code import index_expanded_dims

from pygraph_trees.coverage.log import RecordingLog
from pygraph_trees.coverage.records import InputRecord
from pygraph_trees.driver import DriverError, NodeKind, driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Upstream: type = cudagraph_trees.CUDAGraphNode


class _CountsUpstreamNodes(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(Upstream if cls is Recording else cls, instance)


class Recording(Upstream, metaclass=_CountsUpstreamNodes):
    """A recording of a function, made and replayed as upstream does."""

    def __init__(
        self, wrapped_function: Any, id: Any, parent: Any, inputs: list[Any], *args: Any, **kwargs: Any
    ) -> None:
        self.log = RecordingLog(number=id.id, parent=None if parent is None else parent.id.id)
        super().__init__(wrapped_function, id, parent, inputs, *args, **kwargs)
        self.log.inputs = tuple(self._describe_inputs())

    def _record(self, model: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        def counted(model_inputs: list[Any]) -> Any:
            outputs = model(model_inputs)
            self._count_nodes()
            return outputs

        return super()._record(counted, inputs)

    def _count_nodes(self) -> None:
        """Notes what has been captured so far; a driver that cannot tell leaves it open."""
        api = driver()
        if api is None:
            return
        try:
            graph = api.capturing_graph(torch.cuda.current_stream().cuda_stream)
            counts = None if graph is None else api.count_nodes(graph)
        except DriverError:
            return
        if counts is not None:
            self.log.kernels = counts.pop(NodeKind.KERNEL, 0)
            self.log.other_nodes = counts.total() - counts.pop(NodeKind.EMPTY, 0)

    def run_graph(self) -> None:
        self.log.replays += 1
        super().run_graph()

    def _describe_inputs(self) -> Iterator[InputRecord]:
        placeholders, mutated = self.wrapped_function.placeholders, set(self.wrapped_function.mutated_input_idxs)
        static, managed = set(self.static_input_idxs), set(self.cudagraph_managed_idxs)
        # Since 2.15 managed inputs can be among those that are copied.
        copied: Any = getattr(self, "input_copy_idxs", self.non_static_input_idx)
        copied = set(copied)
        for index, value in enumerate(self.reconstructed_inputs):
            name = placeholders[index].name if index < len(placeholders) else None
            if not isinstance(value, torch.Tensor):
                yield InputRecord(index, name, "value", None, 0, 0, index in mutated)
                continue
            kind = "managed" if index in managed else "static" if index in static else "live"
            dense = index_expanded_dims(value, self.expanded_dims[index]) if index in copied else None
            yield InputRecord(
                index=index,
                name=name,
                kind=kind,
                device=str(value.device),
                nbytes=value.numel() * value.element_size(),
                copied_bytes=0 if dense is None else dense.numel() * dense.element_size(),
                mutated=index in mutated,
            )
