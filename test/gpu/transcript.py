"""The findings of one run of a program, in a form in which two runs can be compared.

A :class:`Transcript` holds noted values (tensors as bytes on the host), errors, counters, warnings, log lines,
recordings, memory and the state of the random generators. ``differences`` returns one line for each difference between
two of them. A transcript keeps no device memory alive. Text is normalised, since addresses, numbers of pools and
processes, cache paths and frames of libraries vary between runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._logging._internal

# Frames of user code stay, to check that an error names the right line of the program.
_USER_CODE = re.compile(r"/test/(gpu|cpu)/[^/]*$")
_FRAME = re.compile(r'^\s*File "(?P<path>[^"]*)", line \d+, in ')
_NORMAL_FORMS = (
    (re.compile(r"0x[0-9a-fA-F]+"), "<address>"),
    (re.compile(r"\b\d{11,}\b"), "<address>"),
    (re.compile(r"pool \(\d+, \d+\)"), "pool <id>"),
    (re.compile(r"[Pp]rocess \d+"), "process <pid>"),
    (re.compile(r"\d+(\.\d+)? (bytes|[KMGT]iB)"), "<bytes>"),
    (re.compile(r"([Pp]rocess <pid> has <bytes> memory in use\. )+"), ""),  # other processes that use the GPU
    (re.compile(r"\S*torchinductor_[^\s\"']*"), "<cache>"),
    (re.compile(r"File \"[^\"]*/(test/[^\"]*)\""), r'File "\1"'),
)

# These counts depend on earlier compilations of the process, not on the run.
_PROCESS_CACHES = re.compile(r"fxgraph_|generated_module_cache|async_compile_cache|triton_bundler|autotune_cache")

# Python's own notices come once per process, or depend on the order of imports, not on the program.
_NOT_COMPARED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning, SyntaxWarning)


def normalise(text: str) -> str:
    """Returns ``text`` without the parts that differ between two runs of the same program."""
    kept: list[str] = []
    in_library = False
    for line in text.split("\n"):
        frame = _FRAME.match(line)
        if frame is not None:
            in_library = not _USER_CODE.search(frame["path"])
        elif not line.startswith("    "):  # a frame's source follows it, indented further
            in_library = False
        if not in_library:
            kept.append(line)
    text = "\n".join(kept)
    for pattern, form in _NORMAL_FORMS:
        text = pattern.sub(form, text)
    return text


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in logical order, equal only for tensors that are equal bit for bit."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@dataclasses.dataclass(frozen=True)
class TensorNote:
    """A snapshot of a tensor; the ``facts`` are compared, among them a hash of the elements' bytes."""

    value: torch.Tensor  # on the host
    facts: dict[str, Any]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorNote:
        facts: dict[str, Any] = {name: getattr(tensor, name) for name in ("dtype", "shape", "requires_grad")}
        facts |= {"stride": tensor.stride(), "storage_offset": tensor.storage_offset(), "device": tensor.device.type}
        facts |= {"grad_fn": type(tensor.grad_fn).__name__, "bits": hashlib.sha256(bits(tensor)).hexdigest()[:16]}
        return cls(tensor.detach().cpu().clone(), facts)


@dataclasses.dataclass(frozen=True)
class ErrorNote:
    """An exception's class and normalised message, and those of its causes."""

    type: str
    message: str
    cause: ErrorNote | None

    @classmethod
    def of(cls, error: BaseException) -> ErrorNote:
        cause = error.__cause__
        return cls(
            type=f"{type(error).__module__}.{type(error).__qualname__}",
            message=normalise(str(error)),
            cause=None if cause is None else cls.of(cause),
        )


@dataclasses.dataclass(frozen=True)
class Note:
    label: str
    value: Any
    oracle: bool  # whether the eager run must have noted the same


@dataclasses.dataclass
class Transcript:
    """All findings of one run of a program. ``crash`` is the exception that left the program, if any."""

    side: str
    notes: list[Note] = dataclasses.field(default_factory=list)
    trees: dict[str, Any] = dataclasses.field(default_factory=dict)  # recordings by label
    counters: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    warnings: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    logs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    random: dict[str, str] = dataclasses.field(default_factory=dict)
    allocated_bytes: int | None = None  # device memory that the program's compiled functions hold at its end
    crash: ErrorNote | None = None
    traceback: str = ""  # of the crash; for people, not compared

    @property
    def errors(self) -> list[ErrorNote]:
        return [note.value for note in self.notes if isinstance(note.value, ErrorNote)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [
            leaf.value for note in self.notes for _, leaf in _leaves("", note.value) if isinstance(leaf, TensorNote)
        ]

    @property
    def tree(self) -> Any:
        """The recordings at the end of the program."""
        return self.trees.get("end")

    def counter(self, name: str) -> int:
        """One of Inductor's counters."""
        return self.counters.get("inductor", {}).get(name, 0)

    def noted(self, label: str) -> Any:
        """The value noted under ``label``."""
        return next(note.value for note in self.notes if note.label == label)

    def as_json(self) -> dict[str, Any]:
        """The compared facts as plain data, with an entry for each leaf, for a run in another process."""
        return {path: leaf if isinstance(leaf, (int, float, str, bool)) else repr(leaf) for path, leaf in self.facts()}

    def facts(self) -> Iterator[tuple[str, Any]]:
        """Every compared fact as (path, leaf)."""
        for index, note in enumerate(self.notes):
            yield from _leaves(f"note {index} ({note.label})", note.value)
        for index, (label, tree) in enumerate(self.trees.items()):
            yield from _leaves(f"recordings {index} ({label})", tree)
        for group, values in self.counters.items():
            yield from _leaves(f"counters[{group!r}]", values)
        yield from _leaves("warnings", self.warnings)
        yield from _leaves("log", self.logs)
        yield from _leaves("random", self.random)
        yield from _leaves("allocated bytes", self.allocated_bytes)
        yield from _leaves("crash", self.crash)


def note_of(value: Any) -> Any:
    """A form of ``value`` for keeping and comparing: tensors and errors as notes, containers member by member."""
    if isinstance(value, torch.Tensor):
        return TensorNote.of(value)
    if isinstance(value, BaseException):
        return ErrorNote.of(value)
    if isinstance(value, dict):
        return {str(key): note_of(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(note_of(member) for member in value)
    if value is None or isinstance(value, (bool, int, float, str, TensorNote, ErrorNote)):
        return normalise(value) if isinstance(value, str) else value
    if dataclasses.is_dataclass(value):
        return value
    return normalise(repr(value))


def comparable_counters(counters: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Torch's counters by group, without our groups."""
    result: dict[str, dict[str, int]] = {}
    for group, values in sorted(counters.items()):
        for key, count in values.items():
            if not group.startswith("pygraph") and not _PROCESS_CACHES.search(str(key)):
                kept, name = result.setdefault(group, {}), normalise(str(key))
                kept[name] = kept.get(name, 0) + count
    return result


def comparable_warnings(caught: Sequence[warnings.WarningMessage]) -> list[tuple[str, str]]:
    return [
        (entry.category.__name__, normalise(str(entry.message)))
        for entry in caught
        if not issubclass(entry.category, _NOT_COMPARED)
    ]


class LogLines(logging.Handler):
    """Warnings and errors of our loggers and of graph capture, except on missing native parts, logged only once."""

    _COMPARED = re.compile(r"cudagraph|pygraph(?!_trees\.native)|inductor_patches")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[str, str]] = []
        self._seen: dict[int, logging.LogRecord] = {}  # holds the records, so that no two have the same id
        # Torch's registered loggers do not pass their records on to parents.
        registered = torch._logging._internal.log_registry.get_log_qnames()
        self._watched = sorted({"", "pygraph_trees", "inductor_patches", *registered})

    def emit(self, record: logging.LogRecord) -> None:
        # A record reaches this handler once for each watched logger on its way up.
        if id(record) not in self._seen and self._COMPARED.search(record.name):
            self._seen[id(record)] = record
            self.lines.append((record.levelname, normalise(record.getMessage())))

    def __enter__(self) -> LogLines:
        for name in self._watched:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._watched:
            logging.getLogger(name).removeHandler(self)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, TensorNote) or value is None or isinstance(value, (bool, int, float, str)):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, dict):
        yield f"{path}: number of entries", len(value)
        for key, member in value.items():
            yield from _leaves(f"{path}[{key!r}]", member)
    elif isinstance(value, (list, tuple)):
        yield f"{path}: length", len(value)
        for index, member in enumerate(value):
            yield from _leaves(f"{path}[{index}]", member)
    else:
        yield path, repr(value)


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, TensorNote) and isinstance(actual, TensorNote):
        return expected.facts == actual.facts
    return type(expected) is type(actual) and bool(expected == actual)


def _describe(leaf: Any) -> str:
    text = (
        repr(dataclasses.replace(leaf, value=leaf.value.flatten()[:4])) if isinstance(leaf, TensorNote) else repr(leaf)
    )
    return text if len(text) < 600 else f"{text[:600]}…"


def differences(expected: Transcript, actual: Transcript) -> list[str]:
    """One line for each fact in which the two runs differ."""
    ours, theirs = dict(actual.facts()), dict(expected.facts())
    lines = [
        f"{path}: {_describe(leaf)} in {expected.side}, {_describe(ours[path])} in {actual.side}"
        for path, leaf in theirs.items()
        if path in ours and not _same(leaf, ours[path])
    ]
    lines += [f"{path}: {_describe(leaf)} only in {expected.side}" for path, leaf in theirs.items() if path not in ours]
    lines += [f"{path}: {_describe(leaf)} only in {actual.side}" for path, leaf in ours.items() if path not in theirs]
    return lines


def oracle_differences(eager: Transcript, compiled: Transcript, **tolerance: float) -> list[str]:
    """One line for each note that differs from the eager run by more than a compiler's usual tolerance."""
    expected = [note for note in eager.notes if note.oracle]
    actual = [note for note in compiled.notes if note.oracle]
    if len(expected) != len(actual):
        return [f"{len(expected)} notes in eager, {len(actual)} in {compiled.side}"]
    lines: list[str] = []
    for want, got in zip(expected, actual, strict=True):
        wanted, gotten = list(_leaves("", want.value)), list(_leaves("", got.value))
        if [path for path, _ in wanted] != [path for path, _ in gotten]:
            lines.append(f"{got.label}: {_describe(want.value)} in eager, {_describe(got.value)} in {compiled.side}")
            continue
        for (path, left), (_, right) in zip(wanted, gotten, strict=True):
            if isinstance(left, TensorNote) and isinstance(right, TensorNote):
                try:
                    torch.testing.assert_close(right.value, left.value, equal_nan=True, **tolerance)
                except AssertionError as error:
                    lines.append(f"{got.label}{path}: not as in eager: {error}")
            elif not _same(left, right):
                lines.append(f"{got.label}{path}: {_describe(left)} in eager, {_describe(right)} in {compiled.side}")
    return lines
