"""Notes what a recording would gain from branches, and gives its graph the edges.

At the end of a capture that :func:`noting` wraps, it notes the order that memory requires of the operations, or why the
graph keeps its chain. With lanes, it also chooses the edges, which :meth:`Branching.replace` puts into the graph. By
themselves, they only raise :class:`GraphLost`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.edges import Dependencies
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection.table.launches import available, tap
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.log import RecordingLog
from pygraph_trees.report.records import Branches

from .accesses import NoBranches, units_of
from .data_flow import Forecast
from .lanes import LANES, lane_edges, time_us
from .operations import Operations, span_of
from .order import Pair, reduced
from .rewriting import Chain, GraphLost, NotReplaced
from .streams import Streams
from .units import Regions

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

_log = logging.getLogger("pygraph_trees.edges")

# Tests turn this off: operations are captured on lanes, and their order is the chain.
SIDE_BY_SIDE = True


class Branching:
    """The edges that a graph gets in place of the captured ones, if any."""

    def __init__(self, log: RecordingLog) -> None:
        self._log = log
        self.chain: Chain | None = None
        self.edges: Sequence[Pair] = ()
        self.forecast = Forecast()

    def replace(self, graph: int) -> None:
        """Gives them to the graph, which is captured and not yet instantiated."""
        chain, self.chain = self.chain, None
        if chain is None:
            return
        try:
            if chain.graph != graph:
                raise NotReplaced(why="the graph is not the one that was captured")
            chain.replace(self.edges)
        except GraphLost:
            raise
        except Exception as error:  # the graph has its captured edges
            _log.warning("the operations of a recording run one after another", exc_info=True)
            self._log.branches, self._log.why_no_branches = None, Reason.NO_CHAIN(why=error)


@contextlib.contextmanager
def noting(
    log: RecordingLog,
    driver: Driver,
    dependencies: Dependencies,
    current_stream: Callable[[], int],
    allocated: Callable[[], int] | None,
    tensors: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    streams: Streams | None = None,
    watching: Callable[[Callable[[torch.Tensor], None]], AbstractContextManager[None]] | None = None,
) -> Iterator[Branching]:
    """Inside, the operations that the current stream captures are noted.

    Args:
        allocated: tells how many blocks torch's allocator has given out so far; None if only a forecast is wanted.
        tensors: those that are alive when the capture begins.
        inputs: those among them that another call may pass elsewhere, where they may overlap others.
        streams: to capture on, so that the graph gets other edges.
        watching: a scope in which generated code tells what it allocates; needed with ``streams``.
    """
    branching = Branching(log)
    if not available():
        log.why_no_branches = Reason.UNWATCHED()
        yield branching
        return
    stream = current_stream()
    elsewhere = Regions(filter(None, map(span_of, inputs)))
    operations = Operations(driver, stream, current_stream, allocated, tensors, streams, branching.forecast)
    del tensors, inputs  # the captured code frees some of them, and uses their memory again
    watched = nullcontext() if watching is None else watching(operations.allocated)
    with tap.scope(operations.launch), watched:
        try:
            with operations:
                yield branching
        except BaseException:
            if streams is not None:
                streams.join()
            raise
        finally:
            operations.leave()
    if allocated is None:
        log.why_no_branches = operations.why_not
        return
    try:
        with driver.without_disturbing_captures():
            chain, times_us, found = _measured(driver, dependencies, stream, operations, elsewhere)
        used, in_order = 1 if streams is None else streams.used, list(pairwise(range(len(chain.units))))
        if used > 1:
            branching.chain = chain
            branching.edges = lane_edges(chain.units, chain.needs, times_us) if SIDE_BY_SIDE else in_order
        predicted_us = {lanes: min(branching.forecast.us(lanes), found["chain_us"]) for lanes in LANES}
        dropped = len({*in_order}.difference(branching.edges)) if used > 1 else 0
        log.branches = Branches(**found, lanes_us=predicted_us, lanes=used, dropped=dropped)
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
) -> tuple[Chain, list[float], dict[str, Any]]:
    """The units of a graph that a stream captures, their times, and the facts for the report."""
    if (graph := driver.capturing_graph(stream)) is None or operations.why_not is not None:
        raise NoBranches(why=operations.why_not or Reason.NOT_CAPTURED())
    nodes = driver.nodes(graph)
    units = units_of(driver, nodes, dependencies.read(graph), operations.found, inputs)
    chain = Chain(dependencies, graph, nodes, units)
    times_us = [time_us(unit.nbytes) for unit in chain.units]
    pairs, depth = reduced(chain.needs), [1] * len(chain.units)
    for earlier, later in pairs:  # sorted by the later one
        depth[later] = max(depth[later], depth[earlier] + 1)
    found = {
        "operations": len(chain.units),
        "barriers": sum(unit.barrier for unit in chain.units),
        "edges": len(pairs),
        "depth": max(depth, default=0),  # units on the longest path
        "chain_us": sum(times_us),
    }
    return chain, times_us, found
