"""Sends advice (rankings, prefetches, admission, resync requests) over the engines' ROUTER."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Final

import zmq

from ...graph.wire import frames
from ...graph.wire.advice import (
    AdmissionAdvice,
    AnyAdvice,
    ContentKey,
    EvictionRanking,
    PrefetchMessage,
    Refused,
    ResyncRequest,
    SendTips,
    StillValid,
    packed,
)
from ..planner import PrefetchOrder
from .subscriber import Peer

TIPS_S: Final = 10.0  # period for which engines are asked to report only last keys; chosen

_NO_ADVICE: Final[Mapping[str, AdmissionAdvice]] = MappingProxyType({})


class AdvicePublisher:
    """Sends each engine its newest ranking, or a few bytes if it has not changed.

    Sending never blocks: messages that an engine cannot take now are dropped and counted, and the
    next ranking supersedes them. The ROUTER has ``ROUTER_MANDATORY`` set.
    """

    def __init__(self, socket: zmq.Socket[bytes], clock: Callable[[], float]) -> None:
        self._socket = socket
        self._clock = clock
        self._unreachable: set[bytes] = set()
        self._seq: dict[bytes, int] = {}
        self._epoch: dict[bytes, int] = {}  # the last ranking that an engine was sent whole
        self._ts: dict[bytes, float] = {}
        self._wanted: dict[bytes, PrefetchOrder] = {}  # the last that an engine was sent
        self._admitted: dict[bytes, float] = {}  # ``ts`` of the last admission advice sent
        # The advice that was published last, and to which peers; None: a part was not sent.
        self._published: tuple[object, ...] | None = None
        self._tips_asked = float("-inf")
        self._content_key = ContentKey(secrets.token_bytes(32))
        self._keyed: dict[bytes, bool] = {}  # engines, and whether they took the key
        self.counters: Counter[str] = Counter()

    def publish(
        self,
        peers: Iterable[Peer],
        rankings: Mapping[str, EvictionRanking],
        wanted: Mapping[str, PrefetchOrder],
        admissions: Mapping[str, AdmissionAdvice] = _NO_ADVICE,
    ) -> None:
        """Send what is new. The mappings must be replaced, not changed: an unchanged mapping is not
        scanned again, since this is called far more often than there is news.
        """
        peers = list(peers)
        standing = [(peer.identity, peer.synced) for peer in peers]
        asked = (rankings, wanted, admissions)
        if self._published is not None:
            *before, stood = self._published
            if stood == standing and all(map(is_, before, asked)):
                return
        self._forget_all_but({peer.identity for peer in peers})
        self._published = *asked, standing
        for peer in peers:
            if not peer.synced:
                self._epoch.pop(peer.identity, None)  # whole again after the resync
                continue
            if (ranking := rankings.get(peer.engine)) is not None:
                self._send_ranking(peer.identity, ranking)
            if (order := wanted.get(peer.engine)) is not None:
                self._send_order(peer.identity, order)
            if (advice := admissions.get(peer.engine)) is not None:
                self._send_admission(peer.identity, advice)

    def take_unreachable(self) -> set[bytes]:
        """Return engines found disconnected when last written to, each once."""
        gone, self._unreachable = self._unreachable, set()
        return gone

    def request_resync(self, identity: bytes, reason: str) -> None:
        """Ask the engine at ``identity`` to send its hello and list its blocks again."""
        self._send(identity, ResyncRequest(reason))

    def ask_for_tips(self, peers: Iterable[Peer]) -> None:
        """Ask engines to report only each chain's last key for a time; renewed before it ends."""
        now = self._clock()
        if now - self._tips_asked >= TIPS_S / 4:
            self._tips_asked = now
            for peer in peers:
                self._send(peer.identity, SendTips(TIPS_S))
            self.counters["tips_asked"] += 1

    def give_key(self, peers: Iterable[Peer]) -> None:
        """Send each engine, once, the key for digests of salted prompts."""
        for peer in peers:
            if peer.synced and not self._keyed.get(peer.identity):
                self._keyed[peer.identity] = self._send(peer.identity, self._content_key)

    def refuse(self, identity: bytes, reason: str) -> None:
        """Tell the engine at ``identity`` why it gets no advice."""
        self._send(identity, Refused(reason))

    def _send_ranking(self, identity: bytes, ranking: EvictionRanking) -> None:
        if self._ts.get(identity) == ranking.ts:
            return
        age_s = max(0.0, self._clock() - ranking.ts)
        whole = self._epoch.get(identity) != ranking.epoch
        still = StillValid(ranking.epoch, age_s, ranking.heard)
        if not self._send(identity, ranking if whole else still):
            return
        self._epoch[identity] = ranking.epoch
        self._ts[identity] = ranking.ts
        self.counters["rankings" if whole else "still_valid"] += 1

    def _send_order(self, identity: bytes, order: PrefetchOrder) -> None:
        """Send a prefetch order, and an empty one once there is nothing left to prefetch."""
        # An engine without room for a whole order waits for the next one.
        before = self._wanted.get(identity)
        told = len(before.keys) if before is not None else 0
        if (before is not None and before.ts == order.ts) or not (told or len(order.keys)):
            return
        if self._send(identity, PrefetchMessage(packed(order.keys))):
            self._wanted[identity] = order
            self.counters["prefetch"] += 1

    def _send_admission(self, identity: bytes, advice: AdmissionAdvice) -> None:
        if self._admitted.get(identity) == advice.ts:
            return
        if self._send(identity, advice):
            self._admitted[identity] = advice.ts
            self.counters["admissions"] += 1

    def _send(self, identity: bytes, advice: AnyAdvice) -> bool:
        seq = self._seq.get(identity, 0)
        message = frames.encode_advice(seq, advice, self._clock())
        try:
            self._socket.send_multipart([identity, *message], zmq.NOBLOCK)
        except zmq.Again:
            self.counters["dropped_full"] += 1
            self._published = None
            return False
        except zmq.ZMQError as error:
            self._published = None
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters["dropped_unreachable"] += 1
            self._unreachable.add(identity)
            return False
        self._seq[identity] = seq + 1
        return True

    def _forget_all_but(self, live: set[bytes]) -> None:
        tables = self._seq, self._epoch, self._ts, self._wanted, self._admitted, self._keyed
        for table in tables:
            for identity in [known for known in table if known not in live]:
                del table[identity]
