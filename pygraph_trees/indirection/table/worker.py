"""Another process compiles the variants and writers for a table, so that the program does not wait.

:func:`job_of` makes the :class:`Job` for a kernel's variant; a :class:`WriterJob` is for a writer. A :class:`Worker`
compiles such jobs into Triton's cache on disk, from which the program loads. If its process fails or hangs, one warning
says so, and the kernels that it had compiled by then count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import variant_launchers
from .pointer_table import compile_writer

_MOST_S = 600.0  # time limit of the process
_NICE = 10
_COMMAND = f"import sys; sys.path[:] = filter(None, sys.path); from {__name__} import main; main()"

_log = logging.getLogger("pygraph_trees.indirection")

_newest: weakref.ref[Worker] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel's variant."""

    path: str  # of the module that Inductor wrote
    kernel: str  # name in that module
    config: Any  # a Triton configuration
    names: frozenset[str]  # of the parameters

    def compile(self) -> None:
        module = runpy.run_path(self.path, run_name=f"pygraph_trees_{Path(self.path).stem}")
        variant_launchers.compile_variant(module[self.kernel], self.config, self.names)


@dataclass(frozen=True, slots=True)
class WriterJob:
    """A table's writer."""

    width: int  # slots
    target: Any  # a Triton target

    def compile(self) -> None:
        compile_writer(self.width, self.target)


def job_of(autotuner: Any, names: frozenset[str]) -> Job | None:
    """The job for a kernel; None if another process could not compile it."""
    launcher = variant_launchers.sole_launcher(autotuner)
    path = getattr(autotuner, "filename", None)
    if launcher is None or path is None or not Path(path).is_file():
        return None
    job = Job(path, variant_launchers.name_of(autotuner), launcher.config, names)
    try:
        pickle.dumps(job)
    except Exception as error:  # for example, of a hook in the configuration
        _log.info("%s: %s", job.kernel, error)
        return None
    return job


class Worker:
    """A process that compiles jobs, at low priority and without our patches.

    It compiles into the Triton cache that this process uses when it starts, and ends; the program then loads from there
    (:meth:`cache`). A kernel that fails is left out. Only one runs at once. It is killed when this object is freed.
    """

    def __init__(self, jobs: Sequence[Job | WriterJob]) -> None:
        from triton import knobs

        executable = sys.executable or ""
        if getattr(sys, "frozen", False) or not Path(executable).name.startswith("python"):
            raise OSError(f"{executable!r} is no Python")
        self._cache = str(knobs.cache.dir)
        self._done: set[int] | None = None
        path = [folder for folder in sys.path if isinstance(folder, str) and folder]
        if "" in sys.path:
            with contextlib.suppress(OSError):
                path.append(os.getcwd())
        variables = {"PYGRAPH_DISABLE": "1", "PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": self._cache}
        with contextlib.ExitStack() as if_not_started:
            self._said = if_not_started.enter_context(tempfile.TemporaryFile())
            with tempfile.TemporaryFile() as asked:
                pickle.dump(list(jobs), asked)
                asked.seek(0)
                self._process = subprocess.Popen(
                    [executable, "-c", _COMMAND],
                    stdin=asked,
                    stdout=self._said,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | variables,
                    start_new_session=True,  # an interrupt is meant for the program alone
                )
            if_not_started.pop_all()  # the file is closed when the process is done
        self._began = time.monotonic()
        self._end = weakref.finalize(self, _stop, self._process, self._said)

    @staticmethod
    def start(jobs: Sequence[Job | WriterJob]) -> Worker | None:
        """Starts the process; returns None while another one is compiling.

        Raises :class:`OSError` if no process can be started. Two threads must not call it at once.
        """
        global _newest
        running = None if _newest is None else _newest()
        if running is not None and running.done() is None:
            return None
        made = Worker(jobs)
        _newest = weakref.ref(made)
        return made

    def done(self) -> set[int] | None:
        """The numbers of the jobs that were compiled; None while the process is compiling."""
        if self._done is not None:
            return self._done
        if self._process.poll() is None and time.monotonic() - self._began < _MOST_S:
            return None
        code = self._process.returncode
        if code != 0:
            how = "did not end in time" if code is None else f"ended with {code}"
            _log.warning("the process that compiles kernels which read addresses from a table %s", how)
        if not self._said.closed:  # it is closed when this process ends
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").splitlines()
            self._done = {int(line) for line in lines if line.isdecimal()}
        self._end()
        return self._done or set()

    @contextlib.contextmanager
    def cache(self) -> Iterator[None]:
        """Inside this scope, Triton uses the cache into which the process compiled."""
        from triton import knobs

        with knobs.cache.scope():
            knobs.cache.dir = self._cache
            yield


def _stop(process: subprocess.Popen[bytes], said: Any) -> None:
    process.kill()  # does nothing if it has ended
    process.wait()
    said.close()


def compile_jobs(jobs: Sequence[Job | WriterJob]) -> Iterator[int]:
    """Compiles into Triton's cache; yields the number of each job that compiled."""
    for number, job in enumerate(jobs):
        try:
            job.compile()
        except Exception as error:  # from Triton; then the kernel has no variant
            _log.info("%s: %s", job, error)
        else:
            yield number


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    signal.alarm(int(_MOST_S))  # the process ends even if the program that would kill it is gone
    for number in compile_jobs(pickle.load(sys.stdin.buffer)):
        print(number, flush=True)
