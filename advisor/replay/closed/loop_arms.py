"""The arms of a closed loop, and what each cell of a table found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....graph.ranking.formulas import LruPolicy
from ....graph.ranking.policy import Policy
from ...admission.admission import Admission
from ..engine.instance import HostTier, Instance
from ..errors import ReplayError
from ..lab.arms import HINTS, Settings, graph_policies
from ..lab.cells import run_cells
from ..orders.graph_order import GraphOrder
from ..orders.orders import LruOrder
from ..recordings.signals import Signals
from ..recordings.weka import Session
from .loop import Loop, Played, Queue, play
from .played_runs import runs_for

ADMISSION: Final = "+admission"
"""Suffix of an arm: new and cold sessions are held as the sidecar advises."""
HOST: Final = "+host"
"""Suffix of an arm, before the other: evicted blocks are copied to host memory, and loaded."""
LPM: Final = "lpm"
"""LRU, and those that wait start with the longest prefix match first: SGLang's order."""
CLIENT_PATIENCE_S: Final = 600.0
"""A client that waits longer gives up (the OpenAI client's default); who does is starved."""

_BLOCK: Final = 512  # tokens; chosen


class ClosedCell(NamedTuple):
    """One run of a loop."""

    arm: str
    capacity: int
    users: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What cells share.

    Attributes:
        sessions: What users play.
        loop: How; the number of users is a cell's own.
        host: Host memory of the arms that have some, in pools.
    """

    sessions: Sequence[Session]
    loop: Loop
    host: float = 1.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class ClosedRow:
    """What a cell found, after the loop was warm; seconds unless said otherwise.

    Attributes:
        turns_per_hour: Answers that were complete; a refusal is none.
        sessions: That were over.
        computed: The share of prompt blocks that were computed.
        returning_p50, returning_p95: TTFT of sessions' later turns.
        first_p50, first_p95: TTFT of their first ones.
        held: The share of requests that waited for room.
        longest_hold: Of any request, at any time.
        starved: Requests that waited longer than a client does, at any time.
        refused: Requests larger than the pool, at any time.
    """

    arm: str
    capacity: int
    users: int
    turns_per_hour: float
    sessions: int
    computed: float
    returning_p50: float
    returning_p95: float
    first_p50: float
    first_p95: float
    held: float
    longest_hold: float
    starved: int
    refused: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, rounded to four digits behind the point."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm by its parts.

    Attributes:
        order: ``lru``, ``lpm`` or a graph policy: who is evicted first.
        hints: Callers name their sessions and say what the trace knows.
        host: There is host memory below the pool.
        admission: New and cold sessions are held.
    """

    order: str
    hints: bool
    host: bool
    admission: bool

    @classmethod
    def of(cls, name: str) -> Arm:
        """The parts of an arm's name.

        Raises:
            ReplayError: There is none of that name.
        """
        bare = name.removesuffix(ADMISSION)
        named = bare.removesuffix(HOST)
        order = named.removesuffix(HINTS)
        known = {"lru", LPM, *graph_policies()}
        if order not in known or (order == LPM and order != named):
            raise ReplayError(
                f"arm {name!r}: allowed: {', '.join(sorted(known))}; {HINTS}, then {HOST} and then "
                f"{ADMISSION} may stand behind"
            )
        return cls(order, named != order, bare != named, name != bare)

    @property
    def is_stock(self) -> bool:
        """Whether it needs no sidecar."""
        return self.order in ("lru", LPM) and not self.hints and not self.admission


def closed_rows(
    plan: Plan,
    cells: Sequence[ClosedCell],
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ClosedRow]:
    """What each cell found, in their order."""
    found: dict[ClosedCell, ClosedRow] = {}
    for done, (cell, row) in enumerate(run_cells(run_cell, plan, cells, processes), start=1):
        found[cell] = row
        progress(done, len(cells))
    return [found[cell] for cell in cells]


def run_cell(plan: Plan, cell: ClosedCell) -> ClosedRow:
    """Play one cell; the same plan and cell give the same row."""
    arm = Arm.of(cell.arm)
    queue = Queue.LPM if arm.order == LPM else plan.loop.queue
    loop = replace(plan.loop, users=cell.users, queue=queue)
    runs = runs_for(
        plan.sessions, cell.users, loop.seconds, block_size=_BLOCK, seed=plan.seed,
        signals=Signals.ALL,
    )  # fmt: skip
    host = HostTier(round(plan.host * cell.capacity), plain=arm.is_stock) if arm.host else None
    if arm.is_stock:
        return _row(cell, loop, play(runs, Instance(cell.capacity, LruOrder(), host=host), loop))
    order = GraphOrder.alone(runs.trace, _policy(arm.order), hints=arm.hints)
    word = partial(order.advised, Admission()) if arm.admission else None
    instance = Instance(cell.capacity, order, host=host)
    return _row(cell, loop, play(runs, instance, loop, word=word))


def _policy(name: str) -> Policy:
    return LruPolicy() if name in ("lru", LPM) else graph_policies()[name](Settings())


def _row(cell: ClosedCell, loop: Loop, played: Played) -> ClosedRow:
    done = played.done >= loop.warm_s
    ttft = played.first_token - played.at
    counted = done & ~np.isnan(ttft)
    first, later = ttft[counted & played.opens], ttft[counted & ~played.opens]
    prompt = max(1, int(played.prompt[counted].sum()))
    end = np.where(np.isnan(played.started), loop.seconds, played.started)
    return ClosedRow(
        *cell,
        turns_per_hour=float(counted.sum()) / (loop.seconds - loop.warm_s) * 3600.0,
        sessions=int((played.ended >= loop.warm_s).sum()),
        computed=1.0 - float(played.found[counted].sum()) / prompt,
        returning_p50=_percentile(later, 50),
        returning_p95=_percentile(later, 95),
        first_p50=_percentile(first, 50),
        first_p95=_percentile(first, 95),
        held=float((played.held_s[counted] > 0).mean()) if counted.any() else 0.0,
        longest_hold=float(played.held_s.max(initial=0.0)),
        starved=int((end - played.at > CLIENT_PATIENCE_S).sum()),
        refused=played.refused,
    )


def _percentile(values: npt.NDArray[np.float64], percent: int) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0
