"""``kvgraph bench sidecar``: what a sidecar uses, and how old its advice is, by load."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from kvgraph.graph.types import Keys
from kvgraph.graph.wire.events import (
    AdviceApplied,
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    Pressure,
    RequestFinished,
    RequestStarted,
)
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.vllm.meters import UrgentFlush
from rich.console import Console

from ..errors import BenchError
from ..figures import Figures
from ..graph.graphs import random_keys
from .sidecar_process import SidecarProcess, wait_until

REQUESTS_PER_S: Final = 200
# All chosen.
SESSIONS: Final = 200  # that are alive at once: each has a turn every second
TURNS: Final = 20  # of a session
_STEP_S: Final = 0.025  # of an engine
_ANSWER_STEPS: Final = 16  # of a request: one block is answered, a token a step
_SHARED: Final = 1 / 8  # of a request: what all sessions begin with
_ROOM: Final = 1.25  # the pool, by what live sessions hold: what ended stays until it is evicted


@dataclass(frozen=True)
class Load:
    # told in steps of 25 ms, or longer ones in which one request starts
    requests_per_s: float = REQUESTS_PER_S
    sessions: int = SESSIONS  # that are alive at once

    @property
    def a_step(self) -> int:
        return max(1, round(self.requests_per_s * _STEP_S))

    @property
    def step_s(self) -> float:
        return self.a_step / self.requests_per_s


@dataclass(eq=False)
class _Session:
    name: str
    chain: Keys
    turn: int = 0
    held: int = 0


@dataclass(frozen=True)
class _Request:
    name: str
    session: _Session
    tokens: int
    ends: int  # in which step


class SessionFeed(FakeEngine):
    """An engine's events without its memory, in the order and at the times of vLLM's steps.

    Each session's turn extends the one before by a prompt and one block of an answer. A step tells
    of the requests that start, of what they and the answers store, of as many blocks that are
    evicted as soon as the pool is full (the longest unused, tail first), and then of the requests
    that end. A session begins with half of ``blocks`` blocks and ends after ``turns`` with half as
    many more, so that a request has so many on average. What is told is sent as an engine's client
    sends it: every 0.2 s, or when much was stored.
    """

    def __init__(
        self,
        endpoint: str,
        blocks: int,
        turns: int = TURNS,
        load: Load | None = None,
        number: int = 0,
    ) -> None:
        self.load = load = load or Load()
        pool = int(_ROOM * blocks * load.sessions)
        super().__init__(endpoint, num_blocks=pool + 1, name=f"feed-{blocks}-{number}")
        self._rng = np.random.default_rng(blocks)
        self._number = number
        self._turns, self._pool = turns, pool
        self._begins = blocks if turns == 1 else blocks // 2
        self._grows = max(1, blocks // turns - 1)
        self._shared = random_keys(self._rng, 0 if turns == 1 else int(_SHARED * blocks))
        self._rng = np.random.default_rng((blocks, number + 1))  # numpy takes (n, 0) for n
        self._live: list[_Session | None] = [None] * load.sessions
        self._running: deque[_Request] = deque()
        self._idle: OrderedDict[str, _Session] = OrderedDict()  # the longest unused first
        self._begun = self._step = self._stored = 0
        self._held = len(self._shared)
        self._news = UrgentFlush(self.num_blocks, self.client.nudge)

    def step(self) -> None:
        self._step += 1
        started = [self._start() for _ in range(self.load.a_step)]
        ended: list[_Request] = []
        while self._running and self._running[0].ends <= self._step:
            ended.append(self._running.popleft())
            self._answer(ended[-1].session)
        told: list[AnyEvent] = [self._told(each) for each in started]
        told += [self._keep(each.session) for each in (*started, *ended)]
        if self._held > self._pool:
            told.append(BlocksRemoved(self._evicted(self._held - self._pool)))
        told += [self._over(each) for each in ended]
        for event in told:
            self.client.emit(event)
        self._running.extend(started)
        self._news.after_step(self._stored)

    def resident(self) -> bytes:
        first, sessions = len(self._shared), list(self._idle.values())
        sessions += [each.session for each in list(self._running)]
        parts = [each.chain[first : each.held].tobytes() for each in sessions]
        return b"".join([self._shared.tobytes(), *parts])

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        free = self._pool - sum(each.session.held for each in list(self._running))
        running = len(self._running)
        pressure = Pressure(self._pool, max(0, free), min(self._held, self._pool), running, 0)
        return [pressure, AdviceApplied(0, 0, 0, 0, 0, dropped)]

    def _start(self) -> _Request:
        at = self._requests % self.load.sessions
        session = self._live[at]
        if session is None or session.turn == self._turns:
            session = self._live[at] = self._new_session(at if session is None else 0)
        else:
            new = random_keys(self._rng, self._grows)
            session.chain = np.concatenate([session.chain, new])
        session.turn += 1
        self._idle.pop(session.name, None)
        self._requests += 1
        tokens = len(session.chain) * self.block_size + self.block_size // 2
        ends = self._step + _ANSWER_STEPS
        return _Request(f"r{self._requests}", session, tokens, ends)

    def _new_session(self, at: int) -> _Session:
        """A new session; the first ones are of different ages, so that not all end at once."""
        self._begun += 1
        turn = at % self._turns
        own = self._begins - len(self._shared) + turn * (self._grows + 1)
        chain = np.concatenate([self._shared, random_keys(self._rng, own)])
        return _Session(f"session-{self._number}-{self._begun}", chain, turn, len(self._shared))

    def _told(self, request: _Request) -> RequestStarted:
        session, size = request.session, self.block_size
        packed, cached = session.chain.tobytes(), session.held * size
        return RequestStarted(request.name, packed, request.tokens, cached, size, session.name)

    def _answer(self, session: _Session) -> None:
        session.chain = np.concatenate([session.chain, random_keys(self._rng, 1)])

    def _keep(self, session: _Session) -> BlocksStored:
        new, before = session.chain[session.held :], session.held
        session.held = len(session.chain)
        self._held += len(new)
        self._stored += len(new)
        parent = int(session.chain[before - 1]) if before else None
        return BlocksStored(new.tobytes(), parent, self.block_size, session.name)

    def _evicted(self, count: int) -> bytes:
        gone: list[Keys] = []
        self._held -= count
        while count:
            session = next(iter(self._idle.values()))
            kept = max(len(self._shared), session.held - count)
            gone.append(session.chain[kept : session.held][::-1])
            count -= len(gone[-1])
            session.held = kept
            if kept == len(self._shared):
                del self._idle[session.name]
        return np.concatenate(gone).tobytes()

    def _over(self, request: _Request) -> RequestFinished:
        session = request.session
        self._idle[session.name] = session
        packed, total = session.chain.tobytes(), len(session.chain) * self.block_size
        why = "finished_stopped"
        return RequestFinished(request.name, packed, request.tokens, total, why, session.name)


def pace(feeds: Sequence[SessionFeed], seconds: float) -> Iterator[float]:
    """Tell of steps of each feed at an even pace; after each, how many seconds have passed."""
    step_s, steps, began = feeds[0].load.step_s, 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        if steps * step_s > passed:
            time.sleep(steps * step_s - passed)
        for feed in feeds:
            feed.step()
        steps += 1
        yield passed


_SETTLE_S: Final = 10.0  # until pools are full, and the first rankings are made
_LINKED_S: Final = 60.0
_LOOK_S: Final = 0.2  # between two looks at how old advice is; chosen
_TOO_OLD_S: Final = 2.0  # an engine has none that is older
_LEAST_RATE: Final = 0.95  # of the requests that were to be told of


@dataclass(frozen=True)
class Heard:
    cpu_percent: list[float]  # of a core, once pools are full: one part of the time after the other
    starting_percent: float  # the same in the seconds before
    # how old each engine's advice was, at every look from the first second on; 2 where it had
    # none
    ages_s: list[float]
    rss_gb: float  # memory at the end

    @property
    def age_p99_s(self) -> float:
        return float(np.percentile(self.ages_s, 99))


_SECONDS: Final = 20.0  # measured per load, once the graph is full
_PARTS: Final = 5  # of these seconds, of which the median counts; chosen


def run(progress: bool) -> Figures:
    figures, console = Figures("sidecar"), Console(stderr=True, quiet=not progress)
    one, ages = Load(), list[float]()
    with console.status("") as status:
        for blocks, target in ((250, "≤ 5"), (2_000, "≤ 10")):
            status.update(f"one engine, {one.requests_per_s:g} requests/s of {blocks:,} blocks")
            heard = listened(1, blocks, one, _SECONDS)
            figures.add(f"sidecar_cpu_{blocks}", heard.cpu_percent, "%", target)
            figures.add(f"sidecar_cpu_{blocks}_starting", heard.starting_percent, "%")
            ages += heard.ages_s
        figures.add("advice_age_p99_s", float(np.percentile(ages, 99)), "s", "≤ 0.8")
        status.update("64 engines of 20,000 blocks, 640 requests/s")
        heard = listened(64, 250, Load(requests_per_s=10, sessions=64), _SECONDS)
        figures.add("fleet64_cpu_percent", heard.cpu_percent, "%", "≤ 50")
        figures.add("fleet64_rss_gb", heard.rss_gb, "GB", "≤ 1.5")
        figures.add("fleet64_advice_age_p99_s", heard.age_p99_s, "s", "≤ 1")
    return figures


def listened(engines: int, blocks: int, load: Load, seconds: float, turns: int = TURNS) -> Heard:
    """Let engines tell a sidecar of requests; with one turn a session, all of them are new."""
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        SidecarProcess(Path(folder), policy__guard="true") as sidecar,
        contextlib.ExitStack() as stack,
    ):
        feeds = [
            stack.enter_context(SessionFeed(sidecar.endpoint, blocks, turns, load, number))
            for number in range(engines)
        ]
        if not wait_until(lambda: all(each.client.standing.linked for each in feeds), _LINKED_S):
            raise BenchError(f"the sidecar did not answer its engines within {_LINKED_S:g} s")
        ages = list[float]()
        starting = _cpu_share(sidecar, feeds, _SETTLE_S, ages)
        cpu = [_cpu_share(sidecar, feeds, seconds / _PARTS, ages) for _ in range(_PARTS)]
        if dropped := sum(each.client.dropped for each in feeds):
            raise BenchError(f"{dropped} events were dropped: the sidecar is too slow")
        return Heard(cpu, starting, ages, sidecar.rss() / 1e9)


def _cpu_share(
    sidecar: SidecarProcess, feeds: list[SessionFeed], seconds: float, ages: list[float]
) -> float:
    """Percent of a core that a sidecar uses; notes the ages of its advice meanwhile."""
    load, began, before = feeds[0].load, time.perf_counter(), sidecar.cpu_s()
    steps, looked = 0, 0.0
    for passed in pace(feeds, seconds):
        steps += 1
        if passed - looked >= _LOOK_S:
            looked = passed
            ages += _ages_s(feeds)
    took = time.perf_counter() - began
    if steps * load.a_step < _LEAST_RATE * load.requests_per_s * took:
        rate = steps * load.a_step / took
        raise BenchError(f"an engine told of {rate:.0f} requests/s, not {load.requests_per_s:g}")
    return 100 * (sidecar.cpu_s() - before) / took


def _ages_s(feeds: list[SessionFeed]) -> list[float]:
    now = time.monotonic()
    rankings = [each.client.ranking() for each in feeds]
    return [_TOO_OLD_S if each is None else max(0.0, now - each.ts) for each in rankings]
