"""``kvgraph bench fleet``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ..figures import Figures, keep_raw, measured_now
from .fleet_kills import add_kills
from .fleet_latency import add_latency
from .fleet_routers import add_routers
from .fleet_stock import add_stock_engines
from .fleet_store import add_store

PARTS: Final = ("all", "latency", "stock", "store", "kills", "routers")


def run(progress: bool, quick: bool = False, raw: Path | None = None, part: str = "all") -> Figures:
    """Measure every figure, or a short version (``quick``), whose figures are no claims. ``raw``:
    where what each kill and each router did goes as JSON. ``store``, ``kills`` and ``routers`` are
    on real engines. Raises BenchError: there is no vLLM to start, or no Mooncake.
    """
    figures, console = Figures("fleet"), Console(stderr=True, quiet=not progress)
    facts: dict[str, Any] = {}

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    if part in ("all", "kills"):  # first: not every machine can
        facts["kills"] = add_kills(figures, say)
    if part in ("all", "store"):
        add_store(figures, 3 if quick else 8, say)
    if part in ("all", "routers"):
        facts["routers"] = add_routers(figures, say)
    if part in ("all", "stock"):
        add_stock_engines(figures, say)
    if part in ("all", "latency"):
        add_latency(figures, quick)
    if raw is not None:
        keep_raw(raw, {**measured_now(), **figures.as_dict(), **facts})
    return figures
