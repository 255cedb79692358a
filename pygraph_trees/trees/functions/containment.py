"""Contains errors of the graph trees: such a call runs un-graphed, or returns what its graph has computed.

:class:`Progress` notes how far a call has come and keeps what a second run needs. :func:`contained` decides what
follows from an error. Errors of the program pass through: those that its Python code raised, those that the un-graphed
run raises too, and all that are no ``Exception``.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch._inductor.cudagraph_trees import CUDAGraphNode

from pygraph_trees.compat import has_replay_hooks
from pygraph_trees.errors import DriverError, PygraphError, Reported
from pygraph_trees.indirection.live_input import memory_at
from pygraph_trees.reasons import Reason, Why

from ..pools.capture_lock import DeviceBusy, is_captured
from . import fast_path

_log = logging.getLogger("pygraph_trees.trees")

MOST_FAILURES = 2  # contained errors of a function before it runs un-graphed for good
_RAISES = {"RAISE_VARARGS", "RERAISE"}
_NOT_OF_PROGRAM = {"torch", "triton", "cuda", "pygraph_trees", "inductor_patches"}  # packages
_NO_MEMORY = 2  # CUDA's number of the error
_HAS_HOOKS = has_replay_hooks()


class HeldForTooLong(PygraphError, RuntimeError):
    template = (
        "{function}: an input that died while its graph was recorded is still held by somebody, "
        "and the replay would write over it"
    )


class UnreadablePool(PygraphError, RuntimeError):
    template = "torch's allocator could not read the state of the graph pool: {error}"


class Stage(enum.Enum):
    """How far a call has come. Only before :attr:`COMPUTED` may its code run again."""

    PREPARED = enum.auto()  # nothing ran, or the code was only captured
    RUNNING = enum.auto()  # the compiled code runs; what it has done cannot be undone
    CAPTURING = enum.auto()  # the compiled code is captured, so no kernel runs
    COMPUTED = enum.auto()  # the outputs are computed, or will be, by work that is queued


class Progress:
    """One call on the slow path."""

    __slots__ = ("_count", "_held", "_is_in_pool", "_list", "is_recording", "node", "outputs", "stage")

    def __init__(self, inputs: list[Any], is_in_pool: Callable[[int], bool]) -> None:
        self._list, self._count, self._is_in_pool = inputs, len(inputs), is_in_pool
        # Inputs by index; of those in the pool only their places, since a recording that holds one uses other memory.
        self._held: dict[int, Any] = {}
        self.stage, self.is_recording = Stage.PREPARED, False
        self.outputs: Any = None  # once they are computed, if they are known
        self.node: Any = None  # the recording that was launched, if all outputs can be read in its memory

    def hold(self, indices: Iterable[int] | None = None) -> None:
        """Keeps what a second run needs of these inputs, or all. Outputs must not be moved after that."""
        chosen = range(self._count) if indices is None else [index for index in indices if index < self._count]
        self._held |= {index: _kept(self._list[index], self._is_in_pool) for index in chosen}

    def released(self, places: Mapping[int, dict[str, Any]]) -> None:
        """Notes the places of inputs in the pool that are no longer in the list, by index."""
        self._held |= places

    def take_inputs(self) -> tuple[list[Any], set[int]]:
        """The call's inputs, even if consumed, and addresses of storages that they do not own; called once."""
        held, given, borrowed = self._held, self._list[: self._count], set()
        self._held, self._list = {}, []
        given += [None] * (self._count - len(given))
        for index, value in held.items():
            if not isinstance(value, dict):
                given[index] = value
            elif not isinstance(given[index], torch.Tensor):
                given[index] = in_place(value)
                borrowed.add(value["data_ptr"])
        return given, borrowed

    def run(self, code: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Runs the compiled code. Code that runs with another list is captured, or is another call's."""
        if inputs is not self._list:
            return code(inputs)
        self.stage, self._held = Stage.RUNNING, {}
        self.outputs = outputs = code(inputs)
        self.stage = Stage.COMPUTED
        return outputs

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.stage = Stage.CAPTURING
        yield
        self.stage = Stage.PREPARED

    def launched(self, node: Any = None, outputs: Any = None) -> None:
        self.stage, self.node, self.outputs = Stage.COMPUTED, node, outputs


def progress_of(model: Any) -> Progress | None:
    """The call of a function on the slow path that this thread makes; None if there is none."""
    calls: dict[int, Progress] | None = getattr(model, "calls", None)
    return calls.get(threading.get_ident()) if calls else None


def place_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Upstream's metadata of a tensor, from which :func:`in_place` makes another one."""
    metadata: dict[str, Any] = CUDAGraphNode._tensor_metadata(tensor, ignore_storage_offset=False)
    return metadata


def in_place(metadata: dict[str, Any]) -> torch.Tensor:
    """A tensor with upstream's ``metadata`` that does not own its memory."""
    storage = memory_at(metadata["data_ptr"], metadata["nbytes"], metadata["device"])
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)


def contained(manager: Any, run: Callable[[], Any], inputs: list[Any], function_id: Any) -> Any:
    """Makes a call in Python with ``run`` and returns its outputs, whatever the trees raise.

    Nothing was launched before ``COMPUTED``, and the memory of inputs in the pool is not used again before the next
    call, so the code may run. Later, the outputs are those of the code, or copies of what the recording has written.
    """
    model: Any = manager.ids_to_funcs[function_id].model
    # The manager may have another pool by then.
    thread, progress = threading.get_ident(), Progress(inputs, lambda address: manager.pool.holds(address))
    model.calls[thread] = progress
    try:
        return run()
    except Reported:
        raise
    except Exception as error:
        if _lacks_memory(error):  # also for the program, if the error is its own to handle
            manager.output_policy.release(manager)
        # If only one rank ran a collective without its graph, or recorded it again, ranks could wait for each other.
        is_alike = manager.reclaiming.is_alike and not isinstance(error, DeviceBusy)
        if progress.stage is Stage.RUNNING or is_of_program(error) or model.may_have_collective:
            raise
        if is_alike and not _is_held(error, manager, progress):
            raise
        failure = error
    finally:
        model.calls.pop(thread, None)
    try:
        return _after(failure, manager, progress, function_id, model)
    finally:
        del failure, progress  # the error's traceback refers to this frame, which would keep the inputs alive


def _after(error: Exception, manager: Any, progress: Progress, function_id: Any, model: Any) -> Any:
    was_captured, is_held = progress.stage is Stage.CAPTURING, _is_held(error, manager, progress)
    forget_frames(error, until=sys.exc_info()[1])  # they hold memory of the pool that no recording accounts for
    if progress.stage is Stage.COMPUTED:
        if progress.outputs is None and progress.node is None:
            raise error
        outputs = progress.node.copied_outputs() if progress.outputs is None else progress.outputs
    else:
        inputs, borrowed = progress.take_inputs()
        # If it raises too, that is what the program gets without graphs.
        outputs = manager.run_ungraphed(inputs, function_id, described(error))
        if borrowed:
            outputs = _with_own_memory(outputs, borrowed)
    if is_held:
        if not model.keeps_inputs:
            manager.keep_inputs(function_id, described(error))
    elif _lacks_memory(error):
        if progress.is_recording:
            model.note_lack(function_id, described(error))
    elif not passes(error):
        note_failure(model, error)
        if not was_captured:
            manager.failed(error, function_id)
    return outputs


def note_failure(model: Any, error: Exception) -> None:
    """Notes a contained error of a function; after the second one, the function runs un-graphed."""
    why = described(error)
    _log.info("%s: %s", model.log.name, why, exc_info=error)
    model.log.not_graphed(why)
    model.failures += 1
    if model.failures >= MOST_FAILURES:
        model.why_ungraphed = why


def _is_held(error: Exception, manager: Any, progress: Progress) -> bool:
    """Whether a replay was refused because an input is held that died while it was recorded."""
    if isinstance(error, HeldForTooLong):
        return True
    deaths = getattr(manager.current_node, "deaths_after", None) if fast_path.CHECKS_LATE else None
    return progress.stage is Stage.PREPARED and deaths is not None and not deaths.ask()


def passes(error: BaseException) -> bool:
    """Whether an error while a function is recorded says nothing about the next recording."""
    is_no_fault = _lacks_memory(error) or isinstance(error, DeviceBusy)
    return not isinstance(error, Exception) or is_no_fault or is_of_program(error)


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, DriverError):
        return bool(error.fields["code"] == "CUDA_ERROR_OUT_OF_MEMORY")
    return isinstance(error, torch.OutOfMemoryError) or getattr(error, "error_code", None) == _NO_MEMORY


def is_of_program(error: Exception) -> bool:
    """Whether a statement in the program's code raised it: in an operator, a hook or a handler of signals."""
    trace, is_in_replay = error.__traceback__, False
    while trace is not None and trace.tb_next is not None:
        if _HAS_HOOKS and trace.tb_frame.f_code.co_name == "replay":
            is_in_replay |= trace.tb_frame.f_globals is vars(torch.cuda.graphs)
        trace = trace.tb_next
        if is_in_replay and _may_be_programs(trace.tb_frame):
            return True  # a hook on a replay, which may be launched by now
    if trace is None or isinstance(error, PygraphError):
        return False
    frame, at = trace.tb_frame, trace.tb_lasti
    if not _may_be_programs(frame):
        return False
    found = next((step for step in dis.get_instructions(frame.f_code) if step.offset == at), None)
    return found is not None and found.opname in _RAISES


def _may_be_programs(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_OF_PROGRAM


def _kept(value: Any, is_in_pool: Callable[[int], bool]) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_cuda or value._is_zerotensor():
        return value
    try:
        address = value.data_ptr()
    except RuntimeError:  # an output that was overwritten; upstream raises when it reads it
        return value
    is_elsewhere = not address or not is_in_pool(address) or value.is_conj() or value.is_neg()
    return value if is_elsewhere else place_of(value)


def check_readable(inputs: Iterable[Any]) -> None:
    """Raises torch's error if an input is an output that was overwritten. Compiled code would read address 0."""
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.is_cuda and not value._is_zerotensor():
            value.data_ptr()


def owned(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """A tensor of the same layout in a copy of the tensor's storage, or in ``storage``."""
    storage = tensor.untyped_storage().clone() if storage is None else storage
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _with_own_memory(outputs: Any, borrowed: set[int]) -> list[Any]:
    """The outputs, with copies of those on borrowed storages; outputs that share a storage share its copy."""
    copies: dict[int, torch.UntypedStorage] = {}
    made = []
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.is_cuda and not output._is_zerotensor():
            storage = output.untyped_storage()
            if (address := storage.data_ptr()) in borrowed:
                output = owned(output, copies.setdefault(address, storage.clone()))
        made.append(output)
    return made


def forget_frames(error: BaseException | None, *, until: BaseException | None = None, of_program: bool = True) -> None:
    """Frees captured tensors that the error's frames hold: memory of the pool that no recording accounts for.

    ``until``: the exception that the program was already handling.
    """
    while error is not None and error is not until:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # A frame of contextlib may hold a generator that would clean up later.
            if of_program or not _may_be_programs(frame) or frame.f_globals is vars(contextlib):
                with contextlib.suppress(RuntimeError):  # it has not ended
                    frame.clear()
        error = error.__context__


def cleaned_up(manager: Any, run: Callable[[], Any]) -> Any:
    """Calls ``run``, which captures for a manager or allocates in its graph pool, and cleans up after an error.

    Torch cleans up in ``finally``, but a signal's handler may raise before torch's ``try`` or inside ``finally``. Later
    tensors of the program would then be in the graph pool, which the next recording overwrites. After an error, torch
    also does not make the program's stream wait for the graphs' stream. This is not a context manager, because the
    handler may raise inside contextlib, too.
    """
    device, handled = getattr(manager, "device_index", None), sys.exc_info()[1]  # no device while the manager is made
    stream = torch.cuda.current_stream(device) if torch.cuda.is_initialized() else None
    try:
        return run()
    except BaseException as error:
        if stream is not None and getattr(manager, "stream", None) is not None:
            if (note_doubt := getattr(manager, "note_doubt", None)) is not None:
                # The program's frames may hold memory of the pool. Its errors may fail to describe themselves.
                note_doubt(Reason.FAILED(error=type(error).__name__))
            forget_frames(error, until=handled, of_program=False)
            _leave_pool(manager, stream)
        raise


def _leave_pool(manager: Any, stream: torch.cuda.Stream) -> None:
    """Ends a manager's capture and allocations if torch has not, and makes ``stream`` wait for the graphs' stream."""
    on_device = torch.cuda.device(stream.device_index)
    with contextlib.suppress(RuntimeError), on_device, torch.cuda.stream(manager.stream):
        if is_captured():  # a new manager captures an empty graph
            manager.graph.capture_end()
    with contextlib.suppress(AttributeError):  # a new manager may have no pool yet
        end_allocations(stream.device_index, manager.cuda_graphs_thread_pool)
    with contextlib.suppress(RuntimeError), on_device:  # the GPU may be lost
        if torch.cuda.current_stream() == manager.stream != stream:
            torch.cuda.set_stream(stream)
        with torch.cuda.stream(manager.stream):
            is_left_captured = is_captured()
        if not is_left_captured:
            stream.wait_stream(manager.stream)


def end_allocations(device: int, pool: tuple[int, int]) -> None:
    """Ends allocations in a graph pool, if torch has begun them and not ended them."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def described(error: Exception) -> Why:
    """Why a call runs un-graphed after an error. Assertions often have no text; then it is the line that raised it."""
    text = str(error).strip().splitlines() or [
        f"in {at.name}: {at.line or at.lineno}" for at in traceback.extract_tb(error.__traceback__)[-1:]
    ]
    return Reason.FAILED(error=f"{type(error).__name__}{f': {text[0][:200]}' if text else ''}")
