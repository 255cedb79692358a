"""The layout that CONTRIBUTING.md describes: rooms import what its table allows, and no files import each other.

Imports count anywhere: at the top, inside a function, or for types alone. Importing a module also runs the
``__init__.py`` above it, which does not count. Nothing here imports the project.
"""

from __future__ import annotations

import ast
import re
import tempfile
import unittest
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pygraph_trees", "inductor_patches")

MOST_LINES = 450
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
            target = _module(name, modules)
            if target is not None and modules[target] != file:
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "made_by")) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def _module(name: str, modules: Mapping[str, str]) -> str | None:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def circle(found: Sequence[Import]) -> list[Import]:
    """Imports that form a circle; empty if there is none."""
    left: dict[str, list[Import]] = {}
    for item in found:
        left.setdefault(item.file, []).append(item)
    while True:  # a file that imports none of the remaining files is in no circle
        kept = {file: [item for item in items if item.target in left] for file, items in left.items()}
        kept = {file: items for file, items in kept.items() if items}
        if kept == left:
            break
        left = kept
    if not left:
        return []
    path, file = [], min(left)
    while file not in [item.file for item in path]:
        path.append(left[file][0])
        file = path[-1].target
    return path[[item.file for item in path].index(file) :]


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
            name: _quoted(names) for name, names in re.findall(r"`(\w+)` is ((?:`[^`]+`(?:, |\s+and\s+)?)+)", text)
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
    """``cuda`` for ``pygraph_trees/cuda/driver.py``. A file in no room, such as ``errors.py``, is its own room.

    Folders of ``trees`` are rooms, such as ``trees/hooks``.
    """
    package, _, below = file.partition("/")
    if package == "pygraph_trees":
        folder, _, rest = below.partition("/")
        return f"trees/{rest.partition('/')[0]}" if folder == "trees" and "/" in rest else folder
    return package if package == "inductor_patches" else None


def too_long(root: Path) -> list[str]:
    files = [path for path in (root / "pygraph_trees").rglob("*") if path.suffix in (".py", ".c", ".cpp", ".h", ".css")]
    counted = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(files)}
    return [
        f"{path.relative_to(root)} has {count} lines, at most {MOST_LINES} are allowed: it holds two concepts"
        for path, count in counted.items()
        if count > MOST_LINES
    ]


class TestLayout(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.imports = imports(ROOT)
        cls.table = Table.read((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))

    def test_no_files_import_each_other(self) -> None:
        self.assertGreater(len(self.imports), 500)
        self.assertEqual(list(map(str, circle(self.imports))), [])

    def test_rooms_import_what_contributing_allows(self) -> None:
        self.assertEqual(self.table.violations(self.imports), [])

    def test_contributing_names_every_room(self) -> None:
        rooms = {room(file) for file in sources(ROOT).values()} - {None}
        self.assertEqual(rooms, set(self.table.allowed))

    def test_a_file_is_one_concept(self) -> None:
        self.assertEqual(too_long(ROOT), [])

    def test_a_file_is_named_by_its_concept(self) -> None:
        named = [file for file in sources(ROOT).values() if Path(file).stem.strip("_") in NAMES_WITHOUT_A_CONCEPT]
        self.assertEqual(named, [])


TABLE = """
`base` is `errors.py` and `settings.py`; `notes` is `report/records.py`.

| room | what it holds | imports |
| --- | --- | --- |
| `__init__.py` | the package | all |
| `trees/` | recordings, see `cuda/` | `cuda` `notes` `base` |
| `report/` | what happened | `base` |
| `cuda/` | the driver | |
| `errors.py` `settings.py` | | `errors.py` |
| `inductor_patches/` | patches | all but `cuda` |

After it.
"""


class TestChecks(unittest.TestCase):
    """The checks above find what they look for in a made-up tree."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for file in ("cuda/driver", "report/records", "report/page", "trees/manager", "errors", "settings", "__init__"):
            self.write(f"pygraph_trees/{file}.py", "")
        self.write("inductor_patches/__init__.py", "")

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def circle(self) -> list[str]:
        return list(map(str, circle(imports(self.root))))

    def violations(self) -> list[str]:
        return [line.partition(": ")[0] for line in Table.read(TABLE).violations(imports(self.root))]

    def test_a_circle_is_found_by_its_imports(self) -> None:
        self.write("pygraph_trees/trees/manager.py", "from . import recording\nfrom ..errors import Error\n")
        for back in (
            "import pygraph_trees.trees.manager",
            "if TYPE_CHECKING:\n    from pygraph_trees.trees.manager import Manager",
            "manager = importlib.import_module('pygraph_trees.trees.manager')",
        ):
            with self.subTest(back):
                self.write("pygraph_trees/trees/recording.py", f"{back}\n")
                first, second = self.circle()
                self.assertEqual(first, "pygraph_trees/trees/manager.py:1 imports pygraph_trees/trees/recording.py")
                line = 1 + back.count("\n")
                self.assertTrue(second.startswith(f"pygraph_trees/trees/recording.py:{line} imports"), second)
        self.write("pygraph_trees/trees/recording.py", "import torch\nfrom . import other\n")
        self.assertEqual(self.circle(), [])

    def test_an_arrow_that_is_not_in_the_table_is_named(self) -> None:
        self.write("pygraph_trees/__init__.py", "import inductor_patches\nfrom .trees import manager\n")
        self.write("pygraph_trees/trees/manager.py", "from pygraph_trees.report.records import A\nimport torch\n")
        self.write("pygraph_trees/cellar/wine.py", "import torch\n")
        self.assertEqual(self.violations(), [])
        self.write("pygraph_trees/trees/manager.py", "\nfrom pygraph_trees.report.page import page\n")
        self.write("pygraph_trees/settings.py", "from pygraph_trees.cuda import driver\nfrom .errors import Error\n")
        self.write("pygraph_trees/cellar/wine.py", "from pygraph_trees.errors import Error\n")  # not in the table
        self.write("inductor_patches/__init__.py", "from pygraph_trees.cuda.driver import driver\n")
        self.assertEqual(
            self.violations(),
            [
                "inductor_patches/__init__.py:1 imports pygraph_trees/cuda/driver.py",
                "pygraph_trees/cellar/wine.py:1 imports pygraph_trees/errors.py",
                "pygraph_trees/settings.py:1 imports pygraph_trees/cuda/driver.py",
                "pygraph_trees/trees/manager.py:2 imports pygraph_trees/report/page.py",
            ],
        )


if __name__ == "__main__":
    unittest.main()
