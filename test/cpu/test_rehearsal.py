"""Kernels that get addresses in forms other than words: the inputs that they read are copied.

The kernels of these graphs compute: a launch reads and writes the memory at the addresses in the instantiated graph. A
placeholder address refers to the memory of its placeholder tensor, and a launch that uses it while nothing is mapped
there fails the test.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from fake_driver import KNOWN, FakeApi
from test_live_inputs import KERNEL, Graph, LiveInputsTestCase, PlaceholderTensor, words
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees import settings
from pygraph_trees.indirection import hidden_addresses
from pygraph_trees.indirection.hidden_addresses import Expected, Surroundings
from pygraph_trees.indirection.inputs import LiveInputs
from pygraph_trees.indirection.known_kernels import is_known
from pygraph_trees.indirection.routes import Route

KEY = 0x5A5A_0F0F_1234_8765
COUNT = 32


class TestNames(TestCase):
    def test_which_kernels_are_known(self):
        """Those of torch and its libraries."""
        for name in (
            "triton_poi_fused_add_0",
            "triton_",
            "pygraph_put_1024",
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
            "_ZN43_GLOBAL__N__1082b6eb_10_SoftMax_cu_75209b9c20softmax_warp_forwardIfffLi9ELb1ELb0EEEvPT0_PKT_iiiPKbib",
            "_ZN14at_cuda_detail3cub6detail10merge_sort26DeviceMergeSortMergeKernelE",
            "_ZN6thrust45THRUST_300001_SM_750_800_860_900_1000_1200_NS8cuda_cub4core6detail13_kernel_agentE",
            "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsE",
            "_Z39fmha_cutlassF_f16_aligned_64x64_rf_sm80N22PyTorchMemEffAttention15AttentionKernelE",
            "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
            "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1",
            "cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4",
            "_ZN7cutlass7Kernel2I66cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4EEvNT_6ParamsE",
            "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xEEEvv",
            "ampere_sgemm_128x64_nn",
            "_ZN8cublasLt19splitKreduce_kernelILi32EEEv",
            "_ZN8internal5gemvx6kernelIiifEEv",
            "_Z17gemv2T_kernel_valIiiffEvv",
            "_ZN5cudnn3cnn33conv2d_grouped_direct_kernelILb0EEEv",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128",
        ):
            self.assertTrue(is_known(name), name)
        for name in (
            "halves_kernel",
            "triton_mine",
            "_Z11gemm_kerneliiPf",
            "_ZN8mykernel2at6nativeE",
            "_ZN56_GLOBAL__N__1082b6eb_8_mine_cu_75209b9c6halvesEiiPf",
            "_ZN7cutlass6KernelINS_4gemm6kernel11GemmGroupedEEEvNT_6ParamsE",
            "_ZN3cub6detail6kernelE",
        ):
            self.assertFalse(is_known(name), name)


class Running(Graph):
    """A captured graph whose kernels run as functions found by name."""

    def __init__(self, api: FakeApi, nodes: Sequence[int], live: LiveInputs) -> None:
        super().__init__(api, nodes)
        self._live = live
        self.launches = 0
        self.interrupted_at: int | None = None  # number of the launch in which ctrl-c is pressed
        self.numbers: Numbers | None = None

    def memory(self, address: int) -> torch.Tensor:
        """The memory at an address, as numbers of the type of the input there, or as floats."""
        for item in self._live.items:
            begin = item.recorded - item.lead
            tensor = item.placeholder_tensor
            if isinstance(tensor, PlaceholderTensor) and begin <= address < item.recorded + item.nbytes:
                assert self._api.is_mapped(address), f"nothing is mapped at {address:#x}"
                tensor = tensor.as_subclass(torch.Tensor)
                return tensor.as_strided((COUNT,), (1,), (address - begin) // tensor.element_size())
        for item in self._live.items:
            given = self._live.given(item.index)
            if given.data_ptr() == address:
                return given.detach()[:COUNT]
        return torch.frombuffer((ctypes.c_float * COUNT).from_address(address), dtype=torch.float32)

    def put(self, target: int, result: torch.Tensor) -> None:
        memory = self.memory(target)
        memory.copy_(result.to(memory.dtype))

    def add(self, source: int, target: int, other: torch.Tensor | float) -> None:
        self.put(target, self.memory(source).double() + other)

    def taken(self, address: int) -> torch.Tensor:
        """The memory's content, which is then overwritten."""
        content = self.memory(address).double()
        self.memory(address).fill_(-1)
        return content

    def replay(self) -> None:
        self.launches += 1
        for node in self._nodes:
            name, block = self._api._nodes[node].content.name, self._api.exec_parameters(self._exec, node)
            KERNELS[name](self, *words(block))
        if self.launches == self.interrupted_at:
            raise KeyboardInterrupt


class Numbers:
    """A random generator of the GPU: a launch draws from its current offset."""

    device = torch.device("cuda")
    offset = 4

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def draw(self) -> int:
        self.offset += 4
        return self.offset - 4


# By name; parameters are words of 8 bytes, and each kernel adds another number.
KERNELS: dict[str, Callable[..., Any]] = {
    KNOWN: lambda graph, source, target: graph.add(source, target, 1),
    "plain": lambda graph, source, target: graph.add(source, target, 1),
    "halves": lambda graph, target, source: graph.add(source, target, 2),
    "xored": lambda graph, hidden, target: graph.add(hidden ^ KEY, target, 3),
    # Reads from a given address, and writes to a hidden one.
    "written": lambda graph, hidden, source: graph.add(source, hidden ^ KEY, 4),
    "in_place": lambda graph, target: graph.add(target, target, 1),
    "drawn": lambda graph, source, target: graph.add(source, target, graph.numbers.draw()),
    # Gives another result at each launch, or one that differs a little.
    "counted": lambda graph, source, target: graph.add(source, target, graph.launches),
    "rounded": lambda graph, source, target: graph.add(source, target, 1 + 1e-5 * math.sin(graph.launches)),
    # Launches differ more from the sixth one on, as if another program used the GPU.
    "busier": lambda graph, source, target: graph.add(
        source, target, 1 + (1e-5 if graph.launches < 6 else 1e-3) * math.sin(graph.launches)
    ),
    # From the sixth launch on, launches differ by more than rounding.
    "wild": lambda graph, source, target: graph.add(
        source, target, 1 + (1e-5 if graph.launches < 6 else 1) * math.sin(graph.launches)
    ),
    # Reads from a hidden address, and adds 0 or a quarter, so that nothing large shows.
    "mask": lambda graph, hidden, target: graph.put(
        target, graph.memory(target) + (graph.memory(hidden ^ KEY) > 0) * 0.25
    ),
    # Reads from a hidden address, and gives 0 for negative numbers and for what is not a number.
    "dropping": lambda graph, hidden, target: graph.put(target, graph.memory(hidden ^ KEY).nan_to_num(0).clamp(min=0)),
    # Reads an input in the graph pool, and overwrites it.
    "overwritten": lambda graph, source, pool, target: graph.add(source, target, graph.taken(pool)),
}
_rooms: list[torch.Tensor] = []


def at(content: torch.Tensor) -> torch.Tensor:
    """A copy at an address that is a multiple of 512, with room around it."""
    size = content.element_size()
    room = torch.zeros(content.numel() + 1024 // size, dtype=content.dtype)
    _rooms.append(room)
    return room[-room.data_ptr() % 512 // size :][: content.numel()].copy_(content)


def some() -> torch.Tensor:
    return at(torch.rand(COUNT) - 0.5)


def split(address: int) -> tuple[bytes, bytes]:
    """An address as two parameters of 4 bytes."""
    return struct.pack("<I", address % 2**32), struct.pack("<I", address >> 32)


class TestExpected(TestCase):
    """Which results are taken for those of an equal launch."""

    def seen(self, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> Expected:
        expected = Expected(one)
        expected.widen(other)
        return expected

    def test_bits_are_compared_as_long_as_launches_agree(self):
        one = [torch.tensor([1.0, float("nan"), -0.0]), torch.arange(3)]
        expected = self.seen(one, [t.clone() for t in one])
        self.assertTrue(expected.is_exact and expected.includes(one))
        self.assertFalse(expected.includes([torch.tensor([1.0, float("nan"), 0.0]), one[1]]))
        self.assertFalse(expected.includes([one[0], one[1] + 1]))

    def test_numbers_are_compared_within_their_spread(self):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
            eps = torch.finfo(dtype).eps
            one = torch.linspace(-1, 1, 64).to(dtype)
            expected = self.seen([one, torch.arange(3)], [one + 3 * eps, torch.arange(3)])
            self.assertEqual((expected.is_exact, expected.differs_by_rounding()), (False, True))
            for factor, is_included in ((-6, True), (6, True), (-40, False), (40, False), (math.nan, False)):
                found = one.clone()
                found[7] += factor * eps
                self.assertEqual(expected.includes([found, torch.arange(3)]), is_included, f"{dtype}, {factor}")
            self.assertFalse(expected.includes([one, torch.arange(3) + 1]))

    def test_which_differences_are_rounding(self):
        """Small results may be noise altogether: the gradient of a bias before a batch normalization is zero but for
        roundings."""
        ones, infinite, bias = torch.ones(4), torch.tensor([1.0, float("inf")]), 1e-9 * torch.randn(3)
        for one, other, is_rounding in (
            (bias, -bias, True),
            (ones, ones + 1, False),
            (torch.arange(3), torch.arange(3) + 1, False),
            (ones > 0, ones < 0, False),
            (ones, ones * float("nan"), False),
            (infinite, infinite * (1 + 1e-6), False),
        ):
            found = self.seen([one, ones], [other, ones * (1 + 1e-6 * is_rounding)])
            self.assertEqual(found.differs_by_rounding(), is_rounding)
        expected = self.seen([ones, infinite], [ones * (1 + 1e-6), infinite])
        self.assertTrue(expected.differs_by_rounding() and expected.includes([ones, infinite]))
        self.assertFalse(expected.includes([ones, infinite * (1 + 1e-6)]))


class TestRehearsal(LiveInputsTestCase):
    """The kernels of a graph, their parameters, and the inputs that are copied."""

    def setUp(self) -> None:
        super().setUp()
        self.out = [torch.zeros(COUNT) for _ in range(4)]

    def rehearse(
        self,
        nodes: Callable[[list[int], list[int]], list[int]],
        *inputs: torch.Tensor,
        numbers: Numbers | None = None,
        kept: Sequence[torch.Tensor] = (),
        written: Sequence[torch.Tensor] = (),
        **more: Any,
    ) -> tuple[LiveInputs, Running]:
        """``nodes`` makes the nodes from the addresses of placeholder tensors and outputs."""
        live, reasons = self.choose(*inputs, **more)
        self.assertEqual(reasons, {})
        recorded = [item.recorded for item in sorted(live.items, key=lambda item: item.index)]
        graph = Running(self.api, nodes(recorded, [o.data_ptr() for o in self.out]), live)
        graph.numbers = numbers
        generators = [] if numbers is None else [numbers]
        before = [t.clone() for t in (*inputs, *kept)]

        def finished(given: Running) -> Running:
            self.finished_at = given.launches, given.instances
            return given

        live.set_up(graph, (), (), lambda: Surroundings(self.out, kept, written, generators), finished)
        self.assertEqual([*inputs, *kept], before)
        return live, graph

    def kernel(self, name: str, *parameters: int | bytes) -> int:
        return self.api.make_kernel(parameters, name=name)

    def check_calls(self, live: LiveInputs, graph: Running, inputs: Sequence[torch.Tensor], expected: Any) -> None:
        """The first launch, and replays with inputs elsewhere, give the ``expected`` function of the inputs."""
        for call in range(3):
            if call:
                inputs = [at(torch.tensor(t.tolist()[::-1], dtype=t.dtype)) for t in inputs]
                self.begin(live, *inputs)
            wanted = expected(*(t.clone() for t in inputs))
            graph.replay()
            live.finish()
            for number, result in enumerate(wanted):
                self.assertEqual(self.out[number], result.float(), f"call {call}, output {number}")

    def test_an_input_is_patched_if_launches_of_unknown_kernels_agree(self):
        a = some()
        for name, launches in ((KNOWN, 0), ("plain", 3)):
            live, graph = self.rehearse(lambda a, o, name=name: [self.kernel(name, a[0], o[0])], a)
            self.assertEqual((self.routes(live), graph.launches, graph.instances), ({0: None}, launches, 1 + launches))
            self.assertEqual(self.finished_at, (launches, launches))  # other edges come after the test launches
            self.assertEqual(self.api.leaks(), [])
            self.check_calls(live, graph, [a], lambda a: [a + 1])
            self.assertFalse(live.copies_some)

    def test_only_the_input_that_is_hidden_is_copied(self):
        inputs = [some(), some(), some()]
        plain = lambda a, o: [self.kernel("plain", a[i], o[i]) for i in range(3)]  # noqa: E731
        live, graph = self.rehearse(lambda a, o: [*plain(a, o), self.kernel("xored", a[1] ^ KEY, o[3])], *inputs)
        why = self.routes(live)
        self.assertRegex(why.pop(1), "plain or xored may hide its address")
        self.assertEqual(why, {0: None, 2: None})
        self.check_calls(live, graph, inputs, lambda a, b, c: [a + 1, b + 1, c + 1, b + 3])
        # Memory that the check mapped for the others is given back.
        self.assertEqual(len(self.api.mappings), 1)

    def test_hidden_inputs_of_any_type_and_content_are_found(self):
        """Inputs are integers and masks of any width with equal elements, zeros, or NaNs."""
        both = lambda a, o: [self.kernel("plain", a[0], o[0]), self.kernel("halves", o[1], *split(a[0]))]  # noqa: E731
        for content, hides in itertools.product(
            (
                torch.arange(COUNT),
                torch.zeros(COUNT, dtype=torch.int64),
                torch.full((COUNT,), 7, dtype=torch.int32),
                torch.full((COUNT,), -3, dtype=torch.int8),
                torch.arange(COUNT).to(torch.uint16),
                torch.arange(COUNT) % 2 == 0,
                torch.ones(COUNT, dtype=torch.bool),
                torch.rand(COUNT).half(),
                torch.rand(COUNT, dtype=torch.float64),
                torch.full((COUNT,), float("nan")),
            ),
            (False, True),
        ):
            with self.subTest(content.dtype, first=content[0], hides=hides):
                a = at(content)
                live, graph = self.rehearse(lambda *to: both(*to)[: 1 + hides], a)  # noqa: B023
                self.assertRegex(str(self.routes(live)[0]), "halves may hide" if hides else "^None$")
                self.check_calls(live, graph, [a], lambda a: [a.double() + 1, a.double() + 2][: 1 + hides])  # noqa: B023

    def test_inputs_that_are_written_end_as_after_one_launch(self):
        """A mutated input is written in place unless its address is hidden. A donated buffer is changed by each launch,
        so the first call needs what it held before the check."""
        in_place = lambda a, o: [self.kernel("in_place", a[0]), self.kernel("plain", a[1], o[0])]  # noqa: E731
        written = lambda a, o: [self.kernel("written", a[0] ^ KEY, a[1]), self.kernel(KNOWN, a[0], o[0])]  # noqa: E731
        other = lambda a, o: [self.kernel("in_place", a[0]), self.kernel("halves", o[0], *split(a[1]))]  # noqa: E731
        for nodes, how, hidden, expected in (
            (in_place, "mutated", {}, lambda a, b: (a + 1, b + 1)),
            (written, "mutated", {0: "written may hide its address"}, lambda a, b: (b + 4, b + 5)),
            (in_place, "overwritten", {}, lambda a, b: (a + 1, b + 1)),
            (other, "overwritten", {1: "no node holds its address"}, lambda a, b: (a + 1, b + 2)),
        ):
            a, b = some(), some()
            live, graph = self.rehearse(nodes, a, b, **{how: [0]})
            for index, why in self.routes(live).items():
                self.assertRegex(str(why), hidden.get(index, "^None$"))
            wanted = expected(a.clone(), b)
            graph.replay()
            result = live.output(0, None) if how == "overwritten" else a
            live.finish()
            self.assertEqual((result, self.out[0]), wanted)

    def test_the_check_leaves_random_numbers_as_they_are(self):
        """Each launch draws the same numbers, and the generator ends at its original offset."""
        both = lambda a, o: [self.kernel("drawn", a[0], o[0]), self.kernel("halves", o[1], *split(a[0]))]  # noqa: E731
        for hides in (False, True):
            numbers, a = Numbers(), some()
            live, graph = self.rehearse(lambda *to: both(*to)[: 1 + hides], a, numbers=numbers)  # noqa: B023
            self.assertEqual((self.routes(live)[0] is not None, numbers.offset), (hides, 4))
            graph.replay()
            self.assertEqual((self.out[0], numbers.offset), (a + 4, 8))

    def test_inputs_are_copied_if_equal_launches_differ(self):
        """If they differ only by rounding, even increasingly, only integers and written inputs are copied. Own memory
        of outputs is only written, so it is not copied."""
        why = "two equal launches give different results, and {} may hide its address"
        a, index, total, block = some(), at(torch.arange(COUNT)), some(), some()
        live, graph = self.rehearse(lambda a, o: [self.kernel("counted", a[0], o[0])], a)
        self.assertEqual(self.routes(live), {0: why.format("counted")})
        graph.replay()
        self.assertEqual(self.out[0], a + graph.launches)

        def nodes(a, o):
            read = [self.kernel(name, a[0], o[0]), self.kernel(KNOWN, a[1], o[1]), self.kernel(KNOWN, a[0], a[3])]
            return [*read, self.kernel("in_place", a[2])]

        for name, apart in (("rounded", 1e-4), ("busier", 1e-2)):
            live, graph = self.rehearse(nodes, a, index, total, block, mutated=[2, 3], own={3: False})
            copied = why.format(f"{name} or in_place")
            self.assertEqual(self.routes(live), {0: None, 1: copied, 2: copied, 3: None})
            graph.replay()
            live.finish()
            self.assertEqual(self.out[0], a + 1, rtol=0, atol=apart)
            self.assertEqual(block, a + 1)

    def test_a_hidden_address_is_found_although_equal_launches_differ(self):
        """A kernel may drop what is not a number, and large numbers of one sign."""
        noisy = lambda a, o: [self.kernel("rounded", a[1], o[0]), self.kernel(KNOWN, a[0], o[1])]  # noqa: E731
        for name, a in (("xored", some()), ("dropping", some()), ("dropping", at(-torch.rand(COUNT)))):
            live, graph = self.rehearse(lambda a, o: [*noisy(a, o), self.kernel(name, a[0] ^ KEY, o[2])], a, some())  # noqa: B023
            why = self.routes(live)
            self.assertRegex(str(why[0]), f"rounded or {name} may hide its address: the results change")
            self.assertIsNone(why[1])
            graph.replay()
            self.assertEqual(self.out[2], a + 3 if name == "xored" else a.clamp(min=0))

    def test_hidden_addresses_are_found_although_launches_differ_more_and_more(self):
        for name in ("busier", "wild"):
            live, _ = self.rehearse(
                lambda a, o: [
                    *(self.kernel(name, a[2], o[i]) for i in (0, 2)),  # noqa: B023
                    *(self.kernel(KNOWN, a[i], o[3]) for i in range(2)),
                    self.kernel("xored", a[0] ^ KEY, o[1]),
                    self.kernel("mask", a[1] ^ KEY, o[2]),
                ],
                *(some() for _ in range(3)),
            )
            for index in range(2):
                self.assertRegex(str(self.routes(live)[index]), f"{name} or xored or mask may hide its address", index)

    def test_inputs_in_the_pool_and_static_ones_are_put_back(self):
        a, pool, static = some(), torch.rand(COUNT), torch.rand(COUNT)

        def nodes(a, o):
            first = [self.kernel("overwritten", a[0], pool.data_ptr(), o[0])]
            return [*first, self.kernel("in_place", static.data_ptr()), self.kernel(KNOWN, static.data_ptr(), o[1])]

        expected = a + pool, static + 2
        live, graph = self.rehearse(nodes, a, kept=[pool, static], written=[static])
        self.assertEqual(self.routes(live), {0: None})
        graph.replay()
        self.assertEqual((self.out[0], self.out[1]), expected)
        # A static input that is written otherwise tells of a hidden address.
        hides = lambda a, o: [self.kernel(KNOWN, a[0], o[0]), self.kernel("xored", a[0] ^ KEY, static.data_ptr())]  # noqa: E731
        live, _ = self.rehearse(hides, a, kept=[static], written=[static])
        self.assertRegex(self.routes(live)[0], "xored may hide")

    def test_between_the_elements_of_a_view_nothing_is_put_back(self):
        rows, same = torch.rand(4, 8), torch.rand(COUNT, 1).expand(COUNT, 2)
        before = rows.clone()
        for kept in (same, rows[:, :2]):  # the kernel writes to all bytes of either
            nodes = lambda a, o, k=kept: [self.kernel("plain", a[0], o[0]), self.kernel("in_place", k.data_ptr())]  # noqa: E731
            _, graph = self.rehearse(nodes, some(), kept=[kept], written=[kept])
        self.assertEqual((rows[:, :2], rows[:, 2:]), (before[:, :2], before[:, 2:] + graph.launches))

    def test_with_other_processes_nothing_is_launched(self):
        self.assertFalse(settings.may_wait_for_others())
        with mock.patch.multiple(torch.distributed, is_initialized=lambda: True, get_world_size=lambda: 2):
            live, graph = self.rehearse(lambda a, o: [self.kernel("plain", a[0], o[0])], some())
        why = "plain, which may wait for other processes, may hide its address"
        self.assertEqual((self.routes(live), graph.launches), ({0: why}, 0))

    def test_inputs_are_copied_without_memory_for_the_check(self):
        for target in ("Poison", "Expected"):
            a = some()
            with mock.patch.object(hidden_addresses, target, side_effect=torch.OutOfMemoryError("of the test")):
                live, graph = self.rehearse(lambda a, o: [self.kernel("plain", a[0], o[0])], a, mutated=[0])
            self.assertRegex(self.routes(live)[0], "no memory to check plain, which may hide its address")
            graph.replay()
            live.finish()
            self.assertEqual(self.out[0], a + 1)

    def test_a_failing_call_of_the_driver_makes_the_hidden_input_copied(self):
        """The recording then copies the input, and all other state is restored."""

        def nodes(a, o):
            first = [self.kernel("plain", a[0], o[0]), self.kernel("in_place", a[1])]
            return [*first, self.kernel("halves", o[1], *split(a[0])), self.kernel("plain", a[2], o[2])]

        def recorded():
            inputs = [some(), some(), some()]
            return inputs, *self.rehearse(nodes, *inputs, mutated=[1])

        recorded()
        calls = Counter(call for call in self.api.calls if call.startswith("cuGraph"))
        self.assertIn(KERNEL, calls)
        for call, count in calls.items():
            for after in range(count):
                with self.subTest(call=call, after=after):
                    self.restart()
                    self.api.fail(call, after)
                    inputs, live, graph = recorded()
                    self.assertEqual(self.api._failures[call], [])
                    self.assertEqual(live.decisions[0].route, Route.COPY)
                    a, b, c = (t.clone() for t in inputs)
                    graph.replay()
                    live.finish()
                    self.assertEqual([*self.out[:3], inputs[1]], [a + 1, a + 2, c + 1, b + 1])

    def test_an_interrupt_puts_all_back(self):
        a, numbers = some(), Numbers()
        before = a.clone()
        live, _ = self.choose(a, mutated=[0])
        graph = Running(self.api, [self.kernel("in_place", live.items[0].recorded)], live)
        for launch in range(1, 4):
            graph.launches, graph.interrupted_at = 0, launch
            with self.subTest(launch), self.assertRaises(KeyboardInterrupt):
                live.set_up(graph, surroundings=lambda: Surroundings(generators=[numbers]))
            self.assertEqual((a, numbers.offset), (before, 4))


if __name__ == "__main__":
    run_tests()
