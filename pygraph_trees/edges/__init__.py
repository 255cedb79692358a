"""Edges of a captured graph: the order that its memory requires, in place of the captured chain.

README.md has a table of the files, and the rules.
"""

from __future__ import annotations

from torch._inductor import compile_fx  # noqa: F401  applies the patches first: they import this package
