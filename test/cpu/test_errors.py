"""errors.py: errors and warnings reach the process that waits for the one that raised them."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_patches.patch import TorchUnknown
from pygraph_trees.cli.target import TargetFormError
from pygraph_trees.errors import PygraphWarning
from pygraph_trees.settings import FLAGS, InvalidFlag


def _set_wrong_value():
    FLAGS[0].check("ful")


class TestErrors(TestCase):
    def test_a_process_pool_passes_them_on(self):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool, self.assertRaises(InvalidFlag) as caught:
            pool.submit(_set_wrong_value).result(timeout=60)
        self.assertEqual(caught.exception.value, "ful")

    def test_copies_have_the_same_message_and_fields(self):
        invalid = InvalidFlag(name="some", allowed="'a'", value="b", hint="")
        warnings = PygraphWarning(message="some"), TorchUnknown(torch="1.0", known="2.11")
        for found in (invalid, TargetFormError("some.py", "it is short"), *warnings):
            for made in (copy.copy(found), pickle.loads(pickle.dumps(found))):
                self.assertEqual((type(made), str(made)), (type(found), str(found)))
        self.assertEqual(pickle.loads(pickle.dumps(invalid)).fields, invalid.fields)


if __name__ == "__main__":
    run_tests()
