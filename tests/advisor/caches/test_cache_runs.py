"""Caches of other processes: what they tell, over HTTP, and what the sidecar remembers of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx
import kvgraph
import pytest
import torch
from kvgraph.advisor import cache_watch
from kvgraph.advisor.cache_watch import CacheWatch
from kvgraph.advisor.page.caches import (
    MOST_RUNS,
    MOST_STEPS,
    SILENT_S,
    CacheRuns,
    Caches,
    CacheSteps,
)
from kvgraph.advisor.tools.remote import EditEndpoint, RemoteError
from kvgraph.dashboards.access import EDIT_HEADER, edit_token
from kvgraph.dashboards.server import HttpServer
from kvgraph.dashboards.source import StatusSource
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from page_app import create_app
from random_models import random_model
from small_world import page_over

SECRET = "a secret that nobody guesses"


class Step(NamedTuple):
    confidence: tuple[float, ...]
    budgets: tuple[int, ...]
    held: float
    at: float


def cache_of(*steps: Step) -> Any:
    return SimpleNamespace(settings=SimpleNamespace(low=64, high=256), trace=deque(steps))


def steps(
    run: str, *at: float, first: int = 0, started: float = 0.0, held: float = 80.0
) -> CacheSteps:
    count = len(at)
    return CacheSteps(
        run=run, started=started, first=first, low=64, high=256, at=list(at),
        confidence=[0.5] * count, budget=[256.0] * count, held=[held] * count,
    )  # fmt: skip


def told(watch: CacheWatch, count: int) -> bool:
    """Whether so many steps are told before long."""
    until = time.monotonic() + 20.0
    while watch.told < count and time.monotonic() < until:
        time.sleep(0.01)
    return watch.told >= count


@pytest.fixture
def url() -> Iterator[str]:
    source = cast(StatusSource, SimpleNamespace(page=page_over(KVCacheGraph())))
    server = HttpServer(create_app(source, {"127.0.0.1"}, SECRET), "127.0.0.1", 0)
    server.start()
    yield server.url
    server.stop()


def shown(url: str, steps: int) -> Caches:
    headers = {"Authorization": f"Bearer {SECRET}"}
    answer = httpx.get(f"{url}/v1/caches?steps={steps}", headers=headers, trust_env=False)
    return Caches.model_validate_json(answer.content)


def post(url: str, body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {SECRET}", EDIT_HEADER: edit_token(SECRET)}
    return httpx.post(f"{url}/v1/caches", json=body, headers=headers, trust_env=False)


def test_a_run_is_shown_while_it_goes_on(url: str) -> None:
    cache = cache_of(Step((0.2, 0.4), (256, 64), 70.0, at=3.0))
    with CacheWatch(cache, "chat", url, SECRET) as watch:
        assert told(watch, 1)
        cache.trace.append(Step((0.9, float("nan")), (64, 64), 64.0, at=2.0))  # a clock set back
        cache.trace.append(Step((0.9, 0.9), (64, 64), 64.0, at=4.0))
    (run,) = shown(url, 10).runs
    assert (run.run, run.low, run.high, run.first) == ("chat", 64, 256, 0)
    assert run.at == [3.0, 3.0, 4.0]
    assert run.confidence == pytest.approx([0.3, 0.0, 0.9])
    assert (run.budget, run.held) == ([160.0, 64.0, 64.0], [70.0, 64.0, 64.0])
    assert watch.told == 3


def test_what_a_model_wrote_is_shown_as_its_own_cache_has_it(url: str) -> None:
    model = random_model("llama")
    settings = kvgraph.ConfKVSettings(low=24, high=40, window=8, slack=4)
    cache = kvgraph.ConfKVCache(model.config, settings)
    with CacheWatch(cache, "llama", url, SECRET):
        model.generate(torch.ones((2, 20), dtype=torch.int64), past_key_values=cache,
                       max_new_tokens=60, do_sample=False, pad_token_id=0)  # fmt: skip
    (run,) = shown(url, 100).runs
    assert (run.low, run.high, len(run.at)) == (24, 40, 60)
    assert run.held == [step.held for step in cache.trace]
    assert 40 < max(run.held) <= 44  # the high budget, and the steps until the next eviction


@pytest.mark.parametrize("wrong", ["token", "port"])
def test_a_model_never_hears_of_a_sidecar_that_refuses_or_is_gone(
    url: str, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = ("http://127.0.0.1:9", SECRET) if wrong == "port" else (url, "wrong")
    with CacheWatch(cache_of(Step((0.5,), (256,), 70.0, at=1.0)), "chat", *where) as watch:
        pass
    assert watch.told == 0
    assert caplog.text.count("run 'chat' is not shown") == 1


def test_steps_whose_answer_was_lost_are_told_again_and_count_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, lost = EditEndpoint.send, ["an answer"]

    def lose_one(*asked: Any) -> Any:
        answer = send(*asked)
        if lost:
            raise OSError(f"{lost.pop()} is lost")
        return answer

    monkeypatch.setattr(EditEndpoint, "send", lose_one)
    cache = cache_of(Step((0.5,), (256,), 70.0, at=1.0))
    with CacheWatch(cache, "chat", url, SECRET) as watch:
        assert told(watch, 1)
        cache.trace.append(Step((0.5,), (256,), 71.0, at=2.0))
    assert shown(url, 10).runs[0].held == [70.0, 71.0]


def test_a_name_or_an_address_that_cannot_be_is_told_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="0 characters"):
        CacheWatch(cache_of(), "", url, SECRET)
    with pytest.raises(RemoteError, match="'sidecar' is not a URL"):
        CacheWatch(cache_of(), "chat", "sidecar")


def test_a_sidecar_that_comes_later_is_told_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    running: list[str] = []
    monkeypatch.setattr(cache_watch, "EditEndpoint", partial(the_only_one, running))
    with CacheWatch(cache_of(Step((0.5,), (256,), 70.0, at=1.0)), "chat") as watch:
        while "no sidecar runs" not in caplog.text:
            time.sleep(0.01)
        running.append(url)
        assert told(watch, 1)
    assert shown(url, 10).runs[0].held == [70.0]
    assert caplog.text.count("run 'chat' is not shown") == 1
    assert caplog.text.count("run 'chat' is shown now") == 1


def the_only_one(running: list[str], path: str, *where: str | None) -> EditEndpoint:
    if not running:
        raise RemoteError("no sidecar runs")
    return EditEndpoint(path, running[0], SECRET)


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": ""},
        {"at": [1.0]},
        {"held": [1.0] * 5000},
        {"first": -1},
        {"at": [2.0, 1.0]},
        {"confidence": [0.5, 2.0]},
        {"held": [1.0, -1.0]},
        {"low": None},
        {"prompt": "what was asked"},
    ],
)
def test_what_is_malformed_is_refused(wrong: dict[str, Any], url: str) -> None:
    body = {**steps("chat", 1.0, 2.0).model_dump(), **wrong}
    answer = post(url, body)
    assert answer.status_code == 422
    assert "what was asked" not in answer.text
    assert shown(url, 1).runs == []


def test_steps_are_put_behind_those_of_the_same_run_and_the_latest_stay() -> None:
    runs = CacheRuns(time.time)
    assert runs.note(steps("chat", *map(float, range(3000)), held=1.0)).steps == 3000
    more = steps("chat", *map(float, range(3000, 6000)), first=3000, held=2.0)
    assert runs.note(more).steps == MOST_STEPS
    (run,) = runs.shown(3001).runs
    assert (run.at[0], run.at[-1], run.held[0], run.held[1]) == (2999.0, 5999.0, 1.0, 2.0)
    assert (run.first, run.following) == (2999, 6000)


def test_steps_that_never_came_leave_a_gap_in_their_numbers() -> None:
    runs = CacheRuns(time.time)
    runs.note(steps("chat", 1.0, 2.0))
    runs.note(steps("chat", 9.0, first=8))
    (run,) = runs.shown(10).runs
    assert (run.at, run.following) == ([1.0, 2.0, 9.0], 9)


def test_a_name_is_free_once_its_run_was_silent_for_seconds() -> None:
    now = 0.0
    runs = CacheRuns(time.time, lambda: now)
    runs.note(steps("chat", 5.0, 6.0))
    assert not runs.note(steps("chat", 7.0, started=6.5)).taken
    assert runs.shown(10).runs[0].at == [5.0, 6.0]
    now = SILENT_S
    assert runs.note(steps("chat", 7.0, started=6.5)).taken
    assert runs.shown(10).runs[0].at == [7.0]


def test_a_second_watch_of_one_name_says_that_it_is_not_shown(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (cache_of(Step((0.5,), (256,), held, at=1.0)) for held in (70.0, 80.0))
    with CacheWatch(one, "chat", url, SECRET) as first:
        assert told(first, 1)
        with CacheWatch(two, "chat", url, SECRET) as second:
            pass
    assert second.told == 0
    assert "another one of this name is being shown" in caplog.text
    assert shown(url, 10).runs[0].held == [70.0]


def test_more_steps_than_are_remembered_keep_their_numbers(url: str) -> None:
    cache = cache_of(*(Step((0.5,), (256,), float(n), at=float(n)) for n in range(MOST_STEPS + 10)))
    with CacheWatch(cache, "chat", url, SECRET) as watch:
        pass
    assert watch.told == MOST_STEPS + 10
    (run,) = shown(url, 1).runs
    assert (run.first, run.held) == (MOST_STEPS + 9, [float(MOST_STEPS + 9)])


def test_a_body_that_is_too_long_is_refused_before_it_is_read(url: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(80):
            yield b"[" + b"{}," * 10_000

    announced = httpx.post(f"{url}/v1/caches", content=b"[" * (3 << 20), trust_env=False)
    streamed = httpx.post(f"{url}/v1/caches", content=pieces(), trust_env=False)
    assert (announced.status_code, streamed.status_code) == (413, 413)
    assert "allowed: 2097152 bytes" in announced.json()["detail"]


def test_who_was_silent_for_longest_is_forgotten() -> None:
    runs = CacheRuns(time.time)
    for number in range(MOST_RUNS):
        runs.note(steps(f"run {number}", 1.0))
    runs.note(steps("run 0", 2.0))
    runs.note(steps("new", 1.0))
    names = [run.run for run in runs.shown(1).runs]
    assert names[:2] == ["new", "run 0"]
    assert len(names) == MOST_RUNS
    assert "run 1" not in names
