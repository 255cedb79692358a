"""Launches of Triton kernels while a function is warmed up or captured: which arguments go through slots, and when."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import os
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import variant_kernels as kernels
from commands import WithFolder, module_of
from test_fake_gpu import on_gpu
from torch._inductor.runtime import static_triton_launcher, triton_helpers, triton_heuristics
from torch.testing._internal.common_utils import TestCase, run_tests
from triton.compiler import CompiledKernel

import inductor_patches
from inductor_patches.patch import PatchOverwritten
from pygraph_trees.fake_gpu import absent_gpu, lower
from pygraph_trees.indirection.table import launches
from pygraph_trees.indirection.table.launches import Tap, VariantLauncher, noting, parameters
from pygraph_trees.indirection.table.variants import NoVariant

UPSTREAM = triton_heuristics.CachingAutotuner.run


class Table:
    """A table with a slot for each of the given tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.slots = {t.data_ptr(): torch.tensor([t.data_ptr()]) for t in tensors}
        self.read: list[tuple[str, int]] = []


class FakeAutotuner:
    """An autotuner whose launches only note their arguments; the first launch chooses among ``count`` launchers."""

    def __init__(self, name: str = "kernel", count: int = 1) -> None:
        self.fn = SimpleNamespace(__name__=name)
        self.device_props = SimpleNamespace(type="cuda")
        self.triton_interpret = False
        self.launched: list[tuple[Any, ...]] = []
        self.launchers: list[Any] = [self._launcher() for _ in range(count)]

    def _launcher(self) -> Any:
        def launcher(in_ptr0: Any, in_ptr1: Any, out_ptr0: Any, xnumel: Any, stream: Any) -> str:
            self.launched.append((in_ptr0, in_ptr1, out_ptr0, xnumel, stream))
            return "launched"

        return launcher

    def run(self, *args: Any, stream: Any, benchmark_run: bool = False) -> Any:
        self.launchers = self.launchers[-1:]
        return self.launchers[0](*args, stream=stream)


@contextlib.contextmanager
def warming_up(addresses: Collection[int]) -> Iterator[None]:
    """Notes launches and builds the variants afterwards."""
    with noting(dict(enumerate(addresses))) as readings:
        yield
    for autotuner, names in readings:
        launches.build(autotuner, names)


def through(table: Table) -> contextlib.AbstractContextManager[None]:
    return launches.through(table.slots, lambda variant, address: table.read.append((variant.kernel, address)))


class LaunchesTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.made: list[tuple[str, frozenset[str]]] = []
        self.refused: Collection[str] = ()
        tap, built = Tap(), weakref.WeakKeyDictionary[Any, Any]()
        self.enterContext(mock.patch.multiple(launches, tap=tap, _made=self._made, _built=built))
        self.addCleanup(tap.offer(self._put_on))

    def _put_on(self) -> Callable[[], None]:
        patch = mock.patch.object(FakeAutotuner, "run", launches.watched(FakeAutotuner.run))
        patch.start()
        return patch.stop

    def _made(self, autotuner: FakeAutotuner, launcher: Any, names: frozenset[str]) -> VariantLauncher:
        name, slots = autotuner.fn.__name__, names - frozenset(self.refused)
        self.made.append((name, names))
        if not slots:
            raise NoVariant(kernel=name, why="of the test")

        def run(*args: Any, stream: Any) -> str:
            autotuner.launched.append(("variant", *args, stream))
            return "launched by variant"

        return VariantLauncher(name, slots, run)


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(8) for _ in range(count)]


class TestCapture(LaunchesTestCase):
    def warmed(self, *inputs: torch.Tensor) -> tuple[FakeAutotuner, torch.Tensor]:
        """Returns a kernel launched with two inputs and an output, and that output."""
        kernel, out, before = FakeAutotuner(), torch.zeros(8), len(self.made)
        with warming_up({t.data_ptr() for t in inputs}):
            kernel.run(*(inputs * 2)[:2], out, 8, stream=7)
            self.assertEqual(self.made[before:], [])  # built only at the end
        kernel.launched.clear()
        return kernel, out

    def captured(self, kernel: FakeAutotuner, out: torch.Tensor) -> tuple[Table, torch.Tensor, torch.Tensor, str]:
        """Launches with two inputs that have slots; returns the table, the inputs, and the launch's result."""
        a, b = tensors(2)
        table = Table(a, b)
        with through(table):
            return table, a, b, kernel.run(a, b, out, 8, stream=7)

    def test_arguments_with_a_slot_go_through_it(self) -> None:
        for refused in ((), ("in_ptr1",)):  # a parameter that can be no slot is passed as it is
            self.refused = refused
            self.made.clear()
            kernel, out = self.warmed(*tensors(2))
            self.assertEqual(self.made, [("kernel", frozenset({"in_ptr0", "in_ptr1"}))])
            table, a, b, result = self.captured(kernel, out)
            self.assertEqual(result, "launched by variant")
            ((way, *given, n, stream),) = kernel.launched
            self.assertEqual((way, n, stream), ("variant", 8, 7))
            self.assertIs(given[0], table.slots[a.data_ptr()])
            self.assertIs(given[1], b if refused else table.slots[b.data_ptr()])
            self.assertIs(given[2], out)
            self.assertEqual(sorted(table.read), sorted(("kernel", t.data_ptr()) for t in ([a] if refused else [a, b])))
            self.assertEqual(len(self.made), 1)  # nothing is built while capturing

    def test_an_input_has_one_slot_also_through_a_view_but_not_further_on(self) -> None:
        kernel, out = self.warmed(*tensors(2))
        a, b = tensors(2)
        table = Table(a, b)
        with through(table):
            kernel.run(a, a.view(2, 4), out, 8, stream=7)
            self.assertIs(kernel.launched[0][1], kernel.launched[0][2])
            self.assertEqual(table.read, [("kernel", a.data_ptr())] * 2)
            table.read.clear()
            self.assertEqual(kernel.run(a[1:], b[2:], out, 8, stream=7), "launched")
        self.assertEqual(table.read, [])

    def test_a_variant_for_other_parameters_is_used_if_it_takes_some(self) -> None:
        a, b, c, d, out = tensors(5)
        kernel = FakeAutotuner()
        with warming_up({a.data_ptr()}):
            kernel.run(a, b, out, 8, stream=7)
        with through(Table(c, d)):  # the only variant takes one of the two
            self.assertEqual(kernel.run(c, d, out, 8, stream=7), "launched by variant")
            self.assertIs(kernel.launched[-1][2], d)
            self.assertEqual(kernel.run(a, d, out, 8, stream=7), "launched")

    def test_a_kernel_without_a_variant_is_launched_as_it_is(self) -> None:
        self.refused = {"in_ptr0", "in_ptr1"}
        kernel, out = self.warmed(*tensors(2))
        for one in (kernel, FakeAutotuner()):  # the latter was never warmed up
            table, a, _, result = self.captured(one, out)
            self.assertEqual((result, table.read), ("launched", []))
        with warming_up({a.data_ptr()}):
            kernel.run(a, a, out, 8, stream=7)
        self.assertEqual(len(self.made), 1)  # the absence of a variant is remembered
        # An error while building is logged and costs the variant.
        with (
            mock.patch.object(launches, "_made", side_effect=RuntimeError("of the test")),
            self.assertLogs("pygraph_trees.indirection", "WARNING") as logs,
        ):
            kernel, out = self.warmed(*tensors(2))
        self.assertIn("of the test", logs.output[0])
        self.assertEqual(self.captured(kernel, out)[-1], "launched")

    def test_benchmarks_are_left_alone(self) -> None:
        a, b, out = tensors(3)
        kernel = FakeAutotuner()
        with warming_up({a.data_ptr()}):
            kernel.run(a, b, out, 8, stream=7, benchmark_run=True)
        self.assertEqual(self.made, [])
        kernel, out = self.warmed(a, b)
        with through(Table(a, b)):
            self.assertEqual(kernel.run(a, b, out, 8, stream=7, benchmark_run=True), "launched")

    def test_a_variant_is_built_for_the_winner_alone(self) -> None:
        (a, out), kernel = tensors(2), FakeAutotuner(count=3)
        winner = kernel.launchers[-1]
        with warming_up({a.data_ptr()}):
            kernel.run(a, out, out, 8, stream=7)
            kernel.run(a, out, out, 8, stream=7)
        self.assertEqual(self.made, [("kernel", frozenset({"in_ptr0"}))])
        self.assertEqual(list(launches._built), [winner])
        gone = weakref.ref(kernel)  # variants go with their kernel
        launches._built[winner].clear()  # the fake's variant, unlike a real one, holds the kernel
        kernel.launched.clear()
        del kernel, winner
        gc.collect()
        self.assertIsNone(gone())
        self.assertEqual(len(launches._built), 0)


class TestTap(LaunchesTestCase):
    def test_an_inner_scope_notes_alone(self) -> None:
        """Launches of other threads are left alone."""
        a, b = tensors(2)
        kernel = FakeAutotuner()
        with warming_up({a.data_ptr()}):
            with warming_up({b.data_ptr()}):
                kernel.run(a, b, b, 8, stream=7)
            self.assertEqual(self.made, [("kernel", frozenset({"in_ptr1", "out_ptr0"}))])
            kernel.run(a, b, b, 8, stream=7)
            with ThreadPoolExecutor(1) as there:
                other = there.submit(FakeAutotuner("there").run, a, b, b, 8, stream=7)
            self.assertEqual(other.result(), "launched")
        self.assertEqual(self.made[1:], [("kernel", frozenset({"in_ptr0"}))])
        with contextlib.suppress(KeyError), through(Table(a)):
            raise KeyError
        self.assertFalse(hasattr(FakeAutotuner.run, "__wrapped__"))
        self.addCleanup(self._put_on())
        self.assertEqual(kernel.run(a, b, b, 8, stream=7), "launched")


class TestPatch(TestCase):
    def test_torch_is_as_it_was_but_while_it_is_needed(self) -> None:
        autotuner = triton_heuristics.CachingAutotuner
        self.assertIs(autotuner.run, UPSTREAM)
        self.assertTrue(launches.available())
        with through(Table()):
            self.assertIs(autotuner.run.__wrapped__, UPSTREAM)
            inductor_patches.uninstall()
            self.assertIs(autotuner.run, UPSTREAM)
            self.assertFalse(launches.available())
            inductor_patches.install()
            self.assertIsNot(autotuner.run, UPSTREAM)
        self.assertIs(autotuner.run, UPSTREAM)
        # A replacement of somebody else stays.
        with mock.patch.object(autotuner, "run", UPSTREAM):
            with self.assertWarnsRegex(PatchOverwritten, "CachingAutotuner.run was replaced"), through(Table()):
                autotuner.run = print
            self.assertIs(autotuner.run, print)


@contextlib.contextmanager
def loaded() -> Iterator[Any]:
    """Stands for a GPU on which kernels are loaded; launches are noted."""
    gpu = SimpleNamespace(launched=[], registers=32)  # registers per thread of a kernel
    static: Any = static_triton_launcher.StaticallyLaunchedCudaKernel
    module = (1,) if hasattr(static, "close") else ()  # since 2.13
    library = SimpleNamespace(
        _load_kernel=lambda path, name, shared, device: (*module, 2, gpu.registers, 0),
        _unload_kernel=lambda module: None,
        _launch_kernel=lambda *args: gpu.launched.append(args),
    )

    def init_handles(kernel: Any) -> None:
        kernel.module, kernel.function, kernel.n_regs, kernel.n_spills = 1, 2, gpu.registers, 0
        kernel._run = lambda *args: gpu.launched.append((kernel.metadata.num_warps, kernel.metadata.shared, *args))

    with (
        mock.patch.object(static, "C_impl", library),
        mock.patch.multiple(CompiledKernel, _init_handles=init_handles, __del__=lambda kernel: None, create=True),
    ):
        yield gpu


@contextlib.contextmanager
def of_inductor(folder: Path) -> Iterator[None]:
    """Makes Inductor generate kernels for a fake GPU; Triton's cache is in the folder."""
    with (
        # Inductor sets this for the process when it makes a kernel's autotuner.
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder / "cache")),
        # Each kernel's module makes Triton look for a GPU.
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        absent_gpu(),
    ):
        yield


def autotuners(folder: Path, fn: Any, *args: torch.Tensor, **options: Any) -> Iterator[Any]:
    """The autotuners of a program's kernels, each with its own file in the folder."""
    for graph in lower(fn, args, {}, **options):
        for node in ast.walk(ast.parse(graph.source_code)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
                name, source = (ast.literal_eval(argument) for argument in node.args[:2])
                path = folder / f"{name}.py"
                path.write_text(source)
                yield getattr(module_of(path), name)


def of_a_user(x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """A program that launches a user's kernel."""
    out = torch.empty_like(x)
    kernels.user[(2,)](x, flags, out, x.numel(), BLOCK=256, STEPS=2)
    return out + 1


class TestInductor(WithFolder):
    """Kernels that Inductor generates, on both launchers."""

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(of_inductor(self.folder))

    def check(self, autotuner: Any, static: bool) -> None:
        """Its variant for all pointers is launched like the original, except that it takes addresses of slots."""
        with loaded() as gpu, torch._inductor.config.patch({"use_static_triton_launcher": static}):
            autotuner.launchers = [autotuner._precompile_config(autotuner.configs[-1]).make_launcher()]
            names = parameters(autotuner.launchers[0])[:-1]
            pointers = [n for n in names if str(autotuner.triton_meta["signature"].get(n)).startswith("*")]
            values = {n: torch.zeros(8) if n in pointers else 1 + i for i, n in enumerate(names)}
            with warming_up({values[n].data_ptr() for n in pointers}):
                autotuner.run(*values.values(), stream=7)
            table = Table(*(values[n] for n in pointers))
            with through(table):
                autotuner.run(*values.values(), stream=7)
        self.assertEqual(sorted(a for _, a in table.read), sorted(table.slots))
        original, variant = (
            [v for value in launch for v in (value if isinstance(value, tuple) and value else [value])]
            for launch in gpu.launched
        )
        changed = 0
        for one, other in zip(original, variant, strict=True):
            if isinstance(one, torch.Tensor):
                self.assertIs(other, table.slots[one.data_ptr()])
                changed += 1
            elif isinstance(one, (int, str, type(None))):
                self.assertEqual(one, other)
        self.assertEqual(changed, len(pointers))

    def one(self) -> Any:
        """The autotuner of a program's only kernel, with its launcher."""
        (autotuner,) = autotuners(self.folder, lambda x: x.sin(), on_gpu(1024))
        autotuner.launchers = [autotuner._precompile_config(autotuner.configs[0]).make_launcher()]
        return autotuner

    def test_variants_are_launched_as_their_originals(self) -> None:
        sizes = on_gpu(8, 24)
        torch._dynamo.mark_dynamic(sizes, 0)
        flags = on_gpu(kernels.SIZE, dtype=torch.bool)
        for fn, args, count in (
            (lambda x, y: ((x.sin() + y).softmax(-1), x.sum()), (on_gpu(1024, 64), on_gpu(1024, 64)), 3),
            (lambda x, y: (x.sin(), y.cos()), (on_gpu(1024), on_gpu(64, 72)), 1),
            (of_a_user, (on_gpu(kernels.SIZE), flags), 2),
            (lambda x: x.sin().sum(0), (sizes,), 1),
        ):
            for static in (True, False):
                with torch._inductor.config.patch(combo_kernels=count == 1):
                    found = list(autotuners(self.folder, fn, *args))
                self.assertEqual(len(found), count)
                for autotuner in found:
                    with self.subTest(kernel=autotuner.fn.__name__, static=static):
                        self.check(autotuner, static)

    def test_a_user_kernel_has_no_variant_if_fewer_of_its_blocks_fit(self) -> None:
        args = on_gpu(kernels.SIZE), on_gpu(kernels.SIZE, dtype=torch.bool)
        for static in (True, False):
            options = {"use_static_triton_launcher": static, "static_launch_user_defined_triton_kernels": static}
            for autotuner, (registers, later) in itertools.product(
                autotuners(self.folder, of_a_user, *args), ((32, 33), (33, 40), (40, 32), (0, 0))
            ):
                with (
                    self.subTest(kernel=autotuner.fn.__name__, static=static, registers=registers),
                    torch._inductor.config.patch(options),
                    loaded() as gpu,
                ):
                    gpu.registers = registers
                    launcher = autotuner._precompile_config(autotuner.configs[0]).make_launcher()
                    self.assertEqual(getattr(launcher, "_is_static", False), static)
                    autotuner.launchers = [launcher]
                    names, gpu.registers = frozenset(parameters(launcher)[:1]), later
                    refused = contextlib.nullcontext()
                    if registers == 32 and autotuner.custom_kernel:
                        refused = self.assertRaisesRegex(NoVariant, "'user' .* fewer of its blocks might fit")
                    with refused:
                        self.assertEqual(launches._made(autotuner, launcher, names).slots, names)

    def test_a_kernel_that_another_process_compiled_is_loaded_again(self) -> None:
        self.enterContext(loaded())
        autotuner, source = self.one(), self.one()
        (launcher,), autotuner.fn.fn = autotuner.launchers, None
        names = frozenset(parameters(launcher)[:2])
        with self.assertRaisesRegex(NoVariant, "only in the process that compiled it"):
            launches._made(autotuner, launcher, names)
        autotuner._reload_kernel = lambda: source
        self.assertEqual(launches._made(autotuner, launcher, names).slots, names)
        self.assertIsNone(autotuner.fn.fn)  # nothing of the original is changed

    def test_kernels_without_a_variant(self) -> None:
        """They are launched cooperatively, or dependently, or on whatever device is current."""
        self.enterContext(loaded())
        for option, value, why in (
            ("launch_cooperative_grid", True, "blocks must fit"),
            ("launch_pdl", True, "may begin before"),
            ("device", None, "any device"),
        ):
            autotuner = self.one()
            autotuner.triton_meta[option] = value
            with self.assertRaisesRegex(NoVariant, why):
                launches._made(autotuner, autotuner.launchers[0], frozenset({"in_ptr0"}))


if __name__ == "__main__":
    run_tests()
