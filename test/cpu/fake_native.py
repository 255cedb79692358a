"""The native part on the fake driver: it calls a C library, which asks the fake.

:func:`native_over` gives a :class:`FakeApi` a module with the interface of ``pygraph_trees.native._graph_nodes``, so
that the tests of the code in Python also test the code in C++. It skips the test if the extension is not built or the
library cannot be built.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import struct
import subprocess
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_driver import CUDA_KERNEL_NODE_PARAMS as FakeParams
from fake_driver import CUgraphExec, CUgraphNode, CUresult, FakeApi

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_SETTER = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, _POINTER)
_GETTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_POINTER))
_INFO = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _SIZE, ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE))
_KINDS = {  # by call of the library
    "cuGraphGetNodes": ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.POINTER(_POINTER), ctypes.POINTER(_SIZE)),
    "cuGraphNodeGetType": ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.POINTER(ctypes.c_int)),
    "cuGraphKernelNodeGetParams_v2": ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER),
    "cuFuncGetParamInfo": _INFO,
    "cuKernelGetParamInfo": _INFO,
    "cuGraphExecKernelNodeSetParams_v2": _SETTER,
}
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


class Launch(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def _struct_at(address: int) -> FakeParams:
    """One of the fake's structs, or a copy of one from the C library in which only pointers may have changed."""
    try:
        return FakeParams.at(address)
    except KeyError:
        found = Launch.from_address(address)
        launch = *found.grid, *found.block, found.shared
        assert launch == (0x5A5A5A5A,) * 7 and found.context == 0x5A5A5A5A5A5A5A5A, "another launch"
        return FakeParams(found.function or 0, found.kernel or 0, found.parameters or 0, found.extra or 0)


def asking(**answers: Any) -> list[BaseException]:
    """From now on, calls of the library ask these functions; returns a list that gets their errors.

    C has no exceptions: a call that raises returns an error code.
    """
    path, raised = library(), list[BaseException]()
    if path is None:
        raise unittest.SkipTest("there is no C compiler")
    fake = ctypes.CDLL(str(path))
    for name, answer in answers.items():

        def ask(*given: Any, answer: Any = answer) -> int:
            try:
                return int(answer(*given))
            except BaseException as error:
                raised.append(error)
                return int(CUresult.CUDA_ERROR_UNKNOWN)

        _asked[name] = _KINDS[name](ask)
        _POINTER.in_dll(fake, f"ask_{name}").value = ctypes.cast(_asked[name], _POINTER).value
    return raised


_asked: dict[str, Any] = {}  # functions that C calls


def native_over(api: FakeApi) -> Any:
    try:
        from pygraph_trees.native import _graph_nodes
    except ImportError:
        raise unittest.SkipTest("the native part was not built") from None
    asking()  # skips the test without a compiler

    def nodes(graph: int, found: Any, count: Any) -> int:
        code, handles, number = api.cuGraphGetNodes(graph, count[0] if found else 0)
        for position, handle in enumerate(handles or ()):
            found[position] = int(handle)
        count[0] = number or 0
        return code

    def kind(node: int, found: Any) -> int:
        code, of = api.cuGraphNodeGetType(node)
        found[0] = int(of or 0)
        return code

    def parameters(node: int, address: int) -> int:
        code, params = api.cuGraphKernelNodeGetParams(node)
        if not code:
            ctypes.memset(address, 0x5A, ctypes.sizeof(Launch))
            found = Launch.from_address(address)
            found.function, found.kernel = int(params.func), int(params.kern)
            found.parameters, found.extra = int(params.kernelParams), int(params.extra)
        return code

    def info(ask: Any, handle: int, index: int, offset: Any, nbytes: Any) -> int:
        code, *place = ask(handle, index)
        if not code:
            offset[0], nbytes[0] = place
        return code

    answers = {"cuGraphGetNodes": nodes, "cuGraphNodeGetType": kind, "cuGraphKernelNodeGetParams_v2": parameters}
    for name in ("cuFuncGetParamInfo", "cuKernelGetParamInfo"):
        answers[name] = functools.partial(info, getattr(api, name))

    def search(_: str, graph: int, low: int, high: int) -> Any:
        raised = asking(**answers)
        found = _graph_nodes.search(str(library()), graph, low, high)
        if raised:
            raise raised[0]
        return found

    def set_kernels(_: str, exec_: int, nodes: bytes) -> tuple[int, int] | None:
        for position, (node, address) in enumerate(struct.iter_unpack("QQ", nodes)):
            (code,) = api.cuGraphExecKernelNodeSetParams(CUgraphExec(exec_), CUgraphNode(node), _struct_at(address))
            if code:
                return position, int(code)
        return None

    @_SETTER
    def set_kernel(exec_: int, node: int, address: int) -> int:
        try:
            (code,) = api.cuGraphExecKernelNodeSetParams(CUgraphExec(exec_), CUgraphNode(node), _struct_at(address))
        except BaseException:  # C has no exceptions: Python asks again, and gets it
            return int(CUresult.CUDA_ERROR_UNKNOWN)
        return int(code)

    @_GETTER
    def get_context(found: Any) -> int:
        code, context = api.cuCtxGetCurrent()
        found[0] = None if code else int(context)
        return int(code)

    api.held += set_kernel, get_context  # functions that C calls live as long as the fake that answers
    calls = {"cuGraphExecKernelNodeSetParams_v2": set_kernel, "cuCtxGetCurrent": get_context}
    return SimpleNamespace(
        search=search,
        set_kernels=set_kernels,
        address_of=lambda _, name: ctypes.cast(calls[name], ctypes.c_void_p).value,
    )
