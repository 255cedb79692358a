"""Builds the variants and writers for a function's table while the program runs.

:func:`begin` starts a build; each :func:`go_on` takes one step, :func:`finish` all that are left. A
:class:`.worker.Worker` compiles, then each step loads one kernel. After the last step, the function's inputs have
slots, and its next recording has a table. A failed build is given up with one warning and not started again. A step
never waits: it does nothing while another thread takes one, or while another function's build uses the process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import torch

from pygraph_trees.locks import run_if_free

from . import pointer_table
from .pointer_table import Reader
from .worker import Job, Worker, WriterJob, job_of

_log = logging.getLogger("pygraph_trees.indirection")

_lock = threading.Lock()  # a function may have recordings in several threads; no thread waits for the lock
# By function: the steps that are left, None if the build is over.
_builds: weakref.WeakKeyDictionary[Any, Generator[None, None, set[int]] | None] = weakref.WeakKeyDictionary()


def begin(function: Any, device: int) -> Generator[None, None, set[int]] | None:
    """Starts a build for a function that has none yet; returns the steps that are left."""
    return _builds.setdefault(function, _steps(pointer_table.readers_of(function), device))


def go_on(function: Any, device: int) -> bool | None:
    """Takes a step of a build. Returns None if more steps follow, else whether the function's inputs have slots."""
    run_if_free(_lock, functools.partial(_take_step, function, device))
    return bool(pointer_table.taken_by_variants(function)) if is_over(function) else None


def _take_step(function: Any, device: int) -> None:
    steps, taken = begin(function, device), set[int]()
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
        if taken:
            pointer_table.take(function, taken)
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
            go_on(function, 0)  # the build knows its device
        time.sleep(0.01)


def give_up(function: Any) -> None:
    """Takes the function's table away, and prevents another build for it."""
    pointer_table.take_no_longer(function)
    _builds[function] = None


def _steps(readers: Sequence[Reader], device: int) -> Generator[None, None, set[int]]:
    """The steps of one build: all kernels are compiled together, then loaded one by one.

    Returns the inputs that variants take: all at once, so that no recording has slots for a part of them.
    """
    found = {reader: job_of(reader.autotuner, reader.names) for reader in readers}
    jobs: dict[Reader | int, Job | WriterJob] = {reader: job for reader, job in found.items() if job is not None}
    if not jobs:
        return set()
    with contextlib.suppress(Exception):  # without a target, a writer is compiled when a table needs it
        with torch.cuda.device(device):
            target = pointer_table.current_target()
        inputs = {index for reader in readers for _, index in reader.inputs}
        most = max(pointer_table.widths_for(len(inputs)))  # inputs may get no slot
        jobs |= {width: WriterJob(width, target) for width in pointer_table.WIDTHS if width <= most}
    while (worker := Worker.start(list(jobs.values()))) is None:
        yield
    while (compiled := worker.done()) is None:
        yield
    taken: set[int] = set()
    for kernel in reversed([kernel for number, kernel in enumerate(jobs) if number in compiled]):
        yield
        with worker.cache():
            if isinstance(kernel, Reader):
                taken |= kernel.build()
            elif pointer_table.loaded_writer(device, kernel) is None:
                return set()
    return taken
