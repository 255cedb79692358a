"""Checks cases in this process: ``python -m fuzzing.worker CAMPAIGN``, with the campaign as JSON (see ``campaign.py``).

Sends ``case``, the text of the running case; ``counts``; and after a failure ``failure``, with the smallest case that
fails. Exit status: 0, :data:`campaign.FAILED`, or, if the GPU is lost, :data:`campaign.POISONED`, or
:data:`campaign.POISONED_BY_EAGER` if eager lost it.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import sys
import threading
import time
import warnings
from dataclasses import asdict
from typing import Any

import torch
from child import answering
from torch._dynamo import guards
from torch._inductor.cpu_vec_isa import VecISA

from pygraph_trees.report.log import journal
from pygraph_trees.trees.hooks import direct_calls

from . import everything
from .campaign import FAILED, POISONED, POISONED_BY_EAGER, Counts, Failure
from .case import Case, read
from .check import InvalidCase, Mismatch, check, check_bits, device_of, is_lost
from .programs import program
from .reduction import reduce
from .uses import uses

_MOST_TRIES = 80  # to make a failing case smaller
_LONG_CALL_S = 60.0


class Worker:
    """Checks cases one after another and keeps the counts."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._say = answering()
        self._device = device_of(told["device"])
        self._end = time.monotonic() + told["seconds"]
        self._number = told["number"]
        self._failure: Failure | None = None
        self.counts = Counts()
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    def campaign(self) -> int:
        """Draws and checks cases until the time is over or one fails."""
        while not self._over():
            self.counts.cases += 1
            if self._number in self._told["left_out"]:
                self.counts.invalid += 1
            else:
                case = program(self._told["seed"], self._number, graphs=self._device.type == "cuda")
                self._failure = self._check(case)
            self._number += self._told["jobs"] if self._failure is None else 0  # it is sent with the failure
        return self._result()

    def single(self, text: str) -> int:
        """Checks one case."""
        failure = self._check(read(text))
        if failure is None:
            return 0
        self._send_failure(failure)
        return FAILED

    def _over(self) -> bool:
        most = self._told["most_cases"]
        is_enough = most is not None and self.counts.cases >= most
        return self._failure is not None or time.monotonic() >= self._end or is_enough

    def _result(self) -> int:
        """The exit status; first makes a failing case smaller, and sends each smaller one."""
        if self._failure is None:
            return 0
        self._send_failure(self._failure)

        def fails(smaller: Case) -> bool:
            failure = self._check(smaller)
            if failure is not None:
                self._send_failure(failure)
            return failure is not None

        reduce(self._failure.case, fails, _MOST_TRIES, self._told["reduce_s"])
        return FAILED

    def _check(self, case: Case) -> Failure | None:
        """The failure of a case, if it fails."""
        self._say({"case": case.text(), "number": self._number, **self._counted()})
        self._alive()
        try:
            verdict = check(
                case,
                self._device,
                under_test=self._told["under_test"],
                control=self._told["control"],
                alive=self._alive,
            )
            on_lanes = self.counts.on_lanes
            self._send_counts()
            if self._told["everything"] and self.counts.on_lanes > on_lanes and verdict.torch_differs is None:
                ways = self._told["under_test"], everything.CHAIN
                self.counts.as_chain += check_bits(case, self._device, *ways, self._alive)
                journal.clear()  # these recordings and calls do not count
        except InvalidCase:
            self.counts.invalid += 1
            self._end_if_poisoned(POISONED_BY_EAGER)
        except Mismatch as error:
            print(error, file=sys.stderr, flush=True)  # if the GPU is lost, the last lines of this log are shown
            self._end_if_poisoned(POISONED)
            return Failure(case, str(error))
        else:
            self.counts.calls += verdict.calls
            self.counts.inside += verdict.inside
            self.counts.caught += verdict.caught
            for name in uses(case):
                self.counts.uses[name] = self.counts.uses.get(name, 0) + 1
            self.counts.torch_differs += verdict.torch_differs is not None
            self._end_if_poisoned(POISONED)  # code that runs when the way is closed may lose the GPU
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._send_counts()
        return None

    def _alive(self) -> None:
        self._say({})
        faulthandler.dump_traceback_later(_LONG_CALL_S)  # into the log, which is shown if the call takes too long

    def _send_counts(self) -> None:
        _, functions = journal.records()
        journal.clear()
        self.counts.replays += sum(f.replays for f in functions)
        self.counts.recordings += sum(len(f.recordings) for f in functions)
        branches = [r.branches for f in functions for r in f.recordings if r.branches is not None]
        self.counts.on_lanes += sum(found.lanes > 1 for found in branches)
        self.counts.unguarded, _ = direct_calls.counts()
        for function in functions:
            if function.ungraphed_calls:
                why = re.sub(r"\d+", "N", function.why_ungraphed)
                self.counts.ungraphed[why] = self.counts.ungraphed.get(why, 0) + function.ungraphed_calls
                self.counts.examples.setdefault(why, self._number)
        self._say(self._counted())

    def _counted(self) -> dict[str, Any]:
        """The counts as they are sent: without cases that are made smaller."""
        return {"counts": asdict(self.counts)} if self._failure is None else {}

    def _end_if_poisoned(self, status: int) -> None:
        """After a fault, every later call on the GPU also fails, which says nothing about its case."""
        if is_lost(self._device):
            self._send_counts()
            os._exit(status)

    def _send_failure(self, failure: Failure) -> None:
        self._say({"failure": {"case": failure.case.text(), "message": failure.message}})


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main(campaign: str) -> int:
    told = json.loads(campaign)
    threading.Thread(target=_end_with_parent, daemon=True).start()  # signals to the parent's session do not reach it
    VecISA.check_build = lambda isa, _: str(isa) in told["vector_instructions"]
    guards.profile_guard_manager = lambda *_: 0.0  # slow: it flushes the CPU's caches after each compilation
    faulthandler.disable()
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of C++, last: after an error in malloc, it waits forever
    faulthandler.enable()
    gc.freeze()  # collections then skip what the imports made
    warnings.simplefilter("ignore")
    if told["everything"]:
        everything.turn_on(told["seed"])
    worker = Worker(told)
    return worker.campaign() if told["case"] is None else worker.single(told["case"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
