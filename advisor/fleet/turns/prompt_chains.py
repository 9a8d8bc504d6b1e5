"""Prompts as chains of digests, and which session a prompt continues."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
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


class Prompt(NamedTuple):
    """A prompt in links, and about how many tokens all of it is."""

    links: list[Link]
    tokens: int


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
        links: list[Link] = []
        digest, tokens = scope, 0
        for piece, whole in _pieces(body):
            tokens += _tokens(piece)
            if whole and len(links) < MOST_LINKS:
                data = piece if isinstance(piece, bytes) else orjson.dumps(piece)
                digest = hashlib.blake2b(digest + data, key=self._key, digest_size=16).digest()
                links.append(Link(digest, tokens))
        return Prompt(links, tokens)


class LastPrompts:
    """Remembers which session each prompt was the last one of.

    Args:
        most: Prompts that are remembered.
    """

    def __init__(self, most: int = MOST_LINKS_HELD) -> None:
        self._most = most
        self._sessions: OrderedDict[Hashable, str] = OrderedDict()  # by a prompt's last link

    def session(self, links: Sequence[Link]) -> str | None:
        """The session whose last prompt this one extends; None if it extends none."""
        for link in reversed(links[:-1]):
            if (session := self._sessions.get(link.key)) is not None:
                return session
        return None

    def note(self, links: Sequence[Link], session: str) -> None:
        """Note that a session's last prompt is this one."""
        if links:
            self._sessions.pop(links[-1].key, None)
            self._sessions[links[-1].key] = session
        while len(self._sessions) > self._most:
            self._sessions.popitem(last=False)


def _pieces(body: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Pieces of a prompt, and whether each is one that a longer prompt would have too."""
    yield from ((body[name], True) for name in _LEADING if body.get(name))
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list):
        yield from ((message, True) for message in messages)
        return
    prompt = body.get("prompt", messages)
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        yield from ((each, False) for each in prompt)  # a batch, which no prompt extends
    elif isinstance(prompt, str):
        data = prompt.encode(errors="surrogatepass")
        yield from (
            (data[at : at + PIECE], at + PIECE <= len(data)) for at in range(0, len(data), PIECE)
        )
    elif isinstance(prompt, list):
        for at in range(0, len(prompt), PIECE_TOKENS):
            yield prompt[at : at + PIECE_TOKENS], at + PIECE_TOKENS <= len(prompt)


def _tokens(piece: Any) -> int:
    if isinstance(piece, list) and piece and isinstance(piece[0], int):
        return len(piece)
    if isinstance(piece, dict) and isinstance(parts := piece.get("content"), list):
        return _tokens({**piece, "content": None}) + sum(map(_part_tokens, parts))
    size = len(piece) if isinstance(piece, bytes) else len(orjson.dumps(piece))
    return -(-size // CHARACTERS_PER_TOKEN)


def _part_tokens(part: Any) -> int:
    """Of a part of a message, which may be an image in base64."""
    is_binary = isinstance(part, dict) and part.get("type") in _BINARY
    return BINARY_TOKENS if is_binary else _tokens(part)
