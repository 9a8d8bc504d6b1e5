"""A chat beside its rendered prompt: what its client says of messages finds their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from ...once import Once
from ..hints.tags import MAX_SEGMENTS
from .message_hints import MessageHint, layer_of, message_hints
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
    segments = said["segments"] if isinstance(said.get("segments"), list) else []
    about = meant(hints, chat.messages)
    if not about:
        once.warn("no such message", "kvgraph: a request's hints name messages that it has not; "
                                     "ignored (said once)")  # fmt: skip
    places = MessagePlaces(chat.tokens, chat.text, chat.tokenizer)
    for place, (at, said_of_it) in zip(places.of(chat.messages, about), about.items(), strict=True):
        if place is None:
            once.warn("not found", "kvgraph: a request's hints name messages that are not found in "
                                   "its prompt; ignored (said once)")  # fmt: skip
        else:
            layer = {"layer": layer_of(chat.messages[at].role)}
            where = {"start": place[0], "end": place[1]}
            room = max(0, MAX_SEGMENTS - len(segments))
            segments += [{**layer, **hint.segment, **where} for hint in said_of_it[:room]]
    if segments:
        said["segments"] = segments
    return said


def meant(
    hints: Sequence[MessageHint], messages: Sequence[ClientMessage]
) -> dict[int, list[MessageHint]]:
    """What is said of messages, by their places among all, in that order; ``MAX_SEGMENTS`` at most,
    however many hints name however many messages."""
    numbered = [at for at, message in enumerate(messages) if message.numbered]
    of_role: dict[str | None, list[int]] = {}
    for at, message in enumerate(messages):
        of_role.setdefault(message.role, []).append(at)
    found: dict[int, list[MessageHint]] = {}
    room = MAX_SEGMENTS
    for hint in hints:
        places = of_role.get(hint.role, [])
        if hint.number is not None:
            places = _one(numbered, hint.number)
        for at in places[:room]:
            found.setdefault(at, []).append(hint)
        room -= min(room, len(places))
    return dict(sorted(found.items()))


def _one(places: list[int], number: int) -> list[int]:
    """The place of this number, from the end on if it is below 0; none where there is none."""
    return [places[number]] if -len(places) <= number < len(places) else []
