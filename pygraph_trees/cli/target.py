"""Turns a TARGET, given as text, into a :class:`~.benchmark.program.Program`.

A target is ``file.py:function`` or ``package.module:function``, or the name of a workload of ``tools/bench`` in a
checkout. The function returns ``(model, args, kwargs)`` or ``(callable, args)``, and may take ``device``: ``cuda`` to
run, ``meta`` to explain. A ``meta`` tensor or a parameter then represents one on the GPU. A target that cannot be built
raises :class:`TargetError`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pygraph_trees.benchmark.program import Program
from pygraph_trees.errors import PygraphError

_WORKLOADS = Path(__file__).resolve().parents[2] / "tools" / "bench" / "workloads" / "__init__.py"
_EXPECTED = (
    "file.py:function, package.module:function (returning (model, args, kwargs) or (callable, args)), or a workload"
)


class TargetError(PygraphError):
    template = "target {target!r}: {problem}. A target is {expected}{workloads}."

    def __init__(self, target: str, problem: str) -> None:
        names = ", ".join(sorted(workload_names()))
        super().__init__(
            target=target, problem=problem, expected=_EXPECTED, workloads=f" ({names})" if names else " of a checkout"
        )


def resolve(target: str, device: torch.device) -> Program:
    """Builds the program that ``target`` names, for ``device``."""
    if ":" not in target:
        workload = _workloads().get(target)
        if workload is None:
            raise TargetError(target, "no such workload")
        try:
            return workload.build(device)
        except ModuleNotFoundError as missing:
            raise TargetError(target, f"it needs the package {missing.name}, which is not installed") from missing
    place, name = target.rsplit(":", 1)
    function = getattr(_module(target, place), name, None)
    if not callable(function):
        raise TargetError(target, f"{place} has no function {name!r}")
    return _program(target, name, _call(target, function, device))


def workload_names() -> list[str]:
    """Names of the workloads; empty if the package is installed without its checkout."""
    return list(_workloads())


def _workloads() -> Mapping[str, Any]:
    if not _WORKLOADS.exists():
        return {}
    module = sys.modules.get("pygraph_bench_workloads") or _load("pygraph_bench_workloads", _WORKLOADS)
    workloads: Mapping[str, Any] = module.WORKLOADS
    return workloads


def _module(target: str, place: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        if not path.exists():
            raise TargetError(target, f"there is no file {place}")
        sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours, as a script can
        return _load(path.stem, path)
    sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (place == missing.name or place.startswith(missing.name + ".")):
            raise TargetError(target, f"there is no module {place}") from missing
        raise
    finally:
        sys.path.remove("")


def _load(name: str, path: Path) -> ModuleType:
    locations = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=locations)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _call(target: str, function: Callable[..., Any], device: torch.device) -> Any:
    parameters = inspect.signature(function).parameters
    required = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if set(required) - {"device"}:
        raise TargetError(target, f"it needs arguments ({', '.join(required)}), only `device` is given")
    return function(device=device) if "device" in parameters else function()


def _program(target: str, name: str, made: Any) -> Program:
    if isinstance(made, Program):
        return made
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]) and isinstance(made[1], (tuple, list)):
        kwargs = made[2] if len(made) == 3 else {}
        if isinstance(kwargs, Mapping):
            return Program(fn=made[0], args=tuple(made[1]), kwargs=kwargs, context=torch.no_grad, name=name)
    shape = (
        f"a tuple of {', '.join(type(m).__name__ for m in made)}" if isinstance(made, tuple) else type(made).__name__
    )
    raise TargetError(target, f"it returned {shape}")
