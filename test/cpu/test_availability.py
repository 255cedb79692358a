"""Whether graphs are given addresses, and the single warning if the driver or its bindings do not allow it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from unittest import mock

import torch
from bare_manager import bare_manager
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda import availability
from pygraph_trees.cuda.availability import IndirectionOff, usable_driver
from pygraph_trees.report.log import FunctionLog
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions.function import FunctionModel
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.pools import pools
from pygraph_trees.trees.recordings import recording
from pygraph_trees.trees.recordings.recording import Recording


class TestUsableDriver(TestCase):
    def setUp(self):
        super().setUp()
        usable_driver.cache_clear()
        self.addCleanup(usable_driver.cache_clear)

    def said(self, found):
        """The driver that two calls give, and their warnings."""
        with mock.patch.object(availability, "driver", lambda: found), warnings.catch_warnings(record=True) as caught:
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
            mock.patch.object(availability, "driver", lambda: None),
            mock.patch.object(torch.cuda, "is_available", lambda: False),
            torch._inductor.config.patch(fx_graph_cache=False),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            compiled = torch.compile(lambda x: x.sin(), mode="reduce-overhead")
            self.assertEqual(compiled(torch.ones(4)), torch.ones(4).sin())
        self.assertEqual([w for w in caught if w.category is IndirectionOff], [])

    def test_without_a_driver_inputs_are_copied_and_writes_are_not_graphed(self):
        """Upstream does the same; here the inputs give the reason."""
        model = FunctionModel(lambda inputs: inputs, Settings.current(), FunctionLog("f", "0/0", "inference", 1, {}))
        made = Recording.__new__(Recording)
        made.wrapped_function = SimpleNamespace(model=model)
        made.cuda_graphs_pool = object()
        wrapped = SimpleNamespace(model=model, mutated_input_idxs=[1], static_input_idxs=[], constants=())
        manager = bare_manager(ids_to_funcs={0: wrapped})
        with (
            mock.patch.object(pools, "OWNED", {made.cuda_graphs_pool: None}),
            mock.patch.object(cudagraph_trees, "CUDAGraphNode", Recording),
            mock.patch.object(
                Manager, "_get_cuda_graph_recorded_tensor_checker", lambda manager: lambda t: False, create=True
            ),
            mock.patch.object(availability, "driver", lambda: None),
            self.assertWarns(IndirectionOff),
        ):
            self.assertEqual(recording.usable_driver(), None)
            self.assertEqual(made._driver_for_addresses(), "cuda.bindings is not installed: pip install cuda-bindings")
            self.assertTrue(manager._given([torch.zeros(1), torch.zeros(1)], 0).would_lose_writes())


if __name__ == "__main__":
    run_tests()
