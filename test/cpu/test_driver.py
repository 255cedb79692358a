"""The driver's calls, on a fake driver that checks its callers."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import threading
from unittest import mock

from fake_driver import CUresult, FakeApi
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda import driver as driver_module
from pygraph_trees.cuda import progress
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.graph_nodes import NodeKind
from pygraph_trees.errors import NOT_FOUND, DriverError

DEVICE = 3
parameters = st.lists(st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=40), max_size=8)
addresses = st.integers(1, 2**47)


def lay_out(words):
    """Returns the block of these parameters and the offsets at which 8 bytes of one parameter begin.

    Each parameter is aligned to the largest power of two that divides its size, up to 8.
    """
    block, inside = b"", []
    for word in words:
        part = word if isinstance(word, bytes) else struct.pack("<Q", word)
        alignment = next(alignment for alignment in (8, 4, 2, 1) if len(part) % alignment == 0)
        block = block.ljust(-(-len(block) // alignment) * alignment, b"\0")
        inside.extend(range(len(block), len(block) + len(part) - 7))
        block += part
    return block, inside


class DriverTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.api = FakeApi()
        self.driver = Driver(self.api)

    def assertRefused(self, call, code, function, *args):
        with self.assertRaisesRegex(DriverError, f"^{call} returned {code}$"):
            function(*args)

    def bound(self, kind, node):
        """A node's wrapper, bound to the only executable graph that has it, and that graph."""
        exec_ = self.api.instantiate(self.api.make_graph(node))
        wrapper = getattr(self.driver, f"{kind}_node")(node)
        wrapper.bind(exec_, self.driver.context())
        return wrapper, exec_


class TestDriver(DriverTestCase):
    def test_counts_nodes_with_child_graphs(self):
        child = self.api.make_graph("KERNEL", "MEMSET")
        graph = self.api.make_graph("KERNEL", "GRAPH", "MEMCPY", "CONDITIONAL", children={1: child})
        counts = self.driver.count_nodes(graph)
        self.assertEqual(counts, {NodeKind.KERNEL: 2, NodeKind.MEMSET: 1, NodeKind.MEMCPY: 1, NodeKind.OTHER: 1})
        self.assertEqual(self.driver.count_nodes(self.api.make_graph()), {})
        for call, after in (("cuGraphGetNodes", 0), ("cuGraphGetNodes", 1), ("cuGraphNodeGetType", 1)):
            self.api.fail(call, after)
            self.assertRefused(call, "CUDA_ERROR_INVALID_VALUE", self.driver.count_nodes, graph)
        self.assertEqual(self.driver.count_nodes(graph), counts)

    def test_the_graph_that_a_stream_captures_is_found(self):
        stream, graph = self.api.make_stream(), self.api.make_graph("KERNEL")
        self.assertIsNone(self.driver.capturing_graph(stream))
        self.api.capture(stream, graph)
        self.assertEqual(self.driver.capturing_graph(stream), graph)
        self.api.capture(stream, graph, "INVALIDATED")
        self.assertIsNone(self.driver.capturing_graph(stream))

    def test_the_mode_of_captures_is_what_it_was(self):
        modes = self.api.CUstreamCaptureMode
        for before in modes:
            self.api.capture_mode = before
            with self.assertRaises(KeyboardInterrupt), self.driver.without_disturbing_captures():
                self.assertIs(self.api.capture_mode, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
                raise KeyboardInterrupt
            self.assertIs(self.api.capture_mode, before)
        for where in ("driver", "bindings"):
            self.api.lack("cuThreadExchangeStreamCaptureMode", where)
            with self.assertRaises(DriverError), self.driver.without_disturbing_captures():
                pass

    def test_questions_about_progress_break_no_capture(self):
        """While another thread captures in the global mode, asking the GPU for progress is an error."""
        modes, asked = self.api.CUstreamCaptureMode, []

        class Event:
            def query(event):
                asked.append(self.api.capture_mode)
                return True

            def elapsed_time(event, end):
                asked.append(self.api.capture_mode)
                return 0.25

        before = self.api.capture_mode
        with mock.patch.object(progress, "driver", lambda: self.driver):
            self.assertTrue(progress.is_over(Event()))
            self.assertEqual(progress.us_between(Event(), Event()), 250)
            self.assertEqual(asked, [modes.CU_STREAM_CAPTURE_MODE_RELAXED] * 3)
            self.assertIs(self.api.capture_mode, before)
            self.api.lack("cuThreadExchangeStreamCaptureMode", "driver")
            self.assertTrue(progress.is_over(Event()))
        with mock.patch.object(progress, "driver", lambda: None):
            self.assertTrue(progress.is_over(Event()))
        self.assertEqual(asked[3:], [before] * 2)

    def test_there_is_no_driver_without_bindings(self):
        driver_module.driver.cache_clear()
        try:
            with mock.patch.dict(sys.modules, {"cuda.bindings.driver": None}):
                self.assertIsNone(driver_module.driver())
        finally:
            driver_module.driver.cache_clear()

    def test_bindings_that_find_no_library_are_called_once_and_without_the_collector(self):
        """They hold a lock while they look for it, for which a finalizer that calls the driver would wait."""
        collects = []

        def absent():
            collects.append(gc.isenabled())
            raise RuntimeError("libcuda.so.1 cannot be opened")

        self.api.cuDriverGetVersion = absent
        with mock.patch.dict(sys.modules, {"cuda.bindings.driver": self.api}):
            found = driver_module.driver.__wrapped__()
        self.assertRefused("cuCtxGetCurrent", NOT_FOUND, found.context)
        self.assertIn("cuMemMap", found.missing_calls())
        self.assertEqual((collects, gc.isenabled()), ([False], True))


class TestMissingCalls(DriverTestCase):
    def test_calls_are_missing_that_the_driver_or_the_bindings_lack(self):
        of_parameters = ["cuFuncGetParamInfo", "cuKernelGetParamInfo"]
        kernel_calls = ["cuGraphKernelNodeGetParams", "cuGraphExecKernelNodeSetParams"]
        self.assertEqual(self.driver.missing_calls(), [])
        for version, missing in ((12040, []), (12030, of_parameters), (11080, kernel_calls)):
            self.api.driver_version = version
            self.assertEqual(self.driver.missing_calls()[:2], missing)
        self.assertGreater(len(self.driver.missing_calls()), 2)
        self.api.driver_version = 12040
        self.api.lack("cuMemMap", "bindings")
        self.assertEqual(self.driver.missing_calls(), ["cuMemMap"])

    def test_every_call_of_memory_and_nodes_is_asked_for(self):
        kernels = [self.api.make_kernel([1], func=func) for func in (True, False)]
        host = self.api.make_host(b"12345678")
        memcpy, memset = self.api.make_memcpy(host, 0x2000, 8, "UNIFIED"), self.api.make_memset(0x2000, 8)
        exec_ = self.api.instantiate(self.api.make_graph(*kernels, memcpy, memset))
        nodes = [self.driver.kernel_node(node) for node in kernels]
        copies = [self.driver.memcpy_node(memcpy), self.driver.memset_node(memset)]
        for node in copies:
            node.set_captured()
        for node in (*nodes, *copies):
            node.bind(exec_, self.driver.context())
            node.set()
        nbytes = self.driver.granularity(DEVICE)
        start, memory = self.driver.reserve(nbytes), self.driver.create_memory(nbytes, DEVICE)
        self.driver.map_memory(start, nbytes, memory)
        self.driver.allow_access(start, nbytes, DEVICE)
        self.driver.unmap(start, nbytes)
        self.driver.release_memory(memory)
        elsewhere = threading.Thread(target=self.driver.enter, args=[self.driver.context()])
        elsewhere.start()
        elsewhere.join()
        called = {*self.api.calls, "cuCtxGetCurrent"}  # which keeps no list
        self.api.lack("cuDriverGetVersion")
        self.assertEqual(called, set(self.driver.missing_calls()))

    def test_absent_calls_are_not_found(self):
        node, exec_ = self.bound("memset", self.api.make_memset(0x1000, 8))
        self.api.lack("cuGraphExecMemsetNodeSetParams")
        node.bind(exec_, self.driver.context())
        self.assertRefused("cuGraphExecMemsetNodeSetParams", NOT_FOUND, node.set)
        self.api.lack("cuGraphExecMemsetNodeSetParams", "bindings")
        self.assertRefused("cuGraphExecMemsetNodeSetParams", NOT_FOUND, node.bind, exec_, self.driver.context())
        for where in ("bindings", "driver"):
            self.api.lack("cuCtxGetCurrent", where)
            self.assertRefused("cuCtxGetCurrent", NOT_FOUND, self.driver.context)


class TestKernelNode(DriverTestCase):
    @given(parameters, st.booleans(), st.booleans(), st.booleans(), st.data())
    def test_sets_what_was_written_and_nothing_else(self, words, packed, func, apart, data):
        handle = self.api.make_kernel(words, packed, func=func, apart=apart)
        node, exec_ = self.bound("kernel", handle)
        recorded, inside = lay_out(words)
        self.assertEqual((node.handle, node.kind, bytes(node.block)), (handle, NodeKind.KERNEL, recorded))
        self.assertEqual(node.words(), recorded + bytes(-len(recorded) % 8))
        self.assertEqual(ctypes.addressof(node.block) % 64, 0)
        expected = bytearray(recorded)
        for offset in data.draw(st.lists(st.sampled_from(inside), max_size=3)) if inside else ():
            node.word(offset).value = data.draw(addresses)
            expected[offset : offset + 8] = bytes(node.word(offset))
        self.assertEqual(bytes(node.block), expected)
        self.assertEqual(self.api.exec_parameters(exec_, handle), recorded)
        self.api.calls.clear()
        node.set()
        self.assertEqual(self.api.calls, ["cuGraphExecKernelNodeSetParams"])
        self.assertEqual(self.api.exec_parameters(exec_, handle), expected)
        self.assertEqual(bytes(self.driver.kernel_node(handle).block), recorded)

    def test_parameters_that_cannot_be_located_are_refused(self):
        handle = self.api.make_kernel([1, 2])
        self.api._nodes[handle].content.layout.reverse()
        with self.assertRaisesRegex(DriverError, "cuFuncGetParamInfo returned parameters in disorder"):
            self.driver.kernel_node(handle)
        handle = self.api.make_kernel([1], packed=True)
        self.api._nodes[handle].content._entries[2] = 3  # an unknown launch parameter
        with self.assertRaises(DriverError):
            self.driver.kernel_node(handle)
        for func, call in ((True, "cuFuncGetParamInfo"), (False, "cuKernelGetParamInfo")):
            handle = self.api.make_kernel([1, 2], func=func, known=False)
            with self.assertRaisesRegex(DriverError, "parameters of unknown layout"):
                self.driver.kernel_node(handle)
            handle = self.api.make_kernel([1, 2], func=func)
            self.api.fail(call, 1, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            self.assertRefused(call, "CUDA_ERROR_OUT_OF_MEMORY", self.driver.kernel_node, handle)
        self.assertEqual(len(self.driver.kernel_node(self.api.make_kernel([1], packed=True, known=False)).block), 8)

    def test_packed_pairs_come_in_either_order(self):
        handle = self.api.make_kernel([1, 2], packed=True)
        entries = self.api._nodes[handle].content._entries
        first, second = entries[:2], entries[2:4]
        for pairs in (first + second, second + first):
            entries[:4] = pairs
            self.assertEqual(bytes(self.driver.kernel_node(handle).block), struct.pack("<QQ", 1, 2))

    def test_a_kernel_is_named_if_the_driver_knows_its_name(self):
        for func in (True, False):
            node = self.driver.kernel_node(self.api.make_kernel([1], name="_Z3addPf", func=func))
            self.assertEqual(self.driver.function_name(node.function, node.kernel), "_Z3addPf")
            nameless = self.driver.kernel_node(self.api.make_kernel([1], name=None, func=func))
            self.assertIsNone(self.driver.function_name(nameless.function, nameless.kernel))
        self.api.lack("cuKernelGetName")
        self.assertIsNone(self.driver.function_name(node.function, node.kernel))


class TestMemcpyNode(DriverTestCase):
    SOURCE, TARGET = 0x1000, 0x2000

    def node(self, *types, **more):
        return self.driver.memcpy_node(self.api.make_memcpy(self.SOURCE, self.TARGET, 64, *types, **more))

    def assertSides(self, node, source, target, host_source, plain):
        found = (node.source, node.target, node.host_source, node.plain)
        self.assertEqual(found, (source, target, host_source, plain))

    def test_only_sides_in_device_memory_are_addresses(self):
        for types, source, target, host_source in (
            (("DEVICE", "DEVICE"), self.SOURCE, self.TARGET, None),
            (("UNIFIED", "DEVICE"), self.SOURCE, self.TARGET, None),
            (("DEVICE", "UNIFIED"), self.SOURCE, self.TARGET, None),
            (("HOST", "DEVICE"), None, self.TARGET, self.SOURCE),
            (("DEVICE", "HOST"), self.SOURCE, None, None),
            (("HOST", "HOST"), None, None, self.SOURCE),
        ):
            with self.subTest(types):
                self.assertSides(self.node(*types), source, target, host_source, True)

    def test_arrays_and_what_adds_to_an_address_are_not_plain(self):
        for types in (("ARRAY", "DEVICE"), ("DEVICE", "ARRAY")):
            with self.subTest(types):
                self.assertSides(self.node(*types), None, None, None, False)
        for field in ("Height", "Depth"):
            with self.subTest(field):
                node = self.node(**{field: 3})
                self.assertSides(node, None, None, None, False)
                self.assertEqual(node.nbytes, 3 * 64)
                self.assertSides(self.node(**{field: 0}), self.SOURCE, self.TARGET, None, True)
        for field in ("XInBytes", "Y", "Z", "LOD"):
            for side in ("src", "dst"):
                with self.subTest(side + field):
                    self.assertSides(self.node(**{side + field: 1}), None, None, None, False)
        self.assertSides(self.node("HOST", srcXInBytes=8), None, None, self.SOURCE, False)

    def test_unified_addresses_are_of_what_lies_there(self):
        for pinned in (True, False):
            host = self.api.make_host(b"12345678", pinned)
            to_device = self.driver.memcpy_node(self.api.make_memcpy(host, self.TARGET, 8, "UNIFIED", "UNIFIED"))
            self.assertSides(to_device, None, self.TARGET, host, True)
            to_host = self.driver.memcpy_node(self.api.make_memcpy(self.SOURCE, host, 8, "UNIFIED", "UNIFIED"))
            self.assertSides(to_host, self.SOURCE, None, None, True)
        self.api.fail("cuPointerGetAttribute", code=CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        self.assertRefused("cuPointerGetAttribute", "CUDA_ERROR_OUT_OF_MEMORY", self.node, "UNIFIED")

    @given(addresses, addresses, st.tuples(*[st.sampled_from(["DEVICE", "UNIFIED"])] * 2))
    def test_set(self, source, target, types):
        node, exec_ = self.bound("memcpy", self.api.make_memcpy(self.SOURCE, self.TARGET, 64, *types))
        self.assertEqual((node.kind, node.nbytes), (NodeKind.MEMCPY, 64))
        node.source = source
        for expected in ((source, self.TARGET), (source, target)):
            node.target = expected[1]
            self.api.calls.clear()
            node.set()
            self.assertEqual(self.api.calls, ["cuGraphExecMemcpyNodeSetParams"])
            self.assertEqual(self.api.exec_parameters(exec_, node.handle), struct.pack("<QQ", *expected))
            self.assertEqual((node.source, node.target), expected)

    def test_set_keeps_a_host_side(self):
        node, exec_ = self.bound("memcpy", self.api.make_memcpy(self.SOURCE, self.TARGET, 64, "HOST"))
        node.target = 0x3000
        node.set()
        self.assertEqual(self.api.exec_parameters(exec_, node.handle), struct.pack("<QQ", self.SOURCE, 0x3000))


class TestMemsetNode(DriverTestCase):
    @given(addresses, st.sampled_from([1, 2, 4]))
    def test_set(self, target, element):
        node, exec_ = self.bound("memset", self.api.make_memset(0x1000, 64, element))
        self.assertEqual((node.kind, node.target, node.nbytes, node.plain), (NodeKind.MEMSET, 0x1000, 64, True))
        node.target = target
        self.api.calls.clear()
        node.set()
        self.assertEqual(self.api.calls, ["cuGraphExecMemsetNodeSetParams"])
        self.assertEqual(self.api.exec_parameters(exec_, node.handle), struct.pack("<Q", target))
        self.assertEqual(node.target, target)

    def test_a_fill_of_several_rows_is_not_plain(self):
        node = self.driver.memset_node(self.api.make_memset(0x1000, 64, 4, rows=3, pitch=512))
        self.assertEqual((node.target, node.nbytes, node.plain), (0x1000, 2 * 512 + 64, False))


if __name__ == "__main__":
    run_tests()
