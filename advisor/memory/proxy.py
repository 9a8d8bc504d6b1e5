"""``MemoryProxy``: sends what a chat's budget allows, and stores the answer."""

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

from ..fleet.callers import (
    BadRequestError,
    Body,
    Call,
    Callers,
    Headers,
    Turn,
    keys_of,
)
from ..fleet.upstream import NothingAnsweredError, Reply, Upstream
from .attention import SampledAttention, Similarity
from .chat import Block, ChatSession, Message
from .chooser import MemoryCounts, PromptChooser, TokenCounter, with_line
from .engine import CompletionReader, EngineAsker, EnginePrompt, Form
from .requests import CACHE_SALT, ChatRequest, read_chat_request, with_salt
from .settings import MemorySettings, Mode
from .store import ChatStore


class ChatQueue:
    """Makes a chat's requests run one at a time, since each needs the previous answer."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def next(self, key: str) -> Callable[[], None]:
        """Wait for the chat's earlier requests; return a function that lets the next one run."""
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
    chat: ChatSession  # the chat, or the version of it that the request belongs to
    before: bytes  # the encoded version before the request, to restore if no answer comes
    number: int  # number of the request within the chat
    model: object  # the model's name in the request
    over: Callable[[], None]  # called when the answer is stored, or will not come
    # Tokens of the blocks in the prompt; None if the engine got the client's own messages.
    counted: int | None = None
    back: tuple[str, ...] = ()  # names of blocks that came back

    @property
    def is_last(self) -> bool:
        return self.chat.requests == self.number

    def undo(self) -> bool:
        """Restore the chat, unless a later request arrived; return whether it is empty then."""
        if not self.is_last:
            return False
        was = msgspec.msgpack.decode(self.before, type=ChatSession)
        for field in was.__struct_fields__:
            if field != "other":
                setattr(self.chat, field, getattr(was, field))
        return not was.blocks

    def header(self) -> bytes:
        """Return the value of the response header that describes the chat's memory."""
        chat = self.chat
        said = {"resident": len(chat.resident), "away": len(chat.away), "tokens": chat.tokens,
                "recalled": self.back}  # fmt: skip
        return json.dumps(said).encode()


def prompt_of(
    blocks: Iterable[Block],
    line: str = "",  # put in front of the last message's text; empty for none
    names: bool = False,  # whether blocks that may leave later get a hint with their name
) -> tuple[list[Message], list[object]]:
    """Return blocks' messages and hints, the client's first: engines cap their number."""
    messages, said, named = list[Message](), list[object](), list[object]()
    for block in blocks:
        # System blocks never leave; a name would protect them in the engine for other chats too.
        name = {"identity": block.identity} if names and block.source != "system" else {}
        for message in block.messages:
            if block.tags:
                said.append({"index": len(messages), **block.tags, **name})
            elif name:
                named.append({"index": len(messages), **name})
            messages.append(message)
    return with_line(messages, line), said + named


def caller_of(headers: Headers) -> str:
    """Return 16 hexadecimal digits that represent a request's API keys, and so its caller."""
    return hashlib.blake2b(b"\0".join(keys_of(headers)), digest_size=8).hexdigest()


def caller_salt(headers: Headers, salt: object, key: bytes | None) -> str:
    """Return a cache salt, 32 hexadecimal digits, that no other API key gets, whatever salt it
    sends; empty if the request has no API key, or ``key`` is None.

    Text that comes back was computed after other text, on which an answer may depend; that text
    must not be another caller's.
    """
    keys = keys_of(headers)
    if key is None or not keys:
        return ""
    said = b"\0".join([*keys, orjson.dumps(salt)])
    return hashlib.blake2b(said, digest_size=16, key=key[:64]).hexdigest()


def salt_of(salt: object) -> str:
    """Return a digest of a cache salt; empty without one."""
    return hashlib.blake2b(orjson.dumps(salt), digest_size=8).hexdigest() if salt else ""


_CHATS: Final = "/v1/chat/completions"
_HEADER: Final = b"x-kvgraph-memory"
_NAMELESS: Final = (
    'messages that continue a chat ("memory": "append") want its name: name the session in the '
    "header X-Session-ID"
)
_OK: Final = 200


class MemoryProxy:
    def __init__(
        self,
        url: str,  # the engine's address, without `/v1`
        settings: MemorySettings,
        store: ChatStore,
        similarity: Similarity,  # compares blocks with what users say
        attention: SampledAttention | None = None,  # reports which blocks the model attends to
    ) -> None:
        self.settings, self.store, self.counts = settings, store, MemoryCounts()
        self.upstream = Upstream(0, url)
        self.callers = Callers(harnesses=False)
        self._names = attention is not None  # by which samples are reported
        self._counter, self._asker = TokenCounter(self.upstream), EngineAsker()
        self._chooser = PromptChooser(settings, similarity, attention, self.counts, self._counter)
        self._appending = ChatQueue()
        self._remembering: set[asyncio.Task[None]] = set()

    async def begin(self, asked: Call) -> tuple[Reply, ChatTurn | None]:
        """Send a request on, a chat with the prompt that the memory chooses for it.

        Returns the engine's answer as far as it has begun, and the chat's turn, to which the rest
        of the answer must be given; None if the request is not a chat. Raises BadRequestError or
        NothingAnsweredError.
        """
        # Answers are read: nothing may compress them.
        plain = [(key, value) for key, value in asked.headers if key != b"accept-encoding"]
        asked = asked._replace(headers=plain)
        is_chat = asked.path.partition("?")[0] == _CHATS and asked.turn is not None
        request = read_chat_request(asked.body.data) if is_chat else None
        if request is not None:
            with contextlib.suppress(orjson.JSONEncodeError):  # it is nested too deep for us
                return await self._begin(asked, request)
        call = asked._replace(body=Body(self._salted(asked)))
        return await self.upstream.begin(call), None

    def why(self, call: Call, error: NothingAnsweredError) -> str:
        """Describe why ``begin`` got no answer: the engine's address, and what is known."""
        what = "dropped this request" if error.sent else "cannot be reached"
        may = ", and may have done what it asks" if error.sent and not call.repeatable else ""
        return f"the engine at {self.upstream.url} {what}{may}: {error}"

    async def rest(self, reply: Reply, turn: ChatTurn | None) -> AsyncGenerator[bytes, None]:
        """Yield an answer's rest; the chat is stored by its end. Raises BrokenAnswerError."""
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

    def finished(self, asked: Call) -> None:
        """Forget a session that its client ended."""
        if asked.turn is not None and asked.turn.ends:
            self.store.forget(asked.turn.session)

    def status(self) -> dict[str, Any]:
        return {**asdict(self.counts), "chats": len(self.store),
                "unwritten": self.store.unwritten, "budget": self.settings.budget}  # fmt: skip

    async def close(self) -> None:
        """Store the answers that ended, and close connections."""
        await asyncio.gather(*self._remembering, return_exceptions=True)
        await self._chooser.close()
        await self.upstream.close()

    async def _begin(self, asked: Call, request: ChatRequest) -> tuple[Reply, ChatTurn | None]:
        assert asked.turn is not None, "a chat has a prompt"
        if request.appends and not asked.turn.is_named:
            raise BadRequestError(_NAMELESS)
        # Of those that append nothing, no request waits for one that repeats its chat.
        appending = self._appending
        over = await appending.next(asked.turn.session) if request.appends else lambda: None
        turn, prompt = await self._prepared(asked, asked.turn, request, over)
        try:
            reply, form = await self._asker.begin(self.upstream, asked, prompt)
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
        return reply._replace(headers=[*reply.headers, (_HEADER, turn.header())]), turn

    async def _prepared(
        self, asked: Call, of: Turn, request: ChatRequest, over: Callable[[], None]
    ) -> tuple[ChatTurn, EnginePrompt]:
        by = self.settings
        self.callers.sent(of)
        self.counts.turns += 1
        async with self.store.lock(of.session):
            chat = self.store.get(_new_chat(of, asked.headers, request))
            if not request.appends:
                whole, chat = chat.version_for(request.messages)
                self.store.put(whole)
            before = msgspec.msgpack.encode(msgspec.structs.replace(chat, other=None))
            turn = ChatTurn(chat, before, chat.requests + 1, request.model, over)
            try:
                new = chat.follow(request.messages, request.appends, request.tags)
                if by.strip_think:
                    chat.drop_thoughts(ended=False)
                chat.fixed = chat.fixed or request.fixed
                await self._counter.count(request.model, chat.blocks)
                back, line = await self._chooser.choose(chat, new, request)
            except BaseException:  # its client is gone, perhaps
                self._undo(turn)
                raise
            sent, tags = prompt_of(chat.resident, line, self._names and chat.named)
            own = prompt_of(chat.blocks)[0] if request.appends else self._salted(asked)
            salt = caller_salt(asked.headers, request.fields.get(CACHE_SALT), by.salt_key)
            prompt = EnginePrompt(request, sent, tags, by.mode is Mode.KV_RESTORE, own, salt)
            counted, names = chat.tokens - chat.fixed, tuple(block.name for block in back)
            return turn._replace(counted=counted, back=names), prompt

    def _salted(self, call: Call) -> bytes:
        """A request's body as it came; if it asks for recall, with its caller's own salt."""
        key = self.settings.salt_key
        return with_salt(call.body.data, lambda salt: caller_salt(call.headers, salt, key))

    async def _remember(self, turn: ChatTurn, reader: CompletionReader) -> None:
        """Store an answer that has ended, even if its client disconnected meanwhile."""
        remembering = asyncio.ensure_future(self._answered(turn, reader))
        self._remembering.add(remembering)
        remembering.add_done_callback(self._remembering.discard)
        remembering.add_done_callback(lambda _: turn.over())
        await asyncio.shield(remembering)

    async def _answered(self, turn: ChatTurn, reader: CompletionReader) -> None:
        """Add an answer to its chat, and let blocks leave if there are too many."""
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
        """Restore a chat, and the counts, after a request without an answer."""
        chat, counts = turn.chat, self.counts
        left, back = chat.evictions, chat.recalls
        is_new = turn.undo()
        counts.evicted += chat.evictions - left
        counts.recalled += chat.recalls - back
        if is_new:
            self.store.forget_new(chat)
        turn.over()


def _new_chat(turn: Turn, headers: Headers, request: ChatRequest) -> ChatSession:
    return ChatSession(
        turn.session,
        turn.name,
        caller_of(headers),
        salt_of(request.fields.get(CACHE_SALT)),
        turn.is_named,
    )
