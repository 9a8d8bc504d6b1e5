"""Serves a memory."""

from __future__ import annotations

import logging
from typing import Final

import uvicorn

from ...dashboards.hosts import TrustedHosts
from ...graph.ipc.addresses import LOOPBACK_HOSTS, is_loopback
from .chats.aboutness import Similarity
from .chats.chat_store import ChatStore
from .chats.memory_settings import MemorySettings, StoreSettings
from .memory_app import MemoryApp
from .memory_proxy import MemoryProxy

_MOST_HEADERS: Final = 64 << 10  # bytes of one request's headers, as `kvgraph route` allows
_STOP_S: Final = 30  # for requests that run when it is told to stop; as `kvgraph route` waits

_log = logging.getLogger(__name__)


async def serve_memory(
    url: str,
    settings: MemorySettings,
    kept: StoreSettings,
    similarity: Similarity,
    host: str,
    port: int,
) -> None:
    """Serve until told to stop, and then finish what runs."""
    app = MemoryApp(MemoryProxy(url, settings, ChatStore(kept), similarity))
    # A page of another origin must not read chats through a browser on this machine.
    guarded = TrustedHosts(app, [*LOOPBACK_HOSTS, host]) if is_loopback(host) else app
    config = uvicorn.Config(
        guarded, host=host, port=port, http="h11", ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, h11_max_incomplete_event_size=_MOST_HEADERS,
        timeout_graceful_shutdown=_STOP_S,
    )  # fmt: skip
    _log.info("chats of %d tokens at http://%s:%d", settings.budget, host, port)
    await uvicorn.Server(config).serve()
