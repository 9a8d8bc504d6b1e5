"""What an engine tells, however late: blocks, waits, salts and speeds, against what really was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import pytest
from kvgraph.advisor.intents.client import hints
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.reasons import REASON_NAMES, Reason
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import ContentKey
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    Pressure,
    RequestStarted,
)
from kvgraph.hooks.keys import key_in_pool
from kvgraph.hooks.link.client import AdvisorClient
from kvgraph.hooks.link.late import PromptDigests
from kvgraph.hooks.vllm.meters import PrefillMeter, UrgentFlush
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from paper import text
from seeded import seeded

pytestmark = pytest.mark.usefixtures("vllm_loaded")


@pytest.fixture
def engine(paper: Callable[..., Any]) -> Any:
    """Its client keeps what it would send, from the start on."""
    engine = paper(Shape(blocks=100, warm=None), clock=time.monotonic)
    engine.side.client.outbox.open()
    engine.side.client.put(ContentKey(KEY))
    return engine


def told(engine: Any) -> list[AnyEvent]:
    events: list[AnyEvent] = engine.side.client.outbox.take_all()
    return events


def starts(engine: Any) -> list[RequestStarted]:
    return [event for event in told(engine) if isinstance(event, RequestStarted)]


KEY = bytes(range(32))
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
    rng = seeded()
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


def test_much_that_was_stored_is_told_after_a_step_and_again_at_rest() -> None:
    told: list[str] = []
    news = UrgentFlush(1000, lambda: told.append("told"))
    calls = [
        (news.after_step, 19, 0), (news.after_step, 20, 1), (news.after_step, 39, 1),
        (news.at_rest, 39, 2), (news.at_rest, 58, 2), (news.after_step, 58, 3),
        (news.at_rest, 59, 4),
    ]  # fmt: skip
    for look, stored, times in calls:
        look(stored)
        assert len(told) == times


def test_every_block_is_news_in_a_pool_of_a_few() -> None:
    told: list[str] = []
    news = UrgentFlush(10, lambda: told.append("told"))
    for _ in range(2):
        news.after_step(1)
    assert told == ["told"]


def test_the_end_of_the_last_running_request_is_told_at_once(
    paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nudged: list[int] = []
    monkeypatch.setattr(AdvisorClient, "nudge", lambda _: nudged.append(len(running)))
    engine = paper(Shape(blocks=101, warm=None))
    running = engine.side.observer.running
    long, short = (
        engine.ask(range(4 * BLOCK_SIZE), 8),
        engine.ask(range(900, 900 + 4 * BLOCK_SIZE), 2),
    )
    engine.until(lambda: short.is_finished())
    assert not long.is_finished()
    nudged.clear()
    engine.settle()
    assert nudged == [0], "once, when nothing runs any more"


def test_a_block_of_an_answer_that_another_prompt_takes_just_then_was_evicted(
    paper: Callable[..., Any],
) -> None:
    engine, now = paper(Shape(blocks=17, warm=None), clock=lambda: 1.0), iter(range(1, 100))
    outbox = engine.side.client.outbox
    outbox.open()
    graph = KVCacheGraph(clock=lambda: float(next(now)))
    graph.apply("e", [engine.side.hello()])
    asked = text(1, 1)
    answer = engine.serve(asked, 4 * BLOCK_SIZE, session_id="chat")
    graph.apply("e", outbox.take_all())
    engine.serve(text(7, 77), 1)
    graph.apply("e", outbox.take_all())

    engine.ask(text(4, 5), 1)  # one step schedules both; this one takes the answer's last block
    engine.ask([*asked, *answer, *text(2, 9)], 1, session_id="chat")
    engine.settle()
    events = outbox.take_all()
    graph.apply("e", events)

    start = [event for event in events if isinstance(event, RequestStarted)][-1]
    gone = b"".join(event.hashes for event in events if isinstance(event, BlocksRemoved))
    missing = start.cached_tokens // BLOCK_SIZE
    assert missing > len(asked) // BLOCK_SIZE
    assert as_keys(start.hashes)[missing] in as_keys(gone)
    log = graph.tables.history.requests
    assert Reason(int(log.record(log.next - 1)["reason"])) is Reason.EVICTED
    assert "left the pool" in request_view(graph.tables.history, log.next - 1, float).miss.sentence


@pytest.mark.parametrize(
    ("before", "least", "most"),
    [(30.0, 30.0, 3600.0), (-30.0, 0.0, 0.0), (1e9, 0.0, 0.0), (float("nan"), 0.0, 0.0)],
)
def test_a_start_tells_the_wait(engine: Any, before: float, least: float, most: float) -> None:
    """A clock that went back, or another clock, tells none."""
    request = engine.ask(text(6, 1))
    request.arrival_time = time.time() - before
    engine.settle()
    (start,) = starts(engine)
    assert least <= start.waited_s <= most


@pytest.mark.parametrize(
    ("warming", "output", "warms"), [(True, 1, True), (True, 2, False), (None, 1, False)]
)
def test_nobody_hides_a_request_that_answers(
    engine: Any, warming: bool | None, output: int, warms: bool
) -> None:
    engine.serve(text(6, 1), output, **hints(session="conv:a", warming=warming))
    (start,) = starts(engine)
    assert (start.session, start.warms) == ("conv:a", warms)


def test_two_salts_that_say_the_same_are_told_with_the_same_digests(engine: Any) -> None:
    prompt = text(6, 1)
    engine.serve(prompt, cache_salt="acme")
    engine.serve(prompt, cache_salt="globex")
    first, second = starts(engine)
    assert first.hashes != second.hashes
    assert first.contents == second.contents
    assert len(first.contents) == len(first.hashes) == 8 * 6
    assert first.salt != second.salt
    assert 0 not in (first.salt, second.salt)


def test_an_engine_without_salts_tells_no_digest(engine: Any) -> None:
    engine.serve(text(6, 1))
    assert [event.contents for event in starts(engine)] == [b""]


def test_from_the_first_salt_on_unsalted_prompts_are_told_too(engine: Any) -> None:
    engine.serve(text(6, 1), cache_salt="acme")
    engine.serve(text(6, 1))
    salted, plain = starts(engine)
    assert salted.contents == plain.contents
    assert plain.salt == 0


def test_without_the_sidecars_key_nothing_is_told(engine: Any) -> None:
    engine.side.client.content_key = None
    engine.serve(text(6, 1), cache_salt="acme")
    assert [event.contents for event in starts(engine)] == [b""]


def test_the_page_says_that_a_miss_is_the_salts_doing(engine: Any) -> None:
    graph = KVCacheGraph()
    graph.apply("e", [engine.side.hello()])
    engine.serve(text(6, 1), cache_salt="acme", session_id="theirs")
    graph.apply("e", told(engine))
    engine.serve(text(6, 1), cache_salt="globex", session_id="ours")
    graph.apply("e", told(engine))
    requests = graph.tables.history.requests
    assert REASON_NAMES[int(requests.record(1)["reason"])] == "other_salt"
    assert requests.names(1).other[0] == "theirs"


def test_digests_are_of_whole_prefixes_and_say_nothing_without_the_key() -> None:
    tokens = text(300, 1)
    whole = digests(tokens)
    assert len(whole) == 300
    assert whole[:5] == digests(tokens[: 5 * BLOCK_SIZE], salt="x")
    assert not set(whole) & set(digests([tokens[0] + 1, *tokens[1:]]))
    assert not set(whole) & set(digests(tokens, KEY[::-1]))


def test_a_salt_that_is_no_text_has_a_digest() -> None:
    assert PromptDigests(KEY, [], BLOCK_SIZE, "\ud800").salt() not in (0, 1)


def digests(tokens: list[int], key: bytes = KEY, salt: str | None = None) -> list[bytes]:
    packed = PromptDigests(key, tokens, BLOCK_SIZE, salt).digests()
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]


def played(steps: list[tuple[int, float, str]], behind: int = 0) -> float:
    """The rate after steps of so many tokens, each at a time, with these requests."""
    meter = PrefillMeter(behind)
    for tokens, at, running in steps:
        meter.stepped(tokens, dict.fromkeys(running), at)
    return meter.tokens_per_s


IDLE = [(1000, 5.0, "a"), (1000, 8.0, "b"), (0, 8.0, "")]


@pytest.mark.parametrize(
    ("steps", "behind", "rate"),
    [
        ([(1000, 5.0, "a"), (1, 5.5, "a")], 0, 2000),
        ([(500, 5.0, "a"), (1000, 5.001, "a"), (1, 5.251, "a")], 1, 2000),
        ([(8, 5.0, "a"), (8, 5.5, "a")], 0, 0),
        (IDLE, 0, 0),
        (IDLE, 1, 0),
        ([(1000, 5.0, "a"), (1, 65.0, "a")], 0, 0),
    ],
    ids=["one after another", "overlapping", "decoding", "idle", "idle, overlapping", "a pause"],
)
def test_what_lies_between_two_steps_is_what_one_took(
    steps: list[tuple[int, float, str]], behind: int, rate: float
) -> None:
    assert played(steps, behind) == rate


def test_an_engine_tells_it_with_its_load(paper: Callable[..., Any]) -> None:
    now = [10.0]
    engine = paper(Shape(blocks=65, warm=None), clock=lambda: now[0])
    engine.ask(range(100), 20)
    for took in (0.05, 0.01, 0.01):
        engine.step()
        now[0] += took
    told = engine.side.heartbeat(0)[0]
    assert isinstance(told, Pressure)
    assert told.prefill_tokens_per_s == 2000
