"""Programs for processes that share a folder of caches, with torch alone or with ours: see ``test_shared_caches.py``.

A process runs :func:`answer`. It compiles each program, calls it a few times and compares the results with eager. By
program, it returns the caches' counts, the number of recorded graphs, and the report's text. With torch alone it
imports only this file of the project.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

CALLS = 5
COUNTED = {
    "inductor": ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"),
    "aot_autograd": ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass", "autograd_cache_saved"),
}


def inference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w).softmax(-1)


def views(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ w
    return y.t(), y[1:], x


def staged(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.sin() * v.to(x.device) + 1


def round_trip(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * 2).cpu().to(x.device) @ w


def written(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    c.add_(x)
    return c * 2


def training(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w).tanh()


def late(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin() * 3


# By name: the function, the device of its second argument, and the options of its compilation.
PROGRAMS: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "inference": (inference, "cuda", {}),
    "of any size": (inference, "cuda", {"dynamic": True}),
    "views": (views, "cuda", {}),
    "staged": (staged, "cpu", {}),
    "round trip": (round_trip, "cuda", {}),
    "written": (written, "cuda", {}),
    "training": (training, "cuda", {}),
    "late": (late, "cuda", {}),
}
TRAINED = ("training", "late")  # the backward of "late" is compiled in the second process


def answer(request: str) -> None:
    way, number, path = json.loads(request)
    if way != "torch":
        import pygraph_trees
        from pygraph_trees.report.summary import clear

    torch._functorch.config.enable_autograd_cache = True
    torch._inductor.config.fx_graph_cache = True
    torch._inductor.config.fx_graph_remote_cache = False
    found = {}
    for name, (fn, where, options) in PROGRAMS.items():
        torch._dynamo.reset()
        counters.clear()
        if way != "torch":
            clear()
        compiled = torch.compile(fn, mode="reduce-overhead", **options)
        has_backward = name in TRAINED and not (name == "late" and number == 0)
        for call in range(CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            _compare(compiled, fn, call, where, requires_grad=name in TRAINED, has_backward=has_backward)
        found[name] = {
            "counters": {n: counters[kind][n] for kind, names in COUNTED.items() for n in names if counters[kind][n]},
            "recordings": _recordings(),
        }
        if way != "torch":
            report = pygraph_trees.report()
            found[name]["graphs"] = [[g.mode, g.dropped, str(g.partitions), str(g.placed)] for g in report.graphs]
            found[name]["replays"] = sum(r.replays for f in report.functions for r in f.recordings)
    Path(path).write_text(json.dumps(found))


def _compare(
    compiled: Callable[..., Any],
    fn: Callable[..., Any],
    call: int,
    where: str,
    *,
    requires_grad: bool,
    has_backward: bool,
) -> None:
    """Calls both on equal arguments; results, mutations and gradients must agree."""
    seen = []
    for function in (compiled, fn):
        torch.manual_seed(call)
        x = torch.randn(64, 64, device="cuda", requires_grad=requires_grad)
        w = torch.randn(64, 64, device=where, requires_grad=requires_grad)
        with torch.set_grad_enabled(requires_grad):
            out = function(x, w)
        if has_backward:
            out.sum().backward()
        outs = out if isinstance(out, tuple) else (out,)
        gradients = [x.grad.clone(), w.grad.clone()] if has_backward else []
        seen.append([*(o.detach().clone() for o in outs), x.detach(), w.detach(), *gradients])
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)  # generated kernels round at other points


def _recordings() -> int:
    """The number of recordings at the root of the process's trees."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return 0 if manager is None else sum(len(nodes) for nodes in (manager.roots or {}).values())
