"""Patching, on a fake driver that checks its callers. An instantiated graph holds the addresses that it was given, and
nothing else in it changes. No node is set without need. A patch that fails half-way is never taken for a whole one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from fake_driver import CUresult, FakeApi, little
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.copy_nodes import HOST_SOURCE, TARGET, MemcpyNode, MemsetNode
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.graph_nodes import GraphNode, KernelNode
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection.patching import CapturedCopies, HalfPatched, Patches, PatchFailed
from pygraph_trees.indirection.relocations import Relocation

SET_CALLS = {kind: f"cuGraphExec{kind.title()}NodeSetParams" for kind in ("kernel", "memcpy", "memset")}
SET_CAPTURED_CALLS = {kind: f"cuGraph{kind.title()}NodeSetParams" for kind in ("memcpy", "memset")}
PLACEHOLDERS = [0x7E00_9000_0000 + i * 0x20_0000 for i in range(6)]
RECORDED = dict(enumerate(PLACEHOLDERS))


@dataclass(frozen=True)
class Held:
    """8 bytes of a node: the address of an input plus an addend, or a number if ``input`` is None."""

    input: int | None
    value: int  # addend or number

    def at(self, addresses: dict[int, int]) -> int:
        return self.value if self.input is None else addresses[self.input] + self.value


@dataclass(frozen=True)
class NodeSpec:
    kind: str
    held: tuple[Held, ...]  # kernel: all words of its block; memcpy: source and target; memset: target
    sizes: tuple[int, ...] = ()  # kernel: words of each parameter
    tail: bytes = b""  # kernel: a last parameter that is not made of words
    packed: bool = False
    func: bool = True
    options: tuple[object, ...] = ()  # memcpy: kinds of memory; memset: bytes of an element

    def make(self, api: FakeApi) -> int:
        values = iter([held.at(RECORDED) for held in self.held])
        if self.kind == "memcpy":
            return api.make_memcpy(*values, 64, *self.options)
        if self.kind == "memset":
            return api.make_memset(*values, 64, *self.options)
        parameters = [little(*itertools.islice(values, size)) for size in self.sizes]
        return api.make_kernel(parameters + [self.tail] * bool(self.tail), packed=self.packed, func=self.func)

    def bytes_at(self, addresses: dict[int, int]) -> bytes:
        return little(*(held.at(addresses) for held in self.held)) + self.tail

    def inputs(self) -> set[int]:
        return {held.input for held in self.held if held.input is not None}


def kernel(*held: Held) -> NodeSpec:
    return NodeSpec("kernel", held, sizes=(1,) * len(held))


def memset(target: Held) -> NodeSpec:
    return NodeSpec("memset", (target,))


class Setup:
    """An instantiated graph of such nodes, and the patches of some of its inputs."""

    def __init__(self, specs: list[NodeSpec], inputs: list[int], order=sorted, lacking=()) -> None:
        self.api = FakeApi()
        self.driver = Driver(self.api)
        for call, where in lacking:
            self.api.lack(call, where)
        self.specs, self.inputs = specs, inputs
        self.handles = [spec.make(self.api) for spec in specs]
        self.graph = self.api.make_graph(*self.handles)
        self.exec, self.patches = self.instantiate(order)
        self.api.calls.clear()

    def scan(self, order=sorted) -> tuple[list[GraphNode], list[Relocation]]:
        """What a scan would find."""
        driver, specs = self.driver, self.specs
        makers = {"kernel": KernelNode, "memcpy": MemcpyNode, "memset": MemsetNode}
        nodes = [i for i, spec in enumerate(specs) if spec.inputs()]
        relocations = [
            Relocation(node=position, offset=8 * word, input=held.input, addend=held.value)
            for position, i in enumerate(nodes)
            for word, held in enumerate(specs[i].held)
            if held.input is not None
        ]
        made = [makers[specs[i].kind](driver, self.handles[i]) for i in nodes]
        self.api.calls.clear()
        return made, order(relocations, key=lambda relocation: (relocation.node, relocation.offset))

    def instantiate(self, order=sorted) -> tuple[int, Patches]:
        nodes, relocations = self.scan(order)
        exec_ = self.api.instantiate(self.graph)
        recorded = [PLACEHOLDERS[i] for i in self.inputs]
        return exec_, Patches(self.driver, nodes, relocations, self.inputs, exec_, self.driver.context(), recorded)

    def held(self, exec_: int | None = None) -> list[bytes]:
        return [self.api.exec_parameters(exec_ or self.exec, handle) for handle in self.handles]

    def expected(self, addresses: list[int]) -> list[bytes]:
        every = RECORDED | dict(zip(self.inputs, addresses, strict=True))
        return [spec.bytes_at(every) for spec in self.specs]

    def due(self, old: list[int], new: list[int]) -> Counter[str]:
        """The set calls that such a change needs, and no more."""
        changed = {i for i, a, b in zip(self.inputs, old, new, strict=True) if a != b}
        due = [s.kind for s in self.specs if s.inputs() & (changed if s.kind == "kernel" else set(self.inputs))]
        return Counter(SET_CALLS[kind] for kind in due)


def held_words(least: int, most: int, numbers_end: int = 2**64):
    addresses = st.builds(Held, st.integers(0, len(PLACEHOLDERS) - 1), st.integers(-0x1_0000, 0x20_0000))
    numbers = st.builds(Held, st.none(), st.integers(0, numbers_end - 1))
    return st.lists(addresses | numbers, min_size=least, max_size=most).map(tuple)


@st.composite
def kernels(draw) -> NodeSpec:
    held = draw(held_words(0, 8))
    sizes = []
    while sum(sizes) < len(held):
        sizes.append(draw(st.integers(1, len(held) - sum(sizes))))
    tail, packed, func = draw(st.tuples(st.binary(max_size=4), st.booleans(), st.booleans()))
    return NodeSpec("kernel", held, tuple(sizes), tail, packed, func)


MEMORY = st.sampled_from(["DEVICE", "UNIFIED"])
NODES = st.one_of(
    kernels(),
    st.builds(NodeSpec, st.just("memcpy"), held_words(2, 2, 2**47), options=st.tuples(*[MEMORY] * 2)),
    st.builds(NodeSpec, st.just("memset"), held_words(1, 1, 2**47), options=st.tuples(st.sampled_from([1, 2, 4]))),
)
GRAPHS = st.lists(NODES, max_size=8)
PATCHED = st.permutations(range(len(PLACEHOLDERS))).flatmap(
    lambda order: st.integers(0, len(PLACEHOLDERS)).map(lambda count: list(order[:count]))
)
# Few addresses, so that inputs share one, keep one, or get an earlier one back.
ADDRESSES = st.sampled_from([*PLACEHOLDERS[:2], 0x7F12_3456_7800, 0x7F12_3456_7A00, 2**57 - 2**22])
STEPS = st.lists(st.lists(ADDRESSES, min_size=6, max_size=6), max_size=5)
EXAMPLES = settings(max_examples=80, deadline=None)


class TestPatching(TestCase):
    @EXAMPLES
    @given(GRAPHS, PATCHED, STEPS, st.randoms(use_true_random=False))
    def test_graph_holds_what_it_is_given(self, specs, inputs, steps, random):
        """Another instantiation gets all addresses, changed or not."""
        setup = Setup(specs, inputs, order=lambda relocations, key: random.sample(relocations, len(relocations)))
        patches, now, total = setup.patches, [PLACEHOLDERS[i] for i in inputs], 0
        self.assertEqual(setup.held(), setup.expected(now))
        for step in steps:
            new = step[: len(inputs)]
            due = setup.due(now, new)
            setup.api.calls.clear()
            lent = list(new)
            count = patches.apply(lent)
            lent.clear()
            self.assertEqual(setup.held(), setup.expected(new))
            self.assertEqual(Counter(setup.api.calls), due)
            self.assertEqual(count, due.total())
            now, total = new, total + count
            self.assertEqual((patches.addresses, patches.sets.value, patches.broken), (new, total, False))
            if random.random() < 0.5:
                setup.exec = setup.api.instantiate(setup.graph)
                patches.rebind(setup.exec)
                total += patches.apply(new)
                self.assertEqual(setup.held(), setup.expected(new))

    def test_other_memory_at_an_address_is_set_again(self):
        setup = Setup([kernel(Held(0, 0)), kernel(Held(1, 0)), kernel(Held(0, 8), Held(1, 0))], [0, 1])
        addresses = [0x7000_0000_0000, 0x7000_0001_0000]
        setup.patches.apply(addresses)
        self.assertEqual([setup.patches.apply(addresses, forced) for forced in ((), [0], [0, 1])], [0, 2, 3])

    def test_a_refusal_names_the_input(self):
        specs, inputs = [kernel(Held(5, 0)), memset(Held(3, 0))], [2, 3, 4, 5]
        specs.append(NodeSpec("memcpy", (Held(4, 0), Held(2, 0))))
        cases = ("kernel", 5, 5), ("memcpy", 4, 4), ("memcpy", 2, 2), ("memset", 5, 3), ("memset", 3, 3)
        for kind, changed, index in cases:
            setup = Setup(specs, inputs)
            setup.api.fail(SET_CALLS[kind], code=CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            message = f"^{SET_CALLS[kind]} refused an address of input {index}: CUDA_ERROR_OUT_OF_MEMORY$"
            with self.assertRaisesRegex(PatchFailed, message) as raised:
                setup.patches.apply([PLACEHOLDERS[i] + 0x200 * (i == changed) for i in inputs])
            self.assertEqual(raised.exception.index, index)
            self.assertIsInstance(raised.exception.__cause__, DriverError)

    def test_an_interrupt_half_way_breaks_the_patches(self):
        setup = Setup([kernel(Held(0, 0)), kernel(Held(0, 8)), kernel(Held(0, 16))], [0])
        setup.api.fail(SET_CALLS["kernel"], 1, raises=KeyboardInterrupt())
        self.assertRaises(KeyboardInterrupt, setup.patches.apply, [0x7F00_0000_0000])
        self.assertTrue(setup.patches.broken)
        # The graph seems to hold the recorded addresses, but does not.
        setup.api.calls.clear()
        self.assertRaises(HalfPatched, setup.patches.apply, [PLACEHOLDERS[0]])
        self.assertEqual(setup.api.calls, [])

    def test_an_absent_call_is_an_error_only_if_it_is_needed(self):
        for kind, node in (("kernel", kernel(Held(0, 0))), ("memset", memset(Held(0, 0)))):
            with self.assertRaisesRegex(DriverError, f"^{SET_CALLS[kind]} returned NOT_FOUND$"):
                Setup([node], [0], lacking=[(SET_CALLS[kind], "bindings")])
            setup = Setup([node], [0], lacking=[(SET_CALLS[kind], "driver")])
            with self.assertRaisesRegex(PatchFailed, "refused an address of input 0: NOT_FOUND$"):
                setup.patches.apply([0x7F00_0000_0000])
            self.assertTrue(setup.patches.broken)
        # A call for a kind of node that the graph does not have is not needed.
        setup = Setup([kernel(Held(0, 0)), memset(Held(1, 0))], [0], lacking=[(SET_CALLS["memset"], "bindings")])
        self.assertEqual(setup.patches.apply([0x7F00_0000_0000]), 1)


class TestCapturedCopies(TestCase):
    @EXAMPLES
    @given(GRAPHS, PATCHED, st.lists(ADDRESSES, min_size=6, max_size=6), st.randoms(use_true_random=False))
    def test_later_instances_hold_what_the_copies_are_given(self, specs, inputs, given, random):
        setup, given = Setup(specs, inputs), dict(zip(inputs, given, strict=False))
        nodes, relocations = setup.scan(lambda relocations, key: random.sample(relocations, len(relocations)))
        CapturedCopies(nodes, relocations).point(given)
        due = Counter(SET_CAPTURED_CALLS[s.kind] for s in specs if s.kind != "kernel" and s.inputs() & given.keys())
        self.assertEqual(Counter(setup.api.calls), due)
        self.assertEqual(setup.held(), [spec.bytes_at(RECORDED) for spec in specs])
        later, patches = setup.instantiate()
        expected = [spec.bytes_at(RECORDED if spec.kind == "kernel" else RECORDED | given) for spec in specs]
        self.assertEqual(setup.held(later), expected)
        patches.apply([given[i] for i in inputs])
        self.assertEqual(setup.held(later), setup.expected([given[i] for i in inputs]))

    def test_a_source_on_the_host_is_taken_back_too(self):
        """Patches may have put the program's own memory in the node."""
        api = FakeApi()
        node = MemcpyNode(Driver(api), api.make_memcpy(0x1008, PLACEHOLDERS[0], 64, "HOST"))
        graph = api.make_graph(node.handle)
        copies = CapturedCopies([node], [Relocation(0, TARGET, 0, 0), Relocation(0, HOST_SOURCE, 1, 8)])

        def captured() -> bytes:
            return api.exec_parameters(api.instantiate(graph), node.handle)

        copies.point({0: 0x7F00_0000_0000})
        self.assertEqual(captured(), little(0x1008, 0x7F00_0000_0000))
        node.word(HOST_SOURCE).value = 0x5555_0000
        copies.point_back({0: PLACEHOLDERS[0], 1: 0x1000})
        self.assertEqual(captured(), little(0x1008, PLACEHOLDERS[0]))


if __name__ == "__main__":
    run_tests()
