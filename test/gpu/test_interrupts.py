"""A program that catches KeyboardInterrupt goes on as if it had not come. Each runs in a process of its own."""

from __future__ import annotations

from indirection import KeptTestCase
from new_program import ROOT, printed
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

# Compiles, then gets real signals while it makes steps, and then none.
PROGRAM = """
import json, os, signal, sys, threading, time
import torch
import pygraph_trees

kind, per_second, seconds, dims = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
layers = [torch.nn.Linear(dims, dims).cuda() for _ in range(4)]
parameters = [p for layer in layers for p in layer.parameters()]

def plain(x):
    for layer in layers:
        x = torch.tanh(layer(x)) + x
    return x, x[1:]

compiled = torch.compile(plain, mode="reduce-overhead", dynamic=False)
kept = []

def step(rows):
    x = torch.randn(rows, dims, device="cuda")
    if kind == "inference":
        with torch.no_grad():
            return compiled(x), plain(x)
    y, part = compiled(x)
    loss = y.square().mean() + part.sum() * 1e-3
    if kind == "kept":
        kept.append(y.detach())
        del kept[:-3]
    loss.backward()
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    y, part = plain(x)
    wanted = torch.autograd.grad(y.square().mean() + part.sum() * 1e-3, parameters)
    return found, wanted

def check(rows):
    for one, other in zip(*step(rows)):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)

SIZES = (4, 9, 17)
for rows in SIZES:
    step(rows)  # compiled, and warmed up
stop, armed, sent = threading.Event(), False, 0

def interrupt(number, frame):
    if not armed:  # the loop below has no place for an interrupt
        return
    while frame is not None:
        if frame.f_code.co_filename.endswith("convert_frame.py"):
            return  # torch compiles once more, and its C++ code may abort
        frame = frame.f_back
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)

def send():
    global sent
    while not stop.wait(1 / per_second):
        os.kill(os.getpid(), signal.SIGINT)
        sent += 1

def in_torchs_generator(cause):
    # Whether torch before 2.13 ignored an interrupt in the generator that it gives to increment_version.
    code = cause.__traceback__.tb_frame.f_code if isinstance(cause, KeyboardInterrupt) else interrupt.__code__
    return code.co_name == "<genexpr>" and code.co_filename.endswith("runtime_wrappers.py")

caught, done, until, problems = 0, 0, time.monotonic() + seconds, []
thread = threading.Thread(target=send, daemon=True)
thread.start()
while (left := until - time.monotonic()) > 0 or (caught < 20 and left > -60):  # a busy machine takes longer
    try:
        armed = True
        check(SIZES[done % 3])
        armed = False
        done += 1
    except KeyboardInterrupt:
        armed = False
        caught += 1
    except Exception as error:
        armed = False
        if in_torchs_generator(error.__cause__):
            caught += 1
        else:
            problems.append(f"{type(error).__name__}: {error}"[:300])
            done += 1
    for p in parameters:
        p.grad = None
stop.set()
thread.join()
for p in parameters:
    p.grad = None
for number in range(12):
    check(SIZES[number % 3])
before = [sum(r.replays for r in f.recordings) for f in pygraph_trees.report().functions]
for number in range(6):
    check(SIZES[number % 3])
after = [sum(r.replays for r in f.recordings) for f in pygraph_trees.report().functions]
print(json.dumps({
    "sent": sent, "caught": caught, "done": done, "problems": problems[:5],
    "replays": [a - b for a, b in zip(after, before)],
    "recordings": [len(f.recordings) for f in pygraph_trees.report().functions],
    "reasons": [f.ungraphed_reason for f in pygraph_trees.report().functions],
}))
"""

# Interrupts a warm-up (0) or a recording (1) at each call and return of the trees' code, and looks at torch's state.
AT_EACH_CALL = """
import itertools, json, sys, time
import torch
from torch._inductor import cudagraph_trees
from fuzzing.check import left_behind
from fuzzing.faults import Fault

def boxed(inputs):
    x, y = inputs
    inputs.clear()
    return [x * y + 1, x @ x]

problems, interrupts, was_interrupted, until = [], 0, True, time.monotonic() + 40
x, y = torch.ones(32, 32, device="cuda"), torch.full((32, 32), 2.0, device="cuda")
for moment in itertools.count(1):
    left = until - time.monotonic()
    if problems or not was_interrupted or left < (0 if interrupts >= 20 else -160):  # a busy machine takes longer
        break
    if moment % 40 == 1:
        torch._dynamo.reset()
    function = cudagraph_trees.cudagraphify_impl(
        boxed, [x, y], (), device_index=0, is_backward=False, is_inference=True, stack_traces=[None, None]
    )
    for call in range(4):
        y.fill_(call)
        torch.compiler.cudagraph_mark_step_begin()
        if call != int(sys.argv[1]):
            found = [output.flatten()[0].item() for output in function([x, y])]
            problems += [] if found == [call + 1.0, 32.0] else [f"moment {moment}, call {call}: {found}"]
            continue
        try:
            with Fault("at a call", call, moment).injected(x.device):
                function([x, y])
            was_interrupted = False
        except KeyboardInterrupt:
            interrupts += 1
        left = "a capture" if torch.cuda.is_current_stream_capturing() else left_behind(torch.empty(9, device="cuda"))
        if left:
            problems.append(f"moment {moment}: {left}")
            break
print(json.dumps({"problems": problems[:5], "interrupts": interrupts}))
"""


@instantiate_parametrized_tests
class TestInterrupts(KeptTestCase):
    @parametrize("kind", ["inference", "training", "kept"])
    @parametrize("per_second, dims", [(100, 64), (23, 256)])
    def test_signals_in_a_loop(self, kind: str, per_second: float, dims: int) -> None:
        """Values are right during and after, and all functions are graphed afterwards.

        Torch may compile one once more. If hardly any call is uninterrupted, as in a machine that is busy, the kept
        outputs differ from call to call, and each needs a recording.
        """
        found = printed(PROGRAM, kind, per_second, 12, dims, PYGRAPH_SELECTIVE="always")
        self.assertFalse(found["problems"], str(found))
        self.assertGreaterEqual(found["caught"], 20, str(found))
        self.assertGreaterEqual(sum(map(bool, found["replays"])), 3 if kind == "inference" else 6, str(found))
        self.assertEqual(set(found["reasons"]), {None}, str(found))
        if found["done"] > found["caught"] // 4:
            self.assertLess(max(found["recordings"]), 12, str(found))

    @parametrize("call", [0, 1])
    def test_exceptions_that_are_not_deferred(self, call: int) -> None:
        """As of a handler of another signal than SIGINT: the program's memory and stream are its own afterwards."""
        found = printed(AT_EACH_CALL, call, folders=(ROOT / "tools",), PYGRAPH_SELECTIVE="always")
        self.assertFalse(found["problems"], str(found))
        self.assertGreaterEqual(found["interrupts"], 20, str(found))


if __name__ == "__main__":
    run_tests()
