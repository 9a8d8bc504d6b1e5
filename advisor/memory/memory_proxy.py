"""``MemoryProxy``: sends an engine what a chat's budget allows, and keeps what it answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from typing import Any, Final

import msgspec
import orjson

from ..fleet.proxy.upstream import NothingAnsweredError, Reply, Upstream
from ..fleet.turns.callers import Asked, BadRequestError, Callers, Headers, Turn
from .chat_turn import ChatTurn, OneByOne, caller_of, caller_salt, prompt_of, salt_of
from .chats.aboutness import Similarity
from .chats.chat_session import ChatSession
from .chats.chat_store import ChatStore
from .chats.looked_at import Attention
from .chats.memory_settings import MemorySettings, Mode
from .client_words import CACHE_SALT, ClientWords, client_words
from .completion_reader import CompletionReader
from .engine_asker import EngineAsker, Form, Prompt
from .engine_reach import gone
from .memory_counts import MemoryCounts
from .prompt_chooser import PromptChooser
from .token_counter import TokenCounter

_CHATS: Final = "/v1/chat/completions"
_HEADER: Final = b"x-kvgraph-memory"
_NAMELESS: Final = (
    'messages that continue a chat ("memory": "append") want its name: name the session in the '
    "header X-Session-ID"
)
_OK: Final = 200


class MemoryProxy:
    """Before one engine, or a router of several.

    Args:
        url: Where it answers, without ``/v1``.
        settings: What the operator chose.
        store: Remembers chats.
        similarity: Compares blocks with what users say.
        attention: Tells which blocks the model looks at.
    """

    def __init__(
        self,
        url: str,
        settings: MemorySettings,
        store: ChatStore,
        similarity: Similarity,
        attention: Attention,
    ) -> None:
        self.settings, self.store, self.counts = settings, store, MemoryCounts()
        self.upstream = Upstream(0, url)
        self.callers = Callers(harnesses=False)
        self._names = attention.wants_names
        self._counter, self._asker = TokenCounter(self.upstream), EngineAsker()
        self._chooser = PromptChooser(settings, similarity, attention, self.counts, self._counter)
        self._appending = OneByOne()
        self._remembering: set[asyncio.Task[None]] = set()

    async def begin(self, asked: Asked) -> tuple[Reply, ChatTurn | None]:
        """The beginning of an answer; ours, where the engine gives none.

        Raises:
            BadRequestError: The request cannot be passed on.
        """
        # Answers are read: nothing may compress them.
        plain = [(key, value) for key, value in asked.call.headers if key != b"accept-encoding"]
        asked = asked._replace(call=asked.call._replace(headers=plain))
        is_chat = asked.call.path.partition("?")[0] == _CHATS and asked.turn is not None
        words = client_words(asked.call.body.data) if is_chat else None
        try:
            if words is not None:
                with contextlib.suppress(orjson.JSONEncodeError):  # it is nested too deep for us
                    return await self._begin(asked, words)
            return await self.upstream.begin(asked.call), None
        except NothingAnsweredError as error:
            self.counts.unserved += 1
            return gone(self.upstream, asked.call, error), None

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
        return {**asdict(self.counts), "chats": len(self.store),
                "unwritten": self.store.unwritten, "budget": self.settings.budget}  # fmt: skip

    async def close(self) -> None:
        """Remember what was answered, and close connections."""
        await asyncio.gather(*self._remembering, return_exceptions=True)
        await self._chooser.close()
        await self.upstream.close()

    async def _begin(self, asked: Asked, words: ClientWords) -> tuple[Reply, ChatTurn | None]:
        """The beginning of an answer to a chat."""
        assert asked.turn is not None, "a chat has a prompt"
        if words.appends and not asked.turn.is_named:
            raise BadRequestError(_NAMELESS)
        over = await self._appending.next(asked.turn.session) if words.appends else _nothing
        turn, prompt = await self._prepared(asked, asked.turn, words, over)
        try:
            reply, form = await self._asker.begin(self.upstream, asked.call, prompt)
        except BaseException:
            self._undo(turn)
            raise
        self.counts.plain += form is Form.PLAIN and reply.status == _OK
        if form is Form.OWN:
            self.counts.as_sent += 1
            turn = turn._replace(counted=None)
        if reply.status != _OK:
            self._undo(turn)
            return reply, None
        return reply._replace(headers=[*reply.headers, (_HEADER, turn.said())]), turn

    async def _prepared(
        self, asked: Asked, of: Turn, words: ClientWords, over: Callable[[], None]
    ) -> tuple[ChatTurn, Prompt]:
        """Take a request over into its chat; what the engine gets."""
        by = self.settings
        self.callers.sent(of)
        self.counts.turns += 1
        async with self.store.lock(of.session):
            chat = self.store.get(_new_chat(of, asked.call.headers, words))
            if not words.appends:
                whole, chat = chat.version_for(words.messages)
                self.store.put(whole)
            before = msgspec.msgpack.encode(msgspec.structs.replace(chat, other=None))
            turn = ChatTurn(chat, before, chat.requests + 1, words.model, over)
            try:
                new = chat.follow(words.messages, words.appends, words.tags)
                if by.strip_think:
                    chat.drop_thoughts(ended=False)
                chat.fixed = chat.fixed or words.fixed
                await self._counter.count(words.model, chat.blocks)
                back, line = await self._chooser.choose(chat, new, words)
            except BaseException:  # its client is gone, perhaps
                self._undo(turn)
                raise
            sent, tags = prompt_of(chat.resident, line, self._names and chat.named)
            own = prompt_of(chat.blocks)[0] if words.appends else asked.call.body.data
            salt = caller_salt(asked.call.headers, words.fields.get(CACHE_SALT), by.salt_key)
            prompt = Prompt(words, sent, tags, by.mode is Mode.KV_RESTORE, own, salt)
            counted, names = chat.tokens - chat.fixed, tuple(block.name for block in back)
            return turn._replace(counted=counted, back=names), prompt

    async def _remember(self, turn: ChatTurn, reader: CompletionReader) -> None:
        """Keep an answer that has ended, also where its client has all of it and is gone."""
        remembering = asyncio.ensure_future(self._answered(turn, reader))
        self._remembering.add(remembering)
        remembering.add_done_callback(self._remembering.discard)
        remembering.add_done_callback(lambda _: turn.over())
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
                await self._chooser.relieve(chat)
            await self.store.keep(chat)

    def _undo(self, turn: ChatTurn) -> None:
        """Let a chat be as it was before a request that has no answer, and its counts."""
        chat, counts = turn.chat, self.counts
        left, back = chat.evictions, chat.recalls
        is_new = turn.undo()
        counts.evicted += chat.evictions - left
        counts.recalled += chat.recalls - back
        if is_new:
            self.store.forget_new(chat)
        turn.over()


def _nothing() -> None:
    """Nobody waits for the end of a request that repeats its chat."""


def _new_chat(turn: Turn, headers: Headers, words: ClientWords) -> ChatSession:
    """The chat of a request, as it is before its first one."""
    return ChatSession(
        turn.session,
        turn.name,
        caller_of(headers),
        salt_of(words.fields.get(CACHE_SALT)),
        turn.is_named,
    )
