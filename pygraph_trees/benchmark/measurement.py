"""The figures of one way of running a program in one regime of inputs.

Times are medians over rounds. A failed measurement has ``error`` set and no figures; an unavailable figure is None. The
compile time belongs to the way and appears in both regimes. Fields may be added, but never dropped: files have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .trace import Span

REGIMES = ("same", "fresh")
PLAIN_NAMES = {"upstream": "reduce-overhead", "compile": "torch.compile", "eager": "eager"}  # of ways, for readers


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one way in one regime."""

    workload: str
    mode: str  # "inference" or "training"
    batch: int
    way: str
    regime: str  # "same" tensors each call, or tensors at "fresh" addresses
    latency_ms: float | None = None  # of a call, waiting for the GPU
    latency_p90_ms: float | None = None
    throughput_ms: float | None = None  # milliseconds per call without waiting between calls
    host_us: float | None = None  # until a call returns, with the GPU idle before it
    gpu_ms: float | None = None  # GPU time inside graphs in one call
    copied_bytes: int | None = None  # inputs copied into recordings in one call
    kernels_graphed: int | None = None
    kernels_total: int | None = None
    recordings: int | None = None
    compile_s: float | None = None  # the first call
    record_s: float | None = None  # extra time of the calls before the steady state
    peak_bytes: int | None = None  # of one call: parameters, inputs, temporaries, and the reserved graph pool
    max_diff: float | None = None  # largest absolute difference of outputs from eager
    error: str | None = None
    max_diff_upstream: float | None = None
    pool_bytes: int | None = None  # reserved by the graph pools of this way
    gpu_total_ms: float | None = None  # GPU time in one call, inside and outside of graphs
    ring: int | None = None  # sets of inputs used in turn
    calls: int | None = None  # calls of each protocol in one round
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by figure: of all rounds; it is their median
    routes: Sequence[str] = field(default_factory=list)  # how a function's inputs are given and why, if that was chosen
    timeline: tuple[Span, ...] = ()  # of one call
    launches: tuple[str, ...] = ()  # of that call: the recording of each graph launch, if known

    def failed(self, error: str) -> Measurement:
        """The same measurement without figures, for the given reason."""
        which = self.workload, self.mode, self.batch, self.way, self.regime
        return Measurement(*which, error=error, samples=self.samples)
