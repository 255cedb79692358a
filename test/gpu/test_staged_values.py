"""CPU values in graphs: one copy or node for all of them, right values in each call, no wait that the program lacks."""

import contextlib
import time
from unittest import mock

import torch
from indirection import Facts, reset
from isolated import run_isolated
from parity import OURS, marked
from placement import PlacementTestCase
from selection import CALLS, SelectionTestCase, decided
from torch._inductor import config, cudagraph_trees
from torch.testing._internal.common_utils import run_tests

import pygraph_trees
from pygraph_trees.cuda.graph_nodes import NodeKind
from pygraph_trees.indirection import staging
from pygraph_trees.indirection.addresses import Addresses
from pygraph_trees.native import binding
from pygraph_trees.selection.decision import Execution
from pygraph_trees.trees.recordings.recording import Recording

NUMBERS = 48
SLEEP = 2_000_000_000  # cycles, about a second
DTYPES = (torch.float32, torch.int64, torch.float64, torch.bool, torch.bfloat16, torch.int32)


def of_numbers(x, *numbers):
    """A program in which a separate kernel, of its own size, reads each number."""
    return tuple(x[: 64 + position].sin() * number for position, number in enumerate(numbers))


def numbers(call):
    return [torch.tensor((call * 7 + n) % 11 - 3).to(DTYPES[n % len(DTYPES)]) for n in range(NUMBERS)]


def copies():
    """The number of copies in the graph that was replayed last."""
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return manager.current_node.live.kinds[NodeKind.MEMCPY]


class Busy:
    """Gives the GPU work for a second; ``waited`` tells whether the code waited for it."""

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        self._done = torch.cuda.Event()
        self._done.record()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self._start
        self.waited = self._done.query()
        torch.cuda.synchronize()


class TestOneCopy(PlacementTestCase):
    def check_calls(self, fn, make, expected_copies, calls=12, **options):
        """Makes calls without a wait, each with its own values; one recording has one copy for all of them."""
        graphed = torch.compile(fn, mode="reduce-overhead", dynamic=False, **options)
        x = torch.rand(256, device=self.device)
        given = [make(call) for call in range(calls)]
        wanted = [fn(x, *values) for values in given]
        found = []
        for call, values in marked(enumerate(given)):
            if call == 3:
                torch.cuda._sleep(SLEEP // 10)
            found.append([output.clone() for output in graphed(x, *values)])
        if expected_copies is not None:
            self.assertEqual(copies(), expected_copies)
        for call, (one, other) in enumerate(zip(found, wanted, strict=True)):
            self.assertEqual(one, list(other), msg=lambda m, call=call: f"call {call}: {m}")
        facts = Facts.now()
        self.assertGraphed(facts, calls)
        self.assertEqual((facts.recordings, facts.copied_bytes), (1, 0))

    def test_48_numbers(self):
        """48 numbers of several types, each read by its own kernel, share one node that holds them."""
        self.check_calls(of_numbers, numbers, 0)
        (function,) = pygraph_trees.report().functions
        self.assertGreaterEqual(function.recordings[0].kernels, NUMBERS + 1)
        self.assertEqual(Facts.now().routes.count("stage"), NUMBERS)
        for count in (2, 1):  # two are the fewest that share a node
            with self.subTest(count):
                reset()
                self.check_calls(of_numbers, lambda call: numbers(call)[:count], 0)  # noqa: B023

    def test_sizes_and_layouts(self):
        """Vectors, matrices (transposed, with gaps, expanded), ids and a mask, up to 320 KiB, are staged."""

        def fn(x, vector, matrix, turned, gaps, wide, ids, mask, large):
            there = vector.to("cuda"), matrix.to("cuda"), turned.to("cuda"), gaps.to("cuda"), wide.to("cuda")
            return (
                *(part.double().sin().sum() for part in there),
                x[ids],
                x[:64] * mask.to("cuda"),
                large.to("cuda").sum(),
            )

        def make(call):
            base = torch.arange(4096.0).view(64, 64) + call
            ids, mask = (torch.arange(100) * (call + 1)) % 256, torch.arange(64) % (call + 2) == 0
            some = base[0].clone(), base.clone(), base.t(), base[::2, ::2], base[:, :1].expand(64, 64)
            return [*some, ids, mask, torch.full((80 << 10,), float(call))]

        self.check_calls(fn, make, 1)

    def test_outputs_in_memory_of_staged_values(self):
        """Kernels write in place to values that are no longer needed, but each output has its own storage."""

        def fn(x, *values):
            return tuple(x * value.to("cuda") + position for position, value in enumerate(values))

        self.check_calls(fn, lambda call: [torch.full((256,), float(call + n)) for n in range(5)], None)
        graphed = torch.compile(fn, mode="reduce-overhead", dynamic=False)
        x = torch.rand(256, device=self.device)
        for call in marked(range(4)):
            found = graphed(x, *(torch.full((256,), float(call + n)) for n in range(5)))
            storages = [output.untyped_storage() for output in found]
            self.assertEqual(len({storage.data_ptr() for storage in storages}), 5)
            self.assertEqual({storage.nbytes() for storage in storages}, {1024})

    def test_pinned_memory_has_a_copy_of_its_own(self):
        """Pinned memory is read in its own place if the program waits for no copy; no other code overwrites it."""

        def fn(x, p, *values):
            return (x * p.to("cuda", non_blocking=True), *(x * value for value in values))

        def make(call):
            return [torch.full((256,), float(call)).pin_memory(), *numbers(call)[:4]]

        self.check_calls(fn, make, 2)

    def test_inputs_that_are_pinned_in_some_calls(self):
        """An input may be pinned after it was recorded from other memory, and the reverse."""

        def fn(x, p, s, t):
            return x * p.to("cuda", non_blocking=True), x * s, x + t

        for first in (True, False):
            with self.subTest(pinned_first=first):
                reset()
                graphed = torch.compile(fn, mode="reduce-overhead", dynamic=False)
                x, found = torch.rand(256, device=self.device), []
                for call in marked(range(12)):
                    p = torch.full((256,), float(call))
                    p = p.pin_memory() if (call < 4) is first else p
                    values = torch.tensor(float(call)), torch.tensor(float(-call))
                    found.append([o.clone() for o in graphed(x, p, *values)])
                for call, one in enumerate(found):
                    self.assertEqual(one, [x * call, x * call, x - call])

    def test_training(self):
        """The forward and the backward of a training step read numbers from the CPU."""

        def fn(x, w, *values):
            return sum((x * w * value).sin().sum() for value in values)

        graphed = torch.compile(fn, mode="reduce-overhead", dynamic=False)
        x = torch.rand(256, device=self.device)
        for call in marked(range(8)):
            values = [value for value in numbers(call) if value.is_floating_point()]
            w, own = (torch.full((256,), 0.5, device=self.device, requires_grad=True) for _ in range(2))
            graphed(x, w, *values).backward()
            fn(x, own, *values).backward()
            self.assertEqual(w.grad, own.grad, rtol=1e-4, atol=1e-3)

    def test_a_value_that_a_later_partition_reads(self):
        """A value for a later partition is an output of the first one, with its own memory."""

        def fn(x, v, s):
            there = v.to("cuda")
            first = (x * there * s).sin()
            chosen = first.cpu().sort().values.to("cuda")  # the CPU sorts, between the partitions
            return first, chosen * there[0] * s, there + 1

        graphed = torch.compile(fn, mode="reduce-overhead", dynamic=False)
        for call in marked(range(8)):
            x, v, s = torch.rand(256, device=self.device), torch.full((256,), float(call)), torch.tensor(float(call))
            self.assertEqual([o.clone() for o in graphed(x, v, s)], list(fn(x, v, s)))

    def test_under_verification(self):
        with config.patch({"triton.pygraph_verify": "on"}):
            self.check_calls(of_numbers, numbers, 0)

    def test_a_stream_of_the_callers(self):
        graphed = torch.compile(of_numbers, mode="reduce-overhead", dynamic=False)
        x, stream, found = torch.rand(256, device=self.device), torch.cuda.Stream(), []
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in marked(range(10)):
                if call == 4:
                    torch.cuda._sleep(SLEEP // 10)
                found.append([o.clone() for o in graphed(x, *numbers(call))])
        stream.synchronize()
        for call, one in enumerate(found):
            self.assertEqual(one, list(of_numbers(x, *numbers(call))))


def graphed_of(fn):
    return torch.compile(fn, mode="reduce-overhead", dynamic=False)


def actor():
    """A small network whose observations arrive on the CPU."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 8)).to("cuda")
    return lambda observations: model(observations.to("cuda"))


class TestByValue(PlacementTestCase):
    """Small values are parameters of a node: C++ replays such calls, which wait for nothing."""

    @contextlib.contextmanager
    def in_cpp(self, calls):
        """The calls are replayed in C++, and no code in Python is asked."""
        if binding.extension is None:
            self.skipTest("not built for this torch")
        wrong = AssertionError("C++ does it")
        asked, fast, in_python = binding.extension.counts()
        with (
            mock.patch.object(Addresses, "prepare", side_effect=wrong),
            mock.patch.object(Recording, "replay", side_effect=wrong),
        ):
            yield
        self.assertEqual(binding.extension.counts(), (asked + calls, fast + calls, in_python))

    def check_in_cpp(self, fn, make, calls=50):
        """Makes calls without a wait; the memory of each call's values is written to at once."""
        graphed, found, x = graphed_of(fn), [], torch.rand(512, device=self.device)
        for call in marked(range(5)):
            graphed(x, *make(call))
        given = [make(call) for call in range(calls)]
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP // 10)
        with self.in_cpp(calls):
            for values in marked(given):
                own = [value.clone() for value in values]
                found.append([output.clone() for output in graphed(x, *own)])
                for value in own:
                    value.zero_()
        for one, values in zip(found, given, strict=True):
            self.assertEqual(one, list(fn(x, *values)))
        self.assertEqual((copies(), Facts.now().recordings), (0, 1))

    def test_observations(self):
        """200 calls without a wait give the bits of calls with waits, which are close to eager's."""
        fn = actor()
        graphed, memory, found = graphed_of(fn), torch.empty(32, 64), []
        given = [torch.randn(32, 64) for _ in range(200)]
        with torch.no_grad():
            wanted = []
            for values in marked(given):
                wanted.append(graphed(values).clone())
                torch.cuda.synchronize()
            self.assertEqual(wanted, [fn(values) for values in given], rtol=1e-3, atol=1e-4)
            with Busy() as busy, self.in_cpp(len(given)):
                for values in marked(given):
                    memory.copy_(values)
                    found.append(graphed(memory).clone())
                memory.fill_(float("nan"))
        self.assertFalse(busy.waited)
        self.assertEqual(found, wanted, rtol=0, atol=0)
        self.assertEqual(copies(), 0)

    def test_numbers(self):
        self.check_in_cpp(of_numbers, numbers)

    def test_types_and_layouts(self):
        def fn(x, ids, mask, half, turned, wide):
            return x[ids], x[:16] * mask.to("cuda"), half.to("cuda") + 1, turned.to("cuda") + 1, wide.to("cuda") + 1

        def make(call):
            base, small = torch.arange(64.0).view(8, 8) + call, torch.arange(16) * (call + 1)
            return [small % 512, small % 3 == 0, (small / 7).bfloat16(), base.t(), base.double()]

        self.check_in_cpp(fn, make)

    def test_each_width_and_the_limit(self):
        """Every byte arrives, whatever the size; a value above 32,736 bytes is copied from a buffer."""
        for count in (1, 3, 16, 255, 256, 257, 1000, 1024, 4095, 4096, 16384, 16385, 32736, 32737):
            with self.subTest(count):
                reset()
                graphed, found = graphed_of(lambda x, v: x + v.to("cuda")), []
                x = torch.zeros(count, dtype=torch.uint8, device=self.device)
                given = [(torch.arange(count) * 7 + call).to(torch.uint8) for call in range(8)]
                for values in marked(given):
                    found.append(graphed(x, values).clone())
                self.assertEqual([output.cpu() for output in found], given)
                self.assertEqual(copies(), int(count > 32736))

    def test_pinned_memory_that_the_gpu_has_still_to_write(self):
        """A value may be pinned though the recorded one was not: it is read after the GPU has written it."""
        for non_blocking in (True, False):
            with self.subTest(non_blocking=non_blocking):
                reset()
                graphed = graphed_of(lambda x, v: x * v.to("cuda", non_blocking=non_blocking))  # noqa: B023
                x, pinned = torch.rand(256, device=self.device), torch.zeros(256).pin_memory()
                for call in marked(range(5)):
                    graphed(x, torch.full((256,), float(call)))
                self.assertEqual(copies(), 0)
                for call in marked(range(10, 13)):
                    there = torch.full((256,), float(call), device=self.device)
                    torch.cuda._sleep(SLEEP // 10)
                    pinned.copy_(there, non_blocking=True)
                    found = graphed(x, pinned)
                    torch.cuda.synchronize()
                    pinned.zero_()
                    self.assertEqual(found, x * call)

    def test_without_the_kernel(self):
        """If the driver cannot load it, values are copied from pinned memory."""
        graphed, x = graphed_of(of_numbers), torch.rand(256, device=self.device)
        with mock.patch.object(staging, "value_kernel", return_value=None):
            for call in marked(range(8)):
                self.assertEqual(graphed(x, *numbers(call)), of_numbers(x, *numbers(call)))
        self.assertEqual(copies(), 1)


class TestWaits(SelectionTestCase):
    """Un-graphed code waits for the GPU only if the program does."""

    def test_ungraphed_under_auto(self):
        """Numbers and vectors, copied with or without a wait, do not need the GPU to be idle."""
        programs = {
            "numbers": (of_numbers, numbers),
            "copies": (
                lambda x, v, w: x * v.to("cuda", non_blocking=True) + w.to("cuda"),
                lambda call: [torch.full((256,), float(call)), torch.arange(256.0) + call],
            ),
            "pinned numbers": (lambda x, s: x * s, lambda call: [torch.tensor(float(call)).pin_memory()]),
            "pinned and later": (
                lambda x, v: x * v.to("cuda", non_blocking=True),
                lambda call: [torch.full((256,), float(call)).pin_memory()],
            ),
        }
        x = torch.rand(256, device=self.device)
        for name, (fn, make) in programs.items():
            with self.subTest(name), decided(Execution.UNGRAPHED):
                reset()
                called = torch.compile(fn, mode="reduce-overhead", dynamic=False)
                for call in marked(range(CALLS)):
                    called(x, *make(call))
                before = [f.replays for f in self.functions()]
                given = [make(call) for call in range(3)]
                found = []
                with Busy() as busy:
                    for values in marked(given):
                        found.append(called(x, *values))
                self.assertFalse(busy.waited)
                self.assertLess(busy.seconds, 0.3)
                self.assertEqual([f.replays for f in self.functions()], before)
                for one, values in zip(found, given, strict=True):
                    self.assertEqual(one, fn(x, *values))

    def test_ungraphed_memory_may_be_written_to_at_once(self):
        """A call's value does not change if its memory is written to at once, whatever work the GPU still has."""
        x, found = torch.ones(1 << 14, device=self.device), []
        with decided(Execution.UNGRAPHED):
            called = torch.compile(lambda x, v: x * v.to("cuda"), mode="reduce-overhead", dynamic=False)
            v = torch.zeros(1 << 14)
            for call in marked(range(CALLS)):
                if call >= CALLS - 5:
                    torch.cuda._sleep(SLEEP // 50)
                v.fill_(call)
                found.append(called(x, v).clone())
                v.fill_(-1)
        for call, one in enumerate(found):
            self.assertEqual((one.min().item(), one.max().item()), (call, call))


def captures(fn):
    """Runs in another process, since torch does not clean up everything after a failed capture."""

    def child(ctx):
        x = torch.rand(256, device="cuda")
        graphed = ctx.compile(fn, dynamic=False)
        for call in marked(range(5)):
            v = torch.full((256,), float(call))
            ctx.fact(f"call {call}", torch.allclose(graphed(x, v), fn(x, v)))
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                graphed(x, torch.ones(256))
        except Exception:
            ctx.fact("raised", True)
        else:
            ctx.fact("raised", False)

    return child


FLAGS_ON = {"triton.pygraph_indirection": "auto", "triton.pygraph_placement": "full"}
captures_vector = captures(lambda x, v: x * v.to("cuda"))
captures_number = captures(lambda x, v: x * v[0])


class TestGraphsOfThePrograms(PlacementTestCase):
    """A call inside a graph that the program captures."""

    def test_torch_raises_for_memory_that_nobody_holds(self):
        for name in ("captures_vector", "captures_number"):
            found = run_isolated("test_staged_values", name, OURS, config=FLAGS_ON)  # the harness turns it off
            facts = {path: leaf for path, leaf in found["facts"].items() if path.startswith("note ")}
            self.assertEqual(list(facts.values()), [True] * 6, f"{name}: {facts}, {found['errors']}, {found['lost']}")

    def test_pinned_memory_of_the_programs_is_read_at_each_replay(self):
        """As with torch, the program's graph reads the program's tensor, not a buffer that other calls write to."""
        x = torch.rand(256, device=self.device)
        graphed = torch.compile(lambda x, v: x * v.to("cuda", non_blocking=True), mode="reduce-overhead", dynamic=False)
        for call in marked(range(5)):
            self.assertEqual(graphed(x, torch.full((256,), float(call)).pin_memory()), x * call)
        v, graph = torch.ones(256).pin_memory(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = graphed(x, v)
        for call in marked(range(4)):
            graphed(x, torch.full((256,), -1.0).pin_memory())
            v.fill_(call)
            graph.replay()
            torch.cuda.synchronize()
            self.assertEqual(found, x * call)


if __name__ == "__main__":
    run_tests()
