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
from collections.abc import Collection, Sequence
from typing import Any

import torch

from pygraph_trees.locks import run_if_free

from . import pointer_table
from .pointer_table import Reader
from .worker import Job, Worker, WriterJob, job_of

_log = logging.getLogger("pygraph_trees.indirection")

_lock = threading.Lock()  # a function may have recordings in several threads; no thread waits for the lock
_builds: weakref.WeakKeyDictionary[Any, _Build] = weakref.WeakKeyDictionary()  # by function


def begin(function: Any, device: int) -> None:
    """Starts a build for a function that has none yet."""
    _builds.setdefault(function, _Build(pointer_table.readers_of(function), device))


def go_on(function: Any) -> bool | None:
    """Takes a step of a build. Returns None if more steps follow, else whether the function's inputs have slots."""
    run_if_free(_lock, functools.partial(_take_step, function))
    return bool(pointer_table.taken_by_variants(function)) if is_over(function) else None


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


def finish(most_s: float) -> None:
    """Takes all steps of all builds; waits at most so long for the kernels to be compiled."""
    end = time.monotonic() + most_s
    while is_any_under_way() and time.monotonic() < end:
        for function in list(_builds):
            go_on(function)
        time.sleep(0.01)


def give_up(function: Any) -> None:
    """Takes the function's table away, and prevents another build for it."""
    pointer_table.take_no_longer(function)
    _builds.setdefault(function, _Build((), 0)).give_up()


class _Build:
    """The build of one function's kernels: all are compiled together, then loaded one by one."""

    def __init__(self, readers: Sequence[Reader], device: int) -> None:
        self._readers, self._device = readers, device
        self._worker: Worker | None = None
        self._kernels: list[Reader | int] = []  # by number of the job: readers for variants, widths for writers
        self._left: list[Reader | int] | None = None  # once it is known what was compiled
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
                self._left = [kernel for number, kernel in enumerate(self._kernels) if number in compiled]
        elif self._left and self._worker is not None:
            kernel = self._left[-1]
            with self._worker.cache():
                if isinstance(kernel, Reader):
                    self._taken |= kernel.build()
                elif pointer_table.loaded_writer(self._device, kernel) is None:
                    self.give_up()
                    return
            if len(self._left) == 1 and self._taken:
                # All at once, so that no recording has slots for a part of them.
                pointer_table.take(function, self._taken)
            self._left.pop()
        if self.is_over:
            self._worker = None

    def _start(self) -> Collection[int] | None:
        """Starts the process; returns an empty set if it has nothing to compile."""
        if Worker.is_busy():
            return None
        found = {reader: job_of(reader.autotuner, reader.names) for reader in self._readers}
        jobs: dict[Reader | int, Job | WriterJob] = {reader: job for reader, job in found.items() if job is not None}
        if not jobs:
            return ()
        with contextlib.suppress(Exception):  # without a target, a writer is compiled when a table needs it
            with torch.cuda.device(self._device):
                target = pointer_table.current_target()
            inputs = {index for reader in self._readers for _, index in reader.inputs}
            most = max(pointer_table.widths_for(len(inputs)))  # inputs may get no slot
            jobs |= {width: WriterJob(width, target) for width in pointer_table.WIDTHS if width <= most}
        self._kernels = list(jobs)
        self._worker = Worker.start(list(jobs.values()))
        return None
