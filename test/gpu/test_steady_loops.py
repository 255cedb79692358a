"""Steady training loops: calls take the fast path, outputs cost no allocation and no node, and values are eager's."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from indirection import OUTPUTS, KeptTestCase
from torch import nn
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.native import binding

FIRST, STEPS = 10, 12  # steps before those that are counted, and these
MICRO_BATCHES = 4


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (4, 32, 64)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    """Libraries allocate its gradients, and a step changes its buffers."""
    blocks = [m for i, o in ((3, 16), (16, 32)) for m in (nn.Conv2d(i, o, 3, 2), nn.BatchNorm2d(o), nn.ReLU())]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (8, 3, 32, 32)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), (16, 64)


MODELS = {"transformer": transformer, "cnn": cnn, "mlp": mlp}


@dataclass(slots=True)
class Training:
    """A model in training, and what its loops keep between steps."""

    model: nn.Module
    loss_of: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor  # each batch is copied into it, so that no input moves
    optimizer: torch.optim.Optimizer = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    losses: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.scaler = torch.amp.GradScaler(self.x.device.type, init_scale=2.0**10)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.x.copy_(batch)
        return self.loss_of(self.x)


def zero_grad_last(training: Training, batch: torch.Tensor) -> None:
    training.forward(batch).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def zero_grad_first(training: Training, batch: torch.Tensor) -> None:
    training.optimizer.zero_grad()
    training.forward(batch).backward()
    training.optimizer.step()


def zero_grad_after_forward(training: Training, batch: torch.Tensor) -> None:
    loss = training.forward(batch)
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()


def losses_kept(training: Training, batch: torch.Tensor) -> None:
    loss = training.forward(batch)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.losses.append(loss.detach())


def clipped(training: Training, batch: torch.Tensor) -> None:
    training.forward(batch).backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)


def scaled(training: Training, batch: torch.Tensor) -> None:
    with torch.autocast(batch.device.type, torch.float16):
        loss = training.forward(batch)
    training.scaler.scale(loss).backward()
    training.scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.optimizer.zero_grad()


def accumulated(training: Training, batch: torch.Tensor) -> None:
    for part in range(MICRO_BATCHES):
        (training.forward(batch + part) / MICRO_BATCHES).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop and what it must be like in its steady state."""

    step: Callable[[Training, torch.Tensor], None]
    is_steady: bool = True  # whether no call may take the slow path, and nothing be recorded
    is_free: bool = True  # whether outputs cost neither an allocation nor a node
    apart: float = 1e-3  # most distance of the update of all parameters from eager's, relative to eager's


LOOPS = {
    "A": Loop(zero_grad_last),
    "B": Loop(zero_grad_first),
    "C": Loop(zero_grad_after_forward),
    "E": Loop(losses_kept, is_free=False),
    "F": Loop(clipped),
    "scaled": Loop(scaled, apart=2e-2),
    "G": Loop(accumulated, is_steady=False, is_free=False),
    "A again": Loop(zero_grad_last),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Counts so far, of all functions."""

    asked: int  # calls that asked for a fast replay
    fast: int
    in_python: int
    allocations: int  # torch's
    recordings: int
    blocks_allocated: int
    blocks_given_away: int
    set_nodes: int
    at_once: int  # backwards that accumulated gradients themselves
    slow_calls: Counter[str]

    @staticmethod
    def now() -> Facts:
        report = pygraph_trees.report()
        functions = report.functions
        slow_calls: Counter[str] = Counter()
        for function in functions:
            slow_calls.update(function.slow_calls)
        return Facts(
            *binding.extension.counts(),
            allocations=torch.cuda.memory_stats()["allocation.all.allocated"],
            recordings=sum(len(function.recordings) for function in functions),
            blocks_allocated=sum(function.blocks_allocated for function in functions),
            blocks_given_away=sum(function.blocks_given_away for function in functions),
            set_nodes=sum(recording.set_nodes for function in functions for recording in function.recordings),
            at_once=report.environment.backwards.at_once,
            slow_calls=slow_calls,
        )

    def since(self, before: Facts) -> dict[str, int]:
        """The counts between two moments, without zeros; slow calls by their reasons."""
        names = ("asked", "fast", "in_python", "allocations", "recordings", "set_nodes")
        names += ("blocks_allocated", "blocks_given_away", "at_once")
        numbers = {name: getattr(self, name) - getattr(before, name) for name in names}
        slow = {f"slow: {reason}": count for reason, count in (self.slow_calls - before.slow_calls).items()}
        return {name: count for name, count in (numbers | slow).items() if count}


def parameters_of(training: Training) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in training.model.parameters()]


def norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def distance(ours: Training, eager: Training, begin: list[torch.Tensor]) -> float:
    """The distance of two models' parameters, relative to eager's distance from where both began."""
    pairs = zip(ours.model.parameters(), eager.model.parameters(), strict=True)
    apart = norm([one.detach() - other.detach() for one, other in pairs])
    changed = [one.detach() - other for one, other in zip(eager.model.parameters(), begin, strict=True)]
    return apart / norm(changed)


def make(name: str, device: torch.device) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model, and its batches."""
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    return model.to(device).train(), [torch.randn(shape, device=device) for _ in range(FIRST + STEPS)]


def training_of(model: nn.Module, batch: torch.Tensor, outputs: str | None) -> Training:
    """A copy of the model; ``outputs``: the flag's value, or None for eager."""
    own = copy.deepcopy(model)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return own(x).sin().mean()

    if outputs is not None:  # by options, since Dynamo would give two models compiled alike the same code
        loss_of = torch.compile(loss_of, options={"triton.cudagraphs": True, OUTPUTS: outputs})
    return Training(own, loss_of, torch.empty_like(batch))


@instantiate_parametrized_tests
class TestSteadyLoops(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        # With TF32, two algorithms of one convolution differ by more than the tolerance.
        flags = {"benchmark": False, "deterministic": True, "allow_tf32": False}
        self.enterContext(torch.backends.cudnn.flags(enabled=True, **flags))

    def counted(self, training: Training, loop: Loop, batches: list[torch.Tensor]) -> dict[str, int]:
        """Runs a loop, and counts over its last steps."""
        for batch in batches[:FIRST]:
            loop.step(training, batch)
        torch.cuda.synchronize()
        before = Facts.now()
        for batch in batches[FIRST:]:
            loop.step(training, batch)
        return Facts.now().since(before)

    @parametrize("name", list(MODELS))
    def test_loops_one_after_the_other(self, name: str) -> None:
        model, batches = make(name, self.device)
        ours, theirs, eager = (training_of(model, batches[0], outputs) for outputs in ("keep", "upstream", None))
        for letter, loop in LOOPS.items():
            with self.subTest(loop=letter):
                for training in (ours, theirs, eager):
                    training.optimizer.zero_grad()
                    training.losses.clear()
                eager.model.load_state_dict(ours.model.state_dict())
                begin = parameters_of(eager)
                for batch in batches:
                    loop.step(eager, batch)
                found = self.counted(ours, loop, batches)
                self.assertLess(distance(ours, eager, begin), loop.apart)
                self.assertEqual(len(ours.losses), len(eager.losses))
                for loss, wanted in zip(ours.losses, eager.losses, strict=True):
                    self.assertEqual(loss, wanted, atol=1e-4, rtol=1e-4)
                if loop.is_steady:
                    self.assertSteady(found)
                if loop.is_free:
                    self.assertFree(found, self.counted(theirs, loop, batches))

    def assertSteady(self, found: dict[str, int]) -> None:
        """Each forward and each backward was replayed by C++, and accumulated its gradients itself."""
        self.assertEqual(found["at_once"], STEPS, found)
        self.assertEqual(found["asked"], 2 * STEPS, found)
        self.assertEqual(found["fast"], 2 * STEPS, found)
        slow = [what for what in found if what in ("in_python", "recordings") or what.startswith("slow: ")]
        self.assertEqual(slow, [], found)

    def assertFree(self, found: dict[str, int], as_upstream: dict[str, int]) -> None:
        """Outputs cost nothing, and torch allocates no more than if they were overwritten."""
        costs = [what for what in ("blocks_allocated", "blocks_given_away", "set_nodes") if what in found]
        self.assertEqual(costs, [], found)
        self.assertLessEqual(found.get("allocations", 0), as_upstream.get("allocations", 0), (found, as_upstream))


if __name__ == "__main__":
    run_tests()
