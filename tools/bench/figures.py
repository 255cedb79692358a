"""Shared by the scripts: names on the command line, the check for a GPU, and the file of figures.

The file is JSON: the GPU's name (null for a trial on a CPU), the versions of torch and triton, the hash of the code,
the options of the measurement, and the results. Without a path, no file is written.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from tested_code import PRODUCT, code_hash

from pygraph_trees.version import triton_version


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """A type for argparse: one of these names."""

    def chosen(name: str) -> str:
        if name in known:
            return name
        by_case = {one.casefold(): one for one in known}
        near = [f"; did you mean {by_case[one]}?" for one in difflib.get_close_matches(name.casefold(), by_case, n=1)]
        raise argparse.ArgumentTypeError(f"there is no {name!r}, only {', '.join(known)}{''.join(near)}")

    return chosen


def several_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of these names, separated by commas."""
    return lambda text: list(map(one_of(known), text.split(",")))


def has_gpu() -> bool:
    """Whether torch can use a GPU; prints a message if not."""
    if not torch.cuda.is_available():
        print("these figures need a GPU, and this machine has none that torch can use", file=sys.stderr)
        return False
    return True


@functools.cache
def product_hash() -> str:
    """The hash of both packages without the tests, whose changes do not outdate results: 64 hexadecimal digits."""
    return code_hash(folders=PRODUCT)


def write_figures(path: Path | None, results: list[Any], **how: Any) -> None:
    """Writes the file, if a path is given."""
    if path is not None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        versions = {"torch": torch.__version__, "triton": triton_version()}
        machine = {"gpu": gpu, **versions, "code_hash": product_hash()}
        path.write_text(json.dumps({**machine, **how, "results": results}, indent=1) + "\n", encoding="utf-8")
