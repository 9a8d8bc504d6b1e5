"""What an engine needs to read why its answers end: the marks of its model, and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....graph.messages.events import RequestFinished
from ..layers.decoder import decoder
from ..settings import reads_ends
from .answer_reader import AnswerReader
from .end_marks import EndMarks, handed_over
from .late_end import AnswerEnds, LateEnd

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

Ended = Callable[[RequestFinished, "Request"], RequestFinished | LateEnd]


def engine_ends(config: VllmConfig) -> Ended:
    """What to emit at a request's end: with why its answer ended, where that can be read."""
    transfer = getattr(config, "kv_transfer_config", None)
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    marks = handed_over(extra, os.environ) if reads_ends() else None
    if marks is None or not marks.are_of(str(config.model_config.model)):
        return _as_told
    return AnswerEnds(lambda: reader_of(marks, config)).of


def _as_told(event: RequestFinished, request: Request) -> RequestFinished:
    return event


def reader_of(marks: EndMarks, config: VllmConfig) -> AnswerReader:
    """Reads answers with the tokenizer that the scheduler's process has loaded already."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return AnswerReader(marks, decoder(cached_tokenizer_from_config(config.model_config)))
