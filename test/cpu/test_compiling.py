"""Graphs that are compiled again in another way: placed ones that Inductor cannot compile, and torn tensors."""

from unittest import mock

import torch
from torch._dynamo.exc import SkipFrame
from torch._inductor.graph import GraphLowering
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.fake_gpu import lower
from pygraph_trees.report.compiled import partitions_of
from pygraph_trees.report.records import PLACED, WHY_NOT_PLACED
from pygraph_trees.trees.hooks import compiling


def branches(x, v):
    """A pass deletes graphs in the graph, if branches write to what is in it."""
    one, other = (lambda y: y.add_(1) + torch.arange(64).to("cuda")), (lambda y: y.mul_(2) * 2)
    return torch.cond(x.sum() > 0, one, other, (x * 2,)) + v.to("cuda")


def halves(x):
    first = x.view(8, 8) @ x.view(8, 8)
    return torch.cat([first, first.cpu().sort().values.to("cuda") @ first])


class TestCompiling(TestCase):
    def lowered(self, program, *inputs, how="exact"):
        torch._dynamo.reset()
        with torch._inductor.config.patch({"triton.pygraph_placement": how}), torch.no_grad():
            (graph,) = lower(program, (torch.empty(64, device="meta"), *inputs))
        return graph

    def test_a_placed_graph_that_cannot_be_compiled_is_compiled_as_it_was(self):
        def codegen(graph, real=GraphLowering.codegen):
            self.assertFalse(graph.module.meta.get(PLACED))
            return real(graph)

        for program in (lambda x, v: x + (v + 1).to("cuda"), branches):
            before = self.lowered(program, torch.rand(64), how="off")
            failing = mock.patch.object(GraphLowering, "codegen", codegen)
            with failing, self.assertLogs("pygraph_trees.compiling", "WARNING"):
                graph = self.lowered(program, torch.rand(64))
            one, other = (found.source_code.splitlines() for found in (graph, before))
            self.assertEqual(*([line for line in lines if not line.startswith("#")] for lines in (one, other)))
            self.assertEqual(graph.gm.meta[WHY_NOT_PLACED], "an error; see the log")

    def test_other_errors_are_those_of_the_first_attempt(self):
        def codegen(graph):
            attempts.append(graph)
            raise error(f"attempt {len(attempts)}")

        for error, program, ranks, count in (
            (AssertionError, lambda x, v: x + v.to("cuda"), False, 2),
            (AssertionError, lambda x, v: x + v.to("cuda"), True, 1),
            (AssertionError, lambda x, v: (x + 1, v), False, 1),  # nothing is placed
            (SkipFrame, lambda x, v: x + v.to("cuda"), False, 1),
        ):
            attempts, failing = [], mock.patch.object(GraphLowering, "codegen", codegen)
            waits = mock.patch.object(compiling, "may_wait_for_others", return_value=ranks)
            told = self.assertRaisesRegex(Exception, "attempt 1" if error is AssertionError else "")
            with self.subTest(error=error, count=count), failing, waits, told:
                self.lowered(program, torch.rand(64))
            self.assertEqual(len(attempts), count)

    def test_what_several_partitions_would_write_to_is_written_by_one_kernel(self):
        """Torch alone allocates the result in each partition, and returns that of the last one."""
        for how in ("exact", "off"):
            graph = self.lowered(halves, how=how)
            self.assertEqual(graph.source_code.count("empty_strided_cuda((16, 8)"), 1)
            self.assertEqual([part.graphed for part in partitions_of(graph.graph.scheduler)], [True, False, True])

        def bytes_too(x):
            """Inductor cannot write one kernel in C++ for these types."""
            found = halves(x)
            return found, torch.cat([found[0].cpu().to(torch.uint16), found[1].cpu().to(torch.uint16)])

        torn, always = compiling._is_torn, lambda *_: True
        for program, ranks, is_torn in (bytes_too, False, torn), (halves, True, torn), (halves, False, always):
            patch = mock.patch.multiple(compiling, may_wait_for_others=lambda: ranks, _is_torn=is_torn)  # noqa: B023
            with patch, self.assertLogs("pygraph_trees.compiling", "WARNING") as logs:
                graph = self.lowered(program)
            self.assertIn("nothing of this graph is graphed", logs.output[-1])
            self.assertEqual([part.graphed for part in partitions_of(graph.graph.scheduler)], [False])


if __name__ == "__main__":
    run_tests()
