"""Packaging of pygraph-trees: ``pip install .`` puts ``pygraph_trees`` and ``inductor_patches`` on a stock torch.

The parts in C++ are built for the torch in use by ``python -m pygraph_trees build``, not here.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

setup(
    name="pygraph-trees",
    version=runpy.run_path(str(HERE / "pygraph_trees" / "version.py"))["__version__"],
    description='CUDA graphs for torch.compile(mode="reduce-overhead"): a drop-in for torch\'s cudagraph trees',
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    author="the pygraph_trees authors",
    project_urls={"Paper": "https://arxiv.org/abs/2503.19779"},
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["pygraph_trees", "pygraph_trees.*", "inductor_patches", "inductor_patches.*"]),
    package_data={
        "pygraph_trees": [
            *("py.typed", "cli/*.txt", "report/page.css", "report/templates/*.html"),
            *("native/*.cpp", "native/*.h"),
        ],
        "inductor_patches": ["py.typed"],
    },
    install_requires=["torch>=2.11,<2.16", 'triton>=3.6; platform_system == "Linux"'],
    extras_require={
        "test": ["expecttest", "hypothesis", "pytest"],
        "bench": ["transformers", "timm"],
        "gpu": ["cuda-bindings"],  # torch's wheels for CUDA require it already
        "build": ["setuptools"],
        "lint": ["mypy==2.4.1", "ruff==0.17.5"],
    },
    entry_points={
        "console_scripts": ["pygraph-trees = pygraph_trees.__main__:main"],
        # Registers a log name for TORCH_LOGS while torch is imported; installs no patch.
        "torch.backends": ["pygraph_trees = inductor_patches:register"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "License :: OSI Approved :: BSD License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
