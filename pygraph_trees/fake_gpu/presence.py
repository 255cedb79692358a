"""Makes torch, Inductor and Triton act as if one CUDA GPU, ``cuda:0`` of a named architecture, existed.

:func:`absent_gpu` replaces what they ask about GPUs, for tracing, lowering and code generation. On exit, every replaced
attribute is the original object again, and memoised answers about the GPU are dropped. A real GPU makes no difference.
One board, common in data centres, represents each architecture: see README.md.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo import device_interface, trace_rules
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses import fake_tensor

from pygraph_trees.errors import PygraphError

from .computed_on_cpu import constants_off_gpu, fallback_on_cpu
from .device_guard import no_op_device_guard
from .library_kernels import chosen_attention, convolutions_by_cudnn
from .replacing import replaced


class UnknownArchitectureError(PygraphError):
    template = "arch must be one of {allowed}, or a GPU such as 'h100' or 'a100'; got {arch!r}."


class OtherArchitectureError(PygraphError):
    template = "absent_gpu({wanted!r}) inside absent_gpu({active!r}): one GPU at a time. Leave the outer one first."


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


# Memoised answers that depend on the GPU, in torch 2.11 to 2.15; those that a version lacks are skipped.
_MEMOISED = {
    "torch._dynamo.debug_utils": "_cuda_system_info_comment",
    "torch._inductor.codecache": "CacheBase.get_system",
    "torch._inductor.codegen.cuda.cuda_env": "get_cuda_arch is_datacenter_blackwell_arch get_cuda_version",
    "torch._inductor.codegen.cutlass.utils": "cutlass_arch _normalize_cuda_arch try_import_cutlass",
    "torch._inductor.compile_fx": "_warn_tf32_disabled",
    "torch._inductor.comm_analysis": "_has_nvlink get_gpu_type",
    "torch._inductor.fx_passes.fuse_attention": "_warn_tf32_disabled",
    "torch._inductor.kernel.mm": "_is_sm7x_or_older_gpu",
    "torch._inductor.lookup_table.choices": "LookupTableChoices._get_device_key",
    "torch._inductor.runtime.caching.context": (
        "_CompileContext.triton_version_hash _CompileContext.runtime _CompileContext.runtime_version "
        "_CompileContext.accelerator_properties"
    ),
    "torch._inductor.runtime.hints": "DeviceProperties.create",
    "torch._inductor.utils": (
        "get_gpu_type is_big_gpu get_max_num_sms using_b200 use_decompose_k_choice get_k_splits "
        "get_backend_num_stages get_device_tflops get_gpu_dram_gbps _triton_supported_fp8_dtypes"
    ),
    "torch.cuda": "_check_bf16_tensor_supported",
    "torch.nn.attention._fa3": "_get_device_major",
    "torch.nn.attention._fa4": "_get_device_major",
    "torch.nn.attention.varlen": "_should_use_cudnn",
    "torch.utils._triton": (
        "_device_supports_tma has_triton_experimental_host_tma has_triton_tensor_descriptor_host_tma has_triton_tma "
        "has_triton_tma_device has_datacenter_blackwell_tma_device has_triton_stable_tma_api has_triton "
        "triton_backend triton_hash_with_backend"
    ),
}

_DOING_NOTHING = (
    *("_lazy_init", "_lazy_call", "init", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"),
    *("set_rng_state", "manual_seed", "manual_seed_all", "seed", "seed_all"),
)
_ANSWERING_ZERO = (
    *("current_device", "_exchange_device", "_maybe_exchange_device"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved"),
)
_OF_THE_INTERFACE = (
    *("current_device", "device_count", "set_device", "synchronize", "memory_allocated", "is_bf16_supported"),
    "get_device_properties",
)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _triton_driver(properties: DeviceProperties) -> SimpleNamespace:
    """Triton's active driver for the fake GPU, as far as compiling (not loading) a kernel needs it."""
    from triton.backends.compiler import GPUTarget

    limits = {
        "max_shared_mem": properties.shared_memory_per_block_optin,
        "max_num_regs": properties.regs_per_multiprocessor,
        "multiprocessor_count": properties.multi_processor_count,
        "warpSize": properties.warp_size,
    }
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=_always(limits)),
        is_active=_always(True),
        get_current_target=_always(GPUTarget("cuda", properties.major * 10 + properties.minor, properties.warp_size)),
        get_device_capability=_always(properties.capability),
        get_active_torch_device=_always(torch.device("cuda", 0)),
        get_current_device=_always(0),
        set_current_device=_always(None),
        get_current_stream=_always(0),
        get_device_interface=_always(torch.cuda),
    )


def _rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    with fake_tensor.unset_fake_temporarily():
        return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _replacements(properties: DeviceProperties) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value while the GPU is faked)."""
    # Triton's package attribute of this name is the object, not the module.
    triton_driver = importlib.import_module("triton.runtime.driver").driver
    driver = _triton_driver(properties)

    nothing, zero, one = _always(None), _always(0), _always(1)
    answers: dict[str, Any] = {
        **dict.fromkeys(_DOING_NOTHING, nothing),
        **dict.fromkeys(_ANSWERING_ZERO, zero),
        **dict.fromkeys(("is_available", "is_bf16_supported", "is_tf32_supported"), _always(True)),
        "is_current_stream_capturing": _always(False),
        "device_count": one,
        "get_device_properties": _always(properties),
        "get_device_capability": _always(properties.capability),
        "get_device_name": _always(properties.name),
        "get_arch_list": _always([f"sm_{properties.major}{properties.minor}"]),
        "mem_get_info": _always((properties.total_memory, properties.total_memory)),
        "get_rng_state": _rng_state,
    }
    # Some modules import these by value.
    modules = (torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.cuda.random)
    out: list[tuple[Any, str, Any]] = [
        (module, name, answer)
        for name, answer in answers.items()
        for module in modules
        if module is torch.cuda or hasattr(module, name)
    ]
    interface: Any = device_interface.CudaInterface
    out += [(interface, name, staticmethod(answers[name])) for name in _OF_THE_INTERFACE]
    out += [
        *(
            (interface, name, staticmethod(zero))
            for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream")
        ),
        (interface.Worker, "get_device_properties", staticmethod(answers["get_device_properties"])),
        (interface.Worker, "current_device", staticmethod(zero)),
        (device_interface, "device_interfaces", {}),
        (device_interface, "_device_initialized", False),
        (device_interface, "caching_worker_device_properties", {}),
        (device_interface, "caching_worker_current_devices", {}),
        (fake_tensor, "init_gpu_context", nothing),
        # torch.tensor(..., device="cuda") must build its data on the CPU first, and copies stay unevaluated.
        (fake_tensor.FakeTensorMode, "avoid_device_init", property(_always(True))),
        (torch._C, "_cuda_cudaCachingAllocator_is_enabled", _always(True)),
        (torch.accelerator, "is_available", _always(True)),
        (torch.accelerator, "device_count", one),
        (torch.accelerator, "current_device_index", zero),
        *((triton_driver, name, driver) for name in ("_active", "_default")),
    ]
    if torch.version.cuda is None:
        out.append((torch.version, "cuda", "12.8"))
    return out


def _forget_memoised() -> None:
    for module, names in _MEMOISED.items():
        for name in names.split() if module in sys.modules else ():
            with contextlib.suppress(AttributeError):
                attrgetter(name)(sys.modules[module]).cache_clear()


_lock = threading.Lock()
_entered: list[str] = []  # the architecture, as often as its context was entered
_exit = contextlib.ExitStack()


def is_absent() -> bool:
    return bool(_entered)


@contextlib.contextmanager
def absent_gpu(arch: str = "sm_90") -> Iterator[None]:
    """Fakes one CUDA GPU ``cuda:0`` of architecture ``arch`` inside the ``with``.

    Raises :class:`UnknownArchitectureError` for an unknown name, :class:`OtherArchitectureError` inside another
    architecture's context, and :class:`NoDeviceGuardError` if this build of torch's C++ code cannot be convinced.
    """
    arch = architecture_of(arch)
    properties = ARCHITECTURES[arch]
    with _lock:
        if _entered and arch not in _entered:
            raise OtherArchitectureError(wanted=arch, active=_entered[0])
        if not _entered:
            if torch.cuda.is_available():
                torch.cuda.init()  # torch's C++ code notes that this was done, and would not do it later
            # Dynamo's tables are keyed by function object: they are built while the functions are torch's own.
            TorchInGraphFunctionVariable._get_handlers()
            trace_rules.get_torch_obj_rule_map()
            with contextlib.ExitStack() as entering:
                entering.callback(_forget_memoised)
                entering.enter_context(no_op_device_guard())
                entering.enter_context(replaced(_replacements(properties)))
                for decided in (chosen_attention, convolutions_by_cudnn, constants_off_gpu, fallback_on_cpu):
                    entering.enter_context(decided())
                _forget_memoised()
                _exit.push(entering.pop_all())
        _entered.append(arch)
    try:
        yield
    finally:
        with _lock:
            _entered.pop()
            if not _entered:
                _exit.close()
