"""Compares variants with their originals, run by Triton's interpreter on CPU tensors.

``test_variants.py`` runs this file in its own process, because Triton decides at import whether it interprets. The file
ends in ``unittest.main``, since torch's ``run_tests`` needs another package if ``CI`` is set.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
import variant_kernels as kernels
from commands import module_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase

kernels.import_without_compiler()
from pygraph_trees.indirection.table.variants import Variant, with_slots

TYPES = {"*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16, "*fp64": torch.float64}
TYPES |= {"*i64": torch.int64, "*i32": torch.int32, "*i8": torch.int8, "*u8": torch.uint8, "*i1": torch.bool}
FIXED = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def values(ty: str, *size: int) -> torch.Tensor:
    return torch.randint(0, 2 if ty == "*i1" else 5, size).to(TYPES[ty])


class InterpretedTestCase(TestCase):
    def assertSameEffect(self, fn: Any, variant: Variant, tensors: dict, rest: dict, grid: tuple, slots: Any) -> None:
        """Asserts that both leave the same bits in every tensor, not the old ones, and that slots stay as they are."""
        before, after = ({name: tensor.clone() for name, tensor in tensors.items()} for _ in range(2))
        fn[grid](**before, **rest)
        addresses = {name: torch.tensor([after[name].data_ptr()]) for name in slots}
        variant.fn[grid](**{**after, **addresses}, **rest)
        self.assertFalse(all(torch.equal(before[name], tensors[name]) for name in tensors), "nothing was done")
        for name in tensors:
            self.assertTrue(torch.equal(before[name], after[name]), name)
        for name in slots:
            self.assertEqual(addresses[name].item(), after[name].data_ptr())


class TestKernels(InterpretedTestCase):
    def test_kinds_of_kernels(self) -> None:
        size, rows, columns = kernels.SIZE, kernels.ROWS, kernels.COLUMNS
        m, n, k = kernels.M, kernels.N, kernels.K
        matrix, reduced = torch.randn(rows, columns), {"xnumel": rows, "r0_numel": columns}
        flags, bytes_ = values("*i1", size), values("*i8", 512)
        for name, given_, scalars in (
            ("pointwise", [torch.randn(size), torch.randn(size).bfloat16(), torch.zeros(size)], {"xnumel": size}),
            ("oneline", [bytes_, torch.zeros(512, dtype=torch.int64)], {}),
            ("reduction", [matrix, torch.zeros(rows)], reduced),
            ("persistent_reduction", [matrix, torch.randn(columns).half()], reduced),
            ("matmul", [torch.randn(m, k).half(), torch.randn(k, n).half(), torch.zeros(m, n)], {}),
            ("user", [torch.randn(size), flags, torch.zeros(size)], {"n": size}),
        ):
            case = kernels.CASES[name]
            tensors = dict(zip(case.pointers, given_, strict=True))
            for count in range(1, len(tensors) + 1):
                for slots in itertools.combinations(tensors, count):
                    with self.subTest(name, slots=slots):
                        variant = with_slots(case.fn, case.signature, case.constants, case.attrs(), slots)
                        self.assertSameEffect(case.fn, variant, tensors, scalars | case.constants, case.grid, slots)

    def test_a_slot_written_anew(self) -> None:
        case = kernels.CASES["oneline"]
        variant = with_slots(case.fn, case.signature, case.constants, case.attrs(), case.pointers)
        slots = torch.zeros(2, dtype=torch.int64)
        for _ in range(3):
            source, target = values("*i8", 512), torch.zeros(512, dtype=torch.int64)
            slots[0], slots[1] = source.data_ptr(), target.data_ptr()
            variant.fn[(1,)](slots[:1], slots[1:], **case.constants)
            self.assertEqual(target, source.long())


@st.composite
def pointwise_kernels(draw: st.DrawFn) -> tuple[str, dict[str, str], list[str]]:
    """The source of a pointwise kernel ``kernel``, the types of its pointers, and those that become slots."""
    types = draw(st.lists(st.sampled_from(list(TYPES)), min_size=1, max_size=6))
    names = [draw(st.sampled_from(("in_ptr", "x", "tl_", "_language"))) + str(i) for i in range(len(types))]
    slots = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    stored = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    annotations = [draw(st.sampled_from(("", ": tl.tensor", ": 'a pointer'"))) for _ in names]
    parameters = [f"{name}{annotation}" for name, annotation in zip(names, annotations, strict=True)]
    separator = draw(st.sampled_from((", ", ",\n    ", ",  # a comment\n    ")))
    last = draw(st.sampled_from(("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = 64")))
    lines = [f"def kernel({separator.join([*parameters, 'n', last])}):"]
    lines += draw(st.sampled_from(([], ['    """A docstring."""'], ['    """Of two\n\n  lines \\\\."""'])))
    lines += ["    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"]
    for name in names:
        how = draw(st.integers(0, 2))
        lines += [[f"    {name} += i"], [f"    {name} = advance({name}, i)"], [f"    {name} = {name} + i"]][how]
    lines += [f"    v{k} = tl.load({name}, i < n)" for k, name in enumerate(names)]
    # Stored values are larger than all values before, and flags are inverted.
    total = " + ".join(f"v{k}.to(tl.float32)" for k in range(len(names))) + " + 1"
    lines += ["    if n > 0:"] if draw(st.booleans()) else ["    for _ in range(1):"]
    for name in stored:
        k = names.index(name)
        lines += [f"        tl.store({name}, {f'v{k} == 0' if types[k] == '*i1' else total}, i < n)"]
    head = (
        "import triton\nimport triton.language as tl\n\n"
        "@triton.jit\ndef advance(pointer, by):\n    return pointer + by\n\n@triton.jit\n"
    )
    return head + "\n".join(lines) + "\n", dict(zip(names, types, strict=True)), slots


class TestRandomKernels(InterpretedTestCase):
    @FIXED
    @given(pointwise_kernels(), st.integers(1, 150), st.randoms(use_true_random=False))
    def test_same_effect(self, drawn: tuple[str, dict[str, str], list[str]], size: int, choices: random.Random) -> None:
        source, types, slots = drawn
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random_kernel.py"
            path.write_text(source)
            module = module_of(path)
            signature = {**types, "n": "i32", "BLOCK": "constexpr"}
            attrs = {(i,): [["tt.divisibility", 16]] for i in range(len(types)) if choices.random() < 0.5}
            variant = with_slots(module.kernel, signature, {"BLOCK": 64}, attrs, slots)
            hints = sum((list(types).index(slot),) in attrs for slot in slots)
            self.assertEqual(inspect.getsource(variant.fn.fn).count("multiple_of"), hints)
            tensors = {name: values(ty, size) for name, ty in types.items()}
            self.assertSameEffect(module.kernel, variant, tensors, {"n": size, "BLOCK": 64}, (3,), slots)


if __name__ == "__main__":
    unittest.main()
