"""Choices that Inductor takes by benchmark, carried from one way's caches to the next one's.

Each way compiles with empty caches, so that none profits from another's compilations. What one way found by timing
kernels would then be found again, with other noise, and two ways would differ by the kernels that they happened to
choose: by 6% of the latency of a 0.4 ms program, measured. So the choices alone are carried over: the first compiled
way tunes, and its compile time holds the tuning; the others start from what it chose.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# Beside each kernel its best configuration; in `cache/` what templates and padding of matrices were found to cost.
_CHOICES = ("*/*.best_config", "cache/**/*")


@contextlib.contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Inside, Inductor and Triton have caches of their own under ``folder``, empty but for the choices kept there."""
    from torch._inductor.utils import fresh_cache

    kept = folder / "choices"
    with fresh_cache(dir=str(folder), delete=False):
        own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        carry_choices(kept, own)
        yield
        carry_choices(own, kept)


def carry_choices(source: Path, target: Path) -> None:
    """Copies the choices of one Inductor cache to another."""
    for pattern in _CHOICES:
        for path in source.glob(pattern):
            if path.is_file():
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
