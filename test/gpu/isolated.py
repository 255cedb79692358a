"""Runs a program in another process, for failures that a process does not survive: lost contexts, exhausted memory.

``run_isolated`` names the program by module and function, so that the child can import it, and returns the child's
findings as plain data. The child takes only the environment and the import path from its parent.

    {"facts": {path: leaf}, "errors": [[type, message]], "lost": [type, message] or None}
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from parity import OURS, UPSTREAM, Context, ParityError, run_side
from transcript import ErrorNote, Transcript

HERE = Path(__file__).resolve().parent
# Children are forks of one process that has imported this module and has not used the GPU.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["isolated"])
_starting = threading.Lock()
_ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with it, asking for GPUs does not start CUDA, which cannot be forked


def run_isolated(module: str, program: str, side: str, *, timeout_s: float = 240, **options: Any) -> dict[str, Any]:
    """The findings of ``program`` of ``module`` on one side in a new process; options are those of ``run_side``."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        request = json.dumps([module, program, side, options, str(result)])
        with _starting:  # the environment is that of the process
            child = _SERVER.Process(target=_child, args=(request, str(log), dict(os.environ)))
            with _variables():
                child.start()
        child.join(timeout_s)
        if child.is_alive():
            child.kill()
            child.join()
            raise ParityError(f"{side}: no end after {timeout_s:g} s:\n{log.read_text()[-4000:]}")
        if not result.exists():
            raise ParityError(f"{side}: the process ended with {child.exitcode}:\n{log.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer


@contextmanager
def _variables() -> Iterator[None]:
    """Sets the environment in which the server starts, with the first child."""
    before = {name: os.environ.get(name) for name in (_ASKS_NVML, "PYTHONPATH")}
    paths = [str(HERE), str(HERE.parents[1]), *(path for path in sys.path if path)]
    os.environ |= {_ASKS_NVML: "1", "PYTHONPATH": os.pathsep.join(paths)}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _child(request: str, log: str, environment: dict[str, str]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(environment)
    answer(request)


def compare_isolated(module: str, program: str, **options: Any) -> dict[str, Any]:
    """Our side's findings, after checking that upstream's are equal; the two processes run in parallel."""
    with ThreadPoolExecutor(2) as pool:
        children = [pool.submit(run_isolated, module, program, side, **options) for side in (UPSTREAM, OURS)]
        upstream, ours = (child.result() for child in children)
    found = [
        f"{path}: {upstream['facts'].get(path)} in upstream, {ours['facts'].get(path)} in ours"
        for path in sorted({*upstream["facts"], *ours["facts"]})
        if upstream["facts"].get(path) != ours["facts"].get(path)
    ]
    if upstream["lost"] != ours["lost"]:
        found.append(f"end of the process: {upstream['lost']} in upstream, {ours['lost']} in ours")
    if found:
        raise ParityError(f"{len(found)} differences\n" + "\n".join(found[:25]))
    return ours


def answer(request: str) -> None:
    """Runs in the child: runs the program that ``request`` names, and writes the result to the file that it names."""
    module, name, side, options, path = json.loads(request)
    program = getattr(importlib.import_module(module), name)

    def guarded(ctx: Context) -> None:
        crash = None
        try:
            program(ctx)
        except Exception as error:
            crash = ErrorNote.of(error)
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            # The context is lost. The device cannot be read any more, and an orderly exit would use it.
            ctx.transcript.crash = crash
            _leave(path, ctx.transcript, ErrorNote.of(error))
            os._exit(0)
        if crash is not None:
            ctx.fact("crash", crash)
        # A failed capture may keep the process from ending normally; its findings so far still count.
        _leave(path, ctx.transcript, None)

    _leave(path, run_side(guarded, side, **options), None)


def _leave(path: str, transcript: Transcript, lost: ErrorNote | None) -> None:
    errors = [error for error in [*transcript.errors, transcript.crash] if error is not None]
    content = {
        "facts": transcript.as_json(),
        "errors": [[error.type, error.message] for error in errors],
        "lost": None if lost is None else [lost.type, lost.message],
    }
    Path(path).write_text(json.dumps(content))
