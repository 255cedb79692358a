"""Profiles on disk: round trips, many writers and readers, damage of every kind, and the command that lists them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from fake_driver import FakeApi
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees import __main__ as command_line
from pygraph_trees.cuda import driver as driver_module
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.selection import profiles as module
from pygraph_trees.selection.decision import Comparison, Decision, Execution, Gain
from pygraph_trees.selection.profiles import (
    FORMAT,
    DamagedProfiles,
    Kept,
    Machine,
    NoCacheFolder,
    Profiles,
    ProfilesNotKept,
    ProfilesNotRemoved,
    Subject,
    describe,
)

MACHINE = Machine("NVIDIA H200", "a CPU", "13000", "2.11.0+cu130", "3.6.0", "0.1.0")
SUBJECT = Subject("graph", ("float32[8, 16]",), MACHINE, {"indirection": "auto"})
GAIN = Gain(54.25, 91.5, 37.25, 1.085, 0.5)
DECISION = Decision(Execution.UNGRAPHED, Comparison(GAIN, GAIN, 10, 1, 25_165_824))
DAY_S = 86400.0

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
amounts = st.floats(0, 1e15)
gains = st.builds(Gain, amounts, amounts, st.floats(-1e15, 1e15), amounts, amounts)
fork = multiprocessing.get_context("fork")


def subject(number: int) -> Subject:
    return dataclasses.replace(SUBJECT, graph=f"graph {number}")


def decision(number: int) -> Decision:
    """A decision whose fields show whether they were written together."""
    gain = dataclasses.replace(GAIN, ungraphed_us=float(number))
    compared = dataclasses.replace(DECISION.compared, latency=gain, kernels=number, pairs=number)
    return Decision(Execution.GRAPHED if number % 2 else Execution.UNGRAPHED, compared)


def whole(found: Decision) -> bool:
    return found == decision(found.compared.pairs)


def processes(*jobs) -> list[int | None]:
    """Runs functions with their arguments in processes, all at once; returns the exit codes."""
    running = [fork.Process(target=target, args=args) for target, *args in jobs]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    return [process.exitcode for process in running]


class Folder(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.profiles = Profiles(Path(folder.name) / "cache" / "pygraph_trees")
        self.file = self.profiles.folder / f"{SUBJECT.key}.json"
        self.enterContext(mock.patch.object(module, "_warned", {}))

    def put(self, content: bytes) -> None:
        self.profiles.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(content)

    def data(self) -> dict:
        return json.loads(self.file.read_text())

    @contextlib.contextmanager
    def warned(self, *kinds):
        """Checks that exactly these warnings are given, in any thread."""
        module._warned.clear()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield found
        self.assertEqual([w.category for w in found], list(kinds))


class TestKey(TestCase):
    def test_all_of_it_matters(self):
        others = [
            dataclasses.replace(SUBJECT, graph="Graph"),
            dataclasses.replace(SUBJECT, inputs=("float32[8, 17]",)),
            dataclasses.replace(SUBJECT, inputs=SUBJECT.inputs * 2),
            dataclasses.replace(SUBJECT, inputs=()),
            dataclasses.replace(SUBJECT, settings={"indirection": "off"}),
            dataclasses.replace(SUBJECT, settings={"a": "1", "b": "2"}),
        ]
        for field in dataclasses.fields(Machine):
            others.append(dataclasses.replace(SUBJECT, machine=dataclasses.replace(MACHINE, **{field.name: "x"})))
        keys = {SUBJECT.key, *(other.key for other in others)}
        self.assertEqual(len(keys), 1 + len(others))
        for key in keys:
            self.assertRegex(key, "^[0-9a-f]{64}$")
        self.assertIn(dataclasses.replace(SUBJECT, settings={"b": "2", "a": "1"}).key, keys)  # in any order

    @given(st.text(), st.lists(st.text()), st.text(), st.lists(st.text()))
    def test_texts_do_not_run_together(self, graph, inputs, other_graph, other_inputs):
        one = dataclasses.replace(SUBJECT, graph=graph, inputs=tuple(inputs))
        other = dataclasses.replace(SUBJECT, graph=other_graph, inputs=tuple(other_inputs))
        self.assertEqual(one.key == other.key, (graph, inputs) == (other_graph, other_inputs))

    def test_describe(self):
        values = (torch.ones(8, 16), torch.tensor(1, dtype=torch.int64), torch.ones(0, dtype=torch.bool), 8, True, None)
        found = [describe(value) for value in values]
        self.assertEqual(found, ["float32[8, 16]", "int64[]", "bool[0]", "int 8", "bool", "NoneType"])

    def test_machine(self):
        with (
            mock.patch.object(torch.cuda, "get_device_name", lambda device: f"GPU {device}"),
            mock.patch.object(driver_module, "driver", lambda: Driver(FakeApi())),
        ):
            found = Machine.current(1)
            self.assertEqual((found.gpu, found.driver, found.torch), ("GPU 1", "13000", torch.__version__))
            with mock.patch.dict(sys.modules, triton=None):
                self.assertEqual(Machine.current(0).triton, "none")
            with mock.patch.object(driver_module, "driver", lambda: None):
                self.assertEqual(Machine.current(0).driver, "unknown")


class TestRoundTrip(Folder):
    def test_store_and_use(self):
        with self.warned():
            self.assertIsNone(self.profiles.use(SUBJECT.key))
            self.assertEqual(self.profiles.list(), ())
            self.profiles.store(SUBJECT, "net [0/0]", DECISION, now_s=1e9)
            found = [self.profiles.use(SUBJECT.key) for _ in range(3)]
        self.assertEqual([p.uses for p in found], [0, 1, 2])
        first = found[0]
        self.assertEqual(
            (first.key, first.what, first.gpu, first.decided_s), (SUBJECT.key, "net [0/0]", MACHINE.gpu, 1e9)
        )
        self.assertEqual(first.decision, DECISION)
        self.assertIsNone(self.profiles.use(subject(1).key))
        self.assertEqual([p.uses for p in self.profiles.list()], [3])
        self.profiles.store(SUBJECT, "net", decision(7))  # restarts the count
        found = self.profiles.use(SUBJECT.key)
        self.assertEqual((found.decision, found.uses), (decision(7), 0))

    def test_file(self):
        """It is small and readable for the users whom the umask allows, and nothing else is left."""
        self.profiles.store(SUBJECT, "net", DECISION, now_s=1e9)
        self.assertEqual(list(self.profiles.folder.iterdir()), [self.file])
        self.assertLess(self.file.stat().st_size, 1000)
        umask = os.umask(0)
        os.umask(umask)
        self.assertEqual(self.file.stat().st_mode & 0o777, 0o666 & ~umask)

    @given(
        st.builds(
            Decision,
            st.sampled_from(Execution),
            st.builds(Comparison, gains, gains, *[st.integers(0, 2**62)] * 3),
        ),
        st.text(),
    )
    @settings(max_examples=50, deadline=None)
    def test_any_decision(self, found, what):
        with self.warned():
            self.profiles.store(SUBJECT, what, found)
            back = self.profiles.use(SUBJECT.key)
        self.assertEqual(back.decision, found)
        self.assertTrue(back.what.isprintable())
        self.assertEqual(len(back.what), min(len(what), 200))

    def test_uses_have_an_end(self):
        self.profiles.store(SUBJECT, "net", DECISION)
        with open(self.file, "ab") as file:
            file.write(b"\n" * 65536)
        size = self.file.stat().st_size
        with self.warned():
            self.assertEqual(self.profiles.use(SUBJECT.key).uses, 65536)
        self.assertEqual(self.file.stat().st_size, size)

    def test_ages(self):
        self.profiles.store(SUBJECT, "net", DECISION, now_s=100 * DAY_S)
        found = self.profiles.use(SUBJECT.key)
        stale = {day: found.is_stale(day * DAY_S) for day in (98.9, 99.5, 100, 101, 129.9, 130.1, 1000)}
        self.assertEqual([day for day, is_stale in stale.items() if is_stale], [98.9, 130.1, 1000])
        self.assertEqual(found.age_s(101 * DAY_S), DAY_S)
        self.profiles.store(SUBJECT, "net", DECISION)
        self.assertFalse(self.profiles.use(SUBJECT.key).is_stale())

    def test_many(self):
        with self.warned():
            for number in range(30):
                self.profiles.store(subject(number), f"net {number}", decision(number), now_s=number)
            found = self.profiles.list()
            self.assertEqual([p.what for p in found], [f"net {number}" for number in reversed(range(30))])
            self.assertTrue(all(whole(p.decision) for p in found))
            self.assertEqual((self.profiles.clear(), self.profiles.list(), self.profiles.clear()), (30, (), 0))


class TestDamage(Folder):
    def check(self, content: bytes, why: str = "") -> None:
        """The content is not a profile, one warning says so, and it can be replaced and cleared."""
        self.put(content)
        with self.warned(DamagedProfiles) as found:
            self.assertIsNone(self.profiles.use(SUBJECT.key))
            self.assertIsNone(self.profiles.use(SUBJECT.key))
            self.assertEqual(self.profiles.list(), ())
        text = str(found[0].message)
        self.assertIn(str(self.profiles.folder), text)
        self.assertIn("`python -m pygraph_trees profiles --clear`", text)
        self.assertIn(why, text)
        self.assertTrue(self.file.read_bytes() == content)
        self.profiles.store(SUBJECT, "net", DECISION)
        self.assertEqual(self.profiles.use(SUBJECT.key).decision, DECISION)

    def stored(self) -> bytes:
        self.profiles.store(SUBJECT, "net", DECISION, now_s=1e9)
        return self.file.read_bytes()

    @given(st.binary(max_size=2000) | json_values.map(lambda value: json.dumps(value).encode()))
    @settings(max_examples=100, deadline=None)
    def test_any_content(self, content):
        self.check(content, "it is not JSON" if not content.strip() else "")

    @given(st.data())
    @settings(max_examples=50, deadline=None)
    def test_truncated(self, data):
        content = self.stored()
        self.check(content[: data.draw(st.integers(0, len(content) - 1))], "it is not JSON")

    @given(st.data())
    @settings(max_examples=100, deadline=None)
    def test_one_byte_differs(self, data):
        content = bytearray(self.stored())
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        self.put(bytes(content))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self.profiles.use(SUBJECT.key)
        self.assertTrue(found is None or (found.key == SUBJECT.key and found.decision.text))

    def test_missing_fields_and_wrong_values(self):
        wrongs = (None, [], {}, [0], True, -1, float("nan"), float("inf"), 10**400, "\ud800", "\x1b[2J")
        self.stored()
        data = self.data()
        compared = data["decision"]["compared"]
        for inner in (data, data["decision"], compared, compared["latency"]):
            for name in [name for name in inner if name != "uses"]:
                value = inner.pop(name)
                self.check(json.dumps(data).encode(), "" if name == "format" else f"has no {name}")
                for wrong in wrongs:
                    if (name, wrong) in (("gain_us", -1), ("is_modelled", True)):
                        continue
                    inner[name] = wrong
                    why = f"{name} has no" if wrong == {} and isinstance(value, dict) else f"{name} is no"
                    self.check(json.dumps(data).encode(), why)
                inner[name] = value

    def test_another_key_and_deep_and_large_files(self):
        self.profiles.store(subject(1), "other", DECISION)
        (path,) = self.profiles.folder.iterdir()
        content = path.read_bytes()
        path.unlink()
        self.check(content, "it is another function's")
        self.check(b"[" * 100_000, "it is not JSON")
        self.check(b'{"format": %d, "key": ' % FORMAT + b"[" * 900 + b"]" * 900 + b"}")
        self.check(b" " * 200_000, "it is too large")
        self.check(b"\n" * 200_000, "it is too large")
        self.check(b'{"format": ' + b"9" * 5000 + b"}", "it is not JSON")

    def test_a_folder_in_its_place(self):
        self.file.mkdir(parents=True)
        with self.warned(DamagedProfiles, ProfilesNotKept):
            self.assertIsNone(self.profiles.use(SUBJECT.key))
            self.profiles.store(SUBJECT, "net", DECISION)
        self.assertEqual(list(self.profiles.folder.iterdir()), [self.file])
        with self.assertRaisesRegex(ProfilesNotRemoved, "^1 of the files in .* could not be removed: "):
            self.profiles.clear()

    def test_a_later_version(self):
        self.stored()
        data = self.data()
        data["new"] = data["decision"]["new"] = {"a": 1}
        self.put(json.dumps(data).encode())
        with self.warned():
            self.assertEqual(self.profiles.use(SUBJECT.key).decision, DECISION)
        self.put(json.dumps({"format": FORMAT + 1, "key": 3}).encode())
        with self.warned():
            self.assertIsNone(self.profiles.use(SUBJECT.key))
            self.assertEqual(self.profiles.list(), ())

    def test_others_are_read(self):
        self.profiles.store(subject(1), "good", DECISION)
        self.put(b"?")
        with self.warned(DamagedProfiles):
            self.assertEqual([p.what for p in self.profiles.list()], ["good"])
        self.assertEqual(self.profiles.clear(), 2)

    def test_one_warning_for_many_files_and_threads(self):
        for number in range(20):
            self.put(b"?")
            self.file.rename(self.file.with_name(f"{subject(number).key}.json"))
        start = threading.Barrier(8)

        def read(_):
            start.wait()
            return [self.profiles.use(subject(number).key) for number in range(20)]

        with self.warned(DamagedProfiles), ThreadPoolExecutor(8) as threads:
            self.assertEqual(list(threads.map(read, range(8))), [[None] * 20] * 8)


class TestDisk(Folder):
    def not_kept(self, profiles: Profiles) -> str:
        with self.warned(ProfilesNotKept) as found:
            for _ in range(2):
                profiles.store(SUBJECT, "net", DECISION)
                self.assertIsNone(profiles.use(SUBJECT.key))
            self.assertEqual(profiles.list(), ())
            self.assertEqual(profiles.clear(), 0)
        self.assertIn(str(profiles.folder), str(found[0].message))
        return str(found[0].message)

    def test_a_folder_that_cannot_be_made(self):
        self.profiles.folder.parent.mkdir()
        self.profiles.folder.write_text("")
        self.assertIn("File exists", self.not_kept(self.profiles))
        self.assertIn("Not a directory", self.not_kept(Profiles(self.profiles.folder / "below")))
        if Path("/proc/self").exists():
            self.not_kept(Profiles(Path("/proc/none/pygraph_trees")))

    def test_who_only_reads_is_not_warned(self):
        self.profiles.store(SUBJECT, "net", DECISION)
        for number in (errno.EACCES, errno.EPERM, errno.EROFS):
            refused = OSError(number, os.strerror(number))
            with mock.patch.object(os, "open", side_effect=refused), self.warned():
                self.assertEqual(self.profiles.use(SUBJECT.key).decision, DECISION)
        with mock.patch.object(os, "open", side_effect=OSError(errno.EIO, "worn out")), self.warned(ProfilesNotKept):
            self.assertEqual(self.profiles.use(SUBJECT.key).decision, DECISION)

    def as_one_who_may_not_write_everywhere(self) -> None:
        """Root becomes another user, who owns the files, until the test ends."""
        if os.geteuid() != 0:
            return
        nobody = 65534
        try:
            for path in (self.file, *self.file.parents[:3]):
                os.chown(path, nobody, -1)
            os.seteuid(nobody)
        except PermissionError:
            self.skipTest("root may write everywhere, and may not become someone else")
        self.addCleanup(os.seteuid, 0)

    def test_permissions(self):
        self.profiles.store(SUBJECT, "net", DECISION)
        self.as_one_who_may_not_write_everywhere()
        self.profiles.folder.chmod(0o500)
        self.addCleanup(self.profiles.folder.chmod, 0o700)
        with self.warned(ProfilesNotKept):
            self.profiles.store(SUBJECT, "net", decision(7))
            self.assertEqual(self.profiles.use(SUBJECT.key).decision, DECISION)
        with self.assertRaisesRegex(ProfilesNotRemoved, "Permission denied"):
            self.profiles.clear()
        self.profiles.folder.chmod(0)
        with self.warned(DamagedProfiles):
            self.assertIsNone(self.profiles.use(SUBJECT.key))
            self.assertEqual(self.profiles.list(), ())

    def test_full(self):
        self.profiles.store(SUBJECT, "net", DECISION)
        real_open = open

        def full(path, mode="r", **kwargs):
            file = real_open(path, mode, **kwargs)
            if "x" in mode:
                os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
            return file

        if not Path("/dev/full").exists():
            self.skipTest("needs /dev/full")
        with mock.patch("builtins.open", full), self.warned(ProfilesNotKept) as found:
            self.profiles.store(SUBJECT, "net", decision(7))
            self.profiles.store(SUBJECT, "net", decision(7))
        self.assertIn("No space left on device", str(found[0].message))
        self.assertEqual([path.name for path in self.profiles.folder.iterdir()], [self.file.name])
        self.assertEqual(self.profiles.use(SUBJECT.key).decision, DECISION)

    def test_the_folder_goes_while_it_is_written_to(self):
        real_open, opened = open, []

        def gone(path, mode="r", **kwargs):
            opened.append(path)
            if len(opened) == 1:
                self.profiles.folder.rmdir()
            return real_open(path, mode, **kwargs)

        with mock.patch("builtins.open", gone), self.warned():
            self.profiles.store(SUBJECT, "net", DECISION)
            self.assertEqual(self.profiles.use(SUBJECT.key).decision, DECISION)

    def test_removed_between_reading_and_counting(self):
        self.profiles.store(SUBJECT, "net", DECISION)
        load = Profiles._load

        def then_clear(profiles, path):
            found = load(profiles, path)
            profiles.clear()
            return found

        with mock.patch.object(Profiles, "_load", then_clear), self.warned():
            self.assertEqual(self.profiles.use(SUBJECT.key).decision, DECISION)
        self.assertEqual(list(self.profiles.folder.iterdir()), [])

    def test_clear_takes_what_was_left_behind_and_not_what_is_written(self):
        self.profiles.store(SUBJECT, "net", DECISION)
        old, new = (self.file.with_suffix(f".{name}.tmp") for name in ("old", "new"))
        old.write_text("")
        new.write_text("")
        os.utime(old, (0, time.time() - 7200))
        self.assertEqual(self.profiles.clear(), 1)
        self.assertEqual(list(self.profiles.folder.iterdir()), [new])


def write_and_read(profiles: Profiles, process: int, end_s: float, subjects: int = 1, *, may_go: bool = False) -> None:
    """Fails if a profile that it reads is not what one process wrote."""
    warnings.simplefilter("error")
    number = process
    while time.time() < end_s:
        number += 10
        profiles.store(subject(number % subjects), "net", decision(number))
        found = profiles.use(subject(number % subjects).key)
        assert may_go if found is None else whole(found.decision), found
        assert all(whole(p.decision) for p in profiles.list())


def write_while_cleared(profiles: Profiles, process: int, end_s: float) -> None:
    write_and_read(profiles, process, end_s, 40, may_go=True)


def clear(profiles: Profiles, end_s: float) -> None:
    warnings.simplefilter("error")
    while time.time() < end_s:
        profiles.clear()
        assert all(whole(p.decision) for p in profiles.list())


def use(profiles: Profiles, times: int) -> None:
    for _ in range(times):
        assert profiles.use(SUBJECT.key) is not None


class TestKept(Folder):
    """What a trial looks up in profiles, and what it stores in them."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(Profiles, "default", staticmethod(lambda: self.profiles)))
        self.enterContext(mock.patch.object(Machine, "current", staticmethod(lambda device: MACHINE)))

    def kept(self, code="cabc", **settings):
        return Kept(code, "Net", 0, settings)

    def test_for_the_next_process(self):
        first, inputs = self.kept(), [torch.ones(2, 3), 4]
        self.assertIsNone(first.find(inputs))
        first.store(DECISION)
        found = self.kept().find(inputs)
        self.assertEqual((found.decision, found.what), (DECISION, "Net"))
        (listed,) = self.profiles.list()
        self.assertEqual(listed.uses, 1)
        for other, values in (
            (self.kept("cabd"), inputs),
            (self.kept(indirection="off"), inputs),
            (self.kept(), [torch.ones(3, 2), 4]),
            (self.kept(), [torch.ones(2, 3), 5]),
        ):
            self.assertIsNone(other.find(values))

    def test_old_ones_are_measured_again(self):
        first, then_s = self.kept(), time.time() - 31 * DAY_S
        self.assertIsNone(first.find([]))
        with mock.patch.object(time, "time", lambda: then_s):
            first.store(DECISION)
        again = self.kept()
        self.assertIsNone(again.find([]))
        self.assertEqual([p.decided_s for p in self.profiles.list()], [then_s])
        again.store(decision(1))
        self.assertEqual(self.kept().find([]).decision, decision(1))

    def test_without_a_folder_or_a_question(self):
        def fail():
            raise NoCacheFolder(folder="/nowhere", why="no space")

        with mock.patch.object(Profiles, "default", staticmethod(fail)):
            kept = self.kept()
            self.assertIsNone(kept.find([]))
            kept.store(DECISION)
        self.kept().store(DECISION)
        self.assertEqual(self.profiles.list(), ())


class TestTogether(Folder):
    def test_one_key(self):
        end_s = time.time() + 1.5
        self.assertEqual(processes(*[(write_and_read, self.profiles, p, end_s) for p in range(4)]), [0] * 4)
        (path,) = self.profiles.folder.iterdir()
        self.assertEqual(path.name, f"{subject(0).key}.json")

    def test_threads(self):
        end_s = time.time() + 0.5
        with warnings.catch_warnings(), ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda number: write_and_read(self.profiles, number, end_s), range(4)))

    def test_clear_while_others_write(self):
        end_s = time.time() + 1.5
        writing = [(write_while_cleared, self.profiles, p, end_s) for p in range(3)]
        self.assertEqual(processes((clear, self.profiles, end_s), *writing), [0] * 4)
        self.profiles.clear()
        self.assertEqual(list(self.profiles.folder.iterdir()), [])

    def test_every_use_is_counted(self):
        self.profiles.store(SUBJECT, "net", DECISION)
        self.assertEqual(processes(*[(use, self.profiles, 100)] * 4), [0] * 4)
        self.assertEqual([p.uses for p in self.profiles.list()], [400])


class TestCommand(Folder):
    def run_command(self, *argv):
        out, err = io.StringIO(), io.StringIO()
        environment = mock.patch.dict(
            os.environ, TORCHINDUCTOR_CACHE_DIR=str(self.profiles.folder.parent), COLUMNS="100", LINES="24"
        )
        with environment, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command_line.main(["profiles", *argv])
        return status, out.getvalue().replace(str(self.profiles.folder), "FOLDER"), err.getvalue()

    def test_table(self):
        now_s = time.time()
        self.profiles.store(SUBJECT, "eos [0/0], inference", DECISION, now_s - 90)
        self.profiles.use(SUBJECT.key)
        only_throughput = Gain(3e4, 3e4, 0.0, 600.0, 50.0), Gain(29012.0, 28577.04, -434.96, 100.0, 50.0)
        compared = Comparison(*only_throughput, 20, 1314, 0)
        text = "BertForMaskedLM [0/0], backward, partition 1 of 2"
        self.profiles.store(subject(1), text, Decision(Execution.GRAPHED, compared), now_s - 5 * 3600)
        self.profiles.store(subject(2), "mlp [1/0], inference", decision(3), now_s - 41 * DAY_S)
        status, out, err = self.run_command()
        self.assertEqual((status, err), (0, ""))
        self.assertExpectedInline(
            out,
            """\
function                                decision       us  against us         for  uses          age
eos [0/0], inference                  un-graphed     54.2        91.5     latency     1        2 min
BertForMaskedLM [0/0], backward, partition 1 of 2
                                         graphed  28577.0     29012.0  throughput     0          5 h
mlp [1/0], inference                     graphed     91.5         3.0     latency     0  41 d, stale

3 profiles in FOLDER
""",
        )
        self.assertLessEqual(max(map(len, out.splitlines())), 100)

    def test_clear(self):
        self.assertEqual(self.run_command(), (0, "0 profiles in FOLDER\n", ""))
        self.assertEqual(self.run_command("--clear"), (0, "0 profiles removed from FOLDER\n", ""))
        self.profiles.store(SUBJECT, "net", DECISION)
        self.assertEqual(self.run_command("--clear"), (0, "1 profile removed from FOLDER\n", ""))
        self.assertEqual(self.profiles.list(), ())
        self.put(b"?")
        with self.warned(DamagedProfiles):
            self.assertEqual(self.run_command(), (0, "0 profiles in FOLDER\n", ""))
        self.assertEqual(self.run_command("--clear"), (0, "1 profile removed from FOLDER\n", ""))
        self.file.mkdir()
        status, out, err = self.run_command("--clear")
        self.assertEqual((status, out), (2, ""))
        self.assertRegex(err, "^error: 1 of the files in .* could not be removed: ")

    def test_no_cache(self):
        self.profiles.folder.parent.write_text("")
        status, out, err = self.run_command()
        self.assertEqual((status, out), (2, ""))
        self.assertRegex(err, "^error: Inductor's cache, .*/cache, cannot be made: .*TORCHINDUCTOR_CACHE_DIR")
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(self.profiles.folder.parent)):
            self.assertRaises(NoCacheFolder, Profiles.default)


if __name__ == "__main__":
    run_tests()
