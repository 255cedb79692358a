"""Un-graphed calls of a function whose kernels may expect aligned inputs.

:class:`Aligned` runs the compiled code as Inductor does without CUDA graphs: misaligned inputs are copied first, and
copied back if they are mutated. As upstream does, the function's first call, graphed or not, decides which inputs must
be aligned; before that call, inputs may not be real.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

Run = Callable[[list[Any]], Any]


class Compiled(Protocol):
    """The compiled code of a function, with its settings and log."""

    def __call__(self, inputs: list[Any]) -> Any: ...

    def note_tangents(self, count: int, static_input_idxs: Sequence[int]) -> None: ...


class Aligned:
    """The compiled code with aligned inputs."""

    def __init__(self, function: Compiled, static_input_idxs: Sequence[int], mutated: Collection[int]) -> None:
        self._function, self._static_input_idxs, self._mutated = function, static_input_idxs, mutated
        self._run: Run | None = None

    def decide(self, inputs: Sequence[Any]) -> Run:
        """Returns the code for all calls; ``inputs`` matter in the first call."""
        if self._run is None:
            from torch._inductor.compile_fx import get_input_idxs_to_check
            from torch._inductor.utils import align_inputs_from_check_idxs
            from torch.utils._ordered_set import OrderedSet

            # If the first call is un-graphed, torch is not asked for a graph.
            self._function.note_tangents(len(inputs), self._static_input_idxs)
            checked = get_input_idxs_to_check(inputs, self._static_input_idxs)
            mutated = OrderedSet(self._mutated) & OrderedSet(checked)
            self._run = align_inputs_from_check_idxs(self._function, checked, mutated)
        return self._run

    def __call__(self, inputs: list[Any]) -> Any:
        return self.decide(inputs)(inputs)
