"""Each question about a version of torch is answered from what torch contains."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch._dynamo import utils as dynamo_utils
from torch._inductor import compile_fx, config, cudagraph_trees
from torch._inductor.sizevars import SizeVarAllocator
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils import _config_module

import inductor_patches
from inductor_patches.fingerprints import parse_version
from pygraph_trees import compat


def holding(owner, name):
    """Inside the context, the owner has an attribute of that name."""
    return mock.patch.object(owner, name, object(), create=True)


@contextlib.contextmanager
def lacking(owner, name):
    """Inside the context, the owner has no attribute of that name."""
    had = name in vars(owner)
    value = vars(owner).get(name)
    if had:
        delattr(owner, name)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, value)


def with_method(kind, method, names):
    """Inside the context, a class of torch has a method that uses these names."""
    scope = {}
    exec(f"def {method}(self):\n" + "".join(f"    self.{name}\n" for name in names) + "    return None", scope)
    return mock.patch.object(cudagraph_trees, kind, type(kind, (), {method: scope[method]}))


def per_thread():
    thread_local = object()

    def cudagraphify():
        return lambda: thread_local

    def with_cell():
        thread_local = object()
        return lambda: thread_local

    return mock.patch.object(compile_fx, "cudagraphify", with_cell), mock.patch.object(
        compile_fx, "cudagraphify", cudagraphify
    )


def entry(default):
    made = dataclasses.make_dataclass("_ConfigEntry", [("user_override", object, default)])
    return mock.patch.object(_config_module, "_ConfigEntry", made)


def of_method(kind, method, name):
    return with_method(kind, method, [name]), with_method(kind, method, ["another"])


def wrapped():
    def plain(): ...

    def wrapper(): ...

    wrapper.__wrapped__ = plain
    name = "record_pregraph_bytecode_enter"
    return mock.patch.object(dynamo_utils, name, wrapper), mock.patch.object(dynamo_utils, name, plain)


NODE, MANAGER = "CUDAGraphNode", "CUDAGraphTreeManager"
# By question: patches of torch for which the answer is yes, and for which it is no.
OF_TORCH = {
    "has_trees_per_thread": per_thread,
    "has_capture_lock": lambda: (
        holding(cudagraph_trees, "graph_capture_lock"),
        lacking(cudagraph_trees, "graph_capture_lock"),
    ),
    "registers_generators": lambda: of_method(NODE, "__init__", "register_generator_state"),
    "clones_live_outputs": lambda: of_method(MANAGER, "__init__", "has_live_user_visible_output_cloning"),
    "has_skip_table": lambda: of_method(MANAGER, "__init__", "skip_cudagraph"),
    "checks_deaths_after_copies": lambda: of_method(NODE, "run", "expected_dead_indices_after_graph"),
    "has_size_hint": lambda: (holding(SizeVarAllocator, "size_hint"), lacking(SizeVarAllocator, "size_hint")),
    "are_call_marks_wrapped": wrapped,
    "has_context_overrides": lambda: (entry(dataclasses.field()), entry(dataclasses.field(default=None))),
    "has_hash_variable": lambda: (holding(Settings, "_hash_dirty_var"), lacking(Settings, "_hash_dirty_var")),
    "has_dirty_keys": lambda: (
        holding(Settings, "_get_dict_dirty_keys_var"),
        lacking(Settings, "_get_dict_dirty_keys_var"),
    ),
}
# By question: an object for which the answer is yes, and one for which it is no.
OF_OBJECTS = {
    "lists_static_tensors": ({"tensor_static_input_idxs": []}, {}),
    "lists_copied_inputs": ({"input_copy_idxs": []}, {}),
    "lists_groups_of_parameters": ({"_fsdp_param_groups": []}, {}),
    "is_kernel_free": ({"kernel_free_cudagraph": True}, {}),
    "has_plugins": ({"_plugins": [object()]}, {}),
    "is_for_any_device": ({"triton_meta": {"device": None}}, {"triton_meta": {"device": 0}}),
}
# By question: the versions for which the answer is known to be yes.
FIRST, LAST = (2, 11), (2, 99)
VERSIONS = {
    "has_trees_per_thread": ((2, 13), LAST),
    "has_capture_lock": ((2, 13), LAST),
    "registers_generators": (FIRST, (2, 13)),
    "clones_live_outputs": ((2, 14), LAST),
    "has_skip_table": ((2, 15), LAST),
    "checks_deaths_after_copies": ((2, 15), LAST),
    "has_size_hint": (FIRST, (2, 12)),
    "are_call_marks_wrapped": (FIRST, (2, 14)),
    "has_context_overrides": ((2, 12), LAST),
}


class Settings:
    """Stands for Inductor's configuration, whose internal attributes cannot be deleted."""


def answer(name):
    value = getattr(compat, name)()
    assert type(value) is bool, (name, value)
    return value


class TestVersionQuestions(TestCase):
    def test_all_questions_are_tested(self):
        questions = {
            name
            for name, value in vars(compat).items()
            if inspect.isfunction(value) and value.__module__ == compat.__name__ and not name.startswith("_")
        }
        self.assertEqual(questions, {*OF_TORCH, *OF_OBJECTS})

    def test_installed_torch_answers_as_the_comments_say(self):
        version = parse_version(torch.__version__)
        for name, (since, until) in VERSIONS.items():
            self.assertEqual(answer(name), since <= version <= until, name)

    def test_answers_are_those_of_torch_without_the_patches(self):
        patched = {name: answer(name) for name in OF_TORCH}
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        self.assertEqual({name: answer(name) for name in OF_TORCH}, patched)

    def test_answers_follow_what_torch_has(self):
        for name, states in OF_TORCH.items():
            of_config = name in ("has_hash_variable", "has_dirty_keys")
            for state, expected in zip(states(), (True, False), strict=True):
                with self.subTest(name, expected=expected), contextlib.ExitStack() as stack:
                    if of_config:
                        stack.enter_context(mock.patch.object(torch._inductor, "config", Settings))
                    stack.enter_context(state)
                    self.assertIs(answer(name), expected)
        self.assertIs(torch._inductor.config, config)

    def test_answers_follow_what_an_object_has(self):
        for name, states in OF_OBJECTS.items():
            for state, expected in zip(states, (True, False), strict=True):
                self.assertIs(getattr(compat, name)(SimpleNamespace(**state)), expected, name)


if __name__ == "__main__":
    run_tests()
