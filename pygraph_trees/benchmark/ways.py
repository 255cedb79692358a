"""The four ways of running a program: eager, compile, upstream's CUDA graphs, ours.

``compile`` is ``torch.compile(fn)``; ``upstream`` and ``ours`` are ``torch.compile(fn, mode="reduce-overhead")``
without and with our patches. All in one process, which takes care in three places:

- Dynamo reuses compiled code where backend objects compare equal, and Inductor's do when their configuration is equal.
  :class:`OwnInductor` is equal to itself only. It is handed to ``torch._dynamo.optimize`` as ``torch.compile`` does;
  ``torch.compile(backend=...)`` would wrap it and lose what the wrapper does not forward.
- A device has one tree manager per thread. Each way with graphs has trees of its own, current inside
  :meth:`Way.active`.
- Only ``ours`` runs with patches installed. :meth:`Way.active` leaves them as it found them.

Entering and leaving a way is no part of any timed region.

Besides there are ``ours:patch`` and ``ours:table``, ours where the route of inputs is not chosen, and
``ours:selected``, ours where it is measured what is graphed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import inductor_patches
from pygraph_trees.errors import PygraphError

from .program import Program

if TYPE_CHECKING:
    from pygraph_trees.trees.containers import Trees

WAYS = ("eager", "compile", "upstream", "ours")
FORCED = ("ours:patch", "ours:table")  # ours, with the route of inputs that is named, whatever is faster
MORE_WAYS = (*FORCED, "ours:selected")

_FLAGS = {
    "ours:patch": {"triton.pygraph_indirection": "patch"},
    "ours:table": {"triton.pygraph_indirection": "table"},
    "ours:selected": {"triton.pygraph_selective": "auto"},
}


class UnknownWayError(PygraphError):
    template = "a way is one of {allowed}; got {got!r}"


class NotPatchedError(PygraphError):
    template = "nothing here is ours: the patches of {feature!r} are {state}"


class OwnInductor(torch._TorchCompileInductorWrapper):
    """Inductor as ``torch.compile(mode=...)`` makes it, with an identity of its own."""

    def __init__(self, mode: str | None) -> None:
        super().__init__(mode, None, None)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Way:
    """One way of running a program: call ``callable`` inside ``active()``."""

    name: str
    callable: Callable[..., Any]
    patched: bool
    trees: Trees | None
    flags: Mapping[str, str] = field(default_factory=dict)  # that differ from the user's

    @property
    def compiled(self) -> bool:
        return self.name != "eager"

    @property
    def managers(self) -> Sequence[Any]:
        """The tree managers of this way, one a device; none for a way without graphs."""
        return self.trees.managers() if self.trees is not None else ()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this way's patches and trees the current ones."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_patches(self.patched))
            if self.flags:  # behind the patches, which make them
                stack.enter_context(torch._inductor.config.patch(dict(self.flags)))
            if self.trees is not None:
                stack.enter_context(self.trees.active())
            yield


def make_ways(program: Program, names: Sequence[str] = WAYS) -> list[Way]:
    """The named ways of running ``program``, in the given order; nothing is compiled yet."""
    for name in names:
        if name not in (*WAYS, *MORE_WAYS):
            raise UnknownWayError(allowed=", ".join((*WAYS, *MORE_WAYS)), got=name)
    return [_make(program, name) for name in names]


def wake_compiler(device: torch.device) -> None:
    """Compiles something small, so that what a process does once is not in the compile time of the first way."""
    with _patches(False), contextlib.suppress(Exception):  # a way that cannot compile will say so
        x = torch.ones(64, device=device)
        _optimize(OwnInductor(None), _small)(x)


def _small(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _optimize(backend: OwnInductor, fn: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch._dynamo.optimize(backend=backend, nopython=False, dynamic=None, disable=False)(fn)
    return compiled


def _make(program: Program, name: str) -> Way:
    if name == "eager":
        return Way(name, program.fn, patched=False, trees=None)
    kind = name.partition(":")[0]
    with _patches(kind == "ours"):
        backend = OwnInductor(None if name == "compile" else "reduce-overhead")
        compiled = _optimize(backend, program.fn)
    trees = None if name == "compile" else _trees()
    return Way(name, compiled, patched=kind == "ours", trees=trees, flags=_FLAGS.get(name, {}))


def _trees() -> Trees:
    from pygraph_trees.trees.containers import Trees

    return Trees()


@contextlib.contextmanager
def _patches(wanted: bool) -> Iterator[None]:
    """Has our patches on or off for the block, and puts back what was."""
    before = patches_on()
    _switch(wanted)
    try:
        yield
    finally:
        _switch(before)


def patches_on() -> bool:
    """Whether any of our patches is on."""
    return any(status.state == "on" for status in inductor_patches.status())


def _switch(on: bool) -> None:
    if on:
        inductor_patches.install()
        for status in inductor_patches.status():
            if status.feature == "trees" and status.state != "on":
                raise NotPatchedError(feature=status.feature, state=status.state)
    elif patches_on():
        inductor_patches.uninstall()
