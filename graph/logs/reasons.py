"""Reasons of misses, rules of evictions and causes of lost copies, with their texts."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Reason(IntEnum):
    """Why the first missing block of a prompt was missing."""

    NEVER_SEEN = 0
    DIVERGED = 1
    EVICTED = 2
    OTHER_ENGINE = 3
    LOAD_SLOWER = 4
    COPY_LOST = 5
    RESET = 6
    NOT_CACHEABLE = 7
    UNKNOWN = 8
    OTHER_SALT = 9
    IN_STORE = 10
    OTHER_GROUP = 11


REASON_NAMES: Final = tuple(reason.name.lower() for reason in Reason)
REASON_TEXTS: Final = {
    "never_seen": "nobody asked for it before, or longer ago than is remembered",
    "diverged": "the prompt went another way than one that began the same",
    "evicted": "it was here, and left the pool",
    "other_engine": "another engine has it, or had it, and this one never did",
    "load_slower": "there is a copy, but loading it would have taken longer than computing",
    "copy_lost": "it left the pool with a copy, or was in the shared store, and the copy is gone",
    "reset": "the prefix cache was reset",
    "not_cacheable": "nothing that can be found was missing: a partial or last block, one that "
    "another request was just computing, or the request reads no cache",
    "unknown": "the sidecar cannot tell: news of it was lost, or what was heard does not explain "
    "it",
    "other_salt": "another tenant asked for the same, under another cache salt",
    "in_store": "it is in the shared store, but loading it would have taken longer than computing, "
    "or the store did not answer in time",
    "other_group": "it is in the pool, but layers of another kind (a sliding window, a state) had "
    "let go of what a match up to there needs of them",
}


class DepartureRule(IntEnum):
    """The rule by which a block was evicted."""

    LRU = 0  # the engine's own order applied
    POLICY = 1  # the ranking put it there
    SUPERSEDED = 2
    SESSION_OVER = 3
    PROTECTED_LAYER = 4  # protected, but no other block was left
    UNRANKED = 5  # the ranking did not contain it
    FORGOTTEN = 6  # it left longer ago than the log reaches
    PROTECTED_SHARE = 7  # its layer is protected, but only up to a share


RULE_NAMES: Final = tuple(rule.name.lower() for rule in DepartureRule)
RULE_TEXTS: Final = (
    "by the engine's own order it was the longest unused",
    "the policy ranked it among the first to go",
    "its session left that branch of its history behind, and nobody else used it",
    "its session is over",
    "it was protected, but nothing else was left to evict, or the engine had gone without advice "
    "for too long to keep it",
    "the engine's last ranking did not name it, as it was newer than that or stood too far down, "
    "so the longest unused went first",
    "longer ago than the log reaches",
    "its layer is protected, but more of it is in the pool than may be kept for its price ([score] "
    "protected_price_points, or protected_share; tenant_share)",
)


class Cause(IntEnum):
    """Why a copy in a colder tier is gone."""

    UNKNOWN = 0
    ROOM = 1  # dropped to make room
    DAMAGED = 2  # it could not be read back
    RESET = 3
    NOT_TAKEN = 4  # the disk refused it
    STORE_GONE = 5  # the shared store no longer has it
    STORE_BROKE = 6  # the shared store listed it, but did not return it


STORE_CAUSES: Final = (Cause.STORE_GONE, Cause.STORE_BROKE)


CAUSE_TEXTS: Final = (
    "for a reason that its engine did not tell",
    "given up to make room for others",
    "it could not be read back",
    "the prefix cache was reset",
    "the disk did not take it",
    "the shared store has it no more",
    "the shared store said that it has it, and did not give it whole and in time",
)


class Detail(IntEnum):
    """Distinguishes the cases of a ``Reason``. For EVICTED the detail is a ``DepartureRule``
    instead, for COPY_LOST a ``Cause``, for OTHER_GROUP an index in ``EngineHello.groups``.
    """

    NONE = 0
    PARTIAL = 1  # NOT_CACHEABLE: the last block is always computed
    UNDER_WAY = 2  # NOT_CACHEABLE: another request was computing it
    OWN_HISTORY = 3  # DIVERGED: from the session's own earlier text
    UNHEARD = 4  # UNKNOWN: events were lost
    IN_POOL = 5  # UNKNOWN: according to the sidecar, the pool had it
    UNCOMPUTED = 6  # UNKNOWN: requested before, but never stored by any known engine
    ELSEWHERE = 7  # OTHER_ENGINE: another engine had it, and no longer does
    READS_NONE = 8  # NOT_CACHEABLE: the request does not read the cache
    APART = 9  # OTHER_SALT: its block has left the pool since
