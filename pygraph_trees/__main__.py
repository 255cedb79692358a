"""The command line: ``python -m pygraph_trees compare``, ``explain``, ``build`` and ``profiles``.

``compare`` runs a target four ways and prints times, costs and the report; ``explain`` shows, without a GPU, how a
target is split and what each input costs; ``build`` compiles the parts in C and C++; ``profiles`` lists or removes the
decisions kept on disk. Exit status: 0; 1 if a way failed or its outputs differ from eager's; 2 for a command that
cannot be carried out as given.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import report
from .cli.target_names import DEFAULT
from .errors import PygraphError
from .version import __version__

if TYPE_CHECKING:
    from pygraph_trees.selection.profiles import Profile

    from .benchmark import Measurement


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out one command; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.command(options)
    except PygraphError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pygraph_trees", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action=_Version, help="show versions, and whether the native parts are built")
    commands = parser.add_subparsers(title="commands", required=True)
    help_target = (
        "file.py:function or package.module:function returning (model, args, kwargs) or (callable, args), "
        "or a workload; default: a BERT that reads a text"
    )

    compare = commands.add_parser("compare", help="run a target as eager, compile, upstream and ours, and measure")
    compare.add_argument("target", nargs="?", default=DEFAULT, metavar="TARGET", help=help_target)
    compare.add_argument("--rounds", type=_positive, default=5, help="rounds over the ways (default 5)")
    compare.add_argument(
        "--ways",
        metavar="A,B",
        help="some of eager,compile,upstream,ours (the default), ours:patch,ours:table,ours:selected",
    )
    compare.add_argument("--json", type=Path, metavar="FILE", help="also write measurements and report to FILE")
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write both, with drawings, as a page to FILE")
    compare.set_defaults(command=_compare)

    explain = commands.add_parser("explain", help="show partitions, their causes and the inputs; needs no GPU")
    explain.add_argument("target", nargs="?", default=DEFAULT, metavar="TARGET", help=help_target)
    _add_arch(explain)
    explain.set_defaults(command=_explain)
    _add_arch(compare)

    built = commands.add_parser("build", help="build the parts in C and C++ for the installed torch")
    built.set_defaults(command=_build)

    profiles = commands.add_parser("profiles", help="list what was decided of functions in earlier processes")
    profiles.add_argument("--clear", action="store_true", help="remove all of it, so that functions are measured again")
    profiles.set_defaults(command=_profiles)
    return parser


class _Version(argparse.Action):
    """As argparse's own, but the text is made when it is asked for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, nargs=0)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .native import build
        from .native.location import torch_version

        print(f"pygraph_trees {__version__}, torch {torch_version()}, native: {build.status()}")
        parser.exit()


def _add_arch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="sm_90", help="architecture of the GPU to explain for (default sm_90)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text}")
    return value


def _compare(options: argparse.Namespace) -> int:
    from .cli import destination

    destination.check({"--json": options.json, "--html": options.html})
    import torch

    from pygraph_trees.benchmark.verify import NO_GPU, NothingVerified

    from .benchmark import WAYS, Effort, compare, text_table
    from .cli import target
    from .cli.progress import Progress
    from .settings import Settings

    verifies = Settings.current().verify == "on"
    if not torch.cuda.is_available():
        if verifies:
            raise NothingVerified(why=NO_GPU)
        print("compare needs a GPU and this machine has none that torch can use; this is `explain` instead.\n")
        return _explain(options)

    program = target.resolve(options.target, torch.device("cuda"))
    ways = options.ways.split(",") if options.ways else WAYS
    measurements = compare(program, ways, Effort(rounds=options.rounds), Progress())
    found = report()
    print(text_table(measurements))
    agreement = _agreement(measurements)
    print(f"\n{agreement}\n\n{found}")
    if options.json:
        content = {"measurements": [asdict(m) for m in measurements], "report": json.loads(found.to_json())}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.html:
        from pygraph_trees.benchmark.page import write_page

        write_page(options.html, measurements, found, agreement)
    has_ours = any(way.startswith("ours") for way in ways)
    if verifies and has_ours and not any(function.recordings for function in found.functions):
        raise NothingVerified(why="no part of the target ran in a CUDA graph of ours; the report says why")
    return 1 if any(m.error for m in measurements) else 0


def _agreement(measurements: Sequence[Measurement]) -> str:
    """One line on outputs: how far each way's are from eager's, and ours from upstream's."""
    parts = []
    for way in ("compile", "upstream", "ours"):
        found = [m.max_diff for m in measurements if m.way == way and m.max_diff is not None]
        if found:
            parts.append(f"{way} within {max(found):.2g}" if max(found) else f"{way} equal")
    apart = [m.max_diff_upstream for m in measurements if m.way == "ours" and m.max_diff_upstream is not None]
    ours = (
        "" if not apart else "; ours and upstream are " + ("bit-equal" if not any(apart) else f"{max(apart):.2g} apart")
    )
    return f"Outputs against eager: {', '.join(parts) or 'not compared'}{ours}."


def _explain(options: argparse.Namespace) -> int:
    import torch

    from .cli import target
    from .cli.explain import explain

    program = target.resolve(options.target, torch.device("meta"))
    print(explain(program, options.arch))
    return 0


def _build(options: argparse.Namespace) -> int:
    from .native import build

    print(f"built in {build.build()}")
    return 0


def _profiles(options: argparse.Namespace) -> int:
    from pygraph_trees.report.text import table
    from pygraph_trees.selection.profiles import Profiles

    profiles = Profiles.default()
    if options.clear:
        print(f"{_count_profiles(profiles.clear())} removed from {profiles.folder}")
        return 0
    found, now_s = profiles.list(), time.time()
    if found:
        head = ("function", "decision", "us", "against us", "for", "uses", "age")
        rows = [_profile_row(profile, now_s) for profile in found]
        print(table(head, rows, max(80, shutil.get_terminal_size((100, 24)).columns)) + "\n")
    print(f"{_count_profiles(len(found))} in {profiles.folder}")
    return 0


def _profile_row(profile: Profile, now_s: float) -> tuple[str, ...]:
    decision = profile.decision
    return (
        profile.what,
        decision.way.value,
        *(f"{decision.compared.step_us(way):.1f}" for way in (decision.way, decision.way.other)),
        decision.compared.objective.value,
        str(profile.uses),
        _age(profile.age_s(now_s)) + (", stale" if profile.is_stale(now_s) else ""),
    )


def _count_profiles(count: int) -> str:
    return f"{count} profile{'' if count == 1 else 's'}"


def _age(seconds: float) -> str:
    """``3 min``, ``5 h``, ``12 d``."""
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds) / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main())
