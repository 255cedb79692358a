"""The command line: ``python -m pygraph_trees compare``, ``explain``, ``build``, ``doctor`` and ``profiles``.

Exit status: 0; 1 if something needed does not work, a way failed, its outputs differ from eager's, or it is slower than
the baseline; 2 for a command that cannot be carried out as given; 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import inductor_patches

from . import report
from .errors import PygraphError
from .native import build
from .native.location import torch_folder, torch_version
from .version import __version__

if TYPE_CHECKING:
    from pygraph_trees.report.markup import Shown


class OutputError(PygraphError):
    template = "standard output: {why}"


class NeedsTorch(PygraphError):
    template = "{why}: {what}"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        return options.command(options)
    except PygraphError as error:
        if options.traceback:
            traceback.print_exception(error.__cause__ or error)
        hint = "" if options.traceback or error.__cause__ is None else " (--traceback shows where)"
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as a shell reports it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pygraph_trees",
        description="Measures and explains programs with CUDA graphs.",  # python -OO has no docstring
    )
    what = "show versions, and whether the native parts are built"
    parser.add_argument("--version", action=_Versions, nargs=0, help=what)
    commands = parser.add_subparsers(title="commands", required=True)
    compare = commands.add_parser("compare", help="run a target as eager, compile, upstream and ours, and measure")
    explain = commands.add_parser("explain", help="show partitions, their causes and the inputs; needs no GPU")
    built = commands.add_parser("build", help="build the parts in C++ for the installed torch")
    doctor = commands.add_parser("doctor", help="check what CUDA graphs need, and say what to do")
    doctor.set_defaults(command=_doctor)
    profiles = commands.add_parser("profiles", help="list the decisions that earlier processes stored")
    what = (
        "file.py:function or package.module:function returning (model, args), (model, args, kwargs) or (model, args, "
        "kwargs, loss), or a workload; default: BERT"
    )
    for command in (compare, explain):
        command.add_argument("target", nargs="?", default="", metavar="TARGET", help=what)

    compare.add_argument("--rounds", type=_positive, default=5, help="rounds over the ways (default 5)")
    compare.add_argument(
        "--ways",
        metavar="A,B",
        help="some of eager, compile, upstream, ours (the default), ours:patch, ours:table, ours:graphed, "
        "ours:keep, ours:overwrite, ours:one-lane, ours:lanes, ours:all-lanes",
    )
    _add_files(compare, "measurements and report")
    what = "also write a profiler's trace of one call in each way to FILE, for Perfetto, with names for graphed kernels"
    compare.add_argument("--trace", type=_file, metavar="FILE", help=what)
    what = "exit with 1 if a way is slower than in FILE, from --json"
    compare.add_argument("--baseline", type=functools.partial(_file, is_there=True), metavar="FILE", help=what)
    what = "by which a way may be slower (default 5)"
    compare.add_argument("--tolerance", type=_percent, default=5, metavar="PERCENT", help=what)
    what = "GPU to explain for, or its architecture: h100, sm_90 (default sm_90)"
    for command in (compare, explain):
        command.add_argument("--arch", default="sm_90", help=what)
    _add_files(explain, "the explanation")
    profiles.add_argument("--clear", action="store_true", help="remove them, so that functions are measured again")

    what = "print the traceback of an error in the target"
    parser.add_argument("--traceback", action="store_true", help=what)
    for command, function in ((compare, _compare), (explain, _explain), (built, _build), (profiles, _profiles)):
        command.set_defaults(command=function)
        # Without a default: it keeps the one given before the command.
        command.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=what)
    return parser


class _Versions(argparse.Action):
    """Prints the versions and exits. For modules of a wheel, torch is imported: only loading them tells their state."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        if (native := inductor_patches.why_unsupported(torch_version())) is None:
            with contextlib.suppress(ImportError, OSError):  # torch cannot be imported
                build.loaded_prebuilt()
            native = build.status()
        print(f"pygraph_trees {__version__}, torch {torch_version()}, native: {native}")
        parser.exit()


def _add_files(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", type=_file, metavar="FILE", help=f"also write {what} to FILE")
    parser.add_argument("--html", type=_file, metavar="FILE", help=f"also write {what} as a page to FILE")


def _number(kind: type[float], what: str, least: int, text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := kind(text)) >= least:
            return value
    raise argparse.ArgumentTypeError(f"expected a {what} of {least} or more, got {text!r}")


_positive = functools.partial(_number, int, "whole number", 1)
_percent = functools.partial(_number, float, "number", 0)


def _file(text: str, *, is_there: bool = False) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file, got ''")
    if is_there and not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def _show(text: object) -> None:
    """Prints a result; raises :class:`OutputError` if standard output cannot take it."""
    try:
        print(text, flush=True)
    except OSError as error:
        with open(os.devnull, "wb") as nowhere:  # takes what is left in the buffer, which Python writes at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OutputError(why=error.strerror) from None


def _deliver(found: Shown, options: argparse.Namespace) -> None:
    _show(found)
    if options.json:
        options.json.write_text(found.to_json() + "\n", encoding="utf-8")
    if options.html:
        found.to_html(options.html)


def _check_before_torch(options: argparse.Namespace) -> None:
    """Raises if a file cannot be written, the target is not there, or torch or its compiler cannot be used."""
    from .cli import destination, target
    from .selection.profiles import NoCacheFolder, Profiles

    trace = getattr(options, "trace", None)
    destination.check({"--json": options.json, "--html": options.html, "--trace": trace})
    target.check(options.target)
    _check_torch()
    folder = Profiles.default().folder.parent
    if (why := destination.problem_in(folder)) is not None:
        raise NoCacheFolder(folder=folder, why=why)


def _check_torch() -> None:
    if torch_folder() is None:
        raise NeedsTorch(why="there is no torch", what="pip install torch")
    if (why := inductor_patches.why_unsupported(torch_version())) is not None:
        raise NeedsTorch(why=why, what="install one of those")


def _compare(options: argparse.Namespace) -> int:
    _check_before_torch(options)
    import torch

    from .benchmark import WAYS, Effort, compare
    from .benchmark.outcome import NeedsGpu, Outcome
    from .benchmark.verify import NO_GPU, NothingVerified
    from .benchmark.ways import check
    from .cli import baseline, target
    from .cli.progress import Progress
    from .settings import Settings

    settings = Settings.current()
    default = (*WAYS, "ours:one-lane") if settings.branches in ("auto", "always") else WAYS
    ways = options.ways.split(",") if options.ways else default
    check(ways)
    verifies = settings.verify == "on"
    if not torch.cuda.is_available():
        if verifies:
            raise NothingVerified(why=NO_GPU)
        for option in ("json", "html", "trace", "baseline"):
            if getattr(options, option) is not None:
                raise NeedsGpu(instead=f"it has no measurements for --{option}")
        _show("compare needs a GPU, and torch finds none here; `explain` shows what it would run.\n")
        return _explain(options)

    path: Path | None = options.baseline
    times = {} if path is None else baseline.read(path, torch.cuda.get_device_name())
    program = target.resolve(options.target, torch.device("cuda"))
    measurements = compare(program, ways, Effort(rounds=options.rounds), Progress(), options.trace)
    found = Outcome(tuple(measurements), report())
    _deliver(found, options)
    has_ours = any(way.startswith("ours") for way in ways)
    if verifies and has_ours and not any(function.recordings for function in found.report.functions):
        raise NothingVerified(why="no part of the target ran in a CUDA graph of ours; the report says why")
    slower = [] if path is None else list(baseline.slower(found.measurements, path, times, options.tolerance / 100))
    for line in slower:
        _show(f"slower than {path}: {line}")
    return 1 if found.failed or slower else 0


def _explain(options: argparse.Namespace) -> int:
    _check_before_torch(options)
    import torch

    from .cli import target
    from .cli.explain import explain
    from .cli.progress import Progress

    program = target.resolve(options.target, torch.device("meta"))
    with target.raising_errors_of(options.target or target.DEFAULT):
        explained = explain(program, options.arch, Progress())
    _deliver(explained, options)
    return 0


def _build(options: argparse.Namespace) -> int:
    _check_torch()
    _show(f"built in {build.build()}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from .cli.doctor import checks

    status = 0
    for name, found, problem in checks():
        status |= problem is not None
        _show(f"{'NOT' if problem else 'ok '}  {name}: {found}{f'; {problem}' if problem else ''}")
    return status


def _profiles(options: argparse.Namespace) -> int:
    from pygraph_trees.report.text import counted
    from pygraph_trees.selection.profiles import Profiles

    profiles = Profiles.default()
    if options.clear:
        _show(f"{counted(profiles.clear(), 'profile')} removed from {profiles.folder}")
        return 0
    found = profiles.list()
    for profile in found:
        stale = ", stale" if profile.is_stale else ""
        _show(f"{profile.what}: {profile.text}, measured {_age(profile.age_s)} ago{stale}\n")
    _show(f"{counted(len(found), 'profile')} in {profiles.folder}")
    return 0


def _age(seconds: float) -> str:
    """``3 min``, ``5 h``, ``12 d``."""
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds) / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main())
