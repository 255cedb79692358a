"""Reasons, as members of one enum: what is not done as asked, or is done again, says why by one of them.

A member's value is the template of a phrase, after "because" or a colon. Called with the template's fields, it gives a
:class:`Why`, which is that phrase. Code and tests compare :attr:`Why.reason`, never the text.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any


class Why(str):
    """A reason with its facts; a copy of it, and what is pickled, is a plain string."""

    __slots__ = ("facts", "reason")

    reason: Reason
    facts: dict[str, Any]

    def __new__(cls, reason: Reason, **facts: Any) -> Why:
        made = super().__new__(cls, reason.value.format(**facts))
        made.reason, made.facts = reason, facts
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


class Reason(Enum):
    """Members are called with facts that keep no tensor and no error alive."""

    def __call__(self, **facts: Any) -> Why:
        return Why(self, **facts) if facts else _without_facts(self)

    # Why a graph, a function or one call of it runs un-graphed.
    NEVER = "pygraph_selective is 'never'"
    ALLOCATOR = "the allocator backend {backend} has no graph pools"
    FASTER = "it is faster un-graphed"
    MUTATES = "mutates inputs that are neither static nor managed"
    LOSES_WRITES = "mutates an input that is in the graph pool and is not an output of this step"
    REBINDS = "it replaces the memory of an input, which a replay would not repeat"
    NO_PART = "no part of it can be graphed"
    SMALL = "it has fewer kernels than triton.cudagraph_min_partition_size"
    OVERRIDDEN = "the program turned its CUDA graphs off with override_cudagraphs"
    POLICY_WRAPS = "cudagraph_policy makes its CUDA graphs"
    POLICY_REFUSES = "cudagraph_policy makes no CUDA graph of it by itself"
    READS_CPU = "reads a value of the CPU"
    ON_CPU = "input {index} is on the CPU, and inputs are not given by address"
    ON_CPU_UNREAD = "input {index} is on the CPU, and no node of the graph reads it there"
    ON_CPU_LARGE = "input {index} is on the CPU, and its {nbytes} bytes are too many to stage"
    OTHER_SIZES = (
        "its sizes change too often: {graphed} size combinations have graphs; others get one after {calls} calls; "
        "pad inputs to few sizes"
    )
    STORM = "it was recorded {count} times for {replays} replays, the last time because: {last}"
    CAPTURED = "the program captured it in a graph of its own"
    SHORT_LIVED = "the threads that call it end before they replay it"
    OTHER_THREAD = "another thread uses CUDA graphs; before torch 2.13, only one thread can"
    BESIDE = "it was called during another call that uses the same CUDA graph trees"
    FAILED = "CUDA graphs failed: {error}"

    # Why a trial is not made.
    RECORDED_BELOW = "a trial would repeat {count} recordings after it"
    NO_ROOM = "the GPU lacks the memory to run it un-graphed while its graph exists"

    # Why a recording is made.
    FIRST = "first call"
    FIRST_SIZES = "first call with these sizes"
    FIRST_IN_THREAD = "first call of another thread"
    FIRST_AFTER = "first call after recording {number}"
    OTHERS_ALIVE = "the live outputs differ from those at its recording"
    MOVED = "{kind} input {names} moved"
    TABLE_BUILT = "its inputs are read from a table from now on"
    ON_LANES = "independent operations run side by side, on {lanes} lanes"
    LANES_LOST = "its graph could not be given other edges: {error}"
    OUTPUTS_OUTLIVE = "outputs that outlive their steps get memory of their own"
    OUTPUT_REFUSED = "an output cannot be given by address"
    POOL_LIMIT = "the graph pool took {nbytes} bytes, more than pygraph_pool_bytes allows"

    # Why a recording cannot be given the inputs of a call.
    EXPECTED_GONE = "an input is an output that should be dead by now"
    IS_VIEW = "an input is a negated or conjugate view"
    BETTER_ALIGNED = "an input is aligned to 16 bytes, and the recorded one was not"
    OTHER_OUTPUTS = "it was recorded when other outputs had memory of their own"
    MUTATED_IN_POOL = "a mutated input is in the graph pool"
    BROKEN = "a driver call failed"
    PREPARING = "another call is preparing it"
    PATCH_FAILED = "{call} refused an address of input {index}: {code}"

    # Why outputs are overwritten although they should be kept.
    NO_NATIVE = "the native parts are missing"

    # Why an input is copied.
    ELSEWHERE = "it is on {device}"
    LAYOUT = "its layout is {layout}"
    EMPTY = "it has no elements"
    ZEROS = "it is a zero tensor without memory"
    CONJUGATE = "it is a conjugate view"
    NEGATED = "it is a negated view"
    IN_POOL = "it is in the graph pool"
    HIDDEN = "{node} may hide its address"
    HIDDEN_BY_OTHERS = "{kernels}, which may wait for other processes, may hide its address"
    HIDDEN_BY_CHANCE = "two equal launches give different results, and {kernels} may hide its address"
    HIDDEN_UNCHECKED = "there is no memory to check {kernels}, which may hide its address"
    HIDDEN_SURELY = "{kernels} may hide its address: the results change with the address"
    UNHELD = "no node holds its address"
    SLOT_UNWRITTEN = "no node writes its slot"
    IN_HOST_ARRAY = "its address is in a host array"
    FILLED_IN_ROWS = "a fill of several rows writes to it"
    READ_BY_COLLECTIVE = "a collective reads it"
    AMBIGUOUS = "a value that looks like its address may be something else"
    UNREAD = "the graph could not be read: {error}"
    NOT_GIVEN = "the graph could not take its address: {error}"
    NO_ADDRESSES = "no addresses could be reserved: {error}"
    NOT_AT_PLACEHOLDER = "recording it at a placeholder address failed: {error}"
    ADDRESS_REFUSED = "the driver refused its address: {error}"
    ADDRESSES_REFUSED = "the driver refused an address of these inputs"
    UNPATCHED = "it was compiled before the patches were applied"
    UNPATCHED_MANAGER = "its tree manager was made before the patches were applied"
    INDIRECTION_OFF = "pygraph_indirection is 'off'"
    NO_DRIVER = "{error}"

    # How inputs are given, after "inputs are passed".
    FEW_INPUTS = "by address: {inputs} inputs that a table could hold have changing addresses, fewer than {least}"
    FEW_KERNELS = "by address: {kernels} kernels could read inputs from a table, fewer than {least}"
    TABLE_AWAITED = "by address, until a table for {kernels} kernels that read {inputs} inputs is built"
    TABLE = "by table: {kernels} kernels read {inputs} inputs whose addresses change"
    TABLE_NOT_COMPILED = "by address: no kernel could be compiled to read a table"
    TABLE_NOT_RECORDED = "by address: recording it with a table failed: {error}"
    TABLE_NOT_READ = "by address: a table is built, but this recording cannot use it"

    # Why a recording keeps the captured chain of its operations.
    READS_TABLE = "its inputs are read from a table"
    NOT_GENERATED = "its code is not Python that Inductor generated"
    UNWATCHED = "launches of kernels cannot be watched on this torch"
    ALLOCATES = "its nodes allocate or free memory"
    OTHER_STREAMS = "it uses several streams"
    NO_CHAIN = "{why}"
    NOT_CAPTURED = "its stream does not capture"
    LITTLE_GAIN = "predicted times are {us} us on lanes and {chain_us} us one after another"
    LANES_GREW = "on lanes, recordings enlarged the graph pool by {nbytes} bytes in all, which is too much"
    LANES_NO_ROOM = "only {nbytes} bytes are free, and lanes may need more"
    LANES_UNPAID = "recordings whose lanes are not faster held {nbytes} bytes of the graph pool"
    LANES_MEASURED = "{text}"
    RANKS = "it calls a collective, and ranks could decide differently"
    RANKS_BESIDE = "another function calls a collective, and ranks could decide differently"

    # Why a kernel has no variant.
    COOPERATIVE = "all of its blocks must fit on the GPU at once, and a variant may need more registers"
    EARLY = "it may begin before the slots are written"
    NOT_TRITON = "it is a {type}, not a kernel that triton.jit made"
    COMPILED_ELSEWHERE = "its Python function exists only in the process that compiled it"
    GLUON = "it is written in Gluon"
    NO_POINTER = "none of its parameters can be a slot"
    NO_SOURCE = "its source cannot be read"
    GLOBAL_VARIABLE = "{name!r} is not a tl.constexpr, and Triton's cache ignores its value"
    ANY_DEVICE = "it is compiled for any device"
    OTHER_PARAMETERS = "it would be launched with {parameters}"
    FEWER_BLOCKS = "fewer of its blocks might fit on the GPU at once"

    # Why torch's engine accumulates the gradients of a compiled function.
    GRAPH_KEPT = "the graph is retained or differentiated"
    SOME_INPUTS = "only some gradients are asked for"
    COMPILED_AUTOGRAD = "compiled autograd is on"
    WATCHED = "anomaly mode or autograd's debug log is on"
    OTHER_BACKWARD = "another backward was running"
    NODE_HOOKED = "its node in the autograd graph, or one that is evaluated before, has a hook"
    PARAMETER_HOOKED = "a parameter has a hook"
    PARAMETER_SHARED = "other parts of the graph, or roots of the backward, lead to its parameters"
    PARAMETER_ELSEWHERE = "its parameters are on other streams or devices"
    PARAMETER_SUBCLASS = "its parameters are tensor subclasses"
    FEW_GRADIENTS = "it has at most {most} gradients to accumulate"
    ENGINE_DIFFERS = "torch's engine does not do as expected: {error}"

    # Why torch's own code did other work of the host around a call.
    SAVES_OTHERS = "sizes or opaque objects are saved, too"
    NOT_PLAIN = "a mode is active, or a tensor is a subclass"
    WRAPPED = "an argument has a functorch wrapper"

    # Why a call of a compiled function went through Dynamo.
    DIRECT_FIRST = "it had no memo yet"
    DIRECT_CHANGED = "a module, one of its tensors, or a setting of torch had changed"
    DIRECT_ARGUMENTS = "its arguments differed"
    DIRECT_GUARD = "a guard failed"
    DIRECT_INSIDE = "a mode, a trace, a compilation or the profiler was active"
    DIRECT_BUSY = "another call ran its guards"
    GUARD_UNKNOWN = "a guard of the kind {kind} cannot be remembered"
    GRAPH_BREAKS = "it has a graph break, or calls other compiled code"
    NO_ENTRY = "Dynamo has no code whose guards hold after the call"
    MODULE_HOOKED = "its module has hooks"
    CALLED_OTHERWISE = "it is neither a plain function nor a module that torch calls in the usual way"
    STANCE = "a stance is set"
    ENTRY_DIFFERS = "Python or torch differs from what direct calls need: {error}"

    # Why placement leaves a graph alone.
    NO_GPU = "it has no GPU"
    SEVERAL_GPUS = "it has several GPUs"
    ERROR = "an error; see the log"

    # Why a value of the CPU is copied or staged at each call.
    BOTH = "{first}, and {second}"
    COMPUTED_FROM = "it is computed from {name}: {why}"
    INPUT = "it is an input"
    LITERALS = "its value would lose bits as literals in a kernel"
    NARROW = "a kernel may hold it in a wider type"
    SEVERAL_DEVICES = "it is computed from values of several devices"
    INDEX_GIVEN = "its indices come from an input and may be out of bounds, which is an error on the CPU"
    INDEX_UNPROVEN = "its indices may be out of bounds, which is an error on the CPU"
    INEXACT = "it is computed from {name}, whose last place may differ"
    READ_BY_JUMP = "the GPU may round it otherwise, and {name}, which reads it, is discontinuous"
    NUMBER_FOR_CPU = "a graph that read its number would be recorded once for each value"
    SOURCES_LARGER = "its sources are larger: {nbytes} bytes"
    NO_STAGING = "inputs are not given by address"
    GAPS = "it is part of an input with gaps"
    SIZE_UNKNOWN = "its size is not known"
    TOO_LARGE = "{nbytes} bytes are too many to stage"
    OTHER_STRIDES = "its copy has other strides"
    NODE = "it is a {op}"
    CUSTOM = "it is a custom operator"
    WRITES = "it writes to a tensor"
    RANDOM = "it is random"
    NUMBER_NEEDED = "the CPU needs its size or its result"
    SPARSE = "it is sparse"
    DIFFERENT = "its result may differ on the GPU"
    MINUS_ZERO = "its argument is -0.0, which the GPU's compiler may turn into 0.0"
    FRACTION = "its argument is a fraction of sizes, which a kernel computes in single precision"
    LARGE_NUMBER = "its argument is a large number computed from sizes, for which a kernel has 32 bits"
    DIVIDES = "it divides integers, and a division by zero is an error on the CPU"
    LAST_PLACE = "its result may differ in the last place"

    # Why it is no constant of the compiled graph either.
    IN_BRANCH = "it is in a branch or a loop"
    SEVERAL_VALUES = "it has several results"
    NO_CONSTANT_TYPE = "Inductor supports no constants of its type on a GPU"
    COMPLEX_ORDER = "a kernel would have to rearrange complex numbers"
    LARGE_CONSTANT = "{nbytes} bytes are too many for a constant"
    FLOAT8 = "a GPU may convert infinities and NaN of its type differently"
    LARGE_EVALUATION = "{nbytes} bytes are too many to compute when the graph is compiled"
    NOT_CONSTANT = "it is not computed from constants alone"
    SIZE_AT_CALL = "its size is not known when the graph is compiled"
    UNSET = "its memory is uninitialized"
    NUMBER_AT_CALL = "one of its arguments is not known when the graph is compiled"
    NOT_EVALUATED = "the CPU cannot compute it when the graph is compiled; see the log"
    OTHER_RESULT = "the CPU's result has a type or size that differs from the traced one"


_without_facts = functools.cache(Why)  # many calls may say the same
