"""The attempts to make one recording, each with fewer means: with a table, with addresses alone, on plain memory.

:class:`Attempts` chooses the inputs that are given by address, and keeps what another attempt needs: the inputs, and
what failed so far. :meth:`Attempts.until_one_works` raises the failure of the last attempt: of the first one if its
inputs cannot be kept. What was refused holds for the function's later recordings as well.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from pygraph_trees.indirection.inputs import LiveInputs, NotStaged, choose
from pygraph_trees.indirection.route_rule import leave_table, may_use_table
from pygraph_trees.indirection.sampler import sampler_for
from pygraph_trees.indirection.table.pointer_table import taken_by_variants
from pygraph_trees.report.naming import BACKWARD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.indirection.pool import PoolRanges
    from pygraph_trees.report.log import RecordingLog


class Attempts:
    """The state of one recording that is being made."""

    __slots__ = ("_function", "_kept", "_left_table", "moving", "refused", "why_copied")

    def __init__(self, function: Any, inputs: list[Any]) -> None:
        """``function``: upstream's record of it; ``inputs``: of the call that is recorded."""
        self._function = function
        self._kept: list[Any] = []  # the inputs, while another attempt may need them
        self._left_table = False  # whether the last attempt failed with a table, and the next one has none
        model = function.model
        self.refused: dict[int, str] = dict(getattr(model, "refused", ()))  # inputs that get no address, and why
        # Managed inputs that were found to move, which are live in this recording.
        self.moving = {index: inputs[index] for index in getattr(model, "moving", ())}
        self.why_copied: dict[int, str] = {}

    def until_one_works(self, attempt: Callable[[], None], inputs: list[Any]) -> None:
        """Makes attempts until one works or nothing is left to be tried; each has all ``inputs``."""
        is_tried_again = False
        while True:
            refused, self._left_table = dict(self.refused), False
            failure: Exception | None = None
            try:
                attempt()
                break
            except Exception as error:
                is_another = self._left_table or self.refused != refused
                if not self._kept or isinstance(error, NotStaged) or not is_another:
                    if not is_tried_again:
                        # It cannot be tried once more at this call, so the next ones go without placeholders.
                        getattr(self._function.model, "refused", {}).update(self.refused)
                    if isinstance(error, NotStaged):
                        inputs[:], self._kept = self._kept, []
                    raise
                failure = error
            # The model or the driver may not bear a table: once more, by address. Or placeholder addresses: on memory.
            forget_frames(failure)
            del failure
            inputs[:], self._kept = self._kept, []
            is_tried_again = True
        if is_tried_again:
            self._function.model.refused.update(self.refused)

    def choose_live(
        self,
        api: Driver,
        device: int,
        inputs: list[Any],
        copied: list[int],
        pool: PoolRanges,
        managed: Collection[int],
        log: RecordingLog,
        *,
        may_be_kept: bool,
    ) -> LiveInputs | None:
        """The inputs of this attempt that are given by address; None if there are none.

        Args:
            inputs: their places get the number 0.
            copied: the indices of inputs that upstream would copy; those of the chosen ones are removed.
            managed: the indices of managed inputs that move.
            may_be_kept: whether the inputs may be held while the function is recorded.
        """
        model, sizes = self._function.model, self._function.id  # a function of integers has an id for each value
        # What is chosen has to be left again if it cannot be recorded, and then the inputs are needed once more.
        may_choose = model.settings.indirection == "auto" and may_be_kept
        may_use = may_use_table(model, sizes) if may_choose else model.settings.indirection == "table"
        live, self.why_copied = choose(
            api,
            device,
            inputs,
            copied,
            set(self._function.mutated_input_idxs),
            pool,
            self.refused,
            managed,
            stage=model.settings.placement != "off",
            tabled=taken_by_variants(model) if may_use else (),
        )
        if live is None:
            return None
        is_chosen = live.has_table or not may_choose
        live.sampler = None if is_chosen else sampler_for(model, sizes, device, log)
        if (live.has_placeholders or live.has_staged) and may_be_kept:
            self._kept = list(inputs)
        live.is_of_backward = model.log.mode == BACKWARD
        for item in live.items:
            inputs[item.index] = 0
            copied.remove(item.index)
        return live

    def launched(self) -> None:
        """The graph was launched and must not be launched twice, so there is no other attempt."""
        self._kept = []

    def failed(self, live: LiveInputs, error: BaseException) -> None:
        """Notes what the next attempt does without."""
        model = self._function.model
        self._left_table = live.has_table and model.settings.indirection == "auto"
        if self._left_table and not isinstance(error, NotStaged):
            leave_table(model, self._function.id, error)
            return
        why = f"recording it at a placeholder address failed: {type(error).__name__}: {error}"
        # Without them it is tried once more; torch does not record what lies on the CPU.
        refused = [error.fields["index"]] if isinstance(error, NotStaged) else live.in_place
        self.refused |= dict.fromkeys(refused, why)


def forget_frames(error: BaseException | None) -> None:
    """Lets go of what was captured: memory of the pool that nobody accounts for."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
