"""A chat beside its rendered prompt: what its client says of messages finds their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from ...once import Once
from ..hints.tags import MAX_SEGMENTS
from .message_hints import layer_of, message_hints
from .message_places import ClientMessage, MessagePlaces

CHAT_KEY: Final = "kvgraph_chat"
"""Of a rendered prompt, inside the API process."""

CLIENTS: Final[ContextVar[list[ClientMessage] | None]] = ContextVar("kvgraph_clients", default=None)
"""The messages as their client numbers them, where a surface makes others of them."""


class RenderedChat(NamedTuple):
    """One prompt.

    Attributes:
        marks: Its layers, as they are handed over; None if nobody read them.
        messages: The client's own.
        text: What was tokenized; None: only the tokens are known.
    """

    marks: dict[str, Any] | None
    messages: list[ClientMessage]
    tokens: Sequence[int]
    text: str | None
    tokenizer: Any


def resolved(said: dict[str, Any], chat: RenderedChat | None, once: Once) -> dict[str, Any]:
    """Hints with those about messages turned into segments.

    Args:
        said: All hints of a request; changed.
        chat: None: the request has no messages.
    """
    hints = message_hints(said, once)
    if not hints:
        return said
    if chat is None:
        once.warn("no messages", "kvgraph: a request without messages names some; ignored "
                                 "(said once)")  # fmt: skip
        return said
    places = MessagePlaces(chat.tokens, chat.text, chat.tokenizer).of(chat.messages)
    count = sum(message.numbered for message in chat.messages)
    segments = list(said.get("segments") or ()) if isinstance(said.get("segments"), list) else []
    found = 0
    index = -1
    for message, place in zip(chat.messages, places, strict=True):
        index += message.numbered
        number = index if message.numbered else None
        for hint in hints:
            if place is not None and hint.means(number, message.role, count):
                found += 1
                layer = {"layer": layer_of(message.role)}
                segments.append({**layer, **hint.segment, "start": place[0], "end": place[1]})
    if not found:
        once.warn("no such message", "kvgraph: a request's hints name messages that it has not; "
                                     "ignored (said once)")  # fmt: skip
    if segments:
        said["segments"] = segments[:MAX_SEGMENTS]
    return said
