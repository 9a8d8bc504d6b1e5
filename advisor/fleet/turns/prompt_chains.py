"""Prompts as chains of digests, and which session a prompt continues."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from ..pool_shadows import MOST_LINKS_HELD, Link

MOST_LINKS: Final = 2048
"""Of one prompt; what is longer is known by its beginning. Chosen."""
PIECE: Final = 1024
"""Characters of a prompt without messages that one link stands for; chosen."""
PIECE_TOKENS: Final = 256
"""The same for a prompt of token ids; chosen."""
CHARACTERS_PER_TOKEN: Final = 4
"""Of English text, by the rule of thumb of OpenAI's tokenizers; costs depend on it, and what a pool
of so many tokens is taken to hold."""


BINARY_TOKENS: Final = 1024
"""Of an image, a sound or a file within a message; chosen: about a large image of Qwen2-VL."""
_BINARY: Final = frozenset(
    {"image", "image_url", "input_image", "audio_url", "input_audio", "video_url", "file"}
    | {"input_file", "document"}
)
_LEADING: Final = ("tools", "system", "instructions")  # templates write them before the messages


_SYSTEM: Final = frozenset({"system", "developer"})  # roles: a prompt of these alone is everybody's
_MOST_TAILS: Final = 64  # prompts that are known to end behind one link; chosen

Digest = Callable[[bytes, Any], bytes]
"""The digest of a piece that follows what has another digest."""


class End(NamedTuple):
    """Where a prompt ends.

    Attributes:
        after: The digest of its last link, or of its scope.
        size: Of what follows that link: characters or token ids; 0: nothing.
        digest: Of all of the prompt.
    """

    after: bytes
    size: int
    digest: bytes


class Prompt(NamedTuple):
    """A prompt in links, and about how many tokens all of it is.

    Attributes:
        end: None where longer prompts do not continue it: it is a batch, or a system's words alone.
        pieces: All of it, in order; for ``LastPrompts`` alone, and not to be kept.
    """

    links: list[Link]
    tokens: int
    end: End | None = None
    pieces: Sequence[Any] = ()


class PromptReader:
    """Makes chains of prompts; digests are keyed, so that nobody can make two prompts look equal.

    Only digests of prompts are kept.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def read(self, body: Mapping[str, Any], scope: bytes) -> Prompt:
        """The prompt of a completion, a chat or a response; without links if it has none.

        Args:
            scope: Whose prompt it is: equal prompts of other scopes are other prompts.
        """
        pieces, whole = _pieces(body)
        links: list[Link] = []
        digest, tokens = scope, 0
        for piece in pieces[:MOST_LINKS]:
            data = _data(piece)
            tokens += _tokens(piece, data)
            if len(links) < whole:
                digest = self._digest(digest, data)
                links.append(Link(digest, tokens))
        if len(pieces) > MOST_LINKS:  # the rest as far as it is like what was read
            tokens += tokens * (len(pieces) - MOST_LINKS) // MOST_LINKS
        return Prompt(links, tokens, self._end(body, digest, pieces, whole), pieces)

    def digest(self, before: bytes, piece: Any) -> bytes:
        """The digest of a piece behind what has the digest ``before``."""
        return self._digest(before, _data(piece))

    def _digest(self, before: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(before + data, key=self._key, digest_size=16).digest()

    def _end(
        self, body: Mapping[str, Any], digest: bytes, pieces: Sequence[Any], whole: int
    ) -> End | None:
        if not pieces or len(pieces) > whole + 1:
            return None
        if len(pieces) == whole or whole >= MOST_LINKS:
            return None if _is_of_the_system(body) else End(digest, 0, digest)
        return End(digest, len(pieces[-1]), self.digest(digest, pieces[-1]))


class LastPrompts:
    """Remembers which session each prompt was the last one of.

    Args:
        digest: Of pieces, as their reader makes them.
        most: Prompts that are remembered.
    """

    def __init__(self, digest: Digest, most: int = MOST_LINKS_HELD) -> None:
        self._digest, self._most = digest, most
        self._sessions: OrderedDict[End, str] = OrderedDict()
        self._ends: dict[bytes, OrderedDict[End, None]] = {}  # by what they are behind

    def session(self, prompt: Prompt, scope: bytes) -> str | None:
        """The session whose last prompt this one extends; None if it extends none.

        Args:
            scope: Whose prompt it is.
        """
        keys: list[Any] = [scope, *(link.key for link in prompt.links)]
        for at in range(min(len(keys), len(prompt.pieces)) - 1, -1, -1):
            before, piece = keys[at], prompt.pieces[at]
            for end in reversed(self._ends.get(before, ())):
                if not end.size or (
                    isinstance(piece, bytes | list)
                    and len(piece) > end.size
                    and self._digest(before, piece[: end.size]) == end.digest
                ):
                    return self._sessions[end]
        return None

    def note(self, prompt: Prompt, session: str) -> None:
        """Note that a session's last prompt is this one."""
        end = prompt.end
        if end is None:
            return
        self._sessions[end] = session
        self._sessions.move_to_end(end)
        behind = self._ends.setdefault(end.after, OrderedDict())
        behind[end] = None
        behind.move_to_end(end)
        if len(behind) > _MOST_TAILS:
            self._forget(next(iter(behind)))
        while len(self._sessions) > self._most:
            self._forget(next(iter(self._sessions)))

    def _forget(self, end: End) -> None:
        del self._sessions[end]
        behind = self._ends[end.after]
        del behind[end]
        if not behind:
            del self._ends[end.after]


def _pieces(body: Mapping[str, Any]) -> tuple[Sequence[Any], int]:
    """Pieces of a prompt, and how many of them a longer prompt would have too."""
    leading = [body[name] for name in _LEADING if body.get(name)]
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list):
        return [*leading, *messages], len(leading) + len(messages)
    prompt = body.get("prompt", messages)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt, 0  # a batch, which no prompt extends
    size, text = PIECE_TOKENS, prompt
    if isinstance(prompt, str):
        size, text = PIECE, prompt.encode(errors="surrogatepass")
    if not isinstance(text, bytes | list):
        return leading, 0
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    return [*leading, *cut], len(leading) + len(text) // size


def _is_of_the_system(body: Mapping[str, Any]) -> bool:
    """Whether a chat has nothing but what many chats begin with."""
    messages = body.get("messages", body.get("input"))
    return isinstance(messages, list) and all(
        isinstance(each, dict) and each.get("role") in _SYSTEM for each in messages
    )


def _tokens(piece: Any, data: bytes) -> int:
    if isinstance(piece, list) and piece and isinstance(piece[0], int):
        return len(piece)
    parts = piece.get("content") if isinstance(piece, dict) else None
    binary = [part for part in parts if _is_binary(part)] if isinstance(parts, list) else []
    characters = len(data) - sum(len(_data(part)) for part in binary)
    return len(binary) * BINARY_TOKENS - (-characters // CHARACTERS_PER_TOKEN)


def _is_binary(part: Any) -> bool:
    """Whether a part of a message may be an image in base64, or the like."""
    return isinstance(part, dict) and part.get("type") in _BINARY


def _data(piece: Any) -> bytes:
    """A piece as text or JSON."""
    return piece if isinstance(piece, bytes) else orjson.dumps(piece)
