"""What a request says that it read, where it is given blocks more than once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.hooks.tiers.jobs import Load
from kvgraph_bench.paper.paper_engine import Shape
from paper import words
from recall_usage import used

pytestmark = pytest.mark.usefixtures("vllm_loaded")
LIMITS = SpliceLimits(least_tokens=32, margin=4, most_generations=3)
HEAD, DOCUMENT, LATER = words(40, 1), words(100, 2), words(150, 3)
ASKS = {"kv_transfer_params": {"kvgraph": {"recall": True, "session": "mine"}}}


@pytest.fixture
def engine(recalls: Callable[..., Any]) -> Any:
    return recalls(Shape(blocks=97, warm=400), LIMITS)


def usage_of(engine: Any, request: Any) -> dict[str, int]:
    """What a request that is under way says at its end."""
    told, finished = dict[str, Any](), engine.connector.request_finished_all_groups

    def watched(ended: Any, block_ids: Any) -> Any:
        answer = finished(ended, block_ids)
        told[ended.request_id] = answer[1]
        return answer

    engine.connector.request_finished_all_groups = watched
    engine.until(request.is_finished)
    usage: dict[str, int] = told[request.request_id]["kvgraph"]["recall"]
    return usage


def lose(engine: Any, request: Any) -> None:
    """Preempt a request, and lose its blocks and their copies."""
    ledger = engine.side.bridge.ledger
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, time.time())
    ledger.give_up([copy for copy in map(ledger.directory.warm, request.block_hashes) if copy])
    held = [engine.pool.get_cached_block(each, [0]) for each in request.block_hashes]
    engine.pool.evict_blocks({block.block_id for blocks in held for block in blocks or ()})


def test_who_is_spliced_after_a_preemption_says_so(engine: Any) -> None:
    mine = engine.ask([*DOCUMENT, *words(30, 20)], 40, **ASKS)
    for _ in range(5):
        engine.step()
        engine.finish_copies()
    other = engine.ask(
        [*HEAD, *DOCUMENT, *words(20, 5)], 2, kv_transfer_params={"kvgraph": {"recall": True}}
    )
    engine.until(other.is_finished)
    for _ in range(3):
        engine.step()
        engine.finish_copies()
    lose(engine, mine)
    told = usage_of(engine, mine)
    assert (told["exact"], told["spliced"]) == (0, len(DOCUMENT) - LIMITS.margin)
    assert sum(told.values()) == mine.num_prompt_tokens


def test_after_a_load_that_failed_all_was_computed(engine: Any) -> None:
    used(engine, [*HEAD, *DOCUMENT, *words(20, 5)], **ASKS)
    (worker,) = engine.workers
    worker.failing = lambda job: range(len(job.targets)) if isinstance(job, Load) else ()
    mine = engine.ask([*DOCUMENT, *LATER], 4, **ASKS)
    told = usage_of(engine, mine)
    assert told == {"exact": 0, "own": 0, "spliced": 0, "computed": mine.num_prompt_tokens}


def test_a_session_that_goes_on_finds_its_branch_though_nobody_advises_copies(engine: Any) -> None:
    marks = engine.side.bridge.spiller.marks
    marks.worth = frozenset()
    marks.follow = lambda ranking: False
    used(engine, [*HEAD, *DOCUMENT, *words(20, 5)], **ASKS)
    text, found = [*DOCUMENT, *words(90, 3)], list[int]()
    for turn in range(4):
        found.append(used(engine, text, 4, **ASKS)["own"])
        text = [*text, *words(50, 60 + turn)]
        for seed in range(8):  # the pool loses it
            engine.serve(words(400, 1000 + turn * 10 + seed))
    assert found[0] == 0
    assert all(later >= 150 for later in found[1:])
