"""Moves outputs that outlive their step out of the graph pool, before the next step overwrites it.

:func:`move_alive` copies each storage that is alive and exchanges its memory for the copy's. Tensors, views and
autograd's saved tensors hold the storage and stay valid; raw addresses that the program took do not. A recording
forgets its cached tensors and makes new ones at its next replay. Without the native parts, nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._inductor.cudagraph_trees import StorageWeakRefWrapper

from pygraph_trees.cuda.extent import copy_bits
from pygraph_trees.native import binding
from pygraph_trees.outputs.allocations import bytes_of
from pygraph_trees.reasons import Reason, Why

from ..functions.function import FunctionModel
from ..pools.capture_lock import wait
from ..pools.liveness import release_unneeded
from ..pools.pools import streams_that_use
from ..pools.program_pools import outside

_CUDA = 1  # c10's number of the type of device


def why_not_moved() -> Why | None:
    """Why outputs are torch's and cannot be moved; None if they can be."""
    return Reason.NO_NATIVE() if binding.extension is None else None


def keeps_outputs(model: Any) -> bool:
    """Whether a function's outputs must be kept as long as they are alive."""
    return isinstance(model, FunctionModel) and model.settings.outputs == "keep" and why_not_moved() is None


def models_that_keep(node: Any) -> list[Any]:
    """The compiled code of the functions on the path to a recording whose outputs must be kept, each once."""
    models = {id(made_by.wrapped_function.model): made_by.wrapped_function.model for made_by in node._path_from_root}
    return [model for model in models.values() if keeps_outputs(model)]


def kept_indices(node: Any) -> list[tuple[int, int]]:
    """Depth and number of the outputs on the path to a recording that may be alive after it and must be kept."""
    keeps = [keeps_outputs(recording.wrapped_function.model) for recording in node._path_from_root]
    return [(depth, number) for depth, number in node.live_indices_after_graph if keeps[depth]]


def move_alive(node: Any, only: torch.UntypedStorage | None = None) -> None:
    """Moves the outputs that are alive on the path to ``node``, or those in one storage, on the streams that made them.

    The caller must wait for the device before and after. If memory runs out, nothing has changed.
    """
    release_unneeded(node.cuda_graphs_pool)
    # By storage: each recording or warm-up that refers to it, with the number of its output.
    places: dict[int, list[tuple[Any, int]]] = {}
    for made_by in (one for one in node._path_from_root if keeps_outputs(one.wrapped_function.model)):
        for number, held in enumerate(made_by.outputs_weakrefs):
            storage = None if held is None else held()
            if storage is not None and (only is None or storage == only._cdata):
                places.setdefault(storage, []).append((made_by, number))
    found = [(torch.UntypedStorage._new_with_weak_ptr(storage), held_by) for storage, held_by in places.items()]
    alive = [(storage, held_by) for storage, held_by in found if storage is not None]
    if not alive:
        return
    copies = []
    for storage, held_by in alive:
        # Once freed, memory is reused after the queued work of the stream on which it was allocated.
        on_stream = _on_stream_of(held_by[0][0], storage.device)
        with torch.inference_mode(False), torch.no_grad(), outside(), on_stream:
            before = bytes_of(storage)
            copies.append(torch.empty_like(before))
            copy_bits(copies[-1:], [before])
            for stream in streams_that_use(node.cuda_graphs_pool, storage):
                copies[-1].record_stream(stream)
    wait(alive[0][0].device.index)  # another thread may read an output as soon as it has its address
    # Before the exchange: after an interrupt, a recording with a moved tensor in its cache would return it again.
    for made_by in {id(made_by): made_by for _, held_by in alive for made_by, _ in held_by}.values():
        if hasattr(made_by, "remove_node_cached_tensors"):  # a warm-up has none
            made_by.remove_node_cached_tensors()
    for (storage, held_by), copy in zip(alive, copies, strict=True):
        _exchange(storage, copy.untyped_storage())
        _forget(held_by, copy.untyped_storage())


def note_launch_of(node: Any, number: int) -> None:
    """Notes the number of the stream on which a recording or warm-up was launched; C++ notes it for fast replays.

    Also drops upstream's weak references to its outputs, if these are kept: upstream invalidates tensors through them,
    and ``swap_tensors`` refuses tensors that have any.
    """
    if (native := getattr(node, "native", None)) is not None:
        native.stream = number
    elif node is not None:
        node.launched_on = number
    if node is not None and keeps_outputs(node.wrapped_function.model):
        node.tensor_weakrefs[:] = [None] * len(node.tensor_weakrefs)


def _on_stream_of(node: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, the current stream is the one on which a recording or warm-up was launched last, if that is known."""
    native = getattr(node, "native", None)
    number = getattr(node, "launched_on", None) if native is None else native.stream
    if number is None or not torch.cuda.is_initialized():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(stream_id=number, device_index=device.index, device_type=_CUDA))


def _exchange(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    binding.extension.exchange_memory(bytes_of(storage), bytes_of(other))


def _forget(places: Sequence[tuple[Any, int]], gone: torch.UntypedStorage) -> None:
    """Redirects references to a moved output to the storage that has its old memory now and is freed next."""
    for made_by, number in places:
        address = made_by.outputs_weakrefs[number].data_ptr()
        # Upstream's swap_weakref would free the old reference twice after an interrupt.
        redirected = StorageWeakRefWrapper.from_weakref_and_data_ptr(gone._weak_ref(), address)
        made_by.outputs_weakrefs[number] = redirected
    made_by, number = places[0]
    made_by.wrapped_function.model.log.output_moved(number, gone.nbytes())
