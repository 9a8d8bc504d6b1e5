"""``hit_table``: hit rates of many arms at many capacities, as a table and a picture."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ..policies.registry import DEFAULT
from .arms import BOUNDS, HINTS, STOPS, Settings, all_cells, graph_policies, run_arm, without_suffix
from .trace import ReplayError, Trace


@dataclass(frozen=True, slots=True)
class HitTable:
    trace: Trace
    capacities: tuple[int, ...]
    # Arm → capacity in blocks → prompt blocks matched by prefix / all prompt blocks.
    rates: dict[str, dict[int, float]]
    seconds: float  # how long the whole table took
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return ``{"trace", "blocks", "policies": {arm: {capacity: rate}}, "seconds"}``."""
        return {
            "trace": self.trace.name,
            "requests": len(self.trace),
            "blocks": self.trace.prompt_blocks,
            "distinct_blocks": self.trace.num_blocks,
            "block_size": self.trace.block_size,
            "policies": {
                arm: {str(capacity): round(rate, 6) for capacity, rate in row.items()}
                for arm, row in self.rates.items()
            },
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
        }

    def way(self, arm: str, capacity: int) -> float | None:
        """Return how far ``arm`` is from LRU (0) to Belady (1); None if one of these is missing."""
        lru, bound = (self.rates.get(name, {}).get(capacity) for name in ("lru", "belady"))
        if lru is None or bound is None or bound - lru < 1e-9:
            return None
        return (self.rates[arm][capacity] - lru) / (bound - lru)


def hit_table(
    trace: Trace,
    arms: Sequence[str],
    capacities: Sequence[int],
    settings: Settings,
    *,
    processes: int = 2,
    progress: Callable[[int, int], None] = lambda done, cells: None,
) -> HitTable:
    """Run every arm at every capacity, in ``processes`` processes (1: in this one)."""
    began = time.perf_counter()
    # Graph policies take the longest: start with them, so that no process ends alone with one.
    cells = sorted(itertools.product(arms, capacities), key=lambda cell: not _is_slow(cell[0]))
    found = all_cells(_hit_rate, (trace, settings), cells, processes, progress)
    rates = {arm: {c: found[arm, c] for c in capacities} for arm in arms}
    seconds = time.perf_counter() - began
    notes = list(_notes(trace, capacities, arms))
    if trace.num_blocks > min(capacities):
        notes += _equal_columns(rates, settings.guard)
    else:
        notes.append(
            f"no pool is ever full: {trace.name} has {trace.num_blocks:,} blocks in all, so all "
            "find the same; choose a smaller --capacity"
        )
    return HitTable(trace, tuple(capacities), rates, seconds, notes)


def _hit_rate(shared: tuple[Trace, Settings], cell: tuple[str, int]) -> float:
    """Return prompt blocks matched by prefix / all prompt blocks, for an arm and a capacity."""
    (trace, settings), (arm, capacity) = shared, cell
    return float(run_arm(arm, trace, capacity, settings).sum() / max(1, trace.prompt_blocks))


def _is_slow(arm: str) -> bool:
    return without_suffix(arm) in graph_policies()


def _notes(trace: Trace, capacities: Sequence[int], arms: Sequence[str]) -> Iterator[str]:
    said = trace.said
    if not (said and said.anything) and any(arm.endswith(HINTS) for arm in arms):
        yield (
            f"in {trace.name} nobody says anything: {HINTS} takes from the future which request is "
            "its session's last, and that is all that is said"
        )
    if not (said and said.tells_stops) and any(arm.endswith(STOPS) for arm in arms):
        yield (
            f"{trace.name} does not say why answers ended, so nothing is read with {STOPS}: make "
            "the fleet with `kvgraph traffic --signals stops` or `all`, or record one"
        )
    for capacity in capacities:
        if longer := int((trace.prompts > capacity).sum()):
            yield (
                f"{longer:,} of {len(trace):,} prompts have more than {capacity:,} blocks: an "
                "engine with such a pool refuses them"
            )


def _equal_columns(rates: dict[str, dict[int, float]], guard: bool) -> Iterator[str]:
    """Warn of different algorithms with the same figures everywhere, once of all that agree."""
    alike: dict[tuple[float, ...], list[str]] = {}
    for arm, row in rates.items():
        alike.setdefault(tuple(row.values()), []).append(arm)
    for found, arms in alike.items():
        if len(found) > 2 and len(arms) > 1:
            guarded = guard and "lru" in arms
            ranked = [arm for arm in arms if guarded and arm != "lru" and _is_slow(arm)]
            kept = f": the guard let {_listed(ranked)} rank never, or in vain" if ranked else ""
            yield f"{_listed(arms)} are equal at every capacity{kept}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def pyplot() -> Any:
    """Return ``matplotlib.pyplot``, drawing into files only. Raises ReplayError."""
    try:
        import matplotlib
    except ImportError:
        raise ReplayError("the picture needs matplotlib: pip install 'kvgraph[replay]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


_GREY: Final = "#9aa0a6"
_WAY: Final = "mean share of LRU → Belady"


def table_of(title: str, heads: Sequence[str], left: Sequence[str]) -> Table:
    """Return a table without rows; columns in ``left`` are left-aligned and never cut."""
    shown = Table(title=title, title_justify="left")
    for head in heads:
        shown.add_column(head, justify="left" if head in left else "right", no_wrap=head in left)
    return shown


def capacity_table(title: str, capacities: Sequence[int], *more: str) -> Table:
    first = "capacity in blocks"
    return table_of(title, [first, *(f"{each:,}" for each in capacities), *more], [first])


def rates_table(table: HitTable) -> Table:
    """Return hit rates by arm and capacity, and each arm's mean position between LRU and Belady."""
    trace = table.trace
    title = (
        f"{trace.name}: {len(trace):,} requests, {trace.prompt_blocks:,} prompt blocks of "
        f"{trace.block_size} tokens; share found by prefix"
    )
    shown = capacity_table(title, table.capacities, _WAY)
    for arm, row in table.rates.items():
        style = "dim" if arm in BOUNDS else None
        shown.add_row(
            arm, *(f"{rate:.4f}" for rate in row.values()), _mean_way(table, arm), style=style
        )
    return shown


def draw(table: HitTable, path: Path) -> None:
    """Save a picture of hit rates between LRU's and Belady's. Raises ReplayError."""
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
    save_picture(figure, path)


def save_picture(figure: Any, path: Path, dpi: int = 130) -> None:
    """Save a figure in the format of its file's suffix, and close it; raises ReplayError."""
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReplayError(f"picture {str(path)!r}: {reason}") from None
    finally:
        pyplot().close(figure)


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
