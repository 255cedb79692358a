"""Kernels of replayed graphs get the module and the line that they come from, or none if that is not certain."""

import gzip
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from fake_driver import FakeApi
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.benchmark import kernels
from pygraph_trees.benchmark.kernels import NotATrace, name_events
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.fake_gpu import lower
from pygraph_trees.report.calls import Call, calls_of
from pygraph_trees.report.log import FunctionLog, GraphLog, RecordingLog, journal
from pygraph_trees.report.records import OWN_MEMORY, OutputRecord
from pygraph_trees.report.summary import clear

# Library kernels as the profiler names them on an H100.
MATMUL, REDUCE = "nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT", "void splitKreduce_kernel<32, 16, int, float>(...)"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<..., cutlass::half_t>>(Flash_fwd_params)"
SORT, FILL = "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>", "void at::native::FillFunctor<...>"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        q, k, v = (part(x).view(2, 16, 4, 16).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.norm(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 64)))


class Encoder(nn.Sequential):
    def forward(self, x):
        return super().forward(x).sin()


def call(name, module):
    return Call(*((name, None) if name.startswith("triton_") else (None, name)), module, None)


def function(*calls, compile_id="0/0", **fields):
    graph = GraphLog("Net", compile_id, "inference", (), calls=(tuple(calls),))
    log = FunctionLog("Net", compile_id, "inference", 1, {}, graph, **fields)
    journal.add_function(log)
    return log


def launch(*names, correlation=1, graph=None):
    """The host's launch of a graph and its kernels; nodes have ids if their graph has one."""
    host = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "args": {"correlation": correlation}}
    found = [host]
    for i, name in enumerate(names):
        args = {"device": 0, "correlation": correlation} | ({"graph node id": graph << 32 | i + 1} if graph else {})
        found.append({"ph": "X", "cat": "kernel", "name": name, "ts": 5 + i, "dur": 1, "args": args})
    return found


def modules(events):
    return [event["args"].get("module") for event in events if event["cat"] == "kernel"]


class TestKernelNames(TestCase):
    def setUp(self):
        super().setUp()
        clear()
        self.addCleanup(clear)
        self.file = Path(self.enterContext(tempfile.TemporaryDirectory()), "trace.json")

    def lowered(self, *, training):
        model = Encoder(Layer(), Layer()).to(torch.float if training else torch.half)
        x = torch.empty(2, 16, 64, device="meta", dtype=model[0].q.weight.dtype)
        return [calls_of(graph.source_code, graph.gm)[0] for graph in lower(model, (x,), training=training)]

    def test_an_encoder(self):
        """Each kernel of real generated code is named, in files of both formats, whatever ran first."""
        (calls,) = self.lowered(training=False)
        layers = [[f"{i}.{name}" for name in ("q", "k", "v", "", "out", "norm")] for i in range(2)]
        wanted = [name.removesuffix(".") for layer in layers for name in layer]
        # The last kernel's last operation is the outermost module's, which has no name.
        self.assertEqual([made.module for made in calls], [*wanted[:-1], None])
        names, owners = [], []
        for made in calls:
            of_call = [made.kernel] if made.kernel else [FLASH] if "attention" in made.operator else [MATMUL, REDUCE]
            names += of_call
            owners += [made.module] * len(of_call)
        function(*calls)
        for file, graph in ((self.file, 7), (self.file.with_suffix(".json.gz"), None)):
            events = [*launch(*names, graph=graph), *launch("triton_poi_fused_0", MATMUL, correlation=2)]
            events.append({"ph": "X", "cat": "kernel", "name": names[0], "ts": 3, "args": {"correlation": 3}})
            if graph:  # ids tell the order
                events = [event | {"ts": -event["ts"]} for event in events]
            text = json.dumps({"traceEvents": events}).encode()
            file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
            self.assertEqual(pygraph_trees.name_kernels(file), (len(names), len(names) + 2))
            text = file.read_bytes()
            found = json.loads(gzip.decompress(text) if file.suffix == ".gz" else text)["traceEvents"]
            self.assertEqual(modules(found), [*owners, None, None, None])
            args = found[1]["args"]
            self.assertEqual((args["compile id"], args["function"]), ("0/0", "Net 0/0 inference"))
            self.assertRegex(args["line"], rf"{Path(__file__).name}:\d+ in .*: q, k, v = ")
            self.assertEqual([event["args"]["number in graph"] for event in found[1:4]], [0, 1, 2])
            self.assertEqual([path.name for path in file.parent.glob(f"{file.name}*")], [file.name])

    def test_a_backward(self):
        _, backward = self.lowered(training=True)
        self.assertEqual([made for made in backward if made.module is None and made.line is None], [])
        for operator, wanted in (("mm", "1.out"), ("attention_backward", "1")):
            self.assertEqual(next(made.module for made in backward if operator in str(made.operator)), wanted)

    def test_kernels_between_two_triton_kernels(self):
        """They are divided among the calls by kind; one that several calls may have launched stays unnamed."""
        first, last, t = call("triton_poi_fused_0", "first"), call("triton_poi_fused_1", "last"), "triton_poi_fused_0"
        named = {"mm": "mm", "addmm": "addmm", "sort": "aten.sort", "op": "my.op"}
        mm, addmm, sort, other = (call(operator, module) for module, operator in named.items())
        attention = call("aten._scaled_dot_product_flash_attention.default", "attention")
        for between, names, wanted in (
            ([mm, addmm], [MATMUL, MATMUL], ["mm", "addmm"]),
            ([mm, addmm], [MATMUL, REDUCE, MATMUL], ["mm", "mm", "addmm"]),
            ([mm, attention, addmm], [MATMUL, FLASH, FILL, MATMUL], ["mm", "attention", None, "addmm"]),
            ([sort], [SORT, FILL, SORT], ["sort"] * 3),
            ([mm, sort, mm], [MATMUL, SORT, SORT, MATMUL], ["mm", "sort", "sort", "mm"]),
            ([sort, other], [SORT, SORT], [None, None]),
            ([mm, addmm], [MATMUL], [None]),  # not the kernels that two matmuls have
            ([mm], ["my_gemv", "pygraph_put_64"], ["mm", None]),
            ([mm], [MATMUL, "triton_poi_fused_9"], [None, None]),
            ([mm] * 101, [MATMUL] * 101, [None] * 101),
        ):
            events = launch(t, *names, "triton_poi_fused_1")
            name_events(events, [function(first, *between, last)])
            self.assertEqual(modules(events), ["first", *wanted, "last"])
        for names in ((t,), (t, t, "triton_poi_fused_1"), (MATMUL,)):  # other graphs
            events = launch(*names)
            self.assertEqual(name_events(events, [function(first, last), function(mm)]), (0, len(names)))
        copied = RecordingLog(outputs=(OutputRecord(0, OWN_MEMORY, 8, 1, 8),))
        for recordings, wanted in (([], "sort"), ([copied], None)):  # the last kernel may be a copy
            events = launch(t, SORT, FILL)
            name_events(events, [function(first, sort, recordings=recordings)])
            self.assertEqual(modules(events), ["first", wanted, wanted])

    def test_functions_with_the_same_kernels(self):
        """Without ids of graphs, their kernels have the facts that both agree on."""
        one, other = (
            function(call("triton_0", module), call("mm", "fc"), compile_id=i, recordings=[RecordingLog()])
            for i, module in (("0/0", "a"), ("1/0", "b"))
        )
        events = launch("triton_0", MATMUL, graph=9)
        self.assertEqual(name_events(events, [one, other]), (1, 2))
        self.assertEqual((modules(events), "compile id" in events[2]["args"]), ([None, "fc"], False))

        class Api(FakeApi):  # of CUDA 13.1
            def cuGraphExecGetId(self, exec_):
                return self._answer("cuGraphExecGetId", int(exec_) - 90)

        api = Api()
        graph = SimpleNamespace(raw_cuda_graph_exec=lambda: 99)
        nodes = [SimpleNamespace(log=other.recordings[0], graph=graph), SimpleNamespace(graph=graph)]
        with mock.patch.multiple(kernels, driver=lambda: Driver(api), recordings=lambda _: nodes):
            self.assertEqual(name_events(events, [one, other]), (2, 2))
        self.assertEqual((modules(events), events[2]["args"]["compile id"]), (["b", "fc"], "1/0"))

    def test_files_that_are_no_traces(self):
        packed = self.file.with_suffix(".json.gz")
        for file, content, said in (
            (self.file, None, "No such file or directory"),
            (self.file, b"[", "Expecting value"),
            (self.file, b"[]", "it has no list of traceEvents"),
            (self.file, b'{"traceEvents": 3}', "it has no list of traceEvents"),
            (packed, b"{}", "Not a gzipped file"),
            (packed, gzip.compress(b"{}")[:-9], "Compressed file ended"),
            (packed, gzip.compress(b"{}")[:10] + b"~~~~", "Error -3"),
        ):
            if content is not None:
                file.write_bytes(content)
            with self.assertRaisesRegex(NotATrace, f"{file.name}: {said}.*; expected a trace that torch.profiler"):
                pygraph_trees.name_kernels(str(file))


if __name__ == "__main__":
    run_tests()
