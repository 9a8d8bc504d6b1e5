"""Recorded agents on vLLM's own schedulers above workers on paper, and one graph that hears them.

Nothing of what decides about blocks is a stand-in: scheduler, cache manager, connector, tiers,
graph, planner and policy are the real ones. Steps take what a model of the service says, so that
hours take a minute; what an engine tells goes to the graph, and to a raw log, in rounds, as over
the wire.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec
from kvgraph.advisor.assembly import new_graph
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.graph.wire.advice import ContentKey
from kvgraph.graph.wire.events import AnyEvent, BlocksResident

from ..closed.closed_users import ClosedTurn, Script
from ..closed.on_paper.closed_paper_link import PaperLink
from ..closed.on_paper.paper_service import AGENTS
from ..paper.paper_engine import PaperEngine, Shape
from ..paper.paper_model import runner_output

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Told = Callable[[str, Sequence[AnyEvent]], None]

ROUND_S: Final = 0.5  # between rounds of news; the sidecar's own interval
_KEY: Final = bytes(32)  # a sidecar has a random one
_IDLE_S: Final = 0.25
_QUEUE: Final = 1 << 20  # events: none is dropped between two rounds
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
    """Engines, their users, and what a sidecar knows and says of them.

    Args:
        base: vLLM's configuration of an engine on paper.
        shapes: Of the engines, one each.
        users: Scripts of recorded agents.
        told: Is shown all that engines report, after the graph was.
        hinted: Whether clients name sessions, and say when they end or wait for a tool.
        seed: Decides who goes where, and what befalls them.
    """

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
        self.desk = _Desk(self.engines, told, lambda: self.now)
        self._hinted = hinted
        self._mishaps = mishaps or Mishaps()
        self._scripts = [iter(script) for script in users]
        self._at = [number % len(shapes) for number in range(len(users))]  # whose engine is which
        self._due = [(5.0 * n / len(users), n) for n in range(len(users))]
        self._numbers = itertools.count()

    def run(self, seconds: float) -> None:
        """Let so many seconds of the fleet's clock pass."""
        while self.now < seconds:
            engine = min(self.engines, key=lambda each: each.at)
            self.now = engine.at
            self._send_due()
            self._befall(engine)
            self.desk.turn()
            if engine.scheduler.has_requests():
                self._due += [(at, user) for at, user in engine.step(self._rng)]
                heapq.heapify(self._due)
            else:
                engine.at += _IDLE_S

    def close(self) -> None:
        """End what engines started."""
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
        passed = engine.at - engine.looked_at
        engine.looked_at = engine.at
        if self._happens(self._mishaps.reset_s, passed):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if self._happens(self._mishaps.lost_news_s, passed):
            engine.loses_news = True

    def _happens(self, every_s: float, passed_s: float) -> bool:
        return bool(every_s) and self._rng.random() < passed_s / every_s


@dataclass(slots=True)
class _Open:
    """A request that is not answered."""

    user: int
    turn: ClosedTurn


class _Engine:
    """One engine on paper, on a clock of its own."""

    def __init__(self, number: int, config: VllmConfig, shape: Shape, rng: random.Random) -> None:
        self.name = f"engine-{number}"
        self.at = self.looked_at = 0.0
        self.loses_news = False
        self.paper = PaperEngine(config, shape, clock=lambda: self.at)
        self.scheduler = self.paper.scheduler
        self._link = PaperLink(self.paper) if self.paper.has_tiers else None
        self._open: dict[str, _Open] = {}
        if self.paper.has_tiers:
            costs = self.paper.side.bridge.ledger.costs
            costs.worth_loading = lambda *_: rng.random() < _LOADS
        client = self.paper.side.client
        client.outbox.open(_QUEUE)
        client.put(ContentKey(_KEY))
        client.linked_since = 0.0

    def ask(self, name: str, user: int, turn: ClosedTurn, salt: str | None, hinted: bool) -> None:
        """Send a user's next turn."""
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
        order = self.scheduler.schedule()
        tokens, seconds = AGENTS.step(self.scheduler, order, self._open)
        if self._link is not None:
            self._link.order(order, self.at)
        self.at += seconds
        done = runner_output(tokens)
        if self._link is not None:
            done = self._link.reported(order, tokens, self.at)
        outputs = self.scheduler.update_from_output(order, done)
        said_now = itertools.chain.from_iterable(each.outputs for each in outputs.values())
        ended = [each.request_id for each in said_now if each.finish_reason is not None]
        return [self._after(name) for name in (*ended, *self._aborted(tokens, rng))]

    def _aborted(self, names: dict[str, list[int]], rng: random.Random) -> list[str]:
        """Requests whose clients go away now."""
        from vllm.v1.request import RequestStatus

        gone = [
            name
            for name in names
            if name in self.scheduler.requests and rng.random() < _ABORTS / len(names)
        ]
        for name in gone:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return gone

    def _after(self, name: str) -> tuple[float, int]:
        ended = self._open.pop(name)
        return self.at + ended.turn.pause_s, ended.user


class _Desk:
    """What a sidecar knows of all engines, told and asked in rounds."""

    def __init__(self, engines: Sequence[_Engine], told: Told, clock: Callable[[], float]) -> None:
        config = Config()
        self.graph = new_graph(config, clock)
        self._engines, self._told, self._clock = engines, told, clock
        self._planner = GraphEvictionAdvisor(
            self.graph, lambda: {each.name: 0 for each in engines}, interval_s=ROUND_S,
            max_ranked=config.sidecar.max_ranked, prefetch=config.prefetch, clock=clock,
        )  # fmt: skip
        self._next = 0.0
        for each in engines:
            self._tell(each, self._greeting(each))

    def turn(self) -> None:
        """Once in a round: all that happened, and advice of it."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + ROUND_S
        for each in self._engines:
            events = each.paper.side.client.outbox.take_all()
            if each.loses_news:
                events, each.loses_news = self._greeting(each), False
            self._tell(each, [*events, *each.paper.side.heartbeat(0)])
        self._planner.tick()
        for each in self._engines:
            self._advise(each, now)

    def _advise(self, engine: _Engine, now: float) -> None:
        client, ranking = engine.paper.side.client, self._planner.latest.get(engine.name)
        order = self._planner.orders.latest.get(engine.name)
        client.hold_ranking(None if ranking is None else replace(ranking, known_of=now))
        client.hold_wanted(None if order is None else order.keys)

    def _greeting(self, engine: _Engine) -> list[AnyEvent]:
        """What an engine tells a sidecar that knows nothing for sure."""
        side = engine.paper.side
        hello = msgspec.structs.replace(side.hello(), engine=engine.name)
        return [hello, BlocksResident(side.resident()), *side.copies()]

    def _tell(self, engine: _Engine, events: list[AnyEvent]) -> None:
        self.graph.apply(engine.name, events)
        self._told(engine.name, events)
