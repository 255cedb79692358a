"""The compiled code of a function, with its settings and log, between Inductor and the tree manager.

:class:`FunctionModel` replaces the compiled code that Inductor passes to ``cudagraphify``. Upstream keeps it in
``WrappedFunction.model`` and calls it to warm up, to record and to run un-graphed. :func:`entered` chooses the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch._guards import TracingContext
from torch._inductor.utils import align_inputs_from_check_idxs, remove_unaligned_input_idxs
from torch.utils._ordered_set import OrderedSet

from pygraph_trees.indirection.collectives import NAMESPACES
from pygraph_trees.native import binding
from pygraph_trees.outputs.allocations import generated_by_inductor, run_generated
from pygraph_trees.outputs.own_memory import OwnOutputs
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.log import FunctionLog, journal
from pygraph_trees.report.naming import BACKWARD, compile_id, mode_name, program_name
from pygraph_trees.report.records import SLOW_CALLS
from pygraph_trees.settings import Settings, may_wait_for_others

from ..pools import program_pools
from ..pools.capture_lock import is_captured
from .containment import Progress, progress_of
from .dispatch import Dispatch
from .fast_path import Call, entry
from .lanes import Lanes
from .outputs import as_it_reads, each_once, give_memory

if TYPE_CHECKING:
    from pygraph_trees.selection.trial import Trial


# Namespaces of torch's operators, and of ours, that call no collectives.
_WITHOUT_COLLECTIVES = {
    *("aten", "prim", "prims", "inductor", "pygraph_trees", "rngprims", "quantized", "quantized_decomposed"),
    *("_quantized", "mkl", "mkldnn", "onednn", "sparse", "fsdp", "flex_lib", "streams", "profiler", "export"),
    *("debugprims", "_native"),
}

_MOST_WAITED = 4096  # calls, until a function whose memory lacks is recorded again

LOADED: ContextVar[Any] = ContextVar("pygraph_loaded", default=None)  # metadata of the program that a thread loads
# By partition of the graph that a thread puts to use: the inputs that its code takes to be aligned.
ASSUMED: ContextVar[Iterator[set[int]] | None] = ContextVar("pygraph_assumed", default=None)


def _first_inside(*, is_backward: bool, is_inference: bool) -> int | None:
    """The first output that a recording may hold in the layout that is returned; None if it may hold none.

    Only autograd holds these outputs of a forward; of a backward, C++ tells whether only autograd uses them. There are
    none if AOTAutograd's metadata is not known, or if it wraps tensors in subclasses of the program.
    """
    if is_inference or (is_backward and binding.extension is None):
        return None
    if (meta := LOADED.get()) is None and (context := TracingContext.try_get()) is not None:
        meta = context.fw_metadata
    if meta is None or any(
        isinstance(found, SubclassCreationMeta) for found in (*meta.subclass_fw_graph_out_meta, *meta.subclass_inp_meta)
    ):
        return None
    return 0 if is_backward else int(meta.num_forward)


def _code_of(model: Any) -> CodeType | None:
    return getattr(getattr(model, "__func__", model), "__code__", None)


def _names_in(model: Call) -> Collection[str]:
    """The attributes and globals of generated code, such as those of ``torch.ops._c10d_functional.all_reduce_``.

    Those of functions in its module that it calls count too: Inductor makes one of each subgraph.
    """
    names = dict[str, None]()
    others = getattr(getattr(model, "__func__", model), "__globals__", {})
    todo = [_code_of(model)]
    while todo:
        for name in () if (code := todo.pop()) is None else code.co_names:
            if name not in names and getattr(found := others.get(name), "__globals__", None) is others:
                todo.append(_code_of(found))
            names[name] = None
    return names


def _hides_collectives(model: Call, names: Collection[str]) -> bool:
    """Whether code calls operators of other libraries, or cannot be read."""
    libraries = {name for name, found in vars(torch.ops).items() if isinstance(found, torch._ops._OpNamespace)}
    return not generated_by_inductor(model) or not (libraries - _WITHOUT_COLLECTIVES).isdisjoint(names)


def text_of(model: Any) -> str:
    """The lines of a function, from its file; "" if they cannot be read. ``inspect`` would keep the whole file."""
    if (code := _code_of(model)) is None:
        return ""
    try:
        lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    last = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    return "\n".join(lines[code.co_firstlineno - 1 : last])


class FunctionModel:
    """The compiled code of one function, with its settings and its log."""

    def __init__(self, model: Call, settings: Settings, log: FunctionLog) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        log.slow = [binding.new_counter() for _ in SLOW_CALLS]
        log.blocks_allocated, log.blocks_given_away = binding.new_counter(), binding.new_counter()
        self.dispatch = Dispatch(tuple(log.slow))
        self.trial: Trial | None = None  # changes the way of ``dispatch``
        self.refused: dict[int, Why] = {}  # inputs that are copied in every later recording, and why
        self.moving: set[int] = set()  # managed inputs whose addresses changed: live ones in every later recording
        self.copies_nothing = False  # whether its newest recording copies no live input
        self.first_inside: int | None = None  # the first output that a recording may hold as it is returned
        self.as_returned: Callable[[Sequence[Any]], Any] | None = None  # makes outputs from the model's outputs
        self.outputs = OwnOutputs()
        self.lanes = Lanes(settings, log)
        self.is_entered = False  # by :func:`entered`
        self.assumed: Collection[int] | None = next(ASSUMED.get() or iter(()), None)  # taken to be aligned, if known
        self.tangents: Sequence[int] = ()  # inputs of a backward that may be zeros without memory, or negated views
        names = _names_in(model)
        self._makes_zeros = "_efficientzerotensor" in names  # outputs may be zeros without memory
        self.may_have_collective = log.has_collective or (may_wait_for_others() and _hides_collectives(model, names))
        self.has_shared_memory = "symm_mem" in names  # which other ranks know by its address
        self.stop: Callable[[Why], None] | None = None  # lets it run un-graphed from the next call on, with a reason
        self.calls: dict[int, Progress] = {}  # on the slow path, by thread
        self.failures = 0  # contained errors
        # By id: how often a recording lacked memory since the last one, for how many calls it runs un-graphed, and why.
        self.lacking: dict[Any, tuple[int, int, Why]] = {}
        self.why_ungraphed: Why | None = None  # why no call is graphed any more
        self.keeps_inputs = False  # whether later recordings leave the memory of its inputs alone
        if hasattr(model, "__name__"):
            self.__name__ = model.__name__

    def note_lack(self, function_id: Any, why: Why) -> None:
        """Notes that a recording lacked memory. The next call tries again, then one after twice as many each time."""
        self.log.lacked += 1
        times = self.lacking.get(function_id, (0,))[0] + 1
        self.lacking[function_id] = times, min(1 << times, _MOST_WAITED) if times > 1 else 0, why

    def why_waits(self, function_id: Any) -> Why | None:
        """Why a call runs un-graphed, which is counted: memory has lacked too often."""
        times, calls, why = self.lacking.get(function_id, (0, 0, None))
        if why is None or not calls:
            return None
        self.lacking[function_id] = times, calls - 1, why
        return why

    def note_tangents(self, count: int, static_input_idxs: Sequence[int]) -> None:
        """Notes which of a backward's inputs are not static: static ones come from the forward."""
        if self.log.mode == BACKWARD:
            self.tangents = sorted(set(range(count)).difference(static_input_idxs))

    def __call__(self, inputs: list[Any]) -> Any:
        self.log.runs += 1
        if self.tangents:
            give_memory(inputs, self.tangents)
            for index in self.tangents:
                inputs[index] = as_it_reads(inputs[index])
        progress = progress_of(self) if self.calls else None
        return self.ungraphed(inputs) if progress is None else progress.run(self.ungraphed, inputs)

    def ungraphed(self, inputs: list[Any]) -> Any:
        """Runs the compiled code, without counting it; the last inputs may be own memory of outputs."""
        allocations = self.outputs.allocations(inputs)
        outputs = run_generated(self.model, inputs, allocations)
        if self.log.mode == BACKWARD and (allocations is not None or is_captured()):
            outputs = each_once(outputs)
        if self._makes_zeros:
            give_memory(outputs := list(outputs))
        if self.as_returned is not None:
            outputs = self.as_returned(outputs)
        return outputs if allocations is None else allocations.finished(outputs)

    @staticmethod
    def of(model: Call, *, is_backward: bool, is_inference: bool) -> FunctionModel:
        """Wraps the model that ``cudagraphify`` is given, as part of the graph being compiled, if it is not wrapped."""
        if isinstance(model, FunctionModel):
            return model
        settings = Settings.current()
        if (graph := journal.graph) is not None:
            graph.functions += 1
        log = FunctionLog(
            model=graph.model if graph else program_name() or str(getattr(model, "__name__", "unknown")),
            compile_id=graph.compile_id if graph else compile_id(),
            mode=mode_name(is_backward=is_backward, is_inference=is_inference),
            partition=graph.functions if graph else 1,
            settings=asdict(settings),
            graph=graph,
            has_collective=not NAMESPACES.isdisjoint(_names_in(model)),
        )
        journal.add_function(log)
        function = FunctionModel(model, settings, log)
        function.first_inside = _first_inside(is_backward=is_backward, is_inference=is_inference)
        return function


def aligning(
    run: Call,
    assumed: Collection[int] | None,
    inputs: Sequence[Any],
    static: Sequence[int],
    mutated: Collection[int],
    *,
    besides_upstream: bool = False,
) -> Call:
    """``run``, but misaligned inputs are copied first, and back if mutated.

    Args:
        assumed: those that the code takes to be aligned. If they are not known, all that are aligned in this call are
            copied, as by upstream; otherwise these and the mutated ones that upstream copies. Static ones that are
            aligned stay so.
        besides_upstream: only what upstream does not do itself. It does not copy back.
    """
    from torch._inductor.compile_fx import get_input_idxs_to_check

    by_upstream = get_input_idxs_to_check(inputs, static)
    checked = list(by_upstream)
    if assumed is not None:
        moving = set(assumed).difference(remove_unaligned_input_idxs(inputs, static))
        moving = moving.union(set(mutated).intersection(by_upstream))
        checked = sorted(index for index in moving if isinstance(inputs[index], torch.Tensor))
    written = OrderedSet(index for index in checked if index in mutated)
    if besides_upstream:
        checked = [index for index in checked if index in written or index not in by_upstream]
    return align_inputs_from_check_idxs(run, checked, written)


def staying(inputs: Sequence[Any], assumed: Collection[int] | None, static: Sequence[int]) -> Sequence[int]:
    """The static inputs, but those that are misaligned and that the code takes to be aligned."""
    aligned = remove_unaligned_input_idxs(inputs, static)
    return static if assumed is None else [i for i in static if i in aligned or i not in assumed]


class Aligned:
    """Un-graphed calls of a function: misaligned inputs are copied first, and copied back if they are mutated.

    If the code does not tell which must be aligned, the first call decides; before, inputs may not be real.
    """

    def __init__(self, function: FunctionModel, static_input_idxs: Sequence[int], mutated: Collection[int]) -> None:
        self._function, self._static_input_idxs, self._mutated = function, static_input_idxs, mutated
        self._run: Call | None = None

    def decide(self, inputs: Sequence[Any]) -> Call:
        """Returns the code for all calls; ``inputs`` matter in the first call."""
        if self._run is None:
            # If the first call is un-graphed, torch is not asked for a graph.
            self._function.note_tangents(len(inputs), self._static_input_idxs)
            function = self._function
            self._run = aligning(function, function.assumed, inputs, self._static_input_idxs, self._mutated)
        return self._run

    def __call__(self, inputs: list[Any]) -> Any:
        return program_pools.inside(self.decide(inputs), inputs)


def entered(
    function: FunctionModel,
    run: Call,
    aligned: Aligned,
    # Is given the function, its graphed version and ``aligned``, and may let its calls go another way. Its result lives
    # as long as the returned callable.
    choose: Callable[[FunctionModel, Call, Aligned], object] | None = None,
    # Gives the way of a call from a thread that must not use graphs, and None for another thread. It is told whether
    # the call would be graphed.
    way_elsewhere: Callable[[bool], Call | None] | None = None,
) -> Call:
    """``run``, but a fast replay is tried first, and a call that the program captures runs un-graphed.

    A function is entered in one place only, the outermost. The returned callable has the attribute ``function``.
    """
    if function.is_entered:
        return run
    if function.settings.indirection == "off":

        def kept_apart(inputs: list[Any]) -> Any:
            elsewhere = None if way_elsewhere is None else way_elsewhere(True)
            if elsewhere is None:
                return run(inputs)
            aligned.decide(inputs)
            return elsewhere(inputs)

        return run if way_elsewhere is None else kept_apart
    function.is_entered = True
    dispatch = function.dispatch
    fast_call = entry(dispatch)

    def graphed(inputs: list[Any]) -> Any:
        outputs = None if fast_call is None else dispatch.replay(fast_call, inputs)
        return run(inputs) if outputs is None else outputs

    def missed(inputs: list[Any], *, asks_again: bool) -> Any:
        aligned.decide(inputs)
        if way_elsewhere is not None and (elsewhere := way_elsewhere(dispatch.is_graphed)) is not None:
            return elsewhere(inputs)
        if (instead := dispatch.call) is not None:
            if (outputs := instead(inputs)) is not None or dispatch.call is not None:
                return outputs
            asks_again = True  # it has let the calls be replayed from this one on
        return (graphed if asks_again else run)(inputs)

    # Only the returned callable may hold it: it holds the graphed version, which keeps the function alive in torch.
    kept = None if choose is None else choose(function, graphed, aligned)

    def call(inputs: list[Any]) -> Any:
        if dispatch.call is None and not dispatch.was_asked and fast_call is not None:
            outputs = fast_call(inputs)
            if outputs is not None:
                return outputs
        dispatch.was_asked = asks_again = False
        unchecked = dispatch.unchecked
        if unchecked is not None and (way_elsewhere is None or way_elsewhere(False) is None):
            if (outputs := unchecked(inputs)) is not None:
                return outputs
            asks_again = True  # as in ``missed``
        if is_captured():
            function.log.not_graphed(Reason.CAPTURED())
            return aligned(inputs)
        if not program_pools.are_used():
            return missed(inputs, asks_again=asks_again)
        with program_pools.outside():
            return missed(inputs, asks_again=True)

    call.function, call.kept = function, kept  # type: ignore[attr-defined]
    return call
