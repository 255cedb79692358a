"""tools/bench/sections.py: clocks around sections, which are put back, and the table that is made of them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from bench import sections
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.benchmark.program import Program
from pygraph_trees.benchmark.rings import Ring


class Outer:
    def work(self, times: int) -> int:
        return sum(self.part(n) for n in range(times))

    def part(self, n: int) -> int:
        if n > 5:
            raise ValueError(n)
        return n


class Inner(Outer): ...


WATCHED = ((Outer, "work", "all"), (Inner, "part", "a part"))


class TestClocks(TestCase):
    def test_own_time_is_without_what_is_inside(self):
        clocks = sections.Clocks(read=itertools.count(step=10).__next__)
        with clocks.watching(WATCHED):
            self.assertEqual(Inner().work(3), 3)
            with clocks.noting() as found:
                self.assertEqual(Inner().work(3), 3)
                self.assertEqual(Outer().work(3), 3)  # its parts are not watched
            Inner().work(2)
        self.assertEqual(
            {name: (s.calls, s.ns, s.own_ns) for name, s in found.items()},
            {"a part": (3, 30, 30), "all": (2, 70 + 10, 40 + 10)},
        )

    def test_what_raises_is_counted_too(self):
        clocks = sections.Clocks(read=itertools.count(step=10).__next__)
        with clocks.watching(WATCHED), clocks.noting() as found:
            with self.assertRaisesRegex(ValueError, "6"):
                Inner().work(9)
            Inner().work(1)
        self.assertEqual((found["a part"].calls, found["all"].calls), (8, 2))
        self.assertEqual(clocks._open, [])

    def test_all_is_put_back(self):
        work, names = Outer.work, set(vars(Inner))
        with contextlib.suppress(KeyError), sections.Clocks().watching(WATCHED):
            self.assertIsNot(Outer.work, work)
            raise KeyError
        self.assertIs(Outer.work, work)
        self.assertEqual(set(vars(Inner)), names)

    def test_each_section_is_there(self):
        for watched in (sections.REPLAY, sections.RECORDING):
            self.assertEqual(len({label for _, _, label in watched}), len(watched))
            for owner, name, _ in watched:
                self.assertTrue(callable(inspect.getattr_static(owner, name)), f"{owner}.{name}")
            before = [inspect.getattr_static(owner, name) for owner, name, _ in watched]
            with sections.Clocks().watching(watched):
                pass
            for (owner, name, _), one in zip(watched, before, strict=True):
                self.assertIs(inspect.getattr_static(owner, name), one)

    def test_what_a_clock_costs(self):
        self.assertGreater(sections.Clocks().cost_ns(100), 0)


class TestResults(TestCase):
    def program(self) -> Program:
        return Program(lambda x: x * 2 + 1, (torch.ones(4),), name="SMALL")

    def test_replays(self):
        found = sections.replays("SMALL", self.program(), 3)
        self.assertEqual(
            [(r.way, r.regime) for r in found],
            [("upstream", "same"), ("upstream", "fresh"), ("ours", "same"), ("ours", "fresh")],
        )
        for result in found:
            calls, us, own = result.sections["compiled graph"]
            self.assertEqual((calls, us), (1.0, own))
            self.assertTrue(0 < own < result.clocked_us * 3, result)
            self.assertIn("outside of all", sections.table(result))

    def test_recordings(self):
        found = sections.recordings("SMALL", self.program(), 1)
        self.assertEqual(
            [(r.way, r.regime) for r in found if r.host_us > 0], [("upstream", "recording"), ("ours", "recording")]
        )

    def test_table(self):
        result = sections.Result(
            "MLP", "ours", "same", 30.0, 40.0, 2, {"launch": (1.0, 6.0, 6.0), "run": (2.0, 20.0, 14.0)}
        )
        self.assertEqual(
            sections.table(result).splitlines(),
            [
                "MLP, ours, same: 30.0 us of the host, 40.0 with clocks",
                "  section                            calls         us     own us",
                "  launch                               1.0       6.00       6.00",
                "  run                                  2.0      20.00      14.00",
                "  outside of all                                           20.00",
            ],
        )

    def test_programs(self):
        for name in ("MLP", "MLP-N", "CHAIN"):
            program = sections.PROGRAMS[name](torch.device("cpu"))
            outputs = program.step(program.fn, program.args, program.kwargs)
            self.assertTrue(torch.isfinite(outputs).all())
            self.assertEqual(program.name, name)

    def test_any_batch_size(self):
        """Of the sets of inputs that take turns, the first one says so for all."""
        program, given = sections.PROGRAMS["MLP-N"](torch.device("cpu")), []

        def backend(graph, inputs):
            given.append(inputs)
            return graph

        compiled, feed = torch.compile(program.fn, backend=backend), Ring(program, 3).fresh()
        for _ in range(6):
            inputs = next(feed)
            program.step(compiled, inputs.args, inputs.kwargs)
        self.assertEqual(len(given), 1)
        self.assertTrue(any(isinstance(value, torch.SymInt) for value in given[0]))


if __name__ == "__main__":
    run_tests()
