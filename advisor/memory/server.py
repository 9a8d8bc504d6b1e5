"""Serves a memory over HTTP: ``/v1/…`` goes to the engine, ``/memory`` is about chats."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from ..fleet.app import Relay, refuse, send_json
from ..fleet.callers import is_served
from ..process.process import PROBES, serve_at
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

_CHATS: Final = "/memory/"


class MemoryApp:
    """The ASGI application in front of a ``MemoryProxy``."""

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
        """Return a caller's chats of this name; a header may have carried the name as UTF-8 read as
        Latin-1."""
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
    """Return a chat without its text."""
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
    url: str,
    settings: MemorySettings,
    kept: ChatStoreSettings,
    embeds: EmbeddingSettings | None,
    page: str | None,
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serve until told to stop, then finish the requests in progress.

    Args:
        url: The engine's, without ``/v1``.
        embeds: None to compare words.
        page: URL of a sidecar's page that reports attention; None without.
        allowed_hosts: Host names accepted beside the server's own.
    """
    similarity: Similarity = WordSimilarity()
    if embeds is not None:
        similarity = EmbeddedSimilarity(embeds.url, embeds.model, embeds.key)
    attention: Attention = SampledAttention(page) if page is not None else NoAttention()
    proxy = MemoryProxy(url, settings, ChatStore(kept), similarity, attention)
    await warn_if_unreachable(proxy.upstream)
    _log.info("chats of %d tokens at http://%s:%d", settings.budget, host, port)
    await serve_at(MemoryApp(proxy), host, port, allowed_hosts)
