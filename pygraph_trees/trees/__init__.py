"""The drop-in for torch's CUDA graph trees: subclasses of upstream's tree manager and recording.

README.md has a table of the files, and the design.
"""

from __future__ import annotations

from torch._inductor import compile_fx  # noqa: F401  applies the patches first: they import this package
