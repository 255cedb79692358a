"""Errors of the trees never reach the program; its own errors do. Upstream's part is a function of the test."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from bare_manager import bare_manager
from torch._inductor.cudagraph_trees import CompilationMode, FunctionID
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.report.log import FunctionLog
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions import containment
from pygraph_trees.trees.functions.containment import MOST_FAILURES, HeldForTooLong, Progress, progress_of
from pygraph_trees.trees.functions.function import FunctionModel
from pygraph_trees.trees.managers import calls
from pygraph_trees.trees.managers.manager import Manager

ID = FunctionID(0)


def doubled(inputs: list[Any]) -> list[Any]:
    outputs = [value * 2 for value in inputs]
    inputs.clear()
    return outputs


def of_torch() -> None:
    """Raises as torch does if an operation cannot be captured: from C++."""
    torch.empty(1).view(2)


def fails(error: BaseException) -> None:
    """Raises an error as code of torch does."""
    exec("raise error", {"__name__": "torch.of_the_test", "error": error})


class TestContained(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.model = FunctionModel(doubled, Settings.current(), FunctionLog("f", "0/0", "inference", 1, {}))
        self.manager = bare_manager(ids_to_funcs={ID: SimpleNamespace(model=self.model)}, warmed_up_functions={ID})
        self.started_over = mock.Mock()
        self.manager.reclaiming = SimpleNamespace(start_over=self.started_over, forgotten=[], record_again=mock.Mock())
        self.enterContext(mock.patch.object(Manager, "is_in_pool", lambda manager, address: False))

    def call(self, upstream: Callable[[list[Any]], Any], value: float = 1.0) -> Any:
        with mock.patch.object(calls.Steps, "run", lambda manager, inputs, function_id: upstream(inputs), create=True):
            return self.manager.run([torch.tensor(value)], ID)

    def progress(self) -> Progress:
        found = progress_of(self.model)
        assert found is not None
        return found

    def check(self, upstream: Callable[[list[Any]], Any]) -> None:
        """The outputs are right, the turn is free, and the report says why."""
        self.assertEqual(self.call(upstream), [torch.tensor(2.0)])
        self.assertFalse(self.manager.is_taken)
        self.assertEqual(self.model.calls, {})
        self.assertIn("CUDA graphs failed: ", str(self.model.log.ungraphed_reason))

    def test_an_error_before_anything_ran(self) -> None:
        def upstream(inputs: list[Any]) -> Any:
            fails(AssertionError("of upstream about itself"))

        self.check(upstream)
        self.assertEqual(self.model.log.runs, 1)
        self.assertIn("AssertionError: of upstream about itself", str(self.model.log.ungraphed_reason))

    def test_an_error_after_the_inputs_were_consumed(self) -> None:
        def upstream(inputs: list[Any]) -> Any:
            self.progress().hold()
            inputs.clear()
            fails(RuntimeError("allocated elsewhere"))

        self.check(upstream)

    def test_an_error_after_the_code_ran(self) -> None:
        """The code does not run twice."""

        def upstream(inputs: list[Any]) -> Any:
            self.model(inputs)
            fails(RuntimeError("not tracked as outputs"))

        self.check(upstream)
        self.assertEqual(self.model.log.runs, 1)

    def test_an_error_after_the_launch(self) -> None:
        node: Any = SimpleNamespace(copied_outputs=lambda: [torch.tensor(2.0)])

        def upstream(inputs: list[Any]) -> Any:
            self.progress().launched(node)
            fails(AssertionError())

        self.check(upstream)
        self.assertEqual(self.model.log.runs, 0)
        node = None  # an output is made from the inputs, which are gone
        self.assertRaises(AssertionError, self.call, upstream)

    def test_an_error_of_the_capture(self) -> None:
        """Nothing that happened must be undone, so other recordings stay."""

        def upstream(inputs: list[Any]) -> Any:
            found = self.progress()
            found.hold()
            inputs.clear()
            with found.capturing():
                of_torch()

        self.check(upstream)
        self.assertIsNone(self.manager.why_start_over)

    def test_nothing_is_left_of_an_error(self) -> None:
        """Its traceback would hold the frames, and with them inputs and outputs, until garbage is collected."""
        seen = []

        def upstream(inputs: list[Any]) -> Any:
            seen.append(weakref.ref(inputs[0]))
            of_torch()

        gc.disable()
        try:
            self.check(upstream)
            self.assertIsNone(seen[0]())
        finally:
            gc.enable()

    def test_a_collective_is_not_made_by_some_ranks_alone(self) -> None:
        self.model.log.has_collective = True
        self.assertRaises(RuntimeError, self.call, lambda inputs: of_torch())

    def test_errors_of_the_program_pass_through(self) -> None:
        class OfProgram(Exception):
            pass

        def fails(inputs: list[Any]) -> Any:
            raise OfProgram

        def captured(inputs: list[Any]) -> Any:
            with self.progress().capturing():
                fails(inputs)

        def interrupted(inputs: list[Any]) -> Any:
            raise KeyboardInterrupt

        self.assertRaises(OfProgram, self.call, captured)
        self.assertRaises(KeyboardInterrupt, self.call, interrupted)
        self.model.model = fails
        self.assertRaises(OfProgram, self.call, self.model)
        self.assertRaises(OfProgram, self.call, lambda inputs: of_torch())  # the un-graphed run raises it
        self.assertEqual((self.model.failures, self.model.calls), (0, {}))
        self.assertFalse(self.manager.is_taken)

    def test_out_of_memory_passes(self) -> None:
        def upstream(inputs: list[Any]) -> Any:
            fails(torch.OutOfMemoryError("while recording"))

        for _ in range(MOST_FAILURES + 1):
            self.check(upstream)
        self.assertEqual(self.model.failures, 0)
        self.assertIsNone(self.manager.why_start_over)

    def test_after_two_errors_a_function_stays_ungraphed(self) -> None:
        def upstream(inputs: list[Any]) -> Any:
            done.append(1)
            fails(AssertionError())

        done: list[int] = []
        stop = self.model.stop = mock.Mock()
        for _ in range(MOST_FAILURES + 2):
            self.check(upstream)
        self.assertEqual(len(done), MOST_FAILURES)
        stop.assert_called_once()
        self.assertEqual(self.started_over.call_count, MOST_FAILURES)  # also after the last one

    def test_the_next_call_starts_over(self) -> None:
        self.check(lambda inputs: of_torch())
        self.started_over.assert_not_called()
        self.assertNotIn(ID, self.manager.warmed_up_functions)  # it warms up again
        self.assertEqual(self.call(lambda inputs: ["graphed"]), ["graphed"])
        self.assertEqual(self.call(lambda inputs: ["graphed"]), ["graphed"])
        self.started_over.assert_called_once()

    def test_an_input_that_is_held_is_left_alone_from_then_on(self) -> None:
        def upstream(inputs: list[Any]) -> Any:
            raise HeldForTooLong(function="f")

        self.check(upstream)
        self.assertTrue(self.model.keeps_inputs)
        self.assertEqual(self.model.failures, 0)
        self.manager.reclaiming.record_again.assert_called_once()

    def test_a_call_inside_another_is_not_the_others(self) -> None:
        def upstream(inputs: list[Any]) -> Any:
            self.assertEqual(self.model([torch.tensor(5.0)]), [torch.tensor(10.0)])
            fails(AssertionError())

        self.check(upstream)

    def test_calls_of_two_threads_are_told_apart(self) -> None:
        def upstream(inputs: list[Any]) -> Any:
            thread = threading.Thread(target=lambda: self.model([torch.tensor(5.0)]))
            thread.start()
            thread.join()
            fails(AssertionError())

        self.check(upstream)

    def test_an_error_of_bookkeeping_for_an_ungraphed_call(self) -> None:
        self.manager.path_state = None
        with mock.patch.object(Manager, "update_generation", lambda *_: fails(AssertionError("of upstream"))):
            self.manager.note_ungraphed([], is_forward=True)
        self.assertEqual(self.manager.why_start_over, "CUDA graphs failed: AssertionError: of upstream")

    @parametrize("mode", [CompilationMode.FORWARD, CompilationMode.BACKWARD])
    def test_a_backward_is_pending_after_a_forward(self, mode: CompilationMode) -> None:
        self.manager.id_to_mode = {ID: mode}
        self.check(lambda inputs: of_torch())
        self.assertEqual(self.manager.running_forwards_with_pending_backwards, mode == CompilationMode.FORWARD)


class TestWhoseErrorItIs(TestCase):
    def raised(self, run: Callable[[], Any]) -> Exception:
        try:
            run()
        except Exception as error:
            return error
        raise AssertionError

    def test_statements_outside_of_torch_are_the_programs(self) -> None:
        def fails() -> None:
            raise ValueError

        def asserts() -> None:
            assert not fails

        for run in (fails, asserts, functools.partial(mock.Mock(side_effect=KeyError))):
            self.assertTrue(containment.passes(self.raised(run)), run)
        for run in (of_torch, lambda: torch._check(False), lambda: int("x")):
            self.assertFalse(containment.passes(self.raised(run)), run)

    def test_errors_about_means_that_failed_do_not_pass(self) -> None:
        def fails() -> None:
            raise HeldForTooLong(function="f")

        self.assertFalse(containment.passes(self.raised(fails)))
        self.assertTrue(containment.passes(torch.OutOfMemoryError()))
        self.assertTrue(containment.passes(KeyboardInterrupt()))


class TestInputs(TestCase):
    def test_inputs_that_were_consumed(self) -> None:
        """Others are those in the list, which may have moved since."""
        for consumed in (False, True):
            given = [torch.ones(2), 3, None]
            progress, wanted = Progress(given, lambda address: True), list(given)
            progress.hold()
            if consumed:
                given[:] = [0, 3, None]
            found, borrowed = progress.take_inputs()
            self.assertTrue(all(one is other for one, other in zip(found, wanted, strict=True)))
            self.assertEqual(borrowed, set())

    def test_a_copy_has_the_layout_of_the_tensor(self) -> None:
        """Compiled code checks strides, and tensors that share a storage share the copy."""
        base = torch.arange(24.0)
        for view in (base.as_strided((3, 4), (8, 1), 2), base.view(4, 6).t(), base[:1].expand(5)):
            made = containment.owned(view)
            self.assertEqual(made, view)
            self.assertEqual((made.stride(), made.storage_offset()), (view.stride(), view.storage_offset()))
            other = containment.owned(base[20:], made.untyped_storage())
            self.assertEqual(other.untyped_storage().data_ptr(), made.untyped_storage().data_ptr())
            self.assertNotEqual(made.data_ptr(), view.data_ptr())

    def test_inputs_that_were_released_before_the_call(self) -> None:
        given = [None, torch.ones(2)]
        progress = Progress(given, lambda address: True)
        progress.released({0: {"data_ptr": 4096}, 1: {"data_ptr": 8192}})
        with mock.patch.object(containment, "in_place", lambda place: place["data_ptr"]):
            found, borrowed = progress.take_inputs()
        self.assertEqual((found[0], borrowed), (4096, {4096}))
        self.assertIs(found[1], given[1])

    def test_a_run_does_not_hold_its_inputs(self) -> None:
        given = [torch.ones(2)]
        progress, seen = Progress(given, lambda address: True), weakref.ref(given[0])
        progress.hold()

        def code(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            self.assertIsNone(seen())
            return []

        progress.run(code, given)


instantiate_parametrized_tests(TestContained)

if __name__ == "__main__":
    sys.exit(run_tests())
