"""Ends of requests that are told with why the answer ended: a caller's word stands over it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvgraph.graph.wire.events import BlocksCleared, RequestFinished
from kvgraph.hooks.link.outbox import Outbox
from kvgraph.hooks.requests.ends import AnswerReader, EndMarks
from kvgraph.hooks.vllm.reading import AnswerEnds, LateEnd, is_bound
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
)
from vllm.tool_parsers.structural_tag_registry import (
    SUPPORTED_STRUCTURAL_TAG_MODELS,
    get_model_structural_tag,
)

END, CALL_END, NAME = 1, 2, 3
MARKS = EndMarks(turn_ends=(END,), call_ends=(CALL_END,), opener=9, before="to", after="!")
STOPPED = RequestFinished("r", b"", 4, 8, "finished_stopped")


def decode(tokens: Sequence[int]) -> str:
    return "".join("to bash!" if token == NAME else "." for token in tokens)


def asked(answer: Sequence[int], form: str | None = None) -> Any:
    tag = form if form and form.startswith("{") else None
    params = SimpleNamespace(structural_tag=tag, json=None if tag else "a form")
    request = SimpleNamespace(params=params) if form else None
    return SimpleNamespace(output_token_ids=answer, structured_output_request=request)


def told(
    event: RequestFinished,
    answer: Sequence[int],
    ends: AnswerEnds | None = None,
    form: str | None = None,
) -> Any:
    ends = ends or AnswerEnds(lambda: AnswerReader(MARKS, decode))
    request = asked(answer, form)
    queued = ends.of(event, request)
    return queued.event() if isinstance(queued, LateEnd) else queued


def changed(**fields: Any) -> RequestFinished:
    return msgspec.structs.replace(STOPPED, **fields)


CALLING, ENDING = (9, NAME, CALL_END), (5, END)


@pytest.mark.parametrize(
    ("said", "answer", "waiting", "tool"),
    [
        ({}, CALLING, True, "bash"),
        ({}, ENDING, False, None),
        ({}, (5, 6), None, None),
        ({"waiting_for_tool": True}, CALLING, True, "bash"),
        ({"waiting_for_tool": True, "tool": "mine"}, CALLING, True, "mine"),
        ({"tool": "mine"}, CALLING, True, "mine"),
        ({"waiting_for_tool": True}, ENDING, True, None),
        ({"waiting_for_tool": False}, CALLING, False, None),
        ({"session_ended": True}, CALLING, None, None),
        ({"reason": "finished_length_capped"}, CALLING, None, None),
        ({"reason": "finished_aborted"}, ENDING, None, None),
    ],
)
def test_a_callers_word_stands(
    said: dict[str, Any], answer: Sequence[int], waiting: bool | None, tool: str | None
) -> None:
    event = changed(**said)
    end = told(event, answer)
    assert (end.waiting_for_tool, end.tool) == (waiting, tool)
    assert end == msgspec.structs.replace(event, waiting_for_tool=waiting, tool=tool)


def test_an_answer_in_a_form_ends_for_nobody_knows_whom() -> None:
    assert told(STOPPED, ENDING, form="json").waiting_for_tool is None
    assert told(STOPPED, CALLING, form="json").tool == "bash"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize("model", sorted(SUPPORTED_STRUCTURAL_TAG_MODELS))
def test_an_answer_that_had_to_be_a_call_is_no_end_of_a_turn(model: str) -> None:
    """By the grammars that vLLM makes for the models that it knows."""
    named = {"type": "function", "function": {"name": "f"}}
    for tool, choice, waiting in (
        (STRICT, "auto", False),
        (TOOL, "required", None),
        (TOOL, ChatCompletionNamedToolChoiceParam(**named), None),
    ):
        tools = [ChatCompletionToolsParam(**tool)]  # type: ignore[arg-type]
        tag = get_model_structural_tag(model, tools, choice, reasoning=False)
        assert tag is not None
        form = json.dumps(tag.model_dump())
        assert told(STOPPED, ENDING, form=form).waiting_for_tool is waiting, form
        assert told(STOPPED, CALLING, form=form).tool == "bash"


@pytest.mark.parametrize("tag", ["[" * 100_000, "3", "{", '{"format": NaN}'])
def test_a_form_that_cannot_be_read_counts_as_one(tag: str) -> None:
    assert is_bound(tag)


def test_an_error_costs_the_reading_and_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> AnswerReader:
        raise RuntimeError("a tokenizer that quotes a secret text")

    ends = AnswerEnds(fail)
    with caplog.at_level(logging.WARNING):
        assert [told(STOPPED, CALLING, ends) for _ in range(3)] == [STOPPED] * 3
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


def test_an_end_keeps_its_place_among_the_events() -> None:
    outbox = Outbox(limit=10, batch_limit=2)
    ends = AnswerEnds(lambda: AnswerReader(MARKS, decode))
    request = asked(CALLING)
    outbox.emit(BlocksCleared())
    outbox.emit(ends.of(STOPPED, request))
    outbox.emit(BlocksCleared())
    waiting = changed(waiting_for_tool=True, tool="bash")
    assert list(outbox) == [BlocksCleared(), waiting, BlocksCleared()]
    assert outbox.take_all() == [BlocksCleared(), waiting, BlocksCleared()]
