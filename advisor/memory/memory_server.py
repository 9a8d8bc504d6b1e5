"""Serves a memory."""

from __future__ import annotations

import logging

from ..process.http_service import serve_at
from .chats.aboutness import Similarity
from .chats.chat_store import ChatStore
from .chats.looked_at import Attention
from .chats.memory_settings import MemorySettings, StoreSettings
from .memory_app import MemoryApp
from .memory_proxy import MemoryProxy

_log = logging.getLogger(__name__)


async def serve_memory(
    url: str,
    settings: MemorySettings,
    kept: StoreSettings,
    similarity: Similarity,
    attention: Attention,
    host: str,
    port: int,
) -> None:
    """Serve until told to stop, and then finish what runs."""
    app = MemoryApp(MemoryProxy(url, settings, ChatStore(kept), similarity, attention))
    _log.info("chats of %d tokens at http://%s:%d", settings.budget, host, port)
    await serve_at(app, host, port)
