"""The flags, and :class:`Settings`: their values as they stood when a function was compiled.

A flag lives in ``torch._inductor.config.triton`` under its name (``inductor_patches/config.py`` puts it there) and
can be set by environment, by ``config.patch`` and by ``torch.compile(options={"triton.cudagraphs": True, ...})``.
Values set by ``mode=`` and ``options=`` hold only while compiling, and a read costs 1.5 µs, so nothing reads a flag
after :meth:`Settings.current` was called in ``cudagraphify``.

A value outside of :attr:`Flag.values` raises :class:`InvalidFlag` if code sets it; in the environment it is ignored
with a warning (``inductor_patches/environment.py``). A switch, "off" or "on", takes a bool as well.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from typing import Any

from .errors import PygraphError


class InvalidFlag(PygraphError):
    """A flag was given a value that it does not have."""

    template = "{name} must be one of {allowed}; got {value!r}.{hint}"


@dataclass(frozen=True, slots=True)
class Flag:
    name: str  # under torch._inductor.config.triton
    values: tuple[str, ...]
    default: str
    changes_artifacts: bool  # whether it belongs in the FX and AOTAutograd cache keys
    help: str  # one sentence for each value, as in the README

    @property
    def environment(self) -> str:
        return self.name.upper()

    @property
    def is_switch(self) -> bool:
        return set(self.values) == {"off", "on"}

    def check(self, value: Any) -> str:
        """The one of :attr:`values` that ``value`` is, or stands for; raises :class:`InvalidFlag` if it is none."""
        if self.is_switch and isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, str) and value in self.values:
            return value
        allowed = ", ".join(map(repr, (*self.values, False, True) if self.is_switch else self.values))
        near = difflib.get_close_matches(value, self.values, n=1) if isinstance(value, str) else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidFlag(name=self.name, allowed=allowed, value=value, hint=hint)


FLAGS: tuple[Flag, ...] = (
    Flag(
        name="pygraph_placement",
        values=("full", "exact", "off"),
        default="full",
        changes_artifacts=True,
        help="Whether values that the CPU computes for the GPU are computed there, or once. `exact`: constants, "
        "integers, indices and copies, the same to the bit. `full`: also single precision of inputs, element by "
        "element, which may differ in the last place. `off`: as upstream.",
    ),
    Flag(
        name="pygraph_indirection",
        values=("auto", "patch", "table", "off"),
        default="auto",
        changes_artifacts=True,  # without it nothing is staged
        help="How a replay gets its inputs. `patch`: by address, copied only where a rule demands it. `table`: the "
        "same, but torch's Triton kernels read the addresses from a table, so that a replay sets the parameters of one "
        "kernel, however many read an input. `auto`: `table` if many kernels read inputs that move and the GPU "
        "waits for the host, else `patch`. `off`: every live input is copied, as upstream.",
    ),
    Flag(
        name="pygraph_verify",
        values=("off", "on"),
        default="off",
        changes_artifacts=False,
        help="Whether each new recording is replayed with inputs at other addresses and compared with the function "
        "un-graphed, which takes about as long as recording it. `on`: a difference raises.",
    ),
    Flag(
        name="pygraph_selective",
        values=("auto", "always", "never"),
        default="always",
        changes_artifacts=False,  # under "never" the graph is compiled with triton.cudagraphs off, which does
        help="Which functions are graphed. `auto`: those that were measured to be faster so, in their first calls. "
        "`always`: every one that can be, as upstream. `never`: none; what runs is what `torch.compile` makes without "
        "CUDA graphs, and the report says so.",
    ),
    Flag(
        name="pygraph_objective",
        values=("latency", "throughput"),
        default="latency",
        changes_artifacts=False,
        help="What is faster, where functions are chosen by measurement. `latency`: a step that is waited for. "
        "`throughput`: steps one after another, without a wait.",
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags of one function, read once when it is compiled."""

    placement: str
    indirection: str
    selective: str
    verify: str = "off"
    objective: str = "latency"

    @staticmethod
    def current() -> Settings:
        """The flags as they stand now: in torch's config, or their defaults where the flags are not installed.

        Nothing is placed for graphs that are never made.
        """
        config = sys.modules.get("torch._inductor.config")
        values = {f.name.removeprefix("pygraph_"): getattr(_triton(config), f.name, f.default) for f in FLAGS}
        if values["selective"] == "never":
            values["placement"] = "off"
        return Settings(**values)


def _triton(config: Any) -> Any:
    return None if config is None else config.triton


def flags_table() -> str:
    """The table of flags as it stands in the README."""
    rows = ["| flag | values | default | environment | |", "| --- | --- | --- | --- | --- |"]
    for flag in FLAGS:
        values = ", ".join(f"`{v}`" for v in flag.values)
        rows.append(f"| `{flag.name}` | {values} | `{flag.default}` | `{flag.environment}` | {flag.help} |")
    return "\n".join(rows)
