"""How closed-loop users meet a server: no request is sent before its predecessor's answer."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from time import perf_counter
from typing import Final

import httpx
from kvgraph.advisor.replay.closed import MAX_PAUSE_S
from kvgraph.advisor.replay.fleet_traffic import MAX_GAP_S, FleetRequest, lay_over_users
from kvgraph.advisor.replay.recorded_sessions import Session

from ..agents.agents_arms import EVERYTHING, HOST_LRU, AgentArm, Room, Telling, check_answer
from ..errors import CompletionError, TrafficError
from ..recorded.agents_requests import AgentRequest, build_requests
from ..serving.completions import Answer, OnAnswer, open_client, send
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server


@dataclass(frozen=True, slots=True)
class HoldCounts:
    """Requests since the engine's start; seconds."""

    held: int
    not_held: int
    longest_s: float
    waited_s: float
    released: dict[str, int]

    @property
    def share(self) -> float:
        """Of all requests, those that were held."""
        return self.held / max(1, self.held + self.not_held)


def hold_counts(server: Server) -> HoldCounts:
    page = httpx.get(f"{server.sidecar_url()}/metrics", timeout=10.0, trust_env=False)
    return parse_holds(page.text)


def parse_holds(metrics: str) -> HoldCounts:
    """``kvgraph_admission_*`` of a metrics page."""

    def number(name: str) -> float:
        found = re.search(rf"^kvgraph_admission_{name}\{{[^}}]*\}} (\S+)$", metrics, re.M)
        return float(found[1]) if found else 0.0

    ends = re.findall(
        r'^kvgraph_admission_released_total\{[^}]*reason="(\w+)"[^}]*\} (\S+)$', metrics, re.M
    )
    return HoldCounts(
        held=int(number("held_total")),
        not_held=int(number("not_held_total")),
        longest_s=number("longest_seconds"),
        waited_s=number("waited_seconds_total"),
        released={reason: int(float(count)) for reason, count in ends},
    )


_SPARE: Final = 1.5  # of the recorded time that a run takes, at most: scripts must not run out


@dataclass(frozen=True, slots=True)
class ClosedTurn:
    request: AgentRequest
    first: bool  # whether it begins a session
    pause_s: float  # recorded seconds from its answer to the user's next turn


Script = tuple[ClosedTurn, ...]


def scripts(
    sessions: Sequence[Session], users: int, seed: int, recorded_s: float, vocabulary: int
) -> tuple[Script, ...]:
    """One script a user, for ``recorded_s`` seconds of play; the same arguments give the same.

    Users are somewhere in their first sessions when the run begins, as on any day at noon: were all
    to begin their sessions at once, contexts would be small for most of a short run.
    """
    fleet = lay_over_users(sessions, users, _SPARE * recorded_s + 2 * MAX_GAP_S, seed)
    asked = zip(fleet, build_requests(fleet, vocabulary, seed), strict=True)
    by_user = sorted(asked, key=lambda pair: pair[0].user)  # stable: each user's stay in order
    rng = random.Random(f"{seed}/noon")
    return tuple(
        _from_noon([_turn(each, request) for each, request in own], recorded_s, rng)
        for _, own in groupby(by_user, key=lambda pair: pair[0].user)
    )


def _from_noon(turns: Sequence[ClosedTurn], recorded_s: float, rng: random.Random) -> Script:
    """Without a random part of the first session; what is left lasts for the run."""
    first = next((at for at, turn in enumerate(turns) if at and turn.first), len(turns))
    left = list(accumulate(turn.pause_s for turn in reversed(turns)))[::-1]
    starts = [at for at in range(first) if left[at] >= recorded_s] or [0]
    return tuple(turns[rng.choice(starts) :])


def _turn(each: FleetRequest, request: AgentRequest) -> ClosedTurn:
    return ClosedTurn(request, each.index == 0, min(each.pause_s or 0.0, MAX_PAUSE_S))


STARTING_S: Final = 5.0  # users begin within so many seconds of each other: chosen


@dataclass(frozen=True, slots=True)
class Clock:
    """When a run is measured; times in seconds."""

    pace: float  # that a recorded second takes
    warm_up_s: float  # at the beginning, whose turns are not counted
    measured_s: float  # that follow

    @property
    def end_s(self) -> float:
        return self.warm_up_s + self.measured_s


@dataclass(frozen=True, slots=True)
class ClosedAnswer:
    sent_s: float
    first: bool
    answer: Answer

    @property
    def ended_s(self) -> float:
        return self.sent_s + self.answer.latency_s


@dataclass(frozen=True, slots=True)
class ClosedPass:
    clock: Clock
    answers: tuple[ClosedAnswer, ...]
    # how long each turn that was not answered by the end had been waiting, and whether it was a
    # session's first
    waiting_s: tuple[tuple[bool, float], ...]
    failed: int  # requests that were refused or lost

    @property
    def counted(self) -> list[ClosedAnswer]:
        clock = self.clock
        return [a for a in self.answers if clock.warm_up_s <= a.ended_s < clock.end_s]

    @property
    def turns_per_minute(self) -> float:
        return 60.0 * len(self.counted) / self.clock.measured_s

    @property
    def cached_share(self) -> float:
        prompt = sum(each.answer.prompt_tokens for each in self.counted)
        return sum(each.answer.cached_tokens for each in self.counted) / max(1, prompt)

    def ttft_s(self, first: bool) -> list[float]:
        """Times to first token, of sessions' first turns or of the others."""
        return [each.answer.ttft_s for each in self.counted if each.first is first]


async def closed_loop(
    url: str, users: Sequence[Script], telling: Telling, clock: Clock, on_answer: OnAnswer
) -> ClosedPass:
    async with open_client(url) as client:
        play = _Play(client, telling, clock, on_answer)
        tasks = [
            asyncio.create_task(play.user(script, STARTING_S * number / len(users)))
            for number, script in enumerate(users)
        ]
        _, pending = await asyncio.wait(
            tasks, timeout=clock.end_s, return_when=asyncio.FIRST_EXCEPTION
        )
        waiting, failed = play.waiting(), play.failed  # who is cancelled below has not failed
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return ClosedPass(clock, tuple(play.answers), waiting, failed)


@dataclass
class _Play:
    client: httpx.AsyncClient
    telling: Telling
    clock: Clock
    on_answer: OnAnswer
    answers: list[ClosedAnswer] = field(default_factory=list)
    failed: int = 0
    began: float = field(default_factory=perf_counter)
    _sent: dict[str, tuple[bool, float]] = field(default_factory=dict)

    def waiting(self) -> tuple[tuple[bool, float], ...]:
        now = perf_counter()
        return tuple((first, now - sent) for first, sent in self._sent.values())

    async def user(self, script: Script, starts_s: float) -> None:
        await asyncio.sleep(starts_s)
        for turn in script:
            await self._turn(turn)
            await asyncio.sleep(self.clock.pace * turn.pause_s)
        raise TrafficError("a user's script ran out: the run is too long for it")

    async def _turn(self, turn: ClosedTurn) -> None:
        request, sent = turn.request, perf_counter()
        body = request.body(self.clock.pace, self.telling.hinted, self.telling.layered)
        self._sent[request.name] = turn.first, sent
        try:
            answer = await send(self.client, request.name, body)
        except CompletionError:
            self.failed += 1
            return
        finally:
            del self._sent[request.name]
        check_answer(request, answer)
        self.answers.append(ClosedAnswer(sent - self.began, turn.first, answer))
        self.on_answer(answer)


_HOLD: Final = ("AITHER_KVCACHE_ADMISSION", "1")

LONGEST_FIRST: Final = "kvgraph_bench.serving.longest_prefix.LongestPrefixFirst"
"""A scheduler class, as vLLM takes it by name."""

STOCK: Final = AgentArm("stock", graph=False)
LPM: Final = AgentArm("lpm", graph=False, options=("--scheduler-cls", LONGEST_FIRST))
"""Stock, but who waits starts by the longest cached prefix: SGLang's order."""
OFF: Final = AgentArm("off", graph=True, settings=(("AITHER_KVCACHE_ADMISSION", "0"),))
HOLD: Final = AgentArm("hold", graph=True, settings=(_HOLD,))
HOLD_TOLD: Final = AgentArm("hold_told", graph=True, telling=EVERYTHING, settings=(_HOLD,))
HOST_HOLD: Final = AgentArm("host_hold", graph=True, hosted=True, settings=(_HOLD,))
CLOSED_ARMS: Final = (STOCK, LPM, OFF, HOLD, HOLD_TOLD, HOST_LRU, HOST_HOLD)


@dataclass(frozen=True, slots=True)
class ClosedRun:
    arm: str
    agents: int
    passed: ClosedPass
    held: HoldCounts | None  # what the engine's sidecar counted; None without one


def run_closed(
    arm: AgentArm, room: Room, users: Sequence[Script], clock: Clock, shown: DemoProgress
) -> ClosedRun:
    tag = f"{arm.name}-{len(users)}"
    shown.starting(tag)
    with Server(room.plan(arm, tag)) as server:
        shown.passing(tag, f"{len(users)} agents")
        passed = asyncio.run(closed_loop(server.url, users, arm.telling, clock, shown.answered))
        return ClosedRun(arm.name, len(users), passed, hold_counts(server) if arm.graph else None)
