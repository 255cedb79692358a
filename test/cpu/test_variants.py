"""Kernels that take pointers from slots: loads and stores as wide as the original's, the same results, or a reason."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
import variant_kernels as kernels
from commands import WithFolder, forked, python
from test_launches import autotuners, of_a_user, of_inductor, on_gpu
from torch import nn
from torch._inductor import config as inductor_config
from torch.testing._internal.common_utils import TestCase, run_tests
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import jit

from pygraph_trees.indirection.table.variants import NoVariant, Variant, with_slots

HERE = Path(__file__).resolve()
TARGET = GPUTarget("cuda", 90, 32)
SLOT_LOAD = "ld.global.b64"
_ACCESS = re.compile(r"\b(?:ld|st|atom|red|cp)\.[\w.:]*global[\w.:]*")


def accesses(compiled: Any) -> Counter[str]:
    """The instructions by which a kernel reaches global memory, each with its width."""
    return Counter(_ACCESS.findall(compiled.asm["ptx"]))


class VariantsTestCase(WithFolder):
    def setUp(self) -> None:
        super().setUp()
        # Inductor sets this for the process when it makes a kernel's autotuner.
        self.enterContext(mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(self.folder / "cache")))

    def compile(self, fn: Any, signature: Any, attrs: Any, case: kernels.Case) -> Any:
        source = ASTSource(fn, signature, case.constants, attrs)
        compiled = triton.compile(source, target=TARGET, options=dict(case.options))
        self.assertGreater(len(compiled.asm["cubin"]), 0)
        return compiled

    def variant(self, case: kernels.Case, slots: Any = None, attrs: Any = None) -> Variant:
        attrs = case.attrs() if attrs is None else attrs
        slots = case.pointers if slots is None else slots
        return with_slots(case.fn, case.signature, case.constants, attrs, slots, case.options)

    def compiled(self, variant: Variant, case: kernels.Case) -> Any:
        return self.compile(variant.fn, variant.signature, variant.attrs, case)

    def original(self, case: kernels.Case, attrs: Any = None) -> Any:
        return self.compile(case.fn, case.signature, case.attrs() if attrs is None else attrs, case)

    def assertAsWide(self, case: kernels.Case, slots: Any = None, attrs: Any = None) -> Counter[str]:
        """The variant loads its slots, and is otherwise equal to its original, whose accesses are returned."""
        original = accesses(self.original(case, attrs))
        compiled = self.compiled(self.variant(case, slots, attrs), case)
        loads = Counter({SLOT_LOAD: len(case.pointers if slots is None else slots)})
        self.assertEqual(accesses(compiled), original + loads)
        self.assertEqual(compiled.metadata.name, case.fn.__name__)
        return original


class TestCompiled(VariantsTestCase):
    def test_a_variant_is_as_wide_as_the_original(self) -> None:
        """It is no wider than is known of its pointers."""
        found = {}
        for name, case in kernels.CASES.items():
            for slots in {tuple(case.pointers), (case.pointers[0],), (case.pointers[-1],)}:
                found[name] = set(self.assertAsWide(case, slots))
        self.assertLessEqual({"ld.global.v4.b32", "st.global.v4.b32"}, found["pointwise"])
        self.assertIn("ld.global.b32", found["oneline"])  # four bytes at once
        self.assertTrue(any(op.startswith("cp.async") for op in found["matmul"]), found["matmul"])
        self.assertTrue(all(any(".v4." in op or ".v2." in op for op in found[name]) for name in ("user", "reduction")))
        case = kernels.CASES["pointwise"]
        self.assertIn("ld.global.b32", self.assertAsWide(case, attrs=case.attrs(without=("in_ptr0",))))

    def test_pointers_to_every_element_type_may_be_slots(self) -> None:
        case = kernels.CASES["oneline"]
        types = ["i1", "u1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"]
        for ty in [*types, "fp16", "bf16", "fp32", "fp64", "fp8e4nv", "fp8e5"]:
            self.assertAsWide(case._replace(signature=case.signature | dict.fromkeys(case.pointers, f"*{ty}")))
        case = case._replace(signature={**case.signature, "in_ptr0": "*kfp32"})
        self.assertIn("_language.float32", self.variant(case, ["in_ptr0"]).fn.src)


class TestRecord(VariantsTestCase):
    def test_the_original_is_left_as_it_was(self) -> None:
        def state(fn: Any) -> tuple[Any, ...]:
            names = [(name, id(value)) for name, value in vars(kernels).items()]
            return names, fn.src, fn.arg_names, fn.cache_key, dict(fn.fn.__annotations__)

        for case in kernels.CASES.values():
            before = state(case.fn)
            self.compiled(self.variant(case), case)
            self.assertEqual(state(case.fn), before)
        registered = f"{kernels.__name__}:user"
        functions = getattr(jit, "_triton_jit_function_registry", {registered: kernels.user})  # since Triton 3.7
        self.assertIs(functions[registered], kernels.user)

    def test_variables_around_the_kernel_are_kept_and_told_apart(self) -> None:
        def make(by: Any, helper: Any) -> Any:
            @triton.jit
            def kernel(in_ptr0, out_ptr0, XBLOCK: tl.constexpr):
                i = tl.arange(0, XBLOCK)
                tl.store(out_ptr0 + i, helper(tl.load(in_ptr0 + i), by))

            return kernel

        keys = set()
        for by in (2, 3):
            case = kernels.CASES["oneline"]._replace(fn=make(tl.constexpr(by), kernels.scaled))
            case = case._replace(signature=case.signature | dict.fromkeys(case.pointers, "*fp32"))
            self.assertAsWide(case)
            keys.add(self.variant(case).fn.cache_key)
        self.assertEqual(len(keys), 2)


class TestCache(VariantsTestCase):
    KEYS = (
        "import sys; sys.path[:0] = {paths}\n"
        "import variant_kernels as k; k.import_without_compiler()\n"
        "from pygraph_trees.indirection.table.variants import with_slots\n"
        "for c in k.CASES.values():\n"
        "    print(with_slots(c.fn, c.signature, c.constants, c.attrs(), c.pointers).fn.cache_key)"
    )

    def test_key_is_its_own_and_the_same_in_every_process(self) -> None:
        ours = [self.variant(case).fn.cache_key for case in kernels.CASES.values()]
        self.assertEqual(ours, [self.variant(case).fn.cache_key for case in kernels.CASES.values()])
        self.assertEqual(len({*ours, *[case.fn.cache_key for case in kernels.CASES.values()]}), 2 * len(kernels.CASES))
        done = python("-c", self.KEYS.format(paths=[str(HERE.parents[2]), str(HERE.parent)]), PYTHONHASHSEED="1")
        self.assertEqual(done.stdout.split(), ours, done.stderr)

    def test_each_choice_of_slots_has_a_key(self) -> None:
        case = kernels.CASES["pointwise"]
        choices = [["in_ptr0"], ["in_ptr1"], ["in_ptr0", "in_ptr1"], ["in_ptr1", "out_ptr0"]]
        keys = [self.variant(case, slots).fn.cache_key for slots in choices]
        keys.append(self.variant(case, ["in_ptr0"], attrs={}).fn.cache_key)
        self.assertEqual(len(set(keys)), len(keys))
        self.assertEqual(self.variant(case, ["in_ptr1", "in_ptr0"]).fn.cache_key, keys[2])


class TestRefused(VariantsTestCase):
    def assertRefused(self, why: str, case: kernels.Case, slots: Any = None, **options: Any) -> None:
        with self.assertRaisesRegex(NoVariant, rf"^Triton kernel .* has no variant, because {why}\.$"):
            self.variant(case._replace(options=case.options | options), slots)

    def test_parameters_that_can_be_no_slots_are_left_out(self) -> None:
        case = kernels.CASES["pointwise"]
        types = ("i32", "tensordesc<fp16[32,32]>", "nvTmaDesc", "**fp32", "*void", ("*fp32", "i32"), "constexpr")
        for other in (
            *(case._replace(signature=case.signature | {"in_ptr0": ty}) for ty in types),
            case._replace(constants=case.constants | {"in_ptr0": None}),
            case._replace(constants=case.constants | {(0,): None}),
        ):
            self.assertRefused("none of its parameters can be a slot", other, ["in_ptr0"])
            self.assertEqual(self.variant(other, ["in_ptr0", "in_ptr1", "XBLOCK", "y"]).slots, {"in_ptr1"})
        self.assertRefused("none of its parameters can be a slot", case, [])

    def test_kernels_that_cannot_be_rebuilt_are_refused(self) -> None:
        from triton.experimental import gluon

        case = kernels.CASES["pointwise"]
        left, unreadable = triton.jit(case.fn.fn), triton.jit(case.fn.fn)
        left.fn = None
        unreadable._unsafe_update_src("not a definition")
        for fn, why in (
            (case.fn.fn, "it is a function, not a kernel that triton.jit made"),
            (triton.autotune([triton.Config({"XBLOCK": 64})], key=[])(case.fn), "it is a Autotuner, not a kernel .*"),
            (left, "its Python function exists only in the process that compiled it"),
            (unreadable, "its source cannot be read"),
            (gluon.jit(case.fn.fn), "it is written in Gluon"),
        ):
            self.assertRefused(why, case._replace(fn=fn))

    def test_variables_that_a_key_leaves_out_are_refused(self) -> None:
        """Those of Triton are no reason."""

        def make(ty: Any) -> Any:
            @triton.jit
            def narrowed(x):
                return x.to(ty).to(tl.int64)

            @triton.jit
            def stored(pointer, x):
                tl.store(pointer, narrowed(x))

            @triton.jit
            def kernel(in_ptr0, out_ptr0, XBLOCK: tl.constexpr):
                i = tl.arange(0, XBLOCK)
                stored(out_ptr0 + i, tl.load(in_ptr0 + i))

            return kernel

        sort = tl.sort  # it calls a function that uses int8 and others

        @triton.jit
        def sorting(in_ptr0, out_ptr0, XBLOCK: tl.constexpr):
            i = tl.arange(0, XBLOCK)
            tl.store(out_ptr0 + i, sort(tl.load(in_ptr0 + i)))

        case = kernels.CASES["oneline"]
        self.assertAsWide(case._replace(fn=sorting, constants={"XBLOCK": 32}))
        refused = case._replace(fn=make(tl.int8))
        self.original(refused)
        self.assertEqual(refused.fn.cache_key, make(tl.int16).cache_key)
        for _ in range(2):  # whether or not keys are cached
            self.assertRefused("'ty' is not a tl.constexpr, and Triton's cache ignores its value", refused)
        self.assertAsWide(case._replace(fn=make(tl.constexpr(tl.int8))))


class TestInductor(VariantsTestCase):
    """Kernels that Inductor generates, with all their pointers from slots."""

    def test_variants_of_programs(self) -> None:
        def gather(x: torch.Tensor, i: torch.Tensor, m: torch.Tensor) -> Any:
            return x[i].where(m, 0), torch.zeros_like(x).index_add_(0, i, x), x.cumsum(-1)

        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1))
        sizes, flags = on_gpu(8, 24), on_gpu(kernels.SIZE, dtype=torch.bool)
        torch._dynamo.mark_dynamic(sizes, 0)
        indices, mask = on_gpu(64, dtype=torch.int64), on_gpu(64, 100, dtype=torch.bool)
        for fn, args, wanted in (
            (model, (on_gpu(512, 64),), "PERSISTENT_REDUCTION"),
            (lambda x: x.softmax(-1).to(torch.bfloat16), (on_gpu(64, 20000),), "REDUCTION"),
            (gather, (on_gpu(64, 100), indices, mask), "POINTWISE"),
            (lambda x: x.sin().sum(0), (sizes,), "REDUCTION"),
            (of_a_user, (on_gpu(kernels.SIZE), flags), "USER_AUTOTUNE"),
            (lambda x, y: (x.sin(), y.cos()), (on_gpu(1024), on_gpu(64, 72)), "combo"),
        ):
            kinds = []
            with of_inductor(self.folder), inductor_config.patch(combo_kernels=wanted == "combo"):
                for autotuner in autotuners(self.folder, fn, *args, training=fn is model):
                    meta = autotuner._create_compile_meta(autotuner.configs[0])
                    options = autotuner._create_compile_options(autotuner.configs[0], meta)
                    case = kernels.Case(autotuner.fn, meta["signature"], meta["constants"], (), options)
                    self.assertAsWide(case, attrs=meta["configs"][0])
                    kinds.append(autotuner.heuristic_type.name)
            if wanted == "combo":
                self.assertEqual(len(kinds), 1)
            else:
                self.assertIn(wanted, " ".join(kinds))


class TestInterpreted(TestCase):
    @forked("torch")
    def test_interpreted_variants_give_the_same_results(self) -> None:
        # With CI, nothing else may be needed.
        done = python(str(HERE.with_name("interpreted_variants.py")), TRITON_INTERPRET="1", CI="true")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stderr, r"Ran 3 tests in .*\n\nOK\n")


if __name__ == "__main__":
    run_tests()
