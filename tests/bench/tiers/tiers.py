"""Tiers on a real vLLM: agents that wait for tools, under memory pressure, arm by arm.

Every arm gets the same requests: first one at a time (are the texts those of stock?), then with
the agents' pauses (who still has their context when they come back?). A last part has no memory
pressure at all and measures what tiers cost an engine that needs none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ..engine.engine_rounds import CONCURRENCY, rounds_in_turns
from ..figures import Figures, at_least, quantile
from ..serving.completions import PassResult, agreement
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.workload import Workload
from .tiers_arms import (
    ARMS,
    POOL_BLOCKS,
    REACTIVE,
    SPILL_ALL,
    STOCK,
    TIERS,
    WARM_GIB,
    ArmRecord,
    PassRecord,
    build_tier_workload,
    measured_pace,
    paced,
    returning,
    reusable_tokens,
    run_arm,
    shortened,
    working_set_blocks,
)


@dataclass(frozen=True, slots=True)
class IdleRates:
    """Output tokens per second without memory pressure, once a pair."""

    stock: list[float]
    tiers: list[float]


@dataclass(frozen=True, slots=True)
class TierResult:
    model: str
    out: Path
    workload: Workload
    rounds: list[dict[str, ArmRecord]]  # arms by name; texts are of the first round alone
    idle: IdleRates | None = None  # none if that part was not run
    pace: float | None = None  # factor on the script's pauses; None if nothing was paused

    def figures(self) -> Figures:
        figures = Figures("tiers")
        first = self.rounds[0].values() if self.rounds else ()
        sequential = {a.arm: a.sequential.result for a in first if a.sequential}
        paused = [
            {a.arm: a.concurrent for a in arms.values() if a.concurrent} for arms in self.rounds
        ]
        if sequential:
            _add_texts(figures, sequential)
        if sequential and any(paused):
            _add_agreement(figures, sequential[STOCK.name], paused[0])
        figures.add_rounds([_pressure(arms, self.workload) for arms in paused if arms])
        if self.idle is not None:
            _add_idle(figures, self.idle)
        return figures


def returning_ttft_ms(result: PassResult, workload: Workload) -> list[float]:
    """Time to first token of the turns that came back from a tool, in milliseconds."""
    names = returning(workload)
    return [answer.ttft_s * 1e3 for answer in result.answers if answer.name in names]


def context_lost(result: PassResult, workload: Workload) -> float:
    """Share of the returning agents' own context that the prefix cache no longer held."""
    before = returning(workload)
    lost = own = 0
    for answer in result.answers:
        if answer.name in before:
            reusable, shared = reusable_tokens(before[answer.name])
            own += reusable - shared
            lost += min(reusable - shared, max(0, reusable - answer.cached_tokens))
    return lost / own


def hit_rate(result: PassResult) -> float:
    """Share of all prompt tokens that were not computed."""
    return result.cached_tokens / result.prompt_tokens


def _add_texts(figures: Figures, sequential: dict[str, PassResult]) -> None:
    stock = sequential[STOCK.name]
    same = all(result.texts == stock.texts for result in sequential.values())
    figures.add("texts_identical", same, "bool", "yes")


def _add_agreement(figures: Figures, alone: PassResult, concurrent: dict[str, PassRecord]) -> None:
    """Against the answers that stock gave with no batching at all."""
    ours = [agreement(alone, r.result) for arm, r in concurrent.items() if arm != STOCK.name]
    itself = agreement(alone, concurrent[STOCK.name].result)
    if ours:
        target = at_least(100 * itself)  # as stock with itself
        figures.add("concurrent_agreement", 100 * min(ours), "%", target)


def _pressure(arms: dict[str, PassRecord], workload: Workload) -> Figures:
    """Return what one round shows."""
    figures = Figures("tiers")
    stock = arms[STOCK.name].result
    figures.add("stock_context_lost", context_lost(stock, workload), "share of own context")
    figures.add("stock_hit_rate", hit_rate(stock), "share of prompt")
    if tiers := arms.get(TIERS.name):
        _add_gains(figures, stock, tiers.result, workload)
    if tiers and (reactive := arms.get(REACTIVE.name)):
        _add_prefetch(figures, tiers, reactive, workload)
    if (worth := arms.get(REACTIVE.name)) and (everything := arms.get(SPILL_ALL.name)):
        _add_admission(figures, worth, everything)
    return figures


def _add_gains(figures: Figures, stock: PassResult, tiers: PassResult, work: Workload) -> None:
    recomputed = tiers.recomputed_tokens / stock.recomputed_tokens
    figures.add("tiers_hit_rate", hit_rate(tiers), "share of prompt")
    # Beside the stalls: what is lost and computed again does not wait for a load either.
    figures.add("tiers_context_lost", context_lost(tiers, work), "share of own context")
    figures.add("recomputed_ratio", recomputed, "tiers / stock", "≤ 0.35")
    for percentile in (50, 95):
        slow, fast = (quantile(returning_ttft_ms(r, work), percentile) for r in (stock, tiers))
        figures.add(f"stock_ttft_p{percentile}_ms", slow, "ms")
        figures.add(f"ttft_p{percentile}_ratio", fast / slow, "tiers / stock", "≤ 0.5")


def _add_prefetch(
    figures: Figures, tiers: PassRecord, reactive: PassRecord, workload: Workload
) -> None:
    ahead, asked = (returning_ttft_ms(r.result, workload) for r in (tiers, reactive))
    for percentile in (50, 95):
        ratio = quantile(ahead, percentile) / quantile(asked, percentile)
        figures.add(f"prefetch_ttft_p{percentile}_ratio", ratio, "tiers / on demand", "≤ 1")
    ours, waiting = tiers.tiers, reactive.tiers
    assert ours is not None
    assert waiting is not None
    if waiting.stalls:
        figures.add("stall_reduction", 1 - ours.stalls / waiting.stalls, "share", "≥ 0.40")
    if ours.prefetched:
        useful = ours.prefetch_useful / ours.prefetched
        figures.add("prefetch_useful", useful, "share of blocks", "≥ 0.60")


def _add_admission(figures: Figures, worth: PassRecord, everything: PassRecord) -> None:
    """Both without prefetch, so that admission is all that differs."""
    few, many = worth.tiers, everything.tiers
    assert few is not None
    assert many is not None
    if many.spilled:
        ratio = few.spilled / many.spilled  # blocks of one size
        figures.add("spilled_bytes_ratio", ratio, "graph / everything", "≤ 0.60")
    gain = 100 * (hit_rate(worth.result) - hit_rate(everything.result))
    figures.add("hit_gain_over_spill_all", gain, "points", "≥ 0")


def _add_idle(figures: Figures, idle: IdleRates) -> None:
    ratios = [on / off for off, on in zip(idle.stock, idle.tiers, strict=True)]
    figures.add("idle_throughput_ratio", ratios, "tiers / stock", "≥ 0.98")
    figures.add("idle_stock_tokens_per_s", idle.stock, "tok/s")
    figures.add("idle_tiers_tokens_per_s", idle.tiers, "tok/s")


SEQUENTIAL_TURNS: Final = 3
"""Turns of each session in the sequential pass: enough for all to be forgotten and return."""


class Part(StrEnum):
    ALL = "all"
    TEXTS = "texts"
    PRESSURE = "pressure"
    IDLE = "idle"


def run(
    progress: bool = True,
    pairs: int = 6,
    model: str | None = None,
    out: Path = Path(".tiers"),
    part: Part = Part.ALL,
    pace: float | None = None,
    rounds: int = 1,
) -> TierResult:
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    name = model or str(ensure_model())
    workload = build_tier_workload(vocabulary_size(name))
    records: list[dict[str, ArmRecord]] = []
    if part is not Part.IDLE:
        with DemoProgress(len(workload.in_order()), shown=progress) as shown:
            if part is not Part.TEXTS:
                pace = pace or measured_pace(STOCK.plan(name, out), workload, shown)
                workload = paced(workload, pace)
            records.append(_round(name, workload, out, part, shown))
            for _ in range(rounds - 1 if part is not Part.TEXTS else 0):
                records.append(_round(name, workload, out, Part.PRESSURE, shown))
    idle = _idle(name, out, pairs, progress) if part in (Part.ALL, Part.IDLE) else None
    return TierResult(name, out, workload, records, idle, pace)


def _round(
    model: str, workload: Workload, out: Path, part: Part, shown: DemoProgress
) -> dict[str, ArmRecord]:
    sequential = None if part is Part.PRESSURE else shortened(workload, SEQUENTIAL_TURNS)
    concurrent = None if part is Part.TEXTS else workload
    return {
        arm.name: run_arm(arm.plan(model, out), arm.tiers, sequential, concurrent, shown)
        for arm in ARMS
    }


def _idle(model: str, out: Path, pairs: int, progress: bool) -> IdleRates:
    stock, tiers = (
        replace(arm.plan(model, out, blocks=None), max_num_seqs=CONCURRENCY)
        for arm in (STOCK, TIERS)
    )
    console = Console(stderr=True, quiet=not progress)
    rounds = rounds_in_turns([stock, tiers], pairs, console.print)
    return IdleRates(*([each.rate for each in rounds[plan.arm]] for plan in (stock, tiers)))


DETAILS_FILE: Final = "tiers.json"


def save_details(result: TierResult) -> Path:
    path = result.out / DETAILS_FILE
    content = {
        **result.figures().as_dict(),
        "workload": {"pace": result.pace, **_workload_details(result.workload)},
        "rounds": [
            {name: _arm_details(arm, result.workload) for name, arm in arms.items()}
            for arms in result.rounds
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _workload_details(workload: Workload) -> dict[str, Any]:
    needed = working_set_blocks(workload)
    return {
        "requests": len(workload.in_order()),
        "returning_turns": len(returning(workload)),
        "prompt_tokens": workload.prompt_tokens,
        "working_set_blocks": needed,
        "pool_blocks": POOL_BLOCKS,
        "pool_share": round(POOL_BLOCKS / needed, 3),
        "warm_gib": WARM_GIB,
    }


def _arm_details(arm: ArmRecord, workload: Workload) -> dict[str, Any]:
    passes = {"sequential": arm.sequential, "concurrent": arm.concurrent}
    return {
        name: _pass_details(record, workload)
        for name, record in passes.items()
        if record is not None
    }


def _pass_details(record: PassRecord, workload: Workload) -> dict[str, Any]:
    done = record.result
    ttft = returning_ttft_ms(done, workload)
    return {
        "requests": len(done.answers),
        "prompt_tokens": done.prompt_tokens,
        "computed_tokens": done.recomputed_tokens,
        "hit_rate": round(hit_rate(done), 4),
        "context_lost": round(context_lost(done, workload), 4),
        "returning_ttft_ms": {p: round(quantile(ttft, p), 1) for p in (50, 90, 95, 99)},
        "busy_share": round(sum(a.latency_s for a in done.answers) / done.wall_s, 3),
        "wall_s": round(done.wall_s, 2),
        "prompt_tokens_by_source": record.sources,
        "tiers": None if record.tiers is None else asdict(record.tiers),
    }
