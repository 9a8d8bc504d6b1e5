"""``Block``: messages that leave a prompt, and come back to it, together.

A tool's results stay with the call that they answer, since engines refuse one without the other.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import orjson

Message = dict[str, Any]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
MOST_TOKENS: Final = 1 << 32  # of one prompt; chosen: an engine that says more says nonsense

_SOURCES: Final = {"system": "system", "developer": "system", "tool": "tool", "function": "tool"}
_THOUGHT: Final = re.compile(r"\A(?:\s*<think>)?(?:(?!<think>).)*?</think>\s*", re.DOTALL)
_THOUGHTS_END: Final = "</think>"
THOUGHTS: Final = ("reasoning_content", "reasoning")
"""Fields of a message that have an assistant's thoughts."""


class Block(msgspec.Struct):
    """One or more messages of a chat.

    Attributes:
        name: By which people know it; unique in its chat.
        source: ``system``, ``user``, ``assistant`` or ``tool``.
        messages: As engines get them; empty: forgotten, for want of room.
        digests: Of each message, as clients repeat it.
        tokens: What it takes of a prompt; 0: not counted yet.
        turn: In which it was said, or last came back.
        place: Where it stands in the prompt, behind all lower ones; None: it has left.
        tags: What its client said of it, in the words of a message's hints.
    """

    name: str
    source: str
    messages: list[Message]
    digests: list[bytes]
    turn: Count
    place: Count | None
    tokens: Count = 0
    tags: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """What its messages say, with the names and arguments of called tools."""
        return "\n".join(part for each in self.messages for part in _texts(each))

    @property
    def identity(self) -> str:
        """By which an engine knows it: as its client calls it, or else its name."""
        said = self.tags.get("identity")
        return said if isinstance(said, str) and said else self.name

    @property
    def priority(self) -> float:
        """Its least score, from 0 to 1."""
        said = self.tags.get("priority")
        return min(max(said / 100, 0.0), 1.0) if isinstance(said, int | float) else 0.0

    @property
    def pinned(self) -> bool:
        """Whether it always stays."""
        return bool(self.tags.get("pinned"))

    @property
    def calls(self) -> bool:
        """Whether tools' results belong to it."""
        return bool(self.messages and self.messages[0].get("tool_calls"))


def is_message(message: object) -> bool:
    """Whether a message has the form that blocks are made of; the engine judges any other."""
    return isinstance(message, dict) and isinstance(message.get("tool_calls") or [], list)


def source_of(message: Message) -> str:
    """Which kind of block a message begins."""
    role = str(message.get("role"))
    if role == "assistant":
        return "tool" if message.get("tool_calls") else "assistant"
    return _SOURCES.get(role, "user")


def digest_of(message: Message) -> bytes:
    """Digest of what clients repeat of a message: no thoughts, no space at its ends."""
    calls = [
        [call.get("id"), *called(call)]
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict)
    ]
    content = message.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if isinstance(content, str):
        is_answer = message.get("role") == "assistant"
        content = (_said_of(content) if is_answer else content).strip()
    said = [message.get("role"), content or "", calls, message.get("tool_call_id")]
    return hashlib.blake2b(orjson.dumps(said), digest_size=16).digest()


def without_thoughts(message: Message) -> Message:
    """A message as later turns have it; the very same, if it has none of the assistant's."""
    if message.get("role") != "assistant":
        return message
    content = message.get("content")
    thinks = isinstance(content, str) and _THOUGHTS_END in content
    if not thinks and not any(field in message for field in THOUGHTS):
        return message
    kept = {field: value for field, value in message.items() if field not in THOUGHTS}
    return kept | {"content": _said_of(content)} if isinstance(content, str) else kept


def called(call: Mapping[str, Any]) -> Sequence[str]:
    """The name of a called tool, and its arguments."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return str(function.get("name") or ""), str(function.get("arguments") or "")


def _said_of(text: str) -> str:
    """An answer without the thoughts before it; templates may have opened them."""
    return _THOUGHT.sub("", text, count=1) if _THOUGHTS_END in text else text


def _texts(message: Message) -> Iterable[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if _is_text(part))
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict):
            yield " ".join(called(call))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


# ``BlockNames``: names for a chat's blocks, by which people tell one from another.

LONGEST_NAME: Final = 128  # characters, before a number
_FILES: Final = ("path", "file_path", "filename", "file")  # of a tool's arguments: what it is about


class BlockNames:
    """Gives names that no other block of a chat has.

    Args:
        taken: Names of its blocks.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._highest: dict[str, int] = {}
        for name in self._taken:
            self._note(name)

    def of(self, message: Message) -> str:
        """A name for the block that a message begins: its kind, and a number from 0."""
        source = source_of(message)
        return self._numbered(_about(message) if source == "tool" else source)

    def given(self, name: str) -> str:
        """The name that a client gives, with a number behind it where another block has it."""
        name = name[:LONGEST_NAME]
        if name in self._taken:
            return self._numbered(name)
        self._take(name)
        return name

    def _numbered(self, stem: str) -> str:
        """A stem with the number behind the highest that is taken."""
        stem = stem[:LONGEST_NAME]
        name = f"{stem}#{self._highest.get(stem, -1) + 1}"
        self._take(name)
        return name

    def _take(self, name: str) -> None:
        self._taken.add(name)
        self._note(name)

    def _note(self, name: str) -> None:
        stem, _, number = name.rpartition("#")
        if number.isascii() and number.isdigit():
            self._highest[stem] = max(self._highest.get(stem, -1), int(number))


def _about(message: Message) -> str:
    """``file:PATH`` where the first called tool is given a file, and else ``tool:NAME``."""
    calls: Sequence[object] = message.get("tool_calls") or [{}]
    name, arguments = called(calls[0] if isinstance(calls[0], dict) else {})
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        given = None
    for field in _FILES if isinstance(given, dict) else ():
        if isinstance(path := given.get(field), str) and path:
            return f"file:{path}"
    return f"tool:{name or message.get('name') or 'unnamed'}"


# ``ChatSession``: a chat's blocks, as its client knows them, and which are in the prompt.


class ChatSession(msgspec.Struct, weakref=True):
    """One chat.

    Attributes:
        key: By which requests find it: whose it is, and its name.
        name: As its client knows it.
        caller, salt: Digests of the keys and the salt that it came with: who else names both may
            read it. Empty: it has no salt.
        named: Whether somebody gave it its name.
        blocks: As its client knows them, the oldest first.
        turn: In how many requests its user spoke.
        requests: How many it had.
        places: How many places in the prompt were given so far.
        fixed: Tokens of a prompt that belong to no block: the tools' descriptions.
        crumb: Tokens of the line in the prompt that names what has left.
        evictions, recalls: Blocks that left the prompt, and that came back, so far.
        gone_on: Orders the versions of a chat by when a client went on with each; 0: never.
        other: Another version of the chat, as ``version_for`` keeps it, which has none itself.
    """

    key: str
    name: str
    caller: str
    salt: str = ""
    named: bool = True
    blocks: list[Block] = []
    turn: Count = 0
    requests: Count = 0
    places: Count = 0
    fixed: Count = 0
    evictions: Count = 0
    recalls: Count = 0
    crumb: Count = 0
    gone_on: Count = 0
    other: ChatSession | None = None

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
        there = (block.tokens for block in self.blocks if block.place is not None)
        return self.fixed + self.crumb + sum(there)

    @property
    def versions(self) -> list[ChatSession]:
        """It, and its other version, if there is one."""
        return [self] if self.other is None else [self, self.other]

    def version_for(self, messages: Sequence[Message]) -> tuple[ChatSession, ChatSession]:
        """Which version of the chat goes on with what a client says, and repeats.

        Titles, tags and the like are asked for under a chat's name, and must not cut it: what
        shares nothing with the chat is another version. So is what keeps half of it or less, which
        is the chat at once, as an edit is, and leaves the version before it as the other. Whichever
        the client goes on with is the chat; beside the newest version, the one stays that a client
        went on with last.

        Returns:
            The chat from now on, and the version that ``messages`` belong to: the same, or its
            other.
        """
        digests = [digest_of(each) for each in messages]
        fits = [_Fit(each, messages, digests) for each in self.versions]
        best = max(fits, key=lambda fit: (fit.common, fit.known))
        version = best.version
        if best.goes_on or (version is self and best.is_edited):
            version.gone_on = 1 + max(each.gone_on for each in self.versions)
            version.other = next((each for each in self.versions if each is not version), None)
            if version is not self:
                self.other = None
            return version, version
        last = max(self.versions, key=lambda each: each.gone_on)
        new = version._copy() if best.common else ChatSession(
            self.key, self.name, self.caller, self.salt, self.named
        )  # fmt: skip
        self.other = last.other = None
        if best.common and version is self:
            new.other = last
            return new, new
        last.other = new
        return last, new

    def follow(
        self, messages: Sequence[Message], appends: bool, tags: Mapping[int, dict[str, Any]]
    ) -> list[Block]:
        """Take over what a client sent; returns the blocks that are new, or grew.

        The system messages that it begins with replace those that the chat begins with. A client
        that repeats its chat may have changed it: what it no longer says is forgotten.

        Args:
            appends: Whether ``messages`` continue the chat instead of repeating it.
            tags: What the client says of messages, by their numbers.
        """
        self.requests += 1
        digests = [digest_of(each) for each in messages]
        same = self._leading(messages, digests)
        if not appends:
            known = [digest for block in self.blocks for digest in block.digests]
            same += _common(digests[same:], known[same:])
            self._cut(same)
        new = messages[same:]
        self.turn += any(source_of(each) == "user" for each in new)
        changed = self.add(new)
        self._tag(tags, same, len(messages))
        return changed

    def add(self, messages: Sequence[Message]) -> list[Block]:
        """Append messages; returns the blocks that are new, or grew."""
        names = BlockNames(block.name for block in self.blocks)
        changed: list[Block] = []
        for message in messages:
            last = self.blocks[-1] if self.blocks else None
            if message.get("role") == "tool" and last is not None and last.calls:
                last.messages.append(message)
                last.digests.append(digest_of(message))
                last.tokens = 0
            else:
                last = Block(names.of(message), source_of(message), [message],
                             [digest_of(message)], self.turn, None)  # fmt: skip
                self.blocks.append(last)
            self.enter(last)
            if not changed or changed[-1] is not last:
                changed.append(last)
        return changed

    def drop_thoughts(self, ended: bool) -> None:
        """Forget what the assistant thought in earlier turns.

        Args:
            ended: Whether the turn under way is over too.
        """
        spoke = [number for number, block in enumerate(self.blocks) if block.source == "user"]
        for block in self.blocks if ended else self.blocks[: spoke[-1] if spoke else 0]:
            kept = [without_thoughts(each) for each in block.messages]
            if kept != block.messages:
                block.messages, block.tokens = kept, 0

    def enter(self, block: Block) -> None:
        """Let a block stand behind all others in the prompt, unless it is there already."""
        if block.place is None:
            self.move_behind([block])
        block.turn = self.turn

    def move_behind(self, blocks: Sequence[Block]) -> None:
        """Let blocks of the prompt stand behind all others, in this order."""
        for block in blocks:
            block.place, self.places = self.places, self.places + 1

    def _copy(self) -> ChatSession:
        """A version of its own, which nobody went on with yet."""
        blocks = [
            msgspec.structs.replace(each, messages=[*each.messages], digests=[*each.digests],
                                    tags={**each.tags})
            for each in self.blocks
        ]  # fmt: skip
        return msgspec.structs.replace(self, blocks=blocks, gone_on=0, other=None)

    def systems(self, messages: Sequence[Message]) -> int:
        """With how many system messages both the chat and ``messages`` begin."""
        number = 0
        for block, message in zip(self.blocks, messages, strict=False):
            if {block.source, source_of(message)} != {"system"}:
                break
            number += 1
        return number

    def _leading(self, messages: Sequence[Message], digests: Sequence[bytes]) -> int:
        """Replace the system messages that the chat begins with by those that ``messages`` begin
        with; how many those are."""
        number = self.systems(messages)
        for block, message, digest in zip(self.blocks[:number], messages, digests, strict=False):
            if block.digests != [digest]:
                block.messages, block.digests, block.tokens = [message], [digest], 0
        return number

    def _tag(self, tags: Mapping[int, dict[str, Any]], same: int, sent: int) -> None:
        """Take over what a client says of the ``sent`` messages that it sent: the first ``same`` of
        them are the chat's first, the others its last."""
        of = [block for block in self.blocks for _ in block.digests]
        names = BlockNames(block.name for block in self.blocks) if tags else BlockNames(())
        for number, said in tags.items():
            block = of[number if number < same else number - sent]
            before = block.tags.get("identity")
            block.tags |= said
            name = block.tags.get("identity")
            if isinstance(name, str) and name not in ("", before, block.name):
                block.name = names.given(name)

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


class _Fit:
    """How a client's messages fit a version of its chat, apart from the systems' at the beginning.

    Attributes:
        known: Messages that the version has.
        common: How many of its first messages are repeated.
        goes_on: Whether all are, or all but a last answer, which clients may shorten.
        is_edited: Whether more than half are, wherever they stand.
    """

    def __init__(
        self, version: ChatSession, messages: Sequence[Message], digests: Sequence[bytes]
    ) -> None:
        self.version, start = version, version.systems(messages)
        known = [digest for block in version.blocks for digest in block.digests][start:]
        said = digests[start:]
        self.known, self.common = len(known), _common(said, known)
        left = self.known - self.common
        self.goes_on = not left or (left == 1 and 0 < self.common < len(said) - 1)
        self.is_edited = 2 * (Counter(said) & Counter(known)).total() > self.known


def _common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number
    return min(len(first), len(second))
