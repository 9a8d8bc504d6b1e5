"""Shows a replay to people: a table, a picture, a page."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ...policies.registry import DEFAULT
from .arms import BOUNDS
from .hit_table import HitTable
from .pictures import pyplot

_GREY: Final = "#9aa0a6"
_WAY: Final = "mean share of LRU → Belady"


def rates_table(table: HitTable) -> Table:
    """Hit rates by arm and capacity, and each arm's mean way from LRU to Belady."""
    trace = table.trace
    shown = Table(
        title=f"{trace.name}: {len(trace):,} requests, {trace.prompt_blocks:,} prompt blocks of "
        f"{trace.block_size} tokens; share found by prefix",
        title_justify="left",
    )
    shown.add_column("capacity in blocks")
    for capacity in table.capacities:
        shown.add_column(f"{capacity:,}", justify="right")
    shown.add_column(_WAY, justify="right")
    for arm, row in table.rates.items():
        style = "dim" if arm in BOUNDS else None
        shown.add_row(
            arm, *(f"{rate:.4f}" for rate in row.values()), _mean_way(table, arm), style=style
        )
    return shown


def draw(table: HitTable, path: Path) -> None:
    """Save the picture: hit rate over capacity, in the band between LRU and Belady.

    Raises:
        ReplayError: matplotlib is not installed.
    """
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(9, 5.4), layout="constrained")
    _draw_band(axes, table)
    for arm, row in table.rates.items():
        if arm not in ("lru", "belady"):
            axes.plot(row.keys(), row.values(), label=arm, **_line(arm))
    axes.set_xscale("log")
    axes.set_xticks(table.capacities, [f"{capacity:,}" for capacity in table.capacities])
    axes.minorticks_off()
    axes.set_xlabel("capacity in blocks")
    axes.set_ylabel("prompt blocks found by prefix")
    axes.set_title(table.trace.name)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    plots.close(figure)


def write_page(table: HitTable, path: Path, sections: dict[str, dict[str, Any]]) -> None:
    """Save one HTML file with the picture, the table and further ``sections`` of facts."""
    picture = path.with_suffix(".png")
    draw(table, picture)
    image = base64.b64encode(picture.read_bytes()).decode()
    head = [f"{capacity:,}" for capacity in table.capacities]
    rows = [
        [arm, *(f"{rate:.4f}" for rate in row.values()), _mean_way(table, arm)]
        for arm, row in table.rates.items()
    ]
    parts = [
        f"<h1>Replay of {html.escape(table.trace.name)}</h1>",
        f'<img alt="hit rate over capacity" src="data:image/png;base64,{image}">',
        _html_table(["capacity in blocks", *head, _WAY], rows),
        *(f"<p>{html.escape(note)}</p>" for note in table.notes),
    ]
    for title, facts in sections.items():
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(_html_table(["", ""], [[name, str(value)] for name, value in facts.items()]))
    path.write_text(_PAGE.format(body="\n".join(parts)), encoding="utf-8")


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvgraph replay</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; }}
img {{ max-width: 100%; }} table {{ border-collapse: collapse; margin: 1rem 0; }}
td, th {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
</style></head><body>
{body}
</body></html>
"""


def _html_table(head: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _mean_way(table: HitTable, arm: str) -> str:
    ways = [table.way(arm, capacity) for capacity in table.capacities]
    known = [way for way in ways if way is not None]
    return f"{sum(known) / len(known):.0%}" if known else ""


def _draw_band(axes: Any, table: HitTable) -> None:
    lru, belady = table.rates.get("lru"), table.rates.get("belady")
    if lru and belady:
        axes.fill_between(list(lru), list(lru.values()), list(belady.values()), color="#e8f0fe")
    for row, name in ((lru, "lru"), (belady, "belady")):
        if row:
            axes.plot(row.keys(), row.values(), color="#3c4043", lw=2.5, label=name)


def _line(arm: str) -> dict[str, Any]:
    if arm in BOUNDS:
        return {"color": _GREY, "ls": ":", "lw": 1.2}
    if arm.startswith(DEFAULT):
        return {"lw": 2.5, "marker": "o"}
    return {"lw": 1.0, "marker": ".", "alpha": 0.8}
