"""What the native parts ask of the driver, on the fake driver, and a library written in C."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_driver import CUDA_KERNEL_NODE_PARAMS, CUgraphExec, CUgraphNode, CUresult, FakeApi

from pygraph_trees.cuda.driver import CONTEXT_GETTER, KERNEL_SETTER

_POINTER = ctypes.c_void_p
_SETTER = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, _POINTER)
_GETTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_POINTER))
_SOURCE = Path(__file__).with_name("fake_libcuda.c")


@functools.cache
def library() -> Path | None:
    """The compiled library, or None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("c++")
    if compiler is None:
        return None
    folder = tempfile.mkdtemp(prefix="pygraph_fake_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "libfake.so"
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-O1", "-o", str(path), str(_SOURCE)], check=True)
    return path


def addresses_over(api: FakeApi) -> Callable[[str], int | None]:
    """``Driver.address_of`` for functions that ask the fake."""

    @_SETTER
    def set_kernel(exec_: int, node: int, address: int) -> int:
        params = CUDA_KERNEL_NODE_PARAMS.at(address)
        try:
            (code,) = api.cuGraphExecKernelNodeSetParams(CUgraphExec(exec_), CUgraphNode(node), params)
        except BaseException:  # C has no exceptions: Python asks again, and gets it
            return int(CUresult.CUDA_ERROR_UNKNOWN)
        return int(code)

    @_GETTER
    def get_context(found: Any) -> int:
        code, context = api.cuCtxGetCurrent()
        found[0] = None if code else int(context)
        return int(code)

    api.held += set_kernel, get_context  # functions that C calls live as long as the fake that answers
    calls = {KERNEL_SETTER: set_kernel, CONTEXT_GETTER: get_context}
    return lambda name: ctypes.cast(calls[name], _POINTER).value
