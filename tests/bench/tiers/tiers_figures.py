"""The arithmetic of ``bench tiers``: figures from what the arms recorded, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..figures import Figures, quantile
from ..serving.passes import PassResult, agreement
from ..serving.workload import Workload
from .tiers_arms import REACTIVE, SPILL_ALL, STOCK, TIERS, ArmRecord, PassRecord
from .tiers_workload import returning, reusable_tokens


@dataclass(frozen=True, slots=True)
class IdleRates:
    """Output tokens per second without memory pressure, once a pair."""

    stock: list[float]
    tiers: list[float]


@dataclass(frozen=True, slots=True)
class TierResult:
    """What the parts that were run have shown.

    Attributes:
        arms: By name.
        idle: None if that part was not run.
        refused: Rivals that did not start, and why.
        pace: Factor on the script's pauses; None if nothing was paused.
    """

    model: str
    out: Path
    workload: Workload
    arms: dict[str, ArmRecord]
    idle: IdleRates | None = None
    refused: dict[str, str] = field(default_factory=dict)
    pace: float | None = None

    def figures(self) -> Figures:
        """The figures of ``kvgraph bench tiers`` that these parts can give."""
        figures = Figures("tiers")
        sequential = {a.arm: a.sequential.result for a in self.arms.values() if a.sequential}
        concurrent = {a.arm: a.concurrent for a in self.arms.values() if a.concurrent}
        if sequential:
            _add_texts(figures, sequential)
        if sequential and concurrent:
            _add_agreement(figures, sequential[STOCK.name], concurrent)
        if concurrent:
            _add_pressure(figures, concurrent, self.workload)
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
        figures.add("concurrent_agreement", 100 * min(ours), "%", "as stock with itself")
    figures.add("stock_self_agreement", 100 * itself, "%")


def _add_pressure(figures: Figures, arms: dict[str, PassRecord], workload: Workload) -> None:
    stock = arms[STOCK.name].result
    figures.add("stock_context_lost", context_lost(stock, workload), "share of own context")
    figures.add("stock_hit_rate", hit_rate(stock), "share of prompt")
    if tiers := arms.get(TIERS.name):
        _add_gains(figures, stock, tiers.result, workload)
    if tiers and (reactive := arms.get(REACTIVE.name)):
        _add_prefetch(figures, tiers, reactive)
    if (worth := arms.get(REACTIVE.name)) and (everything := arms.get(SPILL_ALL.name)):
        _add_admission(figures, worth, everything)


def _add_gains(figures: Figures, stock: PassResult, tiers: PassResult, work: Workload) -> None:
    recomputed = tiers.recomputed_tokens / stock.recomputed_tokens
    figures.add("tiers_hit_rate", hit_rate(tiers), "share of prompt")
    # Beside the stalls: what is lost and computed again does not wait for a load either.
    figures.add("tiers_context_lost", context_lost(tiers, work), "share of own context")
    figures.add("recomputed_ratio", recomputed, "tiers / stock", "≤ 0.35")
    for percentile in (50, 95):
        slow, fast = (quantile(returning_ttft_ms(r, work), percentile) for r in (stock, tiers))
        figures.add(f"ttft_p{percentile}_ratio", fast / slow, "tiers / stock", "≤ 0.5")


def _add_prefetch(figures: Figures, tiers: PassRecord, reactive: PassRecord) -> None:
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
