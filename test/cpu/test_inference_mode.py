"""Recordings made in inference mode and replayed outside it, and the reverse.

Dynamo compiles again for another mode only if a guard on a tensor tells it. A function without tensors, a compilation
whose guards are skipped, and a backward are replayed in any mode. Their tensors must be of the kind that un-graphed
code makes in the mode of the call: an inference tensor cannot be changed in place or saved for a backward outside.
"""

from __future__ import annotations

import torch
from recordings_on_cpu import SIZE, Function, OnCpuTestCase
from torch._inductor.cudagraph_trees import CompilationMode
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.trees.recordings.recording import Recording

INSIDE = [[True, False, False, True], [False, True, True, False]]  # whether each call is in inference mode


class TestOutputs(OnCpuTestCase):
    @parametrize("modes", INSIDE)
    @parametrize("mode", list(CompilationMode))
    @parametrize("fast", [False, True])
    def test_the_kind_of_an_output_is_that_of_its_call(self, fast, mode, modes):
        function = Function(outputs=2, mode=mode)
        for step, is_inside in enumerate(modes):
            function.manager.running_forwards_with_pending_backwards = False
            with torch.inference_mode(is_inside):
                outputs = function.call(step, fast=fast)
                self.assertEqual([output.is_inference() for output in outputs], [is_inside] * 2)
                outputs[0].add_(1)
            self.assertEqual(outputs[0], torch.full((SIZE,), step + 1.0))
            if not is_inside:
                self.assertGreaterEqual(outputs[0]._version, 1)  # an inference tensor would raise
                scale = torch.ones(SIZE, requires_grad=True)
                (scale * outputs[1]).sum().backward()
                self.assertEqual(scale.grad, outputs[1])
            del outputs

    @parametrize("modes", INSIDE)
    def test_outputs_that_are_held_while_the_mode_changes(self, modes):
        function, held = Function(), []
        for step, is_inside in enumerate(modes):
            with torch.inference_mode(is_inside):
                held += function.call(step)
        self.assertEqual([output.is_inference() for output in held], modes)
        self.assertEqual(held, [torch.full((SIZE,), float(step)) for step in range(4)])


class TestUpstreamCopies(TestCase):
    """Inputs that upstream copies to its own memory."""

    @parametrize("was_recorded_inside", [False, True])
    @parametrize("gives_addresses", [False, True])
    def test_an_input_is_copied_in_any_mode(self, gives_addresses, was_recorded_inside):
        recording = Recording.__new__(Recording)
        recording._gives_addresses = gives_addresses
        recording.non_static_input_idx = recording.input_copy_idxs = [0, 1]
        recording.expanded_dims = {0: [], 1: [0]}
        with torch.inference_mode(was_recorded_inside):
            targets = [torch.zeros(4), torch.zeros(1).expand(4)]
        with torch.inference_mode(not was_recorded_inside):
            inputs = [torch.ones(4), torch.ones(1).expand(4)]
            recording._copy_inputs_and_remove_from_src(targets, inputs)
        self.assertEqual((targets, inputs), ([torch.ones(4)] * 2, [None, None]))


instantiate_parametrized_tests(TestOutputs)
instantiate_parametrized_tests(TestUpstreamCopies)

if __name__ == "__main__":
    run_tests()
