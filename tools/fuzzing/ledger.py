"""What campaigns of random programs have found: ``ledger.json``, with an entry for each, and the table made of it.

``python tools/fuzzing/ledger.py`` prints the table, which is in CONTRIBUTING.md.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LEDGER = Path(__file__).with_name("ledger.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """One campaign, or several of the same code and day."""

    code: str  # a commit, or the first digits of the hash of the tested code
    torch: str
    gpus: str
    seeds: Sequence[int]
    programs: int
    everything: bool  # with what is off by default (everything.py)
    failures: Sequence[str] | None = ()  # seed, number and message of each that is not torch's; None: not noted
    counts: Mapping[str, int] = field(default_factory=dict)  # what else was counted
    date: str = field(default_factory=datetime.date.today().isoformat)


def read(path: Path = LEDGER) -> list[Entry]:
    return [Entry(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def add(entry: Entry, path: Path = LEDGER) -> None:
    entries = [*(read(path) if path.exists() else ()), entry]
    text = json.dumps([dataclasses.asdict(entry) for entry in entries], indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def table(entries: Sequence[Entry]) -> str:
    """In Markdown, by entry; below it stands the number of programs."""
    names = ("date", "code", "torch", "GPUs", "seeds", "programs", "failures")
    lines = [names, ("---",) * 5 + ("---:",) * 2]
    for e in entries:
        seeds, failures = ", ".join(map(str, e.seeds)), "-" if e.failures is None else f"{len(e.failures)}"
        programs = f"{'everything on: ' if e.everything else ''}{e.programs:,}"
        lines.append((e.date, e.code, e.torch, e.gpus, seeds, programs, failures))
    of_all = sum(entry.programs for entry in entries if entry.everything)
    total = f"{sum(e.programs for e in entries):,} programs, {of_all:,} of them with everything on."
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", total])


if __name__ == "__main__":
    print(table(read()))
