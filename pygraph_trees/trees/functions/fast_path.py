"""The fast path in C++, from the call of a compiled graph to its return, if the native parts are built.

:func:`entry` returns a C++ callable that replays a function. Managers and functions derive from :data:`TreeState` and
:data:`FunctionState`, whose attributes C++ reads and writes directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees

from pygraph_trees.compat import checks_deaths_after_copies, clones_live_outputs
from pygraph_trees.native import binding

from . import native_names

Call = Callable[[list[Any]], Any]
View = tuple[int, tuple[int, ...], tuple[int, ...], int]  # number, sizes, strides, offset

_MODE = cudagraph_trees.CompilationMode
MAY_CLONE = clones_live_outputs()
CHECKS_LATE = checks_deaths_after_copies()  # whether upstream checks which tensors died after it has made copies


class _TreeState:
    """The base of managers without C++: at most one call at a time has the turn."""

    keeps_outputs = False
    ordered_device, last_stream = -1, 0

    turns = 0  # how often a call asked for the turn
    _turn: list[Any]  # the inputs of the call that has it

    @property
    def is_taken(self) -> bool:
        return "_turn" in vars(self)

    def take_turn(self, inputs: list[Any]) -> bool:
        """Takes the turn for the call with this list, and returns whether the call has it."""
        self.turns += 1
        # Atomic: no other thread or interrupt comes in between.
        return vars(self).setdefault("_turn", inputs) is inputs

    def has_turn(self, inputs: list[Any]) -> bool:
        return vars(self).get("_turn") is inputs

    def end_turn(self, inputs: list[Any]) -> None:
        """Gives the turn back if the call with this list has it."""
        if self.has_turn(inputs):
            del self._turn

    def order_streams(self) -> None:
        """As upstream: replays on different streams are not put in order."""

    note_launch = order_streams


native_names.check()
TreeState: Any = _TreeState if binding.extension is None else binding.extension.TreeState
FunctionState: Any = object if binding.extension is None else binding.extension.FunctionState
Replayer: Any = None if binding.extension is None else binding.extension.Replayer  # of one thread


def entry(
    function: object,  # the :class:`~.dispatch.Dispatch` of the function that is replayed
    *,
    runner: tuple[list[Any], Any] | None = None,  # the partitions of the code around it, and what must be the only one
    order: Sequence[int] | None = None,  # the number of the input that each argument of the function is
    kept: Sequence[int] = (),  # the numbers of inputs that are returned
    # The numbers of the returned values in one row of the outputs, the kept inputs, the views and the constants; if
    # None, all outputs are returned as a list.
    picks: Sequence[int] | None = None,
    constants: Sequence[Any] = (),  # that are returned
    views: Sequence[View] = (),  # arguments of ``reinterpret_tensor``, with the number of an output or a kept input
    # The numbers of views of gradients that already have that layout. If only autograd uses such a gradient, it is
    # returned itself (``native/own_outputs.cpp``).
    own: Sequence[int] = (),
) -> Call | None:
    """Returns a callable that gives the outputs of a fast replay for a list of inputs; None without C++.

    A replay consumes the inputs. If none is possible, the callable returns None and leaves the inputs as they are.
    """
    if binding.extension is None:
        return None
    given = {"function": function, "runner": runner, "order": order, "kept": kept, "picks": picks, "views": views}
    return binding.extension.Entry(
        **given,
        constants=tuple(constants),
        steps=cudagraph_trees.MarkStepBox,
        generations=GenerationTracker,
        execution=cudagraph_trees.ExecutionState.EXECUTION,
        forward=_MODE.FORWARD,
        backward=_MODE.BACKWARD,
        clones=MAY_CLONE,
        own=own,
    )
