"""Real recordings of a real manager, replayed by C++ on the CPU: the graph is a Python function that fills its pool.

Recordings are made without upstream's constructor, which needs a GPU; pool and allocator are a tensor.
"""

from __future__ import annotations

import collections
import unittest
from typing import Any
from unittest import mock

import torch
from fake_trees import LIMITS, Plain, bare_manager, bare_recording
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import CompilationMode, StorageWeakRefWrapper, UnaliasedStorage, WrappedFunction
from torch.testing._internal.common_utils import TestCase

from pygraph_trees.native import binding
from pygraph_trees.native.binding import new_counter
from pygraph_trees.report.log import FunctionLog, RecordingLog
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions import fast_path
from pygraph_trees.trees.functions.function import FunctionModel
from pygraph_trees.trees.functions.outputs import makers_of_empty
from pygraph_trees.trees.pools.liveness import deaths
from pygraph_trees.trees.recordings.kept_outputs import kept_indices
from pygraph_trees.trees.recordings.recording import Recording

SIZE = 4  # elements of an output


@unittest.skipIf(binding.extension is None, "C++ replays here")
class OnCpuTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        torch._C._set_cached_tensors_enabled(True)
        self.enterContext(mock.patch("torch.cuda.is_current_stream_capturing", lambda: False))


def tensor_of(metadata: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0).set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])


class Function:
    """A function whose outputs hold the value of the step that :meth:`call` begins; the last one may be empty."""

    def __init__(
        self, outputs: int = 1, mode: CompilationMode = CompilationMode.INFERENCE, *, ends_empty: bool = False
    ) -> None:
        self.ends_empty = ends_empty
        self.pool, self.value = torch.zeros(SIZE * outputs), 0.0
        settings = Settings(placement="off", indirection="auto", selective="always", outputs="keep")
        model = FunctionModel(self._fail, settings, FunctionLog("f", "0/0", "inference", 1, {}))
        self.id = cudagraph_trees.FunctionID(0)
        self.recording = self._record(model, outputs, mode)
        self.manager = bare_manager(
            roots={self.id: [self.recording]},
            warmed_up_functions={self.id},
            ids_to_funcs={self.id: self.recording.wrapped_function},
            id_to_mode=collections.defaultdict(lambda: mode),
            keeps_outputs=True,
        )
        model.dispatch.add()
        model.dispatch.may_be_replayed_by(self.manager, self.id)
        self._entry = fast_path.entry(model.dispatch)
        for _ in range(2):  # makes the outputs that later calls return again
            self.call(0.0)

    def call(self, value: float, *, fast: bool = True) -> list[torch.Tensor]:
        """The outputs; only a replay may make them, in C++ if ``fast``."""
        cudagraph_trees.MarkStepBox.mark_step_counter -= 1
        self.value = value
        with mock.patch.object(self.manager, "_run_beside", side_effect=AssertionError("no replay")):
            assert self._entry is not None
            outputs = self._entry([]) if fast else None
            assert fast == (outputs is not None)
            found: list[torch.Tensor] = self.manager.run([], self.id) if outputs is None else outputs
        return found

    def end(self) -> None:
        """Moves the outputs that are alive, as when the last function is gone."""
        self.manager.move_last_outputs()

    def _fill(self) -> None:
        self.pool.fill_(self.value)

    def _fail(self, inputs: list[Any]) -> None:
        raise AssertionError("it was called un-graphed")

    def _record(self, model: FunctionModel, outputs: int, mode: CompilationMode) -> Recording:
        references = [StorageWeakRefWrapper(torch.empty(1)) for _ in range(outputs)]
        made: Any = bare_recording(None, references, id=self.id, cuda_graphs_pool=(0, 38), _gives_addresses=True)
        made._reconstruct_from_tensor_metadata = tensor_of  # on a GPU otherwise
        made.wrapped_function = WrappedFunction(model, [], self.id, (), (), (), **LIMITS)
        made.children = collections.defaultdict(list)
        same = {"size": torch.Size([SIZE]), "stride": (1,), "dtype": torch.float32, "storage_offset": 0}
        same |= {"nbytes": SIZE * 4, "device": self.pool.device}
        addresses = [self.pool[SIZE * number :].data_ptr() for number in range(outputs)]
        made.outputs_metadata = [same | {"data_ptr": address} for address in addresses]
        made.output_storage_alias = [UnaliasedStorage] * outputs
        made.unaliased_in_all_paths, made.cached_tensor_outputs = [True] * outputs, []
        made.static_output_tensors, made.tensor_weakrefs, made.stack_traces = ([None] * outputs for _ in range(3))
        made._has_moving, made._takes, made.has_new_history = False, 0, mode == CompilationMode.FORWARD
        made.is_backward = mode == CompilationMode.BACKWARD
        made.log = RecordingLog(number=0, parent=None, counter=new_counter())
        made.graph = Plain(replay=self._fill)
        made.deaths_before = made.deaths_after = None
        if self.ends_empty:  # as upstream notes it
            made.static_output_tensors[-1] = empty = torch.empty(0)
            made.outputs_metadata[-1] |= {"nbytes": 0, "data_ptr": 0, "size": empty.size()}
            made.output_storage_alias[-1] = made.outputs_weakrefs[-1] = None
            made.unaliased_in_all_paths[-1] = False
            made.live_indices_after_graph.pop()
            made.empty_outputs = makers_of_empty(made.static_output_tensors, ())
        made.outliving = deaths(made, kept_indices(made))
        made.native = made._native(in_python=False)
        recording: Recording = made
        return recording
