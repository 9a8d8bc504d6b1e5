"""``kvgraph memory``."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import parse_qs

import typer
from starlette.types import Receive, Scope, Send

from ...graph.errors import ConfigError
from ..fleet.app import Relay, refuse, send_json
from ..fleet.callers import is_served
from ..fleet.command import AllowedHosts
from ..fleet.upstream import engine_in
from ..process.process import PROBES, checked_hosts, log_for_people, refuse_remote, serve_at
from ..tools.remote import only_sidecar_url
from .attention import (
    Attention,
    EmbeddedSimilarity,
    LookedAt,
    NoAttention,
    Similarity,
    WordSimilarity,
)
from .chat import ChatSession
from .engine import warn_if_unreachable
from .proxy import MemoryProxy, caller_of, salt_of
from .requests import CACHE_SALT
from .settings import LOOKS, EmbeddingSettings, MemorySettings, Mode, StoreSettings
from .store import ChatStore

_MIB: Final = 1 << 20
_KEY: Final = "OPENAI_API_KEY"
_SECRET: Final = "KVGRAPH_MEMORY_SECRET"
_CHATTY: Final = "bm25s"  # logs a line for each comparison, and sets its own level on import

Engine = Annotated[str, typer.Argument(help="The engine's address: http://127.0.0.1:8000")]
Budget = Annotated[int, typer.Option(help="Tokens of a chat's prompt and answer.")]
High = Annotated[float, typer.Option(help="Share of the budget above which blocks leave.")]
Low = Annotated[float, typer.Option(help="Share of the budget until which they leave.")]
How = Annotated[Mode, typer.Option(help="What becomes of them.")]
Top = Annotated[int, typer.Option(min=0, help="Blocks that come back at most.")]
Least = Annotated[float, typer.Option(min=0, max=1, help="A message is about no block below it.")]
Gate = Annotated[bool, typer.Option(help="Count blocks that are in the prompt among --top.")]
Embeddings = Annotated[
    str | None, typer.Option(help="An OpenAI-compatible API with /embeddings; else words count.")
]
Embedder = Annotated[str, typer.Option(help="As that API calls it.")]
Sidecar = Annotated[
    str | None,
    typer.Option(
        help="The URL of a sidecar's page: what the engine's samples looked at counts, too. Its "
        "token is that of the sidecar's note, or the environment's."
    ),
]
Strip = Annotated[bool, typer.Option(help="Leave thoughts out of later prompts.")]
Store = Annotated[Path | None, typer.Option(help="Keep chats, in clear text, in this directory.")]
Ram = Annotated[int, typer.Option(min=1, help="For the text of all chats.")]
Disk = Annotated[int, typer.Option(min=1, help="For --store.")]
Host = Annotated[str, typer.Option(help="Where to listen.")]
Port = Annotated[int, typer.Option(min=0, max=65535)]
Shared = Annotated[
    bool, typer.Option(help="Let what one API key said come back for others: answers may show it.")
]
Remote = Annotated[
    bool, typer.Option(help="Listen beyond loopback: whoever reaches it may use the engine.")
]


def memory(
    engine: Engine, budget: Budget, high: High = 0.9, low: Low = 0.7,
    mode: How = Mode.KV_RESTORE, top: Top = 4, least_similarity: Least = 0.1, gate: Gate = True,
    embeddings: Embeddings = None, embedding_model: Embedder = "", sidecar: Sidecar = None,
    strip_think: Strip = True, store: Store = None, ram_mib: Ram = 512, disk_mib: Disk = 4096,
    host: Host = "127.0.0.1", port: Port = 8010, allow_remote: Remote = False,
    allowed_host: AllowedHosts = None,
    share_recall: Shared = False,
) -> None:  # fmt: skip
    """An OpenAI-compatible address at which chats outlive a token budget."""
    refuse_remote(host, allow_remote)
    if embeddings and not embedding_model:
        raise ConfigError("--embeddings wants --embedding-model")
    url, page = engine_in(engine).url, only_sidecar_url(sidecar) if sidecar else None
    settings = MemorySettings(
        budget, high, low, mode, top, least_similarity, gate,
        attention=LOOKS if page else 0.0, strip_think=strip_think,
    )  # fmt: skip
    if share_recall:
        settings = replace(settings, salt_key=None)
    elif secret := os.environ.get(_SECRET):
        settings = replace(settings, salt_key=hashlib.blake2b(secret.encode()).digest())
    kept = StoreSettings(ram_mib * _MIB, store, disk_mib * _MIB)
    embeds = (
        EmbeddingSettings(embeddings, embedding_model, os.environ.get(_KEY)) if embeddings else None
    )
    hosts = checked_hosts(allowed_host or [])
    log_for_people()
    logging.getLogger(_CHATTY).setLevel(logging.WARNING)
    asyncio.run(serve_memory(url, settings, kept, embeds, page, host, port, hosts))


# The memory's HTTP surface: ``/v1/…`` is passed on, ``/memory`` is about chats.

_CHATS: Final = "/memory/"


class MemoryApp:
    """An ASGI application before a ``MemoryProxy``."""

    def __init__(self, proxy: MemoryProxy) -> None:
        self._proxy = proxy
        self._relay = Relay(proxy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or wait for the server's end."""
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._proxy.close()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in PROBES:
            await send_json(send, 200, {"status": "ok"})
        elif path == "/memory":
            await send_json(send, 200, self._proxy.status())
        elif path.startswith(_CHATS) and method in ("GET", "DELETE"):
            name = path.removeprefix(_CHATS)
            found, aside = self._named(name, scope), False
            if method == "DELETE":
                for chat in found:
                    self._proxy.store.forget(chat.key)
                aside = self._proxy.store.forget_aside(caller_of(scope["headers"]), name)
            if not found and not aside:
                return await refuse(send, 404, "no chat of this caller and salt goes by that name")
            await send_json(send, 200, [_plain(chat) for chat in found])
        elif is_served(path):
            await self._relay.pass_on(scope, receive, send)
        else:
            await refuse(send, 404, "not served here; requests go to /v1/…")

    def _named(self, name: str, scope: Scope) -> list[ChatSession]:
        """Chats that go by a name, which came in the path. In a request's header it may have come
        as UTF-8, which servers read as Latin-1: a chat may be known by that, too."""
        said = parse_qs(scope["query_string"].decode("latin-1")).get(CACHE_SALT, [""])
        caller, salt = caller_of(scope["headers"]), salt_of(said[0])
        in_header = name.encode().decode("latin-1")
        found = {
            c.key: c
            for each in {name, in_header}
            for c in self._proxy.store.of_caller(caller, salt, each)
        }
        return list(found.values())


def _plain(chat: ChatSession) -> dict[str, Any]:
    """A chat without its text."""
    blocks = [
        {"name": block.name, "source": block.source, "tokens": block.tokens, "place": block.place,
         "pinned": block.pinned, "priority": round(100 * block.priority, 6)}
        for block in chat.blocks
    ]  # fmt: skip
    return {
        "name": chat.name, "turn": chat.turn, "tokens": chat.tokens, "evicted": chat.evictions,
        "recalled": chat.recalls, "blocks": blocks,
    }  # fmt: skip


# Serves a memory.

_log = logging.getLogger(__name__)


async def serve_memory(
    url: str,
    settings: MemorySettings,
    kept: StoreSettings,
    embeds: EmbeddingSettings | None,
    page: str | None,
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serve until told to stop, and then finish what runs.

    Args:
        url: Of the engine, without ``/v1``.
        embeds: None: words are compared.
        page: A sidecar's, which tells where the model looks.
        allowed_hosts: Names under which the memory is addressed, beside its own.
    """
    similarity: Similarity = WordSimilarity()
    if embeds is not None:
        similarity = EmbeddedSimilarity(embeds.url, embeds.model, embeds.key)
    attention: Attention = LookedAt(page) if page is not None else NoAttention()
    proxy = MemoryProxy(url, settings, ChatStore(kept), similarity, attention)
    await warn_if_unreachable(proxy.upstream)
    _log.info("chats of %d tokens at http://%s:%d", settings.budget, host, port)
    await serve_at(MemoryApp(proxy), host, port, allowed_hosts)
