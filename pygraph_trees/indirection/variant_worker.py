"""Variants compiled by a process of its own, so that the program that will want them does not wait.

A variant's text is the same in every process, and so is its key in Triton's cache on disk: what :class:`Worker` has
compiled there, :func:`.variant_launchers.build` finds and only loads. The process gets each kernel's file as Inductor
wrote it, its name, the configuration that won and the parameters that are to be slots (:class:`Job`); it runs at
a low priority, with our patches off, and ends when it is done. There is one at a time.

What does not work, and why: a thread of the program's own. Triton's front end is Python, and holds the interpreter for
milliseconds at a time; each call of the program would wait for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import variant_launchers

_MOST_S = 600.0  # that it may take
_NICE = 10

_log = logging.getLogger("pygraph_trees.indirection")
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Job:
    path: str  # of the module that Inductor wrote
    kernel: str  # its name there
    config: Any  # as Triton has it
    names: frozenset[str]  # of the parameters


def job_of(autotuner: Any, names: frozenset[str]) -> Job | None:
    """What is to be compiled for a kernel; None where another process could not."""
    launcher = variant_launchers.sole_launcher(autotuner)
    path = getattr(autotuner, "filename", None)
    if launcher is None or path is None or not Path(path).is_file():
        return None
    return Job(path, variant_launchers.name_of(autotuner), launcher.config, names)


class Worker:
    """The process. :meth:`start` makes it; it is killed where nobody holds this any longer."""

    def __init__(self, process: subprocess.Popen[bytes], said: Any) -> None:
        self._process, self._said = process, said
        self._began = time.monotonic()
        self._end = weakref.finalize(self, _stop, process, said)

    @staticmethod
    def start(jobs: Sequence[Job]) -> Worker | None:
        """None while there is another one. Raises :class:`OSError`, and what pickling raises."""
        if not _one_at_a_time.acquire(blocking=False):
            return None
        said = None
        try:
            said = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process is done
            with tempfile.TemporaryFile() as asked:
                pickle.dump(list(jobs), asked)
                asked.seek(0)
                path = os.pathsep.join(filter(None, sys.path))
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=asked,
                    stdout=said,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYGRAPH_DISABLE": "1", "PYTHONPATH": path},
                )
        except BaseException:
            if said is not None:
                said.close()
            _one_at_a_time.release()
            raise
        return Worker(process, said)

    def done(self) -> set[int] | None:
        """The numbers of the jobs that were compiled; None where it is still at work."""
        if self._process.poll() is None and time.monotonic() - self._began < _MOST_S:
            return None
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        code = self._process.returncode
        if code != 0:
            how = "did not end in time" if code is None else f"ended with {code}"
            _log.warning("the process that compiles kernels which read addresses from a table %s", how)
        self._end()
        return {int(line) for line in lines if line.isdecimal()}


def _stop(process: subprocess.Popen[bytes], said: Any) -> None:
    try:
        if process.poll() is None:
            process.kill()
            process.wait()
        said.close()
    finally:
        _one_at_a_time.release()


def compile_jobs(jobs: Sequence[Job]) -> list[int]:
    """Compiles variants into Triton's cache; the numbers of those that could be."""
    compiled = []
    for number, job in enumerate(jobs):
        try:
            variant_launchers.compile_variant(_autotuner(job), job.config, job.names)
            compiled.append(number)
        except Exception as error:  # of Triton; there is none then
            _log.info("%s: %s", job.kernel, error)
    return compiled


def _autotuner(job: Job) -> Any:
    spec = importlib.util.spec_from_file_location(f"pygraph_trees_{Path(job.path).stem}", job.path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, job.kernel)


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    jobs = pickle.load(sys.stdin.buffer)
    for number in compile_jobs(jobs):
        print(number)


if __name__ == "__main__":
    main()
