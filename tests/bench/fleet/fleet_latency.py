"""What the proxy adds to the time of a request: before stand-ins that answer at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import httpx

from ..figures import Figures, quantile
from .router_process import RouteProcess, RouterProcess

RATE: Final = 50.0
"""Requests per second."""
ENGINES: Final = 3
_PROMPT: Final = "a prompt of some four thousand tokens " * 420


def add_latency(figures: Figures, requests: int) -> None:
    """Send ``requests`` requests straight to a stand-in, and as many through the proxy, in turn;
    raises ServerError: a process did not start.
    """
    with contextlib.ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [stack.enter_context(_StandIn(out / f"{at}.log")) for at in range(ENGINES)]
        urls = [each.url for each in engines]
        route = stack.enter_context(RouteProcess(urls, out, out / "route.log"))
        direct, proxied = asyncio.run(_both(urls[0], route.url, requests))
    for share in (50, 99):
        added = quantile(proxied, share) - quantile(direct, share)
        target = f"< 10, at {RATE:g}/s" if share == 99 else ""
        figures.add(f"proxy_added_p{share}_ms", added, "ms", target)


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
