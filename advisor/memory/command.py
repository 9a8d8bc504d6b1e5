"""``kvgraph memory``."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from ...graph.errors import ConfigError
from ..fleet.command import AllowedHosts
from ..fleet.upstream import MOST_SHOWN, engine_in, is_address
from ..process.process import checked_hosts, log_for_people, refuse_remote
from ..tools.remote import only_sidecar_url
from .settings import ATTENTION_WEIGHT, ChatStoreSettings, EmbeddingSettings, MemorySettings, Mode

_MIB: Final = 1 << 20
_KEY: Final = "OPENAI_API_KEY"
_SECRET: Final = "KVGRAPH_MEMORY_SECRET"
_INSTALLS: Final = "pip install 'kvgraph[memory]', or in a clone with pip install '.[memory]'"
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
    embeds = (
        EmbeddingSettings(embeddings, embedding_model, os.environ.get(_KEY)) if embeddings else None
    )
    try:  # imported here, so that the other commands need no extra
        from .server import serve_memory
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing; install it with {_INSTALLS}") from None

    hosts = checked_hosts(allowed_host or [])
    log_for_people()
    logging.getLogger(_CHATTY).setLevel(logging.WARNING)
    asyncio.run(serve_memory(url, settings, kept, embeds, page, host, port, hosts))
