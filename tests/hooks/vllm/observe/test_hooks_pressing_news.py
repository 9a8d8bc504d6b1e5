"""When the engine's news goes to the sidecar at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.hooks.link.client import AdvisorClient
from kvgraph.hooks.vllm.meters import PressingNews
from kvgraph_bench.paper.paper_engine import Shape

BLOCK = 16


class Told:
    """Counts how often news was told."""

    def __init__(self, pool_blocks: int) -> None:
        self.times = 0
        self.news = PressingNews(pool_blocks, self.tell)

    def tell(self) -> None:
        self.times += 1


def test_much_that_was_stored_is_told_after_a_step_and_again_at_rest() -> None:
    told = Told(1000)
    calls = [
        (told.news.after_step, 19, 0), (told.news.after_step, 20, 1),
        (told.news.after_step, 39, 1), (told.news.at_rest, 39, 2), (told.news.at_rest, 58, 2),
        (told.news.after_step, 58, 3), (told.news.at_rest, 59, 4),
    ]  # fmt: skip
    for look, stored, times in calls:
        look(stored)
        assert told.times == times


def test_every_block_is_news_in_a_pool_of_a_few() -> None:
    told = Told(10)
    for _ in range(2):
        told.news.after_step(1)
    assert told.times == 1


def test_the_end_of_the_last_running_request_is_told_at_once(
    paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nudged: list[int] = []
    monkeypatch.setattr(AdvisorClient, "nudge", lambda _: nudged.append(len(running)))
    engine = paper(Shape(blocks=101, warm=None))
    running = engine.side.observer.running
    long, short = engine.ask(range(4 * BLOCK), 8), engine.ask(range(900, 900 + 4 * BLOCK), 2)
    engine.until(lambda: short.is_finished())
    assert not long.is_finished()
    nudged.clear()
    engine.settle()
    assert nudged == [0], "once, when nothing runs any more"
