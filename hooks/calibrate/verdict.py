"""Judges what was measured: whether splicing is allowed, and how far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..recall.cover import SpliceLimits
from .trials import Cell, Measured


@dataclass(frozen=True, slots=True)
class Bar:
    """What a cell must show.

    Attributes:
        most_kl: Mean divergence, in nats; chosen: a tenth of a nat moves a coin's .5 to .72.
        least_agreement: Share of tokens that stay the first choice; chosen.
    """

    most_kl: float = 0.1
    least_agreement: float = 0.9

    def passes(self, measured: Measured) -> bool:
        """Whether a cell passes."""
        return self.allows(measured.kl, measured.agreement)

    def allows(self, kl: float, agreement: float) -> bool:
        """Whether so much divergence, in nats, and a share of tokens that stay are allowed."""
        return kl <= self.most_kl and agreement >= self.least_agreement


DEFAULT_BAR: Final = Bar()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model passed, why, and what is allowed."""

    passed: bool
    reason: str
    limits: SpliceLimits


def judge_margins(
    grids: Iterable[Sequence[Cell]], measure: Callable[[Cell], Measured], bar: Bar = DEFAULT_BAR
) -> tuple[Verdict, list[Measured]]:
    """Judge one grid after the other, each of a longer margin, until one passes.

    Returns:
        The verdict on the last that was measured, and what all showed.
    """
    verdict, shown = judge([], bar), list[Measured]()
    for cells in grids:
        if shown and (verdict.passed or not cells):
            break
        measured = [measure(cell) for cell in cells]
        verdict, shown = judge(measured, bar), [*shown, *measured]
    return verdict, shown


def judge(measured: Sequence[Measured], bar: Bar = DEFAULT_BAR) -> Verdict:
    """Allow what was measured and passed: nothing shorter, further or with more joints.

    All of ``measured`` has one margin, which the limits keep.

    The limits are found one after the other: the shortest span from which on all lengths pass at
    the nearest distance, then the largest distance up to which all of these pass, then, up to that
    distance, joints, and how often text that was computed behind spliced text may be spliced again.
    How far text may move towards the end, and whether it may have opened its prompt, is judged
    beside that.
    """
    exact = [each for each in measured if not each.cell.int8]
    single = [each for each in exact if each.cell.joints == each.cell.generations == 1]
    later = [each for each in single if each.cell.later]
    single = [each for each in single if not each.cell.later]
    if not single:
        return Verdict(False, "the model takes no sequence that is long enough", SpliceLimits())
    nearest = min(each.cell.distance for each in single)
    near = [each for each in single if each.cell.distance == nearest]
    least = _least((each.cell.tokens, bar.passes(each)) for each in near)
    if least is None:
        return Verdict(False, _why_not(near, bar), SpliceLimits())
    fit = [each for each in single if each.cell.tokens >= least]
    furthest = _most((each.cell.distance, bar.passes(each)) for each in fit) or nearest
    within = [each for each in exact if each.cell.distance <= furthest and not each.cell.later]
    joints = _most((each.cell.joints, bar.passes(each)) for each in within if each.cell.joints > 1)
    again = [(each.cell.generations, bar.passes(each)) for each in within]
    generations = _most(each for each in again if each[0] > 1)
    inside = [each for each in later if not each.cell.opening]
    most_later = _most((each.cell.distance, bar.passes(each)) for each in inside)
    openings = {bar.passes(each) for each in later if each.cell.opening}
    limits = SpliceLimits(
        least, furthest, joints or 1, single[0].cell.margin, generations or 1, most_later or 0,
        openings == {True},
    )  # fmt: skip
    return Verdict(True, _words(limits, bar), limits)


def _least(results: Iterable[tuple[int, bool]]) -> int | None:
    """The smallest value from which on all pass."""
    found: int | None = None
    for value, passes in sorted(results, reverse=True):
        if not passes:
            break
        found = value
    return found


def _most(results: Iterable[tuple[int, bool]]) -> int | None:
    """The largest value up to which all pass."""
    found: int | None = None
    failed = False
    for value, passes in sorted(results, key=lambda each: (each[0], each[1])):
        failed |= not passes
        if failed:
            break
        found = value
    return found


def _why_not(near: Sequence[Measured], bar: Bar) -> str:
    longest = max(near, key=lambda each: each.cell.tokens)
    return (
        f"{longest.cell.tokens} tokens moved by {longest.cell.distance} change what it says, "
        f"{longest.cell.margin} computed tokens further on: "
        f"{longest.kl:.3f} nats (allowed: {bar.most_kl}), {100 * longest.agreement:.0f} % of the "
        f"tokens stay the same (needed: {100 * bar.least_agreement:.0f} %)"
    )


def _words(limits: SpliceLimits, bar: Bar) -> str:
    pieces = "one piece" if limits.most_joints == 1 else f"{limits.most_joints} pieces in a row"
    again = f", of {limits.most_generations} generations" if limits.most_generations > 1 else ""
    opened = "those that" if limits.openings else "none that"
    return (
        f"pieces of {limits.least_tokens} tokens or more, moved by {limits.most_distance} at most "
        f"towards the beginning and {limits.most_later} towards the end, "
        f"{opened} opened a prompt among them, {pieces}{again}, the last {limits.margin} tokens "
        f"computed: no more than {bar.most_kl} nats and {100 - 100 * bar.least_agreement:.0f} % of "
        "the tokens differ"
    )
