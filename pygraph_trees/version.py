"""The versions of the package and of Triton, and the hash of the code that shapes artifacts in Inductor's caches.

The version is part of Inductor's cache keys while the patches are on. :func:`artifact_hash` covers the bytes of
:data:`ARTIFACT_CODE`, once per process. A file that cannot be read raises :class:`OSError`.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__version__ = "0.1.0"
_ROOT = Path(__file__).resolve().parent.parent
# The code that rewrites a graph, decides how it is partitioned, or describes it on its artifact; a folder stands for
# all its modules.
ARTIFACT_CODE = (
    "inductor_patches",
    "pygraph_trees/compat.py",
    "pygraph_trees/report/calls.py",
    "pygraph_trees/report/compiled.py",
    "pygraph_trees/report/log.py",
    "pygraph_trees/report/naming.py",
    "pygraph_trees/report/partitions.py",
    "pygraph_trees/report/records.py",
    "pygraph_trees/errors.py",
    "pygraph_trees/cuda/extent.py",
    "pygraph_trees/cuda/host_reads.py",
    "pygraph_trees/edges/buffers.py",
    "pygraph_trees/placement",
    "pygraph_trees/reasons.py",
    "pygraph_trees/settings.py",
    "pygraph_trees/trees/hooks/compiling.py",
    "pygraph_trees/trees/hooks/saved_tensors.py",
    "pygraph_trees/version.py",
)


class ArtifactVersion(str):
    """The version in Inductor's configuration. A process that unpickles the configuration thereby gets the patches."""

    __slots__ = ()


def triton_version() -> str | None:
    """The version of the installed Triton; None without one."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


@functools.cache
def artifact_hash(root: Path = _ROOT) -> str:
    """The SHA-256 of the files in :data:`ARTIFACT_CODE`, 64 hexadecimal digits; ``root`` holds both packages."""
    digest = hashlib.sha256()
    for path in artifact_files(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def artifact_files(root: Path = _ROOT) -> list[Path]:
    """The files that :func:`artifact_hash` covers, in hashing order."""
    named = (root / part for part in ARTIFACT_CODE)
    return sorted(file for path in named for file in ([path] if path.suffix == ".py" else path.rglob("*.py")))
