"""What ``kvgraph top`` shows: a sidecar's answers as lines that fit any terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..reasons.guard_words import ranker
from ..terminal_tables import FirstThatFits, facts_table, plain
from ..times.spoken_times import seconds, time_of_day
from .watched import Watched

_SHADES: Final = " ▁▂▃▄▅▆▇█"
_BAR: Final = 24  # characters of a bar; chosen
_STEPS: Final = 60  # steps of history shown at most; chosen
_REASONS: Final = 6  # reasons shown at most; chosen
_WINDOW_COLUMNS: Final = (
    "prompt tokens", "requests", "tokens", "found", "pool", "loaded", "prefetched", "LRU", "saved"
)  # fmt: skip
_STYLES: Final = {"serious": "bold red", "warning": "yellow", "info": "dim"}


def top_screen(watched: Sequence[Watched]) -> RenderableType:
    """All sidecars, one below the other."""
    return Group(*(part for each in watched for part in _sidecar(each)))


def _sidecar(watched: Watched) -> Iterable[RenderableType]:
    now = watched.now
    yield Rule(plain(f"kvgraph {watched.url}{_clock(now)}"), align="left")
    if watched.trouble is not None:
        yield Text(f"! {plain(watched.trouble).plain}", style="bold red")
    if now is None:
        return
    yield Text(f"{plain(now['verdict']).plain}\n", style="bold")
    yield from (_notice(each) for each in now["attention"])
    yield windows_table(now["windows"])
    if any(now["history"]["asked"]):
        yield _history(now["history"])
    for pool in now["pools"]:
        yield _pool(pool, now)
    if watched.misses is not None:
        yield _misses(watched.misses)


def _clock(now: Mapping[str, Any] | None) -> str:
    return "" if now is None else f", {time_of_day(now['at'])}"


def _notice(notice: Mapping[str, Any]) -> Text:
    return Text(f"{notice['level']}: {plain(notice['text']).plain}", style=_STYLES[notice["level"]])


def windows_table(windows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Where the tokens of prompts came from; a window without requests is left out.

    Args:
        windows: As ``Now`` has them: the longest last.
    """
    cells = [_window(each) for each in windows if each["asked"]]
    if not cells:
        return Text(windows[-1]["verdict"])
    table = Table(box=None, pad_edge=False)
    for name in _WINDOW_COLUMNS:
        table.add_column(name, justify="left" if name == _WINDOW_COLUMNS[0] else "right")
    for each in cells:
        table.add_row(*each)
    titles = _WINDOW_COLUMNS[1:]
    told = ((row[0], _told(titles, row[1:])) for row in cells)
    return FirstThatFits(table, facts_table("prompt tokens", told))


def _told(titles: Sequence[str], cells: Sequence[str]) -> str:
    return ", ".join(f"{title} {cell}" for title, cell in zip(titles, cells, strict=True))


def _window(window: Mapping[str, Any]) -> list[str]:
    asked = window["asked"]
    shares = [asked - window["computed"], *(window[n] for n in ("pool", "loaded", "prefetched"))]
    return [
        f"last {seconds(window['seconds'])}",
        f"{window['requests']:,}",
        f"{asked:,}",
        *(f"{share / asked:.1%}" for share in shares),
        "-" if window["lru"] is None else f"{window['lru'] / asked:.1%}",
        "-" if window["saved_s"] is None else seconds(window["saved_s"]),
    ]


def _history(history: Mapping[str, Any]) -> Text:
    """The share that was found, by step: a blank where nothing was asked."""
    pairs = list(zip(history["asked"], history["computed"], strict=True))[-_STEPS:]
    line = "".join(shade(1 - computed / asked) if asked else " " for asked, computed in pairs)
    span = seconds(len(pairs) * history["step_s"])
    return Text(f"\nfound, over {span}\n{line}", no_wrap=True, overflow="crop")


def shade(share: float) -> str:
    """One character, the fuller the larger the share."""
    return _SHADES[max(1, min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1))))]


def _pool(pool: Mapping[str, Any], now: Mapping[str, Any]) -> RenderableType:
    size, cached, engine = pool["blocks"], pool["cached"], pool["engine"]
    facts = [
        ("cached", f"{_bar(cached, size)} {cached:,} of {size or '?'} blocks"),
        ("layers", _counts(pool["layers"])),
        ("of sessions", _counts(pool["states"])),
        ("protected", pool["protection"].removeprefix("protected: ")),
        *(("ranked by", _advice(each)) for each in now["advice"] if each["engine"] == engine),
        *(("room", each["sentence"]) for each in now["rooms"] if each["engine"] == engine),
        *((each["tier"], _tier(each)) for each in now["tiers"] if each["engine"] == engine),
    ]
    return facts_table(f"\n{pool['name']}", facts)


def _advice(advice: Mapping[str, Any]) -> str:
    age = advice["age_s"]
    who = ranker(advice["ranked_by"])
    return f"{who}; advice is {age:.1f} s old" if age is not None else f"{who}; no advice yet"


def _tier(tier: Mapping[str, Any]) -> str:
    bar = _bar(tier["blocks"], tier["capacity"])
    return f"{bar} {tier['blocks']:,} of {tier['capacity']:,} blocks, {tier['bytes'] / 1e9:.2f} GB"


def _bar(count: int, of: int | None) -> str:
    full = round(_BAR * min(1.0, count / of)) if of else 0
    return "█" * full + "░" * (_BAR - full)


def _counts(counts: Mapping[str, int]) -> str:
    known = sorted(counts.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {count:,}" for name, count in known if count) or "none"


def _misses(misses: Mapping[str, Any]) -> RenderableType:
    """Why requests found no more, the costliest reason first."""
    totals = sorted(misses["totals"].items(), key=lambda each: -each[1]["blocks"])
    rows = [
        (name, f"{total['requests']:,} requests computed {total['blocks']:,} blocks for it")
        for name, total in totals[:_REASONS]
        if total["requests"]
    ]
    return facts_table("\nwhy requests found no more", rows) if rows else Text("")
