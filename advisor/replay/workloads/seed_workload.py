"""The workload that this project began with: eight engines, few sessions that come back, and they
come back late enough to be gone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from ..traces.trace import Trace, last_turns

Draw = Callable[[], float]
_NORMAL: Final = NormalDist()
_PARTIAL: Final = 100
"""Tokens of each prompt behind its last full block; any number below a block does."""


@dataclass(frozen=True, slots=True)
class SeedShape:
    """What sessions are drawn from; the defaults were fitted to the seed's eleven figures, and
    `kvgraph bench fleet` says how near they come.

    Attributes:
        several: Share of sessions with more than one turn.
        more_turns: Mean number of turns beyond the second, of those.
        gap: Median of the requests that a session's engine serves between two of its turns.
        gap_sigma: Of its logarithm.
        context, context_sigma: Blocks of a session's first prompt behind the shared prefix, the
            median, of sessions with one turn.
        first, first_sigma: The same of sessions with several turns.
        growth, growth_sigma: Blocks that each further turn adds, the median.
        longest: Blocks of the longest prompt: a session that would exceed it ends.
        prefixes: Number of shared prefixes.
        prefix_blocks, prefix_sigma: Blocks of a shared prefix, the median.
        zipf: Exponent of the prefixes' popularity.
        interval_s: Mean seconds between requests.
    """

    requests: int = 1000
    engines: int = 8
    block_size: int = 512
    several: float = 0.098
    more_turns: float = 4.85
    gap: float = 3.53
    gap_sigma: float = 1.21
    context: float = 48.0
    context_sigma: float = 0.757
    first: float = 116.0
    first_sigma: float = 0.592
    growth: float = 16.1
    growth_sigma: float = 0.665
    longest: int = 512
    prefixes: int = 31
    prefix_blocks: float = 27.3
    prefix_sigma: float = 0.591
    zipf: float = 1.2
    interval_s: float = 1.0


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


class _Sessions:
    """Draws sessions one after the other."""

    def __init__(self, shape: SeedShape, rng: random.Random) -> None:
        self._shape, self._rng = shape, rng
        self._next_block = 0
        sizes = _lognormal(rng, shape.prefix_blocks, shape.prefix_sigma, shape.prefixes)
        self._prefixes = [self._fresh(sizes()) for _ in range(shape.prefixes)]
        self._popular = [1 / (rank + 1) ** shape.zipf for rank in range(shape.prefixes)]
        self._count = round(shape.requests / self._turns_each())
        several = max(1, round(self._count * shape.several))
        self._context = _lognormal(rng, shape.context, shape.context_sigma, self._count - several)
        self._first = _lognormal(rng, shape.first, shape.first_sigma, several)
        self._growth = _lognormal(rng, shape.growth, shape.growth_sigma, 10 * several)
        self._gap = _lognormal(rng, shape.gap, shape.gap_sigma, 10 * several)
        self._more = _geometric(rng, shape.more_turns, several)

    def turns(self) -> list[_Turn]:
        """All turns of as many sessions as fill the requests, some of them beyond the end."""
        each_s = self._shape.interval_s * self._turns_each()
        turns: list[_Turn] = []
        every = round(1 / self._shape.several)
        for session in range(2 * self._count):  # those that start last come back after the end
            start = (session + self._rng.random()) * each_s
            turns += self._session(session, start, several=session % every == every // 2)
        return turns

    def _turns_each(self) -> float:
        return 1 + self._shape.several * (1 + self._shape.more_turns)

    def _session(self, number: int, at: float, several: bool) -> list[_Turn]:
        prefix = self._rng.choices(self._prefixes, self._popular)[0]
        first, longest = self._first if several else self._context, self._shape.longest
        own = min(first(), longest - len(prefix))
        turns = [_Turn(at, number, prefix + self._fresh(own))]
        between_s = self._shape.engines * self._shape.interval_s
        for _ in range(1 + round(self._more()) if several else 0):
            at += self._gap() * between_s
            chain = turns[-1].chain + self._fresh(self._growth())
            if len(chain) > longest:
                break
            turns.append(_Turn(at, number, chain))
        return turns

    def _fresh(self, blocks: float) -> list[int]:
        start = self._next_block
        self._next_block += max(1, round(blocks))
        return list(range(start, self._next_block))


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
