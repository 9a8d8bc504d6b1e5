"""Recorded coding agents on a real vLLM: stock, with the graph, with hints, with host memory.

Every arm gets the same requests, one at a time. Recorded sessions are laid over users who work in
parallel; everything is ``SHRINK`` times smaller than recorded, and as fast as this machine allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from ..errors import TrafficError
from ..figures import Figures, quantile
from ..recorded.agents_requests import (
    SESSIONS,
    SHRINK,
    USERS,
    AgentRequest,
    engine_trace,
    pace_of,
    recorded_requests,
)
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.workload import BLOCK
from .agents_arms import (
    BELADY,
    DEFAULT,
    HINTS,
    HOST_LRU,
    KEPT_BACK,
    LRU,
    MARKED,
    QUIET_TIERS,
    STOCK,
    TIERS,
    AgentArm,
    AgentRun,
    LabRun,
    Room,
    default_policy,
    lab_run,
    longest,
    pool_for,
    run_arm,
)


@dataclass(frozen=True, slots=True)
class AgentsResult:
    out: Path
    requests: tuple[AgentRequest, ...]
    pools: tuple[int, ...]  # blocks of each pool; the first one's figures are the headline
    pace: float | None  # seconds that a recorded second took
    runs: Sequence[AgentRun]
    lab: Sequence[LabRun]

    def figures(self) -> Figures:
        figures = Figures("agents")
        first = self.pools[0]
        figures.add("stock_share", self.shares(STOCK, first), "share of prompt", ".5 – .7")
        belady = self.lab_share(BELADY, first)
        assert belady is not None
        figures.add("belady_share", belady, "share of prompt")
        for arm, name, target in (
            (DEFAULT, "engine_inferred_share", "≥ 0.30"),
            (MARKED, "engine_marked_share", "≥ engine_inferred_share"),
            (HINTS, "engine_signalled_share", "≥ 0.55"),
        ):
            if self.shares(arm, first):
                figures.add(f"{arm.name}_share", self.shares(arm, first), "share of prompt")
                figures.add(name, self._closed(arm, belady), "of stock → Belady", target)
        if points := self._worst_points():
            figures.add("engine_worst_points", min(points), "points", "≥ -0.2")
        if differences := self.lab_differences():
            largest = max(differences, key=abs)
            figures.add("lab_live_difference", largest, "points", "≤ 1 either way")
        self._add_tiers(figures)
        return figures

    def shares(self, arm: AgentArm, pool: int) -> list[float]:
        return [r.passed.share for r in self.runs if (r.arm, r.pool) == (arm.name, pool)]

    def lab_share(self, policy: str, pool: int) -> float | None:
        found = [r.share for r in self.lab if (r.policy, r.pool) == (policy, pool)]
        return found[0] if found else None

    def lab_differences(self) -> list[float]:
        """What arms gain over stock beyond what the lab lets them gain over LRU, in points."""
        found = []
        for arm in (DEFAULT, HINTS):
            for pool in self.pools:
                shares = self.shares(arm, pool)
                policy = self.lab_share(default_policy(arm.telling.hinted), pool)
                lru = self.lab_share(LRU, pool)
                if shares and policy is not None and lru is not None:
                    live = median(shares) - median(self.shares(STOCK, pool))
                    found.append(100 * (live - (policy - lru)))
        return found

    def _closed(self, arm: AgentArm, belady: float) -> float:
        stock = median(self.shares(STOCK, self.pools[0]))
        return (median(self.shares(arm, self.pools[0])) - stock) / (belady - stock)

    def _worst_points(self) -> list[float]:
        """Each run with advice and without host memory, against the worst of stock's runs."""
        return [
            100 * (share - min(self.shares(STOCK, pool)))
            for arm in (DEFAULT, MARKED, HINTS)
            for pool in self.pools
            for share in self.shares(arm, pool)
        ]

    def _add_tiers(self, figures: Figures) -> None:
        for arm in (HOST_LRU, QUIET_TIERS, TIERS):
            if shares := self.shares(arm, self.pools[0]):
                figures.add(f"{arm.name}_share", shares, "share of prompt")
        for arm, name, target in (
            (QUIET_TIERS, "quiet_tiers_recomputed", "≤ 1.0"),
            (TIERS, "tiers_recomputed", "≤ 0.85"),
        ):
            if ratios := self._ratios(arm):
                figures.add(f"{name}_ratio", ratios[min(ratios)], "tiers / plain", target)
                figures.add(f"{name}_worst", max(ratios.values()), "tiers / plain", "≤ 1.0")

    def _ratios(self, arm: AgentArm) -> dict[int, float]:
        """By size of host memory: tokens that an arm computed over those of a plain host tier."""
        return {
            run.host: run.passed.result.recomputed_tokens / plain.passed.result.recomputed_tokens
            for run in self.runs
            for plain in self.runs
            if (run.arm, plain.arm) == (arm.name, HOST_LRU.name) and run.host == plain.host
        }


SHARES: Final = (0.6, 0.4, 0.8)
"""What stock should find in the pools of a run, the first one's figures being the headline."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything there is: ``requests`` of the fleet, ``shares`` with a pool each (see
    ``SHARES``), ``repeats`` of stock on the first pool, ``hosts``, shares of it, and ``arms``
    unless the caller chooses.
    """

    requests: int = 400
    shares: tuple[float, ...] = SHARES
    repeats: int = 3
    hosts: tuple[float, ...] = (0.5,)  # more of them: --open, above a simulated model
    arms: tuple[AgentArm, ...] = (STOCK, DEFAULT, MARKED, HINTS, HOST_LRU, TIERS)

    def cut(self, requests: int | None, shares: tuple[float, ...] | None) -> Scale:
        requests = self.requests if requests is None else requests
        return replace(self, requests=requests, shares=shares or self.shares)


QUICK: Final = Scale(shares=SHARES[:1], repeats=1, arms=(STOCK, DEFAULT, HINTS, HOST_LRU, TIERS))


def run(
    progress: bool = True,
    scale: Scale | None = None,
    arms: Sequence[AgentArm] | None = None,
    sessions: Path = SESSIONS,
    seed: int = 1,
    model: str | None = None,
    out: Path = Path(".agents"),
    keep: Callable[[AgentsResult], object] = lambda result: None,
) -> AgentsResult:
    scale = scale or Scale()
    arms = scale.arms if arms is None else arms
    if STOCK not in arms:
        raise TrafficError("the arm stock is missing: every figure is relative to it")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    name = model or str(ensure_model())
    vocabulary = vocabulary_size(name)
    requests = recorded_requests(sessions, USERS, seed, scale.requests, vocabulary)
    with DemoProgress(len(requests), shown=progress) as shown:
        bench = _Bench(name, out, requests, scale, arms, shown, keep)
        bench.play()
        return bench.result()


@dataclass
class _Bench:
    model: str
    out: Path
    requests: tuple[AgentRequest, ...]
    scale: Scale
    arms: Sequence[AgentArm]
    shown: DemoProgress
    keep: Callable[[AgentsResult], object]
    runs: list[AgentRun] = field(default_factory=list)
    lab: list[LabRun] = field(default_factory=list)
    pace: float | None = None  # measured by the first run of stock

    def __post_init__(self) -> None:
        self.max_model_len = longest(self.requests)
        least, scratch = self.max_model_len // BLOCK + KEPT_BACK, self.out / "fleet.jsonl.gz"
        shares = self.scale.shares
        self.pools = tuple(pool_for(self.requests, share, least, scratch) for share in shares)

    def play(self) -> None:
        for pool in self.pools:
            self._play_stock(pool, self.scale.repeats if pool == self.pools[0] else 1)
            for arm in (DEFAULT, HINTS):
                if arm in self.arms:
                    self._play_advised(arm, pool)
        if MARKED in self.arms:
            self._run(MARKED, self.pools[0])
        for share in self.scale.hosts:
            for arm in (HOST_LRU, QUIET_TIERS, TIERS):
                if arm in self.arms:
                    self._run(arm, self.pools[0], host=round(share * self.pools[0]))

    def result(self) -> AgentsResult:
        return AgentsResult(self.out, self.requests, self.pools, self.pace, self.runs, self.lab)

    def _play_stock(self, pool: int, repeats: int) -> None:
        """What stock evicts depends on no clock, so it need not wait for one."""
        for number in range(repeats):
            done = self._run(STOCK, pool, number=number, timed=False)
        self.pace = self.pace or pace_of(done.passed.result.wall_s, self.requests)
        self._replay(done, LRU, BELADY)

    def _play_advised(self, arm: AgentArm, pool: int) -> None:
        self._replay(self._run(arm, pool), default_policy(arm.telling.hinted))

    def _run(
        self, arm: AgentArm, pool: int, host: int = 0, number: int = 0, timed: bool = True
    ) -> AgentRun:
        room = Room(self.model, self.out, pool, self.max_model_len, host)
        pace = self.pace if timed else None
        done = run_arm(arm, room, self.requests, pace, self.shown, number)
        self.runs.append(done)
        if self.lab:  # what stock finds is told in shares of Belady's, which is replayed behind it
            self.keep(self.result())
        return done

    def _replay(self, done: AgentRun, *policies: str) -> None:
        """The lab on what was just sent, at the times at which it was sent."""
        path = self.out / f"{done.name}.jsonl.gz"
        pace = done.pace or 1.0
        trace = engine_trace(self.requests, done.passed.sent_s, pace, path, done.took_s())
        for policy in policies:
            self.shown.passing("lab", policy, 0)
            self.lab.append(lab_run(trace, policy, done.pool))
        self.keep(self.result())


DETAILS_FILE: Final = "agents.json"


def save_details(result: AgentsResult) -> Path:
    path = result.out / DETAILS_FILE
    content = {
        **result.figures().as_dict(),
        "fleet": _fleet_details(result),
        "runs": [_run_details(run, result.requests) for run in result.runs],
        "lab": [_lab_details(run) for run in result.lab],
    }
    path.write_text(json.dumps(content) + "\n")
    return path


def late_s(run: AgentRun, requests: Sequence[AgentRequest]) -> list[float]:
    """Seconds by which each request was sent after it was due; empty if no clock was followed."""
    if run.pace is None:
        return []
    due = [run.pace * (request.at - requests[0].at) for request in requests]
    return [sent - at for sent, at in zip(run.passed.sent_s, due, strict=True)]


def _fleet_details(result: AgentsResult) -> dict[str, Any]:
    requests = result.requests
    return {
        "requests": len(requests),
        "sessions": len({request.session for request in requests}),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "recorded_s": round(requests[-1].at - requests[0].at, 1),
        "shrink": SHRINK,
        "block": BLOCK,
        "pools": result.pools,
        "pace": result.pace,
    }


def _run_details(run: AgentRun, requests: Sequence[AgentRequest]) -> dict[str, Any]:
    done, late = run.passed.result, late_s(run, requests)
    return {
        "arm": run.arm,
        "pool": run.pool,
        "host": run.host,
        "share": round(run.passed.share, 5),
        "computed_tokens": done.recomputed_tokens,
        "wall_s": round(done.wall_s, 1),
        "busy_share": round(sum(a.latency_s for a in done.answers) / done.wall_s, 3),
        "late_s": {p: round(quantile(late, p), 2) for p in (50, 95)} if late else None,
        "ttft_ms": {p: round(quantile(done.ttft_ms, p), 1) for p in (50, 95)},
        "prompt_tokens_by_source": run.own.sources,
        "mean_served_s": round(run.own.mean_served_s, 4),
        "cached_blocks": [answer.cached_tokens // BLOCK for answer in done.answers],
    }


def _lab_details(run: LabRun) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "pool": run.pool,
        "share": round(run.share, 5),
        "cached_blocks": np.asarray(run.hits).tolist(),
    }
