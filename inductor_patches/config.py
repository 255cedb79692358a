"""The flags in ``torch._inductor.config.triton``: entries that check their values.

Each entry is part of the FX and AOTAutograd cache keys, which keeps artifacts of patched and unpatched processes apart,
except for flags that act only at run time. The entry ``pygraph_version`` holds the version and a hash of the code that
shapes artifacts.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from . import environment
from .patch import Patch

if TYPE_CHECKING:
    from pygraph_trees.settings import Flag

_PREFIX = "triton."


class _CheckedOverride:
    """Replaces an entry's context variable, and checks each value that is set."""

    def __init__(self, variable: Any, flag: Flag, unset: object) -> None:
        self._variable, self._flag, self._unset = variable, flag, unset
        self.get, self.reset = variable.get, variable.reset  # torch 2.15 undoes a patch with the latter

    def set(self, value: Any) -> Any:
        return self._variable.set(value if value is self._unset else self._flag.check(value))


def _entry(flag: Flag) -> Any:
    from torch.utils import _config_module

    from pygraph_trees.compat import has_context_overrides

    unset = _config_module._UNSET_SENTINEL
    # `torch.compile(options=...)` does not check the value of an entry whose type is a union.
    kind = int if flag.is_number else str | bool if flag.is_switch else str
    declared = _config_module._Config(default=flag.default, value_type=kind)
    if has_context_overrides():
        entry = _config_module._ConfigEntry(declared, _PREFIX + flag.name)
        entry.user_override = _CheckedOverride(entry.user_override, flag, unset)
        return entry

    class CheckedEntry(_config_module._ConfigEntry):
        _override: Any = unset

        @property
        def user_override(self) -> Any:
            return self._override

        @user_override.setter
        def user_override(self, value: Any) -> None:
            self._override = value if value is unset else flag.check(value)

    return CheckedEntry(declared)


def _mark_dirty(config: Any) -> None:
    """Makes the config compute its dictionary and hash again. Each thread may have cached them."""
    from pygraph_trees.compat import has_dirty_variables

    if has_dirty_variables():
        for name, default in (("_get_dict_dirty_keys_var", None), ("_hash_dirty_var", True)):
            vars(config)[name] = ContextVar(vars(config)[name].name, default=default)
    else:
        config._is_dirty = True


def _ignored_prefix_lists(config: Any) -> list[list[str]]:
    """The lists of prefixes left out of cache keys: the default, and the copy made when it was first read."""
    from pygraph_trees.compat import has_context_overrides

    entry = config._config["_cache_config_ignore_prefix"]
    override = entry.user_override.get() if has_context_overrides() else entry.user_override
    return [held for held in (entry.default, override) if isinstance(held, list)]


@functools.cache
def _version() -> str:
    """The version of the code that shapes artifacts; if it cannot be read, one for this process, which shares none."""
    from pygraph_trees import version

    try:
        code = version.artifact_hash()
    except OSError:
        code = secrets.token_hex(32)
    return version.ArtifactVersion(f"{version.__version__}+{code}")


def declare() -> Callable[[], None]:
    """Registers flags that do nothing, for programs that set them while the package is disabled; returns the undo."""
    from pygraph_trees.settings import FLAGS

    entries = {_PREFIX + flag.name: _entry(flag) for flag in FLAGS}
    return _add(entries, ignored=list(entries))


def _add(entries: Mapping[str, Any], ignored: Sequence[str]) -> Callable[[], None]:
    """Registers entries with torch, and leaves those that ``ignored`` names out of cache keys; returns the undo."""
    from torch._inductor import config

    config._config.update(entries)
    for held in _ignored_prefix_lists(config):
        held.extend(ignored)
    _mark_dirty(config)

    def undo() -> None:
        for name in entries:
            config._config.pop(name, None)
        for held in _ignored_prefix_lists(config):
            held[:] = [prefix for prefix in held if prefix not in ignored]
        _mark_dirty(config)

    return undo


class Flags(Patch):
    def apply(self) -> Callable[[], None]:
        from pygraph_trees.settings import FLAGS, Flag

        class _Version(Flag):
            def check(self, value: object) -> str:
                return self.values[0]  # a saved configuration may have another one

        known = _version()
        version = _Version("pygraph_version", (known,), changes_artifacts=True, help="")
        entries = {_PREFIX + flag.name: _entry(flag) for flag in (*FLAGS, version)}
        for flag in FLAGS:
            if (wanted := environment.value_of(flag.environment, flag.values, flag.default)) is not None:
                entries[_PREFIX + flag.name].env_value_default = wanted
        return _add(entries, [_PREFIX + flag.name for flag in FLAGS if not flag.changes_artifacts])
