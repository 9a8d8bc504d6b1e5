"""What the page says of misses, over recorded fleets, beside a model of the raw log."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.page.misses import RequestView, request_view
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.graph.logs.history import History
from kvgraph.graph.logs.reasons import Detail
from kvgraph.graph.logs.requests import LIMIT
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import ContentKey
from kvgraph.graph.wire.events import (
    AnyEvent,
    EngineHello,
)
from kvgraph_bench.closed.closed_pass import ClosedTurn, Script, scripts
from kvgraph_bench.paper.paper_engine import Shape
from kvgraph_bench.paper.timed_engine import AGENTS, PaperSidecar, TimedEngine, Told
from kvgraph_bench.recorded.agents_requests import SESSIONS
from kvgraph_bench.serving.model import ModelShape
from raw_log_oracle import RawLogOracle, Verdict

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PACKED: Final = ("hashes", "contents")  # fields of eight bytes each, one after the other


def _worded(event: AnyEvent) -> dict[str, Any]:
    """A line of a log: its kind, and its fields; hashes are lists of ``0x…`` in chain order."""
    fields = msgspec.to_builtins(msgspec.structs.asdict(event), builtin_types=(bytes,))
    if isinstance(event, EngineHello):
        fields["name"] = fields.pop("engine")
    for name in _PACKED:
        if isinstance(packed := fields.get(name), bytes):
            whole = packed[: len(packed) // 8 * 8]
            fields[name] = [f"{key:#018x}" for key in as_keys(whole).tolist()]
    return {"event": type(event).__name__, **fields}


_KEY: Final = bytes(32)  # a sidecar has a random one
_IDLE_S: Final = 0.25
_MOVES: Final = 0.1  # share of turns for which a user goes to any engine; chosen, as the others
_ABORTS: Final = 0.01  # share of requests whose client goes away
_LOADS: Final = 0.8  # share of loads that are judged worth it
_SALTED: Final = 4  # every so manieth user has a cache salt of its own


@dataclass(frozen=True, slots=True)
class Mishaps:
    """What befalls the fleet, and how often: in seconds between two of a kind; 0: never."""

    reset_s: float = 0.0
    lost_news_s: float = 0.0


class ToldFleet:
    def __init__(
        self,
        base: VllmConfig,
        shapes: Sequence[Shape],
        users: Sequence[Script],
        told: Told,
        *,
        hinted: bool,
        seed: int,
        mishaps: Mishaps | None = None,
    ) -> None:
        self.now = 0.0
        self._rng = random.Random(seed)
        config = AGENTS.config(base)
        self.engines = [_Engine(n, config, shape, self._rng) for n, shape in enumerate(shapes)]
        named = {each.name: each.paper for each in self.engines}
        self.sidecar = PaperSidecar(named, Config(), lambda: self.now, told)
        self._hinted = hinted
        self._mishaps = mishaps or Mishaps()
        self._scripts = [iter(script) for script in users]
        self._at = [number % len(shapes) for number in range(len(users))]  # whose engine is which
        self._due = [(5.0 * n / len(users), n) for n in range(len(users))]
        self._numbers = itertools.count()

    def run(self, seconds: float) -> None:
        while self.now < seconds:
            engine = min(self.engines, key=lambda each: each.paper.now)
            self.now = engine.paper.now
            self._send_due()
            self._befall(engine)
            self.sidecar.turn()
            if engine.scheduler.has_requests():
                self._due += [(at, user) for at, user in engine.step(self._rng)]
                heapq.heapify(self._due)
            else:
                engine.paper.now += _IDLE_S

    def close(self) -> None:
        for each in self.engines:
            each.paper.close()

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            _, user = heapq.heappop(self._due)
            turn = next(self._scripts[user], None)
            if turn is None:
                continue
            if self._rng.random() < _MOVES:
                self._at[user] = self._rng.randrange(len(self.engines))
            salt = f"tenant-{user}" if user % _SALTED == _SALTED - 1 else None
            name = f"{turn.request.name}#{next(self._numbers)}"
            self.engines[self._at[user]].ask(name, user, turn, salt, self._hinted)

    def _befall(self, engine: _Engine) -> None:
        """Let a mishap happen to the engine whose turn it is, if one is due."""
        passed = self.now - engine.looked_at
        engine.looked_at = self.now
        if self._happens(self._mishaps.reset_s, passed):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if self._happens(self._mishaps.lost_news_s, passed):
            self.sidecar.lose_news(engine.name)

    def _happens(self, every_s: float, passed_s: float) -> bool:
        return bool(every_s) and self._rng.random() < passed_s / every_s


@dataclass(slots=True)
class _Open:
    user: int
    turn: ClosedTurn


class _Engine:
    def __init__(self, number: int, config: VllmConfig, shape: Shape, rng: random.Random) -> None:
        self.name = f"engine-{number}"
        self.looked_at = 0.0
        self.paper = TimedEngine(config, shape)
        self.scheduler = self.paper.scheduler
        self._open: dict[str, _Open] = {}
        if self.paper.has_tiers:
            costs = self.paper.side.bridge.ledger.costs
            costs.worth_loading = lambda *_: rng.random() < _LOADS
        self.paper.side.client.put(ContentKey(_KEY))

    def ask(self, name: str, user: int, turn: ClosedTurn, salt: str | None, hinted: bool) -> None:
        asked = turn.request
        session = asked.session if hinted else None
        request = self.paper.make(
            name, list(asked.prompt), len(asked.answer), session_id=session, cache_salt=salt
        )
        if hinted:
            request.kv_transfer_params = asked.body(1.0, True).get("kv_transfer_params")
        self._open[name] = _Open(user, turn)
        self.scheduler.add_request(request)

    def step(self, rng: random.Random) -> list[tuple[float, int]]:
        """One step; when whose next turn is due."""
        names, outputs = self.paper.take_step(self._open)
        ended = [each.request_id for each in outputs if each.finish_reason is not None]
        return [self._after(name) for name in (*ended, *self._aborted(names, rng))]

    def _aborted(self, names: Collection[str], rng: random.Random) -> list[str]:
        gone = [
            name
            for name in names
            if name in self.scheduler.requests and rng.random() < _ABORTS / len(names)
        ]
        for name in gone:
            self.paper.abort(self.scheduler.requests[name])
        return gone

    def _after(self, name: str) -> tuple[float, int]:
        ended = self._open.pop(name)
        return self.paper.now + ended.turn.pause_s, ended.user


SEED: Final = 1
_SAME_S: Final = 0.02  # the log of evictions keeps hundredths of a second
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
    pairs: list[tuple[Said, Verdict]]
    wrong: list[tuple[Said, Verdict]]

    @property
    def share(self) -> float:
        """Of requests, the share of which all that is said is right."""
        return 1.0 - len(self.wrong) / len(self.pairs)


def play(base: VllmConfig, plan: FleetPlan, seconds: float, seed: int = SEED) -> Compared:
    users = scripts(read_sessions(SESSIONS), plan.users, seed, seconds, ModelShape().vocab)
    teller = _Teller()
    fleet = ToldFleet(
        base, plan.shapes, users, teller, hinted=plan.hinted, seed=seed, mishaps=plan.mishaps
    )
    teller.attach(fleet)
    try:
        fleet.run(seconds)
    finally:
        fleet.close()
    return compared(teller.said(), teller.oracle.verdicts)


class _Teller:
    def __init__(self) -> None:
        self.oracle = RawLogOracle()
        self._history: History | None = None
        self._fleet: ToldFleet | None = None
        self._said: list[Said] = []

    def __call__(self, engine: str, events: Sequence[AnyEvent]) -> None:
        at = self._fleet.now if self._fleet is not None else 0.0
        for event in events:
            self.oracle.read({"at": at, "engine": engine, **_worded(event)})
        if self._history is not None and self._history.requests.next - len(self._said) > LIMIT // 2:
            self._note(self._history.requests.next - LIMIT // 4)

    def attach(self, fleet: ToldFleet) -> None:
        self._fleet, self._history = fleet, fleet.sidecar.graph.tables.history

    def said(self) -> list[Said]:
        assert self._history is not None
        self._note(self._history.requests.next)
        return self._said

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
    clients did not.
    """
    assert view.miss is not None
    if verdict.reason != "diverged" or all(name is None for name, _ in verdict.others):
        return True
    return (view.miss.session, view.miss.tenant) in verdict.others
