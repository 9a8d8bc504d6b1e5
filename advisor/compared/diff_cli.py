"""``kvgraph diff``: prints a comparison in words and as a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..terminal_tables import FirstThatFits, facts_table, plain
from ..times.spoken_times import seconds

if TYPE_CHECKING:
    from .difference import Row

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
    from .difference import as_data, rows, words
    from .stretches import Stretches
    from .sums import sums_of

    stretches = Stretches(url)
    found = [stretches.of(name) for name in (before, after)]
    both = sums_of(found[0]), sums_of(found[1])
    unknown = list(dict.fromkeys(text for each in found for text in each.unknown))
    if as_json:
        typer.echo(json.dumps({**as_data(*both), "unknown": unknown}))
        return
    console = Console()
    for sentence in words(*both):
        console.print(plain(sentence))
    console.print(_table((both[0].name, both[1].name), [r for r in rows(*both) if _is_told(r)]))
    for text in unknown:
        console.print(plain(f"note: {text}"))


def _is_told(row: Row) -> bool:
    """Whether a row says anything: a figure that neither knows, or is zero in both, does not."""
    return bool(row.before or row.after)


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
