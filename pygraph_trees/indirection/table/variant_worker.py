"""Compiles kernels for tables in another process, so that the program does not wait for them.

A :class:`Worker` takes jobs: the file that Inductor wrote, the kernel's name, its winning configuration and the
parameters that become slots. It runs at low priority without our patches, compiles into the Triton cache that this
process uses when it starts, and ends. The program then loads from there (:meth:`Worker.cache`). Only one runs at once.
A kernel that fails is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pickle
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

from . import pointer_table as table
from . import variant_launchers

_MOST_S = 600.0  # time limit of the process
_NICE = 10
_CACHE = "TRITON_CACHE_DIR"
_COMMAND = f"import sys; sys.path[:] = filter(None, sys.path); from {__name__} import main; main()"

_log = logging.getLogger("pygraph_trees.indirection")


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel's variant."""

    path: str  # of the module that Inductor wrote
    kernel: str  # name in that module
    config: Any  # a Triton configuration
    names: frozenset[str]  # of the parameters

    def compile(self) -> None:
        spec = importlib.util.spec_from_file_location(f"pygraph_trees_{Path(self.path).stem}", self.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        variant_launchers.compile_variant(getattr(module, self.kernel), self.config, self.names)


@dataclass(frozen=True, slots=True)
class WriterJob:
    """A table's writer."""

    width: int  # slots
    target: Any  # a Triton target

    def compile(self) -> None:
        table.compile_writer(self.width, self.target)


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
    """The process that compiles. :meth:`start` starts it; it is killed when this object is freed."""

    def __init__(self, process: subprocess.Popen[bytes], said: Any, cache: str) -> None:
        self._process, self._said, self._cache = process, said, cache
        self._began = time.monotonic()
        self._done: set[int] | None = None
        self._end = weakref.finalize(self, _stop, process, said)

    @staticmethod
    def is_busy() -> bool:
        """Whether a process is compiling."""
        running = None if _newest is None else _newest()
        return running is not None and running.done() is None

    @staticmethod
    def start(jobs: Sequence[Job | WriterJob]) -> Worker | None:
        """Starts the process; returns None while another one is compiling.

        Raises :class:`OSError` if no process can be started. Two threads must not call it at once.
        """
        global _newest
        if Worker.is_busy():
            return None
        executable = sys.executable or ""
        if getattr(sys, "frozen", False) or not Path(executable).name.startswith("python"):
            raise OSError(f"{executable!r} is no Python")
        cache = _cache_in_use()
        path = [folder for folder in sys.path if isinstance(folder, str) and folder]
        if "" in sys.path:
            with contextlib.suppress(OSError):
                path.append(os.getcwd())
        said = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process is done
        try:
            with tempfile.TemporaryFile() as asked:
                pickle.dump(list(jobs), asked)
                asked.seek(0)
                process = subprocess.Popen(
                    [executable, "-c", _COMMAND],
                    stdin=asked,
                    stdout=said,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYGRAPH_DISABLE": "1", "PYTHONPATH": os.pathsep.join(path), _CACHE: cache},
                    start_new_session=True,  # an interrupt is meant for the program alone
                )
        except BaseException:
            said.close()
            raise
        made = Worker(process, said, cache)
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
        before = os.environ.get(_CACHE)
        if _cache_in_use() == self._cache:
            yield
            return
        os.environ[_CACHE] = self._cache
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_CACHE, None)
            else:
                os.environ[_CACHE] = before


_newest: weakref.ref[Worker] | None = None


def _stop(process: subprocess.Popen[bytes], said: Any) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    said.close()


def _cache_in_use() -> str:
    """The folder of Triton's cache in this process."""
    from triton import knobs

    return str(knobs.cache.dir)


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
