"""Every reason for a miss, made to happen, and read from the page."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from kvgraph.graph.logs.reasons import REASON_NAMES
from kvgraph.graph.wire.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CacheGroup,
    CopiesDropped,
    EngineHello,
    GroupKind,
    RequestFinished,
    RequestStarted,
    TierReport,
)
from kvgraph.hooks.fake import FakeEngine
from msgspec.structs import replace
from page_browser import Visit
from page_sidecar import BLOCK, TOKEN, PageSidecar
from small_world import pack
from waiting import until

SENTENCES = {
    "never_seen": "was never asked for before",
    "diverged": "up to there the prompt is that of session never_seen",
    "evicted": "left the pool",
    "other_engine": "would have found it",
    "load_slower": "computing it was judged faster than loading",
    "copy_lost": "the copy is gone: given up to make room for others",
    "reset": "was in the pool until the prefix cache was reset",
    "not_cacheable": "all that can be reused was found",
    "unknown": "the news of its eviction was lost",
    "in_store": "is in the shared store, but did not come from there",
    "other_group": "cache group 1 (a sliding window of 64 tokens) had let go of a part",
    "other_salt": "session theirs's prompt says the same up to there under another one",
}
"""A part of what the page says; sessions are called by the reason that they make happen."""


class TwoKinds(FakeEngine):
    """An engine whose layers are of two kinds."""

    def hello(self) -> EngineHello:
        window = CacheGroup(GroupKind.WINDOW, 64, BLOCK)
        return replace(super().hello(), groups=(CacheGroup(GroupKind.FULL, 0, BLOCK), window))


class Told:
    """An engine that reports what it is told to report."""

    def __init__(self, engine: FakeEngine) -> None:
        self._emit, self._number = engine.client.emit, 0

    def serve(self, session: str, *keys: int, found: int = 0, **fields: Any) -> None:
        """A request for these blocks, of which the pool has the first ``found``."""
        self._number += 1
        name, size = f"{session}-{self._number}", BLOCK
        total = size * len(keys) + 5
        self._emit(RequestStarted(name, pack(*keys), total, size * found, size, session, **fields))
        if fresh := keys[found:]:
            self._emit(BlocksStored(pack(*fresh), keys[found - 1] if found else None, size))
        self._emit(RequestFinished(name, pack(*keys), total, total, "finished_stopped", session))

    def lose(self, *keys: int) -> None:
        """These blocks leave the pool."""
        self._emit(BlocksRemoved(pack(*keys)))

    def copy(self, *keys: int) -> None:
        """These blocks leave it with a copy."""
        self._emit(BlocksSpilled(pack(*keys), 2, 100))
        self.lose(*keys)

    def say(self, *events: Any) -> None:
        for event in events:
            self._emit(event)


def make_all_happen(one: Told, two: Told) -> None:
    one.serve("never_seen", 1, 2, 3)
    one.serve("diverged", 1, 2, 30, found=2)
    one.serve("not_cacheable", 1, 2, 3, found=3)
    one.serve("theirs", 41, 42)
    one.lose(42)
    one.serve("evicted", 41, 42, found=1)
    two.serve("theirs", 51, 52)
    one.serve("theirs", 61, 62)
    one.copy(62)
    one.serve("load_slower", 61, 62, found=1)
    one.serve("theirs", 71, 72)
    one.copy(72)
    one.say(CopiesDropped(pack(72), 2, 1))
    one.serve("copy_lost", 71, 72, found=1)
    one.serve("theirs", 81, 82, contents=pack(5, 6), salt=1)
    one.serve("other_salt", 91, 92, contents=pack(5, 6), salt=2)
    one.say(TierReport(4096, *[0] * 13, 0.0, *[0] * 5, 0.0, 0.0, 0.0, reads_store=True))
    two.serve("theirs", 111, 112)
    two.say(BlocksSpilled(pack(111, 112), 8, 100))
    one.serve("theirs", 121, 122)
    one.serve("other_group", 121, 122, found=1, lacking=1)
    one.serve("theirs", 101, 102)
    one.serve("unknown", 101, 102, found=1)


def told(sidecar: PageSidecar) -> dict[str, tuple[int, str]]:
    """By session: its last request, and why that missed."""
    question = urllib.request.Request(f"{sidecar.url}/v1/requests?limit=100")
    question.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(question, timeout=10) as answer:
        found = json.load(answer)["requests"]
    return {each["session"]: (each["id"], each["miss"]["reason"]) for each in reversed(found)}


def test_every_reason_is_told_on_the_page(
    visit: Callable[..., Visit], page_sidecar: PageSidecar
) -> None:
    with (
        TwoKinds(page_sidecar.endpoint, 500, BLOCK, "one") as first,
        FakeEngine(page_sidecar.endpoint, 500, BLOCK, "two") as second,
    ):
        until(lambda: first.client.standing.linked and second.client.standing.linked)
        time.sleep(1.0)  # the first lists of both pools were taken in
        one, two = Told(first), Told(second)
        make_all_happen(one, two)
        until(lambda: "unknown" in told(page_sidecar))
        one.serve("other_engine", 51, 52)
        one.serve("in_store", 111, 112)
        one.say(BlocksCleared())
        one.serve("reset", 1, 2, 3)
        until(lambda: "reset" in told(page_sidecar))
        said = told(page_sidecar)
        assert {name: said[name][1] for name in REASON_NAMES} == dict(
            zip(REASON_NAMES, REASON_NAMES, strict=True)
        )
        begun = visit()
        begun.page.goto(page_sidecar.address)
        begun.page.get_by_text("live", exact=True).wait_for()
        for reason, part in SENTENCES.items():
            page = begun.show(f"misses?request={said[reason][0]}")
            sentence = page.locator(".opened .reason")
            sentence.wait_for()
            assert part in sentence.inner_text(), reason
        assert set(SENTENCES) == set(REASON_NAMES)
        assert begun.faults == []
