"""Shared by the scripts that measure one thing: their options, the check for a GPU, and the file of figures.

The file is JSON: the GPU's name (null for a trial on a CPU), the versions of torch and triton, the hash of the code,
the options of the measurement, and the results. Without a path, no file is written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.product import product_hash
from pygraph_trees.version import triton_version


def options_of(doc: str | None, names: Sequence[str], *, rounds: int, calls: int = 0) -> argparse.Namespace:
    """The options of a script that measures the programs in its arguments.

    Args:
        doc: the script's docstring; its first line is the description.
        names: the programs that are measured by default.
        rounds: rounds by default.
        calls: calls in a block by default; if 0, there is no such option.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(names), metavar="NAMES", help=f"default: {' '.join(names)}")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"({rounds})")
    if calls:
        parser.add_argument("--calls", type=int, default=calls, help=f"in a block ({calls})")
    parser.add_argument("--out", type=Path, help="file of the figures, .json")
    return parser.parse_args()


def has_gpu() -> bool:
    """Whether torch can use a GPU; prints a message if not."""
    if not torch.cuda.is_available():
        print("these figures need a GPU, and this machine has none that torch can use")
        return False
    return True


def write_figures(path: Path | None, results: list[Any], **how: Any) -> None:
    """Writes the file, if a path is given."""
    if path is not None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        versions = {"torch": torch.__version__, "triton": triton_version()}
        machine = {"gpu": gpu, **versions, "code_hash": product_hash()}
        path.write_text(json.dumps({**machine, **how, "results": results}, indent=1) + "\n", encoding="utf-8")
