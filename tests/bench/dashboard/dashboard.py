"""Runs the parts of the bench, each of which adds its figures."""

from __future__ import annotations

import contextlib
import gzip
import random
import re
import shutil
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from kvgraph.dashboards.access import PAGE, page_address
from kvgraph.graph.wire.events import BlocksAttended
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions
from rich.console import Console

from ..errors import BenchError
from ..faults.faults_http import is_advised, token_in
from ..figures import Figures
from ..sidecars.sidecar_process import SidecarProcess, wait_until
from . import attribution, log_cost, shadow_error

BLOCK: Final = 16
SESSIONS: Final = 200
MANY: Final = 2_000  # sessions: 200,000 blocks, as many as the page shows
SHARED: Final = 20  # blocks at the start of every session's prompt
OWN: Final = 100  # and after them: 20,020 blocks in all
READ_TOGETHER: Final = 16  # blocks of one sampled step: 120 edges
STEPS: Final = 170
PAN_S: Final = 3.0
_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
_SOFTWARE_GL: Final = (
    "--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--ignore-gpu-blocklist",
)  # fmt: skip
_PAINTED: Final = "(performance.getEntriesByName('kvgraph:painted')[0] ?? {}).startTime"
_WATCH_FRAMES: Final = """() => {
  window.frames_at = [];
  const note = at => { window.frames_at.push(at); requestAnimationFrame(note); };
  requestAnimationFrame(note);
}"""


def measure_page_speed(figures: Figures, quick: bool) -> None:
    """20,000 blocks and 60,000 edges in a headless Chromium with software GL; then 200,000."""
    files = [path for path in PAGE.rglob("*") if path.is_file()]
    size = sum(len(gzip.compress(path.read_bytes())) for path in files)
    figures.add("page_bundle_kb", size / 1e3, "kB", "≤ 600")
    with _filled(SESSIONS) as address:
        _look(figures, "", address, 2 if quick else 5)
    if not quick:
        with _filled(MANY) as address:
            _look(figures, "_200k", address, 3)


@contextmanager
def _filled(sessions: int) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        SidecarProcess(Path(folder)) as sidecar,
        FakeEngine(
            sidecar.endpoint, 2 * sessions * OWN, BLOCK, options=ClientOptions(tick_s=0.05)
        ) as engine,
    ):
        _fill(engine, sessions)
        wait_until(lambda: is_advised(engine), 60.0)
        yield page_address(sidecar.http, token_in(Path(folder)))


def _fill(engine: FakeEngine, sessions: int) -> None:
    """Sessions over one prompt's start, each asked twice, and decode steps that read far back."""
    for session in range(sessions):
        own = [1_000_000 * (session + 1) + token for token in range(OWN * BLOCK)]
        tokens = [*range(SHARED * BLOCK), *own]
        engine.run(tokens, f"session-{session}")
        engine.run(tokens, f"session-{session}")
        keys = np.array(engine.keys(tokens), dtype="<u8")
        if session < STEPS * sessions // SESSIONS:
            _attend(engine, keys, session)


def _attend(engine: FakeEngine, keys: np.ndarray[Any, np.dtype[np.uint64]], seed: int) -> None:
    """Three steps that read the same blocks: as many as make edges."""
    some = np.random.default_rng(seed).choice(len(keys), READ_TOGETHER, replace=False)
    mass = np.full(READ_TOGETHER, 1 / READ_TOGETHER, dtype="<f4")
    for _ in range(3):
        engine.client.emit(BlocksAttended(keys[some].tobytes(), mass.tobytes()))


def _look(figures: Figures, size: str, address: str, times: int) -> None:
    """Add figures, their names with ``size`` in them: bounds hold for the usual one alone."""
    driver, program = _browser()
    with driver() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_SOFTWARE_GL))
        page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        page.goto(address)
        painted = [_paint(page) for _ in range(times)]
        figures.add(f"paint{size}_ms", painted, "ms", "" if size else "≤ 2,000")
        said = page.locator(".status").inner_text()
        figures.add(f"paint{size}_blocks", _shown(said, r"^([\d,]+)"), "")
        figures.add(f"paint{size}_edges", _shown(said, r"([\d,]+) edges"), "")
        figures.add(f"frame{size}_ms", _pan(page), "ms", "" if size else "≤ 100")
        browser.close()


def _shown(said: str, pattern: str) -> int:
    found = re.search(pattern, said)
    assert found is not None, said
    return int(found[1].replace(",", ""))


def _browser() -> tuple[Any, str]:
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise BenchError("no Chromium on the PATH: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise BenchError("no playwright: pip install 'kvgraph[dev]'") from None
    return sync_playwright, program


def _paint(page: Any) -> float:
    base = page.url.partition("#")[0]
    page.goto("about:blank")
    page.goto(f"{base}#/graph?limit={MANY * OWN}")
    for _ in range(600):
        painted = page.evaluate(_PAINTED)
        if painted is not None:
            return float(painted)
        page.wait_for_timeout(50)
    raise BenchError("the graph was not painted within 30 s")


def _pan(page: Any) -> list[float]:
    """Milliseconds between frames while the settled graph is dragged about."""
    page.wait_for_timeout(1500)
    box = page.locator("canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.evaluate(_WATCH_FRAMES)
    moves = 0
    while page.evaluate("(frames_at.at(-1) ?? 0) - (frames_at[0] ?? 0)") < 1e3 * PAN_S:
        moves += 1
        page.mouse.move(x + 120 * np.sin(moves / 5), y + 80 * np.cos(moves / 5))
    page.mouse.up()
    at: list[float] = page.evaluate("frames_at")
    return [later - earlier for earlier, later in pairwise(at)]


POOL: Final = 20_000
_VIEW: Final = {"/v1/graph?limit=20000": 4.0}
"""What the page asks for over and over, and seconds from one time to the next."""


def measure_page_load(figures: Figures, quick: bool) -> None:
    """An engine of 20,000 blocks; nobody looks, and one page does."""
    seconds = 5.0 if quick else 30.0
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        SidecarProcess(Path(folder)) as sidecar,
        FakeEngine(sidecar.endpoint, POOL, options=ClientOptions(tick_s=0.05)) as engine,
    ):
        _fill_with_load(engine)
        wait_until(lambda: is_advised(engine), 30.0)
        token = token_in(Path(folder))
        alone = _served(sidecar, engine, seconds)
        figures.add("sidecar_cpu_percent_without_a_page", alone.cpu_percent, "%")
        figures.add("ranking_age_ms_without_a_page", alone.ages_ms, "ms")
        with _open_page(sidecar.http, token, _VIEW):
            watched = _served(sidecar, engine, seconds)
        cost = watched.cpu_percent - alone.cpu_percent
        figures.add("page_cpu_percent", cost, "%", "≤ 3")
        figures.add("ranking_age_ms", watched.ages_ms, "ms")


def _fill_with_load(engine: FakeEngine) -> None:
    rng = random.Random(1)
    for session in range(POOL // 50):
        engine.run([rng.randrange(50_000) for _ in range(16 * 50)], session=f"s{session}")


class _Served(NamedTuple):
    """While the engine served ten requests a second: percent of a core that the sidecar took, and
    how old the engine's ranking was at each of them.
    """

    cpu_percent: float
    ages_ms: list[float]


def _served(sidecar: SidecarProcess, engine: FakeEngine, seconds: float) -> _Served:
    rng, end, ages_ms = random.Random(2), time.monotonic() + seconds, list[float]()
    before = sidecar.cpu_s()
    while time.monotonic() < end:
        engine.run([rng.randrange(50_000) for _ in range(160)], session=f"s{rng.randrange(400)}")
        if (ranking := engine.client.ranking()) is not None:
            ages_ms.append(1e3 * (time.monotonic() - ranking.ts))
        time.sleep(0.1)
    return _Served(100 * (sidecar.cpu_s() - before) / seconds, ages_ms)


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


def _ask(http: str, path: str, token: str) -> bytes:
    request = urllib.request.Request(http + path)
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        body: bytes = answer.read()
        return body


_PARTS: Final[dict[str, Callable[[Figures, bool], None]]] = {
    "attribution": attribution.run,
    "log_cost": log_cost.run,
    "shadow_error": shadow_error.run,
    "page_load": measure_page_load,
    "page_speed": measure_page_speed,
}


def run(progress: bool = True, quick: bool = False) -> Figures:
    figures, console = Figures("dashboard"), Console(stderr=True)
    for name, measure in _PARTS.items():
        if progress:
            console.print(f"{name} …")
        try:
            measure(figures, quick)
        except BenchError as error:  # a machine without a browser measures the rest
            console.print(f"left out: {error}")
    return figures
