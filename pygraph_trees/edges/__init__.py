"""Edges of a captured graph: the order that its memory requires, in place of the captured chain.

:mod:`.units` describes what a graph's operations access, :mod:`.conflicts` finds which must keep their order,
:mod:`.lanes` spreads them over lanes, :mod:`.order` reduces the order to edges, and :mod:`.rewriting` puts these into
the graph, or leaves the chain. README.md has the rules.
"""
