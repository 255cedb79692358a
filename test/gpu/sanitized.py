"""A short program that patches addresses, keeps outputs, stages inputs and uses a table, for ``compute-sanitizer``.

It takes about a minute under a tool. CONTRIBUTING.md has the commands.
"""

from __future__ import annotations

from typing import Any

import torch

import pygraph_trees

DIMS, STEPS = 32, 8


def compiled(fn: Any, indirection: str) -> Any:
    return torch.compile(fn, options={"triton.cudagraphs": True, "triton.pygraph_indirection": indirection})


def run(indirection: str) -> None:
    def moving(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ y).relu() + x.sum()

    def staging(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return c.to("cuda") * x

    model = torch.nn.Sequential(torch.nn.Linear(DIMS, DIMS), torch.nn.Tanh(), torch.nn.Linear(DIMS, 4)).cuda()
    f, g, h = (compiled(fn, indirection) for fn in (model, moving, staging))
    kept = []
    for step in range(STEPS):
        x, y, c = (
            torch.randn(DIMS, DIMS, device="cuda"),
            torch.randn(DIMS, DIMS, device="cuda"),
            torch.randn(DIMS, DIMS),
        )
        with torch.no_grad():
            kept.append(g(x, y))
            torch.testing.assert_close(kept[-1], moving(x, y), atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(h(c, x), c.cuda() * x)
        loss = f(x).square().mean()
        if step % 2:  # gradients of two steps are accumulated, and live over a forward
            model.zero_grad()
        loss.backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    torch.manual_seed(0)
    for way in ("auto", "table"):
        torch.compiler.reset()
        run(way)
    replays = sum(recording.replays for f in pygraph_trees.report().functions for recording in f.recordings)
    print(f"{replays} replays")
