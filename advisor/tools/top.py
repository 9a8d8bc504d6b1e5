"""``kvgraph top``: shows continuously what running sidecars report, until Ctrl-C."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from .terminal import FirstThatFits, UrlOption, facts_table, plain

_MISSES_EVERY: Final = 5  # polls; chosen


@dataclass(frozen=True, slots=True)
class Watched:
    url: str
    now: Mapping[str, Any] | None = None  # its `/v1/now`; None: it never answered
    misses: Mapping[str, Any] | None = None  # its `/v1/misses`
    trouble: str | None = None  # why it does not answer at present


class Watcher:
    """Polls sidecars on its own thread, and keeps the latest answer of each while it restarts."""

    def __init__(self, url: str | None, interval_s: float) -> None:
        self._url = url
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraph-top", daemon=True)
        self.latest: Sequence[Watched] = ()  # of the last poll
        self.polls = 0

    def first_poll(self) -> None:
        """Poll once; raises RemoteError if no sidecar answers."""
        found = [_asked(Watched(each), True) for each in sidecar_urls(self._url)]
        if all(each.now is None for each in found):
            raise RemoteError(found[0].trouble or "no sidecar answers")
        self._note(found)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def poll(self) -> None:
        """Poll again; a sidecar that does not answer keeps its last answer."""
        before = {each.url: each for each in self.latest}
        try:
            urls = sidecar_urls(self._url)
        except RemoteError:
            waits = "it is gone; waiting for a sidecar to start"
            self._note([replace(each, trouble=waits) for each in self.latest])
            return
        anew = self.polls % _MISSES_EVERY == 0
        self._note([_asked(before.get(url, Watched(url)), anew) for url in urls])

    def _note(self, found: Sequence[Watched]) -> None:
        self.latest = found
        self.polls += 1

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.poll()
            except Exception as error:  # whatever it is, the next poll may go better
                why = f"the look failed ({type(error).__name__})"
                self._note([replace(each, trouble=why) for each in self.latest])


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
    "prompt tokens", "requests", "tokens", "found", "pool", "loaded", "prefetched", "LRU", "saved"
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
    """Return a table of where prompt tokens came from, per time window; windows without requests
    are left out.
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
    facts = ((row[0], _sentence(titles, row[1:])) for row in cells)
    return FirstThatFits(table, facts_table("prompt tokens", facts))


def _sentence(titles: Sequence[str], cells: Sequence[str]) -> str:
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
    totals = sorted(misses["totals"].items(), key=lambda each: -each[1]["blocks"])
    rows = [
        (name, f"{total['requests']:,} requests computed {total['blocks']:,} blocks for it")
        for name, total in totals[:_REASONS]
        if total["requests"]
    ]
    return facts_table("\nwhy requests found no more", rows) if rows else Text("")


_CHECK_EVERY_S: Final = 0.1  # whether there is something new to draw; chosen


def top(
    url: UrlOption = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,
) -> None:
    """Show live whether kvgraph helps; Ctrl-C ends it. In a pipe, one look is printed."""
    watcher, console = Watcher(url, interval), Console()
    watcher.first_poll()
    if as_json:
        seen = [{"url": w.url, "now": w.now, "misses": w.misses} for w in watcher.latest]
        typer.echo(json.dumps(seen))
    elif not console.is_terminal:
        console.print(top_screen(watcher.latest))
    else:
        _follow(watcher, console)


def _follow(watcher: Watcher, console: Console) -> None:
    watcher.start()
    drawn = 0, console.size
    screen = Live(top_screen(watcher.latest), console=console, screen=True, auto_refresh=False)
    try:
        with screen:
            while True:
                if drawn != (watcher.polls, console.size):
                    drawn = watcher.polls, console.size
                    screen.update(top_screen(watcher.latest), refresh=True)
                time.sleep(_CHECK_EVERY_S)
    except KeyboardInterrupt:
        pass
    finally:
        watcher.stop()
