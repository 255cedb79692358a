"""The versions of the package, which is part of Inductor's cache keys while the patches are on, and of Triton."""

from __future__ import annotations

__version__ = "0.1.0"


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
