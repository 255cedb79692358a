"""Fakes of the objects that a fast replay in C++ uses: a manager, a recording, a graph and live inputs; and a real
manager as it is before its first call, without upstream's constructor, which needs a GPU."""

import collections
import ctypes
import inspect
import threading
import unittest
import weakref
from unittest import mock

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.compat import has_skip_table
from pygraph_trees.native import binding
from pygraph_trees.outputs.policy import OutputPolicy
from pygraph_trees.trees.functions import fast_path
from pygraph_trees.trees.managers.candidates import candidate_filter, find
from pygraph_trees.trees.managers.input_rules import Moves
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.reclaiming import Reclaiming
from pygraph_trees.trees.pools.liveness import Deaths
from pygraph_trees.trees.recordings.recording import Recording as OurRecording
from pygraph_trees.trees.recordings.recording import Upstream as UpstreamRecording
from pygraph_trees.trees.recordings.replaying import native_replay

MODE = cudagraph_trees.CompilationMode
MAY_CLONE = fast_path.MAY_CLONE
# Since torch 2.15, a recording asks again which outputs are alive after it has found some that nothing needs.
CHECKS_LIVENESS_AGAIN = "liveness_check_state" in inspect.signature(UpstreamRecording).parameters
# Limits of a function, since torch 2.15; None means no limit.
PARAMETERS = inspect.signature(cudagraph_trees.WrappedFunction).parameters
LIMITS = dict.fromkeys(name for name in PARAMETERS if "managed_input_rerecord" in name)


class Failed(Exception): ...


fail = mock.Mock(side_effect=Failed)


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class FakeManager(fast_path.TreeState):
    """Counts how often it is asked to end a path; ``find`` searches candidates."""

    def __init__(self, find):
        self.ended, self._find, self._candidates = 0, find, {}
        self.graph, self.current_gen = Plain(), -5
        self._current_node = self.mode = self.compile_id = self.path_state = None
        self.running_forwards_with_pending_backwards = None
        if MAY_CLONE:
            self.has_live_user_visible_output_cloning = False

    def try_end_curr_execution(self):
        self.ended += 1


class FakeFunction(fast_path.FunctionState):
    """A function that a manager replays in this thread."""

    def __init__(self, manager=None, function_id=None):
        self.is_replayed = True
        replay_with(self, manager, function_id)


def replay_with(function, manager, function_id):
    """Lets a manager replay a function in this thread."""
    if binding.extension is not None:
        function.replayer = fast_path.Replayer()
        function.replayer.manager, function.replayer.function_id = lambda: manager, function_id
        function.replayer.thread = binding.extension.thread_of_trees()


def manager_of(dispatch):
    """The manager that may replay a function in the thread used last; None if no call is replayed now."""
    return dispatch.replayer.manager() if dispatch.is_replayed and dispatch.replayer else None


class Graph(Plain):
    def replay(self):
        self.launches += 1
        self.at_launch()


class Live:
    """Live inputs; a graph settles on the addresses that it is asked for if the answer is None. ``prepared`` has the
    ids of inputs and their addresses, and holds no input."""

    def __init__(self, patched, settled, outputs=()):
        self.patched = self.items = [Plain(index=index, placeholder_tensor=torch.empty(0)) for index in patched]
        self.outputs, self.temporary, self.prepared = dict(outputs), {}, []
        self.answer = lambda: None
        self.pool_changes = binding.new_counter()
        self.pool_changes.value = 3
        nothing = dict.fromkeys(("own", "words", "nodes", "holders", "values"), ()) | {"owner": None}
        nothing |= dict.fromkeys(("exec", "set", "get_context", "context"), 0)
        known = {"pool_changes": self.pool_changes, "sets": binding.new_counter(), "count": len(patched)}
        self.native = binding.extension and binding.extension.Addresses(held=[0] * len(patched), **known, **nothing)
        self.settle(settled)

    @property
    def addresses(self):
        return self

    def settle(self, addresses):
        if addresses is None:
            self.native.unsettle()
        else:
            self.native.settle(addresses)

    def prepare_fast(self, inputs, seen):
        self.prepared.append(([id(one) for one in inputs], seen))
        if self.answer() is not None:
            return None
        self.native.forget()
        self.native.settle(seen)
        return bool(self.temporary)


class Recording:
    has_new_history, is_backward = False, False

    def __init__(self, fixed, cached, *, live=None, before=None, after=None, outliving=None, own=None):
        self.graph, self.log, self.live = Graph(launches=0, at_launch=list), Plain(counter=binding.new_counter()), live
        self.cached_tensor_outputs, self.outputs, self.calls = cached, list(cached), []
        self.deaths_before, self.deaths_after = before, after
        self.outliving, self.own = outliving, own
        self.fixed = [(index, tensor.data_ptr()) for index, tensor in fixed.items()]
        self.places = {index: (tensor.data_ptr(), tensor.numel()) for index, tensor in fixed.items()}

    def replay(self, inputs):
        self.calls.append(list(inputs))
        inputs.clear()
        return list(self.outputs)

    def own_outputs(self):
        self.calls.append("own outputs")
        return list(self.outputs)

    def borrowed(self, index):
        address, count = self.places[index]
        self.calls.append("borrowed")
        return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


class Trees:
    """Trees in which a call always follows the same recording. It usually has one candidate."""

    def __init__(self, fixed, cached, *, managed=(), others=None, mode=MODE.INFERENCE, in_python=False, **recording):
        self.recording = Recording(fixed, cached, **recording)
        self.recording.is_backward = mode is MODE.BACKWARD
        self.graph, self.log, self.live = self.recording.graph, self.recording.log, self.recording.live
        others = [NotImplemented] * len(cached) if others is None else others
        self.native = native_replay(self.recording, managed, others, in_python=in_python)
        self.before, self.partition, self.compile_id, self.mode = Plain(), Plain(), Plain(), mode
        self.manager, self.partitions = FakeManager(self.find), [self.partition]
        self.searched = []  # searches for candidates, which find none
        self.put(self.candidates(self.native))
        self.function = FakeFunction(self.manager, 7)
        self.replayer = self.function.replayer

    def candidates(self, *replays, begins=None, facts=()):
        known = {"begins": begins, "mode": self.mode, "compile_id": self.compile_id, "replays": replays}
        return binding.extension.Candidates(**known, make_filter=lambda: candidate_filter(facts), release=lambda: False)

    def put(self, candidates):
        """Makes ``candidates`` the known ones of the next call."""
        self.manager._candidates = {7: {self.before: candidates}}

    def find(self, manager, function_id, begins):
        assert manager is self.manager
        self.searched.append((function_id, begins))

    def entry(self, *, around=False, **arguments):
        """An entry that starts each call after the same recording."""
        made = fast_path.entry(self.function, runner=(self.partitions, self.partition) if around else None, **arguments)

        def call(inputs):
            self.manager._current_node = self.before
            return made(inputs)

        return call


def replaying(replay):
    """A manager whose recordings call ``replay`` with inputs and the function's id, and refuse the inputs if it returns
    None. Skips the test without C++."""
    if binding.extension is None:
        raise unittest.SkipTest("not built for this torch")
    kept = []

    def find(_, function_id, begins):
        def prepare(inputs, _):
            recording.outputs = replay(inputs, function_id)
            return None if recording.outputs is None else False

        live = Plain(addresses=Plain(prepare_fast=prepare, native=None), patched=(), items=(), outputs={})
        kept.append(recording := Recording({}, [], live=live))
        replays = (native_replay(recording, (), [], in_python=True),)
        return binding.extension.Candidates(
            begins=None, mode=MODE.INFERENCE, compile_id=None, replays=replays, make_filter=None, release=None
        )

    return FakeManager(find)


def some(count):
    made = [torch.full((4,), float(i)) for i in range(count)]
    for tensor in made:
        tensor.untyped_storage()  # as torch's own reference to the storage does
    return made


def ordered(items, order):
    return list(items) if order is None else [items[index] for index in order]


def deaths(cached, *indices):
    """The check of some outputs. Torch's references say that all are alive, so C++ must find the dead ones itself."""
    alive, addresses = [lambda: 7] * len(cached), [tensor.untyped_storage().data_ptr() for tensor in cached]
    return Deaths([(cached, alive, index, addresses[index]) for index in indices], lambda: False)


# The attribute in which upstream notes functions that it does not graph; renamed in torch 2.15.
SKIPPED = "skip_cudagraph" if has_skip_table() else "non_cudagraph_managed_mutation_hint"


def bare_manager(kind=Manager, **state):
    """``state``: attributes that differ from the defaults; functions are for inference by default."""
    manager = kind.__new__(kind)
    candidates = {}
    known = {
        "graph": object(),
        "stream": 0,
        "cuda_graphs_thread_pool": (0, 7),
        "device_index": 0,
        "roots": {},
        "current_node": None,
        "current_gen": -1,
        "path_state": cudagraph_trees.ExecutionState.NONE,
        "running_forwards_with_pending_backwards": False,
        "has_live_user_visible_output_cloning": False,
        "ids_to_funcs": {},
        "id_to_mode": collections.defaultdict(lambda: MODE.INFERENCE),
        "id_to_compile_id": collections.defaultdict(lambda: "3/1"),
        "warmed_up_functions": set(),
        "num_rerecord": collections.defaultdict(lambda: collections.defaultdict(int)),
        SKIPPED: collections.defaultdict(dict),
        "_candidates": candidates,
        "_find": find,
        "output_policy": OutputPolicy(),
        "_moves": Moves(),
        "thread": threading.get_ident(),
        "reclaiming": Reclaiming(lambda: kind(0), candidates),
    }
    for name, value in (known | state).items():
        setattr(manager, name, value)
    return manager


def bare_recording(parent=None, references=(), **state):
    """A recording as upstream's constructor, which needs a GPU, leaves one without inputs; ``state``: what differs.

    Args:
        parent: the recording before it.
        references: torch's weak references to its outputs.
    """
    recording = OurRecording.__new__(OurRecording)
    path = [*(parent.path_weakrefs if parent else ()), references]
    empty = (
        "cudagraph_managed_idxs expected_dead_indices_after_graph expected_dead_indices_before_graph fixed"
        " input_copy_idxs non_managed_static_input_idxs non_static_input_idx preserved_aliased_inputs"
        " path_user_visible_storage_groups reconstructed_inputs static_input_data_ptrs static_input_idxs"
        " tensor_static_input_idxs"
    )
    known = {name: [] for name in empty.split()} | {
        "_parent": None if parent is None else weakref.ref(parent),
        "children": {},
        "cuda_graphs_pool": (0, 7),
        "device": 0,
        "has_fast_path": True,
        "live_indices_after_graph": [(depth, i) for depth, held in enumerate(path) for i in range(len(held))],
        "outputs_weakrefs": references,
        "path_weakrefs": path,
        "rerecord_if_static_inputs_change": True,
        "user_visible_output_idxs": (),
    }
    if CHECKS_LIVENESS_AGAIN:
        known["liveness_check_state"] = Plain(detached=False)
    vars(recording).update(known | state)
    return recording
