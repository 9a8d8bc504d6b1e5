"""``/v1/now``: one screen that answers whether it is helping."""

from __future__ import annotations

from .answer import Answer, Notice, Part
from .engine_views import RoomView


class TokenWindow(Part):
    """Where the tokens of prompts came from, over the last ``seconds``.

    ``asked`` is the sum of pool, loaded, prefetched and computed.

    Attributes:
        pool: Found in an engine's pool, where requests had left them.
        loaded: Brought back from a colder tier for a request that waited.
        prefetched: Found in the pool because they were brought back before anyone asked.
        lru: What stock LRU would have found in a pool as large; None where no shadow counts.
        saved_s: Seconds of computing that cached tokens stand for, at the measured prefill rate;
            None before one was measured.
        saved_beside_lru_s: Of these: beyond what LRU would have saved; may be negative.
        verdict: One sentence: whether it is helping, and by how much.
    """

    seconds: float
    requests: int
    asked: int
    pool: int
    loaded: int
    prefetched: int
    computed: int
    lru: int | None
    saved_s: float | None
    saved_beside_lru_s: float | None
    verdict: str


class TokenHistory(Part):
    """The same over time, a column each, the oldest first; ``starts`` are the steps' beginnings."""

    step_s: float
    starts: list[float]
    requests: list[int]
    asked: list[int]
    pool: list[int]
    loaded: list[int]
    prefetched: list[int]
    computed: list[int]
    lru: list[int | None]


class PoolView(Part):
    """What an engine's pool holds, in blocks.

    Attributes:
        blocks: The pool's size; None where the engine never said.
        layers: Cached blocks by source layer, all ten of them.
        states: Cached blocks by what their session does: running, waiting_for_tool, idle, ended,
            or none for blocks of no session.
        protected: Of these: kept by their layer.
        protection: What is kept whatever scores say, and what that costs, in words.
    """

    engine: str
    name: str
    blocks: int | None
    cached: int
    layers: dict[str, int]
    states: dict[str, int]
    protected: int
    protection: str


class TierFill(Part):
    """How full one tier of one engine is; bytes are one worker's."""

    engine: str
    tier: str
    blocks: int
    capacity: int
    bytes: int


class AdviceAge(Part):
    """How old the advice is that an engine has, and who made it.

    Attributes:
        ranked_by: The policy's name, or ``lru`` where the guard lets the engine keep its order.
    """

    engine: str
    age_s: float | None
    epoch: int | None
    ranked_by: str


class Now(Answer):
    """Everything on the first screen.

    Attributes:
        verdict: That of the longest window in which anything was asked.
        windows: The last minute, ten minutes, hour and four hours; the newest first.
        prefill_tokens_per_s: As engines measured it; None before that.
        stale_s: With advice older than this an engine evicts as stock vLLM does.
        rooms: Of engines that hold a request, began one lately that they had held, or hold none
            since that saved nothing.
        attention: What needs it, the most serious first; empty when nothing does.
    """

    verdict: str
    windows: list[TokenWindow]
    history: TokenHistory
    prefill_tokens_per_s: float | None
    pools: list[PoolView]
    tiers: list[TierFill]
    stale_s: float
    advice: list[AdviceAge]
    rooms: list[RoomView]
    attention: list[Notice]
