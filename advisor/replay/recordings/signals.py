"""What callers of a fleet say about their sessions."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final

from .fleet import FleetRequest

MAGNITUDE: Final = 4.0
"""A tool's pause is told within this factor."""

_LEAST_PAUSE_S: Final = 0.5  # recorded times are whole seconds: a pause of 0 is up to half a one
_WAITING: Final = {"tool_use": True, "end_turn": False, "stop_sequence": False}


class Signals(StrEnum):
    """How much callers say; each is what a client of that kind can know."""

    NONE = "none"
    """Nothing."""
    ENDS = "ends"
    """That a session is over, with its last request."""
    STOPS = "stops"
    """Why answers ended, which an engine could see by itself."""
    ALL = "all"
    """Ends, why answers ended, and roughly how long a tool takes."""


def waiting_for_tool(request: FleetRequest) -> bool | None:
    """Whether the answer ended in a tool call (True) or ended the turn (False); None if unknown."""
    return _WAITING.get(request.turn.stop)


def rough_return_s(request: FleetRequest, seed: int) -> float | None:
    """The pause that a tool call causes, wrong by up to ``MAGNITUDE``; None without one."""
    if request.pause_s is None or not waiting_for_tool(request):
        return None
    error = random.Random(f"{seed}/return/{request.run}/{request.index}").uniform(-1.0, 1.0)
    return round(float(max(request.pause_s, _LEAST_PAUSE_S) * MAGNITUDE**error), 3)


def layers(request: FleetRequest) -> list[tuple[str, int, int]]:
    """The parts of a prompt's head: ``(source layer, first token, end token)``."""
    tools = min(request.session.tool_tokens, request.turn.input_tokens)
    head = min(tools + request.session.system_tokens, request.turn.input_tokens)
    parts = [("capabilities", 0, tools), ("rules", tools, head)]
    return [part for part in parts if part[1] < part[2]]
