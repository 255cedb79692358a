"""Targets and the command line: valid targets, the messages for others, and what the commands print."""

import contextlib
import functools
import io
import json
import re
import sys
from unittest import mock

import torch
from commands import WithFolder, forked, python
from commands import run as run_main
from page_elements import Elements, needed
from torch.testing._internal.common_utils import run_tests

import inductor_patches
import pygraph_trees
from pygraph_trees import __main__ as command_line
from pygraph_trees.benchmark import Effort, Measurement
from pygraph_trees.benchmark.outcome import PLAIN_NAMES, verdicts
from pygraph_trees.benchmark.ways import Way
from pygraph_trees.cli import target
from pygraph_trees.errors import PygraphError
from pygraph_trees.report.records import Environment
from pygraph_trees.report.summary import clear

META = torch.device("meta")
MAIN = "import sys; from pygraph_trees.__main__ import main; sys.exit(main())"

PROGRAM = """
import torch
from beside import SIZE

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(SIZE, SIZE)
        self.table = torch.arange(float(SIZE))

    def forward(self, x, *, scale):
        table = self.table.to(x.device)
        y = self.linear(x).relu() * table
        factor = scale.to(x.device)
        total = (y * factor).sum().cpu()
        return y.softmax(-1), total

def net(device="cuda"):
    return Net().to(device).eval(), (torch.ones(8, SIZE, device=device),), {"scale": torch.ones(SIZE)}

def plain():
    return torch.sin, (torch.ones(4),)

def number(): return 3
def bare(): return torch.sin, torch.ones(4)
def on_cpu(): return Net().eval(), (torch.ones(8, SIZE),), {"scale": torch.ones(SIZE)}
def needs(a, device): return torch.sin, (a,)
def raises(device): return (lambda x: inner(x)), (torch.ones(4, 3, device=device),)
def inner(x): return torch.nn.functional.linear(x, torch.ones(5, 5, device=x.device))
def broken(device): raise ZeroDivisionError("mine")
"""


run = functools.partial(run_main, command_line.main)


class Folder(WithFolder):
    def setUp(self):
        super().setUp()
        # A file that is written again within a second, with the same length, would run as it was before.
        self.enterContext(mock.patch.multiple(sys, path=list(sys.path), dont_write_bytecode=True))
        self.addCleanup(sys.modules.pop, "beside", None)
        self.addCleanup(sys.modules.pop, "program", None)
        self.file = self.folder / "program.py"
        self.file.write_text(PROGRAM)
        self.file.with_name("beside.py").write_text("SIZE = 16\n")
        self.html, self.json = (self.file.with_name(name) for name in ("page.html", "out.json"))

    def in_a_process(self, *arguments, options=("-m", "pygraph_trees"), **environment):
        """A command in a new process: its exit status, and what it wrote to both streams."""
        done = python(*options, *map(str, arguments), **environment)
        return done.returncode, done.stdout, done.stderr

    def data(self):
        """The data of the page, which is complete and needs no other file."""
        text = self.html.read_text(encoding="utf-8")
        self.assertEqual((Elements(text).open, needed(text)), ([], []))
        return json.loads(text.partition('id="report">')[2].partition("</script>")[0])


class TestTarget(Folder):
    def test_file_module_and_workload(self):
        sys.path.insert(0, str(self.file.parent))
        self.assertIn("BERT-I", target.workloads())
        for text, name in ((f"{self.file}:net", "net"), ("program:net", "net"), ("EOS", "EOS")):
            program = target.resolve(text, META)
            self.assertEqual((program.name, program.args[0].device), (name, META))
            if name == "net":
                self.assertEqual(program.kwargs["scale"].device.type, "cpu")
                self.assertEqual(next(program.fn.parameters()).device, META)

    def test_what_is_said(self):
        self.file.with_name("w.txt").write_text("")
        for text, problem in (
            (f"{self.file}:missing", "has no function 'missing'$"),
            (f"{self.file}:number", "it returned int"),
            (f"{self.file}:bare", "it returned a tuple of .*, Tensor; args must be a tuple"),
            (f"{self.file.with_name('w.txt')}:build", "w.txt is not a .py file"),
            (".:build", "'.' is neither a .py file nor the name of a module"),
            (f"{self.file}:needs", r"it needs arguments \(a, device\)"),
            (str(self.file), "it names no function; add one, as in .*program.py:build$"),
            ("no_such_package.x:f", "there is no module no_such_package.x"),
            ("NOPE", r"no such workload.*\(.*BERT-I.*\)"),
            ("bert-i", r"no such workload; did you mean BERT-I\?$"),
        ):
            with self.assertRaisesRegex(target.TargetError, problem) as caught:
                target.resolve(text, META)
            explains = "(model, args, kwargs, loss)), or a workload" in str(caught.exception)
            self.assertEqual(explains, not problem.endswith("$"))  # a name that is proposed is all that it needs

    def test_an_error_of_the_target_is_one_line(self):
        """With --traceback, it also shows a traceback."""
        missing = "it needs the package a_package, which is not installed: pip install a_package"
        exits = r"it calls sys.exit\(0\); do this under if __name__ == '__main__'"
        for function, text, problem in (
            ("broken", None, r"ZeroDivisionError: mine \(program.py:30 in broken\)"),
            ("on_cpu", None, "all inputs are on the CPU, .* on the GPU; add a parameter `device` to the function, .*"),
            ("net", "import a_package.inside as net", missing),
            ("net", "import torch.nosuch as net", "there is no module torch.nosuch"),
            ("net", "import sys; net = sys.exit(0)", exits),
            ("net", "def net(:", "program.py:1 is not valid Python: invalid syntax"),
            ("raises", None, r"RuntimeError: a and b must have same reduction dim.* \(program.py:29 in inner\)"),
        ):
            with self.subTest(function=function, text=text):
                self.file.write_text(text or PROGRAM)
                status, out, err = run("explain", f"{self.file}:{function}")
                said = rf"^error: target 'program.py:{function}': {problem} \(--traceback shows where\)$"
                self.assertRegex(err.splitlines()[-1].replace(str(self.file), "program.py"), said)  # after the progress
                traced = run("explain", "--traceback", f"{self.file}:{function}")
                self.assertEqual((status, out, traced[0]), (2, "", 2))
                self.assertIn("Traceback (most recent call last)", traced[2])

    def test_what_is_not_there_is_told_before_torch_is_imported(self):
        """A target that asks for a GPU is told its line, after the import."""
        made, asks = (self.file.with_name(name) for name in ("made.py", "asks.py"))
        made.write_text("globals()['net'] = lambda: (abs, (1,))\n")
        asks.write_text("import torch\ndef net(): return torch.ones(2).cuda(), ()\n")
        code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {MAIN}"
        to_do = "add a parameter `device` to the function, and build for it (--traceback shows where)"
        for text, is_imported, problem in (
            (f"{self.file}:nett", False, f"{self.file} has no function 'nett'; did you mean 'net'?"),
            ("nowhere.py:net", False, "there is no file nowhere.py"),
            (f"{asks}:net", True, f"it uses a GPU at {asks}:2 in net, and torch finds none; {to_do}"),
        ):
            found = self.in_a_process("explain", text, options=("-c", code))
            self.assertEqual(found, (2, f"{is_imported}\n", f"error: target {text!r}: {problem}\n"))
        target.check(f"{made}:net")  # its function is made while it runs

    def test_what_is_trained(self):
        """A module with a loss or in training mode is trained; a function with the latter takes its own steps."""
        net, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
        loss = lambda y: y.square().mean()  # noqa: E731
        trained = target.program_of((net, (x,)), "net")
        self.assertEqual((trained.mode, trained.loss(net(x))), ("training", net(x).sum()))
        step = target.program_of((lambda x: net(x).sum().backward(), (x,)), "step")
        self.assertEqual((step.mode, step.is_step), ("a step", True))
        step.step(step.fn, step.args, step.kwargs)
        self.assertEqual(net.weight.grad, torch.full((3, 3), 2.0))
        with_loss = target.program_of((net.eval(), (x,), {}, loss), "net")
        self.assertEqual((with_loss.mode, with_loss.loss), ("training", loss))
        for fn in (net, torch.nn.Linear(3, 3).requires_grad_(False), lambda x: net(x)):
            self.assertEqual(target.program_of((fn, (x,)), "net").mode, "inference")
        for made in (3, (net,), (net, 3), (net, (x,), 3), (net, (x,), {}, 3), (net, (x,), {}, loss, 1)):
            self.assertIsNone(target.program_of(made, "net"))


class TestExplain(Folder):
    def test_partitions_causes_and_inputs(self):
        with mock.patch("pygraph_trees.cli.explanation.WIDTH", 400):  # no wrapping, which depends on the folder's name
            status, out, err = run("explain", f"{self.file}:net", "--json", str(self.json), "--html", str(self.html))
        self.assertEqual((status, "lowering net for sm_90" in err), (0, True), err)
        data = json.loads(self.json.read_text())
        self.assertEqual((data["program"], data["unplaced"], len(data["graphs"])), ("net", [3, 2], 1))
        self.assertEqual(self.data(), data)
        self.assertIn("because of cpu ops", self.html.read_text())
        text = out.replace(str(self.file), "program.py").replace(torch.__version__, "2")
        text = re.sub(r"\[\d+/\d+\]", "[0/0]", text)
        self.assertExpectedInline(
            text,
            """\
net for sm_90, torch 2: 1 graph

Net [0/0], inference: 2 partitions, 1 graphed
  compiled from program.py:11 in forward
  partition 1, graphed: 3 extern, 2 triton
    inputs: 2 static (1.1 kB), 1 live (512 B), 2 cpu (128 B)
      live input      on    dtype  bytes   read by
      x           cuda:0  float32  512 B  1 extern
      scale          cpu  float32   64 B  1 extern
      table          cpu  float32   64 B  1 extern
  partition 2, outside of CUDA graphs: 1 copy
    because of cpu ops: prims.device_put.default at program.py:15 in forward: total = (y * factor).sum().cpu()

What pygraph_trees does:
  placement full: 2 partitions, 1 outside of CUDA graphs; without it 3, 2 outside
    staged: table, scale, because it is an input
  indirection auto: 1 live input, 512 B, given by address; 2 live inputs, 128 B, staged at each replay
  selective auto: 1 function graphed, if that is faster

Kernels are generated (triton) or a library's (extern). Inputs are parameters and buffers (static),
outputs of an earlier graph (managed), or come with each call (live; cpu if on the CPU).
""",
        )

    def told(self, fn, *inputs, **how):
        return " ".join(str(pygraph_trees.explain(fn, *inputs, **how)).split())

    def test_a_training_step(self):
        """The forward and the backward of a plain training loop are explained."""
        net = torch.nn.Linear(4, 4, device="meta")

        def step(x):
            net.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            return loss.detach()

        found = pygraph_trees.explain(step, torch.ones(4, 4, device="meta"))
        self.assertEqual(([graph.mode for graph in found.graphs], net.weight.grad), (["forward", "backward"], None))

    def test_graph_breaks(self):
        """After a branch on a value, the rest of the program is unknown."""

        def printing(x):
            y = x.sin()
            print("from inside")
            return y if (y * 2).sum() > 0 else y.cos()

        with contextlib.redirect_stdout(io.StringIO()):
            found = pygraph_trees.explain(printing, torch.ones(4, 4, device="meta"))
        self.assertEqual(([b.count for b in found.breaks], len(found.graphs)), ([1, 1], 2))
        self.assertRegex(str(found), r"2 graph breaks:\n  1x: .*print")
        unknown = "(?s)The rest is unknown: printing reads the value of a tensor .*2 functions graphed"
        self.assertRegex(str(found), unknown)

    def test_in_python(self):
        found = pygraph_trees.explain(torch.nn.Linear(4, 4).eval(), torch.ones(2, 4, device="meta"), arch="sm_80")
        self.assertEqual((found.program, found.architecture, len(found.graphs)), ("Linear", "sm_80", 1))
        self.assertIn("Linear for sm_80", found._repr_html_())
        self.assertRaisesRegex(TypeError, "a module or a function, got int", pygraph_trees.explain, 3)
        x = torch.ones(8, 4, device="meta")
        torch._dynamo.mark_dynamic(x, 0)
        found = self.told(lambda x: x.sin(), x)
        self.assertRegex(found, r"live input on dtype bytes read by x cuda:0 float32 \[s\d+, 4\] 1 triton")

    def test_what_is_left_on_the_cpu(self):
        """The error names it, and the device to use."""

        class Moves(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x.to(self.weight.device))

        net, x = torch.nn.Linear(4, 4).eval(), torch.ones(2, 4)
        for fn, inputs, said in (
            (net, x, "all inputs are on the CPU, and parameters count as on the GPU; put the inputs on"),
            (lambda x: net(x), x.to("meta"), "all parameters are on the CPU, and inputs on the GPU; put the model on"),
        ):
            with self.assertRaisesRegex(PygraphError, f"^{said} device='meta', which stands for the GPU$"):
                pygraph_trees.explain(fn, inputs)
        self.assertEqual(len(pygraph_trees.explain(net, x.to("meta")).graphs), 1)  # a model loses its weights there
        with self.assertRaisesRegex(RuntimeError, "same reduction dim"):  # another error stays as it is
            pygraph_trees.explain(net, torch.ones(2, 5, device="meta"))
        self.assertIn("staged: x, because it is an input", self.told(Moves(4, 4).eval(), x))
        wanted = "not graphed, 1 cpu outside: all of its tensors are on the CPU; device='meta' stands for"
        self.assertIn(wanted, self.told(torch.sin, torch.ones(4)))

    def test_without_the_patches_nothing_is_told(self):
        said = "error: explain needs the patches of 'flags', and their state is 'disabled'; unset PYGRAPH_DISABLE\n"
        with forked("compiler"):
            self.assertEqual(self.in_a_process("explain", f"{self.file}:net", PYGRAPH_DISABLE="1"), (2, "", said))
        inductor_patches.uninstall()
        self.addCleanup(inductor_patches.install)
        with self.assertRaisesRegex(PygraphError, r"their state is 'off'; call pygraph_trees.install\(\)$"):
            pygraph_trees.explain(torch.sin, torch.ones(4, device="meta"))

    def test_a_torch_that_cannot_be_imported(self):
        """Torch is not installed, or its compiler has no folder for its cache."""
        place = self.file / "cache"  # inside a file, where no folder can be made
        no_torch = f"from pygraph_trees.native import location; location.torch_folder = lambda: None; {MAIN}"
        no_folder = f"Inductor's cache, {place}, cannot be made: Not a directory. TORCHINDUCTOR_CACHE_DIR names "
        no_folder += "another folder for it."
        for code, problem in ((no_torch, "there is no torch: pip install torch"), (MAIN, no_folder)):
            for command in ("explain", "compare"):
                arguments, options = (command, f"{self.file}:net"), ("-c", code)
                found = self.in_a_process(*arguments, options=options, TORCHINDUCTOR_CACHE_DIR=str(place))
                self.assertEqual(found, (2, "", f"error: {problem}\n"))

    def test_settings_of_inductor(self):
        never = r"Net .*: not graphed, .*: pygraph_selective is 'never'"
        for settings, *lines in (
            # A CPU input prevents graphs.
            ({"graph_partition": False}, "inference: not graphed", "placement full: no partitions\n", "auto: nothing"),
            ({"triton.pygraph_selective": "never"}, never, "placement off: no partitions\n", "never: nothing"),
            ({"freezing": True}, "1 live input"),
        ):
            with self.subTest(settings), torch._inductor.config.patch(settings):
                status, out, err = run("explain", f"{self.file}:net")
                self.assertEqual(status, 0, err)
                for line in lines:
                    self.assertRegex(out, line)
                self.assertLessEqual(max(map(len, out.splitlines())), 104)  # fits a terminal

    def test_compare_without_a_gpu_explains_and_writes_nothing(self):
        self.enterContext(mock.patch.object(torch.cuda, "is_available", lambda: False))
        for option in ("--json", "--html", "--trace", "--baseline"):
            said = f"error: compare needs a GPU, and torch finds none; it has no measurements for {option}\n"
            found = run("compare", f"{self.file}:net", option, str(self.file if option == "--baseline" else self.json))
            self.assertEqual((found, self.json.exists()), ((2, "", said), False))
        self.assertRaisesRegex(PygraphError, "compare needs a GPU", pygraph_trees.compare, torch.sin, torch.ones(2))
        status, out, err = run("compare", f"{self.file}:net")
        self.assertEqual(status, 0, err)
        self.assertRegex(out, r"^.*compare needs a GPU.*\n(?s:.*)\nWhat pygraph_trees does:\n")
        with torch._inductor.config.patch("triton.pygraph_verify", "on"):  # no success if nothing was verified
            found = run("compare", f"{self.file}:net")
        self.assertEqual(found, (2, "", "error: nothing was verified: this needs a GPU, and torch can use none here\n"))

    def test_usage(self):
        self.enterContext(mock.patch.object(torch.cuda, "is_available", lambda: False))
        self.assertEqual(run()[0], 2)
        program = f"{self.file}:net"
        for arguments, problem in (
            (("compare", program, "--rounds", "0"), "--rounds: expected a whole number of 1 or more, got '0'"),
            (("compare", program, "--json", ""), "argument --json: expected the name of a file, got ''"),
            (("compare", program, "--ways", "ours,foo"), "error: a way is one of eager, compile, .*; got 'foo'"),
            (("explain", program, "--arch", "sm_12"), "error: .*'sm_90'.*'sm_12'"),
            (("compare", program, "--baseline", "no.json"), "argument --baseline: there is no file 'no.json'"),
        ):
            status, out, err = run(*arguments)
            self.assertEqual((status, out), (2, ""))
            self.assertRegex(err, problem)
        status, out, _ = run("--version")
        self.assertEqual((status, "pygraph_trees 0." in out), (0, True))
        status, out, _ = run("--help")
        self.assertEqual((status, "`" in out), (0, False))


class TestDoctor(Folder):
    def doctor(self, code="", **environment):
        """Exit status, and what is said of each part, by its name; "ok" or "NOT" first."""
        status, out, err = self.in_a_process("doctor", options=("-c", f"import sys\n{code}\n{MAIN}"), **environment)
        self.assertNotIn("Traceback", err)
        parts = [(line[:3], *line[5:].split(": ", 1)) for line in out.splitlines()]
        return status, {name: f"{works} {text}" for works, name, text in parts}

    @forked("compiler")
    def test_what_works(self):
        """Only what is missing here is said to be."""
        status, found = self.doctor()
        lacking = {name for name, text in found.items() if text.startswith("NOT")}
        self.assertEqual(status, int(bool(lacking)))
        self.assertLessEqual(lacking, {"GPU", "native parts", "headers"})
        self.assertEqual("GPU" in lacking, not torch.cuda.is_available())
        self.assertEqual((found["torch"], found["allocator"]), (f"ok  {torch.__version__}", "ok  native"))
        states = {name.removeprefix("patches "): text for name, text in found.items() if name.startswith("patches")}
        self.assertEqual(states, dict.fromkeys(inductor_patches.FEATURES, "ok  on"))

    def test_what_is_missing(self):
        """Without compilers, patches, a folder for the cache, and the parts in C++, each line says what to do."""
        folder, wrong = self.file.parent, self.file / "x"
        where = {"PATH": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(wrong), "TORCH_EXTENSIONS_DIR": str(folder)}
        status, found = self.doctor(CC="my-cc -x", CXX="g++", PYGRAPH_DISABLE="1", PYGRAPH_BUILD="1", **where)
        self.assertEqual(status, 1)
        for name, text in (
            ("C compiler", "NOT none; install my-cc, or set CC"),
            ("C++ compiler", "NOT none; install g++, or set CXX"),
            ("patches trees", "NOT disabled; unset PYGRAPH_DISABLE"),
            ("cache TORCHINDUCTOR_CACHE_DIR", f"NOT {wrong}; Not a directory; set it to another folder"),
            ("cache TORCH_EXTENSIONS_DIR", f"ok  {folder / 'pygraph_trees'}"),
        ):
            self.assertEqual(found[name], text)
        self.assertRegex(found["native parts"], "^NOT .*because it is not built: run python -m pygraph_trees build$")
        self.assertEqual(list((folder / "pygraph_trees").iterdir()), [])  # no probe is left

    def test_a_torch_that_cannot_be_imported(self):
        broken = self.file.parent / "torch"
        broken.mkdir()
        (broken / "__init__.py").write_text("raise ImportError('no libcudart')")
        (broken / "version.py").write_text("__version__ = '2.13.0'")
        status, found = self.doctor(f"sys.path.insert(0, {str(self.file.parent)!r})")
        self.assertEqual((status, found["torch"]), (1, "ok  2.13.0"))
        self.assertEqual(found["import of torch"], "NOT failed; ImportError: no libcudart")

    @forked("compiler")
    def test_an_unsupported_torch(self):
        """Nothing recommends a build that would serve nothing."""
        other = "import torch; torch.__version__ = '2.99.0'"
        why = "pygraph_trees supports torch 2.11 to 2.15; torch 2.99.0 is not patched"
        status, found = self.doctor(other)
        self.assertEqual((status, found["torch"]), (1, f"NOT 2.99.0; {why}"))
        self.assertIn("because torch is not patched", found["native parts"])
        status, out, err = self.in_a_process("build", options=("-c", f"{other}\n{MAIN}"))
        self.assertEqual((status, out, err.splitlines()[-1]), (2, "", f"error: {why}: install one of those"))
        out = self.in_a_process("--version", options=("-c", f"{other}\n{MAIN}"))[1]
        self.assertEqual(out, f"pygraph_trees {pygraph_trees.__version__}, torch 2.99.0, native: {why}\n")


class TestCompare(Folder):
    """The GPU is absent: ``compare`` calls and times a program on the CPU, in ways that are plain callables."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.multiple(torch.cuda, is_available=lambda: True, get_device_name=lambda: "a GPU"))
        environment = Environment("9", "2", None, "a GPU", ())
        self.enterContext(mock.patch("pygraph_trees.report.summary.Environment", return_value=environment))

    def test_verdicts(self):
        latencies = {"eager": 4.0, "compile": 2.0, "upstream": 3.0, "ours": 1.5}
        found = [Measurement("W", "inference", 1, way, "same", latency_ms=ms) for way, ms in latencies.items()]
        line = "ours, same inputs: 2.00x over reduce-overhead, 1.33x over torch.compile, 2.67x over eager"
        for measured, lines in ((found, [line]), ([*found[:3], found[3].failed("it broke")], []), (found[3:], [])):
            self.assertEqual(verdicts(measured), lines)

    def compared(self, *options, way="ours", latency_ms=2.0):
        """``compare`` with these options, which measures this latency."""
        found = [Measurement("W", "inference", 1, way, "same", latency_ms=latency_ms)]
        measures = mock.patch("pygraph_trees.benchmark.compare", return_value=found)
        with mock.patch.object(target, "resolve"), measures as self.measured:
            return run("compare", "X", *options)

    def test_a_baseline(self):
        """The exit status says whether a way became slower, for use in CI."""
        baseline = str(self.json)
        self.assertEqual(self.compared("--json", baseline)[0], 0)
        line = f"slower than {baseline}: ours, same inputs: 2.200 ms, 2.000 ms before (+10%)"
        for latency_ms, options, expected in ((2.09, (), 0), (2.2, (), 1), (2.2, ("--tolerance", "20"), 0)):
            status, out, err = self.compared("--baseline", baseline, *options, latency_ms=latency_ms)
            self.assertEqual((status, line in out), (expected, expected == 1), err)

    def test_what_is_no_baseline(self):
        self.compared("--json", str(self.json))
        good = self.json.read_text()
        for text, why in (
            ("{", "Expecting property name"),
            ("[]", "is not a baseline"),
            ("{}", "it has no measurements"),
            (good.replace('"a GPU"', '"another"'), "was measured on another, and this is a GPU"),
        ):
            self.json.write_text(text)
            status, _, err = self.compared("--baseline", str(self.json))
            self.assertEqual((status, self.measured.called), (2, False))  # before anything is measured
            self.assertRegex(err, f"error: .*{why}")
        self.json.write_text(good.replace('"W"', '"another"'))
        self.assertIn("it has no measurement of this program", self.compared("--baseline", str(self.json))[2])

    def test_nothing_graphed_is_nothing_verified(self):
        """If ours is to be verified but records nothing, the status says so after all measurements."""
        for verify, way, expected in (("on", "ours:patch", 2), ("on", "upstream", 0), ("off", "ours", 0)):
            clear()
            with torch._inductor.config.patch("triton.pygraph_verify", verify):
                status, text, err = self.compared("--ways", way, way=way)
            self.assertEqual((status, "nothing was verified" in err), (expected, expected == 2), err)
            self.assertIn("pygraph_trees 9", text)

    def test_one_lane_is_a_way_if_there_may_be_more(self):
        for flag, expected in (("off", False), ("report", False), ("auto", True), ("always", True)):
            with torch._inductor.config.patch("triton.pygraph_branches", flag):
                self.compared()
            self.assertEqual("ours:one-lane" in self.measured.call_args.args[1], expected)

    def compare(self, *options, ours=torch.sin):
        callables = {"eager": torch.sin, "upstream": torch.sin, "ours": ours}
        ways = [Way(name, fn, patched=False, trees=None) for name, fn in callables.items()]
        effort = Effort(1, 0.0, (2, 2), settle_calls=1, warm_calls=(5, 8), ring=2, fresh_caches=False)
        replaced = {"make_ways": lambda program, names: ways, "wake_compiler": mock.DEFAULT}
        measure = mock.patch.multiple("pygraph_trees.benchmark.measure", **replaced)
        with measure, mock.patch("pygraph_trees.benchmark.Effort", lambda rounds: effort):
            return run("compare", f"{self.file}:plain", "--html", str(self.html), *options)

    def test_a_page_and_the_same_in_json(self):
        status, out, err = self.compare("--json", str(self.json))
        self.assertEqual(status, 0, err)
        for line in ("ours equal; ours and upstream are bit-equal", "plain: inference, batch 1", "pygraph_trees 9"):
            self.assertIn(line, out)
        beside, text = json.loads(self.json.read_text()), self.html.read_text(encoding="utf-8")
        found = beside["measurements"]
        self.assertEqual(self.data(), {**beside["report"], "measurements": found})
        ways = [(way, regime) for way in ("eager", "upstream", "ours") for regime in ("same", "fresh")]
        self.assertEqual([(m["way"], m["regime"]) for m in found], ways)
        self.assertIn("<title>plain: pygraph_trees</title>", text)
        for m in found:
            self.assertEqual((m["workload"], m["error"]), ("plain", None))
            self.assertGreater(m["latency_ms"], 0)
            name = PLAIN_NAMES.get(m["way"], m["way"])
            self.assertIn(f"{name}, {m['regime']} inputs: {m['latency_ms']:.3f} ms", text)

    def test_a_way_that_failed(self):
        broken = mock.Mock(side_effect=RuntimeError("of the <test>"))
        status, out, _ = self.compare("--json", str(self.json), ours=broken)
        self.assertEqual((status, "of the <test>" in out), (1, True))
        measured = self.data()["measurements"]
        self.assertEqual([m["error"] for m in measured], [None] * 4 + ["RuntimeError: of the <test>"] * 2)
        self.assertEqual(json.loads(self.json.read_text())["measurements"], measured)
        self.assertIn("ours, same inputs, failed: RuntimeError: of the &lt;test&gt;", self.html.read_text())

    def test_what_cannot_be_written_is_said_before_anything_is_measured(self):
        """No file is touched then, nor by a comparison that fails."""
        self.html.write_text("of an earlier run")
        link = self.file.with_name("link.html")
        link.symlink_to("made-later.html")
        before = sorted(self.file.parent.rglob("*"))
        for options, problem in (
            (("--html", self.file.with_name("missing") / "page.html"), "No such file or directory"),
            (("--html", self.html, "--json", self.file.parent), "that is a folder"),
            (("--html", link, "--json", self.file.with_name("made-later.html")), "--json names it too"),
        ):
            began = mock.patch.object(target, "resolve", side_effect=lambda *_: self.fail("began"))
            with self.subTest(options=options), began:
                status, out, err = run("compare", "X", *map(str, options))
                self.assertEqual((status, out), (2, ""))
                self.assertRegex(err, rf"^error: --(html|json) .*: {problem}; expected a file that can be written")
        with mock.patch("pygraph_trees.benchmark.compare", side_effect=PygraphError(message="of the test")):
            self.assertEqual(self.compare("--json", str(self.json))[0], 2)
        self.assertEqual(sorted(self.file.parent.rglob("*")), before)
        self.assertEqual((self.html.read_text(), link.is_symlink()), ("of an earlier run", True))


if __name__ == "__main__":
    run_tests()
