"""Builds the variants for a function's table while the program runs.

:func:`begin` starts a build, :func:`go_on` takes one step, :func:`finish` all that are left. A :class:`Worker` compiles
in another process, then each step loads one kernel. After the last one, the function's next recording has a table. A
step never waits: it does nothing while another thread takes one, or another build uses the process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from pygraph_trees.locks import run_if_free

from . import launches, pointer_table
from .pointer_table import Reader

_MOST_S = 600.0  # time limit of the process
_NICE = 10
_COMMAND = f"import sys; sys.path[:] = filter(None, sys.path); from {__name__} import main; main()"

_log = logging.getLogger("pygraph_trees.indirection")

Job = functools.partial  # the compilation of a variant, which can be sent to another process

_lock = threading.Lock()  # a function may have recordings in several threads; no thread waits for the lock
# By function: the steps that are left, None if the build is over.
_builds: weakref.WeakKeyDictionary[Any, Generator[None, None, set[int]] | None] = weakref.WeakKeyDictionary()


def begin(function: Any) -> Generator[None, None, set[int]] | None:
    """Starts a build for a function that has none yet; returns the steps that are left."""
    return _builds.setdefault(function, _steps(pointer_table.readers_of(function)))


def go_on(function: Any) -> bool | None:
    """Takes a step of a build. Returns None if more steps follow, else whether the function's inputs have slots."""
    run_if_free(_lock, functools.partial(_take_step, function))
    return bool(pointer_table.taken_by_variants(function)) if is_over(function) else None


def _take_step(function: Any) -> None:
    steps, taken = begin(function), set[int]()
    if steps is None:
        return
    try:
        return next(steps)
    except StopIteration as end:
        taken = end.value
    except Exception as error:  # for example, no process can be started
        _log.warning("kernels were not compiled to read addresses from a table: %s", error)
    except BaseException:  # an interrupt: the next step begins again, and finds what was compiled
        _builds.pop(function, None)
        raise
    if _builds.get(function) is steps:  # otherwise it was given up
        pointer_table.TAKEN[function] = pointer_table.taken_by_variants(function) | taken
        _builds[function] = None


def is_over(function: Any) -> bool:
    """Whether the function's build has ended, with or without variants."""
    return function in _builds and _builds[function] is None


def is_any_under_way() -> bool:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has just started a build
            return any(steps is not None for steps in list(_builds.values()))


def finish(most_s: float) -> None:
    """Takes all steps of all builds; waits at most ``most_s`` seconds for the kernels to be compiled."""
    end = time.monotonic() + most_s
    while is_any_under_way() and time.monotonic() < end:
        for function in list(_builds):
            go_on(function)
        time.sleep(0.01)


def give_up(function: Any) -> None:
    """Takes the function's table away, and prevents another build for it."""
    pointer_table.TAKEN.pop(function, None)
    _builds[function] = None


def _steps(readers: Sequence[Reader]) -> Generator[None, None, set[int]]:
    """The steps of one build; returns the inputs that variants take. No recording has slots for a part of them."""
    jobs = {reader: job for reader in readers if (job := job_of(reader.autotuner, reader.names)) is not None}
    if not jobs:
        return set()
    while (worker := Worker.start(list(jobs.values()))) is None:
        yield
    while (compiled := worker.done()) is None:
        yield
    taken = set[int]()
    for reader in [reader for number, reader in enumerate(jobs) if number in compiled]:
        yield
        with worker.cache():
            taken |= reader.build()
    return taken


def job_of(autotuner: Any, names: frozenset[str]) -> Job | None:
    """The job for a kernel; None if another process could not compile it."""
    launcher = launches.sole_launcher(autotuner)
    path = getattr(autotuner, "filename", None)
    if launcher is None or path is None or not Path(path).is_file():
        return None
    job = Job(_compile_kernel, path, launches.name_of(autotuner), launcher.config, names)
    try:
        pickle.dumps(job)
    except Exception as error:  # for example, of a hook in the configuration
        _log.info("%s: %s", launches.name_of(autotuner), error)
        return None
    return job


def _compile_kernel(path: str, kernel: str, config: Any, names: frozenset[str]) -> None:
    """Compiles a variant of a kernel in a module that Inductor wrote, for one of Triton's configurations."""
    module = runpy.run_path(path, run_name=f"pygraph_trees_{Path(path).stem}")
    launches.compile_variant(module[kernel], config, names)


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """A process that compiles jobs into this one's Triton cache, without our patches. Only one runs at once."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        from triton import knobs

        executable = sys.executable or ""
        if getattr(sys, "frozen", False) or not Path(executable).name.startswith("python"):
            raise OSError(f"{executable!r} is no Python")
        self._cache = str(knobs.cache.dir)
        self._done: set[int] | None = None
        path = [folder for folder in sys.path if isinstance(folder, str) and folder]
        with contextlib.suppress(OSError):
            path += [os.getcwd()] if "" in sys.path else []
        variables = {"PYGRAPH_DISABLE": "1", "PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": self._cache}
        with contextlib.ExitStack() as stack:
            asked, self._said = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
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
            stack.pop_all()  # the file is closed when the process is done
            asked.close()
        self._began = time.monotonic()
        self._end = weakref.finalize(self, _stop, self._process, self._said)

    @staticmethod
    def start(jobs: Sequence[Job]) -> Worker | None:
        """Starts the process; None while another one is compiling. Two threads must not call it at once."""
        if any(worker.done() is None for worker in _workers):
            return None
        _workers.add(made := Worker(jobs))
        return made

    def done(self) -> set[int] | None:
        """The numbers of the jobs that were compiled; None while the process is compiling."""
        if self._done is not None:
            return self._done
        if self._process.poll() is None and time.monotonic() - self._began < _MOST_S:
            return None
        if (code := self._process.returncode) != 0:
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


def compile_jobs(jobs: Sequence[Job]) -> Iterator[int]:
    """Compiles into Triton's cache; yields the number of each job that compiled."""
    for number, job in enumerate(jobs):
        try:
            job()
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
