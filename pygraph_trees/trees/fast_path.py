"""A fast replay in C++, from the call of a compiled graph to its return, where that part was built.

The Python code does the same and is what is run elsewhere: ``fast_call`` of a function or of the code around its only
partition, ``Manager.replay_fast``, ``Recording.accepts`` and ``Recording.replay``. :func:`entry` puts one callable
in C++ in its place, which looks at the state of the manager itself and asks the recording's :func:`replay` about its
inputs; wherever anything is not as usual it calls the Python code, before anything is done.

On an H200's host, launches apart, in µs for the same inputs, with single questions in C++ and the rest in Python, and
with all of it in C++ (another run on another host; upstream's beside each): an MLP 5.9 (47) and 2.0 (41), BERT at
batch 1 13.6 (94) and 6.5 (78), DLRM 10.4 (280) and 4.6 (195), a training step of BERT 199 (2120) and 80 (1772). On one
machine without a GPU (torch 2.11), a step of 527 inputs and 521 outputs: 18 and 12 where it is in the caches, 147 and
91 where other work has filled them. On another, a step of 624 inputs and 521 outputs in C++, 150 of them gradients that
are views, in and out of the caches: 64 to 133 and 262 to 331 where these are other tensors at each call, 46 to 65 and
178 to 211 where they are the recording's own (``native/gradients.cpp``); and 87 to 107 and 342 to 395 with other
tensors before both ends of what is read were loaded ahead. On a third machine, a forward and a backward of 625 inputs,
522 outputs and 200 edges, the caches emptied before both and partly at each launch: 53 to 61, 48 to 54 since what is
read of the edges' parameters is loaded ahead, and 44 to 50 in a commit that gave views once for all calls and asked
nobody. New addresses for 28 inputs of 30 kernels, over a driver that does nothing, in Python and in C++
(``native/patch.cpp``): 6.2 and 2.6, both with Python's call of it.
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
    """What a fast replay is made of: a recording."""

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
    """Does what ``by_hand`` does for a list of inputs: the outputs of a fast replay, or None.

    Args:
        function: the :class:`~.function.FunctionModel` whose replay it is.
        runner: of the code around the function, the list of partitions, and the partition that has to be its only one.
        order: of the inputs, the number of each that the function is given.
        kept: the numbers of inputs that are returned.
        picks: what is returned, by number, of the outputs, the kept inputs, the views and the constants one behind
            another; all outputs as a list where that is None.
        constants: that are returned.
        views: of outputs and kept inputs, by number: what Inductor's ``reinterpret_tensor`` takes.
        own: the numbers of views, each of a gradient that is seen so already, and that is returned itself where nobody
            sees it (``native/gradients.cpp``).
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
    """What tells whose turn it is among calls: ``acquire(blocking=False)``, ``release`` and ``locked`` as a lock's."""
    return threading.Lock() if tensors.extension is None else tensors.extension.Turn()


def replay(recording: Replayed, managed: Sequence[int], others: Sequence[Any]) -> Any:
    """A recording with a fast path's part, where it copies no input at each replay; None without the part in C++.

    Args:
        managed: the inputs that are let go of.
        others: by output, what is not cached (see :func:`pygraph_trees.native.tensors.once_more`).
    """
    if tensors.extension is None or recording.graph is None:
        return None
    live = recording.live
    return tensors.extension.Replay(
        recording=weakref.ref(recording),
        live=live,
        log=recording.log,
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
    """Inputs that are outputs as they are, and the numbers of both; None where an output is a view of one."""
    outputs = {} if live is None else live.outputs
    if any(view is not None for _, view in outputs.values()):
        return None
    return packed([number for position, (index, _) in outputs.items() for number in (index, position)])


def _to_ask(deaths: tensors.Deaths | None) -> tuple[Any, Any] | None:
    return None if deaths is None else (deaths.groups, deaths.ask)
