"""Renders HTML: one self-contained page without network or script, light and dark, wide and narrow.

:func:`page` takes a report's records and, for a measured program, the sections that ``benchmark`` adds; the element
``#report`` holds the records as JSON for tools. :func:`render` fills a template of ``templates/`` and escapes all text
that it is given. HTML is :class:`markupsafe.Markup`, which other templates insert unchanged.
"""

from __future__ import annotations

import datetime
import functools
import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from . import text
from .records import IN_POOL, ON_INPUT, OWN_MEMORY, FunctionRecord, RecordingRecord, Snapshot

_MOST_ROWS = 400  # of one table of inputs
_FEW_ROWS = 24  # a longer table of inputs is closed: hundreds of parameters are no news
_GIVEN = {"patch": "by address", "table": "by table", "copy": "copied", "stage": "staged"}
_PLACES = {OWN_MEMORY: "in own memory", IN_POOL: "in the graph pool", ON_INPUT: "on an input"}
_IN_TEMPLATES = "amounts called cause_line counted facts function_notes mode_and_part nbytes placed_lines title"


@dataclass(frozen=True, slots=True)
class Section:
    anchor: str
    title: str
    body: Markup


def render(template: str, **values: Any) -> Markup:
    """Renders the template ``NAME.html``; a missing value raises :class:`jinja2.UndefinedError`."""
    return Markup(_environment().get_template(f"{template}.html").render(values))


def preformatted(shown: object) -> Markup:
    return Markup("<pre>{}</pre>").format(str(shown))


@dataclass(frozen=True, slots=True)
class Shown:
    """A dataclass of records that prints as text, shows itself in a notebook, and becomes JSON or a page."""

    def to_text(self) -> str:
        raise NotImplementedError

    def _page(self) -> str:
        raise NotImplementedError

    def to_json(self) -> str:
        """All records as a JSON object, with their names as keys."""
        return json.dumps(asdict(self), indent=1)

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page for a browser, also written to ``path`` if given."""
        html = self._page()
        if path is not None:
            # Arguments of the command line that are not UTF-8 contain surrogates.
            Path(path).write_text(html, encoding="utf-8", errors="backslashreplace")
        return html

    def _repr_html_(self) -> str:
        return preformatted(self.to_text())

    def __str__(self) -> str:
        return self.to_text()


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        extensions=["jinja2.ext.do"],
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update({name: getattr(text, name) for name in _IN_TEMPLATES.split()})
    return environment


def page(
    report: Snapshot,
    first: Sequence[Section] = (),
    *,
    name: str = "CUDA graphs",
    verdict: Sequence[str] = (),
    more: Mapping[str, object] | None = None,
) -> str:
    """The page: ``verdict`` is lines at the top, ``first`` comes before other sections, ``more`` goes into the JSON."""
    wrong = text.problems(report)
    functions = render(
        "functions",
        functions=report.functions,
        few=_FEW_ROWS,
        most=_MOST_ROWS,
        in_order=lambda inputs: sorted(inputs, key=lambda i: (-i.copied_bytes, i.kind != "live", i.index)),
        kinds_of=lambda inputs: text.amounts(Counter(i.kind for i in inputs)),
        places=_PLACES,
        given=_GIVEN,
    )
    sections = [
        *([Section("problems", "Problems", render("problems", problems=wrong))] if wrong else []),
        *first,
        Section("functions", "Functions", functions),
        Section("tree", "Tree of recordings", _tree(report.functions)),
        Section("graphs", "Compiled graphs", render("graphs", graphs=report.graphs, most=_MOST_ROWS)),
    ]
    newest = [f.recordings[-1] for f in report.functions if f.recordings]
    before = render("summary", verdict=verdict, report=report, newest=newest)
    versions, patches, *off = text.environment_lines(report.environment)
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    lines = [f"{versions}; {patches}", *off, f"{now}, {_command()}"]
    return document(name, lines, before, sections, {**asdict(report), **(more or {})})


def document(
    name: str, lines: Iterable[str], before: Markup | str, sections: Sequence[Section], data: Mapping[str, object]
) -> str:
    """A page with a heading, plain ``lines``, HTML ``before`` the sections, which links can reach, and data as JSON."""
    # A character that could end the element is written as an escape, which JSON reads as the same character.
    content = json.dumps(data, indent=1).replace("<", "\\u003c")
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return render("document", name=name, lines=lines, before=before, sections=sections, data=content, css=css)


def _command() -> str:
    """The command as a user types it, without the folders of the program."""
    if not sys.argv or not sys.argv[0]:
        return "Python"
    program, *arguments = sys.argv
    if Path(program).name == "__main__.py":
        return f"python -m {Path(program).parent.name} {shlex.join(arguments)}".rstrip()
    return shlex.join([Path(program).name, *arguments])


@dataclass(frozen=True, slots=True)
class Node:
    function: FunctionRecord
    recording: RecordingRecord
    place: tuple[int, int]  # index of the function in the report, and of the recording in it; anchors are made of it


def _tree(functions: Sequence[FunctionRecord]) -> Markup:
    """All recordings as one tree across functions, with a link from each to its function's section.

    Numbers belong to a manager and may repeat: a recording whose parent is ambiguous starts a tree and names what it
    follows.
    """
    nodes = [Node(f, r, (index, at)) for index, f in enumerate(functions) for at, r in enumerate(f.recordings)]
    numbers: Counter[int | None] = Counter(node.recording.number for node in nodes)
    below: dict[int | None, list[Node]] = defaultdict(list)  # by number of the parent; None: there is not exactly one
    for node in sorted(nodes, key=lambda node: node.recording.number):
        parent = node.recording.parent
        below[parent if numbers[parent] == 1 else None].append(node)

    def why(recording: RecordingRecord) -> str:
        """The reason why it was made and, if its parent is ambiguous, what it follows."""
        if recording.parent is None or numbers[recording.parent] == 1:
            return recording.reason
        which = "several recordings have this number" if recording.parent in numbers else "it is not in this report"
        return f"{recording.reason}, after recording {recording.parent} ({which})"

    steps = list(_lists([*below[None], *nodes], below))  # records in a cycle have no root
    return render("tree", steps=steps, why=why, ambiguous=len(numbers) < len(nodes))


def _lists(roots: Sequence[Node], below: Mapping[int | None, Sequence[Node]]) -> Iterator[Node | str]:
    """Recordings and tags. Unbranched paths are ``ol``, branches are ``ul``; every recording appears exactly once."""
    seen: set[tuple[int, int]] = set()
    for root in roots:
        pending: list[Node | str] = [root]
        while pending:
            node = pending.pop()
            if isinstance(node, str):
                yield node
                continue
            if node.place in seen:
                continue
            yield "<li><ol>"
            while True:
                seen.add(node.place)
                yield node
                followers = [f for f in below.get(node.recording.number, ()) if f.place not in seen]
                if len(followers) != 1:
                    break
                yield "</li>"
                (node,) = followers
            yield "<ul>" if followers else "</li></ol></li>"
            pending += ["</ul></li></ol></li>", *reversed(followers)] if followers else []
