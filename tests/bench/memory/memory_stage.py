"""A real engine with the small model that remembers, and ``kvgraph memory`` before it."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from kvgraph.advisor.memory.attention import WordSimilarity
from kvgraph.advisor.memory.chat import Block
from kvgraph.advisor.memory.command import memory_app
from kvgraph.advisor.memory.proxy import MemoryProxy
from kvgraph.advisor.memory.settings import ChatStoreSettings, MemorySettings
from kvgraph.advisor.memory.store import ChatStore
from kvgraph.hooks.recall.cover import SpliceLimits

from ..errors import ServerError
from ..recall.approximate import keep_calibration
from ..recall.recall_stage import RECALLS
from ..serving.listening import listening
from ..serving.vllm_server import Server, ServerPlan

LONGEST: Final = 512  # tokens, as the model was taught
BLOCKS: Final = 256
ANSWER: Final = 3  # tokens
_OK: Final = 200
_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] or '' }} {% endfor %}"
_ALWAYS: Final = (("AITHER_KVCACHE_RECALL_ALWAYS", "1"),)


@dataclass
class Answered:
    """A chat's answers: tokens, the most of one request in the pool, and blocks that came back."""

    prompt: int = 0
    spliced: int = 0
    decoded: int = 0
    peak: int = 0
    recalled: list[str] = field(default_factory=list)

    def note(self, answer: dict[str, Any], memory: dict[str, Any]) -> None:
        usage = answer["usage"]
        told = (answer.get("kv_transfer_params") or {}).get("kvgraph", {}).get("recall", {})
        self.prompt += usage["prompt_tokens"]
        self.decoded += usage["completion_tokens"]
        self.spliced += told.get("spliced", 0)
        self.peak = max(self.peak, usage["total_tokens"])
        self.recalled += memory["recalled"]


class Chat:
    """A client that repeats its whole chat. Its session's name begins with ``name`` and is its
    cache salt too; no other chat has that one: an engine remembers what other arms said.
    """

    def __init__(self, client: httpx.AsyncClient, name: str, recall: bool = True) -> None:
        self._client, self._name = client, f"{name}-{secrets.token_hex(4)}"
        self._said = {} if recall else {"kv_transfer_params": {"kvgraph": {"recall": False}}}
        self.messages: list[dict[str, Any]] = []
        self.seen = Answered()

    async def say(self, *messages: dict[str, Any], keeps: bool = True) -> list[str]:
        """Say something and return the answer's words; ``keeps``: the chat goes on from here."""
        whole = [*self.messages, *messages]
        body = {"model": "demo", "messages": whole, "max_tokens": ANSWER, "temperature": 0,
                "ignore_eos": True, "cache_salt": self._name, **self._said}  # fmt: skip
        answer = await self._client.post(
            "/v1/chat/completions", json=body, headers={"X-Session-ID": self._name}
        )
        if answer.status_code != _OK:
            raise ServerError(f"the memory answered {answer.status_code}: {answer.text}")
        read = answer.json()
        self.seen.note(read, json.loads(answer.headers["x-kvgraph-memory"]))
        text: str = read["choices"][0]["message"]["content"] or ""
        if keeps:
            self.messages = [*whole, {"role": "assistant", "content": text}]
        return text.split()


@contextlib.contextmanager
def remembering_engine(scratch: Path, model: Path = RECALLS) -> Iterator[Server]:
    """The engine; its model is taken to be calibrated.

    Text comes back to the small model also where computing it is quicker, as it often is. With any
    other the engine decides.

    Args:
        model: The small model that remembers, or a large one whose answers say nothing.
    """
    from vllm.config import ModelConfig

    limits = SpliceLimits(least_tokens=16, most_generations=4)  # 4: what is calibrated at most
    keep_calibration(ModelConfig(str(model), max_model_len=LONGEST), scratch, limits)
    template = scratch / "words.jinja"
    template.write_text(_TEMPLATE)
    settings = (
        ("AITHER_KVCACHE_CALIBRATIONS", str(scratch)), ("AITHER_KVCACHE_WARM_GIB", "0.5"),
        ("OMP_NUM_THREADS", "1"), ("AITHER_KVCACHE_RECALL_SHARED", "1"),
        *(_ALWAYS if model is RECALLS else ()),
        ("AITHER_KVCACHE_SIDECAR", f"ipc://{scratch}/nobody"),
    )  # fmt: skip
    plan = ServerPlan(
        str(model), True, scratch, blocks=BLOCKS, max_model_len=LONGEST, settings=settings,
        name="" if model is RECALLS else "large", options=("--chat-template", str(template)),
        linked=False,
    )  # fmt: skip
    with Server(plan) as server:
        yield server


class Memory:
    def __init__(self, proxy: MemoryProxy, client: httpx.AsyncClient) -> None:
        self.proxy, self._client = proxy, client

    def chat(self, name: str, recall: bool = True) -> Chat:
        return Chat(self._client, name, recall)

    def blocks(self) -> list[Block]:
        return [block for chat in self.proxy.store.chats() for block in chat.blocks]


@contextlib.asynccontextmanager
async def memory_before(url: str, settings: MemorySettings) -> AsyncIterator[Memory]:
    store = ChatStore(ChatStoreSettings())
    proxy = MemoryProxy(url, settings, store, WordSimilarity(), None)
    async with (
        listening(memory_app(proxy), "on") as address,
        httpx.AsyncClient(base_url=address, timeout=120, trust_env=False) as client,
    ):
        yield Memory(proxy, client)
