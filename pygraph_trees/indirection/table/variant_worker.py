"""Kernels for a table, compiled by a process of its own, so that the program that will want them does not wait.

A variant's text is the same in every process, and so is its key in Triton's cache on disk, as are those of a table's
writers: what a :class:`Worker` has compiled is found there, and only loaded. The process gets each kernel's file as
Inductor wrote it, its name, the configuration that won and the parameters that are to be slots (:class:`Job`). It runs
at a low priority, with our patches off, and ends when it is done; there is one at a time. Its cache is the one that
this process uses when it begins; what is loaded is looked for there (:meth:`Worker.cache`), whatever is used by then.

What does not work, and why: a thread of the program's own. Triton's front end is Python, and holds the interpreter for
milliseconds at a time; each call of the program would wait for it.
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

_MOST_S = 600.0  # that it may take
_NICE = 10
_CACHE = "TRITON_CACHE_DIR"
_COMMAND = f"import sys; sys.path[:] = filter(None, sys.path); from {__name__} import main; main()"

_log = logging.getLogger("pygraph_trees.indirection")


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel's variant."""

    path: str  # of the module that Inductor wrote
    kernel: str  # its name there
    config: Any  # as Triton has it
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
    target: Any  # as Triton has it

    def compile(self) -> None:
        table.compile_writer(self.width, self.target)


def job_of(autotuner: Any, names: frozenset[str]) -> Job | None:
    """What is to be compiled for a kernel; None where another process could not."""
    launcher = variant_launchers.sole_launcher(autotuner)
    path = getattr(autotuner, "filename", None)
    if launcher is None or path is None or not Path(path).is_file():
        return None
    job = Job(path, variant_launchers.name_of(autotuner), launcher.config, names)
    try:
        pickle.dumps(job)
    except Exception as error:  # a hook of the configuration's, say
        _log.info("%s: %s", job.kernel, error)
        return None
    return job


class Worker:
    """The process. :meth:`start` makes it; it is killed where nobody holds this any longer."""

    def __init__(self, process: subprocess.Popen[bytes], said: Any, cache: str) -> None:
        self._process, self._said, self._cache = process, said, cache
        self._began = time.monotonic()
        self._done: set[int] | None = None
        self._end = weakref.finalize(self, _stop, process, said)

    @staticmethod
    def is_busy() -> bool:
        """Whether there is one at work."""
        running = None if _newest is None else _newest()
        return running is not None and running.done() is None

    @staticmethod
    def start(jobs: Sequence[Job | WriterJob]) -> Worker | None:
        """None while another one is at work. Raises :class:`OSError`. Not for two threads at once."""
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
                    start_new_session=True,  # an interrupt is the program's
                )
        except BaseException:
            said.close()
            raise
        made = Worker(process, said, cache)
        _newest = weakref.ref(made)
        return made

    def done(self) -> set[int] | None:
        """The numbers of the jobs that were compiled; None where it is still at work."""
        if self._done is not None:
            return self._done
        if self._process.poll() is None and time.monotonic() - self._began < _MOST_S:
            return None
        code = self._process.returncode
        if code != 0:
            how = "did not end in time" if code is None else f"ended with {code}"
            _log.warning("the process that compiles kernels which read addresses from a table %s", how)
        if not self._said.closed:  # as it is where this process ends
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").splitlines()
            self._done = {int(line) for line in lines if line.isdecimal()}
        self._end()
        return self._done or set()

    @contextlib.contextmanager
    def cache(self) -> Iterator[None]:
        """Inside, Triton looks where the process has put what it compiled."""
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
    """Where Triton of this process looks for what is compiled."""
    from triton import knobs

    return str(knobs.cache.dir)


def compile_jobs(jobs: Sequence[Job | WriterJob]) -> Iterator[int]:
    """Compiles into Triton's cache; the numbers of those that could be, one by one."""
    for number, job in enumerate(jobs):
        try:
            job.compile()
        except Exception as error:  # of Triton; there is none then
            _log.info("%s: %s", job, error)
        else:
            yield number


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    signal.alarm(int(_MOST_S))  # also where nobody is there any more who would end it
    for number in compile_jobs(pickle.load(sys.stdin.buffer)):
        print(number, flush=True)
