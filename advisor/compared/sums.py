"""``Sums``: a stretch of time in numbers that can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..happened.happened import Happened


@dataclass(frozen=True, slots=True)
class Sums:
    """What requests asked for and found, and what left; None where the source does not say.

    Attributes:
        asked: Blocks that were asked for.
        blocks: Of these: by where they came from.
        reasons: Requests by why they found no more, and the blocks that they computed for it.
        evicted: Blocks that left; ``wanted``: those of them that were wanted again.
        left_by_layer, left_by_rule: Evictions.
        computed_by: Computed blocks by session.
        block_sizes: Tokens of a block, of each size that the requests' engines have.
    """

    name: str
    seconds: float
    requests: int
    session_count: int | None
    asked_tokens: int
    found_tokens: int
    asked: int
    blocks: Mapping[str, int] | None
    reasons: Mapping[str, tuple[int, int]] | None
    evicted: int | None
    wanted: int | None
    left_by_layer: Mapping[str, int] | None
    left_by_rule: Mapping[str, int] | None
    computed_by: Mapping[str, int] | None
    block_sizes: frozenset[int]

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompts that were not found."""
        return self.asked_tokens - self.found_tokens

    @property
    def share(self) -> float | None:
        """Share of prompt tokens that was found; None before any was asked for."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else None

    @property
    def regret(self) -> float | None:
        """Share of evicted blocks that were wanted again; None where none is known."""
        return self.wanted / self.evicted if self.evicted and self.wanted is not None else None


def sums_of(happened: Happened) -> Sums:
    """Add up what happened, record by record where records reach back to its beginning."""
    reaches = happened.since <= happened.begin or not happened.minutes
    return _of_records(happened) if reaches else _of_minutes(happened)


def _of_records(happened: Happened) -> Sums:
    requests, left = happened.requests, happened.evictions
    blocks = Counter[str]()
    for each in requests:
        blocks.update(each.blocks.model_dump())
    return Sums(
        name=happened.name,
        seconds=happened.end - happened.begin,
        requests=len(requests),
        session_count=len({(each.tenant, each.session) for each in requests if each.session}),
        asked_tokens=sum(each.prompt_tokens for each in requests),
        found_tokens=sum((e.blocks.asked - e.blocks.computed) * e.block_size for e in requests),
        asked=blocks.pop("asked", 0),
        blocks=blocks,
        reasons=_reasons(happened),
        evicted=None if left is None else len(left),
        wanted=None if left is None else sum(e.wanted_after_s is not None for e in left),
        left_by_layer=None if left is None else Counter(each.layer for each in left),
        left_by_rule=None if left is None else Counter(each.rule for each in left),
        computed_by=_by_session(happened),
        block_sizes=_sizes(happened),
    )


def _of_minutes(happened: Happened) -> Sums:
    requests, blocks = Counter[str](), Counter[str]()
    for each in happened.minutes:
        requests.update(each.requests)
        blocks.update(each.blocks)
    minutes = happened.minutes
    return Sums(
        name=happened.name,
        seconds=happened.end - happened.begin,
        requests=requests.total(),
        session_count=None,
        asked_tokens=sum(each.asked for each in minutes),
        found_tokens=sum(each.found for each in minutes),
        asked=sum(each.asked_blocks for each in minutes),
        blocks=None,
        reasons={name: (count, blocks[name]) for name, count in requests.items() if count},
        evicted=sum(each.evicted for each in minutes),
        wanted=sum(each.wanted for each in minutes),
        left_by_layer=None,
        left_by_rule=None,
        computed_by=None,
        block_sizes=_sizes(happened),
    )


def _sizes(happened: Happened) -> frozenset[int]:
    return frozenset(each.block_size for each in happened.requests)


def _reasons(happened: Happened) -> dict[str, tuple[int, int]] | None:
    if not happened.has_reasons:
        return None
    requests, blocks = Counter[str](), Counter[str]()
    for each in happened.requests:
        if each.miss is not None:
            requests[each.miss.reason] += 1
            blocks[each.miss.reason] += each.blocks.computed
    return {reason: (count, blocks[reason]) for reason, count in requests.items()}


def _by_session(happened: Happened) -> Counter[str]:
    computed = Counter[str]()
    for each in happened.requests:
        if each.session is not None:
            of = f" of {each.tenant}" if each.tenant else ""
            computed[each.session + of] += each.blocks.computed
    return computed
