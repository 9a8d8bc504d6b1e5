"""The page, at work: recorded agents, an engine without a model, and a sidecar to look at."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from kvgraph.dashboards.access import page_address
from kvgraph.graph.types import LAYER_BY_NAME, Authority, SourceLayer
from kvgraph.graph.wire.events import Segment
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions
from rich.console import Console

from ..recorded.agents_requests import SESSIONS, AgentRequest, recorded_requests
from ..serving.listening import free_port
from ..sidecars.sidecar_process import SidecarProcess

ENDPOINT: Final = "AITHER_KVCACHE_SIDECAR"
"""Tells an engine where to link to instead of to a sidecar of its own."""

_HEADER: Final = "# Weights that are applied on the page are written here.\n"


class LivePage:
    """A sidecar with its page; a context manager. Whoever opens its address may edit weights.

    A sidecar remembers what it learned and who asked, so each scene of a demo gets a new one. It
    stands at the same address and takes the same token: a page that is open goes on with it.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvg-")
        directory, self._token = Path(self._folder.name), secrets.token_hex(16)
        (config := directory / "kvgraph.toml").write_text(_HEADER)
        self._sidecar = SidecarProcess(
            directory, port=free_port(), config=config, token=self._token, policy__guard="true"
        )

    def __enter__(self) -> Self:
        self._sidecar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sidecar.kill()
        self._folder.cleanup()

    @property
    def endpoint(self) -> str:
        return self._sidecar.endpoint

    @property
    def address(self) -> str:
        """What to open in a browser, to look at and to edit weights: the demo is one's own."""
        return page_address(self._sidecar.http, self._token, edit=True) + "&now"

    @property
    def invitation(self) -> str:
        """Where to watch it, and how commands find its sidecar, whose runtime note is its own."""
        ask = f"XDG_RUNTIME_DIR={self._folder.name} kvgraph top"
        return f"watch it at {self.address}\nor in a terminal: {ask} (or why, explain, status)"

    def status(self) -> dict[str, Any]:
        return self._sidecar.status()

    def begin_anew(self) -> None:
        self._sidecar.kill()
        self._sidecar.start()


USERS: Final = 40
POOL: Final = 1_200  # blocks; too few for all of the agents' contexts: chosen
BLOCK: Final = 8  # tokens of the shrunk recordings
REQUESTS: Final = 1_400  # of one fleet; another one comes after it
VOCABULARY: Final = 8_000
FASTER: Final = 5.0  # than recorded
TOKENS_PER_S: Final = 2_000.0  # of prompts; chosen: requests wait for each other now and then
LAST_WORDS: Final = 60  # tokens at the end of a prompt that stand for what a user wrote


def run_page() -> None:
    console = Console()
    with LivePage() as page:
        console.print(page.invitation, soft_wrap=True)
        console.print(f"{USERS} recorded agents, {FASTER:.0f} times as fast; Ctrl-C ends it")
        play_agents(page.endpoint, threading.Event())


@contextlib.contextmanager
def agents_at(page: LivePage | None) -> Iterator[None]:
    """Recorded agents for the page to show, while something else goes on that it cannot show."""
    if page is None:
        yield
        return
    stopping = threading.Event()
    agents = threading.Thread(target=play_agents, args=(page.endpoint, stopping), daemon=True)
    agents.start()
    try:
        yield
    finally:
        stopping.set()
        agents.join()


def play_agents(endpoint: str, stopping: threading.Event) -> None:
    options = ClientOptions(tick_s=0.05)
    with FakeEngine(endpoint, POOL, BLOCK, "demo", options, TOKENS_PER_S) as engine:
        for number in itertools.count():
            fleet = recorded_requests(SESSIONS, USERS, 3 + number, REQUESTS, VOCABULARY)
            _play(engine, fleet, number, stopping)
            if stopping.is_set():
                return


def _play(
    engine: FakeEngine, fleet: tuple[AgentRequest, ...], number: int, stopping: threading.Event
) -> None:
    began = time.monotonic()
    for each in fleet:
        due = began + each.at / FASTER
        if stopping.wait(max(0.0, due - time.monotonic())):
            return
        if len(each.prompt) + len(each.answer) < POOL * BLOCK:
            engine.run(
                each.prompt,
                _named(each.session, number),
                None,
                tuple(_segments(each)),
                each.waiting,
                each.ended,
                each.answer[:-1],
                max(0.0, time.monotonic() - due),
                each.returns_s / FASTER if each.waiting and each.returns_s else None,
            )


def _named(session: str, number: int) -> str:
    """A recording's session, each time that it is played under another name."""
    name = session.replace("@", "-again-")
    return f"{name}-round-{number + 1}" if number else name


def _segments(request: AgentRequest) -> Iterator[Segment]:
    """The head as recorded; what follows counts as inferred, since no caller states anything."""
    end = 0
    for layer, start, end in request.layers:
        yield _inferred(LAYER_BY_NAME[layer], start, end)
    words = max(end, len(request.prompt) - LAST_WORDS)
    if words > end:
        yield _inferred(SourceLayer.TOOL_RESULT, end, words)
    yield _inferred(SourceLayer.USER_TURN, words, len(request.prompt))


def _inferred(layer: SourceLayer, start: int, end: int) -> Segment:
    return Segment(int(layer), start, end, authority=int(Authority.INFERRED))
