"""What the graph costs an engine that needs no help: CPU time without memory pressure.

Wall-clock rates of an engine, a server and a sidecar that share a few cores spread too widely to
show half a percent. So CPU seconds are counted, of the engine core's main thread and of ours, and
beside on and off two stock servers take part: what they differ by is no cost of anybody's. In all
of them the core sleeps while the model computes (``sleeping_executor``), as it does not in vLLM.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import numpy as np
from kvgraph.graph.types import SourceLayer
from rich.console import Console

from ..errors import ServerError
from ..figures import Figures, keep_raw, measured_now
from ..serving.completions import complete, open_client
from ..serving.model import TINY, ensure_model, vocabulary_size
from ..serving.vllm_server import Server, ServerPlan, check_advised
from ..serving.workload import Span, Turn
from .engine_feed import TURNS, sidecar_cpu_percent
from .engine_rounds import CONCURRENCY, Course, Round, Rounds, rounds_in_turns
from .profiled_executor import OWN_TIMES, is_ours

RUNNING: Final = 256
# All chosen.
POOL: Final = 6000  # blocks: about what the callers' longest prompts need at once
MAX_MODEL_LEN: Final = 1024
_BEGINS: Final = 160  # tokens of a caller's first prompt
_GROWS: Final = 96  # with each turn
_TURNS: Final = 7  # of a caller's session; then another begins
_ANSWER: Final = 64  # tokens
_FIRST_TOKEN: Final = 9  # below are special ones
_PROFILED: Final = "kvgraph_bench.engine.profiled_executor.ProfiledExecutor"


class FunctionShare(NamedTuple):
    """A function's share of the main thread's CPU time, spent in itself."""

    function: str
    share: float
    ours: bool  # whether it is a function of kvgraph's


@dataclass(frozen=True, slots=True)
class Profile:
    """The functions, the longest first."""

    rows: tuple[FunctionShare, ...]
    called_share: float  # of the time, what our functions take, and whatever these call

    @property
    def first_of_ours(self) -> int:
        """The line, from 1, of our first function."""
        ours = (line for line, row in enumerate(self.rows, 1) if row.ours)
        return next(ours, len(self.rows) + 1)

    def lines(self, count: int = 20) -> list[str]:
        """The first lines, and our first, for people."""
        shown = dict.fromkeys([*range(min(count, len(self.rows))), self.first_of_ours - 1])
        return [
            f"{at + 1:4d}  {self.rows[at].share:6.2%}  {self.rows[at].function}"
            for at in shown
            if at < len(self.rows)
        ]


def profiled(plan: ServerPlan, seconds: float) -> Profile:
    """Keep a server busy with ``RUNNING`` callers for so many seconds."""
    kept = plan.directory / f"{plan.arm}.own_times.json"
    # Server and callers are late under this load: no connection may be closed just as a caller
    # takes it up again.
    settings = (*plan.settings, (OWN_TIMES, str(kept)), ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "60"))
    options = (*plan.options, "--distributed-executor-backend", _PROFILED)
    plan = replace(plan, blocks=POOL, max_model_len=MAX_MODEL_LEN, max_num_seqs=RUNNING,
                   settings=settings, options=options)  # fmt: skip
    with Server(plan) as server:
        check_advised(server)
        asyncio.run(_keep_busy(server.url, vocabulary_size(plan.model), seconds))
    return read_profile(kept)


def read_profile(kept: Path) -> Profile:
    """What an engine core kept."""
    try:
        found = json.loads(kept.read_text())
    except FileNotFoundError:
        raise ServerError("the engine core was not busy for long enough to be profiled") from None
    total = sum(seconds for *_, seconds in found)
    shares: Counter[tuple[str, str]] = Counter()
    called_share = 0.0
    for module, function, called, seconds in found:
        shares[module, function] += seconds / total
        called_share += called * seconds / total
    rows = (
        FunctionShare(f"{module}.{function}", share, is_ours(module))
        for (module, function), share in shares.most_common()
    )
    return Profile(tuple(rows), called_share)


async def _keep_busy(url: str, vocabulary: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    async with open_client(url) as client:
        await asyncio.gather(
            *(_caller(client, number, vocabulary, until) for number in range(RUNNING))
        )


async def _caller(client: httpx.AsyncClient, number: int, vocabulary: int, until: float) -> None:
    random, sent = np.random.default_rng(number), 0
    prompt: list[int] = []
    while time.monotonic() < until:
        session, turn = divmod(sent, _TURNS)
        more = _GROWS if turn else _BEGINS
        prompt = (prompt if turn else []) + random.integers(_FIRST_TOKEN, vocabulary, more).tolist()
        span = Span(SourceLayer.USER_TURN, tuple(prompt))
        await complete(
            client, Turn(f"caller-{number}-{session}", turn, (span,), _ANSWER, 0.0, None), "busy"
        )
        sent += 1


STOCK: Final = ("stock", "stock_again")
GRAPH, TIERS = "graph", "tiers"
_WARM: Final = (("AITHER_KVCACHE_WARM_GIB", "0.5"),)
_SLEEPS: Final = (
    "--distributed-executor-backend", "kvgraph_bench.engine.sleeping_executor.SleepingExecutor"
)  # fmt: skip


class Part(StrEnum):
    """What of the bench to run."""

    ALL = "all"
    ENGINE = "engine"
    SIDECAR = "sidecar"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        pairs: Rounds of each server between two starts.
        fleets: How often all servers are started: two processes that are alike differ too.
        tiers: Whether a server with tiers is measured too.
        feed_rounds, feed_s: Of each feed to a sidecar, and seconds of each.
        profile_s: Of each engine that is profiled.
        minutes: For all of it: on a slow machine, fewer pairs are made.
    """

    pairs: int = 5
    fleets: int = 2
    tiers: bool = True
    feed_rounds: int = 3
    feed_s: float = 8.0
    profile_s: float = 60.0
    minutes: float = 14.0


QUICK: Final = Scale(
    pairs=3, fleets=1, tiers=False, feed_rounds=1, feed_s=6.0, profile_s=20.0, minutes=3.0
)
_FEEDS: Final = 3
_FEED_START_S: Final = 10.0  # of a sidecar, until it is asked; chosen


def run(
    progress: bool = True,
    scale: Scale | None = None,
    model: str | None = None,
    raw: Path | None = None,
    part: Part = Part.ALL,
) -> Figures:
    """Measure ``part``; every round is kept in ``raw``, if that is given, as soon as it is over.

    Interrupted, it gives what it has until then; the figure ``complete`` says whether it is all."""
    scale, console = scale or Scale(), Console(stderr=True, quiet=not progress)
    record = Record(scale, Course(60 * scale.minutes, console), raw)
    try:
        if part in (Part.ALL, Part.ENGINE):
            make_rounds(record, model or str(ensure_model()), part is Part.ALL)
        if part in (Part.ALL, Part.SIDECAR):
            _feed_sidecars(record)
        if part is Part.PROFILE:
            _profile(record, model or str(ensure_model(TINY)))
        record.is_complete = True
    except (KeyboardInterrupt, SystemExit):
        known = "the figures are those of what was measured until now"
        console.print(f"interrupted: {known if record.has_any else 'nothing was measured yet'}")
    finally:
        record.save()
    if said := verdict(record.whole_pairs()):
        console.print(said)
    return record.figures()


def make_rounds(record: Record, model: str, sidecars_follow: bool) -> None:
    """All rounds of all fleets; each has the same part of the time, and the last ones none if it
    is over."""
    scale, course = record.scale, record.course
    feeds_s = _FEEDS * (_FEED_START_S + scale.feed_rounds * scale.feed_s) * sidecars_follow
    for_rounds = 1 - feeds_s / (60 * scale.minutes)
    for fleet in range(scale.fleets):
        if fleet and not course.has_time_for(sum(course.took.values()) / fleet, for_rounds):
            course.say(f"no time for more than {fleet} of {scale.fleets} starts of all servers")
            return
        share = for_rounds * (fleet + 1) / scale.fleets
        with tempfile.TemporaryDirectory(prefix="kvgraph-engine-") as directory:
            plans = _plans(model, Path(directory), scale.tiers)
            rounds_in_turns(plans, scale.pairs, course, share, record.note)


def _plans(model: str, directory: Path, tiers: bool) -> list[ServerPlan]:
    def plan(name: str, settings: tuple[tuple[str, str], ...] = ()) -> ServerPlan:
        on = name not in STOCK
        return ServerPlan(
            model, on, directory, max_num_seqs=CONCURRENCY, name=name, settings=settings,
            options=_SLEEPS,
        )  # fmt: skip

    plans = [plan(STOCK[0]), plan(GRAPH), plan(STOCK[1])]
    return [*plans, plan(TIERS, _WARM)] if tiers else plans


@dataclass
class Record:
    """What was measured until now, and where it is kept."""

    scale: Scale
    course: Course
    raw: Path | None = None
    rounds: Rounds = field(default_factory=dict)
    # by the figure's name, a sidecar's samples and its target
    feeds: dict[str, tuple[list[float], str]] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)  # of busy engines, by arm
    is_complete: bool = False  # whether nothing is to come any more

    @property
    def has_any(self) -> bool:
        """Whether anything was measured."""
        return bool(self.rounds or self.feeds or self.profiles)

    def note(self, arm: str, done: Round) -> None:
        """Keep a round."""
        self.rounds.setdefault(arm, []).append(done)
        self.save()

    def whole_pairs(self) -> Rounds:
        """The rounds of pairs in which every server had its turn."""
        pairs = min(map(len, self.rounds.values()), default=0)
        return {arm: done[:pairs] for arm, done in self.rounds.items()} if pairs else {}

    def figures(self) -> Figures:
        """Of what was measured until now."""
        figures = Figures("engine")
        if (rounds := self.whole_pairs()) and set(STOCK) <= rounds.keys():
            add_engine_figures(figures, rounds)
        for name, (samples, target) in self.feeds.items():
            figures.add(name, samples, "% of a core", target)
        for arm, profile in self.profiles.items():
            first, share = profile.first_of_ours, profile.called_share
            figures.add(f"{arm}_profile_first_of_ours", first, "line", "≥ 21")
            figures.add(f"{arm}_profile_called_share", share, "of main thread")
        figures.add("complete", self.is_complete, "bool")
        return figures

    def save(self) -> None:
        """Write everything that was measured, with date, machine and times, if that is wanted."""
        if self.raw is None:
            return
        record = {
            **measured_now(),
            "scale": asdict(self.scale),
            "seconds": {name: round(took, 1) for name, took in self.course.took.items()},
            "verdict": verdict(self.whole_pairs()).splitlines(),
            **self.figures().as_dict(),
            "profiles": {arm: each.lines() for arm, each in self.profiles.items()},
            "rounds": {arm: [asdict(each) for each in done] for arm, done in self.rounds.items()},
        }
        keep_raw(self.raw, record)


def add_engine_figures(figures: Figures, rounds: Rounds) -> None:
    """Ratios of pairs; of stock the mean of both servers, but where one is held to the other."""
    for name, arm, target in (("", GRAPH, "≤ 1.005"), ("_tiers", TIERS, "≤ 1.01")):
        if arm in rounds:
            found = ratios(rounds, arm, STOCK, _cpu)
            figures.add(f"engine_cpu_ratio{name}", found, f"{arm} / stock", target)
    again = ratios(rounds, STOCK[1], STOCK[:1], _cpu)
    figures.add("engine_cpu_ratio_stock", again, "stock / stock")
    figures.add("engine_cpu_floor", floor(rounds), "| ratio - 1 |")
    for arm, done in rounds.items():
        figures.add(f"{arm}_engine_cpu", [_cpu(each) for each in done], "CPU s / 1,000 tok")
    throughput = ratios(rounds, GRAPH, STOCK, _rate)
    figures.add("throughput_ratio", throughput, "graph / stock", "≥ 0.99")
    figures.add("throughput_ratio_stock", ratios(rounds, STOCK[1], STOCK[:1], _rate), "")
    for arm, done in rounds.items():
        figures.add(f"{arm}_output_tokens_per_s", [_rate(each) for each in done], "tok/s")


def _feed_sidecars(record: Record) -> None:
    feeds = (
        ("sidecar_cpu_250", 250, TURNS, "≤ 10"),
        ("sidecar_cpu_2000", 2000, TURNS, "≤ 40"),
        ("sidecar_cpu_2000_new", 2000, 1, ""),  # every block is new
    )
    scale = record.scale
    for name, blocks, turns, target in feeds:
        with record.course.part(f"a sidecar hears of 200 requests/s of {blocks} blocks"):
            samples = sidecar_cpu_percent(blocks, turns, scale.feed_rounds, scale.feed_s)
        record.feeds[name] = samples, target
        record.save()


def _profile(record: Record, model: str) -> None:
    """Profile busy engines, and show where their time goes."""
    with tempfile.TemporaryDirectory(prefix="kvgraph-profile-") as directory:
        arms = {GRAPH: (), TIERS: _WARM} if record.scale.tiers else {GRAPH: ()}
        for name, settings in arms.items():
            plan = ServerPlan(model, True, Path(directory), name=name, settings=settings)
            with record.course.part(f"{name}: {RUNNING} requests run"):
                found = profiled(plan, record.scale.profile_s)
            record.course.say("\n".join(found.lines()))
            record.profiles[name] = found
            record.save()


def ratios(
    rounds: Rounds, arm: str, beside: Sequence[str], value: Callable[[Round], float]
) -> list[float]:
    """``value`` of an arm's round over its mean in those of the others, pair by pair."""
    others = zip(*(rounds[each] for each in beside), strict=True)
    return [
        value(one) / float(np.mean([value(each) for each in pair]))
        for one, pair in zip(rounds[arm], others, strict=True)
    ]


def floor(rounds: Rounds) -> float:
    """What stock differs from itself by: nothing that is smaller is claimed.

    Of the 10th and 90th percentile of stock / stock the one that is further from 1; the extremes,
    below ten pairs.
    """
    again = ratios(rounds, STOCK[1], STOCK[:1], _cpu)
    bounds = np.percentile(again, (10, 90) if len(again) >= 10 else (0, 100))
    return float(np.max(np.abs(bounds - 1)))


def verdict(rounds: Rounds) -> str:
    """In a sentence for each arm, what can be said and what cannot."""
    if not set(STOCK) <= rounds.keys():
        return ""
    lines, least = [], floor(rounds)
    for arm in (GRAPH, TIERS):
        if arm in rounds:
            cost = float(np.median(ratios(rounds, arm, STOCK, _cpu))) - 1
            said = f"{arm}: engine CPU {cost:+.2%}, stock against stock up to ±{least:.2%}: "
            shown = "this is a difference" if abs(cost) > least else "no difference is shown"
            lines.append(said + shown)
    return "\n".join(lines)


def _cpu(each: Round) -> float:
    return each.cpu_per_1000


def _rate(each: Round) -> float:
    return each.rate
