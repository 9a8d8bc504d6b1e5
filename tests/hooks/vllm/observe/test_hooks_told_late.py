"""What is told late of a pool, against what vLLM's own pool held after each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import pytest
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.events import BlocksCleared, BlocksRemoved, BlocksStored, Event, Pressure
from kvgraph.hooks.keys import key_in_pool
from kvgraph_bench.paper.paper_engine import Shape
from paper import text

pytestmark = pytest.mark.usefixtures("vllm_loaded")

_STEPS = 250
_STEP = Pressure(1, 1, 1, 1, 1)  # stands between the events of two steps


class Follower:
    """Applies what is queued to a set of keys."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.told = engine, set[int]()
        self._outbox = engine.side.client.outbox
        self._held: list[set[int]] = []  # after each step

    def note_step(self) -> None:
        held = (block.block_hash for block in self.engine.pool.blocks)
        self._held.append({key_in_pool(each) for each in held if each is not None})
        self._outbox.emit(_STEP)

    def compare(self) -> None:
        """Work through all that is queued, at once."""
        events = iter(self._outbox.take_all())
        for held in self._held:
            self._apply(takewhile(lambda event: event is not _STEP, events))
            assert self.told == held
        self._held.clear()

    def _apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.told |= set(as_keys(event.hashes).tolist())
            elif isinstance(event, BlocksRemoved):
                self.told -= set(as_keys(event.hashes).tolist())
            elif isinstance(event, BlocksCleared):
                self.told = set()


@pytest.mark.parametrize("every", [1, 40])
def test_after_each_step_the_pool_is_as_told_however_late(
    paper: Callable[..., Any], every: int
) -> None:
    """With duplicates: the same prompts come twice and three times at once, in a pool too small."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng = random.Random(seed)
    engine = paper(Shape(blocks=24, warm=None), clock=lambda: 1.0)
    engine.side.client.outbox.open()
    follower = Follower(engine)
    prompts = [text(rng.randrange(1, 9), number) for number in range(5)]
    for number in range(_STEPS):
        if rng.random() < 0.3 and len(engine.scheduler.requests) < 6:
            prompt = [*rng.choice(prompts), *rng.sample(range(3, 190), rng.randrange(1, 40))]
            for _ in range(rng.choice((1, 2, 3))):
                engine.ask(prompt, rng.randrange(1, 20))
        if rng.random() < 0.01:
            engine.reset(reset_running_requests=True)
        if not engine.scheduler.has_requests():
            continue  # an engine that rests takes no step, and tells of a reset with its next one
        engine.step()
        follower.note_step()
        if number % every == 0:
            follower.compare()
    follower.compare()


def test_blocks_of_a_streamed_session_are_told_though_their_hashes_are_discarded(
    paper: Callable[..., Any],
) -> None:
    """vLLM takes back what the next part of the input does not go on with, in the same list."""
    engine = paper(Shape(blocks=24, warm=None), clock=lambda: 1.0)
    engine.side.client.outbox.open()
    follower = Follower(engine)
    session = engine.make("stream", text(4, 1), 1, resumable=True)
    engine.outputs["stream"] = []
    engine.scheduler.add_request(session)
    engine.step()
    follower.note_step()
    del session.block_hashes[1:]
    follower.compare()
    assert len(follower.told) > 1
