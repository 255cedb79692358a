"""The properties that Inductor and Triton read of a CUDA GPU, for each architecture that can be named.

One board, common in data centres, represents each architecture. Another board gives the same partitions and, except for
tile sizes of templates and split reductions, the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from pygraph_trees.errors import PygraphError


class UnknownArchitectureError(PygraphError):
    template = "arch must be one of {allowed}, or a GPU such as 'h100' or 'a100'; got {arch!r}."


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """The attributes of ``torch.cuda.get_device_properties(0)``, by torch's names; sizes in bytes."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    max_threads_per_multi_processor: int
    shared_memory_per_block: int = 49152
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0

    @property
    def gcnArchName(self) -> str:
        """The board's name, as CUDA builds of torch answer."""
        return self.name

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


_KIB, _MIB = 1 << 10, 1 << 20

ARCHITECTURES: dict[str, DeviceProperties] = {
    "sm_80": DeviceProperties(
        "NVIDIA A100-SXM4-80GB", 8, 0, 108, 81153 * _MIB, 40 * _MIB, 163 * _KIB, 164 * _KIB, 2048
    ),
    "sm_86": DeviceProperties("NVIDIA RTX A6000", 8, 6, 84, 48676 * _MIB, 6 * _MIB, 99 * _KIB, 100 * _KIB, 1536),
    "sm_89": DeviceProperties("NVIDIA L40S", 8, 9, 142, 45488 * _MIB, 96 * _MIB, 99 * _KIB, 100 * _KIB, 1536),
    "sm_90": DeviceProperties("NVIDIA H200", 9, 0, 132, 143156 * _MIB, 60 * _MIB, 227 * _KIB, 228 * _KIB, 2048),
    "sm_100": DeviceProperties("NVIDIA B200", 10, 0, 148, 182642 * _MIB, 126 * _MIB, 227 * _KIB, 228 * _KIB, 2048),
    "sm_120": DeviceProperties(
        "NVIDIA GeForce RTX 5090", 12, 0, 170, 32118 * _MIB, 96 * _MIB, 99 * _KIB, 100 * _KIB, 1536
    ),
}
_BOARDS = {  # others of the same architecture, and shorter names
    **{"sm_80": "a100 a30", "sm_86": "a10 a40 a6000 rtx3090", "sm_89": "l4 l40 l40s rtx4090"},
    **{"sm_90": "h100 h200 gh200", "sm_100": "b200 gb200", "sm_120": "rtx5090"},
}


def architecture_of(name: str) -> str:
    """The architecture with this name, or of the GPU with it; raises :class:`UnknownArchitectureError` without one."""
    for arch, boards in _BOARDS.items():
        if str(name).lower() in (arch, *boards.split()):
            return arch
    raise UnknownArchitectureError(arch=name, allowed=", ".join(map(repr, ARCHITECTURES)))
