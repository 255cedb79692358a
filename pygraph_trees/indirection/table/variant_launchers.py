"""Launchers of variants: what Inductor calls to launch a kernel, made for the kernel's variant.

An autotuner ends with one launcher, a function of the kernel's arguments and the stream, that computes the grid and
goes to Triton's own launcher or to torch's static one. :func:`build` compiles the variant as the autotuner compiles a
configuration, the winner's, and has its launcher made the same way: same parameters, same grid, warps, stages and
options. It compiles, loads and may take seconds; Triton's cache on disk has it by source from then on. A variant lives
as long as the launcher of its original, or who else holds it. A user's kernel may have as many blocks as the GPU holds
at once, and let them wait for each other; so its variant must fit there as often.

:func:`variant_of` finds what is built, at no cost that matters. What cannot have a variant is remembered as such, and
the log of ``pygraph_trees.indirection`` says why.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from pygraph_trees.compat import has_plugins, is_for_any_device

from .variants import NoVariant, can_be_slot, with_slots

_REGISTERS = 8  # that a thread is given at once

_log = logging.getLogger("pygraph_trees.indirection")


@dataclass(frozen=True, slots=True)
class VariantLauncher:
    kernel: str  # its name
    slots: frozenset[str]  # the parameters that take the address of a slot
    run: Callable[..., Any]

    def launch(self, autotuner: Any, args: Collection[Any], kwargs: dict[str, Any]) -> Any:
        """Launches it as ``CachingAutotuner.run`` would the original."""
        _provide_scratch(autotuner)
        return self.run(*args, **{name: value for name, value in kwargs.items() if name != "benchmark_run"})


# By the launcher of the original: variants by the parameters that they were asked for; None where there can be none.
_built: weakref.WeakKeyDictionary[Any, dict[frozenset[str], VariantLauncher | None]] = weakref.WeakKeyDictionary()


def sole_launcher(autotuner: Any) -> Any:
    """The launcher that won, None where none has yet, or where others than this launcher do the launch."""
    launchers = autotuner.launchers
    if len(launchers) != 1 or autotuner.triton_interpret or has_plugins(autotuner):
        return None
    return launchers[0]


def parameters(launcher: Any) -> tuple[str, ...]:
    """The names of a launcher's parameters, the last is the stream's; none where it is no function of Python."""
    code = getattr(launcher, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


def variant_of(autotuner: Any, launcher: Any, names: Collection[str]) -> VariantLauncher | None:
    """The variant that was built for these parameters, else the one for most of them; None where there is none."""
    built = _built.get(launcher)
    if not built:
        return None
    wanted = frozenset(names)
    if wanted in built:
        return built[wanted]
    fitting = [found for found in tuple(built.values()) if found is not None and found.slots <= wanted]
    return max(fitting, key=lambda found: len(found.slots), default=None)


def build(autotuner: Any, names: frozenset[str]) -> VariantLauncher | None:
    """Makes the variant of a kernel that was launched, for parameters of pointers, once; None where it has none.

    Never raises: a kernel without a variant is launched as it is.
    """
    launcher = sole_launcher(autotuner)
    if launcher is None:
        return None
    built = _built.setdefault(launcher, {})
    if names in built:
        return built[names]
    built[names] = None
    try:
        built[names] = _made(autotuner, launcher, names)
    except NoVariant as error:
        _log.info("%s", error)
    except Exception as error:  # of Triton, of the driver, of another version's Inductor
        _log.warning("%s was not compiled to take pointers from slots: %s", name_of(autotuner), error)
    return built[names]


def compile_variant(autotuner: Any, config: Any, names: Collection[str]) -> tuple[Any, frozenset[str]]:
    """A kernel's variant, compiled for a configuration as Inductor has it, and the parameters that are slots in it.

    Loads nothing. Raises :class:`~.variants.NoVariant`, and whatever the compiler raises.
    """
    if is_for_any_device(autotuner):
        raise NoVariant(kernel=name_of(autotuner), why="it is compiled for whatever device it is launched on")
    fn = _with_source(autotuner)
    meta = autotuner._create_compile_meta(config)
    signature, constants, attrs = meta["signature"], meta["constants"], meta["configs"][0]
    slots = frozenset(name for name in names if can_be_slot(fn, name, signature, constants))
    variant = with_slots(fn, signature, constants, attrs, slots, meta)
    twin = object.__new__(type(autotuner))  # a copy would be one for another process
    twin.__dict__.update(autotuner.__dict__)
    twin.fn = variant.fn
    twin.triton_meta = {
        **autotuner.triton_meta,
        "signature": {name: variant.signature[name] for name in autotuner.triton_meta["signature"]},
        "configs": [variant.attrs],
    }
    return twin._precompile_config(config), slots


def _made(autotuner: Any, launcher: Any, names: frozenset[str]) -> VariantLauncher:
    compiled, slots = compile_variant(autotuner, launcher.config, names)
    with _on_its_device(autotuner):
        run = compiled.make_launcher()
    if parameters(run) != parameters(launcher):
        raise NoVariant(kernel=name_of(autotuner), why=f"it would be launched with {parameters(run)}")
    if autotuner.custom_kernel and not _fits_as_often(run, launcher):
        raise NoVariant(kernel=name_of(autotuner), why="fewer of its blocks might be on the GPU at once")
    return VariantLauncher(name_of(autotuner), slots, run)


def _fits_as_often(run: Any, original: Any) -> bool:
    """Whether a multiprocessor is known to hold as many blocks of one launcher's kernel as of another's, as large."""
    needs = [(launcher.n_regs, launcher.shared) for launcher in (run, original)]
    if any(None in need for need in needs):
        return False
    (registers, shared), (had_registers, had_shared) = needs
    return -(-registers // _REGISTERS) <= -(-had_registers // _REGISTERS) and shared <= had_shared


def _with_source(autotuner: Any) -> Any:
    """What ``triton.jit`` made; where it came from a process that compiles, it left its source there."""
    fn = autotuner.fn
    reload = getattr(autotuner, "_reload_kernel", None)
    return reload().fn if fn.fn is None and reload is not None else fn


def _on_its_device(autotuner: Any) -> Any:
    from torch._dynamo.device_interface import DeviceGuard

    return DeviceGuard(autotuner.get_device_interface(), autotuner.triton_meta["device"])


def _provide_scratch(autotuner: Any) -> None:
    """As upstream before a launch: kernels that need memory of their launcher get it from torch."""
    import triton

    device = autotuner.device_props.type
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))


def name_of(autotuner: Any) -> str:
    return str(autotuner.fn.__name__)
