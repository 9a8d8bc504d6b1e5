"""Requests by the clock on paper: every run of the same requests gives the same times."""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..agents.agents_arms import KEPT_BACK, pool_for
from ..figures import Figures, measured_now, only_errors, quantile
from ..paper.paper_engine import BLOCK_SIZE, base_config
from ..paper.timed_engine import AGENTS, PaperService
from ..recorded.agents_requests import USERS, AgentRequest, recorded_requests
from ..serving.cache_ledger import Books
from ..serving.model import TINY, ModelShape, ensure_model
from ..serving.progress import DemoProgress
from ..serving.workload import BLOCK
from .closed_pass import ClosedAnswer, ClosedTurn, HoldCounts
from .paper_loop import (
    PAPER_HOLD,
    PAPER_HOST_LRU,
    PAPER_LPM,
    PAPER_OFF,
    PAPER_QUIET_TIERS,
    PAPER_STOCK,
    PAPER_TIERS,
    PAPER_TOLD,
    Crowd,
    PaperArm,
    PaperLoop,
    Sent,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SIZES: Final = (0.5, 1.0, 2.0)  # blocks of host memory for each block of the pool
_HOST_ARMS: Final = (PAPER_HOST_LRU, PAPER_QUIET_TIERS, PAPER_TIERS)


@dataclass(frozen=True, slots=True)
class OpenRun:
    arm: str
    answers: Sequence[ClosedAnswer]
    wall_s: float  # until the last answer
    held: HoldCounts | None  # what the engine counted; None where nobody is held

    @property
    def cached_share(self) -> float:
        prompt = sum(each.answer.prompt_tokens for each in self.answers)
        return sum(each.answer.cached_tokens for each in self.answers) / prompt

    @property
    def mean_ttft_s(self) -> float:
        return sum(each.answer.ttft_s for each in self.answers) / len(self.answers)

    def ttft_s(self, percentile: int) -> float:
        return quantile([each.answer.ttft_s for each in self.answers], percentile)


def play_open(
    base: VllmConfig,
    arm: PaperArm,
    blocks: int,
    requests: Sequence[AgentRequest],
    pace: float,
    running: int,
    books: Books | None = None,
) -> OpenRun:
    """Send each session's requests when they are due, each after the answer to the one before."""
    return _play(base, arm, blocks, Sessions(_by_session(requests), pace), running, books)


def alone_s(base: VllmConfig, blocks: int, requests: Sequence[AgentRequest]) -> float:
    """What all requests take one after the other on stock, in seconds."""
    return _play(base, PAPER_STOCK, blocks, Sessions([requests], 0.0), 1).wall_s


def _play(
    base: VllmConfig,
    arm: PaperArm,
    blocks: int,
    crowd: Sessions,
    running: int,
    books: Books | None = None,
) -> OpenRun:
    service = replace(AGENTS, sequences=running)
    loop = PaperLoop(base, arm, blocks, crowd, service, crowd.pace, books)
    try:
        loop.run()
        return OpenRun(arm.name, tuple(loop.answers), loop.now, loop.held())
    finally:
        loop.engine.close()


def _by_session(requests: Sequence[AgentRequest]) -> Iterator[list[AgentRequest]]:
    in_order = sorted(requests, key=lambda each: each.session)  # stable: each session's stay so
    return (list(own) for _, own in groupby(in_order, key=lambda each: each.session))


class Sessions(Crowd):
    """Each session's requests by the clock, late ones as soon as may be."""

    def __init__(self, sessions: Iterable[Sequence[AgentRequest]], pace: float) -> None:
        super().__init__()
        self._left = [deque(own) for own in sessions]
        self.pace = pace
        self._began = min(own[0].at for own in self._left)
        self._lengths = [len(own) for own in self._left]
        for user in range(len(self._left)):
            self._next(user, 0.0)

    def asks(self, user: int) -> Iterator[ClosedTurn]:
        own = self._left[user]
        is_first = len(own) == self._lengths[user]
        yield ClosedTurn(own.popleft(), is_first, 0.0)

    def answered(self, sent: Sent, now: float) -> None:
        self._next(sent.user, now)

    def _next(self, user: int, now: float) -> None:
        if own := self._left[user]:
            self.plan(max(now, self.pace * (own[0].at - self._began)), user)


# All chosen; a step's fixed cost is that of 200 tokens.
_BLOCKS: Final = 4000
_SERVICE: Final = PaperService(20_000.0, 0.01, 2048, step_s=0.01)
_WARM_S, _END_S = 30.0, 90.0


@dataclass(frozen=True, slots=True)
class Traffic:
    name: str
    clients: int  # each asks again as soon as it is answered
    texts: int  # that are asked in turn, and anew behind the last
    length: int  # of a text
    answer: int = 1  # of an answer
    questions: int = 0  # of a question behind each text, another one each time; 0: none
    grows: int = 0  # by how much each text is longer than it was in the round before
    together: int = 1  # requests of one prompt, sent at once; the next follow the last answer
    rest_s: float = 0.0  # seconds from an answer to the client's next request


OTHERS: Final = (
    Traffic("short", clients=128, texts=1200, length=8 * BLOCK_SIZE + 1),
    Traffic("long", clients=64, texts=250, length=40 * BLOCK_SIZE + 1, answer=8),
    Traffic("documents", clients=64, texts=120, length=60 * BLOCK_SIZE, answer=20, questions=40),
    Traffic("siblings", clients=12, texts=200, length=40 * BLOCK_SIZE, answer=30, together=8),
    Traffic("growing", clients=128, texts=240, length=40 * BLOCK_SIZE, answer=4, grows=BLOCK_SIZE),
    Traffic("bursts", clients=100, texts=300, length=30 * BLOCK_SIZE, answer=8, rest_s=10.0),
)  # of each, the texts take from one and a half to three pools. Chosen


def answers_per_s(base: VllmConfig, arm: PaperArm, traffic: Traffic) -> float:
    """Answers a second, of the service model's seconds."""
    loop = PaperLoop(base, arm, _BLOCKS, _Clients(traffic), _SERVICE)
    try:
        loop.run(_END_S)
        return sum(each.ended_s >= _WARM_S for each in loop.answers) / (_END_S - _WARM_S)
    finally:
        loop.engine.close()


class _Clients(Crowd):
    """Whoever has all answers to a prompt asks the next text."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__((0.0, client) for client in range(traffic.clients))
        self._traffic = traffic
        self._asked = 0
        self._open = [0] * traffic.clients  # answers that each waits for

    def asks(self, user: int) -> Iterator[ClosedTurn]:
        self._open[user] = self._traffic.together
        return itertools.repeat(self._next(), self._traffic.together)

    def answered(self, sent: Sent, now: float) -> None:
        self._open[sent.user] -= 1
        if not self._open[sent.user]:
            self.plan(now + self._traffic.rest_s, sent.user)

    def _next(self) -> ClosedTurn:
        traffic, number = self._traffic, self._asked
        self._asked += 1
        name = f"{traffic.name}-{number}"
        prompt = (*self._text(number), *_tokens(name, traffic.questions))
        answer = _tokens(f"answer {number}", traffic.answer)
        request = AgentRequest(name, 0.0, name, prompt, tuple(answer), False, None, None, ())
        return ClosedTurn(request, True, 0.0)

    def _text(self, number: int) -> Iterator[int]:
        traffic, (again, text) = self._traffic, divmod(number, self._traffic.texts)
        yield from _tokens(f"text {text}", traffic.length)
        for each in range(again):
            yield from _tokens(f"more {text} {each}", traffic.grows)


def _tokens(seed: str, count: int) -> Sequence[int]:
    return random.Random(seed).choices(range(3, ModelShape().vocab), k=count)


OPEN_FILE: Final = "open.json"
REQUESTS: Final = 600  # as many as the demo plays
_OTHERS_ARMS: Final = (PAPER_STOCK, PAPER_OFF, PAPER_HOLD)
_ARMS: Final = (PAPER_STOCK, PAPER_LPM, PAPER_OFF, PAPER_HOLD, PAPER_TOLD)


@dataclass(frozen=True, slots=True)
class Setting:
    running: int  # requests that run at once at most
    load: float  # share of the time in which stock would be busy, were it asked one by one

    @property
    def name(self) -> str:
        return f"_at_{self.running}_{self.load:g}"


SETTINGS: Final = (Setting(1, 0.3), Setting(1, 0.75), Setting(64, 0.75), Setting(64, 2.2))
"""As the demo has it, and too much; then the same for an engine that batches. Chosen."""


@dataclass(frozen=True, slots=True)
class OpenResult:
    out: Path
    pool: int  # blocks of ``BLOCK_SIZE`` tokens
    runs: Sequence[tuple[Setting, OpenRun]]
    # answers a second by arm, for each kind of traffic that is no agents'
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # arms with host memory, of so many blocks for each of the pool
    hosts: Sequence[tuple[float, OpenRun]] = ()

    def figures(self) -> Figures:
        figures = Figures("agents --open")
        for setting in dict.fromkeys(setting for setting, _ in self.runs):
            stock, *others = (run for at, run in self.runs if at == setting)
            figures.add(f"stock_share{setting.name}", stock.cached_share, "share of prompt")
            for run in others:
                _add(figures, f"_{run.arm}{setting.name}", run, stock)
        for host in dict.fromkeys(host for host, _ in self.hosts):
            plain, *others = (run for size, run in self.hosts if size == host)
            figures.add(f"host_lru_share_{host:g}", plain.cached_share, "share of prompt")
            for run in others:
                ratio = (1 - run.cached_share) / (1 - plain.cached_share)
                name = f"{run.arm}_recomputed_ratio_{host:g}"
                figures.add(name, ratio, "tiers / plain", "≤ 1")
        for kind, rates in self.others.items():
            for arm, rate in rates.items():
                figures.add(f"{kind}_answers_{arm}", rate, "answers/s")
            ratio = rates[PAPER_HOLD.name] / rates[PAPER_OFF.name]
            figures.add(f"{kind}_ratio", ratio, "of admission off", "≥ .99")
        return figures

    def save(self) -> Path:
        content = {
            **self.figures().as_dict(),
            **measured_now(),
            "pool": self.pool,
            "block": BLOCK_SIZE,
            "runs": [asdict(setting) | _details(run) for setting, run in self.runs],
            "hosts": [{"host": host} | _details(run) for host, run in self.hosts],
        }
        path = self.out / OPEN_FILE
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def run_open(
    progress: bool, quick: bool, sessions: Path, seed: int, requests: int | None,
    share: float, out: Path,
) -> OpenResult:  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    asked = recorded_requests(sessions, USERS, seed, requests or REQUESTS, ModelShape().vocab)
    longest = max(len(each.prompt) + len(each.answer) for each in asked)
    found = pool_for(asked, share, longest // BLOCK + KEPT_BACK, out / "fleet.jsonl.gz")
    pool = found * BLOCK // BLOCK_SIZE
    settings = SETTINGS[:1] if quick else SETTINGS
    with DemoProgress(0, shown=progress) as shown, only_errors():
        base = base_config(ensure_model(TINY))
        wall_s = alone_s(base, pool, asked)
        runs = []
        for setting in settings:
            pace = wall_s / (setting.load * _span_s(asked))
            for arm in _ARMS:
                shown.passing(f"{arm.name}{setting.name}", "on paper")
                runs.append((setting, play_open(base, arm, pool, asked, pace, setting.running)))
        hosts = []
        pace = wall_s / (SETTINGS[0].load * _span_s(asked))
        for host, arm in itertools.product(() if quick else SIZES, _HOST_ARMS):
            shown.passing(f"{arm.name}, host memory {host:g}", "on paper")
            sized = replace(arm, host=host)
            hosts.append((host, play_open(base, sized, pool, asked, pace, 1)))
        others = {}
        for traffic in () if quick else OTHERS:
            shown.passing(traffic.name, "on paper")
            rates = {arm.name: answers_per_s(base, arm, traffic) for arm in _OTHERS_ARMS}
            others[traffic.name] = rates
    return OpenResult(out.resolve(), pool, runs, others, hosts)


def _span_s(requests: Sequence[AgentRequest]) -> float:
    return requests[-1].at - requests[0].at


def _add(figures: Figures, name: str, run: OpenRun, stock: OpenRun) -> None:
    gain = 100 * (run.cached_share - stock.cached_share)
    figures.add(f"gain_points{name}", gain, "points", "≥ 0")
    for percentile in (50, 95):
        ratio = run.ttft_s(percentile) / stock.ttft_s(percentile)
        figures.add(f"ttft_p{percentile}_ratio{name}", ratio, "of stock", "≤ 1")
    figures.add(f"ttft_mean_ratio{name}", run.mean_ttft_s / stock.mean_ttft_s, "of stock", "≤ 1")
    if run.held is not None:
        figures.add(f"held_share{name}", run.held.share, "of requests")


def _details(run: OpenRun) -> dict[str, Any]:
    return {
        "arm": run.arm,
        "cached_share": round(run.cached_share, 4),
        "ttft_s": {p: round(run.ttft_s(p), 2) for p in (50, 95, 99)},
        "ttft_mean_s": round(run.mean_ttft_s, 2),
        "wall_s": round(run.wall_s, 1),
        "held": None if run.held is None else asdict(run.held),
    }
