"""How right the page is about misses: over recorded fleets, against a model of the raw log."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvgraph.advisor.page.misses import RequestView, request_view
from kvgraph.advisor.replay.recorder import RawLog
from kvgraph.advisor.replay.recordings import read_sessions
from kvgraph.graph.logs.history import History
from kvgraph.graph.logs.reasons import Detail
from kvgraph.graph.logs.requests import LIMIT
from kvgraph.graph.wire.events import AnyEvent

from ..closed.closed_users import scripts
from ..figures import Figures
from ..paper.paper_engine import Shape, base_config
from ..paper.quiet import only_errors
from ..policies.policies_fleets import SHIPPED
from ..serving.model import TINY, ModelShape, ensure_model
from .raw_log_oracle import RawLogOracle, Verdict
from .told_fleet import Mishaps, ToldFleet

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SEED: Final = 1
_SAME_S: Final = 0.02  # the log of evictions keeps hundredths of a second
_NOTHING_LOST: Final = ("not_cacheable:partial", "never_seen")
_DETAILS: Final[dict[tuple[str, int], str]] = {
    ("not_cacheable", Detail.PARTIAL): "not_cacheable:partial",
    ("not_cacheable", Detail.UNDER_WAY): "not_cacheable:under_way",
    ("unknown", Detail.UNHEARD): "unknown:unheard",
    ("unknown", Detail.IN_POOL): "unknown:in_pool",
    ("unknown", Detail.UNCOMPUTED): "unknown:uncomputed",
    ("other_engine", Detail.ELSEWHERE): "other_engine:had",
    ("not_cacheable", Detail.READS_NONE): "not_cacheable:reads_none",
}


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """One play: its engines, users and mishaps."""

    shapes: tuple[Shape, ...]
    users: int
    hinted: bool
    mishaps: Mishaps = field(default_factory=Mishaps)


PLANS: Final = (
    FleetPlan((Shape(blocks=1000, warm=None),), 20, hinted=False),
    FleetPlan(
        (Shape(blocks=700, warm=None), Shape(blocks=700, warm=None)), 24, hinted=True,
        mishaps=Mishaps(reset_s=1800.0),
    ),
    FleetPlan(
        (Shape(blocks=700, warm=500), Shape(blocks=700, warm=500, cold=800)), 24, hinted=True,
        mishaps=Mishaps(reset_s=1800.0, lost_news_s=900.0),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Said:
    """What the page says of a request, and how it tells cases of its reason apart."""

    view: RequestView
    reason: str
    cause: int | None


@dataclass
class Compared:
    """Requests of a play, as said and as they were."""

    pairs: list[tuple[Said, Verdict]]
    wrong: list[tuple[Said, Verdict]]

    @property
    def share(self) -> float:
        """Of requests, the share of which all that is said is right."""
        return 1.0 - len(self.wrong) / len(self.pairs)

    @property
    def share_of_losses(self) -> float:
        """The same of requests that missed what could have been found."""
        lost = [verdict for _, verdict in self.pairs if verdict.reason not in _NOTHING_LOST]
        wrong = [verdict for _, verdict in self.wrong if verdict.reason not in _NOTHING_LOST]
        return 1.0 - len(wrong) / max(1, len(lost))


def run(figures: Figures, quick: bool) -> None:
    """Requests of recorded fleets, on vLLM's own schedulers."""
    with only_errors():
        base = base_config(ensure_model(TINY))
        played = [play(base, plan, 1200.0 if quick else 3600.0) for plan in PLANS]
    pairs = [pair for each in played for pair in each.pairs]
    whole = Compared(pairs, [pair for each in played for pair in each.wrong])
    figures.add("attribution_accuracy", whole.share, "", "≥ .99")
    figures.add("attribution_accuracy_of_losses", whole.share_of_losses, "")
    figures.add("attributed_requests", len(pairs), "")
    for reason, count in sorted(Counter(verdict.reason for _, verdict in pairs).items()):
        figures.add(f"attributed_{reason.replace(':', '_')}", count, "")


def play(base: VllmConfig, plan: FleetPlan, seconds: float, seed: int = SEED) -> Compared:
    """Play a fleet, and hold what the page says of its requests against its raw log."""
    users = scripts(read_sessions(SHIPPED), plan.users, seed, seconds, ModelShape().vocab)
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        path = Path(folder) / "raw.jsonl.gz"
        teller = _Teller(path)
        fleet = ToldFleet(
            base, plan.shapes, users, teller, hinted=plan.hinted, seed=seed, mishaps=plan.mishaps
        )
        teller.attach(fleet)
        try:
            fleet.run(seconds)
        finally:
            fleet.close()
            teller.close()
        oracle = RawLogOracle()
        with gzip.open(path, "rt") as lines:
            for line in lines:
                oracle.read(json.loads(line))
    return compared(teller.said(), oracle.verdicts)


class _Teller:
    """Writes the raw log, and notes what the page says before it forgets."""

    def __init__(self, path: Path) -> None:
        self._now = 0.0
        self._log = RawLog(path, clock=lambda: self._now)
        self._history: History | None = None
        self._fleet: ToldFleet | None = None
        self._said: list[Said] = []

    def __call__(self, engine: str, events: Sequence[AnyEvent]) -> None:
        self._now = self._fleet.now if self._fleet is not None else 0.0
        self._log(engine, events)
        if self._history is not None and self._history.requests.next - len(self._said) > LIMIT // 2:
            self._note(self._history.requests.next - LIMIT // 4)

    def attach(self, fleet: ToldFleet) -> None:
        """Listen to this fleet."""
        self._fleet, self._history = fleet, fleet.desk.graph.tables.history

    def said(self) -> list[Said]:
        """What is said of every request."""
        assert self._history is not None
        self._note(self._history.requests.next)
        return self._said

    def close(self) -> None:
        """Finish the log."""
        self._log.close()

    def _note(self, end: int) -> None:
        assert self._history is not None
        for number in range(len(self._said), end):
            self._said.append(_said(self._history, number))


def _said(history: History, number: int) -> Said:
    view = request_view(history, number, float)
    assert view.miss is not None
    detail = int(history.requests.record(number)["detail"])
    reason = _DETAILS.get((view.miss.reason, detail), view.miss.reason)
    return Said(view, reason, detail if view.miss.reason == "copy_lost" else None)


def compared(said: Sequence[Said], verdicts: Sequence[Verdict]) -> Compared:
    """What is said of requests beside what the log tells, in the order of their starts."""
    pairs = list(zip(said, verdicts, strict=True))
    return Compared(pairs, [pair for pair in pairs if not agree(*pair)])


def agree(said: Said, verdict: Verdict) -> bool:
    """Whether all that is said of a request is so."""
    view, miss, blocks = said.view, said.view.miss, said.view.blocks
    assert miss is not None
    assert (view.request, view.engine) == (verdict.request, verdict.engine)
    counts = (blocks.pool, blocks.loaded, blocks.prefetched)
    return (
        counts == (verdict.found, verdict.loaded, verdict.prefetched)
        and (miss.index, said.reason) == (verdict.index, verdict.reason)
        and verdict.reason != "unknown:in_pool"  # neither can tell
        and _is_same(miss.evicted_at, verdict.left)
        and said.cause == verdict.cause
        and (not verdict.holders or miss.engine in verdict.holders)
        and _names_one(view, verdict)
    )


def _is_same(said: float | None, left: float | None) -> bool:
    if said is None or left is None:
        return said is left
    return abs(said - left) <= _SAME_S


def _names_one(view: RequestView, verdict: Verdict) -> bool:
    """Whether the session is named from which this one went another way; the log names none where
    clients did not."""
    assert view.miss is not None
    if verdict.reason != "diverged" or all(name is None for name, _ in verdict.others):
        return True
    return (view.miss.session, view.miss.tenant) in verdict.others
