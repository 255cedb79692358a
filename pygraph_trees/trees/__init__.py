"""The drop-in for torch's CUDA graph trees: subclasses of upstream's tree manager and recording.

``entry_points`` passes functions to them, ``manager`` decides which recording a call replays, and ``recording`` makes
and replays recordings. README.md has the design.
"""

from __future__ import annotations

from torch._inductor import compile_fx  # noqa: F401  applies the patches first: they import this package
