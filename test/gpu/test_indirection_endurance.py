"""Many replays with new addresses: nothing grows, and peak memory is upstream's minus the copies.

Of many steps that keep a random half of their outputs for random times, values are right.

``PYGRAPH_REPLAYS`` is the number of replays, 2,000 by default; 100,000 take some minutes. ``PYGRAPH_STEPS`` is the
number of steps, 10,000 by default. The tests read the memory in use of the whole GPU.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from indirection import FLAG, Facts, IndirectionTestCase, KeptTestCase, compiled, reset
from parity import marked
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.indirection.placeholder import MAX_MAPPINGS, MAX_PIECE_NBYTES

RUNS_ALONE = True  # it reads the GPU's memory in use, which includes that of other processes
PARTS = 9  # the calls are made in so many parts, and objects are counted after each
REPLAYS = int(os.environ.get("PYGRAPH_REPLAYS", "2000"))
MIB = 2**20


def host_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes() -> int:
    """The GPU's memory in use, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def handles() -> tuple[int, Counter[str]]:
    """The numbers of open files and, by type, of Python objects."""
    gc.collect()
    names = Counter(type(found).__qualname__ for found in gc.get_objects())
    # Each ``config.patch``, which these tests use around each call, adds to the nodes of the context in torch 2.15.
    return len(os.listdir("/proc/self/fd")), Counter({n: k for n, k in names.items() if not n.startswith("hamt_")})


class Peak(threading.Thread):
    """Watches the GPU's memory continuously."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = gpu_bytes()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            self.most = max(self.most, gpu_bytes())
            time.sleep(0.0005)

    def stop(self) -> int:
        self.most = max(self.most, gpu_bytes())
        self._over.set()
        self.join()
        return self.most


class TestIndirectionEndurance(IndirectionTestCase):
    def assertSteady(self, step, rounds, tenth=10):
        """Memory and handles after all rounds are as after a tenth of them."""
        first = max(20, rounds // tenth)
        for call in range(first):
            step(call)
        torch.cuda.synchronize()
        before = handles(), gpu_bytes(), torch.cuda.memory_allocated(), host_bytes()
        seen, call = [before[0][1]], first
        for part in range(1, PARTS + 1):
            while call < first + (rounds - first) * part // PARTS:
                step(call)
                call += 1
            seen.append(handles()[1])
        torch.cuda.synchronize()
        files, gpu, allocated, host = handles()[0], gpu_bytes(), torch.cuda.memory_allocated(), host_bytes()
        self.assertLessEqual(files, before[0][0])
        # What grows does so in most parts.
        growth = statistics.median(later.total() - earlier.total() for earlier, later in itertools.pairwise(seen))
        self.assertLess(growth * PARTS, 500, str((seen[-1] - seen[0]).most_common(20)))
        self.assertLessEqual(gpu - before[1], 2 * MIB)
        self.assertEqual(allocated, before[2])
        self.assertLess(host - before[3], 8 * MIB)

    def test_fresh_addresses(self):
        def program(cache, x, w, position):
            cache.index_copy_(0, position, x)
            return (cache @ w).softmax(1).sum(0), x

        graphed = compiled(program).graphed
        memory = torch.randn(32 * MIB, device=self.device)
        w = torch.randn(64, 32, device=self.device)
        torch.cuda.synchronize()

        def step(call):
            # 128 floats are 512 bytes: as aligned as the allocator's memory, and no two calls have the same address.
            begin = call * 128 % (30 * MIB)
            cache = memory[begin : begin + 256 * 64].view(256, 64)
            x = memory[begin + 256 * 64 : begin + 257 * 64].view(1, 64)
            position = torch.full((1,), call % 256, device=self.device)
            torch.compiler.cudagraph_mark_step_begin()
            result, same = graphed(cache, x, w, position)
            assert same.data_ptr() == x.data_ptr()
            if call % 500 == 3:  # the first time is at the recording, which frees the workspace for matmuls
                self.assertEqual(cache[call % 256], x[0])
                self.assertEqual(result, (cache @ w).softmax(1).sum(0))

        self.assertSteady(step, REPLAYS)
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.copied_bytes, facts.ungraphed_calls), (1, 0, 0), str(facts))
        self.assertEqual(facts.replays, REPLAYS - 2)

    def test_recordings_that_come_and_go(self):
        """Ranges, graphs and pool memory are freed with their functions."""

        def step(call):
            torch._dynamo.reset()
            graphed = compiled(lambda x, c: (c.add_(x), x.sin() @ c)[1]).graphed
            for _ in marked(range(4)):
                graphed(torch.ones(64, 64, device=self.device), torch.ones(64, 64, device=self.device))
            del graphed
            reset()

        for call in range(6):
            step(call)
        files, gpu, host = handles()[0], gpu_bytes(), host_bytes()
        for call in range(30):
            step(call)
        self.assertLessEqual(handles()[0], files)
        self.assertLessEqual(gpu_bytes() - gpu, 2 * MIB)
        self.assertLess(host_bytes() - host, 64 * MIB)

    def peak(self, flag, program, sizes):
        """The most GPU memory in use from the first call on, and that at the end, above the use before."""
        reset()
        inputs = [torch.ones(size // 4, device=self.device) for size in sizes]
        torch.cuda.synchronize()
        with torch._inductor.config.patch({FLAG: flag}):
            graphed = compiled(program, dynamic=False).graphed
            graphed(*[x[:1024].clone() for x in inputs])  # loads and compiles everything that a process does once
            torch.cuda.synchronize()
            before = gpu_bytes()
            watch = Peak()
            watch.start()
            for _ in marked(range(6)):
                graphed(*inputs)
            torch.cuda.synchronize()
            left = gpu_bytes() - before
        return watch.stop() - before, left

    def test_peak_memory(self):
        def program(*xs):
            return sum(x.sin().sum() for x in xs)

        for name, sizes in (("one large", [512 * MIB]), ("several", [64 * MIB] * 4), ("small", [4096] * 16)):
            with self.subTest(name):
                upstream, ours = (self.peak(flag, program, sizes) for flag in ("off", self.indirection))
                for what, theirs, mine in zip(("peak", "left"), upstream, ours, strict=True):
                    self.assertLessEqual(mine, theirs + 4 * MIB, f"{what}: {mine}, upstream {theirs}")
                if sum(sizes) > MAX_PIECE_NBYTES:
                    # The memory of the placeholders during the recording.
                    saved = sum(sizes) - max(MAX_PIECE_NBYTES, max(sizes) // MAX_MAPPINGS)
                    self.assertLessEqual(ours[0], upstream[0] - saved + 4 * MIB, f"{ours}, upstream {upstream}")
                    self.assertLessEqual(ours[1], upstream[1] - sum(sizes) + 4 * MIB, f"{ours}, upstream {upstream}")


class TestEnduranceByTable(TestIndirectionEndurance):
    indirection = "table"

    def test_fresh_addresses(self):
        super().test_fresh_addresses()
        self.assertIn("table", Facts.now().routes)


STEPS = int(os.environ.get("PYGRAPH_STEPS", "10000"))
LONGEST = 64  # steps that an output is kept


class TestKeptOutputsEndurance(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.drawn = random.Random(7)
        self.held: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)  # by their last step
        torch.manual_seed(7)

    def keep(self, step: int, outputs: Any) -> None:
        """Keeps a random half of the outputs, or views of them, and compares those that were kept until this step."""
        for output in outputs:
            if self.drawn.random() < 0.5:
                kept = output[1:] if self.drawn.random() < 0.3 else output
                self.held[step + self.drawn.randrange(LONGEST)].append((kept, kept.clone()))
        found = self.held.pop(step, [])
        if found:
            same = torch.stack([(kept == wanted).all() for kept, wanted in found])
            self.assertTrue(bool(same.all()), f"step {step}: an output has changed")

    def assertSteady(self, step: Any) -> None:
        """After a tenth of the steps, memory does not grow."""
        first = max(4 * LONGEST, STEPS // 10)
        for number in range(first):
            step(number)
        before = self.in_use()
        for number in range(first, STEPS):
            step(number)
        after = self.in_use()
        for name, value in after.items():
            self.assertLess(value - before[name], 8 * MIB, f"{name}: {before} -> {after}")

    def in_use(self) -> dict[str, int]:
        gc.collect()
        torch.cuda.synchronize()
        held = sum(
            kept.untyped_storage().nbytes() + wanted.nbytes for some in self.held.values() for kept, wanted in some
        )
        allocated = torch.cuda.memory_allocated() - held
        return {"allocated": allocated, "GPU": gpu_bytes(), "host": host_bytes()}

    def test_inference(self) -> None:
        weight = torch.randn(32, 32, device=self.device)
        graphed = torch.compile(lambda x: (x @ weight, (x + 1).sin(), x.sum(0)), mode="reduce-overhead")

        def step(number: int) -> None:
            with torch.no_grad():
                self.keep(number, graphed(torch.randn(16, 32, device=self.device)))

        self.assertSteady(step)

    def test_training(self) -> None:
        layer = torch.nn.Linear(32, 32, device=self.device)
        graphed = torch.compile(lambda x: layer(x).tanh().square().mean(1), mode="reduce-overhead")

        def step(number: int) -> None:
            layer.zero_grad()
            loss = graphed(torch.randn(16, 32, device=self.device))
            loss.sum().backward()
            gradients = [parameter.grad for parameter in layer.parameters()]
            self.keep(number, [loss.detach(), *gradients])

        self.assertSteady(step)


if __name__ == "__main__":
    run_tests()
