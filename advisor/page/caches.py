"""``/v1/caches``: what confidence-driven caches hold, step by step."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate
from typing import Annotated, ClassVar, Final

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from pydantic import Field, model_validator

from ...dashboards.answer import Answer, Part
from ...graph.wire.events import MAX_NAME
from .page import Page, answered

MOST_STEPS: Final = 4_096  # per run, as reported and as stored; chosen: some minutes of one chat

StepsQuery = Annotated[int, Query(ge=1, le=MOST_STEPS)]
_Steps = Field(max_length=MOST_STEPS)
_Tokens = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
_Moment = Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)]


class CacheSteps(Part):
    """Steps of one run, the oldest first, in columns of one length.

    Attributes:
        run: The run's name.
        started: When reporting of the run began, in Unix seconds. A different start replaces the
            run of this name, unless that run reported within the last seconds.
        first: The number of the first of these steps, counted from that start.
        low, high: Tokens per layer that are kept while the model is confident, and while it is not.
        at: Time of each step, in Unix seconds.
        confidence: From 0 to 1; for a batch, the mean.
        budget: Tokens that a layer of average depth may keep; for a batch, the mean.
        held: Tokens per layer after the step, averaged over layers.
    """

    COLUMNS: ClassVar = ("at", "confidence", "budget", "held")

    run: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    started: _Moment
    first: Annotated[int, Field(ge=0, le=1 << 53)]
    low: _Tokens
    high: _Tokens
    at: Annotated[list[_Moment], _Steps]
    confidence: Annotated[list[_Share], _Steps]
    budget: Annotated[list[_Tokens], _Steps]
    held: Annotated[list[_Tokens], _Steps]

    @model_validator(mode="after")
    def _check_columns(self) -> CacheSteps:
        if len({len(getattr(self, name)) for name in self.COLUMNS}) > 1:
            raise ValueError(f"{', '.join(self.COLUMNS)}: all have one length")
        if self.at != sorted(self.at):
            raise ValueError("at: never falls")
        return self

    @property
    def following(self) -> int:  # the number of the step behind these
        return self.first + len(self.at)

    def latest(self, steps: int) -> CacheSteps:
        columns = {name: getattr(self, name)[-steps:] for name in self.COLUMNS}
        return self.model_copy(update={**columns, "first": max(self.first, self.following - steps)})

    def behind(self, known: CacheSteps) -> CacheSteps:
        """Return ``known`` with the new ones of these steps; renumbered after a gap."""
        new = min(max(0, known.following - self.first), len(self.at))
        columns = {n: [*getattr(known, n), *getattr(self, n)[new:]] for n in self.COLUMNS}
        columns["at"] = [*accumulate(columns["at"], max)]  # a clock may be set back
        first = max(self.following, known.following) - len(columns["at"])
        return self.model_copy(update={**columns, "first": first})


class CacheNoted(Answer):
    """Whether reported steps were accepted.

    Attributes:
        taken: False: another start of a run of this name is still reporting.
        steps: How many steps of the run are stored.
    """

    taken: bool
    steps: int


class Caches(Answer):
    """The latest steps of the latest runs.

    Attributes:
        runs: The run that reported last comes first.
    """

    runs: list[CacheSteps]


def add_routes(paths: APIRouter, page: Page, edits: Callable[..., None]) -> None:
    """The view's routes; the one that adds steps needs the edit token."""
    runs = CacheRuns(lambda: page.unix.now())

    @paths.get("/caches", response_model=Caches)
    def caches(steps: StepsQuery = 600) -> Response:
        return answered(page.recent.of(("caches", steps), lambda: runs.shown(steps)))

    @paths.post("/caches", response_model=CacheNoted, dependencies=[Depends(edits)])
    def note_steps(told: CacheSteps) -> Response:
        return answered(runs.note(told))


MOST_RUNS: Final = 16  # beyond, the run silent for longest is forgotten; chosen: what a page shows
SILENT_S: Final = 5.0  # then a run's name may be reused; chosen: ten pauses between reports


class CacheRuns:
    """The latest steps of the latest runs; thread-safe."""

    def __init__(
        self, wall: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._clock = wall, clock
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, tuple[CacheSteps, float]] = OrderedDict()  # and when told of

    def shown(self, steps: int) -> Caches:
        """Return the last ``steps`` steps of each run; the run that reported last comes first."""
        with self._lock:
            runs = [run for run, _ in reversed(self._runs.values())]
        return Caches(at=self._wall(), runs=[run.latest(steps) for run in runs])

    def note(self, told: CacheSteps) -> CacheNoted:
        """Append steps to their run; steps reported twice count once."""
        now = self._clock()
        with self._lock:
            known, heard_at = self._runs.get(told.run, (None, 0.0))
            if known is None:
                run = told
            elif known.started == told.started:
                run = told.behind(known).latest(MOST_STEPS)
            elif now - heard_at < SILENT_S:
                return CacheNoted(at=self._wall(), taken=False, steps=len(known.at))
            else:
                run = told
            self._runs[told.run] = run, now
            self._runs.move_to_end(told.run)
            while len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
        return CacheNoted(at=self._wall(), taken=True, steps=len(run.at))
