"""Where captured graphs hold the addresses of placeholders, on a driver that checks its callers."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import struct
from collections.abc import Collection
from unittest import mock

import torch
import torch.distributed as dist
from fake_driver import KNOWN, little
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_placeholder import PlaceholdersTestCase
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.errors import DriverError
from pygraph_trees.indirection import relocations
from pygraph_trees.indirection.collectives import Collectives
from pygraph_trees.indirection.placeholder import Extent, Placeholders
from pygraph_trees.indirection.relocations import Scan, scan

calls = torch.ops._c10d_functional

NBYTES = (4096, 100, 3 << 20)  # two small placeholders, which share a page, and a large one
PLAIN = 0x7F00_0000_0000  # an address of no placeholder
HOST_ARRAY = "its address is in a host array"
FAR = "a pointer far outside of every input"
LOOKALIKE = "a value that looks like its address may be something else"


class RelocationsTestCase(PlaceholdersTestCase):
    def setUp(self):
        super().setUp()
        self.a, self.b, self.c = self.place(*(Extent(nbytes, 64 * i) for i, nbytes in enumerate(NBYTES)))

    def place(self, *extents: Extent, **memory: int) -> list[int]:
        """Starts again with other placeholders; returns where they begin."""
        self.restart(**memory)
        self.placeholders = Placeholders(self.driver, 0, extents)
        return [placeholder.start for placeholder in self.placeholders.placeholders]

    def scan(self, *nodes: str | int, hide_nothing: Collection[int] = ()) -> Scan:
        return scan(self.driver, self.api.make_graph(*nodes), self.placeholders, hide_nothing=hide_nothing)

    def assertFound(self, found: Scan, *relocations: tuple[int, ...], refused=(), opaque=None):
        """``relocations``: handle of the node, offset, input, addend; ``refused``: inputs, or a reason for each."""
        held = [(found.nodes[s.node].handle, s.offset, s.input, s.addend) for s in found.relocations]
        self.assertEqual(held, list(relocations))
        handles = [node.handle for node in found.nodes]
        self.assertEqual(handles, list(dict.fromkeys(handle for handle, *_ in relocations)))
        reasons = refused if isinstance(refused, dict) else dict.fromkeys(refused, LOOKALIKE)
        self.assertEqual((found.refused, found.opaque), (reasons, opaque))


class TestKernels(RelocationsTestCase):
    def test_guards_belong_to_the_input(self):
        """They belong to it as far as no other allocation can own a pointer there."""
        for index, placeholder in enumerate(self.placeholders.placeholders):
            start, end = placeholder.start, placeholder.end
            first, last = start - (start - placeholder.low) // 4, end + (placeholder.high - end) // 4
            for address in (first, start - 1, end - 1, end, last):
                kernel = self.api.make_kernel([address])
                self.assertFound(self.scan(kernel), (kernel, 0, index, address - start))
            for address in (placeholder.low, first - 1, last + 1, placeholder.high - 1):
                kernel = self.api.make_kernel([address, start])
                self.assertFound(self.scan(kernel), (kernel, 8, index, 0), opaque=FAR)

    def test_two_integers_may_look_like_an_address_of_a_large_input(self):
        (start,) = self.place(Extent(3 << 30, 0))
        address = (start + (3 << 30) - 1) // (1 << 32) * (1 << 32) + 100  # as 100 and another number
        self.assertEqual(self.placeholders.find(address), 0)
        kernel = self.api.make_kernel([start, little(address, 7)])
        self.assertFound(self.scan(kernel), (kernel, 0, 0, 0), refused=[0])
        alone = self.api.make_kernel([start, little(start, 7), address])
        self.assertFound(self.scan(alone), (alone, 0, 0, 0), (alone, 8, 0, 0), (alone, 24, 0, address - start))
        packed = self.api.make_kernel([start, address], packed=True)
        self.assertFound(self.scan(packed), (packed, 0, 0, 0), refused=[0])

    def test_a_factor_and_a_shift_may_look_like_an_address(self):
        """ATen's division by 10, next to a pointer in the same structure, in a process whose addresses are all low."""
        (start,) = self.place(Extent(400 << 20, 0), _next_range=0x3_0200_0000, most_reserved=70 << 30)
        divider = struct.pack("<III", 10, 0x9999999A, 4)
        self.assertEqual(self.placeholders.find(int.from_bytes(divider[4:], "little")), 0)
        self.assertFound(self.scan(self.api.make_kernel([little(start) + bytes(4) + divider])), refused=[0])
        alone = self.api.make_kernel([start])
        self.assertFound(self.scan(alone), (alone, 0, 0, 0))

    def test_a_word_between_two_aligned_ones_or_cut_off_refuses(self):
        for packed in (False, True):
            words = b"abcd" + little(self.a), b"abcd" + little(self.b), self.c
            first, second, kernel = (self.api.make_kernel([word, self.c], packed=packed) for word in words)
            held = (first, 16, 2, 0), (kernel, 0, 2, 0), (kernel, 8, 2, 0), (second, 16, 2, 0)
            self.assertFound(self.scan(first, kernel, second), *held, refused=[0, 1])
        self.assertFound(self.scan(self.api.make_kernel([little(PLAIN, self.a)[:-2]])), refused=[0])

    def test_kernels_that_are_not_known_are_named(self):
        """Each is named once, whether or not it contains a relocation; the search in C++ finds the same names."""
        names = ("halves", KNOWN, "_Z6halvesiiPf", "halves", "pygraph_put_256", "triton_mine", "ncclKernel")
        words = ([7], [self.a], [self.b, 1], [2], [self.a], [self.c], [self.a])
        kernels = [self.api.make_kernel(given, name=name) for name, given in zip(names, words, strict=True)]
        self.assertEqual(self.scan(*kernels).unknown, ("halves", "_Z6halvesiiPf", "triton_mine"))

    def test_halves_in_two_parameters_are_no_address(self):
        """They may be a negative number and an integer. In a packed block they are taken for an address."""
        low, high = little(self.a)[:4], little(self.a)[4:]
        kernel, packed = (self.api.make_kernel([low, high, self.b], packed=packed) for packed in (False, True))
        self.assertFound(self.scan(kernel, packed), (kernel, 8, 1, 0), (packed, 0, 0, 0), (packed, 8, 1, 0))
        unaligned = self.api.make_kernel([b"abcd", low, high, b"abcd", self.b])
        self.assertFound(self.scan(unaligned), (unaligned, 16, 1, 0))
        kernels = self.api.make_kernel([PLAIN, b"abcd" + low]), self.api.make_kernel([high + b"abcd"])
        self.assertFound(self.scan(*kernels))

    def test_numbers_of_kernels_over_lists_are_no_addresses(self):
        """Stale words follow them, which may begin with such numbers. In a struct of another size, nothing is sure."""
        lists = "_ZN2at6native12_GLOBAL__N_125multi_tensor_apply_kernelINS1_"
        cat = "_ZN2at6native19CatArrayBatchedCopyINS1_10OpaqueTypeILj4EEEjLi2ELi64ELi64EEEvPT_"
        for name, nbytes, addresses, before in (
            (lists + "18TensorListMetadataILi2EEENS1_", 3144, 128, []),
            (lists + "32FusedOptimizerTensorListMetadataILi4EEENS1_", 3336, 216, []),
            (lists + "28TensorListScalarListMetadataIsLi1EEENS1_", 3328, 96, []),
            (lists + "28TensorListScalarListMetadataIN3c107complexIdEELi2EEENS1_", 4000, 120, []),
            (lists + "18TensorListMetadataILi2EEENS1_", 24200, 896, []),
            (cat, 64 * 13, 64, [self.c]),
            (lists + "18TensorListMetadataILi2EEENS1_", 3152, 0, []),
        ):
            with self.subTest(name=name, nbytes=nbytes):
                (start,) = self.place(Extent(100, 0))
                struct = little(*(start,) * addresses, *(start + 1,) * (nbytes // 8 - addresses))
                kernel = self.api.make_kernel([*(start for _ in before), struct, start], name=name)
                held = (*range(addresses + len(before)), nbytes // 8 + len(before))
                found = [(kernel, 8 * word, 0, 0) for word in held]
                self.assertFound(self.scan(kernel), *found, refused=[0] * (addresses == 0))

    def test_addresses_with_a_number_in_their_first_bytes_refuse_in_atens_structs(self):
        """They are stale. With strides, only the input itself is sure; other kernels may be given parts of it."""
        strided = "_ZN2at6native18elementwise_kernelILi128ELi4EZNS0_22gpu_kernel_impl_nocastI"
        for name, start, index, nbytes, numbers in (
            ("_ZN2at6native13reduce_kernelI", self.a, 0, 2, (0x0000, 0x0007, 0x3C00, 0x3F80, 0xBC00, 0xBF80, 0xFC00)),
            ("_ZN2at6native13reduce_kernelI", self.c, 2, 2, (0x0000, 0x0007, 0x3C00, 0x3F80, 0xBC00, 0xBF80, 0xFC00)),
            (strided, self.c, 2, 2, (0x0000, 0x3C00, 0xFF80, 0xFFFF)),
            (strided, self.c, 2, 3, ((self.c & 0xFF0000) + 0x020E00,)),
        ):
            for number in numbers:
                stale = start >> 8 * nbytes << 8 * nbytes | number
                kernel = self.api.make_kernel([little(start, stale)], name=name)
                self.assertFound(self.scan(kernel), (kernel, 0, index, 0), refused=[index])
                self.assertEqual(self.scan(self.api.make_kernel([stale], name=name)).refused, {})  # its own parameter
        views = [self.api.make_kernel([little(self.c + 64, PLAIN)], name=strided) for _ in range(2)]
        self.assertFound(self.scan(views[0]), refused=[2])
        graph, first = self.api.make_graph(views[1]), [self.a, self.b, self.c + 64]
        self.assertFound(scan(self.driver, graph, self.placeholders, recorded=first), (views[1], 0, 2, 64))

    def test_a_number_before_half_an_address_is_not_taken_for_one_between_inputs(self):
        """Placeholders of many large inputs are in several ranges of 4 GiB."""
        first, *_, last = self.place(*[Extent(400 << 20, 0)] * 4)
        self.assertLess(first >> 32, last >> 32)
        kernel = self.api.make_kernel([little(first, last >> 32 << 32 | 7)])
        self.assertFound(self.scan(kernel), (kernel, 0, 0, 0))
        kernel = self.api.make_kernel([first, last >> 32 << 32 | 7])
        self.assertFound(self.scan(kernel), (kernel, 0, 0, 0), opaque=FAR)

    def test_kernels_without_known_parameters_or_a_name_may_hide_all(self):
        """One without a name may be a collective."""
        unread, kernel = self.api.make_kernel([self.b], known=False), self.api.make_kernel([self.a])
        found = self.scan(unread, kernel)
        self.assertFound(found, (kernel, 0, 0, 0), opaque="a kernel whose parameters cannot be read")
        nameless = self.api.make_kernel([self.a], name=None)
        self.assertFound(self.scan(nameless), (nameless, 0, 0, 0), opaque="a kernel whose name cannot be told")

    def test_a_collective_refuses_its_inputs_and_may_hide_all_others(self):
        for name in (
            "ncclKernel_AllReduce_RING_LL_Sum_float",
            "ncclDevKernel_Generic",
            "_Z40ncclDevKernel_AllGather_RING_LL_Sum_f32_24ncclDevKernelArgsStorageILm4096EE",
            "_Z33ncclSymkDevKernel_AllReduce_AGxLL19ncclSymkDevWorkArgs",
        ):
            found = self.scan(self.api.make_kernel([self.a], name=name), kernel := self.api.make_kernel([self.b]))
            self.assertFound(found, (kernel, 0, 1, 0), refused={0: "a collective reads it"}, opaque="a collective")
        for name in ("enclosedKernel", "_Z14my_ncclKernel_v", "triton_poi_fused_nccl_0", ""):
            kernel = self.api.make_kernel([self.a], name=name)
            self.assertFound(self.scan(kernel), (kernel, 0, 0, 0))

    def test_a_collective_of_known_tensors_hides_nothing(self):
        """Nor does a host node that it adds; another collective does, or another host node."""
        for words, known, opaque in ((PLAIN, True, None), (self.a, True, None), (PLAIN, False, "a collective")):
            first, other = (self.api.make_kernel([word], name="ncclDevKernel_Sum") for word in (words, PLAIN))
            kernel = self.api.make_kernel([self.b])
            found = self.scan(first, kernel, other, hide_nothing=[first, other] if known else [first])
            refused = {0: "a collective reads it"} if words == self.a else {}
            self.assertFound(found, (kernel, 0, 1, 0), refused=refused, opaque=opaque)
        kernel = self.api.make_kernel([self.b])
        graph = self.api.make_graph("HOST", kernel, "HOST")
        first, _, last = self.driver.nodes(graph)
        for hide_nothing, opaque in (([first, last], None), ([first], "a host node")):
            found = scan(self.driver, graph, self.placeholders, hide_nothing=hide_nothing)
            self.assertFound(found, (kernel, 0, 1, 0), opaque=opaque)


class TestCopiesAndFills(RelocationsTestCase):
    def test_a_copy_of_rows_may_touch_any_and_a_fill_of_rows_is_refused(self):
        for more in ({"Height": 2}, {"Depth": 2}, {"srcXInBytes": 8}, {"source_type": "ARRAY"}):
            copy = self.api.make_memcpy(PLAIN, self.a, 16, **more)
            self.assertFound(self.scan(copy), opaque="a copy of rows or arrays")
        rows, others = (self.api.make_memset(at, 16, rows=4, pitch=64) for at in (self.b, PLAIN))
        self.assertFound(self.scan(rows, others), refused={1: "a fill of several rows writes to it"})


class TestCollectives(TestCase):
    """Operators for collectives, with a driver whose graph grows by a node at each of them, and by one elsewhere."""

    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        self.group = dist.group.WORLD.group_name
        self.graph: list[int] | None = []

    def capturing_graph(self, stream: int) -> int | None:
        if self.graph is None:
            raise DriverError(call="cuStreamGetCaptureInfo", code="unknown")
        return stream

    def nodes(self, graph: int) -> list[int]:
        """Each time that it is asked, there is another one."""
        assert self.graph is not None
        self.graph.append(len(self.graph))
        return list(self.graph)

    def test_their_nodes_and_tensors(self):
        summed, gathered, other = torch.ones(8), torch.ones(4), torch.ones(2)
        with Collectives(self, 7) as found:
            reduced = calls.all_reduce_(summed[2:], "sum", self.group)
            other.add(self.graph.append(10) or 1)  # another operation
            result = calls.all_gather_into_tensor_coalesced([gathered], 1, self.group)[0]
            calls.wait_tensor(result)
            calls.wait_tensor(reduced)
        storages = {tensor.untyped_storage().data_ptr() for tensor in (summed, gathered, result)}
        self.assertEqual((found.nodes, found.storages), ({1, 4, 6, 8}, storages))

    def test_a_driver_that_does_not_tell(self):
        """The values are right, and no node is known."""
        with Collectives(self, 7) as found:
            self.graph = None
            self.assertEqual(calls.wait_tensor(calls.all_reduce(torch.ones(8), "sum", self.group)).sum(), 8)
        self.assertEqual((found.nodes, len(found.storages) > 0), (set(), True))


class TestHostArrays(RelocationsTestCase):
    def upload(self, data: bytes, target: int = PLAIN, pinned: bool = True, **more: str) -> int:
        kind = {"source_type": "HOST", **more}
        return self.api.make_memcpy(self.api.make_host(data, pinned), target, len(data), **kind)

    def test_addresses_in_a_host_array_are_refused(self):
        for pinned, kind in itertools.product((True, False), ("HOST", "UNIFIED")):
            kernel = self.api.make_kernel([self.a, self.b])
            upload = self.upload(little(1, self.b + 24, PLAIN), pinned=pinned, source_type=kind)
            self.assertFound(self.scan(upload, kernel), (kernel, 0, 0, 0), (kernel, 8, 1, 0), refused={1: HOST_ARRAY})
        collective = self.api.make_kernel([self.a], name="ncclKernel")  # the first reason is told
        found = self.scan(self.upload(little(self.a)), "HOST", collective)
        self.assertFound(found, refused={0: HOST_ARRAY}, opaque="a host node")

    def test_words_are_aligned_as_on_the_device(self):
        """They may begin in one chunk and end in the next."""
        for chunk in (relocations._HOST_CHUNK, 16):
            with mock.patch.object(relocations, "_HOST_CHUNK", chunk):
                for before, lead in itertools.product(range(0, 72, 4), range(8)):
                    data = b"x" * (before + -lead % 4) + little(self.a) + bytes(40 - before % 8)
                    self.assertFound(self.scan(self.upload(data, PLAIN + lead)), refused={0: HOST_ARRAY})
                self.assertFound(self.scan(self.upload(bytes(range(200)))))

    def test_plain_numbers_and_less_than_a_word_are_harmless(self):
        upload = self.upload(bytes(range(256)) * 8, target=self.a)
        self.assertFound(self.scan(upload), (upload, 8, 0, 0))
        for nbytes in range(1, 8):
            self.assertFound(self.scan(self.upload(little(self.a)[:nbytes], target=PLAIN + 4)))

    def test_memory_that_cannot_be_read_may_hold_any_address(self):
        """Memory is not read past its end."""
        unread = "a copy from host memory that cannot be read"
        with mock.patch("builtins.open", side_effect=FileNotFoundError):
            self.assertFound(self.scan(self.upload(bytes(8))), opaque=unread)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        page = mmap.PAGESIZE
        with mmap.mmap(-1, 2 * page) as memory:
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            self.assertEqual(libc.munmap(start + page, page), 0)
            for source, nbytes, opaque in ((start, page, None), (start, page + 8, unread), (0x10, 64, unread)):
                copy = self.api.make_memcpy(source, PLAIN, nbytes, source_type="HOST")
                self.assertFound(self.scan(copy), opaque=opaque)


class TestOtherNodes(RelocationsTestCase):
    def test_nodes_that_may_hide_addresses_are_named(self):
        unread = "a node that cannot be read"
        for kind, opaque in (("HOST", "a host node"), ("CONDITIONAL", unread), ("BATCH_MEM_OP", unread)):
            found = self.scan(kind, kernel := self.api.make_kernel([self.a]))
            self.assertFound(found, (kernel, 0, 0, 0), opaque=opaque)
        graph = self.api.make_graph("GRAPH", "HOST", children={0: self.api.make_graph("KERNEL")})
        self.assertFound(scan(self.driver, graph, self.placeholders), opaque="a child graph")
        self.assertFound(self.scan("EMPTY", "WAIT_EVENT", "MEM_ALLOC", "EVENT_RECORD", "MEM_FREE", "EMPTY"))

    def test_an_address_between_the_placeholders_is_hidden(self):
        start, _ = self.place(Extent(1 << 30, 0), Extent(1 << 30, 0))
        between = self.placeholders.placeholders[0].high
        self.assertIsNone(self.placeholders.find(between))
        kernel = self.api.make_kernel([between, start])
        self.assertFound(self.scan(kernel), (kernel, 8, 0, 0), opaque=FAR)
        for node in (self.api.make_memset(between, 4), self.api.make_memcpy(between, PLAIN, 4)):
            self.assertFound(self.scan(node), opaque=FAR)


class TestFailures(RelocationsTestCase):
    def test_nodes_that_the_driver_does_not_describe_hide_addresses(self):
        unified = {"source_type": "UNIFIED"}
        for call, make, opaque in (
            ("cuGraphKernelNodeGetParams", lambda: self.api.make_kernel([self.b]), "a kernel whose parameters"),
            ("cuFuncGetParamInfo", lambda: self.api.make_kernel([self.b]), "a kernel whose parameters"),
            ("cuGraphMemcpyNodeGetParams", lambda: self.api.make_memcpy(self.b, PLAIN, 8), "a copy that"),
            ("cuPointerGetAttribute", lambda: self.api.make_memcpy(self.b, PLAIN, 8, **unified), "a copy that"),
            ("cuGraphMemsetNodeGetParams", lambda: self.api.make_memset(self.b, 8), "a fill that"),
        ):
            kernel = self.api.make_kernel([self.a])
            graph = self.api.make_graph(make(), kernel)
            self.api.fail(call, code=self.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            found = scan(self.driver, graph, self.placeholders)
            self.assertFound(found, (kernel, 0, 0, 0), opaque=f"{opaque} cannot be read")
            self.assertIsNone(scan(self.driver, graph, self.placeholders).opaque)


@st.composite
def words(draw: st.DrawFn) -> tuple[int | None, int]:
    """A word of a node: placeholder and addend, or None and a number that is no placeholder's address."""
    if draw(st.booleans()):
        index = draw(st.integers(0, len(NBYTES) - 1))
        return index, draw(st.integers(-0x8000, NBYTES[index] + 0x8000))
    return None, draw(st.sampled_from([0, 1, 4096, PLAIN, 2**63, 2**64 - 1]))


PARAMETERS = st.lists(words() | st.binary(min_size=1, max_size=5) | words().map(lambda w: (b"abcd", w)), max_size=6)
NODES = st.one_of(
    st.tuples(st.just("kernel"), PARAMETERS, st.booleans()),
    st.tuples(st.just("memcpy"), words(), words()),
    st.tuples(st.just("memset"), words()),
    st.just(("EMPTY",)),
)
GRAPHS = st.lists(NODES, max_size=6)


class TestAllAtOnce(RelocationsTestCase):
    @settings(suppress_health_check=[HealthCheck.differing_executors])  # C++ inherits it
    @given(GRAPHS)
    def test_relocations_are_all_the_places_and_no_others(self, drawn):
        self.place(*(Extent(nbytes, 0) for nbytes in NBYTES))
        api, driver, placeholders = self.api, self.driver, self.placeholders

        def value(word: tuple[int | None, int]) -> int:
            return word[1] if word[0] is None else placeholders.placeholders[word[0]].start + word[1]

        def parameter(drawn) -> int | bytes:
            if isinstance(drawn, bytes):
                return drawn
            return drawn[0] + little(value(drawn[1])) if isinstance(drawn[0], bytes) else value(drawn)

        def node(kind: str, *parts) -> int | str:
            if kind == "kernel":
                return api.make_kernel([parameter(part) for part in parts[0]], packed=parts[1])
            if kind == "memcpy":
                return api.make_memcpy(value(parts[0]), value(parts[1]), 8)
            return api.make_memset(value(parts[0]), 8) if kind == "memset" else kind

        graph = api.make_graph(*(node(*parts) for parts in drawn))
        exec_ = api.instantiate(graph)
        found = scan(driver, graph, placeholders)

        expected, refused, opaque = {}, set(), None
        for handle, (kind, *_) in zip(driver.nodes(graph), drawn, strict=True):
            held = b"" if kind == "EMPTY" else api.exec_parameters(exec_, handle)
            for offset in range(0, len(held) - 7, 4):
                index = placeholders.find(address := int.from_bytes(held[offset : offset + 8], "little"))
                if index is not None and placeholders.placeholders[index].is_far_from(address):
                    opaque = FAR
                elif index is not None and offset % 8:
                    refused.add(index)
                elif index is not None:
                    expected[handle, offset] = (index, address - placeholders.placeholders[index].start)
        self.assertFound(found, *[(*place, *held) for place, held in expected.items()], refused=refused, opaque=opaque)


if __name__ == "__main__":
    run_tests()
