"""Which parameters FSDP2 has gathered, on one rank of gloo; the module state of torch 2.11 is imitated."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.two_tensor import TwoTensor

from pygraph_trees.trees.managers.input_rules import gathered_addresses

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
        parameters = [
            SimpleNamespace(_unsharded_param=one),
            SimpleNamespace(_unsharded_param=SimpleNamespace(_local_tensor=two)),
            SimpleNamespace(_unsharded_param=freed),
            SimpleNamespace(_unsharded_param=nn.Parameter(wrapped)),  # as with float8: its own address is 0
            SimpleNamespace(_unsharded_param=SimpleNamespace(_local_tensor=half_freed)),
            SimpleNamespace(),
        ]
        group = SimpleNamespace(fsdp_params=parameters)
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
