"""A real vLLM beside a sidecar: what the page says of requests, against what the engine told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.config.config import Config
from kvgraph.advisor.page.misses import RequestQuery, RequestView, misses_of, requests_of
from kvgraph.advisor.page.sessions import session_of
from kvgraph.advisor.service import Service
from kvgraph.advisor.tools.terminal import why_sentence
from kvgraph.graph.logs.evictions import EvictionLog
from kvgraph.graph.tables.blocks import salt_of
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.events import AnyEvent, BlocksStored, EngineHello, RequestStarted

pytestmark = pytest.mark.engine
REQUESTS = 36


class Books:
    """A dictionary's view of what the engine said, in its order; shares no code with the logs."""

    def __init__(self) -> None:
        self.model = ""
        self.once: set[int] = set()
        self.expected: dict[str, tuple[int, str]] = {}  # request → first miss, and why

    def __call__(self, engine: str, events: Sequence[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.once |= set(as_keys(event.hashes).tolist())
            elif isinstance(event, EngineHello):
                self.model = event.model
            elif isinstance(event, RequestStarted):
                self._started(event)

    def _started(self, event: RequestStarted) -> None:
        found = event.cached_tokens // event.block_size
        reach = (event.prompt_tokens - 1) // event.block_size
        if found >= reach:
            self.expected[event.request_id] = found, "not_cacheable"
            return
        key = as_keys(event.hashes).tolist()[found]
        seen = "evicted" if key in self.once else "never_seen"
        self.expected[event.request_id] = found, seen


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def service(socket_directory: Path, books: Books) -> Iterator[Service]:
    config = Config(sidecar={"endpoint": f"ipc://{socket_directory}/s"})
    service = Service(config, tap=books)
    thread = threading.Thread(target=service.run)
    thread.start()
    yield service
    service.stop()
    thread.join(10)


def test_the_page_says_why_each_request_missed(
    service: Service, books: Books, new_engine: Any, tiny_model: Path
) -> None:
    run = new_engine(
        "engine_run.py", {"model": str(tiny_model), "pause_s": 0.1},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=service.endpoint,
        AITHER_KVCACHE_HINTS="session",
    ).run()  # fmt: skip
    page = service.status.page
    requests = requests_of(page, RequestQuery(100)).requests
    assert len(requests) == REQUESTS
    assert sum(each.blocks.pool * each.block_size for each in requests) == run.result["cached"]
    said = {each.request: (each.miss.index, each.miss.reason) for each in requests if each.miss}
    assert said == books.expected
    reasons = [reason for _, reason in said.values()]
    assert {"evicted", "never_seen"} <= set(reasons)
    _check_evictions(service.graph.tables.history.evictions[0], books, requests)
    assert {name for name, _ in misses_of(page).totals.items()} > set(reasons)
    (evicted, *_) = [each for each in requests if each.miss and each.miss.reason == "evicted"]
    assert "left the pool" in why_sentence(evicted.model_dump())
    assert session_of(page, "hot-a", None).turns


def _check_evictions(log: EvictionLog, books: Books, requests: Sequence[RequestView]) -> None:
    """Each evicted miss leads to the record of its block, and that to a regret."""
    salt = int(salt_of(books.model))
    for each in requests:
        if each.miss is not None and each.miss.reason == "evicted":
            assert each.miss.eviction is not None
            record = log.record(each.miss.eviction)
            assert f"{int(record['key']) ^ salt:#018x}" == each.miss.key
            assert int(record["wanted"])
