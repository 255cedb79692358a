"""What a fast replay in C++ goes through: a manager, a recording, a graph and live inputs, as fakes."""

from __future__ import annotations

from unittest import mock

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.native import tensors
from pygraph_trees.trees import fast_path
from pygraph_trees.trees import manager as trees_manager

MODE = cudagraph_trees.CompilationMode
MAY_CLONE = fast_path.MAY_CLONE


class Failed(Exception): ...


fail = mock.Mock(side_effect=Failed)


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:  # of a manager
    __slots__ = (*trees_manager.Manager.__slots__, "__weakref__", "has_live_user_visible_output_cloning")


class Graph(Plain):
    def replay(self):
        self.launches += 1
        self.at_launch()


class Live:
    """Live inputs; a graph settles on the addresses that it is asked for, where the answer is None."""

    def __init__(self, patched, settled, outputs=()):
        self.patched = [Plain(index=index) for index in patched]
        self.outputs, self.temporary, self.prepared = dict(outputs), {}, []
        self.answer = lambda: None
        self.pool_changes, nothing = tensors.new_counter(), tensors.packed([])
        self.pool_changes.value = 3
        self.native = tensors.extension and tensors.extension.Addresses(
            owner=None,
            pool_changes=self.pool_changes,
            held=tensors.packed([0] * len(patched)),
            **dict.fromkeys(("words", "nodes", "holders"), nothing),
            **dict.fromkeys(("exec", "set", "get_context", "context"), 0),
        )
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
        self.prepared.append((list(inputs), seen))
        if self.answer() is not None:
            return None
        self.native.forget()
        self.native.settle(seen)
        return bool(self.temporary)


class Recording:
    are_held = True

    def __init__(self, fixed, cached, *, live=None, before=None, after=None):
        self.graph, self.log, self.live = Graph(launches=0, at_launch=list), Plain(counter=tensors.new_counter()), live
        self.cached_tensor_outputs, self.own, self.calls = cached, list(cached), []
        self.deaths_before, self.deaths_after = before, after
        patched = [] if live is None else [item.index for item in live.patched]
        self.whereabouts = tensors.Whereabouts(list(fixed), [t.data_ptr() for t in fixed.values()], patched)

    def replay(self, inputs):
        self.calls.append(list(inputs))
        inputs.clear()
        return list(self.own)

    def _own_outputs(self):
        self.calls.append("own outputs")
        return list(self.own)

    def _check_what_died(self):
        self.calls.append("check")
        if self.are_held:
            raise Failed


class Trees:
    """The state of the trees in which one recording is replayed, behind the same one each time."""

    def __init__(self, fixed, cached, *, manager=Slotted, managed=(), others=None, mode=MODE.INFERENCE, **recording):
        self.recording = Recording(fixed, cached, **recording)
        self.graph, self.log, self.live = self.recording.graph, self.recording.log, self.recording.live
        native = fast_path.replay(self.recording, managed, [NotImplemented] * len(cached) if others is None else others)
        self.before, self.answer, self.partition = Plain(), Plain(), Plain()
        self.candidates = Plain(
            begins=None, replay=native, mode=mode, compile_id=Plain(), candidate_filter=None, replays=()
        )
        self.manager, self.partitions, self.handed = manager(), [self.partition], []
        self.manager.turn = fast_path.new_turn()
        self.manager.graph, self.manager.current_gen = Plain(), -5
        self.manager._candidates = {7: {self.before: self.candidates}}
        self.manager.mode = self.manager.compile_id = self.manager.path_state = None
        self.manager.running_forwards_with_pending_backwards = None
        if MAY_CLONE:
            self.manager.has_live_user_visible_output_cloning = False
        self.function = Plain(manager=lambda: self.manager, function_id=7, thread=None, was_asked=False)

    def by_hand(self, inputs):
        self.handed.append((inputs, list(inputs) if isinstance(inputs, (list, tuple)) else []))
        return self.answer

    def entry(self, *, around=False, **arguments):
        """What it gives for inputs, behind the same recording each time."""
        runner = (self.partitions, self.partition) if around else None
        made = fast_path.entry(self.by_hand, self.function, runner=runner, **arguments)

        def call(inputs):
            self.manager._current_node = self.before
            return made(inputs)

        return call


def some(count):
    made = [torch.full((4,), float(i)) for i in range(count)]
    for tensor in made:
        tensor.untyped_storage()  # as torch's own reference to the storage does
    return made


def ordered(items, order):
    return list(items) if order is None else [items[index] for index in order]


def deaths(cached, *indices):
    """Of torch's references each says that its output is held: those that C++ sees to be dead are not asked."""
    return tensors.Deaths([(cached, [lambda: 7] * len(cached), index) for index in indices])
