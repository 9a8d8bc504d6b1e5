"""``LastPrompts``: which session a prompt continues that names none."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import orjson
from cachetools import FIFOCache

from .pools import MOST_LINKS_HELD, Link

# Prompts as chains of digests, and the words by which prompts that are alike are known again.

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
        return _prompt_text(role, content.strip())  # most are like that
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


def _prompt_text(role: str, text: str) -> _Shown:
    data = f"{role}\0{text}".encode(errors="surrogatepass")
    return _Shown(role, text, data, 1 - (-len(text) // CHARACTERS_PER_TOKEN))


def _made(role: str, parts: Sequence[str]) -> _Shown:
    said = "\n".join(
        filter(None, (part.strip() for part in parts if not isinstance(part, _Binary)))
    )
    shown = _prompt_text(role, said)
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


_MOST_TAILS: Final = 64  # prompts that are known to end behind one link, or by one word; chosen
_MOST_KNOWN: Final = 50_000  # sessions whose last prompt's words are remembered: 150 MB. Chosen
_FOUND_BY: Final = 4  # words of a message by which it is found again; chosen
_LEAST_WORDS: Final = 8  # of a system prompt that tells two apart; chosen
_KEPT: Final = 0.5  # of a last prompt: what keeps more goes on with it, as for the sidecar

Digest = Callable[[bytes, Any], bytes]
"""The digest of a piece that follows what has another digest."""


class _Owner(NamedTuple):
    """Who said something; None: several did.

    Attributes:
        first: Whether that was in its first prompt.
    """

    session: str | None
    first: bool = True


class _Known(NamedTuple):
    """A session's last prompt.

    Attributes:
        at: Larger than those noted before.
        messages, tokens: Of it, without the system's.
        newest, newest_tokens, digest: Of its last message.
    """

    at: int
    messages: int
    tokens: int
    newest: Words
    newest_tokens: int
    digest: bytes
    system: Words
    found_by: tuple[tuple[bytes, int], ...]


class LastPrompts:
    """Remembers which session each prompt was the last one of. May be asked by several threads.

    A prompt goes on with a session if it begins with the whole of one of its prompts; else, if it
    keeps more than half of its last one, what nobody else said among it, and has an answer to it.
    Prompts that only begin alike, as with examples, have none.

    Args:
        digest: Of pieces, as their reader makes them.
        most: Prompts that are remembered, and messages.
    """

    def __init__(self, digest: Digest, most: int = MOST_LINKS_HELD) -> None:
        self._digest, self._most = digest, most
        self._lock = threading.Lock()
        self._sessions: OrderedDict[End, str] = OrderedDict()  # of prompts without messages
        self._ends: dict[bytes, OrderedDict[End, None]] = {}  # by what they are behind
        self._chats: FIFOCache[bytes, str] = FIFOCache(most)  # by all that was said
        self._owners: dict[bytes, _Owner] = {}  # by what was said
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._by_word: dict[tuple[bytes, int], OrderedDict[str, None]] = {}
        self._noted = 0

    def session(self, prompt: Prompt, scope: bytes) -> str | None:
        """The session that a prompt continues; None if it continues none.

        Args:
            scope: Whose prompt it is.
        """
        with self._lock:
            if prompt.pieces:
                exact = self._continued_text(prompt, scope)
            else:
                exact = self._continued_chat(prompt)
            return exact or self._likeliest(prompt)

    def note(self, prompt: Prompt, session: str) -> None:
        """Note that a session's last prompt is this one."""
        with self._lock:
            if prompt.end is not None:
                self._note_end(prompt.end, session)
            elif prompt.said:
                self._chats[prompt.said[-1].chain] = session
            if prompt.said:
                self._note_said(prompt, session)

    def _continued_text(self, prompt: Prompt, scope: bytes) -> str | None:
        """The session whose whole prompt without messages this one extends."""
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

    def _continued_chat(self, prompt: Prompt) -> str | None:
        """The session whose whole chat this one extends; what only users said may be said under
        other words of the system, too."""
        said = prompt.said
        until = len(said) if len(prompt.links) == MOST_LINKS else len(said) - 1
        for at in range(until - 1, -1, -1):
            if (session := self._chats.get(said[at].chain)) is None:
                continue
            known = self._known.get(session)
            answered = any(each.by_model for each in said[: at + 1])
            if answered or known is None or _alike(known.system, prompt.system):
                return session
        return None

    def _likeliest(self, prompt: Prompt) -> str | None:
        """The session of whose last prompt this one keeps most, if that is more than half."""
        said, kept, beyond = prompt.said, Counter[str](), set[str]()
        answered, again = set[str](), dict[str, float]()
        digests = {each.digest for each in said[:-1]}
        for each in said[:-1]:
            session, first = self._owners.get(each.digest, _Owner(None))
            if session is None:
                continue
            kept[session] += each.tokens
            if not first:
                beyond.add(session)
            if each.by_model:
                answered.add(session)
        for session, share in self._asked_again(prompt):
            again[session] = max(share, again.get(session, 0.0))
        best, most = None, (0.0, 0)  # the session, and what is kept of it
        for session in kept.keys() | again.keys():
            if (known := self._known.get(session)) is None:
                continue
            # Whole, it is among what is kept.
            share = 0.0 if known.digest in digests else again.get(session, 0.0)
            grew = len(said) > known.messages and said[known.messages].by_model
            goes_on = known.digest in digests or share > _KEPT or session in beyond or grew
            own = session in answered or session in beyond  # whatever the system's words are
            alike = own or _alike(known.system, prompt.system)
            tokens = kept[session] + share * known.newest_tokens
            if goes_on and alike and tokens > _KEPT * known.tokens:
                # Of chats that begin alike, the one that was asked first goes on first.
                best, most = max((best, most), (session, (tokens, -known.at)), key=itemgetter(1))
        return best

    def _asked_again(self, prompt: Prompt) -> Iterator[tuple[str, float]]:
        """Sessions of whose newest message this prompt has a part, not as the last one; and how
        large a part."""
        last = len(prompt.said) - 1
        for each, text in zip(
            prompt.said[max(0, last - NEAREST) : last], prompt.texts, strict=False
        ):
            if each.by_model:
                continue
            words = words_of(text)
            found = {
                session: None
                for word in sorted(words)[: 2 * _FOUND_BY]
                for session in self._by_word.get((prompt.scope, word), ())
            }
            for session in found:
                newest = self._known[session].newest
                yield session, len(newest & words) / len(newest)

    def _note_said(self, prompt: Prompt, session: str) -> None:
        said, before = prompt.said, self._known.pop(session, None)
        owner = _Owner(session, before is None)
        for each in said:
            theirs = self._owners.setdefault(each.digest, owner)
            if theirs.session not in (session, None):
                self._owners[each.digest] = _Owner(None)
        while len(self._owners) > self._most:
            del self._owners[next(iter(self._owners))]
        if before is not None:
            self._forget_words(session, before)
        found_by = tuple((prompt.scope, word) for word in sorted(prompt.newest)[:_FOUND_BY])
        self._noted += 1
        last, tokens = said[-1], sum(each.tokens for each in said)
        self._known[session] = _Known(
            self._noted, len(said), tokens, prompt.newest, last.tokens, last.digest, prompt.system,
            found_by,
        )  # fmt: skip
        for word in found_by:
            sessions = self._by_word.setdefault(word, OrderedDict())
            sessions[session] = None
            if len(sessions) > _MOST_TAILS:
                sessions.popitem(last=False)
        if len(self._known) > _MOST_KNOWN:
            self._forget_words(*self._known.popitem(last=False))

    def _forget_words(self, session: str, known: _Known) -> None:
        for word in known.found_by:
            if (sessions := self._by_word.get(word)) is not None:
                sessions.pop(session, None)
                if not sessions:
                    del self._by_word[word]

    def _note_end(self, end: End, session: str) -> None:
        self._sessions[end] = session
        self._sessions.move_to_end(end)
        behind = self._ends.setdefault(end.after, OrderedDict())
        behind[end] = None
        behind.move_to_end(end)
        if len(behind) > _MOST_TAILS:
            self._forget_end(next(iter(behind)))
        while len(self._sessions) > self._most:
            self._forget_end(next(iter(self._sessions)))

    def _forget_end(self, end: End) -> None:
        del self._sessions[end]
        behind = self._ends[end.after]
        del behind[end]
        if not behind:
            del self._ends[end.after]


def _alike(before: Words, now: Words) -> bool:
    """Whether two system prompts are one, but for a date or the like."""
    least = min(len(before), len(now))
    if least < _LEAST_WORDS:
        return max(len(before), len(now)) < 2 * _LEAST_WORDS
    return len(before & now) > _KEPT * least
