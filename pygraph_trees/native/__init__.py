"""The modules in C++: the fast path of a replay, questions about many tensors, and the reader of graph nodes.

``_fast_path`` and ``_graph_nodes`` are imported from this package if a wheel brought them for the torch in use, and
otherwise from the folder that ``python -m pygraph_trees build`` makes. If they are missing, Python does the same, more
slowly, and :func:`.build.why_missing` returns the reason.
"""

from __future__ import annotations

from .location import build_folder, prebuilt, torch_version

FOLDER = build_folder(torch_version())
PREBUILT = prebuilt()
__path__[:0] = [str(folder) for folder in (PREBUILT, FOLDER) if folder is not None]
