"""``kvgraph bench replay``: how fast the lab replays."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvgraph.advisor.replay.arms import Settings
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.advisor.replay.tables import hit_table
from kvgraph.advisor.replay.trace import Trace, TraceError
from rich.console import Console

from .errors import InputError
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
        played = _fleet() if trace is None else _loaded(trace)
        seconds = list[float]()
        for number in range(_ROUNDS):
            status.update(f"six policies in two processes, round {number + 1} of {_ROUNDS}")
            seconds.append(hit_table(played, _POLICIES, [_CAPACITY], Settings()).seconds)
        figures.add("table_seconds", seconds, "s", "≤ 10" if trace is None else "")
    return figures


def _fleet() -> Trace:
    sessions = read_sessions(SESSIONS)
    return fleet("fleet", sessions, _USERS, _HOURS, Signals.ALL, with_layers=True)


def _loaded(path: Path) -> Trace:
    try:
        return load_trace(path)
    except TraceError as error:
        raise InputError(str(error)) from None
