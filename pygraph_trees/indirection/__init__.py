"""Indirection: a replay is given the addresses of its live inputs; their data is not copied.

A function is recorded with its live inputs at placeholder addresses, where nothing else ever is. Any word of the
captured graph that points into a placeholder is therefore a relocation. Each input is given to replays by address,
through a table, or by copy, with the reason for each copy. README.md says how, and lists the files.
"""

from __future__ import annotations

from torch._inductor import compile_fx  # noqa: F401  applies the patches first: they import this package
