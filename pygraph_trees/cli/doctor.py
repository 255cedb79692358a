"""Checks everything that CUDA graphs need here, and needs none of it itself.

:func:`checks` gives, for each part, its name, what there is, and what is wrong with what to do; None if it works.
Folders of caches are made. What needs torch comes last, and is left out if torch cannot be imported.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import inductor_patches
from pygraph_trees import settings
from pygraph_trees.cuda.driver import why_unusable
from pygraph_trees.native import FOLDER, PREBUILT, build
from pygraph_trees.native.location import torch_version
from pygraph_trees.selection.profiles import Profiles
from pygraph_trees.version import triton_version

from .destination import problem_in

# By state of a feature whose patches are not on.
TO_DO = {"disabled": "unset PYGRAPH_DISABLE", "off": "call pygraph_trees.install()", "mismatch": "use another torch"}


def checks() -> Iterator[tuple[str, str, str | None]]:
    c = os.environ.get("CC", "").strip() or next(filter(which, ("gcc", "clang", "cc")), "gcc")  # as Triton looks for it
    cpp = os.environ.get("CXX", "").strip() or sysconfig.get_config_var("CXX") or "g++"
    for name, variable, program in (("C compiler", "CC", c.split()[0]), ("C++ compiler", "CXX", cpp.split()[0])):
        is_enough = which(program) or (variable == "CXX" and (build.is_built() or PREBUILT is not None))
        yield name, which(program) or "none", None if is_enough else f"install {program}, or set {variable}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    yield "headers", str(header), None if header.exists() else "it is not there; install python3-dev"
    caches = {"TORCHINDUCTOR_CACHE_DIR": Profiles.default().folder.parent, "TORCH_EXTENSIONS_DIR": FOLDER.parent}
    for variable, folder in caches.items():
        why = problem_in(folder)
        yield f"cache {variable}", str(folder), None if why is None else f"{why}; set it to another folder"

    version = torch_version()
    unsupported = inductor_patches.why_unsupported(version)
    yield "torch", version, "pip install torch" if version == "none" else unsupported
    try:
        import torch

        from pygraph_trees.native import binding
    except Exception as error:
        yield "import of torch", "failed", f"{type(error).__name__}: {error}"
        return
    yield "Triton", triton_version() or "none", None if triton_version() else "install it"
    if torch.cuda.is_available():
        why = why_unusable() and f"inputs are copied at each replay, because {why_unusable()}"
        yield "GPU", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}", why
    else:
        why = "see nvidia-smi" if torch.version.cuda else "this torch is for the CPU, install one for CUDA"
        yield "GPU", "torch can use none", f"{why}; without one, only explain works"
    backend, problem = settings.allocator_backend(), "it has no graph pools; change PYTORCH_CUDA_ALLOC_CONF"
    yield "allocator", backend, None if backend == settings.NATIVE else problem
    for status in inductor_patches.install():
        why = "see torch" if unsupported else "; ".join([*status.mismatches, TO_DO.get(status.state, "")])
        yield f"patches {status.feature}", status.state, None if status.state == "on" else why
    why = "torch is not patched" if unsupported else build.why_missing()
    wrong = None if why is None else f"replays are slower and outputs are not kept, because {why}"
    if binding.why_not_prebuilt is not None:
        wrong = f"{wrong or 'a build is used'}; the wheel's cannot be loaded: {binding.why_not_prebuilt}"
    yield "native parts", str(build.loaded_prebuilt() or FOLDER), wrong
