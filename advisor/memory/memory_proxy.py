"""``MemoryProxy``: sends an engine what a chat's budget allows, and keeps what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import httpx
import msgspec
import numpy as np
import orjson

from ..fleet.proxy.upstream import Reply, Upstream
from ..fleet.turns.callers import Asked, BadRequestError, Body, Callers, Headers, Turn
from .chat_turn import ChatTurn, caller_of, prompt_of, salt_of
from .chats.aboutness import Shares, Similarity, tells_of
from .chats.block_scores import stays
from .chats.chat_blocks import Block
from .chats.chat_session import ChatSession
from .chats.chat_store import ChatStore
from .chats.memory_settings import MemorySettings, Mode
from .chats.working_set import breadcrumb, evict, recall
from .client_words import ClientWords, client_words
from .completion_reader import CompletionReader
from .token_counter import TokenCounter

_CHATS: Final = "/v1/chat/completions"
_HEADER: Final = b"x-kvgraph-memory"
_ANSWER: Final = 8  # the part of the budget that is kept for an answer of unknown length; chosen
_MOST_ANSWER: Final = 2  # the part that is kept for one at most: the rest is the prompt's; chosen
_NAMELESS: Final = (
    'messages that continue a chat ("memory": "append") want its name: name the session in the '
    "header X-Session-ID"
)
_OK: Final = 200
_REFUSED: Final = 400

_log = logging.getLogger(__name__)


@dataclass
class MemoryCounts:
    """What happened so far.

    Attributes:
        turns: Requests of chats.
        evicted, recalled: Blocks.
        beyond: Prompts that were longer than the budget, for want of blocks that may leave.
        as_sent: Requests that the engine refused as we put them: it got what their client meant.
        unscored: Times that similarity could not be asked for.
        refused, unserved, left: As a proxy counts them.
    """

    turns: int = 0
    refused: int = 0
    unserved: int = 0
    left: int = 0
    evicted: int = 0
    recalled: int = 0
    beyond: int = 0
    as_sent: int = 0
    unscored: int = 0


class MemoryProxy:
    """Before one engine, or a router of several.

    Args:
        url: Where it answers, without ``/v1``.
        settings: What the operator chose.
        store: Remembers chats.
        similarity: Compares blocks with what users say.
    """

    def __init__(
        self, url: str, settings: MemorySettings, store: ChatStore, similarity: Similarity
    ) -> None:
        self.settings, self.store, self.counts = settings, store, MemoryCounts()
        self.upstream = Upstream(0, url)
        self._similarity = similarity
        self.callers = Callers()
        self._counter = TokenCounter(self.upstream)
        self._warned = False
        self._remembering: set[asyncio.Task[None]] = set()

    async def begin(self, asked: Asked) -> tuple[Reply, ChatTurn | None]:
        """The beginning of an answer.

        Raises:
            NothingAnsweredError: The engine is gone.
            BadRequestError: The request cannot be passed on.
        """
        # Answers are read: nothing may compress them.
        plain = [(key, value) for key, value in asked.call.headers if key != b"accept-encoding"]
        call = asked.call._replace(headers=plain)
        is_chat = call.path.partition("?")[0] == _CHATS and asked.turn is not None
        words = client_words(call.body.data) if is_chat else None
        if words is None:
            return await self.upstream.begin(call), None
        try:
            turn, body = await self._prepared(asked, words)
        except orjson.JSONEncodeError:  # its hints are nested deeper than JSON is written here
            return await self.upstream.begin(call), None
        try:
            reply = await self.upstream.begin(call._replace(body=Body(body)))
            if reply.status == _REFUSED and turn.sent != turn.meant:
                await reply.response.aclose()
                self.counts.as_sent += 1
                turn = turn._replace(counted=None)
                if words.appends:
                    call = call._replace(body=Body(words.body(turn.meant, (), False)))
                reply = await self.upstream.begin(call)
        except BaseException:
            self._undo(turn)
            raise
        if reply.status != _OK:
            self._undo(turn)
            return reply, None
        return reply._replace(headers=[*reply.headers, (_HEADER, turn.said())]), turn

    async def rest(self, reply: Reply, turn: ChatTurn | None) -> AsyncGenerator[bytes, None]:
        """All bytes of an answer that has begun; a chat's memory is ready when it ends.

        Raises:
            BrokenAnswerError: The engine is gone before the end.
        """
        kinds = [value for key, value in reply.headers if key.lower() == b"content-type"]
        reader = CompletionReader(any(b"event-stream" in kind for kind in kinds))
        ended = turn is None
        try:
            async with contextlib.aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    if turn is not None and not ended:
                        reader.feed(chunk)
                        if reader.is_over:  # the client may go on at once
                            ended = True
                            await self._remember(turn, reader)
                    yield chunk
            if turn is not None and not ended:
                ended = True
                await self._remember(turn, reader)
        finally:
            if turn is not None and not ended:
                self._undo(turn)

    def finished(self, asked: Asked) -> None:
        """Forget a session that its client ended."""
        if asked.turn is not None and asked.turn.ends:
            self.store.forget(asked.turn.session)

    def status(self) -> dict[str, Any]:
        """Counts, for people."""
        return {**asdict(self.counts), "chats": len(self.store), "budget": self.settings.budget}

    async def close(self) -> None:
        """Remember what was answered, and close connections."""
        await asyncio.gather(*self._remembering, return_exceptions=True)
        await self._similarity.close()
        await self.upstream.close()

    async def _prepared(self, asked: Asked, words: ClientWords) -> tuple[ChatTurn, bytes]:
        """Take a request over into its chat; what the engine gets."""
        assert asked.turn is not None, "a chat has a prompt"
        if words.appends and not asked.turn.is_named:
            raise BadRequestError(_NAMELESS)
        by = self.settings
        self.callers.sent(asked.turn)
        self.counts.turns += 1
        async with self.store.lock(asked.turn.session):
            chat = self.store.get(_new_chat(asked.turn, asked.call.headers, words))
            turn = ChatTurn(chat, msgspec.msgpack.encode(chat), chat.requests + 1, words.model)
            try:
                new = chat.follow(words.messages, words.appends, words.tags)
                if by.strip_think:
                    chat.drop_thoughts(ended=False)
                chat.fixed = chat.fixed or words.fixed
                await self._counter.count(words.model, chat.blocks)
                back = await self._choose(chat, new, self._room(words))
                crumb = breadcrumb(chat) if by.mode is Mode.BREADCRUMB else ""
                sent, tags = prompt_of(chat.resident, crumb)
                body = words.body(sent, tags, by.mode is Mode.KV_RESTORE)
            except BaseException:  # its client is gone, perhaps
                self._undo(turn)
                raise
            turn = turn._replace(
                sent=sent,
                meant=prompt_of(chat.blocks)[0] if words.appends else words.messages,
                counted=chat.tokens - chat.fixed,
                back=tuple(block.name for block in back),
            )
        return turn, body

    def _room(self, words: ClientWords) -> int:
        """Tokens of a prompt, beside those that are kept for its answer."""
        budget = self.settings.budget
        answer, most = words.answer or budget // _ANSWER, budget // _MOST_ANSWER
        if answer > most and not self._warned:
            self._warned = True
            _log.warning("an answer of %d tokens is asked for, and %d of the budget's %d are kept "
                         "for it: prompt and answer may be longer together",
                         answer, most, budget)  # fmt: skip
        return budget - min(answer, most)

    async def _choose(self, chat: ChatSession, new: Sequence[Block], room: int) -> list[Block]:
        """Let blocks come back that the user speaks of, and others leave until all fits."""
        by, speaks = self.settings, bool(new) and new[-1].source == "user"
        back: list[Block] = []
        if chat.tokens > room or (speaks and chat.away):
            about = await self._about(chat)
            if speaks:
                always = stays(chat, by)
                kept = sum(block.tokens for block in chat.resident if id(block) in always)
                back = recall(chat, about, by, room - chat.fixed - kept)
                chat.move_behind(new)
            self._evict(chat, about, room)
            back = [block for block in back if block.place is not None]
        self.counts.recalled += len(back)
        self.counts.beyond += chat.tokens > room
        return back

    async def _remember(self, turn: ChatTurn, reader: CompletionReader) -> None:
        """Keep an answer that has ended, also where its client has all of it and is gone."""
        remembering = asyncio.ensure_future(self._answered(turn, reader))
        self._remembering.add(remembering)
        remembering.add_done_callback(self._remembering.discard)
        await asyncio.shield(remembering)

    async def _answered(self, turn: ChatTurn, reader: CompletionReader) -> None:
        """Keep an answer that has ended, and let blocks leave if there are too many."""
        said, chat, by = reader.message(), turn.chat, self.settings
        if said is None:
            return self._undo(turn)
        async with self.store.lock(chat.key):
            if turn.is_last:
                if reader.prompt_tokens and turn.counted is not None:
                    chat.fixed = max(0, reader.prompt_tokens - turn.counted)
                chat.add([said])
                if by.strip_think:  # a tool's result goes on with the turn
                    chat.drop_thoughts(ended=not said.get("tool_calls"))
                await self._counter.count(turn.model, chat.blocks)
                if chat.tokens > by.high * by.budget:
                    self._evict(chat, await self._about(chat), int(by.low * by.budget))
            await self.store.keep(chat)

    def _evict(self, chat: ChatSession, about: Shares, until: int) -> None:
        self.counts.evicted += len(evict(chat, about, self.settings, until))

    async def _about(self, chat: ChatSession) -> Shares:
        """How much each block is about what the user said last; 0 where nobody can tell."""
        said = next((each.text for each in reversed(chat.blocks) if each.source == "user"), "")
        try:
            return await tells_of(self._similarity, said, chat.blocks)
        except httpx.HTTPError as error:
            self.counts.unscored += 1
            _log.warning("similarity could not be asked for: %s", type(error).__name__)
            return np.zeros(len(chat.blocks))

    def _undo(self, turn: ChatTurn) -> None:
        """Let a chat be as it was before a request that has no answer."""
        if turn.undo() and self.store.holds(turn.chat):
            self.store.forget(turn.chat.key)


def _new_chat(turn: Turn, headers: Headers, words: ClientWords) -> ChatSession:
    """The chat of a request, as it is before its first one."""
    return ChatSession(
        turn.session,
        turn.name,
        caller_of(headers),
        salt_of(words.fields.get("cache_salt")),
        turn.is_named,
    )
