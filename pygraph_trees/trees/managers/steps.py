"""Decides when a step begins: by torch's rules, also if calls run un-graphed or a backward never comes.

:class:`Steps` is the part of a manager that answers this. A new step ends the last step's path. While a path ends,
:meth:`Steps.by_one_answer` makes all of upstream's questions get the same answer, whatever other threads do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._inductor import cudagraph_trees

from ..pools.capture_lock import idle_device
from ..pools.interrupts import deferred
from ..pools.liveness import release_unneeded
from ..recordings.kept_outputs import keeps_outputs, move_alive
from .storms import is_endless

if TYPE_CHECKING:
    import torch

Upstream: type = cudagraph_trees.CUDAGraphTreeManager
_FORWARD = cudagraph_trees.CompilationMode.FORWARD
_STATE = cudagraph_trees.ExecutionState


class Steps(Upstream):
    """The part of a manager that tells whether a step begins, which ends the last step's path."""

    keeps_outputs: bool  # whether a function was added whose outputs must be kept
    _begins_step: bool | None = None  # the answer of can_start_new_generation while a path may end
    asides = 0  # turns that were not for a graphed call
    _ungraphed = 0  # un-graphed forwards since the last un-graphed call that began a step or was a backward

    def can_start_new_generation(self, *generation: Any) -> bool:
        """Whether a step begins. Since torch 2.14 the argument is the current generation, if it is known."""
        if self._begins_step is not None:
            return self._begins_step
        return bool(super().can_start_new_generation(*generation)) or self._has_endless_path(*generation)

    def _has_endless_path(self, *generation: Any) -> bool:
        node = self.current_node
        if node is None or not self.keeps_outputs or not self.in_new_torch_compile_invocation(*generation):
            return False

        def is_forward(node: Any) -> bool:
            return bool(self.id_to_mode[node.wrapped_function.id] == _FORWARD)

        path = list(node._path_from_root)
        is_long = is_endless(path, is_forward, others=self._ungraphed)
        return is_long and all(keeps_outputs(node.wrapped_function.model) for node in path)

    def take_aside(self, inputs: list[Any]) -> bool:
        """Takes the turn for anything but a graphed call."""
        self.asides += 1  # first: another thread that looks in between must not see a graphed call
        return bool(self.take_turn(inputs))

    def note_ungraphed(self, inputs: list[Any], *, is_forward: bool) -> None:
        """Notes that an un-graphed forward or backward runs now; it is part of a step like a graphed one.

        A forward that begins a step ends the last step's path: while a backward is pending, no later call does.
        """
        with deferred():
            try:
                if self.take_aside(inputs):  # otherwise it is called during another call
                    self.note_ungraphed_in_turn(is_forward=is_forward)
            finally:
                self.end_turn(inputs)

    def note_ungraphed_in_turn(self, *, is_forward: bool) -> None:
        """:meth:`note_ungraphed` of a call that already has the turn."""
        try:
            # A graphed call ends a path that grows at each call: looking for such a path takes longer than this call.
            begins = is_forward and super().can_start_new_generation()
            if begins:
                self._end_path()
            self.update_generation()
            self._ungraphed = self._ungraphed + 1 if is_forward and not begins else 0
        except Exception as error:  # the un-graphed call needs none of this
            self.failed(error)

    def end_step(self, *, if_dead: bool = False) -> bool:
        """Ends the open path, and moves its outputs, as if a step began. Returns whether it did: not during a call.

        With ``if_dead``, does so only if no output of the path is alive, so that nothing moves.
        Autograd's graphs that only recordings hold are freed: their nodes would run on the stream that made them.
        """
        inputs: list[Any] = []
        try:  # an interrupt may come anywhere
            if not self.take_aside(inputs):
                return False
            release_unneeded(self.cuda_graphs_thread_pool)
            if if_dead and self.current_node is not None and not self.current_node.all_outputs_are_dead():
                return False
            path = [] if self.current_node is None else list(self.current_node._path_from_root)
            if all(keeps_outputs(node.wrapped_function.model) for node in path):
                self._begins_step = True
                try:
                    self._end_path()
                    return True
                except Exception as error:
                    self.failed(error)
            if self.current_node is not None:
                with idle_device(self.device_index):
                    move_alive(self.current_node)  # outputs that are torch's stay
            return True
        finally:
            if self.has_turn(inputs):
                self._begins_step = None
            self.end_turn(inputs)

    def move_out(self, storage: torch.UntypedStorage) -> None:
        """Moves an output out of the graph pool; does nothing if it is no output.

        Waits a second at most for a call of another thread: ``multiprocessing.Queue`` sends tensors from its own one.
        """
        inputs: list[Any] = []
        until = time.monotonic() + 1
        try:  # an interrupt may come anywhere
            while not self.take_aside(inputs):
                if time.monotonic() > until:
                    return
                time.sleep(1e-4)
            if self.current_node is not None:
                with idle_device(self.device_index):
                    move_alive(self.current_node, storage)
        finally:
            self.end_turn(inputs)

    def _end_path(self) -> None:
        if self.path_state is _STATE.EXECUTION:
            self.try_end_curr_execution()
        elif self.path_state is _STATE.RECORDING:
            self.try_end_curr_recording(None)
        elif self.path_state is _STATE.WARMUP:
            self.try_end_curr_warmup(None)

    def by_one_answer(self, *calls: Callable[[], None]) -> None:
        """Makes calls that all get the same answer to whether a step begins, whatever other threads do.

        Otherwise a path could end although its outputs were not moved.
        """
        before = self._begins_step
        try:  # an interrupt may come anywhere, so this is no context manager
            self._begins_step = self.can_start_new_generation()
            for call in calls:
                call()
        finally:
            self._begins_step = before
