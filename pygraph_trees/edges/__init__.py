"""Edges of a captured graph: the order that its memory requires, in place of the captured chain.

:mod:`.operations` notes what a capture does, on the :mod:`.streams` of lanes if wanted, and :mod:`.accesses` makes
:mod:`.units` of it. :mod:`.order` finds which must keep their order, and :mod:`.lanes` orders each lane.
:mod:`.rewriting` puts the edges into the graph, or leaves the chain. A :mod:`.trial` compares both. README.md has the
rules.
"""

from __future__ import annotations

from torch._inductor import compile_fx  # noqa: F401  applies the patches first: they import this package
