"""Conversations whose renderings show where each message begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ....graph.types import SourceLayer
from .probes import (
    ANSWER,
    ASKED,
    CALL_IDS,
    DESCRIPTION,
    KEY,
    RESULT,
    TOOL,
    VALUE,
    Message,
    Probes,
    called,
    text_place,
)

SYSTEM: Final = "Zqsystem"
QUESTION: Final = "Zqquestion"
SECOND: Final = "Zqfurther"


class Part(NamedTuple):
    """What stands before a message's text.

    Attributes:
        layer: Of the text.
        before: Tokens from the end of the text before it on; of the first, from the start on.
    """

    layer: SourceLayer
    before: list[int]


class Conversation(NamedTuple):
    """A rendered conversation.

    Attributes:
        parts: What it shows, in its order.
    """

    parts: list[Part]


_Wanted = tuple[SourceLayer, str]
_SYSTEM: Final[_Wanted] = (SourceLayer.RULES, SYSTEM)
_SCHEMA: Final = 40  # tokens from a tool's description to the end of its schema, at most
_PROSE: Final[tuple[_Wanted, ...]] = (
    (SourceLayer.USER_TURN, QUESTION),
    (SourceLayer.GENERATION, ANSWER),
    (SourceLayer.USER_TURN, SECOND),
)
_CALLING: Final[tuple[_Wanted, ...]] = (
    (SourceLayer.USER_TURN, QUESTION),
    (SourceLayer.GENERATION, VALUE),
    (SourceLayer.TOOL_RESULT, RESULT),
    (SourceLayer.GENERATION, ANSWER),
    (SourceLayer.USER_TURN, SECOND),
)


def conversations(probes: Probes) -> Iterator[Conversation]:
    """All conversations that the template renders, with and without system text and tools."""
    for has_system in (True, False):
        for has_tools in (False, True):
            for messages, wanted in _made(has_system):
                with contextlib.suppress(Exception):  # a template may refuse any of them
                    tokens = probes.render(messages, tools=has_tools)
                    yield Conversation(_parts(probes, tokens, wanted, has_tools))


def _made(has_system: bool) -> Iterator[tuple[list[Message], tuple[_Wanted, ...]]]:
    first: list[Message] = [{"role": "system", "content": SYSTEM}] if has_system else []
    lead = (_SYSTEM,) if has_system else ()
    asked, further = ASKED, {"role": "user", "content": SECOND}
    answer: Message = {"role": "assistant", "content": ANSWER}
    yield [*first, asked, answer, further], (*lead, *_PROSE)
    for call_id in CALL_IDS:
        yield [*first, asked, *called(call_id), answer, further], (*lead, *_CALLING)


def _parts(
    probes: Probes, tokens: list[int], wanted: Sequence[_Wanted], has_tools: bool
) -> list[Part]:
    """What stands before each text that is found; the others are left out."""
    places = [] if not has_tools else list(_schema(probes, tokens))
    for layer, text in wanted:
        start = text_place(probes, tokens, text, 0)
        if start is not None:
            stop = text_place(probes, tokens, text, 0, end=True) or start
            places.append((start, stop, layer))
    parts, end = [], 0
    for start, stop, layer in sorted(places):
        parts.append(Part(layer, tokens[end:start]))
        end = max(end, stop)
    return parts


def _schema(probes: Probes, tokens: list[int]) -> Iterator[tuple[int, int, SourceLayer]]:
    """Where the tool is described: from its name on, up to what its parameters are called."""
    told = text_place(probes, tokens, DESCRIPTION, 0) or text_place(probes, tokens, QUESTION, 0)
    named = text_place(probes, tokens[:told], TOOL, 0, last=True)
    if named is None:
        return
    end = text_place(probes, tokens[: (told or 0) + _SCHEMA], KEY, named, end=True)
    yield named, end or named + 1, SourceLayer.CAPABILITIES
