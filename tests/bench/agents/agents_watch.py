"""What a server's pool lost of recorded agents, by source layer."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvgraph.graph.types import LAYER_BY_NAME, SourceLayer

from ..recorded.agents_requests import AgentRequest
from ..recorded.agents_text import Kind, kind_of
from ..serving.cache_ledger import Digest, Ledger, chain_of, layers_of
from ..serving.vllm_server import Server, ServerPlan, check_advised
from ..serving.workload import BLOCK

_LAYERS: Final = {
    Kind.HEAD: SourceLayer.CONTEXT,  # where nobody says what it is
    Kind.USER: SourceLayer.USER_TURN,
    Kind.TOOL: SourceLayer.TOOL_RESULT,
    Kind.ANSWER: SourceLayer.GENERATION,
}


@contextlib.contextmanager
def watched(plan: ServerPlan, known: dict[Digest, SourceLayer]) -> Iterator[tuple[Server, Ledger]]:
    """A running server, and what its KV events say; one that should be advised is.

    Raises:
        ServerError: It did not start, or a graph's arm ran without its graph.
    """
    with tempfile.TemporaryDirectory(prefix="kvgraph-watch-") as sockets:
        events = f"ipc://{sockets}/events.sock"
        with Ledger(events, known) as ledger, Server(replace(plan, events_endpoint=events)) as one:
            if plan.graph:
                check_advised(one)
            yield one, ledger


def layers_by_block(
    requests: Sequence[AgentRequest], vocabulary: int, size: int = BLOCK
) -> dict[Digest, SourceLayer]:
    """The source layer of every full block of ``size`` tokens of these prompts."""
    known: dict[Digest, SourceLayer] = {}
    for request in requests:
        layers = [_LAYERS[kind_of(token, vocabulary)] for token in request.prompt]
        for name, start, end in request.layers:
            layers[start:end] = [LAYER_BY_NAME[name]] * (end - start)
        known.update(layers_of(request.prompt, layers, size))
    return known


def kept_with(
    layers: Container[SourceLayer],
    requests: Sequence[AgentRequest],
    known: Mapping[Digest, SourceLayer],
) -> set[Digest]:
    """The blocks of some layers, and those before them in a prompt: without these no request finds
    them.

    Args:
        known: See ``layers_by_block``.
    """
    kept: set[Digest] = set()
    for request in requests:
        chain = chain_of(request.prompt)
        last = max((at for at, digest in enumerate(chain) if known[digest] in layers), default=-1)
        kept.update(chain[: last + 1])
    return kept
