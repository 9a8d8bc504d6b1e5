"""``PromptChooser``: which blocks of a chat are in its prompt, turn by turn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import httpx
import numpy as np

from ..fleet.turns.prompt_chains import CHARACTERS_PER_TOKEN
from .chats.aboutness import Shares, Similarity, tells_of
from .chats.block_scores import stays
from .chats.breadcrumbs import breadcrumb
from .chats.chat_blocks import Block
from .chats.chat_session import ChatSession
from .chats.looked_at import Attention
from .chats.memory_settings import MemorySettings, Mode
from .chats.working_set import evict, recall
from .client_words import ClientWords
from .memory_counts import MemoryCounts
from .token_counter import TokenCounter

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
