"""The flags in ``torch._inductor.config.triton``: entries that check what they are given, and their part in cache
keys.

Entries go into ``config._config``, the table behind attribute access, ``config.patch``,
``torch.compile(options=...)`` and the cache keys. Registering an entry is what keeps artifacts of patched and
unpatched processes apart: every entry is part of the FX and AOTAutograd keys unless its name is in
``_cache_config_ignore_prefix``, where flags that act at run time only are added. ``pygraph_version`` is an entry for
that purpose alone.

Since 2.12 an override is a context variable, before it is an attribute of the entry; both are replaced here by
something that checks the value first. Undoing takes the entries out again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .patch import Expectation, Fingerprint, Patch

if TYPE_CHECKING:
    from pygraph_trees.settings import Flag

_MODULE = "torch.utils._config_module"
_PREFIX = "triton."


class _CheckedOverride:
    """Stands for an entry's context variable, and checks what is set."""

    def __init__(self, variable: Any, flag: Flag, unset: object) -> None:
        self._variable = variable
        self._flag = flag
        self._unset = unset

    def get(self) -> Any:
        return self._variable.get()

    def set(self, value: Any) -> Any:
        if value is not self._unset:
            self._flag.check(value)
        return self._variable.set(value)

    def reset(self, token: Any) -> None:
        """As 2.15 takes back what a patch of the configuration set."""
        self._variable.reset(token)


def _entry(flag: Flag) -> Any:
    from torch.utils import _config_module

    unset = _config_module._UNSET_SENTINEL
    declared = _config_module._Config(default=flag.default, value_type=str, env_name_default=flag.environment)
    if _has_context_overrides():
        entry = _config_module._ConfigEntry(declared, _PREFIX + flag.name)
        entry.user_override = _CheckedOverride(entry.user_override, flag, unset)
    else:
        entry = _attribute_entry(flag, unset)(declared)
    if entry.env_value_default is not unset:
        flag.check(entry.env_value_default, source=f"environment variable {flag.environment}")
    return entry


def _has_context_overrides() -> bool:
    """Whether a config override is a context variable (2.12) or an attribute of the entry."""
    from torch.utils import _config_module

    fields = {f.name: f for f in dataclasses.fields(_config_module._ConfigEntry)}
    return fields["user_override"].default is dataclasses.MISSING


def _attribute_entry(flag: Flag, unset: object) -> type:
    from torch.utils import _config_module

    class CheckedEntry(_config_module._ConfigEntry):
        _override: Any = unset

        @property
        def user_override(self) -> Any:
            return self._override

        @user_override.setter
        def user_override(self, value: Any) -> None:
            if value is not unset:
                flag.check(value)
            self._override = value

    return CheckedEntry


def _mark_dirty(config: Any) -> None:
    """Makes the config recompute its dictionary and hash: entries came or went."""
    if hasattr(config, "_get_dict_dirty_keys_var"):
        config._get_dict_dirty_keys_var.set(None)
    if hasattr(config, "_hash_dirty_var"):
        config._hash_dirty_var.set(True)
    else:
        config._is_dirty = True


def _ignored_prefix_lists(config: Any) -> list[list[str]]:
    """The lists of prefixes left out of cache keys: the default, and the copy made of it when it was first read."""
    entry = config._config["_cache_config_ignore_prefix"]
    override = entry.user_override.get() if _has_context_overrides() else entry.user_override
    return [held for held in (entry.default, override) if isinstance(held, list)]


@dataclasses.dataclass(frozen=True, slots=True)
class Flags(Patch):
    """Adds the flags to ``torch._inductor.config``."""

    @property
    def target(self) -> str:
        return "torch._inductor.config.triton"

    def apply(self) -> Callable[[], None]:
        from torch._inductor import config

        from pygraph_trees.settings import FLAGS, Flag
        from pygraph_trees.version import __version__

        version = Flag("pygraph_version", (__version__,), __version__, changes_artifacts=True, help="")
        entries = {_PREFIX + flag.name: _entry(flag) for flag in (*FLAGS, version)}
        ignored = [_PREFIX + flag.name for flag in FLAGS if not flag.changes_artifacts]
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


def _fingerprint(since: tuple[int, int], until: tuple[int, int], entry: tuple[str, ...]) -> Fingerprint:
    return Fingerprint(
        since,
        until,
        (
            Expectation(_MODULE, "_ConfigEntry.__init__", ("self", *entry), ("env_name_default", "env_value_default")),
            Expectation(_MODULE, "ConfigModule.__setattr__", ("self", "name", "value"), ("_config", "user_override")),
            Expectation(_MODULE, "ConfigModule.__getattr__", ("self", "name"), ("user_override", "env_value_default")),
            Expectation(_MODULE, "ConfigModule._get_dict", ("self", "ignored_keys", "ignored_prefixes"), ("_config",)),
            Expectation(_MODULE, "ConfigModule.save_config_portable", None, ("_cache_config_ignore_prefix",)),
            Expectation(_MODULE, "_Config", None, ("env_name_default", "value_type")),
        ),
    )


PATCHES: tuple[Patch, ...] = (
    Flags(
        feature="flags",
        fingerprints=(
            _fingerprint((2, 11), (2, 11), ("config",)),
            _fingerprint((2, 12), (2, 15), ("config", "name")),
        ),
        removable="torch has a way to register config entries from outside",
    ),
)
