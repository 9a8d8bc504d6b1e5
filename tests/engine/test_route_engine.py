"""``kvgraph route`` before two real engines: sessions find their KV at home, and one dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvgraph_bench.fleet.router_process import RouteProcess
from kvgraph_bench.serving.vllm_server import Server, ServerPlan

pytestmark = [pytest.mark.engine, pytest.mark.timing]
NOTICED_S = 10.0  # an engine that nobody asks is looked at every half second; chosen for busy cores


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    directory = tmp_path_factory.mktemp("route")
    runtime = directory / "run"
    runtime.mkdir(mode=0o700)
    settings = (("XDG_RUNTIME_DIR", str(runtime)), ("OMP_NUM_THREADS", "1"))
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        plan = ServerPlan(
            str(tiny_model), True, directory, blocks=400, max_model_len=1024, settings=settings
        )
        plans = [replace(plan, directory=directory / f"e{number}") for number in range(2)]
        servers = list(pool.map(lambda each: stack.enter_context(Server(each)), plans))
        urls = [server.url for server in servers]
        yield servers, stack.enter_context(RouteProcess(urls, runtime, directory / "route.log"))


def words(number: int, count: int) -> str:
    return " ".join(f"w{(number * 37 + place) % 400}" for place in range(count))


def complete(route: RouteProcess, prompt: str, session: str, tokens: int = 8) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(
        f"{route.url}/v1/completions", json=body, headers={"X-Session-ID": session},
        timeout=120, trust_env=False,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_later_turns_find_their_context_and_the_sidecars_tell_what_is_resident(
    fleet: tuple[list[Server], RouteProcess],
) -> None:
    _, route = fleet
    prompts = {f"s{number}": words(number, 200) for number in range(4)}
    cached = []
    for turn in range(3):
        for session, prompt in prompts.items():
            answer = complete(route, prompt, session)
            details = answer["usage"]["prompt_tokens_details"] or {}
            cached.append(details.get("cached_tokens") or 0)
            prompts[session] = f"{prompt} {answer['choices'][0]['text']} {words(turn, 30)}"
    assert cached[:4] == [0, 0, 0, 0]
    assert min(cached[4:]) >= 160
    deadline = time.monotonic() + 20
    while (status := route.status())["sessions_of_sidecars"] < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert status["sessions_of_sidecars"] == 4
    assert status["decisions"] == {"new": 4, "home": 8}
    assert status["requests"]["answered"] == 12


def test_no_request_fails_when_an_engine_dies_but_those_it_had_begun_to_answer(
    fleet: tuple[list[Server], RouteProcess],
) -> None:
    servers, route = fleet
    outcomes = asyncio.run(_killed(servers[0], route))
    assert len(outcomes) == 20
    assert outcomes.count("failed before its answer") == 0
    assert outcomes.count("whole") >= 10
    deadline = time.monotonic() + NOTICED_S
    while (status := route.status())["engines"][0]["up"]:
        assert time.monotonic() < deadline, "nobody noticed that the engine is gone"
        time.sleep(0.05)
    assert status["engines"][1]["up"]
    assert status["requests"]["broken"] == outcomes.count("cut")
    for number in range(4):
        complete(route, words(number, 210), f"s{number}")


async def _killed(victim: Server, route: RouteProcess) -> list[str]:
    """Twenty answers in flight while an engine is killed: ``whole``, ``cut`` or worse."""
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        asked = [asyncio.create_task(_stream(client, route, number)) for number in range(20)]
        await asyncio.sleep(0.5)
        for pid in victim.process_ids():
            os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*asked)


async def _stream(client: httpx.AsyncClient, route: RouteProcess, number: int) -> str:
    body = {
        "model": "demo", "prompt": words(100 + number, 300), "max_tokens": 200, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    text = ""
    try:
        async with client.stream("POST", f"{route.url}/v1/completions", json=body) as answer:
            async for chunk in answer.aiter_text():
                text += chunk
    except httpx.TransportError:
        return "cut" if text else "failed before its answer"
    return "whole" if "[DONE]" in text else f"failed before its answer: {text[:200]}"
