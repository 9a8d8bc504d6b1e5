"""``kvgraph bench replay``: how fast the lab replays."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvgraph.advisor.replay.arms import Settings
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.advisor.replay.tables import hit_table
from rich.console import Console

from .figures import Figures
from .recorded.agents_requests import SESSIONS
from .recorded.lab_fleets import fleet

_USERS, _HOURS = 40, 3.0
_CAPACITY: Final = 2_000  # blocks
_POLICIES: Final = ("lru", "arc", "classic", "lifecycle", "lifecycle+hints", "belady")
_ROUNDS: Final = 3


def run(progress: bool, trace: Path | None = None) -> Figures:
    figures, console = Figures("replay"), Console(stderr=True, quiet=not progress)
    with console.status("laying recorded sessions over 40 users") as status:
        if trace is None:
            sessions = read_sessions(SESSIONS)
            played = fleet("fleet", sessions, _USERS, _HOURS, Signals.ALL, with_layers=True)
        else:
            played = load_trace(trace)
        seconds = list[float]()
        for number in range(_ROUNDS):
            status.update(f"six policies in two processes, round {number + 1} of {_ROUNDS}")
            seconds.append(hit_table(played, _POLICIES, [_CAPACITY], Settings()).seconds)
        figures.add("table_seconds", seconds, "s", "≤ 10" if trace is None else "")
    return figures
