"""Reads why an engine's answers end and which layers its prompts have, when these are reported."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from ...graph.types import PROTECTED_LAYERS, Authority
from ...graph.wire.events import RequestFinished, RequestStarted, Segment
from ..link.outbox import LateEvents
from ..requests.borders import (
    BorderTable,
    Decode,
    LayerReader,
    Run,
    configured_table,
    decoder,
    proven_marks,
    runs_of,
)
from ..requests.ends import AnswerReader, EndMarks, Tokens, configured_marks
from ..requests.sections import SectionSplitter
from ..settings import engine_settings
from ..threads import warn_read_no_more

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request

_FORMS: Final = ("json_schema", "grammar", "regex", "qwen_xml_parameter")
_SOME: Final = ("triggered_tags", "token_triggered_tags", "tags_with_separator")
"""Kinds of formats whose tags an answer may leave out, unless one at least is required."""


def is_bound(structural_tag: str | None) -> bool:
    """Return whether vLLM's ``structural_tag``, in JSON, prescribed all of an answer or a call in
    it. None stands for another kind of constraint; that and an unreadable tag count as prescribing
    all.
    """
    if structural_tag is None:
        return True
    try:
        read = msgspec.json.decode(structural_tag, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return True
    form = read.get("format")
    return isinstance(form, Mapping) and _requires(form)  # the older kind allows prose around tags


def _requires(form: Mapping[str, Any]) -> bool:
    """Whether an answer that follows a format has a form, or a call, in any case."""
    kind, parts = form.get("type"), _mappings(form.get("elements"))
    if kind in _FORMS:
        return True
    if kind in _SOME:
        return form.get("at_least_one") is True
    if kind == "sequence":
        return any(map(_requires, parts))
    if kind == "or":
        return bool(parts) and all(map(_requires, parts))
    content = form.get("content")
    return kind in ("tag", "plus") and isinstance(content, Mapping) and _requires(content)


def _mappings(parts: object) -> list[Mapping[str, Any]]:
    return [each for each in parts if isinstance(each, Mapping)] if isinstance(parts, list) else []


logger = logging.getLogger(__name__)

_STOPPED: Final = "finished_stopped"
"""vLLM's status of an answer that the model or a stop token ended. The last tokens of an answer cut
at a length, aborted or preempted show nothing.
"""


class AnswerEnds:
    """Adds to a request's end event why its answer ended, unless its caller stated it."""

    def __init__(self, make_reader: Callable[[], AnswerReader]) -> None:
        self._make_reader = make_reader
        self._reader: AnswerReader | None = None
        self._given_up = False

    def of(self, event: RequestFinished, request: Request) -> RequestFinished | LateEvents:
        """Return ``event`` for the queue, or a deferred version of it."""
        told = event.waiting_for_tool is False or event.session_ended
        known = event.waiting_for_tool is not None and event.tool is not None
        if told or known or self._given_up or event.reason != _STOPPED:
            return event
        form, answer = request.structured_output_request, request.output_token_ids
        bound_by = None if form is None else form.params
        return LateEvents(lambda: [self.read(event, answer, bound_by)])

    def read(
        self, event: RequestFinished, answer: Tokens, bound_by: StructuredOutputsParams | None
    ) -> RequestFinished:
        """Return ``event`` with why ``answer`` ended, if no caller said so. Never raises."""
        if self._given_up:
            return event
        try:
            reader = self._reader = self._reader or self._make_reader()
            bound = bound_by is not None and is_bound(bound_by.structural_tag)
            ending = reader.read_bound(answer) if bound else reader.read(answer)
        except Exception as error:  # of a tokenizer: the request's end must be told all the same
            self._give_up(error)
            return event
        if event.waiting_for_tool and not ending.waiting_for_tool:
            return event
        return msgspec.structs.replace(
            event, waiting_for_tool=ending.waiting_for_tool, tool=event.tool or ending.tool
        )

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        warn_read_no_more(logger, "why answers end", error)


T = TypeVar("T", RequestStarted, RequestFinished)


def engine_ends(
    config: VllmConfig,
) -> Callable[[RequestFinished, Request], RequestFinished | LateEvents]:
    """Return a function that makes the item to queue when a request of this engine ends."""
    marks = configured_marks(_extra(config), os.environ) if engine_settings().reads_ends else None
    if marks is None or not marks.are_of(str(config.model_config.model)):
        return _as_told
    return AnswerEnds(lambda: reader_of(marks, config)).of


def _as_told(event: T, request: Request) -> T:
    return event


def reader_of(marks: EndMarks, config: VllmConfig) -> AnswerReader:
    return AnswerReader(marks, _decoder(config))


def _decoder(config: VllmConfig) -> Decode:
    """Decodes with the tokenizer that the scheduler's process has loaded already."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return decoder(cached_tokenizer_from_config(config.model_config))


def _extra(config: VllmConfig) -> Mapping[str, Any]:
    """What an engine's connector was configured with besides what vLLM knows."""
    transfer = getattr(config, "kv_transfer_config", None)
    return transfer.kv_connector_extra_config if transfer is not None else {}


MOST_SEGMENTS: Final = 1024  # segments per request, as for those that callers state; chosen
_ORDER: Final = tuple(int(layer) for layer in sorted(PROTECTED_LAYERS))


def engine_layers(
    config: VllmConfig,
) -> Callable[[RequestStarted, Request], RequestStarted | LateEvents]:
    """Return a function that makes the item to queue when a request of this engine starts."""
    table = engine_table(config)
    return _as_told if table is None else PromptLayers(table, lambda: _decoder(config)).of


def engine_table(config: VllmConfig) -> BorderTable | None:
    """Return an engine's borders; None if unknown, or layers are switched off."""
    if not engine_settings().reads_layers:
        return None
    table = configured_table(_extra(config), os.environ)
    fits = table is not None and table.are_of(str(config.model_config.model))
    return table if fits else None


class PromptLayers:
    """Adds the layers of a request's prompt to its start event."""

    def __init__(self, table: BorderTable, make_decoder: Callable[[], Decode]) -> None:
        self._table = table
        self._reader = LayerReader(table)
        self._make_decoder = make_decoder
        self._sections: SectionSplitter | None = None
        self._given_up = False

    def of(self, event: RequestStarted, request: Request) -> RequestStarted | LateEvents:
        """Return ``event`` for the queue, or a deferred version of it; bounded work."""
        if self._given_up:
            return event
        marks = proven_marks(request.kv_transfer_params, self._table.proof)
        tokens = request.prompt_token_ids if marks is None else None
        if marks is None and not tokens:  # embeddings, and the like
            return event
        return LateEvents(lambda: [self.added(event, marks, tokens)])

    def added(
        self, event: RequestStarted, marks: list[int] | None, tokens: Sequence[int] | None
    ) -> RequestStarted:
        """Return ``event`` with inferred layers added after the caller's; never raises."""
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


def segments(runs: Sequence[Run], known: int, size: int, tokens: int) -> list[Segment]:
    """Return the segments to report for a prompt of ``tokens`` tokens: for each block of ``size``
    its most precious layer. The first ``known`` tokens, found in the prefix cache, were reported by
    the requests that computed them; only protected layers are reported again, so that they stay
    valid for a session that continues.
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
