"""One call at a time goes through the trees. Their errors never reach the program; its own errors do."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_trees import bare_manager, bare_recording
from test_trees import double, inference
from torch._inductor.cudagraph_trees import FunctionID
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.errors import DriverError
from pygraph_trees.reasons import Reason
from pygraph_trees.trees.functions import containment
from pygraph_trees.trees.functions.containment import MOST_FAILURES, HeldForTooLong, Progress, progress_of
from pygraph_trees.trees.managers import calls, candidates
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.pools.capture_lock import DeviceBusy
from pygraph_trees.trees.recordings import recording

ID = FunctionID(0)


def of_torch() -> None:
    """Raises as torch does if an operation cannot be captured: from C++."""
    torch.empty(1).view(2)


def fails(error: BaseException) -> None:
    """Raises an error as code of torch does."""
    exec("raise error", {"__name__": "torch.of_the_test", "error": error})


class TestContained(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.model = inference(double)
        self.manager = bare_manager(ids_to_funcs={ID: SimpleNamespace(model=self.model)}, warmed_up_functions={ID})
        self.manager.reclaiming = mock.Mock(forgotten=[], is_alike=False)
        self.enterContext(mock.patch.object(Manager, "pool", SimpleNamespace(holds=lambda address: False)))

    def call(self, upstream: Callable[[list[Any]], Any]) -> Any:
        with mock.patch.object(
            calls.Upstream, "run", lambda manager, inputs, function_id: upstream(inputs), create=True
        ):
            return self.manager.run([torch.tensor(1.0)], ID)

    def progress(self) -> Any:
        return progress_of(self.model)

    def check(self, upstream: Callable[[list[Any]], Any]) -> None:
        """The outputs are right, the turn is free, and the report says why."""
        self.assertEqual(self.call(upstream), [torch.tensor(2.0)])
        self.assertFalse(self.manager.is_taken)
        self.assertEqual(self.model.calls, {})
        self.assertIn("CUDA graphs failed: ", str(self.model.log.ungraphed_reason))

    def test_a_call_inside_another_or_of_another_thread_is_ungraphed_meanwhile(self) -> None:
        """Such calls come from hooks, finalizers, or the program's own operators."""

        def interrupted(inputs: list[Any]) -> Any:
            self.assertTrue(self.manager.is_taken)
            inside = self.manager.run([torch.ones(1)], ID)
            return inside, other.submit(self.manager.run, [torch.ones(1)], ID).result(60), inputs

        with ThreadPoolExecutor(1) as other:
            self.assertEqual(self.call(interrupted), (*[[torch.full((1,), 2.0)]] * 2, [torch.tensor(1.0)]))
        self.assertEqual(self.call(lambda inputs: ["graphed"]), ["graphed"])
        self.assertEqual(self.model.log.runs, 2)
        self.assertIn("another call", str(self.model.log.ungraphed_reason))

    def test_upstream_may_begin_again_at_a_root(self) -> None:
        upstream = mock.Mock()
        upstream.side_effect = lambda inputs: self.manager.run(inputs, ID) if upstream.call_count == 1 else ["graphed"]
        self.assertEqual(self.call(upstream), ["graphed"])
        self.assertEqual((upstream.call_count, self.model.log.runs, self.manager.is_taken), (2, 0, False))

    def test_outputs_are_right_wherever_an_error_comes(self) -> None:
        def consume(inputs: list[Any]) -> None:
            self.progress().hold()
            inputs.clear()

        def capture(inputs: list[Any]) -> None:
            consume(inputs)
            with self.progress().capturing():
                of_torch()

        node: Any = SimpleNamespace(copied_outputs=lambda: [torch.tensor(2.0)])
        for stage, before, runs, starts_over in (
            ("nothing ran", list, 1, True),
            ("the inputs were consumed", consume, 1, True),
            ("the code ran", lambda inputs: self.model(inputs), 1, True),  # it does not run twice
            ("the graph was launched", lambda inputs: self.progress().launched(node), 0, True),
            ("the code was captured", capture, 1, False),  # nothing must be undone, so other recordings stay
        ):
            self.setUp()
            with self.subTest(stage):
                self.check(lambda inputs: (before(inputs), fails(AssertionError("of upstream about itself"))))  # noqa: B023
                self.assertEqual(self.model.log.runs, runs)
                self.assertEqual(self.manager.why_start_over is not None, starts_over)

    def test_what_was_launched_is_not_run_again(self) -> None:
        """An output is made from the inputs, which are gone."""
        upstream = lambda inputs: (self.progress().launched(None), fails(AssertionError()))  # noqa: E731
        self.assertRaises(AssertionError, self.call, upstream)
        self.assertEqual(self.model.log.runs, 0)

    def test_nothing_is_left_of_an_error(self) -> None:
        """Its traceback would hold the frames, and with them inputs and outputs, until garbage is collected."""
        seen: list[Any] = []
        gc.disable()
        self.addCleanup(gc.enable)
        self.check(lambda inputs: (seen.append(weakref.ref(inputs[0])), of_torch()))
        self.assertIsNone(seen[0]())

    def test_errors_of_the_program_pass_through(self) -> None:
        """And errors of code with a collective, which some ranks alone would repeat."""

        class OfProgram(Exception): ...

        def fails(inputs: list[Any]) -> Any:
            raise OfProgram

        def captured(inputs: list[Any]) -> Any:
            with self.progress().capturing():
                fails(inputs)

        def take_turn(inputs: list[Any]) -> Any:
            self.assertTrue(Manager.take_turn(self.manager, inputs))
            raise KeyboardInterrupt  # as soon as it has its turn

        self.model.may_have_collective = True
        self.assertRaises(RuntimeError, self.call, lambda inputs: of_torch())
        self.model.may_have_collective = False
        self.assertRaises(OfProgram, self.call, captured)
        for taking in (self.manager.take_turn, take_turn):
            with mock.patch.object(self.manager, "take_turn", taking):
                self.assertRaises(KeyboardInterrupt, self.call, mock.Mock(side_effect=KeyboardInterrupt))
            self.assertFalse(self.manager.is_taken)
        self.model.model = fails
        self.assertRaises(OfProgram, self.call, self.model)
        self.assertRaises(OfProgram, self.call, lambda inputs: of_torch())  # the un-graphed run raises it
        self.assertEqual((self.model.failures, self.model.calls), (0, {}))
        self.assertFalse(self.manager.is_taken)

    def test_out_of_memory_passes(self) -> None:
        """Own memory is freed before, also if the error is the program's."""
        no_memory = torch.OutOfMemoryError("while recording")
        of_driver = DriverError(call="cuMemCreate", code="CUDA_ERROR_OUT_OF_MEMORY")
        with mock.patch.object(type(self.manager.output_policy), "release") as release:
            for _ in range(MOST_FAILURES + 1):
                self.check(lambda inputs: fails(no_memory))
                self.check(lambda inputs: fails(of_driver))
            self.model.model = mock.Mock(side_effect=no_memory)
            self.assertRaises(torch.OutOfMemoryError, self.call, self.model)
        self.assertEqual(release.call_count, 2 * MOST_FAILURES + 3)
        self.assertEqual(self.model.failures, 0)
        self.assertIsNone(self.manager.why_start_over)

    def test_a_function_that_never_gets_memory_tries_less_and_less_often(self) -> None:
        """Memory may lack before the capture, for copies of inputs, or after it, for the executable graph."""
        texts = itertools.count()

        def record(inputs: list[Any]) -> None:
            progress, number = self.progress(), next(texts)
            progress.is_recording = True
            progress.hold()
            with progress.capturing() if number % 3 else contextlib.nullcontext():
                if number % 3 < 2:
                    fails(torch.OutOfMemoryError(f"{number} bytes"))
            fails(torch.OutOfMemoryError(f"{number} bytes"))

        upstream, attempts = mock.Mock(side_effect=record), []
        for number in range(20_000):
            before = upstream.call_count
            self.check(upstream)
            attempts += [number] * (upstream.call_count - before)
        self.assertEqual(attempts[:6], [0, 1, 6, 15, 32, 65])
        self.assertEqual(attempts[-1] - attempts[-2], 4097)
        self.assertEqual((len(self.model.log.traced_reasons), self.model.failures), (1, 0))
        self.assertIsNone(self.model.why_waits("another size"))

    def test_errors_of_a_function_beside_a_collective_pass_through(self) -> None:
        """Otherwise this rank alone would record the collective's function again."""
        self.manager.reclaiming.is_alike = True
        for error in (AssertionError(), torch.OutOfMemoryError()):
            self.assertRaises(type(error), self.call, lambda inputs, error=error: fails(error))
        self.assertEqual((self.model.failures, self.manager.why_start_over), (0, None))
        for error in (HeldForTooLong(function="f"), DeviceBusy()):
            self.check(mock.Mock(side_effect=error))

    def test_after_two_errors_a_function_stays_ungraphed(self) -> None:
        upstream, stop = mock.Mock(side_effect=lambda inputs: fails(AssertionError())), mock.Mock()
        self.model.stop = stop
        for _ in range(MOST_FAILURES + 2):
            self.check(upstream)
        self.assertEqual(upstream.call_count, MOST_FAILURES)
        stop.assert_called_once()
        self.assertEqual(self.manager.reclaiming.start_over.call_count, MOST_FAILURES)  # also after the last one

    def test_the_next_call_starts_over(self) -> None:
        self.check(lambda inputs: of_torch())
        self.manager.reclaiming.start_over.assert_not_called()
        self.assertNotIn(ID, self.manager.warmed_up_functions)  # it warms up again
        self.assertEqual(self.call(lambda inputs: ["graphed"]), ["graphed"])
        self.assertEqual(self.call(lambda inputs: ["graphed"]), ["graphed"])
        self.manager.reclaiming.start_over.assert_called_once()

    def test_recordings_are_dropped_if_an_error_may_hold_memory_of_the_pool(self) -> None:
        """Torch would give out the memory again, and end the process once the error is gone."""
        output = SimpleNamespace(data_ptr=lambda: 512)
        self.manager.device_index = 0
        # What is in use, whether the pool can be left, whether ranks must act alike, and how often it is asked for and
        # left in two calls.
        for in_use, leaves, is_alike, asks, starts in (
            ({512}, True, False, 1, 0),
            ({512, 1024}, True, False, 2, 1),
            (set(), False, False, 2, 2),
            (set(), True, True, 0, 0),
        ):
            self.manager.cuda_graphs_thread_pool, self.manager.reclaiming.is_alike = (0, 1), is_alike
            self.manager.why_start_over = None
            self.manager.current_node = mock.Mock(spec=["path_live_weakrefs"])
            self.manager.current_node.path_live_weakrefs.return_value = [output]
            asked = mock.Mock(side_effect=lambda device, pool, live: live == in_use)  # noqa: B023

            def start_over(manager: Any, why: Any) -> None:
                manager.cuda_graphs_thread_pool = (0, 1 + leaves)  # noqa: B023

            self.manager.reclaiming.start_over = started = mock.Mock(side_effect=start_over)
            with mock.patch.object(torch._C, "_cuda_checkPoolLiveAllocations", asked, create=True):
                self.manager._candidates["f"] = {}
                self.manager.note_doubt(Reason.FAILED(error="OutOfMemoryError"))
                self.assertEqual((self.manager._candidates, candidates._find(self.manager, ID, True)), ({}, None))
                whys = [self.manager._start_over() for _ in range(2)]
            self.assertEqual((asked.call_count, started.call_count), (asks, starts))
            self.assertLessEqual(asked.mock_calls, [mock.call(0, (0, 1), {512})] * 2)
            self.assertEqual({why is None for why in (*whys, self.manager.doubt)}, {leaves})
        self.manager.doubt = self.manager.why_start_over = self.manager.current_node = None
        with mock.patch.object(Manager, "_start_over", lambda _: Reason.FAILED(error="the pool is in use")):
            self.check(lambda inputs: ["graphed"])

    def test_no_call_is_graphed_once_a_pool_could_not_be_read(self) -> None:
        """Another recording could crash. Before a recording asks for the pool's state, errors have other causes."""
        failed = mock.patch.object(recording.Upstream, "_add_first_outputs", lambda *_: fails(RuntimeError()))
        for liveness, is_final in ([], False), ([[True]], True):
            self.setUp()
            node = bare_recording(recorded_liveness_after_graph=liveness, checkpointed_caching_state=None)
            with failed, mock.patch.dict(calls._unreadable):
                self.check(lambda inputs: node._add_first_outputs([], {}))  # noqa: B023
                self.assertEqual(self.call(lambda inputs: ["graphed"]) != ["graphed"], is_final)

    def test_an_input_that_is_held_is_left_alone_from_then_on(self) -> None:
        self.check(mock.Mock(side_effect=HeldForTooLong(function="f")))
        self.assertTrue(self.model.keeps_inputs)
        self.assertEqual(self.model.failures, 0)
        self.manager.reclaiming.record_again.assert_called_once()

    def test_a_call_inside_another_or_beside_it_is_not_the_others(self) -> None:
        def upstream(inputs: list[Any]) -> Any:
            self.assertEqual(self.model([torch.tensor(5.0)]), [torch.tensor(10.0)])
            self.assertEqual(other.submit(self.model, [torch.tensor(5.0)]).result(60), [torch.tensor(10.0)])
            fails(AssertionError())

        with ThreadPoolExecutor(1) as other:
            self.check(upstream)
        self.assertIn("AssertionError: in <module>", str(self.model.log.ungraphed_reason))

    def test_an_error_of_bookkeeping_for_an_ungraphed_call(self) -> None:
        self.manager.path_state = None
        with mock.patch.object(Manager, "update_generation", lambda *_: fails(AssertionError("of upstream"))):
            self.manager.note_ungraphed([], is_forward=True)
        self.assertEqual(self.manager.why_start_over, "CUDA graphs failed: AssertionError: of upstream")


class TestWhoseErrorItIs(TestCase):
    def test_statements_outside_of_torch_are_the_programs(self) -> None:
        """Errors about means that failed do not pass."""

        def asserts() -> None:
            assert not fails

        def holds() -> None:
            raise HeldForTooLong(function="f")

        for passes, run in (
            *((True, run) for run in (asserts, functools.partial(mock.Mock(side_effect=KeyError)))),
            *((False, run) for run in (of_torch, lambda: torch._check(False), lambda: int("x"), holds)),
        ):
            try:
                run()
            except Exception as error:
                self.assertEqual(containment.passes(error), passes, run)
            else:
                self.fail("it raises nothing")
        self.assertTrue(containment.passes(torch.OutOfMemoryError()))
        self.assertTrue(containment.passes(KeyboardInterrupt()))


class TestInputs(TestCase):
    def test_inputs_that_were_consumed_or_released_before_the_call(self) -> None:
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
        given = [None, torch.ones(2)]
        progress = Progress(given, lambda address: True)
        progress.released({0: {"data_ptr": 4096}, 1: {"data_ptr": 8192}})
        with mock.patch.object(containment, "in_place", lambda place: place["data_ptr"]):
            found, borrowed = progress.take_inputs()
        self.assertEqual((found[0], borrowed), (4096, {4096}))
        self.assertIs(found[1], given[1])

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

    def test_a_run_does_not_hold_its_inputs(self) -> None:
        given = [torch.ones(2)]
        progress, seen = Progress(given, lambda address: True), weakref.ref(given[0])
        progress.hold()

        def code(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            self.assertIsNone(seen())
            return []

        progress.run(code, given)


if __name__ == "__main__":
    run_tests()
