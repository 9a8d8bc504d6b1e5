"""What a sidecar uses of a core while an engine tells it of 200 requests a second."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from ...graph.messages.events import BlocksRemoved, BlocksStored, RequestFinished, RequestStarted
from ...graph.types import Keys
from ...hooks.fake import FakeEngine
from ..errors import BenchError
from ..graph.graphs import random_keys
from ..sidecars.sidecar_process import SidecarProcess, wait_until

REQUESTS_PER_S: Final = 200
SESSIONS: Final = 100  # that are alive at once; chosen
TURNS: Final = 20  # of a session; chosen
_TICK_S: Final = 0.05
_SETTLE_S: Final = 4.0  # until all sessions have begun and the first rankings are made


@dataclass
class _Session:
    name: str
    chain: Keys
    turn: int = 0


class SessionFeed(FakeEngine):
    """An engine's events without its memory: sessions that grow turn by turn, and go.

    A session begins with half of ``blocks`` blocks and ends after ``turns`` with half as many more,
    so that a request has so many on average; then its blocks leave the pool.

    Args:
        endpoint: The sidecar's.
        blocks: Of a request.
        turns: Of a session; 1: every block of every request is new.
    """

    def __init__(self, endpoint: str, blocks: int, turns: int = TURNS) -> None:
        super().__init__(endpoint, num_blocks=2 * blocks * SESSIONS, name=f"feed-{blocks}")
        self._rng = np.random.default_rng(blocks)
        self._turns = turns
        self._begins = blocks if turns == 1 else blocks // 2
        self._grows = 0 if turns == 1 else max(1, blocks // turns)
        self._sessions: list[_Session | None] = [None] * SESSIONS
        self._begun = 0

    def request(self) -> None:
        """Tell of one request: the next session's next turn."""
        at = self._requests % SESSIONS
        session = self._sessions[at]
        if session is None or session.turn == self._turns:
            self._leave(session)
            session = self._sessions[at] = self._new_session()
        held = len(session.chain) if session.turn else 0
        if session.turn:
            new = random_keys(self._rng, self._grows)
            session.chain = np.concatenate([session.chain, new])
        session.turn += 1
        self._requests += 1
        self._tell(session, held)

    def resident(self) -> bytes:
        """See ``EngineEnd``."""
        return b"".join(each.chain.tobytes() for each in self._sessions if each is not None)

    def _new_session(self) -> _Session:
        self._begun += 1
        return _Session(f"session-{self._begun}", random_keys(self._rng, self._begins))

    def _leave(self, session: _Session | None) -> None:
        if session is not None:
            self.client.emit(BlocksRemoved(session.chain[::-1].tobytes()))

    def _tell(self, session: _Session, held: int) -> None:
        name, packed, size = f"r{self._requests}", session.chain.tobytes(), self.block_size
        tokens, emit = len(session.chain) * size, self.client.emit
        emit(RequestStarted(name, packed, tokens, held * size, size, session.name, None))
        if held < len(session.chain):
            parent = int(session.chain[held - 1]) if held else None
            emit(BlocksStored(session.chain[held:].tobytes(), parent, size, session.name))
        ended = "finished_stopped"
        emit(RequestFinished(name, packed, tokens, tokens, ended, session.name, None))


def sidecar_cpu_percent(
    blocks: int, turns: int = TURNS, rounds: int = 3, seconds: float = 10.0
) -> list[float]:
    """Percent of a core that a sidecar uses under such a feed, once a round.

    Raises:
        BenchError: The feed did not reach its rate, or had to drop events.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        SidecarProcess(Path(folder), policy__guard="true") as sidecar,
        SessionFeed(sidecar.endpoint, blocks, turns) as feed,
    ):
        if not wait_until(lambda: feed.client.standing.linked, 30):
            raise BenchError("the sidecar did not answer its engine within 30 s")
        _feed(feed, _SETTLE_S)
        samples = [_cpu_share(sidecar, feed, seconds) for _ in range(rounds)]
        if feed.client.dropped:
            raise BenchError(f"{feed.client.dropped} events were dropped: the sidecar is too slow")
    return samples


def _cpu_share(sidecar: SidecarProcess, feed: SessionFeed, seconds: float) -> float:
    before, began = _cpu_s(sidecar.process), time.perf_counter()
    sent = _feed(feed, seconds)
    passed = time.perf_counter() - began
    if sent < 0.98 * REQUESTS_PER_S * passed:
        raise BenchError(f"the feed told of {sent / passed:.0f} requests/s, not {REQUESTS_PER_S}")
    return 100 * (_cpu_s(sidecar.process) - before) / passed


def _feed(feed: SessionFeed, seconds: float) -> int:
    """Tell of requests at an even pace; how many they were."""
    sent, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        while sent < passed * REQUESTS_PER_S:
            feed.request()
            sent += 1
        time.sleep(_TICK_S)
    return sent


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
