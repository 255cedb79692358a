"""The search of captured graphs in C finds what the search in Python finds.

Both read the same graph when it is recorded. Nodes, relocations, refused inputs and kinds of nodes must be equal, and
some relocation must be found.
"""

from __future__ import annotations

import unittest
from unittest import mock

import torch.nn.functional as F
from indirection import IndirectionTestCase, Program, by_name, tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.cuda.driver import Driver, driver
from pygraph_trees.indirection import inputs
from pygraph_trees.indirection import relocations as relocations

HALF = {"dtype": "float16"}
PROGRAMS = [
    Program("pointwise", lambda x, y: x * y + 1, (tensor(1 << 16), tensor(1 << 16))),
    Program("matmul", lambda x, y: (x @ y).relu(), (tensor(256, 256, **HALF), tensor(256, 256, **HALF))),
    Program("convolution", F.conv2d, (tensor(2, 8, 16, 16), tensor(8, 8, 3, 3))),
    Program("attention", F.scaled_dot_product_attention,
            (tensor(2, 4, 128, 64, **HALF), tensor(2, 4, 128, 64, **HALF), tensor(2, 4, 128, 64, **HALF))),
    Program("sort", lambda x: x.sort().values, (tensor(33_333),)),
    Program("embedding bag", lambda i, w: F.embedding_bag(i, w, mode="sum"),
            (tensor(64, 8, dtype="int64", values="below 9"), tensor(9, 32))),
    Program("64 inputs", lambda *xs: [x * 2 for x in xs], tuple(tensor(17) for _ in range(64))),
    Program("written to", lambda c, x: c.add_(x), (tensor(1000), tensor(1000))),
]  # fmt: skip


class TestNativeSearch(IndirectionTestCase):
    def setUp(self):
        super().setUp()
        if driver().reader is None:
            raise unittest.SkipTest("the native part was not built")

    @parametrize("program", PROGRAMS, name_fn=by_name)
    def test_both_find_the_same(self, program):
        searched = []

        def scan(api, *captured):
            found, expected = relocations.scan(api, *captured), relocations.scan(Driver(api.api), *captured)
            self.assertEqual([node.handle for node in found.nodes], [node.handle for node in expected.nodes])
            self.assertEqual((found.relocations, found.refused), (expected.relocations, expected.refused))
            self.assertEqual((found.opaque, found.kinds), (expected.opaque, expected.kinds))
            searched.append(len(found.relocations))
            return found

        with mock.patch.object(inputs, "scan", scan):
            self.check(program)
        self.assertGreater(sum(searched), 0)


instantiate_parametrized_tests(TestNativeSearch)

if __name__ == "__main__":
    run_tests()
