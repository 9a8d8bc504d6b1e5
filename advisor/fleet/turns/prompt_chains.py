"""Prompts as chains of digests, and the words by which prompts that are alike are known again."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from ..pool_shadows import Link

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
_MODELS: Final = frozenset({"assistant", "model"})  # roles: what they say only one chat has
_TEXT: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_THOUGHTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Kinds of parts and items that clients and templates leave out of later prompts."""
_CALLS: Final = frozenset({"tool_calls", "function_call"})
_BILLING: Final = "x-anthropic-billing-header"  # a line that differs each time; vLLM drops it, too
_SAYS_NOTHING: Final = frozenset(
    {"cache_control", "id", "call_id", "tool_call_id", "tool_use_id", "status", "annotations"}
)  # fields of parts and items that are about them
NEAREST: Final = 8
"""Messages before the last one that may be the last one of the prompt before; chosen."""
_MOST_WORDS: Final = 128  # of one text that are kept, the smallest digests: a fair sample. Chosen
_EXCERPT: Final = 1024  # characters at a text's either end whose words count; chosen
_WORD: Final = re.compile(r"[!-~]+|\S")  # other scripts do not always write spaces

Words = frozenset[int]
"""Digests of pairs of neighbouring words."""


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


class Said(NamedTuple):
    """A message of a chat, or a whole piece of another prompt, as far as it tells chats apart.

    Attributes:
        digest: Of it alone: what stands before it may change.
        chain: Of all that was said up to here, without the system's words.
        tokens: About how many it is.
        by_model: Whether a model wrote it.
    """

    digest: bytes
    chain: bytes
    tokens: int
    by_model: bool


class Prompt(NamedTuple):
    """A prompt in links, and about how many tokens all of it is.

    Attributes:
        end: None where longer prompts do not continue it: it is a batch, or a system's words alone.
            Chats have none either.
        pieces: All of a prompt without messages, in order; not to be kept.
        said: Its messages, without those of the system that it begins with, or its pieces.
        texts: What the last of them say; not to be kept.
        newest: Words of the last message; empty where it has none.
        system: Words of the system.
        scope: Whose it is.
    """

    links: list[Link]
    tokens: int
    end: End | None = None
    pieces: Sequence[Any] = ()
    said: Sequence[Said] = ()
    texts: Sequence[str] = ()
    newest: Words = frozenset()
    system: Words = frozenset()
    scope: bytes = b""

    @property
    def known_by(self) -> Prompt:
        """What may be kept of it: digests alone."""
        return self._replace(pieces=(), texts=())


class PromptReader:
    """Makes chains of prompts; digests are keyed, so that nobody can make two prompts look equal.

    Only digests of prompts are kept. What a template does not show counts for nothing: ids, cache
    marks, the order of keys, thoughts of earlier turns, space at the ends.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def read(self, body: Mapping[str, Any], scope: bytes) -> Prompt:
        """The prompt of a completion, a chat or a response; without links if it has none.

        Args:
            scope: Whose prompt it is: equal prompts of other scopes are other prompts.
        """
        messages = body.get("messages", body.get("input"))
        if isinstance(messages, list):
            return self._chat(body, messages, scope)
        pieces, whole = _pieces(body)
        links: list[Link] = []
        digest, tokens = scope, 0
        for piece in pieces[:MOST_LINKS]:
            data = _data(piece)
            tokens += _tokens_of(piece, data)
            if len(links) < whole:
                digest = self._digest(digest, data)
                links.append(Link(digest, tokens))
        tokens = _with_rest(tokens, len(pieces))
        end = self._end(digest, pieces, whole)
        begins = [0, *(link.tokens for link in links)]
        said = [
            Said(link.key, link.key, link.tokens - begin, False)
            for begin, link in zip(begins, links, strict=False)
            if isinstance(link.key, bytes)
        ]
        return Prompt(links, tokens, end, pieces, said, scope=scope)

    def digest(self, before: bytes, piece: Any) -> bytes:
        """The digest of a piece behind what has the digest ``before``."""
        return self._digest(before, _data(piece))

    def _chat(self, body: Mapping[str, Any], messages: list[Any], scope: bytes) -> Prompt:
        leading = [_leading(name, body[name]) for name in _LEADING if body.get(name)]
        shown = [each for message in messages if (each := _shown(message)) is not None]
        links: list[Link] = []
        said, texts = list[Said](), deque[str](maxlen=NEAREST + 1)
        digest = chain = scope
        tokens, system = 0, list[str]()
        for each in [*leading, *shown][:MOST_LINKS]:
            tokens += each.tokens
            own = self._digest(scope, each.data)
            digest = self._digest(digest, own)
            links.append(Link(digest, tokens))
            if each.role in _SYSTEM and not said:
                system.append(each.text)
                continue
            chain = self._digest(chain, own)
            said.append(Said(own, chain, each.tokens, each.role in _MODELS))
            texts.append(each.text)
        tokens = _with_rest(tokens, len(leading) + len(shown))
        newest = sample_of(words_of(texts[-1])) if said else frozenset[int]()
        words = sample_of(words_of("\n".join(system)))
        return Prompt(links, tokens, None, (), said, texts, newest, words, scope)

    def _digest(self, before: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(before + data, key=self._key, digest_size=16).digest()

    def _end(self, digest: bytes, pieces: Sequence[Any], whole: int) -> End | None:
        if not pieces or len(pieces) > whole + 1:
            return None
        if len(pieces) == whole or whole >= MOST_LINKS:
            return End(digest, 0, digest)
        return End(digest, len(pieces[-1]), self.digest(digest, pieces[-1]))


def words_of(text: str) -> Words:
    """The words of a text, each with the one before it; of a long one, those at either end."""
    if len(text) > 2 * _EXCERPT:
        text = f"{text[:_EXCERPT]} {text[-_EXCERPT:]}"
    words = _WORD.findall(text)
    return frozenset(map(hash, zip(["", *words], words, strict=False)))


def sample_of(words: Words) -> Words:
    """So many of them as are kept of one text."""
    return words if len(words) <= _MOST_WORDS else frozenset(sorted(words)[:_MOST_WORDS])


class _Shown(NamedTuple):
    """A message, or what stands before the messages, as templates show it."""

    role: str
    text: str
    data: bytes
    tokens: int


def _shown(message: Any) -> _Shown | None:
    """A message or an item of a response; None: a template shows nothing of it."""
    if not isinstance(message, dict):
        return _made("", [_plain(message)])
    kind = message.get("type")
    if kind in _THOUGHTS:
        return None
    role = message.get("role")
    if kind in ("function_call", "custom_tool_call"):
        said = message.get("arguments", message.get("input"))
        return _made("assistant", [_call(message.get("name"), said)])
    if kind in ("function_call_output", "custom_tool_call_output"):
        return _made("tool", _texts(message.get("output")))
    if not isinstance(role, str):
        return _made("", [_plain(_without_marks(message))])
    content = message.get("content")
    if isinstance(content, str) and role not in _SYSTEM and not _CALLS & message.keys():
        return _text(role, content.strip())  # most are like that
    parts = _texts(content)
    if role in _SYSTEM:
        parts = _without_billing(parts)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        called = function if isinstance(function, dict) else {}
        parts.append(_call(called.get("name"), called.get("arguments")) if called else _plain(call))
    if isinstance(function := message.get("function_call"), dict):
        parts.append(_call(function.get("name"), function.get("arguments")))
    return _made(role, parts) if parts or role not in _MODELS | _SYSTEM else None


def _leading(name: str, value: Any) -> _Shown:
    if name == "tools":
        tools = list(map(_without_marks, value)) if isinstance(value, list) else value
        return _made("system", [_plain(tools)])
    return _made("system", _without_billing(_texts(value)))


class _Binary(str):
    """A part that is no text, but for its name."""

    __slots__ = ()


def _text(role: str, text: str) -> _Shown:
    data = f"{role}\0{text}".encode(errors="surrogatepass")
    return _Shown(role, text, data, 1 - (-len(text) // CHARACTERS_PER_TOKEN))


def _made(role: str, parts: Sequence[str]) -> _Shown:
    said = "\n".join(
        filter(None, (part.strip() for part in parts if not isinstance(part, _Binary)))
    )
    shown = _text(role, said)
    if binary := [part for part in parts if isinstance(part, _Binary)]:
        data = "\0".join(["", *binary]).encode(errors="surrogatepass")
        tokens = shown.tokens + len(binary) * BINARY_TOKENS
        shown = shown._replace(data=shown.data + data, tokens=tokens)
    return shown


def _texts(content: Any) -> list[str]:
    """What a message's content shows, in parts; one text is one part, or no list at all."""
    if isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        return [] if content is None else [_plain(content)]
    found: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            found.append(part)
        elif kind in _THOUGHTS:
            continue
        elif kind in _TEXT and isinstance(text := part.get("text", part.get("refusal")), str):
            found.append(text)
        elif kind == "tool_use":
            found.append(_call(part.get("name"), part.get("input")))
        elif kind == "tool_result":
            found += _texts(part.get("content"))
        elif kind in _BINARY:
            found.append(_Binary(_plain(_without_marks(part))))
        else:
            found.append(_plain(_without_marks(part)))
    return found


def _call(name: Any, arguments: Any) -> str:
    """A tool's call; arguments that are JSON in a text are what they say."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return f"{name} {arguments}"
    return f"{name} {_plain(arguments)}"


def _plain(value: Any) -> str:
    """Anything as JSON, whatever the order of its keys."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(value, option=options).decode()


def _without_marks(part: Any) -> Any:
    """A part, an item or a tool without what is about it."""
    if not isinstance(part, dict):
        return part
    return {name: each for name, each in part.items() if name not in _SAYS_NOTHING}


def _without_billing(parts: Iterable[str]) -> list[str]:
    found = [
        part.partition("\n")[2] if part.lstrip().startswith(_BILLING) else part for part in parts
    ]
    return [part for part in found if part]


def _pieces(body: Mapping[str, Any]) -> tuple[Sequence[Any], int]:
    """Pieces of a prompt that has no messages, and how many of them a longer prompt would have
    too."""
    leading = [_leading(name, body[name]).data for name in _LEADING if body.get(name)]
    prompt = body.get("prompt", body.get("messages", body.get("input")))
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


def _with_rest(tokens: int, pieces: int) -> int:
    """Tokens of a prompt whose first pieces have so many: the rest counts as if like them."""
    beyond = max(0, pieces - MOST_LINKS)
    return tokens + tokens * beyond // MOST_LINKS


def _tokens_of(piece: Any, data: bytes) -> int:
    if isinstance(piece, list) and piece and isinstance(piece[0], int):
        return len(piece)
    return -(-len(data) // CHARACTERS_PER_TOKEN)


def _data(piece: Any) -> bytes:
    """A piece as text or JSON."""
    return piece if isinstance(piece, bytes) else orjson.dumps(piece)
