"""What programs of torch 2.13 and later ask for works as with torch alone, or the graph is left to torch or to them."""

from __future__ import annotations

import contextlib
import functools
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from recordings_on_cpu import SIZE, Function, OnCpuTestCase
from torch.cuda import graphs
from torch.testing._internal.common_utils import run_tests

_Graph: Any = torch.cuda.CUDAGraph
_UPSTREAM = _Graph.__mro__[1]  # in C++, or a dummy if torch was built without CUDA


class _Hooked(Function):
    """A function whose graph is torch's, with its hooks; ``events`` has the launches among what hooks append."""

    def __init__(self) -> None:
        self.events: list[str] = []
        super().__init__()

    def _fill(self) -> None:
        self.events.append("launch")
        super()._fill()

    def _record(self, *args: Any) -> Any:
        made = super()._record(*args)
        made.graph = _Graph.__new__(_Graph)  # the constructor needs a GPU
        made.native = made._native(in_python=False)
        return made

    def noting(self, event: str) -> Callable[[Any], None]:
        return lambda graph: self.events.append(event)


@contextlib.contextmanager
def _launching(function: list[_Hooked]) -> Iterator[None]:
    replaced = {"replay": lambda graph: function[0]._fill(), "_has_graph_exec": True}
    if _UPSTREAM.__module__ == "torch._utils":
        replaced["__new__"] = lambda cls, *_: object.__new__(cls)
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(_UPSTREAM, name, value, create=True))
        yield


@unittest.skipUnless(hasattr(graphs, "register_graph_replay_start_hook"), "torch has no hooks on replays")
class TestHooksOnReplays(OnCpuTestCase):
    def setUp(self) -> None:
        super().setUp()
        held: list[_Hooked] = []
        self.enterContext(_launching(held))

        class Made(_Hooked):
            def __init__(self) -> None:
                held.append(self)
                super().__init__()

        self.function = Made()
        self.graph: Any = self.function.recording.graph

    def check(self, events: str, *, fast: bool, value: float = 3.0) -> None:
        self.function.events.clear()
        (output,) = self.function.call(value, fast=fast)
        self.assertEqual((output.tolist(), " ".join(self.function.events)), ([value] * SIZE, events))

    def test_a_replay_calls_the_hooks_around_its_launch(self) -> None:
        """Hooks of all graphs come before those of one graph; a replay stays fast, and none is called once removed."""
        noting, graph = self.function.noting, self.graph
        handles = [
            graph.register_replay_start_hook(noting("own start")),
            graph.register_replay_end_hook(noting("own end")),
            graphs.register_graph_replay_start_hook(noting("start")),
            graphs.register_graph_replay_end_hook(noting("end")),
        ]
        for fast in (True, False):
            self.check("start own start launch end own end", fast=fast)
        for handle in handles:
            handle.remove()
        for fast in (True, False):
            self.check("launch", fast=fast)

    def test_errors_of_hooks(self) -> None:
        """Torch ignores an error of a hook on all graphs. One of a hook on a graph reaches the program, once."""
        raising = {"raise": lambda _: self.fail("hook"), "in C": lambda _: int("hook")}
        for name, hook in raising.items():
            for fast in (True, False):
                for at in ("start", "end"):
                    with self.subTest(name=name, fast=fast, at=at):
                        handle = getattr(graphs, f"register_graph_replay_{at}_hook")(hook)
                        self.check("launch", fast=fast)
                        handle.remove()
                        handle = getattr(self.graph, f"register_replay_{at}_hook")(hook)
                        self.function.events.clear()
                        with self.assertRaisesRegex((AssertionError, ValueError), "hook"):
                            self.function.call(4.0, fast=fast)
                        self.assertEqual(self.function.events, ["launch"] * (at == "end"))
                        handle.remove()
                        self.check("launch", fast=fast)
        self.assertIsNone(self.function.recording.wrapped_function.model.why_ungraphed)

    def test_a_hook_that_calls_the_function(self) -> None:
        """Such a call runs un-graphed: the graph has its addresses, but is not launched yet."""
        for fast in (True, False):
            found: list[Any] = []

            def call(graph: Any, found: list[Any] = found) -> None:
                with mock.patch.object(self.function.manager, "_run_beside", return_value=["beside"]):
                    found.append(self.function.manager.run([], self.function.id))

            handle = self.graph.register_replay_start_hook(call)
            self.check("launch", fast=fast, value=5.0)
            self.assertEqual(found, [["beside"]])
            handle.remove()

    def test_a_launch_that_fails_is_no_error_of_a_hook(self) -> None:
        """The call then runs un-graphed, since nothing was launched."""
        handle = graphs.register_graph_replay_start_hook(self.function.noting("start"))
        self.addCleanup(handle.remove)
        with (
            mock.patch.object(_UPSTREAM, "replay", functools.partial(int, "no launch")),  # as in C++, without a frame
            self.assertRaisesRegex(AssertionError, "called un-graphed"),
        ):
            self.function.call(3.0, fast=False)


if __name__ == "__main__":
    run_tests()
