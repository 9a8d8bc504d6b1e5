"""``kvgraph diff``: compares two recordings or time spans, in sentences and as a table."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from ...graph.errors import ConfigError
from ...graph.logs.history import WINDOW_S
from ...graph.logs.reasons import REASON_TEXTS
from ..words.times import seconds
from .activity import Activity, origin_of
from .terminal import FirstThatFits, facts_table, plain

_HELP = (
    "A recording of `kvgraph record`; or a stretch of time: 2h..1h (ago, at the running sidecar), "
    "FILE@0m..30m, URL@10m..now."
)


def diff(
    before: Annotated[str, typer.Argument(help=_HELP)],
    after: Annotated[str, typer.Argument(help="The same, to be compared with it.")],
    url: Annotated[
        str | None, typer.Option(help="A sidecar's URL; without it, the one that runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two recordings, or two stretches of time: what was found, and what moved most."""
    whole = cache(lambda origin: origin_of(origin or url).activity())
    found = [stretch(name, whole) for name in (before, after)]
    both = sums_of(found[0]), sums_of(found[1])
    unknown = list(dict.fromkeys(text for each in found for text in each.unknown))
    if as_json:
        typer.echo(json.dumps({**as_data(*both), "unknown": unknown}))
        return
    console = Console()
    for sentence in words(*both):
        console.print(plain(sentence))
    console.print(
        _table((both[0].name, both[1].name), [r for r in rows(*both) if r.before or r.after])
    )
    for text in unknown:
        console.print(plain(f"note: {text}"))


def _table(names: tuple[str, str], rows: list[Row]) -> FirstThatFits:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in (*names, "change"):
        table.add_column(plain(name), justify="right")
    for row in rows:
        table.add_row(plain(row.name), _text(row.before, row), _text(row.after, row), _change(row))
    told = [
        (row.name, f"{_text(row.before, row)} → {_text(row.after, row)} ({_change(row)})")
        for row in rows
    ]
    return FirstThatFits(table, facts_table(f"{names[0]} → {names[1]}", told))


def _text(value: float | None, row: Row) -> str:
    if value is None:
        return "-"
    if row.unit == "%":
        return f"{value:.1%}"
    return seconds(value) if row.unit == "s" else f"{value:,.0f}"


def _change(row: Row) -> str:
    if row.before is None or row.after is None:
        return "-"
    change = row.after - row.before
    if row.unit == "%":
        return f"{100 * change:+.1f} points"
    if row.unit == "s":
        return ""
    return f"{change:+,.0f}" + (f" ({change / row.before:+.0%})" if row.before else "")


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals of a time span; None where the source does not know."""

    name: str
    seconds: float
    requests: int
    session_count: int | None
    asked_tokens: int
    found_tokens: int
    asked: int  # full prompt blocks
    blocks: Mapping[str, int] | None  # of these, by where they came from
    reasons: Mapping[str, tuple[int, int]] | None  # requests, and blocks that they computed
    evicted: int | None
    wanted: int | None  # evicted blocks that were requested again
    left_by_layer: Mapping[str, int] | None
    left_by_rule: Mapping[str, int] | None
    computed_by: Mapping[str, int] | None  # blocks by session
    block_sizes: frozenset[int]  # in tokens

    @property
    def computed_tokens(self) -> int:
        return self.asked_tokens - self.found_tokens

    @property
    def share(self) -> float | None:
        """Share of prompt tokens that was found."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else None

    @property
    def regret(self) -> float | None:
        """Share of evicted blocks that were requested again."""
        return self.wanted / self.evicted if self.evicted and self.wanted is not None else None


def sums_of(activity: Activity) -> Sums:
    """Add up a time span: from records if they reach back to its beginning, else from minutes."""
    reaches = activity.since <= activity.begin or not activity.minutes
    return _of_records(activity) if reaches else _of_minutes(activity)


def _of_records(activity: Activity) -> Sums:
    requests, left = activity.requests, activity.evictions
    blocks = Counter[str]()
    for each in requests:
        blocks.update(each.blocks.model_dump())
    return Sums(
        name=activity.name,
        seconds=activity.end - activity.begin,
        requests=len(requests),
        session_count=len({(each.tenant, each.session) for each in requests if each.session}),
        asked_tokens=sum(each.prompt_tokens for each in requests),
        found_tokens=sum((e.blocks.asked - e.blocks.computed) * e.block_size for e in requests),
        asked=blocks.pop("asked", 0),
        blocks=blocks,
        reasons=_reasons(activity),
        evicted=None if left is None else len(left),
        wanted=None if left is None else sum(e.wanted_after_s is not None for e in left),
        left_by_layer=None if left is None else Counter(each.layer for each in left),
        left_by_rule=None if left is None else Counter(each.rule for each in left),
        computed_by=_by_session(activity),
        block_sizes=_sizes(activity),
    )


def _of_minutes(activity: Activity) -> Sums:
    requests, blocks = Counter[str](), Counter[str]()
    for each in activity.minutes:
        requests.update(each.requests)
        blocks.update(each.blocks)
    minutes = activity.minutes
    return Sums(
        name=activity.name,
        seconds=activity.end - activity.begin,
        requests=requests.total(),
        session_count=None,
        asked_tokens=sum(each.asked for each in minutes),
        found_tokens=sum(each.found for each in minutes),
        asked=sum(each.asked_blocks for each in minutes),
        blocks=None,
        reasons={name: (count, blocks[name]) for name, count in requests.items() if count},
        evicted=sum(each.evicted for each in minutes),
        wanted=sum(each.wanted for each in minutes),
        left_by_layer=None,
        left_by_rule=None,
        computed_by=None,
        block_sizes=_sizes(activity),
    )


def _sizes(activity: Activity) -> frozenset[int]:
    return frozenset(each.block_size for each in activity.requests)


def _reasons(activity: Activity) -> dict[str, tuple[int, int]] | None:
    if not activity.has_reasons:
        return None
    requests, blocks = Counter[str](), Counter[str]()
    for each in activity.requests:
        if each.miss is not None:
            requests[each.miss.reason] += 1
            blocks[each.miss.reason] += each.blocks.computed
    return {reason: (count, blocks[reason]) for reason, count in requests.items()}


def _by_session(activity: Activity) -> Counter[str]:
    computed = Counter[str]()
    for each in activity.requests:
        if each.session is not None:
            of = f" of {each.tenant}" if each.tenant else ""
            computed[each.session + of] += each.blocks.computed
    return computed


_MOVERS: Final = 5  # shown at most; chosen
_SAME: Final = 0.005  # of all tokens or blocks; smaller differences count as equal; chosen


class Row(NamedTuple):
    """One figure of both time spans; None: unknown."""

    name: str
    before: float | None
    after: float | None
    unit: str  # "", "%" or "s"


class Mover(NamedTuple):
    """A part of all requested blocks, and how its share changed."""

    what: str
    before: float
    after: float

    @property
    def by(self) -> float:
        return self.after - self.before


def rows(before: Sums, after: Sums) -> Iterator[Row]:
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
    """The largest changes first, as shares of all requested blocks."""
    found: list[Mover] = []
    if before.reasons is not None and after.reasons is not None:
        names = (name for name in REASON_TEXTS if name != "not_cacheable")
        found += [
            _mover(
                f"computed because of {name}",
                _of(before.reasons, name, 1),
                _of(after.reasons, name, 1),
                before,
                after,
            )
            for name in names
        ]
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
    sentences = [_found(before, after), *_pool_sizes(before, after)]
    if before.regret is not None and after.regret is not None:
        sentences.append(
            f"Of the blocks that left, {before.regret:.1%} were wanted again within ten minutes in "
            f"{before.name}, and {after.regret:.1%} in {after.name}."
        )
    for each in movers(before, after):
        way = "rose" if each.by > 0 else "fell"
        sentences.append(
            f"{each.what[0].upper()}{each.what[1:]} {way} from {100 * each.before:.1f} to "
            f"{100 * each.after:.1f} blocks per 100 asked for{_meaning(each.what)}."
        )
    return sentences


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


def _pool_sizes(before: Sums, after: Sums) -> Iterator[str]:
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
    return {
        "words": words(before, after),
        "figures": [row._asdict() for row in rows(before, after)],
        "moved": [{**each._asdict(), "by": each.by} for each in movers(before, after)],
    }


_MOMENT: Final = r"now|\d+(?:\.\d+)?[smh]?"
_STRETCH: Final = re.compile(rf"(?:(?P<origin>.+)@)?(?P<begin>{_MOMENT})\.\.(?P<end>{_MOMENT})")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_ALLOWED: Final = (
    "allowed: a file, a URL, 2h..1h (ago, at the running sidecar), or one of them with such a "
    "stretch behind it: FILE@0m..30m counts from the file's beginning"
)


class _ParsedName(NamedTuple):
    """A parsed name; times are in seconds, as given."""

    origin: str | None
    begin: float | None = None
    end: float | None = None


def stretch(name: str, read: Callable[[str | None], Activity]) -> Activity:
    """The recording or time span that ``name`` refers to.

    Args:
        read: All that happened at an origin; at the default sidecar for None.

    Raises:
        KvGraphError: It cannot be read, or the name is not valid.
    """
    named = _parsed(name)
    whole = read(named.origin)
    if named.begin is None or named.end is None:
        return whole
    times = (whole.end - named.begin, whole.end - named.end)
    begin, end = times if whole.is_live else (named.begin, named.end)
    if begin >= end:
        raise ConfigError(f"{name!r} is empty or runs backwards; {_ALLOWED}")
    cut = whole.between(begin, end, name)
    return replace(cut, unknown=[*cut.unknown, *_limits(name, whole, begin, end)])


def _parsed(name: str) -> _ParsedName:
    found = _STRETCH.fullmatch(name)
    if found is None:
        if ".." in name.rpartition("/")[2] and not Path(name).exists():
            raise ConfigError(f"{name!r} is not a stretch of time; {_ALLOWED}")
        return _ParsedName(name)
    return _ParsedName(found["origin"], _seconds(found["begin"]), _seconds(found["end"]))


def _seconds(moment: str) -> float:
    if moment == "now":
        return 0.0
    unit = moment[-1] if moment[-1] in "smh" else ""
    return float(moment.removesuffix(unit)) * _UNITS[unit]


def _limits(name: str, whole: Activity, begin: float, end: float) -> Iterator[str]:
    if begin < min((whole.begin, *(each.at for each in whole.minutes[:1]))):
        yield f"{name} begins before what is known: only a part of it is here."
    if whole.evictions and end > whole.end - WINDOW_S:
        yield (
            f"Of blocks that left at the end of {name} it is not known yet whether they are wanted "
            f"again within {WINDOW_S / 60:.0f} minutes."
        )
