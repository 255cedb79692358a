"""The driver's calls, and the single warning if the driver or its bindings do not allow addresses."""

import ctypes
import gc
import struct
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
from fake_driver import CUresult, FakeApi
from fake_trees import bare_manager, bare_recording
from test_trees import inference
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda import driver as driver_module
from pygraph_trees.cuda import progress
from pygraph_trees.cuda.copy_nodes import MemcpyNode
from pygraph_trees.cuda.driver import Driver, IndirectionOff, usable_driver
from pygraph_trees.cuda.graph_nodes import KernelNode, NodeKind
from pygraph_trees.errors import NOT_FOUND, DriverError
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.pools import pools
from pygraph_trees.trees.recordings import recording
from pygraph_trees.trees.recordings.recording import Recording

DEVICE = 3


class DriverTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.api = FakeApi()
        self.driver = Driver(self.api)

    def assertRefused(self, call, code, function, *args):
        self.assertRaisesRegex(DriverError, f"^{call} returned {code}$", function, *args)


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
        for status, found in (("NONE", None), ("ACTIVE", graph), ("INVALIDATED", None)):
            self.api.capture(stream, graph, status)
            self.assertEqual(self.driver.capturing_graph(stream), found)

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
        asked, before = [], self.api.capture_mode

        def answer(value):
            return lambda *_: asked.append(self.api.capture_mode) or value

        event = SimpleNamespace(query=answer(True), elapsed_time=answer(0.25))
        self.enterContext(mock.patch.object(torch.cuda, "current_stream", lambda index: event))
        device = progress.CudaDevice(0)
        with mock.patch.object(progress, "driver", lambda: self.driver):
            self.assertTrue(device.is_idle())
            self.assertEqual(device.us_between(event, event), 250)
            self.assertEqual(asked, [self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED] * 3)
            self.assertIs(self.api.capture_mode, before)
            self.api.lack("cuThreadExchangeStreamCaptureMode", "driver")
            self.assertTrue(device.is_idle())
        with mock.patch.object(progress, "driver", lambda: None):
            self.assertTrue(device.is_idle())
        self.assertEqual(asked[3:], [before] * 2)

    def test_there_is_no_driver_without_bindings(self):
        with mock.patch.dict(sys.modules, {"cuda.bindings.driver": None}):
            self.assertIsNone(driver_module.driver.__wrapped__())

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
        self.assertIn("cuFuncGetParamInfo", found.missing_calls())
        self.assertEqual((collects, gc.isenabled()), ([False], True))

    def test_calls_are_missing_that_the_driver_or_the_bindings_lack(self):
        self.assertEqual(self.driver.missing_calls(), [])
        for version, missing in ((12040, []), (12030, ["cuFuncGetParamInfo", "cuKernelGetParamInfo"])):
            self.api.driver_version = version
            self.assertEqual(self.driver.missing_calls(), missing)
        self.api.driver_version = 12040
        self.api.lack("cuKernelGetParamInfo", "bindings")
        self.assertEqual(self.driver.missing_calls(), ["cuKernelGetParamInfo"])


class TestKernelNode(DriverTestCase):
    def test_parameters_that_cannot_be_located_are_refused(self):
        handle = self.api.make_kernel([1, 2])
        self.api._nodes[handle].content.layout.reverse()
        self.assertRefused("cuFuncGetParamInfo", "parameters in disorder", KernelNode, self.driver, handle)
        handle = self.api.make_kernel([1], packed=True)
        self.api._nodes[handle].content._entries[2] = 3  # an unknown launch parameter
        self.assertRaises(DriverError, KernelNode, self.driver, handle)
        for func, call in ((True, "cuFuncGetParamInfo"), (False, "cuKernelGetParamInfo")):
            handle = self.api.make_kernel([1, 2], func=func, known=False)
            self.assertRaisesRegex(DriverError, "parameters of unknown layout", KernelNode, self.driver, handle)
            handle = self.api.make_kernel([1, 2], func=func)
            self.api.fail(call, 1, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            self.assertRefused(call, "CUDA_ERROR_OUT_OF_MEMORY", KernelNode, self.driver, handle)
        self.assertEqual(len(KernelNode(self.driver, self.api.make_kernel([1], packed=True, known=False)).block), 8)

    def test_packed_pairs_come_in_either_order_and_parameters_may_lie_apart(self):
        handle = self.api.make_kernel([1, 2], packed=True)
        entries = self.api._nodes[handle].content._entries
        first, second = entries[:2], entries[2:4]
        for pairs in (first + second, second + first):
            entries[:4] = pairs
            self.assertEqual(bytes(KernelNode(self.driver, handle).block), struct.pack("<QQ", 1, 2))
        apart = KernelNode(self.driver, self.api.make_kernel([1, 2], apart=True))
        self.assertEqual(bytes(apart.block), struct.pack("<QQ", 1, 2))
        self.assertEqual(ctypes.addressof(apart.block) % 64, 0)

    def test_a_kernel_is_named_if_the_driver_knows_its_name(self):
        for func in (True, False):
            node = KernelNode(self.driver, self.api.make_kernel([1], name="_Z3addPf", func=func))
            self.assertEqual(self.driver.function_name(node.function, node.kernel), "_Z3addPf")
            nameless = KernelNode(self.driver, self.api.make_kernel([1], name=None, func=func))
            self.assertIsNone(self.driver.function_name(nameless.function, nameless.kernel))
        self.api.lack("cuKernelGetName")
        self.assertIsNone(self.driver.function_name(node.function, node.kernel))


class TestCopyNodes(DriverTestCase):
    SOURCE, TARGET = 0x1000, 0x2000

    def sides(self, *types, source=SOURCE, target=TARGET, **more):
        node = MemcpyNode(self.driver, self.api.make_memcpy(source, target, 64, *types, **more))
        self.assertEqual(node.nbytes, 64 * max(1, more.get("Height", 1)) * max(1, more.get("Depth", 1)))
        return node.source, node.target, node.host_source, node.plain

    def test_only_sides_in_device_memory_are_addresses(self):
        """Arrays, and what adds to an address, are not plain."""
        source, target = self.SOURCE, self.TARGET
        plain, other = (source, target, None, True), (None, None, None, False)
        cases = [
            (("DEVICE", "DEVICE"), {}, plain),
            (("HOST", "DEVICE"), {}, (None, target, source, True)),
            (("DEVICE", "HOST"), {}, (source, None, None, True)),
            (("HOST", "HOST"), {}, (None, None, source, True)),
            (("HOST", "DEVICE"), {"srcXInBytes": 8}, (None, None, source, False)),
            (("ARRAY", "DEVICE"), {}, other),
            (("DEVICE", "ARRAY"), {}, other),
            *(((), {field: rows}, other if rows else plain) for field in ("Height", "Depth") for rows in (0, 3)),
            *(((), {s + field: 1}, other) for field in ("XInBytes", "Y", "Z", "LOD") for s in ("src", "dst")),
        ]
        for types, more, expected in cases:
            with self.subTest(types=types, **more):
                self.assertEqual(self.sides(*types, **more), expected)


class TestUsableDriver(TestCase):
    def setUp(self):
        super().setUp()
        usable_driver.cache_clear()
        self.addCleanup(usable_driver.cache_clear)

    def said(self, found):
        """The driver that two calls give, and their warnings."""
        with mock.patch.object(driver_module, "driver", lambda: found), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given = usable_driver(), usable_driver()
        self.assertIs(*given)
        self.assertTrue(all(issubclass(warning.category, IndirectionOff) for warning in caught))
        return given[0], [str(warning.message) for warning in caught]

    def test_a_driver_that_is_missing_or_too_old_is_told_once(self):
        old = SimpleNamespace(missing_calls=lambda: ["cuMemMap", "cuGraphNodeGetType"])
        for found, expected in (
            (None, "inputs of CUDA graphs are copied at each replay.*cuda.bindings is not installed"),
            (old, "too old, they lack cuMemMap, cuGraphNodeGetType"),
        ):
            usable_driver.cache_clear()
            given, (text,) = self.said(found)
            self.assertIsNone(given)
            self.assertRegex(text, expected)
        usable_driver.cache_clear()
        driver = SimpleNamespace(missing_calls=list)
        self.assertEqual(self.said(driver), (driver, []))

    def test_a_program_without_a_gpu_is_not_told_of_the_driver(self):
        with (
            mock.patch.object(driver_module, "driver", lambda: None),
            mock.patch.object(torch.cuda, "is_available", lambda: False),
            torch._inductor.config.patch(fx_graph_cache=False),
            warnings.catch_warnings(record=True, action="always") as caught,
        ):
            compiled = torch.compile(lambda x: x.sin(), mode="reduce-overhead")
            self.assertEqual(compiled(torch.ones(4)), torch.ones(4).sin())
        self.assertEqual([w for w in caught if w.category is IndirectionOff], [])

    def test_without_a_driver_inputs_are_copied_and_writes_are_not_graphed(self):
        """Upstream does the same; here the inputs give the reason."""
        model = inference()
        made = bare_recording(wrapped_function=SimpleNamespace(model=model))
        wrapped = SimpleNamespace(model=model, mutated_input_idxs=[1], static_input_idxs=[], constants=())
        manager = bare_manager(ids_to_funcs={0: wrapped})
        with (
            mock.patch.object(pools, "OWNED", {made.cuda_graphs_pool: None}),
            mock.patch.object(cudagraph_trees, "CUDAGraphNode", Recording),
            mock.patch.multiple(
                Manager, _get_cuda_graph_recorded_tensor_checker=lambda _: lambda t: False, create=True
            ),
            mock.patch.object(driver_module, "driver", lambda: None),
            self.assertWarns(IndirectionOff),
        ):
            self.assertIsNone(recording.usable_driver())
            self.assertEqual(made._driver_for_addresses(), "cuda.bindings is not installed: pip install cuda-bindings")
            self.assertTrue(manager._given([torch.zeros(1), torch.zeros(1)], 0).would_lose_writes())


if __name__ == "__main__":
    run_tests()
