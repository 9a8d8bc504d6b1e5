"""``PromptChooser``: decides which blocks of a chat are in its prompt, turn by turn."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson

from ..fleet.prompts import CHARACTERS_PER_TOKEN
from ..fleet.upstream import NothingAnsweredError, Upstream
from .attention import SampledAttention, Shares, Similarity, SimilarityError, relevance_of
from .chat import MOST_TOKENS, THOUGHTS, Block, ChatSession, Message
from .requests import ChatRequest
from .settings import MemorySettings, Mode

_MOST: Final = 32  # names in a line; chosen: a reminder, not a list
_NAME: Final = re.compile(r"((?:file|tool):)?(.*?)(#\d+)?", re.DOTALL)  # ours: kind, and number
_ODD: Final = re.compile(r"[^\w./-]")


def summary_line(chat: ChatSession, characters: int) -> str:
    """Return one line that names the blocks that left, newest last; empty if none did."""
    names = [block.name for block in chat.away]
    if not names:
        return ""
    lines = (_line(names, shown) for shown in range(min(len(names), _MOST), 0, -1))
    return next((line for line in lines if len(line) <= characters), _line(names, 0))


def with_line(messages: Sequence[Message], line: str) -> list[Message]:
    """Put a line in front of the last message's text; unchanged if that is no text."""
    said = messages[-1].get("content") if line else None
    if not isinstance(said, str):
        return list(messages)
    return [*messages[:-1], messages[-1] | {"content": f"{line}\n\n{said}"}]


def _line(names: Sequence[str], shown: int) -> str:
    """Return the line that names the ``shown`` newest blocks, and counts the older ones."""
    older = len(names) - shown
    parts = [f"{older} older"] if older else []
    return f"[left out: {', '.join([*parts, *map(_plain, names[older:])])}]"


def _plain(name: str) -> str:
    """Escape whatever in a block's name could end the line or pose as a speaker."""
    # Most of a name is a tool's or a model's text, and the line stands in the user's message.
    found = _NAME.fullmatch(name)
    assert found is not None, "it takes any text"
    kind, said, number = found.groups()
    return f"{kind or ''}{_ODD.sub(_escaped, said)}{number or ''}"


def _escaped(odd: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in odd[0].encode(errors="replace"))


_WRAPPING: Final = 8  # estimated tokens around a message's text; chosen
_AT_ONCE: Final = 8  # concurrent requests; chosen
_MOST_S: Final = 5.0  # for one count; chosen: a client waits for it, and an engine may hang
_WITHOUT_S: Final = 60.0  # until one that had none, or hung, is asked again; chosen: it may change
_OK, _NO_SUCH_PATH = 200, 404


class TokenCounter:
    """Counts tokens by ``/tokenize`` for ``most_s`` at a time; else four characters are a token."""

    def __init__(self, upstream: Upstream, most_s: float = _MOST_S) -> None:
        self._upstream, self._most_s = upstream, most_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._asks_from = 0.0

    async def count(self, model: object, blocks: Sequence[Block]) -> None:
        new = [block for block in blocks if not block.tokens and block.messages]
        try:
            async with asyncio.timeout(self._most_s):
                await asyncio.gather(*(self._count(model, block) for block in new))
        except TimeoutError:
            self._asks_from = time.monotonic() + _WITHOUT_S
        for block in new:
            block.tokens = block.tokens or about(block)

    async def more(self, model: object, block: Block, line: str) -> int:
        if not line:
            return 0
        messages = with_line(block.messages, line)
        longer = Block(block.name, block.source, messages, block.digests, block.turn, None)
        await self.count(model, [longer])
        return max(0, longer.tokens - block.tokens)

    async def _count(self, model: object, block: Block) -> None:
        async with self._slots:
            if time.monotonic() >= self._asks_from:
                asked = {"model": model, "messages": block.messages, "add_generation_prompt": False}
                block.tokens = await self._ask(orjson.dumps(asked))

    async def _ask(self, body: bytes) -> int:
        try:
            answer = await self._upstream.ask("/tokenize", self._most_s, body)
            if answer.status == _NO_SUCH_PATH:
                self._asks_from = time.monotonic() + _WITHOUT_S
            read: Any = orjson.loads(answer.content) if answer.status == _OK else {}
        except (NothingAnsweredError, orjson.JSONDecodeError):
            return 0
        count = read.get("count") if isinstance(read, dict) else None
        return count if isinstance(count, int) and 0 < count < MOST_TOKENS else 0


def about(block: Block) -> int:
    characters = len(block.text)
    for message in block.messages:
        characters += sum(len(str(message.get(field) or "")) for field in THOUGHTS)
    return -(-characters // CHARACTERS_PER_TOKEN) + _WRAPPING * len(block.messages)


@dataclass
class MemoryCounts:
    turns: int = 0  # requests of chats
    # ``refused``, ``unserved``, ``left``: as counted by the proxy.
    refused: int = 0
    unserved: int = 0
    left: int = 0
    # ``evicted``, ``recalled``: blocks that left prompts, and that came back.
    evicted: int = 0
    recalled: int = 0
    beyond: int = 0  # prompts longer than the budget because no further block may leave
    as_sent: int = 0  # requests refused by the engine in our form, and sent in their client's
    plain: int = 0  # requests sent without hints, because the engine rejects them
    unscored: int = 0  # times that the similarity server did not answer

    def note(self, chat: ChatSession, left: int, back: int) -> None:
        """Count blocks that left a chat's prompt and that came back, in the chat too."""
        chat.evictions += left
        chat.recalls += back
        self.evicted += left
        self.recalled += back


_SIMILARITY, _RECENCY = 0.6, 0.4  # weights of both in a score; chosen
_HALF_LIFE: Final = 8.0  # turns after which recency has halved; chosen
_MOST_SAID: Final = 3  # messages that count as one statement of the user; chosen
_FLOORS: Final = {"system": 1.0, "user": 0.2, "assistant": 0.1, "tool": 0.0}
"""Least score of a block by its source. Chosen: what people write is short and means much."""


def scores(
    chat: ChatSession, blocks: Sequence[Block], about: Shares, attention: Shares, by: MemorySettings
) -> Shares:
    """Return each block's score from similarity, recency and attention, but not below its floor:
    float64 ``[blocks]``, 0 to 1.
    """
    age = np.array([chat.turn - block.turn for block in blocks], dtype=np.float64)
    worth = _SIMILARITY * about + _RECENCY * np.exp2(-age / _HALF_LIFE)
    worth = (1 - by.attention) * worth + by.attention * attention
    floors = [max(_FLOORS.get(block.source, 0.0), block.priority) for block in blocks]
    always = stays(chat, by)
    worth = np.maximum(worth, np.array(floors, dtype=np.float64))
    worth[[id(block) in always for block in blocks]] = 1.0
    return np.clip(worth, 0.0, 1.0)


def stays(chat: ChatSession, by: MemorySettings) -> set[int]:
    """Return the ``id`` of the blocks that never leave: the system's, the first, the newest, and
    pinned ones.

    While a turn is in progress, its user message stays, and the last ``tail`` blocks after it.
    """
    system = [block for block in chat.blocks if block.source == "system"]
    spoken = [block for block in chat.blocks if block.source != "system"]
    asked = _said_last(chat)
    pinned = [block for block in chat.blocks if block.pinned]
    newest = spoken[len(spoken) - by.tail :] if by.tail < len(spoken) else spoken
    return {id(block) for block in (*system, *spoken[: by.sinks], *asked, *newest, *pinned)}


def _said_last(chat: ChatSession) -> list[Block]:
    """The user's newest messages, ``_MOST_SAID`` at most: harnesses put a reminder behind one."""
    said: list[Block] = []
    for block in reversed(chat.blocks):
        if block.source == "user" and len(said) < _MOST_SAID:
            said.append(block)
        elif said and block.source != "system":
            break
    return said[::-1]


def evict(
    chat: ChatSession, about: Shares, attention: Shares, by: MemorySettings, until: int
) -> list[Block]:
    """Evict the lowest scores until the prompt takes ``until`` tokens; return the blocks."""
    worth = scores(chat, chat.blocks, about, attention, by)
    always = stays(chat, by)
    gone: list[Block] = []
    taken = chat.tokens
    for number in np.argsort(worth, kind="stable"):  # of equals, the oldest first
        if taken <= until:
            break
        block = chat.blocks[int(number)]
        if block.place is not None and id(block) not in always:
            block.place = None
            taken -= block.tokens
            gone.append(block)
    return gone


def recall(chat: ChatSession, about: Shares, by: MemorySettings, room: int) -> list[Block]:
    """Bring back the blocks that a message refers to, as far as there is room; return them."""
    if by.mode is not Mode.KV_RESTORE:
        return []
    back: list[int] = []
    taken = 0
    for number in np.argsort(-about, kind="stable").tolist():
        block = chat.blocks[number]
        if taken == by.top or about[number] < by.least_similarity:
            break
        if block.turn == chat.turn:
            continue  # it belongs to the present turn
        if block.place is not None:
            taken += by.resident_gate
        elif block.messages and block.tokens <= room:
            back.append(number)
            taken += 1
            room -= block.tokens
    # They go before the newest blocks: an engine splices next to text that it holds, and it does
    # not hold the end of its last answer. Blocks too short to splice go last, out of the way.
    found = [chat.blocks[number] for number in sorted(back)]
    long = [block for block in found if block.tokens >= by.shortest]
    newest = _newest(chat, by) if long else []
    for block in long:
        chat.enter(block)
    chat.move_behind(newest)
    for block in found:
        chat.enter(block)
    return found


def _newest(chat: ChatSession, by: MemorySettings) -> list[Block]:
    """Return the newest blocks of earlier turns, of ``settled`` tokens; none if too long."""
    first = [block for block in chat.blocks if block.source != "system"][: by.sinks]
    fixed = {id(block) for block in first}
    newest: list[Block] = []
    for block in reversed(chat.resident):
        if sum(each.tokens for each in newest) >= by.settled:
            break
        if block.turn != chat.turn and block.source != "system" and id(block) not in fixed:
            newest.append(block)
    moved = sum(each.tokens for each in newest)
    return newest[::-1] if moved <= by.most_moved else []


_ANSWER: Final = 8  # fraction of the budget reserved for an answer of unknown length; chosen
_MOST_ANSWER: Final = 2  # largest fraction reserved for one; the rest is the prompt's; chosen
_LINE: Final = 8
"""Largest fraction of a prompt's room for the line of names; chosen: the line says little."""

_log = logging.getLogger(__name__)


class PromptChooser:
    """Chooses the blocks that leave and come back; the caller must hold the chat's lock."""

    def __init__(
        self,
        settings: MemorySettings,
        similarity: Similarity,  # compares blocks with what users say
        attention: SampledAttention | None,  # reports which blocks the model attends to
        counts: MemoryCounts,  # the memory's; changed
        counter: TokenCounter,  # counts the tokens of the line that names what has left
    ) -> None:
        self._settings, self._counts, self._counter = settings, counts, counter
        self._similarity, self._attention = similarity, attention
        self._warned = False

    async def choose(
        self, chat: ChatSession, new: Sequence[Block], request: ChatRequest
    ) -> tuple[list[Block], str]:
        """Bring back the blocks that the user refers to, and let others leave until all fits.
        Returns the blocks that came back and stay, and the line that names those that left, if any.
        """
        by, room = self._settings, self._room(request)
        # A harness may put rules behind what the user says.
        last = next((block.source for block in reversed(new) if block.source != "system"), "")
        speaks = last == "user"
        found: list[Block] = []
        gone: list[Block] = []
        if chat.tokens > room or (speaks and chat.away):
            about = await self._about(chat)
            if speaks:
                always = stays(chat, by)
                kept = sum(block.tokens for block in chat.resident if id(block) in always)
                found = recall(chat, about, by, room - chat.fixed - kept)
                chat.move_behind(new)
            gone = await self._evict(chat, about, room)
        back = [block for block in found if block.place is not None]
        # What came back and left again at once did neither.
        self._counts.note(chat, len(gone) - (len(found) - len(back)), len(back))
        line = await self._line(chat, request, room)
        self._counts.beyond += chat.tokens > room
        return back, line

    async def relieve(self, chat: ChatSession) -> None:
        """Let blocks leave if the prompt is too long after an answer."""
        by = self._settings
        if chat.tokens > by.high * by.budget:
            gone = await self._evict(chat, await self._about(chat), int(by.low * by.budget))
            self._counts.note(chat, len(gone), 0)

    async def close(self) -> None:
        await self._similarity.close()

    def _room(self, request: ChatRequest) -> int:
        """Return the tokens of a prompt, without those reserved for its answer."""
        budget = self._settings.budget
        answer, most = request.answer or budget // _ANSWER, budget // _MOST_ANSWER
        if answer > most and not self._warned:
            self._warned = True
            _log.warning("an answer of %d tokens is asked for, and %d of the budget's %d are kept "
                         "for it: prompt and answer may be longer together",
                         answer, most, budget)  # fmt: skip
        return budget - min(answer, most)

    async def _line(self, chat: ChatSession, request: ChatRequest, room: int) -> str:
        """Return the line that names what has left, blocks leaving until it fits; or nothing."""
        chat.crumb = 0
        while self._settings.mode is Mode.BREADCRUMB:
            line = summary_line(chat, room // _LINE * CHARACTERS_PER_TOKEN)
            chat.crumb = await self._counter.more(request.model, chat.resident[-1], line)
            if not line or chat.tokens <= room:
                return line
            gone = await self._evict(chat, await self._about(chat), room)
            self._counts.note(chat, len(gone), 0)
            if not gone:
                chat.crumb = 0
                break
        return ""

    async def _evict(self, chat: ChatSession, about: Shares, until: int) -> list[Block]:
        if chat.tokens <= until:
            return []
        attention = np.zeros(len(chat.blocks))
        if self._attention is not None:
            attention = await self._attention.of(chat, stays(chat, self._settings))
        return evict(chat, about, attention, self._settings, until)

    async def _about(self, chat: ChatSession) -> Shares:
        """Return how much each block is about what the user said last; 0 if no server answers."""
        said = "\n".join(block.text for block in _said_last(chat))
        try:
            return await relevance_of(self._similarity, said, chat.blocks)
        except SimilarityError as error:
            self._counts.unscored += 1
            _log.warning("similarity could not be asked for: %s", error)
            return np.zeros(len(chat.blocks))
