"""A closed loop: users who wait for an answer before they ask again, and one engine."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.admission import HoldingBounds, HoldingRule, new_context_blocks
from ...graph.release_order import Held
from ...graph.wire.advice import HOLD_MAX_S, AdmissionAdvice
from .fleet_traffic import LEAST_S, FleetRequest, Signals, trace_lines
from .reader import recorded_trace
from .recorded_sessions import Session
from .simulator import Instance
from .trace import AGENTS_SERVICE, HostLink, ReplayError, ServiceModel, Trace

AdviceAt = Callable[[float], AdmissionAdvice | None]
"""Returns a sidecar's latest advice on admission, as of a time; None: no advice."""


@dataclass(slots=True, eq=False)
class ArrivedRequest:
    request: int
    user: int
    run: int
    opens: bool  # whether it is its session's first
    # Blocks of context that neither the pool nor a tier holds; 0 for a session that is live and
    # resident.
    brings: int = 0
    since: float = math.nan  # when it started to wait for room, in seconds; NaN: it never did
    held_s: float = 0.0  # how long it waited for room

    @property
    def name(self) -> str:
        return str(self.request)

    def as_held(self, now: float) -> Held:
        return Held(self.name, now, self.brings, returning=not self.opens)


class SimulatedHold:
    """Holds simulated requests by ``HoldingRule``, with a sidecar's advice on room.

    The rule is applied when a request arrives, and again when its turn comes, because contexts are
    lost in a long queue.
    """

    def __init__(self, word: AdviceAt, bounds: HoldingBounds) -> None:
        self._word = word
        self._rule = HoldingRule(bounds)
        self._held: dict[str, ArrivedRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def arrives(self, asked: ArrivedRequest, now: float, *, idle: bool, queued: bool) -> bool:
        """Note that a request arrived; returns whether it must wait for room. ``idle``: nothing
        runs and nobody else waits for the engine; ``queued``: somebody else does.
        """
        held = self._rule.arrives(asked.as_held(now), self._word(now), idle=idle, queued=queued)
        return self._noted(asked, now, held)

    def turn_comes(self, asked: ArrivedRequest, now: float) -> bool:
        """Note that a request is next to start; returns whether it must wait for room after all."""
        held = self._rule.turn_comes(asked.as_held(now), self._word(now))
        return self._noted(asked, now, held)

    def started(self, asked: ArrivedRequest, now: float) -> None:
        self._rule.started(asked.name, now)

    def still_held(self) -> list[ArrivedRequest]:
        return list(self._held.values())

    def released(self, now: float, *, idle: bool, free: bool) -> list[ArrivedRequest]:
        """Return the requests that may start now, in order. ``idle``: nothing runs and no other
        request waits for the engine; ``free``: no other request waits, and no prompt is being
        computed.
        """
        found = self._rule.released(self._word(now), now, idle=idle, free=free)
        gone = [self._held.pop(held.request_id) for held, _ in found]
        for asked in gone:
            asked.held_s += now - asked.since
        return gone

    def _noted(self, asked: ArrivedRequest, now: float, held: bool) -> bool:
        if held:
            asked.since = now
            self._held[asked.name] = asked
        return held


MAX_PAUSE_S: Final = 600.0
"""Seconds to which pauses are cut: a user who is away longer has another task by then."""

_SPARE: Final = 1.5  # times the number of runs that average users play in the time; chosen


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of recorded sessions that users may play."""

    trace: Trace  # the requests of all runs, run by run; their times are for users to decide
    # int64 ``[runs + 1]``: run i's requests are ``first[i]`` to ``first[i + 1]``.
    first: npt.NDArray[np.int64]
    # float64 ``[requests]``: seconds since the answer before; 0 at a run's start.
    pause: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first) - 1


def runs_for(
    sessions: Sequence[Session],
    users: int,
    seconds: float,
    *,
    block_size: int,
    seed: int,
    signals: Signals = Signals.ALL,
) -> Runs:
    """Draw as many runs as ``users`` can play in ``seconds``, and some more.

    Sessions are drawn from one shuffled pile, which is reshuffled when it is used up; a session
    played again counts as another session. Subagents are left out, since they run while their
    parent waits. Raises ReplayError.
    """
    if not sessions or users < 1 or seconds <= 0:
        raise ReplayError("a closed loop needs at least one session, one user and some time")
    usual = sum(map(_least_s, sessions)) / len(sessions)
    count = users + round(_SPARE * users * seconds / usual) + 1
    requests = list(_requests(sessions, count, seed))
    trace = recorded_trace(trace_lines(requests, block_size, signals, seed), f"{users} users")
    assert trace.said is not None
    said = replace(trace.said, seconds=np.full(len(trace), np.nan))
    starts = [number for number, request in enumerate(requests) if not request.index]
    return Runs(
        replace(trace, at=np.zeros(len(trace)), said=said),
        np.append(starts, len(requests)),
        np.array([_pause_s(request.session, request.index) for request in requests]),
    )


def _requests(sessions: Sequence[Session], count: int, seed: int) -> Iterator[FleetRequest]:
    """Yield requests run by run; each one's time is its number, so that a trace keeps them so."""
    rng = random.Random(f"{seed}/closed")
    pile: list[Session] = []
    number = lap = 0
    for run in range(count):
        if not pile:
            lap += 1
            pile = list(sessions)
            rng.shuffle(pile)
        session = pile.pop()
        name = f"{session.name}@{run}"
        for index, turn in enumerate(session.turns):
            last = index + 1 == len(session.turns)
            back = None if last else _pause_s(session, index + 1) + (turn.api_s or 0.0)
            yield FleetRequest(float(number), 0, name, name, session, index, back, lap)
            number += 1


def _pause_s(session: Session, index: int) -> float:
    """Return the seconds from the answer before to this turn, cut; 0 before the first."""
    if not index:
        return 0.0
    before, turn = session.turns[index - 1], session.turns[index]
    return min(max(0.0, turn.at - before.at - (before.api_s or 0.0)), MAX_PAUSE_S)


def _least_s(session: Session) -> float:
    """Return the seconds that a session takes on an engine without a queue."""
    service = ServiceModel()
    answers = sum(service.seconds(0, turn.output_tokens) for turn in session.turns)
    pauses = sum(_pause_s(session, index) for index in range(len(session.turns)))
    return max(LEAST_S, answers + pauses)


AGENTS_LINK: Final = HostLink(bytes_per_token=327_680)
"""KV of ``AGENTS_SERVICE``'s model in bf16 (80 layers, 8 heads of 128) over one PCIe 5 x16 link."""


class Queue(StrEnum):
    FCFS = "fcfs"  # first come, first served: vLLM
    LPM = "lpm"  # longest prefix match first: SGLang


@dataclass(frozen=True, slots=True)
class Loop:
    users: int  # each plays one run after the other
    seconds: float  # length of the loop
    begin_s: float = 1800.0  # users begin within this, evenly
    warm_s: float = 3600.0  # earlier events are not counted
    queue: Queue = Queue.FCFS
    service: ServiceModel = AGENTS_SERVICE
    link: HostLink = AGENTS_LINK
    bound_s: float = HOLD_MAX_S  # no request is held longer
    recheck_s: float = 0.5  # seconds between two checks of held requests


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """The outcome of each request, in the runs' order; NaN and 0 for those that never arrived."""

    # ``at``, ``started``, ``first_token``, ``done``: float64 ``[requests]``, seconds.
    at: npt.NDArray[np.float64]
    started: npt.NDArray[np.float64]
    first_token: npt.NDArray[np.float64]
    done: npt.NDArray[np.float64]
    # ``prompt``, ``found``: int32 ``[requests]``, blocks.
    prompt: npt.NDArray[np.int32]
    found: npt.NDArray[np.int32]
    opens: npt.NDArray[np.bool_]  # bool ``[requests]``: whether it opens its session
    held_s: npt.NDArray[np.float64]  # float64 ``[requests]``: how long it waited for room
    ended: npt.NDArray[np.float64]  # float64 ``[runs]``: when each run ended; NaN: it did not
    refused: int  # requests larger than the pool


def play(
    runs: Runs, instance: Instance, loop: Loop, *, word: AdviceAt = lambda now: None
) -> Played:
    """Let users play ``runs`` on one engine; without ``word``, no request is held."""
    return _Play(runs, instance, loop, word).play()


class _Play:
    def __init__(self, runs: Runs, instance: Instance, loop: Loop, word: AdviceAt) -> None:
        trace = runs.trace
        self._runs, self._instance, self._loop = runs, instance, loop
        self._chains, self._limits = trace.chains(), trace.matchable.tolist()
        self._input, self._output = trace.input_tokens.tolist(), trace.output_tokens.tolist()
        self._pause, self._first = runs.pause.tolist(), runs.first.tolist()
        self._size = trace.block_size
        self._hold = SimulatedHold(word, HoldingBounds(instance.capacity, loop.bound_s))
        self._line: list[ArrivedRequest] = []  # who may start, and waits for the engine
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._next_run = 0
        self._busy = False  # the prefill server
        self._loaded: deque[ArrivedRequest] = deque()  # whose copies are there
        self._asking = False  # a held request is asked about again soon
        self._refused = 0
        count = len(trace)
        self._times = {
            name: np.full(count, np.nan) for name in ("at", "started", "first_token", "done")
        }
        self._found = np.zeros(count, dtype=np.int32)
        self._held_s = np.zeros(count)
        self._ended = np.full(len(runs), np.nan)

    def play(self) -> Played:
        loop = self._loop
        for user in range(loop.users):
            self._at(loop.begin_s * user / loop.users, partial(self._open, user))
        while self._events and self._events[0][0] < loop.seconds:
            now, _, event = heapq.heappop(self._events)
            event(now)
            self._serve(now)
        for asked in self._hold.still_held():
            self._held_s[asked.request] = asked.held_s + loop.seconds - asked.since
        opens = np.zeros(len(self._runs.trace), dtype=np.bool_)
        opens[self._runs.first[:-1]] = True
        prompt = self._runs.trace.matchable
        return Played(
            **self._times, prompt=prompt, found=self._found, opens=opens,
            held_s=self._held_s, ended=self._ended, refused=self._refused,
        )  # fmt: skip

    def _at(self, now: float, event: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (now, self._number, event))

    def _open(self, user: int, now: float) -> None:
        if self._next_run < len(self._runs):
            run, self._next_run = self._next_run, self._next_run + 1
            self._ask(self._first[run], user, run, now)

    def _ask(self, request: int, user: int, run: int, now: float) -> None:
        self._times["at"][request] = now
        if len(self._chains[request]) + self._unhashed(request) > self._instance.capacity:
            self._refused += 1  # as vLLM does; the user goes on without an answer
            self._answered(request, user, run, now)
            return
        asked = ArrivedRequest(request, user, run, request == self._first[run])
        asked.brings = self._brings(asked)
        if not self._hold.arrives(asked, now, idle=self._idle, queued=bool(self._line)):
            self._line.append(asked)

    @property
    def _idle(self) -> bool:
        return not self._instance.running and not self._line

    def _brings(self, asked: ArrivedRequest) -> int:
        prompt = self._limits[asked.request]
        found = self._instance.reach(self._chains[asked.request], prompt)
        return new_context_blocks(prompt, found, self._instance.capacity, new=asked.opens)

    def _serve(self, now: float) -> None:
        """Start waiting requests; one prompt is computed at a time."""
        free = not self._line and not self._busy
        self._line += self._hold.released(now, idle=self._idle, free=free)
        while not self._busy and self._loaded:
            self._prefill(self._loaded.popleft(), now)
        while not self._busy and self._line:
            asked = self._next()
            asked.brings = self._brings(asked)
            if self._hold.turn_comes(asked, now):
                self._line.remove(asked)
            elif not self._start(asked, now):
                break
        if len(self._hold) and not self._asking:
            self._asking = True
            self._at(now + self._loop.recheck_s, self._wake)

    def _next(self) -> ArrivedRequest:
        if self._loop.queue is Queue.FCFS:
            return self._line[0]
        match, chains, limits = self._instance.match, self._chains, self._limits
        return max(
            self._line, key=lambda asked: match(chains[asked.request], limits[asked.request])
        )

    def _wake(self, now: float) -> None:
        self._asking = False

    def _start(self, asked: ArrivedRequest, now: float) -> bool:
        """Start a request; returns whether there were blocks for it."""
        request, instance = asked.request, self._instance
        chain, limit = self._chains[request], self._limits[request]
        admission = instance.admit(request, chain, limit, self._unhashed(request), now)
        if admission is None:
            return False
        self._line.remove(asked)
        self._times["started"][request] = now
        self._held_s[request] = asked.held_s
        self._hold.started(asked, now)
        self._found[request] = admission.hit + admission.warmed
        if admission.warmed:
            seconds = self._loop.link.seconds(admission.warmed, self._size)
            self._at(now + seconds, lambda _: self._loaded.append(asked))
        else:
            self._prefill(asked, now)
        return True

    def _prefill(self, asked: ArrivedRequest, now: float) -> None:
        request = asked.request
        tokens = max(1, self._input[request] - int(self._found[request]) * self._size)
        self._busy = True
        seconds = self._loop.service.prefill_seconds(tokens)
        self._at(now + seconds, partial(self._decode, asked))

    def _decode(self, asked: ArrivedRequest, now: float) -> None:
        request = asked.request
        self._busy = False
        self._times["first_token"][request] = now
        seconds = self._loop.service.seconds(0, self._output[request])
        self._at(now + seconds, partial(self._finish, asked))

    def _finish(self, asked: ArrivedRequest, now: float) -> None:
        request = asked.request
        self._instance.finish(request, self._chains[request], now)
        self._answered(request, asked.user, asked.run, now)

    def _answered(self, request: int, user: int, run: int, now: float) -> None:
        """Let the user ask again after the recorded pause, or begin another session."""
        self._times["done"][request] = now
        after = request + 1
        if after == self._first[run + 1]:
            self._ended[run] = now
            self._at(now, partial(self._open, user))
        else:
            self._at(now + self._pause[after], lambda at: self._ask(after, user, run, at))

    def _unhashed(self, request: int) -> int:
        """Take blocks for output that has no recorded hashes, while the request runs."""
        tokens = self._input[request] + self._output[request]
        unhashed: int = max(0, -(-tokens // self._size) - len(self._chains[request]))
        return unhashed
