"""Programs that mix CPU and GPU, with all possible work moved to the GPU, and with staged values."""

import numpy
import torch
from indirection import FLAG, VERIFY, Facts, reset
from parity import marked
from placement import CALLS_EACH, PlacementTestCase, name_of
from placement_programs import CALLS, PROGRAMS, loud, louder
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

VERIFIED = (("input", "vector"), ("number", "as it is"), ("number", "for the CPU too"), ("closed over", "indexed"))
UNSTAGED = (("input", "vector"), ("number", "as it is"), ("number", "for the CPU alone"), ("constructors", "integers"))


@instantiate_parametrized_tests
class TestPlacement(PlacementTestCase):
    @parametrize("program", PROGRAMS, name_fn=name_of)
    def test_family(self, program):
        self.check_family(program, "full")

    def test_under_verification(self):
        for program in PROGRAMS:
            if (program.family, program.name) in VERIFIED:
                with self.subTest(name_of(program)), torch._inductor.config.patch({VERIFY: "on"}):
                    reset()
                    self.check_family(program, "full")

    def test_without_addresses(self):
        """Without addresses nothing can be staged; values are copied at each call outside of the graph."""
        with torch._inductor.config.patch({FLAG: "off"}):
            for program in PROGRAMS:
                if (program.family, program.name) in UNSTAGED:
                    with self.subTest(name_of(program)):
                        reset()
                        self.assertEqual(self.check(program, "full").ungraphed_calls, 0)

    def test_any_memory_of_the_cpu(self):
        """For any kind of CPU memory, the graph reads the values that it holds at the call."""
        wide = torch.arange(4096.0).view(64, 64)
        kinds = {
            "pageable": lambda call: torch.full((64, 64), float(call)),
            "pinned": lambda call: torch.full((64, 64), float(call)).pin_memory(),
            "transposed": lambda call: (wide + call).t(),
            "a slice": lambda call: (wide + call)[:, 3:35],
            "every second one": lambda call: (wide + call)[::2],
            "expanded": lambda call: torch.full((64, 1), float(call)).expand(64, 64),
            "one element": lambda call: torch.full((1,), float(call)),
            "empty": lambda call: torch.empty(0, 64),
            "of booleans": lambda call: torch.arange(64) % (call + 2) == 0,
            "of halves": lambda call: torch.arange(64.0).to(torch.bfloat16) * call,
            "complex": lambda call: torch.full((64,), complex(call, 1)),
            "misaligned": lambda call: torch.arange(65.0)[1:] + call,
            "changed in place": lambda call: wide.add_(1),
            "changed by NumPy": lambda call: torch.from_numpy(numpy.add(wide.numpy(), 1, out=wide.numpy())),
        }
        for name, make in kinds.items():
            with self.subTest(name):
                reset()
                graphed = torch.compile(lambda x, v: (x.sin(), v.to("cuda") * 2), mode="reduce-overhead", dynamic=False)
                x = torch.rand(64, device=self.device)
                for call in marked(range(CALLS_EACH)):
                    v = make(call)
                    found = graphed(x, v)[1].clone()
                    self.assertEqual(found, v.to("cuda") * 2, rtol=0, atol=0)
                facts = Facts.now()
                self.assertGraphed(facts, CALLS_EACH)

    def test_pinned_memory_that_the_gpu_has_still_to_write(self):
        """Later readers in the program's stream get the written values: copies, also of views, and indices."""
        numbers = torch.arange(64, device=self.device)
        for name, function, integers in (
            ("all of it, not waited for", lambda x, v: x + v.to("cuda", non_blocking=True), False),
            ("all of it", lambda x, v: x + v.to("cuda"), False),
            ("view, not waited for", lambda x, v: x + v.view(8, 8).to("cuda", non_blocking=True).view(64), False),
            ("view", lambda x, v: x + v.view(8, 8).to("cuda").view(64), False),
            ("slice", lambda x, v: x[:32] + v[:32].to("cuda", non_blocking=True), False),
            ("copied to", lambda x, v: torch.zeros_like(x).copy_(v, non_blocking=True) + x, False),
            ("index", lambda x, v: x[v], True),
        ):
            reset()
            graphed = torch.compile(function, mode="reduce-overhead")
            x, v = torch.rand(64, device=self.device), torch.zeros(64, dtype=torch.int64 if integers else None)
            v = v.pin_memory()
            for call in marked(range(CALLS_EACH)):
                value = (numbers * (call + 1) % 64).to(v.dtype)
                torch.cuda._sleep(50_000_000)
                v.copy_(value, non_blocking=True)
                found = graphed(x, v).clone()
                torch.cuda.synchronize()
                self.assertEqual(found, function(x, v), rtol=0, atol=0, msg=f"{name}, call {call}")
            self.assertGraphed(Facts.now(), CALLS_EACH)

    def test_rows_of_pinned_memory_that_the_gpu_has_still_to_write(self):
        """An input with gaps is not staged, and its rows are read after the GPU has written them."""
        graphed = torch.compile(lambda x, v: x * v[3].to("cuda"), mode="reduce-overhead", dynamic=False)
        x, wide = torch.ones(256, device=self.device), torch.zeros(128, 512).pin_memory()
        for call in marked(range(CALLS_EACH)):
            value = torch.full((128, 512), float(call + 1), device=self.device)
            torch.cuda._sleep(50_000_000)
            wide.copy_(value, non_blocking=True)
            self.assertEqual(graphed(x, wide[:, :256]), x * (call + 1), rtol=0, atol=0)

    def test_pinned_memory_is_the_callers_behind_a_copy_that_is_waited_for(self):
        """A blocking copy waits for all copies of its stream, so other pinned memory has been read too."""

        def function(x, v, u):
            return x + v.to("cuda", non_blocking=True) + u.to("cuda")

        graphed = torch.compile(function, mode="reduce-overhead", dynamic=False)
        x, v = torch.zeros(64, device=self.device), torch.zeros(64).pin_memory()
        for call in marked(range(CALLS_EACH)):
            torch.cuda._sleep(50_000_000)
            v.fill_(call)
            found = graphed(x, v, torch.full((64,), 100.0)).clone()
            v.fill_(-1)
            self.assertEqual(found, torch.full_like(x, 100.0 + call), rtol=0, atol=0)
        self.assertGraphed(Facts.now(), CALLS_EACH)

    def test_pinned_memory_without_a_wait(self):
        """Queued calls each read their own values, without a wait."""
        graphed = torch.compile(lambda x, v: x + v.to("cuda", non_blocking=True), mode="reduce-overhead")
        x = torch.zeros(1 << 14, device=self.device)
        for _ in marked(range(4)):
            graphed(x, torch.zeros(1 << 14).pin_memory())
        given = [torch.full((1 << 14,), float(number)).pin_memory() for number in range(20)]
        found = []
        torch.cuda._sleep(1_000_000_000)
        done = torch.cuda.Event()
        done.record()
        for v in marked(given[:6]):
            found.append(graphed(x, v).clone())
        self.assertFalse(done.query())
        for v in marked(given[6:]):
            found.append(graphed(x, v).clone())
        del given, v
        for number, value in enumerate(found):
            self.assertEqual(value, torch.full_like(x, number), rtol=0, atol=0)

    def test_gradients_of_inputs_on_the_cpu(self):
        graphed = torch.compile(lambda x, w: (x * w.to("cuda")).sin().sum(), mode="reduce-overhead")
        for _ in marked(range(6)):
            x, w = torch.rand(64, device=self.device), torch.rand(64).requires_grad_()
            own = w.detach().clone().requires_grad_()
            graphed(x, w).backward()
            (x * own.to("cuda")).sin().sum().backward()
            self.assertEqual(w.grad, own.grad)

    def test_freed_inputs(self):
        """No replay reads or writes an earlier call's input after it is freed."""
        busy = torch.randn(4096, 4096, device=self.device)
        graphed = torch.compile(lambda x, v: x + v.to("cuda"), mode="reduce-overhead")
        x, found = torch.zeros(1 << 16, device=self.device), []
        for call in marked(range(30)):
            for _ in range(5):
                busy = (busy @ busy).clamp(-1, 1)
            v = torch.full((1 << 16,), float(call))
            found.append(graphed(x, v).clone())
            del v
            reused = torch.full((1 << 16,), -1.0)
            self.assertEqual(reused.min().item(), -1.0)
        torch.cuda.synchronize()
        self.assertEqual(reused, torch.full((1 << 16,), -1.0))
        for call, one in enumerate(found):
            self.assertEqual((one.min().item(), one.max().item()), (call, call))

    def test_a_program_may_write_to_its_tensor_as_soon_as_a_call_is_done(self):
        """It holds for pinned memory too, which the GPU could read later: staged, copied outside, and un-graphed."""
        busy = torch.randn(4096, 4096, device=self.device)
        for count, selective in ((64, "always"), (1 << 18, "always"), (64, "never")):
            with (
                self.subTest(count=count, selective=selective),
                torch._inductor.config.patch({"triton.pygraph_selective": selective}),
            ):
                reset()
                graphed = torch.compile(lambda x, v: x + v.to("cuda"), mode="reduce-overhead", dynamic=False)
                x, v, found = torch.zeros(count, device=self.device), torch.zeros(count).pin_memory(), []
                for call in marked(range(CALLS_EACH)):
                    if call:  # the first call compiles, and the GPU would finish meanwhile
                        for _ in range(20):
                            busy = (busy @ busy).clamp(-1, 1)
                    v.fill_(call)
                    found.append(graphed(x, v).clone())
                v.fill_(-1)
                for call, one in enumerate(found):
                    self.assertEqual((one.min().item(), one.max().item()), (call, call))

    def test_branches(self):
        graphed = torch.compile(
            lambda x, v: (
                torch.cond(x.sum() > 0, lambda x, v: x * v.to("cuda"), lambda x, v: x - v.to("cuda"), (x, v)) + 1
            ),
            mode="reduce-overhead",
        )
        for call in marked(range(CALLS_EACH)):
            x, v = torch.full((64,), call - 2.5, device=self.device), torch.full((64,), float(call))
            wanted = (x * call if call > 2 else x - call) + 1
            self.assertEqual(graphed(x, v), wanted)

    def test_side_effects_keep_their_order(self):
        """Two operators and a write between them to their input keep their order; the first result is read last."""

        def program(x, v):
            first = loud(v)
            v.add_(1)
            second = louder(v)
            return (x.sin() + second.to("cuda")) * first.to("cuda")

        graphed = torch.compile(program, mode="reduce-overhead")
        v, own = torch.zeros(64), torch.zeros(64)
        for call in marked(range(CALLS_EACH)):
            x = torch.rand(64, device=self.device)
            CALLS.clear()
            found = graphed(x, v)
            self.assertEqual(CALLS, [("loud", 64.0 * call), ("louder", 64.0 * (call + 1))])
            self.assertEqual(found, program(x, own))
            self.assertEqual(CALLS[2:], CALLS[:2])
            self.assertEqual(v, own, rtol=0, atol=0)
        self.assertGraphed(Facts.now(), CALLS_EACH)


if __name__ == "__main__":
    run_tests()
