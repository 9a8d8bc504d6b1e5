"""Ends of requests that are told once their answers were read, on the thread that sends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from ....graph.messages.events import RequestFinished
from ..logs import warn_read_no_more
from .answer_reader import AnswerReader, Tokens
from .bound_answers import is_bound

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_STOPPED: Final = "finished_stopped"
"""vLLM's status of an answer that the model, or a stop token, ended. One that was cut at a length,
aborted or preempted shows nothing by its last tokens."""


class AnswerEnds:
    """Adds to the end of a request why its answer ended, where no caller says so.

    Args:
        make_reader: Called once, at the first end that is sent; its tokenizer may take a while to
            load. If it fails, nothing is read any more.
    """

    def __init__(self, make_reader: Callable[[], AnswerReader]) -> None:
        self._make_reader = make_reader
        self._reader: AnswerReader | None = None
        self._given_up = False

    def of(self, event: RequestFinished, request: Request) -> RequestFinished | LateEnd:
        """What to queue for the end of ``request``: ``event``, or what becomes it when it is
        sent."""
        told = event.waiting_for_tool is False or event.session_ended
        known = event.waiting_for_tool is not None and event.tool is not None
        if told or known or self._given_up or event.reason != _STOPPED:
            return event
        form = request.structured_output_request
        bound_by = None if form is None else form.params
        return LateEnd(event, request.output_token_ids, self, bound_by)

    def read(
        self, event: RequestFinished, answer: Tokens, bound_by: StructuredOutputsParams | None
    ) -> RequestFinished:
        """``event`` with why ``answer`` ended; what a caller said of it stands.

        Args:
            bound_by: The form that the answer had to follow; None for none.
        """
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


class LateEnd:
    """The end of a request whose answer is still to be read; see ``hooks.link.outbox.Later``."""

    __slots__ = ("_answer", "_bound_by", "_ends", "_event")

    def __init__(
        self,
        event: RequestFinished,
        answer: Tokens,
        ends: AnswerEnds,
        bound_by: StructuredOutputsParams | None,
    ) -> None:
        self._event = event
        self._answer = answer
        self._ends = ends
        self._bound_by = bound_by

    def event(self) -> RequestFinished:
        """The whole event; never raises."""
        return self._ends.read(self._event, self._answer, self._bound_by)

    def events(self) -> tuple[RequestFinished]:
        """The same, as the queue asks for it."""
        return (self.event(),)
