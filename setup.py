"""Packaging, besides pyproject.toml: a distribution with built modules is for one Python and one platform."""

from __future__ import annotations

from pathlib import Path

from setuptools import Distribution, setup

PREBUILT = Path(__file__).resolve().parent / "pygraph_trees" / "native" / "prebuilt"  # made by tools/wheels


class PygraphDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return any(PREBUILT.glob("*/*.so")) or super().has_ext_modules()


setup(distclass=PygraphDistribution)
