"""``kvgraph top``: shows continuously what running sidecars report, until Ctrl-C."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..words.times import seconds, time_of_day
from ..words.words import ranker
from .remote import RemoteError, ask, sidecar_urls
from .terminal import UrlOption, facts_table, plain

_MISSES_EVERY: Final = 5  # looks; chosen


@dataclass(frozen=True, slots=True)
class Watched:
    url: str
    now: Mapping[str, Any] | None = None  # its `/v1/now`; None: it never answered
    misses: Mapping[str, Any] | None = None  # its `/v1/misses`
    trouble: str | None = None  # why it does not answer at present


def first_look(url: str | None) -> list[Watched]:
    """Ask the sidecars that run; raises RemoteError where none answers."""
    found = [_asked(Watched(each), True) for each in sidecar_urls(url)]
    if all(each.now is None for each in found):
        raise RemoteError(found[0].trouble or "no sidecar answers")
    return found


def next_look(url: str | None, before: Sequence[Watched], anew: bool) -> list[Watched]:
    """Ask again; a sidecar that does not answer, as while it restarts, keeps its last answer."""
    known = {each.url: each for each in before}
    try:
        return [_asked(known.get(each, Watched(each)), anew) for each in sidecar_urls(url)]
    except RemoteError:
        why = "it is gone; waiting for a sidecar to start"
    except Exception as error:  # whatever it is, the next look may go better
        why = f"the look failed ({type(error).__name__})"
    return [replace(each, trouble=why) for each in before]


def _asked(before: Watched, anew: bool) -> Watched:
    """A sidecar's new answer, or its previous one with the reason of the failure."""
    try:
        now = ask(before.url, "/v1/now")
        # Twelve hours of misses are a large answer: not at each poll.
        misses = ask(before.url, "/v1/misses") if anew or not before.misses else before.misses
    except RemoteError as error:
        since = f"; this is as of {time_of_day(before.now['at'])}" if before.now else ""
        return replace(before, trouble=f"{error}{since}")
    return Watched(before.url, now, misses)


_SHADES: Final = " ▁▂▃▄▅▆▇█"
_BAR: Final = 24  # characters of a bar; chosen
_STEPS: Final = 60  # steps of history shown at most; chosen
_REASONS: Final = 6  # reasons shown at most; chosen
_WINDOW_COLUMNS: Final = (
    "", "requests", "tokens", "found", "pool", "loaded", "prefetched", "LRU", "saved"
)  # fmt: skip
_STYLES: Final = {"serious": "bold red", "warning": "yellow", "info": "dim"}


def top_screen(watched: Sequence[Watched]) -> RenderableType:
    return Group(*(part for each in watched for part in _sidecar(each)))


def _sidecar(watched: Watched) -> Iterable[RenderableType]:
    now = watched.now
    clock = "" if now is None else f", {time_of_day(now['at'])}"
    yield Rule(plain(f"kvgraph {watched.url}{clock}"), align="left")
    if watched.trouble is not None:
        yield Text(f"! {plain(watched.trouble).plain}", style="bold red")
    if now is None:
        return
    yield Text(f"{plain(now['verdict']).plain}\n", style="bold")
    for each in now["attention"]:
        yield Text(f"{each['level']}: {plain(each['text']).plain}", style=_STYLES[each["level"]])
    yield windows_table(now["windows"])
    if any(now["history"]["asked"]):
        yield _history(now["history"])
    for pool in now["pools"]:
        yield _pool(pool, now)
    if watched.misses is not None:
        yield _misses(watched.misses)


def windows_table(windows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of where prompt tokens came from, by windows that have requests."""
    cells = [_window(each) for each in windows if each["asked"]]
    if not cells:
        return Text(windows[-1]["verdict"])
    said = "Tokens are of prompts, and shares are of these."
    table = Table(box=None, pad_edge=False, caption=said, caption_justify="left")
    for name in _WINDOW_COLUMNS:
        table.add_column(name, justify="left" if name == _WINDOW_COLUMNS[0] else "right")
    for each in cells:
        table.add_row(*each)
    return table


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
    pairs = list(zip(history["asked"], history["computed"], strict=True))[-_STEPS:]
    line = "".join(shade(1 - computed / asked) if asked else " " for asked, computed in pairs)
    span = seconds(len(pairs) * history["step_s"])
    return Text(f"\nfound, over {span}\n{line}", no_wrap=True, overflow="crop")


def shade(share: float) -> str:
    """Return a character that is fuller for a larger share."""
    return _SHADES[max(1, min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1))))]


def _pool(pool: Mapping[str, Any], now: Mapping[str, Any]) -> RenderableType:
    size, cached, engine = pool["blocks"], pool["cached"], pool["engine"]
    facts = [
        ("cached", f"{_bar(cached, size)} {cached:,} of {f'{size:,}' if size else '?'} blocks"),
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
    totals = sorted(misses["totals"].items(), key=lambda each: -each[1]["blocks"])
    rows = [
        (name, f"{total['blocks']:,} blocks computed for it; requests: {total['requests']:,}")
        for name, total in totals[:_REASONS]
        if total["requests"]
    ]
    return facts_table("\nwhy requests found no more", rows) if rows else Text("")


def top(
    url: UrlOption = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,
) -> None:
    """Show live whether kvgraph helps; Ctrl-C ends it. In a pipe, one look is printed."""
    seen, console = first_look(url), Console()
    if as_json:
        typer.echo(json.dumps([{"url": w.url, "now": w.now, "misses": w.misses} for w in seen]))
    elif not console.is_terminal:
        console.print(top_screen(seen))
    else:
        _follow(url, interval, seen, console)


def _follow(url: str | None, interval_s: float, seen: Sequence[Watched], console: Console) -> None:
    screen = Live(top_screen(seen), console=console, screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), screen:
        for looks in count(1):
            time.sleep(interval_s)
            seen = next_look(url, seen, anew=looks % _MISSES_EVERY == 0)
            screen.update(top_screen(seen), refresh=True)
