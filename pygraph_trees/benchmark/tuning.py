"""Carries choices that Inductor makes by benchmark from one way's caches to the next.

Each way compiles with empty caches, so none profits from another's compilations. The choices alone are copied:
otherwise ways would differ by the kernels that they happened to choose. The first way tunes, and its compile time
includes that; the others start from its choices. README.md gives the measured effect.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# The best configuration is next to each kernel; `cache/` has the measured costs of templates and padding of matrices.
_CHOICES = ("*/*.best_config", "cache/**/*")


@contextlib.contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Inside, Inductor and Triton have caches of their own under ``folder``, empty except for its choices."""
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
