"""The native part on the fake driver: the fake's answers go into a C library, which the native part calls.

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

_SETTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_GETTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
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


def native_over(api: FakeApi) -> Any:
    try:
        from pygraph_trees.native import _graph_nodes
    except ImportError:
        raise unittest.SkipTest("the native part was not built") from None
    path = library()
    if path is None:
        raise unittest.SkipTest("there is no C compiler")
    fake = ctypes.CDLL(str(path))
    for name, count in (("fake_node", 8), ("fake_kernel", 3), ("fake_parameter", 2)):
        getattr(fake, name).argtypes = [ctypes.c_void_p] * count

    def search(_: str, graph: int, low: int, high: int) -> Any:
        _fill(fake, api, graph)
        return _graph_nodes.search(str(path), graph, low, high)

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


def _fill(fake: ctypes.CDLL, api: FakeApi, graph: int) -> None:
    code, _, count = api.cuGraphGetNodes(graph, 0)
    nodes = []
    if not code and count:
        code, nodes, _ = api.cuGraphGetNodes(graph, count)
    fake.fake_reset(int(code))
    known: set[tuple[int, int]] = set()
    for node in nodes or ():
        type_code, kind = api.cuGraphNodeGetType(node)
        if type_code or int(kind) != 0:
            fake.fake_node(int(node), int(type_code), 0 if kind is None else int(kind), 0, 0, 0, 0, 0)
            continue
        code, params = api.cuGraphKernelNodeGetParams(int(node))
        if code:
            fake.fake_node(int(node), 0, 0, int(code), 0, 0, 0, 0)
            continue
        handles = int(params.func), int(params.kern)
        fake.fake_node(int(node), 0, 0, 0, *handles, int(params.kernelParams), int(params.extra))
        if handles not in known and not int(params.extra):
            known.add(handles)
            _fill_kernel(fake, api, *handles)


def _fill_kernel(fake: ctypes.CDLL, api: FakeApi, function: int, kernel: int) -> None:
    ask = api.cuFuncGetParamInfo if function else api.cuKernelGetParamInfo
    answers: list[tuple[int, int]] = []
    while True:
        code, *place = ask(function or kernel, len(answers))
        if code:
            break
        answers.append((place[0], place[1]))
    fake.fake_kernel(function or kernel, int(bool(function)), int(CUresult(code)))
    for offset, nbytes in answers:
        fake.fake_parameter(offset, nbytes)
