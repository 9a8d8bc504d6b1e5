"""Serves a memory over HTTP: ``/v1/…`` goes to the engine, ``/memory`` is about chats."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from ..fleet.relay import NOT_SERVED, Relay, json_response, refusal, served_app
from ..process.process import PROBES, check_address, serve_at
from .attention import (
    Attention,
    EmbeddedSimilarity,
    NoAttention,
    SampledAttention,
    Similarity,
    WordSimilarity,
)
from .chat import ChatSession
from .engine import warn_if_unreachable
from .proxy import MemoryProxy, caller_of, salt_of
from .requests import CACHE_SALT
from .settings import ChatStoreSettings, EmbeddingSettings, MemorySettings
from .store import ChatStore

_log = logging.getLogger(__name__)


def memory_app(proxy: MemoryProxy) -> Router:
    """Return the ASGI application in front of a memory; it closes the proxy at the end."""

    async def probe(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def status(_: Request) -> Response:
        return json_response(proxy.status())

    async def chats(request: Request) -> Response:
        name, aside = request.path_params["name"], False
        if request.method not in ("GET", "DELETE"):
            return refusal(404, NOT_SERVED)
        found = _named(proxy.store, request, name)
        if request.method == "DELETE":
            for chat in found:
                proxy.store.forget(chat.key)
            aside = proxy.store.forget_aside(caller_of(request.headers.raw), name)
        if not found and not aside:
            return refusal(404, "no chat of this caller and salt goes by that name")
        return json_response([_plain(chat) for chat in found])

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        await proxy.close()

    views = {**dict.fromkeys(PROBES, probe), "/memory": status, "/memory/{name:path}": chats}
    return served_app(views, Relay(proxy), lifespan)


def _named(store: ChatStore, request: Request, name: str) -> list[ChatSession]:
    """Return a caller's chats of this name, which a header may carry as UTF-8 or Latin-1."""
    caller = caller_of(request.headers.raw)
    salt = salt_of(request.query_params.get(CACHE_SALT, ""))
    names = {name, name.encode().decode("latin-1")}
    found = [chat for each in names for chat in store.of_caller(caller, salt, each)]
    return list({chat.key: chat for chat in found}.values())


def _plain(chat: ChatSession) -> dict[str, Any]:
    blocks = [
        {"name": block.name, "source": block.source, "tokens": block.tokens, "place": block.place,
         "pinned": block.pinned, "priority": round(100 * block.priority, 6)}
        for block in chat.blocks
    ]  # fmt: skip
    return {
        "name": chat.name, "turn": chat.turn, "tokens": chat.tokens, "evicted": chat.evictions,
        "recalled": chat.recalls, "blocks": blocks,
    }  # fmt: skip


async def serve_memory(
    url: str,  # the engine's, without `/v1`
    settings: MemorySettings,
    kept: ChatStoreSettings,
    embeds: EmbeddingSettings | None,  # None to compare words
    page: str | None,  # URL of a sidecar's page that reports attention; None without
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),  # host names accepted beside the server's own
) -> None:
    """Serve until a signal; raises ConfigError."""
    await check_address(host, port)
    similarity: Similarity = WordSimilarity()
    if embeds is not None:
        similarity = EmbeddedSimilarity(embeds.url, embeds.model, embeds.key)
    attention: Attention = SampledAttention(page) if page is not None else NoAttention()
    proxy = MemoryProxy(url, settings, ChatStore(kept), similarity, attention)
    await warn_if_unreachable(proxy.upstream)
    _log.info("chats of %d tokens at http://%s:%d", settings.budget, host, port)
    await serve_at(memory_app(proxy), host, port, allowed_hosts)
