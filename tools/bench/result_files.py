"""Files of measurements, with machine, versions and date.

A :class:`Results` converts to JSON and back without loss. Fields may be added, but never dropped. A malformed file
raises :class:`ResultsFormatError`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from pygraph_trees.benchmark import Measurement
from pygraph_trees.errors import PygraphError
from pygraph_trees.version import triton_version

_OF_ONE_CALL = frozenset({"timeline", "launches"})  # not in files


class ResultsFormatError(PygraphError):
    template = "{path} is no result file: expected {expected}"


def to_record(found: Measurement) -> dict[str, Any]:
    return {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.name not in _OF_ONE_CALL}


def from_record(record: Mapping[str, Any]) -> Measurement:
    """Reads a record; ignores fields that a later version may have added."""
    known = {f.name for f in dataclasses.fields(Measurement)}
    return Measurement(**{name: value for name, value in record.items() if name in known})


@dataclass(frozen=True, slots=True)
class Results:
    """A result file."""

    gpu: str
    driver: str
    torch: str
    triton: str
    python: str
    date: str
    code_hash: str
    rounds: int
    records: tuple[Measurement, ...] = ()

    def with_records(self, records: Sequence[Measurement]) -> Results:
        """The file with ``records`` in place of the old ones of their workloads; other records stay."""
        fresh = {record.workload for record in records}
        kept = [record for record in self.records if record.workload not in fresh]
        return dataclasses.replace(self, records=(*kept, *records))

    def finished(self, ways: Sequence[str] = ()) -> set[str]:
        """The workloads that are measured in all of these ways without a failed record."""
        failed = {record.workload for record in self.records if record.error is not None}
        measured = {(record.workload, record.way) for record in self.records}
        found = {record.workload for record in self.records} - failed
        return {workload for workload in found if all((workload, way) in measured for way in ways)}

    def differs_in(self, other: Results) -> list[str]:
        """The conditions in which another file's records were measured differently; empty if comparable."""
        conditions = (f.name for f in dataclasses.fields(self) if f.name not in ("date", "records"))
        return [name for name in conditions if getattr(self, name) != getattr(other, name)]

    def write(self, path: Path) -> None:
        """Writes the file as a whole or not at all."""
        body = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        body["records"] = [to_record(record) for record in self.records]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file that :meth:`write` wrote; raises :class:`ResultsFormatError` for anything else."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            records = tuple(from_record(record) for record in body.pop("records"))
            known = {f.name for f in dataclasses.fields(cls)}
            return cls(**{k: v for k, v in body.items() if k in known}, records=records)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsFormatError(path=path, expected=f"the JSON of a benchmark run ({error})") from error


def here(code_hash: str, rounds: int) -> Results:
    """An empty result file for this machine and time."""
    return Results(
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        driver=_driver(),
        torch=str(torch.__version__),
        triton=triton_version() or "none",
        python=platform.python_version(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        code_hash=code_hash,
        rounds=rounds,
    )


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else "unknown"


def file_stem(gpu: str, torch_version: str) -> str:
    """``h200-torch2.11`` for an "NVIDIA H200" and torch "2.11.0+cu130"."""
    words = [w for w in gpu.lower().replace("/", "-").split() if w not in ("nvidia", "tesla", "geforce")]
    return f"{'-'.join(words)}-torch{'.'.join(torch_version.split('+')[0].split('.')[:2])}"
