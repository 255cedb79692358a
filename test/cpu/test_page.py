"""The report as a page: its contents, and no markup from a program."""

import html
import json
import re
import sys
from dataclasses import replace
from unittest import mock

from commands import WithFolder
from page_elements import Elements, needed
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.benchmark.inspection import Span
from pygraph_trees.benchmark.outcome import Measurement, sections
from pygraph_trees.report import records
from pygraph_trees.report.page import page
from pygraph_trees.report.summary import Report

EVIL = '</script><b onclick="x()">&'
ENVIRONMENT = records.Environment("0.1.0", "2.13.0", "3.7.0", "NVIDIA H200", (records.FeatureState("flags", "on"),))
SETTINGS = {"placement": "full", "indirection": "auto"}
INPUTS = (
    *(records.InputRecord(i, f"arg{i}_1", "static", "cuda:0", 4096, 0, False) for i in range(30)),
    records.InputRecord(30, "arg30_1", "live", "cuda:0", 8, 8, True, "copy", "its address is in a host array"),
    records.InputRecord(31, "arg31_1", "live", "cpu", 16, 0, False, "stage"),
    records.InputRecord(32, "arg32_1", "live", "cuda:0", 32, 0, False, "patch"),
)


def recording(number, parent=None, reason="first call", replays=1):
    return records.RecordingRecord(number, parent, reason, INPUTS, 7, 0, 0.0125, 1000, replays)


def function(*recordings, mode="inference", **fields):
    given = {"warmups": 1, "warmup_pool_bytes": 0, "ungraphed_calls": 0, "ungraphed_reason": None, **fields}
    return records.FunctionRecord("Net", "0/0", mode, 1, 1, SETTINGS, recordings, **given)


def graph():
    cause = records.Cause("cpu ops", "aten.index.Tensor", f"model.py:31 in forward: {EVIL}")
    parts = (records.Partition(True, {"triton": 3}), records.Partition(False, {"cpu": 2, "copy": 1}, (cause,)))
    placed = (
        records.Placed("arange", "made on the GPU", None, None),
        records.Placed("arg0_1", "staged", "it is an input", None),
    )
    return records.GraphRecord("Net", "0/0", "inference", parts, None, placed)


def report(functions=(), graphs=(), breaks=()):
    return Report(ENVIRONMENT, tuple(graphs), tuple(functions), tuple(breaks))


FULL = report(
    [
        function(recording(0, replays=90), recording(2, 1, "static input arg3_1 moved", 4), mode="forward"),
        function(recording(1, 0, replays=90), mode="backward", ungraphed_calls=3, ungraphed_reason=EVIL),
    ],
    [graph(), records.GraphRecord("other", None, "inference", (), EVIL)],
    [records.GraphBreak(f"data: {EVIL}", f"model.py:31 in f: {EVIL}", 2, EVIL)],
)
TIMELINE = Span("host", True, 0.0, 5.0), Span("gpu", True, 6.0, 40.0)
MEASURED = [
    Measurement("Net", "inference", 1, way, regime, latency_ms=latency, timeline=TIMELINE)
    for regime in ("same", "fresh")
    for way, latency in (("upstream", 2.0), ("ours", 1.0))
]


class TestPage(WithFolder):
    def elements(self, text):
        """Tags and attributes of a text that is well-formed and has no markup from a program."""
        found = Elements(text)
        self.assertEqual(found.open, [])
        self.assertNotIn(EVIL, text)
        self.assertNotIn('onclick="', text)
        return found.found

    def html(self, *of):
        """The page of a report, which is checked."""
        text = report(*of).to_html()
        self.elements(text)
        return text

    def test_the_command_is_shown_without_the_folders_of_the_program(self):
        path = self.folder / "page.html"
        for given, shown in (
            (["/some/where/pygraph_trees/__main__.py", "compare", "my model.py"], "python -m pygraph_trees compare"),
            (["/home/me/bin/pygraph-trees", "compare", "BERT"], ", pygraph-trees compare BERT<"),
            ([""], ", Python<"),
            (["run.py", "caf\udce9"], r"caf\udce9"),
        ):
            with self.subTest(given), mock.patch.object(sys, "argv", given):
                report().to_html(path)
                text = path.read_text(encoding="utf-8")
                self.elements(text)
                self.assertIn("Nothing was compiled for CUDA graphs yet", text)
                self.assertIn(shown, text)
                self.assertNotIn("/some/where", text)

    def test_everything_is_there(self):
        text = FULL.to_html()
        data = text.partition('id="report">')[2].partition("</script>")[0]
        self.assertEqual(json.loads(data), json.loads(FULL.to_json()))
        tags = [tag for tag, _ in self.elements(text)]
        self.assertEqual((tags.count("script"), tags.count("b")), (1, 0))  # nothing of a program is markup
        for wanted in (
            "pygraph_trees 0.1.0, torch 2.13.0",
            "<dt>replays</dt><dd>184</dd>",
            "<dt>kernels outside</dt><dd>1</dd>",
            "<dt>copied at each replay</dt><dd>16 B</dd>",
            "static input arg3_1 moved, after recording 1",
            "<td>staged</td>",
            "<td>by address</td>",
            "30 static, 3 live",
            "12.5 ms to record",
            "made on the GPU",
        ):
            self.assertIn(wanted, text)

    def test_the_verdict_and_the_problems_come_first(self):
        text = page(FULL, sections(MEASURED), verdict=["ours, same inputs: 2.00x over reduce-overhead"])
        self.elements(text)
        self.assertRegex(text, r"(?s)2.00x over reduce-overhead</strong>.*<h2>Problems.*<h2>Figures")
        shown = text.partition("<h2>Problems</h2>")[2].partition("</section>")[0]
        for problem in (
            "graph break, 2x: data: ",
            "3 calls un-graphed",
            "live inputs, 8 B, because its address is in a host array",
            "outside of CUDA graphs: cpu ops: aten.index.Tensor",
            "not graphed, 0 GPU kernels",
        ):
            self.assertIn(problem, shown)
        self.assertNotIn("<h2>Problems", report().to_html())
        self.assertRegex(text, r'<p class="quiet">\d{4}-\d\d-\d\d \d\d:\d\d [^<]*</p>')

    def test_a_keyboard_is_enough_and_links_lead_somewhere(self):
        """No other file is needed."""
        text = page(FULL, sections(MEASURED))
        self.assertEqual(needed(text), [])
        self.assertNotRegex(text.partition("<script")[0], r"https?://|@import|url\(")
        found = self.elements(text)
        anchors = [attributes.get("id") for _, attributes in found if attributes.get("id")]
        self.assertEqual(len(anchors), len(set(anchors)))
        for tag, attributes in found:
            if attributes.get("href", "").startswith("#"):
                self.assertIn(attributes["href"][1:], anchors)
            if attributes.get("class") == "scroll":
                self.assertEqual((attributes["tabindex"], attributes["role"]), ("0", "region"), tag)
            if attributes.get("class") == "scroll" or attributes.get("role") == "img":
                self.assertTrue(attributes["aria-label"])

    def shape(self, *functions):
        """The tree of a report, with brackets around the successors of a recording if there are several."""
        tree = self.html(functions).partition('<ul class="tree">')[2].partition("</section>")[0].rpartition("</ul>")[0]
        marks = re.findall(r"<ul>|</ul>|<ol>|</ol>|>recording \d+<", tree)
        names = {"<ul>": "[", "</ul>": "]", "<ol>": "(", "</ol>": ")"}
        return " ".join(names.get(mark) or re.sub(r"\D", "", mark) for mark in marks)

    def test_a_tree_across_functions(self):
        forward = function(recording(0), recording(3), mode="forward")
        backward = function(recording(1, 0), recording(4, 3), recording(5, 0, "static input arg3_1 moved"))
        after_both = function(recording(2, 1), recording(6, 4), recording(7, 5))
        self.assertEqual(self.shape(forward, backward, after_both), "( 0 [ ( 1 2 ) ( 5 7 ) ] ) ( 3 4 6 )")
        tree = function(*[recording(n, p) for n, p in ((0, None), (1, 0), (2, 1), (3, 0), (4, 9))])
        self.assertEqual(self.shape(tree), "( 0 [ ( 1 2 ) ( 3 ) ] ) ( 4 )")
        self.assertIn("after recording 9 (it is not in this report)", report([tree]).to_html())
        self.assertIn("Nothing was recorded", report([function()]).to_html())

    def visible(self, text):
        """The text that can be read without a pointer; attributes do not count."""
        return " ".join(html.unescape(re.sub(r"<[^>]*>", "\n", text)).split())

    def test_parts_are_told_in_text(self):
        """The text names what cuts each part off, and its inputs and outputs as in JSON."""
        record = graph()
        reads = (
            records.PartitionInput("primals_1", True, "cuda:0", "float32", 4096, {"triton": 2, "extern": 1}),
            records.PartitionInput(EVIL, False, "cpu", "int64", None, {}),
        )
        causes = (*record.partitions[1].causes, records.Cause("DeviceCopy ops", "prims.device_put.default", None))
        parts = (
            replace(record.partitions[0], inputs=reads[:1], outputs=("buf1",)),
            replace(record.partitions[1], inputs=reads, outputs=("buf2", EVIL), causes=causes),
            records.Partition(True, {"triton": 1}),
        )
        text = self.html([], [replace(record, partitions=parts), replace(record, partitions=parts, dropped="why")])
        one, two, three, dropped, *_ = map(self.visible, re.findall(r'<li id="graph-\d-part-\d">(.*?)</li>', text))
        because = f"because of cpu ops: aten.index.Tensor at model.py:31 in forward: {EVIL}, and 1 other operation"
        for found, wanted in (
            (one, "part 1, graphed: 3 triton"),
            (one, "primals_1 the graph cuda:0 float32 4.1 kB 2 triton, 1 extern Outputs buf1"),
            (two, f"part 2, outside: 2 cpu, 1 copy {because}"),
            (two, "DeviceCopy ops prims.device_put.default -"),
            (two, f"{EVIL} another part cpu int64 symbolic -"),
            (two, f"Outputs buf2, {EVIL}"),
            (dropped, "part 1, outside: 3 triton"),
        ):
            self.assertIn(wanted, found)
        self.assertNotIn("because", one)
        self.assertEqual(three, "part 3, graphed: 1 triton")


if __name__ == "__main__":
    run_tests()
