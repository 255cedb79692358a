"""Packaging of pygraph-trees: ``pip install .`` puts ``pygraph_trees`` and ``inductor_patches`` on a stock torch."""

from __future__ import annotations

import re
import runpy
import site
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).resolve().parent
SOURCES = runpy.run_path(str(HERE / "pygraph_trees" / "native/sources.py"))["sources_hash"]()


def torch_folder() -> Path | None:
    """The installed torch, which an isolated build cannot import."""
    folders = [sysconfig.get_path("platlib"), *site.getsitepackages(), site.getusersitepackages()]
    found = (Path(folder) / "torch" for folder in folders)
    needed = ("version.py", "include/torch/csrc/autograd/python_variable.h", "lib/libtorch_python.so")
    return next((torch for torch in found if all((torch / name).is_file() for name in needed)), None)


def tensors_extension(torch: Path) -> Extension:
    """Good for this very torch; the module says so, and is not used with another one."""
    version = re.search(r"^__version__ = '(.+)'", (torch / "version.py").read_text(encoding="utf-8"), re.M)
    return Extension(
        "pygraph_trees.native._fast_path",
        [
            "pygraph_trees/native/tensors.cpp",
            *(
                f"pygraph_trees/native/{part}.cpp"
                for part in ("attributes", "entry", "candidates", "replay", "gradients", "call", "patch")
            ),
        ],
        depends=["pygraph_trees/native/fast_path.h", "pygraph_trees/native/tensors.h"],
        define_macros=[
            ("PYGRAPH_TORCH_VERSION", f'"{version[1] if version else "unknown"}"'),
            ("PYGRAPH_SOURCES", f'"{SOURCES}"'),
        ],
        include_dirs=[str(torch / "include"), str(torch / "include" / "torch" / "csrc" / "api" / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_python", "torch_cpu", "c10"],  # loaded by torch by the time this is
        extra_compile_args=["-std=c++20", "-g0"],
        language="c++",
        optional=True,
    )


torch = torch_folder()

setup(
    name="pygraph-trees",
    version=runpy.run_path(str(HERE / "pygraph_trees" / "version.py"))["__version__"],
    description='CUDA graphs for torch.compile(mode="reduce-overhead"): a drop-in for torch\'s cudagraph trees',
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["pygraph_trees", "pygraph_trees.*", "inductor_patches", "inductor_patches.*"]),
    package_data={"pygraph_trees": ["py.typed", "cli/*.txt", "report/*.css"], "inductor_patches": ["py.typed"]},
    ext_modules=[
        Extension(
            "pygraph_trees.native._graph_nodes",
            ["pygraph_trees/native/graph_nodes.c"],
            define_macros=[("Py_LIMITED_API", "0x030A0000"), ("PYGRAPH_SOURCES", f'"{SOURCES}"')],
            py_limited_api=True,
            optional=True,  # without a compiler Python does the same, more slowly
        ),
        *([] if torch is None else [tensors_extension(torch)]),
    ],
    install_requires=["torch>=2.11", 'triton>=3.6; platform_system == "Linux"'],
    extras_require={
        "test": ["expecttest", "hypothesis", "pytest"],
        "bench": ["transformers", "timm", "matplotlib"],
        "lint": ["mypy==2.4.1", "ruff==0.17.5"],
    },
    entry_points={
        "console_scripts": ["pygraph-trees = pygraph_trees.__main__:main"],
        # Registers a log name for TORCH_LOGS while torch is imported; installs no patch.
        "torch.backends": ["pygraph_trees = inductor_patches.torch_logs:register"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "License :: OSI Approved :: BSD License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
