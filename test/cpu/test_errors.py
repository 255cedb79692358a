"""Errors, warnings and reasons: they reach the process that waits for the one that raised them; each reason is used and
has its own text."""

import copy
import json
import pickle
import string
from pathlib import Path

from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_patches.patch import TorchUnknown
from pygraph_trees.cli.target import TargetFormError
from pygraph_trees.errors import PygraphWarning
from pygraph_trees.reasons import Reason
from pygraph_trees.settings import InvalidFlag


class TestErrors(TestCase):
    def test_copies_have_the_same_message_and_fields(self):
        """A process pool pickles what it passes on."""
        invalid = InvalidFlag(name="some", allowed="'a'", value="b", hint="")
        warnings = PygraphWarning(message="some"), TorchUnknown(torch="1.0", known="2.11")
        for found in (invalid, TargetFormError("some.py", "it is short"), *warnings):
            for made in (copy.copy(found), pickle.loads(pickle.dumps(found))):
                self.assertEqual((type(made), str(made)), (type(found), str(found)))
        self.assertEqual(pickle.loads(pickle.dumps(invalid)).fields, invalid.fields)


PACKAGE = Path(__file__).resolve().parents[2] / "pygraph_trees"


class TestReasons(TestCase):
    def test_each_is_used_and_says_something_else(self):
        code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.stem != "reasons")
        self.assertEqual([name for name in Reason.__members__ if f"Reason.{name}" not in code], [])
        self.assertEqual([name for name, member in Reason.__members__.items() if name != member.name], [])

    def test_it_is_text_and_tells_its_reason_and_facts(self):
        for reason in Reason:
            facts = {name: f"<{name}>" for _, name, *_ in string.Formatter().parse(reason.value) if name}
            why = reason(**facts)
            self.assertEqual((why.reason, why.facts, isinstance(why, str)), (reason, facts, True))
            self.assertTrue(all(fact in why for fact in facts.values()), why)
            for copied in (copy.deepcopy(why), pickle.loads(pickle.dumps(why)), json.loads(json.dumps(why))):
                self.assertEqual((type(copied), copied), (str, str(why)))
        self.assertRaises(KeyError, Reason.TABLE, kernels=1)


if __name__ == "__main__":
    run_tests()
