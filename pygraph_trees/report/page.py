"""Renders the report as one self-contained HTML page: no network, no script, light and dark, wide and narrow.

:func:`page` takes a report's records and, for a measured program, the sections that ``benchmark`` adds. Elements that
open are ``details`` elements, which work with a keyboard. The element ``#report`` holds the records as JSON for tools.
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from markupsafe import Markup

from .markup import Section, render
from .recorded_tree import recorded_tree
from .records import IN_POOL, ON_INPUT, OWN_MEMORY, FunctionRecord, Snapshot
from .text import amounts, environment_lines, problems

_MOST_ROWS = 400  # of one table of inputs
_FEW_ROWS = 24  # a longer table of inputs is closed: hundreds of parameters are no news
_CSS = Path(__file__).with_name("page.css")
_GIVEN = {"patch": "by address", "table": "by table", "copy": "copied", "stage": "staged"}
_PLACES = {OWN_MEMORY: "in own memory", IN_POOL: "in the graph pool", ON_INPUT: "on an input"}


def page(
    report: Snapshot,
    first: Sequence[Section] = (),
    *,
    name: str = "CUDA graphs",
    verdict: Sequence[str] = (),
    more: Mapping[str, object] | None = None,
) -> str:
    """The page: ``verdict`` is lines at the top, ``first`` comes before other sections, ``more`` goes into the JSON."""
    wrong = problems(report)
    sections = [
        *([Section("problems", "Problems", render("problems", problems=wrong))] if wrong else []),
        *first,
        Section("functions", "Functions", _functions(report.functions)),
        Section("tree", "Tree of recordings", recorded_tree(report.functions)),
        Section("graphs", "Compiled graphs", render("graphs", graphs=report.graphs, most=_MOST_ROWS)),
    ]
    newest = [f.recordings[-1] for f in report.functions if f.recordings]
    before = render("summary", verdict=verdict, report=report, newest=newest)
    versions, patches, *off = environment_lines(report.environment)
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    lines = [f"{versions}; {patches}", *off, f"{now}, {_command()}"]
    return document(name, lines, before, sections, {**asdict(report), **(more or {})})


def document(
    name: str, lines: Iterable[str], before: Markup | str, sections: Sequence[Section], data: Mapping[str, object]
) -> str:
    """A page with a heading, plain ``lines``, HTML ``before`` the sections, which links can reach, and data as JSON."""
    # A character that could end the element is written as an escape, which JSON reads as the same character.
    content = json.dumps(data, indent=1).replace("<", "\\u003c")
    css = _CSS.read_text(encoding="utf-8")
    return render("document", name=name, lines=lines, before=before, sections=sections, data=content, css=css)


def _command() -> str:
    """The command as a user types it, without the folders of the program."""
    if not sys.argv or not sys.argv[0]:
        return "Python"
    program, *arguments = sys.argv
    if Path(program).name == "__main__.py":
        return f"python -m {Path(program).parent.name} {shlex.join(arguments)}".rstrip()
    return shlex.join([Path(program).name, *arguments])


def _functions(functions: Sequence[FunctionRecord]) -> Markup:
    return render(
        "functions",
        functions=functions,
        few=_FEW_ROWS,
        most=_MOST_ROWS,
        in_order=lambda inputs: sorted(inputs, key=lambda i: (-i.copied_bytes, i.kind != "live", i.index)),
        kinds_of=lambda inputs: amounts(Counter(i.kind for i in inputs)),
        places=_PLACES,
        given=_GIVEN,
    )
