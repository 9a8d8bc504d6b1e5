"""429 for who waits too long: over real HTTP, with vLLM's own way of noticing who has gone."""

from __future__ import annotations

import asyncio
import contextlib
import http.client as http_client
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from kvgraph.graph.wire.events import MAX_NAME
from kvgraph.hooks.settings import REFUSE_AFTER_VARIABLE, SIDECAR_VARIABLE
from kvgraph.hooks.vllm.api.refusal import RefuseWhoWaits, WaitingRequests, ask_sidecar
from prometheus_client import REGISTRY

pytestmark = pytest.mark.usefixtures("vllm_loaded")

LONG = "a-name-of-sixteen-or-more"


class Engine:
    """What vLLM's API does with a request, as far as middleware can see: it waits, then answers."""

    def __init__(self) -> None:
        self.held: list[str] = []  # ids that the sidecar would name
        self.go = asyncio.Event()  # lets the waiting ones be answered
        # names of requests whose clients were gone before they were answered
        self.aborted: list[str] = []
        self.seen: list[str] = []

    def app(self) -> FastAPI:
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        app = FastAPI()

        @app.post("/v1/completions")
        @with_cancellation
        async def complete(body: dict[str, Any], raw_request: Request) -> Any:
            name = raw_request.headers["x-request-id"]
            self.seen.append(name)
            if body.get("held", True):
                self.held.append(f"cmpl-{name}-0-1a2b3c4d")
            if body.get("stream"):
                return StreamingResponse(self._chunks(name), media_type="text/event-stream")
            await self._turn(name)
            return {"id": name}

        return app

    async def _turn(self, name: str) -> None:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.aborted.append(name)
            raise

    async def _chunks(self, name: str) -> AsyncIterator[str]:
        await self._turn(name)
        for part in range(3):
            yield f"data: {part}\n\n"


@contextlib.asynccontextmanager
async def serving(engine: Engine, ask: Callable[[], Collection[str]] | None = None) -> Any:
    """A client of a real server with the middleware, as vLLM adds it."""
    app = engine.app()
    waiting = WaitingRequests(ask or (lambda: list(engine.held)))
    app.add_middleware(RefuseWhoWaits, waiting=waiting)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        yield client
    server.should_exit = True
    await task


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFUSE_AFTER_VARIABLE, "0.3")


def post(client: httpx.AsyncClient, name: str = "", **body: Any) -> Any:
    headers = {"X-Request-Id": name} if name else {}
    return client.post("/v1/completions", json=body, headers=headers)


def refused() -> float:
    return REGISTRY.get_sample_value("kvgraph_refused_requests_total") or 0.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["", LONG])
async def test_who_is_held_for_too_long_is_told_to_come_again(stream: bool, name: str) -> None:
    engine, before = Engine(), refused()
    async with serving(engine) as client:
        answer = await post(client, name, stream=stream)
        assert answer.status_code == 429
        assert refused() == before + 1
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == 429
        assert engine.aborted == engine.seen, "to vLLM the client has gone"
        assert len(engine.seen) == 1


async def waited(engine: Engine, request: Any, seconds: float) -> Any:
    """The answer of a request that is not refused meanwhile, and then has its turn."""
    waits = asyncio.ensure_future(request)
    await asyncio.sleep(seconds)
    assert not waits.done()
    engine.go.set()
    return await waits


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waits_and_is_not_held_is_never_refused(stream: bool) -> None:
    """As a session that is live and resident is: it waits in vLLM's own queue."""
    engine = Engine()
    engine.held = ["cmpl-somebody-else-of-that-length-0-1a2b3c4d"]
    async with serving(engine) as client:
        answer = await waited(engine, post(client, LONG, stream=stream, held=False), 2.0)
        assert answer.status_code == 200
        assert engine.aborted == []
        if stream:
            assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


async def test_who_is_held_for_less_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFUSE_AFTER_VARIABLE, "30")
    engine = Engine()
    async with serving(engine) as client:
        assert (await waited(engine, post(client), 0.1)).status_code == 200


def no_sidecar() -> Collection[str]:
    raise OSError("it is gone")


@pytest.mark.parametrize(("name", "ask"), [("short", None), (LONG, no_sidecar)])
async def test_where_it_is_not_known_nobody_is_refused(name: str, ask: Any) -> None:
    engine = Engine()
    async with serving(engine, ask) as client:
        assert (await waited(engine, post(client, name), 1.6)).status_code == 200


async def test_two_of_one_name_cannot_be_told_apart() -> None:
    engine = Engine()
    async with serving(engine) as client:
        both = asyncio.gather(post(client, LONG), post(client, LONG))
        assert [each.status_code for each in await waited(engine, both, 1.6)] == [200, 200]


async def test_other_requests_and_refusals_of_vllms_own_pass() -> None:
    engine = Engine()
    async with serving(engine) as client:
        assert (await client.get("/v1/completions")).status_code == 405
        assert (await client.post("/v1/completions", content=b"{")).status_code == 422


UUID = "550e8400-e29b-41d4-a716-446655440000"  # the last group has digits only


def holds(held: str, name: str) -> bool:
    return asyncio.run(WaitingRequests(lambda: [held]).holds(name))


@pytest.mark.parametrize("name", ["mine", UUID, "agent-7f3a9b2c4d5e-2", "0_1-deadbeef", "a-1_2-3"])
def test_the_names_that_vllm_makes_are_understood(name: str) -> None:
    assert holds(f"chatcmpl-{name}-1a2b3c4d", name)
    assert holds(f"cmpl-{name}-0-1a2b3c4d", name)
    assert holds(f"cmpl-{name}-17-1a2b3c4d", name)
    assert holds(f"3_chatcmpl-{name}-1a2b3c4d", name), "one of several answers"
    assert holds(f"3_cmpl-{name}-0-1a2b3c4d", name)


@pytest.mark.parametrize(
    "held",
    [
        "chatcmpl-agent-7f3a9b2c4d5e-2-1a2b3c4d",  # of a client that numbers its turns
        "cmpl-agent-7f3a9b2c4d5e-2-0-1a2b3c4d",
        "chatcmpl-agent-7f3a9b2c4d5e-deadbeef-1a2b3c4d",
        "chatcmpl-agent-7f3a9b2c4d5e_0-1a2b3c4d",  # perhaps of a batch, perhaps a name
        "cmpl-agent-7f3a9b2c4d5e",
        "chatcmpl-agent-7f3a9b2c4d5e",
        "cmpl-agent-7f3a9b2c4d5e-1a2b3c4d",
        "else-agent-7f3a9b2c4d5e-1a2b3c4d",
        "resp_agent-7f3a9b2c4d5e-1a2b3c4d",
        "1_2_chatcmpl-agent-7f3a9b2c4d5e-1a2b3c4d",
    ],
)
def test_nobody_is_taken_for_another(held: str) -> None:
    assert not holds(held, "agent-7f3a9b2c4d5e")


def test_a_chat_that_may_be_one_of_a_batch_names_nobody() -> None:
    held = "chatcmpl-agent-7f3a9b2c4d5e_0-1a2b3c4d"
    assert not holds(held, "agent-7f3a9b2c4d5e_0")
    assert holds("cmpl-agent-7f3a9b2c4d5e_0-0-1a2b3c4d", "agent-7f3a9b2c4d5e_0")


def test_an_id_that_was_cut_names_nobody() -> None:
    long = f"chatcmpl-{'a' * 300}"
    cut = f"{long[: MAX_NAME - 9]}-1a2b3c4d"  # as the name's own middle may look
    assert not holds(cut, cut[len("chatcmpl-") : -9])


def test_ids_without_a_random_part_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert holds("chatcmpl-mine-1a2b3c4d", "mine-1a2b3c4d")
    assert not holds("chatcmpl-mine-1a2b3c4d", "mine")
    assert holds("cmpl-mine-2", "mine")


def test_vllms_own_makers_of_ids_are_the_ones_that_are_understood() -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    fields |= {"request_id": f"chatcmpl-{UUID}", "sampling_params": SamplingParams(n=2)}
    request = EngineCoreRequest(**fields)
    InputProcessor.assign_request_id(request)
    assert holds(request.request_id, UUID)
    assert holds(ParentRequest(request).get_child_info(1)[0], UUID)


def test_thousands_that_are_held_do_not_stop_the_server() -> None:
    ids = [f"chatcmpl-{'a' * 200}{number:08d}-1a2b3c4d" for number in range(10_000)]
    threads: list[str] = []

    class Seen(list[str]):
        def __iter__(self) -> Any:
            threads.append(threading.current_thread().name)
            return super().__iter__()

    assert asyncio.run(WaitingRequests(lambda: Seen(ids)).holds(f"{'a' * 200}00009999"))
    assert threads
    assert threading.main_thread().name not in threads


async def test_the_sidecar_is_asked_twice_a_second_at_most() -> None:
    asked: list[float] = []
    now = [0.0]

    def ask() -> Collection[str]:
        asked.append(now[0])
        return ["cmpl-mine-0-1a2b3c4d"]

    waiting = WaitingRequests(ask, lambda: now[0])
    answers = await asyncio.gather(*(waiting.holds("mine") for _ in range(100)))
    assert all(answers)
    now[0] = 0.6
    assert await waiting.holds("mine")
    assert asked == [0.0, 0.6]


@pytest.mark.parametrize("said", ["no JSON", "[" * 100_000, "[null]"], ids=["text", "deep", "no"])
def test_a_wrong_answer_of_a_sidecar_names_nobody(said: str) -> None:
    assert asyncio.run(WaitingRequests(lambda: json.loads(said)).holds("mine")) is False


def test_whoever_else_listens_at_the_sidecars_port_names_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=greet, daemon=True).start()
        http = f"http://127.0.0.1:{server.getsockname()[1]}"
        gone = SimpleNamespace(endpoint="ipc:///gone", token="t", http=http)
        monkeypatch.setattr("kvgraph.graph.wire.endpoints.running_sidecars", lambda: [gone])
        monkeypatch.setenv(SIDECAR_VARIABLE, "ipc:///gone")
        with pytest.raises(http_client.HTTPException):
            ask_sidecar()
        threading.Thread(target=greet, daemon=True).start()
        assert asyncio.run(WaitingRequests().holds("mine")) is False
