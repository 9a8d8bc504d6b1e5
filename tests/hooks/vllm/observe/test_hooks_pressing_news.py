"""When the engine's news goes to the sidecar at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgraph.bench.paper.paper_engine import Shape
from kvgraph.hooks.vllm.observe.pressing_news import PressingNews

BLOCK = 16


def test_much_that_was_stored_is_told_after_a_step_and_again_at_rest() -> None:
    news = PressingNews(1000)
    assert not news.after_step(19)
    assert news.after_step(20)
    assert not news.after_step(39)
    assert news.at_rest(39)
    assert not news.at_rest(58)
    assert news.after_step(58)
    assert news.at_rest(59)


def test_every_block_is_news_in_a_pool_of_a_few() -> None:
    news = PressingNews(10)
    assert news.after_step(1)
    assert not news.after_step(1)


def test_the_end_of_the_last_running_request_is_told_at_once(paper: Callable[..., Any]) -> None:
    engine = paper(Shape(blocks=101, warm=None))
    nudged: list[int] = []
    engine.side.client.nudge = lambda: nudged.append(len(engine.side.observer.running))
    long, short = engine.ask(range(4 * BLOCK), 8), engine.ask(range(900, 900 + 4 * BLOCK), 2)
    engine.until(lambda: short.is_finished())
    assert not long.is_finished()
    nudged.clear()
    engine.settle()
    assert nudged == [0], "once, when nothing runs any more"
