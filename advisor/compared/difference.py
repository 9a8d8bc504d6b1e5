"""Two stretches beside each other: rows of figures, what moved most, and both in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ...graph.logs.reasons import REASON_TEXTS
from ..times.spoken_times import seconds
from .sums import Sums

_MOVERS: Final = 5  # shown at most; chosen
_SAME: Final = 0.005  # of the asked tokens or blocks: what is nearer is told as equal; chosen


class Row(NamedTuple):
    """One figure in both; None: not known."""

    name: str
    before: float | None
    after: float | None
    unit: str  # "", "%" or "s"


class Mover(NamedTuple):
    """What changed its part of all asked blocks; ``by`` is in shares of them."""

    what: str
    before: float
    after: float

    @property
    def by(self) -> float:
        return self.after - self.before


def rows(before: Sums, after: Sums) -> Iterator[Row]:
    """All figures, in the order in which to show them."""
    for name, figure, unit in _FIGURES:
        yield Row(name, figure(before), figure(after), unit)
    yield from _reason_rows(before, after)
    yield Row("evictions", before.evicted, after.evicted, "")
    yield Row("… wanted again in ten minutes", before.wanted, after.wanted, "")
    yield Row("… share of evictions", before.regret, after.regret, "%")
    for title, mine, theirs in (
        ("… by rule", before.left_by_rule, after.left_by_rule),
        ("… of layer", before.left_by_layer, after.left_by_layer),
    ):
        for name in sorted({**(mine or {}), **(theirs or {})}):
            yield Row(f"{title}: {name}", _count(mine, name), _count(theirs, name), "")


_FIGURES: Final[tuple[tuple[str, Callable[[Sums], float | None], str], ...]] = (
    ("length", lambda sums: sums.seconds, "s"),
    ("requests", lambda sums: sums.requests, ""),
    ("sessions", lambda sums: sums.session_count, ""),
    ("prompt tokens", lambda sums: sums.asked_tokens, ""),
    ("found", lambda sums: sums.share, "%"),
    ("tokens computed", lambda sums: sums.computed_tokens, ""),
    ("blocks asked for", lambda sums: sums.asked, ""),
    *(
        (f"… {name}", lambda sums, name=name: _count(sums.blocks, name), "")
        for name in ("pool", "loaded", "prefetched", "spliced", "computed")
    ),
)


def _reason_rows(before: Sums, after: Sums) -> Iterator[Row]:
    mine, theirs = before.reasons, after.reasons
    known = {**(mine or {}), **(theirs or {})}
    for reason in (name for name in REASON_TEXTS if name in known):
        yield Row(f"missed: {reason}, requests", _of(mine, reason, 0), _of(theirs, reason, 0), "")
        yield Row("… blocks computed for it", _of(mine, reason, 1), _of(theirs, reason, 1), "")


def _of(reasons: Mapping[str, tuple[int, int]] | None, reason: str, place: int) -> int | None:
    return None if reasons is None else reasons.get(reason, (0, 0))[place]


def _count(counts: Mapping[str, int] | None, name: str) -> int | None:
    return None if counts is None else counts.get(name, 0)


def movers(before: Sums, after: Sums) -> list[Mover]:
    """What moved most, the largest change first: parts of all asked blocks."""
    found: list[Mover] = []
    if before.reasons is not None and after.reasons is not None:
        names = (name for name in REASON_TEXTS if name != "not_cacheable")
        found += [
            _mover(f"computed because of {name}", _of(before.reasons, name, 1),
                   _of(after.reasons, name, 1), before, after)
            for name in names
        ]  # fmt: skip
    for layer in {**(before.left_by_layer or {}), **(after.left_by_layer or {})}:
        if before.left_by_layer is not None and after.left_by_layer is not None:
            gone = _count(before.left_by_layer, layer), _count(after.left_by_layer, layer)
            found.append(_mover(f"evictions of {layer}", *gone, before, after))
    mine_by, theirs_by = before.computed_by or {}, after.computed_by or {}
    for session in mine_by.keys() & theirs_by.keys():
        mine, theirs = mine_by[session], theirs_by[session]
        found.append(_mover(f"computed by session {session}", mine, theirs, before, after))
    moved = [each for each in found if abs(each.by) >= _SAME]
    return sorted(moved, key=lambda each: (-abs(each.by), each.what))[:_MOVERS]


def _mover(what: str, mine: int | None, theirs: int | None, before: Sums, after: Sums) -> Mover:
    return Mover(what, (mine or 0) / max(1, before.asked), (theirs or 0) / max(1, after.asked))


def words(before: Sums, after: Sums) -> list[str]:
    """The comparison in sentences."""
    said = [_found(before, after), *_sizes(before, after)]
    if before.regret is not None and after.regret is not None:
        said.append(
            f"Of the blocks that left, {before.regret:.1%} were wanted again within ten minutes in "
            f"{before.name}, and {after.regret:.1%} in {after.name}."
        )
    for each in movers(before, after):
        way = "rose" if each.by > 0 else "fell"
        said.append(
            f"{each.what[0].upper()}{each.what[1:]} {way} from {100 * each.before:.1f} to "
            f"{100 * each.after:.1f} blocks per 100 asked for{_meaning(each.what)}."
        )
    return said


def _found(before: Sums, after: Sums) -> str:
    mine, theirs = before.share, after.share
    silent = [sums.name for sums in (before, after) if not sums.requests]
    if silent or mine is None or theirs is None:
        return f"No request is known in {' and '.join(silent) or 'one of them'}."
    ahead = 100 * (theirs - mine)
    head = f"{after.name} found {theirs:.1%} of its prompt tokens, {before.name} {mine:.1%}"
    if abs(ahead) < 100 * _SAME:
        return f"{head}: as much."
    than = "more" if ahead > 0 else "less"
    cost = f"{after.computed_tokens:,} tokens were computed in {seconds(after.seconds)}"
    was = f"{before.computed_tokens:,} in {seconds(before.seconds)}"
    return f"{head}: {abs(ahead):.1f} points {than}; {cost}, before {was}."


def _sizes(before: Sums, after: Sums) -> Iterator[str]:
    """A warning where a block of the one is not a block of the other."""
    mine, theirs = before.block_sizes, after.block_sizes
    if len(mine | theirs) > 1:
        yield (
            f"Blocks have {_either(mine)} tokens in {before.name}, and {_either(theirs)} in "
            f"{after.name}: compare shares and tokens, not counts of blocks."
        )


def _either(sizes: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(sizes))) or "an unknown number of"


def _meaning(what: str) -> str:
    reason = what.removeprefix("computed because of ")
    return f" ({REASON_TEXTS[reason]})" if reason in REASON_TEXTS else ""


def as_data(before: Sums, after: Sums) -> dict[str, Any]:
    """The comparison for programs."""
    return {
        "words": words(before, after),
        "figures": [row._asdict() for row in rows(before, after)],
        "moved": [{**each._asdict(), "by": each.by} for each in movers(before, after)],
    }
