"""Runs a case in several ways and compares each call: outputs, gradients, aliasing, and the memory of all inputs.

Eager is the oracle; the tolerance depends on the narrowest dtype. If the way under test disagrees, a control, a way of
torch's own, runs too. Differences count as :attr:`Verdict.torch_differs` if both raise, or both give the same values,
or the control raises, or it is wrong in all that is wrong: its kernels may race, and other values come of it.
Moved constants must have eager's bits, unless un-graphed code has others, too, here or on the CPU. After a fault, calls
must be graphed again, and memory and stream be the program's. A failure raises :class:`Mismatch`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph_trees.benchmark.verify import differences
from pygraph_trees.report.log import journal
from pygraph_trees.trees.recordings.kept_outputs import why_not_moved

from .case import Case
from .faults import NEVER
from .observation import Observation
from .runner import Runner

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_GRADIENT = re.compile(r"\['gradient'\]|\['earlier'\]\[\d+\]\[1\]")  # names of those of this call, and of held ones
UNGRAPHED = "compile"  # torch.compile without graphs
ALIASES = frozenset({"aliases"})  # the name of where outputs are
ROUNDING = ("compile", "upstream")  # ways that may compute constants on another device, with its rounding


class InvalidCase(Exception):
    """Eager cannot run the case, which therefore says nothing about a compiler."""

    held: object = None  # what must not be freed


class Mismatch(AssertionError):
    """A compiled way differs from eager."""

    names: frozenset[str] = frozenset()  # what differs in the call, if known


class Raised(Mismatch):
    """A compiled way raised."""

    def __init__(self, message: str, way: str) -> None:
        super().__init__(message)
        self.way = way


class InexactConstant(Mismatch):
    """A moved constant has other bits than eager's."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check that found no failure."""

    calls: int  # calls that were compared and agreed
    inside: int = 0  # calls made from inside those
    caught: int = 0  # faults that ended a call, which was then made again
    torch_differs: str | None = None  # how the control differs from eager, if it does


def check(
    case: Case,
    device: torch.device,
    *,
    under_test: str,
    control: str | None = None,
    exactly: str | None = None,
    alive: Callable[[], None] = lambda: None,
    aliases: bool = True,
) -> Verdict:
    """Runs ``case`` under eager and ``under_test`` and compares after each call.

    Args:
        under_test: one of the benchmark's ways, or a Dynamo backend, by name or as ``module:function``.
        control: the way to run if they disagree; None: a disagreement is a failure.
        exactly: a way that the way under test must also equal bit for bit.
        alive: called after each call.
        aliases: whether outputs must share memory with the same inputs.

    Raises:
        InvalidCase: eager cannot run the case.
        Mismatch: the way under test differs from eager or raises, and the control does not do the same.
    """
    tolerance = tolerance_of(case)
    compare = functools.partial(_compare, case, alive, device=device, aliases=aliases)
    try:
        verdict = compare(under_test, "eager", tolerance)
    except InexactConstant as error:
        if control is None:
            raise
        theirs = _mismatch(compare, UNGRAPHED, tolerance, exact=True)
        if theirs is None or not error.names & theirs.names:  # torch may have computed them on another device than ours
            with contextlib.suppress(InvalidCase):  # if eager cannot run it there
                theirs = _mismatch(compare, UNGRAPHED, tolerance, exact=True, device=torch.device("cpu"))
        if theirs is None or not error.names & theirs.names:
            raise
        # Torch's decompositions change the last place, too, and signs of zeros, which choose a side of a branch cut.
        try:
            compare(under_test, "eager", tolerance, exact=False)
        except Mismatch as ours:
            with_theirs = functools.partial(compare, under_test, UNGRAPHED, tolerance, only=ours.names)
            if _fails(with_theirs) is not None:
                with_theirs(reference_device=torch.device("cpu"))
        return Verdict(0, torch_differs=str(theirs))
    except Mismatch as ours:
        if control is None or is_lost(device):  # every way would raise on a GPU that is lost
            raise
        by_torch = _mismatch(compare, control, tolerance)
        # It may raise only after its values differ. If it raised, it may not do so again: its kernels are tuned.
        if by_torch is not None and isinstance(ours, Raised) and not isinstance(by_torch, Raised):
            by_torch = _mismatch(compare, control, tolerance, only=frozenset({"nothing"}))
        if by_torch is None or (isinstance(ours, Raised) and not isinstance(by_torch, Raised)):
            raise
        if not isinstance(by_torch, Raised):
            try:
                compare(under_test, control, tolerance, only=ours.names)
            except Raised as error:  # a later call of the control may raise
                if error.way == under_test:
                    raise
                if is_lost(device):
                    raise InvalidCase(f"the control lost the GPU: {error}") from error
            except Mismatch as error:
                if not ours.names or not ours.names <= by_torch.names:
                    raise Mismatch(f"{error}; {ours}") from error
        if ours.names == ALIASES:  # the values must still be eager's, or those of the control
            again = functools.partial(check, case, device, under_test=under_test, control=control, exactly=exactly)
            return replace(again(alive=alive, aliases=False), torch_differs=str(by_torch))
        return Verdict(0, torch_differs=str(by_torch))
    if exactly is not None:
        compare(under_test, exactly, 0.0)
    return verdict


def check_bits(case: Case, device: torch.device, way: str, reference: str, alive: Callable[[], None]) -> int:
    """The number of calls in which ``way`` gives the bits of ``reference``; 0 if the reference itself varies.

    Raises:
        Mismatch: they differ, and four runs of the reference agree.
    """
    compare = functools.partial(_compare, case, alive, device=device)
    try:
        return compare(way, reference, 0.0).calls
    except Mismatch:
        if any(_fails(functools.partial(compare, reference, reference, 0.0)) for _ in range(2)):
            return 0
        raise


def device_of(kind: str) -> torch.device:
    """The device of the programs, with its index: some functions of torch refuse one without."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def is_lost(device: torch.device) -> bool:
    """Whether this process is of no use: after a fault of the GPU, or under a mode that torch has left active."""
    if _get_current_dispatch_mode_stack():  # threads that trace at the same time, as torch.cond in eager does
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _mismatch(compare: Callable[..., Verdict], way: str, tolerance: float, **kwargs: Any) -> Mismatch | None:
    """How a way of torch's own differs from eager; None if it does not."""
    return _fails(functools.partial(compare, way, "eager", tolerance, **kwargs))


def _fails(compare: Callable[[], Verdict]) -> Mismatch | None:
    try:
        compare()
    except Mismatch as found:
        return found
    return None


def _compare(
    case: Case,
    alive: Callable[[], None],
    subject: str,
    reference: str,
    tolerance: float,
    *,
    device: torch.device,
    reference_device: torch.device | None = None,
    exact: bool | None = None,
    only: frozenset[str] = frozenset(),
    aliases: bool = True,
) -> Verdict:
    """Raises :class:`Mismatch` at the first call at which the two differ; otherwise counts the calls.

    Args:
        only: the names of what is compared; empty: everything.
        exact: whether constants must have eager's bits; by default, in all ways but those of :data:`ROUNDING`.
    """
    agreed = inside = 0
    # Gradients of rows that were looked up are summed in their own precision, one row at a time, in any order.
    lookups = ("embedding", "index_select", "gather", "[..., ")
    rounded = 16.0 if any(name in line for line in case.body for name in lookups) else 4.0
    with contextlib.ExitStack() as stack:
        if case.around.captures is not None and device.type == "cuda":
            stack.callback(_end_captures)
        stack.callback(gc.collect)
        stack.callback(torch._dynamo.reset)
        flag = getattr(torch._inductor.config.triton, "pygraph_outputs", None)
        keeps = subject == UNGRAPHED or (subject.startswith("ours") and flag == "keep" and why_not_moved() is None)
        devices = reference_device or device, device
        runners = [Runner(case, *way, keeps=keeps) for way in zip((reference, subject), devices, strict=True)]
        for runner in runners:
            stack.callback(runner.close)
        for call in range(case.calls):
            ungraphed = _ungraphed_calls() if call == case.calls - 1 and runners[1].caught else 0
            try:
                wanted, found = (_observe(runner, call) for runner in runners)
            except InvalidCase as error:
                if is_lost(device):
                    error.held = stack.pop_all()  # to free memory of a lost GPU would end the process
                raise
            alive()
            where = f"call {call}: {subject} against {reference}"
            is_exact = reference == "eager" and (subject not in ROUNDING if exact is None else exact)
            with_bits = case.moved_constants if is_exact else frozenset()
            if not aliases:
                found = replace(found, aliases=wanted.aliases)
            if reference_device is not None:
                found = replace(found, devices=wanted.devices)
            _agree(found, wanted, tolerance, where, with_bits, only, rounded)
            # Those were made by eager, whatever the reference is.
            least = max(tolerance, TOLERANCE[torch.float32])
            for one in found.inside if reference == "eager" else ():
                _agree(one.found, one.wanted, least, f"{where}: {one.where}", with_bits)
            agreed, inside = agreed + 1, inside + len(found.inside)
            # Outputs of a warm-up or a recording must not be used in a later step; torch raises if they are.
            for runner in runners if any(runner.recorded() for runner in runners) else ():
                runner.detach_outputs()
        if device.type == "cuda" and (left := left_behind(torch.empty(1, device=device))):
            # Otherwise, the control would fail in the same way.
            torch.cuda.set_stream(torch.cuda.default_stream(device))
            raise Mismatch(f"after {subject}: {left}")
        last = _ungraphed_calls() - ungraphed
        caught, why = runners[1].caught, {f.why_ungraphed for f in journal.records()[1] if f.ungraphed_calls}
    if caught and last > (usual := _ungraphed_at_the_end(case, device, subject) if last else 0):
        raise Mismatch(
            f"after {caught} faults, {last} functions run un-graphed in the last call; usually {usual}: {sorted(why)}"
        )
    return Verdict(agreed, inside, caught)


def _end_captures() -> None:
    """Undoes what a failed ``torch.cuda.graph`` leaves: its stream is current, and random numbers raise."""
    torch.cuda.set_stream(torch.cuda.default_stream())
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):  # the GPU may be lost
        torch.zeros(1, device="cuda")


def left_behind(tensor: torch.Tensor) -> str | None:
    """The state that earlier calls left: another current stream, or a graph pool that holds the new ``tensor``."""
    if torch.cuda.current_stream(tensor.device) != torch.cuda.default_stream(tensor.device):
        return "another stream is current"
    segments = [s for s in torch.cuda.memory_snapshot() if 0 <= tensor.data_ptr() - s["address"] < s["total_size"]]
    return "tensors are in a graph pool" if any(any(segment["segment_pool_id"]) for segment in segments) else None


def _ungraphed_calls() -> int:
    return sum(function.ungraphed_calls for function in journal.records()[1])


def _ungraphed_at_the_end(case: Case, device: torch.device, way: str) -> int:
    """The number of functions that the last call of a case runs un-graphed if it has no faults."""
    runner = Runner(replace(case, around=replace(case.around, faults=(NEVER,))), way, device)
    before = 0
    try:
        for call in range(case.calls):
            before = _ungraphed_calls()
            _observe(runner, call)
            if runner.recorded():
                runner.detach_outputs()
        return _ungraphed_calls() - before
    finally:
        runner.close()
        torch._dynamo.reset()


def _observe(runner: Runner, call: int) -> Observation:
    try:
        seen = runner.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # attributes a fault to this way, not to the next one
        return seen.on_cpu()
    except Exception as error:
        if runner.kind == "eager":
            raise InvalidCase(f"call {call}: {error}") from error
        at = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{runner.kind} raised {type(error).__name__} at {at.filename}:{at.lineno}: {error}"
        raise Raised(f"call {call}: {message}", runner.kind) from error


def _agree(
    found: Observation,
    wanted: Observation,
    tolerance: float,
    where: str,
    exact: frozenset[str],
    only: frozenset[str] = frozenset(),
    rounded: float = 4.0,
) -> None:
    bits = {f"['output'][{i}]" for i, name in enumerate(wanted.returns) if name in exact}
    if found.aliases != wanted.aliases and only <= ALIASES:
        problem = Mismatch(f"{where}: outputs are in {found.aliases}, expected {wanted.aliases}")
        problem.names = ALIASES
        raise problem
    for what in ("outputs", "blocks"):
        names = [name for name, _ in getattr(wanted, what)]
        if names != [name for name, _ in getattr(found, what)]:
            raise Mismatch(f"{where}: {what} are {[n for n, _ in getattr(found, what)]}, expected {names}")
    if found.devices != wanted.devices:
        raise Mismatch(f"{where}: outputs and inputs are on {found.devices}, expected {wanted.devices}")
    problems = {}
    for what in ("outputs", "blocks"):
        for one, other in zip(getattr(found, what), getattr(wanted, what), strict=True):
            # Programs keep everything within a few units, but gradients, which accumulate, in any order.
            is_gradient = _GRADIENT.match(one[0]) is not None
            is_same = not tolerance and not (is_gradient and rounded > 4.0)
            own = 0.0 if is_same else max(tolerance, TOLERANCE.get(other[1].dtype, 0.0))  # constants have other dtypes
            allowed = own * (_scale(other[1]) if what == "outputs" else 1.0)
            if is_gradient and tolerance > TOLERANCE[torch.float32]:
                allowed *= rounded
            if (not only or one[0] in only) and (problem := _problem(one, other, allowed, where, one[0] in bits)):
                problems[one[0]] = problem
    for problem in problems.values():
        problem.names = frozenset(problems)
        raise problem


def _problem(one: Any, other: Any, allowed: float, where: str, is_exact: bool) -> Mismatch | None:
    """How two named tensors differ."""
    ((_, apart),) = differences([one], [other])
    if isinstance(apart, str):
        return (InexactConstant if is_exact else Mismatch)(f"{where}: {apart}")
    if is_exact and (elements := _apart(one[1], other[1])).any():
        at = int(elements.nonzero()[0])
        found, wanted = (_real(t)[at].item() for _, t in (one, other))
        bits = f"element {at} is {found!r}, expected {wanted!r}"
        return InexactConstant(f"{where}: {one[0]} is a constant, and has other bits: {bits}")
    if apart > allowed:
        return Mismatch(f"{where}: {one[0]} differs by {apart:.3g}, allowed {allowed:.3g}")
    return None


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which elements differ, signs of zeros included; NaNs are equal whatever their bits."""
    one, other = _real(one), _real(other)
    if not one.is_floating_point():
        return one != other
    return ((one != other) | (one.signbit() != other.signbit())) & ~(one.isnan() & other.isnan())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in a row; complex numbers as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _scale(tensor: torch.Tensor) -> float:
    """The largest magnitude in a tensor, at least 1."""
    tensor = _real(tensor)
    finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else tensor.new_zeros(0)
    return max(1.0, finite.abs().max().item()) if finite.numel() else 1.0


def tolerance_of(case: Case) -> float:
    lines = "\n".join(line for line in case.body if line.partition(" = ")[0] not in case.constants)
    dtypes = {i.torch_dtype for i in case.inputs}
    dtypes |= {dtype for dtype in TOLERANCE if str(dtype) in lines}
    return max((TOLERANCE[d] for d in dtypes if d in TOLERANCE), default=0.0)
