"""``EngineAsker``: puts a chat's prompt to an engine in a form that it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import orjson

from ..fleet.proxy.upstream import Reply, Upstream
from ..fleet.turns.callers import Body, Call
from .chats.chat_blocks import Message
from .client_words import ClientWords

_PLAIN_S: Final = 600.0
"""Until an engine that takes no hints gets some again; chosen: it may be another by then, and to be
refused once costs little."""
_OK, _REFUSED = 200, 400


class Form(IntEnum):
    """How a request is put, in the order in which that is tried."""

    OURS = 0
    """Our messages, with hints."""
    PLAIN = 1
    """Our messages alone: servers exist that refuse fields which they do not know."""
    OWN = 2
    """What its client means: some templates want roles to alternate."""


class Prompt(NamedTuple):
    """A chat's request, in each form.

    Attributes:
        sent: Our messages.
        tags: Hints about them.
        recalls: Whether the engine may recall, unless the client says.
        own: What the client means: the body as it came, or all of the chat if it appends.
        salt: Of the cache, where text may come back; empty: the client's.
    """

    words: ClientWords
    sent: Sequence[Message]
    tags: Sequence[object]
    recalls: bool
    own: bytes | Sequence[Message]
    salt: str = ""

    def body(self, form: Form) -> bytes:
        """The request's body."""
        if form is Form.OURS:
            return self.words.body(self.sent, self.tags, self.recalls, self.salt)
        if form is Form.PLAIN:
            return self.words.plain(self.sent)
        return (
            self.own
            if isinstance(self.own, bytes)
            else self.words.body(self.own, (), False, self.salt)
        )


class EngineAsker:
    """Asks one engine, and remembers for a while whether it takes hints.

    Args:
        plain_s: Seconds for which an engine that takes none gets none.
    """

    def __init__(self, plain_s: float = _PLAIN_S) -> None:
        self._plain_s = plain_s
        self._hints_from = 0.0

    async def begin(self, engine: Upstream, call: Call, prompt: Prompt) -> tuple[Reply, Form]:
        """The beginning of an answer, and to which form; of those that are the same, one is tried.

        Args:
            call: The client's, whose body is replaced.

        Raises:
            NothingAnsweredError: The engine is gone.
            BadRequestError: The request cannot be passed on.
            orjson.JSONEncodeError: Its hints are nested deeper than JSON is written here.
        """
        first = Form.OURS if time.monotonic() >= self._hints_from else Form.PLAIN
        used, body = first, prompt.body(first)
        reply, tried = await _send(engine, call, body), [body]
        for form in list(Form)[first + 1 :]:
            if reply.status != _REFUSED:
                break
            body = prompt.body(form)
            if orjson.loads(body) in map(orjson.loads, tried):
                continue
            await reply.response.aclose()
            used, reply = form, await _send(engine, call, body)
            tried.append(body)
        if first is Form.OURS and used is Form.PLAIN and reply.status == _OK:
            self._hints_from = time.monotonic() + self._plain_s
        return reply, used


async def _send(engine: Upstream, call: Call, body: bytes) -> Reply:
    return await engine.begin(call._replace(body=Body(body)))
