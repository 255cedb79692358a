"""Builds the module in C++ for the installed torch: ``python -m pygraph_trees build``.

:func:`build` compiles into a temporary folder and moves it into place, so the folder is complete or missing. A file
lock keeps two processes from building at once. :func:`start` builds in a detached process of low priority, whose output
goes to a log next to the folder. After a failed build, only :func:`build` tries again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pygraph_trees.errors import PygraphError

from . import FOLDER, PREBUILT
from .location import SOURCES, torch_folder

_LOCK = FOLDER.with_name(f"{FOLDER.name}.lock")
LOG = FOLDER.with_name(f"{FOLDER.name}.log")  # output of builds that were started automatically
_FAILED = FOLDER.with_name(f"{FOLDER.name}.failed")  # exists after a build that failed

_LOWEST_PRIORITY = 19

_log = logging.getLogger("pygraph_trees.native")
_COMMAND = "import sys; from pygraph_trees.__main__ import main; sys.exit(main(['build']))"
_process: subprocess.Popen[bytes] | None = None  # a build that this process started; nobody waits for it
_is_prevented = _is_announced = False


class BuildFailed(PygraphError):
    template = "the parts in C++ were not built: {why}"


def is_built() -> bool:
    return FOLDER.is_dir()


def is_running() -> bool:
    """Whether a process is building now, or this one has just started it."""
    if _process is not None and _process.poll() is None:
        return True
    if not _LOCK.exists():
        return False
    from filelock import FileLock, Timeout

    with contextlib.suppress(Timeout, OSError), FileLock(_LOCK, timeout=0):
        return False
    return True


def has_failed() -> bool:
    return _FAILED.exists() and not is_built()


def build() -> Path:
    """Compiles the module if it is missing, in about half a minute, and returns its folder.

    A wheel's module will do if it can be loaded. Raises :class:`BuildFailed` if another process is building, if
    there is no torch, compiler or setuptools, or if the compiler fails, whose output is shown.
    """
    if is_built():
        return FOLDER
    if (torch := torch_folder()) is None:
        raise BuildFailed(why="there is no torch: pip install torch")
    if (prebuilt := loaded_prebuilt()) is not None:
        return prebuilt
    from filelock import FileLock, Timeout  # torch requires it

    try:
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_LOCK, timeout=0), tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix="building-") as made:
            if not is_built():
                try:
                    compile_module(Path(made), torch)
                except BuildFailed:
                    _FAILED.touch()
                    raise
                _FAILED.unlink(missing_ok=True)
                os.replace(Path(made) / "out", FOLDER)
    except Timeout:
        raise BuildFailed(why="another process is building them") from None
    except OSError as error:
        raise BuildFailed(why=f"{error}; TORCH_EXTENSIONS_DIR names another folder") from error
    return FOLDER


def loaded_prebuilt() -> Path | None:
    """The folder of a wheel's modules if this process uses them. Imports torch if there are some: loading tells."""
    if PREBUILT is None:
        return None
    from . import binding

    return PREBUILT if binding.extension is not None and binding.why_not_prebuilt is None else None


def prevent() -> None:
    """Prevents automatic builds in this process; :func:`build` still builds."""
    global _is_prevented
    _is_prevented = True


def why_missing() -> str | None:
    """Why this process runs without the built modules, as a phrase that follows "because"; None if it has them."""
    if "torch" in sys.modules:
        from . import binding

        if binding.extension is not None or binding.why_without is not None:
            return binding.why_without
    elif is_built() or PREBUILT is not None:
        return None  # it cannot be loaded yet: it needs torch's libraries
    if is_built():
        return "it was built after this process began; the next one uses it"
    if is_running():
        return "it is being built; the next process uses it"
    if has_failed():
        see = f"see {LOG}, then " if LOG.exists() else ""  # a build in the foreground writes none
        return f"its build failed: {see}run python -m pygraph_trees build"
    if _is_prevented:
        return "PYGRAPH_BUILD is off, and it is not built: run python -m pygraph_trees build"
    return "it is not built: run python -m pygraph_trees build"


def status() -> str:
    """``yes``, or ``no`` with what this process lacks, and the reason; then why a wheel's modules are not used."""
    why = why_missing()
    text = "yes" if why is None else f"no (replays are slower, outputs are not kept), because {why}"
    why = getattr(sys.modules.get("pygraph_trees.native.binding"), "why_not_prebuilt", None)
    return text if why is None else f"{text}; the wheel's cannot be loaded: {why}"


def announce() -> None:
    """At the first use of CUDA graphs in a process: starts a build if one is needed, and logs one line."""
    global _is_announced
    if _is_announced:
        return
    _is_announced = True
    from . import binding

    if binding.extension is None and binding.why_without is None and not _is_prevented:
        start()
    _log.log(logging.INFO if binding.extension is not None else logging.WARNING, "native: %s", status())


def start() -> None:
    """Starts a build in another process unless one is running or has failed; the next process uses its result."""
    global _process
    if is_built() or has_failed() or is_running():
        return
    with contextlib.suppress(OSError):  # the folder may be read-only
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with LOG.open("ab") as log:
            _process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # This process may find the package by a path that another one would not have.
                env={**os.environ, "PYGRAPH_DISABLE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        os.setpriority(os.PRIO_PROCESS, _process.pid, _LOWEST_PRIORITY)


def compile_module(folder: Path, torch: Path) -> None:
    """Compiles the module for the torch in a folder into the subfolder ``out``; raises :class:`BuildFailed`."""
    try:
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext
        from setuptools.errors import BaseError, CCompilerError
    except ImportError:
        raise BuildFailed(why="setuptools is missing: pip install setuptools") from None
    include = torch / "include"
    sources = folder / "sources"  # a copy, since objects may be written next to them
    shutil.copytree(SOURCES, sources, ignore=lambda _, names: [n for n in names if not n.endswith((".cpp", ".h"))])
    # A wheel's module does not name the folders in which it was made.
    prefixes = [f"-ffile-prefix-map={place}={name}" for place, name in ((torch, "torch"), (sources, "pygraph_trees"))]
    extension = Extension(
        "_fast_path",
        [str(sources / "fast_path.cpp")],
        include_dirs=[str(include), str(include / "torch" / "csrc" / "api" / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_python", "torch_cpu", "c10"],  # torch has loaded them before the module is imported
        extra_compile_args=["-std=c++20", "-g0", "-fvisibility=hidden", "-Wno-invalid-offsetof", *prefixes],
        language="c++",
    )
    command = build_ext(Distribution({"name": "pygraph_trees_native", "ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(folder / "out"), str(folder / "objects")
    try:
        command.ensure_finalized()
        command.run()
    except (BaseError, CCompilerError) as error:
        raise BuildFailed(why=f"{error}; they need a C++ compiler and Python's headers") from error
