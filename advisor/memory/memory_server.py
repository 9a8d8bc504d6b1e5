"""Serves a memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..process.http_service import serve_at
from .chats.aboutness import EmbeddedSimilarity, Similarity, WordSimilarity
from .chats.chat_store import ChatStore
from .chats.looked_at import Attention, LookedAt, NoAttention
from .chats.memory_settings import EmbeddingSettings, MemorySettings, StoreSettings
from .engine_reach import warn_if_unreachable
from .memory_app import MemoryApp
from .memory_proxy import MemoryProxy

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
