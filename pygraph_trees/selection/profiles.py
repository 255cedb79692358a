"""Profiles on disk: what was decided of a function, kept for the next process.

A profile is a small JSON file in the folder ``pygraph_trees`` of Inductor's cache, named by its key: a hash over all
that the decision depends on (:class:`Subject`). Any number of processes and threads may use a folder at once:

- a file is written under another name and renamed, so that a reader sees all of it or none; the last writer wins;
- a use is counted by a newline appended to the file, which JSON does not mind. A count may be lost where the file is
  replaced just then; a decision is never overwritten with an older one for the sake of a count.

No failure of the disk is an error. A file that is damaged is no profile, and the function is measured again; a file in
a later version's format is no profile either. What cannot be read and what cannot be written gives one warning each in
a process, however many files and threads there are; but where nothing may be written, uses are not counted, and that is
all. A profile that is old is still good, and should be checked again (:meth:`Profile.is_stale`).
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import json
import logging
import os
import secrets
import time
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from pygraph_trees.cuda.driver import driver
from pygraph_trees.errors import PygraphError, PygraphWarning
from pygraph_trees.version import __version__

from .decision import Decision

_log = logging.getLogger("pygraph_trees.selection")

FORMAT = 1  # of the files; greater where an older version would misread one
STALE_AFTER_S = 30 * 86400.0
_LIMIT = 2**63  # of all numbers
_MOST_BYTES = 65536  # of a file; no use is counted beyond
_MOST_NAME = 200  # characters
_LEFT_BEHIND_S = 3600.0  # a file that is being written is never as old as this


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
    """Inductor has no folder for its cache."""

    template = "Inductor's cache, {folder}, cannot be made: {why}. TORCHINDUCTOR_CACHE_DIR names another folder for it."


class ProfilesNotRemoved(PygraphError):
    """Some profiles are still there after they should have been removed."""

    template = "{count} of the files in {folder} could not be removed: {why}"


class _Damaged(Exception):
    """A file's content is not a profile."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs the functions."""

    gpu: str
    driver: str  # the CUDA version that it supports, such as 13000
    torch: str
    triton: str
    package: str

    @staticmethod
    def current(device: int) -> Machine:
        """That of a CUDA device, by its index."""
        try:
            import triton

            triton_version = triton.__version__
        except ImportError:
            triton_version = "none"
        api = driver()
        version = "unknown" if api is None else str(api.version())
        return Machine(torch.cuda.get_device_name(device), version, str(torch.__version__), triton_version, __version__)


@dataclass(frozen=True, slots=True)
class Subject:
    """All that a decision depends on."""

    graph: str  # anything that tells one compiled function from others, such as Inductor's key and the partition
    inputs: tuple[str, ...]  # in order, as describe() has them
    machine: Machine
    settings: Mapping[str, str]  # what else changes a call's cost or the question: flags, the objective

    @property
    def key(self) -> str:
        """64 hexadecimal digits."""
        parts = [self.graph, list(self.inputs), asdict(self.machine), dict(self.settings)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def describe(value: object) -> str:
    """An input's dtype and shape, ``float32[8, 16]``; of what is no tensor its type, and its value if it is an int."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"int {value}" if type(value) is int else type(value).__name__


@dataclass(frozen=True, slots=True)
class Profile:
    key: str
    what: str  # the function, for people
    gpu: str
    decided_s: float  # since 1970
    decision: Decision
    uses: int = 0  # since it was decided, by those who did not decide it; at most 65536

    def age_s(self, now_s: float | None = None) -> float:
        return (time.time() if now_s is None else now_s) - self.decided_s

    def is_stale(self, now_s: float | None = None) -> bool:
        """Whether it should be measured again: it is 30 days old, or more than a day from the future."""
        return not -86400.0 <= self.age_s(now_s) <= STALE_AFTER_S


@dataclass(frozen=True, slots=True)
class Profiles:
    """The profiles in one folder, which need not exist."""

    folder: Path

    @staticmethod
    def default() -> Profiles:
        """Those beside Inductor's cache, as it is set now.

        Raises:
            NoCacheFolder: Inductor, which makes that folder where there is none, cannot.
        """
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        try:
            return Profiles(Path(cache_dir()) / "pygraph_trees")
        except OSError as error:
            raise NoCacheFolder(folder=error.filename, why=error.strerror) from error

    def use(self, key: str) -> Profile | None:
        """The profile of a key, which is counted as used; None where there is none."""
        found = self._load(self._path(key))
        if found is not None:
            self._count(key)
        return found

    def store(self, subject: Subject, what: str, decision: Decision, now_s: float | None = None) -> None:
        """Writes what was decided, in place of what there was."""
        decided_s = time.time() if now_s is None else now_s
        printable = "".join(c if c.isprintable() else "?" for c in what[:_MOST_NAME])
        profile = Profile(subject.key, printable, subject.machine.gpu, decided_s, decision)
        content = json.dumps({"format": FORMAT, **asdict(profile), "uses": 0}, default=_value).encode()
        try:
            self._write(profile.key, content)
        except OSError as error:
            self._warn(ProfilesNotKept, error.strerror or type(error).__name__)

    def list(self) -> tuple[Profile, ...]:
        """All that can be read, the newest first."""
        found = (self._load(path) for path in self._files(".json"))
        return tuple(sorted((p for p in found if p is not None), key=lambda p: (-p.decided_s, p.key)))

    def clear(self) -> int:
        """Removes all profiles, damaged ones too, and what writers that were killed have left; returns how many.

        What another process writes meanwhile may stay.

        Raises:
            ProfilesNotRemoved: some are still there; all others are gone.
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
        with contextlib.suppress(FileNotFoundError):  # the folder was removed meanwhile
            return self._write_once(key, content)
        return self._write_once(key, content)

    def _write_once(self, key: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Not by tempfile, whose files no other user may read.
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
        # One operation, so that of several threads one warns; a lock could be held by another thread in a fork.
        if _warned.setdefault(kind, mine) is mine:
            warnings.warn(kind(folder=self.folder, why=why), stacklevel=3)


_warned: dict[type[PygraphWarning], object] = {}


class Kept:
    """What is kept of one compiled graph: asked for before it is measured, and given what was decided."""

    def __init__(self, code: str, what: str, device: int, settings: Mapping[str, str]) -> None:
        """
        Args:
            code: the key of the graph's generated code.
            what: the graph, for people.
            settings: what else changes a call's cost, or the question.
        """
        self._code, self._what, self._device, self._settings = code, what, device, settings
        self._subject: Subject | None = None
        self._profiles: Profiles | None = None

    def find(self, inputs: Sequence[object]) -> Profile | None:
        """The profile of the graph called with such inputs; None where there is none that holds still."""
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
        """For the inputs that were asked for; nothing where that was not done, or where there is no folder."""
        if self._profiles is not None and self._subject is not None:
            self._profiles.store(self._subject, self._what, decision)


def _value(value: object) -> str:
    """What JSON has no word for."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    raise TypeError(f"{type(value).__name__} has no place in a profile")


def _parse(key: str, content: bytes) -> Profile | None:
    """The profile in a file, None where its format is a later one."""
    if len(content) > 2 * _MOST_BYTES:
        raise _Damaged("it is too large")
    stripped = content.rstrip(b"\n")
    try:
        data = json.loads(stripped)
    except (ValueError, RecursionError):
        raise _Damaged("it is not JSON") from None
    if not isinstance(data, dict):
        raise _Damaged("it is not a JSON object")
    if _read(int, data.get("format"), "format") > FORMAT:
        return None
    profile: Profile = _read(Profile, {**data, "uses": len(content) - len(stripped)}, "profile")
    if profile.key != key:
        raise _Damaged("it is another function's")
    return profile


def _read(kind: Any, data: Any, name: str) -> Any:
    """A value of one of the types that records here have, out of JSON; fields that are not known are left out."""
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
    if kind is int and type(data) is int and 0 <= data < _LIMIT:
        return data
    if kind is float and type(data) in (int, float) and 0 <= data < _LIMIT:
        return float(data)
    raise _Damaged(f"{name} is no {kind.__name__}")
