"""The README is short, its links exist, and its example and sample are what the commands print."""

import json
import re
import sys
from unittest import mock

from commands import ROOT, WithFolder, run
from torch.testing._internal.common_utils import run_tests

from pygraph_trees import __main__ as command_line
from pygraph_trees.benchmark import Measurement, outcome, text_table

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
MOST_WORDS = 1500


def block_after(mark):
    """The first code block after a mark."""
    return TEXT.partition(mark)[2].partition("```")[2].partition("\n")[2].partition("```")[0]


class TestReadme(WithFolder):
    def test_it_is_short(self):
        self.assertLessEqual(len(TEXT.split()), MOST_WORDS)

    def test_links_exist(self):
        of_folders = (page for name in ("pygraph_trees", "tools") for page in (ROOT / name).rglob("*.md"))
        for page in (README, ROOT / "CONTRIBUTING.md", *of_folders):
            for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
                self.assertTrue((page.parent / name).exists(), f"{page.relative_to(ROOT)}: {name}")

    def test_the_sample_is_of_the_page(self):
        (name,) = re.findall(r"\((\S+-tke\.html)\)", TEXT)
        report = (ROOT / name).read_text(encoding="utf-8").partition('id="report">')[2].partition("</script>")[0]
        found = [Measurement(**fields) for fields in json.loads(report)["measurements"]]
        printed = {"", *text_table(found).splitlines(), *outcome.verdicts(found)}
        self.assertTrue({""} < {*block_after("`compare` measures").splitlines()} <= printed, printed)

    def test_the_example_is_explained_as_it_says(self):
        with mock.patch.object(sys, "path", list(sys.path)):
            path = self.folder / "my.py"
            path.write_text(block_after("<!-- my.py: run by test_readme.py -->"))
            status, out, err = run(command_line.main, "explain", f"{path}:build")
            self.assertEqual(status, 0, err)
            sys.modules.pop("my", None)
        versions = lambda text: re.sub(r"\S+/my\.py", "my.py", re.sub(r"torch \S+:", "torch:", text))  # noqa: E731
        self.assertEqual(versions(out), versions(block_after("<!-- explained: compared by test_readme.py -->")))

    def test_other_modes_with_cuda_graphs_are_named(self):
        """The README names exactly the modes in which torch uses CUDA graphs."""
        from torch._inductor import list_mode_options

        graphed = {mode for mode, options in list_mode_options().items() if options.get("triton.cudagraphs")}
        self.assertEqual(graphed, {"reduce-overhead", "max-autotune"})
        self.assertIn('`"reduce-overhead"` or `"max-autotune"`', TEXT.replace("\n  ", " "))


if __name__ == "__main__":
    run_tests()
