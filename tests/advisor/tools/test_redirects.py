"""A token goes to the server that it is for, wherever that server redirects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from http_answers import Asked, HttpAnswers
from kvgraph.advisor.precache.keeper import ServerRefusalError, ask_server
from kvgraph.advisor.precache.prefixes import ServerConfig
from kvgraph.advisor.tools.remote import EditEndpoint, RemoteError, ask
from kvgraph.graph.wire.endpoints import RunningSidecar
from kvgraph.hooks.access import answer_of

SECRET = "only-for-the-first-server"


class Server(HttpAnswers):
    """Notes who asks it, and redirects them if it has ``to``."""

    def __init__(self, to: str = "", status: int = 200) -> None:
        super().__init__(self._answer)
        self.to, self.status = to, status
        self.tokens: list[str] = []

    def _answer(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        self.tokens.append(asked.headers["Authorization"])
        return self.status, {"Location": self.to + asked.path} if self.to else {}, b"{}"


@pytest.fixture(params=[301, 302, 303, 307, 308])
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    """The one that is asked, and the one that it redirects to."""
    with closing(Server()) as there, closing(Server(there.url, request.param)) as asked:
        yield asked, there


def sidecar(url: str) -> RunningSidecar:
    return RunningSidecar(endpoint="ipc:///gone", http=url, token=SECRET, pid=1)


def server(url: str, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    monkeypatch.setenv("PRECACHE_KEY", SECRET)
    return ServerConfig(url=url, key_variable="PRECACHE_KEY")


ASKING: dict[str, Callable[[str, pytest.MonkeyPatch], Any]] = {
    "tools": lambda url, _: ask(url, "/status"),
    "edits": lambda url, _: EditEndpoint("/intents", url, SECRET).send({}),
    "engines": lambda url, _: answer_of(sidecar(url), "/status"),
    "precache": lambda url, patch: ask_server(server(url, patch), "/models", None),
    "precache that posts": lambda url, patch: ask_server(server(url, patch), "/completions", {}),
}


@pytest.mark.parametrize("who", ASKING)
def test_no_token_follows_a_redirect(
    servers: tuple[Server, Server], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGRAPH_SIDECAR__TOKEN", SECRET)
    asked, there = servers
    with pytest.raises((OSError, RemoteError, ServerRefusalError), match=str(asked.status)):
        ASKING[who](asked.url, monkeypatch)
    assert asked.tokens == [f"Bearer {SECRET}"]
    assert there.tokens == []


def test_a_server_without_such_a_path_is_named() -> None:
    """A sidecar says itself what it does not know; this is of any other server."""
    other = HttpAnswers(lambda _: (404, {}, b'{"detail": "Not Found"}'))
    with closing(other), pytest.raises(RemoteError, match=f"^{other.url} answered 404: Not Found$"):
        ask(other.url, "/status")
