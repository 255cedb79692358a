"""Kernels that get addresses in forms other than words: the inputs that they read are copied.

The kernels of these graphs compute: a launch reads and writes the memory at the addresses in the instantiated graph. A
placeholder address refers to the memory of its placeholder tensor, and a launch that uses it while nothing is mapped
there fails the test.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from fake_driver import KNOWN, CUresult, FakeApi
from test_live_inputs import KERNEL, Graph, LiveInputsTestCase, PlaceholderTensor
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection import hidden_addresses
from pygraph_trees.indirection.hidden_addresses import Surroundings
from pygraph_trees.indirection.inputs import LiveInputs
from pygraph_trees.indirection.known_kernels import is_known
from pygraph_trees.indirection.routes import Route
from pygraph_trees.indirection.spread import Expected

KEY = 0x5A5A_0F0F_1234_8765
COUNT = 32


class TestNames(TestCase):
    def test_kernels_of_torch_and_its_libraries_are_known(self):
        for name in (
            "triton_poi_fused_add_0",
            "triton_red_fused_sum_3",
            "triton_tem_fused_mm_1",
            "triton_",
            "pygraph_write_slots_32",
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

    def test_other_kernels_are_not(self):
        for name in (
            "halves_kernel",
            "triton_mine",
            "my_triton_poi_fused_add_0",
            "_Z11gemm_kerneliiPf",
            "_Z17wgrad_alg0_engineiiPf",
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
        self.numbers: Numbers | None = None

    def memory(self, address: int) -> torch.Tensor:
        """The memory at an address, as floats."""
        for item in self._live.items:
            if (
                isinstance(item.placeholder_tensor, PlaceholderTensor)
                and item.recorded - item.lead <= address < item.recorded + item.nbytes
            ):
                if not self._api.is_mapped(address):
                    raise AssertionError(f"nothing is mapped at {address:#x}")
                placeholder_tensor = item.placeholder_tensor.as_subclass(torch.Tensor)
                begin = (address - (item.recorded - item.lead)) // placeholder_tensor.element_size()
                return placeholder_tensor.as_strided((COUNT,), (1,), begin)
        for item in self._live.items:
            given = self._live.given(item.index)
            if given.data_ptr() == address:
                return given.detach()[:COUNT]
        return torch.frombuffer((ctypes.c_float * COUNT).from_address(address), dtype=torch.float32)

    def replay(self) -> None:
        self.launches += 1
        for node in self._nodes:
            name, block = self._api._nodes[node].content.name, self._api.exec_parameters(self._exec, node)
            KERNELS[name](self, block)


class Numbers:
    """A random generator of the GPU: a launch draws from its current offset."""

    def __init__(self) -> None:
        self.offset = 4

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def add(graph: Running, source: int, target: int, other: torch.Tensor | float) -> None:
    result = graph.memory(source).double() + other
    memory = graph.memory(target)
    memory.copy_(result.to(memory.dtype))


def plain(graph: Running, block: bytes) -> None:
    add(graph, *struct.unpack_from("QQ", block), 1)


def halves(graph: Running, block: bytes) -> None:
    target, low, high = struct.unpack_from("QII", block)
    add(graph, high << 32 | low, target, 2)


def xored(graph: Running, block: bytes) -> None:
    hidden, target = struct.unpack_from("QQ", block)
    add(graph, hidden ^ KEY, target, 3)


def written(graph: Running, block: bytes) -> None:
    """Reads from a given address, and writes to a hidden one."""
    hidden, source = struct.unpack_from("QQ", block)
    add(graph, source, hidden ^ KEY, 4)


def in_place(graph: Running, block: bytes) -> None:
    (target,) = struct.unpack_from("Q", block)
    graph.memory(target).add_(1)


def drawn(graph: Running, block: bytes) -> None:
    assert graph.numbers is not None
    add(graph, *struct.unpack_from("QQ", block), graph.numbers.offset)
    graph.numbers.offset += 4


def counted(graph: Running, block: bytes) -> None:
    """Gives another result at each launch."""
    add(graph, *struct.unpack_from("QQ", block), graph.launches)


def rounded(graph: Running, block: bytes) -> None:
    """Gives a result that differs a little at each launch."""
    add(graph, *struct.unpack_from("QQ", block), 1 + 1e-5 * math.sin(graph.launches))


def dropping(graph: Running, block: bytes) -> None:
    """Reads from a hidden address, and gives 0 for negative numbers and for what is not a number."""
    hidden, target = struct.unpack_from("QQ", block)
    graph.memory(target).copy_(graph.memory(hidden ^ KEY).nan_to_num(0).clamp(min=0))


def overwritten(graph: Running, block: bytes) -> None:
    """Reads an input in the graph pool, and overwrites it."""
    source, pool, target = struct.unpack_from("QQQ", block)
    add(graph, source, target, graph.memory(pool).double().clone())
    graph.memory(pool).fill_(-1)


KERNELS: dict[str, Callable[[Running, bytes], None]] = {
    KNOWN: plain,
    **{kernel.__name__: kernel for kernel in (plain, halves, xored, written, in_place, drawn, counted)},
    **{kernel.__name__: kernel for kernel in (rounded, dropping, overwritten)},
}

_rooms: list[torch.Tensor] = []


def at(content: torch.Tensor) -> torch.Tensor:
    """A copy at an address that is a multiple of 512, with room around it."""
    room = torch.zeros(content.numel() + 1024 // content.element_size(), dtype=content.dtype)
    _rooms.append(room)
    begin = -room.data_ptr() % 512 // content.element_size()
    room[begin : begin + content.numel()].copy_(content)
    return room[begin : begin + content.numel()]


def some() -> torch.Tensor:
    return at(torch.rand(COUNT) - 0.5)


def split(address: int) -> tuple[bytes, bytes]:
    """An address as two parameters of 4 bytes."""
    return struct.pack("<I", address % 2**32), struct.pack("<I", address >> 32)


class TestExpected(TestCase):
    """Which results are taken for those of an equal launch."""

    def seen(self, *launches: Sequence[torch.Tensor]) -> Expected:
        expected = Expected(launches[0])
        for results in launches[1:]:
            expected.widen(results)
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
            self.assertFalse(expected.is_exact)
            self.assertTrue(expected.differs_by_rounding())
            for factor, is_included in ((-6, True), (6, True), (-40, False), (40, False), (math.nan, False)):
                found = one.clone()
                found[7] += factor * eps
                self.assertEqual(expected.includes([found, torch.arange(3)]), is_included, f"{dtype}, {factor}")
            self.assertFalse(expected.includes([one, torch.arange(3) + 1]))

    def test_small_results_may_be_noise_altogether(self):
        """The gradient of a bias before a batch normalization is zero but for roundings."""
        weight, bias = torch.rand(8), 1e-9 * torch.randn(3)
        self.assertTrue(self.seen([weight, bias], [weight * (1 + 1e-6), -bias]).differs_by_rounding())

    def test_other_differences_are_no_rounding(self):
        ones, infinite = torch.ones(4), torch.tensor([1.0, float("inf")])
        for one, other in (
            (ones, ones + 1),
            (torch.arange(3), torch.arange(3) + 1),
            (ones > 0, ones < 0),
            (ones, ones * float("nan")),
            (infinite, infinite * (1 + 1e-6)),
        ):
            self.assertFalse(self.seen([one, ones], [other, ones]).differs_by_rounding())
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
        live.set_up(graph, surroundings=lambda: Surroundings(self.out, kept, written, generators))
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
        live, graph = self.rehearse(lambda a, o: [self.kernel(KNOWN, a[0], o[0])], a)
        self.assertEqual((self.routes(live), graph.launches, graph.instances), ({0: None}, 0, 1))
        self.assertEqual(self.api.leaks(), [])
        live, graph = self.rehearse(lambda a, o: [self.kernel("plain", a[0], o[0])], a)
        self.assertEqual(self.routes(live), {0: None})
        self.assertGreaterEqual(graph.launches, 3)
        self.assertEqual(self.api.leaks(), [])
        self.check_calls(live, graph, [a], lambda a: [a + 1])
        self.assertFalse(live.copies_some)

    def test_an_input_whose_address_is_split_or_encoded_is_copied(self):
        a = some()
        for first in (KNOWN, "plain"):
            for name, more in (("halves", 2), ("xored", 3)):

                def nodes(a, o, first=first, name=name):
                    hidden = [o[1], *split(a[0])] if name == "halves" else [a[0] ^ KEY, o[1]]
                    return [self.kernel(first, a[0], o[0]), self.kernel(name, *hidden)]

                live, graph = self.rehearse(nodes, a)
                self.assertRegex(self.routes(live)[0], f"{name} may hide its address")
                self.check_calls(live, graph, [a], lambda a, more=more: [a + 1, a + more])
                self.assertTrue(live.copies_some)

    def test_only_the_input_that_is_hidden_is_copied(self):
        inputs = [some(), some(), some()]

        def nodes(a, o):
            read = [self.kernel("plain", a[i], o[i]) for i in range(3)]
            return [*read, self.kernel("xored", a[1] ^ KEY, o[3])]

        live, graph = self.rehearse(nodes, *inputs)
        why = self.routes(live)
        self.assertEqual((why[0], why[2]), (None, None))
        self.assertRegex(why[1], "plain or xored may hide its address")
        self.check_calls(live, graph, inputs, lambda a, b, c: [a + 1, b + 1, c + 1, b + 3])
        # Memory that the check mapped for the others is given back.
        self.assertEqual(len(self.api.mappings), 1)

    def test_hidden_inputs_of_any_type_and_content_are_found(self):
        """Inputs are integers and masks of any width with equal elements, zeros, or NaNs."""
        for content in (
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
        ):
            with self.subTest(content.dtype, first=content[0]):
                a = at(content)
                live, graph = self.rehearse(lambda a, o: [self.kernel("plain", a[0], o[0])], a)
                self.assertEqual(self.routes(live), {0: None})
                self.check_calls(live, graph, [a], lambda a: [a.double() + 1])
                live, graph = self.rehearse(
                    lambda a, o: [self.kernel("plain", a[0], o[0]), self.kernel("halves", o[1], *split(a[0]))], a
                )
                self.assertRegex(self.routes(live)[0], "halves may hide")
                self.check_calls(live, graph, [a], lambda a: [a.double() + 1, a.double() + 2])

    def test_a_mutated_input_is_written_in_place_unless_its_address_is_hidden(self):
        a, b = some(), some()
        live, graph = self.rehearse(
            lambda a, o: [self.kernel("in_place", a[0]), self.kernel("plain", a[1], o[0])], a, b, mutated=[0]
        )
        self.assertEqual(self.routes(live), {0: None, 1: None})
        before = a.clone()
        graph.replay()
        live.finish()
        self.assertEqual((a, self.out[0]), (before + 1, b + 1))
        live, graph = self.rehearse(
            lambda a, o: [self.kernel("written", a[0] ^ KEY, a[1]), self.kernel(KNOWN, a[0], o[0])], a, b, mutated=[0]
        )
        self.assertRegex(self.routes(live)[0], "written may hide its address")
        graph.replay()
        live.finish()
        self.assertEqual((a, self.out[0]), (b + 4, b + 5))

    def test_the_check_leaves_random_numbers_as_they_are(self):
        """Each launch draws the same numbers, and the generator ends at its original offset."""
        numbers, a = Numbers(), some()
        live, graph = self.rehearse(lambda a, o: [self.kernel("drawn", a[0], o[0])], a, numbers=numbers)
        self.assertEqual((self.routes(live), numbers.offset), ({0: None}, 4))
        graph.replay()
        self.assertEqual((self.out[0], numbers.offset), (a + 4, 8))
        live, _ = self.rehearse(
            lambda a, o: [self.kernel("drawn", a[0], o[0]), self.kernel("halves", o[1], *split(a[0]))],
            a,
            numbers=numbers,
        )
        self.assertRegex(self.routes(live)[0], "may hide")
        self.assertEqual(numbers.offset, 8)

    def test_inputs_are_copied_if_equal_launches_differ(self):
        a = some()
        live, graph = self.rehearse(lambda a, o: [self.kernel("counted", a[0], o[0])], a)
        self.assertEqual(
            self.routes(live), {0: "two equal launches give different results, and counted may hide its address"}
        )
        graph.replay()
        self.assertEqual(self.out[0], a + graph.launches)

    def test_inputs_are_patched_if_equal_launches_differ_by_rounding(self):
        """Own memory of outputs, which is only written, is written in place."""
        a, block = some(), some()
        live, graph = self.rehearse(
            lambda a, o: [self.kernel("rounded", a[0], o[0]), self.kernel(KNOWN, a[0], a[1])],
            *(a, block),
            mutated=[1],
            own={1: False},
        )
        self.assertEqual(self.routes(live), {0: None, 1: None})
        graph.replay()
        live.finish()
        self.assertEqual(self.out[0], a + 1, rtol=0, atol=1e-4)
        self.assertEqual(block, a + 1)

    def test_a_hidden_address_is_found_although_equal_launches_differ(self):
        """A kernel may drop what is not a number, and large numbers of one sign."""
        for name, content in (("xored", some()), ("dropping", some()), ("dropping", at(-torch.rand(COUNT)))):
            a, b = content, some()

            def nodes(a, o, name=name):
                noisy = [self.kernel("rounded", a[1], o[0]), self.kernel(KNOWN, a[0], o[1])]
                return [*noisy, self.kernel(name, a[0] ^ KEY, o[2])]

            live, graph = self.rehearse(nodes, a, b)
            why = self.routes(live)
            self.assertRegex(str(why[0]), f"rounded or {name} may hide its address: with another one")
            self.assertIsNone(why[1])
            graph.replay()
            self.assertEqual(self.out[2], a + 3 if name == "xored" else a.clamp(min=0))

    def test_integers_and_written_inputs_are_copied_if_equal_launches_differ(self):
        a, index, total = some(), at(torch.arange(COUNT)), some()

        def nodes(a, o):
            read = [self.kernel("rounded", a[0], o[0]), self.kernel(KNOWN, a[1], o[1])]
            return [*read, self.kernel("in_place", a[2])]

        live, _ = self.rehearse(nodes, a, index, total, mutated=[2])
        why = self.routes(live)
        self.assertIsNone(why[0])
        for reason in (why[1], why[2]):
            self.assertEqual(
                reason, "two equal launches give different results, and rounded or in_place may hide its address"
            )

    def test_inputs_in_the_pool_and_static_ones_are_put_back(self):
        a, pool, static = some(), torch.rand(COUNT), torch.rand(COUNT)

        def nodes(a, o):
            return [
                self.kernel("overwritten", a[0], pool.data_ptr(), o[0]),
                self.kernel("in_place", static.data_ptr()),
                self.kernel(KNOWN, static.data_ptr(), o[1]),
            ]

        expected = a + pool, static + 2
        live, graph = self.rehearse(nodes, a, kept=[pool, static], written=[static])
        self.assertEqual(self.routes(live), {0: None})
        graph.replay()
        self.assertEqual((self.out[0], self.out[1]), expected)
        # A static input that is written otherwise tells of a hidden address.
        nodes = lambda a, o: [self.kernel(KNOWN, a[0], o[0]), self.kernel("xored", a[0] ^ KEY, static.data_ptr())]  # noqa: E731
        live, _ = self.rehearse(nodes, a, kept=[static], written=[static])
        self.assertRegex(self.routes(live)[0], "xored may hide")

    def test_between_the_elements_of_a_view_nothing_is_put_back(self):
        rows = torch.rand(4, 8)
        before = rows.clone()
        nodes = lambda a, o: [self.kernel("plain", a[0], o[0]), self.kernel("in_place", rows.data_ptr())]  # noqa: E731
        _, graph = self.rehearse(nodes, some(), kept=[rows[:, :2]], written=[rows[:, :2]])
        self.assertEqual((rows[:, :2], rows[:, 2:]), (before[:, :2], before[:, 2:] + graph.launches))
        same = torch.rand(4, 1).expand(4, 8)
        saved, before = hidden_addresses._Saved(same), same.clone()
        same.untyped_storage().fill_(0)
        saved.put_back()
        self.assertEqual(same, before)

    def test_with_other_processes_nothing_is_launched(self):
        self.assertIsNone(hidden_addresses.why_not_launched())
        with (
            mock.patch.object(torch.distributed, "is_initialized", lambda: True),
            mock.patch.object(torch.distributed, "get_world_size", lambda: 2),
        ):
            live, graph = self.rehearse(lambda a, o: [self.kernel("plain", a[0], o[0])], some())
        self.assertEqual(
            (self.routes(live), graph.launches),
            ({0: "plain, which may wait for other processes, may hide its address"}, 0),
        )

    def test_inputs_are_copied_without_memory_for_the_check(self):
        for target in ("_Saved", "Expected"):
            a = some()
            with mock.patch.object(hidden_addresses, target, side_effect=torch.OutOfMemoryError("of the test")):
                live, graph = self.rehearse(lambda a, o: [self.kernel("plain", a[0], o[0])], a, mutated=[0])
            self.assertRegex(self.routes(live)[0], "no memory to check plain, which may hide its address")
            graph.replay()
            live.finish()
            self.assertEqual(self.out[0], a + 1)

    def test_without_memory_at_the_placeholders_setting_up_raises(self):
        """The function is then recorded without placeholders."""
        a = some()
        live, _ = self.choose(a)
        graph = Running(self.api, [self.kernel("plain", live.items[0].recorded, self.out[0].data_ptr())], live)
        for _ in range(4):
            self.api.fail("cuMemCreate", 0, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        with mock.patch.object(torch.cuda, "empty_cache"), self.assertRaisesRegex(Exception, "cuMemCreate"):
            live.set_up(graph)
        live.release()
        self.choose()
        self.assertEqual((self.api.leaks(), graph.launches), ([], 0))

    def test_a_failing_call_of_the_driver_makes_the_hidden_input_copied(self):
        """The recording then copies the input, and all other state is restored."""

        def nodes(a, o):
            return [
                self.kernel("plain", a[0], o[0]),
                self.kernel("in_place", a[1]),
                self.kernel("halves", o[1], *split(a[0])),
                self.kernel("plain", a[2], o[2]),
            ]

        def recorded():
            inputs = [some(), some(), some()]
            return inputs, *self.rehearse(nodes, *inputs, mutated=[1])

        recorded()
        calls = [call for call in set(self.api.calls) if call.startswith("cuGraph")]
        self.assertIn(KERNEL, calls)
        for call in calls:
            count = self.api.calls.count(call)
            for after in sorted({0, count // 3, count // 2, count - 1}):
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
        for launch in range(3):
            with (
                self.subTest(launch),
                mock.patch.object(Running, "replay", interrupted(Running.replay, launch)),
                self.assertRaises(KeyboardInterrupt),
            ):
                live.set_up(graph, surroundings=lambda: Surroundings(generators=[numbers]))
            self.assertEqual((a, numbers.offset), (before, 4))


def interrupted(replay: Any, number: int) -> Any:
    counted = []

    def call(graph: Running) -> None:
        replay(graph)
        counted.append(1)
        if len(counted) > number:
            raise KeyboardInterrupt

    return call


if __name__ == "__main__":
    run_tests()
