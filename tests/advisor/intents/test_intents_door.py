"""``POST /v1/intents`` and its client: who may ask, and what is answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import httpx
import numpy as np
import pytest
from kvgraph.advisor.intents.client import IntentClient
from kvgraph.advisor.page.intents import MOST_WISHES
from kvgraph.advisor.tools.remote import RemoteError
from kvgraph.dashboards.access import EDIT_HEADER, edit_token, page_token
from kvgraph.dashboards.server import HttpServer
from kvgraph.dashboards.source import StatusSource
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import BlocksStored, EngineHello, RequestFinished, RequestStarted
from page_app import create_app
from small_world import page_over

SECRET = "a secret that nobody guesses"


class Source:
    """A sidecar's page over a graph of two sessions, of two blocks each."""

    def __init__(self) -> None:
        self.graph = KVCacheGraph()
        self.page = page_over(self.graph)
        self.graph.apply("e", [EngineHello("e", "", 16, 40, "v")])
        for session, keys in (("a", (1, 2)), ("b", (3, 4))):
            packed = np.array(keys, dtype="<u8").tobytes()
            self.graph.apply(
                "e",
                [
                    RequestStarted(session, packed, 32, 0, 16, session),
                    BlocksStored(packed, None, 16),
                    RequestFinished(session, packed, 32, 32, "stop", session),
                ],
            )


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def url(source: Source) -> Iterator[str]:
    app = create_app(cast(StatusSource, source), {"127.0.0.1"}, SECRET)
    server = HttpServer(app, "127.0.0.1", 0)
    server.start()
    yield server.url
    server.stop()


def post(url: str, body: Any, secret: str = SECRET, edit: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {secret}"}
    headers[EDIT_HEADER] = edit_token(SECRET) if edit is None else edit
    return httpx.post(f"{url}/v1/intents", json=body, headers=headers, trust_env=False, timeout=30)


def test_the_client_is_answered_for_every_kind(source: Source, url: str) -> None:
    client = IntentClient(url, SECRET)
    assert client.pin(session="a", seconds=60)["answer"] == "accepted"
    assert source.graph.rank("e", 10).order.tolist() == [4, 3, 2, 1]
    assert client.demote(block=2)["answer"] == "accepted"
    assert source.graph.rank("e", 10).order.tolist()[:2] == [2, 1]
    assert client.retain(0.5, session="b")["blocks"] == 2
    assert client.share(session="b")["answer"] == "accepted"
    assert client.prefetch(session="b")["reason"] == "all of them are in a pool already"
    assert client.pin(session="b", tenant="acme")["answer"] == "missing"
    assert client.pin()["answer"] == "rejected"


@pytest.mark.parametrize(
    ("importance", "session", "named"),
    [(7, "a", "importance"), (float("nan"), "a", "importance"), (1, "a" * 300, "session"),
     (1, "a" * 10_000_000, "bytes")],
)  # fmt: skip
def test_a_wish_that_is_malformed_is_answered_too(
    importance: float, session: str, named: str, source: Source, url: str
) -> None:
    answer = IntentClient(url, SECRET).retain(importance, session=session)
    assert answer["answer"] == "rejected"
    assert named in answer["reason"]


def test_signals_say_what_a_session_does(source: Source, url: str) -> None:
    client = IntentClient(url, SECRET)
    assert client.waiting("a", tool="bash", expected_return_s=5)["answer"] == "accepted"
    assert source.graph.explain_session("a")["waits_for"] == "bash"
    assert client.turn_ended("b")["answer"] == "accepted"
    assert source.graph.explain_session("b")["last_stop"] == "end_of_turn"
    assert client.ended("b")["answer"] == "accepted"
    assert source.graph.explain_session("b")["state"] == "ended"
    assert client.ended("nobody")["answer"] == "missing"


def test_whoever_may_only_read_changes_nothing(source: Source, url: str) -> None:
    body = {"intents": [{"kind": "pin", "session": "a"}]}
    before = source.graph.changes.total
    assert post(url, body, secret="x").status_code == 401
    assert post(url, body, secret=page_token(SECRET), edit="").status_code == 403
    assert post(url, body, edit=page_token(SECRET)).status_code == 403
    assert source.graph.changes.total == before
    with pytest.raises(RemoteError, match="answered 401"):
        IntentClient(url, "wrong").pin(session="a")


@pytest.mark.parametrize(
    "wish",
    [
        {"kind": "burn", "session": "a"},
        {"kind": "pin", "session": "a" * 300},
        {"kind": "pin", "session": "a", "seconds": -1},
        {"kind": "pin", "block": "-5"},
        {"kind": "pin", "block": "1e3"},
        {"kind": "retain", "session": "a", "importance": 2},
        {"kind": "pin", "session": "a", "unknown": 1},
        {"kind": "pin", "session": "a", "seconds": True},
        {"kind": "pin", "session": "a", "seconds": "60"},
        {"kind": "pin", "session": "a", "waiting_for_tool": True},
        {"kind": "signal", "session": "a", "session_ended": True, "seconds": 4},
        {"kind": "signal", "session": "a", "waiting_for_tool": 1},
        {"kind": "pin", "block": "99999999999999999999"},
        {},
    ],
)
def test_what_is_malformed_is_refused_as_a_whole(
    wish: dict[str, Any], source: Source, url: str
) -> None:
    before = source.graph.changes.total
    good = {"kind": "pin", "session": "a"}
    assert post(url, {"intents": [good, wish]}).status_code == 422
    assert post(url, {"intents": [good] * (MOST_WISHES + 1)}).status_code == 422
    assert source.graph.changes.total == before


@pytest.mark.parametrize("block", ["0xffffffffffffffff", "18446744073709551615", "7"])
def test_a_block_that_nobody_knows_is_missing(block: str, url: str) -> None:
    answer = post(url, {"intents": [{"kind": "pin", "block": block}]}).json()
    assert answer["answers"][0]["answer"] == "missing"
