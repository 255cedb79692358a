"""The outcome of a comparison: measurements, verdicts, and the report, as text, JSON with these keys, or a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pygraph_trees.errors import PygraphError
from pygraph_trees.report.page import page
from pygraph_trees.report.shown import Shown

from .measurement import PLAIN_NAMES, REGIMES, Measurement
from .page import sections
from .table import speedup, text_table

if TYPE_CHECKING:
    from pygraph_trees.report.summary import Report


class NeedsGpu(PygraphError):
    template = "compare needs a GPU, and torch finds none; {instead}"


@dataclass(frozen=True, slots=True)
class Outcome(Shown):
    """What a comparison found."""

    measurements: tuple[Measurement, ...]
    report: Report

    @property
    def failed(self) -> bool:
        """Whether a way raised, or its outputs differ from eager's."""
        return any(m.error for m in self.measurements)

    def to_text(self) -> str:
        """Tables, the verdicts, how far outputs are apart, and the report."""
        return "\n\n".join([text_table(self.measurements), "\n".join(self._lines()), str(self.report)])

    def _page(self) -> str:
        return page(
            self.report,
            sections(self.measurements),
            name=self.measurements[0].workload if self.measurements else "comparison",
            verdict=self._lines(),
            more={"measurements": [asdict(m) for m in self.measurements]},
        )

    def _lines(self) -> list[str]:
        return [*verdicts(self.measurements), agreement(self.measurements)]


def verdicts(measurements: Sequence[Measurement]) -> list[str]:
    """For each regime of inputs, how many times as fast ours is as the others: ``ours, same inputs: 2.07x over …``."""
    lines = []
    for regime in REGIMES:
        group = [m for m in measurements if m.regime == regime]
        for ours in (m for m in group if m.way.startswith("ours") and m.error is None):
            times = {other: speedup(ours, group, way) for way, other in PLAIN_NAMES.items()}
            found = ", ".join(f"{ratio:.2f}x over {other}" for other, ratio in times.items() if ratio is not None)
            if found:
                lines.append(f"{ours.way}, {regime} inputs: {found}")
    return lines


def agreement(measurements: Sequence[Measurement]) -> str:
    """One line on outputs: how far each way's are from eager's, and ours from upstream's."""
    parts = []
    for way in ("compile", "upstream", "ours"):
        found = [m.max_diff for m in measurements if m.way == way and m.max_diff is not None]
        if found:
            parts.append(f"{way} within {max(found):.2g}" if max(found) else f"{way} equal")
    apart = [m.max_diff_upstream for m in measurements if m.way == "ours" and m.max_diff_upstream is not None]
    ours = (
        "" if not apart else "; ours and upstream are " + ("bit-equal" if not any(apart) else f"{max(apart):.2g} apart")
    )
    return f"Outputs against eager: {', '.join(parts) or 'not compared'}{ours}."
