"""Reports what a recording would gain from branches, and changes nothing.

:func:`noting` wraps a capture. At its end, while the graph still captures, it notes the order that memory requires of
the operations, as :class:`~pygraph_trees.report.records.Branches`, or why the graph keeps its chain. It never raises by
itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pygraph_trees.cuda.edges import Dependencies
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection.table.launches import available, tap
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.log import RecordingLog
from pygraph_trees.report.records import Branches

from .accesses import NoBranches, units_of
from .lanes import predicted
from .operations import Operations, span_of
from .order import Pair, reduced
from .regions import Regions
from .rewriting import Chain, NotReplaced

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

_log = logging.getLogger("pygraph_trees.edges")

LANES = (2, 4)
FLOOR_US = 2.5  # of an operation, however few bytes it takes
BYTES_PER_US = 2.5e6  # of the GPU's memory


@contextlib.contextmanager
def noting(
    log: RecordingLog,
    driver: Driver,
    dependencies: Dependencies,
    current_stream: Callable[[], int],
    allocated: Callable[[], int],
    tensors: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
) -> Iterator[None]:
    """Inside, the operations that the current stream captures are noted.

    Args:
        allocated: tells how many blocks torch's allocator has given out so far.
        tensors: those that are alive when the capture begins.
        inputs: those among them that another call may pass elsewhere, where they may overlap others.
    """
    if not available():
        log.why_no_branches = Reason.UNWATCHED()
        yield
        return
    stream = current_stream()
    elsewhere = Regions(filter(None, map(span_of, inputs)))
    operations = Operations(driver, stream, current_stream, allocated, tensors)
    with tap.scope(operations.launch), operations:
        yield
    try:
        with driver.without_disturbing_captures():
            log.branches = _measured(driver, dependencies, stream, operations, elsewhere)
    except (NoBranches, NotReplaced) as error:
        why = error.fields["why"]
        log.why_no_branches = why if isinstance(why, Why) else Reason.NO_CHAIN(why=why)
    except DriverError as error:
        log.why_no_branches = Reason.UNREAD(error=str(error))
    except Exception as error:  # a report must not make a program fail
        _log.warning("the operations of a recording were not compared", exc_info=True)
        log.why_no_branches = Reason.UNREAD(error=f"{type(error).__name__}: {error}")


def _measured(
    driver: Driver, dependencies: Dependencies, stream: int, operations: Operations, inputs: Regions
) -> Branches:
    """The branches of a graph that a stream captures."""
    graph = driver.capturing_graph(stream)
    if graph is None or operations.why_not is not None:
        raise NoBranches(why=operations.why_not or Reason.NOT_CAPTURED())
    nodes = driver.nodes(graph)
    units, nbytes = units_of(driver, nodes, dependencies.read(graph), operations.found, inputs)
    chain = Chain(dependencies, graph, nodes, units)
    number = {node: i for i, unit in enumerate(chain.units) for node in unit.nodes}
    taken = [0] * len(chain.units)  # bytes; units may have been joined
    for unit, count in zip(units, nbytes, strict=True):
        taken[number[unit.nodes[0]]] += count
    times_us = [max(FLOOR_US, count / BYTES_PER_US) for count in taken]
    pairs = reduced(chain.needs)
    in_any_order_us = sum(taken) / BYTES_PER_US  # operations side by side share the memory's bandwidth
    return Branches(
        operations=len(chain.units),
        barriers=sum(unit.barrier for unit in chain.units),
        edges=len(pairs),
        depth=_depth(len(chain.units), pairs),
        chain_us=sum(times_us),
        lanes_us={lanes: max(in_any_order_us, predicted(pairs, lanes, times_us)) for lanes in LANES},
    )


def _depth(count: int, pairs: Sequence[Pair]) -> int:
    """The number of units on the longest path."""
    depth = [1] * count
    for earlier, later in pairs:  # sorted by the later one
        depth[later] = max(depth[later], depth[earlier] + 1)
    return max(depth, default=0)
