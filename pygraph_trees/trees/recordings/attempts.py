"""Attempts to make one recording: first with a table, then with addresses only, then on ordinary memory.

:class:`Attempts` chooses the inputs that are given by address, and keeps the inputs and the earlier failures for the
next attempt. Inputs that were refused are also copied in later recordings of the function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pygraph_trees.indirection.choosing import choose
from pygraph_trees.indirection.inputs import LiveInputs
from pygraph_trees.indirection.route_rule import chooser_for, leave_table, may_use_table
from pygraph_trees.indirection.staged_inputs import NotStaged
from pygraph_trees.indirection.table.pointer_table import taken_by_variants
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.naming import BACKWARD

from ..functions.containment import UnreadablePool, forget_frames, passes
from ..functions.function import FunctionModel, text_of
from ..pools import pools
from ..pools.pools import ranges_of
from .captured_graph import is_cuda

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

_WORDS = re.compile(r"\w+")
_INPUTS = re.compile(r"^ *(.+) = args$", re.MULTILINE)
_REUSES = re.compile(r" = (.+) # reuse$", re.MULTILINE)  # of a buffer, or of a view of it


class Attempts:
    __slots__ = ("_function", "_kept", "_left_table", "model", "moving", "overwritten", "refused", "why_copied")

    def __init__(self, function: Any, inputs: list[Any]) -> None:
        """``function``: upstream's ``WrappedFunction``; ``inputs``: the inputs of the recorded call."""
        self._function = function
        self.model = model = function.model
        self._kept: list[Any] = []  # the inputs, while another attempt may need them
        self._left_table = False  # whether the last attempt failed with a table; the next one has none
        self.refused: dict[int, Why] = dict(getattr(model, "refused", ()))  # inputs that get no address, and why
        # Managed inputs whose addresses changed; they are live inputs of this recording.
        self.moving = {index: inputs[index] for index in getattr(model, "moving", ())}
        self.why_copied: dict[int, Why] = {}
        # Inputs that do not count as mutated, but in whose memory a launch may leave something else.
        self.overwritten: frozenset[int] = frozenset()
        if isinstance(model, FunctionModel):
            own = getattr(function, "own", None)
            count = len(inputs) if own is None else own.takes
            self.overwritten = overwritten_inputs(model.model, count, is_backward=model.log.mode == BACKWARD)

    def until_one_works(self, attempt: Callable[[], None], inputs: list[Any]) -> None:
        """Makes attempts until one works or nothing else can be tried; each attempt is given all ``inputs``."""
        is_tried_again = False
        while True:
            refused, self._left_table = dict(self.refused), False
            failure: Exception | None = None
            try:
                attempt()
                break
            except Exception as error:
                is_another = self._left_table or self.refused.keys() != refused.keys()
                if not self._kept or isinstance(error, NotStaged | UnreadablePool) or not is_another:
                    if not is_tried_again:
                        # This call cannot try again, so later calls record without placeholders.
                        getattr(self.model, "refused", {}).update(self.refused)
                    if isinstance(error, NotStaged):
                        inputs[:], self._kept = self._kept, []
                    raise
                failure = error
            # The model or the driver may not support a table: then the next attempt has only addresses. Or it may
            # not support placeholder addresses: then the next one uses ordinary memory.
            forget_frames(failure)
            del failure
            inputs[:], self._kept = self._kept, []
            is_tried_again = True
        if is_tried_again:
            self.model.refused.update(self.refused)

    def choose_live(self, node: Any, api: Driver, inputs: list[Any]) -> LiveInputs | None:
        """Chooses the inputs that ``node`` is given by address, as :func:`.choosing.choose`; None if there are none.

        In ``inputs``, each of them is replaced by the number 0. Upstream does not copy it.
        """
        model, sizes, copied = self.model, self._function.id, node._copied_indices()  # integers have ids of their own
        pool = ranges_of(node.device, node.cuda_graphs_pool)
        # Managed inputs that move are alive, so this recording does not use their memory.
        managed = {i for i, t in self.moving.items() if node._is_alias_of_live_recorded_tensor(t) is not None}
        # If inputs in the pool were held while the function is recorded, the graph would use other memory.
        in_pool = (is_cuda(value) and pool.holds(value.data_ptr()) for value in inputs)
        may_be_kept = not node.cudagraph_managed_idxs and not any(in_pool)
        # If a recording with a table fails, the next attempt needs the inputs again.
        manager = pools.OWNED.get(node.cuda_graphs_pool)
        is_alike = manager is not None and manager.reclaiming.is_alike  # ranks may build tables at different times
        may_choose = model.settings.indirection == "auto" and may_be_kept and not is_alike
        may_use = may_use_table(model, sizes) if may_choose else model.settings.indirection == "table"
        mutated = set(self._function.mutated_input_idxs)
        live, self.why_copied = choose(
            *(api, node.device, inputs, copied, mutated, pool, self.refused, managed),
            stage=model.settings.placement != "off",
            tabled=taken_by_variants(model) if may_use else (),
            overwritten=self.overwritten,
            own={} if node.own is None else node.own.inputs,
        )
        if live is None:
            return None
        try:
            live.chooser = None if live.has_table or not may_choose else chooser_for(model, sizes)
            if (live.has_placeholders or live.has_staged) and may_be_kept:
                self._kept = list(inputs)
            live.is_of_backward = model.log.mode == BACKWARD
            for item in live.items:
                inputs[item.index] = 0
                copied.remove(item.index)
        except BaseException:
            live.release()
            raise
        return live

    def launched(self) -> None:
        """Ends the attempts: the graph was launched, and a second launch would repeat its effects."""
        self._kept = []

    def failed(self, live: LiveInputs, error: BaseException) -> None:
        """After a failure, notes the means that the next attempt must do without."""
        if passes(error):
            return
        model = self.model
        self._left_table = live.has_table and model.settings.indirection == "auto"
        if self._left_table and not isinstance(error, NotStaged):
            leave_table(model, self._function.id, error)
            return
        why = Reason.NOT_AT_PLACEHOLDER(error=f"{type(error).__name__}: {error}")
        # The next attempt does not give these by address. Torch does not record inputs on the CPU, so after NotStaged
        # only that input is refused.
        refused = [error.fields["index"]] if isinstance(error, NotStaged) else live.in_place
        self.refused |= dict.fromkeys(refused, why)


def overwritten_inputs(model: Callable[..., Any], count: int, *, is_backward: bool) -> frozenset[int]:
    """The inputs whose memory generated code reuses, by the comment that Inductor writes after each reuse.

    Nobody else reads them: a backward's saved tensors (*donated buffers*), and buffers of other partitions. They do not
    count as mutated. If the code cannot be read, these may be all ``count`` inputs of a backward.
    """
    text = text_of(model)
    if (inputs := _INPUTS.search(text)) is None:
        return frozenset(range(count) if is_backward else ())
    reused = {word for right in _REUSES.findall(text) for word in _WORDS.findall(right)}
    return frozenset(index for index, name in enumerate(_WORDS.findall(inputs[1])) if name in reused)
