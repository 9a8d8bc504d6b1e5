"""``ChatSession``: a chat's blocks, as its client knows them, and which are in the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .chat_blocks import LONGEST_NAME, Block, Message, as_kept, digest_of, name_of, source_of


class ChatSession(msgspec.Struct, weakref=True):
    """One chat.

    Attributes:
        key: By which requests find it: whose it is, and its name.
        name: As its client knows it.
        caller: Digest of who may read it.
        blocks: As its client knows them, the oldest first.
        turn: How many requests it had.
        places: How many places in the prompt were given so far.
        fixed: Tokens of a prompt that belong to no block: the tools' descriptions.
        evictions, recalls: Blocks that left the prompt, and that came back, so far.
    """

    key: str
    name: str
    caller: str
    blocks: list[Block] = []
    turn: int = 0
    places: int = 0
    fixed: int = 0
    evictions: int = 0
    recalls: int = 0

    @property
    def resident(self) -> list[Block]:
        """Blocks that are in the prompt, in its order."""
        there = [block for block in self.blocks if block.place is not None]
        return sorted(there, key=lambda block: block.place or 0)

    @property
    def away(self) -> list[Block]:
        """Blocks that have left the prompt, the oldest first."""
        return [block for block in self.blocks if block.place is None]

    @property
    def tokens(self) -> int:
        """What the prompt takes, as far as its blocks are counted."""
        return self.fixed + sum(block.tokens for block in self.resident)

    def follow(self, messages: Sequence[Message], appends: bool, strip_think: bool) -> list[Block]:
        """Take over what a client sent; returns the blocks that are new, or grew.

        A client that repeats its chat may have changed it: what it no longer says is forgotten.

        Args:
            appends: Whether ``messages`` continue the chat instead of repeating it.
        """
        self.turn += 1
        digests = [digest_of(each) for each in messages]
        known = [digest for block in self.blocks for digest in block.digests]
        same = _common(digests, known)
        if appends:
            while same and source_of(messages[same - 1]) != "system":
                same -= 1  # its rules may be repeated; whatever else is said again is said twice
        else:
            self._cut(same)
        return self.add([as_kept(each, strip_think) for each in messages[same:]])

    def add(self, messages: Sequence[Message]) -> list[Block]:
        """Append messages; returns the blocks that are new, or grew."""
        named = Counter(block.name.rpartition("#")[0] for block in self.blocks)
        changed: list[Block] = []
        for message in messages:
            last = self.blocks[-1] if self.blocks else None
            if message.get("role") == "tool" and last is not None and last.calls:
                last.messages.append(message)
                last.digests.append(digest_of(message))
                last.tokens = 0
                self.enter(last)
            else:
                last = Block(name_of(message, named), source_of(message), [message],
                             [digest_of(message)], self.turn, None)  # fmt: skip
                self.blocks.append(last)
                self.enter(last)
            if all(each is not last for each in changed):
                changed.append(last)
        return changed

    def enter(self, block: Block) -> None:
        """Let a block stand behind all others in the prompt, unless it is there already."""
        if block.place is None:
            self.move_behind([block])
        block.turn = self.turn

    def move_behind(self, blocks: Sequence[Block]) -> None:
        """Let blocks of the prompt stand behind all others, in this order."""
        for block in blocks:
            block.place, self.places = self.places, self.places + 1

    def leave(self, block: Block) -> None:
        """Take a block out of the prompt."""
        block.place = None
        self.evictions += 1

    def prompt(self) -> list[Message]:
        """The messages that are in the prompt."""
        return [message for block in self.resident for message in block.messages]

    def tag(self, tags: Mapping[int, dict[str, Any]], sent: int) -> None:
        """Take over what a client says of the messages that it sent.

        Args:
            tags: By their numbers among those.
            sent: How many those were: the chat's last.
        """
        number = sent - sum(len(block.digests) for block in self.blocks)
        for block in self.blocks:
            for _ in block.digests:
                block.tags |= tags.get(number, {})
                number += 1
            if isinstance(name := block.tags.get("identity"), str) and name:
                block.name = name[:LONGEST_NAME]

    def _cut(self, messages: int) -> None:
        """Forget all but the first ``messages`` messages."""
        kept: list[Block] = []
        for block in self.blocks:
            if messages <= 0:
                break
            if len(block.digests) > messages:
                del block.messages[messages:], block.digests[messages:]
                block.tokens = 0
            messages -= len(block.digests)
            kept.append(block)
        self.blocks = kept


def _common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number
    return min(len(first), len(second))
