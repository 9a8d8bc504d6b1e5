"""``/v1/requests`` and ``/v1/misses``: what prompts found, and why they did not find more."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .answer import Answer, Part


class BlockCounts(Part):
    """Full blocks of one prompt by where they came from; they add up to ``asked``."""

    asked: int
    pool: int
    loaded: int
    prefetched: int
    spliced: int
    computed: int


class Miss(Part):
    """The first block that a prompt did not find, and why; decided when it happened, or when it
    was heard what its step evicted, within 2 s.

    Attributes:
        index: Which block of the prompt it is, from 0.
        reason: One of ``never_seen``, ``diverged``, ``evicted``, ``other_engine``,
            ``load_slower``, ``copy_lost``, ``reset``, ``not_cacheable``, ``unknown``,
            ``other_salt``, ``in_store``, ``other_group``.
        sentence: The reason in words, with names, times and rules.
        key: The block; None for one that has no key (a partial block).
        token: For ``diverged``: the first of the prompt's tokens, from 0, that differs from another
            recent prompt; None where its engine has not both.
        session: The other session that it is about: from which this one diverged, or whose the
            block was; None where there is none.
        engine: The engine that has the block, for ``other_engine``.
        eviction: The eviction's ``id`` in ``/v1/evictions`` of the request's engine; None where
            none is known.
        evicted_at: When it left; None where it did not.
    """

    index: int
    reason: str
    sentence: str
    key: str | None
    token: int | None
    session: str | None
    tenant: str | None
    engine: str | None
    eviction: int | None
    evicted_at: float | None


class Wait(Part):
    """What an engine did while a request waited for its turn there.

    Attributes:
        prompts: That were begun in that time.
        tokens: That were computed for these; where there were none, for the last one begun before
            that was under way.
        again: Of these tokens: how many had been in the engine's pool before.
        largest: The request's ``id`` for which most was computed; None where nothing was.
        held_s: How long of it the request was held until there was room for its context; 0: it
            was not held.
        until: Why it was held no longer: ``room``, ``bound``, ``idle``, ``open``, ``silence`` or
            ``patience``; None: it was not held.
        sentence: All that in words.
    """

    prompts: int
    tokens: int
    again: int
    largest: int | None
    held_s: float = 0.0
    until: str | None = None
    sentence: str


class Remedy(Part):
    """What would have made a request faster.

    Attributes:
        of: Which part of its time: ``wait``, ``prompt`` or ``answer``.
        saves_s: How much of that, at most; 0: nothing could; None: nobody can tell.
        text: The remedy in words.
    """

    of: Literal["wait", "prompt", "answer"]
    saves_s: float | None
    text: str


class RequestView(Part):
    """One request as its engine first scheduled it.

    Attributes:
        id: Its place in the log.
        request: What its engine calls it.
        at: When it was first scheduled, in Unix seconds.
        waited_s: From its arrival until then; 0 where its engine does not tell.
        wait: What it waited for; None where it hardly waited.
        prompt_tokens: All of them, the partial block at the end included.
        block_size: Tokens of a block.
        again: Of the blocks that it computed: how many had been in this pool before.
        finished: Why it ended; ``end_not_heard`` where its end was not heard of, or not yet; None:
            it runs.
        is_awaited: Whether its end may still be heard of: it runs, or its engine lost news less
            than ten minutes ago. Of others nothing changes any more.
        ended_at: When; None while it runs, or where that was not heard of.
        answer_tokens: Tokens of its answer; None while it runs.
        expected_pause_s: How long its session said that it would pause then.
        prompt_s: How long of its time its prompt took to compute, by the speed that its engine
            measured; None while it runs, or where none was measured.
        miss: Why no more was found; ``not_cacheable`` where nothing that can be found is missing.
        remedies: What would have made it faster, what saves most first.
    """

    id: int
    request: str
    engine: str
    session: str | None
    tenant: str | None
    at: float
    waited_s: float = 0.0
    wait: Wait | None = None
    prompt_tokens: int
    block_size: int
    blocks: BlockCounts
    again: int = 0
    finished: str | None
    is_awaited: bool = False
    ended_at: float | None
    answer_tokens: int | None = None
    expected_pause_s: float | None
    prompt_s: float | None = None
    miss: Miss | None
    remedies: tuple[Remedy, ...] = ()

    @property
    def arrived(self) -> float:
        """When it reached its engine, in Unix seconds: a pause before it lasts until then."""
        return self.at - self.waited_s


class RequestsAsked(NamedTuple):
    """Which requests are asked for.

    Attributes:
        limit: So many at most.
        before: Only those that began before this one; None: all.
        session: Only this one's; None: all.
        search: Only those whose id, session or tenant contains this.
        reason: Only those that missed for this one; None: all.
        is_slowest: Whether those that took longest come first, and not the newest.
    """

    limit: int
    before: int | None = None
    session: str | None = None
    search: str = ""
    reason: str | None = None
    is_slowest: bool = False


class Requests(Answer):
    """Recent requests, the newest first.

    Attributes:
        next: Of the last one, if there are more.
        since: When the oldest began that the log remembers; None where that is not known.
    """

    requests: list[RequestView]
    next: int | None
    since: float | None


class ReasonTotal(Part):
    """One reason since the sidecar's start: requests, and the blocks that they computed for it."""

    requests: int
    blocks: int


class Loss(Part):
    """Blocks computed again though they had been computed before, by whom they were to serve.

    Attributes:
        multi_turn: Their own session's: its next turn found less than it left.
        cross_session: Shared ones, that another session had computed.
        capacity_multi_turn: Blocks of pool that would have ended it, by the reuse distances of
            what was lost; None where nothing was lost, or none is known.
    """

    multi_turn: int
    cross_session: int
    capacity_multi_turn: int | None
    capacity_cross_session: int | None


class Misses(Answer):
    """Misses by reason: totals, and over time in steps, the oldest first.

    Attributes:
        reasons: Every reason code, in the order in which to show them, and what it means.
        requests: By reason: how many requests in each step.
        blocks: By reason: how many blocks they computed in each step.
        asked, found: Tokens of prompts in each step, and how many of them were found.
        asked_blocks: Full blocks of prompts in each step, each of its own engine's size.
        evicted: Blocks that left a pool in each step.
        wanted: Blocks that were wanted again in each step, within ten minutes after they had left.
    """

    reasons: dict[str, str]
    totals: dict[str, ReasonTotal]
    step_s: float
    starts: list[float]
    requests: dict[str, list[int]]
    blocks: dict[str, list[int]]
    asked: list[int]
    asked_blocks: list[int]
    found: list[int]
    evicted: list[int]
    wanted: list[int]
    loss: Loss
