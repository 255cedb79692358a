"""The drop-in as far as it runs without a GPU: functions, isolation, and the reasons of recordings."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch._inductor import compile_fx, config, cudagraph_trees
from torch._inductor.cudagraph_utils import FunctionID, PlaceholderInfo
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from inductor_patches.cudagraph_trees import _steadily
from pygraph_trees.coverage import compiled
from pygraph_trees.coverage.log import GraphLog, journal
from pygraph_trees.coverage.report import clear
from pygraph_trees.selection import why_not_graphed
from pygraph_trees.settings import Settings
from pygraph_trees.trees.function import FunctionModel
from pygraph_trees.trees.isolation import Trees
from pygraph_trees.trees.rerecord import why_recorded


def double(inputs):
    values = [x * 2 for x in inputs]
    inputs.clear()
    return values


class TestFunction(TestCase):
    def setUp(self):
        super().setUp()
        clear()

    def test_stands_for_the_model(self):
        function = FunctionModel.of(double, is_backward=False, is_inference=True)
        self.assertEqual(function([torch.ones(2)]), [torch.full((2,), 2.0)])
        self.assertEqual(function.__name__, "double")
        self.assertEqual(function.log.runs, 1)
        self.assertIs(FunctionModel.of(function, is_backward=False, is_inference=True), function)
        self.assertFalse(
            hasattr(FunctionModel.of(mock.Mock(spec=[]), is_backward=True, is_inference=False), "__name__")
        )

    def test_who_may_replay_it_without_a_look(self):
        class Manager: ...

        for indirection, added, known in (
            ("auto", [[torch.ones(2), None]], True),
            ("off", [[torch.ones(2)]], False),
            ("auto", [[torch.ones(2), 3]], False),  # another number is another function
            ("auto", [[torch.ones(2)], [torch.ones(2)]], False),
            ("auto", [], False),
        ):
            with self.subTest(indirection=indirection, added=added):
                function = FunctionModel.of(double, is_backward=False, is_inference=True)
                function.settings = dataclasses.replace(function.settings, indirection=indirection)
                for inputs in added:
                    function.add(inputs)
                    self.assertIsNone(function.manager())
                manager = Manager()
                function.is_steady_in(manager, 7)
                self.assertEqual((function.manager() is manager, function.function_id == 7), (known, known))
                del manager
                self.assertIsNone(function.manager())

    def test_calls_go_past_the_wrappers_where_they_can(self):
        function = FunctionModel.of(double, is_backward=False, is_inference=True)
        call = _steadily(function, lambda inputs: ["the wrappers", *inputs])
        self.assertEqual(call([1]), ["the wrappers", 1])
        manager = SimpleNamespace(replay_steadily=lambda inputs, function_id: [function_id] if inputs == [1] else None)
        function.manager, function.function_id = lambda: manager, 7
        self.assertEqual((call([1]), call([2])), ([7], ["the wrappers", 2]))

    def test_belongs_to_the_graph_being_compiled(self):
        graph = GraphLog("Net", "3/1", "forward", ())
        with journal.compiling(graph):
            functions = [FunctionModel.of(double, is_backward=False, is_inference=False) for _ in range(2)]
        records = [f.log.record() for f in functions]
        self.assertEqual(
            [(r.model, r.compile_id, r.partition, r.partitions) for r in records],
            [("Net", "3/1", 1, 2), ("Net", "3/1", 2, 2)],
        )
        self.assertEqual(len(pygraph_trees.report().functions), 2)

    def test_settings_are_taken_when_it_is_compiled(self):
        with config.patch({"triton.pygraph_selective": "never"}):
            function = FunctionModel.of(double, is_backward=False, is_inference=True)
        self.assertEqual(function.settings.selective, "never")
        self.assertEqual(why_not_graphed(function.settings), "pygraph_selective is 'never'")
        self.assertIsNone(why_not_graphed(Settings.current()))

    def test_inductor_hands_over_wrapped_models(self):
        seen = []

        def impl(model, inputs, static_input_idxs, **kwargs):
            seen.append((type(model), static_input_idxs))
            return model

        with (
            mock.patch.object(cudagraph_trees, "cudagraphify_impl", impl),
            config.patch({"triton.cudagraph_trees": True}),
        ):
            run = compile_fx.cudagraphify(
                double, (0,), device_index=0, stack_traces=[], is_backward=False, is_inference=True
            )
            with mock.patch("torch._dynamo.utils.preserve_rng_state"):
                self.assertEqual(run([torch.ones(1)]), [torch.full((1,), 2.0)])
        self.assertEqual(seen, [(FunctionModel, (0,))])

    def test_never_on_the_cudagraphs_backend(self):
        made = []
        with (
            config.patch({"triton.pygraph_selective": "never"}),
            mock.patch.object(cudagraph_trees, "get_manager", made.append),
        ):
            run = cudagraph_trees.cudagraphify_impl(
                double, [torch.ones(2)], (), device_index=0, is_backward=False, is_inference=True
            )
        run._boxed_call = True  # as the backend sets it
        self.assertEqual(run([torch.ones(2)]), [torch.full((2,), 2.0)])
        self.assertEqual(made, [0])
        (record,) = pygraph_trees.report().functions
        self.assertEqual((record.model, record.ungraphed_calls), ("double", 1))
        self.assertIn("never", record.ungraphed_reason)


class TestPutToUse(TestCase):
    """A compiled graph is noted when it is put to use, with what its artifact knows."""

    def setUp(self):
        super().setUp()
        clear()

    def artifact(self, **fields):
        known = {
            "model": "Net",
            "partitions": [{"graphed": True, "kernels": {"triton": 2}, "causes": [], "inputs": [], "outputs": []}],
        }
        base = {
            "device_types": {"cuda"},
            "disabled_cudagraphs_reason": None,
            "cudagraph_info": None,
            "pygraph_coverage": known,
        }
        return SimpleNamespace(**{**base, **fields})

    def put(self, artifact, functions=0, **options):
        kwargs = {"is_backward": False, "is_inference": True, "cudagraphs": True}
        with compiled.put_to_use(artifact, kwargs, **{"wanted": True, "dropped": None, **options}):
            for _ in range(functions):
                FunctionModel.of(double, is_backward=False, is_inference=True)
        return pygraph_trees.report().graphs

    def test_graphed(self):
        (graph,) = self.put(self.artifact(), functions=1)
        self.assertEqual((graph.model, graph.mode, graph.dropped), ("Net", "inference", None))
        self.assertEqual(graph.partitions[0].kernels, {"triton": 2})

    def test_dropped(self):
        info = SimpleNamespace(cudagraph_fail_reasons=["mutated inputs", "non-Tensor inputs"])
        for artifact, reason in (
            (self.artifact(disabled_cudagraphs_reason="cpu device"), "cpu device"),
            (self.artifact(cudagraph_info=info), "mutated inputs, non-Tensor inputs"),
            (self.artifact(), "no part of it can be graphed"),
        ):
            clear()
            (graph,) = self.put(artifact)
            self.assertEqual(graph.dropped, reason)
        clear()
        (graph,) = self.put(self.artifact(), dropped="pygraph_selective is 'never'")
        self.assertEqual(graph.dropped, "pygraph_selective is 'never'")

    def test_not_of_interest(self):
        self.assertEqual(self.put(self.artifact(device_types={"cpu"})), ())
        self.assertEqual(self.put(self.artifact(), wanted=False), ())

    def test_artifact_of_an_unpatched_process(self):
        artifact = self.artifact()
        del artifact.pygraph_coverage
        (graph,) = self.put(artifact, functions=1)
        self.assertEqual((graph.model, graph.partitions), ("unknown", ()))

    def test_a_failing_description_does_not_fail_the_compilation(self):
        with self.assertLogs("pygraph_trees.coverage", "WARNING"):
            compiled.partitioned(SimpleNamespace(), [[object()]], [object()])
        with self.assertLogs("pygraph_trees.coverage", "WARNING"):
            compiled.attach(SimpleNamespace(), SimpleNamespace(scheduler=None), object())


class TestIsolation(TestCase):
    def setUp(self):
        super().setUp()
        self.containers = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
        self.before = dict(self.containers)
        self.addCleanup(lambda: self.assertEqual(self.containers, self.before))

    def test_containers_are_exchanged(self):
        one, other = Trees(), Trees()
        with one.active():
            self.assertEqual(self.containers, {})
            mine = cudagraph_trees.get_container(0)
            with other.active():
                self.assertIsNot(cudagraph_trees.get_container(0), mine)
            self.assertIs(cudagraph_trees.get_container(0), mine)
        self.assertEqual(self.containers, self.before)
        with one.active():
            self.assertIs(cudagraph_trees.get_container(0), mine)

    def test_restored_after_an_exception(self):
        with self.assertRaises(ValueError), Trees().active():
            cudagraph_trees.get_container(0)
            raise ValueError
        self.assertEqual(self.containers, self.before)

    def test_not_twice_at_a_time(self):
        trees = Trees()
        with trees.active(), self.assertRaises(AssertionError), trees.active():
            pass

    def test_autograd_threads_follow_and_nothing_is_freed(self):
        seen = []

        class Note(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                seen.append(dict(torch._C._get_obj_in_tls("tree_manager_containers")))
                return grad

        references = sys.getrefcount(self.containers)
        for trees in (Trees(), Trees()):
            with trees.active():
                mine = cudagraph_trees.get_container(0)
                Note.apply(torch.ones(2, requires_grad=True)).sum().backward()
            self.assertEqual(seen.pop(), {0: mine})
            gc.collect()
        self.assertEqual(sys.getrefcount(self.containers), references)

    def test_managers_and_clear(self):
        trees, manager = Trees(), mock.Mock()
        with trees.active():
            cudagraph_trees.get_container(0).tree_manager = manager
            cudagraph_trees.get_container(1)
            self.assertEqual(trees.managers(), [manager])
        self.assertEqual(trees.managers(), [manager])
        trees.clear()
        manager.shutdown.assert_called_once_with()
        self.assertEqual(trees.managers(), [])


class TestWhyRecorded(TestCase):
    def setUp(self):
        super().setUp()
        self.inputs = [torch.ones(2), torch.ones(2), torch.ones(2), 5]
        placeholders = [PlaceholderInfo(f"arg{i}_1", None, [], None) for i in range(4)]
        self.id = FunctionID(0)
        self.log = SimpleNamespace(recordings=[])
        self.function = SimpleNamespace(model=double, placeholders=placeholders)
        self.manager = SimpleNamespace(roots={}, current_node=None, ids_to_funcs={self.id: self.function})

    def node(self, **fields):
        pointers = (
            [t.data_ptr() if i < 2 else None for i, t in enumerate(self.inputs)]
            if fields.get("same")
            else [1, 2, None, None]
        )
        return SimpleNamespace(
            id=SimpleNamespace(id=7),
            children={},
            wrapped_function=self.function,
            cudagraph_managed_idxs=fields.get("managed", []),
            static_input_idxs=[0, 1],
            static_input_data_ptrs=pointers,
        )

    def why(self):
        return why_recorded(self.manager, self.inputs, self.id, self.log)

    def test_first(self):
        self.assertEqual(self.why(), "first call")
        self.log.recordings.append(object())
        self.assertEqual(self.why(), "first call with these sizes")
        self.manager.current_node = self.node()
        self.assertEqual(self.why(), "first call after recording 7")

    def test_moved(self):
        self.manager.roots = {self.id: [self.node(same=True), self.node()]}
        self.assertEqual(self.why(), "static input arg0_1, arg1_1 moved")
        self.manager.roots = {self.id: [self.node(managed=[0, 1])]}
        self.assertEqual(self.why(), "managed input arg0_1, arg1_1 moved")

    def test_liveness(self):
        self.manager.current_node = self.node()
        self.manager.current_node.children = {self.id: [self.node(same=True)]}
        self.assertEqual(self.why(), "other outputs are alive than when it was recorded")
        self.assertEqual(len(self.inputs), 4)  # asked without changing what it was asked about


if __name__ == "__main__":
    run_tests()
