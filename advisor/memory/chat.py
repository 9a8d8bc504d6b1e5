"""``ChatSession`` and ``Block``: messages that leave a prompt, and come back, together."""

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
MOST_TOKENS: Final = 1 << 32  # of one prompt; chosen: a larger number from an engine is an error

_SOURCES: Final = {"system": "system", "developer": "system", "tool": "tool", "function": "tool"}
_THOUGHT: Final = re.compile(r"\A(?:\s*<think>)?(?:(?!<think>).)*?</think>\s*", re.DOTALL)
_THOUGHTS_END: Final = "</think>"
THOUGHTS: Final = ("reasoning_content", "reasoning")
"""Fields of a message that hold an assistant's reasoning."""


class Block(msgspec.Struct):
    """Messages of a chat that stay together: engines require a tool's results with their call."""

    name: str  # unique name within the chat
    source: str  # ``system``, ``user``, ``assistant`` or ``tool``
    messages: list[Message]  # as sent to engines; empty if dropped to save memory
    digests: list[bytes]  # one per message, of the parts that clients repeat
    turn: Count  # turn in which it was said, or last came back
    place: Count | None  # order in the prompt, ascending; None if it has left
    tokens: Count = 0  # size in a prompt; 0 if not counted yet
    tags: dict[str, Any] = {}  # the client's hints about it

    @property
    def text(self) -> str:
        """The messages' text, with the names and arguments of called tools."""
        return "\n".join(part for each in self.messages for part in _texts(each))

    @property
    def identity(self) -> str:
        """The name by which an engine knows it: the client's, or else this proxy's."""
        said = self.tags.get("identity")
        return said if isinstance(said, str) and said else self.name

    @property
    def priority(self) -> float:
        """The least score that its client requests, from 0 to 1."""
        said = self.tags.get("priority")
        return min(max(said / 100, 0.0), 1.0) if isinstance(said, int | float) else 0.0

    @property
    def pinned(self) -> bool:
        """Whether its client requests that it always stays."""
        return bool(self.tags.get("pinned"))

    @property
    def calls(self) -> bool:
        return bool(self.messages and self.messages[0].get("tool_calls"))


def is_message(message: object) -> bool:
    """Return whether a message has the form that blocks need; the engine judges any other."""
    return isinstance(message, dict) and isinstance(message.get("tool_calls") or [], list)


def source_of(message: Message) -> str:
    role = str(message.get("role"))
    if role == "assistant":
        return "tool" if message.get("tool_calls") else "assistant"
    return _SOURCES.get(role, "user")


def digest_of(message: Message) -> bytes:
    """Digest what clients send back unchanged: no reasoning, no white space at a text's ends."""
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
    """Return a message without the assistant's thoughts; the same object if it has none."""
    if message.get("role") != "assistant":
        return message
    content = message.get("content")
    thinks = isinstance(content, str) and _THOUGHTS_END in content
    if not thinks and not any(field in message for field in THOUGHTS):
        return message
    kept = {field: value for field, value in message.items() if field not in THOUGHTS}
    return kept | {"content": _said_of(content)} if isinstance(content, str) else kept


def called(call: Mapping[str, Any]) -> Sequence[str]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return str(function.get("name") or ""), str(function.get("arguments") or "")


def _said_of(text: str) -> str:
    """Return an answer without the thoughts before it, whose opening tag may be the template's."""
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


LONGEST_NAME: Final = 128  # characters, before a number
_FILES: Final = ("path", "file_path", "filename", "file")  # arguments of a tool that name its file


class BlockNames:
    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._highest: dict[str, int] = {}
        for name in self._taken:
            self._note(name)

    def of(self, message: Message) -> str:
        """Return a name for the block that starts with a message: its kind, and a number from 0."""
        source = source_of(message)
        return self._numbered(_about(message) if source == "tool" else source)

    def given(self, name: str) -> str:
        """Return a client's name for a block, with a number after it if it is taken."""
        name = name[:LONGEST_NAME]
        if name in self._taken:
            return self._numbered(name)
        self._take(name)
        return name

    def _numbered(self, stem: str) -> str:
        """Return ``stem`` with the number after the highest that is taken."""
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
    """Return ``file:PATH`` if the first called tool is given a file, else ``tool:NAME``."""
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


class ChatSession(msgspec.Struct, weakref=True):
    """A chat: its blocks, and which of them are in the prompt."""

    key: str  # identifies the chat to requests: its owner, and its name
    name: str  # the client's name for it
    # ``caller``, ``salt``: digests of its API keys and cache salt; a caller with both may read it.
    # An empty salt stands for none.
    caller: str
    salt: str = ""
    named: bool = True  # whether the client named it
    blocks: list[Block] = []  # in the client's order, oldest first
    turn: Count = 0  # number of requests in which the user spoke
    requests: Count = 0  # number of requests
    places: Count = 0  # next free position in the prompt
    fixed: Count = 0  # tokens of a prompt outside of blocks, such as tools' descriptions
    # ``evictions``, ``recalls``: how many blocks have left the prompt, and have come back.
    evictions: Count = 0
    recalls: Count = 0
    crumb: Count = 0  # tokens of the line in the prompt that names the blocks that left
    # Another version of the chat, see ``version_for``, with the next one.
    other: ChatSession | None = None

    @property
    def resident(self) -> list[Block]:
        """Blocks in the prompt, in its order."""
        there = [block for block in self.blocks if block.place is not None]
        return sorted(there, key=lambda block: block.place or 0)

    @property
    def away(self) -> list[Block]:
        """Blocks that have left the prompt, oldest first."""
        return [block for block in self.blocks if block.place is None]

    @property
    def tokens(self) -> int:
        """Size of the prompt, as far as its blocks are counted."""
        there = (block.tokens for block in self.blocks if block.place is not None)
        return self.fixed + self.crumb + sum(there)

    @property
    def versions(self) -> list[ChatSession]:
        return [self] if self.other is None else [self, *self.other.versions]

    def version_for(self, messages: Sequence[Message]) -> tuple[ChatSession, ChatSession]:
        """Choose the version of the chat that a client's messages continue.

        Clients also ask for titles and tags under a chat's name, which must not truncate it. So
        messages that share nothing with the chat get a version of their own. Messages that keep
        half of it or less from the first one on, as after an edit, become the chat at once, and the
        previous version is kept as the other one. A version that the client continues becomes the
        chat. Besides the newest version and the chat, the longest of the others is kept: it may be
        the one that the client continues.

        Returns:
            The chat from now on, and the version that ``messages`` belong to: the same, or its
            other one.
        """
        digests = [digest_of(each) for each in messages]
        fits = [_Fit(each, messages, digests) for each in self.versions]
        best = max(fits, key=lambda fit: (fit.common, fit.is_edited, fit.known))
        version, mine = best.version, best.version is self
        if best.goes_on or (mine and best.is_edited and 2 * best.common > best.known):
            rest = [each for each in self.versions if each is not version]
            return _linked(version, *rest), version
        kept = sorted(self.versions[1:], key=lambda each: len(each.blocks))[-1:]
        shares = best.common > 0 or best.is_edited
        new = (
            version._copy()
            if shares
            else ChatSession(self.key, self.name, self.caller, self.salt, self.named)
        )
        if shares and mine:
            return _linked(new, self, *kept), new
        return _linked(self, new, *kept), new

    def without(self, version: ChatSession) -> None:
        """Forget another version."""
        _linked(*(each for each in self.versions if each is not version))

    def follow(
        self, messages: Sequence[Message], appends: bool, tags: Mapping[int, dict[str, Any]]
    ) -> list[Block]:
        """Apply a client's messages; return the blocks that are new or grew.

        Leading system messages replace the chat's own. A client that repeats its chat may have
        changed it: messages that are no longer in it are forgotten.
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
        """Append messages; return the blocks that are new or grew."""
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
        """Remove the assistant's reasoning of earlier turns; of the current one if it ``ended``."""
        spoke = [number for number, block in enumerate(self.blocks) if block.source == "user"]
        for block in self.blocks if ended else self.blocks[: spoke[-1] if spoke else 0]:
            kept = [without_thoughts(each) for each in block.messages]
            if kept != block.messages:
                block.messages, block.tokens = kept, 0

    def enter(self, block: Block) -> None:
        """Put a block at the end of the prompt, unless it is in the prompt already."""
        if block.place is None:
            self.move_behind([block])
        block.turn = self.turn

    def move_behind(self, blocks: Sequence[Block]) -> None:
        """Move blocks to the end of the prompt, in this order."""
        for block in blocks:
            block.place, self.places = self.places, self.places + 1

    def _copy(self) -> ChatSession:
        """Return a separate version."""
        blocks = [
            msgspec.structs.replace(
                each, messages=[*each.messages], digests=[*each.digests], tags={**each.tags}
            )
            for each in self.blocks
        ]
        return msgspec.structs.replace(self, blocks=blocks, other=None)

    def systems(self, messages: Sequence[Message]) -> int:
        number = 0
        for block, message in zip(self.blocks, messages, strict=False):
            if {block.source, source_of(message)} != {"system"}:
                break
            number += 1
        return number

    def _leading(self, messages: Sequence[Message], digests: Sequence[bytes]) -> int:
        """Replace the chat's leading system messages by those of ``messages``; return how many."""
        number = self.systems(messages)
        for block, message, digest in zip(self.blocks[:number], messages, digests, strict=False):
            if block.digests != [digest]:
                block.messages, block.digests, block.tokens = [message], [digest], 0
        return number

    def _tag(self, tags: Mapping[int, dict[str, Any]], same: int, sent: int) -> None:
        """Apply hints to ``sent`` messages: the chat's first ``same`` ones, and then its last."""
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


def _linked(*versions: ChatSession) -> ChatSession:
    """Make these the versions of a chat; return the first, which is the chat."""
    for each, behind in zip(versions, [*versions[1:], None], strict=True):
        each.other = behind
    return versions[0]


class _Fit:
    """How well a client's messages match a version of its chat, leading system messages aside:
    ``common`` of the first of ``known`` messages are repeated.
    """

    def __init__(
        self, version: ChatSession, messages: Sequence[Message], digests: Sequence[bytes]
    ) -> None:
        self.version, start = version, version.systems(messages)
        known = [digest for block in version.blocks for digest in block.digests][start:]
        said = digests[start:]
        self.known, self.common = len(known), _common(said, known)
        left = self.known - self.common
        # whether all are, or all but a last answer, which clients may shorten
        self.goes_on = not left or (left == 1 and 0 < self.common < len(said) - 1)
        # whether more than half are, in any order
        self.is_edited = 2 * (Counter(said) & Counter(known)).total() > self.known


def _common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number
    return min(len(first), len(second))
