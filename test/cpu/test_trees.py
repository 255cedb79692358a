"""The parts of the drop-in that run without a GPU: functions, isolation, and reasons for recordings."""

import contextlib
import functools
import gc
import itertools
import sys
import threading
import unittest
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from fake_trees import CHECKS_LIVENESS_AGAIN, LIMITS, Plain, bare_manager, bare_recording, replay_with, replaying
from recordings_on_cpu import tensor_of
from test_own_memory import own_memory, storage
from torch._inductor import config, cudagraph_trees
from torch._inductor.cudagraph_utils import FunctionID, PlaceholderInfo, WrappedFunction
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.errors import DriverError
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason
from pygraph_trees.report import compiled
from pygraph_trees.report.log import GraphLog, RecordingLog, journal
from pygraph_trees.report.summary import clear
from pygraph_trees.selection.functions import why_not_graphed
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions import fast_path
from pygraph_trees.trees.functions import function as function_module
from pygraph_trees.trees.functions.containment import HeldForTooLong
from pygraph_trees.trees.functions.function import Aligned, FunctionModel, entered
from pygraph_trees.trees.functions.outputs import as_they_read
from pygraph_trees.trees.hooks import entry_points
from pygraph_trees.trees.hooks.manager_container import Trees
from pygraph_trees.trees.managers import input_rules
from pygraph_trees.trees.managers.calls import Upstream
from pygraph_trees.trees.managers.input_rules import Given, knows_its_writes
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.pools import liveness, pools
from pygraph_trees.trees.recordings import attempts
from pygraph_trees.trees.recordings import recording as recording_module
from pygraph_trees.trees.recordings.recording import Recording
from pygraph_trees.trees.recordings.records import why_recorded


def double(inputs):
    values = [x * 2 for x in inputs]
    inputs.clear()
    return values


def inference(fn=double, **settings):
    """A function for inference; ``settings`` differ from the current ones."""
    function = FunctionModel.of(fn, is_backward=False, is_inference=True)
    function.settings = replace(function.settings, **settings)
    return function


def addressed(uses=True):
    """Functions give their inputs by address, or do not."""
    return mock.patch.object(input_rules, "uses_addresses", lambda model: uses)


class TestFunction(TestCase):
    def test_a_call_goes_past_the_wrappers_if_it_can(self):
        """The function is entered once, and only if inputs go by address."""
        self.assertIs(entered(off := inference(indirection="off"), double, Aligned(off, (), ())), double)
        function = inference(indirection="auto")
        aligned, dispatch = Aligned(function, (), ()), function.dispatch
        call = entered(function, lambda inputs: ["the wrappers", *inputs], aligned)
        self.assertIs(entered(function, double, aligned), double)
        self.assertEqual(call([1]), ["the wrappers", 1])
        replay_with(dispatch, replaying(lambda inputs, function_id: [function_id] if inputs == [1] else None), 7)
        self.assertEqual((call([1]), call([2])), ([7], ["the wrappers", 2]))
        dispatch.was_asked = True  # the caller has already tried the fast path in vain
        self.assertEqual((call([1]), call([1])), (["the wrappers", 1], [7]))
        self.assertIs(call.function, function)

    def test_stands_for_the_model_with_the_graph_and_the_settings_of_its_compilation(self):
        clear()
        graph = GraphLog("Net", "3/1", "forward", ())
        with journal.compiling(graph), config.patch({"triton.pygraph_selective": "never"}):
            function, _ = functions = inference(), inference()
        self.assertEqual(function([torch.ones(2)]), [torch.full((2,), 2.0)])
        self.assertEqual((function.__name__, function.log.runs), ("double", 1))
        self.assertIs(inference(function), function)
        found = [(r.model, r.compile_id, r.partition, r.partitions) for r in pygraph_trees.report().functions]
        self.assertEqual(found, [("Net", "3/1", number, len(functions)) for number in (1, 2)])
        self.assertEqual(why_not_graphed(function.settings), "pygraph_selective is 'never'")
        self.assertIsNone(why_not_graphed(Settings.current()))

    def test_generated_code_that_calls_one_is_not_verified(self):
        """All ranks must go the same way."""
        names = {"torch": torch}
        exec(
            "def subgraph(args):\n    torch.ops._c10d_functional.all_reduce_.default(args[0], 'sum', '0')\n"
            "def nested(args):\n    return nested and subgraph(args)\n"
            "def call(args):\n    nested(args)",
            names,
        )
        for call, has_collective in (
            (names["call"], True),
            (lambda args: torch.ops._c10d_functional.all_reduce_.default(args[0], "sum", "0"), True),
            (lambda args: torch.ops.symm_mem.one_shot_all_reduce.default(args[0], "sum", "0"), True),
            (lambda args: torch.ops.aten.add.Tensor(args[0], 1), False),
        ):
            model = inference(call, verify="on")
            given = SimpleNamespace(function=SimpleNamespace(model=model), inputs=[torch.ones(2)])
            given.is_managed = lambda tensor: False
            with self.assertLogs("pygraph_trees.trees", "INFO") if has_collective else contextlib.nullcontext():
                verification = Manager._verification(SimpleNamespace(), given)
            self.assertEqual((model.log.has_collective, verification is None), (has_collective, has_collective))
        self.assertFalse(inference(len).log.has_collective)

    def test_with_other_ranks_code_that_may_hide_a_collective_counts_as_one(self):
        names = {"torch": torch, "empty_strided_cuda": len}
        exec("def known(args):\n    torch.ops.aten.add.Tensor(args[0], 1)", names)
        exec("def other(args):\n    torch.ops.trees_test.reduce.default(args[0])", names)
        torch.ops.trees_test  # noqa: B018  its operators are registered
        for ranks, call, expected in (
            (True, names["known"], False),
            (True, names["other"], True),
            (True, len, True),  # as code in C++
            (False, names["other"], False),
        ):
            with mock.patch.object(function_module, "may_wait_for_others", lambda ranks=ranks: ranks):
                self.assertEqual(inference(call).may_have_collective, expected)

    def test_memory_that_other_ranks_know_is_not_written_elsewhere(self):
        symmetric = inference(lambda args: torch.ops.symm_mem.multimem_all_reduce_.default(args[0], "sum", "0"))
        plain = inference(lambda args: args)
        for model in (symmetric, plain):
            model.log.graph = GraphLog("Net", "3/1", "forward", ())
        self.assertEqual((knows_its_writes(symmetric), knows_its_writes(plain)), (False, True))

    def test_conjugated_and_negated_outputs_are_resolved(self):
        """Neither upstream nor a replay knows about the bits: the memory is read as it is."""
        base = torch.randn(8, 8, dtype=torch.complex64)
        outputs = [
            *(base.conj(), base[:, ::2].conj(), base.t().conj(), base[1:2].expand(4, 8).conj(), base[3, 4].conj()),
            *(torch._neg_view(base.real), base.conj().imag, base[0:0].conj()),
            *(base[:, :0], base.view(2, 4, 8)[:, :0, :3].conj(), base[:0, :3].conj()),
        ]
        given = [base, None, 3, *outputs]
        found = as_they_read(given)
        self.assertTrue(all(one is other for one, other in zip(found[:3], given[:3], strict=True)))
        for one, other in zip(found[3:], outputs, strict=True):
            self.assertEqual(one, other, rtol=0, atol=0)
            self.assertEqual(one.stride(), other.stride())
            self.assertFalse(one.numel() and (one.is_conj() or one.is_neg()))
        for plain in ((base, 3), base):
            self.assertIs(as_they_read(plain), plain)
        self.assertFalse(as_they_read(base.conj()).is_conj())


class TestPutToUse(TestCase):
    """A compiled graph is noted when it is put to use, with the facts in its artifact."""

    def artifact(self, **fields):
        partition = {"graphed": True, "kernels": {"triton": 2}, "causes": [], "inputs": [], "outputs": []}
        fields = {"pygraph_coverage": {"model": "Net", "partitions": [partition]}} | fields
        fields = {"fx_kwargs": {"is_inference": True, "is_backward": False}, "cudagraph_info": None} | fields
        return SimpleNamespace(**{"device_types": {"cuda"}, "disabled_cudagraphs_reason": None} | fields)

    def put(self, artifact, functions=1, **options):
        clear()
        kwargs = {"is_backward": False, "cudagraphs": True}  # no more than AOTAutograd's cache passes
        with compiled.put_to_use(artifact, kwargs, **{"wanted": True, "dropped": None, **options}):
            for _ in range(functions):
                inference()
        return pygraph_trees.report().graphs

    def test_a_graphed_one_is_noted_with_what_its_artifact_knows(self):
        for is_inference, mode in ((True, "inference"), (False, "forward")):
            (graph,) = self.put(self.artifact(fx_kwargs={"is_inference": is_inference}))
            self.assertEqual((graph.model, graph.mode, graph.dropped), ("Net", mode, None))
            self.assertEqual(graph.partitions[0].kernels, {"triton": 2})
        artifact = self.artifact()
        del artifact.pygraph_coverage  # of a process without the patches
        (graph,) = self.put(artifact)
        self.assertEqual((graph.model, graph.partitions), ("unknown", ()))

    def test_a_dropped_one_is_noted_with_the_reason(self):
        """None is noted that is on the CPU or not to be graphed."""
        info = SimpleNamespace(cudagraph_fail_reasons=["mutated inputs", "non-Tensor inputs"])
        never = "pygraph_selective is 'never'"
        for fields, options, reasons in (
            ({"disabled_cudagraphs_reason": "cpu device"}, {}, ["cpu device"]),
            ({"cudagraph_info": info}, {}, ["mutated inputs, non-Tensor inputs"]),
            ({}, {}, ["no part of it can be graphed"]),
            ({}, {"dropped": never}, [never]),
            ({"device_types": {"cpu"}}, {}, []),
            ({}, {"wanted": False}, []),
        ):
            graphs = self.put(self.artifact(**fields), functions=0, **options)
            self.assertEqual([graph.dropped for graph in graphs], reasons)

    def test_an_artifact_keeps_the_calls_and_a_key_of_its_code(self):
        """The key does not depend on earlier compilations; other code has another key."""
        one, other = (lambda x: x @ x @ x), (lambda x: x @ x)  # which need no kernel to be compiled
        attach = mock.patch.object(compiled, "attach", wraps=compiled.attach)
        with attach as attached, config.patch({"force_disable_caches": True}):
            for fn in (one, other, one):
                torch.compile(fn)(torch.ones(4, 4))
                torch._dynamo.reset()
        keys = [call.args[0].pygraph_coverage["code"] for call in attached.call_args_list]
        self.assertEqual(keys[0], keys[2])
        self.assertNotEqual(keys[0], keys[1])
        self.assertRegex(keys[0], "^[0-9a-f]{64}$")
        artifact = attached.call_args.args[0]
        artifact.device_types, artifact.fx_kwargs = {"cuda"}, {"is_inference": True}
        with compiled.put_to_use(artifact, {"is_backward": False, "cudagraphs": True}, wanted=True, dropped=None):
            (calls,) = journal.graph.calls
        self.assertEqual([(made.kernel, made.operator, made.module) for made in calls], [(None, "mm", None)] * 2)
        self.assertIn("x @ x @ x", calls[0].line)

    def test_a_failing_description_does_not_fail_the_compilation(self):
        with self.assertLogs("pygraph_trees.report", "WARNING"):
            compiled.describing_partitions(lambda self: ([[object()]], [object()]))(SimpleNamespace())
        with self.assertLogs("pygraph_trees.report", "WARNING"):
            compiled.attach(SimpleNamespace(), SimpleNamespace(scheduler=None), object())
        for field, value in (("partitions", [{"unknown": 1}]), ("placed", [{"unknown": 1}]), ("partitions", 3)):
            with self.subTest(field=field), self.assertLogs("pygraph_trees.report", "WARNING"):
                (graph,) = self.put(self.artifact(pygraph_coverage={"model": "Net", field: value}))
                self.assertEqual((graph.model, graph.partitions, graph.dropped), ("Net", (), None))

    @unittest.skipIf(binding.extension is None, "not built for this torch")
    def test_a_call_bypasses_upstream_if_a_fast_replay_answers(self):
        """It does not while a profiler runs or calls are recorded, since these must see the call."""

        def run(inputs):
            return list(inputs)

        call = entry_points.calling(lambda graph, inputs: ["upstream's", *graph.current_callable(inputs)])
        graph = SimpleNamespace(current_callable=run)
        for run.fast_call in (None, lambda inputs: None):
            self.assertEqual(call(graph, [1]), ["upstream's", 1])
        run.fast_call = lambda inputs: ["fast"]
        self.assertEqual(call(graph, [1]), ["fast"])
        profiler, debug = torch.autograd.profiler, torch._inductor.debug
        for owner, watches in ((profiler, "_is_profiler_enabled"), (debug, "RECORD_GRAPH_EXECUTION")):
            with mock.patch.object(owner, watches, True):
                self.assertEqual(call(graph, [1]), ["upstream's", 1])


class TestContainers(TestCase):
    def setUp(self):
        super().setUp()
        self.containers = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
        before = dict(self.containers)
        self.addCleanup(lambda: self.assertEqual(self.containers, before))

    def test_containers_are_exchanged_and_put_back(self):
        """To clear them shuts their managers down."""
        one, other, manager = Trees(), Trees(), mock.Mock()
        with one.active():
            self.assertEqual(self.containers, {})
            mine = cudagraph_trees.get_container(0)
            with other.active():
                self.assertIsNot(cudagraph_trees.get_container(0), mine)
            self.assertIs(cudagraph_trees.get_container(0), mine)
            with self.assertRaises(AssertionError), one.active():  # not twice at a time
                pass
        with self.assertRaises(ValueError), one.active():
            self.assertIs(cudagraph_trees.get_container(0), mine)
            mine.tree_manager = manager
            cudagraph_trees.get_container(1)
            self.assertEqual(one.managers(), [manager])
            raise ValueError
        self.assertEqual(one.managers(), [manager])
        one.clear()
        manager.shutdown.assert_called_once_with()
        self.assertEqual(one.managers(), [])

    def test_autograd_threads_follow_and_nothing_is_freed(self):
        references = sys.getrefcount(self.containers)
        for trees in (Trees(), Trees()):
            seen, y = [], torch.ones(2, requires_grad=True).clone()
            y.register_hook(lambda _, to=seen: to.append(dict(torch._C._get_obj_in_tls("tree_manager_containers"))))
            with trees.active():
                mine = cudagraph_trees.get_container(0)
                y.sum().backward()
            self.assertEqual(seen, [{0: mine}])
            gc.collect()
        self.assertEqual(sys.getrefcount(self.containers), references)

    def manager_of(self, kind, call):
        """The manager that ``call`` is given twice. It must end: a thread that waits for its own lock never does."""
        thread = threading.Thread(target=call, args=(seen := [],), daemon=True)
        with mock.patch.object(cudagraph_trees, "CUDAGraphTreeManager", kind):
            thread.start()
            thread.join(60)
        self.assertFalse(thread.is_alive())
        manager, other = seen
        self.assertIs(manager, other)
        return manager

    def test_a_collection_while_a_manager_is_made(self):
        """A finalizer that asks for the manager meanwhile runs later; upstream's thread would wait for itself."""
        before, asked = gc.get_threshold(), []

        class Made:
            def __init__(self, device_index, **_):
                litter = Plain()
                litter.cycle = litter
                weakref.finalize(litter, lambda: asked.append(cudagraph_trees.get_manager(0))).atexit = False
                del litter
                gc.set_threshold(1)
                self.objects = [[n] for n in range(100)]
                gc.set_threshold(*before)
                self.had_been_asked = list(asked)

        def make(seen):
            manager = cudagraph_trees.get_manager(0)
            gc.collect()
            seen += manager, *asked

        self.addCleanup(gc.set_threshold, *before)
        self.assertEqual(self.manager_of(Made, make).had_been_asked, [])

    def test_what_a_manager_holds_may_ask_for_another_when_the_last_function_is_gone(self):
        def let_go(seen):
            container = cudagraph_trees.get_container(0)
            weakref.finalize(container.get_tree_manager(), lambda: seen.append(cudagraph_trees.get_manager(0)))
            container.add_strong_reference(fn := lambda: None)
            del fn
            seen.append(container.tree_manager)

        self.manager_of(lambda *_, **__: Plain(), let_go)


class TestInputsThatMove(TestCase):
    """Static inputs that are found elsewhere are live in the next recording; other recordings stay unchanged."""

    def setUp(self):
        super().setUp()
        self.inputs, self.id = [*(torch.ones(2) for _ in range(4)), 7], FunctionID(0)
        wrapped = WrappedFunction(inference(), [0, 1, 2], self.id, (), [], [2], **LIMITS)
        recorded = SimpleNamespace(
            static_input_idxs=[0, 1, 2, 4],
            static_input_data_ptrs=[t.data_ptr() if isinstance(t, torch.Tensor) else None for t in self.inputs],
            cudagraph_managed_idxs=[],
            preserved_aliased_inputs=[False] * 5,
        )
        self.manager = bare_manager(ids_to_funcs={self.id: wrapped}, roots={self.id: [recorded]})
        self.in_place, self.kept = True, []
        self.enterContext(addressed())
        self.enterContext(mock.patch.object(Given, "is_written_in_place", lambda *_: self.in_place))

    def static(self, *moved):
        """The inputs that are static after the ``moved`` ones were found elsewhere."""
        inputs = [value.clone() if index in moved else value for index, value in enumerate(self.inputs)]
        self.kept.append(inputs)  # later ones get other memory
        self.manager._demote(self.manager._given(inputs, self.id), self.id)
        return list(self.manager.ids_to_funcs[self.id].static_input_idxs)

    def test_a_static_input_that_moved_is_live_from_then_on(self):
        """If it is written to, only if it can be written in place."""
        before = self.manager.ids_to_funcs[self.id]
        for moved in ((), (3,)):  # the latter is live already
            self.assertEqual(self.static(*moved), [0, 1, 2])
        self.assertIs(self.manager.ids_to_funcs[self.id], before)
        for moved, self.in_place, static in (
            ((1,), True, [0, 2]),
            ((1,), True, [0, 2]),
            ((0, 1, 2), False, [2]),
            ((0, 1, 2), True, []),
        ):
            self.assertEqual(self.static(*moved), static)

    def test_all_are_live_once_inputs_moved_twice(self):
        """Unless the function does not give its inputs by address. One that has no place there stays static."""
        self.enterContext(mock.patch.object(Manager, "pool", SimpleNamespace(holds=lambda address: False)))
        for gives, stays, static in ((False, None, [2]), (True, None, []), (True, 2, [2])):
            self.setUp()
            self.manager.ids_to_funcs[self.id].model.copies_nothing = gives
            self.assertEqual(self.static(1), [0, 2])
            why_not = lambda value, *_, stays=stays: "it is empty" if value is self.inputs[stays or 0] else None  # noqa: E731
            with mock.patch.object(input_rules, "why_not_placeholder", why_not):
                self.assertEqual(self.static(0), static)

    def test_inputs_that_two_functions_share_move_once(self):
        moves = input_rules.Moves()
        for addresses, go_on in (({1, 2, 3}, False), ({2}, False), (set(), False), ({2, 4}, True), ({1}, True)):
            moves.note(addresses)
            self.assertEqual(moves.go_on, go_on)

    def test_without_a_recording_there_only_parameters_that_are_gathered_are_live(self):
        """All stay static without addresses."""
        with addressed(False):
            self.assertEqual(self.static(0, 1, 2), [0, 1, 2])
        self.manager.current_node = SimpleNamespace(children={})  # only its successors count
        self.assertEqual(self.static(0, 1, 2), [0, 1, 2])
        self.manager.roots, self.manager.current_node = {}, None
        self.assertEqual(self.static(0, 1, 2), [0, 1, 2])
        gathered = {self.inputs[index].data_ptr() for index in (1, 3)}
        with mock.patch.object(input_rules, "gathered_addresses", lambda: gathered):
            self.assertEqual(self.static(), [0, 2])
        self.assertEqual(self.static(), [0, 2])


class Graph(torch.autograd.Function):
    """A compiled forward: it returns a recording's output, and saves its input and some of the recording's outputs."""

    @staticmethod
    def forward(ctx, x, weight, recording, saved):
        outputs = recording.cached_tensor_outputs
        ctx.save_for_backward(x, *(outputs[number] for number in saved))
        return outputs[0]

    @staticmethod
    def backward(ctx, grad):
        return grad * sum(ctx.saved_tensors), grad, None, None


class TestWhoHoldsOutputs(TestCase):
    """A recording's own references to its outputs, in CPU memory."""

    def setUp(self):
        super().setUp()
        torch._C._set_cached_tensors_enabled(True)
        self.addCleanup(torch._C._set_cached_tensors_enabled, False)
        self.weight = torch.ones(3, requires_grad=True)
        self.pool = 0, id(self)

    def recording(self, count, parent=None):
        node = bare_recording(
            parent,
            [None] * count,
            cuda_graphs_pool=self.pool,
            cached_tensor_outputs=[],
            output_storage_alias=[cudagraph_trees.UnaliasedStorage] * count,
            unaliased_in_all_paths=[True] * count,
            outputs_metadata=[Recording._tensor_metadata(torch.zeros(3), ignore_storage_offset=False)] * count,
            _reconstruct_from_tensor_metadata=tensor_of,
        )
        node._initialize_cached_tensors()
        return node

    def alive(self, node):
        return [cudagraph_trees.is_live(reference) for reference in node.outputs_weakrefs]

    def check_that_none_has_a_backward(self, *nodes):
        outputs = [output for node in nodes for output in node.cached_tensor_outputs]
        self.assertEqual([output.grad_fn for output in outputs], [None] * len(outputs))

    def test_outputs_that_others_have_taken_the_place_of(self):
        """They stay in the pool as long as they are held, although the recording no longer asks for them."""
        node = self.recording(2)
        self.assertEqual(list(node.older_outputs), [])
        held = node.cached_tensor_outputs[1][1:]  # a view will do
        for _ in range(2):
            node.remove_node_cached_tensors()
            node._initialize_cached_tensors()
            self.assertEqual([older.expired() for older in node.older_outputs], [False])
        self.assertTrue(all(reference.expired() for reference in node.outputs_weakrefs))
        node.remove_node_cached_tensors()
        del held
        self.assertEqual([older.expired() for older in node.older_outputs], [True])

    def test_an_output_that_only_autograd_holds_is_alive(self):
        """It is alive just as the view would be that the graph's code would have made of it."""
        node = self.recording(3)
        cached = node.cached_tensor_outputs
        self.assertTrue(node.all_outputs_are_dead())
        y = cached[1] * self.weight  # in code that is not compiled
        self.assertEqual((self.alive(node), node.all_outputs_are_dead()), ([False, True, False], False))
        y.sum().backward()
        self.assertTrue(node.all_outputs_are_dead())
        for hold in (lambda output: output, lambda output: output.view(1, 3)):
            held = hold(cached[1])
            self.assertFalse(node.all_outputs_are_dead())
            del held
            self.assertTrue(node.all_outputs_are_dead())

    def forward(self, graphs, saved, between=lambda x: x):
        """Runs some graphs, one after another; returns the output of the last one, and the recordings."""
        x, nodes = torch.ones(3), []
        for _ in range(graphs):
            nodes.append(self.recording(3, nodes[-1] if nodes else None))
            x = between(Graph.apply(x, self.weight, nodes[-1], saved))
        return x, nodes

    def test_an_output_that_nobody_holds_keeps_no_backward(self):
        """The user has dropped the outputs, only their recordings hold them, and no backward ever comes."""
        places, steps = ((1,), (1, 2), (0,), (0, 1)), (lambda x: x, lambda x: x * 1.5, torch.sigmoid)
        for graphs, saved, between in itertools.product((1, 2, 4), places, steps):
            with self.subTest(graphs=graphs, saved=saved):
                x, nodes = self.forward(graphs, saved, between)
                del x
                with torch.inference_mode(between is torch.sigmoid):
                    self.assertTrue(nodes[-1].all_outputs_are_dead())
                self.check_that_none_has_a_backward(*nodes)

    def test_a_backward_that_is_to_come_keeps_all_that_it_reads(self):
        for graphs in (1, 2, 4):
            x, nodes = self.forward(graphs, (0, 1))
            loss = x.sum()
            del x
            self.assertFalse(nodes[-1].all_outputs_are_dead())
            self.assertEqual([self.alive(node) for node in nodes], [[True, True, False]] * graphs)
            loss.backward()
            del loss
            self.assertTrue(nodes[-1].all_outputs_are_dead())

    def test_an_output_that_is_not_asked_for_holds_none_that_is(self):
        """Gradients stop at it: the tensors saved for it are gone, and its own memory is in use."""
        teacher = self.recording(3)
        student = self.recording(1, teacher)
        for asked in ([(0, 1)], [(0, 1), (0, 2)]):
            stopped = Graph.apply(torch.ones(3), self.weight, teacher, (1, 2)).detach()
            if not CHECKS_LIVENESS_AGAIN:  # otherwise torch finds the dead ones when asked
                self.assertEqual(self.alive(teacher), [True, True, True])
            self.assertTrue(liveness.deaths(student, asked).ask())
            self.assertEqual(self.alive(teacher), [True, False, False])
            del stopped
            self.assertTrue(student.all_outputs_are_dead())

    def test_recordings_on_other_paths_hold_none(self):
        """The other path had no backward, and a new step has left it."""
        first = self.recording(2)
        left, taken = self.recording(2, first), self.recording(2, first)
        y = Graph.apply(torch.ones(3), self.weight, first, (1,))
        Graph.apply(y.cos() * 2, self.weight, left, (1,))  # the caller drops the output
        del y
        self.assertEqual(self.alive(first), [True, True])
        self.assertTrue(taken.all_outputs_are_dead())
        self.check_that_none_has_a_backward(first, left)

    def test_outputs_of_another_manager_are_not_released(self):
        """Another manager's thread may be about to return them."""
        x, (node,) = self.forward(1, (1,))
        del x
        self.assertFalse(liveness.release_unneeded((0, 0)))
        self.assertIsNotNone(node.cached_tensor_outputs[0].grad_fn)
        self.assertTrue(liveness.release_unneeded(self.pool))

    def test_questions_about_outputs_do_not_keep_the_recording(self):
        node = self.recording(1)
        gone, reference = weakref.ref(node), node.outputs_weakrefs[0]
        del node
        self.assertIsNone(gone())
        self.assertFalse(reference.expired())  # as in upstream: it cannot be known


class TestManager(TestCase):
    """What a manager decides about functions and recordings, beside upstream."""

    FUNCTION = 7

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(cudagraph_trees.MarkStepBox, "mark_step_counter", 0))  # no steps are marked
        self.model = inference(indirection="auto")
        self.manager = bare_manager(warmed_up_functions={self.FUNCTION, 8})

    def wrapped(self, model, mutated=()):
        return SimpleNamespace(model=model, mutated_input_idxs=mutated, static_input_idxs=[], id="sizes")

    def node(self, **attributes):
        known = {"own": None, "all_outputs_are_dead": lambda: False, "clear_path_state": lambda: None}
        return bare_recording(**known | attributes)

    def test_a_manager_takes_the_arguments_of_upstream_s(self):
        """For a new pool, it makes another manager with the same arguments."""
        given = []

        def init(manager, *args, **kwargs):
            manager.cuda_graphs_thread_pool = "its pool"
            given.append((args, kwargs))

        with mock.patch.object(Upstream, "__init__", init), mock.patch.object(pools, "OWNED", {}) as owned:
            manager = Manager(3, initial_mempool_allocation_gb=1.5)  # since torch 2.15
            self.assertIs(owned["its pool"], manager)
            self.assertIsInstance(manager.reclaiming._remake(), Manager)
        self.assertEqual(given, 2 * [((3,), {"initial_mempool_allocation_gb": 1.5})])

    def tried(self, flag, last, can_copy):
        """The ways in which a recording is tried until the ``last`` one works, and for what tables are given up."""
        given_, seen, left = ["an input"], [], []
        self.model = inference(indirection=flag)
        recording = attempts.Attempts(self.wrapped(self.model), given_)

        node = SimpleNamespace(device=0, cuda_graphs_pool=None, cudagraph_managed_idxs=(), own=None)
        node._copied_indices = lambda: [0]

        def choose(*_, tabled, **__):
            items = [SimpleNamespace(index=0)]
            live = SimpleNamespace(has_table=bool(tabled), has_placeholders=True, in_place=(0,), items=items)
            return (None if recording.refused and can_copy else live), {}

        def attempt():
            self.assertEqual(given_, ["an input"])
            live = recording.choose_live(node, None, given_)
            seen.append("memory" if live is None else "table" if live.has_table else "address")
            given_[:] = [0]
            try:
                torch.empty(1).view(1 if seen[-1] == last else 1 + len(seen))  # an error of torch, with another text
            except RuntimeError as error:
                if live is not None:
                    recording.failed(live, error)
                raise

        replaced = {"choose": choose, "may_use_table": lambda *_: not left, "taken_by_variants": lambda _: (0,)}
        replaced |= {"leave_table": lambda *what: left.append(what[1])}
        replaced |= dict.fromkeys(("chooser_for", "ranges_of"), mock.Mock())
        fails = self.assertRaises(RuntimeError) if last is None else contextlib.nullcontext()
        with mock.patch.multiple(attempts, **replaced), fails:
            recording.until_one_works(attempt, given_)
        return seen, left

    def test_a_recording_that_fails_is_tried_in_another_way(self):
        """It is tried with a table, by address, then on memory, as long as the inputs exist and a way is left."""
        for flag, last, ways, refused, can_copy in (
            ("auto", "address", ["table", "address"], [], True),
            ("auto", "memory", ["table", "address", "memory"], [0], True),
            ("table", "memory", ["table", "memory"], [0], True),  # the flag asks for a table: then on memory at once
            ("auto", None, ["table", "address", "memory"], [], True),  # no way works
            ("auto", None, ["table", "address", "address"], [], False),  # an input that is refused already stays so
        ):
            with self.subTest(flag=flag, ways=ways):
                self.assertEqual(self.tried(flag, last, can_copy), (ways, ["sizes"] if flag == "auto" else []))
                self.assertEqual(list(self.model.refused), refused)

    def test_no_input_is_refused_because_memory_lacks(self):
        """After another error, the next attempt copies it, and so do all later recordings."""
        recording = attempts.Attempts(self.wrapped(model := inference(indirection="auto")), inputs := ["an input"])

        def attempt():
            recording._kept = list(inputs)
            if not recording.refused:
                recording.failed(SimpleNamespace(has_table=False, in_place=(0,)), error)
                raise error

        lacks = self.assertRaises(DriverError)
        for code, ends, refused in (("OUT_OF_MEMORY", lacks, []), ("NOT_SUPPORTED", contextlib.nullcontext(), [0])):
            error = DriverError(call="cuMemCreate", code=f"CUDA_ERROR_{code}")
            with ends:
                recording.until_one_works(attempt, inputs)
            self.assertEqual(list(model.refused), refused)

    def test_a_recording_that_would_write_to_a_copy_is_refused(self):
        """This holds even if upstream has decided that the function may be recorded."""
        inputs = [torch.ones(2), torch.ones(2), torch.ones(0)]
        function = self.wrapped(inference(placement="off", indirection="patch"), mutated=(1,))
        node = self.node(log=RecordingLog(number=3), wrapped_function=function)
        node._attempts = attempts.Attempts(function, inputs)
        self.enterContext(mock.patch.multiple(attempts, choose=lambda *_, **__: (None, {}), ranges_of=mock.DEFAULT))
        upstream = recording_module.Upstream, "_allocate_and_copy_recording_inputs"
        self.enterContext(mock.patch.object(*upstream, lambda *_: "done"))
        loses = self.assertRaisesRegex(recording_module.WouldLoseWrites, "recording 3: input 1 is written")
        # Without addresses upstream decides.
        for copied, api, fits in (((0, 1), "driver", False), ((0,), "driver", True), ((0, 1), None, True)):
            node._driver_for_addresses = lambda: api or Reason.UNPATCHED()  # noqa: B023
            node._copied_indices = lambda: list(copied)  # noqa: B023
            with contextlib.nullcontext() if fits else loses:
                self.assertEqual(node._allocate_and_copy_recording_inputs(inputs), "done")

    def test_a_call_that_cannot_be_staged_leaves_the_path_as_it_is(self):
        """Upstream prepares the allocator for a recording before it asks for one."""
        self.model = inference(lambda inputs: ["un-graphed", *inputs], placement="full")
        self.model.refused = {0: "no node of the graph reads it"}
        self.manager.ids_to_funcs = {self.FUNCTION: self.wrapped(self.model), 8: self.wrapped(None)}
        self.manager.path_state = state = cudagraph_trees.ExecutionState.EXECUTION
        self.enterContext(addressed())
        self.enterContext(mock.patch.object(Upstream, "_run", lambda manager, inputs, function_id: ["upstream's"]))
        x, node = torch.ones(2), self.node()
        for new_step in (False, False, True):
            self.manager.current_node = node
            self.manager.current_gen = self.manager.get_curr_generation() - new_step
            self.assertEqual(self.manager._run([x], self.FUNCTION), ["un-graphed", x])
            if not new_step:
                self.assertEqual((self.manager.current_node, self.manager.path_state), (node, state))
        self.assertIsNone(self.manager.current_node)  # the new step's path begins with the next function
        self.assertEqual(self.model.log.ungraphed_reason, "no node of the graph reads it")
        for function_id in (8, self.FUNCTION):
            self.assertEqual(self.manager._run([x], function_id), ["upstream's"])

    def test_a_function_is_added_only_if_its_first_call_works(self):
        def add_function(manager, model, inputs):
            if inputs.pop() == "fails":
                raise MemoryError
            return functools.partial(manager.run, function_id=self.FUNCTION), ["outputs"]

        with mock.patch.object(Upstream, "add_function", add_function):
            self.assertRaises(MemoryError, self.manager.add_function, self.model, ["fails"])
            self.assertFalse(self.model.dispatch.is_added)
            self.assertEqual(self.manager.add_function(self.model, [7])[1], ["outputs"])
        self.assertTrue(self.model.dispatch.is_added)

    def test_a_function_that_would_lose_its_writes_is_not_recorded(self):
        wrapped = self.wrapped(self.model, mutated=(0,))
        self.manager.ids_to_funcs = {self.FUNCTION: wrapped}
        managed, elsewhere, in_pool = object(), object(), object()
        self.manager._get_cuda_graph_recorded_tensor_checker = lambda: lambda t: t is managed
        in_place = mock.patch.object(Given, "is_written_in_place", lambda given, index: given.inputs[0] is elsewhere)
        for uses in (False, True):
            for value, loses in ((managed, False), (elsewhere, not uses), (in_pool, True)):
                with addressed(uses), in_place:
                    self.assertEqual(self.manager._given([value], self.FUNCTION).would_lose_writes(), loses)
        with addressed(), in_place, mock.patch.object(Upstream, "record_function", side_effect=AssertionError):
            self.assertEqual(self.manager.record_function([torch.ones(2)], self.FUNCTION), [torch.full((2,), 2.0)])
        self.assertRegex(self.model.log.ungraphed_reason, "mutates an input that is in the graph pool")
        wrapped.static_input_idxs = [0]
        with addressed():
            self.assertFalse(self.manager._given([in_pool], self.FUNCTION).would_lose_writes())

    def test_a_recording_that_lacks_memory_is_counted(self):
        self.manager.ids_to_funcs = {self.FUNCTION: self.wrapped(self.model)}
        self.enterContext(mock.patch.object(pools, "segments_of", return_value=()))
        run = mock.patch.object(Upstream, "_run", lambda manager, *call: manager.record_function(*call))
        error = DriverError(call="cuMemCreate", code="CUDA_ERROR_OUT_OF_MEMORY")
        with addressed(), run, mock.patch.object(Upstream, "record_function", side_effect=error):
            self.assertEqual(self.manager.run([torch.ones(2)], self.FUNCTION), [torch.full((2,), 2.0)])
        self.assertEqual((self.model.log.lacked, self.model.failures), (1, 0))

    def test_the_reason_names_what_differs_from_what_is_recorded(self):
        inputs, id_, log = [torch.ones(2), torch.ones(2), torch.ones(2), 5], FunctionID(0), SimpleNamespace()
        placeholders = [PlaceholderInfo(f"arg{i}_1", None, [], None) for i in range(4)]
        function = SimpleNamespace(model=double, placeholders=placeholders)

        def node(moved=True, managed=(), **children):
            return SimpleNamespace(
                id=SimpleNamespace(id=7),
                children={id_: list(children.values())} if children else {},
                wrapped_function=function,
                cudagraph_managed_idxs=managed,
                static_input_idxs=[0, 1],
                static_input_data_ptrs=[*([1, 2] if moved else [t.data_ptr() for t in inputs[:2]]), None, None],
            )

        for recordings, current, roots, reason, *sizes in (
            ([], None, [], "first call"),
            ([object()], None, [], "first call with these sizes", 8),
            ([object()], None, [], "first call of another thread"),
            ([object()], node(), [], "first call after recording 7"),
            ([], None, [node(moved=False), node()], "static input arg0_1, arg1_1 moved"),
            ([], None, [node(managed=[0, 1])], "managed input arg0_1, arg1_1 moved"),
            ([], node(below=node(moved=False)), [], "the live outputs differ from those at its recording"),
        ):
            log.recordings = recordings
            functions = dict.fromkeys([id_, *sizes], function)
            tree = SimpleNamespace(current_node=current, roots={id_: roots} if roots else {}, ids_to_funcs=functions)
            self.assertEqual(why_recorded(tree, inputs, id_, log), reason)
            self.assertEqual(len(inputs), 4)  # the question does not change the inputs

    def test_inputs_of_a_forward_are_live_in_its_backward(self):
        saved, weight, managed, tangent = (torch.ones(4) for _ in range(4))
        reached = {saved.data_ptr(), managed.data_ptr(), tangent.data_ptr()}
        forward = self.node(live=SimpleNamespace(addresses=SimpleNamespace(reaches=reached.__contains__)))
        inputs = [saved, weight, managed, 7, tangent]
        modes = cudagraph_trees.CompilationMode
        self.enterContext(mock.patch.object(Given, "is_written_in_place", lambda given, index: False))
        self.manager._get_cuda_graph_recorded_tensor_checker = lambda: lambda t: t is managed
        for mode, node, uses, mutated, static in (
            (modes.BACKWARD, self.node(live=None, _parent=lambda: forward), True, (), [1, 2, 3]),
            (modes.BACKWARD, forward, True, (1,), [1, 2, 3]),
            (modes.BACKWARD, forward, True, (0,), [0, 1, 2, 3]),
            (modes.BACKWARD, None, True, (), [0, 1, 2, 3]),
            (modes.BACKWARD, forward, False, (), [0, 1, 2, 3]),
            (modes.FORWARD, forward, True, (), [0, 1, 2, 3]),
        ):
            wrapped = WrappedFunction(self.model, [0, 1, 2, 3], self.FUNCTION, (), (), mutated, **LIMITS)
            self.manager.ids_to_funcs, self.manager.current_node = {self.FUNCTION: wrapped}, node
            self.manager.id_to_mode = {self.FUNCTION: mode}
            with self.subTest(mode=mode, uses=uses, mutated=mutated), addressed(uses):
                self.manager._demote(self.manager._given(inputs, self.FUNCTION), self.FUNCTION)
                self.assertEqual(self.manager.ids_to_funcs[self.FUNCTION].static_input_idxs, static)

    def replayed(self, **attributes):
        """A recording after whose replay an input is still held."""
        function = SimpleNamespace(model=SimpleNamespace(log=SimpleNamespace(name="step 0/0")))
        deaths = SimpleNamespace(ask=lambda: False)
        return self.node(**{"deaths_after": deaths, "wrapped_function": function, **attributes})

    def test_an_input_that_is_still_held_after_it_died_is_an_error(self):
        """With torch 2.15, the replay checks it. If inputs are copied, upstream's own code does so after the copies."""
        live = SimpleNamespace(is_copied=False, drop=mock.Mock())
        for given in (None, live):
            with self.assertRaisesRegex(RuntimeError, "step 0/0: an input that died .* is still held"):
                self.replayed(live=given).check_what_died()
        live.drop.assert_called_once_with()
        for deaths_after in (None, SimpleNamespace(ask=lambda: True)):
            self.replayed(deaths_after=deaths_after).check_what_died()
        recording = self.replayed(live=live, run=lambda inputs: ["upstream's way"])
        with mock.patch.object(fast_path, "CHECKS_LATE", True):
            self.assertRaises(HeldForTooLong, recording.replay, ["there"])
            live.is_copied = True
            self.assertEqual(recording.replay(["there"]), ["upstream's way"])

    @unittest.skipIf(binding.extension is None, "not built for this torch")
    def test_a_call_with_other_own_memory_does_not_replay_it(self):
        one, other = own_memory(storage(0)), own_memory(storage(0))
        for own, given in ((None, one), (one, None), (one, other)):
            inputs = [torch.ones(1), *([] if given is None else given.native.take())]
            _, why = self.node(own=own, _takes=1).check_invariants(inputs)
            self.assertEqual(why(), "it was recorded when other outputs had memory of their own")


if __name__ == "__main__":
    run_tests()
