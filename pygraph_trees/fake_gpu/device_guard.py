"""Makes torch's C++ code accept tensors of a CUDA device that does not exist.

Inside :func:`no_op_device_guard`, C++ code finds a no-op guard for CUDA, and CUDA as the accelerator. If torch has a
CUDA device, nothing changes; if any step fails, everything is undone and :class:`NoDeviceGuardError` is raised.
README.md explains the method.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

from pygraph_trees.errors import PygraphError

_CUDA = 1  # c10::DeviceType::CUDA
# Slots of isBuilt, isAvailable and hasPrimaryContext in AcceleratorHooksInterface, after two for its destructor.
_ANSWERED_TRUE = (2, 3, 4)
_BEFORE_METHODS = 2  # pointers in a method table: offset to top, type information
_SLOTS = 128  # more than any method table has; copies beyond its end are never called


class NoDeviceGuardError(PygraphError):
    template = "torch {version} cannot be made to trace for a fake GPU: {what}. It was left unchanged."


def _symbol(name: str) -> int:
    """Address of an exported symbol of torch's libraries."""
    for library in (None, "libc10.so", "libtorch_cpu.so", "libc10.dylib", "libtorch_cpu.dylib"):
        path = None if library is None else f"{torch.__path__[0]}/lib/{library}"
        with contextlib.suppress(OSError, ValueError):
            return ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(path), name))
    raise NoDeviceGuardError(version=torch.__version__, what=f"its libraries do not export {name}")


def _guard_slot() -> Any:
    """The registry's entry for CUDA: ``std::atomic<DeviceGuardImplInterface const*>``."""
    registry = _symbol("_ZN3c104impl26device_guard_impl_registryE")
    return ctypes.c_void_p.from_address(registry + _CUDA * ctypes.sizeof(ctypes.c_void_p))


@functools.cache  # kept alive for good
def _with_cuda_built(original: int) -> Any:
    """A copy of the CUDA hooks' method table in which CUDA is built and available."""
    table_type = ctypes.c_void_p * (_BEFORE_METHODS + _SLOTS)
    pointer_size = ctypes.sizeof(ctypes.c_void_p)
    table = table_type.from_buffer_copy(table_type.from_address(original - _BEFORE_METHODS * pointer_size))
    # Any C function works that returns 1 without arguments, the interpreter lock or side effects.
    for slot in _ANSWERED_TRUE:
        table[_BEFORE_METHODS + slot] = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    return table


@functools.cache  # made once by torch, never freed
def _no_op_guard() -> int:
    """Makes torch put its no-op guard into the empty slot; empties the slot again and returns the guard's address."""
    slot = _guard_slot()
    answer_zero = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    table = (ctypes.c_void_p * _SLOTS)(*[ctypes.cast(answer_zero, ctypes.c_void_p)] * _SLOTS)
    substitute = ctypes.c_void_p(ctypes.addressof(table))
    slot.value = ctypes.addressof(substitute)
    try:
        torch._C._ensureCUDADeviceGuardSet()
        made: int | None = slot.value
    finally:
        slot.value = None
    if made is None or made == ctypes.addressof(substitute):
        raise NoDeviceGuardError(version=torch.__version__, what="it put no guard in place of one without devices")
    return made


@contextlib.contextmanager
def no_op_device_guard() -> Iterator[None]:
    """Inside, C++ code takes CUDA devices as given; raises :class:`NoDeviceGuardError` if that is impossible."""
    if torch.cuda.device_count():
        yield
        return
    slot = _guard_slot()
    get_hooks = ctypes.CFUNCTYPE(ctypes.c_void_p)(_symbol("_ZN2at6detail12getCUDAHooksEv"))  # at::detail::getCUDAHooks
    hooks = ctypes.c_void_p.from_address(get_hooks())  # its method table
    before, table_before = slot.value, hooks.value
    cuda_is_built = _with_cuda_built(table_before)
    try:
        if before is None:
            slot.value = _no_op_guard()
        else:
            torch._C._ensureCUDADeviceGuardSet()
        hooks.value = ctypes.addressof(cuda_is_built) + _BEFORE_METHODS * ctypes.sizeof(ctypes.c_void_p)
        accelerator = torch._C._accelerator_getAccelerator()
        if getattr(accelerator, "type", None) != "cuda":
            raise NoDeviceGuardError(version=torch.__version__, what=f"it takes {accelerator} for the accelerator")
        yield
    finally:
        slot.value = before
        hooks.value = table_before
