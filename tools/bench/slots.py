"""The cost, for a kernel, of taking pointers from slots of a table of addresses.

usage: python tools/bench/slots.py [--rounds N] [--sizes N,N] [--block N] [--out FILE]

A Triton kernel adds up n inputs given as pointers; its variant takes n slots that hold them. Each is captured many
times into a graph, and the graphs alternate. A figure is one kernel's GPU time in µs, the median over rounds: with few
elements the launch's, with many the memory's.
"""

from __future__ import annotations

import argparse
import linecache
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

from bench.figures import has_gpu, write_figures
from pygraph_trees.indirection.table.variants import with_slots

COUNTS = (1, 8, 32)
SIZES = (1 << 10, 1 << 20)  # elements of each input
BLOCK = 1024
_KERNELS = 200  # in a graph


class Compiled(NamedTuple):
    """A kernel, and its variant with slots."""

    direct: Any
    slotted: Any


def source(count: int, block: int = BLOCK) -> str:
    """A kernel with ``count`` input pointers, an output pointer, and the number of elements."""
    pointers = [f"in_ptr{i}" for i in range(count)]
    lines = [
        f"def add_{count}({', '.join(pointers)}, out_ptr, xnumel):",
        f"    x = tl.program_id(0) * {block} + tl.arange(0, {block})",
        "    mask = x < xnumel",
        *(f"    value{i} = tl.load({pointer} + x, mask)" for i, pointer in enumerate(pointers)),
        f"    tl.store(out_ptr + x, {' + '.join(f'value{i}' for i in range(count))}, mask)",
    ]
    return "\n".join([*lines, ""])


def compiled(count: int, target: Any, block: int = BLOCK) -> Compiled:
    """The kernels compiled for a GPU, which may be absent."""
    import triton
    from triton.compiler import ASTSource

    path = f"<slots_{count}_{block}>"
    text = source(count, block)
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # where triton.jit looks
    names: dict[str, Any] = {"__name__": __name__, "tl": triton.language}
    exec(compile(text, path, "exec", dont_inherit=True), names)
    fn = triton.jit(names[f"add_{count}"])
    pointers = [f"in_ptr{i}" for i in range(count)]
    signature = {**dict.fromkeys([*pointers, "out_ptr"], "*fp32"), "xnumel": "i32"}
    attrs: dict[tuple[int, ...], Any] = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    variant = with_slots(fn, signature, {}, attrs, pointers)
    sources = ASTSource(fn, signature, {}, attrs), ASTSource(variant.fn, variant.signature, {}, variant.attrs)
    return Compiled(*(triton.compile(one, target=target, options={"num_warps": 4}) for one in sources))


def measure(count: int, size: int, rounds: int, block: int = BLOCK) -> dict[str, Any]:
    """GPU time of one of many in a graph, for both kernels, and whether their results are equal."""
    import triton

    kernels = compiled(count, triton.runtime.driver.active.get_current_target(), block)
    inputs = [torch.randn(size, device="cuda") for _ in range(count)]
    slots = torch.tensor([value.data_ptr() for value in inputs], dtype=torch.int64, device="cuda")
    grid = (-(-size // block), 1, 1)
    outputs = [torch.empty(size, device="cuda") for _ in kernels]
    given = (inputs, [slots[i : i + 1] for i in range(count)])
    graphs = [
        _graph(lambda kernel=kernel, arguments=arguments, output=output: kernel[grid](*arguments, output, size))
        for kernel, arguments, output in zip(kernels, given, outputs, strict=True)
    ]
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            samples[which].append(_us(graphs[which]) / _KERNELS)
    direct, slotted = map(median, samples)
    return {
        "pointers": count,
        "elements": size,
        "block": block,
        "direct_us": direct,
        "slots_us": slotted,
        "difference_us": slotted - direct,
        "registers": [getattr(kernel, "n_regs", None) for kernel in kernels],
        "equal": bool(torch.equal(*outputs)),
        "samples": {"direct": samples[0], "slots": samples[1]},
    }


def _graph(launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of many launches of a kernel that is already loaded."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_KERNELS):
            launch()
    return graph


def _us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()  # keeps the GPU busy until the next launch
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def table(records: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'pointers':>8} {'elements':>9} {'direct':>8} {'slots':>8} {'more':>7}"]
    for r in records:
        lines.append(
            f"{r['pointers']:8} {r['elements']:9} {r['direct_us']:8.3f} {r['slots_us']:8.3f} {r['difference_us']:+7.3f}"
            + ("" if r["equal"] else "  OTHER VALUES")
        )
    return "\n".join(lines)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, got {text!r}")
    return tuple(map(int, sizes))


def _block(text: str) -> int:
    if not text.isdecimal() or int(text).bit_count() != 1:
        raise argparse.ArgumentTypeError(f"expected a power of two, got {text!r}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="elements of each input (1024,1048576)")
    parser.add_argument("--block", type=_block, default=BLOCK, help="elements of each block (1024)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not has_gpu():
        return 2
    records = [measure(count, size, options.rounds, options.block) for count in COUNTS for size in options.sizes]
    print(table(records))
    write_figures(options.out, records, rounds=options.rounds)
    return 0 if all(record["equal"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
