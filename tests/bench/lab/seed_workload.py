"""The workload that this project began with: eight engines, few sessions that come back, and they
come back late enough to be gone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from kvgraph.advisor.policies.registry import new_policy
from kvgraph.advisor.replay.analysis import needed_at_once, own_history, session_blocks
from kvgraph.advisor.replay.arms import BY_DEFAULT, HINTS, Settings, new_orders, run_cells
from kvgraph.advisor.replay.fast import infinite_hits
from kvgraph.advisor.replay.graph_order import GraphOrder, SimulatedSidecar
from kvgraph.advisor.replay.plan import FleetRouting, NotingRouter
from kvgraph.advisor.replay.simulator import (
    EvictionOrder,
    HostTier,
    Instance,
    LruOrder,
    PrefixAffinity,
    Router,
    simulate,
)
from kvgraph.advisor.replay.trace import Ints, Trace, last_turns
from kvgraph.graph.ranking.policy import ScoreProfile

Draw = Callable[[], float]
_NORMAL: Final = NormalDist()
_GOLDEN: Final = (5**0.5 - 1) / 2
"""Multiples of it, taken modulo 1, are spread evenly, however many."""
_PARTIAL: Final = 100
"""Tokens of each prompt behind its last full block; any number below a block does."""


@dataclass(frozen=True, slots=True)
class Kind:
    share: float  # of all sessions
    more_turns: float  # mean number of turns beyond the second
    gap: float  # median of the requests that a session's engine serves between two of its turns
    gap_sigma: float  # of its logarithm
    first: float  # blocks of the first prompt behind the shared prefix, the median
    growth: float  # blocks that each further turn adds, the median


@dataclass(frozen=True, slots=True)
class SeedShape:
    """What sessions are drawn from; the defaults were fitted to the seed's eleven figures, and
    `kvgraph bench fleet` says how near they come.

    Attributes:
        loops, talks: Sessions with several turns: those that come back at once, as after a tool,
            and those that come back late.
        context, context_sigma: Blocks of the prompt behind the shared prefix, the median, of
            sessions with one turn, and of its logarithm.
        first_sigma, growth_sigma: Of the logarithms of sessions with several turns.
        longest: Blocks of the longest prompt: a session that would exceed it ends.
        prefixes: Number of shared prefixes.
        prefix_blocks, prefix_sigma: Blocks of a shared prefix, the median.
        zipf: Exponent of the prefixes' popularity.
        interval_s: Mean seconds between requests.
    """

    requests: int = 1000
    engines: int = 8
    block_size: int = 512
    loops: Kind = Kind(0.04886, 9.93, 2.918, 0.2066, 87.87, 21.32)
    talks: Kind = Kind(0.0521, 1.536, 17.99, 0.8766, 190.1, 25.79)
    context: float = 70.14
    context_sigma: float = 0.3365
    first_sigma: float = 0.2496
    growth_sigma: float = 0.5326
    longest: int = 512
    prefixes: int = 57
    prefix_blocks: float = 16.55
    prefix_sigma: float = 1.078
    zipf: float = 1.215
    interval_s: float = 1.0

    @property
    def turns_each(self) -> float:
        return 1 + sum(kind.share * (1 + kind.more_turns) for kind in (self.loops, self.talks))


class _Turn(NamedTuple):
    at: float
    session: int
    chain: list[int]


def seed_workload(seed: int = 1, shape: SeedShape | None = None) -> Trace:
    """The seed's workload; deterministic.

    What is drawn is spread evenly over its distribution and shuffled, so that a thousand requests
    are enough for its median and its tail to be near what they were drawn from.
    """
    shape = shape or SeedShape()
    turns = _Sessions(shape, random.Random(seed)).turns()
    return _trace(shape, sorted(turns)[: shape.requests])


class _Draws:
    def __init__(self, rng: random.Random, shape: SeedShape, kind: Kind, count: int) -> None:
        self.prefix = _popular(rng, shape, count)
        self.first = _lognormal(rng, kind.first, shape.first_sigma, count)
        self.growth = _lognormal(rng, kind.growth, shape.growth_sigma, 10 * count)
        self.gap = _lognormal(rng, kind.gap, kind.gap_sigma, 10 * count)
        self.more = _geometric(rng, kind.more_turns, count)


class _Sessions:
    def __init__(self, shape: SeedShape, rng: random.Random) -> None:
        self._shape, self._rng = shape, rng
        self._next_block = 0
        self._prefixes = [self._fresh(size) for size in _prefix_sizes(shape)]
        self._count = round(shape.requests / shape.turns_each)
        several = [max(1, round(self._count * k.share)) for k in (shape.loops, shape.talks)]
        once = self._count - sum(several)
        self._loops = _Draws(rng, shape, shape.loops, several[0])
        self._talks = _Draws(rng, shape, shape.talks, several[1])
        self._prefix = _popular(rng, shape, once)
        self._context = _lognormal(rng, shape.context, shape.context_sigma, once)

    def turns(self) -> list[_Turn]:
        """All turns of as many sessions as fill the requests, some of them beyond the end."""
        shape = self._shape
        each_s = shape.interval_s * shape.turns_each
        turns: list[_Turn] = []
        for session in range(2 * self._count):  # those that start last come back after the end
            start = (session + self._rng.random()) * each_s
            if _is_one_of(session, shape.loops.share, 0.25):
                turns += self._several(session, start, self._loops)
            elif _is_one_of(session, shape.talks.share, 0.75):
                turns += self._several(session, start, self._talks)
            else:
                turns.append(self._first(session, start, self._prefix(), self._context()))
        return turns

    def _first(self, number: int, at: float, prefix: int, own: float) -> _Turn:
        shared = self._prefixes[prefix]
        return _Turn(at, number, shared + self._fresh(min(own, self._shape.longest - len(shared))))

    def _several(self, number: int, at: float, draws: _Draws) -> list[_Turn]:
        turns = [self._first(number, at, draws.prefix(), draws.first())]
        between_s = self._shape.engines * self._shape.interval_s
        for _ in range(1 + round(draws.more())):
            at += draws.gap() * between_s
            chain = turns[-1].chain + self._fresh(draws.growth())
            if len(chain) > self._shape.longest:
                break
            turns.append(_Turn(at, number, chain))
        return turns

    def _fresh(self, blocks: float) -> list[int]:
        start = self._next_block
        self._next_block += max(1, round(blocks))
        return list(range(start, self._next_block))


def _is_one_of(number: int, share: float, offset: float) -> bool:
    """Whether a number is one of a share of all numbers, evenly spread."""
    return int((number + 1) * share + offset) > int(number * share + offset)


def _even(rng: random.Random, count: int) -> Draw:
    """Shares in (0, 1), evenly spread over each ``count`` draws."""
    left: list[float] = []

    def draw() -> float:
        if not left:
            left.extend((place + 0.5) / count for place in range(count))
            rng.shuffle(left)
        return left.pop()

    return draw


def _lognormal(rng: random.Random, median: float, sigma: float, count: int) -> Draw:
    share = _even(rng, count)
    return lambda: median * float(np.exp(sigma * _NORMAL.inv_cdf(share())))


def _prefix_sizes(shape: SeedShape) -> list[float]:
    """Blocks of each shared prefix, the most popular first: what is popular has any size, and the
    same in every workload, since one prefix is in a quarter of all prompts.
    """
    shares = ((0.5 + rank * _GOLDEN) % 1.0 for rank in range(shape.prefixes))
    return [
        shape.prefix_blocks * float(np.exp(shape.prefix_sigma * _NORMAL.inv_cdf(each or 0.5)))
        for each in shares
    ]


def _popular(rng: random.Random, shape: SeedShape, count: int) -> Callable[[], int]:
    weights = np.arange(1, shape.prefixes + 1, dtype=np.float64) ** -shape.zipf
    reached, share = np.cumsum(weights) / weights.sum(), _even(rng, count)
    return lambda: int(np.searchsorted(reached, share()))


def _geometric(rng: random.Random, mean: float, count: int) -> Draw:
    share = _even(rng, count)
    return lambda: float(np.floor(np.log1p(-share()) / np.log(mean / (1 + mean))))


def _trace(shape: SeedShape, turns: list[_Turn]) -> Trace:
    ids: dict[int, int] = {}
    flat = [ids.setdefault(block, len(ids)) for turn in turns for block in turn.chain]
    lengths = np.array([len(turn.chain) for turn in turns], dtype=np.int32)
    rows: dict[int, int] = {}
    session = np.array([rows.setdefault(t.session, len(rows)) for t in turns], dtype=np.int32)
    at = np.array([turn.at for turn in turns])
    return Trace(
        name="seed",
        block_size=shape.block_size,
        at=at - at[0],
        input_tokens=lengths * shape.block_size + _PARTIAL,
        output_tokens=np.full(len(turns), _PARTIAL, dtype=np.int32),
        starts=np.append(0, np.cumsum(lengths)).astype(np.int64),
        blocks=np.array(flat, dtype=np.int32),
        prompts=lengths,
        full=lengths,
        matchable=lengths,
        session=session,
        last=last_turns(session),
        has_sessions=True,
    )


# What can be said of a workload in a few figures: how its sessions come back, and what its
# prompts would find in a fleet of engines.


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """A workload on a fleet whose router goes by what engines have cached, each under LRU.

    Attributes:
        several: Share of sessions with more than one turn.
        gap_p50, gap_p90: Requests that the engine of a session's turn serves before its next turn.
        blocks_p50: Blocks of a session's longest prompt.
        live_p50, live_max: Sessions between two of their turns, at a request.
        infinite: Share of prompt blocks that an endless cache finds.
        lru: The share that the fleet finds.
        multi_turn: Share of the gap between both that a session's own turns lose.
        budget_p50, budget_max: Distinct blocks that those sessions hold, at a request.
    """

    several: float
    gap_p50: float
    gap_p90: float
    blocks_p50: float
    live_p50: float
    live_max: float
    infinite: float
    lru: float
    multi_turn: float
    budget_p50: float
    budget_max: float

    def errors(self, other: WorkloadFacts) -> dict[str, float]:
        """By how much each figure is off that of ``other``, as a share of it."""
        wanted = asdict(other)
        return {name: abs(own / wanted[name] - 1) for name, own in asdict(self).items()}


SEED_FACTS: Final = WorkloadFacts(
    several=0.09,
    gap_p50=2,
    gap_p90=12,
    blocks_p50=93,
    live_p50=14,
    live_max=21,
    infinite=0.534,
    lru=0.433,
    multi_turn=0.66,
    budget_p50=3515,
    budget_max=4927,
)  # the seed's figures, on eight engines of 550 blocks


def workload_facts(trace: Trace, engines: int, capacity: int) -> WorkloadFacts:
    routed = NotingRouter(PrefixAffinity(trace))
    pools = [Instance(capacity, LruOrder()) for _ in range(engines)]
    found = simulate(trace, pools, router=routed).hits
    endless = infinite_hits(trace)
    lost = endless - found
    lost_own = np.maximum(0, np.minimum(endless, own_history(trace)) - found)
    total = max(1, trace.prompt_blocks)
    gaps = _gaps(trace, np.array(routed.where))
    needed, budget = needed_at_once(trace)
    return WorkloadFacts(
        several=float((np.bincount(trace.session) > 1).mean()),
        gap_p50=float(np.percentile(gaps, 50)),
        gap_p90=float(np.percentile(gaps, 90)),
        blocks_p50=float(np.median(session_blocks(trace))),
        live_p50=float(np.median(needed)),
        live_max=float(needed.max()),
        infinite=float(endless.sum() / total),
        lru=float(found.sum() / total),
        multi_turn=float(lost_own.sum() / max(1, lost.sum())),
        budget_p50=float(np.median(budget)),
        budget_max=float(budget.max()),
    )


def _gaps(trace: Trace, where: Ints) -> Ints:
    """Requests that the engine of each turn serves before its session's next turn."""
    order = np.argsort(trace.session, kind="stable")
    again = np.flatnonzero(trace.session[order][1:] == trace.session[order][:-1])
    gaps = [
        int((where[turn + 1 : after] == where[turn]).sum())
        for turn, after in zip(order[again], order[again + 1], strict=True)
    ]
    return np.array(gaps, dtype=np.int32)


# What engines find together with a home for each session (A), a shared store (B), an order that
# knows when sessions return (C), and all of these.

RESERVED: Final = 200 / 550
"""Share of each pool that A keeps for sessions with several turns: the seed's."""
STORE_FACTOR: Final = 1.0  # blocks of the shared store for each block of all pools together; chosen


@dataclass(frozen=True, slots=True)
class FleetArm:
    """Which of the three levers are pulled; without any: cache-aware routing above LRU."""

    home: bool = False
    store: bool = False
    lifecycle: bool = False

    @property
    def name(self) -> str:
        levers = zip("ABC", (self.home, self.store, self.lifecycle), strict=True)
        return "".join(letter for letter, pulled in levers if pulled) or "none"


NOTHING: Final = FleetArm()
ARMS: Final = (
    NOTHING,
    FleetArm(home=True),
    FleetArm(store=True),
    FleetArm(lifecycle=True),
    FleetArm(home=True, store=True),
    FleetArm(home=True, lifecycle=True),
    FleetArm(store=True, lifecycle=True),
    FleetArm(home=True, store=True, lifecycle=True),
)


@dataclass(frozen=True, slots=True)
class FleetSize:
    engines: int = 8
    blocks: int = 550


@dataclass(frozen=True, slots=True)
class FleetFound:
    """Shares of a trace's prompt blocks: found in pools, loaded from the shared store."""

    pool: float
    store: float

    @property
    def share(self) -> float:
        return self.pool + self.store


def compare_arms(
    trace: Trace,
    size: FleetSize,
    arms: Sequence[FleetArm] = ARMS,
    *,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, FleetFound]:
    slow_first = sorted(arms, key=lambda arm: not (arm.lifecycle or arm.home))
    found: dict[str, FleetFound] = {}
    for done, (arm, row) in enumerate(run_cells(_run, (trace, size), slow_first, processes)):
        found[arm.name] = row
        progress(done + 1, len(arms))
    return {arm.name: found[arm.name] for arm in arms}


def run_fleet(trace: Trace, size: FleetSize, arm: FleetArm) -> FleetFound:
    """Replay a trace through a fleet; requests take no time."""
    store = None
    if arm.store:
        blocks = round(STORE_FACTOR * size.engines * size.blocks)
        store = HostTier(blocks, plain=not arm.lifecycle, selective=arm.lifecycle)
    orders = _orders(trace, size.engines, arm)
    pools = [Instance(size.blocks, order, host=store) for order in orders]
    outcome = simulate(trace, pools, router=_router(trace, arm, store))
    total = max(1, trace.prompt_blocks)
    return FleetFound(float(outcome.hits.sum() / total), float(outcome.warmed.sum() / total))


def endless(trace: Trace) -> float:
    return float(infinite_hits(trace).sum() / max(1, trace.prompt_blocks))


def _run(shared: tuple[Trace, FleetSize], arm: FleetArm) -> FleetFound:
    return run_fleet(*shared, arm)


def _router(trace: Trace, arm: FleetArm, store: HostTier | None) -> Router:
    return FleetRouting(trace, store) if arm.home else PrefixAffinity(trace, below=False)


def _orders(trace: Trace, engines: int, arm: FleetArm) -> Sequence[EvictionOrder]:
    """One for each engine; where advice is needed, one sidecar advises all of them."""
    rules = replace(ScoreProfile(), reserved=RESERVED if arm.home else 0.0)
    if arm.lifecycle:
        return new_orders(BY_DEFAULT + HINTS, trace, Settings(profile=rules), engines)
    if not arm.home:
        return [LruOrder() for _ in range(engines)]
    sidecar = SimulatedSidecar(trace, new_policy("lru", None), rules=rules)
    return [GraphOrder(sidecar) for _ in range(engines)]
