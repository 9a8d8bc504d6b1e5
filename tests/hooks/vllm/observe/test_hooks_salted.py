"""What salted prompts say: told as digests, by the thread that sends, of vLLM's own requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.reasons import REASON_NAMES
from kvgraph.graph.wire.advice import ContentKey
from kvgraph.graph.wire.events import AnyEvent, RequestStarted
from kvgraph.hooks.link.late import PromptDigests
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from paper import text

pytestmark = pytest.mark.usefixtures("vllm_loaded")

KEY = bytes(range(32))


@pytest.fixture
def engine(paper: Callable[..., Any]) -> Any:
    engine = paper(Shape(blocks=100, warm=None), clock=time.monotonic)
    engine.side.client.outbox.open()
    engine.side.client.put(ContentKey(KEY))
    return engine


def told(engine: Any) -> list[AnyEvent]:
    events: list[AnyEvent] = engine.side.client.outbox.take_all()
    return events


def starts(engine: Any) -> list[RequestStarted]:
    return [event for event in told(engine) if isinstance(event, RequestStarted)]


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
    whole = PromptDigests(KEY, tokens, BLOCK_SIZE, None).digests()
    assert len(whole) == 8 * 300
    assert whole.startswith(PromptDigests(KEY, tokens[: 5 * BLOCK_SIZE], BLOCK_SIZE, "x").digests())
    other = [tokens[0] + 1, *tokens[1:]]
    assert not set(digests(whole)) & set(
        digests(PromptDigests(KEY, other, BLOCK_SIZE, None).digests())
    )
    assert not set(digests(whole)) & set(
        digests(PromptDigests(KEY[::-1], tokens, 16, None).digests())
    )


def digests(packed: bytes) -> list[bytes]:
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]
