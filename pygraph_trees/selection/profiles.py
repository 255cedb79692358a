"""Keeps decisions on disk for later processes, which may share the folder.

A profile is a JSON file in the folder ``pygraph_trees`` of Inductor's cache, named by a hash over all that the decision
depends on. No failure of the disk is an error: each reason gives one warning in a process.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import json
import logging
import math
import os
import platform
import re
import secrets
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pygraph_trees.errors import PygraphError, PygraphWarning
from pygraph_trees.version import __version__, triton_version

from .decision import Execution

_log = logging.getLogger("pygraph_trees.selection")

FORMAT = 5  # of the files; raised if another version would misread one
STALE_AFTER_S = 30 * 86400.0
_MOST_NAME = 200  # characters
_LEFT_BEHIND_S = 3600.0  # a file that is being written is never this old
_warned: set[tuple[Path, str]] = set()  # in this process


class ProfilesUnusable(PygraphWarning):
    template = (
        "pygraph_trees: profiles in {folder} cannot all be used ({why}), so other processes may measure again. "
        "`python -m pygraph_trees profiles --clear` removes them; TORCHINDUCTOR_CACHE_DIR names another folder."
    )


class NoCacheFolder(PygraphError):
    template = "Inductor's cache, {folder}, cannot be made: {why}. TORCHINDUCTOR_CACHE_DIR names another folder for it."


class ProfilesNotRemoved(PygraphError):
    template = "profiles in {folder} could not be removed: {why}"


def machine(device: int) -> dict[str, str]:
    """The hardware and software that run the functions of the CUDA device with this index."""
    import torch

    from pygraph_trees.cuda.driver import driver

    api = driver()
    return {
        "gpu": torch.cuda.get_device_name(device),
        "cpu": _cpu(),
        "driver": "unknown" if api is None else str(api.version()),  # the CUDA version that it supports
        "torch": str(torch.__version__),
        "triton": triton_version() or "none",
        "package": __version__,
    }


def modes() -> list[object]:
    """Torch's settings that decide which kernels libraries choose; generated code does not show them."""
    import torch

    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by both of torch's ways
        precision = "mixed"
    return [precision, torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]


@functools.cache
def _cpu() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def _inductors_folder() -> str:
    if (folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) is not None:
        return os.path.abspath(folder)
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _describe(value: object) -> str:
    """An input's dtype and shape; otherwise its type, and its value if it is an int."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {value if type(value) is int else ''}"


@dataclass(frozen=True, slots=True)
class Profile:
    """A decision; the fields are those of its file."""

    key: str  # 64 hexadecimal digits, also the file's name
    what: str  # the function's name for readers
    way: Execution
    text: str  # the decision in numbers
    decided_s: float  # seconds since 1970
    lanes: int = 1  # of its recordings; 0 if it was decided that their operations run one after another

    @property
    def age_s(self) -> float:
        return time.time() - self.decided_s

    @property
    def is_stale(self) -> bool:
        """Whether the function should be measured again: the profile is 30 days old, or over a day in the future."""
        return not -86400.0 <= self.age_s <= STALE_AFTER_S


@dataclass(frozen=True, slots=True)
class Profiles:
    """The profiles in one folder, which need not exist."""

    folder: Path

    @staticmethod
    def default() -> Profiles:
        """The profiles next to Inductor's cache; imports no torch. Raises NoCacheFolder if that cannot be made."""
        inductors = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
        try:
            folder = _inductors_folder() if inductors is None else inductors.cache_dir()
        except OSError as error:
            raise NoCacheFolder(folder=error.filename, why=error.strerror) from error
        return Profiles(Path(folder) / "pygraph_trees")

    def find(self, key: str) -> Profile | None:
        """The profile for a key; None if there is none, or one in another version's format."""
        why = "a file is no profile"
        try:
            data = json.loads((self.folder / f"{key}.json").read_bytes())
            if data["format"] != FORMAT:
                return None
            facts = data["key"], data["what"], Execution(data["way"]), data["text"], float(data["decided_s"])
            found = Profile(*facts, data["lanes"])
            is_whole = (found.what + found.text).isprintable() and math.isfinite(found.decided_s)
            if found.key == key and is_whole and found.lanes in range(5):
                return found
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            why = error.strerror or type(error).__name__
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
            pass
        self._warn(why)
        return None

    def store(self, profile: Profile) -> None:
        """Writes a profile, which replaces an earlier one with its key."""
        # No other user could read a file that tempfile creates.
        path = self.folder / f"{profile.key}.{secrets.token_hex(8)}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="ascii") as file:
                json.dump({"format": FORMAT, **asdict(profile), "way": profile.way.value}, file)
            os.replace(path, self.folder / f"{profile.key}.json")
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            self._warn(error.strerror or type(error).__name__)

    def list(self) -> tuple[Profile, ...]:
        """All readable profiles, the newest first."""
        found = [profile for path in self.folder.glob("*.json") if (profile := self.find(path.stem)) is not None]
        return tuple(sorted(found, key=lambda profile: (-profile.decided_s, profile.key)))

    def clear(self) -> int:
        """Removes all profiles and what killed writers left; returns how many. Raises at the first that stays."""
        before, removed = time.time() - _LEFT_BEHIND_S, 0
        for path in (*self.folder.glob("*.json"), *self.folder.glob("*.tmp")):
            try:
                if path.suffix == ".json" or path.lstat().st_mtime < before:
                    path.unlink()
                    removed += path.suffix == ".json"
            except FileNotFoundError:
                pass  # another process removed it, or renamed it
            except OSError as error:
                raise ProfilesNotRemoved(folder=self.folder, why=error.strerror or type(error).__name__) from error
        return removed

    def _warn(self, why: str) -> None:
        """Gives each reason once, even if warnings are errors."""
        if (self.folder, why) not in _warned:
            _warned.add((self.folder, why))
            warnings.warn(ProfilesUnusable(folder=self.folder, why=why), stacklevel=3)


@dataclass(slots=True)
class Kept:
    """The stored decision of one compiled graph: looked up before it is measured, and written afterwards."""

    code: str  # the key of the graph's generated code
    what: str  # the graph's name for readers
    device: int
    settings: Mapping[str, object]  # other settings that a decision depends on
    _profiles: Profiles | None = None
    _key: str = ""  # of the last lookup

    def find(self, inputs: Sequence[object]) -> Profile | None:
        """The profile of the graph for such inputs on this machine; None if there is none that is still valid."""
        try:
            self._profiles = Profiles.default()
        except NoCacheFolder as error:
            _log.info("%s", error)
            return None
        subject = [self.code, [_describe(value) for value in inputs], machine(self.device), modes(), self.settings]
        self._key = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
        found = self._profiles.find(self._key)
        return None if found is None or found.is_stale else found

    def store(self, way: Execution, text: str, lanes: int = 1) -> None:
        """Stores a decision for the inputs of :meth:`find`; does nothing without these or without a folder."""
        if self._profiles is not None:
            what = "".join(c if c.isprintable() else "?" for c in self.what[:_MOST_NAME])
            self._profiles.store(Profile(self._key, what, way, text, time.time(), lanes))
