"""Tables for terminals of any width: what does not fit is folded, and no name is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .reasons.guard_words import beside_lru, ranker

_NAME_WIDTH: Final = 16  # of a folded engine name above a column, in characters; chosen
_ENGINES_ACROSS: Final = 3  # so many such columns fit 80 characters
_ANY_WIDTH: Final = 10_000  # wider than every table here
_ENGINE_COLUMNS: Final = (
    "name", "model", "state", "ranks", "resident", "ranking age", "moved", "dropped", "gaps"
)  # fmt: skip
_TEXTS: Final = ("name", "model", "state", "ranks")


class FirstThatFits:
    """Shows the first of its renderings that is no wider than the terminal, or else the last."""

    def __init__(self, *renderings: RenderableType) -> None:
        self._renderings = renderings

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Called by rich to show this."""
        wide = options.update_width(_ANY_WIDTH)
        fitting = (
            each
            for each in self._renderings
            if Measurement.get(console, wide, each).maximum <= options.max_width
        )
        yield next(fitting, self._renderings[-1])


def plain(text: object) -> Text:
    """Text as it is: no markup, and nothing that moves the cursor or turns the writing round."""
    return Text(
        "".join(
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(text)
        )
    )


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """A row per fact: its name and its text, both folded where they do not fit."""
    table = Table(title=plain(title), show_header=False, title_justify="left")
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(plain(name), plain(text))
    return table


def engines_report(engines: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row per engine; where the terminal is too narrow for columns, its facts as sentences."""
    if not engines:
        return Text("no engine is connected")
    cells = [_cells(engine) for engine in engines]
    columns = Table(title="engines", title_justify="left")
    for name in _ENGINE_COLUMNS:
        columns.add_column(name, justify="left" if name in _TEXTS else "right")
    for each in cells:
        columns.add_row(*(plain(each[name]) for name in _ENGINE_COLUMNS))
    return FirstThatFits(
        columns, facts_table("engines", ((each["name"], _told(each)) for each in cells))
    )


def layers_report(engines: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Resident blocks by layer, a column per engine; several tables where they do not fit one."""
    shown = [engine for engine in engines if engine["graph"]]
    few = [
        _layers(shown[start : start + _ENGINES_ACROSS])
        for start in range(0, len(shown), _ENGINES_ACROSS)
    ]
    return FirstThatFits(_layers(shown), Group(*few))


def _cells(engine: Mapping[str, Any]) -> dict[str, str]:
    graph, age = engine["graph"] or {}, engine["ranking_age_s"]
    applied = graph.get("applied") or {}
    return {
        "name": str(engine["name"]),
        "model": str(engine["model"]),
        "state": engine["state"],
        "ranks": _ruler(engine),
        "resident": str(graph.get("resident", 0)),
        "ranking age": "-" if age is None else f"{age:.2f} s",
        "moved": str(applied.get("moved", "-")),
        "dropped": str(applied.get("dropped", "-")),
        "gaps": str(engine["gaps"]),
    }


def _told(cells: Mapping[str, str]) -> str:
    counts = ("moved", "dropped", "gaps")
    return "\n".join(
        (
            f"{cells['model']}, {cells['state']}",
            f"ranked by {cells['ranks']}, {cells['ranking age']} ago",
            f"{cells['resident']} blocks; " + ", ".join(f"{name} {cells[name]}" for name in counts),
        )
    )


def _ruler(engine: Mapping[str, Any]) -> str:
    """Who ranks, and how the policy does beside LRU."""
    name, ruling = ranker(engine["ranked_by"]), engine["ruling"]
    return name if ruling is None else f"{name} (policy {beside_lru(ruling['ahead'])})"


def _layers(engines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="resident blocks by layer", title_justify="left")
    table.add_column("layer")
    for engine in engines:
        table.add_column(
            plain(engine["name"]), justify="right", overflow="fold", max_width=_NAME_WIDTH
        )
    for layer in engines[0]["graph"]["layers"]:
        table.add_row(layer, *(f"{engine['graph']['layers'][layer]:,}" for engine in engines))
    return table
