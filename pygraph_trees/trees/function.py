"""The compiled code of a function, with its settings and log, between Inductor and the tree manager.

:class:`FunctionModel` replaces the compiled code that Inductor passes to ``cudagraphify``. Upstream keeps it in
``WrappedFunction.model`` and calls it to warm up, to record and to run un-graphed. It also knows the manager that
replays the function on the fast path. :func:`entered` tries that replay first and otherwise calls upstream's code.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch._guards import TracingContext

from pygraph_trees.compat import has_trees_per_thread
from pygraph_trees.native import tensors
from pygraph_trees.report.log import FunctionLog, journal
from pygraph_trees.report.naming import compile_id, mode_name, program_name
from pygraph_trees.settings import Settings

from .fast_path import entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pygraph_trees.selection.trial import Trial


PER_THREAD = has_trees_per_thread()

# If functions are chosen by measurement, one call in so many is sampled.
LOOK_EVERY = 4096


def _nobody() -> None:
    return None


class FastReplays(Protocol):
    """A manager that replays functions on the fast path."""

    def replay_fast(self, inputs: list[Any], function_id: Any) -> Any: ...


class _Loaded(threading.local):
    meta: Any = None


_loaded = _Loaded()


@contextlib.contextmanager
def loaded_with(meta: Any) -> Iterator[None]:
    """Inside, this thread puts a program from a cache to use; ``meta`` is AOTAutograd's metadata of its forward."""
    before, _loaded.meta = _loaded.meta, meta
    try:
        yield
    finally:
        _loaded.meta = before


def _first_inside(*, is_backward: bool, is_inference: bool) -> int | None:
    """The first output that a recording may hold in the layout that is returned; None if no output may be.

    For a forward, these are the outputs that only autograd holds. For a backward, these are all outputs, if C++ can
    tell whether only autograd uses them. None if AOTAutograd's metadata is not known, or if it wraps tensors in
    subclasses of the program.
    """
    if is_inference or (is_backward and tensors.extension is None):
        return None
    context = TracingContext.try_get()
    meta = _loaded.meta
    if meta is None and context is not None:
        meta = context.fw_metadata
    if meta is None or any(
        isinstance(found, SubclassCreationMeta) for found in (*meta.subclass_fw_graph_out_meta, *meta.subclass_inp_meta)
    ):
        return None
    return 0 if is_backward else int(meta.num_forward)


class _Counting:
    """Gives the manager that may replay a function; one call in ``LOOK_EVERY`` gets None and is sampled instead."""

    __slots__ = ("_function", "_left")

    def __init__(self, function: FunctionModel) -> None:
        self._function = weakref.ref(function)
        self._left = LOOK_EVERY

    def __call__(self) -> FastReplays | None:
        function = self._function()
        if function is None:
            return None
        self._left -= 1
        if self._left > 0:
            return function.fast_path_in()
        self._left = LOOK_EVERY
        if function.instead is None and function.looked_at is not None:
            function.instead = function.looked_at
            function.may_replay(may=False)
        return None


class FunctionModel:
    """The compiled code of one function, with its settings and its log."""

    # Slots for attributes that each call reads.
    __slots__ = ("__dict__", "__weakref__", "function_id", "instead", "manager", "thread", "was_asked")

    def __init__(self, model: Callable[[list[Any]], Any], settings: Settings, log: FunctionLog) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        self.refused: dict[int, str] = {}  # inputs that are copied in every later recording, and why
        self.moving: set[int] = set()  # managed inputs whose addresses changed: live ones in every later recording
        # The manager that may replay it now, by a weak reference: a manager must not outlive its functions.
        self.manager: Callable[[], FastReplays | None] = _nobody
        self.function_id: Any = None
        self.thread: int | None = None  # the only thread that may replay it, if each thread has its own trees
        self.first_inside: int | None = None  # the first output that a recording may hold as it is returned
        self.fast_path_in: Callable[[], FastReplays | None] = _nobody  # the manager, also if it may not replay now
        self._counting = _Counting(self)
        self.instead: Callable[[list[Any]], Any] | None = None  # called instead of the function
        self.trial: Trial | None = None  # sets ``instead``
        self.looked_at: Callable[[list[Any]], Any] | None = None  # becomes ``instead`` for one graphed call of many
        self.as_returned: Callable[[Sequence[Any]], Any] | None = None  # makes outputs from the model's outputs
        self.is_entered = False  # by :func:`entered`
        self.was_asked = False  # whether this call's caller has tried a fast replay without success
        self._added = 0
        self._of_integers = False
        self._may_replay = False
        # By values of its integers, the function with these values and its fast replay: see :meth:`add_values`.
        self._integers: tuple[int, ...] = ()
        self._by_values: dict[tuple[int, ...], tuple[FunctionModel, Callable[[list[Any]], Any]]] = {}
        self._by_number: dict[Any, FunctionModel] = {}
        if hasattr(model, "__name__"):
            self.__name__ = model.__name__

    def __call__(self, inputs: list[Any]) -> Any:
        self.log.runs += 1
        return self.ungraphed(inputs)

    def ungraphed(self, inputs: list[Any]) -> Any:
        """Runs the compiled code and returns its outputs; no run is counted."""
        outputs = self.model(inputs)
        return outputs if self.as_returned is None else self.as_returned(outputs)

    def add(self, *, of_integers: bool) -> None:
        """Notes that it was added to a manager: once, or once for each set of values if it takes integers."""
        self._added += 1
        self._of_integers |= of_integers
        self.fast_path_in = _nobody
        self.may_replay(may=self.instead is None)

    @property
    def is_added(self) -> bool:
        """Whether it was added to a manager."""
        return self._added > 0

    def add_values(self, function_id: Any, integers: Mapping[int, int]) -> None:
        """Notes that it was added with these values of its integers, by the index of each among the inputs.

        The manager treats it as a separate function for each set of values, with its own ``function_id``.
        """
        self._integers = tuple(integers)
        values = tuple(integers.values())
        own, _ = self._by_values.get(values) or (FunctionModel(self.model, self.settings, self.log), None)
        own.add(of_integers=False)
        self._by_number[function_id] = own
        self._by_values[values] = own, entry(own.fast_call, own)

    def has_fast_path_in(self, manager: FastReplays, function_id: Any) -> None:
        """Notes that ``manager`` may replay it on the fast path."""
        if self._of_integers:
            own = self._by_number.get(function_id)
            if own is not None:
                own.has_fast_path_in(manager, function_id)
        elif self._added == 1 and self.settings.indirection != "off":
            self.fast_path_in, self.function_id = weakref.ref(manager), function_id
            self.thread = tensors.thread_id() if PER_THREAD else None
            if self.instead is None:
                self.may_replay(may=True)

    def fast_call(self, inputs: list[Any]) -> Any:
        """The outputs of a fast replay, which consumes the inputs; None if no fast replay is possible."""
        if self._of_integers:
            return self._fast_call_with_values(inputs)
        manager = self.manager() if self.thread is None or self.thread == tensors.thread_id() else None
        return None if manager is None else manager.replay_fast(inputs, self.function_id)

    def _fast_call_with_values(self, inputs: list[Any]) -> Any:
        self.manager()  # only counts calls
        found = self._by_values.get(tuple([inputs[i] for i in self._integers])) if self._may_replay else None
        return None if found is None else found[1](inputs)

    def may_replay(self, *, may: bool) -> None:
        """Sets whether it may be replayed on the fast path."""
        by_whom = self.fast_path_in if self.looked_at is None else self._counting
        self.manager = by_whom if may else _nobody
        self._may_replay = may

    @staticmethod
    def of(model: Callable[[list[Any]], Any], *, is_backward: bool, is_inference: bool) -> FunctionModel:
        """Wraps the model that ``cudagraphify`` is given at compile time, as part of the graph being compiled.

        A model that is already wrapped is returned unchanged.
        """
        if isinstance(model, FunctionModel):
            return model
        settings = Settings.current()
        graph = journal.graph
        log = FunctionLog(
            model=graph.model if graph else program_name() or str(getattr(model, "__name__", "unknown")),
            compile_id=graph.compile_id if graph else compile_id(),
            mode=mode_name(is_backward=is_backward, is_inference=is_inference),
            partition=1,
            settings=asdict(settings),
            graph=graph,
        )
        if graph is not None:
            graph.functions += 1
            log.partition = graph.functions
        journal.add_function(log)
        function = FunctionModel(model, settings, log)
        function.first_inside = _first_inside(is_backward=is_backward, is_inference=is_inference)
        return function


def entered(
    function: FunctionModel,
    run: Callable[[list[Any]], Any],
    choose: Callable[[FunctionModel, Callable[[list[Any]], Any]], object] | None = None,
) -> Callable[[list[Any]], Any]:
    """``run``, but a fast replay is tried first.

    A function is entered in one place only, the outermost. The returned callable has the attribute ``function``.

    Args:
        choose: is given the function and its graphed version, and may set :attr:`~FunctionModel.instead`. Its result
            lives as long as the returned callable.
    """
    if function.is_entered or function.settings.indirection == "off":
        return run
    function.is_entered = True
    fast_call = entry(function.fast_call, function)

    def graphed(inputs: list[Any]) -> Any:
        function.may_replay(may=True)
        try:
            outputs = fast_call(inputs)
        finally:
            if function.instead is not None:
                function.may_replay(may=False)
        return run(inputs) if outputs is None else outputs

    # Only the returned callable may hold it: it holds the graphed version, which keeps the function alive in torch.
    kept = None if choose is None else choose(function, graphed)

    def call(inputs: list[Any]) -> Any:
        instead = function.instead
        if instead is not None:
            function.was_asked = False
            return instead(inputs)
        if function.was_asked:
            function.was_asked = False
        else:
            outputs = fast_call(inputs)
            if outputs is not None:
                return outputs
        return run(inputs)

    call.function, call.kept = function, kept  # type: ignore[attr-defined]
    return call
