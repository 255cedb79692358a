"""Notes launches of Inductor's Triton kernels, redirects them to variants, and builds the variants.

:func:`noting`, around a warmup, tells which kernels are given the addresses of live inputs, and by which parameters.
:func:`build` compiles and loads a variant of the launcher that won in autotuning. :func:`through`, around a capture,
launches the variants. ``CachingAutotuner.run`` is wrapped (:class:`Tap`) only while a thread is in a scope.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pygraph_trees.compat import has_plugins, is_for_any_device
from pygraph_trees.reasons import Reason

from .variants import NoVariant, with_slots

Run = Callable[..., Any]
Launch = Callable[[Run, Any, tuple[Any, ...], dict[str, Any]], Any]  # upstream's method, autotuner, arguments

_log = logging.getLogger("pygraph_trees.indirection")

_here = threading.local()  # its ``launch``, if any, makes the launches of this thread


class Tap:
    """Puts the wrapper on while a scope is open. The code that installs patches offers the function that does so."""

    def __init__(self) -> None:
        self.put_on: Callable[[], Callable[[], None]] | None = None
        self._lock = threading.RLock()
        self._take_off: Callable[[], None] | None = None
        self._held = 0  # scopes

    def offer(self, put_on: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Offers a function that applies the wrapper and returns one that removes it. Returns what withdraws it."""
        self._offer(put_on)
        return lambda: self._offer(None)

    def _offer(self, put_on: Callable[[], Callable[[], None]] | None) -> None:
        self.put_on = put_on
        self._change()

    @contextlib.contextmanager
    def scope(self, launch: Launch) -> Iterator[None]:
        """Inside this scope, ``launch`` makes the launches of this thread."""
        before = getattr(_here, "launch", None)
        self._change(1)
        try:
            _here.launch = launch
            yield
        finally:
            _here.launch = before
            self._change(-1)

    def _change(self, held: int = 0) -> None:
        """Counts scopes that begin or end, then puts the wrapper on or takes it off if that is due."""
        with self._lock:
            self._held += held
            wanted = self.put_on if self._held else None
            if wanted is None and self._take_off is not None:
                take_off, self._take_off = self._take_off, None
                take_off()
            elif wanted is not None and self._take_off is None:
                self._take_off = wanted()


tap = Tap()
offer = tap.offer  # for the table of patches


def available() -> bool:
    """Whether launches can be watched on this torch."""
    return tap.put_on is not None


def watched(upstream: Run) -> Run:
    """Wraps ``CachingAutotuner.run``: in a scope, the scope makes the launch."""

    @functools.wraps(upstream)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch: Launch | None = getattr(_here, "launch", None)
        if launch is None or kwargs.get("benchmark_run"):
            return upstream(self, *args, **kwargs)
        return launch(upstream, self, args, kwargs)

    return run


@contextlib.contextmanager
def noting(addresses: Mapping[int, int]) -> Iterator[dict[tuple[Any, frozenset[str]], set[tuple[str, int]]]]:
    """Yields, by autotuner and by the parameters that a launch gives one of these addresses, parameter and input."""
    found: dict[tuple[Any, frozenset[str]], set[tuple[str, int]]] = {}

    def launch(run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _addresses(args)  # before the launch: the arguments may be gone after it
        result = run(autotuner, *args, **kwargs)
        named = zip(parameters(sole_launcher(autotuner)), given, strict=False)
        inputs = {(name, i) for name, address in named for i, at in addresses.items() if at == address}
        if inputs:
            found.setdefault((autotuner, frozenset(name for name, _ in inputs)), set()).update(inputs)
        return result

    with tap.scope(launch):
        yield found


@contextlib.contextmanager
def through(slots: Mapping[int, torch.Tensor], note_reader: Callable[[VariantLauncher, int], None]) -> Iterator[None]:
    """Launches variants with slots in place of addresses; ``note_reader`` gets each with the address, and keeps it."""
    import triton

    def launch(run: Run, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        launcher = sole_launcher(autotuner)
        named = enumerate(zip(parameters(launcher), _addresses(args), strict=False))
        found = {name: (position, address) for position, (name, address) in named if address in slots}
        variant = variant_of(launcher, found) if found else None
        if variant is None:
            return run(autotuner, *args, **kwargs)
        given = list(args)
        for name in variant.slots:
            position, address = found[name]
            given[position] = slots[address]
            note_reader(variant, address)
        # Kernels that need scratch memory get it from torch, as upstream provides before a launch.
        device = autotuner.device_props.type
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
        return variant.run(*given, **{name: value for name, value in kwargs.items() if name != "benchmark_run"})

    with tap.scope(launch):
        yield


def _addresses(args: tuple[Any, ...]) -> list[int]:
    """The addresses of a launch's tensors; 0 for other arguments."""
    return [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in args]


@dataclass(frozen=True, slots=True)
class VariantLauncher:
    kernel: str  # name of the original
    slots: frozenset[str]  # the parameters that take the address of a slot
    run: Callable[..., Any]


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
    built, wanted = _built.get(launcher, {}), frozenset(names)
    if wanted in built:
        return built[wanted]
    fitting = [found for found in tuple(built.values()) if found is not None and found.slots <= wanted]
    return max(fitting, key=lambda found: len(found.slots), default=None)


def build(autotuner: Any, names: frozenset[str]) -> VariantLauncher | None:
    """Compiles and loads a launched kernel's variant for some pointer parameters, once; None if there can be none."""
    if (launcher := sole_launcher(autotuner)) is None:
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
    """Compiles a kernel's variant for one of Inductor's configurations; also returns the parameters that are slots."""
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
    units, most = (-(-each.n_regs // 8) for each in (run, original))  # a thread is given eight registers at a time
    return units <= most and run.shared <= original.shared


def name_of(autotuner: Any) -> str:
    return str(autotuner.fn.__name__)
