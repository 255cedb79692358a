"""The events around the calls of a program's compiled function, as data.

An :class:`Around` belongs to a :class:`~fuzzing.case.Case` and is printed with it. With all fields at their defaults,
one thread calls on one stream, with nothing in between. A field that a case cannot use, such as saved-tensor hooks
without a backward, has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from .faults import KINDS, Fault

SAVED = (  # kinds of saved-tensor hooks; each returns the same values
    "identity",
    "clone",  # at another address
    "cpu",  # on the CPU in between
    "pinned",  # on the CPU in between, in pinned memory; comes back contiguous
    "float64",  # as double in between
    "contiguous",  # unpacked contiguous
    "transposed",  # unpacked with the last two dimensions swapped in memory
)
WHEN = ("always", "later", "first", "every other")  # "later": from the third call on; "first": the two before it
TANGENTS = (  # kinds of gradients of an output
    "missing",  # the backward starts from the other outputs
    "zero",  # zeros without memory
    "expanded zero",  # one element
    "expanded",  # one element that is not zero
    "none",  # None, which torch allows for one element
    "neg",  # a view with the negative bit
    "conj",  # a view with the conjugate bit, of a complex output
)
# Tangents from the third call on: code that is not replayed reads address 0, or rejects a conjugate bit.
LATE = ("zero", "conj")
EVENTS = (  # places at which something happens
    "forward hook",  # of a module around the call
    "output hook",  # of an output, in the backward
    "accumulated",  # after a gradient is accumulated
    "pack",  # of the saved-tensor hooks
    "unpack",
)
TARGETS = ("same", "other")  # the called function: the case's own, or another one compiled in the same way
ACTIONS = ("collect", *TARGETS)  # collect garbage, or call a function
THREADS = (
    "call",  # each call in a new thread
    "worker",  # all in one other thread
    "workers",  # in turns in two other threads
    "backward",  # each backward in a new thread
)
PLACES_TO_RUN = (
    "device",  # inside torch.cuda.device of the current device
    "stream",  # on another stream
    "two streams",  # in turns on two other streams
    "three streams",
    "second device",  # all tensors on another device than the current one, if there are two
)

STREAMS = {"stream": 1, "two streams": 2, "three streams": 3}
BESIDE = ("stream", "thread")  # where a function is called at the same time
HOLDS = (  # what the program holds over later calls
    "nothing",
    "outputs",
    "loss",  # with its autograd graph; the backward starts from it
    "detached loss",
    "graph",  # that a second backward uses as well
)

_WHEN_FIELDS = ("saved_when", "thread_when", "where_when", "holds_when", "reads", "captures")


@dataclass(frozen=True, slots=True)
class Around:
    """The events around the calls."""

    saved: str | None = None  # one of SAVED: saved-tensor hooks around the forward
    saved_when: str = "always"
    tangents: tuple[tuple[str, str], ...] = ()  # (returned value, one of TANGENTS)
    events: tuple[tuple[str, str], ...] = ()  # (one of EVENTS, one of ACTIONS)
    garbage: str | None = None  # one of TARGETS: finalizers of objects in cycles call it, from the third call on
    threshold: int = 0  # of the garbage collector, from the third call on; 0 leaves it alone
    inner_backward: bool = False  # calls from hooks and finalizers have a backward, if the case has one
    thread: str | None = None  # one of THREADS
    thread_when: str = "always"
    where: str | None = None  # one of PLACES_TO_RUN
    where_when: str = "always"
    keeps: int = 0  # number of calls whose outputs are kept without being read
    holds: str | None = None  # one of HOLDS, at calls that `holds_when` includes; nothing at others
    holds_when: str = "always"
    reads: str | None = None  # one of WHEN: outputs are read on another stream, recorded there, and dropped
    captures: str | None = None  # one of WHEN: the call is in a graph that the program captures; later calls replay it
    beside: tuple[tuple[str, str], ...] = ()  # (one of BESIDE, one of TARGETS): called during the call, from the third
    faults: tuple[Fault, ...] = ()  # of compiled ways; the program catches one and makes the call again
    step_of: int = 1  # calls per step; after each, earlier outputs of the step are read again

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("saved", self.saved, SAVED),
            ("garbage", self.garbage, TARGETS),
            ("thread", self.thread, THREADS),
            ("where", self.where, PLACES_TO_RUN),
            ("holds", self.holds, HOLDS),
            *((name, getattr(self, name), WHEN) for name in _WHEN_FIELDS),
            *(("beside", place, BESIDE) for place, _ in self.beside),
            *(("beside", target, TARGETS) for _, target in self.beside),
            *(("faults", fault.kind, KINDS) for fault in self.faults),
            *(("tangents", kind, TANGENTS) for _, kind in self.tangents),
            *(("events", event, EVENTS) for event, _ in self.events),
            *(("events", action, ACTIONS) for _, action in self.events),
        ):
            if value is not None and value not in allowed:
                raise ValueError(f"{name} is one of {allowed}; got {value!r}")

    @property
    def targets(self) -> frozenset[str]:
        """The functions that are called from inside other calls."""
        return frozenset({self.garbage, *(action for _, action in (*self.events, *self.beside))} & set(TARGETS))


NOTHING = Around()


def at(when: str, call: int) -> bool:
    """Whether ``when`` includes a call."""
    return {"always": True, "later": call >= 2, "first": call < 2, "every other": call % 2 == 1}[when]
