"""The messages from the sidecar to an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ..types import Keys, as_keys
from .events import MAX_NAME, Count, Hashes, Seconds, Unit

PRESSING_SHARE: Final = 0.02
"""Share of a pool: when so much happened since the last ranking, a new one is made at once (see
``Tables.turnover``). So the faster an engine evicts, the younger is its advice. Chosen."""

HOLD_MAX_S: Final = 300.0
"""The longest that a request is held. Chosen: a request released by the bound costs a whole
prefill, during which no resident session is answered, so that a short bound brings the collapse
back; and it is half of what clients wait (the OpenAI client's default is 600 s)."""

HOLD_PATIENCE_S: Final = 10.0
"""A request held for as long may start when nobody else is queued, and earlier where a whole pool
of prompts takes less to compute. Chosen: room comes by then, or the engine has time to compute the
context again."""


@dataclass(frozen=True, slots=True, eq=False)
class EvictionRanking:
    """One immutable opinion about which blocks an engine should evict first.

    One type from the graph that makes it to the engine that applies it.

    Attributes:
        epoch: Rises by one with each ranking that is published; 0 before.
        ts: When it was true, in monotonic seconds of the process that holds it.
        order: uint64 ``[k]`` block keys, evict first → evict last. Holds no protected block.
        protected: uint64 ``[p]`` keys that should go only when nothing else is left, least precious
            first. Where LRU ranks, leased blocks and what stands before them come first.
        spill_first: uint64 ``[s]`` resident keys that are worth a copy before they go, in the order
            in which they will. Which of them have one, only the engine knows: it may drop one
            meanwhile.
        demote_first: uint64 ``[w]`` keys of copies in the WARM tier, least worth keeping first.
        known_of: The ranking does not know what the engine did after this time (same seconds).
        heard: How many of the engine's batches the ranking knows.
    """

    epoch: int
    ts: float
    order: Keys
    protected: Keys
    spill_first: Keys
    demote_first: Keys
    known_of: float = math.inf
    heard: int = 0

    @classmethod
    def empty(cls, ts: float) -> EvictionRanking:
        """One that names no block."""
        nothing = as_keys([])
        return cls(0, ts, nothing, nothing, nothing, nothing)


@dataclass(frozen=True, slots=True)
class AdmissionAdvice:
    """One opinion about how much new context an engine has room for.

    Attributes:
        epoch: Rises by one with each new opinion.
        ts: When it was true, in monotonic seconds of the process that holds it.
        room_blocks: Blocks of context of new or cold sessions that may still start, counted from
            ``ts``; None: without a limit.
        live_sessions: Sessions that are live on the engine.
        fitting_sessions: Sessions that fit, for people to read.
        known_of: The opinion does not know what the engine started after this time (same
            seconds): subtract it from the room.
        heard: How many of the engine's batches the opinion knows.
        again: Share of the prompt blocks asked lately that were computed again: the more, the more
            rarely anybody starts for whom there is no room.
        lifted_pools: Pools' worth of prompt blocks to be asked before there may be a limit again,
            since one saved nothing; 0: there may be one at any time. For people.
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


_BLOCKS: Final = ("order", "protected", "spill_first", "demote_first")  # of a ranking, as sent


class Advice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of every sidecar → engine message."""


class RankingMessage(Advice, tag=1, frozen=True):
    """An ``EvictionRanking`` on the wire; ``age_s`` is its age when it was sent."""

    epoch: int
    age_s: Seconds
    order: Hashes
    protected: Hashes
    spill_first: Hashes
    demote_first: Hashes = b""
    heard: Count = 0

    @classmethod
    def of(cls, ranking: EvictionRanking, age_s: float) -> RankingMessage:
        """The message for a ranking."""
        order, protected, spill, demote = (packed(getattr(ranking, name)) for name in _BLOCKS)
        return cls(ranking.epoch, age_s, order, protected, spill, demote, ranking.heard)

    def at(self, now: float) -> EvictionRanking:
        """The ranking, dated in the receiver's own clock."""
        order, protected, spill, demote = (as_keys(getattr(self, name)) for name in _BLOCKS)
        ts, heard = now - self.age_s, self.heard
        return EvictionRanking(self.epoch, ts, order, protected, spill, demote, heard=heard)


class StillValid(Advice, tag=2, frozen=True):
    """Says that ranking ``epoch`` still holds: nothing changed since."""

    epoch: int
    age_s: Seconds
    heard: Count = 0


class PrefetchMessage(Advice, tag=3, frozen=True):
    """Spilled blocks worth bringing back, best first."""

    order: Hashes


class ResyncRequest(Advice, tag=4, frozen=True):
    """Asks for another hello and ``BlocksResident``: events were lost."""

    reason: Annotated[str, msgspec.Meta(max_length=64)]


class Refused(Advice, tag=5, frozen=True):
    """Says that this engine gets no advice here; it should not ask again for a while."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class AdmissionMessage(Advice, tag=6, frozen=True):
    """An ``AdmissionAdvice`` on the wire; ``age_s`` is its age when it was sent."""

    epoch: Count
    age_s: Seconds
    room_blocks: Count | None
    live_sessions: Count
    fitting_sessions: Count
    heard: Count = 0
    again: Unit = 0.0

    @classmethod
    def of(cls, advice: AdmissionAdvice, age_s: float) -> AdmissionMessage:
        """The message for an opinion."""
        room, live, fitting = advice.room_blocks, advice.live_sessions, advice.fitting_sessions
        again = min(1.0, max(0.0, advice.again))
        return cls(advice.epoch, age_s, room, live, fitting, advice.heard, again)

    def at(self, now: float) -> AdmissionAdvice:
        """The opinion, dated in the receiver's own clock."""
        return AdmissionAdvice(
            self.epoch,
            now - self.age_s,
            self.room_blocks,
            self.live_sessions,
            self.fitting_sessions,
            heard=self.heard,
            again=self.again,
        )


class SendTips(Advice, tag=7, frozen=True):
    """The sidecar is overloaded: for so long, requests shall be told by their tips.

    That is one key: at a request's start of the last block that the prefix cache holds (those
    behind it are told as they are stored), at its end of the last of all. ``skipped`` says how many
    blocks are before it: their links are known.
    """

    seconds: Seconds


class ContentKey(Advice, tag=8, frozen=True):
    """The sidecar's own key, with which an engine digests what salted prompts say.

    Prompts of two salts that say the same have different hashes, but the same digest. So the
    sidecar can tell that a miss is the salt's doing; without the key nobody can try out prompts
    against digests. It is made anew by every sidecar, and kept in memory only.
    """

    key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]


AnyAdvice = (
    RankingMessage
    | StillValid
    | PrefetchMessage
    | ResyncRequest
    | Refused
    | AdmissionMessage
    | SendTips
    | ContentKey
)


def packed(keys: Keys) -> bytes:
    """Keys as they are sent: eight bytes each, little-endian."""
    return keys.astype("<u8", copy=False).tobytes()
