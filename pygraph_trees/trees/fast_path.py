"""The fast path in C++, from the call of a compiled graph to its return, if the native part was built.

:func:`entry` returns a C++ callable that does the same as ``fast_call``, ``Manager.replay_fast``, ``Recording.accepts``
and ``Recording.replay``. It reads the manager's state itself and asks the recording's :func:`replay` about the inputs.
In any unusual case it calls the Python code before it has changed anything. Without the native part, :func:`entry`
returns the Python callable.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees

from pygraph_trees.compat import clones_live_outputs
from pygraph_trees.native import tensors
from pygraph_trees.native.tensors import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraph_trees.indirection.inputs import LiveInputs
    from pygraph_trees.report.log import RecordingLog

    FastCall = Callable[[list[Any]], Any]
    View = tuple[int, tuple[int, ...], tuple[int, ...], int]  # number, sizes, strides, offset

_MODE = cudagraph_trees.CompilationMode
MAY_CLONE = clones_live_outputs()


class Replayed(Protocol):
    """The attributes of a recording that a fast replay uses."""

    log: RecordingLog
    graph: Any
    cached_tensor_outputs: Any  # upstream's
    whereabouts: tensors.Whereabouts
    deaths_before: tensors.Deaths | None
    deaths_after: tensors.Deaths | None

    @property
    def live(self) -> LiveInputs | None: ...


def entry(
    by_hand: FastCall,
    function: object,
    *,
    runner: tuple[list[Any], Any] | None = None,
    order: Sequence[int] | None = None,
    kept: Sequence[int] = (),
    picks: Sequence[int] | None = None,
    constants: Sequence[Any] = (),
    views: Sequence[View] = (),
    own: Sequence[int] = (),
) -> FastCall:
    """Returns ``by_hand`` in C++: it takes a list of inputs and gives the outputs of a fast replay, or None.

    Args:
        by_hand: the Python callable, which is called in unusual cases.
        function: the :class:`~.function.FunctionModel` that is replayed.
        runner: the list of partitions of the code around the function, and the partition that must be its only one.
        order: the number of the input that each argument of the function is.
        kept: the numbers of inputs that are returned.
        picks: the numbers of the returned values in one row of the outputs, the kept inputs, the views and the
            constants; if None, all outputs are returned as a list.
        constants: the returned constants.
        views: the arguments of Inductor's ``reinterpret_tensor``, with the number of an output or a kept input.
        own: the numbers of views of gradients that already have that layout. If only autograd uses such a gradient, it
            is returned itself (``native/gradients.cpp``).
    """
    if tensors.extension is None:
        return by_hand
    made: FastCall = tensors.extension.Entry(
        by_hand=by_hand,
        function=function,
        runner=runner,
        order=None if order is None else packed(order),
        kept=packed(kept),
        picks=None if picks is None else packed(picks),
        constants=tuple(constants),
        views=list(views),
        steps=cudagraph_trees.MarkStepBox,
        generations=GenerationTracker,
        execution=cudagraph_trees.ExecutionState.EXECUTION,
        forward=_MODE.FORWARD,
        backward=_MODE.BACKWARD,
        clones=MAY_CLONE,
        own=packed(own),
    )
    return made


def new_turn() -> Any:
    """A lock that at most one call holds, with ``acquire(blocking=False)``, ``release`` and ``locked``."""
    return threading.Lock() if tensors.extension is None else tensors.extension.Turn()


def replay(recording: Replayed, managed: Sequence[int], others: Sequence[Any]) -> Any:
    """The C++ part of a recording that has a fast path and copies no input; None without the native part.

    Args:
        managed: the indices of the inputs that are released.
        others: by output, the value that is not cached (see :func:`pygraph_trees.native.tensors.once_more`).
    """
    if tensors.extension is None or recording.graph is None:
        return None
    live = recording.live
    return tensors.extension.Replay(
        recording=weakref.ref(recording),
        prepare=None if live is None else live.addresses.prepare_fast,
        addresses=None if live is None else live.addresses.native,
        replays=recording.log.counter,
        graph=recording.graph,
        cached=recording.cached_tensor_outputs,
        others=list(others),
        places=recording.whereabouts.places,
        patched=packed([] if live is None else [item.index for item in live.patched]),
        managed=packed(managed),
        returned=_returned(live),
        before=_to_ask(recording.deaths_before),
        after=_to_ask(recording.deaths_after),
    )


def _returned(live: LiveInputs | None) -> bytes | None:
    """The numbers of inputs that are returned unchanged, each with its output's; None if an output is a view of one."""
    outputs = {} if live is None else live.outputs
    if any(view is not None for _, view in outputs.values()):
        return None
    return packed([number for position, (index, _) in outputs.items() for number in (index, position)])


def _to_ask(deaths: tensors.Deaths | None) -> tuple[Any, Any] | None:
    return None if deaths is None else (deaths.groups, deaths.ask)
