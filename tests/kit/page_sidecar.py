"""A sidecar process with its page, and agents that give it something to show."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.tools.remote import EditEndpoint
from kvgraph.dashboards.access import page_address
from kvgraph.graph.types import SourceLayer
from kvgraph.graph.wire.events import BlocksAttended, ConfidenceSampled, Segment
from kvgraph.hooks.fake import FakeEngine
from kvgraph_bench.serving.listening import free_port
from small_world import pack
from waiting import PATIENCE_S

TOKEN = "a-token-for-tests-of-the-page"
BLOCK = 16


class PageSidecar:
    """``kvgraph serve`` in a process of its own, at one address whenever it runs; without a
    configuration file, which the page could change, by the defaults.
    """

    def __init__(self, directory: Path, config: Path | None = None) -> None:
        self._config = config
        self.endpoint = f"ipc://{directory}/s"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return page_address(self.url, TOKEN)

    @property
    def edit_address(self) -> str:
        """What opens it for changes."""
        return page_address(self.url, TOKEN, edit=True)

    def start(self) -> None:
        command = [sys.executable, "-m", "kvgraph", "serve", "--endpoint", self.endpoint,
                   "--http-port", str(self.port)]  # fmt: skip
        command += [] if self._config is None else ["--config", str(self._config)]
        self._process = subprocess.Popen(
            command, env={**os.environ, "KVGRAPH_SIDECAR__TOKEN": TOKEN},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert time.monotonic() < deadline, "the sidecar does not answer"
            assert self._process.poll() is None, "the sidecar ended"
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def get(self, path: str) -> Any:
        """Its answer to who has the token; who is told that it is busy asks again."""
        question = urllib.request.Request(self.url + path)
        question.add_header("Authorization", f"Bearer {TOKEN}")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(question, timeout=10) as answer:
                    return json.load(answer)
            except OSError as error:  # refused because it is busy, or too busy to say so
                is_refused = isinstance(error, urllib.error.HTTPError) and error.code != 503
                if is_refused or time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def links(self, *engines: FakeEngine) -> None:
        """Wait until it knows these engines' pools, as they were before anything is served."""

        def are_known() -> bool:
            states = {each["name"]: each["state"] for each in self.get("/status")["engines"]}
            linked = (each.client.standing.linked for each in engines)
            return all(linked) and all(states.get(each.name) == "synced" for each in engines)

        self._asked_until(are_known, "it does not hear of the engines")

    def hears_of(self, requests: int) -> None:
        """Wait until so many requests are over, as far as it was told."""

        def are_over() -> bool:
            found = self.get("/v1/requests?limit=1000")["requests"]
            return sum(each["finished"] is not None for each in found) >= requests

        self._asked_until(are_over, f"it does not hear of {requests} requests")

    def _asked_until(self, condition: Callable[[], bool], what: str) -> None:
        """As ``until``, and seldom: questions take the time in which it would hear."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.get('/status')['engines']}"
            time.sleep(0.2)

    def show_cache(self, run: str) -> None:
        """Tell it of a cache that follows confidence: a sawtooth between its budgets."""
        held = [64.0 + step % 192 for step in range(400)]
        sure = [float(tokens == 64.0) for tokens in held]
        now = time.time()
        EditEndpoint("/v1/caches", self.url, TOKEN).send(
            {
                "run": run, "started": now, "first": 0, "low": 64, "high": 256,
                "at": [now - 40 + step / 10 for step in range(400)], "confidence": sure,
                "budget": [64.0 if each else 256.0 for each in sure], "held": held,
            }
        )  # fmt: skip

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/healthz"):
            return True
        return False


def serve_agents(engine: FakeEngine, names: list[str], turns: int = 4) -> None:
    """Agents by turns, each under a name, below one system prompt; more than the pool holds."""
    system = list(range(8 * BLOCK))
    for turn in range(turns):
        for place, name in enumerate(names):
            own = [1_000_000 * (place + 1) + token for token in range((turn + 1) * 6 * BLOCK)]
            segments = (
                Segment(int(SourceLayer.RULES), 0, 4 * BLOCK, name=name[:200]),
                Segment(int(SourceLayer.CONTEXT), 4 * BLOCK, 8 * BLOCK, memory_id=name[:200]),
                Segment(int(SourceLayer.TOOL_RESULT), 8 * BLOCK, len(system) + len(own)),
            )
            last = turn == turns - 1 and place % 3 == 0
            engine.run(system + own, name, name[:100], segments, turn % 2 == 0, last)
            sample(engine, system + own, name, sure=place / len(names))


def sample(engine: FakeEngine, tokens: list[int], name: str, sure: float) -> None:
    """Tell of a sampled step: the earlier a block of the prompt, the more it is attended to."""
    keys = engine.keys(tokens)
    mass = np.arange(len(keys), 0, -1) / sum(range(len(keys) + 1))
    engine.client.emit(BlocksAttended(pack(*keys), mass.astype("<f4").tobytes()))
    engine.client.emit(ConfidenceSampled(b"", sure, session=name, tenant=name[:100]))


@pytest.fixture
def page_sidecar(socket_directory: Path) -> Iterator[PageSidecar]:
    """A sidecar that runs; ended after the test."""
    sidecar = PageSidecar(socket_directory)
    sidecar.start()
    yield sidecar
    sidecar.stop()


@pytest.fixture
def configured_sidecar(socket_directory: Path) -> Iterator[tuple[PageSidecar, Path]]:
    """A sidecar that the page may change, ranking by the formula, and its file."""
    file = socket_directory / "kvgraph.toml"
    file.write_text("[policy]\nname = 'classic'\nguard = false\n")
    sidecar = PageSidecar(socket_directory, file)
    sidecar.start()
    yield sidecar, file
    sidecar.stop()


@pytest.fixture(scope="module")
def busy_sidecar() -> Iterator[PageSidecar]:
    """A sidecar that a small engine has told of twelve agents, and goes on telling."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as directory:
        sidecar = PageSidecar(Path(directory))
        sidecar.start()
        try:
            with FakeEngine(sidecar.endpoint, 160, BLOCK, "engine-one") as engine:
                sidecar.links(engine)
                serve_agents(engine, [f"agent-{n:02d}" for n in range(12)])
                sidecar.show_cache("my model")
                sidecar.hears_of(48)
                yield sidecar
        finally:
            sidecar.stop()
