"""``PromptChooser``: which blocks of a chat are in its prompt, turn by turn."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import orjson

from ..fleet.callers import Body, Call
from ..fleet.prompts import CHARACTERS_PER_TOKEN
from ..fleet.upstream import BrokenAnswerError, NothingAnsweredError, Upstream
from .attention import Attention, Shares, Similarity, tells_of
from .chat import MOST_TOKENS, THOUGHTS, Block, ChatSession, Message
from .requests import ClientWords
from .settings import MemorySettings, Mode

# The line that names what has left a prompt.

_MOST: Final = 32  # names in a line; chosen: it reminds, and is no list
_NAME: Final = re.compile(r"((?:file|tool):)?(.*?)(#\d+)?", re.DOTALL)  # ours: kind, and number
_ODD: Final = re.compile(r"[^\w./-]")


def breadcrumb(chat: ChatSession, characters: int) -> str:
    """One line that names what has left, the newest last; empty if nothing has.

    Args:
        characters: Of a line that names blocks; where none fits, it says how many have left.
    """
    names = [block.name for block in chat.away]
    if not names:
        return ""
    lines = (_line(names, shown) for shown in range(min(len(names), _MOST), 0, -1))
    return next((line for line in lines if len(line) <= characters), _line(names, 0))


def with_line(messages: Sequence[Message], line: str) -> list[Message]:
    """Messages with a line before what the last one says; the same, if that is no text."""
    said = messages[-1].get("content") if line else None
    if not isinstance(said, str):
        return list(messages)
    return [*messages[:-1], messages[-1] | {"content": f"{line}\n\n{said}"}]


def _line(names: Sequence[str], shown: int) -> str:
    """The line that names the newest blocks, and counts the older ones."""
    older = len(names) - shown
    parts = [f"{older} older"] if older else []
    return f"[left out: {', '.join([*parts, *map(_plain, names[older:])])}]"


def _plain(name: str) -> str:
    """A block's name without what could end the line, or speak for somebody: most of a name is a
    tool's or a model's words, and the line stands in what the user says."""
    found = _NAME.fullmatch(name)
    assert found is not None, "it takes any text"
    kind, said, number = found.groups()
    return f"{kind or ''}{_ODD.sub(_escaped, said)}{number or ''}"


def _escaped(odd: re.Match[str]) -> str:
    """As in a URL."""
    return "".join(f"%{byte:02X}" for byte in odd[0].encode(errors="replace"))


# ``TokenCounter``: how many tokens blocks take, by the engine's own tokenizer where it has one.

_WRAPPING: Final = 8  # tokens of a message's borders, where nobody counts; chosen
_AT_ONCE: Final = 8  # questions; chosen
_MOST_S: Final = 5.0  # of one count; chosen: a client waits for it, and an engine may hang
_WITHOUT_S: Final = 60.0  # until one that had none, or hung, is asked again; chosen: it may change
_OK, _NO_SUCH_PATH = 200, 404


class TokenCounter:
    """Asks ``/tokenize``, as vLLM has it; without one, four characters are a token.

    Args:
        upstream: The engine.
        most_s: Seconds of one count; what is not counted by then is estimated.
    """

    def __init__(self, upstream: Upstream, most_s: float = _MOST_S) -> None:
        self._upstream, self._most_s = upstream, most_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._asks_from = 0.0

    async def count(self, model: object, blocks: Sequence[Block]) -> None:
        """Count the blocks that are not counted yet."""
        new = [block for block in blocks if not block.tokens and block.messages]
        try:
            async with asyncio.timeout(self._most_s):
                await asyncio.gather(*(self._count(model, block) for block in new))
        except TimeoutError:
            self._asks_from = time.monotonic() + _WITHOUT_S
        for block in new:
            block.tokens = block.tokens or about(block)

    async def more(self, model: object, block: Block, line: str) -> int:
        """How many tokens a line adds to a counted block, before what its last message says."""
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
        headers = [(b"content-type", b"application/json")]
        try:
            reply = await self._upstream.begin(Call("POST", "/tokenize", headers, Body(body)))
            answer = b"".join([chunk async for chunk in reply.chunks()])
            if reply.status == _NO_SUCH_PATH:
                self._asks_from = time.monotonic() + _WITHOUT_S
            read: Any = orjson.loads(answer) if reply.status == _OK else {}
        except (NothingAnsweredError, BrokenAnswerError, orjson.JSONDecodeError):
            return 0
        count = read.get("count") if isinstance(read, dict) else None
        return count if isinstance(count, int) and 0 < count < MOST_TOKENS else 0


def about(block: Block) -> int:
    """What a block takes by the rule of thumb."""
    characters = len(block.text)
    for message in block.messages:
        characters += sum(len(str(message.get(field) or "")) for field in THOUGHTS)
    return -(-characters // CHARACTERS_PER_TOKEN) + _WRAPPING * len(block.messages)


# ``MemoryCounts``: what happened in a memory so far.


@dataclass
class MemoryCounts:
    """What happened so far.

    Attributes:
        turns: Requests of chats.
        evicted, recalled: Blocks that left prompts, and that came back, as their chats count them.
        beyond: Prompts that were longer than the budget, for want of blocks that may leave.
        as_sent: Requests that the engine refused as we put them: it got what their client meant.
        plain: Requests that it got without hints, since it takes none.
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
    plain: int = 0
    unscored: int = 0

    def note(self, chat: ChatSession, left: int, back: int) -> None:
        """Count blocks that left a chat's prompt, and that came back, here and there."""
        chat.evictions += left
        chat.recalls += back
        self.evicted += left
        self.recalled += back


# What blocks are worth: scores from 0 to 1, and which of them always stay.


def scores(
    chat: ChatSession, blocks: Sequence[Block], about: Shares, looks: Shares, by: MemorySettings
) -> Shares:
    """float64 ``[blocks]`` from 0 to 1: similarity, recency and attention, and not below a block's
    floor.

    Args:
        about: How much each block is about what the user said last, from 0 to 1.
        looks: How much the model looks at each, from 0 to 1.
    """
    age = np.array([chat.turn - block.turn for block in blocks], dtype=np.float64)
    worth = by.similarity * about + by.recency * np.exp2(-age / by.half_life)
    worth = (1 - by.attention) * worth + by.attention * looks
    floors = [max(by.floors.get(block.source, 0.0), block.priority) for block in blocks]
    always = stays(chat, by)
    worth = np.maximum(worth, np.array(floors, dtype=np.float64))
    worth[[id(block) in always for block in blocks]] = 1.0
    return np.clip(worth, 0.0, 1.0)


def stays(chat: ChatSession, by: MemorySettings) -> set[int]:
    """``id`` of the blocks that never leave: the system's, the first, the newest, what is pinned.

    What stands behind the newest message of the user belongs to a turn under way, of which the
    last ``tail`` blocks stay.
    """
    system = [block for block in chat.blocks if block.source == "system"]
    spoken = [block for block in chat.blocks if block.source != "system"]
    asked = [block for block in spoken if block.source == "user"][-1:]
    pinned = [block for block in chat.blocks if block.pinned]
    newest = spoken[len(spoken) - by.tail :] if by.tail < len(spoken) else spoken
    return {id(block) for block in (*system, *spoken[: by.sinks], *asked, *newest, *pinned)}


# Which blocks leave a prompt, and which come back.


def evict(
    chat: ChatSession, about: Shares, looks: Shares, by: MemorySettings, until: int
) -> list[Block]:
    """Let the blocks that are worth least leave, until the prompt takes ``until`` tokens at most.

    Args:
        about, looks: float64 ``[chat.blocks]``: see ``scores``.
    """
    worth = scores(chat, chat.blocks, about, looks, by)
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
    """Let the blocks come back that a message is about, as long as there is room for them.

    They stand before the newest of the others: an engine splices what adjoins text that it holds,
    and does not hold the end of what it answered last. Those that are too short to be spliced stand
    behind, where they keep nothing else from being spliced.

    Args:
        about: float64 ``[chat.blocks]``: how much each is about the user's message.
        room: Tokens.
    """
    if by.mode is not Mode.KV_RESTORE:
        return []
    back: list[int] = []
    taken = 0
    for number in np.argsort(-about, kind="stable").tolist():
        block = chat.blocks[number]
        if taken == by.top or about[number] < by.least_similarity:
            break
        if block.turn == chat.turn:
            continue  # it is what was just said
        if block.place is not None:
            taken += by.resident_gate
        elif block.messages and block.tokens <= room:
            back.append(number)
            taken += 1
            room -= block.tokens
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
    """The newest blocks of earlier turns that have ``settled`` tokens together, in their order.

    The system's and the chat's first are not among them; none are, if they are too long.
    """
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


_ANSWER: Final = 8  # the part of the budget that is kept for an answer of unknown length; chosen
_MOST_ANSWER: Final = 2  # the part that is kept for one at most: the rest is the prompt's; chosen
_LINE: Final = 8
"""The part of a prompt's room that the line of names takes at most; chosen: it tells little."""

_log = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """What a prompt has beside the blocks that were in it.

    Attributes:
        back: What came back, and stays.
        line: Names what has left; empty: no line does.
    """

    back: list[Block]
    line: str


class PromptChooser:
    """Lets blocks leave and come back; whoever holds a chat's lock may ask it.

    Args:
        settings: What the operator chose.
        similarity: Compares blocks with what users say.
        attention: Tells which blocks the model looks at.
        counts: Of the memory; changed.
        counter: Counts the line that names what has left.
    """

    def __init__(
        self,
        settings: MemorySettings,
        similarity: Similarity,
        attention: Attention,
        counts: MemoryCounts,
        counter: TokenCounter,
    ) -> None:
        self._settings, self._counts, self._counter = settings, counts, counter
        self._similarity, self._attention = similarity, attention
        self._warned = False

    async def choose(self, chat: ChatSession, new: Sequence[Block], words: ClientWords) -> Chosen:
        """Let blocks come back that the user speaks of, and others leave until all fits.

        Args:
            new: Blocks that the request brings.
        """
        by, speaks, room = self._settings, bool(new) and new[-1].source == "user", self._room(words)
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
        line = await self._line(chat, words, room)
        self._counts.beyond += chat.tokens > room
        return Chosen(back, line)

    async def relieve(self, chat: ChatSession) -> None:
        """Let blocks leave if an answer left too many in the prompt."""
        by = self._settings
        if chat.tokens > by.high * by.budget:
            gone = await self._evict(chat, await self._about(chat), int(by.low * by.budget))
            self._counts.note(chat, len(gone), 0)

    async def close(self) -> None:
        """Give up connections."""
        await self._similarity.close()

    def _room(self, words: ClientWords) -> int:
        """Tokens of a prompt, beside those that are kept for its answer."""
        budget = self._settings.budget
        answer, most = words.answer or budget // _ANSWER, budget // _MOST_ANSWER
        if answer > most and not self._warned:
            self._warned = True
            _log.warning("an answer of %d tokens is asked for, and %d of the budget's %d are kept "
                         "for it: prompt and answer may be longer together",
                         answer, most, budget)  # fmt: skip
        return budget - min(answer, most)

    async def _line(self, chat: ChatSession, words: ClientWords, room: int) -> str:
        """The line that names what has left; others leave until it fits, and it is left out where
        it does not."""
        chat.crumb = 0
        while self._settings.mode is Mode.BREADCRUMB:
            line = breadcrumb(chat, room // _LINE * CHARACTERS_PER_TOKEN)
            chat.crumb = await self._counter.more(words.model, chat.resident[-1], line)
            if not line or chat.tokens <= room:
                return line
            gone = await self._evict(chat, await self._about(chat), room)
            self._counts.note(chat, len(gone), 0)
            if not gone:
                chat.crumb = 0
                break
        return ""

    async def _evict(self, chat: ChatSession, about: Shares, until: int) -> list[Block]:
        """Let blocks leave until a prompt takes no more tokens than these; which left."""
        if chat.tokens <= until:
            return []
        looks = await self._attention.of(chat, stays(chat, self._settings))
        return evict(chat, about, looks, self._settings, until)

    async def _about(self, chat: ChatSession) -> Shares:
        """How much each block is about what the user said last; 0 where nobody can tell."""
        said = next((each.text for each in reversed(chat.blocks) if each.source == "user"), "")
        try:
            return await tells_of(self._similarity, said, chat.blocks)
        except httpx.HTTPError as error:
            self._counts.unscored += 1
            _log.warning("similarity could not be asked for: %s", type(error).__name__)
            return np.zeros(len(chat.blocks))
