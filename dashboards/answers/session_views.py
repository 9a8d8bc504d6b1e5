"""``/v1/sessions`` and ``/v1/sessions/NAME``: who is here, and one of them over time."""

from __future__ import annotations

from typing import Any

from .answer import Answer, Part
from .graph_view import Moment


class SessionView(Part):
    """One session.

    Attributes:
        state: ``idle``, ``running``, ``waiting_for_tool``, ``ended``.
        inferred: Nobody named it: it was told from its blocks.
        tokens: Of its last prompt, with the answer once that is known.
        pool, warm, cold: Blocks in each tier of any engine.
        engine: That ran its last request.
        chain: Blocks of its last request, from its prompt's start; 0: nobody knows them.
        chain_pool: How many of these, from the start, are in that engine's pool.
        chain_copied: How many are there or in that engine's tiers below.
        chain_shared: How many are in a store that engines share.
    """

    session: str
    tenant: str | None
    state: str
    inferred: bool
    turns: int
    tokens: int
    idle_s: float
    mean_pause_s: float
    waits_for: str | None
    expected_return_in_s: float | None
    return_probability: float
    pool: int
    warm: int
    cold: int
    blocks: int
    engine: str | None
    chain: int
    chain_pool: int
    chain_copied: int
    chain_shared: int


class Sessions(Answer):
    """Sessions, those heard of last first; ``known`` is how many there are, ``states`` counts."""

    sessions: list[SessionView]
    known: int
    states: dict[str, int]


class Turn(Part):
    """One turn: when it was scheduled and ended, and the pause that followed.

    Attributes:
        waited_s: From its arrival until ``at``; 0 where its engine does not tell.
        ended_at: None while it runs; its beginning, where its end was not heard of.
        pause_s: Until the next turn arrived; None: there was none yet.
        expected_pause_s: As it was expected when the turn ended; None: nobody said.
        found_blocks: Blocks of its prompt that it found.
    """

    request: int
    at: float
    waited_s: float
    ended_at: float | None
    prompt_tokens: int
    found_blocks: int
    computed_blocks: int
    pause_s: float | None
    expected_pause_s: float | None


class Residency(Part):
    """Blocks of the session by tier over time, the oldest first."""

    starts: list[float]
    pool: list[int]
    warm: list[int]  # with a copy there, whether the pool has them too or not
    cold: list[int]


class SessionTimeline(Answer):
    """One session: ``explain`` is what ``/sessions/NAME/explain`` says.

    ``moments`` are the newest first; ``turns`` the oldest first.

    Attributes:
        since: The request of the mark that was asked with: turns, moments and residency begin with
            it. None: all is told.
        mark: To ask with for what comes next; None while no turn is over.
    """

    session: SessionView
    explain: dict[str, Any]
    turns: list[Turn]
    residency: Residency
    moments: list[Moment]
    since: int | None
    mark: str | None
