"""tools/bench/everything.py: its steps run one after another, are cut, fail, and are resumed."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from bench import everything
from bench.everything import TIME_IS_UP, Done, Step, run_all
from torch.testing._internal.common_utils import TestCase, run_tests


def python(code, name="one"):
    return Step(name, [sys.executable, "-c", code, "{out}"], "a step")


class TestEverything(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def done(self, **of):
        return Done(self.folder / "done.txt", {"code_hash": "first", **of})

    def run_all(self, *steps, done=None, **options):
        with mock.patch("builtins.print") as printed:
            status = run_all(steps, self.folder, "gpu-torch", self.done() if done is None else done, **options)
        return status, "\n".join(str(call.args[0]) for call in printed.call_args_list)

    def test_figures_and_what_is_printed(self):
        step = python("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('7'); print('a figure')")
        status, shown = self.run_all(step)
        self.assertEqual((status, "  a figure" in shown.splitlines()), (0, True))
        self.assertEqual((self.folder / "gpu-torch-one.json").read_text(), "7")
        self.assertEqual((self.folder / "gpu-torch-one.txt").read_text(), "a figure\n")
        self.run_all(dataclasses.replace(step, name="two", is_printed=False))
        self.assertEqual([path.name for path in self.folder.glob("*two*")], ["gpu-torch-two.json"])

    def test_goes_on_where_it_was_cut(self):
        counted = python(f"open({str(self.folder / 'count')!r}, 'a').write('x')")
        slow = python("import time; time.sleep(60)", "slow")
        with mock.patch.object(everything, "_LEAST_S", 0.0):
            status, shown = self.run_all(counted, slow, left_s=lambda: 5.0)
        self.assertEqual(status, TIME_IS_UP)
        self.assertRegex(shown, r"slow: cut after \d+ s")
        status, shown = self.run_all(counted, slow, left_s=lambda: 1.0)
        self.assertEqual((status, shown.splitlines()[0]), (TIME_IS_UP, "one: done before"))
        self.assertEqual(self.run_all(counted, again=True)[0], 0)
        self.assertEqual((self.folder / "count").read_text(), "xx")

    def test_a_step_that_fails_fails_alone(self):
        status, shown = self.run_all(python("raise SystemExit(5)"), python("", "other"))
        self.assertEqual((status, shown.splitlines()[-1]), (1, "failed: one"))
        self.assertIn("one: exit status 5 after", shown)
        self.assertNotIn("one", self.done())
        self.assertIn("other", self.done())
        self.assertNotIn("other", self.done(code_hash="second"))  # of other code, all is done again
        self.assertNotIn("other", self.done(gpu="another"))
        self.assertEqual(json.loads((self.folder / "done.txt").read_text())["of"], {"code_hash": "first"})

    def test_what_the_steps_run_is_there(self):
        made = str(everything.CACHES)  # by the step itself
        for step in everything.STEPS:
            self.assertEqual(step.command[0], sys.executable)
            paths = [Path(part.partition(".py:")[0]) for part in step.command[1:] if "/" in part and part != made]
            self.assertTrue(all((ROOT / path).exists() or path.with_suffix(".py").exists() for path in paths), paths)

    def test_command_line(self):
        with mock.patch("builtins.print") as printed:
            self.assertEqual(everything.main(["--list"]), 0)
        self.assertIn("what recording takes", printed.call_args.args[0])
        with mock.patch("sys.stderr") as errors, self.assertRaises(SystemExit):
            everything.main(["recordin"])
        self.assertIn("did you mean recording?", str(errors.write.call_args_list))
        if not torch.cuda.is_available():
            with mock.patch("builtins.print"):
                self.assertEqual(everything.main([]), 2)


if __name__ == "__main__":
    run_tests()
