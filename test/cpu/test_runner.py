"""Replacements of Inductor's code around a graph's only partition: they do the same, or nothing is replaced."""

from __future__ import annotations

import functools
import itertools
import re
import textwrap
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from commands import WithFolder, module_of
from fake_trees import FakeFunction, replay_with, replaying
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fake_gpu import on_gpu
from torch import nn
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch._guards import TracingContext, tracing
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.two_tensor import TwoTensor

from pygraph_trees.fake_gpu import lower
from pygraph_trees.native import binding
from pygraph_trees.trees.functions.function import Aligned, FunctionModel, entered
from pygraph_trees.trees.hooks import runner as trees_runner
from pygraph_trees.trees.hooks.runner import shortened

HEAD = "import torch\nreinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor\n"
RUNNER = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        self.partitions = [fn(c) for fn, c in zip(fns, self.partitions)]

    def call(self, args):
"""
CALL = """
arg0_1, arg1_1, arg2_1 = args
args.clear()
partition0_args = [arg2_1, arg0_1, arg1_1]
del arg2_1, arg0_1
(buf0, buf1) = self.partitions[0](partition0_args)
del partition0_args
return (reinterpret_tensor(buf1, (2, 3), (3, 1), 4), buf0, None, )
"""
TWICE = CALL.replace("None", "reinterpret_tensor(buf1, (2, 3), (3, 1), 4)")
# Statements that Inductor, or other code, may add between the lines above, and after the partition.
MORE = """
torch.cuda.synchronize()
arg1_1 = copy_if_misaligned(arg1_1)
args.append(arg1_1)
reinterpret_tensor = arg1_1
del args
args.clear(1)
"""
MORE_BEHIND = """
buf2 = buf0
(buf2, buf3) = self.partitions[0](partition0_args)
partition0_args = [arg1_1]
s0 = arg1_1
"""
# Replacements of a line above, by its number; an empty one leaves the line out.
INSTEAD = {
    0: """
        arg0_1, arg1_1, *arg2_1 = args
        arg0_1, arg1_1, arg2_1 = inputs
        arg0_1, arg1_1, arg1_1 = args
        arg0_1, arg1_1, arg2_1 = others = args
    """,
    2: """
        partition0_args = [arg2_1, arg0_1, buf0]
        partition0_args = [arg2_1, *args]
        partition0_args = (arg2_1, arg0_1, arg1_1)
        partition1_args = [arg2_1, arg0_1, arg1_1]
    """,
    4: """
        (buf0, buf1) = self.partitions[1](partition0_args)
        (buf0, *buf1) = self.partitions[0](partition0_args)
        (buf1, buf1) = self.partitions[0](partition0_args)
        buf1 = self.partitions[0](partition0_args)
    """,
    6: """
        return (buf0 + 1, )
        return (alias(buf0, (2, ), (1, ), 0), )
        return (arg0_1, )
        return [buf0, buf1]
        return (reinterpret_tensor(arg0_1, (2, ), (1, ), 0), )
        return (reinterpret_tensor(buf0, (arg1_1, ), (1, ), 0), )
        return (reinterpret_tensor(buf0, (2, ), (1, ), offset=0), )
        return (reinterpret_tensor(), )
    """,
}


def runner_of(call: str) -> str:
    """The source of Inductor's class, whose method has these statements."""
    return RUNNER + textwrap.indent(textwrap.dedent(call).strip(), " " * 8) + "\n"


def listed(names: list[str]) -> str:
    """Names as Inductor writes them in a list or a tuple."""
    return ", ".join(names) + ("," if len(names) == 1 else "")


class Partition:
    """Returns the given outputs, with an input in place of each index, and notes its arguments."""

    def __init__(self, outputs):
        self.outputs, self.seen = outputs, []

    def __call__(self, inputs):
        self.seen.append(list(inputs))
        outputs = [inputs[o] if isinstance(o, int) else o for o in self.outputs]
        inputs.clear()
        self.given = outputs
        return outputs


def tensors_numbered(count):
    return [torch.zeros(64) for _ in range(count)]


@st.composite
def programs(draw):
    """The method's statements and number of inputs, the partition's outputs, and whether those are returned as is."""
    count = draw(st.integers(0, 9))
    inputs = [f"{draw(st.sampled_from(['arg', 'primals_', 'tangents_']))}{n}" for n in range(count)]
    lines = [f"{listed(inputs)} = args", "args.clear()"] if inputs else []
    numbers = {name: number for number, name in enumerate(inputs)}
    for alias in draw(st.lists(st.sampled_from(["s0", "s77", "u0"]), unique=True)) if inputs else []:
        source = draw(st.sampled_from(sorted(numbers)))
        lines.append(f"{alias} = {source}")
        numbers[alias] = numbers[source]
    names = sorted(numbers, key=numbers.__getitem__)
    order = draw(st.permutations(names) | st.lists(st.sampled_from(names)) | st.just(inputs)) if inputs else []
    lines.append(f"partition0_args = [{listed(order)}]")
    passed = draw(st.lists(st.sampled_from(order), unique=True)) if order else []
    dropped = [name for name in inputs if name not in passed]
    if dropped and draw(st.booleans()):
        lines.append(f"del {', '.join(dropped)}")
        numbers = {name: number for name, number in numbers.items() if name not in dropped}
    outputs = draw(st.permutations([*(f"buf{n}" for n in range(draw(st.integers(0, 5)))), *passed]))
    lines.append(f"({listed(outputs)}) = self.partitions[0](partition0_args)")
    lines.append("del partition0_args")
    number = st.integers(0, 4)
    others = st.sampled_from(["None", "0", "7", "True"])
    there = [*outputs, *(name for name in numbers if name not in outputs)]
    if there:
        name = st.sampled_from(there)
        views = st.builds("reinterpret_tensor({}, ({}, {}), ({}, {}), {})".format, name, *[number] * 5)
        returned = draw(st.lists(st.one_of(name, views, others)) | st.just(outputs))
    else:
        returned = draw(st.lists(others))
    lines.append("return (" + ", ".join(returned) + ", )" if returned else "return ()")
    given_ = [order.index(name) if name in passed else torch.zeros(64) for name in outputs]
    return "\n".join(lines), count, given_, returned == outputs


class RunnerTestCase(WithFolder):
    files = 0

    def module(self, source):
        """Loads the module from a file, as Inductor loads its code."""
        self.files += 1
        path = self.folder / f"generated{self.files}.py"
        path.write_text(HEAD + source)
        return module_of(path)

    def runner(self, call, *partitions):
        return self.module(runner_of(call)).Runner(list(partitions))

    def assertAreIdentical(self, found, expected):
        self.assertEqual(list(map(id, found)), list(map(id, expected)))

    def assertAreSame(self, found, expected):
        """Both are the same objects, or tensors that view the same memory."""
        facts = lambda x: (x.data_ptr(), x.size(), x.stride()) if isinstance(x, torch.Tensor) else id(x)  # noqa: E731
        self.assertEqual(list(map(facts, found)), list(map(facts, expected)))

    def check(self, runner, count, partition):
        """Calls both ways; returns the short one."""
        call = shortened(runner.call)
        self.assertIsNotNone(call)
        one = tensors_numbered(count)
        other = list(one)
        expected, found = runner.call(one), call(other)
        self.assertAreSame(found, expected)
        self.assertAreIdentical(*partition.seen[-2:])
        self.assertEqual(other, [])
        return call

    def check_refused(self, call, *partitions):
        self.assertIsNone(shortened(self.runner(call, *(partitions or [Partition([])])).call))


OF_GRADIENTS = None if binding.extension is None else 0  # C++ finds whether they are seen


class TestViewsInside(RunnerTestCase):
    """If an output is returned as only one view, our function returns it as that view."""

    def graphed(self, call, partition, first_inside=0, *, is_backward=False):
        """Inductor's runner, the same runner with the function graphed, and that function."""
        module = self.module(runner_of(call) + "\ndef partition_0(args):\n    return compute(args)\n")
        module.compute = partition
        long, short = module.Runner([module.partition_0]), module.Runner([module.partition_0])
        model = FunctionModel.of(module.partition_0, is_backward=is_backward, is_inference=not is_backward)
        model.first_inside = first_inside
        short.recursively_apply_fns([lambda _: entered(model, model, Aligned(model, (), ()))])
        return long, short, model

    def check(self, call, count, partition, first_inside=0, **graph):
        long, short, model = self.graphed(call, partition, first_inside, **graph)
        found = shortened(short.call)
        inputs = tensors_numbered(count)
        self.assertAreSame(found(list(inputs)), long.call(list(inputs)))
        self.assertAreIdentical(*partition.seen[-2:])
        return found, model

    @settings(max_examples=100, deadline=None)
    @given(programs())
    def test_any_program(self, program):
        call, count, outputs, are_returned = program
        partition = Partition(outputs)
        short = super().check(self.runner(call, partition), count, partition)
        self.assertEqual(short(tensors_numbered(count)) is partition.given, are_returned)
        for is_backward in (False, True):
            _, model = self.check(call, count, Partition(outputs), is_backward=is_backward)
            if "reinterpret" not in call:
                self.assertIsNone(model.as_returned)

    def test_a_gradient_is_the_functions_own_if_it_is_returned_once(self):
        """Python makes a new tensor for each view; C++ knows for which views it may return the function's own. Torch
        would take over one tensor for both views of an output that is returned twice."""
        for more, own in (
            ("None", [0]),
            ("reinterpret_tensor(buf1, (2, 3), (3, 1), 4)", []),
            ("reinterpret_tensor(buf1, (3, 2), (1, 3), 4)", []),
            ("reinterpret_tensor(buf0, (3, 2), (1, 3), 4)", [0]),
        ):
            partition = Partition([torch.zeros(64), torch.ones(64)[4:]])
            with self.subTest(more), mock.patch.object(trees_runner, "entry") as entry:
                found, model = self.check(CALL.replace("None", more), 3, partition, is_backward=True)
            views, numbers = entry.call_args.kwargs["views"], entry.call_args.kwargs["own"]
            self.assertEqual(numbers, own)
            given_ = model(tensors_numbered(3))
            for number in own:
                output, sizes, strides, offset = views[number]
                self.assertEqual((given_[output].shape, given_[output].stride(), offset), (sizes, strides, 0))
            with mock.patch.object(FunctionModel, "ungraphed", lambda self, inputs, given_=given_: list(given_)):
                for value in found(tensors_numbered(3)):
                    self.assertEqual(value is given_[0], isinstance(value, torch.Tensor) and value.dim() == 1)
                    self.assertIsNot(value, given_[1])

    def test_an_output_is_viewed_inside_if_it_is_always_returned_alike(self):
        """If it is returned twice, there are two tensors, and the last is the function's own."""
        for call in (CALL, TWICE):
            partition = Partition([torch.zeros(64), torch.ones(64)[4:]])
            found, model = self.check(call, 3, partition)
            buf0, buf1 = model(tensors_numbered(3))
            self.assertIs(buf0, partition.outputs[0])
            self.assertEqual((buf1.shape, buf1.storage_offset()), ((2, 3), 8))
            manager = replaying(lambda *_, given_=(buf0, buf1): list(given_))
            for returned in (found, found.fast_call):
                replay_with(model.dispatch, None if returned is found else manager, 7)
                with mock.patch.object(FunctionModel, "ungraphed", lambda *_, given_=(buf0, buf1): list(given_)):
                    first, second, last = returned(tensors_numbered(3))
                self.assertIs(second, buf0)
                self.assertIs(last, None if call is CALL else buf1)
                self.assertEqual(first is buf1, call is CALL)
                self.assertAreSame([first], [buf1])

    def test_which_outputs_are_viewed_outside(self):
        """Those that a user sees, that are returned in several ways, or that are the call's own inputs. Either no
        output is known to be inside, or all from some number on are."""
        of_input = CALL.replace("(buf0, buf1) =", "(buf0, arg0_1) =").replace("buf1", "arg0_1")
        of_alias = CALL.replace("args.clear()", "args.clear()\ns0 = arg0_1").replace("buf1", "s0")
        inside = ((CALL, 0), (TWICE, 0), (TWICE, 2))
        otherwise = "buf1", "reinterpret_tensor(buf1, (1, ), (1, ), 0)"
        for call, first_inside in (
            *inside,
            *((CALL, 1), (CALL, 3), (CALL, None), (TWICE, 3), (TWICE, None)),
            *((call, 0) for call in (*(CALL.replace("None", more) for more in otherwise), of_input, of_alias)),
        ):
            with self.subTest(call, first_inside=first_inside):
                second = 1 if call in (of_input, of_alias) else torch.zeros(64)
                _, model = self.check(call, 3, Partition([torch.zeros(64), second]), first_inside)
                self.assertEqual(model.as_returned is not None, (call, first_inside) in inside)

    def test_saved_outputs_begin_where_autograd_says(self):
        """AOTAutograd's cache tells as much as its compilation; nothing is known for inference."""

        def step(x, w, v):  # needs no kernel, which would take seconds to compile
            y = x @ w
            return y.view(-1), v @ v.mT, v[0]

        found = {}
        upstream = CompiledFxGraph.post_compile

        def first_inside(is_backward, is_inference):
            return FunctionModel.of(len, is_backward=is_backward, is_inference=is_inference).first_inside

        def post_compile(graph, inputs, constants, kwargs):
            mode = bool(kwargs["is_backward"]), bool(graph.fx_kwargs["is_inference"])
            found[mode[0]] = first_inside(*mode)
            if mode[0]:
                with mock.patch.object(binding, "extension", None):
                    self.assertIsNone(first_inside(*mode))
            return upstream(graph, inputs, constants, kwargs)

        counters = torch._dynamo.utils.counters["aot_autograd"]
        with fresh_cache(), mock.patch.object(CompiledFxGraph, "post_compile", post_compile):
            for kind, requires_grad, wanted in (
                (torch.clone, True, {False: 3, True: OF_GRADIENTS}),
                (torch.clone, False, {False: None}),
                (lambda t: TwoTensor(t, t.clone()), True, {False: 6, True: OF_GRADIENTS}),  # two tensors for each
            ):
                for hits in (0, 1):
                    before = counters["autograd_cache_hit"]
                    found.clear()
                    torch._dynamo.reset()
                    inputs = (kind(torch.randn(4, 4)).requires_grad_(requires_grad) for _ in range(3))
                    outputs = torch.compile(step)(*inputs)
                    if requires_grad:
                        sum(output.sum() for output in outputs).backward()
                    self.assertEqual((found, counters["autograd_cache_hit"] - before), (wanted, hits))
        self.assertIsNone(first_inside(False, False))

    def test_nothing_is_known_if_autograd_wraps_outputs_or_inputs_in_subclasses(self):
        wrapped, kinds = [object.__new__(SubclassCreationMeta)], ("subclass_fw_graph_out_meta", "subclass_inp_meta")
        for which, is_backward in itertools.product(kinds, (False, True)):
            context = TracingContext(None)
            context.fw_metadata = SimpleNamespace(num_forward=3, **{kind: wrapped * (kind == which) for kind in kinds})
            with tracing(context):
                model = FunctionModel.of(len, is_backward=is_backward, is_inference=False)
            self.assertIsNone(model.first_inside)

    def test_a_function_of_other_code_or_without_addresses_is_left_alone(self):
        """A function of other code would be called in other places; one without addresses is not entered."""
        partition = Partition(tensors_numbered(2))
        for indirection in ("auto", "off"):
            with torch._inductor.config.patch({"triton.pygraph_indirection": indirection}):
                long, short, model = self.graphed(CALL, partition)
            if indirection == "auto":
                model = FunctionModel.of(lambda inputs: partition(inputs), is_backward=False, is_inference=True)
                short.partitions = [entered(model, model, Aligned(model, (), ()))]
            given_ = tensors_numbered(3)
            self.assertAreSame(shortened(short.call)(list(given_)), long.call(list(given_)))
            self.assertIsNone(model.as_returned)


class TestShortened(RunnerTestCase):
    def test_inputs_are_released(self):
        """The partition gets the only list, and only inputs that are returned for the backward are kept."""
        seen, output = [], torch.zeros(64)

        def partition(inputs):
            seen.append(inputs)
            for _ in range(2):
                seen.append([reference() is None for reference in references])
                inputs.clear()
            return [output, output]

        kept = CALL.replace("None, )", "arg1_1, reinterpret_tensor(arg1_1, (2, ), (1, ), 7), )")
        for call, first, then in (
            (CALL, [False, False, False], [True, True, True]),
            (CALL.replace(", arg1_1]", "]"), [False, True, False], [True, True, True]),
            (kept, [False, False, False], [True, False, True]),
        ):
            inputs = tensors_numbered(3)
            references, address = [weakref.ref(tensor) for tensor in inputs], inputs[1].data_ptr()
            found = shortened(self.runner(call, partition).call)(inputs)
            self.assertIs(seen[0], inputs)
            self.assertEqual(seen[1:], [first, then])
            seen.clear()
            if call is kept:
                self.assertEqual((found[2].data_ptr(), found[3].data_ptr()), (address, address + 28))

    def test_fast_path(self):
        """The outputs of the partition's function are returned; if it returns none, the inputs stay unchanged."""
        for call, outputs in (
            (CALL, [torch.zeros(64), torch.zeros(64)]),
            (CALL.replace("[arg2_1, arg0_1, arg1_1]", "[arg0_1, arg1_1, arg2_1]"), [torch.zeros(64), 1]),
            (CALL.replace("None, )", "arg1_1, )"), [2, torch.zeros(64)]),
        ):
            partition = Partition(outputs)
            runner = self.runner(call, partition)
            self.assertIsNone(shortened(runner.call).fast_call)  # no function of ours
            replay = mock.Mock(side_effect=lambda inputs, _, partition=partition: partition(inputs))
            function = FakeFunction(replaying(replay), 7)
            partition.function = SimpleNamespace(dispatch=function)
            short = shortened(runner.call)
            given_ = tensors_numbered(3)
            expected, inputs = runner.call(list(given_)), list(given_)
            self.assertAreSame(short.fast_call(inputs), expected)
            self.assertEqual((inputs, function.was_asked), ([], False))
            self.assertAreIdentical(*partition.seen[-2:])
            replay.side_effect = lambda *_: None
            inputs = list(given_)
            self.assertIsNone(short.fast_call(inputs))
            self.assertAreIdentical(inputs, given_)
            self.assertTrue(function.was_asked)
            replay.side_effect = None  # it would give something again
            # Inductor replaces the partition with a graphed one, and may do so after the code was read.
            runner.partitions[0] = other = Partition(outputs)
            self.assertIsNone(short.fast_call(inputs))
            for _ in range(2):
                short(list(given_))
                self.assertEqual(len(other.seen), 1)
                other = Partition(outputs)
                runner.recursively_apply_fns([lambda _, other=other: other])

    def test_there_is_no_fast_path_without_the_native_module_or_all_inputs(self):
        """Inputs that were left out could not be put back."""
        partition = Partition(tensors_numbered(2))
        partition.function = SimpleNamespace(dispatch=None)
        with mock.patch.object(binding, "extension", None):
            self.assertIsNone(self.check(self.runner(CALL, partition), 3, partition).fast_call)
        runner = self.runner(CALL.replace("[arg2_1, arg0_1, arg1_1]", "[arg2_1, arg1_1]"), partition)
        self.assertFalse(hasattr(self.check(runner, 3, partition), "fast_call"))

    def test_code_with_another_number_of_partitions_is_not_shortened(self):
        module, partition = self.module(runner_of(CALL)), Partition(tensors_numbered(2))
        for partitions in ([], [partition] * 2, (partition,), partition, None):
            self.assertIsNone(shortened(module.Runner(partitions).call))
        more = "partition1_args = [buf0]\n(buf1,) = self.partitions[1](partition1_args)"
        for partitions in ([partition], [partition] * 2):
            self.check_refused(CALL.replace("del partition0_args", more), *partitions)
        self.check_refused("arg0_1, = args\nargs.clear()\nreturn (reinterpret_tensor(arg0_1, (2, ), (1, ), 2), )")

    def test_only_methods_of_a_runner_with_a_source_are_shortened(self):
        partition, source = Partition(tensors_numbered(2)), runner_of(CALL)
        runner, wrapped = self.runner(CALL, partition), self.runner(CALL, partition)
        self.assertIsNotNone(shortened(runner.call))
        original = type(wrapped).call
        type(wrapped).call = functools.wraps(original)(lambda self, args: ["wrapped", *original(self, args)])
        renamed = self.module(source.replace("class Runner", "class Other")).Other([partition])
        derived = type("Derived", (type(runner),), {})([partition])
        builtin = type("Runner", (list,), {"partitions": [partition]})()
        others = [
            self.module(source.replace("def call(self, args)", definition)).Runner([partition])
            for definition in ("def call(self, inputs)", "def call(args, self)", "async def call(self, args)")
        ]
        for filename in ("<string>", str(self.folder / "gone.py")):
            exec(compile(HEAD + source, filename, "exec"), namespace := {})
            others.append(namespace["Runner"]([partition]))
        calls = [other.call for other in (wrapped, renamed, derived, *others)]
        for call in (*calls, original, lambda inputs: runner.call(inputs), runner, builtin.append, len, None):
            self.assertIsNone(shortened(call), call)
        (self.folder / "generated1.py").unlink()
        self.assertIsNone(shortened(runner.call))

    def test_code_that_does_more_or_differs_is_not_shortened(self):
        """Statements may not be added, put into a block, replaced or left out."""
        lines = CALL.strip().splitlines()

        def check_edited(kept, inserted, rest):
            code = "\n".join([*lines[:kept], *inserted, *rest])
            with self.subTest(code):
                self.check_refused(code)

        for more, places in ((MORE, range(1, 7)), (MORE_BEHIND, [5, 6])):
            for statement, place in itertools.product(more.strip().splitlines(), places):
                check_edited(place, [statement], lines[place:])
        blocks = "with torch.no_grad():", "if True:", "while True:", "def inner():"
        for block, begin in itertools.product(blocks, range(1, 7)):
            check_edited(begin, [block], [f"    {line}" for line in lines[begin:]])
        for number, instead in INSTEAD.items():
            for other in ["", *instead.strip().splitlines()]:
                check_edited(number, [other.strip()], lines[number + 1 :])
        check_edited(1, lines[:1], lines[1:])  # taken apart twice
        twice = [line.replace("(buf0, buf1)", "(buf0, buf0)") for line in lines[:-1]]
        self.check_refused("\n".join([*twice, "return (buf0, buf0, )"]))


class TestInductor(RunnerTestCase):
    """Code that Inductor writes for an absent GPU is shortened."""

    def check_graph(self, graph):
        source = graph.source_code
        text = re.search(r"^class Runner.*?(?=^runner = )", source, re.DOTALL | re.MULTILINE).group()
        self.assertRegex(source, r"\nrunner = Runner\(partitions=\[\w+,?\]\)")
        inputs, given_, outputs = (
            re.findall(r"\w+", found.group(1)) if (found := re.search(pattern, text)) else []
            for pattern in (r"\n *(.*) = args\n", r"partition0_args = \[(.*)\]", r"\((.*)\) = self.partitions\[0\]")
        )
        partition = Partition([given_.index(o) if o in given_ else torch.zeros(4096) for o in outputs])
        self.check(self.module(text).Runner([partition]), len(inputs), partition)
        return text

    def test_code_of_one_partition_is_shortened(self):
        def several(x, y, z):
            return y + 1, x @ y, x, (x @ z).view(-1)[2:], 3, None, (x @ y).unbind(0)[1], z[0]

        (graph,) = lower(several, [on_gpu(8, 8) for _ in range(3)])
        self.assertIn("reinterpret_tensor", self.check_graph(graph).rsplit("return", 1)[1])
        for fn, arguments in (
            (torch.sin, (on_gpu(4),)),
            (lambda x, y: [x.add_(y)][1:], (on_gpu(4), on_gpu(4))),
            (lambda: torch.ones(4, device="cuda"), ()),
            (lambda x: torch.rand(4, device=x.device) + x, (on_gpu(4),)),
        ):
            (graph,) = lower(fn, arguments)
            self.check_graph(graph)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 8))
        forward, backward = lower(model, (on_gpu(4, 8),), training=True)
        self.check_graph(forward)
        self.assertIn("None", self.check_graph(backward).rsplit("return", 1)[1])

        def step(x):
            return (x * 2).sum(0) + x.size(0)

        def any_size(*tensors):
            for x in tensors:
                torch._dynamo.graph_break()
                y = step(x)
            return y

        self.assertRegex(self.check_graph(lower(any_size, (on_gpu(4, 8), on_gpu(5, 8)))[-1]), r"\n *s\d+ = arg0_1\n")


if __name__ == "__main__":
    run_tests()
