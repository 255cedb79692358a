"""The layout that CONTRIBUTING.md describes: rooms import what its table allows, and no files import each other."""

from __future__ import annotations

import ast
import graphlib
import re
import unittest
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pygraph_trees", "inductor_patches")

MOST_LINES, MOST_FILES = 400, 20
NAMES_WITHOUT_A_CONCEPT = {"common", "core", "helpers", "misc", "utils"}


@dataclass(frozen=True)
class Import:
    file: str  # path below the root
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def sources(root: Path) -> dict[str, str]:
    """The modules of the packages and of ``tools``: path below the root, by the name that an import uses."""
    found = {}
    for base, parts in ((root, PACKAGES), (root / "tools", (".",))):
        for path in (path for part in parts for path in (base / part).rglob("*.py")):
            names = path.relative_to(base).with_suffix("").parts
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path.relative_to(root).as_posix()
    return found


def imports(root: Path) -> list[Import]:
    """Every import of one of these modules by another one."""
    modules = sources(root)
    found = []
    for module, file in modules.items():
        package = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
        for line, name in _imported_names((root / file).read_text(encoding="utf-8"), package):
            target = name
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and modules[target] != file:
                found.append(Import(file, line, modules[target]))
    return sorted(set(found), key=lambda found: (found.file, found.line, found.target))


def _imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that is imported; for ``from a import b`` the name is ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        else:  # the module is a string, in a call or in a row of the table of patches
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "made_by"))
            given = node.args[:1] if is_call else node.values if isinstance(node, ast.Dict) else []
            for name in given:
                if isinstance(name, ast.Constant) and isinstance(name.value, str) and (is_call or "." in name.value):
                    yield name.lineno, name.value


def circle(found: Sequence[Import]) -> list[str]:
    """Files that import each other in a circle, with the first one once more at the end; empty if there are none."""
    graph: dict[str, list[str]] = {}
    for item in found:
        graph.setdefault(item.target, []).append(item.file)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        files: list[str] = error.args[1]
        return files
    return []


@dataclass(frozen=True)
class Table:
    """What each room may import: other rooms, and single files of them."""

    allowed: Mapping[str, frozenset[str]]

    @staticmethod
    def read(text: str) -> Table:
        """Reads the table of CONTRIBUTING.md, whose first column names rooms and whose last column names their imports.

        "all" and "all but ..." are understood; a sentence of the form "`name` is `this` and `that`" gives a name to
        several files.
        """
        groups = {
            name: _quoted(names) for name, names in re.findall(r"`(\w+)` is ((?:`[^`]+`(?:,\s+|\s+and\s+)?)+)", text)
        }
        heading, *rows = text.partition("| room |")[2].partition("\n\n")[0].splitlines()
        assert heading.endswith("| imports |"), heading
        cells = [row.strip("|").split("|") for row in rows[1:]]
        rooms = {name for row in cells for name in _quoted(row[0])}
        allowed = {}
        for row in cells:
            names = {each for name in _quoted(row[-1]) for each in groups.get(name, [name])}
            if row[-1].strip().startswith("all"):
                names = rooms - names
            unknown = {name for name in names if not {name, name.partition("/")[0]} & rooms}
            assert not unknown, f"{row[-1]} names no room: {unknown}"
            allowed |= {room: frozenset(names) for room in _quoted(row[0])}
        return Table(allowed)

    def violations(self, found: Sequence[Import]) -> list[str]:
        lines = []
        for item in found:
            own, other = room(item.file), room(item.target)
            below = item.target.partition("/")[2]
            if own is None or other is None or own == other or self.allowed.get(own, frozenset()) & {other, below}:
                continue
            lines.append(f"{item}: CONTRIBUTING.md's table does not let {own} import it")
        return lines


def _quoted(text: str) -> list[str]:
    return [name.rstrip("/") for name in re.findall(r"`([^`]+)`", text)]


def room(file: str) -> str | None:
    """``cuda`` for ``pygraph_trees/cuda/driver.py``, ``trees/hooks`` in ``trees``; a file in no room is its own."""
    package, _, below = file.partition("/")
    if package == "pygraph_trees":
        folder, _, rest = below.partition("/")
        return f"trees/{rest.partition('/')[0]}" if folder == "trees" and "/" in rest else folder
    return package if package == "inductor_patches" else None


class TestLayout(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.imports = imports(ROOT)
        cls.table = Table.read((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))

    def test_no_files_import_each_other(self) -> None:
        self.assertGreater(len(self.imports), 500)
        self.assertEqual(circle(self.imports), [])

    def test_rooms_import_what_contributing_allows(self) -> None:
        self.assertEqual(self.table.violations(self.imports), [])

    def test_contributing_names_every_room(self) -> None:
        rooms = {room(file) for file in sources(ROOT).values()} - {None}
        self.assertEqual(rooms, set(self.table.allowed))

    def test_a_file_is_one_concept(self) -> None:
        files = [path for path in (ROOT / "pygraph_trees").rglob("*") if path.suffix in (".py", ".cpp", ".h", ".css")]
        counted = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
        too_long = {path: count for path, count in counted.items() if count > MOST_LINES}
        self.assertEqual(too_long, {}, f"at most {MOST_LINES} lines are allowed: these files hold two concepts")
        rooms = Counter(path.parent for path in files)
        self.assertEqual([str(room) for room, count in rooms.items() if count > MOST_FILES], [])

    def test_a_file_is_named_by_its_concept(self) -> None:
        named = [file for file in sources(ROOT).values() if Path(file).stem.strip("_") in NAMES_WITHOUT_A_CONCEPT]
        self.assertEqual(named, [])


if __name__ == "__main__":
    unittest.main()
