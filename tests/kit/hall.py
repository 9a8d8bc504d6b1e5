"""An engine on paper that holds new sessions; clock and word are the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hand_clock import Clock
from kvgraph.graph.wire.advice import AdmissionAdvice
from kvgraph.graph.wire.events import RequestReleased
from kvgraph.hooks.vllm.holding.queue import HoldingQueue
from kvgraph.hooks.vllm.patches import bind_scheduler
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, PaperEngine, Shape
from paper import changed, text

STEP_S = 0.01  # what a step takes by the test's clock


class Hall:
    """One engine, made with a ``Clock`` of its own; by default it has met a long queue before.
    ``started``: requests in the order in which they were first scheduled.
    """

    def __init__(self, engine: PaperEngine, *, keeps_up: bool = False) -> None:
        assert isinstance(engine.clock, Clock)
        self.engine, self.clock = engine, engine.clock
        bind_scheduler(engine.scheduler)
        self.side = engine.side
        self.holding = self.side.holding
        if not keeps_up:
            self.saturate()
        self.started: list[str] = []
        scheduled = self.side.observer.request_scheduled
        self.side.observer.request_scheduled = lambda request, *rest: (
            self.started.append(request.request_id),
            scheduled(request, *rest),
        )

    @property
    def held(self) -> list[str]:
        """Who is held, in the order of arrival."""
        return held_of(self.engine)

    def saturate(self) -> None:
        """As if many requests had come and had met others in vLLM's queue."""
        for _ in range(100):
            self.holding.saturation.note_arrival(queued=True)

    def say(self, room: int | None, known_of: float | None = None) -> None:
        """The sidecar says now that so many blocks may start."""
        now = self.clock.now
        known = now if known_of is None else known_of
        self.side.client.hold_admission(AdmissionAdvice(1, now, room, 38, 31, known))

    def ask(self, blocks: int, seed: int, output: int = 1, **fields: Any) -> str:
        """A request for a prompt of the seed's own; its id."""
        return self.engine.ask(text(blocks, seed), output, **fields).request_id

    def step(self, steps: int = 1, room: int | None = -1) -> None:
        """Steps; with ``room``, the sidecar says it before each."""
        for _ in range(steps):
            if room != -1:
                self.say(room)
            self.clock.now += STEP_S
            self.engine.step()

    def busy(self, seed: int = 9000) -> str:
        """A request that runs for a long time, so that the engine is never idle."""
        name = self.engine.ask(text(2, seed), 400).request_id
        self.step(2)
        assert name in self.started
        return name

    def shut(self) -> str:
        """Busy, and with room for nobody; the name of the request that keeps it busy."""
        name = self.busy()
        self.say(0)
        return name

    def serve(self, blocks: int, seed: int, **fields: Any) -> None:
        """A request that is let in and answered."""
        self.say(None)
        self.ask(blocks, seed, **fields)
        self.engine.settle()

    def crowd(self) -> None:
        """As many run as may, and one that is live and resident waits in vLLM's own queue."""
        self.say(None)
        self.ask(4, 8000, session_id="at the door")
        self.engine.settle()
        for seed in range(9000, 9006):
            self.busy(seed)
        longer = tokens_of(4, 8000, range(5 * BLOCK_SIZE))
        self.engine.ask(longer, 1, session_id="at the door")

    def abort(self, request_id: str) -> None:
        self.engine.abort(self.engine.scheduler.requests[request_id])

    def released(self) -> list[tuple[str, str]]:
        """Ids and reasons of those that were released, as the sidecar would have heard."""
        events = list(self.side.client.outbox)
        return [(e.request_id, e.reason) for e in events if isinstance(e, RequestReleased)]


def held_of(engine: PaperEngine) -> list[str]:
    """Ids of the requests that wait beside vLLM's own queue, in the order of arrival."""
    queue = engine.scheduler.waiting
    if not isinstance(queue, HoldingQueue):
        return []
    return [each.request_id for each in queue if queue.is_held(each.request_id)]


def by_priority(base: Any) -> Any:
    return changed(base, "scheduler_config", policy="priority")


def shape(asynchronous: bool = False, blocks: int = 97, warm: int | None = None) -> Shape:
    return Shape(blocks=blocks, asynchronous=asynchronous, warm=warm)


def tokens_of(blocks: int, seed: int, more: Sequence[int] = ()) -> list[int]:
    return [*text(blocks, seed), *more]


__all__ = ["BLOCK_SIZE", "Clock", "Hall", "by_priority", "held_of", "shape", "tokens_of"]
