"""Keeps decisions on disk for later processes.

A profile is a small JSON file in the folder ``pygraph_trees`` of Inductor's cache. Its name is a hash over everything
that the decision depends on (:class:`Subject`). Processes may share a folder. No disk failure is an error: a damaged
file, or one in another version's format, is no profile, and the function is measured again. Read failures and write
failures each give one warning per process. README.md describes files and counts.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import getpass
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from pygraph_trees.errors import PygraphError, PygraphWarning
from pygraph_trees.version import __version__, triton_version

from .decision import Decision

_log = logging.getLogger("pygraph_trees.selection")

FORMAT = 3  # of the files; raised if another version would misread one
STALE_AFTER_S = 30 * 86400.0
_LIMIT = 2**63  # of all numbers
_SIGNED = ("gain_us",)  # fields that may be negative
_MOST_BYTES = 65536  # limit of a file, above which uses are not counted
_MOST_NAME = 200  # characters
_LEFT_BEHIND_S = 3600.0  # a file that is being written is never this old


class DamagedProfiles(PygraphWarning):
    template = (
        "pygraph_trees: a profile in {folder} cannot be read ({why}) and is ignored, as are any others like it; "
        "`python -m pygraph_trees profiles --clear` removes all of them."
    )


class ProfilesNotKept(PygraphWarning):
    template = (
        "pygraph_trees: what is measured is not kept for other processes, since {folder} cannot be written ({why}). "
        "TORCHINDUCTOR_CACHE_DIR names another folder for Inductor's cache."
    )


class NoCacheFolder(PygraphError):
    """Inductor has no cache folder."""

    template = "Inductor's cache, {folder}, cannot be made: {why}. TORCHINDUCTOR_CACHE_DIR names another folder for it."


class ProfilesNotRemoved(PygraphError):
    """Some profiles remain after they should have been removed."""

    template = "{count} of the files in {folder} could not be removed: {why}"


class _Damaged(Exception):
    """A file's content is not a profile."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and software that run the functions."""

    gpu: str
    cpu: str  # the model of the host's processor
    driver: str  # the CUDA version that it supports, such as 13000
    torch: str
    triton: str
    package: str

    @staticmethod
    def current(device: int) -> Machine:
        """The machine of the CUDA device with this index."""
        import torch

        from pygraph_trees.cuda.driver import driver

        api = driver()
        version = "unknown" if api is None else str(api.version())
        gpu, triton = torch.cuda.get_device_name(device), triton_version() or "none"
        return Machine(gpu, _cpu(), version, str(torch.__version__), triton, __version__)


@functools.cache
def _cpu() -> str:
    """The name of the host's processor model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


@dataclass(frozen=True, slots=True)
class Subject:
    """Everything that a decision depends on."""

    graph: str  # identifies one compiled function, for example by Inductor's key and the partition
    inputs: tuple[str, ...]  # in order, in the form of describe()
    machine: Machine
    settings: Mapping[str, str]  # what else changes a call's cost or the question: flags, the partition

    @property
    def key(self) -> str:
        """The file name: 64 hexadecimal digits."""
        parts = [self.graph, list(self.inputs), asdict(self.machine), dict(self.settings)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _inductors_folder() -> str:
    """Where Inductor's cache is, or would be."""
    if (folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) is not None:
        return os.path.abspath(folder)
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def describe(value: object) -> str:
    """An input's dtype and shape, ``float32[8, 16]``; otherwise its type, and its value if it is an int."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"int {value}" if type(value) is int else type(value).__name__


@dataclass(frozen=True, slots=True)
class Profile:
    key: str
    what: str  # the function's name for readers
    gpu: str
    decided_s: float  # seconds since 1970
    decision: Decision
    uses: int = 0  # by other processes since the decision; at most 65536

    def age_s(self, now_s: float | None = None) -> float:
        return (time.time() if now_s is None else now_s) - self.decided_s

    def is_stale(self, now_s: float | None = None) -> bool:
        """Whether the function should be measured again: the profile is 30 days old, or over a day in the future."""
        return not -86400.0 <= self.age_s(now_s) <= STALE_AFTER_S


@dataclass(frozen=True, slots=True)
class Profiles:
    """The profiles in one folder, which need not exist."""

    folder: Path

    @staticmethod
    def default() -> Profiles:
        """The profiles next to Inductor's current cache; does not import torch.

        Raises:
            NoCacheFolder: the folder does not exist, and Inductor cannot create it.
        """
        inductors = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
        try:
            folder = _inductors_folder() if inductors is None else inductors.cache_dir()
        except OSError as error:
            raise NoCacheFolder(folder=error.filename, why=error.strerror) from error
        return Profiles(Path(folder) / "pygraph_trees")

    def use(self, key: str) -> Profile | None:
        """The profile for a key, which counts as a use; None if there is none."""
        found = self._load(self._path(key))
        if found is not None:
            self._count(key)
        return found

    def store(self, subject: Subject, what: str, decision: Decision, now_s: float | None = None) -> None:
        """Writes a decision, which replaces an earlier one."""
        decided_s = time.time() if now_s is None else now_s
        printable = "".join(c if c.isprintable() else "?" for c in what[:_MOST_NAME])
        profile = Profile(subject.key, printable, subject.machine.gpu, decided_s, decision)
        content = json.dumps({"format": FORMAT, **asdict(profile), "uses": 0}, default=_value).encode()
        try:
            self._write(profile.key, content)
        except OSError as error:
            self._warn(ProfilesNotKept, error.strerror or type(error).__name__)

    def list(self) -> tuple[Profile, ...]:
        """All readable profiles, the newest first."""
        found = (self._load(path) for path in self._files(".json"))
        return tuple(sorted((p for p in found if p is not None), key=lambda p: (-p.decided_s, p.key)))

    def clear(self) -> int:
        """Removes all profiles, damaged ones and the leftovers of killed writers included; returns how many.

        A file that another process writes in the meantime may stay.

        Raises:
            ProfilesNotRemoved: some remain; all others are gone.
        """
        before = time.time() - _LEFT_BEHIND_S
        removed, failures = 0, []
        for suffix in (".json", ".tmp"):
            for path in self._files(suffix):
                try:
                    if suffix == ".json" or path.lstat().st_mtime < before:
                        path.unlink()
                        removed += suffix == ".json"
                except FileNotFoundError:
                    pass  # another process removed it, or renamed it
                except OSError as error:
                    failures.append(error.strerror or type(error).__name__)
        if failures:
            raise ProfilesNotRemoved(count=len(failures), folder=self.folder, why=failures[0])
        return removed

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _files(self, suffix: str) -> Iterator[Path]:
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._warn(DamagedProfiles, error.strerror or type(error).__name__)
            return
        yield from (self.folder / name for name in names if name.endswith(suffix))

    def _load(self, path: Path) -> Profile | None:
        try:
            with open(path, "rb") as file:
                content = file.read(2 * _MOST_BYTES + 1)
            return _parse(path.stem, content)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            why = error.strerror or type(error).__name__
        except _Damaged as error:
            why = str(error)
        self._warn(DamagedProfiles, f"{path.name}: {why}")
        return None

    def _write(self, key: str, content: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process removed the folder
            return self._write_once(key, content)
        return self._write_once(key, content)

    def _write_once(self, key: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # No other user could read a file that tempfile creates.
        path = self.folder / f"{key}.{secrets.token_hex(8)}.tmp"
        try:
            with open(path, "xb") as file:
                file.write(content)
            os.replace(path, self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def _count(self, key: str) -> None:
        try:
            file = os.open(self._path(key), os.O_WRONLY | os.O_APPEND)
            try:
                if os.fstat(file).st_size < _MOST_BYTES:
                    os.write(file, b"\n")
            finally:
                os.close(file)
        except FileNotFoundError:
            pass  # removed since it was read
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return
            self._warn(ProfilesNotKept, error.strerror or type(error).__name__)

    def _warn(self, kind: type[PygraphWarning], why: str) -> None:
        mine = object()
        # setdefault is one operation, so only one of several threads warns; after a fork, a lock could be held by a
        # thread that is gone.
        if _warned.setdefault(kind, mine) is mine:
            warnings.warn(kind(folder=self.folder, why=why), stacklevel=3)


_warned: dict[type[PygraphWarning], object] = {}


class Kept:
    """The stored decision of one compiled graph: looked up before it is measured, and written afterwards."""

    def __init__(self, code: str, what: str, device: int, settings: Mapping[str, str]) -> None:
        """
        Args:
            code: the key of the graph's generated code.
            what: the graph's name for readers.
            settings: what else changes a call's cost, or the question.
        """
        self._code, self._what, self._device, self._settings = code, what, device, settings
        self._subject: Subject | None = None
        self._profiles: Profiles | None = None

    def find(self, inputs: Sequence[object]) -> Profile | None:
        """The profile of the graph for such inputs; None if there is none that is still valid."""
        try:
            self._profiles = Profiles.default()
        except NoCacheFolder as error:
            _log.info("%s", error)
            return None
        machine = Machine.current(self._device)
        self._subject = Subject(self._code, tuple(map(describe, inputs)), machine, self._settings)
        found = self._profiles.use(self._subject.key)
        return None if found is None or found.is_stale() else found

    def store(self, decision: Decision) -> None:
        """Stores a decision for the inputs of :meth:`find`; does nothing without these or without a folder."""
        if self._profiles is not None and self._subject is not None:
            self._profiles.store(self._subject, self._what, decision)


def _value(value: object) -> str:
    """Converts a value for which JSON has no type."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    raise TypeError(f"{type(value).__name__} has no place in a profile")


def _parse(key: str, content: bytes) -> Profile | None:
    """The profile in a file; None if its format is another version's."""
    if len(content) > 2 * _MOST_BYTES:
        raise _Damaged("it is too large")
    stripped = content.rstrip(b"\n")
    try:
        data = json.loads(stripped)
    except (ValueError, RecursionError):
        raise _Damaged("it is not JSON") from None
    if not isinstance(data, dict):
        raise _Damaged("it is not a JSON object")
    if _read(int, data.get("format"), "format") != FORMAT:
        return None
    profile: Profile = _read(Profile, {**data, "uses": len(content) - len(stripped)}, "profile")
    if profile.key != key:
        raise _Damaged("it is another function's")
    return profile


def _read(kind: Any, data: Any, name: str) -> Any:
    """Converts JSON to one of the record types; ignores unknown fields."""
    if is_dataclass(kind) and isinstance(data, dict):
        record: Any = kind
        types = typing.get_type_hints(kind)
        missing = [f.name for f in fields(kind) if f.name not in data]
        if missing:
            raise _Damaged(f"{name} has no {missing[0]}")
        return record(**{f.name: _read(types[f.name], data[f.name], f.name) for f in fields(kind)})
    if issubclass(kind, enum.Enum):
        members: list[enum.Enum] = [member for member in kind if member.value == data]
        if members:
            return members[0]
    if kind is str and isinstance(data, str) and data.isprintable():
        return data
    if kind is bool and isinstance(data, bool):
        return data
    if kind is int and type(data) is int and 0 <= data < _LIMIT:
        return data
    if kind is float and type(data) in (int, float) and (data >= 0 or name in _SIGNED) and abs(data) < _LIMIT:
        return float(data)
    raise _Damaged(f"{name} is no {kind.__name__}")
