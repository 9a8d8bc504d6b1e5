"""``Happened``: what is known of a stretch of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...dashboards.answers.evictions import EvictionView
from ...dashboards.answers.misses import RequestView

_LONGEST_RECORDING_S: Final = 1e6
"""Times beyond are Unix seconds: eleven days, and 1970. Chosen."""

NOT_RECORDED = "not recorded"
"""Stands for the rule of an eviction in a recording: it holds no rankings."""


@dataclass(frozen=True, slots=True)
class BlockLife:
    """A stretch that a block spent in an engine's pool.

    Attributes:
        begin: When it was stored; where only its last use is known, that.
        since_use: Whether ``begin`` is its last use.
        end: When it left; None: it was still there.
        why: Why it left; None where it did not.
    """

    engine: str
    key: str
    layer: str
    session: str | None
    begin: float
    since_use: bool
    end: float | None
    why: str | None


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """How many blocks an engine's pool held at a moment."""

    at: float
    engine: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Minute:
    """What one minute brought: all that is known where the logs of records do not reach.

    Attributes:
        asked, found: Tokens of prompts.
        asked_blocks: Their full blocks, each of its own engine's size.
        evicted, wanted: Blocks that left, and blocks that were wanted again by then.
        requests, blocks: By reason: requests, and what they computed.
    """

    at: float
    asked: int
    found: int
    asked_blocks: int
    evicted: int
    wanted: int
    requests: Mapping[str, int]
    blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Happened:
    """What is known of a stretch of time; all of it in the order in which it happened.

    Times are Unix seconds, or seconds since the beginning of a recording.

    Attributes:
        name: Where it came from, for people.
        engines: Engines' names by their ids.
        evictions: None: the source tells of none.
        has_reasons: Whether requests say why they found no more.
        minutes: Sums that reach back further than the records do.
        since: What the records reach back to; before it there are minutes alone.
        unknown: What is missing, in sentences.
    """

    name: str
    begin: float
    end: float
    engines: Mapping[str, str]
    requests: Sequence[RequestView]
    evictions: Sequence[EvictionView] | None
    lives: Sequence[BlockLife]
    pools: Sequence[PoolPoint]
    has_reasons: bool
    unknown: Sequence[str]
    minutes: Sequence[Minute] = ()
    since: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether its times are Unix seconds, and not those of a recording."""
        return self.begin > _LONGEST_RECORDING_S

    def between(self, begin: float, end: float, name: str) -> Happened:
        """What of it happened from ``begin`` until before ``end``."""
        left = self.evictions
        return replace(
            self,
            name=name,
            begin=begin,
            end=end,
            requests=[each for each in self.requests if begin <= each.at < end],
            evictions=None if left is None else [e for e in left if begin <= e.at < end],
            lives=[each for each in self.lives if begin <= each.begin < end],
            pools=[each for each in self.pools if begin <= each.at < end],
            minutes=[each for each in self.minutes if begin <= each.at < end],
        )

    def knowing_less(self, of_what: str) -> Happened:
        """The same, where one thing more is not known."""
        return replace(self, unknown=[*self.unknown, of_what])
