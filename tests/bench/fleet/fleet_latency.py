"""What the proxy adds to the time of a request: before stand-ins that answer at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import httpx

from ..errors import ServerError
from ..figures import Figures, quantile

RATE: Final = 50.0
"""Requests per second."""
ENGINES: Final = 3
_PROMPT: Final = "a prompt of some four thousand tokens " * 420
_START_S: Final = 60.0


def add_latency(figures: Figures, requests: int) -> None:
    """Send ``requests`` requests straight to a stand-in, and as many through the proxy, in turn.

    Raises:
        ServerError: A process did not start.
    """
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(_process(_stand_in)) for _ in range(ENGINES)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        port = stack.enter_context(_process(lambda free: _proxy(urls, free)))
        direct, proxied = asyncio.run(_both(urls[0], f"http://127.0.0.1:{port}", requests))
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


@contextlib.contextmanager
def _process(command: Callable[[int], list[str]]) -> Iterator[int]:
    """A process that listens on a free port, until the end of the block.

    Args:
        command: Its command line, given the port.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(command(port), stderr=subprocess.DEVNULL)
    try:
        _wait(port, process)
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
            return
        time.sleep(0.1)
    raise ServerError(f"{process.args!r} did not start")


def _stand_in(port: int) -> list[str]:
    return [sys.executable, "-m", "kvgraph_bench.fleet.fleet_latency", str(port)]


def _proxy(urls: list[str], port: int) -> list[str]:
    return [sys.executable, "-m", "kvgraph", "route", *urls, "--port", str(port)]


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
