"""A token goes to the server that it is for, wherever that server redirects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from kvgraph.advisor.precache.keeper import ServerRefusalError, ask_server
from kvgraph.advisor.precache.prefixes import ServerConfig
from kvgraph.advisor.tools.remote import EditEndpoint, RemoteError, ask
from kvgraph.graph.wire.endpoints import RunningSidecar
from kvgraph.hooks.access import answer_of

SECRET = "only-for-the-first-server"


class Redirecting(BaseHTTPRequestHandler):
    """Notes what it is asked, and redirects if its server has ``to``."""

    def do_GET(self) -> None:
        self.server.asked.append(self.headers)  # type: ignore[attr-defined]
        to = self.server.to  # type: ignore[attr-defined]
        self.send_response(self.server.status if to else 200)  # type: ignore[attr-defined]
        if to:
            self.send_header("Location", to + self.path)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


class Server(HTTPServer):
    def __init__(self, to: str = "", status: int = 302) -> None:
        super().__init__(("127.0.0.1", 0), Redirecting)
        self.asked: list[Any] = []
        self.to, self.status = to, status
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture(params=[301, 302, 303, 307, 308])
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    """The one that is asked, and the one that it redirects to."""
    there = Server()
    asked = Server(there.url, request.param)
    yield asked, there
    asked.end()
    there.end()


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
    assert [headers["Authorization"] for headers in asked.asked] == [f"Bearer {SECRET}"]
    assert there.asked == []
