"""Profiles on disk: round trips, keys, damage, and the command that lists them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from unittest import mock

import torch
from commands import WithFolder, run
from fake_driver import FakeApi
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees import __main__ as command_line
from pygraph_trees.cuda import driver as driver_module
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.selection import profiles as module
from pygraph_trees.selection.decision import Execution
from pygraph_trees.selection.profiles import Kept, NoCacheFolder, Profile, Profiles, ProfilesUnusable

MACHINE = {"gpu": "NVIDIA H200", "cpu": "a CPU", "torch": "2.11.0+cu130"}
DAY_S = 86400.0


def key(number: int) -> str:
    return f"{number:064x}"


KEY = key(0)


def profile(number: int = 0, at: str = KEY, decided_s: float = 1e9) -> Profile:
    """A profile with numbered fields."""
    return Profile(at, f"net {number}", list(Execution)[number % 2], f"decision {number}", decided_s)


class Folder(WithFolder):
    def setUp(self):
        super().setUp()
        self.profiles = Profiles(self.folder / "cache" / "pygraph_trees")
        self.file = self.profiles.folder / f"{KEY}.json"
        module._warned.clear()

    def put(self, content: bytes) -> None:
        self.profiles.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(content)

    @contextlib.contextmanager
    def warned(self, *kinds):
        """Checks that exactly these warnings are given."""
        module._warned.clear()
        with warnings.catch_warnings(record=True, action="always") as found:
            yield found
        self.assertEqual([w.category for w in found], list(kinds))


class TestRoundTrip(Folder):
    def test_store_and_find(self):
        """The file is small and readable for the users whom the umask allows, and nothing else is left."""
        with self.warned():
            self.assertIsNone(self.profiles.find(KEY))
            self.assertEqual((self.profiles.list(), self.profiles.clear()), ((), 0))
            for number in (1, 2):
                self.profiles.store(profile(number))
                self.assertEqual(self.profiles.find(KEY), profile(number))
            self.assertIsNone(self.profiles.find(key(1)))
        self.assertEqual(list(self.profiles.folder.iterdir()), [self.file])
        self.assertLess(self.file.stat().st_size, 1000)
        umask = os.umask(0)
        os.umask(umask)
        self.assertEqual(self.file.stat().st_mode & 0o777, 0o666 & ~umask)

    def test_ages(self):
        self.profiles.store(profile(decided_s=100 * DAY_S))
        found, stale = self.profiles.find(KEY), []
        for day in (98.9, 99.5, 100, 101, 129.9, 130.1, 1000):
            with mock.patch.object(time, "time", lambda day=day: day * DAY_S):
                self.assertEqual(found.age_s, (day - 100) * DAY_S)
                stale += [day] * found.is_stale
        self.assertEqual(stale, [98.9, 130.1, 1000])


class TestDamage(Folder):
    def check(self, content: bytes) -> None:
        """The content is no profile, one warning says so, and it can be replaced."""
        self.put(content)
        with self.warned(ProfilesUnusable) as found:
            self.assertIsNone(self.profiles.find(KEY))
            self.assertEqual(self.profiles.list(), ())
        text = str(found[0].message)
        self.assertIn(str(self.profiles.folder), text)
        self.assertIn("`python -m pygraph_trees profiles --clear`", text)
        self.profiles.store(profile())
        self.assertEqual(self.profiles.find(KEY), profile())

    def test_missing_fields_and_wrong_values(self):
        self.profiles.store(profile())
        data = json.loads(self.file.read_text())
        for name in data:
            self.check(json.dumps({other: value for other, value in data.items() if other != name}).encode())
            for wrong in (None, [], {}, [0], float("nan"), float("inf"), 10**400, "\ud800", "\x1b[2J"):
                if name != "format":
                    self.check(json.dumps({**data, name: wrong}).encode())
        self.check(json.dumps({**data, "key": key(1)}).encode())  # of another file
        for content in (b'{"format": ' + b"9" * 5000 + b"}", b"", b"?", b"\xff", b"[]", b"{}", b"3", b'"a"', b"NaN"):
            self.check(content)

    def test_a_later_version(self):
        self.profiles.store(profile())
        self.put(json.dumps({**json.loads(self.file.read_text()), "new": {"a": 1}}).encode())
        with self.warned():
            self.assertEqual(self.profiles.find(KEY), profile())
            self.put(json.dumps({"format": module.FORMAT + 1, "key": 3}).encode())
            self.assertIsNone(self.profiles.find(KEY))
            self.assertEqual(self.profiles.list(), ())

    def test_others_are_read(self):
        """Many damaged files give one warning."""
        self.profiles.store(profile(at=key(99)))
        for number in range(1, 21):
            self.put(b"?")
            self.file.rename(self.file.with_name(f"{key(number)}.json"))
        with self.warned(ProfilesUnusable):
            self.assertEqual(self.profiles.list(), (profile(at=key(99)),))
        self.assertEqual(self.profiles.clear(), 21)


class TestDisk(Folder):
    def test_a_folder_that_cannot_be_made(self):
        self.profiles.folder.parent.mkdir()
        self.profiles.folder.write_text("")
        inside = Profiles(self.profiles.folder / "a")
        for profiles, why in ((self.profiles, "File exists"), (inside, "Not a directory")):
            with self.warned(ProfilesUnusable) as found:
                for _ in range(2):
                    profiles.store(profile())
                    self.assertIsNone(profiles.find(KEY))
                self.assertEqual((profiles.list(), profiles.clear()), ((), 0))
            self.assertIn(why, str(found[0].message))

    def test_a_folder_in_its_place(self):
        self.file.mkdir(parents=True)
        with self.warned(ProfilesUnusable):
            self.assertIsNone(self.profiles.find(KEY))
            self.profiles.store(profile())
        self.assertEqual(list(self.profiles.folder.iterdir()), [self.file])

    def test_clear_takes_what_was_left_behind_and_not_what_is_written(self):
        self.profiles.store(profile())
        old, new = (self.file.with_suffix(f".{name}.tmp") for name in ("old", "new"))
        old.write_text("")
        new.write_text("")
        os.utime(old, (0, time.time() - 7200))
        self.assertEqual(self.profiles.clear(), 1)
        self.assertEqual(list(self.profiles.folder.iterdir()), [new])


class TestKept(Folder):
    """What a trial looks up in profiles, and what it stores in them."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(Profiles, "default", staticmethod(lambda: self.profiles)))
        self.machine = MACHINE
        self.enterContext(mock.patch.object(module, "machine", lambda device: self.machine))

    def kept(self, code="cabc", what="Net", **settings):
        return Kept(code, what, 0, settings)

    def test_for_the_next_process(self):
        first, inputs = self.kept(what="\x1b[2J\ud800" + "n" * 300, a="1", b="2"), [torch.ones(2, 3), 4]
        self.assertIsNone(first.find(inputs))
        first.store(Execution.UNGRAPHED, "in numbers")
        found = self.kept(b="2", a="1").find(inputs)
        self.assertEqual((found.way, found.text, found.what), (Execution.UNGRAPHED, "in numbers", "?[2J?" + "n" * 195))
        self.assertRegex(found.key, "^[0-9a-f]{64}$")
        self.assertIsNone(self.kept("cabd", a="1", b="2").find(inputs))
        self.assertIsNone(self.kept(a="1", b="3").find(inputs))
        tensor, same = inputs[0], self.kept(a="1", b="2")
        for values in ([tensor.t(), 4], [tensor.long(), 4], [tensor, 5], [tensor, None], []):
            self.assertIsNone(same.find(values))
        with torch.backends.cudnn.flags(benchmark=True):
            self.assertIsNone(self.kept(a="1", b="2").find(inputs))  # libraries may choose other kernels
        for name in MACHINE:
            self.machine = {**MACHINE, name: "x"}
            self.assertIsNone(self.kept(a="1", b="2").find(inputs))

    def test_old_ones_are_measured_again(self):
        first, then_s = self.kept(), time.time() - 31 * DAY_S
        self.assertIsNone(first.find([]))
        with mock.patch.object(time, "time", lambda: then_s):
            first.store(Execution.GRAPHED, "then")
        again = self.kept()
        self.assertIsNone(again.find([]))
        self.assertEqual([p.decided_s for p in self.profiles.list()], [then_s])
        again.store(Execution.UNGRAPHED, "now")
        self.assertEqual(self.kept().find([]).text, "now")

    def test_without_a_folder_or_a_question(self):
        no_folder = mock.Mock(side_effect=NoCacheFolder(folder="/nowhere", why="no space"))
        with mock.patch.object(Profiles, "default", no_folder):
            kept = self.kept()
            self.assertIsNone(kept.find([]))
            kept.store(Execution.GRAPHED, "in numbers")
        self.kept().store(Execution.GRAPHED, "in numbers")
        self.assertEqual(self.profiles.list(), ())


class TestMachine(TestCase):
    def test_hardware_and_software(self):
        with (
            mock.patch.object(torch.cuda, "get_device_name", lambda device: f"GPU {device}"),
            mock.patch.object(driver_module, "driver", lambda: Driver(FakeApi())),
        ):
            found = module.machine(1)
            self.assertEqual((found["gpu"], found["driver"], found["torch"]), ("GPU 1", "13000", torch.__version__))
            with mock.patch.dict(sys.modules, triton=None):
                self.assertEqual(module.machine(0)["triton"], "none")
            with mock.patch.object(driver_module, "driver", lambda: None):
                self.assertEqual(module.machine(0)["driver"], "unknown")


class TestCommand(Folder):
    def run_command(self, *argv):
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(self.profiles.folder.parent)):
            status, out, err = run(command_line.main, "profiles", *argv)
        return status, out.replace(str(self.profiles.folder), "FOLDER"), err

    def test_list(self):
        now_s = time.time()
        for number, decided_s in enumerate((now_s - 5 * 3600, now_s - 90, now_s - 41 * DAY_S)):
            self.profiles.store(profile(number, key(number), decided_s))
        status, out, err = self.run_command()
        self.assertEqual((status, err), (0, ""))
        self.assertExpectedInline(
            out,
            """\
net 1: decision 1, measured 2 min ago

net 0: decision 0, measured 5 h ago

net 2: decision 2, measured 41 d ago, stale

3 profiles in FOLDER
""",
        )

    def test_clear(self):
        for argv, out in (((), "0 profiles in FOLDER\n"), (("--clear",), "0 profiles removed from FOLDER\n")):
            self.assertEqual(self.run_command(*argv), (0, out, ""))
        self.profiles.store(profile())
        self.assertEqual(self.run_command("--clear"), (0, "1 profile removed from FOLDER\n", ""))
        self.assertEqual(self.profiles.list(), ())
        self.put(b"?")
        with self.warned(ProfilesUnusable):
            self.assertEqual(self.run_command(), (0, "0 profiles in FOLDER\n", ""))
        self.assertEqual(self.run_command("--clear"), (0, "1 profile removed from FOLDER\n", ""))
        self.file.mkdir()
        status, out, err = self.run_command("--clear")
        self.assertEqual((status, out), (2, ""))
        self.assertRegex(err, "^error: profiles in .* could not be removed: ")


if __name__ == "__main__":
    run_tests()
