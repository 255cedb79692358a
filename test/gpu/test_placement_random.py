"""Random graphs and realistic programs that mix CPU and GPU."""

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from indirection import Facts, IndirectionTestCase, reset
from mixed_programs import GPU, programs, run_steps, traced
from packages import is_torchvision_broken
from parity import marked
from placement import CALLS_EACH
from real_programs import REAL, noise_schedule, tokens
from torch import fx
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
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
            for call in marked(range(5)):
                self.assertSame(graphed(*on_devices(inputs, call)), program(*on_devices(inputs, call)))
            replays.append(Facts.now().replays)

        for _ in range(4):  # not every program is graphed
            check()
            if sum(map(bool, replays)) > 3:
                return
        self.fail(f"replays of {len(replays)} programs: {replays}")


@instantiate_parametrized_tests
class TestRealPrograms(IndirectionTestCase):
    @parametrize("build", REAL, name_fn=lambda build: build.__name__)
    def test_one_graph(self, build):
        if build is tokens and is_torchvision_broken():
            self.skipTest("transformers imports torchvision, which was built for another torch")
        program, inputs = build(self.device, small=True)
        graphed = torch.compile(program, mode="reduce-overhead")
        with torch.backends.cudnn.flags(allow_tf32=False):  # otherwise another layout gives another result
            for call in marked(range(CALLS_EACH)):
                # CPU inputs change at each call.
                given_ = [t.flip(0).clone() if t.device.type == "cpu" and call % 2 else t.clone() for t in inputs]
                self.assertEqual(graphed(*given_), program(*given_), atol=1e-4, rtol=1e-4)
        (graph,) = pygraph_trees.report().graphs
        self.assertEqual(sum(p.graphed for p in graph.partitions), 1)
        self.assertEqual(len(graph.partitions), 2 if build is noise_schedule else 1)
        self.assertEqual(pygraph_trees.report().breaks, ())
        self.assertGraphed(Facts.now(), CALLS_EACH)


if __name__ == "__main__":
    run_tests()
