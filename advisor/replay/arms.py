"""The arms of a replay: eviction orders to compare with, besides those of libcachesim, and every
policy by name, as one function of trace and capacity.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import signal
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from threadpoolctl import threadpool_limits

from ...graph.ranking.policy import Policy, ScoreProfile
from ..policies.registry import DEFAULT, POLICIES, new_policy
from .fast import (
    ALGORITHMS,
    belady_hits,
    depths,
    infinite_hits,
    is_installed,
    library_hits,
    lru_hits,
)
from .graph_order import GraphOrder, Planning, SimulatedSidecar
from .simulator import EvictionOrder, Instance, Load, LruOrder, simulate
from .trace import Ints, ReplayError, Trace

# What a trace tells about the future, and the eviction order that knows it.

NEVER: Final = 1 << 40  # stands for a request that does not come


class HeapOrder(EvictionOrder):
    """Evicts the free block with the smallest key; the latest ``_put`` of a block counts."""

    def __init__(self) -> None:
        self._free: dict[int, tuple[int, int, int]] = {}  # block → its entry of the heap
        self._heap: list[tuple[int, int, int]] = []

    def _put(self, block: int, *key: int) -> None:
        first, second = key
        self._free[block] = first, second, block
        heapq.heappush(self._heap, self._free[block])

    def reused(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._free[block]

    def victims(self, count: int, now: float) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            entry = heapq.heappop(self._heap)
            if self._free.get(entry[2]) == entry:
                del self._free[entry[2]]
                taken.append(entry[2])
        return taken


class BeladyOrder(HeapOrder):
    """Evicts the block whose next use is farthest, among equals the deepest.

    A block's parent is used whenever the block is, so this makes no block unreachable. No other
    order finds more if every request fits the pool; a refused request counts as a use here.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._next = next_uses(trace)
        self._depth: list[int] = depths(trace.starts, trace.blocks).tolist()

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        uses = self._next[request]
        for block in blocks:
            self._put(block, -uses[self._depth[block]], -self._depth[block])


def next_uses(trace: Trace) -> list[list[int]]:
    """Return per request, for each block of its chain, the next request that asks for it."""
    coming = [NEVER] * trace.num_blocks
    prompts = trace.prompts.tolist()
    uses: list[list[int]] = []
    for request, chain in reversed(list(enumerate(trace.chains()))):
        uses.append([coming[block] for block in chain])
        for block in chain[: prompts[request]]:
            coming[block] = request
    uses.reverse()
    return uses


class LfuHistoryOrder(HeapOrder):
    """Evicts the least frequently used block, the oldest among equals. An evicted block keeps its
    count; libcachesim's LFU forgets it with its object, as most do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()
        self._freed = 0

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        for block in blocks:
            self._uses[block] += 1
            self._freed += 1
            self._put(block, self._uses[block], self._freed)


_TTL_S: Final = 300.0  # chosen


class SessionTtlOrder(EvictionOrder):
    """Keeps blocks used by a session with two or more turns for five minutes after its last turn.

    Other blocks are evicted first, those free longest before the rest; among the kept ones, the
    oldest. With the same time to live for every session, it would be LRU.
    """

    def __init__(self, trace: Trace) -> None:
        self._turns = trace.turns().tolist()
        self._kept: OrderedDict[int, float] = OrderedDict()
        self._plain: OrderedDict[int, None] = OrderedDict()

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        if self._turns[request]:
            self._kept.update(dict.fromkeys(blocks, now + _TTL_S))
        else:
            self._plain.update(dict.fromkeys(blocks))

    def reused(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
            else:
                del self._plain[block]

    def victims(self, count: int, now: float) -> list[int]:
        return [self._victim(now) for _ in range(count)]

    def _victim(self, now: float) -> int:
        oldest = next(iter(self._kept.values()), now)
        if self._plain and oldest >= now:
            return self._plain.popitem(last=False)[0]
        return self._kept.popitem(last=False)[0]


HINTS: Final = "+hints"
"""Suffix of a graph policy's name: callers name their sessions and state what the trace knows.
Without it sessions are inferred from chains, as live.
"""

LAYERS: Final = "+layers"
"""Suffix of a graph policy's name: callers state nothing; the engine finds the parts of prompts by
itself, as far as the trace contains them."""

STOPS: Final = "+stops"
"""Suffix of a graph policy's name: callers state nothing; the engine recognises from each answer
why it ended, as it does by default if its chat template has a format for tool calls.
"""

SUFFIXES: Final = (HINTS, LAYERS, STOPS)

BY_DEFAULT: Final = "default"  # the graph policy that a sidecar runs with no configuration


@dataclass(frozen=True, slots=True)
class Settings:
    planning: Planning = field(default_factory=Planning)  # how graph policies plan
    profile: ScoreProfile | None = None  # weights and rules; None takes the defaults
    guard: bool = True  # whether LRU ranks until a graph policy has shown that it finds more
    load: Load | None = None  # makes requests take time, for arms that simulate it


Fast = Callable[[Trace, int], Ints]


def graph_policies() -> dict[str, str]:
    return {BY_DEFAULT: DEFAULT, **{name: name for name in POLICIES}}


ORDERS: Final[dict[str, Callable[[Trace], EvictionOrder]]] = {
    "lru": lambda trace: LruOrder(),
    "lfu-history": lambda trace: LfuHistoryOrder(),
    "session-ttl": SessionTtlOrder,
    "belady-pool": BeladyOrder,
}
"""Orders that the simulator runs, besides those of graph policies."""

FAST: Final[dict[str, Fast]] = {
    "lru": lru_hits,
    **{name: partial(library_hits, policy=name) for name in ALGORITHMS},
    "belady": belady_hits,
    "infinite": lambda trace, capacity: infinite_hits(trace),
}
"""Arms with an inner loop of their own; requests take no time there."""

BOUNDS: Final = ("belady-pool", "belady", "infinite")
"""Arms that know the future, with which policies are compared."""


def arm_names() -> list[str]:
    """Return the names for ``all``: baselines, then graph policies, then bounds.

    Suffixes are included for the default policy only: their gain shows there, and graph policies
    take most of a table's time. The default is listed under its own name.
    """
    graph = [*(name for name in POLICIES if name not in ORDERS), DEFAULT + HINTS]
    online = [name for name in {**ORDERS, **FAST} if name not in BOUNDS]
    if not is_installed():
        online = [name for name in online if name not in ALGORITHMS]
    return [*online, *graph, *BOUNDS]


def chosen_arms(names: Sequence[str]) -> list[str]:
    """Return the arms for ``names``; ``all``: each that can run here. Raises ReplayError."""
    known = arm_names()
    more = [*ALGORITHMS, *order_names()]
    allowed = [*known, *(name for name in more if name not in known)]
    for name in names:
        if name != "all" and name not in allowed:
            raise ReplayError(f"policy {name!r}: allowed: all, {', '.join(allowed)}")
    return known if "all" in names else list(dict.fromkeys(names))


def without_suffix(name: str) -> str:
    told = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(told)


def order_names() -> list[str]:
    policies = graph_policies()
    told = [name + suffix for suffix in SUFFIXES for name in policies]
    return list(dict.fromkeys([*ORDERS, *policies, *told]))


def new_order(name: str, trace: Trace, settings: Settings) -> EvictionOrder:
    """Make an eviction order for a simulated instance; raises as ``new_orders``."""
    return new_orders(name, trace, settings, 1)[0]


def new_orders(name: str, trace: Trace, settings: Settings, engines: int) -> list[EvictionOrder]:
    """Make an order per engine; a graph policy's share one sidecar. Raises ReplayError."""
    if name in ORDERS:
        return [ORDERS[name](trace) for _ in range(engines)]
    policy = graph_policies().get(without_suffix(name))
    if policy is None:
        allowed = ", ".join(order_names())
        raise ReplayError(f"policy {name!r} cannot run here: allowed: {allowed}")
    sidecar = SimulatedSidecar(
        trace,
        new_policy(policy, settings.profile),
        rules=settings.profile,
        hints=name.endswith(HINTS),
        layers=name.endswith(LAYERS),
        stops=name.endswith(STOPS),
        guard=settings.guard,
    )
    return [GraphOrder(sidecar, settings.planning) for _ in range(engines)]


def run_arm(name: str, trace: Trace, capacity: int, settings: Settings) -> Ints:
    """Return the prompt blocks that an engine of ``capacity`` matched, int32 ``[requests]``."""
    if name in FAST and (settings.load is None or name not in ORDERS):
        return FAST[name](trace, capacity)
    instance = Instance(capacity, new_order(name, trace, settings))
    return simulate(trace, [instance], load=settings.load).hits


Shared = TypeVar("Shared")
Cell = TypeVar("Cell", bound=Hashable)
Found = TypeVar("Found")


def run_cells(
    run: Callable[[Shared, Cell], Found],  # a module's function: other processes import it
    shared: Shared,  # sent to each process once
    cells: Sequence[Cell],
    processes: int,  # 1 runs all cells in this one
) -> Iterator[tuple[Cell, Found]]:
    """Yield every cell with ``run(shared, cell)`` when it is done; cells start in their order."""
    if processes == 1 or len(cells) == 1:
        with threadpool_limits(1, user_api="blas"):
            for cell in cells:
                yield cell, run(shared, cell)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a threaded process may hang
    with ProcessPoolExecutor(processes, spawn, _adopt, (run, shared)) as pool:
        try:
            running = {pool.submit(_run_cell, cell): cell for cell in cells}
            for future in as_completed(running):
                yield running[future], future.result()
        except BaseException:  # Ctrl-C, an error of one cell, or nobody wants the others
            pool.shutdown(cancel_futures=True)
            raise


def all_cells(
    run: Callable[[Shared, Cell], Found],
    shared: Shared,
    cells: Sequence[Cell],
    processes: int,
    progress: Callable[[int, int], None],  # called with how many are done, and how many there are
) -> dict[Cell, Found]:
    """Run ``run_cells`` to its end; returns the results by cell."""
    found: dict[Cell, Found] = {}
    for cell, each in run_cells(run, shared, cells, processes):
        found[cell] = each
        progress(len(found), len(cells))
    return found


_worker: dict[str, Any] = {}


def _adopt(run: Callable[[Any, Any], Any], shared: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # caught, it would end one cell, not the process
    # Matrices are small here, and every core has a process already.
    threadpool_limits(1, user_api="blas")
    _worker.update(run=run, shared=shared)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit with the parent: otherwise a worker whose parent was killed would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_cell(cell: Any) -> Any:
    return _worker["run"](_worker["shared"], cell)


def hit_rate(trace: Trace, capacity: int, policy: Policy | str = BY_DEFAULT) -> float:
    """Replay a trace through one engine; prompt blocks found in its pool / all prompt blocks.

    Args:
        capacity: Blocks of the pool.
        policy: A name that ``kvgraph replay --policy`` takes, or an object of your own, which must
            be fresh, since it may learn. As in a live sidecar, it ranks only while it finds more
            than LRU would, and knows only what an engine sees.

    Raises:
        ReplayError: No policy has that name.
    """
    if isinstance(policy, str):
        hits = run_arm(policy, trace, capacity, Settings())
    else:
        hits = simulate(trace, [Instance(capacity, GraphOrder.alone(trace, policy))]).hits
    return float(hits.sum() / max(1, trace.prompt_blocks))
