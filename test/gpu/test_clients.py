"""Programs in the shape of what people run: swapped adapters, an agent, streams, padded batches, simulations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from parity import Context, ParityTestCase, both_sides, in_parity, marked
from torch import nn
from torch.testing._internal.common_utils import run_tests


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.base(x) + self.up(self.down(x)))


class TestClients(ParityTestCase):
    by_address = True

    @in_parity()
    def test_compiled_regions_with_adapters_that_are_swapped(ctx: Context) -> None:
        """Of a diffusion model, only its repeated blocks are compiled; adapters are copied into place, or replaced."""
        blocks = nn.ModuleList(Adapted() for _ in range(3)).to(ctx.device)
        adapters = [[torch.randn_like(b.up.weight) for b in blocks] for _ in range(2)]
        compiled = [ctx.compile(block) for block in blocks]
        with torch.no_grad():
            for step in range(12):
                if step in (4, 8):
                    for block, adapter in zip(blocks, adapters[step == 8], strict=True):
                        if step == 4:
                            block.up.weight.copy_(adapter)
                        else:
                            block.up.weight = nn.Parameter(adapter)
                torch.compiler.cudagraph_mark_step_begin()
                x = torch.randn(4, 16, device=ctx.device)
                for block in compiled:
                    x = block(x)
                ctx.record(x)

    @in_parity()
    def test_an_agent_whose_environment_is_on_the_cpu(ctx: Context) -> None:
        actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(ctx.device)
        optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
        act, loss_of = ctx.compile(actor), ctx.compile(lambda x, target: F.mse_loss(actor(x), target))
        state = torch.zeros(8, 6)
        for step in marked(range(10)):
            # As below, a compilation leaves torch's ``deterministic`` off.
            with torch._inductor.config.patch(both_sides()):
                with torch.no_grad():
                    action = act(state.to(ctx.device)).cpu()
                ctx.record(action)
                state = state * 0.9 + F.pad(action, (0, 4)) + 0.1 * step  # the environment
                torch.compiler.cudagraph_mark_step_begin()
                loss = loss_of(state.to(ctx.device), -action.to(ctx.device))
                ctx.record(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    @in_parity()
    def test_a_stream_that_keeps_its_state(ctx: Context) -> None:
        """A recogniser gets chunks of sound, with the state and the last frames of the chunk before."""
        front, cell = nn.Conv1d(4, 8, 3).to(ctx.device), nn.GRUCell(8, 8).to(ctx.device)

        def recognise(chunk, state, last):
            frames = front(torch.cat((last, chunk), -1))
            for frame in frames.unbind(-1):
                state = cell(frame, state)
            return state.softmax(-1), state, chunk[..., -2:].clone()

        compiled = ctx.compile(recognise)
        with torch.no_grad():
            for _ in range(2):  # streams
                state, last = torch.zeros(2, 8, device=ctx.device), torch.zeros(2, 4, 2, device=ctx.device)
                for _ in marked(range(6)):
                    shown, state, last = compiled(torch.randn(2, 4, 5, device=ctx.device), state, last)
                    state, last = state.clone(), last.clone()
                    ctx.record(shown)

    @in_parity()
    def test_batches_that_are_padded_to_their_longest_text(ctx: Context) -> None:
        """Each length is compiled alone: kernels for all lengths are chosen by their speed, and may round otherwise."""
        embedding, head = nn.Embedding(64, 16).to(ctx.device), nn.Linear(16, 64).to(ctx.device)

        def loss_of(tokens):
            return F.cross_entropy(head(embedding(tokens).tanh()).flatten(0, 1), tokens.flatten())

        compiled = ctx.compile(loss_of, dynamic=False)
        for length in marked((7, 9, 7, 12, 9, 9, 7, 12, 9, 7)):
            # A compilation leaves torch's ``deterministic`` off; then the next one would choose by speed, too.
            with torch._inductor.config.patch(both_sides()):
                loss = compiled(torch.randint(64, (4, length), device=ctx.device))
                loss.backward()
            ctx.record(loss, head.weight.grad)
            head.weight.grad = head.bias.grad = embedding.weight.grad = None

    @in_parity()
    def test_a_simulation_that_looks_at_its_state(ctx: Context) -> None:
        def advance(x, v, dt):
            force = -x - 0.1 * v + torch.roll(x, 1, 0)
            v = v + dt * force
            return x + dt * v, v

        compiled = ctx.compile(advance)
        x, v, dt = torch.ones(64, device=ctx.device), torch.zeros(64, device=ctx.device), torch.tensor(0.5)
        for _ in marked(range(12)):
            x, v = (t.clone() for t in compiled(x, v, dt))
            if float(x.abs().max()) > 1.2:  # the step is halved, and the state is put back
                x, dt = x.clamp(-1, 1), dt / 2
            ctx.record(x, v)


if __name__ == "__main__":
    run_tests()
