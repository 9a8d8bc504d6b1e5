"""HTTP clients that hang or ask without end, and a deaf engine: what other engines notice."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from multiprocessing import connection
from pathlib import Path
from typing import Final

import numpy as np
from kvgraph.graph.wire.endpoints import RunningSidecar
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions

from ..figures import Figures
from ..sidecars.sidecar_process import SidecarProcess, wait_until
from .faults import Say, Size
from .faults_engines import EngineProcess

SILENT: Final = 256
ASKING: Final = 200
ASK_EVERY_S: Final = 0.5
DEAF: Final = 50  # of those who ask: they do not read
_POOL: Final = 20_000
_TIMEOUT_S: Final = 10.0  # of a question
_ESTABLISHED: Final = 1  # in TCP_INFO


@dataclass
class Crowd:
    """Clients of one sidecar, each on a thread of its own, all in a process of their own: ``waits``
    seconds until an answer other than 503, of clients that read; ``refused`` until a 503; ``cut``
    until a client that does not read was cut off, or the end came; ``failed`` questions without any
    answer.
    """

    http: str
    token: str
    keys: list[int]
    waits: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failed: int = 0
    cut: list[float] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.stopping.is_set():
            key = rng.choice(self.keys)
            path = rng.choice(("/status", "/metrics", f"/blocks/{key}/explain"))
            self.ask_once(path)
            time.sleep(ASK_EVERY_S)

    def be_silent(self) -> None:
        """Connect and say nothing; again when cut."""
        host, port = self._address
        while not self.stopping.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, port), 5) as line:
                line.settimeout(1.0)
                while not self.stopping.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not line.recv(1):
                            break
            time.sleep(0.1)

    def be_deaf(self) -> None:
        """Ask for more than fits a socket's buffers, do not read, and see how long it lasts."""
        host, port = self._address
        question = "GET /v1/openapi.json HTTP/1.1\r\n"  # the largest answer that anybody may ask
        question += f"Host: 127.0.0.1\r\nAuthorization: Bearer {self.token}\r\n\r\n"
        while not self.stopping.is_set():
            with contextlib.suppress(OSError), socket.socket() as line:
                # Before it connects: else the kernel takes the whole answer in.
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                line.settimeout(5)
                line.connect((host, port))
                for _ in range(20):
                    line.sendall(question.encode())
                since = time.monotonic()
                _wait_for_a_cut(line, self.stopping)
                self.cut.append(time.monotonic() - since)
            time.sleep(0.2)

    @property
    def _address(self) -> tuple[str, int]:
        host, _, port = self.http.removeprefix("http://").partition(":")
        return host, int(port)

    def ask_once(self, path: str) -> None:
        """Ask for one path; notes how long the answer took, or that there was none."""
        request = urllib.request.Request(self.http + path)
        request.add_header("Authorization", f"Bearer {self.token}")
        started, waits = time.monotonic(), self.waits
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            with error:
                waits = self.refused if error.code == 503 else self.waits
        except (OSError, HTTPException):
            self.failed += 1
            return
        waits.append(time.monotonic() - started)


def _wait_for_a_cut(line: socket.socket, stopping: threading.Event) -> None:
    """Wait until the server ended the connection, or we are to stop; without reading."""
    while not stopping.wait(0.1):
        try:
            state = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return
        if state != _ESTABLISHED:
            return


@dataclass(frozen=True)
class Seen:
    waits: list[float]
    refused: list[float]
    failed: int
    cut: list[float]
    ages: list[float]  # seconds: of the ranking that the engine held, looked at every 20 ms
    rss_growth: int  # bytes


def crowded(directory: Path, seconds: float, seed: int) -> Seen:
    with (
        SidecarProcess(directory) as sidecar,
        FakeEngine(
            sidecar.endpoint, num_blocks=_POOL, options=ClientOptions(tick_s=0.05)
        ) as engine,
    ):
        rng = random.Random(seed)
        for _ in range(_POOL // 50):
            engine.run([rng.randrange(50_000) for _ in range(16 * 50)])
        wait_until(lambda: is_advised(engine), 30.0)
        before = sidecar.rss()
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        who = (sidecar.http, token_in(directory), list(engine.cached)[:500])
        crowd = context.Process(target=gather, args=(*who, seconds, theirs), daemon=True)
        crowd.start()
        mine.recv()  # they are there
        ages = advice_ages(engine, seconds, rng)
        growth = sidecar.rss() - before
        waits, refused, failed, cut = mine.recv()
        crowd.join()
        return Seen(waits, refused, failed, cut, ages, growth)


def gather(
    http: str, token: str, keys: list[int], seconds: float, answer: connection.Connection
) -> None:
    """Be the crowd for so long; tell ``answer`` when all are there, and what they saw."""
    crowd = Crowd(http, token, keys)
    threads = [threading.Thread(target=crowd.be_silent) for _ in range(SILENT)]
    threads += [threading.Thread(target=crowd.be_deaf) for _ in range(DEAF)]
    threads += [threading.Thread(target=crowd.ask, args=(i,)) for i in range(ASKING - DEAF)]
    for thread in threads:
        thread.start()
    answer.send(len(threads))
    time.sleep(seconds)
    crowd.stopping.set()
    for thread in threads:
        thread.join()
    answer.send((crowd.waits, crowd.refused, crowd.failed, crowd.cut))


def is_advised(engine: FakeEngine) -> bool:
    """Whether it holds a ranking; of a pool this large it names a part."""
    ranking = engine.client.ranking()
    return ranking is not None and len(ranking.order) > 0


def token_in(directory: Path) -> str:
    (note,) = directory.glob("kvgraph-*/*.json")
    return RunningSidecar(**json.loads(note.read_text())).token


def advice_ages(engine: FakeEngine, seconds: float, rng: random.Random) -> list[float]:
    """Seconds since the latest advice, fifty times a second, of an engine that serves meanwhile."""
    ages, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        engine.run([rng.randrange(50_000) for _ in range(160)])
        held = engine.client.remembered()
        ages.append(time.monotonic() - held.ts if held is not None else seconds)
        time.sleep(0.02)
    return ages


def run_http(figures: Figures, size: Size, say: Say) -> None:
    seconds = size.of(30, 120)
    say(f"{SILENT} silent and {ASKING} asking clients, {seconds} s")
    seen = crowded(size.folder, seconds, size.seed)
    figures.add("advice_age_max_s", max(seen.ages), "s", "≤ 2")
    answers = seen.waits + seen.refused
    figures.add("http_answer_p99_s", _p99(answers), "s", "< 1")
    figures.add("http_answer_other_than_503_p99_s", _p99(seen.waits), "s")
    figures.add("http_answers", len(answers), "")
    figures.add("http_refused_503", len(seen.refused), "")
    figures.add("http_unanswered", seen.failed, "")
    figures.add("http_cut_max_s", max(seen.cut), "s", "≤ 10")
    figures.add("http_rss_growth_mb", seen.rss_growth / 1e6, "MB", "< 50")


def _p99(seconds: list[float]) -> float:
    return float(np.percentile(seconds or [_TIMEOUT_S], 99))


_SMALL_POOL: Final = 500
_PATIENCE_S: Final = 30.0


def ages_beside_a_stopped_engine(directory: Path, seconds: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    with (
        SidecarProcess(directory) as sidecar,
        FakeEngine(
            sidecar.endpoint, num_blocks=_SMALL_POOL, options=ClientOptions(tick_s=0.05)
        ) as engine,
    ):
        other = EngineProcess(sidecar.endpoint, 1)
        try:
            wait_until(lambda: engine.client.ranking() is not None, _PATIENCE_S)
            other.stop()
            return advice_ages(engine, seconds, rng)
        finally:
            other.kill()


def run_apart(figures: Figures, size: Size, say: Say) -> None:
    seconds = size.of(10, 60)
    say(f"one of two engines is stopped for {seconds} s")
    ages = ages_beside_a_stopped_engine(size.folder, seconds, size.seed)
    figures.add("apart_advice_age_max_s", max(ages), "s", "≤ 2")
