"""A kernel that takes bytes by value and writes them to memory of the GPU.

A node of this kernel holds its bytes itself: setting it copies them, and queued launches keep theirs. So the memory
from which they were copied may be written to at once.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraph_trees.errors import DriverError

if TYPE_CHECKING:
    from .driver import Driver

NAME = "pygraph_put"  # a kernel's name begins so; the most bytes that it takes follow
WIDTHS = (256, 1024, 4096, 8192, 16384, 32736)  # bytes; CUDA allows 32,764 for all parameters (PTX 8.1, sm_70)
BYTES = 2  # the number of the parameter that holds the bytes
_AT_ONCE, _THREADS = 16, 32  # bytes that a thread writes, threads of a block

_log = logging.getLogger("pygraph_trees.cuda")


def source(width: int) -> str:
    """The kernel in PTX. A thread writes 16 bytes, or the last ones one by one.

    Threads of a warp that read different parameters wait for each other, so each block is one warp.
    """
    return f"""
.version 8.1
.target sm_70
.address_size 64

.visible .entry {NAME}_{width}(.param .u64 target, .param .u32 nbytes, .param .align 16 .b8 bytes[{width}])
{{
    .reg .pred %done;
    .reg .b16 %one;
    .reg .b32 %at, %thread, %block, %end, %nbytes;
    .reg .b64 %from, %to, %offset, %low, %high;

    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mad.lo.u32 %at, %block, {_THREADS}, %thread;
    mul.lo.u32 %at, %at, {_AT_ONCE};
    ld.param.u32 %nbytes, [nbytes];
    ld.param.u64 %to, [target];
    cvta.to.global.u64 %to, %to;
    mov.u64 %from, bytes;
    cvt.u64.u32 %offset, %at;
    add.s64 %to, %to, %offset;
    add.s64 %from, %from, %offset;
    add.u32 %end, %at, {_AT_ONCE};
    setp.gt.u32 %done, %end, %nbytes;
    @%done bra rest;
    ld.param.v2.u64 {{%low, %high}}, [%from];
    st.global.v2.u64 [%to], {{%low, %high}};
    ret;
rest:
    setp.ge.u32 %done, %at, %nbytes;
    @%done ret;
    ld.param.u8 %one, [%from];
    st.global.u8 [%to], %one;
    add.u32 %at, %at, 1;
    add.s64 %from, %from, 1;
    add.s64 %to, %to, 1;
    bra rest;
}}
"""


@dataclass(frozen=True, slots=True)
class ValueKernel:
    """The kernel for at most ``width`` bytes, in the context that was current when it was loaded."""

    driver: Driver
    function: int
    width: int

    def launch(self, stream: int, target: int, values: bytes) -> None:
        """Writes at most ``width`` bytes to ``target``, an address that is a multiple of 16."""
        nbytes, block = len(values), (ctypes.c_char * self.width).from_buffer_copy(values.ljust(self.width, b"\0"))
        parameters = ctypes.c_uint64(target), ctypes.c_uint32(nbytes), block
        pointers = (ctypes.c_uint64 * len(parameters))(*map(ctypes.addressof, parameters))
        blocks = max(1, -(-nbytes // (_AT_ONCE * _THREADS)))
        grid = blocks, 1, 1, _THREADS, 1, 1
        self.driver.call("cuLaunchKernel", self.function, *grid, 0, stream, ctypes.addressof(pointers), 0)


def value_kernel(driver: Driver, device: int, stream: int, nbytes: int) -> ValueKernel | None:
    """The kernel for so many bytes on the current device; None if there is none, or if it could not be loaded."""
    kernels = driver.value_kernels
    width = next((width for width in WIDTHS if nbytes <= width), None)
    if width is not None and (device, width) not in kernels:
        kernels[device, width] = _loaded(driver, stream, width)
    return None if width is None else kernels[device, width]


def _loaded(driver: Driver, stream: int, width: int) -> ValueKernel | None:
    """Loads a kernel, for as long as the process lives, by a launch without bytes, which a capture must not do."""
    try:
        with driver.without_disturbing_captures():
            (module,) = driver.call("cuModuleLoadData", source(width).encode() + b"\0")
            (function,) = driver.call("cuModuleGetFunction", module, f"{NAME}_{width}".encode())
            kernel = ValueKernel(driver, int(function), width)
            kernel.launch(stream, 0, b"")
    except DriverError as error:
        _log.warning("no kernel can hold %d bytes of inputs on the CPU, or of addresses: %s", width, error)
        return None
    return kernel
