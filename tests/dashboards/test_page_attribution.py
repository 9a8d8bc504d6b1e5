"""The model of raw logs by which the page is judged, and the page judged by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.reasons import Reason
from kvgraph.graph.wire.events import BlocksRemoved, BlocksStored
from kvgraph.hooks.keys import key_of, unpack
from kvgraph_bench.paper.paper_engine import Shape
from page_attribution import PLANS, FleetPlan, play
from paper import text
from raw_log_oracle import Line, RawLogOracle, Verdict

SIZE = 16


def hexed(*keys: int) -> list[str]:
    return [f"{key:#018x}" for key in keys]


class Log:
    """Lines of one engine, a second apart."""

    def __init__(self) -> None:
        self.oracle, self.at, self.number = RawLogOracle(), 0.0, 0
        self.say("EngineHello", model="m")

    def say(self, event: str, engine: str = "e", **fields: Any) -> None:
        self.at += 1.0
        line: Line = {"at": self.at, "engine": engine, "event": event, **fields}
        self.oracle.read(line)

    def start(
        self, *keys: int, found: int = 0, loading: int = 0, session: str | None = "s",
        engine: str = "e", says: tuple[int, ...] = (), salt: int = 0, lacking: int | None = None,
    ) -> Verdict:  # fmt: skip
        self.number += 1
        self.say(
            "RequestStarted", engine, request_id=f"r{self.number}", hashes=hexed(*keys),
            prompt_tokens=SIZE * len(keys) + 1, cached_tokens=SIZE * found, block_size=SIZE,
            session=session, tenant=None, loading_tokens=SIZE * loading,
            contents=hexed(*says), salt=salt, lacking=lacking,
        )  # fmt: skip
        return self.oracle.verdicts[-1]

    def serve(self, *keys: int, found: int = 0, engine: str = "e", **words: Any) -> Verdict:
        verdict = self.start(*keys, found=found, engine=engine, **words)
        parent = keys[found - 1] if found else None
        self.say("BlocksStored", engine, hashes=hexed(*keys[found:]), parent=parent, session=None)
        self.say(
            "RequestFinished", engine, request_id=verdict.request, hashes=hexed(*keys),
            session=words.get("session", "s"), tenant=None,
        )  # fmt: skip
        return verdict


@pytest.fixture
def log() -> Log:
    return Log()


def test_an_engine_of_several_groups_says_which_one_lacks_its_part(log: Log) -> None:
    log.serve(1, 2, 3)
    assert log.serve(1, 2, 3, found=1, lacking=1).reason == "other_group"


def test_a_growing_chat_is_new_at_its_end(log: Log) -> None:
    assert log.serve(1, 2).reason == "never_seen"
    assert log.serve(1, 2, 3, found=2).reason == "never_seen"


def test_who_shares_a_beginning_goes_another_way(log: Log) -> None:
    log.serve(1, 2, 3, session="first")
    verdict = log.serve(1, 2, 4, found=2, session="second")
    assert (verdict.reason, verdict.others) == ("diverged", frozenset({("first", None)}))


def test_what_left_is_evicted_also_when_that_is_told_after_the_request(log: Log) -> None:
    log.serve(1, 2)
    verdict = log.start(1, 2, found=1)
    assert verdict.reason == "unknown:in_pool"
    log.say("BlocksRemoved", hashes=hexed(2))
    assert (verdict.reason, verdict.left) == ("evicted", log.at)


def test_a_copy_that_is_gone_is_told_with_its_cause(log: Log) -> None:
    log.serve(1, 2)
    log.say("BlocksSpilled", hashes=hexed(2), tier=2)
    log.say("BlocksRemoved", hashes=hexed(2))
    assert log.start(1, 2, found=1).reason == "load_slower"
    log.oracle.verdicts.clear()
    log.say("RequestFinished", request_id="r2", hashes=[], session="s", tenant=None)
    log.say("CopiesDropped", hashes=hexed(2), tier=2, cause=1)
    verdict = log.start(1, 2, found=1)
    assert (verdict.reason, verdict.cause) == ("copy_lost", 1)


def test_others_have_it_or_compute_it(log: Log) -> None:
    log.say("EngineHello", "f", model="m")
    log.serve(1, 2)
    elsewhere = log.start(1, 2, engine="f")
    assert (elsewhere.reason, elsewhere.holders) == ("other_engine", frozenset({"e"}))
    assert log.start(1, 2, engine="f").reason == "not_cacheable:under_way"


def test_others_had_it_or_never_computed_it(log: Log) -> None:
    log.say("EngineHello", "f", model="m")
    log.serve(1, 2)
    log.say("BlocksRemoved", hashes=hexed(2, 1))
    assert log.serve(1, 2, engine="f").reason == "other_engine:had"
    gone = log.start(3, 4)
    log.say("RequestFinished", request_id=gone.request, hashes=[], session="s", tenant=None)
    assert log.start(3, 4).reason == "unknown:uncomputed"


def test_the_same_under_another_salt_is_the_salts_doing(log: Log) -> None:
    assert log.serve(1, 2, says=(91, 92), salt=5).reason == "never_seen"
    assert log.serve(11, 12, says=(91, 92), salt=6, session="t").reason == "other_salt"
    assert log.serve(21, 22, says=(95, 96), salt=5, session="u").reason == "never_seen"


def test_resets_and_lost_news_are_told_apart(log: Log) -> None:
    log.serve(1, 2)
    log.say("BlocksCleared")
    assert log.serve(1, 2).reason == "reset"
    log.say("BlocksResident", hashes=hexed(1))
    assert log.start(1, 2, found=1).reason == "unknown:unheard"


def test_what_a_step_evicts_and_computes_anew_is_told_as_evicted(paper: Callable[..., Any]) -> None:
    engine, graph = paper(Shape(blocks=15, warm=None)), KVCacheGraph()
    outbox = engine.side.client.outbox
    outbox.open(1 << 16)
    engine.serve(text(4, 1))
    engine.serve(text(4, 2))
    engine.ask(text(6, 3))  # takes what is blank, and the first prompt's last block
    again = engine.ask(text(4, 1))
    engine.step()
    lost = key_of(again.block_hashes[3])
    events = [engine.side.hello(), *outbox.take_all()]
    told = [event for event in events if isinstance(event, BlocksStored | BlocksRemoved)]
    kinds = [type(event) for event in told if lost in unpack(event.hashes)]
    assert kinds == [BlocksStored, BlocksStored, BlocksRemoved, BlocksStored]
    graph.apply("e", events)
    record = graph.tables.history.requests.record(3)
    assert (int(record["index"]), Reason(int(record["reason"]))) == (3, Reason.EVICTED)
    held = graph.tables.blocks.resident(0).sum()
    assert held == len(engine.pool.cached_block_hash_to_block)
    engine.settle()


def test_what_layers_with_a_window_lost_is_not_put_on_lost_news(paper: Callable[..., Any]) -> None:
    """We follow the group with full attention, which has the block; vLLM needs those of all."""
    engine, graph = paper(Shape(blocks=40, warm=None, windows=(None, 32))), KVCacheGraph()
    outbox = engine.side.client.outbox
    outbox.open(1 << 16)
    for length, prompt in ((12, 1), (10, 2), (6, 1)):
        engine.serve(text(length, prompt))
    graph.apply("e", [engine.side.hello(), *outbox.take_all()])
    miss = request_view(graph.tables.history, 2, float).miss
    assert (miss.index, miss.reason) == (0, "other_group")
    assert "cache group 1 (a sliding window of 32 tokens) had let go" in miss.sentence
    engine.settle()


@pytest.mark.parametrize(
    ("plan", "seconds"),  # longer where mishaps befall a fleet
    list(zip(PLANS, (300.0, 600.0, 600.0), strict=True)),
    ids=["alone", "two", "tiers"],
)
def test_the_page_is_right_about_a_recorded_fleet(
    paper_config: Any, plan: FleetPlan, seconds: float
) -> None:
    found = play(paper_config, plan, seconds)
    wrong = [(said.reason, said.view.miss, verdict) for said, verdict in found.wrong]
    assert len(found.pairs) > 100
    assert found.share >= 0.99, wrong[:5]
