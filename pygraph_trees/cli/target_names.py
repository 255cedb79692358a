"""The target of the command line if none is given. Separate from ``target``, which imports torch."""

from __future__ import annotations

DEFAULT = "pygraph_trees.cli.default_target:bert_reads_text"
