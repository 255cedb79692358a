"""The ways of running a program: eager, ``torch.compile``, upstream's CUDA graphs, ours.

A :class:`Way` is called inside :meth:`Way.active`, which sets its patches, flags and trees, and restores the previous
ones. It is never timed. README.md says how ways share a process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.utils import fresh_cache

import inductor_patches
from pygraph_trees.errors import PygraphError

from .program import Program

if TYPE_CHECKING:
    from pygraph_trees.trees.hooks.manager_container import Trees

WAYS = ("eager", "compile", "upstream", "ours")

FLAGS: Mapping[str, Mapping[str, str]] = {  # of all ways, by name: overrides of the user's flags
    **{name: {} for name in WAYS},
    "ours:patch": {"triton.pygraph_indirection": "patch", "triton.pygraph_selective": "always"},
    "ours:table": {"triton.pygraph_indirection": "table", "triton.pygraph_selective": "always"},
    "ours:graphed": {"triton.pygraph_selective": "always"},
    "ours:keep": {"triton.pygraph_selective": "always", "triton.pygraph_outputs": "keep"},
    "ours:overwrite": {"triton.pygraph_selective": "always", "triton.pygraph_outputs": "upstream"},
    "ours:one-lane": {"triton.pygraph_branches": "off"},
    "ours:lanes": {"triton.pygraph_branches": "auto"},
    "ours:all-lanes": {"triton.pygraph_branches": "always"},
}
# The best configuration is next to each kernel; `cache/` has the measured costs of templates and padding of matrices.
_CHOICES = ("*/*.best_config", "cache/**/*")


class UnknownWayError(PygraphError):
    template = "a way is one of {allowed}; got {got!r}"


class NotPatchedError(PygraphError):
    template = "nothing here is ours: the patches of {feature!r} are {state}"


class OwnInductor(torch._TorchCompileInductorWrapper):
    """Inductor as ``torch.compile(mode=...)`` makes it, with its own identity."""

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
    flags: Mapping[str, str] = field(default_factory=dict)  # overrides of the user's flags

    @property
    def managers(self) -> Sequence[Any]:
        """The tree managers of this way, one per device; none for a way without graphs."""
        return self.trees.managers() if self.trees is not None else ()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        trees = contextlib.nullcontext() if self.trees is None else self.trees.active()
        with _patches(self.patched), torch._inductor.config.patch(dict(self.flags)), trees:  # patches create the flags
            yield


def check(names: Sequence[str]) -> None:
    """Raises :class:`UnknownWayError` unless there are ways of all these names."""
    for name in names:
        if name not in FLAGS:
            raise UnknownWayError(allowed=", ".join(FLAGS), got=name)


def make_ways(program: Program, names: Sequence[str] = WAYS) -> list[Way]:
    """The named ways of running ``program``, in the given order; compiles nothing yet."""
    check(names)
    from pygraph_trees.trees.hooks.manager_container import Trees

    ways = []
    for name in names:
        patched, is_graphed = name.startswith("ours"), name not in ("eager", "compile")
        fn = program.fn
        if name != "eager":
            with _patches(patched):
                fn = _compiled(fn, "reduce-overhead" if is_graphed else None)
        ways.append(Way(name, fn, patched, Trees() if is_graphed else None, FLAGS[name]))
    return ways


def wake_compiler(device: torch.device) -> None:
    """Compiles something small, so the first way's compile time does not include one-time work of the process."""
    with _patches(False), contextlib.suppress(Exception):  # a way that cannot compile reports that itself
        x = torch.ones(64, device=device)
        _compiled(lambda x: x * 2 + 1, None)(x)


def _compiled(fn: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    backend = OwnInductor(mode, None, None)
    return torch._dynamo.optimize(backend=backend, nopython=False, dynamic=None, disable=False)(fn)


@contextlib.contextmanager
def _patches(wanted: bool) -> Iterator[None]:
    """Turns our patches on or off for the block, and restores the previous state."""
    before = patches_on()
    _switch(wanted)
    try:
        yield
    finally:
        _switch(before)


def patches_on() -> bool:
    """Whether any of our patches is on, or will be once a program is compiled."""
    return any(status.state in ("on", "waiting") for status in inductor_patches.status())


def _switch(on: bool) -> None:
    if on:
        inductor_patches.install()
        for status in inductor_patches.status():
            if status.feature == "trees" and status.state != "on":
                raise NotPatchedError(feature=status.feature, state=status.state)
    elif patches_on():
        inductor_patches.uninstall()


@contextlib.contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Caches of Inductor and Triton under ``folder``, in which only choices by benchmark stay (README.md)."""
    kept = folder / "choices"
    with fresh_cache(dir=str(folder), delete=False):
        own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        _carry_choices(kept, own)
        yield
        _carry_choices(own, kept)


def _carry_choices(source: Path, target: Path) -> None:
    for path in (path for pattern in _CHOICES for path in source.glob(pattern) if path.is_file()):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
