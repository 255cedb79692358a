"""Runs Triton kernels of pointwise programs on the CPU, in Triton's interpreter, and prints what they store.

``python interpreted_kernels.py FILE``: the file holds, by name, a kernel's source as Inductor generates it and its
output, whose elements are zeros like those of all inputs; it is replaced by the outputs. A process of its own, because
Triton decides at import whether functions are interpreted.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

_HEADER = """
import triton, triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

@triton.jit
"""
_BLOCK = 1 << 15


def interpret(name: str, source: str, output: torch.Tensor, folder: Path) -> torch.Tensor:
    """The output of a kernel of one dimension whose inputs are zeros of the output's type and size."""
    signature = re.search(r"def (\w+)\((.*?)\):", source)
    assert signature is not None
    path = folder / f"{name}.py"
    path.write_text(_HEADER + source[signature.start() :], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs = [torch.zeros_like(output)] * signature[2].count("in_ptr")
    getattr(module, signature[1])[(-(-len(output) // _BLOCK),)](*inputs, output, len(output), XBLOCK=_BLOCK)
    return output


if __name__ == "__main__":
    kernels = torch.load(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        outputs = {f"k{n}": interpret(f"k{n}", *kernel, Path(folder)) for n, kernel in enumerate(kernels)}
    torch.save(list(outputs.values()), sys.argv[1])
