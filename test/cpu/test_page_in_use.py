"""The report's page in use, in a browser: by touch on a phone's screen, and with only a keyboard."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from browser import PROGRAM, browser
from test_page import FULL, SETTINGS, function, measurement, recording, report
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.benchmark.page import sections
from pygraph_trees.benchmark.trace import Span
from pygraph_trees.benchmark.ways import MORE_WAYS, WAYS
from pygraph_trees.report.page import page
from pygraph_trees.report.records import Cause, FunctionRecord, GraphRecord, Partition, PartitionInput

PHONE, DESK = 390, 1280
SMALLEST_TEXT, SMALLEST_TARGET = 12, 24  # pixels; the second from WCAG 2.2, criterion 2.5.8

TEXT = """(() => {
    const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode, element = text.parentElement;
        if (!text.data.trim() || !element.checkVisibility() || element.matches("script, title")) continue;
        const scale = element.ownerSVGElement?.getScreenCTM().a ?? 1;
        found.push([parseFloat(getComputedStyle(element).fontSize) * scale, text.data.slice(0, 40)]);
    }
    return found;
})()"""
# A link that wraps has a box for each line.
TARGETS = """[...document.querySelectorAll("a:not(.skip), summary")].filter(e => e.checkVisibility()).map(e => {
    const boxes = [...e.getClientRects()].map(({left, top, right, bottom}) => [left, top, right, bottom]);
    return [boxes, e.textContent.slice(0, 40)];
})"""
DRAWN = """[...document.querySelectorAll("svg")].map(svg => [svg.getBoundingClientRect().right,
    [...svg.querySelectorAll("text, rect:not(.lane)")].map(e => {
        const {left, top, right, bottom} = e.getBoundingClientRect();
        return [e.tagName, e.textContent, [left, top, right, bottom]];
    })])"""
STOPS = '[...document.querySelectorAll("a:not([tabindex]), summary, .scroll")]'
FOCUS = f"""(() => {{
    const e = document.activeElement, {{outlineStyle, outlineWidth}} = getComputedStyle(e);
    const {{left, top, right, bottom}} = e.getBoundingClientRect();
    return {{
        at: {STOPS}.indexOf(e), closed: e.matches("details:not([open]) > summary"),
        outline: outlineStyle === "none" ? 0 : parseFloat(outlineWidth),
        seen: right > 0 && left < innerWidth && bottom > 0 && top < innerHeight,
    }};
}})()"""
OPEN_ALL = "document.querySelectorAll('details').forEach(d => { d.open = true; })"


def overlap(a, b):
    """Whether two boxes share more than the rounding of a pixel."""
    return min(a[2], b[2]) - max(a[0], b[0]) > 0.5 and min(a[3], b[3]) - max(a[1], b[1]) > 0.5


def rich():
    """A page with long names, many inputs, a deep tree, parts with causes and inputs, and timelines of all ways."""
    name = "AModelWithANameThatIsLongerThanTheScreenOfAPhoneIsWide"
    ladder = [recording(9 + n, 9 + (n - 1) // 2 * 2 if n else None) for n in range(20)]
    deep = FunctionRecord(name, "0/0", "forward", 2, 3, SETTINGS, tuple(ladder), 1, 0, 0, None)
    long = FunctionRecord(name, "1/0", "backward", 1, 1, SETTINGS, (recording(60),), 1, 0, 5, f"because of {name}" * 4)
    causes = tuple(Cause("cpu ops", f"aten.{name}.{n}", f"/a/long/path/{name}.py:{n} in forward") for n in range(3))
    reads = tuple(PartitionInput(f"primals_{n}", True, "cuda:0", "float32", 4096, {"triton": n}) for n in range(30))
    parts = (Partition(True, {"triton": 3}, inputs=reads, outputs=(name,)), Partition(False, {"cpu": 2}, causes))
    graphs = [*FULL.graphs, GraphRecord(name, "0/0", "forward", parts * 6, None)]
    spans = [Span(lane, n % 3 > 0, 40.0 * n, 20.0, (n, n)) for lane in ("host", "gpu") for n in range(12)]
    measured = [
        measurement(way, regime, latency, timeline=tuple(spans), launches=(f"{name} 0/0 forward, recording 9",) * 12)
        for regime in ("same", "fresh")
        for way, latency in zip((*WAYS, *MORE_WAYS), cycle((1234.5, 617.25, 2.5, 0.001)))
    ]
    functions = [deep, long, *FULL.functions, function(recording(70))]
    return page(report(functions, graphs, FULL.breaks), sections(measured))


class TestPageInUse(TestCase):
    def setUp(self):
        super().setUp()
        text = rich()  # made even if there is no browser
        if PROGRAM is None:
            self.skipTest("chromium is not installed")
        ends = contextlib.ExitStack()
        self.addCleanup(ends.close)
        self.path = Path(ends.enter_context(tempfile.TemporaryDirectory())) / "page.html"
        self.path.write_text(text, encoding="utf-8")
        self.shown = ends.enter_context(browser())
        self.shown.open(self.path, PHONE)

    def test_a_phone_scrolls_down_only(self):
        """Wider content is in its own scrolling area, which a keyboard reaches."""
        wider = "[...document.querySelectorAll('body *')].filter(e => e.scrollWidth > e.clientWidth + 1"
        wider += " && getComputedStyle(e).overflowX !== 'visible').map(e => e.className)"
        for opened in ("", OPEN_ALL):
            self.shown.ask(opened)
            widths = "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.documentElement)"
            self.assertEqual(self.shown.ask(widths), [PHONE, PHONE])
            self.assertEqual(set(self.shown.ask(wider)), {"scroll"})

    def test_sixty_parts_stay_on_the_screen(self):
        """A strip of parts wraps, and no number in it is cut."""
        parts = tuple(Partition(n % 2 == 0, {"triton": 10_000 if n == 4 else 1 + n}) for n in range(60))
        self.path.write_text(report([], [GraphRecord("Net", "0/0", "forward", parts, None)]).to_html())
        strips = "[...document.querySelectorAll('.strip a')]"
        for width in (PHONE, DESK):
            self.shown.open(self.path, width)
            self.shown.ask(OPEN_ALL)
            self.assertLessEqual(self.shown.ask("document.documentElement.scrollWidth"), width)
            self.assertEqual(self.shown.ask(f"{strips}.length"), 60)
            self.assertEqual(self.shown.ask(f"{strips}.filter(e => e.scrollWidth > e.clientWidth).length"), 0)

    def test_light_and_dark(self):
        grounds = []
        for dark in (False, True):
            self.shown.open(self.path, DESK, dark=dark)
            grounds.append(self.shown.ask("getComputedStyle(document.body).backgroundColor"))
        self.assertEqual(grounds, ["rgb(255, 255, 255)", "rgb(16, 20, 24)"])

    def test_text_is_large_enough(self):
        for width in (PHONE, DESK):
            self.shown.open(self.path, width)
            self.shown.ask(OPEN_ALL)
            found = self.shown.ask(TEXT)
            self.assertGreater(len(found), 1000)
            self.assertEqual([t for t in found if t[0] < SMALLEST_TEXT - 0.01], [])

    def test_text_of_drawings_is_not_covered(self):
        for width in (PHONE, DESK):
            self.shown.open(self.path, width)
            drawings = self.shown.ask(DRAWN)
            self.assertEqual(len(drawings), 2)
            for right, marks in drawings:
                texts = [(text, box) for tag, text, box in marks if tag == "text"]
                self.assertEqual([t for t, box in texts if box[2] > right + 0.5], [])
                covered = [(t, what) for t, a in texts for _, what, b in marks if a != b and overlap(a, b)]
                self.assertEqual(covered, [])

    def test_a_finger_meets_what_it_means(self):
        self.shown.ask(OPEN_ALL)
        found = self.shown.ask(TARGETS)
        self.assertGreater(len(found), 80)
        for boxes, what in found:
            height, width = min(b[3] - b[1] for b in boxes), max(b[2] - b[0] for b in boxes)
            self.assertGreaterEqual(min(height, width), SMALLEST_TARGET, what)
        places = [(number, box) for number, (boxes, _) in enumerate(found) for box in boxes]
        pairs = [(found[n], found[m]) for n, a in places for m, b in places if n < m and overlap(a, b)]
        self.assertEqual(pairs, [])

    def test_tab_stops_at_everything_and_opens_what_is_closed(self):
        """It stops in document order, in view, with an outline. Enter and the space bar take turns to open."""
        stops, opened = [], 0
        while True:
            self.shown.press("Tab")
            focus = self.shown.ask(FOCUS)
            if focus["at"] in (-1, *stops):
                break
            stops.append(focus["at"])
            self.assertGreaterEqual(focus["outline"], 2, focus)
            self.assertTrue(focus["seen"], focus)
            if focus["closed"]:
                self.shown.press(("Enter", " ")[opened % 2])
                self.assertFalse(self.shown.ask(FOCUS)["closed"])
                opened += 1
        self.assertEqual(stops, list(range(self.shown.ask(f"{STOPS}.length"))))
        self.assertEqual(opened, self.shown.ask("document.querySelectorAll('details').length"))
        self.assertGreater(opened, 20)

    def test_an_arrow_scrolls_what_is_wider(self):
        wider = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        self.shown.ask(OPEN_ALL)
        number = self.shown.ask(f"{wider}.length")
        self.assertGreater(number, 8)
        for n in range(number):
            self.shown.ask(f"{wider}[{n}].focus()")
            self.shown.press("ArrowRight")
            self.shown.wait_for(f"{wider}[{n}].scrollLeft > 0")

    def test_the_first_link_leads_past_the_others(self):
        self.shown.press("Tab")
        box = "(({left, top, right}) => [left, top, right])(document.activeElement.getBoundingClientRect())"
        left, top, right = self.shown.ask(box)
        self.assertTrue(0 <= left < right <= PHONE and top >= 0, (left, top, right))
        self.shown.press("Enter")
        self.shown.wait_for("document.activeElement.id === 'content'")
        self.shown.press("Tab")
        self.assertTrue(self.shown.ask("document.activeElement.matches('#content *')"))


if __name__ == "__main__":
    run_tests()
