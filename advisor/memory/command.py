"""``kvgraph memory``: ``/v1/…`` goes to the engine, ``/memory`` is about chats."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from ...graph.errors import ConfigError
from ..fleet.command import AllowedHosts
from ..fleet.relay import NOT_SERVED, Relay, json_response, refusal, served_app
from ..fleet.upstream import MOST_SHOWN, engine_in, is_address
from ..process.process import (
    PROBES,
    check_address,
    checked_hosts,
    log_for_people,
    refuse_remote,
    serve_at,
)
from ..tools.remote import only_sidecar_url
from .attention import (
    EmbeddedSimilarity,
    SampledAttention,
    WordSimilarity,
)
from .chat import ChatSession
from .engine import warn_if_unreachable
from .proxy import MemoryProxy, caller_of, salt_of
from .requests import CACHE_SALT
from .settings import ATTENTION_WEIGHT, LEAST_BUDGET, ChatStoreSettings, MemorySettings, Mode
from .store import ChatStore, UnreadError

_MIB: Final = 1 << 20
_KEY: Final = "OPENAI_API_KEY"
_SECRET: Final = "KVGRAPH_MEMORY_SECRET"
_CHATTY: Final = "bm25s"  # logs a line for each comparison, and sets its own level on import

Engine = Annotated[str, typer.Argument(help="The engine's address: http://127.0.0.1:8000")]
Budget = Annotated[
    int, typer.Option(help=f"Tokens of a chat's prompt and answer: {LEAST_BUDGET} or more.")
]
High = Annotated[
    float, typer.Option(help="Share of the budget, up to 1, above which blocks leave.")
]
Low = Annotated[float, typer.Option(help="Share until which they leave, above 0 and up to --high.")]
How = Annotated[
    Mode,
    typer.Option(
        help="What becomes of blocks that left: kv_restore brings them back when the user speaks "
        "of them, breadcrumb names them in the prompt, discard does neither."
    ),
]
Top = Annotated[int, typer.Option(min=0, help="Blocks that come back at most.")]
Least = Annotated[
    float, typer.Option(min=0, max=1, help="Similarity from which a message is about a block.")
]
Gate = Annotated[bool, typer.Option(help="Count blocks that are in the prompt among --top.")]
Embeddings = Annotated[
    str | None, typer.Option(help="An OpenAI-compatible API with /embeddings; else words count.")
]
Embedder = Annotated[str, typer.Option(help="The model for --embeddings, as that API calls it.")]
Sidecar = Annotated[
    str | None,
    typer.Option(
        help="The URL of a sidecar's page: what the engine's samples looked at counts, too. Its "
        "token is that of the sidecar's note, or the environment's."
    ),
]
Strip = Annotated[bool, typer.Option(help="Leave thoughts out of later prompts.")]
Store = Annotated[
    Path | None,
    typer.Option(help="Keep chats, in clear text, in this directory; without it, in memory."),
]
Ram = Annotated[int, typer.Option(min=1, help="MiB of memory for the text of all chats.")]
Disk = Annotated[int, typer.Option(min=1, help="MiB of disk for --store.")]
Host = Annotated[str, typer.Option(help="Where to listen.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")]
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
        raise ConfigError("--embeddings needs --embedding-model")
    if embeddings and not embeddings.startswith(("http://", "https://")):
        raise ConfigError(f"--embeddings {embeddings[:MOST_SHOWN]!r}: allowed: http://HOST:PORT/v1")
    if not is_address(engine):
        raise ConfigError(f"engine {engine[:MOST_SHOWN]!r}: allowed: http://HOST:PORT")
    url, page = engine_in(engine).url, only_sidecar_url(sidecar) if sidecar else None
    settings = MemorySettings(
        budget, high, low, mode, top, least_similarity, gate,
        attention=ATTENTION_WEIGHT if page else 0.0, strip_think=strip_think,
    )  # fmt: skip
    if share_recall:
        settings = replace(settings, salt_key=None)
    elif secret := os.environ.get(_SECRET):
        settings = replace(settings, salt_key=hashlib.blake2b(secret.encode()).digest())
    kept = ChatStoreSettings(ram_mib * _MIB, store, disk_mib * _MIB)
    embeds = (embeddings, embedding_model, os.environ.get(_KEY)) if embeddings else None
    hosts = checked_hosts(allowed_host or [])
    log_for_people()
    logging.getLogger(_CHATTY).setLevel(logging.WARNING)
    asyncio.run(serve_memory(url, settings, kept, embeds, page, host, port, hosts))


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
        try:
            found = _named(proxy.store, request, name)
        except UnreadError as error:
            return refusal(error.status, str(error))
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
    embeds: tuple[str, str, str | None] | None,  # an API, its model and key; None to compare words
    page: str | None,  # URL of a sidecar's page that reports attention; None without
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),  # host names accepted beside the server's own
) -> None:
    """Serve until a signal; raises ConfigError."""
    port = await check_address(host, port)
    similarity = EmbeddedSimilarity(*embeds) if embeds is not None else WordSimilarity()
    attention = SampledAttention(page) if page is not None else None
    proxy = MemoryProxy(url, settings, ChatStore(kept), similarity, attention)
    await warn_if_unreachable(proxy.upstream)
    _log.info("chats of %d tokens at http://%s:%d", settings.budget, host, port)
    await serve_at(memory_app(proxy), host, port, allowed_hosts)
