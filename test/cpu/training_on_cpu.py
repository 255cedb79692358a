"""Training on the CPU with the real tree manager, autograd and choice: graphs are Python functions on a pool of memory.

Like torch's allocator, a recording reuses the memory of every dead tensor on its path, so a tensor that is overwritten
too early has a wrong value. Recordings and warm-ups are made without upstream's constructors, which need a GPU. No
replay takes the fast path: each runs upstream's code.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from types import SimpleNamespace
from unittest import mock

import torch
from bare_manager import bare_manager
from fake_trees import LIMITS, liveness_check
from test_trial import World
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import CompilationMode, ExecutionState, StorageWeakRefWrapper, WrappedFunction

from pygraph_trees.report.log import FunctionLog, RecordingLog
from pygraph_trees.report.naming import BACKWARD
from pygraph_trees.selection.decision import Execution
from pygraph_trees.selection.trial import Trial
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions.containment import HeldForTooLong
from pygraph_trees.trees.functions.function import Aligned, FunctionModel, entered
from pygraph_trees.trees.hooks import choice
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.reclaiming import Reclaiming
from pygraph_trees.trees.recordings.recording import Upstream as UpstreamRecording

SIZE = 4  # elements of each tensor
_BYTES = 4 * SIZE
_SLOTS = 4096
_WRONG = float("nan")
# Functions of CUDA builds of torch, for outputs of an earlier step that are not kept.
_MISSING = ("_free_And_Remove_DeleterFn", "_set_storage_access_error_msg", "_set_storage_data_ptr_access_error_msg")


class Pool:
    """Memory for tensors of one size."""

    def __init__(self):
        self._bytes = bytearray(_BYTES * _SLOTS)
        self._base = self.at(0).data_ptr()

    def at(self, slot):
        return torch.frombuffer(self._bytes, dtype=torch.float32, count=SIZE, offset=_BYTES * slot)

    def read(self, address):
        return self.at((address - self._base) // _BYTES).clone()

    def take(self, count, path):
        """Slots that no live output of a path holds."""
        taken = {(held.data_ptr() - self._base) // _BYTES for held in path}
        return list(itertools.islice((slot for slot in range(_SLOTS) if slot not in taken), count))

    def put(self, slots, values):
        for slot, value in zip(slots, values, strict=True):
            self.at(slot).copy_(value)
        return [self.at(slot) for slot in slots]

    def spoil(self):
        for slot in range(_SLOTS):
            self.at(slot).fill_(_WRONG)


def filled(value):
    return torch.full((SIZE,), float(value))


def _held(tensors):
    return [StorageWeakRefWrapper(tensor) for tensor in tensors]


class _Warmup(cudagraph_trees.CUDAWarmupNode):
    user_visible_output_idxs = ()  # since torch 2.14: torch clones no outputs

    def __init__(self, wrapped, parent, number):
        self.wrapped_function, self.parent, self.id = wrapped, parent, number
        self.cuda_graphs_pool, self.outputs_weakrefs, self.tensor_weakrefs, self.stack_traces = (0, 7), [], [], []

    def warm_up(self, pool, inputs):
        values = self.wrapped_function.model(inputs)
        assert not inputs
        outputs = pool.put(pool.take(len(values), self.path_live_weakrefs()), values)
        self.outputs_weakrefs += _held(outputs)
        return outputs


class _Recording(UpstreamRecording):
    user_visible_output_idxs = ()

    def __init__(self, wrapped, parent, number, inputs, pool, static):
        self.wrapped_function, self.id, self.pool = wrapped, number, pool
        self._parent = None if parent is None else mock.MagicMock(return_value=parent)
        self.children = collections.defaultdict(list)
        self.cuda_graphs_pool, self.stack_traces, self.tensor_weakrefs = (0, 7), [], []
        self.outputs_weakrefs, self.cached_tensor_outputs, self.older_outputs = [], [], []
        self.path_weakrefs = [node.outputs_weakrefs for node in self._path_from_root]
        self.cudagraph_managed_idxs = [i for i, x in enumerate(inputs) if self._is_cuda_graph_recorded_tensor(x)]
        self.tensor_static_input_idxs = [i for i in static if i not in self.cudagraph_managed_idxs]
        self.static_input_data_ptrs = [x.data_ptr() for x in inputs]
        self.preserved_aliased_inputs, self.rerecord_if_static_inputs_change = [False] * len(inputs), True
        self.live_indices_after_graph = self._living()
        self.log = RecordingLog(number=0, reason="of the test")
        for name, value in liveness_check().items():
            setattr(self, name, value)

    def record(self, inputs):
        before = self._dead()
        values = self.wrapped_function.model(inputs)
        assert not inputs
        self.expected_dead_indices_before_graph = before
        self.expected_dead_indices_after_graph = [place for place in self._dead() if place not in before]
        self._slots = self.pool.take(len(values), self.path_live_weakrefs())
        outputs = self.pool.put(self._slots, values)
        self.outputs_weakrefs += _held(outputs)
        self.unaliased_in_all_paths = [True] * len(outputs)
        self.output_storage_alias = [cudagraph_trees.UnaliasedStorage] * len(outputs)
        self.live_indices_after_graph = self._living()
        return outputs

    def _living(self):
        return [(depth, i) for depth, i, held in self._outputs() if held() is not None]

    def _dead(self):
        return [(depth, i) for depth, i, held in self._outputs() if held() is None]

    def _outputs(self):
        return [(depth, i, held) for depth, row in enumerate(self.path_weakrefs) for i, held in enumerate(row)]

    def check_invariants(self, inputs):
        status = cudagraph_trees.CheckInvariantStatus
        for indices, found in (
            (self.cudagraph_managed_idxs, status.CudagraphManagedIdxMismatch),
            (self.tensor_static_input_idxs, status.StaticInputIdxMismatch),
        ):
            if any(inputs[index].data_ptr() != self.static_input_data_ptrs[index] for index in indices):
                return found, lambda: "it moved"
        if not self._check_liveness(self.expected_dead_indices_before_graph, self.path_weakrefs):
            return status.ExpectedDeadIndicesBeforeGraphMismatch, lambda: "it is alive"
        for index in self.cudagraph_managed_idxs:
            inputs[index] = None
        if not self._check_liveness(self.expected_dead_indices_after_graph, self.path_weakrefs):
            raise HeldForTooLong(function="f")
        return status.SUCCESS, lambda: ""

    def run(self, inputs):
        self.log.counter.value += 1
        given = [self.pool.read(self.static_input_data_ptrs[i]) if x is None else x for i, x in enumerate(inputs)]
        inputs.clear()
        values = self.wrapped_function.model.model(given)
        outputs = self.pool.put(self._slots, values)
        self.older_outputs += _held(outputs)
        for held, output in zip(self.outputs_weakrefs, outputs, strict=True):
            held.swap_weakref(output.untyped_storage()._weak_ref())
        return outputs


class CpuManager(Manager):
    """``recorded``: the number of recordings."""

    def record_function(self, new_inputs, function_id):
        wrapped, parent = self.ids_to_funcs[function_id], self.current_node
        siblings = (self.roots if parent is None else parent.children)[function_id]
        static = set(wrapped.static_input_idxs)
        for sibling in siblings:  # inputs that moved are no longer static
            static -= {i for i in static if new_inputs[i].data_ptr() != sibling.static_input_data_ptrs[i]}
        node = _Recording(wrapped, parent, self.new_graph_id(), new_inputs, self.memory, static)
        siblings.append(node)
        self.current_node, self.path_state = node, ExecutionState.RECORDING
        self.update_generation()
        self.recorded += 1
        wrapped.model.log.recordings.append(node.log)
        return node.record(new_inputs)

    def run_eager(self, new_inputs, function_id):
        self.warmed_up_functions.add(function_id)
        node = _Warmup(self.ids_to_funcs[function_id], self.current_node, self.new_warmup_node_id())
        self.current_node, self.path_state = node, ExecutionState.WARMUP
        self.update_generation()
        return node.warm_up(self.memory, new_inputs)

    def apply_checkpoint_execution_state_in_allocator(self):
        pass  # a recording takes live outputs of its path into account


class Told(Trial):
    """A trial that takes the way it is told at each call."""

    next_way = Execution.GRAPHED

    def _begin(self, member, inputs):
        if not self.is_over:
            self.way = self.next_way
        return True


class Training:
    """A process with one manager and several models, each with a compiled forward and a compiled backward."""

    def __init__(self, outputs="keep"):
        self._outputs, self._ids = outputs, itertools.count()
        self.manager = bare_manager(
            CpuManager,
            roots=collections.defaultdict(list),
            id_to_mode={},
            num_rerecord=collections.defaultdict(lambda: collections.defaultdict(int)),
            keeps_outputs=outputs == "keep",
            current_gen=-1,
        )
        manager = self.manager
        manager.memory, manager.recorded, manager.debug_fail_counter = Pool(), 0, 0
        manager.func_counter, manager.graph_counter, manager.warmup_node_counter = (itertools.count() for _ in "abc")
        manager.warned_functions, manager.disable_invalidate_aliases = set(), False
        manager.reclaiming = Reclaiming(self._remade, manager._candidates)

    def _remade(self):
        self.manager.memory.spoil()  # the old pool is given back
        self.manager.memory = Pool()
        return SimpleNamespace(graph=object(), stream=0, cuda_graphs_thread_pool=(0, 7))

    @contextlib.contextmanager
    def running(self):
        with (
            mock.patch.object(cudagraph_trees, "get_manager", lambda *args, **kwargs: self.manager),
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
            mock.patch("torch.cuda.empty_cache"),
            mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *args: []),
            mock.patch.object(GenerationTracker, "generation", 1),
            mock.patch.object(cudagraph_trees.MarkStepBox, "mark_step_counter", 0),  # other tests mark steps
            contextlib.ExitStack() as missing,
        ):
            for name in _MISSING:  # only programs that read outputs of earlier steps see their effect
                missing.enter_context(mock.patch.object(torch._C, name, lambda *args: None, create=True))
            yield

    def model(self):
        return Model(self, Told())

    def function(self, trial, mode, compute, static):
        settings = Settings(placement="off", indirection="auto", selective="auto", outputs=self._outputs)
        function = FunctionModel(_consuming(compute), settings, FunctionLog("f", "0/0", mode, 1, {}))
        manager, function_id = self.manager, self.manager.new_func_id()
        manager.ids_to_funcs[function_id] = WrappedFunction(function, static, function_id, (), (), (), **LIMITS)
        manager.id_to_mode[function_id] = CompilationMode[mode.upper()]
        function.dispatch.add(of_integers=False)
        world = World()
        with (
            mock.patch.object(choice, "trial_of", lambda *args, **kwargs: trial),
            mock.patch.object(choice, "CudaDevice", lambda device: world),
        ):
            run = functools.partial(manager.run, function_id=function_id)
            return entered(function, run, Aligned(function, static, ()), choice.chooser(0))


def _consuming(compute):
    def call(inputs):
        values = list(inputs)
        inputs.clear()
        return compute(values)

    return call


class Model:
    """Computes ``x * w + 1`` and saves copies of both inputs. ``trial.next_way`` is the way of its next calls."""

    def __init__(self, training, trial):
        self.trial = trial
        self.forward = training.function(trial, "forward", _forward, [1])
        self.backward = training.function(trial, BACKWARD, _backward, [0, 1])

    def __call__(self, x, w):
        GenerationTracker.generation += 1  # as Dynamo does
        return _Compiled.apply(self, x, w)


def _forward(given):
    x, w = given
    return [x * w + 1, x + 0, w + 0]


def _backward(given):
    x, w, grad = given
    return [grad * w, grad * x]


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, model, x, w):
        output, *saved = model.forward([x.detach(), w.detach()])
        ctx.save_for_backward(*saved)
        ctx.model = model
        return output

    @staticmethod
    def backward(ctx, grad):
        inputs = [*ctx.saved_tensors, grad]
        ctx.maybe_clear_saved_tensors()
        return None, *ctx.model.backward(inputs)
