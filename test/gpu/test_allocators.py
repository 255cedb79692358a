"""Other settings of torch's allocator, each in a process of its own: eager is the oracle."""

from __future__ import annotations

from typing import Any

from indirection import IndirectionTestCase
from new_program import printed
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

PROGRAM = """
import copy, json
import torch
import pygraph_trees

torch.manual_seed(0)
model = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.GELU()))).cuda()
eager = copy.deepcopy(model)
compiled = torch.compile(model, mode="reduce-overhead")
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
kept, wanted = [], []
for step in range(16):
    x = torch.randn(16, 64, device="cuda")
    for run, optimizer, outputs in zip((compiled, eager), optimizers, (kept, wanted)):
        y = run(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach())
    with torch.no_grad():
        kept.append(compiled(x[:4]))
        wanted.append(eager(x[:4]))
    if step == 8:
        torch.cuda.empty_cache()
torch.testing.assert_close(kept, wanted, atol=1e-5, rtol=1e-4)
report = pygraph_trees.report()
print()
print(json.dumps([report.replays, sorted({str(graph.dropped) for graph in report.graphs})]))
"""


POOL = """
import copy, gc, json
import torch
import pygraph_trees

torch.manual_seed(0)
model = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.GELU()))).cuda()
eager = copy.deepcopy(model)
compiled = torch.compile(model, mode="reduce-overhead")
never = {"triton.pygraph_selective": "never", "triton.cudagraphs": True}
ungraphed = torch.compile(lambda x: x.cos() + 1, options=never)
kept, wanted, counts, places = [], [], [], []

def step(trained):
    x = torch.randn(16, 64, device="cuda")
    for run, each, outputs in ((compiled, model, kept), (eager, eager, wanted)):
        with torch.set_grad_enabled(trained):
            y = run(x)
        if trained:
            y.square().mean().backward()
            outputs += [p.grad.clone() for p in each.parameters()]
            each.zero_grad()
        outputs.append(y.detach())

outer = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(outer):
    step(trained=FIRST)
for number in range(24):
    pool = torch.cuda.MemPool()
    if number % 3:
        with torch.cuda.use_mem_pool(pool):
            step(trained=FIRST)
            spoilt = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(8)]
            y = ungraphed(spoilt[0])
        addresses = [range(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
        places.append(any(y.data_ptr() in segment for segment in addresses))
        del spoilt, y
    else:
        step(trained=FIRST)
    counts.append(pool.use_count())
    del pool
    gc.collect()
    torch.cuda.empty_cache()
torch.cuda.synchronize()
del outer
torch.testing.assert_close(kept, wanted, atol=1e-5, rtol=1e-4)
report = pygraph_trees.report()
print()
recordings = sum(len(function.recordings) for function in report.functions)
print(json.dumps([report.replays, recordings, sorted(set(counts)), all(places)]))
"""


@instantiate_parametrized_tests
class TestAllocators(IndirectionTestCase):
    def replays_and_reasons(self, settings: str) -> list[Any]:
        found: list[Any] = printed(PROGRAM, PYTORCH_CUDA_ALLOC_CONF=settings, PYGRAPH_SELECTIVE="always")
        return found

    def test_cudas_asynchronous_allocator(self) -> None:
        """Functions run un-graphed: torch's trees would raise."""
        why = "the allocator backend cudaMallocAsync has no graph pools"
        self.assertEqual(self.replays_and_reasons("backend:cudaMallocAsync"), [0, [why]])

    @parametrize("settings", ["expandable_segments:True", "garbage_collection_threshold:0.6,max_split_size_mb:64"])
    def test_settings_of_torchs_allocator(self, settings: str) -> None:
        replays, reasons = self.replays_and_reasons(settings)
        self.assertGreater(replays, 30)
        self.assertEqual(reasons, ["None"])

    @parametrize("trained", [False, True])
    def test_pools_of_the_program_around_calls(self, trained: bool) -> None:
        """Around the first call and some others, each gone afterwards: un-graphed code alone has memory in them."""
        replays, recordings, counts, are_inside = printed(
            POOL.replace("FIRST", str(trained)), PYGRAPH_SELECTIVE="always"
        )
        self.assertGreater(replays, 30 if trained else 15)
        self.assertLess(recordings, 12)
        self.assertEqual((counts, are_inside), ([1], True))


if __name__ == "__main__":
    run_tests()
