"""The closed loop of `kvgraph bench policies`: what admission makes of engines past LRU's cliff."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..advisor.replay.arms import BY_DEFAULT
from ..advisor.replay.closed import Loop
from ..advisor.replay.closed_arms import ADMISSION, LPM, ClosedCell, ClosedRow, Plan, closed_rows
from ..advisor.replay.closed_cli import Part, part_of
from ..advisor.replay.weka import Session
from .figures import Figures

ADMITTED: Final = BY_DEFAULT + ADMISSION
"""Nothing is said by callers: sessions are inferred, and nobody knows which are over."""
LOST: Final = 0.25
"""Of the prompt, computed: beyond it an engine is past its cliff."""
UNDER: Final = 0.75
OVER: Final = 1.5
"""Of the agents at LRU's cliff."""
_FURTHER: Final = (1.2, 1.4, 1.6)  # of the agents at LRU's cliff: where is the other's?


@dataclass(frozen=True, slots=True)
class LoopScale:
    """How much is played.

    Attributes:
        ladders: Capacity in blocks → agents among whom LRU's cliff is.
        hours, warm_hours: Played, and of these not counted.
    """

    ladders: Mapping[int, Sequence[int]]
    hours: float
    warm_hours: float

    def plan(self, sessions: Sequence[Session]) -> Plan:
        """On the sessions of even rank: on those of odd rank the controller was shaped."""
        loop = Loop(1, 3600 * self.hours, warm_s=3600 * self.warm_hours)
        return Plan(part_of(sessions, Part.EVEN), loop)


FULL: Final = LoopScale(
    {2000: (10, 12, 14, 16, 18, 20), 4000: (20, 24, 28, 32, 36, 40)}, 2.0, 0.75
)  # fmt: skip
QUICK: Final = LoopScale({1000: (4, 6, 8, 10)}, 1.0, 0.6)


def add_loop(
    figures: Figures,
    sessions: Sequence[Session],
    scale: LoopScale,
    processes: int,
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Measure, add the figures, and give every row."""
    plan = scale.plan(sessions)
    ladders = scale.ladders.items()
    ladder = [ClosedCell("lru", capacity, users) for capacity, rungs in ladders for users in rungs]
    rows = closed_rows(plan, ladder, processes, progress)
    cliffs = {capacity: cliff(rows, "lru", capacity) for capacity in scale.ladders}
    cells = [cell for capacity, users in cliffs.items() for cell in _beyond(capacity, users)]
    rows += closed_rows(plan, list(dict.fromkeys(cells)), processes, progress)
    _add(figures, rows, cliffs)
    return [row.as_dict() for row in rows]


def cliff(rows: Sequence[ClosedRow], arm: str, capacity: int) -> int:
    """The most agents of whom, and of fewer, an arm computes no more than ``LOST`` again."""
    found = sorted(
        (row.users, row.computed) for row in rows if (row.arm, row.capacity) == (arm, capacity)
    )
    stands = found[0][0]
    for users, computed in found:
        if computed > LOST:
            break
        stands = users
    return stands


def _beyond(capacity: int, users: int) -> list[ClosedCell]:
    over, under = round(OVER * users), round(UNDER * users)
    cells = [ClosedCell(arm, capacity, over) for arm in ("lru", LPM, ADMITTED)]
    cells += [ClosedCell(arm, capacity, under) for arm in ("lru", ADMITTED)]
    return cells + [ClosedCell(ADMITTED, capacity, round(each * users)) for each in _FURTHER]


def _add(figures: Figures, rows: Sequence[ClosedRow], cliffs: Mapping[int, int]) -> None:
    known = {(row.arm, row.capacity, row.users): row for row in rows}

    def ratio(arm: str, other: str, share: float) -> float:
        ratios = []
        for capacity, users in cliffs.items():
            ours, theirs = (known[name, capacity, round(share * users)] for name in (arm, other))
            ratios.append(ours.turns_per_hour / max(1.0, theirs.turns_per_hour))
        return min(ratios)

    under = [known[ADMITTED, capacity, round(UNDER * each)] for capacity, each in cliffs.items()]
    further = [cliff(rows, ADMITTED, capacity) / users for capacity, users in cliffs.items()]
    ours = [row for row in rows if row.arm == ADMITTED]
    figures.add("lab_turns_ratio_over", ratio(ADMITTED, "lru", OVER), "×", "≥ 2.5")
    figures.add("lab_agents_before_cliff_ratio", min(further), "×", "≥ 1.4")
    figures.add("lab_turns_ratio_lpm", ratio(ADMITTED, LPM, OVER), "×", "≥ 1")
    figures.add("lab_turns_ratio_under", ratio(ADMITTED, "lru", UNDER), "×", "≥ 0.99")
    figures.add("lab_held_under", max(row.held for row in under), "of requests", "≤ 0.01")
    figures.add("lab_longest_hold_s", max(row.longest_hold for row in ours), "s", "≤ 300")
    figures.add("lab_starved", sum(row.starved for row in ours), "requests", "0")
