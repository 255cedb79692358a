"""Builds the variants and writers for a function's table while the program runs.

:func:`begin` starts a build; each :func:`go_on` takes one step. Another process compiles (:class:`Worker`), then each
step loads one kernel. After the last step, the function's inputs have slots, and its next recording has a table. A
failed build is given up with one warning and not started again. A step never waits: it does nothing while another
thread takes one, or while another function's build uses the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pygraph_trees.locks import run_if_free

from . import variant_launchers
from .pointer_table import (
    WIDTHS,
    Reader,
    compile_writer,
    current_target,
    loaded_writer,
    readers_of,
    take,
    take_no_longer,
    taken_by_variants,
    widths_for,
)

_MOST_S = 600.0  # time limit of the process
_NICE = 10
_CACHE = "TRITON_CACHE_DIR"
_COMMAND = f"import sys; sys.path[:] = filter(None, sys.path); from {__name__} import main; main()"

_Load = Callable[[], Collection[int] | None]  # loads a kernel; gives the inputs that it takes from slots, None for none

_log = logging.getLogger("pygraph_trees.indirection")

_lock = threading.Lock()  # a function may have recordings in several threads; no thread waits for the lock
_builds: weakref.WeakKeyDictionary[Any, _Build] = weakref.WeakKeyDictionary()  # by function


def begin(function: Any, device: int) -> None:
    """Starts a build for a function that has none yet."""
    _builds.setdefault(function, _Build(readers_of(function), device))


def go_on(function: Any) -> bool | None:
    """Takes a step of a build. Returns None if more steps follow, else whether the function's inputs have slots."""
    run_if_free(_lock, functools.partial(_take_step, function))
    return bool(taken_by_variants(function)) if is_over(function) else None


def _take_step(function: Any) -> None:
    build = _builds[function]
    try:
        build.go_on(function)
    except Exception as error:  # for example, no process can be started
        _log.warning("kernels were not compiled to read addresses from a table: %s", error)
        build.give_up()


def is_over(function: Any) -> bool:
    """Whether the function's build has ended, with or without variants."""
    build = _builds.get(function)
    return build is not None and build.is_over


def is_any_under_way() -> bool:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has just started a build
            return not all(build.is_over for build in list(_builds.values()))


def give_up(function: Any) -> None:
    """Takes the function's table away, and prevents another build for it."""
    take_no_longer(function)
    build = _builds.setdefault(function, _Build((), 0))
    build.give_up()


class _Build:
    """The build of one function's kernels: all are compiled together, then loaded one by one."""

    def __init__(self, readers: Sequence[Reader], device: int) -> None:
        self._readers, self._device = readers, device
        self._worker: Worker | None = None
        self._loads: list[_Load] = []  # by number of the job
        self._left: list[_Load] | None = None  # once it is known what was compiled
        self._taken: set[int] = set()

    @property
    def is_over(self) -> bool:
        return self._left == []

    def give_up(self) -> None:
        self._left, self._worker = [], None

    def go_on(self, function: Any) -> None:
        if self._left is None:
            compiled = self._start() if self._worker is None else self._worker.done()
            if compiled is not None:
                self._left = [load for number, load in enumerate(self._loads) if number in compiled]
        elif self._left and self._worker is not None:
            with self._worker.cache():
                taken = self._left[-1]()
            if taken is None:
                self._left.clear()
            else:
                self._taken |= set(taken)
                if len(self._left) == 1 and self._taken:
                    take(function, self._taken)  # all at once, so that no recording has slots for a part of them
                self._left.pop()
        if self.is_over:
            self._worker = None

    def _start(self) -> Collection[int] | None:
        """Starts the process; returns an empty set if it has nothing to compile."""
        if Worker.is_busy():
            return None
        found = [(reader.build, job_of(reader.autotuner, reader.names)) for reader in self._readers]
        jobs: list[tuple[_Load, Job | WriterJob]] = [(build, job) for build, job in found if job is not None]
        if not jobs:
            return ()
        with contextlib.suppress(Exception):  # without a target, a writer is compiled when a table needs it
            with torch.cuda.device(self._device):
                target = current_target()
            most = max(widths_for(len({index for reader in self._readers for _, index in reader.inputs})))
            widths = [width for width in WIDTHS if width <= most]  # inputs may get no slot
            jobs += [(functools.partial(self._load_writer, width), WriterJob(width, target)) for width in widths]
        self._loads = [load for load, _ in jobs]
        self._worker = Worker.start([job for _, job in jobs])
        return None

    def _load_writer(self, width: int) -> Collection[int] | None:
        return None if loaded_writer(self._device, width) is None else ()


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
    """A process that compiles jobs, at low priority and without our patches, so that the program does not wait.

    It compiles into the Triton cache that this process uses when it starts, and ends; the program then loads from there
    (:meth:`cache`). A kernel that fails is left out. Only one runs at once. It is killed when this object is freed.
    """

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
        from triton import knobs

        with knobs.cache.scope():
            knobs.cache.dir = self._cache
            yield


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
