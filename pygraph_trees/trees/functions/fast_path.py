"""The fast path in C++, from the call of a compiled graph to its return, if the native parts are built.

:func:`entry` returns a C++ callable that replays a function; :func:`replay` returns a recording's part of it. Managers
and functions derive from :data:`TreeState` and :data:`FunctionState`, whose attributes C++ reads and writes directly.
Without the native parts, no replay is fast, and upstream's code replays.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees

from pygraph_trees.compat import checks_deaths_after_copies, clones_live_outputs
from pygraph_trees.native import binding

from . import native_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pygraph_trees.indirection.inputs import LiveInputs
    from pygraph_trees.outputs.own_memory import OwnMemory
    from pygraph_trees.report.log import RecordingLog

    from ..pools.liveness import Deaths

    FastCall = Callable[[list[Any]], Any]
    View = tuple[int, tuple[int, ...], tuple[int, ...], int]  # number, sizes, strides, offset

_MODE = cudagraph_trees.CompilationMode
MAY_CLONE = clones_live_outputs()
CHECKS_LATE = checks_deaths_after_copies()  # whether upstream checks which tensors died after it has made copies


class _TreeState:
    """The base of managers without C++: at most one call at a time has the turn."""

    keeps_outputs = False
    ordered_device, last_stream = -1, 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made._turn, made.turns = {}, 0
        return made

    @property
    def is_taken(self) -> bool:
        """Whether a call has the turn."""
        return bool(self._turn)

    def take_turn(self, inputs: list[Any]) -> bool:
        """Takes the turn for the call with this list, and returns whether the call has it."""
        self.turns += 1
        return self._turn.setdefault("call", inputs) is inputs  # atomic: no other thread or interrupt comes in between

    def has_turn(self, inputs: list[Any]) -> bool:
        """Whether the call with this list has the turn."""
        return self._turn.get("call") is inputs

    def end_turn(self, inputs: list[Any]) -> None:
        """Gives the turn back if the call with this list has it."""
        if self.has_turn(inputs):
            del self._turn["call"]

    def order_streams(self) -> None:
        """As upstream: replays on different streams are not put in order."""

    note_launch = order_streams

    _turn: dict[str, list[Any]]
    turns: int  # how often a call asked for the turn


class _FunctionState:
    __slots__ = ()


native_names.check()
TreeState: Any = _TreeState if binding.extension is None else binding.extension.TreeState
FunctionState: Any = _FunctionState if binding.extension is None else binding.extension.FunctionState
Replayer: Any = None if binding.extension is None else binding.extension.Replayer  # of one thread


class Replayed(Protocol):
    """The attributes of a recording that a fast replay uses."""

    log: RecordingLog
    graph: Any
    cached_tensor_outputs: Any  # upstream's
    fixed: Sequence[tuple[int, int]]  # index and address of each static input
    deaths_before: Deaths | None
    deaths_after: Deaths | None
    outliving: Deaths | None  # outputs that must be moved if they are alive when the next step begins
    own: OwnMemory | None  # own memory of its outputs; the blocks are its last inputs
    has_new_history: bool  # whether autograd gives the outputs a new history at each call
    is_backward: bool  # whether the outputs are gradients

    @property
    def live(self) -> LiveInputs | None: ...

    def borrowed(self, index: int) -> torch.Tensor: ...

    def own_outputs(self) -> Any: ...

    def replay(self, inputs: list[Any]) -> Any: ...


def entry(
    function: object,
    *,
    runner: tuple[list[Any], Any] | None = None,
    order: Sequence[int] | None = None,
    kept: Sequence[int] = (),
    picks: Sequence[int] | None = None,
    constants: Sequence[Any] = (),
    views: Sequence[View] = (),
    own: Sequence[int] = (),
) -> FastCall | None:
    """Returns a callable that gives the outputs of a fast replay for a list of inputs; None without C++.

    A replay consumes the inputs. If no fast replay is possible, the callable returns None and leaves the inputs as they
    are.

    Args:
        function: the :class:`~.dispatch.Dispatch` of the function that is replayed.
        runner: the list of partitions of the code around the function, and the partition that must be its only one.
        order: the number of the input that each argument of the function is.
        kept: the numbers of inputs that are returned.
        picks: the numbers of the returned values in one row of the outputs, the kept inputs, the views and the
            constants; if None, all outputs are returned as a list.
        constants: the returned constants.
        views: the arguments of Inductor's ``reinterpret_tensor``, with the number of an output or a kept input.
        own: the numbers of views of gradients that already have that layout. If only autograd uses such a gradient, it
            is returned itself (``native/own_outputs.cpp``).
    """
    if binding.extension is None:
        return None
    made: FastCall = binding.extension.Entry(
        function=function,
        runner=runner,
        order=order,
        kept=kept,
        picks=picks,
        constants=tuple(constants),
        views=views,
        steps=cudagraph_trees.MarkStepBox,
        generations=GenerationTracker,
        execution=cudagraph_trees.ExecutionState.EXECUTION,
        forward=_MODE.FORWARD,
        backward=_MODE.BACKWARD,
        clones=MAY_CLONE,
        own=own,
    )
    return made


def replay(recording: Replayed, managed: Sequence[int], others: Sequence[Any], *, in_python: bool = False) -> Any:
    """The C++ part of a recording that has a fast path; None without C++.

    Args:
        managed: the indices of the inputs that are released.
        others: by output, the value that is not cached, or ``NotImplemented`` if there is no such value. A tuple with
            a tensor without elements stands for a new one like it at each call.
        in_python: whether ``recording.replay`` launches the graph.
    """
    if binding.extension is None:
        return None
    live, kind = recording.live, type(recording)
    return binding.extension.Replay(
        recording=weakref.ref(recording),
        prepare=None if live is None else live.addresses.prepare_fast,
        addresses=None if live is None else live.addresses.native,
        replays=recording.log.counter,
        graph=recording.graph,
        cached=recording.cached_tensor_outputs,
        others=list(others),
        places=recording.fixed,
        patched=[] if live is None else [item.index for item in live.patched],
        managed=managed,
        returned=() if live is None else _returned(live, recording.own),
        before=_to_ask(recording.deaths_before),
        after=_to_ask(recording.deaths_after),
        outliving=_to_ask(recording.outliving),
        own=None if recording.own is None else recording.own.native,
        borrow=kind.borrowed,
        make=kind.own_outputs,
        run=kind.replay,
        in_python=in_python or (live is not None and _changes_dtype(live, recording.own)),
        python_checks=CHECKS_LATE,
        has_new_history=recording.has_new_history,
        is_backward=recording.is_backward,
    )


def _returned(live: LiveInputs, own: OwnMemory | None) -> tuple[tuple[Any, ...], ...]:
    """The input of each output that is made for each call, the output, its block of own memory, and its view of it."""
    takes = sys.maxsize if own is None else own.takes
    return tuple(
        (index, position, None if index < takes else index - takes, view)
        for position, (index, view) in live.outputs.items()
    )


def _changes_dtype(live: LiveInputs, own: OwnMemory | None) -> bool:
    """Whether an output is a view of an input, not of own memory, with another dtype."""
    dtypes = {item.index: item.placeholder_tensor.dtype for item in live.items}
    return any(
        view is not None and view[-1] != dtypes[index]
        for index, view in live.outputs.values()
        if own is None or index < own.takes
    )


def _to_ask(deaths: Deaths | None) -> tuple[Any, Any] | None:
    return None if deaths is None else (deaths.groups, deaths.ask)
