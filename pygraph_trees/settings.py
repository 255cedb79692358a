"""The flags, and :class:`Settings`, their values at the time a function is compiled.

A wrong value raises :class:`InvalidFlag` if code sets it; in the environment it is ignored with a warning. Values of
``mode=`` and ``options=`` hold only during compilation, and a read costs 1.5 µs, so nothing reads a flag after
:meth:`Settings.current` ran in ``cudagraphify``.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import PygraphError


class InvalidFlag(PygraphError):
    template = "{name} must be one of {allowed}; got {value!r}.{hint}"


class UnknownFlag(PygraphError):
    template = "{name} is no option; the flags are {allowed}.{hint}"


@dataclass(frozen=True, slots=True)
class Flag:
    name: str  # in torch._inductor.config.triton
    values: tuple[str, ...]  # the default first; none: it takes a number, 0 or more
    changes_artifacts: bool  # whether it belongs in the FX and AOTAutograd cache keys
    help: str  # one sentence for each value, as in the README

    @property
    def environment(self) -> str:
        return self.name.upper()

    @property
    def default(self) -> str | int:
        return self.values[0] if self.values else 0

    @property
    def is_switch(self) -> bool:
        return set(self.values) == {"off", "on"}

    @property
    def is_number(self) -> bool:
        return not self.values

    def check(self, value: Any) -> Any:
        """Returns the value, or the one that a bool means for a switch; raises :class:`InvalidFlag` if it is wrong."""
        if self.is_number and type(value) is int and value >= 0:
            return value
        if self.is_switch and isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, str) and value in self.values:
            return value
        words = (*self.values, False, True) if self.is_switch else self.values
        allowed = ", ".join(map(repr, words)) or "0, 1, 2 and so on"
        near = difflib.get_close_matches(value, self.values, n=1) if isinstance(value, str) else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidFlag(name=self.name, allowed=allowed, value=value, hint=hint)


FLAGS: tuple[Flag, ...] = (
    Flag(
        name="pygraph_placement",
        values=("full", "exact", "off"),
        changes_artifacts=True,
        help="Values that the CPU computes for the GPU. `exact`: computed there, or once, if the bits are the same. "
        "`full`: also single-precision math on inputs, which the GPU rounds otherwise. `off`: as in torch.",
    ),
    Flag(
        name="pygraph_indirection",
        values=("auto", "patch", "table", "off"),
        changes_artifacts=True,  # nothing is staged without it
        help="How replays get inputs: their addresses, in the parameters of kernels (`patch`) or in a table that "
        "kernels read (`table`), whichever suits (`auto`), or copies, as in torch (`off`).",
    ),
    Flag(
        name="pygraph_verify",
        values=("off", "on"),
        changes_artifacts=False,
        help="`on`: compares each recording with un-graphed code, with inputs elsewhere; a difference raises.",
    ),
    Flag(
        name="pygraph_selective",
        values=("auto", "always", "never"),
        changes_artifacts=False,  # "never" compiles the graph with triton.cudagraphs off, which does
        help="Which functions are graphed: those that are faster so (`auto`), all that can be, as in torch "
        "(`always`), or none (`never`).",
    ),
    Flag(
        name="pygraph_outputs",
        values=("keep", "upstream"),
        changes_artifacts=False,
        help="Outputs of earlier steps: they stay valid (`keep`), or are overwritten, as in torch (`upstream`).",
    ),
    Flag(
        name="pygraph_pool_bytes",
        values=(),
        changes_artifacts=False,
        help="Bytes of the graph pool above which all recordings are dropped. `0`: no limit.",
    ),
    Flag(
        name="pygraph_entry",
        values=("short", "off", "check", "direct"),
        changes_artifacts=False,
        help="`short`: less in training. `direct`: fewer guards, experimental. `check`: checked. `off`: torch's.",
    ),
    Flag(
        name="pygraph_branches",
        values=("off", "report", "auto", "always"),
        changes_artifacts=True,
        help="Experimental: independent kernels run side by side, if faster (`auto`) or `always`. `report`: the "
        "expected gain.",
    ),
)


NATIVE = "native"  # the only backend of torch's allocator that keeps a pool for graphs


def allocator_backend() -> str:
    """The backend of torch's allocator on GPUs; :data:`NATIVE` also without CUDA."""
    backend = getattr(sys.modules.get("torch._C"), "_cuda_getAllocatorBackend", None)
    return NATIVE if backend is None else str(backend())


def may_wait_for_others() -> bool:
    """Whether there are other ranks, for which kernels may wait.

    Such a graph must be launched only as often as the program does, and what a rank decides must not depend on times.
    """
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_upstream_debugged() -> bool:
    """Whether upstream's options let it check, wait or warm up at each call."""
    from torch._inductor.config import triton

    return triton.fast_path_cudagraph_asserts or triton.force_cudagraph_sync or triton.force_cudagraphs_warmup


def is_disturbed() -> bool:
    """Whether a profiler, a debugger, a blocking launch mode or a check at each call slows down calls."""
    from torch.autograd import profiler

    return (
        bool(profiler._is_profiler_enabled)
        or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        or (sys.gettrace() or sys.getprofile()) is not None
        or is_upstream_debugged()
    )


def checking_options(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``'s handling of options, which refuses a flag before Inductor has applied half of them."""
    flags = {f"triton.{flag.name}": flag for flag in FLAGS}

    @functools.wraps(upstream)
    def apply_options(self: Any, options: dict[str, Any] | None) -> None:
        for key, value in (options or {}).items():
            name = key.replace("-", "_")
            if (flag := flags.get(name)) is not None:
                flag.check(value)
            elif "pygraph_" in name:  # torch would list all of its options
                from torch._inductor import config

                if name not in config.get_config_copy():
                    near = difflib.get_close_matches(name, flags, n=1)
                    hint = f" Did you mean {near[0]!r}?" if near else ""
                    raise UnknownFlag(name=key, allowed=", ".join(flags), hint=hint)
        upstream(self, options)

    return apply_options


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags of one function, read once when it is compiled."""

    placement: str
    indirection: str
    selective: str
    verify: str = "off"
    outputs: str = "keep"
    pool_bytes: int = 0
    entry: str = "short"
    branches: str = "off"

    @staticmethod
    def current() -> Settings:
        """The current flags, or the defaults if they are not installed; placement is off if nothing is graphed."""
        triton = getattr(sys.modules.get("torch._inductor.config"), "triton", None)
        values: dict[str, Any] = {f.name.removeprefix("pygraph_"): getattr(triton, f.name, f.default) for f in FLAGS}
        if values["selective"] == "never" or allocator_backend() != NATIVE:
            values["placement"] = "off"
        return Settings(**values)
