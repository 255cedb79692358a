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
from typing import TYPE_CHECKING, Any

from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch._guards import TracingContext

from pygraph_trees.compat import has_trees_per_thread
from pygraph_trees.native import binding
from pygraph_trees.report.log import FunctionLog, journal
from pygraph_trees.report.naming import compile_id, mode_name, program_name
from pygraph_trees.settings import Settings

from .fast_path import FunctionState, entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pygraph_trees.selection.trial import Trial

PER_THREAD = has_trees_per_thread()

# If functions are chosen by measurement, one call in so many is sampled.
LOOK_EVERY = 4096


def _nobody() -> None:
    return None


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
    if is_inference or (is_backward and binding.extension is None):
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

    def __call__(self) -> Any:
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


class FunctionModel(FunctionState):
    """The compiled code of one function, with its settings and its log."""

    __slots__ = ("__dict__", "__weakref__", "instead")  # each call reads the last one
    was_asked: bool  # whether this call's caller has tried a fast replay without success
    thread: int  # the only thread that may replay it, if each thread has its own trees; 0 otherwise
    integers: tuple[int, ...]  # the indices of its integers, once it was added with some
    by_values: dict[tuple[int, ...], Any]  # by their values, the entry of the function with these values

    def __init__(self, model: Callable[[list[Any]], Any], settings: Settings, log: FunctionLog) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        self.refused: dict[int, str] = {}  # inputs that are copied in every later recording, and why
        self.moving: set[int] = set()  # managed inputs whose addresses changed: live ones in every later recording
        # The manager that may replay it now, by a weak reference: a manager must not outlive its functions.
        self.manager: Callable[[], Any] = _nobody
        self.function_id: Any = None
        self.thread, self.was_asked = 0, False
        self.first_inside: int | None = None  # the first output that a recording may hold as it is returned
        self.fast_path_in: Callable[[], Any] = _nobody  # the manager, also if it may not replay now
        self._counting = _Counting(self)
        self.instead: Callable[[list[Any]], Any] | None = None  # called instead of the function
        self.trial: Trial | None = None  # sets ``instead``
        self.looked_at: Callable[[list[Any]], Any] | None = None  # becomes ``instead`` for one graphed call of many
        self.as_returned: Callable[[Sequence[Any]], Any] | None = None  # makes outputs from the model's outputs
        self.is_entered = False  # by :func:`entered`
        self._added = 0
        self._of_integers = False
        # The function with certain values of its integers, by these and by the manager's id: see :meth:`add_values`.
        self._with_values: dict[tuple[int, ...], FunctionModel] = {}
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
        self.integers, values = tuple(integers), tuple(integers.values())
        own = self._with_values.setdefault(values, FunctionModel(self.model, self.settings, self.log))
        own.add(of_integers=False)
        self._by_number[function_id] = own
        self.by_values = {known: entry(function) for known, function in self._with_values.items()}

    def has_fast_path_in(self, manager: Any, function_id: Any) -> None:
        """Notes that ``manager`` may replay it on the fast path."""
        if self._of_integers:
            own = self._by_number.get(function_id)
            if own is None:
                return
            own.has_fast_path_in(manager, function_id)
        elif self._added != 1 or self.settings.indirection == "off":
            return
        self.fast_path_in, self.function_id = weakref.ref(manager), function_id
        self.thread = binding.thread_id() if PER_THREAD and not self._of_integers else 0
        if self.instead is None:
            self.may_replay(may=True)

    def may_replay(self, *, may: bool) -> None:
        """Sets whether it may be replayed on the fast path."""
        by_whom = self.fast_path_in if self.looked_at is None else self._counting
        self.manager = by_whom if may else _nobody

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
    fast_call = entry(function)

    def graphed(inputs: list[Any]) -> Any:
        if fast_call is None:
            return run(inputs)
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
        elif fast_call is None:
            function.manager()  # counts the call
        else:
            outputs = fast_call(inputs)
            if outputs is not None:
                return outputs
        return run(inputs)

    call.function, call.kept = function, kept  # type: ignore[attr-defined]
    return call
