"""``MemoryProxy``: sends an engine what a chat's budget allows, and keeps what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import asdict
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import orjson

from ..fleet.callers import BadRequestError, Callers, Headers, ParsedRequest, Turn, keys_of
from ..fleet.upstream import NothingAnsweredError, Reply, Upstream
from .attention import Attention, Similarity
from .chat import Block, ChatSession, Message
from .chooser import MemoryCounts, PromptChooser, TokenCounter, with_line
from .engine import CompletionReader, EngineAsker, Form, Prompt, gone
from .requests import CACHE_SALT, ClientWords, client_words
from .settings import MemorySettings, Mode
from .store import ChatStore

# ``ChatTurn``: a chat's request under way, and the prompt that an engine gets for it.


class OneByOne:
    """Has requests that continue one chat wait for the one before them: nobody else has answers."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def next(self, key: str) -> Callable[[], None]:
        """Wait for those that came before; returns what lets the next one go on. The end of the
        caller's task does so, too."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        await lock.acquire()
        held = [lock]

        def over(*_: object) -> None:
            while held:
                held.pop().release()

        task = asyncio.current_task()
        assert task is not None, "it is awaited"
        task.add_done_callback(over)
        return over


class ChatTurn(NamedTuple):
    """A chat's request under way.

    Attributes:
        chat: Or the version of it that the request belongs to.
        before: It as it was, without another version: to go back to where there is no answer.
        number: Of the chat's requests.
        model: As the client calls it.
        over: To be called when its answer is remembered, or there will be none.
        counted: Tokens of the blocks in the prompt; None: the engine got what was meant.
        back: Names of blocks that came back.
    """

    chat: ChatSession
    before: bytes
    number: int
    model: object
    over: Callable[[], None]
    counted: int | None = None
    back: tuple[str, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether no other request of the chat came since."""
        return self.chat.requests == self.number

    def undo(self) -> bool:
        """Let the chat be as it was, unless it went on since; whether it is as if never begun."""
        if not self.is_last:
            return False
        was = msgspec.msgpack.decode(self.before, type=ChatSession)
        for field in was.__struct_fields__:
            if field != "other":
                setattr(self.chat, field, getattr(was, field))
        return not was.blocks

    def said(self) -> bytes:
        """What a client reads of its chat's memory, as it was when the answer began."""
        chat = self.chat
        said = {"resident": len(chat.resident), "away": len(chat.away), "tokens": chat.tokens,
                "recalled": self.back}  # fmt: skip
        return json.dumps(said).encode()


def prompt_of(
    blocks: Iterable[Block], line: str = "", names: bool = False
) -> tuple[list[Message], list[object]]:
    """The messages of blocks, and what is said of them: what their client says first, since engines
    take no more than so many hints.

    Args:
        line: Stands before what the last message says; empty: none does.
        names: Whether blocks that may leave one day are named, too.
    """
    messages, said, named = list[Message](), list[object](), list[object]()
    for block in blocks:
        # The system's never leave; a name would protect them in the engine, whoever else has them.
        name = {"identity": block.identity} if names and block.source != "system" else {}
        for message in block.messages:
            if block.tags:
                said.append({"index": len(messages), **block.tags, **name})
            elif name:
                named.append({"index": len(messages), **name})
            messages.append(message)
    return with_line(messages, line), said + named


def caller_of(headers: Headers) -> str:
    """Digest of the keys that a request came with."""
    return hashlib.blake2b(b"\0".join(keys_of(headers)), digest_size=8).hexdigest()


def caller_salt(headers: Headers, salt: object, key: bytes | None) -> str:
    """A cache's salt that no other API key gets, whatever salt it names.

    What comes back for a caller was computed behind whatever somebody said before it, which an
    answer then depends on.

    Args:
        salt: The client's own.
        key: Of the hash; None: callers are not told apart.

    Returns:
        32 hexadecimal digits; empty: the request has no API key, or ``key`` is None.
    """
    keys = keys_of(headers)
    if key is None or not keys:
        return ""
    said = b"\0".join([*keys, orjson.dumps(salt)])
    return hashlib.blake2b(said, digest_size=16, key=key[:64]).hexdigest()


def salt_of(salt: object) -> str:
    """Digest of a cache's salt; empty if there is none."""
    return hashlib.blake2b(orjson.dumps(salt), digest_size=8).hexdigest() if salt else ""


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

    async def begin(self, asked: ParsedRequest) -> tuple[Reply, ChatTurn | None]:
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

    def finished(self, asked: ParsedRequest) -> None:
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

    async def _begin(
        self, asked: ParsedRequest, words: ClientWords
    ) -> tuple[Reply, ChatTurn | None]:
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
        self, asked: ParsedRequest, of: Turn, words: ClientWords, over: Callable[[], None]
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
