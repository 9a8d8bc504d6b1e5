"""What the router's decisions take, and what the proxy adds to a request's time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from kvgraph.advisor.fleet.board import EngineBoard, Speed
from kvgraph.advisor.fleet.router import FleetRouter, Holdings, RoutingRequest

from ..figures import Figures, quantile
from .router_process import RouteProcess, RouterProcess

RATE: Final = 50.0  # requests per second
ENGINES: Final = 3
_PROMPT: Final = "a prompt of some four thousand tokens " * 420


def add_latency(figures: Figures, quick: bool) -> None:
    _add_decisions(figures, 100_000 if quick else 1_000_000)
    _add_proxy(figures, 200 if quick else 2000)


DECISIONS_PER_S: Final = 1000.0
DECISIONS: Final = 20_000
_SHARED: Final = 4096  # tokens of a prefix that all prompts share; chosen


def _add_decisions(figures: Figures, sessions: int) -> None:
    few, _ = _decisions(3, 10_000)
    many, memory = _decisions(1000, sessions)
    figures.add("route_p99_ms", quantile(few, 99), "ms, at 1,000/s", "< 2")
    figures.add("route_p99_ms_1000_engines", quantile(many, 99), "ms", "< 5")
    figures.add("sessions_known", sessions, "sessions")
    figures.add("bytes_per_session", memory / sessions, "B")


def _decisions(engines: int, sessions: int) -> tuple[list[float], int]:
    """Milliseconds of each decision; and bytes that the sessions' homes take."""
    rng = random.Random(1)
    board = EngineBoard()
    for number in range(engines):
        board.add(f"#{number}", Speed(pool_tokens=500_000))
    router = FleetRouter(board)
    tracemalloc.start()
    for session in range(sessions):
        router.homes.settle(f"session {session}", rng.randrange(engines), 20_000, 0.0)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    pool = np.zeros(engines, dtype=np.int64)
    samples, begin = [], time.perf_counter()
    for number in range(DECISIONS):
        time.sleep(max(0.0, begin + number / DECISIONS_PER_S - time.perf_counter()))
        wanted = RoutingRequest(
            f"session {rng.randrange(int(1.3 * sessions))}", rng.randrange(2000, 40_000)
        )
        start = time.perf_counter()
        pool[:] = _SHARED
        choice = router.route(wanted, Holdings(pool, pool), number / DECISIONS_PER_S)
        samples.append(1e3 * (time.perf_counter() - start))
        router.computed(choice)
    return samples, memory


def _add_proxy(figures: Figures, requests: int) -> None:
    """Send requests straight to a stand-in that answers at once, and through the proxy, in turn."""
    with contextlib.ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [stack.enter_context(_StandIn(out / f"{at}.log")) for at in range(ENGINES)]
        urls = [each.url for each in engines]
        route = stack.enter_context(RouteProcess(urls, out, out / "route.log"))
        direct, proxied = asyncio.run(_both(urls[0], route.url, requests))
    for share in (50, 99):
        added = quantile(proxied, share) - quantile(direct, share)
        target = "< 10" if share == 99 else ""
        figures.add(f"proxy_added_p{share}_ms", added, f"ms, at {RATE:g}/s", target)


async def _both(direct: str, proxied: str, requests: int) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for url in (direct, proxied):  # connections stand before anything is timed
            await _ask(client, url, 0, [])
        running = set()
        begin = time.perf_counter()
        for number in range(2 * requests):
            await asyncio.sleep(max(0.0, begin + number / (2 * RATE) - time.perf_counter()))
            url = (direct, proxied)[number % 2]
            asking = asyncio.create_task(_ask(client, url, number // 2, times[number % 2]))
            running.add(asking)
            asking.add_done_callback(running.discard)
        await asyncio.gather(*running)
    return times


async def _ask(client: httpx.AsyncClient, url: str, number: int, times: list[float]) -> None:
    body = {"model": "m", "prompt": f"{number % 97} {_PROMPT}"}
    start = time.perf_counter()
    answer = await client.post(f"{url}/v1/completions", json=body)
    answer.raise_for_status()
    times.append(1e3 * (time.perf_counter() - start))


class _StandIn(RouterProcess):
    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.words = [__name__, str(self.port)]


async def _serve(port: int) -> None:
    server = await asyncio.start_server(_connection, "127.0.0.1", port)
    await server.serve_forever()


async def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or 0))
            mine = str(writer.get_extra_info("sockname")[1])
            text = json.dumps({"id": mine, "data": [{"id": "m"}], "choices": [{"text": "yes"}]})
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
