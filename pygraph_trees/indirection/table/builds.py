"""Builds the variants and writers for a function's table while the program runs.

:func:`begin` starts a build; each :func:`go_on` takes one step. Another process compiles (:mod:`.variant_worker`), then
each step loads one kernel. After the last step, the function's inputs have slots, and its next recording has a table. A
failed build is given up with one warning and not started again. A step never waits: it does nothing while another
thread takes one, or while another function's build uses the process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from pygraph_trees.locks import run_if_free

from .pointer_table import (
    WIDTHS,
    Reader,
    current_target,
    load_writer,
    readers_of,
    take,
    take_no_longer,
    taken_by_variants,
    widths_for,
)
from .variant_worker import Job, Worker, WriterJob, job_of

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
        self._device = device
        self._readers = readers
        self._worker: Worker | None = None
        self._jobs: list[tuple[Reader | int, Job | WriterJob]] = []
        self._left: list[Reader | int] | None = None  # still to be loaded, once known; a number is a writer's width
        self._taken: set[int] = set()

    @property
    def is_over(self) -> bool:
        return self._left == []

    def give_up(self) -> None:
        self._left, self._worker = [], None

    def go_on(self, function: Any) -> None:
        if self._worker is None and self._left is None:
            self._start()
        elif self._left is None and self._worker is not None:
            compiled = self._worker.done()
            if compiled is not None:
                self._left = [what for number, (what, _) in enumerate(self._jobs) if number in compiled]
        elif self._left and self._worker is not None:
            what = self._left[-1]
            with self._worker.cache():
                if isinstance(what, Reader):
                    self._taken |= what.build()
                else:
                    load_writer(self._device, what)
            if len(self._left) == 1 and self._taken:
                take(function, self._taken)  # all at once, so that no recording has slots for a part of them
            self._left.pop()
        if self.is_over:
            self._worker = None

    def _start(self) -> None:
        if Worker.is_busy():
            return
        found = [(reader, job_of(reader.autotuner, reader.names)) for reader in self._readers]
        jobs: list[tuple[Reader | int, Job | WriterJob]] = [(reader, job) for reader, job in found if job is not None]
        if not jobs:
            self.give_up()
            return
        with contextlib.suppress(Exception):  # without a target, a writer is compiled when a table needs it
            with torch.cuda.device(self._device):
                target = current_target()
            most = max(widths_for(len({index for reader in self._readers for _, index in reader.inputs})))
            jobs += [(width, WriterJob(width, target)) for width in WIDTHS if width <= most]  # inputs may get no slot
        self._worker, self._jobs = Worker.start([job for _, job in jobs]), jobs
