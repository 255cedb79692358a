"""Commands of this checkout: Python in a new process, or a command's main function in this one; a folder for files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest import mock

from torch.testing._internal.common_utils import TestCase

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``environment``: variables besides those of this process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300)


@contextlib.contextmanager
def forked(after: str | None) -> Iterator[None]:
    """In the lane, new Python processes begin with ``torch``, or also its ``compiler``, imported; see tools/forks."""
    folder = os.environ.get("LANE_FORKS")
    with mock.patch.object(sys, "executable", f"{folder}/{after}" if folder and after else sys.executable):
        yield


def run(main: Callable[[list[str]], Any], *arguments: str) -> tuple[Any, str, str]:
    """The exit status, and what is written to both streams."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(arguments))
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


def module_of(path: Path) -> Any:
    """A file as a module, wherever it is."""
    loader = SourceFileLoader(path.stem, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.stem, loader))
    sys.modules[path.stem] = module
    loader.exec_module(module)
    return module


def tool(name: str) -> Any:
    """A script of ``tools`` as a module."""
    return module_of(ROOT / "tools" / name)


class WithFolder(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
