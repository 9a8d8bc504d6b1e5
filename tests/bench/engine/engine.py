"""What the graph costs an engine that needs no help: CPU time without memory pressure.

Wall-clock rates of an engine, a server and a sidecar that share a few cores spread too widely to
show half a percent. So CPU seconds are counted, of the engine core's main thread and of ours, and
beside on and off two stock servers take part: what they differ by is no cost of anybody's. In all
of them the core sleeps while the model computes (``profiled_executor``), as it does not in vLLM.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import numpy as np
from rich.console import Console

from ..errors import ServerError
from ..figures import Figures, keep_raw, measured_now
from ..serving.completions import forced, open_client, send
from ..serving.model import TINY, ensure_model, vocabulary_size
from ..serving.vllm_server import Server, ServerPlan
from ..sidecars.sidecar_bench import Load, listened
from .engine_rounds import CONCURRENCY, Round, Rounds, Say, rounds_in_turns
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
_EXECUTORS: Final = f"{__package__}.profiled_executor"


class FunctionShare(NamedTuple):
    """A function's share of the main thread's CPU time, spent in itself."""

    function: str
    share: float
    ours: bool  # whether it is a function of kvgraph's


@dataclass(frozen=True, slots=True)
class Profile:
    rows: tuple[FunctionShare, ...]
    called_share: float  # of the time, what our functions take, and whatever these call

    @property
    def first_of_ours(self) -> int:
        ours = (line for line, row in enumerate(self.rows, 1) if row.ours)
        return next(ours, len(self.rows) + 1)

    def lines(self, count: int = 20) -> list[str]:
        shown = dict.fromkeys([*range(min(count, len(self.rows))), self.first_of_ours - 1])
        return [
            f"{at + 1:4d}  {self.rows[at].share:6.2%}  {self.rows[at].function}"
            for at in shown
            if at < len(self.rows)
        ]


def profiled(plan: ServerPlan, seconds: float) -> Profile:
    kept = plan.directory / f"{plan.arm}.own_times.json"
    settings = (*plan.settings, (OWN_TIMES, str(kept)))
    options = (*plan.options, "--distributed-executor-backend", f"{_EXECUTORS}.ProfiledExecutor")
    plan = replace(plan, blocks=POOL, max_model_len=MAX_MODEL_LEN, max_num_seqs=RUNNING,
                   settings=settings, options=options)  # fmt: skip
    with Server(plan) as server:
        asyncio.run(_keep_busy(server.url, vocabulary_size(plan.model), seconds))
    return read_profile(kept)


def read_profile(kept: Path) -> Profile:
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
        await send(client, f"caller-{number}-{session}/{turn}", forced(prompt, _ANSWER))
        sent += 1


STOCK: Final = ("stock", "stock_again")
GRAPH, TIERS = "graph", "tiers"
_WARM: Final = (("AITHER_KVCACHE_WARM_GIB", "0.5"),)
_SLEEPS: Final = ("--distributed-executor-backend", f"{_EXECUTORS}.SleepingExecutor")
PARTS: Final = ("all", "engine", "sidecar", "profile")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: ``pairs`` of rounds between two of so many starts (``fleets``: two
    processes that are alike differ too), with or without ``tiers``, ``feed_s`` seconds for which a
    sidecar is fed, and ``profile_s`` of each engine that is profiled.
    """

    pairs: int = 5
    fleets: int = 2
    tiers: bool = True
    feed_s: float = 20.0
    profile_s: float = 60.0


QUICK: Final = Scale(pairs=3, fleets=1, tiers=False, feed_s=6.0, profile_s=20.0)


def run(
    progress: bool = True,
    quick: bool = False,
    pairs: int | None = None,
    model: str | None = None,
    raw: Path | None = None,
    part: str = "all",
) -> Figures:
    """Measure ``part``; every round is kept in ``raw``, if that is given, as soon as it is over.
    Interrupted, it gives what it has until then; the figure ``complete`` says whether it is all.
    """
    scale, console = QUICK if quick else Scale(), Console(stderr=True, quiet=not progress)
    scale = replace(scale, pairs=pairs or scale.pairs)
    record = Record(scale, raw)
    try:
        if part in ("all", "engine"):
            _make_rounds(record, model or str(ensure_model()), console.print)
        if part in ("all", "sidecar"):
            console.print("a sidecar hears of 200 requests/s of 2,000 blocks, all of them new")
            heard = listened(1, 2000, Load(), scale.feed_s, turns=1)
            record.sidecar_cpu = float(np.median(heard.cpu_percent))
        if part == "profile":
            _profile(record, model or str(ensure_model(TINY)), console.print)
        record.is_complete = True
    except (KeyboardInterrupt, SystemExit):
        console.print("interrupted: the figures are those of what was measured until now")
    finally:
        record.save()
    return record.figures()


def _make_rounds(record: Record, model: str, say: Say) -> None:
    for _ in range(record.scale.fleets):
        with tempfile.TemporaryDirectory(prefix="kvgraph-engine-") as directory:
            plans = _plans(model, Path(directory), record.scale.tiers)
            rounds_in_turns(plans, record.scale.pairs, say, record.note)


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
    scale: Scale
    raw: Path | None = None
    rounds: Rounds = field(default_factory=dict)
    sidecar_cpu: float | None = None
    profiles: dict[str, Profile] = field(default_factory=dict)  # of busy engines, by arm
    is_complete: bool = False  # whether nothing is to come any more

    def note(self, arm: str, done: Round) -> None:
        self.rounds.setdefault(arm, []).append(done)
        self.save()

    def figures(self) -> Figures:
        figures = Figures("engine")
        pairs = min(map(len, self.rounds.values()), default=0)
        if pairs and set(STOCK) <= self.rounds.keys():
            add_engine_figures(figures, {arm: each[:pairs] for arm, each in self.rounds.items()})
        if self.sidecar_cpu is not None:
            figures.add("sidecar_cpu_2000_new", self.sidecar_cpu, "% of a core")
        for arm, profile in self.profiles.items():
            first, share = profile.first_of_ours, profile.called_share
            figures.add(f"{arm}_profile_first_of_ours", first, "line", "≥ 21")
            figures.add(f"{arm}_profile_called_share", share, "of main thread")
        figures.add("complete", self.is_complete, "bool")
        return figures

    def save(self) -> None:
        if self.raw is None:
            return
        record = {
            **measured_now(),
            "scale": asdict(self.scale),
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
    for arm, done in rounds.items():
        figures.add(f"{arm}_engine_cpu", [_cpu(each) for each in done], "CPU s / 1,000 tok")
    throughput = ratios(rounds, GRAPH, STOCK, _rate)
    figures.add("throughput_ratio", throughput, "graph / stock", "≥ 0.99")
    figures.add("throughput_ratio_stock", ratios(rounds, STOCK[1], STOCK[:1], _rate), "")


def _profile(record: Record, model: str, say: Say) -> None:
    with tempfile.TemporaryDirectory(prefix="kvgraph-profile-") as directory:
        arms = {GRAPH: (), TIERS: _WARM} if record.scale.tiers else {GRAPH: ()}
        for name, settings in arms.items():
            say(f"{name}: {RUNNING} requests run")
            plan = ServerPlan(model, True, Path(directory), name=name, settings=settings)
            found = record.profiles[name] = profiled(plan, record.scale.profile_s)
            say("\n".join(found.lines()))
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


def _cpu(each: Round) -> float:
    return each.cpu_per_1000


def _rate(each: Round) -> float:
    return each.rate
