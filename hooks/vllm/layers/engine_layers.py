"""Tells a request's layers with its start, on the thread that sends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from ....graph.messages.events import RequestStarted, Segment
from ....graph.types import PROTECTED_LAYERS, Authority
from ..logs import warn_read_no_more
from ..settings import reads_layers
from .border_table import BorderTable, handed_over
from .decoder import decoder
from .layer_runs import LayerReader, Run
from .marks import proven, runs_of
from .system_sections import SectionSplitter
from .token_places import Decode

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MOST_SEGMENTS: Final = 1024  # of one request, as of those that callers state; chosen
_ORDER: Final = tuple(int(layer) for layer in sorted(PROTECTED_LAYERS))

Started = Callable[[RequestStarted, "Request"], "RequestStarted | LateLayers"]


def engine_layers(config: VllmConfig) -> Started:
    """What to emit at a request's start: with its layers, where its borders are known."""
    transfer = getattr(config, "kv_transfer_config", None)
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    table = handed_over(extra, os.environ) if reads_layers() else None
    if table is None or not table.are_of(str(config.model_config.model)):
        return _as_told
    return PromptLayers(table, lambda: _decoder(config)).of


def _as_told(event: RequestStarted, request: Request) -> RequestStarted:
    return event


def _decoder(config: VllmConfig) -> Decode:
    from vllm.tokenizers import cached_tokenizer_from_config

    return decoder(cached_tokenizer_from_config(config.model_config))


class PromptLayers:
    """Adds to the start of a request the layers of its prompt.

    Args:
        table: The borders of the model's messages.
        make_decoder: Called once, if a system text has to be read; it may take a while.
    """

    def __init__(self, table: BorderTable, make_decoder: Callable[[], Decode]) -> None:
        self._table = table
        self._reader = LayerReader(table)
        self._make_decoder = make_decoder
        self._sections: SectionSplitter | None = None
        self._given_up = False

    def of(self, event: RequestStarted, request: Request) -> RequestStarted | LateLayers:
        """What to queue for the start of ``request``; bounded work, on the engine's thread."""
        if self._given_up:
            return event
        marks = proven(request.kv_transfer_params, self._table.proof)
        tokens = request.prompt_token_ids if marks is None else None
        if marks is None and not tokens:  # embeddings, and the like
            return event
        return LateLayers(event, marks, tokens, self)

    def added(
        self, event: RequestStarted, marks: list[int] | None, tokens: Sequence[int] | None
    ) -> RequestStarted:
        """``event`` with what is inferred behind what callers say; never raises."""
        try:
            known = event.cached_tokens
            runs = self._read(tokens or (), known) if marks is None else runs_of(marks)
            inferred = segments(runs, known, event.block_size, event.prompt_tokens)
            return msgspec.structs.replace(event, segments=(*event.segments, *inferred))
        except Exception as error:  # whatever a tokenizer does: the start must be told all the same
            self._give_up(error)
            return event

    def _read(self, tokens: Sequence[int], known: int) -> list[Run]:
        runs = self._reader.stream(tokens, known)
        if not self._table.sections or not runs:
            return runs
        self._sections = self._sections or SectionSplitter(self._table, self._make_decoder())
        return self._sections.split(tokens, runs)

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        warn_read_no_more(logger, "which layers prompts have", error)


class LateLayers:
    """The start of a request whose layers are still to be read; see ``hooks.link.outbox.Later``."""

    __slots__ = ("_event", "_layers", "_marks", "_tokens")

    def __init__(
        self,
        event: RequestStarted,
        marks: list[int] | None,
        tokens: Sequence[int] | None,
        layers: PromptLayers,
    ) -> None:
        self._event, self._marks, self._tokens, self._layers = event, marks, tokens, layers

    def events(self) -> tuple[RequestStarted]:
        """The whole event."""
        return (self._layers.added(self._event, self._marks, self._tokens),)


def segments(runs: Sequence[Run], known: int, size: int, tokens: int) -> list[Segment]:
    """What is told of a prompt: the most precious layer of each block.

    Blocks that the prefix cache held were told by those who computed them; what is to be protected
    is told again, so that it stays true of a session that goes on.

    Args:
        known: Tokens that the prefix cache held.
        size: Of a block, in tokens.
        tokens: Of the prompt.
    """
    told: list[Segment] = []
    for run in _by_block(runs, size):
        start, end = run.start * size, min(run.end * size, tokens)
        if run.layer not in _ORDER:
            start = max(start, known // size * size)
        if start < end:
            told.append(Segment(run.layer, start, end, authority=int(Authority.INFERRED)))
    return told[:MOST_SEGMENTS]


def _by_block(runs: Sequence[Run], size: int) -> list[Run]:
    """Runs of blocks, not of tokens: a block that two layers share is of the more precious."""
    blocks: list[Run] = []
    for layer, start, end in runs:
        first, last = start // size, -(-end // size)
        if blocks and blocks[-1].end > first:  # the block that both have a part of
            if layer < blocks[-1].layer:
                before = blocks.pop()
                if before.start < first:
                    blocks.append(before._replace(end=first))
            else:
                first = blocks[-1].end
        if first >= last:
            continue
        if blocks and blocks[-1].layer == layer and blocks[-1].end == first:
            blocks[-1] = blocks[-1]._replace(end=last)
        else:
            blocks.append(Run(layer, first, last))
    return blocks
