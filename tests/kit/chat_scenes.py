"""Chats before ``kvgraph memory``: what a client says, and what it is told."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytest.importorskip("bm25s")

from kvgraph.advisor.memory.settings import MemorySettings
from kvgraph_bench.memory.chat_engine import Remembering

SMALL = MemorySettings(budget=100, settled=0, shortest=1)
LARGE = MemorySettings(budget=1000)
APPEND = {"kvgraph": {"memory": "append"}}
FACT = "the vault opens with nine seven four"
ASKED = "what opens the vault ?"


def user(text: str) -> dict[str, Any]:
    """A message of the client's."""
    return {"role": "user", "content": text}


def model(text: str | None = "well then", **more: Any) -> dict[str, Any]:
    """A message of the model's."""
    return {"role": "assistant", "content": text, **more}


def noise(number: int, words: int = 12) -> dict[str, Any]:
    return user(" ".join(f"n{number}x{word}" for word in range(words)))


def reads(path: str, call: str = "c") -> dict[str, Any]:
    """A call of a tool that reads a file."""
    function = {"name": "read", "arguments": json.dumps({"path": path})}
    return {"id": call, "type": "function", "function": function}


def result(content: str = "print ()", call: str = "c") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


async def talk(
    memory: Remembering, turns: int, chat: list[Any] | None = None, **hint: Any
) -> list[Any]:
    """A client that repeats its whole chat: a greeting, the fact, and noise with ``hint``."""
    chat = [user("hello"), user(FACT)] if chat is None else chat
    for number in range(turns):
        hints = [{"index": at, **hint} for at in range(2, len(chat)) if hint]
        params = {"kvgraph": {"messages": hints}} if hints else {}
        answer = await memory.chat(chat, kv_transfer_params=params)
        assert answer.status_code == 200, answer.text
        chat += [answer.json()["choices"][0]["message"], noise(number)]
    return chat


async def append(memory: Remembering, *messages: Any, **more: Any) -> httpx.Response:
    """Messages, or a user's words, that a client appends; ``hints`` say something of them."""
    said = [user(each) if isinstance(each, str) else each for each in messages]
    params = {"kvgraph": {"memory": "append", **more.pop("hints", {})}}
    return await memory.chat(said, kv_transfer_params=params, **more)


def asked(memory: Remembering, *messages: Any, **more: Any) -> Any:
    """A request as the proxy reads it."""
    body = {"model": "m", "messages": messages, **more}
    headers = [(b"x-session-id", b"s"), (b"content-type", b"application/json")]
    data = json.dumps(body).encode()
    return memory.proxy.callers.read("POST", "/v1/chat/completions", headers, data)


async def finish(memory: Remembering, begun: Any) -> None:
    """Read an answer that the proxy has begun to its end."""
    async for _ in memory.proxy.rest(*begun):
        pass


async def shown(memory: Remembering) -> Any:
    """What is told of the only chat."""
    (chat,) = (await memory.client.get("/memory/s")).json()
    return chat


async def names(memory: Remembering, kind: str = "") -> list[str]:
    """Of the only chat's blocks, those that begin with ``kind``."""
    blocks = (await shown(memory))["blocks"]
    return [each["name"] for each in blocks if each["name"].startswith(kind)]


def told(answer: httpx.Response) -> Any:
    """What an answer's header says of its prompt."""
    return json.loads(answer.headers["x-kvgraph-memory"])
