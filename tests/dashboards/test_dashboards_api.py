"""The page's API: who may ask, and that each path answers with the model that it promises."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from kvgraph.advisor.page.caches import Caches
from kvgraph.advisor.page.engines import Engines
from kvgraph.advisor.page.events import NewsStream
from kvgraph.advisor.page.evictions import Evictions
from kvgraph.advisor.page.graph import GraphView
from kvgraph.advisor.page.misses import Misses, Requests
from kvgraph.advisor.page.now import Now
from kvgraph.advisor.page.ranking import RankingView
from kvgraph.advisor.page.sampled import Sampled
from kvgraph.advisor.page.sessions import Sessions
from kvgraph.advisor.page.shadows import Shadows
from kvgraph.advisor.page.what_if import Weights
from kvgraph.dashboards import app
from kvgraph.dashboards.access import PAGE, POLICY, Access, edit_token, page_address, page_token
from kvgraph.dashboards.source import StatusSource
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import EngineHello
from page_app import create_app
from pydantic import BaseModel
from small_world import SIZE, World, page_of, page_over

SECRET = "a secret that nobody guesses"
PATHS: dict[str, type[BaseModel]] = {
    "now": Now,
    "requests": Requests,
    "misses": Misses,
    "evictions": Evictions,
    "ranking": RankingView,
    "graph": GraphView,
    "sessions": Sessions,
    "engines": Engines,
    "caches": Caches,
    "sampled": Sampled,
    "shadows": Shadows,
    "weights": Weights,
}


def visitor(secret: str = SECRET, **headers: str) -> TestClient:
    """Of an empty sidecar's page."""
    source = cast(StatusSource, SimpleNamespace(page=page_over(KVCacheGraph())))
    app = create_app(source, {"127.0.0.1"}, secret)
    return TestClient(app, "http://127.0.0.1:8000", headers=headers, follow_redirects=False)


@pytest.fixture
def client() -> TestClient:
    return visitor(Authorization=f"Bearer {page_token(SECRET)}")


@pytest.mark.parametrize("path", PATHS)
def test_each_path_answers_with_its_model(client: TestClient, path: str) -> None:
    answer = client.get(f"/v1/{path}")
    assert answer.status_code == 200
    PATHS[path].model_validate_json(answer.content)


@pytest.mark.parametrize("path", [*PATHS, "blocks/1", "sessions/chat", "events"])
def test_each_path_needs_the_token(path: str) -> None:
    answer = visitor().get(f"/v1/{path}")
    assert answer.status_code == 401
    assert SECRET not in answer.text


def test_each_path_that_changes_something_needs_the_edit_token(client: TestClient) -> None:
    paths = client.get("/v1/openapi.json").json()["paths"]
    changes = [(way, path) for path, ways in paths.items() for way in ways if way != "get"]
    changes.remove(("post", "/v1/weights/preview"))
    assert len(changes) >= 6
    for way, path in changes:
        answer = client.request(way, path, json={})
        assert (answer.status_code, "edit token" in answer.text) == (403, True), path


def test_the_schema_names_every_path() -> None:
    schema = visitor().get("/v1/openapi.json").json()
    assert {f"/v1/{path}" for path in PATHS} < set(schema["paths"])
    assert "Miss" in schema["components"]["schemas"]


def test_the_schema_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the port may ask for it, and making it keeps the sidecar busy."""
    made: list[str] = []
    real = app.get_openapi
    monkeypatch.setattr(app, "get_openapi", lambda **of: (made.append("once"), real(**of))[1])
    client = visitor()
    first, again = (client.get("/v1/openapi.json") for _ in range(2))
    assert first.headers["content-type"] == "application/json"
    assert first.content == again.content
    assert made == ["once"]


def test_what_is_unknown_or_wrong_is_told(client: TestClient) -> None:
    assert client.get("/v1/blocks/77").status_code == 404
    assert client.get("/v1/sessions/nobody").status_code == 404
    assert client.get("/v1/blocks/xyz").status_code == 400
    assert client.get("/v1/requests?limit=0").status_code == 422


def test_an_unchanged_graph_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/v1/graph").headers["etag"]
    assert client.get("/v1/graph", headers={"If-None-Match": tag}).status_code == 304


def test_an_address_opens_the_page_once_and_a_cookie_keeps_it() -> None:
    client = visitor()
    address = page_address("http://127.0.0.1:8000", SECRET)
    answer = client.get(address)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "kvgraph-8000="))
    assert SECRET not in cookie
    assert page_token(SECRET) not in cookie
    assert client.get("/v1/now").status_code == 200


def test_a_cookie_of_another_sidecar_opens_nothing() -> None:
    client = visitor()
    client.get(page_address("http://127.0.0.1:8000", SECRET))
    kept = client.cookies.get("kvgraph-8000")
    other = visitor("another secret altogether")
    other.cookies.set("kvgraph-8000", str(kept))
    assert other.get("/v1/now").status_code == 401


@pytest.mark.parametrize("token", ["", "x", SECRET, edit_token(SECRET), "\u00e4"])
def test_a_wrong_address_opens_nothing(token: str) -> None:
    answer = visitor().get("/open", params={"token": token})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_the_edit_token_is_another_and_stands_where_no_server_sees_it() -> None:
    address = page_address("http://127.0.0.1:8000", SECRET, edit=True)
    shown, _, hidden = address.partition("#")
    assert hidden == f"edit={edit_token(SECRET)}"
    assert edit_token(SECRET) not in shown
    assert len({SECRET, page_token(SECRET), edit_token(SECRET)}) == 3
    check: Any = Access(SECRET).edits()
    check(edit_token(SECRET))
    for wrong in ("", SECRET, page_token(SECRET)):
        with pytest.raises(Exception, match="edit token"):
            check(wrong)


@pytest.mark.parametrize(
    ("last", "ids", "is_gap"),
    [("", [3, 4, 5], False), ("{}4", [5], False), ("{}2", [3, 4, 5], False),
     ("{}1", [3, 4, 5], True), ("x", [3, 4, 5], True), ("{}" + "9" * 50, [3, 4, 5], True),
     ("another-4", [3, 4, 5], True), ("{}-4", [3, 4, 5], True), ("4", [3, 4, 5], True)],
)  # fmt: skip
async def test_a_reader_resumes_where_it_was(
    monkeypatch: pytest.MonkeyPatch, last: str, ids: list[int], is_gap: bool
) -> None:
    monkeypatch.setattr("kvgraph.advisor.page.events.RECENT", 3)
    world = World()
    for key in range(1, 7):
        world.serve(key)
    stream = NewsStream(page_of(world))
    name = mark_of(await first_news(stream)).removesuffix("5")
    frame = await first_news(stream, last.format(name))
    news = data_of(frame)
    assert [each["id"] for each in news["requests"]] == ids
    assert (news["is_gap"], mark_of(frame)) == (is_gap, f"{name}5")


async def first_news(stream: NewsStream, last: str = "") -> bytes:
    """What a reader is told first."""
    frames = stream.follow(last)
    await anext(frames)
    return await anext(frames)


async def test_a_reader_of_a_sidecar_before_this_one_forgets_its_requests() -> None:
    news = data_of(await first_news(NewsStream(page_of(World())), "another-4"))
    assert (news["requests"], news["is_gap"]) == ([], True)


async def test_a_reader_is_told_when_a_request_ends_and_resumes_before_those_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvgraph.advisor.page.events.BEAT_S", 0.01)
    world = World()
    world.serve(1)
    slow = world.start(2, session="slow")
    world.serve(3)
    stream = NewsStream(page_of(world))
    frames = events(stream)
    first = await anext(frames)
    world.now += 5.0
    world.end(slow, 2, session="slow")
    second, resumed = await anext(frames), await first_news(stream, mark_of(first))
    assert [each["id"] for each in data_of(first)["requests"]] == [0, 1, 2]
    assert mark_of(first).endswith("-0"), "all up to this one have ended"
    (ended,) = data_of(second)["requests"]
    assert (ended["id"], ended["ended_at"] is None) == (1, False)
    assert mark_of(second).endswith("-2")
    assert [each["id"] for each in data_of(resumed)["requests"]] == [1, 2]


async def events(stream: NewsStream) -> AsyncIterator[bytes]:
    """All that a new reader is told."""
    async for frame in stream.follow(""):
        if frame.startswith(b"event:"):
            yield frame


async def test_a_request_that_ran_through_a_gap_is_told_to_who_resumes_when_it_ended() -> None:
    world = World()
    world.serve(1)
    slow = world.start(2)
    world.tell(EngineHello("host:a", "model", SIZE, 100, "vllm"))
    world.serve(3)
    page = page_of(world)
    first = await first_news(NewsStream(page))
    assert mark_of(first).endswith("-0"), "its end may still be heard of"
    assert data_of(first)["requests"][1]["finished"] == "end_not_heard"
    world.now += 601.0
    world.serve(3, found=1)
    assert mark_of(await first_news(NewsStream(page))).endswith("-3"), "it is awaited no longer"
    world.end(slow, 2)
    assert mark_of(await first_news(NewsStream(page))).endswith("-3")


def mark_of(frame: bytes) -> str:
    """The id of an event."""
    (line,) = [each for each in frame.split(b"\n") if each.startswith(b"id: ")]
    return line.removeprefix(b"id: ").decode()


def data_of(frame: bytes) -> Any:
    return json.loads(frame.partition(b"data: ")[2])


async def test_news_come_as_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgraph.advisor.page.events.BEAT_S", 0.01)
    frames = NewsStream(page_over(KVCacheGraph())).follow("")
    hello, news, quiet = [await anext(frames) for _ in range(3)]
    assert hello.startswith(b"retry:")
    head, _, data = news.partition(b"data: ")
    assert head.startswith(b"event: news\n")
    assert json.loads(data)["now"]["verdict"]
    assert quiet.startswith(b":")


async def test_a_reader_is_told_of_the_history_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgraph.advisor.page.events.BEAT_S", 0.01)
    world = World()
    for key in range(1, 40):
        world.serve(key)
        world.now += 20.0
    stream, found = NewsStream(page_of(world)), []
    frames = events(stream)
    for number in range(3):
        found.append(await anext(frames))
        world.now += 20.0
        world.serve(101 + number)
    told = [data_of(each) for each in [*found, await first_news(stream, "3")]]
    sizes = [len(each["now"]["history"]["asked"]) for each in told]
    assert sizes[0] == told[0]["steps"] > 40
    assert max(sizes[1:3]) <= 5, "two steps that were told, and those since"
    assert sizes[3] == told[3]["steps"], "a new connection begins with all of it"
    first, second = (each["now"]["history"]["starts"] for each in told[:2])
    assert second[0] == pytest.approx(first[-2], abs=0.1)


BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MOST_BYTES = 600_000  # of all files, compressed


@pytest.fixture
def browser() -> TestClient:
    return visitor()


def test_a_browser_gets_the_page_and_a_program_what_there_is(browser: TestClient) -> None:
    page = browser.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert '<div id="page">' in page.text
    assert "/healthz" in browser.get("/").json()["see"]


def test_every_file_that_the_page_names_is_served(browser: TestClient) -> None:
    names = re.findall(r'(?:src|href)="\./(assets/[^"]+)"', browser.get("/", headers=BROWSER).text)
    assert {Path(name).suffix for name in names} == {".js", ".css", ".svg"}
    for name in names:
        assert browser.get(f"/{name}").status_code == 200
    assert browser.get("/assets/nothing.js").status_code == 404
    assert browser.get("/assets/..%2Findex.html").status_code == 404


def test_the_policy_allows_only_files_of_this_sidecar(browser: TestClient) -> None:
    for path in ("/", "/assets/page.js"):
        headers = browser.get(path, headers=BROWSER).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_what_a_browser_has_is_not_sent_again(browser: TestClient) -> None:
    first = browser.get("/assets/page.js")
    assert first.headers["content-encoding"] == "gzip"
    tag = first.headers["etag"]
    again = browser.get("/assets/page.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_is_small_and_names_no_other_host() -> None:
    files = [path for path in PAGE.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) <= MOST_BYTES
    html = (PAGE / "index.html").read_text()
    assert "://" not in html
    assert "<style" not in html
    assert not re.search(r"<script(?![^>]*src=)", html)
