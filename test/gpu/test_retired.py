"""Memory of deleted recordings returns to the driver and the allocator, but not before their launches end."""

from __future__ import annotations

import gc
from unittest import mock

import torch
import torch._dynamo
from indirection import FLAG, Facts, IndirectionTestCase, reset
from parity import marked
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import run_tests
from user_operators import host_call

from pygraph_trees.indirection import retired

RUNS_ALONE = True  # it reads the GPU's memory in use, which includes that of other processes
MIB = 1 << 20
INPUT_NBYTES = 128 * MIB
ROOM = 32 * MIB  # for memory that the allocator and the driver keep


def summed(x):
    """A function whose input is copied, because a host node may hide its address."""
    return host_call(x).sum()


def many_readers(x, y):
    """Kernels that take addresses from a table if there is one."""
    for _ in range(3):
        x = (x.sin() @ y).softmax(1)
    return x


class TestRetired(IndirectionTestCase):
    def setUp(self):
        super().setUp()
        # Inductor keeps the module of a graph with partitions, which holds them.
        self.enterContext(torch._inductor.config.patch(graph_partition=False))

    def used(self, device: int = 0) -> int:
        """The GPU's bytes in use after the allocator has freed its cache."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    def copied(self, device: int = 0):
        """A function after replays that copied its input."""
        graphed = torch.compile(summed, mode="reduce-overhead")
        for call in marked(range(5)):
            x = torch.full((INPUT_NBYTES // 4,), float(call % 2), device=f"cuda:{device}")
            self.assertEqual(graphed(x).item(), call % 2 * 2.0 * x.numel())
        self.assertGreater(Facts.now().copied_bytes, 0)
        return graphed

    def warmed_up(self) -> int:
        """The bytes in use after everything is loaded."""
        self.copied()
        reset()
        return self.used()

    def test_reset_gives_placeholders_back(self):
        before = self.warmed_up()
        graphed = self.copied()
        self.assertGreater(self.used(), before + INPUT_NBYTES - ROOM)
        torch._dynamo.reset()
        del graphed
        self.assertLess(self.used(), before + ROOM)
        self.assertEqual(len(retired._retired), 0)

    def test_placeholders_go_with_the_last_function(self):
        """Placeholders are given back with the last function, without a wait."""
        before = self.warmed_up()
        graphed = self.copied()
        torch.cuda.synchronize()
        with mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError("waited")):
            del graphed
            torch._dynamo.reset_code_caches()
            gc.collect()
            self.assertIsNone(cudagraph_trees.get_container(0).tree_manager)
            self.assertLess(self.used(), before + ROOM)

    def test_placeholders_stay_while_a_launch_is_queued(self):
        reset()
        graphed = self.copied()
        x = torch.ones(INPUT_NBYTES // 4, device=self.device)
        torch.compiler.cudagraph_mark_step_begin()
        torch.cuda._sleep(1 << 30)
        result = graphed(x).clone()
        del graphed
        with mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError("waited")):
            torch._dynamo.reset_code_caches()
            gc.collect()
        self.assertEqual(len(retired._retired), 1)
        self.assertFalse(torch.cuda.current_stream().query())  # otherwise the test proves nothing
        torch._dynamo.reset()
        self.assertEqual(len(retired._retired), 0)
        self.assertEqual(result.item(), 2.0 * x.numel())

    def test_launches_on_two_streams(self):
        reset()
        graphed = self.copied()
        x, stream = torch.ones(INPUT_NBYTES // 4, device=self.device), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.compiler.cudagraph_mark_step_begin()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 30)
            graphed(x)
        del graphed
        torch._dynamo.reset_code_caches()
        gc.collect()
        self.assertFalse(stream.query())
        self.assertEqual(len(retired._retired), 1)
        torch._dynamo.reset()
        self.assertTrue(stream.query())
        self.assertEqual(len(retired._retired), 0)

    def test_tables_are_given_back(self):
        def called():
            graphed = torch.compile(many_readers, mode="reduce-overhead")
            for _ in marked(range(5)):
                x, y = torch.rand(64, 64, device=self.device), torch.rand(64, 64, device=self.device)
                graphed(x, y)
            return graphed

        with torch._inductor.config.patch({FLAG: "table"}):
            called()
            self.assertIn("table", Facts.now().routes)
            for _ in range(2):
                reset()
                self.used()
                before = torch.cuda.memory_allocated()
                graphed = called()
                self.assertIn("table", Facts.now().routes)
                torch._dynamo.reset()
                del graphed
                self.used()
                self.assertEqual((torch.cuda.memory_allocated(), len(retired._retired)), (before, 0))


if __name__ == "__main__":
    run_tests()
