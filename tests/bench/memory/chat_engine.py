"""A stand-in for an engine that chats, and ``kvgraph memory`` before it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from kvgraph.advisor.memory.attention import SampledAttention, Similarity, WordSimilarity
from kvgraph.advisor.memory.command import memory_app
from kvgraph.advisor.memory.proxy import MemoryProxy
from kvgraph.advisor.memory.settings import ChatStoreSettings, MemorySettings
from kvgraph.advisor.memory.store import ChatStore
from starlette.requests import Request

from ..serving.listening import listening

Sent = dict[str, Any]


class ChatEngine:
    """Answers chats; a word is a token, and a message's border another one.

    Attributes:
        got: Bodies of chats, as they came.
        says: The message that answers a body.
        refuses: Whether it refuses a body.
        status: With which it does.
        cuts: Whether it breaks off in the middle of an answer.
        tokenizes: Whether it has ``/tokenize``.
    """

    def __init__(self) -> None:
        self.got: list[Sent] = []
        self.headers: list[dict[str, str]] = []
        self.says: Callable[[Sent], Sent] = lambda _: {"role": "assistant", "content": "well then"}
        self.refuses: Callable[[Sent], bool] = lambda _: False
        self.status = 400
        self.cuts, self.tokenizes = False, True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        data = await Request(scope, receive).body()
        body = json.loads(data) if data else {}
        if scope["path"] == "/tokenize":
            counted = {"count": sum(len(words_of(each)) + 1 for each in body["messages"])}
            return await _json(send, 200 if self.tokenizes else 404, counted)
        if scope["path"] != "/v1/chat/completions":
            return await _json(send, 200, {"path": scope["path"], "sent": body})
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        self.got.append(body)
        if self.refuses(body):
            return await _json(send, self.status, {"error": {"message": "roles must alternate"}})
        said = self.says(body)
        if body.get("stream"):
            await self._stream(send, said)
        else:
            await _json(send, 200, {"choices": [{"index": 0, "message": said,
                                                 "finish_reason": "stop"}]})  # fmt: skip

    async def _stream(self, send: Any, said: Sent) -> None:
        await _start(send, 200, b"text/event-stream")
        deltas: list[Sent] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": f"{word} "} for word in (said.get("content") or "").split()]
        for number, call in enumerate(said.get("tool_calls") or ()):
            function = call["function"]
            head = {**call, "function": {"name": function["name"], "arguments": ""}}
            deltas.append({"tool_calls": [{"index": number, **head}]})
            rest = {"index": number, "function": {"arguments": function["arguments"]}}
            deltas.append({"tool_calls": [rest]})
        for delta in deltas:
            await _event(send, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        if self.cuts:
            raise ConnectionError("cut, as the test wants it")
        await _event(send, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class Remembering:
    def __init__(self, engine: ChatEngine, proxy: MemoryProxy, url: str) -> None:
        self.engine, self.proxy = engine, proxy
        self.client = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False)

    async def chat(self, messages: list[Sent], session: str = "s", **more: Any) -> httpx.Response:
        headers = {"X-Session-ID": session, **more.pop("headers", {})}
        body = {"model": "m", "messages": messages, "max_tokens": 8, **more}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    def prompt(self, number: int = -1) -> list[str]:
        return [each["content"] for each in self.engine.got[number]["messages"]]


@contextlib.asynccontextmanager
async def remembering(
    settings: MemorySettings,
    engine: ChatEngine | None = None,
    kept: ChatStoreSettings | None = None,
    similarity: Similarity | None = None,
    attention: SampledAttention | None = None,
) -> AsyncIterator[Remembering]:
    engine = engine or ChatEngine()
    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(listening(engine, "off"))
        store = ChatStore(kept or ChatStoreSettings())
        proxy = MemoryProxy(upstream, settings, store, similarity or WordSimilarity(), attention)
        url = await stack.enter_async_context(listening(memory_app(proxy), "on"))
        found = Remembering(engine, proxy, url)
        stack.push_async_callback(found.client.aclose)
        yield found


def words_of(message: Sent) -> list[str]:
    """What counts as tokens of a message."""
    calls = " ".join(each["function"]["arguments"] for each in message.get("tool_calls") or ())
    return f"{message.get('content') or ''} {calls}".split()


async def _json(send: Any, status: int, answer: Sent) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def _start(send: Any, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _event(send: Any, event: Sent) -> None:
    data = f"data: {json.dumps(event)}\n\n".encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})
