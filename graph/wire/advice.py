"""The messages from the sidecar to an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ..types import Keys, as_keys
from .events import MAX_NAME, Count, Hashes, Seconds, Total, Unit

PRESSING_SHARE: Final = 0.02
"""Share of a pool: after this much turnover since the last ranking, a new one is made at once (see
``Tables.turnover``), so that a faster engine gets fresher advice. Chosen."""

HOLD_MAX_S: Final = 300.0
"""The longest that a request is held, in seconds. Chosen: releasing a request at the bound costs a
whole prefill that delays resident sessions, so a short bound brings the collapse back; and it is
half of what clients wait (the OpenAI client's default is 600 s)."""

HOLD_PATIENCE_S: Final = 10.0
"""Seconds after which a held request may start once no other is queued; sooner if a pool's worth of
prompts takes less to compute. Chosen: by then there is room, or the engine has time to compute the
context again."""


BlockIds = npt.NDArray[np.int64]
"""Numbers of blocks in an engine's pool; 0 is its null block, which holds no key."""


@dataclass(frozen=True, slots=True, eq=False)
class EvictionRanking:
    """The order in which an engine should evict blocks; immutable.

    It is one type from the graph, which makes it, to the engine's free queue. The engine fills in
    the last four attributes: they are not sent, and None until they are looked up.

    Attributes:
        epoch: Rises by one with each published ranking; 0 before it is published.
        ts: When it was computed, in monotonic seconds of the process that holds it.
        order: uint64 ``[k]`` block keys, evict first → evict last. Holds no protected block.
        protected: uint64 ``[p]`` keys to evict only when nothing else is left, least precious
            first. Where LRU ranks, leased blocks and those that LRU would evict before them come
            first.
        spill_first: uint64 ``[s]`` resident keys worth copying to a colder tier before they are
            evicted, in eviction order. The engine skips blocks that have a copy already, since only
            it knows which.
        demote_first: uint64 ``[w]`` keys of copies in the WARM tier, least worth keeping first.
        known_of: The ranking reflects engine events up to this time (same clock as ``ts``).
        heard: How many of the engine's event batches the ranking reflects.
        may_keep: How many blocks of the pool may be protected or leased; None: not known.
        order_blocks: int64 ``[k]``: the blocks that held the keys of ``order`` when the ranking
            arrived; 0 for a key that none held.
        spill_blocks: int64 ``[s]``: the same for ``spill_first``.
        spill_keys: uint64 ``[s]``: the keys of ``spill_first``, ascending.
        protected_places: Each key of ``protected``, with its index there.
    """

    epoch: int
    ts: float
    order: Keys
    protected: Keys
    spill_first: Keys
    demote_first: Keys
    known_of: float = math.inf
    heard: int = 0
    may_keep: int | None = None
    order_blocks: BlockIds | None = None
    spill_blocks: BlockIds | None = None
    spill_keys: Keys | None = None
    protected_places: dict[int, int] | None = None

    @classmethod
    def empty(cls, ts: float) -> EvictionRanking:
        """Return an empty ranking: the engine keeps its own order."""
        nothing = as_keys([])
        return cls(0, ts, nothing, nothing, nothing, nothing)


@dataclass(frozen=True, slots=True)
class AdmissionAdvice:
    """How much new context an engine has room for.

    Attributes:
        epoch: Rises by one with each new advice.
        ts: When it was computed, in monotonic seconds of the process that holds it.
        room_blocks: Blocks of context that new or cold sessions may still start, counted from
            ``ts``; None: no limit.
        live_sessions: Number of live sessions on the engine.
        fitting_sessions: Number of sessions whose context fits into the pool; only for operators.
        known_of: The advice reflects requests started up to this time (same clock); subtract later
            ones from the room.
        heard: How many of the engine's event batches the advice reflects.
        again: Share of recently requested prompt blocks that were computed again; only for
            operators.
        lifted_pools: How many pools' worth of prompt blocks must be requested before a limit may be
            set again, because the last one saved nothing; 0: at any time. Only for operators.
        wasted: Share of the recently computed prompt blocks that had been computed before. The
            higher it is, the more rarely a request starts without room.
    """

    epoch: int
    ts: float
    room_blocks: int | None
    live_sessions: int
    fitting_sessions: int
    known_of: float = math.inf
    heard: int = 0
    again: float = 0.0
    lifted_pools: int = 0
    wasted: float = 0.0


_BLOCKS: Final = ("order", "protected", "spill_first", "demote_first")  # a ranking's lists, as sent


class Advice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of every sidecar → engine message."""


class RankingMessage(Advice, tag=1, frozen=True):
    """An ``EvictionRanking`` as encoded: its keys as bytes, and its age."""

    epoch: Total  # what an engine reports back
    age_s: Seconds
    order: Hashes
    protected: Hashes
    spill_first: Hashes
    demote_first: Hashes = b""
    heard: Count = 0
    may_keep: Count | None = None

    @classmethod
    def of(cls, ranking: EvictionRanking, now: float) -> RankingMessage:
        """Return the ranking as sent at ``now`` on the sender's clock."""
        age_s = max(0.0, now - ranking.ts)
        order, protected, spill, demote = (packed(getattr(ranking, name)) for name in _BLOCKS)
        lists = order, protected, spill, demote
        return cls(ranking.epoch, age_s, *lists, ranking.heard, ranking.may_keep)

    def at(self, now: float) -> EvictionRanking:
        """Return the ranking with ``ts`` on the clock of the receiver, which received it at
        ``now``. Raises ValueError if its keys are not whole 64-bit numbers.
        """
        order, protected, spill, demote = (as_keys(getattr(self, name)) for name in _BLOCKS)
        return EvictionRanking(
            self.epoch, now - self.age_s, order, protected, spill, demote,
            heard=self.heard, may_keep=self.may_keep,
        )  # fmt: skip


class StillValid(Advice, tag=2, frozen=True):
    """Confirms that ranking ``epoch`` is still valid because nothing has changed."""

    epoch: Total
    age_s: Seconds
    heard: Count = 0


class PrefetchMessage(Advice, tag=3, frozen=True):
    """Spilled blocks to load back, most useful first."""

    order: Hashes


class ResyncRequest(Advice, tag=4, frozen=True):
    """Asks the engine for a new hello and ``BlocksResident`` because events were lost."""

    reason: Annotated[str, msgspec.Meta(max_length=64)]


class Refused(Advice, tag=5, frozen=True):
    """Tells an engine that it gets no advice here, and should not ask again for a while."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class AdmissionMessage(Advice, tag=6, frozen=True):
    """An ``AdmissionAdvice`` as encoded: with its age instead of a time."""

    epoch: Count
    age_s: Seconds
    room_blocks: Count | None
    live_sessions: Count
    fitting_sessions: Count
    heard: Count = 0
    again: Unit = 0.0
    wasted: Unit = 0.0

    @classmethod
    def of(cls, advice: AdmissionAdvice, now: float) -> AdmissionMessage:
        """Return the advice as sent at ``now`` on the sender's clock."""
        age_s = max(0.0, now - advice.ts)
        room, live, fitting = advice.room_blocks, advice.live_sessions, advice.fitting_sessions
        again, wasted = (min(1.0, max(0.0, share)) for share in (advice.again, advice.wasted))
        return cls(advice.epoch, age_s, room, live, fitting, advice.heard, again, wasted)

    def at(self, now: float) -> AdmissionAdvice:
        """Return the advice with ``ts`` on the receiver's clock, which received it at ``now``."""
        said = msgspec.structs.asdict(self)
        return AdmissionAdvice(ts=now - said.pop("age_s"), **said)


class SendTips(Advice, tag=7, frozen=True):
    """Asks the engine to report each chain by its last block only, while the sidecar is overloaded.

    At a request's start this is the last block found in the prefix cache (later blocks are reported
    when stored), at its end the last block of all. The event's ``skipped`` counts the blocks before
    it, whose links the sidecar knows already.
    """

    seconds: Seconds


class ContentKey(Advice, tag=8, frozen=True):
    """The sidecar's own key, with which an engine digests the content of salted prompts.

    Equal prompts under two salts have different hashes but equal digests, so the sidecar can tell
    that only the salt caused a miss. Without the key, guessed prompts cannot be tested against
    digests. Every sidecar creates a new key when it starts and keeps it in memory only.
    """

    key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]


_Undated = StillValid | PrefetchMessage | ResyncRequest | Refused | SendTips | ContentKey
AnyAdvice = EvictionRanking | AdmissionAdvice | _Undated
AnyMessage = RankingMessage | AdmissionMessage | _Undated
"""The types in which ``AnyAdvice`` is encoded."""


def packed(keys: Keys) -> bytes:
    """Return keys as bytes for the wire: eight bytes each, little-endian."""
    return keys.astype("<u8", copy=False).tobytes()
