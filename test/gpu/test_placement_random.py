"""Random graphs that mix CPU and GPU: rewritten and original graphs agree, interpreted and compiled.

Values, devices, types and strides must be equal, and so must sharing of memory. A minimum of the graphs must have moved
something.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from indirection import Facts, IndirectionTestCase, reset
from mixed_programs import GPU, programs, run_steps, traced
from torch import fx
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.placement import place

ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def on_devices(inputs, seed=0):
    """Copies of the inputs, which are on the CPU, each on its device."""
    return [(x + seed).to(GPU) if where == "gpu" else x + seed for x, where in inputs]


def memory_of(tensors):
    """For each value, the number of the memory that it shares; a value without memory is alone."""
    addresses = [t.untyped_storage().data_ptr() or -n for n, t in enumerate(tensors, 1)]
    return [addresses.index(address) for address in addresses]


class TestRandomPlacement(IndirectionTestCase):
    def assertSame(self, found, wanted):
        self.assertEqual(len(found), len(wanted))
        for one, other in zip(found, wanted, strict=True):
            self.assertEqual(one.device, other.device)
            self.assertEqual(one, other, rtol=0, atol=0, exact_dtype=True, exact_stride=True)

    def test_rewritten(self):
        moved = []

        @settings(max_examples=300, **ANY)
        @given(st.data(), st.booleans())
        def check(data, exact):
            # Operators that round are drawn only with exact placement, which leaves them on the CPU.
            inputs, steps, outputs = data.draw(programs(rounds=exact))
            before = traced(run_steps(steps, outputs), inputs)
            after = copy.deepcopy(before)
            moved.append(len(place(after.graph, exact=exact).moves))
            after.recompile()
            wanted, found = (fx.Interpreter(module).run(*on_devices(inputs)) for module in (before, after))
            self.assertSame(found, wanted)
            self.assertEqual(memory_of(found), memory_of(wanted))

        check()
        self.assertGreater(sum(map(bool, moved)), 30)

    def test_compiled(self):
        """Five calls of each graph agree with eager; the later ones are replays."""
        replays = []

        @settings(max_examples=15, **ANY)
        @given(programs(rounds=False))
        def check(drawn):
            inputs, steps, outputs = drawn
            reset()
            program = run_steps(steps, outputs)
            graphed = torch.compile(program, mode="reduce-overhead", dynamic=False)
            for call in range(5):
                torch.compiler.cudagraph_mark_step_begin()
                self.assertSame(graphed(*on_devices(inputs, call)), program(*on_devices(inputs, call)))
            replays.append(Facts.now().replays)

        for _ in range(4):  # not every program is graphed
            check()
            if sum(map(bool, replays)) > 3:
                return
        self.fail(f"replays of {len(replays)} programs: {replays}")


if __name__ == "__main__":
    run_tests()
