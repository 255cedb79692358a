"""The module in C++, ``_fast_path``: the fast path of a replay, and questions about many tensors.

It is imported from this package if a wheel brought it for the torch in use, and otherwise from the folder that
``python -m pygraph_trees build`` makes. Without it, replays take the slow path, and :func:`.build.why_missing` returns
the reason.
"""

from __future__ import annotations

from .location import build_folder, prebuilt, torch_version

FOLDER = build_folder(torch_version())
PREBUILT = prebuilt()
__path__[:0] = [str(folder) for folder in (PREBUILT, FOLDER) if folder is not None]
