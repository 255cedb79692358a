"""Programs that mix CPU and GPU, with floating-point work left on the CPU; and the accuracy of moved work."""

import torch
from indirection import Facts, assert_same_bits
from last_place import EQUAL, NEAR, numbers
from placement import CALLS_EACH, PlacementTestCase, name_of
from placement_programs import EXACT
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees


@instantiate_parametrized_tests
class TestExactPlacement(PlacementTestCase):
    def assertLikeEager(self, found, wanted, rounds, where):
        super().assertLikeEager(found, wanted, rounds, where)
        if not rounds:
            assert_same_bits(found, wanted, where)

    @parametrize("program", EXACT, name_fn=name_of)
    def test_family(self, program):
        self.check_family(program, "exact")

    def test_single_precision_math_on_inputs(self):
        """Values that the GPU computes instead of the CPU are equal, or differ by the GPU's rounding."""
        functions = {**EQUAL, **NEAR}

        def program(x, v):
            return x + 1, [function(v).to(x.device) for function in functions.values()]

        graphed = torch.compile(program, mode="reduce-overhead")
        x = torch.rand(4, device=self.device)
        for call in range(CALLS_EACH):
            v = numbers().roll(call) * (1 + call / 10)
            torch.compiler.cudagraph_mark_step_begin()
            _, found = graphed(x, v)
            for (name, function), one in zip(functions.items(), found, strict=True):
                with self.subTest(name):
                    most = 0 if name in EQUAL else 1e-5  # a GPU takes `exp` of large numbers less exactly
                    self.assertEqual(one.cpu(), function(v), rtol=most, atol=most)
        (graph,) = pygraph_trees.report().graphs
        self.assertEqual([part.graphed for part in graph.partitions], [True])
        self.assertGraphed(Facts.now(), CALLS_EACH)


if __name__ == "__main__":
    run_tests()
