"""Zeros without memory as inputs and outputs: upstream's code and compiled code get ordinary tensors instead."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from fake_trees import bare_manager, bare_recording
from test_allocations import function
from torch import nn
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.two_tensor import TwoTensor

from pygraph_trees.outputs.allocations import Allocations
from pygraph_trees.trees.functions.function import Aligned
from pygraph_trees.trees.functions.outputs import give_memory
from pygraph_trees.trees.hooks import entry_points
from pygraph_trees.trees.managers.input_rules import gathered_addresses
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.recordings.recording import Upstream

UpstreamManager = Manager.__mro__[-2]
FUNCTION = 3


def zeros(*shape: int) -> torch.Tensor:
    return torch._efficientzerotensor(shape, dtype=torch.float16)


def has_memory(value: torch.Tensor) -> bool:
    return not value._is_zerotensor() and value.untyped_storage().data_ptr() != 0


class TestZeros(TestCase):
    def test_they_get_memory_and_keep_their_strides(self):
        """All do, or only those at the given indices."""
        other, number = torch.ones(2), 7
        inputs = [zeros(2, 3), other, number, zeros(2, 3).t(), zeros(3).expand(2, 3)]
        give_memory(inputs)
        self.assertIs(inputs[1], other)
        self.assertEqual(inputs[2], number)
        for index, shape, strides in ((0, (2, 3), (3, 1)), (3, (3, 2), (1, 3)), (4, (2, 3), (3, 1))):
            self.assertTrue(has_memory(inputs[index]))
            self.assertEqual((tuple(inputs[index].shape), inputs[index].stride()), (shape, strides))
            self.assertEqual(inputs[index], torch.zeros(shape, dtype=torch.float16))
        give_memory(inputs := [zeros(2), zeros(2)], [1])
        self.assertEqual([has_memory(value) for value in inputs], [False, True])

    def test_a_warm_up_and_a_recording_have_memory(self):
        """Upstream asks for the address of each input's storage, and torch raises for one without memory."""
        wrapped = SimpleNamespace(mutated_input_idxs=(), static_input_idxs=[], model=lambda inputs: inputs)
        manager = bare_manager(ids_to_funcs={FUNCTION: wrapped})

        def address(manager, inputs, function_id):
            return [value.untyped_storage().data_ptr() for value in inputs]

        self.assertRaisesRegex(RuntimeError, "invalid python storage", address, manager, [zeros(2)], FUNCTION)
        with (
            mock.patch.object(Manager, "pool", mock.Mock()),
            mock.patch.multiple(UpstreamManager, run_eager=address, record_function=address),
        ):
            for call in (manager.run_eager, manager.record_function):
                self.assertNotIn(0, call([zeros(2), torch.ones(2)], FUNCTION))

    def test_all_ungraphed_calls_of_a_backward_have_memory_for_tangents(self):
        """The calls are measured, made during another call, or left un-graphed by upstream after too many recordings.
        Static inputs come from the forward, which makes no zeros without memory, so they are not checked."""
        for is_backward, expected in ((True, [True, False]), (False, [True, True])):
            mode = "backward" if is_backward else "forward"
            model = function(lambda inputs: [value._is_zerotensor() for value in inputs], mode=mode)
            put = dict(device_index=0, is_backward=is_backward, is_inference=False)
            entry_points.cudagraphify_impl(lambda function, *_, **__: function)(model, [zeros(2)] * 2, [0], **put)
            wrapped = SimpleNamespace(model=model, mutated_input_idxs=(), static_input_idxs=[0])
            manager = bare_manager(ids_to_funcs={FUNCTION: wrapped}, warmed_up_functions={FUNCTION})
            aligned = Aligned(model, [0], ())
            with (
                mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda inputs, static: []),
                mock.patch.object(Manager, "exceed_rerecord_limit", return_value=True),
            ):
                self.assertEqual([aligned([zeros(2), zeros(2)]) for _ in range(2)], [expected] * 2)
                self.assertEqual(manager._run_beside([zeros(2), zeros(2)], FUNCTION), [False, False])
                self.assertEqual(manager.run([zeros(2), zeros(2)], FUNCTION), expected)

    def test_generated_code_reads_the_values_of_negated_and_conjugated_tangents(self):
        """It reads memory, whatever the bits of a view say."""
        real, pair = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([1 + 2j, 3 - 4j])
        neg = torch._neg_view
        for value in (neg(real.mT), neg(real)[:, ::2], pair.conj(), neg(pair.conj())):
            model = function(lambda inputs: list(inputs), mode="backward")
            model.note_tangents(2, [0])
            static, found = model([value, value])
            self.assertIs(static, value)
            self.assertEqual((found.is_neg(), found.is_conj(), found.stride()), (False, False, value.stride()))
            self.assertEqual(found, value.clone())

    def test_outputs_that_compiled_code_makes_have_memory(self):
        """Upstream, and the search for the storages of outputs, ask for the address of each output."""
        code = "def call(args):\n    return (args[0], torch.ops.aten._efficientzerotensor.default([2, 3]), None)"
        exec(code, scope := {"torch": torch})
        given = torch.ones(2)
        with self.assertRaisesRegex(RuntimeError, "invalid python storage"):
            Allocations().storages(scope["call"]([given]), lambda address: True)
        outputs = function(scope["call"])([given])
        self.assertIs(outputs[0], given)
        self.assertTrue(has_memory(outputs[1]))
        self.assertEqual(outputs[1:], [torch.zeros(2, 3), None])
        self.assertEqual(len(Allocations().storages(outputs, lambda address: True)), 2)

    def test_one_in_the_place_of_an_output_is_none(self):
        """Zeros may replace a moving output of another graph; torch then has no address to compare."""
        recording = bare_recording(references=[object()], expected_dead_indices_after_graph=[(0, 0)])
        live = SimpleNamespace(items=[SimpleNamespace(managed=True, index=0)])
        output = torch.ones(2)
        found = output.untyped_storage(), output.untyped_storage().data_ptr()
        with mock.patch("torch._inductor.cudagraph_trees.maybe_deref", lambda held: found):
            self.assertIsNone(recording._why_not_alive(live, [zeros(2)]))
            self.assertIn("should be dead", recording._why_not_alive(live, [output]))
            self.assertRaises(RuntimeError, Upstream._is_alias_of_live_recorded_tensor, recording, zeros(2))


STATES = "_module_state_mapping"


class Seen(nn.Module):
    """A linear layer that notes the addresses of its parameters, and those that are gathered, as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[set[int], frozenset[int]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(({p.data_ptr() for p in self.parameters()}, gathered_addresses()))
        return self.linear(x)


class TestGathered(TestCase):
    def test_without_fsdp_none_is(self) -> None:
        with mock.patch.dict(sys.modules):
            sys.modules.pop("torch.distributed._composable_state", None)
            self.assertEqual(gathered_addresses(), frozenset())

    def test_those_of_the_module_that_runs_are(self) -> None:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        model = nn.Sequential(Seen(), Seen())
        mesh = dist.init_device_mesh("cpu", (1,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.assertEqual(gathered_addresses(), frozenset())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        for block in model:
            for own, gathered in block.seen:
                self.assertEqual(own, gathered)
        self.assertEqual([len(block.seen) for block in model], [2, 2])

    def test_groups_of_any_version(self) -> None:
        import torch.distributed._composable_state as composable

        one, two, freed = torch.ones(2), torch.ones(2), torch.ones(2)
        freed.untyped_storage().resize_(0)
        wrapped, half_freed = TwoTensor(torch.ones(2), torch.ones(2)), TwoTensor(torch.ones(2), freed)
        local = (SimpleNamespace(_local_tensor=tensor) for tensor in (two, half_freed))
        held = one, freed, nn.Parameter(wrapped), *local  # as with float8: the third one's own address is 0
        parameters = [SimpleNamespace(_unsharded_param=tensor) for tensor in held]
        group = SimpleNamespace(fsdp_params=[*parameters, SimpleNamespace()])
        found = {tensor.data_ptr() for tensor in (one, two, wrapped.a, wrapped.b, half_freed.a)}
        for state, expected in (
            (SimpleNamespace(_fsdp_param_group=group), found),
            (SimpleNamespace(_fsdp_param_groups=[group]), found),
            (SimpleNamespace(_fsdp_param_group=None), set()),
            (SimpleNamespace(_fsdp_param_groups=[]), set()),
            (SimpleNamespace(), set()),  # of another kind
            (None, set()),  # freed
        ):
            with mock.patch.object(composable, STATES, {nn.Module(): lambda state=state: state}):
                self.assertEqual(gathered_addresses(), expected)


if __name__ == "__main__":
    run_tests()
