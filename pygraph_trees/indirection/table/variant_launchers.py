"""Launchers of variants, with the parameters, grid, warps, stages and options of the launcher that won in autotuning.

:func:`build` compiles a variant as the autotuner compiles the winner's configuration, and loads it. It may take seconds
unless Triton's cache on disk has the variant. It never raises: a kernel that cannot have a variant is remembered, and
the log gives the reason. :func:`variant_of` finds a built variant quickly. A variant lives at least as long as its
original's launcher.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from pygraph_trees.compat import has_plugins, is_for_any_device
from pygraph_trees.reasons import Reason

from .variants import NoVariant, with_slots

_REGISTERS = 8  # a thread is given registers in such units

_log = logging.getLogger("pygraph_trees.indirection")


@dataclass(frozen=True, slots=True)
class VariantLauncher:
    kernel: str  # name of the original
    slots: frozenset[str]  # the parameters that take the address of a slot
    run: Callable[..., Any]

    def launch(self, autotuner: Any, args: Collection[Any], kwargs: dict[str, Any]) -> Any:
        """Launches the variant as ``CachingAutotuner.run`` launches the original."""
        import triton

        device = autotuner.device_props.type
        # Kernels that need scratch memory get it from torch, as upstream provides before a launch.
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
        return self.run(*args, **{name: value for name, value in kwargs.items() if name != "benchmark_run"})


# By the original's launcher: variants by the parameters for which they were built; None if there can be no variant.
_built: weakref.WeakKeyDictionary[Any, dict[frozenset[str], VariantLauncher | None]] = weakref.WeakKeyDictionary()


def sole_launcher(autotuner: Any) -> Any:
    """The launcher that won in autotuning; None if none has won yet, or if this launcher does not do the launch."""
    launchers = autotuner.launchers
    if len(launchers) != 1 or autotuner.triton_interpret or has_plugins(autotuner):
        return None
    return launchers[0]


def parameters(launcher: Any) -> tuple[str, ...]:
    """The names of a launcher's parameters; the last is the stream. Empty if it is None, or no Python function."""
    code = getattr(launcher, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


def variant_of(launcher: Any, names: Collection[str]) -> VariantLauncher | None:
    """The variant that was built for these parameters, else the one for most of them; None if there is none."""
    built = _built.get(launcher)
    if not built:
        return None
    wanted = frozenset(names)
    if wanted in built:
        return built[wanted]
    fitting = [found for found in tuple(built.values()) if found is not None and found.slots <= wanted]
    return max(fitting, key=lambda found: len(found.slots), default=None)


def build(autotuner: Any, names: frozenset[str]) -> VariantLauncher | None:
    """Makes the variant of a launched kernel for some pointer parameters, once; None if it cannot have one.

    Never raises: a kernel without a variant is launched as it is.
    """
    launcher = sole_launcher(autotuner)
    if launcher is None:
        return None
    built = _built.setdefault(launcher, {})
    if names not in built:
        built[names] = None
        try:
            built[names] = _made(autotuner, launcher, names)
        except NoVariant as error:
            _log.info("%s", error)
        except Exception as error:  # from Triton, from the driver, from another version's Inductor
            _log.warning("%s was not compiled to take pointers from slots: %s", name_of(autotuner), error)
    return built[names]


def compile_variant(autotuner: Any, config: Any, names: Collection[str]) -> tuple[Any, frozenset[str]]:
    """Compiles a kernel's variant for one of Inductor's configurations; also returns the parameters that are slots.

    Loads nothing. Raises :class:`~.variants.NoVariant` and the compiler's errors.
    """
    if is_for_any_device(autotuner):
        raise NoVariant(kernel=name_of(autotuner), why=Reason.ANY_DEVICE())
    fn, reload = autotuner.fn, getattr(autotuner, "_reload_kernel", None)
    if fn.fn is None and reload is not None:  # it comes from a compiling process, without source
        fn = reload().fn
    meta = autotuner._create_compile_meta(config)
    variant = with_slots(fn, meta["signature"], meta["constants"], meta["configs"][0], names, meta)
    twin = object.__new__(type(autotuner))  # copying an autotuner prepares it for another process
    twin.__dict__.update(autotuner.__dict__)
    twin.fn = variant.fn
    twin.triton_meta = {
        **autotuner.triton_meta,
        "signature": {name: variant.signature[name] for name in autotuner.triton_meta["signature"]},
        "configs": [variant.attrs],
    }
    return twin._precompile_config(config), variant.slots


def _made(autotuner: Any, launcher: Any, names: frozenset[str]) -> VariantLauncher:
    from torch._dynamo.device_interface import DeviceGuard

    compiled, slots = compile_variant(autotuner, launcher.config, names)
    with DeviceGuard(autotuner.get_device_interface(), autotuner.triton_meta["device"]):
        run = compiled.make_launcher()
    if parameters(run) != parameters(launcher):
        raise NoVariant(kernel=name_of(autotuner), why=Reason.OTHER_PARAMETERS(parameters=parameters(run)))
    if autotuner.custom_kernel and not _fits_as_often(run, launcher):
        raise NoVariant(kernel=name_of(autotuner), why=Reason.FEWER_BLOCKS())
    return VariantLauncher(name_of(autotuner), slots, run)


def _fits_as_often(run: Any, original: Any) -> bool:
    """Whether a multiprocessor is known to hold as many blocks of one launcher's kernel as of the original's."""
    if None in (run.n_regs, run.shared, original.n_regs, original.shared):
        return False
    units = -(-run.n_regs // _REGISTERS)
    return units <= -(-original.n_regs // _REGISTERS) and run.shared <= original.shared


def name_of(autotuner: Any) -> str:
    return str(autotuner.fn.__name__)
