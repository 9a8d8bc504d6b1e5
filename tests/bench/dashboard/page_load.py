"""What open pages cost a real sidecar in a process of its own, and who waits how long."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions

from ..faults.processes.faults_http import Crowd, is_advised, token_in
from ..figures import Figures
from ..sidecars.sidecar_process import SidecarProcess, wait_until

POOL: Final = 20_000
CLIENTS: Final = 200
STUCK: Final = 50
_PATHS: Final = ("/v1/now", "/v1/requests", "/v1/misses", "/v1/evictions", "/v1/engines",
                 "/v1/sessions", "/healthz", "/metrics")  # fmt: skip
_ASK_EVERY_S: Final = 0.5
_VIEWS: Final = {
    "": {"/v1/graph?limit=20000": 4.0},
    "_of_misses": {"/v1/requests?limit=200": 1.0, "/v1/misses": 2.0},
}
"""What the page asks for over and over, and seconds from one time to the next, by its view."""


def run(figures: Figures, quick: bool) -> None:
    """An engine of 20,000 blocks; nobody looks, one page does, two hundred clients do."""
    seconds = 5.0 if quick else 30.0
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        SidecarProcess(Path(folder)) as sidecar,
        FakeEngine(sidecar.endpoint, POOL, options=ClientOptions(tick_s=0.05)) as engine,
    ):
        _fill(engine)
        wait_until(lambda: is_advised(engine), 30.0)
        token, process = token_in(Path(folder)), sidecar.process
        _graph(figures, sidecar.http, token)
        alone = _served(process, engine, seconds)
        figures.add("sidecar_cpu_percent_without_a_page", alone.cpu_percent, "%")
        figures.add("ranking_age_ms_without_a_page", alone.ages_ms, "ms")
        for view, asked in _VIEWS.items():
            with _open_page(sidecar.http, token, asked):
                watched = _served(process, engine, seconds)
            cost = watched.cpu_percent - alone.cpu_percent
            figures.add(f"page_cpu_percent{view}", cost, "%", "≤ 3")
            figures.add(f"ranking_age_ms{view}", watched.ages_ms, "ms")
        _crowd(figures, sidecar.http, token, seconds)


def _fill(engine: FakeEngine) -> None:
    rng = random.Random(1)
    for session in range(POOL // 50):
        engine.run([rng.randrange(50_000) for _ in range(16 * 50)], session=f"s{session}")


def _graph(figures: Figures, http: str, token: str) -> None:
    """Milliseconds, and bytes, of the whole graph as columns."""
    took, size, nodes = [], 0, 0
    for _ in range(5):
        start = time.perf_counter()
        body = _ask(http, "/v1/graph?limit=20000", token)
        took.append(1e3 * (time.perf_counter() - start))
        size, nodes = len(body), len(json.loads(body)["nodes"]["key"])
        time.sleep(1.0)  # questions leave the graph alone for three times what they took
    figures.add("graph_answer_ms", took, "ms")
    figures.add("graph_answer_bytes", size, "B")
    figures.add("graph_answer_nodes", nodes, "")


class _Served(NamedTuple):
    """While the engine served ten requests a second: percent of a core that the sidecar took, and
    how old the engine's ranking was at each of them."""

    cpu_percent: float
    ages_ms: list[float]


def _served(process: psutil.Process, engine: FakeEngine, seconds: float) -> _Served:
    rng, end, ages_ms = random.Random(2), time.monotonic() + seconds, list[float]()
    before = _cpu_s(process)
    while time.monotonic() < end:
        engine.run([rng.randrange(50_000) for _ in range(160)], session=f"s{rng.randrange(400)}")
        if (ranking := engine.client.ranking()) is not None:
            ages_ms.append(1e3 * (time.monotonic() - ranking.ts))
        time.sleep(0.1)
    return _Served(100 * (_cpu_s(process) - before) / seconds, ages_ms)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _open_page(http: str, token: str, asked: Mapping[str, float]) -> Iterator[None]:
    """The page's event stream, read to its end, and what one of its views asks for."""
    stopping = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError), _stream(http, token) as line:
            line.settimeout(1.0)
            while not stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    line.recv(1 << 20)

    def look(path: str, every_s: float) -> None:
        while not stopping.wait(every_s):
            with contextlib.suppress(OSError):  # busy: the page asks again
                _ask(http, path, token)

    threads = [threading.Thread(target=read, daemon=True)]
    threads += [threading.Thread(target=look, args=each, daemon=True) for each in asked.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _stream(http: str, token: str) -> socket.socket:
    host, _, port = http.removeprefix("http://").partition(":")
    line = socket.create_connection((host, int(port)), 5)
    line.sendall(
        f"GET /v1/events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    return line


@dataclass
class _Pages(Crowd):
    """Clients that ask what the page asks."""

    def ask(self, seed: int) -> None:
        """Ask this and that, over and over."""
        rng = random.Random(seed)
        while not self.stopping.is_set():
            self.ask_once(rng.choice(_PATHS))
            time.sleep(_ASK_EVERY_S)

    def be_stuck(self, cut: list[float]) -> None:
        """Ask for more than fits a socket's buffers, read nothing, and see how long it lasts; what
        lasts until the end counts as well."""
        host, port = self._address
        question = "GET /v1/graph HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        question += f"Authorization: Bearer {self.token}\r\n\r\n"
        while not self.stopping.is_set():
            with contextlib.suppress(OSError), socket.socket() as line:
                # Before it connects: else the kernel takes the whole answer in.
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                line.settimeout(5)
                line.connect((host, port))
                line.sendall(question.encode())
                since = time.monotonic()
                _wait_for_a_cut(line, self.stopping)
                cut.append(time.monotonic() - since)
            time.sleep(0.2)


def _wait_for_a_cut(line: socket.socket, stopping: threading.Event) -> None:
    """Wait until the server ended the connection, or we are to stop; without reading."""
    while not stopping.wait(0.1):
        try:
            info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:
            return
        if info[0] != 1:  # no longer ESTABLISHED
            return


def _crowd(figures: Figures, http: str, token: str, seconds: float) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    crowd = context.Process(target=gather, args=(http, token, seconds + 12.0, theirs), daemon=True)
    crowd.start()
    waits, refused, failed, cut = mine.recv()
    crowd.join()
    p99 = float(np.percentile(waits + refused or [10.0], 99))
    figures.add("clients_p99_ms", 1e3 * p99, "ms", "< 1,000")
    figures.add("clients_refused_503_percent", 100 * len(refused) / len(waits + refused), "%")
    figures.add("clients_unanswered", failed, "")
    figures.add("stuck_cut_s", max(cut), "s", "≤ 10")


def gather(http: str, token: str, seconds: float, answer: connection.Connection) -> None:
    """Be the crowd for so long, in a process of its own."""
    crowd, cut = _Pages(http, token, []), list[float]()
    threads = [threading.Thread(target=crowd.be_stuck, args=(cut,)) for _ in range(STUCK)]
    threads += [threading.Thread(target=crowd.ask, args=(i,)) for i in range(CLIENTS - STUCK)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    crowd.stopping.set()
    for thread in threads:
        thread.join()
    answer.send((crowd.waits, crowd.refused, crowd.failed, cut))


def _ask(http: str, path: str, token: str) -> bytes:
    request = urllib.request.Request(http + path)
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        body: bytes = answer.read()
        return body
