"""Graphed or not, in trials and after them, a function gives the bits of un-graphed Inductor.

Which way is better depends on the machine, so the tests set the decision.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from indirection import Program, by_name, compiled, run, tensor
from selection import CALLS, SelectionTestCase, decided
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.selection.decision import Execution


def _in_parts(x, y):
    z = (x * 2 + y).cpu().sum()  # on the CPU between two graphs
    return x.sin() * z.to(x.device, non_blocking=False), z


PROGRAMS = (
    Program("pointwise", lambda x, y: (x.sin() + y, x * y), (tensor(64, 64), tensor(64, 64))),
    Program("written to", lambda c, x: c.add_(x).sum(), (tensor(64, 64), tensor(64, 64))),
    Program("cache", lambda c, i, x: c.index_copy_(0, i, x).sum(), (
        tensor(32, 8), tensor(4, dtype="int64", values="order"), tensor(4, 8),
    )),
    Program("returned", lambda x: (x[1:].t(), x, x @ x), (tensor(8, 8),)),
    Program("misaligned", lambda x: x.cos() * 3, (tensor(33, 33, layout="misaligned"),)),
    Program("backward", lambda x, y: (x * y).tanh().sum(), (tensor(64, 64), tensor(64, 64)), backward=True),
    Program("in parts", _in_parts, (tensor(64, 64), tensor(64, 64))),
)  # fmt: skip


class TestBothWays(SelectionTestCase):
    @parametrize("way", list(Execution), name_fn=lambda way: way.name.lower())
    @parametrize("program", PROGRAMS, name_fn=by_name)
    def test_bits(self, program, way):
        with decided(way):
            run(program, compiled(program.fn), self.device, ("kept", "fresh"), calls=CALLS)
        functions = self.functions()
        self.assertGreater(len(functions), 0)
        for function in functions:
            self.assertRegex(str(function.decision), f"^{way.value}: ")
            self.assertEqual(function.ungraphed_calls > 0, way is Execution.UNGRAPHED)

    @parametrize("way", list(Execution), name_fn=lambda way: way.name.lower())
    def test_training(self, way):
        """Parameters, statistics and momentum are equal after many steps, and no forward waits for its backward."""
        results = []
        for side in ("plain", "graphed"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            layers = [torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 4)]
            model = torch.nn.Sequential(*layers).to(self.device)
            step = getattr(compiled(model), side)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with decided(way):
                for number in range(CALLS):
                    torch.manual_seed(number)
                    loss = step(torch.randn(8, 16, device=self.device)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            results.append([loss.detach().clone(), *(p.detach().clone() for p in model.state_dict().values())])
        self.assertEqual(results[1], results[0], rtol=0, atol=0)
        manager = torch._inductor.cudagraph_trees.get_manager(0, create_if_none_exists=False)
        self.assertFalse(manager.running_forwards_with_pending_backwards)
        self.assertEqual({str(f.decision).partition(":")[0] for f in self.functions()}, {way.value})


instantiate_parametrized_tests(TestBothWays)

if __name__ == "__main__":
    run_tests()
