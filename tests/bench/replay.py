"""``kvgraph bench replay``: how fast the lab replays."""

from __future__ import annotations

from pathlib import Path

from kvgraph.advisor.replay.arms import Settings, arm_names
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.tables import hit_table
from rich.console import Console

from .errors import InputError
from .figures import Figures

CAPACITIES = (1000, 2000, 5000, 10_000, 20_000)
SHARED = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def run(progress: bool, trace: Path | None = None) -> Figures:
    figures = Figures("replay")
    console = Console(stderr=True, quiet=not progress)
    path = trace or SHARED
    if not path.exists():
        raise InputError(f"{path}: there is no trace; name one with --trace")
    loaded = load_trace(path)
    with console.status("every policy at five capacities, in two processes"):
        table = hit_table(loaded, arm_names(), CAPACITIES, Settings())
        figures.add("table_seconds", table.seconds, "s", "≤ 120")
    return figures
