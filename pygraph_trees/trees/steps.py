"""When a step begins: by torch's rules, or if a path would grow at each call because a backward never comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._inductor import cudagraph_trees

from .kept_outputs import keeps_outputs
from .storms import is_endless

if TYPE_CHECKING:
    from collections.abc import Callable

Upstream: type = cudagraph_trees.CUDAGraphTreeManager
_FORWARD = cudagraph_trees.CompilationMode.FORWARD


class Steps(Upstream):
    """The part of a manager that tells whether a step begins, which ends the last step's path."""

    current_node: Any
    keeps_outputs: bool  # whether a function was added whose outputs must be kept
    _begins_step: bool | None = None  # the answer of can_start_new_generation while a path may end

    def can_start_new_generation(self, *generation: Any) -> bool:
        """Whether a step begins. Since torch 2.14 the argument is the current generation, if it is known."""
        if self._begins_step is not None:
            return self._begins_step
        return bool(super().can_start_new_generation(*generation)) or self._has_endless_path(*generation)

    def _has_endless_path(self, *generation: Any) -> bool:
        node = self.current_node
        if node is None or not self.keeps_outputs or not self.in_new_torch_compile_invocation(*generation):
            return False
        path = list(node._path_from_root)
        return is_endless(path, self._is_forward) and all(keeps_outputs(node.wrapped_function.model) for node in path)

    def _is_forward(self, node: Any) -> bool:
        return bool(self.id_to_mode[node.wrapped_function.id] == _FORWARD)

    def by_one_answer(self, *calls: Callable[[], None]) -> None:
        """Makes calls for which one answer tells if a step begins, whatever other threads do: outputs are moved if a
        path ends.
        """
        before = self._begins_step
        try:  # an interrupt may come anywhere, so this is no context manager
            self._begins_step = self.can_start_new_generation()
            for call in calls:
                call()
        finally:
            self._begins_step = before
